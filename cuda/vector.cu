/* SPDX-License-Identifier: Apache-2.0 */
#include "cuda/device.h"

#include "cuda/vector.h"
#include "cuda/vector.cuh"

enum { THREADS = VECTOR_THREADS, WARPS = VECTOR_WARPS, NORM_ROWS = 4, NORM_ROWS_SHARED_LEAST = 16 };

/* ---- norm ---- */

/* ROWS rows a block, so that the weights are read once for all of them; a row lies in registers, CHUNKS vectors of four
 * a thread, so that it is read once. width is a multiple of 4, at most 4 * CHUNKS * THREADS. */
template <int CHUNKS, int ROWS>
static __global__ void __launch_bounds__(THREADS)
    norm_rows(const float *x, const float *weight, float epsilon, uint32_t rows, uint32_t width, float *out) {
    KERNEL_SHARED(float, sums);
    uint32_t first = blockIdx.x * ROWS, vectors = width / 4;
    float4 value[ROWS][CHUNKS];
    float factor[ROWS];
#pragma unroll
    for (int r = 0; r < ROWS; r++) {
        const float4 *row = (const float4 *)(x + (size_t)(first + r) * width);
#pragma unroll
        for (int c = 0; c < CHUNKS; c++) {
            uint32_t at = c * THREADS + threadIdx.x;
            value[r][c] = first + r < rows && at < vectors ? row[at] : make_float4(0, 0, 0, 0);
        }
    }
#pragma unroll
    for (int r = 0; r < ROWS; r++) {
        float sum = 0;
#pragma unroll
        for (int c = 0; c < CHUNKS; c++)
            sum = vector_add_square(value[r][c], sum);
        factor[r] = vector_norm_factor(vector_block_sum(sum, sums + r * WARPS), width, epsilon);
    }
#pragma unroll
    for (int c = 0; c < CHUNKS; c++) {
        uint32_t at = c * THREADS + threadIdx.x;
        if (at >= vectors)
            continue;
        float4 weights = ((const float4 *)weight)[at];
#pragma unroll
        for (int r = 0; r < ROWS; r++)
            if (first + r < rows)
                ((float4 *)(out + (size_t)(first + r) * width))[at] = vector_scaled(value[r][c], factor[r], weights);
    }
}

/* Any width, the row read twice. */
static __global__ void __launch_bounds__(THREADS)
    norm_any(const float *x, const float *weight, float epsilon, uint32_t width, float *out) {
    KERNEL_SHARED(float, sums);
    const float *row = x + (size_t)blockIdx.x * width;
    float *to = out + (size_t)blockIdx.x * width, sum = 0;
    for (uint32_t i = threadIdx.x; i < width; i += THREADS)
        sum = fmaf(row[i], row[i], sum);
    float factor = vector_norm_factor(vector_block_sum(sum, sums), width, epsilon);
    for (uint32_t i = threadIdx.x; i < width; i += THREADS)
        to[i] = row[i] * factor * weight[i];
}

template <int CHUNKS>
static void launch_norm_rows(const float *x, const float *weight, float epsilon, uint32_t rows, uint32_t width,
    float *out, cudaStream_t stream) {
    if (rows >= NORM_ROWS_SHARED_LEAST)
        KERNEL_LAUNCH(norm_rows<CHUNKS, NORM_ROWS>, (rows + NORM_ROWS - 1) / NORM_ROWS, THREADS,
            NORM_ROWS * WARPS * sizeof(float), stream, x, weight, epsilon, rows, width, out);
    else
        KERNEL_LAUNCH(
            norm_rows<CHUNKS, 1>, rows, THREADS, WARPS * sizeof(float), stream, x, weight, epsilon, rows, width, out);
}

