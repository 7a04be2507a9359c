#include "kernels.h"
#include "membench.h"

#if defined(__x86_64__)
#include <immintrin.h>
#endif

/* ---- portable ---- */

/* Hides a pointer from the optimiser, which would otherwise turn copy into memcpy with its own choice of stores. */
#define OPAQUE(p) __asm__("" : "+r"(p))

#define PORTABLE_STREAM(NAME, EXPRESSION)                                                                          \
    static void NAME(double *restrict to, const double *restrict x, const double *restrict y, double q, size_t lines) \
    {                                                                                                              \
        (void)x, (void)y, (void)q;                                                                                 \
        for (; lines > 0; lines--, to += LINE_DOUBLES, x += LINE_DOUBLES, y += LINE_DOUBLES) {                      \
            OPAQUE(to);                                                                                            \
            for (int i = 0; i < LINE_DOUBLES; i++)                                                                 \
                to[i] = (EXPRESSION);                                                                              \
        }                                                                                                          \
    }

PORTABLE_STREAM(copy_scalar, x[i])
PORTABLE_STREAM(scale_scalar, q *x[i])
PORTABLE_STREAM(add_scalar, x[i] + y[i])
PORTABLE_STREAM(triad_scalar, x[i] + q * y[i])
PORTABLE_STREAM(poison_scalar, q)

typedef uint64_t __attribute__((may_alias)) word;

static uint64_t read_scalar(const double *a, const double *b, const double *c, size_t lines)
{
    const word *x = (const word *)a, *y = (const word *)b, *z = (const word *)c;
    uint64_t s0 = 0, s1 = 0, s2 = 0, s3 = 0, s4 = 0, s5 = 0;
    for (size_t i = 0; i < lines * LINE_DOUBLES; i += 2) {
        s0 += x[i], s1 += x[i + 1];
        s2 += y[i], s3 += y[i + 1];
        s4 += z[i], s5 += z[i + 1];
    }
    return s0 + s1 + s2 + s3 + s4 + s5;
}

/* Accumulator number j starts at j and gains exactly 1 per round, so any skipped multiply-add shows in the end. */
#define EACH_12(OP) OP(0) OP(1) OP(2) OP(3) OP(4) OP(5) OP(6) OP(7) OP(8) OP(9) OP(10) OP(11)
#define EACH_16(OP) EACH_12(OP) OP(12) OP(13) OP(14) OP(15)
enum { SUM_12 = 12 * 11 / 2, SUM_16 = 16 * 15 / 2 };

static bool flops_scalar(int expected, int rounds)
{
    volatile float opaque = 1.0F; /* else the compiler knows the result */
    const float one = opaque;
#define START(j) float r##j = (float)(j);
#define ROUND(j) r##j = r##j * one + one;
#define TOTAL(j) +r##j
    EACH_12(START)
    for (int i = 0; i < rounds; i++) {
        EACH_12(ROUND)
    }
    return (0.0F EACH_12(TOTAL)) == (float)(12 * expected + SUM_12);
#undef START
#undef ROUND
}

static const struct kernels scalar_kernels = {
    .stream = {{copy_scalar}, {scale_scalar}, {add_scalar}, {triad_scalar}},
    .poison = poison_scalar,
    .read = read_scalar,
    .flops = flops_scalar,
    .flops_per_round = 2.0 * 12,
};

/* ---- one template for every vector width: V is a vector of doubles, W of words, F of floats ---- */

#define VECTOR_TYPES(ISA, BYTES)                                                     \
    typedef double ISA##_d __attribute__((vector_size(BYTES), may_alias));           \
    typedef uint64_t ISA##_w __attribute__((vector_size(BYTES), may_alias));         \
    typedef float ISA##_f __attribute__((vector_size(BYTES), may_alias));

#define PLAIN_STORE(p, v) (*(p) = (v))

#define VECTOR_STREAM(NAME, TARGET, V, STORE, EXPRESSION)                                         \
    TARGET static void NAME(double *to, const double *from, const double *also, double factor, size_t lines) \
    {                                                                                             \
        V *d = (V *)to;                                                                           \
        const V *x = (const V *)from, *y = (const V *)also;                                       \
        const V q = (V){0} + factor;                                                              \
        const size_t n = lines * (LINE_DOUBLES * sizeof(double) / sizeof(V));                     \
        (void)x, (void)y, (void)q;                                                                \
        _Pragma("GCC unroll 8") for (size_t i = 0; i < n; i++) STORE(&d[i], EXPRESSION);          \
    }

