/* SPDX-License-Identifier: Apache-2.0 */
#include "cuda/device.h"

#include "cuda/exchange.h"
#include "cuda/vector.cuh"

enum { THREADS = VECTOR_THREADS, STEP_NANOSECONDS_MOST = 1000000, BLOCKS_MOST = 1024 };

/* What a block shares. */
struct exchange_space {
    float sums[VECTOR_WARPS];
    uint32_t met;
};

/* An exchange that is under way. */
struct exchange_now {
    struct exchange exchange;
    float *slots; /* [ranks][EXCHANGE_FLOATS] of its set */
    uint32_t epoch;
};

/* The rank's next exchange, or from its meeting on the one that has met. */
static __device__ __forceinline__ struct exchange_now find_now(const struct exchange &exchange, bool met) {
    struct exchange_now now = {exchange, NULL, *exchange.done + (met ? 0 : 1)};
    now.slots = exchange.slots + (size_t)(now.epoch % EXCHANGE_SETS) * exchange.ranks * EXCHANGE_FLOATS;
    return now;
}

/* Numbers that another device has just written: not from a cache. */
static __device__ __forceinline__ float4 load_fresh(const float4 *from) {
#ifdef __CUDACC__
    return __ldcv(from);
#else
    return *from;
#endif
}

static __device__ __forceinline__ float load_fresh(const float *from) {
    return *(const volatile float *)from;
}

static __device__ __forceinline__ float *slot_of(const struct exchange_now &now, uint32_t rank) {
    return now.slots + (size_t)rank * EXCHANGE_FLOATS;
}

static __device__ __forceinline__ bool is_stopped(const struct exchange &exchange) {
    return *(const volatile uint32_t *)exchange.stop != EXCHANGE_GOES_ON;
}

/* ---- meeting ---- */

/* Until the rank has come. A process that was stopped meanwhile has not waited: a step of the clock counts a
 * millisecond at most. */
static __device__ bool await_rank(const struct exchange &exchange, uint32_t rank, uint32_t epoch) {
    const volatile uint32_t *flag = exchange.flags + rank * EXCHANGE_LINE;
    uint64_t last = device_nanoseconds(), waited = 0;
    while ((int32_t)(*flag - epoch) < 0) {
        if (is_stopped(exchange))
            return false;
        device_pause();
        uint64_t now = device_nanoseconds(), step = now - last;
        waited += step < STEP_NANOSECONDS_MOST ? step : (uint64_t)STEP_NANOSECONDS_MOST;
        last = now;
        if (waited > exchange.patience) {
            *(volatile uint32_t *)exchange.stop = EXCHANGE_LATE;
            return false;
        }
    }
    return true;
}

/* All threads of one block; what they, and launches before, have written is there for whoever sees the flag. False: a
 * rank did not come. */
static __device__ bool meet(const struct exchange_now &now, struct exchange_space *space) {
    const struct exchange &exchange = now.exchange;
    __threadfence_system();
    __syncthreads();
    if (threadIdx.x == 0) {
        bool met = !is_stopped(exchange);
        *(volatile uint32_t *)(exchange.flags + exchange.rank * EXCHANGE_LINE) = now.epoch;
        for (uint32_t rank = 0; rank < exchange.ranks && met; rank++)
            met = await_rank(exchange, rank, now.epoch);
        __threadfence_system();
        *exchange.done = now.epoch;
        space->met = met;
    }
    __syncthreads();
    return space->met != 0;
}

static __global__ void __launch_bounds__(32) exchange_meet(const struct exchange exchange) {
    KERNEL_SHARED(struct exchange_space, space);
    meet(find_now(exchange, false), space);
}

/* ---- sums ---- */

/* What a rank brings to place i of a row: the own part does not come through the host. */
template <typename number>
static __device__ __forceinline__ number load_part(
    const struct exchange_now &now, uint32_t rank, size_t offset, const number *own, uint32_t i) {
    return rank == now.exchange.rank ? own[i] : load_fresh((const number *)(slot_of(now, rank) + offset) + i);
}

/* The row at `offset` of the slots, by one block. */
static __device__ void add_row(const struct exchange_now &now, size_t offset, uint32_t width, float *x,
    const float *weight, float epsilon, float *normed, float *sums) {
    float squares = 0;
    if (!vector_by_fours(width)) {
        for (uint32_t i = threadIdx.x; i < width; i += THREADS) {
            float sum = load_part(now, 0, offset, x, i);
            for (uint32_t rank = 1; rank < now.exchange.ranks; rank++)
                sum += load_part(now, rank, offset, x, i);
            x[i] = sum;
            squares = fmaf(sum, sum, squares);
        }
        if (weight == NULL)
            return;
        float factor = vector_norm_factor(vector_block_sum(squares, sums), width, epsilon);
        for (uint32_t i = threadIdx.x; i < width; i += THREADS)
            normed[i] = x[i] * factor * weight[i];
        return;
    }
    for (uint32_t i = threadIdx.x; i < width / 4; i += THREADS) {
        float4 sum = load_part(now, 0, offset, (const float4 *)x, i);
        for (uint32_t rank = 1; rank < now.exchange.ranks; rank++) {
            float4 more = load_part(now, rank, offset, (const float4 *)x, i);
            sum = make_float4(sum.x + more.x, sum.y + more.y, sum.z + more.z, sum.w + more.w);
        }
        ((float4 *)x)[i] = sum;
        squares = vector_add_square(sum, squares);
    }
    if (weight == NULL)
        return;
    float factor = vector_norm_factor(vector_block_sum(squares, sums), width, epsilon);
    for (uint32_t i = threadIdx.x; i < width / 4; i += THREADS)
        ((float4 *)normed)[i] = vector_scaled(((const float4 *)x)[i], factor, ((const float4 *)weight)[i]);
}

