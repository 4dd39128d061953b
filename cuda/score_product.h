/* SPDX-License-Identifier: Apache-2.0
 *
 * A matrix times the keys or values of a tile of S slots, by a block of PRODUCT_THREADS threads. For .cu files.
 *
 * The tile lies in shared memory as floats, [d][S]; rows of the matrix come 64 at a time, a slice of 16 columns after
 * the other, two slices in flight. A thread has four rows (4 ty ...) of S / 16 slots (S / 16 * tx ...): sums in float,
 * in ascending order of columns. Slots of a row are turned by 16 (tile_at), so that neither writing a tile nor reading
 * it meets a bank twice.
 */
#ifndef CUDA_SCORE_PRODUCT_H
#define CUDA_SCORE_PRODUCT_H

#include "cuda/score_device.h"

enum {
    PRODUCT_THREADS = 256,
    PRODUCT_ROWS = SCORE_ROWS,
    PRODUCT_SLICE = 16,
    PRODUCT_SLICES_FLOATS = 2 * PRODUCT_SLICE * PRODUCT_ROWS, /* shared memory of product_rows, and of sum_rows */
};

template <int S> SCORE_INLINE uint32_t tile_at(uint32_t channel, uint32_t slot) {
    return channel * S + (slot ^ ((channel ^ channel >> 2 ^ channel >> 3) & 1) << 4);
}

SCORE_INLINE uint32_t product_row(void) {
    return threadIdx.x / 16 * 4;
}

template <int S> SCORE_INLINE uint32_t product_slot(void) {
    return threadIdx.x % 16 * (S / 16);
}

/* The thread's slots of one channel. */
template <int S> SCORE_INLINE void tile_read(const float *tile, uint32_t channel, float out[S / 16]) {
    const float *from = tile + tile_at<S>(channel, product_slot<S>());
    if (S == 64) {
        float4 four = *(const float4 *)from;
        out[0] = four.x;
        out[1] = four.y;
        out[S / 32] = four.z;
        out[S / 16 - 1] = four.w;
    } else {
        float2 two = *(const float2 *)from;
        out[0] = two.x;
        out[1] = two.y;
    }
}

template <int S> SCORE_INLINE void tile_write(float *tile, uint32_t channel, const float in[S / 16]) {
    float *to = tile + tile_at<S>(channel, product_slot<S>());
    if (S == 64)
        *(float4 *)to = make_float4(in[0], in[1], in[S / 32], in[S / 16 - 1]);
    else
        *(float2 *)to = make_float2(in[0], in[1]);
}

/* Probabilities (f16) of the thread's slots, by one access; from: aligned to as many. */
template <int S> SCORE_INLINE void read_probabilities(const uint16_t *from, float out[S / 16]) {
    uint32_t words[2];
    if (S == 64) {
        uint2 two = *(const uint2 *)from;
        words[0] = two.x;
        words[1] = two.y;
    } else {
        words[0] = words[1] = *(const uint32_t *)from;
    }
#pragma unroll
    for (int s = 0; s < S / 16; s++)
        out[s] = half_number((uint16_t)(words[s / 2] >> s % 2 * 16));
}

SCORE_INLINE void slice_fetch(const float *matrix, size_t stride, uint32_t depth, uint32_t slice, float *slices) {
    uint32_t column = slice * PRODUCT_SLICE + threadIdx.x / 16;
    float *to = slices + (slice % 2 * PRODUCT_THREADS + threadIdx.x) * 4;
    if (column < depth)
        device_copy_async_16(to, matrix + column * stride + threadIdx.x % 16 * 4);
    device_copy_commit();
}

/* The same of a matrix in f16: half as many threads have 16 bytes. */
SCORE_INLINE void slice_fetch(const uint16_t *matrix, size_t stride, uint32_t depth, uint32_t slice, float *slices) {
    uint32_t column = slice * PRODUCT_SLICE + threadIdx.x / 8;
    uint16_t *to = (uint16_t *)(slices + slice % 2 * PRODUCT_SLICE * PRODUCT_ROWS) + threadIdx.x * 8;
    if (threadIdx.x < PRODUCT_THREADS / 2 && column < depth)
        device_copy_async_16(to, matrix + column * stride + threadIdx.x % 8 * 8);
    device_copy_commit();
}

