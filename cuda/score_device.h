/* SPDX-License-Identifier: Apache-2.0
 *
 * What kernels of scoring share: a unit in shared memory, positions and numbers of pages, orders of floats, sums over a
 * block. For .cu files. Sums and scans go through fixed trees: the same numbers give the same bits.
 */
#ifndef CUDA_SCORE_DEVICE_H
#define CUDA_SCORE_DEVICE_H

#include "cuda/device.h"
#include "cuda/pages.cuh"
#include "cuda/score.h"
#include "cuda/warp.cuh"

#define SCORE_INLINE static __device__ __forceinline__

enum { WARP = 32, SCORE_UNITS_GRID = 32768 /* units a launch, below the limit of a grid's second dimension */ };

static_assert(sizeof(struct cuda_score_unit) % sizeof(uint4) == 0, "a unit is read 16 bytes at a time");

/* The block's unit, read once: sizeof(struct cuda_score_unit) bytes of shared memory. All threads. */
SCORE_INLINE void unit_load(const struct cuda_score_unit *from, struct cuda_score_unit *to) {
    const uint4 *words = (const uint4 *)from;
    for (uint32_t i = threadIdx.x; i < sizeof *to / sizeof(uint4); i += blockDim.x)
        ((uint4 *)to)[i] = words[i];
    __syncthreads();
}

SCORE_INLINE const char *page_of(const struct kv_pool *pool, uint32_t page) {
    return page_at(*pool, page);
}

SCORE_INLINE const char *values_of(const struct kv_pool *pool, const char *page) {
    return page_values(pool->layout, (char *)page);
}

SCORE_INLINE const int32_t *positions_of(const struct kv_pool *pool, const char *page) {
    return page_positions(pool->layout, (char *)page);
}

/* The position of a slot whose page's number is known. */
SCORE_INLINE int32_t place_position(const struct kv_pool *pool, uint32_t page, uint32_t slot) {
    return positions_of(pool, page_of(pool, page))[slot % KV_PAGE_SLOTS];
}

SCORE_INLINE int32_t slot_position(const struct kv_pool *pool, const struct cuda_head_view *view, uint32_t slot) {
    return positions_of(pool, page_of(pool, view->pages[slot / KV_PAGE_SLOTS]))[slot % KV_PAGE_SLOTS];
}

SCORE_INLINE float stored_number(enum kv_format format, uint32_t bits) {
    return format == KV_F16 ? half_number((uint16_t)bits) : bfloat_number((uint16_t)bits);
}

/* 16 bytes as floats: 4 of KV_F32, else 8. */
template <enum kv_format FORMAT> SCORE_INLINE void widen(uint4 raw, float *out) {
    if (FORMAT == KV_F32) {
        out[0] = __uint_as_float(raw.x);
        out[1] = __uint_as_float(raw.y);
        out[2] = __uint_as_float(raw.z);
        out[3] = __uint_as_float(raw.w);
        return;
    }
    const uint32_t words[4] = {raw.x, raw.y, raw.z, raw.w};
#pragma unroll
    for (int i = 0; i < 4; i++) {
        out[2 * i] = stored_number(FORMAT, words[i] & 0xffff);
        out[2 * i + 1] = stored_number(FORMAT, words[i] >> 16);
    }
}

SCORE_INLINE float not_a_number(void) {
    return __uint_as_float(0x7fc00000u);
}

SCORE_INLINE float infinity(void) {
    return __uint_as_float(0x7f800000u);
}

/* policy/order.h, as unsigned: ascending with the value, -0 equals 0, NaN equals -infinity. */
SCORE_INLINE uint32_t order_of(float value) {
    uint32_t bits = __float_as_uint(value + 0.0f);
    if ((bits & 0x7fffffffu) > 0x7f800000u)
        bits = 0xff800000u;
    return bits >> 31 ? ~bits : bits | 0x80000000u;
}

enum { KEY_POSITION_BITS = 31 };

