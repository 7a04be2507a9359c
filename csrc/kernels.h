/* The inner loops, one set per instruction set. Private to the library. */
#ifndef MEMBENCH_KERNELS_H
#define MEMBENCH_KERNELS_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#ifndef MEMBENCH_TEST_FAULT
#define MEMBENCH_TEST_FAULT 0 /* tests only: lines of a slice, or rounds of a multiply-add, that a broken kernel leaves out */
#endif

enum { LINE_DOUBLES = 8, STREAM_KERNELS = 4, STORES = 2 };

/* Multiply-adds per accumulator in one call of a flops_fn: small enough that integers in fp32 stay exact. */
enum { FLOPS_ROUNDS = 16384 };

/* Writes `lines` whole 64 B lines of `to`; all pointers are 64 B aligned and the arrays do not overlap. */
typedef void stream_fn(double *to, const double *x, const double *y, double q, size_t lines);

/* The sum modulo 2^64 of all 64-bit words in `lines` lines of each of the three arrays. */
typedef uint64_t read_fn(const double *a, const double *b, const double *c, size_t lines);

/* `rounds` multiply-adds on every accumulator; false if a lane does not end exactly where `expected` rounds lead. */
typedef bool flops_fn(int expected, int rounds);

struct kernels {
    stream_fn *stream[STREAM_KERNELS][STORES]; /* by enum membench_kernel and membench_store; NULL: unsupported */
    stream_fn *poison; /* every element becomes q; bypasses the caches where the processor can; x and y are not read */
    read_fn *read;
    flops_fn *flops;
    double flops_per_round; /* FLOP of one round: 2 x lanes x accumulators */
};

/* NULL if the instruction set cannot run here. */
const struct kernels *kernels_for(int isa);

/* Waits until non-temporal stores have left the write-combining buffers. */
void kernels_store_fence(void);

#endif
