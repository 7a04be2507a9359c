#define _GNU_SOURCE
#include "team.h"

#include <errno.h>
#include <limits.h>
#include <pthread.h>
#include <sched.h>
#include <signal.h>
#include <stdatomic.h>
#include <stdlib.h>
#include <string.h>
#include <sys/resource.h>
#include <time.h>

enum {
    STACK_BYTES = 256 * 1024,
    MAX_CPU = 1 << 16,
    REST_SLICE_NS = 20 * 1000 * 1000, /* a cancelled rest ends after at most this */
    GATE_NS = 1000 * 1000,            /* bounded spin at the start gate */
    GATE_NS_PER_THREAD = 20 * 1000,   /* waking many threads takes longer */
};

enum launch { LAUNCH_WAIT, LAUNCH_GO, LAUNCH_ABORT };

/* One thread's stamps; own cache lines (two: adjacent-line prefetch), so that writing them disturbs nobody. */
struct member {
    _Alignas(128) struct team *team;
    pthread_t id;
    int32_t index;
    int64_t start, end, cpu;
    int64_t switches, faults;
};

struct team {
    const struct team_plan *plan;
    const struct team_work *work;
    struct member *members;
    membench_pass *passes;
    double spent;
    int32_t completed;
    pthread_mutex_t lock;
    pthread_cond_t changed;
    enum launch launch;
    int32_t arrived;
    uint32_t round;
    bool go;
    bool settled;
    int64_t gate_deadline;
    int64_t wake_at;
    atomic_int unpinned;
    atomic_int error; /* the first one wins */
    _Alignas(128) atomic_int ready;
};

static int64_t clock_ns(clockid_t clock)
{
    struct timespec t;
    clock_gettime(clock, &t);
    return (int64_t)t.tv_sec * 1000000000 + t.tv_nsec;
}

int64_t team_now(void) { return clock_ns(CLOCK_MONOTONIC); }

bool team_cancelled(const int32_t *cancel) { return cancel != NULL && __atomic_load_n(cancel, __ATOMIC_RELAXED) != 0; }

bool team_possible(const int32_t *cpus, int32_t threads)
{
    if (threads < 1 || threads > MEMBENCH_MAX_THREADS)
        return false;
    for (int32_t i = 0; cpus != NULL && i < threads; i++)
        if (cpus[i] < 0)
            return false;
    return true;
}

static void relax(void)
{
#if defined(__x86_64__) || defined(__i386__)
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    __asm__ volatile("yield");
#endif
}

static void note(struct team *team, int error)
{
    int none = MEMBENCH_OK;
    if (error != MEMBENCH_OK)
        atomic_compare_exchange_strong(&team->error, &none, error);
}

static bool pin(int32_t cpu)
{
    if (cpu < 0 || cpu >= MAX_CPU)
        return false;
    cpu_set_t *set = CPU_ALLOC((size_t)cpu + 1);
    if (set == NULL)
        return false;
    const size_t size = CPU_ALLOC_SIZE((size_t)cpu + 1);
    CPU_ZERO_S(size, set);
    CPU_SET_S((size_t)cpu, size, set);
    const bool pinned = sched_setaffinity(0, size, set) == 0;
    CPU_FREE(set);
    return pinned;
}

/* Waits for all; the last to arrive runs `decide` while the others are still held, and everybody returns its verdict. */
static bool meet(struct team *team, bool (*decide)(struct team *))
{
    pthread_mutex_lock(&team->lock);
    if (++team->arrived == team->plan->threads) {
        team->arrived = 0;
        team->go = decide(team);
        team->round++;
        pthread_cond_broadcast(&team->changed);
    } else {
        for (const uint32_t round = team->round; round == team->round;)
            pthread_cond_wait(&team->changed, &team->lock);
    }
    const bool go = team->go;
    pthread_mutex_unlock(&team->lock);
    return go;
}

static bool may_pass(struct team *team)
{
    const struct team_plan *plan = team->plan;
    if (team_cancelled(plan->cancel))
        note(team, MEMBENCH_E_CANCELLED);
    return atomic_load(&team->error) == MEMBENCH_OK && team->completed < plan->max_passes &&
           (team->completed == 0 || team->spent < plan->budget_seconds);
}

static bool before_pass(struct team *team)
{
    if (!team->settled && team->work->settle != NULL && atomic_load(&team->error) == MEMBENCH_OK)
        team->work->settle(team->work->context);
    team->settled = true;
    atomic_store(&team->ready, 0);
    team->gate_deadline = team_now() + GATE_NS + (int64_t)team->plan->threads * GATE_NS_PER_THREAD;
    return may_pass(team);
}

static double ratio(int64_t part, int64_t whole) { return (double)part / (double)(whole > 0 ? whole : 1); }

static bool after_pass(struct team *team)
{
    if (atomic_load(&team->error) == MEMBENCH_OK) {
        const struct member *m = team->members;
        int64_t first = m->start, last = m->end, shortest = INT64_MAX, longest = 0;
        membench_pass pass = {.cpu_ratio = 1.0};
        for (; m < team->members + team->plan->threads; m++) {
            const int64_t wall = m->end - m->start;
            first = m->start < first ? m->start : first;
            last = m->end > last ? m->end : last;
            shortest = wall < shortest ? wall : shortest;
            longest = wall > longest ? wall : longest;
            pass.cpu_ratio = ratio(m->cpu, wall) < pass.cpu_ratio ? ratio(m->cpu, wall) : pass.cpu_ratio;
            pass.involuntary_switches += m->switches;
            pass.page_faults += m->faults;
        }
        pass.seconds = (double)(last - first) * 1e-9;
        pass.imbalance = ratio(longest > 0 ? longest : 1, shortest);
        pass.stagger = ratio(last - first, longest);
        team->passes[team->completed++] = pass;
        team->spent += pass.seconds;
    }
    team->wake_at = team_now() + (int64_t)(team->plan->rest_seconds * 1e9);
    return may_pass(team);
}

