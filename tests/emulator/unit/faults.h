/* SPDX-License-Identifier: Apache-2.0
 *
 * Kernels with one deliberate fault each, and the same without it.
 */
#ifndef EMULATOR_FAULTS_H
#define EMULATOR_FAULTS_H

#include <stdbool.h>
#include <stdint.h>

#include <cuda_runtime_api.h>

#ifdef __cplusplus
extern "C" {
#endif

enum fault {
    FAULT_BARRIER,         /* a warp reads what another wrote, without __syncthreads */
    FAULT_BARRIER_REUSE,   /* shared memory is written again before all have read it */
    FAULT_SYNCWARP,        /* a lane reads what another wrote, without __syncwarp */
    FAULT_SYNCWARP_MASK,   /* the same, with a mask of the wrong half */
    FAULT_GLOBAL_RACE,     /* two threads of a block write the same word of global memory */
    FAULT_BYTE_RACE,       /* two threads write the same byte, others their own bytes of the same word */
    FAULT_BLOCK_RACE,      /* two blocks write the same words */
    FAULT_MEMCPY_PAST,     /* memcpy of one byte too many */
    FAULT_READ_PAST,       /* one element past the allocation */
    FAULT_WRITE_BEFORE,    /* one element before it */
    FAULT_SHARED_PAST,     /* one element past the block's shared memory */
    FAULT_UNWRITTEN,       /* shared memory that nobody wrote */
    FAULT_UNWRITTEN_OTHER, /* shared memory that only the block before wrote */
    FAULT_DIVERGED,        /* halves of a warp at different shuffles of one mask */
    FAULT_ENDED_LANE,      /* lanes of the mask have returned */
    FAULT_ENDED_THREAD,    /* a thread has returned before __syncthreads */
    FAULT_HALF_BARRIER,    /* half of the block comes to __syncthreads, half to another one */
    FAULT_MASK_SELF,       /* the mask lacks the lane itself */
    FAULT_MASK_SOURCE,     /* a shuffle from a lane outside of the mask */
    FAULT_NEVER,           /* masks that cannot meet */
    FAULT_COPY_WAIT,       /* cp.async without a wait */
    FAULT_COPY_GROUPS,     /* a wait that leaves one group too many under way */
    FAULT_COPY_BARRIER,    /* the wait, but no barrier for the other threads */
    FAULT_COPY_REUSE,      /* a copy into a stage that others still read */
    FAULT_UNALIGNED,       /* a vector of 16 bytes at an address that is no multiple */
    FAULT_UNALIGNED_WORD,  /* a word at an odd address */
    FAULT_HOST_MEMORY,     /* the kernel reads the host's memory: memory[1] is a host address */
    FAULT_ATOMIC_PLAIN,    /* an atomic of one thread, a plain read of another */
    FAULTS
};

/* Runs the kernel of a fault on 64 words of zeros; right: without the fault. host: what FAULT_HOST_MEMORY reads. */
void faults_run(enum fault fault, bool right, int *words, const int *host, cudaStream_t stream);

/* Adds 1 to each of 64 words. */
void faults_touch(int *words, cudaStream_t stream);

/* Copies a square of `size` x `size` floats (a multiple of 32): by columns, each lane its own row; or by rows. */
void faults_copy(const float *from, float *to, unsigned size, bool by_columns, cudaStream_t stream);
/* Copies count 16-byte vectors. */
void faults_copy_vectors(const void *from, void *to, unsigned count, cudaStream_t stream);
/* Transposes a square of 32 x 32 through shared memory with rows of `stride` words. */
void faults_transpose(const float *from, float *to, unsigned stride, cudaStream_t stream);
/* ldmatrix of one 16 x 16 tile of halves whose rows are `stride` halves apart. */
void faults_matrix(unsigned stride, uint32_t *out, cudaStream_t stream);
/* Lanes with odd numbers leave a loop one turn early; each turn reads one row of 32 words. rows >= 1 */
void faults_ragged(const int *from, int *to, unsigned rows, cudaStream_t stream);

#ifdef __cplusplus
}
#endif

#endif
