/* Tests of the C library: cancels, signals, leaks, failures to create threads. */
#define _GNU_SOURCE
#include "check.h"

#include <dirent.h>
#include <pthread.h>
#include <signal.h>
#include <stdatomic.h>
#include <sys/resource.h>
#include <unistd.h>

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

struct errand {
    membench *b;
    int32_t *cancel;
    atomic_int error;
    double rest;
    int method;
    int32_t completed;
    double ended;
};

static void *errand_run(void *argument)
{
    struct errand *e = argument;
    static membench_pass own[1 << 16];
    const int32_t most = 1 << 16;
    const int kernel = e->method == MEMBENCH_METHOD_EVICT ? MEMBENCH_READ : MEMBENCH_TRIAD;
    int error;
    do /* while a run of `until_busy` is on */
        error = membench_run(e->b, kernel, membench_isa_best(), 0, e->method, most, e->rest, 1e9, e->cancel, own, &e->completed);
    while (error == MEMBENCH_E_BUSY);
    atomic_store(&e->error, error);
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

/* The errand is in its run, whenever the system lets its thread begin. */
static void until_busy(membench *b)
{
    const double most = now() + 60.0;
    while (quick(b, MEMBENCH_READ, MEMBENCH_ISA_SCALAR, 0, 1) != MEMBENCH_E_BUSY) {
        CHECK(now() < most);
        if (now() >= most)
            return;
        nanosleep(&(struct timespec){.tv_nsec = 1000 * 1000}, NULL);
    }
}

/* Seconds from the cancel to the end. */
static double cancelled_after(void *(*body)(void *), int method, size_t elements, double rest, long delay_ns)
{
    int32_t cancel = 0;
    struct errand e = {.cancel = &cancel, .rest = rest, .method = method, .error = -1};
    e.b = opened(elements, 2);
    pthread_t thread;
    CHECK(pthread_create(&thread, NULL, body, &e) == 0);
    nanosleep(&(struct timespec){.tv_nsec = delay_ns}, NULL);
    if (body == errand_run)
        until_busy(e.b);
    CHECK(atomic_load(&e.error) == -1);
    const double start = now();
    membench_cancel(&cancel);
    pthread_join(thread, NULL);
    CHECK(atomic_load(&e.error) == MEMBENCH_E_CANCELLED);
    membench_close(e.b);
    return e.ended - start;
}

/* On a busy machine a thread waits for its CPU: the best of several tries. */
static void cancel_after(void *(*body)(void *), int method, size_t elements, double rest, long delay_ns)
{
    double seconds = cancelled_after(body, method, elements, rest, delay_ns);
    for (int i = 0; i < 4 && !instrumented() && seconds >= 0.1; i++)
        seconds = cancelled_after(body, method, elements, rest, delay_ns);
    CHECK(instrumented() || seconds < 0.1);
}

static void test_cancel(void)
{
    const size_t large = !instrumented() ? (size_t)16 * MIB : (size_t)MIB;
    cancel_after(errand_run, 0, large, 0.0, 20 * 1000 * 1000);     /* in the first touch */
    cancel_after(errand_run, 0, SMALL, 0.0, 100 * 1000 * 1000);    /* between short passes */
    cancel_after(errand_run, 0, large, 0.0, 900 * 1000 * 1000);    /* in a long pass */
    cancel_after(errand_run, 0, SMALL, 3000.0, 300 * 1000 * 1000); /* in a rest */
    cancel_after(errand_fma, 0, SMALL, 0.0, 50 * 1000 * 1000);
    if (membench_evict_supported()) {
        cancel_after(errand_run, MEMBENCH_METHOD_EVICT, SMALL, 0.0, 50 * 1000 * 1000);
        cancel_after(errand_run, MEMBENCH_METHOD_EVICT, large, 0.0, 900 * 1000 * 1000); /* most of the time is flushing */
    }
    int32_t cancel = 1;
    membench *b = opened(SMALL, 2);
    CHECK(membench_run(b, 0, 0, 0, 0, 1, 0.0, 1.0, &cancel, passes, &completed) == MEMBENCH_E_CANCELLED && completed == 0);
    cancel = 0;
    CHECK(membench_run(b, 0, 0, 0, 0, 1, 0.0, 1.0, &cancel, passes, &completed) == MEMBENCH_OK && completed == 1);
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

/* Waits until there are no more tasks than that: a host that is busy may not let a joined thread end at once. */
static int ended_but(int tasks)
{
    const struct timespec moment = {0, 5000000};
    for (int i = 0; i < 1000 && count_entries("/proc/self/task") > tasks; i++)
        nanosleep(&moment, NULL);
    return count_entries("/proc/self/task") <= tasks;
}

static void test_no_threads(void)
{
    struct rlimit before;
    getrlimit(RLIMIT_AS, &before);
    membench *b = opened((size_t)1 << 16, 200); /* few enough for a container's limit of processes */
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
    CHECK(ended_but(threads));
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
        if (membench_evict_supported())
            CHECK(attempt(b, MEMBENCH_READ, membench_isa_best(), 0, MEMBENCH_METHOD_EVICT, 1) == MEMBENCH_OK);
        membench_close(b);
        if (i == rounds / 10) {
            maps = map_count();
            threads = settled_tasks();
            files = count_entries("/proc/self/fd");
        }
    }
    CHECK(instrumented() || map_count() <= maps + 4); /* the allocator may grow; a leak would add one per round */
    CHECK(ended_but(threads));
    CHECK(count_entries("/proc/self/fd") == files);
}

void test_lifetimes(void)
{
    test_cancel();
    test_signals();
    test_no_leak();
    if (!instrumented())
        test_no_threads();
}
