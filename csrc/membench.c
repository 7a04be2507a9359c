#define _GNU_SOURCE
#include "membench.h"

#include "contents.h"
#include "evict.h"
#include "kernels.h"
#include "team.h"

#include <math.h>
#include <stdatomic.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>

enum {
    HUGE_PAGE = 2 * 1024 * 1024,
    PAGE = 4096,
    SKEW = 1344,          /* bytes between the arrays' offsets: equal offsets would collide in caches and memory banks */
    CHUNK_LINES = 1 << 14 /* 1 MiB of each array between two looks at the cancel flag */
};

static const double FACTOR = 3.0;
static const double POISON = -1.0; /* no kernel produces it */

enum holding { UNKNOWN, SPOILT, INPUT }; /* SPOILT: some kernel's result, which only a kernel that reads it minds */

/* What the slices of one thread hold; that thread writes it, outside the timed part. */
struct owned {
    enum holding holding[ARRAYS];
    uint64_t sum[ARRAYS]; /* of the words of an array that is INPUT */
    bool refill_touched;
};

struct membench {
    double *array[ARRAYS];
    void *map;
    size_t map_bytes;
    size_t elements;
    char *refill;        /* refill_bytes for each thread */
    size_t refill_bytes;
    int32_t *cpus; /* NULL: unpinned */
    int32_t threads;
    struct owned *owned; /* by thread */
    atomic_int busy; /* an int: riscv64 has no byte-sized exchange without libatomic */
    atomic_int unpinned;
};

struct slice {
    size_t first, last; /* elements, half open; `first` starts a 64 B line */
};

struct stream {
    int to, x, y;
    uint64_t bytes;     /* credited per element */
    struct mix result;  /* in `to` after the kernel */
};

static const struct stream STREAMS[STREAM_KERNELS] = {
    [MEMBENCH_COPY] = {.to = 2, .x = 0, .y = 0, .bytes = 16, .result = {.a = 1.0}},
    [MEMBENCH_SCALE] = {.to = 1, .x = 2, .y = 2, .bytes = 16, .result = {.c = 3.0}},
    [MEMBENCH_ADD] = {.to = 2, .x = 0, .y = 1, .bytes = 24, .result = {.a = 1.0, .b = 1.0}},
    [MEMBENCH_TRIAD] = {.to = 0, .x = 1, .y = 2, .bytes = 24, .result = {.b = 1.0, .c = 3.0}},
};

struct bandwidth_run {
    const struct membench *b;
    int kernel;
    int store;
    const struct kernels *kernels;
    const struct contents *contents;
    struct evict evict;
    const int32_t *cancel;
};

static struct slice slice_of(const struct membench *b, int32_t thread)
{
    const size_t lines = (b->elements + LINE_DOUBLES - 1) / LINE_DOUBLES;
    const size_t share = lines / (size_t)b->threads, extra = lines % (size_t)b->threads, t = (size_t)thread;
    const size_t first = t * share + (t < extra ? t : extra);
    const size_t last = (first + share + (t < extra ? 1 : 0)) * LINE_DOUBLES;
    return (struct slice){.first = first * LINE_DOUBLES, .last = last < b->elements ? last : b->elements};
}

/* ---- one thread's work ---- */

static size_t chunk_end(size_t at, size_t last)
{
    const size_t chunk = (size_t)CHUNK_LINES * LINE_DOUBLES;
    return last - at > chunk ? at + chunk : last;
}

static int fill(const struct bandwidth_run *run, int j, struct slice s, uint64_t *sum)
{
    *sum = 0;
    for (size_t at = s.first; at < s.last; at = chunk_end(at, s.last)) {
        if (team_cancelled(run->cancel))
            return MEMBENCH_E_CANCELLED;
        *sum += run->contents->fill(run->b->array[j], j, at, chunk_end(at, s.last));
    }
    return MEMBENCH_OK;
}

/* So that an element which the kernel leaves out cannot pass for a result, not even for one of the run before. */
static int poison(const struct bandwidth_run *run, double *to, struct slice s)
{
    const size_t whole = s.last - s.last % LINE_DOUBLES;
    for (size_t at = s.first; at < whole; at = chunk_end(at, whole)) {
        if (team_cancelled(run->cancel))
            return MEMBENCH_E_CANCELLED;
        run->kernels->poison(to + at, to + at, to + at, POISON, (chunk_end(at, whole) - at) / LINE_DOUBLES);
    }
    for (size_t i = whole; i < s.last; i++)
        to[i] = POISON;
    kernels_store_fence();
    return MEMBENCH_OK;
}