static void rest(const struct team *team)
{
    for (int64_t now = team_now(); now < team->wake_at && !team_cancelled(team->plan->cancel); now = team_now()) {
        const int64_t left = team->wake_at - now;
        const int64_t until = now + (left < REST_SLICE_NS ? left : REST_SLICE_NS);
        const struct timespec t = {.tv_sec = (time_t)(until / 1000000000), .tv_nsec = (long)(until % 1000000000)};
        clock_nanosleep(CLOCK_MONOTONIC, TIMER_ABSTIME, &t, NULL);
    }
}

static void timed_pass(struct member *m)
{
    struct team *team = m->team;
    struct rusage before, after;
    getrusage(RUSAGE_THREAD, &before); /* ahead of the gate: a thread preempted there starts late, which `stagger` tells */
    atomic_fetch_add(&team->ready, 1);
    while (atomic_load_explicit(&team->ready, memory_order_relaxed) < team->plan->threads && team_now() < team->gate_deadline)
        relax();
    const int64_t cpu = clock_ns(CLOCK_THREAD_CPUTIME_ID);
    m->start = team_now();
    note(team, team->work->pass(team->work->context, m->index));
    m->end = team_now();
    m->cpu = clock_ns(CLOCK_THREAD_CPUTIME_ID) - cpu;
    getrusage(RUSAGE_THREAD, &after);
    m->switches = after.ru_nivcsw - before.ru_nivcsw;
    m->faults = after.ru_minflt - before.ru_minflt + after.ru_majflt - before.ru_majflt;
}

static void *member_main(void *argument)
{
    struct member *m = argument;
    struct team *team = m->team;
    const struct team_work *work = team->work;
    pthread_mutex_lock(&team->lock);
    while (team->launch == LAUNCH_WAIT)
        pthread_cond_wait(&team->changed, &team->lock);
    const bool launched = team->launch == LAUNCH_GO;
    pthread_mutex_unlock(&team->lock);
    if (!launched)
        return NULL;
    if (team->plan->cpus != NULL && !pin(team->plan->cpus[m->index]))
        atomic_fetch_add(&team->unpinned, 1);
    note(team, work->prepare(work->context, m->index));
    for (;;) {
        if (work->arrange != NULL && atomic_load(&team->error) == MEMBENCH_OK)
            note(team, work->arrange(work->context, m->index));
        if (!meet(team, before_pass))
            break;
        timed_pass(m);
        if (!meet(team, after_pass))
            break;
        rest(team);
    }
    if (work->check != NULL && atomic_load(&team->error) == MEMBENCH_OK)
        note(team, work->check(work->context, m->index));
    return NULL;
}

static int create(struct member *m)
{
    pthread_attr_t attributes;
    if (pthread_attr_init(&attributes) != 0)
        return ENOMEM;
    pthread_attr_setstacksize(&attributes, STACK_BYTES);
    int error = pthread_create(&m->id, &attributes, member_main, m);
    if (error == EINVAL) /* the process has so much thread-local storage that the small stack cannot hold it */
        error = pthread_create(&m->id, NULL, member_main, m);
    pthread_attr_destroy(&attributes);
    return error;
}

static void launch(struct team *team)
{
    sigset_t all, previous;
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &previous); /* inherited: signals stay with the caller's threads */
    int32_t created = 0;
    while (created < team->plan->threads && create(&team->members[created]) == 0)
        created++;
    pthread_sigmask(SIG_SETMASK, &previous, NULL);
    if (created < team->plan->threads)
        note(team, MEMBENCH_E_THREAD);
    pthread_mutex_lock(&team->lock);
    team->launch = created == team->plan->threads ? LAUNCH_GO : LAUNCH_ABORT;
    pthread_cond_broadcast(&team->changed);
    pthread_mutex_unlock(&team->lock);
    for (int32_t i = 0; i < created; i++)
        pthread_join(team->members[i].id, NULL);
}

int team_run(const struct team_plan *plan, const struct team_work *work, membench_pass *passes, int32_t *completed,
             int32_t *unpinned)
{
    const size_t bytes = (size_t)plan->threads * sizeof(struct member);
    struct team team = {.plan = plan, .work = work, .passes = passes};
    team.members = aligned_alloc(_Alignof(struct member), bytes);
    if (team.members == NULL)
        return MEMBENCH_E_MAP;
    memset(team.members, 0, bytes);
    for (int32_t i = 0; i < plan->threads; i++) {
        team.members[i].team = &team;
        team.members[i].index = i;
    }
    pthread_mutex_init(&team.lock, NULL);
    pthread_cond_init(&team.changed, NULL);
    launch(&team);
    pthread_cond_destroy(&team.changed);
    pthread_mutex_destroy(&team.lock);
    free(team.members);
    *completed = team.completed;
    *unpinned = atomic_load(&team.unpinned);
    return atomic_load(&team.error);
}