/* The number by which slots are compared (policy/select.c): score, then position; 0: an empty slot. */
SCORE_INLINE uint64_t slot_key(float score, int32_t position) {
    return position == KV_NO_POSITION ? 0 : (uint64_t)order_of(score) << KEY_POSITION_BITS | (uint32_t)position;
}

/* ---- over a block ---- */

/* The sum, or the largest, of the block's numbers, the same for all threads. space [32]: shared, free again after the
 * next barrier. */
template <typename number> SCORE_INLINE number block_sum(number value, number *space) {
    value = warp_sum(value);
    __syncthreads();
    if (threadIdx.x % WARP == 0)
        space[threadIdx.x / WARP] = value;
    __syncthreads();
    number total = 0;
    for (uint32_t i = 0; i < blockDim.x / WARP; i++)
        total += space[i];
    return total;
}

SCORE_INLINE float block_most(float value, float *space) {
    value = warp_most(value);
    __syncthreads();
    if (threadIdx.x % WARP == 0)
        space[threadIdx.x / WARP] = value;
    __syncthreads();
    float most = space[0];
    for (uint32_t i = 1; i < blockDim.x / WARP; i++)
        most = fmaxf(most, space[i]);
    return most;
}

/* Sum of the values of threads before this one; *total that of all. space [33]: shared. */
SCORE_INLINE uint32_t block_scan(uint32_t value, uint32_t *space, uint32_t *total) {
    uint32_t lane = threadIdx.x % WARP, warp = threadIdx.x / WARP, warps = blockDim.x / WARP, sum = value;
#pragma unroll
    for (uint32_t step = 1; step < WARP; step *= 2) {
        uint32_t before = __shfl_up_sync(0xffffffffu, sum, step);
        sum += lane >= step ? before : 0;
    }
    __syncthreads();
    if (lane == WARP - 1)
        space[warp] = sum;
    __syncthreads();
    uint32_t first = 0, all = 0;
    for (uint32_t i = 0; i < warps; i++) {
        first += i < warp ? space[i] : 0;
        all += space[i];
    }
    *total = all;
    return first + sum - value;
}

/* ---- launches ---- */

/* Units of a launch of which `left` are left. */
static inline uint32_t units_at_once(uint32_t left) {
    return left < (uint32_t)SCORE_UNITS_GRID ? left : (uint32_t)SCORE_UNITS_GRID;
}

/* ---- launches of kernels that are made for a KV format, and for one of two ways ---- */

#define SCORE_FORMATS(format, kernel, ...)                                                                             \
    do {                                                                                                               \
        if ((format) == KV_F32)                                                                                        \
            KERNEL_LAUNCH(kernel<KV_F32>, __VA_ARGS__);                                                                \
        else if ((format) == KV_F16)                                                                                   \
            KERNEL_LAUNCH(kernel<KV_F16>, __VA_ARGS__);                                                                \
        else                                                                                                           \
            KERNEL_LAUNCH(kernel<KV_BF16>, __VA_ARGS__);                                                               \
    } while (0)

#define SCORE_FORMATS_WIDE(format, wide, kernel, ...)                                                                  \
    do {                                                                                                               \
        if ((format) == KV_F32 && (wide))                                                                              \
            KERNEL_LAUNCH(kernel<KV_F32, true>, __VA_ARGS__);                                                          \
        else if ((format) == KV_F32)                                                                                   \
            KERNEL_LAUNCH(kernel<KV_F32, false>, __VA_ARGS__);                                                         \
        else if ((format) == KV_F16 && (wide))                                                                         \
            KERNEL_LAUNCH(kernel<KV_F16, true>, __VA_ARGS__);                                                          \
        else if ((format) == KV_F16)                                                                                   \
            KERNEL_LAUNCH(kernel<KV_F16, false>, __VA_ARGS__);                                                         \
        else if (wide)                                                                                                 \
            KERNEL_LAUNCH(kernel<KV_BF16, true>, __VA_ARGS__);                                                         \
        else                                                                                                           \
            KERNEL_LAUNCH(kernel<KV_BF16, false>, __VA_ARGS__);                                                        \
    } while (0)

#endif
