/* Tests of the C library; compiled by tests/test_csrc.py, also with fault.h, where every kernel must be caught. */
#define _GNU_SOURCE
#include "check.h"

#include <math.h>
#include <string.h>
#include <sys/mman.h>

int failures;
int test_fault = 1;
membench_pass passes[PASSES];
int32_t completed;

static bool plausible(const membench_pass *p)
{
    return p->seconds > 0.0 && p->seconds < 600.0 && p->cpu_ratio >= 0.0 && p->cpu_ratio <= 1.0 && p->imbalance >= 1.0 &&
           isfinite(p->imbalance) && p->stagger >= 1.0 && isfinite(p->stagger) && p->involuntary_switches >= 0 && p->page_faults >= 0;
}

static bool has_store(int isa, int kernel, int store)
{
    return store == MEMBENCH_STORE_PLAIN || kernel == MEMBENCH_READ || isa != MEMBENCH_ISA_SCALAR;
}

static bool has_method(int kernel, int store, int method)
{
#if defined(__x86_64__)
    const bool bypasses = store == MEMBENCH_STORE_NT;
#else
    const bool bypasses = false;
    (void)store;
#endif
    return method == MEMBENCH_METHOD_STREAM || (membench_evict_supported() && (kernel == MEMBENCH_READ || bypasses));
}

static void test_kernel(membench *b, int kernel, int isa, int store, int method, const char *where)
{
    const int expected = MEMBENCH_TEST_FAULT ? MEMBENCH_E_INVALID : MEMBENCH_OK;
    const int error = attempt(b, kernel, isa, store, method, 2);
    if (!membench_isa_supported(isa) || !has_store(isa, kernel, store) || !has_method(kernel, store, method)) {
        CHECK(error == MEMBENCH_E_UNSUPPORTED && completed == 0);
        return;
    }
    if (error != expected)
        fprintf(stderr, "%s: kernel %d isa %s store %d method %d: %s\n", where, kernel, membench_isa_name(isa), store, method,
                membench_strerror(error));
    CHECK(error == expected);
    CHECK(error != MEMBENCH_OK || (completed == 2 && plausible(&passes[0]) && plausible(&passes[1])));
}

static void test_every_kernel(void)
{
    /* Odd sizes: below, at and past whole lines, vectors and unrolled blocks; more chunks than one. */
    static const size_t sizes[] = {24, 25, 31, 63, 64, 1001, 4099, 262144 * 3 + 13};
    for (size_t s = 0; s < sizeof sizes / sizeof sizes[0]; s++)
        for (int32_t threads = 1; threads <= 3; threads++) {
            if (instrumented() && sizes[s] > MIB / 2 && threads != 2)
                continue; /* an emulator takes half a minute for each */
            char where[64];
            snprintf(where, sizeof where, "%zu elements, %d threads", sizes[s], threads);
            membench *b = opened(sizes[s], threads);
            for (int isa = MEMBENCH_ISA_SCALAR; isa <= MEMBENCH_ISA_NEON; isa++)
                for (int kernel = MEMBENCH_COPY; kernel <= MEMBENCH_READ; kernel++)
                    for (int store = MEMBENCH_STORE_PLAIN; store <= MEMBENCH_STORE_NT; store++)
                        for (int method = MEMBENCH_METHOD_STREAM; method <= MEMBENCH_METHOD_EVICT; method++)
                            test_kernel(b, kernel, isa, store, method, where);
            membench_close(b);
        }
}

/* What a good run left in the destination must not pass for the result of a bad one. */
static void test_stale_results(void)
{
    for (int kernel = MEMBENCH_COPY; kernel <= MEMBENCH_TRIAD; kernel++) {
        membench *b = opened(1001, 2);
        test_fault = 0;
        CHECK(quick(b, kernel, membench_isa_best(), 0, 1) == MEMBENCH_OK);
        test_fault = 1;
        CHECK(quick(b, kernel, membench_isa_best(), 0, 1) == MEMBENCH_E_INVALID);
        membench_close(b);
    }
}