/* The thread's four rows of a column of a slice. */
SCORE_INLINE void slice_read(const float *slice, const float *, uint32_t column, float rows[4]) {
    float4 m = *(const float4 *)(slice + column * PRODUCT_ROWS + product_row());
    rows[0] = m.x;
    rows[1] = m.y;
    rows[2] = m.z;
    rows[3] = m.w;
}

SCORE_INLINE void slice_read(const float *slice, const uint16_t *, uint32_t column, float rows[4]) {
    uint2 m = *(const uint2 *)((const uint16_t *)slice + column * PRODUCT_ROWS + product_row());
    rows[0] = half_number((uint16_t)m.x);
    rows[1] = half_number((uint16_t)(m.x >> 16));
    rows[2] = half_number((uint16_t)m.y);
    rows[3] = half_number((uint16_t)(m.y >> 16));
}

static_assert((uint32_t)PRODUCT_SLICE * PRODUCT_ROWS == 4 * (uint32_t)PRODUCT_THREADS, "a thread fetches 16 bytes");

/* sums = rows of the matrix (64, from `matrix` on) times the tile. matrix: [depth][stride], turned. DISTANCE: sums of
 * squares of differences instead of products. number: float, or uint16_t (f16). */
template <int S, bool DISTANCE, typename number>
SCORE_INLINE void product_rows(
    const number *matrix, size_t stride, uint32_t depth, const float *tile, float *slices, float sums[4][S / 16]) {
    uint32_t count = (depth + PRODUCT_SLICE - 1) / PRODUCT_SLICE;
#pragma unroll
    for (int r = 0; r < 4; r++)
#pragma unroll
        for (int s = 0; s < S / 16; s++)
            sums[r][s] = 0;
    __syncthreads();
    slice_fetch(matrix, stride, depth, 0, slices);
    for (uint32_t slice = 0; slice < count; slice++) {
        uint32_t first = slice * PRODUCT_SLICE, left = depth - first;
        uint32_t most = left < (uint32_t)PRODUCT_SLICE ? left : (uint32_t)PRODUCT_SLICE;
        if (slice + 1 < count)
            slice_fetch(matrix, stride, depth, slice + 1, slices);
        else
            device_copy_commit();
        device_copy_wait<1>();
        __syncthreads();
        const float *from = slices + slice % 2 * PRODUCT_SLICE * PRODUCT_ROWS;
#pragma unroll 8
        for (uint32_t c = 0; c < most; c++) {
            float rows[4];
            slice_read(from, matrix, c, rows);
            float x[S / 16];
            tile_read<S>(tile, first + c, x);
#pragma unroll
            for (int r = 0; r < 4; r++)
#pragma unroll
                for (int s = 0; s < S / 16; s++) {
                    float off = DISTANCE ? x[s] - rows[r] : rows[r];
                    sums[r][s] = fmaf(off, DISTANCE ? off : x[s], sums[r][s]);
                }
        }
        __syncthreads();
    }
}

/* What threads of the same slots have, added up: slot threadIdx.x's sum, for threads below S. space: that of slices. */
template <int S> SCORE_INLINE double sum_rows(const double parts[S / 16], float *space) {
    double *rows = (double *)space; /* [16][S] */
    double sum = 0;
    __syncthreads();
#pragma unroll
    for (int s = 0; s < S / 16; s++)
        rows[threadIdx.x / 16 * S + s * 16 + threadIdx.x % 16] = parts[s];
    __syncthreads();
    if (threadIdx.x < S)
        for (uint32_t r = 0; r < 16; r++)
            sum += rows[r * S + threadIdx.x % (S / 16) * 16 + threadIdx.x / (S / 16)];
    return sum;
}

static_assert(PRODUCT_SLICES_FLOATS * sizeof(float) >= 16 * SCORE_TILE * sizeof(double), "sum_rows has room");

/* ---- tiles ---- */

/* Warps share out the tile's pages; the page of this one, 16 slots from page_of_warp * 16 on, and its turn there. */
template <int S> SCORE_INLINE uint32_t page_of_warp(void) {
    return threadIdx.x / WARP % (S / KV_PAGE_SLOTS);
}

template <int S> SCORE_INLINE uint32_t turn_of_warp(void) {
    return threadIdx.x / WARP / (S / KV_PAGE_SLOTS);
}

template <int S> SCORE_INLINE uint32_t turns_of_page(void) {
    return PRODUCT_THREADS / WARP / (S / KV_PAGE_SLOTS);
}

