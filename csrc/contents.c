#include "contents.h"
#include "membench.h"

#include <string.h>

/*
 * Element i of array j is (i + SALT[j]) * SPREAD modulo 2^32, its upper 20 bits: no two nearby lines or arrays are alike.
 * The product advances by addition, which every instruction set has for vectors.
 */
static const uint32_t SPREAD = 2654435761U;
static const uint32_t SALT[ARRAYS] = {1, 0x5bd1e995U, 0x2545f491U};

#define INLINE static inline __attribute__((always_inline)) /* into functions for wider vectors */

INLINE uint32_t seed(int j, size_t i) { return ((uint32_t)i + SALT[j]) * SPREAD; }

INLINE double value(uint32_t product) { return (double)(int32_t)(product >> 12); }

INLINE uint64_t word_of(double x)
{
    uint64_t word;
    memcpy(&word, &x, sizeof word);
    return word;
}

INLINE uint64_t fill(double *array, int j, size_t first, size_t last)
{
    uint64_t sum = 0;
    uint32_t product = seed(j, first);
    for (size_t i = first; i < last; i++, product += SPREAD) {
        const double x = value(product);
        array[i] = x;
        sum += word_of(x);
    }
    return sum;
}

INLINE bool holds(const double *array, const struct mix *mix, size_t first, size_t last)
{
    const double p = mix->a, q = mix->b, r = mix->c;
    uint32_t a = seed(0, first), b = seed(1, first), c = seed(2, first);
    uint64_t wrong = 0; /* bits that differ: no branch, so that it vectorises */
    for (size_t i = first; i < last; i++, a += SPREAD, b += SPREAD, c += SPREAD)
        wrong |= word_of(array[i]) ^ word_of(p * value(a) + q * value(b) + r * value(c));
    return wrong == 0;
}

#define CONTENTS(ISA, TARGET)                                                                              \
    TARGET static uint64_t fill_##ISA(double *array, int j, size_t first, size_t last)                     \
    {                                                                                                      \
        return fill(array, j, first, last);                                                                \
    }                                                                                                      \
    TARGET static bool holds_##ISA(const double *array, const struct mix *mix, size_t first, size_t last)  \
    {                                                                                                      \
        return holds(array, mix, first, last);                                                             \
    }                                                                                                      \
    static const struct contents ISA##_contents = {fill_##ISA, holds_##ISA};

CONTENTS(baseline, )
#if defined(__x86_64__)
CONTENTS(avx2, __attribute__((target("avx2"))))
CONTENTS(avx512, __attribute__((target("avx512f"))))
#endif

const struct contents *contents_for(int isa)
{
#if defined(__x86_64__)
    if (isa == MEMBENCH_ISA_AVX2)
        return &avx2_contents;
    if (isa == MEMBENCH_ISA_AVX512)
        return &avx512_contents;
#endif
    (void)isa;
    return &baseline_contents;
}