/* Every kernel after every other: each must find its inputs, whatever the one before left behind. */
static void test_every_order(void)
{
    enum { KERNELS = MEMBENCH_READ + 1 };
    for (int first = 0; first < KERNELS; first++)
        for (int second = 0; second < KERNELS; second++)
            for (int third = 0; third < KERNELS; third++) {
                membench *b = opened(1001, 2);
                CHECK(quick(b, first, membench_isa_best(), 0, 1) == MEMBENCH_OK);
                CHECK(quick(b, second, MEMBENCH_ISA_SCALAR, 0, 2) == MEMBENCH_OK);
                CHECK(quick(b, third, membench_isa_best(), 0, 1) == MEMBENCH_OK);
                membench_close(b);
            }
}

static void test_flops(void)
{
    for (int isa = MEMBENCH_ISA_SCALAR; isa <= MEMBENCH_ISA_NEON; isa++) {
        double flops = -1.0;
        const int error = membench_fma(NULL, 2, isa, 3, 0.002, NULL, passes, &completed, &flops);
        if (!membench_isa_supported(isa)) {
            CHECK(error == MEMBENCH_E_UNSUPPORTED && completed == 0);
        } else if (MEMBENCH_TEST_FAULT) {
            CHECK(error == MEMBENCH_E_INVALID && completed == 0);
        } else {
            CHECK(error == MEMBENCH_OK && completed == 3 && flops > 1e5);
            CHECK(plausible(&passes[0]) && plausible(&passes[2]));
        }
    }
}

static void test_bytes(void)
{
    static const uint64_t per_element[] = {16, 16, 24, 24, 24};
    membench *b = opened(SMALL + 3, 3);
    for (int kernel = MEMBENCH_COPY; kernel <= MEMBENCH_READ; kernel++)
        CHECK(membench_pass_bytes(b, kernel) == (SMALL + 3) * per_element[kernel]);
    CHECK(membench_pass_bytes(b, MEMBENCH_READ + 1) == 0);
    CHECK(membench_pass_bytes(b, -1) == 0);
    CHECK(membench_pass_bytes(NULL, MEMBENCH_READ) == 0);
    membench_close(b);
}

static void test_names(void)
{
    for (int isa = MEMBENCH_ISA_SCALAR; isa <= MEMBENCH_ISA_NEON; isa++)
        CHECK(strcmp(membench_isa_name(isa), "unknown") != 0);
    CHECK(strcmp(membench_isa_name(-1), "unknown") == 0);
    CHECK(membench_isa_supported(MEMBENCH_ISA_SCALAR) == 1);
    CHECK(membench_isa_supported(99) == 0 && membench_isa_supported(-1) == 0);
    CHECK(membench_isa_supported(membench_isa_best()) == 1);
    const char *best = getenv("MEMBENCH_EXPECT_ISA"); /* an emulated processor, whose instruction set the caller knows */
    CHECK(best == NULL || strcmp(membench_isa_name(membench_isa_best()), best) == 0);
    for (int error = MEMBENCH_OK; error <= MEMBENCH_E_BUSY; error++)
        for (int other = error + 1; other <= MEMBENCH_E_BUSY + 1; other++)
            CHECK(strcmp(membench_strerror(error), membench_strerror(other)) != 0);
}

