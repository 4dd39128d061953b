/* SPDX-License-Identifier: Apache-2.0
 *
 * Launchers of kernels by which devices exchange numbers through pinned memory of the host that all of them see
 * (communicator_mapped.c). Each rank has a slot, into which it copies what it has, and a flag in a line of its own,
 * into which it then writes the number of the exchange (its epoch); it reads the others' slots once their flags say so.
 * What is awaited is bounded: a thread that waits looks at `stop`, and writes there when it has waited too long.
 *
 * There are two sets of slots in turn: whoever fills a set again has met all others since they read it.
 */
#ifndef CUDA_EXCHANGE_H
#define CUDA_EXCHANGE_H

#include <cuda_runtime_api.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

enum {
    EXCHANGE_SETS = 2,
    EXCHANGE_FLOATS = 1 << 20, /* of a slot */
    EXCHANGE_LINE = 32,        /* words from one flag to the next */
    EXCHANGE_ALONE_ROWS = 4,   /* up to as many rows one block does everything in one launch */
};

enum exchange_stop { EXCHANGE_GOES_ON, EXCHANGE_STOPPED /* by the host */, EXCHANGE_LATE /* a rank did not come */ };

/* One exchange as a rank sees it. Device addresses of host memory. */
struct exchange {
    float *slots;    /* [EXCHANGE_SETS][ranks][EXCHANGE_FLOATS] */
    uint32_t *flags; /* [ranks][EXCHANGE_LINE] epochs that ranks have come to */
    uint32_t *stop;  /* enum exchange_stop */
    uint32_t ranks, rank;
    uint32_t
        *done; /* exchanges of this rank so far, in its device's own memory: a launch that was captured counts on */
    uint64_t patience; /* nanoseconds */
};

/* x [rows, width] = the sum of all ranks' x, in the order of ranks; rows * width at most EXCHANGE_FLOATS. weight not
 * NULL: normed [rows, width] = what launch_rms_norm gives for x, the same bits. */
void launch_exchange_sum(const struct exchange *exchange, float *x, uint32_t rows, uint32_t width, const float *weight,
    float epsilon, float *normed, cudaStream_t stream);

/* Columns of a rank in rank 0's matrix. */
struct exchange_columns {
    uint32_t first[9]; /* [ranks + 1] rank r has [first[r], first[r + 1]) */
};

/* Rank 0's out [rows, first[ranks]] = the ranks' parts [rows, their width] side by side; rows times the largest width
 * at most EXCHANGE_FLOATS. */
void launch_exchange_gather(const struct exchange *exchange, const float *part, uint32_t rows,
    const struct exchange_columns *columns, float *out, cudaStream_t stream);

#ifdef __cplusplus
}
#endif

#endif