/* Fills only what an earlier run of the handle did not leave behind: no kernel writes what it reads. */
static int prepare(void *context, int32_t thread)
{
    const struct bandwidth_run *run = context;
    const struct slice s = slice_of(run->b, thread);
    const struct stream *stream = run->kernel == MEMBENCH_READ ? NULL : &STREAMS[run->kernel];
    struct owned *own = &run->b->owned[thread];
    int error = MEMBENCH_OK;
    for (int j = 0; error == MEMBENCH_OK && j < ARRAYS; j++) {
        const bool written = stream != NULL && j == stream->to;
        const bool read = stream == NULL || j == stream->x || j == stream->y;
        if (!written && (own->holding[j] == INPUT || (own->holding[j] == SPOILT && !read)))
            continue;
        own->holding[j] = UNKNOWN; /* stays so if a cancel interrupts */
        error = written ? poison(run, run->b->array[j], s) : fill(run, j, s, &own->sum[j]);
        if (error == MEMBENCH_OK)
            own->holding[j] = written ? SPOILT : INPUT;
    }
    return error;
}

/* The inputs need no look: a wrong one makes a wrong result, here or in the run that reads it next. */
static int check(void *context, int32_t thread)
{
    const struct bandwidth_run *run = context;
    const struct slice s = slice_of(run->b, thread);
    if (run->kernel == MEMBENCH_READ)
        return MEMBENCH_OK;
    const struct stream *stream = &STREAMS[run->kernel];
    for (size_t at = s.first; at < s.last; at = chunk_end(at, s.last)) {
        if (team_cancelled(run->cancel))
            return MEMBENCH_E_CANCELLED;
        if (!run->contents->holds(run->b->array[stream->to], &stream->result, at, chunk_end(at, s.last)))
            return MEMBENCH_E_INVALID;
    }
    return MEMBENCH_OK;
}

/* Written once, or all of it would be the one page of zeros; the written lines go to memory, so that none is dirty later. */
static void touch_refill(const struct bandwidth_run *run, char *refill, size_t bytes)
{
    memset(refill, 1, bytes);
    run->evict.flush(refill, refill + bytes, run->evict.line);
    evict_fence();
}

/*
 * As in a long stream, the thread's own caches are then full of clean lines that no shared cache holds, and each line that
 * comes in drives one out. A buffer that threads share would not do: its lines leave at no cost.
 */
static void refill_caches(const struct bandwidth_run *run, int32_t thread)
{
    const struct membench *b = run->b;
    char *refill = b->refill + (size_t)thread * b->refill_bytes;
    if (!b->owned[thread].refill_touched)
        touch_refill(run, refill, b->refill_bytes);
    b->owned[thread].refill_touched = true;
    for (size_t at = 0; at < b->refill_bytes; at += run->evict.line)
        (void)*(const volatile char *)(refill + at);
}

static int flush(void *context, int32_t thread)
{
    const struct bandwidth_run *run = context;
    const struct slice s = slice_of(run->b, thread);
    for (int j = 0; j < ARRAYS; j++)
        for (size_t at = s.first; at < s.last; at = chunk_end(at, s.last)) {
            if (team_cancelled(run->cancel))
                return MEMBENCH_E_CANCELLED;
            const double *array = run->b->array[j];
            run->evict.flush((const char *)(array + at), (const char *)(array + chunk_end(at, s.last)), run->evict.line);
        }
    evict_fence();
    refill_caches(run, thread);
    return MEMBENCH_OK;
}

static int read_pass(const struct bandwidth_run *run, struct slice s, const uint64_t *expected)
{
    double *const *array = run->b->array;
    const size_t whole = s.last - s.last % LINE_DOUBLES - (size_t)MEMBENCH_TEST_FAULT * LINE_DOUBLES;
    uint64_t sum = 0;
    for (size_t at = s.first; at < whole; at = chunk_end(at, whole)) {
        if (team_cancelled(run->cancel))
            return MEMBENCH_E_CANCELLED;
        sum += run->kernels->read(array[0] + at, array[1] + at, array[2] + at, (chunk_end(at, whole) - at) / LINE_DOUBLES);
    }
    for (size_t i = s.last - s.last % LINE_DOUBLES; i < s.last; i++)
        for (int j = 0; j < ARRAYS; j++) {
            uint64_t word;
            memcpy(&word, &array[j][i], sizeof word);
            sum += word;
        }
    return sum == expected[0] + expected[1] + expected[2] ? MEMBENCH_OK : MEMBENCH_E_INVALID;
}