/* The keys of the warp's page; page NULL: zeros. */
template <enum kv_format FORMAT, int S> SCORE_INLINE void tile_keys(const char *page, uint32_t dim, float *tile) {
    const uint32_t SLOTS = FORMAT == KV_F32 ? 4 : 8, LANES = KV_PAGE_SLOTS / SLOTS;
#pragma unroll 2
    for (uint32_t part = turn_of_warp<S>() * WARP + threadIdx.x % WARP; part < dim * LANES;
         part += turns_of_page<S>() * WARP) {
        uint32_t channel = part / LANES, slot = page_of_warp<S>() * KV_PAGE_SLOTS + part % LANES * SLOTS;
        float numbers[8] = {0, 0, 0, 0, 0, 0, 0, 0};
        if (page != NULL)
            widen<FORMAT>(((const uint4 *)page)[part], numbers);
        float4 low = make_float4(numbers[0], numbers[1], numbers[2], numbers[3]);
        float4 high = make_float4(numbers[4], numbers[5], numbers[6], numbers[7]);
        if (FORMAT == KV_F32) {
            *(float4 *)(tile + tile_at<S>(channel, slot)) = low;
            continue;
        }
        uint32_t swap = channel >> 1 & 1; /* so that eight lanes meet all banks */
        *(float4 *)(tile + tile_at<S>(channel, slot + swap * 4)) = swap ? high : low;
        *(float4 *)(tile + tile_at<S>(channel, slot + 4 - swap * 4)) = swap ? low : high;
    }
}

/* The values of the warp's page, turned: two lanes read a sector of a row. WIDE: rows are whole parts of 16 bytes. */
template <enum kv_format FORMAT, int S, bool WIDE>
SCORE_INLINE void tile_values(const char *values, uint32_t dim, float *tile) {
    const uint32_t NUMBERS = FORMAT == KV_F32 ? 4 : 8;
    uint32_t lane = threadIdx.x % WARP, first = page_of_warp<S>() * KV_PAGE_SLOTS;
    if (WIDE) {
        uint32_t parts = dim / NUMBERS, slot = lane / 2;
#pragma unroll 2
        for (uint32_t part = turn_of_warp<S>() * 2 + lane % 2; part < parts; part += turns_of_page<S>() * 2) {
            float numbers[8] = {0, 0, 0, 0, 0, 0, 0, 0};
            if (values != NULL)
                widen<FORMAT>(((const uint4 *)values)[slot * parts + part], numbers);
#pragma unroll
            for (uint32_t i = 0; i < NUMBERS; i++)
                tile[tile_at<S>(part * NUMBERS + i, first + slot)] = numbers[i];
        }
    } else {
        for (uint32_t i = turn_of_warp<S>() * WARP + lane; i < dim * KV_PAGE_SLOTS; i += turns_of_page<S>() * WARP)
            tile[tile_at<S>(i % dim, first + i / dim)] = values != NULL ? number_load(FORMAT, values, i) : 0;
    }
}

/* Rows of floats as slots of the tile: row(slot) is where one begins, NULL: zeros. Two lanes read a sector. */
template <int S, class Rows> SCORE_INLINE void tile_rows(const Rows &row, uint32_t dim, float *tile) {
    uint32_t lane = threadIdx.x % WARP, slot = page_of_warp<S>() * KV_PAGE_SLOTS + lane / 2;
    uint32_t first = turn_of_warp<S>() * 2 + lane % 2, step = turns_of_page<S>() * 2;
    const float *from = row(slot);
    if (dim % 8 != 0) {
        for (uint32_t channel = first; channel < dim; channel += step)
            tile[tile_at<S>(channel, slot)] = from != NULL ? from[channel] : 0;
        return;
    }
    for (uint32_t part = first; part < dim / 4; part += step) {
        float4 four = from != NULL ? ((const float4 *)from)[part] : make_float4(0, 0, 0, 0);
        tile[tile_at<S>(part * 4, slot)] = four.x;
        tile[tile_at<S>(part * 4 + 1, slot)] = four.y;
        tile[tile_at<S>(part * 4 + 2, slot)] = four.z;
        tile[tile_at<S>(part * 4 + 3, slot)] = four.w;
    }
}

/* Rows of a matrix of `rows` rows, turned: how far apart its columns are. */
SCORE_INLINE size_t padded_rows(uint32_t rows) {
    return ((size_t)rows + SCORE_ROWS - 1) / SCORE_ROWS * SCORE_ROWS;
}

#endif
