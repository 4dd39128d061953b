/* SPDX-License-Identifier: Apache-2.0
 *
 * Reductions over the 32 lanes of a warp, all of which take part; every lane gets the result. Pairs at a distance of
 * 16, then 8, 4, 2, 1: the order of a sum is always the same. For .cu files; include cuda/device.h first.
 */
#ifndef CUDA_WARP_CUH
#define CUDA_WARP_CUH

#define WARP_ALL 0xffffffffu

template <typename number> static __device__ __forceinline__ number warp_sum(number x) {
#pragma unroll
    for (int lanes = 16; lanes > 0; lanes /= 2)
        x += __shfl_xor_sync(WARP_ALL, x, lanes);
    return x;
}

template <typename number> static __device__ __forceinline__ number warp_most(number x) {
#pragma unroll
    for (int lanes = 16; lanes > 0; lanes /= 2) {
        number other = __shfl_xor_sync(WARP_ALL, x, lanes);
        x = other > x ? other : x;
    }
    return x;
}

/* NaN counts only where all are. */
static __device__ __forceinline__ float warp_most(float x) {
#pragma unroll
    for (int lanes = 16; lanes > 0; lanes /= 2)
        x = fmaxf(x, __shfl_xor_sync(WARP_ALL, x, lanes));
    return x;
}

#endif