void launch_rms_norm(const float *x, const float *weight, float epsilon, uint32_t rows, uint32_t width, float *out,
    cudaStream_t stream) {
    if (rows == 0)
        return;
    if (width % 4 != 0 || width > 8 * 4 * THREADS)
        KERNEL_LAUNCH(norm_any, rows, THREADS, WARPS * sizeof(float), stream, x, weight, epsilon, width, out);
    else if (width <= 4 * THREADS)
        launch_norm_rows<1>(x, weight, epsilon, rows, width, out, stream);
    else if (width <= 2 * 4 * THREADS)
        launch_norm_rows<2>(x, weight, epsilon, rows, width, out, stream);
    else if (width <= 4 * 4 * THREADS)
        launch_norm_rows<4>(x, weight, epsilon, rows, width, out, stream);
    else
        launch_norm_rows<8>(x, weight, epsilon, rows, width, out, stream);
}

/* ---- activation ---- */

static __device__ __forceinline__ float silu_times(float gate, float up) {
    return gate / (1 + expf(-gate)) * up;
}

/* A block does a part of one row; STEP numbers a thread at a time. */
static __global__ void __launch_bounds__(THREADS) silu_vectors(const float *gate_up, uint32_t vectors, float *out) {
    uint32_t at = blockIdx.x * THREADS + threadIdx.x;
    if (at >= vectors)
        return;
    const float4 *row = (const float4 *)gate_up + (size_t)blockIdx.y * 2 * vectors;
    float4 gate = row[at], up = row[vectors + at];
    ((float4 *)out)[(size_t)blockIdx.y * vectors + at] = make_float4(
        silu_times(gate.x, up.x), silu_times(gate.y, up.y), silu_times(gate.z, up.z), silu_times(gate.w, up.w));
}

static __global__ void __launch_bounds__(THREADS) silu_any(const float *gate_up, uint32_t width, float *out) {
    uint32_t at = blockIdx.x * THREADS + threadIdx.x;
    if (at >= width)
        return;
    const float *row = gate_up + (size_t)blockIdx.y * 2 * width;
    out[(size_t)blockIdx.y * width + at] = silu_times(row[at], row[width + at]);
}

void launch_silu_mul(const float *gate_up, uint32_t rows, uint32_t width, float *out, cudaStream_t stream) {
    for (uint32_t done = 0, part; done < rows; done += part) {
        part = rows - done < 65535 ? rows - done : 65535; /* the most that a grid has in y */
        const float *from = gate_up + (size_t)done * 2 * width;
        float *to = out + (size_t)done * width;
        uint32_t steps = width % 4 == 0 ? width / 4 : width;
        dim3 grid((steps + THREADS - 1) / THREADS, part);
        if (width % 4 == 0)
            KERNEL_LAUNCH(silu_vectors, grid, THREADS, 0, stream, from, steps, to);
        else
            KERNEL_LAUNCH(silu_any, grid, THREADS, 0, stream, from, steps, to);
    }
}

/* ---- gathering ---- */

static __global__ void __launch_bounds__(THREADS)
    gather_vectors(const float *x, const uint32_t *wanted, uint32_t vectors, float *out) {
    const float4 *from = (const float4 *)x + (size_t)wanted[blockIdx.x] * vectors;
    float4 *to = (float4 *)out + (size_t)blockIdx.x * vectors;
    for (uint32_t i = blockIdx.y * THREADS + threadIdx.x; i < vectors; i += gridDim.y * THREADS)
        to[i] = from[i];
}

static __global__ void __launch_bounds__(THREADS)
    gather_any(const float *x, const uint32_t *wanted, uint32_t width, float *out) {
    const float *from = x + (size_t)wanted[blockIdx.x] * width;
    for (uint32_t i = blockIdx.y * THREADS + threadIdx.x; i < width; i += gridDim.y * THREADS)
        out[(size_t)blockIdx.x * width + i] = from[i];
}

void launch_gather_rows(
    const float *x, const uint32_t *wanted, uint32_t count, uint32_t width, float *out, cudaStream_t stream) {
    if (count == 0)
        return;
    uint32_t steps = width % 4 == 0 ? width / 4 : width;
    dim3 grid(count, (steps + THREADS - 1) / THREADS);
    if (width % 4 == 0)
        KERNEL_LAUNCH(gather_vectors, grid, THREADS, 0, stream, x, wanted, steps, out);
    else
        KERNEL_LAUNCH(gather_any, grid, THREADS, 0, stream, x, wanted, steps, out);
}
