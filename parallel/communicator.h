/* SPDX-License-Identifier: Apache-2.0
 *
 * What the ranks of one model tell each other: sums of vectors that each has a part of, and columns of matrices. Each
 * rank calls every operation, all in the same order, from its own thread, with addresses of its own device's memory. An
 * operation is done in the order of the device's other operations, and may return before it is.
 *
 * A communicator can fail for good: a rank that cannot go on says so (give_up), and every rank that waits for
 * it, and every operation from then on, returns the first error. Nobody waits for a rank that failed.
 */
#ifndef PARALLEL_COMMUNICATOR_H
#define PARALLEL_COMMUNICATOR_H

#include "engine/error.h"

#include <stddef.h>
#include <stdint.h>

struct communicator;

/* What a rank brings to `gather`. */
struct communicator_part {
    const float *part; /* [rows][stride] */
    float *out;        /* rank 0's: [rows][out_stride] */
    uint32_t rows, stride, out_stride;
    uint32_t first, width; /* columns of out that are the rank's */
};

struct communicator_operations {
    void (*free)(struct communicator *);
    /* buffer [count] of each rank = the sum of all ranks' buffers, added in the order of ranks, and so the same bits on
     * all of them, whatever else is in the call. */
    int (*all_reduce)(struct communicator *, uint32_t rank, float *buffer, size_t count);
    /* Columns [first, first + width) of rank 0's out [rows][out_stride] = each rank's part [rows][stride], of which the
     * first `width` columns count. Ranks' columns do not overlap. */
    int (*gather)(struct communicator *, uint32_t rank, const struct communicator_part *part);
    void (*give_up)(struct communicator *, const struct error *error);
    int (*check)(struct communicator *, struct error *error); /* 0, or the first error */
};

struct communicator {
    const struct communicator_operations *operations;
    uint32_t ranks;
};

/* Threads of one process that see each other's memory: ranks on the CPU. ERROR_MEMORY. */
struct communicator *communicator_host_create(uint32_t ranks, struct error *error);

#endif
