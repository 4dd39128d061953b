/* SPDX-License-Identifier: Apache-2.0 */
#include "cuda/device.h"

#include "cuda/vector.h"
#include "cuda/vector.cuh"

enum { THREADS = VECTOR_THREADS, WARPS = VECTOR_WARPS, NORM_ROWS = 4, NORM_ROWS_SHARED_LEAST = 16 };

/* ---- norm ---- */

static __device__ __forceinline__ float4 vector_sum(float4 a, float4 b) {
    return make_float4(a.x + b.x, a.y + b.y, a.z + b.z, a.w + b.w);
}

/* ROWS rows a block, so that the weights are read once for all of them; a row lies in registers, CHUNKS vectors of four
 * a thread, so that it is read once. width is a multiple of 4, at most 4 * CHUNKS * THREADS. ADD: to what is there. */
template <int CHUNKS, int ROWS, bool ADD>
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
        for (int r = 0; r < ROWS; r++) {
            if (first + r >= rows)
                continue;
            float4 *to = (float4 *)(out + (size_t)(first + r) * width) + at;
            float4 scaled = vector_scaled(value[r][c], factor[r], weights);
            *to = ADD ? vector_sum(*to, scaled) : scaled;
        }
    }
}

/* Any width, the row read twice. */
template <bool ADD>
static __global__ void __launch_bounds__(THREADS)
    norm_any(const float *x, const float *weight, float epsilon, uint32_t width, float *out) {
    KERNEL_SHARED(float, sums);
    const float *row = x + (size_t)blockIdx.x * width;
    float *to = out + (size_t)blockIdx.x * width, sum = 0;
    for (uint32_t i = threadIdx.x; i < width; i += THREADS)
        sum = fmaf(row[i], row[i], sum);
    float factor = vector_norm_factor(vector_block_sum(sum, sums), width, epsilon);
    for (uint32_t i = threadIdx.x; i < width; i += THREADS)
        to[i] = ADD ? to[i] + row[i] * factor * weight[i] : row[i] * factor * weight[i];
}

template <int CHUNKS, bool ADD>
static void launch_norm_rows(const float *x, const float *weight, float epsilon, uint32_t rows, uint32_t width,
    float *out, cudaStream_t stream) {
    if (rows >= NORM_ROWS_SHARED_LEAST)
        KERNEL_LAUNCH(norm_rows<CHUNKS, NORM_ROWS, ADD>, (rows + NORM_ROWS - 1) / NORM_ROWS, THREADS,
            NORM_ROWS * WARPS * sizeof(float), stream, x, weight, epsilon, rows, width, out);
    else
        KERNEL_LAUNCH(norm_rows<CHUNKS, 1, ADD>, rows, THREADS, WARPS * sizeof(float), stream, x, weight, epsilon, rows,
            width, out);
}

template <bool ADD>
static void launch_norm(const float *x, const float *weight, float epsilon, uint32_t rows, uint32_t width, float *out,
    cudaStream_t stream) {
    if (rows == 0)
        return;
    if (width % 4 != 0 || width > 8 * 4 * THREADS)
        KERNEL_LAUNCH(norm_any<ADD>, rows, THREADS, WARPS * sizeof(float), stream, x, weight, epsilon, width, out);
    else if (width <= 4 * THREADS)
        launch_norm_rows<1, ADD>(x, weight, epsilon, rows, width, out, stream);
    else if (width <= 2 * 4 * THREADS)
        launch_norm_rows<2, ADD>(x, weight, epsilon, rows, width, out, stream);
    else if (width <= 4 * 4 * THREADS)
        launch_norm_rows<4, ADD>(x, weight, epsilon, rows, width, out, stream);
    else
        launch_norm_rows<8, ADD>(x, weight, epsilon, rows, width, out, stream);
}