static void test_bad_arguments(void)
{
    const int32_t negative[] = {0, -1};
    membench *b = NULL;
    CHECK(membench_open(NULL, SMALL, 0, NULL, 1) == MEMBENCH_E_ARG);
    CHECK(membench_open(&b, 0, 0, NULL, 1) == MEMBENCH_E_ARG);
    CHECK(membench_open(&b, 16, 0, NULL, 3) == MEMBENCH_E_ARG);
    CHECK(membench_open(&b, SMALL, 0, NULL, 0) == MEMBENCH_E_ARG);
    CHECK(membench_open(&b, SMALL, 0, NULL, -1) == MEMBENCH_E_ARG);
    CHECK(membench_open(&b, (size_t)1 << 20, 0, NULL, MEMBENCH_MAX_THREADS + 1) == MEMBENCH_E_ARG);
    CHECK(membench_open(&b, SIZE_MAX, 0, NULL, 1) == MEMBENCH_E_ARG);
    CHECK(membench_open(&b, SIZE_MAX / 24, 0, NULL, 1) == MEMBENCH_E_ARG);
    CHECK(membench_open(&b, SIZE_MAX / 8 + 1, 0, NULL, 1) == MEMBENCH_E_ARG);
    CHECK(membench_open(&b, SMALL, (size_t)MEMBENCH_MAX_REFILL_BYTES + 1, NULL, 1) == MEMBENCH_E_ARG);
    CHECK(membench_open(&b, SMALL, SIZE_MAX, NULL, 1) == MEMBENCH_E_ARG);
    /* Each fits alone, not together: the largest arrays, and 64 x 64 MiB, which are 0 in 32 bits. */
    const size_t largest = ((size_t)PTRDIFF_MAX / 3 - 4 * 1024 * 1024) / 8;
    CHECK(membench_open(&b, largest, MEMBENCH_MAX_REFILL_BYTES, NULL, 64) == MEMBENCH_E_ARG);
    if (sizeof(size_t) == 4)
        CHECK(membench_open(&b, SMALL, MEMBENCH_MAX_REFILL_BYTES, NULL, 64) == MEMBENCH_E_ARG);
    CHECK(membench_open(&b, SMALL, 0, negative, 2) == MEMBENCH_E_ARG);
    CHECK(membench_open(&b, (size_t)1 << 45, 0, NULL, 1) == MEMBENCH_E_MAP); /* past the address space of a process */
    CHECK(b == NULL);
    membench_close(NULL);
    CHECK(membench_unpinned(NULL) == 0);
    membench_cancel(NULL);

    b = opened(SMALL, 1);
    const int isa = MEMBENCH_ISA_SCALAR;
    CHECK(membench_run(NULL, 0, isa, 0, 0, 1, 0, 1, NULL, passes, &completed) == MEMBENCH_E_ARG);
    CHECK(membench_run(b, -1, isa, 0, 0, 1, 0, 1, NULL, passes, &completed) == MEMBENCH_E_ARG);
    CHECK(membench_run(b, MEMBENCH_READ + 1, isa, 0, 0, 1, 0, 1, NULL, passes, &completed) == MEMBENCH_E_ARG);
    CHECK(membench_run(b, 0, -1, 0, 0, 1, 0, 1, NULL, passes, &completed) == MEMBENCH_E_ARG);
    CHECK(membench_run(b, 0, 99, 0, 0, 1, 0, 1, NULL, passes, &completed) == MEMBENCH_E_ARG);
    CHECK(membench_run(b, 0, isa, 2, 0, 1, 0, 1, NULL, passes, &completed) == MEMBENCH_E_ARG);
    CHECK(membench_run(b, 0, isa, 0, -1, 1, 0, 1, NULL, passes, &completed) == MEMBENCH_E_ARG);
    CHECK(membench_run(b, 0, isa, 0, 2, 1, 0, 1, NULL, passes, &completed) == MEMBENCH_E_ARG);
    CHECK(membench_run(b, 0, isa, 0, 0, 0, 0, 1, NULL, passes, &completed) == MEMBENCH_E_ARG);
    CHECK(membench_run(b, 0, isa, 0, 0, 1, -1.0, 1, NULL, passes, &completed) == MEMBENCH_E_ARG);
    CHECK(membench_run(b, 0, isa, 0, 0, 1, (double)NAN, 1, NULL, passes, &completed) == MEMBENCH_E_ARG);
    CHECK(membench_run(b, 0, isa, 0, 0, 1, 0, (double)NAN, NULL, passes, &completed) == MEMBENCH_E_ARG);
    CHECK(membench_run(b, 0, isa, 0, 0, 1, 0, -1.0, NULL, passes, &completed) == MEMBENCH_E_ARG);
    CHECK(membench_run(b, 0, isa, 0, 0, 1, 0, 1, NULL, NULL, &completed) == MEMBENCH_E_ARG);
    CHECK(membench_run(b, 0, isa, 0, 0, 1, 0, 1, NULL, passes, NULL) == MEMBENCH_E_ARG);
    CHECK(completed == 0);
    membench_close(b);

    double flops = 0.0;
    CHECK(membench_fma(NULL, 0, isa, 1, 0.01, NULL, passes, &completed, &flops) == MEMBENCH_E_ARG);
    CHECK(membench_fma(negative, 2, isa, 1, 0.01, NULL, passes, &completed, &flops) == MEMBENCH_E_ARG);
    CHECK(membench_fma(NULL, 1, 99, 1, 0.01, NULL, passes, &completed, &flops) == MEMBENCH_E_ARG);
    CHECK(membench_fma(NULL, 1, isa, 0, 0.01, NULL, passes, &completed, &flops) == MEMBENCH_E_ARG);
    CHECK(membench_fma(NULL, 1, isa, 1, 0.0, NULL, passes, &completed, &flops) == MEMBENCH_E_ARG);
    CHECK(membench_fma(NULL, 1, isa, 1, (double)INFINITY, NULL, passes, &completed, &flops) == MEMBENCH_E_ARG);
    CHECK(membench_fma(NULL, 1, isa, 1, 0.01, NULL, NULL, &completed, &flops) == MEMBENCH_E_ARG);
    CHECK(membench_fma(NULL, 1, isa, 1, 0.01, NULL, passes, NULL, &flops) == MEMBENCH_E_ARG);
    CHECK(membench_fma(NULL, 1, isa, 1, 0.01, NULL, passes, &completed, NULL) == MEMBENCH_E_ARG);
}

