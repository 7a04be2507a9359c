/* Flushes memory from every cache, so that a small array must come from memory. Private to the library. */
#ifndef MEMBENCH_EVICT_H
#define MEMBENCH_EVICT_H

#include <stdbool.h>
#include <stddef.h>

/* Whether non-temporal stores really leave the caches: x86's do by definition, arm64's STNP is only a hint. */
#if defined(__x86_64__)
enum { NT_BYPASSES_CACHES = 1 };
#else
enum { NT_BYPASSES_CACHES = 0 };
#endif

struct evict {
    void (*flush)(const char *at, const char *end, size_t line); /* writes back and drops the lines of [at, end) */
    size_t line;                                                 /* bytes from one flush to the next */
};

/* The best way of this processor; false if user code cannot flush here. Asks CPUID, which a hypervisor traps: once per run. */
bool evict_find(struct evict *evict);

/* Waits until the flushes of this thread are done. */
void evict_fence(void);

#endif