void launch_rms_norm(const float *x, const float *weight, float epsilon, uint32_t rows, uint32_t width, float *out,
    cudaStream_t stream) {
    launch_norm<false>(x, weight, epsilon, rows, width, out, stream);
}

void launch_rms_norm_add(const float *x, const float *weight, float epsilon, uint32_t rows, uint32_t width, float *out,
    cudaStream_t stream) {
    launch_norm<true>(x, weight, epsilon, rows, width, out, stream);
}

/* ---- norms of heads ---- */

enum { HEADS_EACH = 8 }; /* heads of a warp, one after the other, so that it reads the weights once */

/* What a launch does: queries (blockIdx.y 0) and keys, each their own weights. */
struct head_norms_plan {
    const float *weights[2];
    uint32_t heads[2], first[2]; /* of each kind in a row, and where they begin */
    uint32_t rows, all;          /* heads of a row, values included */
    float epsilon;
};

/* Head number `at` of a kind, counted through all rows. */
static __device__ __forceinline__ float *head_at(
    const struct head_norms_plan &plan, uint32_t kind, uint32_t at, uint32_t dim, float *qkv) {
    uint32_t row = at / plan.heads[kind], head = plan.first[kind] + at % plan.heads[kind];
    return qkv + ((size_t)row * plan.all + head) * dim;
}

/* A head lies in registers, CHUNKS vectors of four a lane. dim is a multiple of 4, at most 128 CHUNKS. */
template <int CHUNKS>
static __global__ void __launch_bounds__(THREADS) norm_heads(struct head_norms_plan plan, uint32_t dim, float *qkv) {
    uint32_t kind = blockIdx.y, lane = threadIdx.x % 32, vectors = dim / 4;
    uint32_t first = (blockIdx.x * WARPS + threadIdx.x / 32) * HEADS_EACH, end = plan.rows * plan.heads[kind];
    if (first >= end)
        return;
    end = end - first < HEADS_EACH ? end : first + HEADS_EACH;
    float4 weights[CHUNKS];
#pragma unroll
    for (int c = 0; c < CHUNKS; c++) {
        uint32_t at = c * 32 + lane;
        weights[c] = at < vectors ? ((const float4 *)plan.weights[kind])[at] : make_float4(0, 0, 0, 0);
    }
#pragma unroll 2
    for (uint32_t head = first; head < end; head++) {
        float4 *to = (float4 *)head_at(plan, kind, head, dim, qkv), value[CHUNKS];
        float sum = 0;
#pragma unroll
        for (int c = 0; c < CHUNKS; c++) {
            uint32_t at = c * 32 + lane;
            value[c] = at < vectors ? to[at] : make_float4(0, 0, 0, 0);
            sum = vector_add_square(value[c], sum);
        }
        float factor = vector_norm_factor(warp_sum(sum), dim, plan.epsilon);
#pragma unroll
        for (int c = 0; c < CHUNKS; c++) {
            uint32_t at = c * 32 + lane;
            if (at < vectors)
                to[at] = vector_scaled(value[c], factor, weights[c]);
        }
    }
}

/* Any dim, a warp a head, which is read twice. */
static __global__ void __launch_bounds__(THREADS)
    norm_heads_any(struct head_norms_plan plan, uint32_t dim, float *qkv) {
    uint32_t kind = blockIdx.y, lane = threadIdx.x % 32, at = blockIdx.x * WARPS + threadIdx.x / 32;
    if (at >= plan.rows * plan.heads[kind])
        return;
    float *head = head_at(plan, kind, at, dim, qkv), sum = 0;
    for (uint32_t i = lane; i < dim; i += 32)
        sum = fmaf(head[i], head[i], sum);
    float factor = vector_norm_factor(warp_sum(sum), dim, plan.epsilon);
    for (uint32_t i = lane; i < dim; i += 32)
        head[i] = head[i] * factor * plan.weights[kind][i];
}