#define VECTOR_STREAMS(ISA, SUFFIX, TARGET, STORE)                                 \
    VECTOR_STREAM(copy_##SUFFIX, TARGET, ISA##_d, STORE, x[i])                     \
    VECTOR_STREAM(scale_##SUFFIX, TARGET, ISA##_d, STORE, q * x[i])                \
    VECTOR_STREAM(add_##SUFFIX, TARGET, ISA##_d, STORE, x[i] + y[i])               \
    VECTOR_STREAM(triad_##SUFFIX, TARGET, ISA##_d, STORE, x[i] + q * y[i])

/* Six named accumulators: an array of them would be serialised through the stack by gcc 12. */
#define VECTOR_READ(NAME, TARGET, V)                                                              \
    TARGET static uint64_t NAME(const double *a, const double *b, const double *c, size_t lines)  \
    {                                                                                             \
        const V *x = (const V *)a, *y = (const V *)b, *z = (const V *)c;                          \
        const size_t n = lines * (LINE_DOUBLES * sizeof(double) / sizeof(V));                     \
        V s0 = {0}, s1 = {0}, s2 = {0}, s3 = {0}, s4 = {0}, s5 = {0};                             \
        size_t i = 0;                                                                             \
        for (; i + 4 <= n; i += 4) {                                                              \
            s0 += x[i], s1 += x[i + 1], s0 += x[i + 2], s1 += x[i + 3];                           \
            s2 += y[i], s3 += y[i + 1], s2 += y[i + 2], s3 += y[i + 3];                           \
            s4 += z[i], s5 += z[i + 1], s4 += z[i + 2], s5 += z[i + 3];                           \
        }                                                                                         \
        for (; i < n; i++)                                                                        \
            s0 += x[i], s2 += y[i], s4 += z[i];                                                   \
        s0 += s1 + s2 + s3 + s4 + s5;                                                             \
        uint64_t sum = 0;                                                                         \
        for (size_t k = 0; k < sizeof(V) / sizeof(uint64_t); k++)                                 \
            sum += s0[k];                                                                         \
        return sum;                                                                               \
    }

/* Assembly, because the compiler would hoist a constant product and serialise or spill the accumulators. */
#define VECTOR_FLOPS(NAME, TARGET, V, COUNT, ROUND)                                               \
    TARGET static bool NAME(int expected, int rounds)                                                       \
    {                                                                                             \
        const V one = (V){0} + 1.0F;                                                              \
        EACH_##COUNT(V_START)                                                                     \
        for (int i = 0; i < rounds; i++) {                                                        \
            EACH_##COUNT(ROUND)                                                                   \
        }                                                                                         \
        const V total = (V){0} EACH_##COUNT(TOTAL);                                               \
        bool right = true;                                                                        \
        for (size_t k = 0; k < sizeof(V) / sizeof(float); k++)                                    \
            right = right && total[k] == (float)((COUNT) * expected + SUM_##COUNT);                   \
        return right;                                                                             \
    }
#define V_START(j) __typeof__(0 + one) r##j = one * (float)(j);

#define VECTOR_SET(ISA, COUNT)                                                                    \
    static const struct kernels ISA##_kernels = {                                                 \
        .stream = {{copy_##ISA, copy_##ISA##_nt},                                                 \
                   {scale_##ISA, scale_##ISA##_nt},                                               \
                   {add_##ISA, add_##ISA##_nt},                                                   \
                   {triad_##ISA, triad_##ISA##_nt}},                                              \
        .poison = poison_##ISA##_nt,                                                              \
        .read = read_##ISA,                                                                       \
        .flops = flops_##ISA,                                                                     \
        .flops_per_round = 2.0 * (COUNT) * (sizeof(ISA##_f) / sizeof(float)),                     \
    };

#define VECTOR_ISA(ISA, TARGET, FLOPS_TARGET, COUNT, ROUND)                                       \
    VECTOR_STREAMS(ISA, ISA, TARGET, PLAIN_STORE)                                                 \
    VECTOR_READ(read_##ISA, TARGET, ISA##_w)                                                      \
    VECTOR_FLOPS(flops_##ISA, FLOPS_TARGET, ISA##_f, COUNT, ROUND)                                \
    VECTOR_SET(ISA, COUNT)

#if defined(__x86_64__)

#define SSE2_NT(p, v) _mm_stream_pd((double *)(p), (__m128d)(v))
#define AVX2_NT(p, v) _mm256_stream_pd((double *)(p), (__m256d)(v))
#define AVX512_NT(p, v) _mm512_stream_pd((double *)(p), (__m512d)(v))
#define MULADD_SSE2(j) __asm__ volatile("mulps %1, %0\n\taddps %1, %0" : "+x"(r##j) : "x"(one));
#define FMADD_VEX(j) __asm__ volatile("vfmadd231ps %1, %1, %0" : "+x"(r##j) : "x"(one));
#define FMADD_EVEX(j) __asm__ volatile("vfmadd231ps %1, %1, %0" : "+v"(r##j) : "v"(one));

#define AVX2 __attribute__((target("avx2")))
#define AVX2_FMA __attribute__((target("avx2,fma")))
#define AVX512 __attribute__((target("avx512f")))

VECTOR_TYPES(sse2, 16)
VECTOR_STREAMS(sse2, sse2_nt, , SSE2_NT)
VECTOR_STREAM(poison_sse2_nt, , sse2_d, SSE2_NT, q)
VECTOR_ISA(sse2, , , 12, MULADD_SSE2)

VECTOR_TYPES(avx2, 32)
VECTOR_STREAMS(avx2, avx2_nt, AVX2, AVX2_NT)
VECTOR_STREAM(poison_avx2_nt, AVX2, avx2_d, AVX2_NT, q)
VECTOR_ISA(avx2, AVX2, AVX2_FMA, 12, FMADD_VEX)

VECTOR_TYPES(avx512, 64)
VECTOR_STREAMS(avx512, avx512_nt, AVX512, AVX512_NT)
VECTOR_STREAM(poison_avx512_nt, AVX512, avx512_d, AVX512_NT, q)
VECTOR_ISA(avx512, AVX512, AVX512, 16, FMADD_EVEX)

#elif defined(__aarch64__)

/* gcc has no builtin for STNP, which stores a pair of q registers. */
#define NEON_STREAM_NT(NAME, EXPRESSION)                                                          \
    static void NAME(double *to, const double *from, const double *also, double factor, size_t lines) \
    {                                                                                             \
        neon_d *d = (neon_d *)to;                                                                 \
        const neon_d *x = (const neon_d *)from, *y = (const neon_d *)also;                        \
        const neon_d q = (neon_d){0} + factor;                                                    \
        (void)x, (void)y, (void)q;                                                                \
        for (size_t i = 0; i < 4 * lines;) {                                                      \
            neon_d *pair = &d[i];                                                                 \
            const neon_d low = (EXPRESSION);                                                      \
            i++;                                                                                  \
            const neon_d high = (EXPRESSION);                                                     \
            i++;                                                                                  \
            __asm__ volatile("stnp %q0, %q1, [%2]" ::"w"(low), "w"(high), "r"(pair) : "memory");  \
        }                                                                                         \
    }
#define FMLA(j) __asm__ volatile("fmla %0.4s, %1.4s, %1.4s" : "+w"(r##j) : "w"(one));

VECTOR_TYPES(neon, 16)
NEON_STREAM_NT(copy_neon_nt, x[i])
NEON_STREAM_NT(scale_neon_nt, q * x[i])
NEON_STREAM_NT(add_neon_nt, x[i] + y[i])
NEON_STREAM_NT(triad_neon_nt, x[i] + q * y[i])
NEON_STREAM_NT(poison_neon_nt, q)
VECTOR_ISA(neon, , , 16, FMLA)

#endif

/* ---- dispatch ---- */

const struct kernels *kernels_for(int isa)
{
    switch (isa) {
    case MEMBENCH_ISA_SCALAR:
        return &scalar_kernels;
#if defined(__x86_64__)
    case MEMBENCH_ISA_SSE2:
        return &sse2_kernels;
    case MEMBENCH_ISA_AVX2: /* the builtin also asks XCR0, so a system that does not save the registers counts as without */
        return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") ? &avx2_kernels : NULL;
    case MEMBENCH_ISA_AVX512:
        return __builtin_cpu_supports("avx512f") ? &avx512_kernels : NULL;
#elif defined(__aarch64__)
    case MEMBENCH_ISA_NEON:
        return &neon_kernels;
#endif
    default:
        return NULL;
    }
}

void kernels_store_fence(void)
{
#if defined(__x86_64__)
    _mm_sfence();
#elif defined(__aarch64__)
    __asm__ volatile("dmb ishst" ::: "memory");
#endif
}