static void test_budget(void)
{
    membench *b = opened(MIB, 2);
    CHECK(membench_run(b, MEMBENCH_TRIAD, membench_isa_best(), 0, 0, PASSES, 0.0, 0.0, NULL, passes, &completed) == MEMBENCH_OK);
    CHECK(completed == 1); /* the first pass always runs */
    CHECK(quick(b, MEMBENCH_TRIAD, membench_isa_best(), 0, 3) == MEMBENCH_OK && completed == 3);
    const double budget = passes[0].seconds * 1e-3;
    CHECK(membench_run(b, MEMBENCH_TRIAD, membench_isa_best(), 0, 0, PASSES, 0.0, budget, NULL, passes, &completed) == MEMBENCH_OK);
    CHECK(completed < PASSES);
    const double start = now();
    CHECK(membench_run(b, MEMBENCH_READ, membench_isa_best(), 0, 0, 3, 0.05, 60.0, NULL, passes, &completed) == MEMBENCH_OK);
    CHECK(completed == 3 && now() - start >= 0.1); /* two rests */
    membench_close(b);
}

static void test_pinning(void)
{
    const int32_t far[] = {4000, 1000000};
    membench *b = NULL;
    CHECK(membench_open(&b, SMALL, 0, far, 2) == MEMBENCH_OK);
    CHECK(membench_unpinned(b) == 0);
    CHECK(quick(b, MEMBENCH_ADD, MEMBENCH_ISA_SCALAR, 0, 1) == MEMBENCH_OK);
    CHECK(membench_unpinned(b) == 2);
    membench_close(b);
    b = opened(SMALL, 2);
    CHECK(quick(b, MEMBENCH_ADD, MEMBENCH_ISA_SCALAR, 0, 1) == MEMBENCH_OK);
    CHECK(membench_unpinned(b) == 0);
    membench_close(b);
}

static void test_oversubscribed(void)
{
    membench *b = opened(SMALL, 24);
    CHECK(quick(b, MEMBENCH_COPY, membench_isa_best(), 0, 3) == MEMBENCH_OK && completed == 3);
    membench_close(b);
}

static double best_seconds(int method)
{
    membench *b = opened(MIB / 128, 1); /* 3 x 64 KiB: deep in a cache of any machine, unless flushed */
    CHECK(attempt(b, MEMBENCH_READ, membench_isa_best(), 0, method, PASSES) == MEMBENCH_OK && completed == PASSES);
    membench_close(b);
    double best = passes[1].seconds;
    for (int i = 2; i < completed; i++)
        best = passes[i].seconds < best ? passes[i].seconds : best;
    return best;
}