void launch_head_norms(const float *query_weight, const float *key_weight, float epsilon, uint32_t rows, uint32_t heads,
    uint32_t kv_heads, uint32_t dim, float *qkv, cudaStream_t stream) {
    struct head_norms_plan plan;
    bool by_fours = dim % 4 == 0 && dim <= 256;
    uint32_t most = heads > kv_heads ? heads : kv_heads, each = WARPS * (by_fours ? HEADS_EACH : 1);
    dim3 grid((uint32_t)(((uint64_t)rows * most + each - 1) / each), 2);
    if (rows == 0)
        return;
    plan.weights[0] = query_weight;
    plan.weights[1] = key_weight;
    plan.heads[0] = plan.first[1] = heads;
    plan.heads[1] = kv_heads;
    plan.first[0] = 0;
    plan.rows = rows;
    plan.all = heads + 2 * kv_heads;
    plan.epsilon = epsilon;
    if (!by_fours)
        KERNEL_LAUNCH(norm_heads_any, grid, THREADS, 0, stream, plan, dim, qkv);
    else if (dim <= 128)
        KERNEL_LAUNCH(norm_heads<1>, grid, THREADS, 0, stream, plan, dim, qkv);
    else
        KERNEL_LAUNCH(norm_heads<2>, grid, THREADS, 0, stream, plan, dim, qkv);
}

/* ---- biases, scales, soft caps ---- */

enum { BIAS_ROWS = 8 }; /* of a block, which reads its part of the bias once */

static __device__ __forceinline__ float plus(float a, float b) {
    return a + b;
}

static __device__ __forceinline__ float4 plus(float4 a, float4 b) {
    return vector_sum(a, b);
}

/* vector: float4 or float; steps: of them in a row. */
template <typename vector>
static __global__ void __launch_bounds__(THREADS)
    bias_rows(const float *bias, uint32_t rows, uint32_t steps, float *x) {
    uint32_t at = blockIdx.y * THREADS + threadIdx.x, first = blockIdx.x * BIAS_ROWS;
    if (at >= steps)
        return;
    vector own = ((const vector *)bias)[at];
    uint32_t count = rows - first < BIAS_ROWS ? rows - first : (uint32_t)BIAS_ROWS;
#pragma unroll 4
    for (uint32_t row = first; row < first + count; row++) {
        vector *to = (vector *)x + (size_t)row * steps + at;
        *to = plus(*to, own);
    }
}

void launch_add_bias(const float *bias, uint32_t rows, uint32_t width, float *x, cudaStream_t stream) {
    uint32_t steps = width % 4 == 0 ? width / 4 : width;
    dim3 grid((rows + BIAS_ROWS - 1) / BIAS_ROWS, (steps + THREADS - 1) / THREADS);
    if (rows == 0)
        return;
    if (width % 4 == 0)
        KERNEL_LAUNCH(bias_rows<float4>, grid, THREADS, 0, stream, bias, rows, steps, x);
    else
        KERNEL_LAUNCH(bias_rows<float>, grid, THREADS, 0, stream, bias, rows, steps, x);
}

struct by_factor {
    float factor;
    __device__ __forceinline__ float operator()(float x) const {
        return x * factor;
    }
};

struct by_cap {
    float cap, inverse;
    __device__ __forceinline__ float operator()(float x) const {
        return cap * tanhf(x * inverse);
    }
};

/* Each of count numbers, four a thread; the last up to three one a thread. */
template <typename function>
static __global__ void __launch_bounds__(THREADS) map_numbers(function apply, uint64_t count, float *x) {
    uint64_t at = (uint64_t)blockIdx.x * THREADS + threadIdx.x, vectors = count / 4;
    if (at < vectors) {
        float4 value = ((float4 *)x)[at];
        ((float4 *)x)[at] = make_float4(apply(value.x), apply(value.y), apply(value.z), apply(value.w));
    } else if (at < vectors + count % 4) {
        float *last = x + 3 * vectors + at;
        *last = apply(*last);
    }
}

