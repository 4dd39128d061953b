/* SPDX-License-Identifier: Apache-2.0
 *
 * A row's norm by one block, for kernels that take it with something else: the same bits wherever it is taken. For .cu
 * files; include cuda/device.h first.
 */
#ifndef CUDA_VECTOR_CUH
#define CUDA_VECTOR_CUH

#include "cuda/warp.cuh"

enum {
    VECTOR_THREADS = 256, /* of the block */
    VECTOR_WARPS = VECTOR_THREADS / 32,
    VECTOR_WIDTH_MOST = 8 * 4 * VECTOR_THREADS, /* of rows that are read by vectors of four */
};

static __device__ __forceinline__ bool vector_by_fours(uint32_t width) {
    return width % 4 == 0 && width <= VECTOR_WIDTH_MOST;
}

/* The sum of each thread's `sum` over the block, the same for all threads; sums [VECTOR_WARPS] is shared memory. The
 * order is fixed: a tree over lanes, then warps in ascending order. */
static __device__ __forceinline__ float vector_block_sum(float sum, float *sums) {
    sum = warp_sum(sum);
    if (threadIdx.x % 32 == 0)
        sums[threadIdx.x / 32] = sum;
    __syncthreads();
    sum = 0;
    for (int warp = 0; warp < VECTOR_WARPS; warp++)
        sum += sums[warp];
    return sum;
}

/* A thread adds up its vectors (by fours) or numbers, every VECTOR_THREADS-th, in ascending order from 0. */
static __device__ __forceinline__ float vector_add_square(float4 x, float sum) {
    return fmaf(x.w, x.w, fmaf(x.z, x.z, fmaf(x.y, x.y, fmaf(x.x, x.x, sum))));
}

static __device__ __forceinline__ float vector_norm_factor(float sum, uint32_t width, float epsilon) {
    return 1 / sqrtf(sum / (float)width + epsilon);
}

static __device__ __forceinline__ float4 vector_scaled(float4 x, float factor, float4 weight) {
    return make_float4(
        x.x * factor * weight.x, x.y * factor * weight.y, x.z * factor * weight.z, x.w * factor * weight.w);
}

#endif