static void stream_tail(int kernel, double *to, const double *x, const double *y, size_t first, size_t last)
{
    for (size_t i = first; i < last; i++)
        to[i] = kernel == MEMBENCH_COPY    ? x[i]
                : kernel == MEMBENCH_SCALE ? FACTOR * x[i]
                : kernel == MEMBENCH_ADD   ? x[i] + y[i]
                                           : x[i] + FACTOR * y[i];
}

static int stream_pass(const struct bandwidth_run *run, struct slice s)
{
    const struct stream *stream = &STREAMS[run->kernel];
    stream_fn *kernel = run->kernels->stream[run->kernel][run->store];
    double *to = run->b->array[stream->to];
    const double *x = run->b->array[stream->x], *y = run->b->array[stream->y];
    const size_t whole = s.last - s.last % LINE_DOUBLES - (size_t)MEMBENCH_TEST_FAULT * LINE_DOUBLES;
    for (size_t at = s.first; at < whole; at = chunk_end(at, whole)) {
        if (team_cancelled(run->cancel))
            return MEMBENCH_E_CANCELLED;
        kernel(to + at, x + at, y + at, FACTOR, (chunk_end(at, whole) - at) / LINE_DOUBLES);
    }
    stream_tail(run->kernel, to, x, y, s.last - s.last % LINE_DOUBLES, s.last);
    if (run->store == MEMBENCH_STORE_NT)
        kernels_store_fence();
    return MEMBENCH_OK;
}

static int pass(void *context, int32_t thread)
{
    const struct bandwidth_run *run = context;
    const struct slice s = slice_of(run->b, thread);
    return run->kernel == MEMBENCH_READ ? read_pass(run, s, run->b->owned[thread].sum) : stream_pass(run, s);
}

/* ---- the bandwidth interface ---- */