static void test_evict_is_cold(void)
{
    if (!membench_evict_supported() || instrumented()) /* an emulator has no caches */
        return;
    double most = 0;
    for (int i = 0; i < 5; i++) { /* a neighbour on the same core may empty its cache too */
        const double ratio = best_seconds(MEMBENCH_METHOD_EVICT) / best_seconds(MEMBENCH_METHOD_STREAM);
        most = ratio > most ? ratio : most;
    }
    CHECK(most > 2.0);
}

static long resident_pages(void)
{
    long pages = 0;
    FILE *statm = fopen("/proc/self/statm", "r");
    CHECK(statm != NULL && fscanf(statm, "%*d %ld", &pages) == 1);
    if (statm != NULL)
        fclose(statm);
    return pages;
}

/* Pages that were read and never written are all one page: nothing that could fill a cache. */
static void test_each_thread_has_memory_of_its_own_to_refill_its_caches(void)
{
    if (!membench_evict_supported() || instrumented())
        return;
    membench *b = NULL;
    CHECK(membench_open(&b, 64, MEMBENCH_MAX_REFILL_BYTES, NULL, 2) == MEMBENCH_OK);
    const long before = resident_pages();
    CHECK(attempt(b, MEMBENCH_READ, membench_isa_best(), 0, MEMBENCH_METHOD_STREAM, 2) == MEMBENCH_OK);
    CHECK(resident_pages() - before < 1024); /* not touched where nothing is flushed */
    CHECK(attempt(b, MEMBENCH_READ, membench_isa_best(), 0, MEMBENCH_METHOD_EVICT, 2) == MEMBENCH_OK);
    CHECK(resident_pages() - before > 2 * (MEMBENCH_MAX_REFILL_BYTES / 4096) - 1024);
    membench_close(b);
    CHECK(resident_pages() - before < 1024);
}

/* Memory in the middle of the largest mapping, that is, of array b. */
static volatile uint64_t *middle_of_arrays(void)
{
    unsigned long start, end, least = 0;
    volatile uint64_t *middle = NULL;
    char line[512];
    FILE *maps = fopen("/proc/self/maps", "r");
    while (maps != NULL && fgets(line, sizeof line, maps) != NULL)
        if (sscanf(line, "%lx-%lx rw", &start, &end) == 2 && end - start > least) {
            least = end - start;
            middle = (volatile uint64_t *)((start + least / 2) & ~7UL);
        }
    if (maps != NULL)
        fclose(maps);
    return middle;
}

/* Inputs are not filled again for the next run, so a change of them must show in its result, and only there. */
static void test_damage_between_runs(void)
{
    if (instrumented()) /* the checkers have large mappings of their own */
        return;
    static const int kernels[] = {MEMBENCH_READ, MEMBENCH_TRIAD, MEMBENCH_ADD};
    membench *b = opened((size_t)4 * MIB, 2);
    for (size_t k = 0; k < sizeof kernels / sizeof kernels[0]; k++) {
        CHECK(quick(b, kernels[k], membench_isa_best(), 0, 1) == MEMBENCH_OK);
        CHECK(quick(b, kernels[k], membench_isa_best(), 0, 1) == MEMBENCH_OK);
        volatile uint64_t *word = middle_of_arrays();
        CHECK(word != NULL);
        *word ^= 1ULL << 50; /* large enough that no rounding hides it */
        CHECK(quick(b, kernels[k], membench_isa_best(), 0, 1) == MEMBENCH_E_INVALID);
        CHECK(quick(b, kernels[k], membench_isa_best(), 0, 1) == MEMBENCH_OK); /* all is filled anew */
    }
    membench_close(b);
}

int main(void)
{
    test_every_kernel();
    test_flops();
    if (MEMBENCH_TEST_FAULT) {
        test_stale_results();
        return failures != 0;
    }
    test_every_order();
    test_bytes();
    test_names();
    test_bad_arguments();
    test_budget();
    test_pinning();
    test_oversubscribed();
    test_evict_is_cold();
    test_each_thread_has_memory_of_its_own_to_refill_its_caches();
    test_damage_between_runs();
    test_lifetimes();
    return failures != 0;
}
