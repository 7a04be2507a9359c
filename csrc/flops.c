#define _GNU_SOURCE
#include "membench.h"

#include "kernels.h"
#include "team.h"

#include <stdatomic.h>
#include <stdlib.h>

struct flops_run {
    const struct kernels *kernels;
    const int32_t *cancel;
    double pass_seconds;
    int64_t calls;           /* of the kernel, per thread and pass */
    _Atomic int64_t call_ns; /* the slowest thread's best call */
};

static int call(const struct flops_run *run)
{
    if (team_cancelled(run->cancel))
        return MEMBENCH_E_CANCELLED;
    return run->kernels->flops(FLOPS_ROUNDS, FLOPS_ROUNDS - MEMBENCH_TEST_FAULT) ? MEMBENCH_OK : MEMBENCH_E_INVALID;
}

/* Warms up (wide vectors start at a lower clock) and finds the time of one call. */
static int calibrate(void *context, int32_t thread)
{
    (void)thread;
    struct flops_run *run = context;
    const double warm = run->pass_seconds / 2 < 0.02 ? run->pass_seconds / 2 : 0.02;
    const int64_t until = team_now() + (int64_t)(warm * 1e9);
    int64_t best = INT64_MAX;
    do {
        const int64_t start = team_now();
        const int error = call(run);
        if (error != MEMBENCH_OK)
            return error;
        const int64_t took = team_now() - start;
        best = took < best ? took : best;
    } while (team_now() < until);
    int64_t slowest = atomic_load(&run->call_ns);
    while (best > slowest && !atomic_compare_exchange_weak(&run->call_ns, &slowest, best)) {
    }
    return MEMBENCH_OK;
}

static void settle(void *context)
{
    struct flops_run *run = context;
    const int64_t call_ns = atomic_load(&run->call_ns);
    const int64_t calls = (int64_t)(run->pass_seconds * 1e9 / (double)(call_ns > 0 ? call_ns : 1) + 0.5);
    run->calls = calls > 0 ? calls : 1;
}

static int pass(void *context, int32_t thread)
{
    (void)thread;
    const struct flops_run *run = context;
    for (int64_t i = 0; i < run->calls; i++) {
        const int error = call(run);
        if (error != MEMBENCH_OK)
            return error;
    }
    return MEMBENCH_OK;
}

int membench_fma(const int32_t *cpus, int32_t threads, int isa, int32_t max_passes, double pass_seconds, int32_t *cancel,
                 membench_pass *passes, int32_t *completed, double *flops_per_pass)
{
    if (completed == NULL || flops_per_pass == NULL)
        return MEMBENCH_E_ARG;
    *completed = 0;
    *flops_per_pass = 0.0;
    if (passes == NULL || !team_possible(cpus, threads) || isa < MEMBENCH_ISA_SCALAR || isa > MEMBENCH_ISA_NEON ||
        max_passes < 1 || !(pass_seconds > 0.0 && pass_seconds <= 10.0))
        return MEMBENCH_E_ARG;
    const struct kernels *kernels = kernels_for(isa);
    if (kernels == NULL)
        return MEMBENCH_E_UNSUPPORTED;
    struct flops_run run = {.kernels = kernels, .cancel = cancel, .pass_seconds = pass_seconds};
    const struct team_work work = {.context = &run, .prepare = calibrate, .settle = settle, .pass = pass};
    const struct team_plan plan = {
        .cpus = cpus, .threads = threads, .max_passes = max_passes, .budget_seconds = 1e9, .cancel = cancel};
    int32_t unpinned = 0;
    const int error = team_run(&plan, &work, passes, completed, &unpinned);
    *flops_per_pass = kernels->flops_per_round * FLOPS_ROUNDS * (double)run.calls * threads;
    return error;
}