/* Copies part of [count], by all blocks. */
static __device__ __forceinline__ void publish(const struct exchange_now &now, const float *from, size_t count) {
    float *to = slot_of(now, now.exchange.rank);
    size_t first = (size_t)blockIdx.x * THREADS + threadIdx.x, step = (size_t)gridDim.x * THREADS;
    for (size_t i = first; i < count / 4; i += step)
        ((float4 *)to)[i] = ((const float4 *)from)[i];
    for (size_t i = count / 4 * 4 + first; i < count; i += step)
        to[i] = from[i];
}

/* Everything in one launch, by one block. */
static __global__ void __launch_bounds__(THREADS) exchange_sum_alone(const struct exchange exchange, float *x,
    uint32_t rows, uint32_t width, const float *weight, float epsilon, float *normed) {
    KERNEL_SHARED(struct exchange_space, space);
    const struct exchange_now now = find_now(exchange, false);
    publish(now, x, (size_t)rows * width);
    if (!meet(now, space))
        return;
    for (uint32_t row = 0; row < rows; row++) {
        size_t offset = (size_t)row * width;
        add_row(now, offset, width, x + offset, weight, epsilon, weight != NULL ? normed + offset : NULL, space->sums);
        __syncthreads(); /* before the next row's sums */
    }
}

static __global__ void __launch_bounds__(THREADS)
    exchange_publish(const struct exchange exchange, const float *from, size_t count) {
    publish(find_now(exchange, false), from, count);
}

static __global__ void __launch_bounds__(THREADS) exchange_sum_rows(
    const struct exchange exchange, float *x, uint32_t width, const float *weight, float epsilon, float *normed) {
    KERNEL_SHARED(struct exchange_space, space);
    size_t offset = (size_t)blockIdx.x * width;
    if (is_stopped(exchange))
        return;
    add_row(find_now(exchange, true), offset, width, x + offset, weight, epsilon,
        weight != NULL ? normed + offset : NULL, space->sums);
}

static uint32_t blocks_for(size_t numbers) {
    size_t blocks = (numbers / 4 + THREADS - 1) / THREADS;
    return blocks < 1 ? 1 : blocks < BLOCKS_MOST ? (uint32_t)blocks : (uint32_t)BLOCKS_MOST;
}

/* A launch for each step: blocks that wait for blocks of another device would all have to be there at once. */
static void launch_meeting(const struct exchange *exchange, const float *from, size_t count, cudaStream_t stream) {
    KERNEL_LAUNCH(exchange_publish, blocks_for(count), THREADS, 0, stream, *exchange, from, count);
    KERNEL_LAUNCH(exchange_meet, 1, 32, sizeof(struct exchange_space), stream, *exchange);
}

extern "C" void launch_exchange_sum(const struct exchange *exchange, float *x, uint32_t rows, uint32_t width,
    const float *weight, float epsilon, float *normed, cudaStream_t stream) {
    size_t shared = sizeof(struct exchange_space);
    if (rows <= EXCHANGE_ALONE_ROWS) {
        KERNEL_LAUNCH(
            exchange_sum_alone, 1, THREADS, shared, stream, *exchange, x, rows, width, weight, epsilon, normed);
        return;
    }
    launch_meeting(exchange, x, (size_t)rows * width, stream);
    KERNEL_LAUNCH(exchange_sum_rows, rows, THREADS, shared, stream, *exchange, x, width, weight, epsilon, normed);
}

/* ---- gathering ---- */

/* A block has part of a row of a rank. */
static __global__ void __launch_bounds__(THREADS) exchange_collect(
    const struct exchange exchange, const float *own, const struct exchange_columns columns, float *out) {
    uint32_t rank = blockIdx.z, first = columns.first[rank], width = columns.first[rank + 1] - first;
    uint32_t i = blockIdx.x * THREADS + threadIdx.x;
    if (i >= width || is_stopped(exchange))
        return;
    size_t at = (size_t)blockIdx.y * width + i;
    out[(size_t)blockIdx.y * columns.first[exchange.ranks] + first + i] =
        rank == exchange.rank ? own[at] : load_fresh(slot_of(find_now(exchange, true), rank) + at);
}

extern "C" void launch_exchange_gather(const struct exchange *exchange, const float *part, uint32_t rows,
    const struct exchange_columns *columns, float *out, cudaStream_t stream) {
    uint32_t widest = 0;
    for (uint32_t rank = 0; rank < exchange->ranks; rank++) {
        uint32_t width = columns->first[rank + 1] - columns->first[rank];
        widest = width > widest ? width : widest;
    }
    uint32_t own = columns->first[exchange->rank + 1] - columns->first[exchange->rank];
    launch_meeting(exchange, part, exchange->rank == 0 ? 0 : (size_t)rows * own, stream);
    if (exchange->rank == 0)
        KERNEL_LAUNCH(exchange_collect, dim3((widest + THREADS - 1) / THREADS, rows, exchange->ranks), THREADS, 0,
            stream, *exchange, part, *columns, out);
}
