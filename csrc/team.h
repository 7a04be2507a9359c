/* A team of pinned threads that runs timed passes in step. Private to the library. */
#ifndef MEMBENCH_TEAM_H
#define MEMBENCH_TEAM_H

#include "membench.h"

#include <stdbool.h>

/* What the threads do. Each step returns an enum membench_error; anything but MEMBENCH_OK ends the run for all. */
struct team_work {
    void *context;
    int (*prepare)(void *context, int32_t thread); /* untimed, once */
    void (*settle)(void *context);                 /* on one thread, after every prepare; may be NULL */
    int (*arrange)(void *context, int32_t thread); /* untimed, before every pass; may be NULL */
    int (*pass)(void *context, int32_t thread);    /* timed */
    int (*check)(void *context, int32_t thread);   /* untimed, once, after the last pass; may be NULL */
};

struct team_plan {
    const int32_t *cpus; /* NULL: unpinned */
    int32_t threads;
    int32_t max_passes;
    double rest_seconds;
    double budget_seconds;
    const int32_t *cancel; /* may be NULL */
};

/* Whether a team can have these threads: their number and CPU numbers are in range. */
bool team_possible(const int32_t *cpus, int32_t threads);

bool team_cancelled(const int32_t *cancel);
int64_t team_now(void); /* CLOCK_MONOTONIC, ns */

/* Creates the threads, runs, joins. *completed counts the filled passes, *unpinned the threads whose pinning failed. */
int team_run(const struct team_plan *plan, const struct team_work *work, membench_pass *passes, int32_t *completed,
             int32_t *unpinned);

#endif
