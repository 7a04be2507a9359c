#include "evict.h"
#include "membench.h"

#include <stdint.h>

#if defined(__x86_64__)

#include <cpuid.h>
#include <immintrin.h>

enum { CLFSH = 1 << 19 }; /* of leaf 1; cpuid.h names only the newer bits */

static void flush_in_order(const char *at, const char *end, size_t line)
{
    for (; at < end; at += line)
        _mm_clflush(at);
}

/* Not ordered among themselves, hence many at a time. */
__attribute__((target("clflushopt"))) static void flush_optimised(const char *at, const char *end, size_t line)
{
    for (; at < end; at += line)
        _mm_clflushopt((void *)(uintptr_t)at);
}

bool evict_find(struct evict *evict)
{
    unsigned eax, ebx, ecx, edx;
    if (__get_cpuid(1, &eax, &ebx, &ecx, &edx) == 0 || (edx & CLFSH) == 0)
        return false;
    evict->line = (ebx >> 8 & 0xff) * 8; /* the unit is 8 bytes */
    evict->flush = flush_in_order;
    if (__get_cpuid_count(7, 0, &eax, &ebx, &ecx, &edx) != 0 && (ebx & bit_CLFLUSHOPT) != 0)
        evict->flush = flush_optimised;
    return evict->line > 0;
}

void evict_fence(void) { _mm_mfence(); /* sfence would let the pass's loads overtake the flushes */ }

#elif defined(__aarch64__)

static void flush_lines(const char *at, const char *end, size_t line)
{
    for (; at < end; at += line)
        __asm__ volatile("dc civac, %0" ::"r"(at) : "memory");
}

bool evict_find(struct evict *evict)
{
    uint64_t ctr;
    __asm__("mrs %0, ctr_el0" : "=r"(ctr)); /* Linux allows both this and DC CIVAC to user code, or emulates them */
    evict->line = (size_t)4 << (ctr >> 16 & 15);
    evict->flush = flush_lines;
    return true;
}

void evict_fence(void) { __asm__ volatile("dsb ish" ::: "memory"); }

#else

bool evict_find(struct evict *evict)
{
    (void)evict;
    return false;
}

void evict_fence(void) {}

#endif

int membench_evict_supported(void)
{
    struct evict evict;
    return evict_find(&evict);
}