static int map_arrays(struct membench *b)
{
    const size_t bytes = b->elements * sizeof(double) + ARRAYS * SKEW;
    const size_t stride = (bytes + PAGE - 1) / PAGE * PAGE; /* not whole huge pages: a small budget would go into the gaps */
    const size_t used = ARRAYS * stride + (size_t)b->threads * b->refill_bytes;
    b->map_bytes = used + HUGE_PAGE;
    b->map = mmap(NULL, b->map_bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (b->map == MAP_FAILED)
        return MEMBENCH_E_MAP;
    char *base = (char *)(((uintptr_t)b->map + HUGE_PAGE - 1) / HUGE_PAGE * HUGE_PAGE);
    madvise(base, used, MADV_HUGEPAGE); /* advice: small pages work too, and the caller reads /proc to tell */
    for (size_t j = 0; j < ARRAYS; j++)
        b->array[j] = (double *)(void *)(base + j * stride + j * SKEW);
    b->refill = base + ARRAYS * stride;
    return MEMBENCH_OK;
}

/* The sum cannot wrap in 64 bits: the arrays alone stay below PTRDIFF_MAX, and the refills below 64 GiB. */
static bool fits_address_space(size_t elements, size_t refill_bytes, int32_t threads)
{
    if (elements > (PTRDIFF_MAX / ARRAYS - 2 * HUGE_PAGE) / sizeof(double) || refill_bytes > MEMBENCH_MAX_REFILL_BYTES)
        return false;
    const uint64_t arrays = ARRAYS * ((uint64_t)elements * sizeof(double) + 2 * HUGE_PAGE);
    return arrays + (uint64_t)threads * refill_bytes <= PTRDIFF_MAX;
}

int membench_open(membench **out, size_t elements, size_t refill_bytes, const int32_t *cpus, int32_t threads)
{
    if (out == NULL)
        return MEMBENCH_E_ARG;
    *out = NULL;
    if (!team_possible(cpus, threads) || !fits_address_space(elements, refill_bytes, threads) ||
        (elements + LINE_DOUBLES - 1) / LINE_DOUBLES < (size_t)threads)
        return MEMBENCH_E_ARG;
    struct membench *b = calloc(1, sizeof *b);
    if (b == NULL)
        return MEMBENCH_E_MAP;
    b->elements = elements;
    b->refill_bytes = refill_bytes / PAGE * PAGE;
    b->threads = threads;
    b->map = MAP_FAILED;
    b->owned = calloc((size_t)threads, sizeof *b->owned);
    int error = b->owned != NULL ? MEMBENCH_OK : MEMBENCH_E_MAP;
    if (error == MEMBENCH_OK && cpus != NULL) {
        b->cpus = calloc((size_t)threads, sizeof *cpus);
        if (b->cpus != NULL)
            memcpy(b->cpus, cpus, (size_t)threads * sizeof *cpus);
        else
            error = MEMBENCH_E_MAP;
    }
    if (error == MEMBENCH_OK)
        error = map_arrays(b);
    if (error != MEMBENCH_OK) {
        membench_close(b);
        return error;
    }
    *out = b;
    return MEMBENCH_OK;
}

void membench_close(membench *b)
{
    if (b == NULL)
        return;
    if (b->map != MAP_FAILED)
        munmap(b->map, b->map_bytes);
    free(b->owned);
    free(b->cpus);
    free(b);
}

/* Whether what this kernel stores is in memory when the pass ends, as a cold pass must claim. */
static bool leaves_nothing_cached(int kernel, int store)
{
    return kernel == MEMBENCH_READ || (store == MEMBENCH_STORE_NT && NT_BYPASSES_CACHES);
}

int membench_run(membench *b, int kernel, int isa, int store, int method, int32_t max_passes, double rest_seconds,
                 double budget_seconds, int32_t *cancel, membench_pass *passes, int32_t *completed)
{
    if (completed == NULL)
        return MEMBENCH_E_ARG;
    *completed = 0;
    if (b == NULL || passes == NULL || kernel < MEMBENCH_COPY || kernel > MEMBENCH_READ || isa < MEMBENCH_ISA_SCALAR ||
        isa > MEMBENCH_ISA_NEON || store < MEMBENCH_STORE_PLAIN || store > MEMBENCH_STORE_NT ||
        method < MEMBENCH_METHOD_STREAM || method > MEMBENCH_METHOD_EVICT || max_passes < 1 ||
        !(rest_seconds >= 0.0 && rest_seconds <= 3600.0) || !(budget_seconds >= 0.0))
        return MEMBENCH_E_ARG;
    const struct kernels *kernels = kernels_for(isa);
    if (kernels == NULL || (kernel != MEMBENCH_READ && kernels->stream[kernel][store] == NULL))
        return MEMBENCH_E_UNSUPPORTED;
    struct bandwidth_run run = {.b = b,
                                .kernel = kernel,
                                .store = store,
                                .kernels = kernels,
                                .contents = contents_for(isa),
                                .cancel = cancel};
    const bool evict = method == MEMBENCH_METHOD_EVICT;
    if (evict && !(leaves_nothing_cached(kernel, store) && evict_find(&run.evict)))
        return MEMBENCH_E_UNSUPPORTED;
    if (atomic_exchange(&b->busy, 1))
        return MEMBENCH_E_BUSY;
    const struct team_work work = {
        .context = &run, .prepare = prepare, .arrange = evict ? flush : NULL, .pass = pass, .check = check};
    const struct team_plan plan = {.cpus = b->cpus,
                                   .threads = b->threads,
                                   .max_passes = max_passes,
                                   .rest_seconds = rest_seconds,
                                   .budget_seconds = budget_seconds,
                                   .cancel = cancel};
    int32_t unpinned = 0;
    const int error = team_run(&plan, &work, passes, completed, &unpinned);
    if (error == MEMBENCH_E_INVALID) /* whatever went wrong, the next run starts from nothing */
        memset(b->owned, 0, (size_t)b->threads * sizeof *b->owned);
    atomic_store(&b->unpinned, unpinned);
    atomic_store(&b->busy, 0);
    return error;
}

int membench_unpinned(const membench *b) { return b == NULL ? 0 : atomic_load(&b->unpinned); }

uint64_t membench_pass_bytes(const membench *b, int kernel)
{
    if (b == NULL || kernel < MEMBENCH_COPY || kernel > MEMBENCH_READ)
        return 0;
    uint64_t elements = 0;
    for (int32_t t = 0; t < b->threads; t++) {
        const struct slice s = slice_of(b, t);
        elements += s.last - s.first;
    }
    return elements * (kernel == MEMBENCH_READ ? ARRAYS * sizeof(double) : STREAMS[kernel].bytes);
}

void membench_cancel(int32_t *flag)
{
    if (flag != NULL)
        __atomic_store_n(flag, 1, __ATOMIC_RELAXED);
}
