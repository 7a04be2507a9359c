/* What the arrays hold before and after a kernel, written and verified outside the timed part. Private to the library. */
#ifndef MEMBENCH_CONTENTS_H
#define MEMBENCH_CONTENTS_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

enum { ARRAYS = 3 };

/* A combination of the three arrays' input patterns: small integers in doubles, so every kernel's result is exact. */
struct mix {
    double a, b, c;
};

struct contents {
    /* Writes array number j's input pattern to its elements first..last-1; returns the sum modulo 2^64 of their words. */
    uint64_t (*fill)(double *array, int j, size_t first, size_t last);
    /* Whether elements first..last-1 are, bit for bit, that combination of the patterns. */
    bool (*holds)(const double *array, const struct mix *mix, size_t first, size_t last);
};

/* The loops for an instruction set that can run here. */
const struct contents *contents_for(int isa);

#endif