template <typename function>
static void launch_map(function apply, uint32_t rows, uint32_t width, float *x, cudaStream_t stream) {
    uint64_t count = (uint64_t)rows * width, steps = count / 4 + count % 4;
    if (count > 0)
        KERNEL_LAUNCH(
            map_numbers<function>, (uint32_t)((steps + THREADS - 1) / THREADS), THREADS, 0, stream, apply, count, x);
}

void launch_scale(float factor, uint32_t rows, uint32_t width, float *x, cudaStream_t stream) {
    struct by_factor apply = {factor};
    launch_map(apply, rows, width, x, stream);
}

void launch_soft_cap(float cap, uint32_t rows, uint32_t width, float *x, cudaStream_t stream) {
    struct by_cap apply = {cap, 1 / cap};
    launch_map(apply, rows, width, x, stream);
}

/* ---- activation ---- */

struct silu {
    static __device__ __forceinline__ float times(float gate, float up) {
        return gate / (1 + expf(-gate)) * up;
    }
};

/* In its tanh form: (1 + tanh(y)) / 2 is 1 / (1 + exp(-2 y)), exact where it is small too. 0.79788456 is sqrt(2 / pi).
 */
struct gelu {
    static __device__ __forceinline__ float times(float gate, float up) {
        float inner = 0.7978845608028654f * fmaf(0.044715f * gate * gate, gate, gate);
        return gate / (1 + expf(-2 * inner)) * up;
    }
};

/* A block does a part of one row; four numbers a thread, or one. */
template <typename activation>
static __global__ void __launch_bounds__(THREADS) gate_vectors(const float *gate_up, uint32_t vectors, float *out) {
    uint32_t at = blockIdx.x * THREADS + threadIdx.x;
    if (at >= vectors)
        return;
    const float4 *row = (const float4 *)gate_up + (size_t)blockIdx.y * 2 * vectors;
    float4 gate = row[at], up = row[vectors + at];
    ((float4 *)out)[(size_t)blockIdx.y * vectors + at] = make_float4(activation::times(gate.x, up.x),
        activation::times(gate.y, up.y), activation::times(gate.z, up.z), activation::times(gate.w, up.w));
}

template <typename activation>
static __global__ void __launch_bounds__(THREADS) gate_any(const float *gate_up, uint32_t width, float *out) {
    uint32_t at = blockIdx.x * THREADS + threadIdx.x;
    if (at >= width)
        return;
    const float *row = gate_up + (size_t)blockIdx.y * 2 * width;
    out[(size_t)blockIdx.y * width + at] = activation::times(row[at], row[width + at]);
}

template <typename activation>
static void launch_gate(const float *gate_up, uint32_t rows, uint32_t width, float *out, cudaStream_t stream) {
    for (uint32_t done = 0, part; done < rows; done += part) {
        part = rows - done < 65535 ? rows - done : 65535; /* the most that a grid has in y */
        const float *from = gate_up + (size_t)done * 2 * width;
        float *to = out + (size_t)done * width;
        uint32_t steps = width % 4 == 0 ? width / 4 : width;
        dim3 grid((steps + THREADS - 1) / THREADS, part);
        if (width % 4 == 0)
            KERNEL_LAUNCH(gate_vectors<activation>, grid, THREADS, 0, stream, from, steps, to);
        else
            KERNEL_LAUNCH(gate_any<activation>, grid, THREADS, 0, stream, from, steps, to);
    }
}

void launch_silu_mul(const float *gate_up, uint32_t rows, uint32_t width, float *out, cudaStream_t stream) {
    launch_gate<silu>(gate_up, rows, width, out, stream);
}

void launch_gelu_mul(const float *gate_up, uint32_t rows, uint32_t width, float *out, cudaStream_t stream) {
    launch_gate<gelu>(gate_up, rows, width, out, stream);
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
