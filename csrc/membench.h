/*
 * membench: memory-bandwidth and compute ceilings of this machine, measured politely.
 *
 * Kernels are variants of McCalpin's STREAM kernels over three arrays of doubles; q = 3. Credited bytes follow STREAM: only the
 * references that the source names, never write-allocate traffic.
 *
 *   COPY   c[i] = a[i]             16 B per element
 *   SCALE  b[i] = q * c[i]         16 B
 *   ADD    c[i] = a[i] + b[i]      24 B
 *   TRIAD  a[i] = b[i] + q * c[i]  24 B
 *   READ   loads a[i], b[i], c[i]  24 B (all three arrays, so that the footprint equals triad's)
 *
 * Times are seconds, sizes are bytes, rates are left to the caller: membench_pass_bytes() / membench_pass.seconds.
 * A pass lasts from the first thread's start to the last thread's end: an error can only make it look longer.
 *
 * Functions that return int return an enum membench_error, 0 for success, unless they say otherwise. Nothing is printed, no
 * state is shared between handles, no thread outlives the call that created it, and no signal reaches a worker.
 * Text between the two cdef markers is also what Python's cffi parses: declarations only.
 */
#ifndef MEMBENCH_H
#define MEMBENCH_H

#include <stddef.h>
#include <stdint.h>

/* cdef begin */
enum membench_kernel { MEMBENCH_COPY, MEMBENCH_SCALE, MEMBENCH_ADD, MEMBENCH_TRIAD, MEMBENCH_READ };

/* NT: stores that bypass the caches and so avoid the write-allocate read; READ stores nothing and accepts both. */
enum membench_store { MEMBENCH_STORE_PLAIN, MEMBENCH_STORE_NT };

/* SCALAR: portable C, which the compiler may vectorise for the baseline of the architecture; it has no NT stores. */
enum membench_isa { MEMBENCH_ISA_SCALAR, MEMBENCH_ISA_SSE2, MEMBENCH_ISA_AVX2, MEMBENCH_ISA_AVX512, MEMBENCH_ISA_NEON };

/*
 * STREAM: passes follow one another; the arrays must be much larger than the caches, or these are what is measured.
 * EVICT: before every pass each thread flushes its slices of all three arrays from all caches, outside the timed part, so that
 * small arrays are read from memory too. A plain store's line would stay dirty in a cache and its way to memory would never be
 * timed: only READ, and kernels with NT stores where these bypass the caches for certain (x86), can be measured like this.
 * Then it reads refill_bytes of its own, which should be the size of a core's private cache: caches that start empty drive
 * nothing out while they fill, which made 0.25 MiB of each array look 17..20 % faster than STREAM, 1 MiB 9..13 %, 4 MiB 3..6 %
 * and 16 MiB up to 3 %. Refilled, 0.5 MiB to 16 MiB agree with STREAM within 2 % in the median and 4 % at best (Xeon, 2 MiB of L2).
 */
enum membench_method { MEMBENCH_METHOD_STREAM, MEMBENCH_METHOD_EVICT };

enum membench_error {
    MEMBENCH_OK = 0,
    MEMBENCH_E_ARG,         /* an argument is out of range, or a size overflows */
    MEMBENCH_E_MAP,         /* the system did not give the memory */
    MEMBENCH_E_THREAD,      /* a thread could not be created; those created are gone again */
    MEMBENCH_E_UNSUPPORTED, /* this processor or architecture lacks the instruction set, the kind of store or the method */
    MEMBENCH_E_CANCELLED,   /* the cancel flag was set; completed passes are kept but were not validated */
    MEMBENCH_E_INVALID,     /* a result element or a checksum is wrong: no pass of this run may be used */
    MEMBENCH_E_BUSY         /* the handle is in a run */
};

enum { MEMBENCH_MAX_THREADS = 1024, MEMBENCH_MAX_REFILL_BYTES = 1 << 26 };

typedef struct {
    double seconds;               /* latest end - earliest start over the threads, CLOCK_MONOTONIC */
    double cpu_ratio;             /* least thread CPU time / thread wall time, at most 1 */
    double imbalance;             /* longest thread wall time / shortest, at least 1 */
    int64_t involuntary_switches; /* sum over the threads, start gate included */
    int64_t page_faults;          /* minor and major, sum over the threads */
    double stagger;               /* seconds / longest thread wall time, at least 1: above, they did not run at the same time */
} membench_pass;

typedef struct membench membench;

/* 1 if the instruction set can run here (compiled in, in the processor, and enabled by the system), else 0. */
int membench_isa_supported(int isa);
/* The widest supported enum membench_isa. */
int membench_isa_best(void);
/* Lower-case name; "unknown" for a value outside the enum. Both strings are static. */
const char *membench_isa_name(int isa);
const char *membench_strerror(int error);

/* 1 if EVICT can measure READ here: user code can flush caches; else 0. */
int membench_evict_supported(void);

/* Sets *flag to 1 atomically; callable from any thread. The run that was given the flag ends within milliseconds. */
void membench_cancel(int32_t *flag);

/*
 * Maps three arrays of `elements` doubles (bases skewed, transparent huge pages asked for), and for each thread refill_bytes (rounded
 * down to whole 4 KiB; 0 for none) that EVICT uses; touches nothing yet.
 * Thread i is pinned to CPU number cpus[i]; NULL leaves the threads unpinned. cpus is copied.
 * E_ARG: threads outside 1..MEMBENCH_MAX_THREADS, fewer elements than one 64 B line per thread, more to refill than
 * MEMBENCH_MAX_REFILL_BYTES, a negative CPU, overflow. E_MAP.
 */
int membench_open(membench **out, size_t elements, size_t refill_bytes, const int32_t *cpus, int32_t threads);

/*
 * Creates the threads; each touches and initialises its own slice, as far as earlier runs of the handle left something to do. Then
 * 1..max_passes timed passes, with rest_seconds of sleep between them; none starts once budget_seconds of timed work are spent (the
 * first always runs) or *cancel is non-zero. Every element written is validated outside the timed part, every read pass by its
 * checksum; the threads are joined. passes[0..*completed-1] are raw, also after an error.
 * cancel may be NULL and must not be reset during the run. The first pass is warm-up by STREAM's rules; dropping it is the caller's job.
 */
int membench_run(membench *b, int kernel, int isa, int store, int method, int32_t max_passes, double rest_seconds,
                 double budget_seconds, int32_t *cancel, membench_pass *passes, int32_t *completed);

/* Threads of the last run that could not be pinned; 0 if no pinning was asked for. */
int membench_unpinned(const membench *b);

/* Credited bytes of one pass of all threads, summed over the slices they really walk; 0 for an unknown kernel. */
uint64_t membench_pass_bytes(const membench *b, int kernel);

/* Unmaps and frees; NULL is allowed. The handle must not be in a run. */
void membench_close(membench *b);

/*
 * fp32 multiply-adds on registers only; a multiply-add of one lane counts 2 FLOP (SSE2 and SCALAR: a multiply and an add).
 * *flops_per_pass is the FLOP of one pass of all threads; a pass takes about pass_seconds (0 < pass_seconds <= 10).
 */
int membench_fma(const int32_t *cpus, int32_t threads, int isa, int32_t max_passes, double pass_seconds, int32_t *cancel,
                 membench_pass *passes, int32_t *completed, double *flops_per_pass);
/* cdef end */

#endif
