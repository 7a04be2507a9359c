/* What the C tests share. */
#ifndef CHECK_H
#define CHECK_H

#include "membench.h"

#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <time.h>

#ifndef MEMBENCH_TEST_FAULT
#define MEMBENCH_TEST_FAULT 0
#endif

#define CHECK(condition)                                                         \
    do {                                                                         \
        if (!(condition)) {                                                      \
            fprintf(stderr, "%s:%d: %s\n", __FILE__, __LINE__, #condition);      \
            failures++;                                                          \
        }                                                                        \
    } while (0)

enum { PASSES = 64, SMALL = 100000, MIB = 1024 * 1024 };

extern int failures;
extern membench_pass passes[PASSES];
extern int32_t completed;

/* Cancels, signals, leaks, failures to create threads. */
void test_lifetimes(void);

/* Sanitizers and emulators are slow, keep freed memory mapped and reserve terabytes of address space. */
static inline bool instrumented(void) { return getenv("MEMBENCH_INSTRUMENTED") != NULL; }

static inline double now(void)
{
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (double)t.tv_sec + 1e-9 * (double)t.tv_nsec;
}

enum { REFILL = 3 * 4096 };

static inline membench *opened(size_t elements, int32_t threads)
{
    membench *b = NULL;
    CHECK(membench_open(&b, elements, REFILL, NULL, threads) == MEMBENCH_OK);
    CHECK(b != NULL);
    return b;
}

static inline int attempt(membench *b, int kernel, int isa, int store, int method, int32_t count)
{
    return membench_run(b, kernel, isa, store, method, count, 0.0, 60.0, NULL, passes, &completed);
}

static inline int quick(membench *b, int kernel, int isa, int store, int32_t count)
{
    return attempt(b, kernel, isa, store, MEMBENCH_METHOD_STREAM, count);
}

#endif
