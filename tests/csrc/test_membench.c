/* Tests of the C library; compiled by tests/test_csrc.py, also with -DMEMBENCH_TEST_FAULT=1, where every kernel must be caught. */
#define _GNU_SOURCE
#include "membench.h"

#include <dirent.h>
#include <math.h>
#include <pthread.h>
#include <signal.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <time.h>
#include <unistd.h>

#ifndef MEMBENCH_TEST_FAULT
#define MEMBENCH_TEST_FAULT 0
#endif

static int failures;

#define CHECK(condition)                                                         \
    do {                                                                         \
        if (!(condition)) {                                                      \
            fprintf(stderr, "%s:%d: %s\n", __FILE__, __LINE__, #condition);      \
            failures++;                                                          \
        }                                                                        \
    } while (0)

enum { PASSES = 64, SMALL = 100000, MIB = 1024 * 1024 };

static membench_pass passes[PASSES];
static int32_t completed;

/* Sanitizers and emulators are slow, keep freed memory mapped and reserve terabytes of address space. */
static bool instrumented(void) { return getenv("MEMBENCH_INSTRUMENTED") != NULL; }

static double now(void)
{
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (double)t.tv_sec + 1e-9 * (double)t.tv_nsec;
}

static int count_entries(const char *path)
{
    int entries = 0;
    DIR *directory = opendir(path);
    while (directory != NULL && readdir(directory) != NULL)
        entries++;
    if (directory != NULL)
        closedir(directory);
    return entries;
}

static membench *opened(size_t elements, int32_t threads)
{
    membench *b = NULL;
    CHECK(membench_open(&b, elements, NULL, threads) == MEMBENCH_OK);
    CHECK(b != NULL);
    return b;
}

static int quick(membench *b, int kernel, int isa, int store, int32_t count)
{
    return membench_run(b, kernel, isa, store, count, 0.0, 60.0, NULL, passes, &completed);
}

static bool plausible(const membench_pass *p)
{
    return p->seconds > 0.0 && p->seconds < 600.0 && p->cpu_ratio >= 0.0 && p->cpu_ratio <= 1.0 && p->imbalance >= 1.0 &&
           isfinite(p->imbalance) && p->involuntary_switches >= 0 && p->page_faults >= 0;
}

static bool has_store(int isa, int kernel, int store)
{
    return store == MEMBENCH_STORE_PLAIN || kernel == MEMBENCH_READ || isa != MEMBENCH_ISA_SCALAR;
}

static void test_every_kernel(void)
{
    /* Odd sizes: below, at and past whole lines, vectors and unrolled blocks; more chunks than one. */
    static const size_t sizes[] = {24, 25, 31, 63, 64, 1001, 4099, 262144 * 3 + 13};
    const int expected = MEMBENCH_TEST_FAULT ? MEMBENCH_E_INVALID : MEMBENCH_OK;
    for (size_t s = 0; s < sizeof sizes / sizeof sizes[0]; s++)
        for (int32_t threads = 1; threads <= 3; threads++) {
            membench *b = opened(sizes[s], threads);
            for (int isa = MEMBENCH_ISA_SCALAR; isa <= MEMBENCH_ISA_NEON; isa++)
                for (int kernel = MEMBENCH_COPY; kernel <= MEMBENCH_READ; kernel++)
                    for (int store = MEMBENCH_STORE_PLAIN; store <= MEMBENCH_STORE_NT; store++) {
                        const int error = quick(b, kernel, isa, store, 2);
                        if (!membench_isa_supported(isa) || !has_store(isa, kernel, store)) {
                            CHECK(error == MEMBENCH_E_UNSUPPORTED && completed == 0);
                            continue;
                        }
                        if (error != expected)
                            fprintf(stderr, "size %zu threads %d kernel %d isa %s store %d: %s\n", sizes[s], threads, kernel,
                                    membench_isa_name(isa), store, membench_strerror(error));
                        CHECK(error == expected);
                        CHECK(error != MEMBENCH_OK || (completed == 2 && plausible(&passes[0]) && plausible(&passes[1])));
                    }
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
    for (int error = MEMBENCH_OK; error <= MEMBENCH_E_BUSY; error++)
        for (int other = error + 1; other <= MEMBENCH_E_BUSY + 1; other++)
            CHECK(strcmp(membench_strerror(error), membench_strerror(other)) != 0);
}

static void test_bad_arguments(void)
{
    const int32_t negative[] = {0, -1};
    membench *b = NULL;
    CHECK(membench_open(NULL, SMALL, NULL, 1) == MEMBENCH_E_ARG);
    CHECK(membench_open(&b, 0, NULL, 1) == MEMBENCH_E_ARG);
    CHECK(membench_open(&b, 16, NULL, 3) == MEMBENCH_E_ARG);
    CHECK(membench_open(&b, SMALL, NULL, 0) == MEMBENCH_E_ARG);
    CHECK(membench_open(&b, SMALL, NULL, -1) == MEMBENCH_E_ARG);
    CHECK(membench_open(&b, (size_t)1 << 20, NULL, MEMBENCH_MAX_THREADS + 1) == MEMBENCH_E_ARG);
    CHECK(membench_open(&b, SIZE_MAX, NULL, 1) == MEMBENCH_E_ARG);
    CHECK(membench_open(&b, SIZE_MAX / 24, NULL, 1) == MEMBENCH_E_ARG);
    CHECK(membench_open(&b, SIZE_MAX / 8 + 1, NULL, 1) == MEMBENCH_E_ARG);
    CHECK(membench_open(&b, SMALL, negative, 2) == MEMBENCH_E_ARG);
    CHECK(membench_open(&b, (size_t)1 << 45, NULL, 1) == MEMBENCH_E_MAP); /* past the address space of a process */
    CHECK(b == NULL);
    membench_close(NULL);
    CHECK(membench_unpinned(NULL) == 0);
    membench_cancel(NULL);

    b = opened(SMALL, 1);
    const int isa = MEMBENCH_ISA_SCALAR;
    CHECK(membench_run(NULL, 0, isa, 0, 1, 0, 1, NULL, passes, &completed) == MEMBENCH_E_ARG);
    CHECK(membench_run(b, -1, isa, 0, 1, 0, 1, NULL, passes, &completed) == MEMBENCH_E_ARG);
    CHECK(membench_run(b, MEMBENCH_READ + 1, isa, 0, 1, 0, 1, NULL, passes, &completed) == MEMBENCH_E_ARG);
    CHECK(membench_run(b, 0, -1, 0, 1, 0, 1, NULL, passes, &completed) == MEMBENCH_E_ARG);
    CHECK(membench_run(b, 0, 99, 0, 1, 0, 1, NULL, passes, &completed) == MEMBENCH_E_ARG);
    CHECK(membench_run(b, 0, isa, 2, 1, 0, 1, NULL, passes, &completed) == MEMBENCH_E_ARG);
    CHECK(membench_run(b, 0, isa, 0, 0, 0, 1, NULL, passes, &completed) == MEMBENCH_E_ARG);
    CHECK(membench_run(b, 0, isa, 0, 1, -1.0, 1, NULL, passes, &completed) == MEMBENCH_E_ARG);
    CHECK(membench_run(b, 0, isa, 0, 1, (double)NAN, 1, NULL, passes, &completed) == MEMBENCH_E_ARG);
    CHECK(membench_run(b, 0, isa, 0, 1, 0, (double)NAN, NULL, passes, &completed) == MEMBENCH_E_ARG);
    CHECK(membench_run(b, 0, isa, 0, 1, 0, -1.0, NULL, passes, &completed) == MEMBENCH_E_ARG);
    CHECK(membench_run(b, 0, isa, 0, 1, 0, 1, NULL, NULL, &completed) == MEMBENCH_E_ARG);
    CHECK(membench_run(b, 0, isa, 0, 1, 0, 1, NULL, passes, NULL) == MEMBENCH_E_ARG);
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
    CHECK(membench_run(b, MEMBENCH_TRIAD, membench_isa_best(), 0, PASSES, 0.0, 0.0, NULL, passes, &completed) == MEMBENCH_OK);
    CHECK(completed == 1); /* the first pass always runs */
    CHECK(quick(b, MEMBENCH_TRIAD, membench_isa_best(), 0, 3) == MEMBENCH_OK && completed == 3);
    const double budget = passes[0].seconds * 1e-3;
    CHECK(membench_run(b, MEMBENCH_TRIAD, membench_isa_best(), 0, PASSES, 0.0, budget, NULL, passes, &completed) == MEMBENCH_OK);
    CHECK(completed < PASSES);
    const double start = now();
    CHECK(membench_run(b, MEMBENCH_READ, membench_isa_best(), 0, 3, 0.05, 60.0, NULL, passes, &completed) == MEMBENCH_OK);
    CHECK(completed == 3 && now() - start >= 0.1); /* two rests */
    membench_close(b);
}

static void test_pinning(void)
{
    const int32_t far[] = {4000, 1000000};
    membench *b = NULL;
    CHECK(membench_open(&b, SMALL, far, 2) == MEMBENCH_OK);
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

struct errand {
    membench *b;
    int32_t *cancel;
    atomic_int error;
    double rest;
    int32_t completed;
    double ended;
};

static void *errand_run(void *argument)
{
    struct errand *e = argument;
    static membench_pass own[1 << 16];
    const int32_t most = 1 << 16;
    atomic_store(&e->error, membench_run(e->b, MEMBENCH_TRIAD, membench_isa_best(), 0, most, e->rest, 1e9, e->cancel, own,
                                         &e->completed));
    e->ended = now();
    return NULL;
}

static void *errand_fma(void *argument)
{
    struct errand *e = argument;
    static membench_pass own[8];
    double flops;
    atomic_store(&e->error, membench_fma(NULL, 2, membench_isa_best(), 8, 10.0, e->cancel, own, &e->completed, &flops));
    e->ended = now();
    return NULL;
}

static void cancel_after(void *(*body)(void *), size_t elements, double rest, long delay_ns)
{
    int32_t cancel = 0;
    struct errand e = {.cancel = &cancel, .rest = rest, .error = -1};
    e.b = opened(elements, 2);
    pthread_t thread;
    CHECK(pthread_create(&thread, NULL, body, &e) == 0);
    nanosleep(&(struct timespec){.tv_nsec = delay_ns}, NULL);
    CHECK(atomic_load(&e.error) == -1);
    if (body == errand_run) /* most likely in the run by now; either way it must be one of the two */
        CHECK(quick(e.b, MEMBENCH_READ, MEMBENCH_ISA_SCALAR, 0, 1) == MEMBENCH_E_BUSY);
    const double start = now();
    membench_cancel(&cancel);
    pthread_join(thread, NULL);
    CHECK(atomic_load(&e.error) == MEMBENCH_E_CANCELLED);
    if (!instrumented())
        CHECK(e.ended - start < 0.1);
    membench_close(e.b);
}

static void test_cancel(void)
{
    const size_t large = !instrumented() ? (size_t)16 * MIB : (size_t)MIB;
    cancel_after(errand_run, large, 0.0, 20 * 1000 * 1000);     /* in the first touch */
    cancel_after(errand_run, SMALL, 0.0, 100 * 1000 * 1000);    /* between short passes */
    cancel_after(errand_run, large, 0.0, 900 * 1000 * 1000);    /* in a long pass */
    cancel_after(errand_run, SMALL, 3000.0, 300 * 1000 * 1000); /* in a rest */
    cancel_after(errand_fma, SMALL, 0.0, 50 * 1000 * 1000);
    int32_t cancel = 1;
    membench *b = opened(SMALL, 2);
    CHECK(membench_run(b, 0, 0, 0, 1, 0.0, 1.0, &cancel, passes, &completed) == MEMBENCH_E_CANCELLED && completed == 0);
    cancel = 0;
    CHECK(membench_run(b, 0, 0, 0, 1, 0.0, 1.0, &cancel, passes, &completed) == MEMBENCH_OK && completed == 1);
    membench_close(b);
}

/* The least of several counts: the kernel lists a joined thread for a moment longer. */
static int settled_tasks(void)
{
    int least = count_entries("/proc/self/task");
    for (int i = 0; i < 20; i++) {
        const struct timespec moment = {0, 5000000};
        nanosleep(&moment, NULL);
        const int now = count_entries("/proc/self/task");
        least = now < least ? now : least;
    }
    return least;
}

static void test_no_threads(void)
{
    struct rlimit before;
    getrlimit(RLIMIT_AS, &before);
    membench *b = opened((size_t)1 << 16, 1000);
    /* Address space, not the process count, which root is exempt from: the stacks do not fit, so some creation fails. */
    FILE *statm = fopen("/proc/self/statm", "r");
    unsigned long pages = 0;
    CHECK(statm != NULL && fscanf(statm, "%lu", &pages) == 1);
    if (statm != NULL)
        fclose(statm);
    const struct rlimit tight = {.rlim_cur = pages * (unsigned long)sysconf(_SC_PAGESIZE) + 8UL * MIB, .rlim_max = before.rlim_max};
    const int threads = settled_tasks();
    CHECK(setrlimit(RLIMIT_AS, &tight) == 0);
    const int error = quick(b, MEMBENCH_COPY, MEMBENCH_ISA_SCALAR, 0, 1);
    setrlimit(RLIMIT_AS, &before);
    CHECK(error == MEMBENCH_E_THREAD && completed == 0);
    CHECK(settled_tasks() == threads);
    CHECK(quick(b, MEMBENCH_COPY, MEMBENCH_ISA_SCALAR, 0, 1) == MEMBENCH_OK); /* the handle is usable again */
    membench_close(b);
}

static atomic_int signalled, stray;
static pthread_t errand_thread;

static void on_signal(int number)
{
    (void)number;
    atomic_fetch_add(pthread_equal(pthread_self(), errand_thread) ? &signalled : &stray, 1);
}

/* A process-directed signal must land on a thread of the caller, never on a worker. */
static void test_signals(void)
{
    int32_t cancel = 0;
    struct errand e = {.cancel = &cancel, .error = -1};
    struct sigaction action = {.sa_handler = on_signal}, previous;
    sigset_t mask;
    sigaction(SIGUSR1, &action, &previous);
    e.b = opened(SMALL, 2);
    sigemptyset(&mask);
    sigaddset(&mask, SIGUSR1);
    CHECK(pthread_create(&errand_thread, NULL, errand_run, &e) == 0);
    nanosleep(&(struct timespec){.tv_nsec = 50 * 1000 * 1000}, NULL);
    pthread_sigmask(SIG_BLOCK, &mask, NULL); /* so that the errand's own thread is the only one left to take it */
    for (int i = 0; i < 20; i++) {
        kill(getpid(), SIGUSR1);
        nanosleep(&(struct timespec){.tv_nsec = 5 * 1000 * 1000}, NULL);
    }
    membench_cancel(&cancel);
    pthread_join(errand_thread, NULL);
    CHECK(atomic_load(&signalled) > 0 && atomic_load(&stray) == 0);
    pthread_sigmask(SIG_UNBLOCK, &mask, NULL);
    sigaction(SIGUSR1, &previous, NULL);
    membench_close(e.b);
}

static long map_count(void)
{
    long lines = 0;
    FILE *maps = fopen("/proc/self/maps", "r");
    for (int c; maps != NULL && (c = fgetc(maps)) != EOF;)
        lines += c == '\n';
    if (maps != NULL)
        fclose(maps);
    return lines;
}

static void test_no_leak(void)
{
    const int rounds = !instrumented() ? 1000 : 100;
    long maps = 0;
    int threads = 0, files = 0;
    for (int i = 0; i < rounds; i++) {
        membench *b = opened(1000 + (size_t)i, 2);
        CHECK(quick(b, i % 5, membench_isa_best(), 0, 1) == MEMBENCH_OK);
        membench_close(b);
        if (i == rounds / 10) {
            maps = map_count();
            threads = settled_tasks();
            files = count_entries("/proc/self/fd");
        }
    }
    CHECK(instrumented() || map_count() <= maps + 4); /* the allocator may grow; a leak would add one per round */
    CHECK(settled_tasks() == threads);
    CHECK(count_entries("/proc/self/fd") == files);
}

int main(void)
{
    test_every_kernel();
    test_flops();
    if (MEMBENCH_TEST_FAULT)
        return failures != 0;
    test_bytes();
    test_names();
    test_bad_arguments();
    test_budget();
    test_pinning();
    test_oversubscribed();
    test_cancel();
    test_signals();
    test_no_leak();
    if (!instrumented())
        test_no_threads();
    return failures != 0;
}
