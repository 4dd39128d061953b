/* SPDX-License-Identifier: Apache-2.0
 *
 * One row of logits and one block of threads: reductions over the row, and visits of its logits. For .cu files; include
 * cuda/device.h first.
 *
 * Weights are e^((logit - maximum) * scale), as the CPU has them, in units of 2^-45: sums of integers do not depend on
 * their order, and a vocabulary of 2^18 tokens cannot overflow them.
 *
 * Every function here is called by all threads of the block, and gives all of them the same result. They end with a
 * barrier or begin with one, so that shared memory may be used again right away.
 */
#ifndef CUDA_ROW_CUH
#define CUDA_ROW_CUH

#include "cuda/numbers.cuh"
#include "cuda/sample.h"
#include "cuda/warp.cuh"

#include <float.h>
#include <math.h>

typedef unsigned long long wide; /* what the atomics of 64 bits take */

enum { ROW_THREADS = 1024, ROW_WARPS = ROW_THREADS / 32, ROW_BINS = 2048, ROW_LIST = 1024, BINS_PER_NAT = 64 };

struct row_shared {
    wide masses[ROW_BINS];
    wide list[ROW_LIST];
    wide warps[ROW_WARPS];
    wide found[3];
    uint32_t counts[ROW_BINS];
    uint32_t listed, lowest, highest;
};

/* Logits of a row that take part: those >= lowest, once they are changed, that are not banned; NaN never does. */
struct row {
    const float *logits;
    const uint32_t *marks; /* these three as struct sample_row has them */
    const struct logit_change *changes;
    uint32_t changes_count;
    uint32_t vocabulary;
    float lowest;
    float maximum, scale; /* of weights */
    struct row_shared *shared;
};

/* ---- over the block ---- */

static __device__ wide block_sum(struct row_shared *shared, wide x) {
    x = warp_sum(x);
    __syncthreads();
    if (threadIdx.x % 32 == 0)
        shared->warps[threadIdx.x / 32] = x;
    __syncthreads();
    return warp_sum(shared->warps[threadIdx.x % 32]);
}

static __device__ wide block_maximum(struct row_shared *shared, wide x) {
    x = warp_most(x);
    __syncthreads();
    if (threadIdx.x % 32 == 0)
        shared->warps[threadIdx.x / 32] = x;
    __syncthreads();
    return warp_most(shared->warps[threadIdx.x % 32]);
}

/* ---- one logit ---- */

/* Ascends with x; x is not NaN. -0 is 0. */
static __device__ __forceinline__ uint32_t key_of(float x) {
    uint32_t bits = __float_as_uint(x + 0.0f);
    return (bits & 0x80000000u) != 0 ? ~bits : bits | 0x80000000u;
}

static __device__ __forceinline__ float key_value(uint32_t key) {
    return __uint_as_float((key & 0x80000000u) != 0 ? key & 0x7fffffffu : ~key);
}

/* Larger for a higher rank: a larger logit, or the same and a lower id. Never 0. */
static __device__ __forceinline__ wide rank_of(float x, uint32_t id) {
    return (wide)key_of(x) << 32 | (0xffffffffu - id);
}

static __device__ __forceinline__ uint32_t rank_id(wide rank) {
    return 0xffffffffu - (uint32_t)rank;
}

static __device__ __forceinline__ wide weight_of(const struct row &row, float x) {
    return (wide)(number_exp((x - row.maximum) * row.scale) * 0x1p45f);
}

/* 0 for the largest logit; ascends as they descend. */
static __device__ __forceinline__ uint32_t bin_of(const struct row &row, float x) {
    float below = row.maximum - x;
    below = below > 0 ? below * row.scale * BINS_PER_NAT : 0;
    return below < ROW_BINS - 1 ? (uint32_t)below : ROW_BINS - 1;
}

/* ---- over the row ---- */

/* What the logit of a marked token becomes: -infinity if it is banned. Rounded as the CPU does it. */
static __device__ float row_change(const struct row &row, uint32_t id, float x) {
    uint32_t low = 0, high = row.changes_count;
    while (low < high) {
        uint32_t middle = low + (high - low) / 2;
        if ((uint32_t)row.changes[middle].token < id)
            low = middle + 1;
        else
            high = middle;
    }
    if (low == row.changes_count || (uint32_t)row.changes[low].token != id)
        return -INFINITY;
    struct logit_change change = row.changes[low];
    return __fadd_rn(__fmul_rn(x, x > 0 ? change.positive : change.negative), change.add);
}

template <typename function>
static __device__ __forceinline__ void row_visit(const struct row &row, uint32_t id, float x, function &visit) {
    if (row.marks != NULL && (row.marks[id / 32] >> id % 32 & 1) != 0)
        x = row_change(row, id, x);
    if (x >= row.lowest)
        visit(id, x > FLT_MAX ? FLT_MAX : x);
}

/* visit(id, logit) for ids [first, end) that take part, by threads `thread` of `threads`, neighbours side by side; a
 * thread's own ids ascend. first is a multiple of 4. */
template <typename function>
static __device__ __forceinline__ void row_each(
    const struct row &row, uint32_t first, uint32_t end, uint32_t thread, uint32_t threads, function visit) {
    if (row.vocabulary % 4 != 0) {
        for (uint32_t id = first + thread; id < end; id += threads)
            row_visit(row, id, row.logits[id], visit);
        return;
    }
#pragma unroll 2
    for (uint32_t id = first + 4 * thread; id < end; id += 4 * threads) {
        float4 x = *(const float4 *)(row.logits + id);
        row_visit(row, id, x.x, visit);
        if (id + 1 < end)
            row_visit(row, id + 1, x.y, visit);
        if (id + 2 < end)
            row_visit(row, id + 2, x.z, visit);
        if (id + 3 < end)
            row_visit(row, id + 3, x.w, visit);
    }
}

template <typename function> static __device__ __forceinline__ void row_all(const struct row &row, function visit) {
    row_each(row, 0, row.vocabulary, threadIdx.x, ROW_THREADS, visit);
}

/* The highest rank; 0 when no logit takes part. */
static __device__ wide row_best(const struct row &row) {
    wide best = 0;
    row_all(row, [&](uint32_t id, float x) {
        wide rank = rank_of(x, id);
        best = rank > best ? rank : best;
    });
    return block_maximum(row.shared, best);
}

/* ln of the sum of e^logit; sets the row's maximum and scale 1. -infinity when there is none. */
static __device__ double row_log_sum(struct row &row) {
    wide best = row_best(row), sum = 0;
    row.maximum = best == 0 ? -INFINITY : key_value((uint32_t)(best >> 32));
    row.scale = 1;
    if (row.maximum == -INFINITY)
        return -INFINITY;
    row_all(row, [&](uint32_t, float x) { sum += weight_of(row, x); });
    return (double)row.maximum + log((double)block_sum(row.shared, sum) * 0x1p-45);
}

#endif
