/* SPDX-License-Identifier: Apache-2.0
 *
 * What the ranks of one model tell each other: sums of vectors that each has a part of, and columns of matrices. Each
 * rank calls every operation, all in the same order, from its own thread, with addresses of its own device's memory. An
 * operation is done in the order of the device's other operations, and may return before it is.
 *
 * A communicator can fail for good: a rank that cannot go on says so (communicator_give_up), and every rank that waits
 * for it, and every operation from then on, returns the first error. Nobody waits for a rank that failed, nor longer
 * than `patience` for one that does not come.
 *
 *   communicator_host.c            ranks on the CPU: threads of one process that see each other's memory; or ranks of
 *                                  other processes and devices, whose parts come to the leader's memory
 *   cuda/communicator_nccl.c       CUDA devices, by NCCL
 *   cuda/communicator_mapped.c     CUDA devices, through host memory that all of them see
 */
#ifndef PARALLEL_COMMUNICATOR_H
#define PARALLEL_COMMUNICATOR_H

#include "engine/error.h"

#include <pthread.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

struct communicator;

/* Seconds that a device waits for another, or a thread for its device. A step of minutes is no step any more. */
enum { COMMUNICATOR_PATIENCE = 120 };

/* What a rank brings to `all_reduce`. */
struct communicator_sum {
    float *x; /* [rows][width] in and out */
    uint32_t rows, width;
    /* communicator->norms only: also normed [rows][width] = x / sqrt(mean(x^2) + epsilon) * weight [width], as
     * rms_norm of backend.h. weight NULL: not wanted. */
    const float *weight;
    float epsilon;
    float *normed;
};

/* What a rank brings to `gather`. */
struct communicator_part {
    const float *part; /* [rows][width of the rank] */
    float *out;        /* rank 0's: [rows][first[ranks]] */
    uint32_t rows;
    const uint32_t *first; /* host [ranks + 1], the same for all: rank r has columns [first[r], first[r + 1]) of out */
};

static inline uint32_t communicator_part_width(const struct communicator_part *part, uint32_t rank) {
    return part->first[rank + 1] - part->first[rank];
}

struct communicator_operations {
    const char *name; /* what adds up: "NCCL 2.28" */
    void (*free)(struct communicator *);
    /* x of each rank = the sum of all ranks' x, the same bits on all of them, whatever else is in the call.
     * communicator_host.c and communicator_mapped.c add in the order of ranks, NCCL of more than two ranks in one that
     * depends on the place. */
    int (*all_reduce)(struct communicator *, uint32_t rank, const struct communicator_sum *sum);
    /* Rank 0's out = the ranks' parts side by side. */
    int (*gather)(struct communicator *, uint32_t rank, const struct communicator_part *part);
    /* Called again and again by a rank that waits for its device: looks for errors of the exchange itself. Returns what
     * communicator_check does. NULL: there are none. */
    int (*poll)(struct communicator *, uint32_t rank);
    /* Once, after the first error: who waits, or whose device does, goes on. From any thread. */
    void (*stop)(struct communicator *);
};

struct communicator {
    const struct communicator_operations *operations;
    uint32_t ranks;
    bool norms; /* all_reduce can norm what it has added up */
    double patience;
    _Atomic bool failed;
    pthread_mutex_t lock; /* of error */
    struct error error;
};

/* For those that implement one. */
void communicator_init(
    struct communicator *communicator, const struct communicator_operations *operations, uint32_t ranks);
void communicator_destroy(struct communicator *communicator);

/* The first error counts. From any thread. */
void communicator_give_up(struct communicator *communicator, const struct error *error);
int communicator_check(struct communicator *communicator, struct error *error); /* 0, or the first error; error NULL */

/* Threads of one process that see each other's memory: ranks on the CPU. ERROR_MEMORY. */
struct communicator *communicator_host_create(uint32_t ranks, struct error *error);

/* The same for backends whose memory this process does not see (remote.h, or a device of its own) beside such that it
 * does: parts are downloaded, and sums uploaded again. Borrows inner [ranks]. ERROR_MEMORY. */
struct backend;
struct communicator *communicator_far_create(struct backend *const *inner, uint32_t ranks, struct error *error);

#endif
