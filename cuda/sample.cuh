/* SPDX-License-Identifier: Apache-2.0
 *
 * Prefixes of the ranks of a row's logits: which one reaches a number of tokens or a mass. Nothing is sorted but the
 * few logits near the prefix's end: logits are counted by their distance from the largest, the bin is found in which
 * the prefix ends, and its logits are ranked (or, if they are many, counted anew in ever shorter ranges of their bits).
 * For .cu files; include cuda/device.h first.
 */
#ifndef CUDA_SAMPLE_CUH
#define CUDA_SAMPLE_CUH

#include "cuda/row.cuh"

static __device__ __forceinline__ wide warp_scan(wide x) {
    for (int offset = 1; offset < 32; offset *= 2) {
        wide other = __shfl_up_sync(0xffffffffu, x, offset);
        x += (int)(threadIdx.x % 32) >= offset ? other : 0;
    }
    return x;
}

/* The sum of x over the threads before this one. */
static __device__ wide block_scan(struct row_shared *shared, wide x) {
    uint32_t lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    wide inclusive = warp_scan(x);
    __syncthreads();
    if (lane == 31)
        shared->warps[warp] = inclusive;
    __syncthreads();
    wide warps = warp_scan(shared->warps[lane]);
    wide before = __shfl_sync(0xffffffffu, warps, warp == 0 ? 0 : (int)warp - 1);
    return inclusive - x + (warp == 0 ? 0 : before);
}

enum measure { MEASURE_COUNT, MEASURE_MASS };

/* Logits whose key is above, and those of this key with an id below tie_end. */
struct cut {
    uint32_t key, tie_end;
};

static __device__ __forceinline__ bool cut_has(const struct cut &cut, uint32_t id, float x) {
    uint32_t key = key_of(x);
    return key > cut.key || (key == cut.key && id < cut.tie_end);
}

static __device__ __forceinline__ struct cut cut_shorter(struct cut a, struct cut b) {
    if (a.key != b.key)
        return a.key > b.key ? a : b;
    return a.tie_end < b.tie_end ? a : b;
}

static __device__ __forceinline__ wide measured(const struct row &row, enum measure measure, float x) {
    return measure == MEASURE_MASS ? weight_of(row, x) : 1;
}

static __device__ wide cut_mass(const struct row &row, struct cut cut) {
    wide sum = 0;
    row_all(row, [&](uint32_t id, float x) { sum += cut_has(cut, id, x) ? weight_of(row, x) : 0; });
    return block_sum(row.shared, sum);
}

/* In order of id: the first token at which the sum of measure(id, logit) exceeds the limit, which is part * whole sum +
 * fixed; the vocabulary's size when none does. First every warp sums a stretch, then every thread a piece of the
 * stretch in which the token is. */
template <typename function>
static __device__ uint32_t row_walk(const struct row &row, double part, double fixed, function measure) {
    struct row_shared *shared = row.shared;
    uint32_t warp = threadIdx.x / 32, stretch = (row.vocabulary + ROW_WARPS * 128 - 1) / (ROW_WARPS * 128) * 128;
    uint32_t first = warp * stretch, end = first + stretch < row.vocabulary ? first + stretch : row.vocabulary;
    wide sum = 0;
    auto add = [&](uint32_t id, float x) { sum += measure(id, x); };
    row_each(row, first, end, threadIdx.x % 32, 32, add);
    sum = warp_sum(sum);
    __syncthreads();
    if (threadIdx.x % 32 == 0)
        shared->warps[warp] = sum;
    if (threadIdx.x == 0)
        shared->listed = row.vocabulary;
    __syncthreads();
    wide through = warp_scan(shared->warps[threadIdx.x % 32]), whole = __shfl_sync(0xffffffffu, through, 31);
    double limit = part * (double)whole + fixed;
    uint32_t over = __ballot_sync(0xffffffffu, (double)through > limit);
    if (over == 0)
        return row.vocabulary;
    uint32_t chosen = (uint32_t)__ffs((int)over) - 1;
    wide before = __shfl_sync(0xffffffffu, through, chosen == 0 ? 0 : (int)chosen - 1);
    before = chosen == 0 ? 0 : before;
    uint32_t each = (stretch + ROW_THREADS - 1) / ROW_THREADS;
    end = (chosen + 1) * stretch < row.vocabulary ? (chosen + 1) * stretch : row.vocabulary;
    first = chosen * stretch + threadIdx.x * each;
    end = first + each < end ? first + each : end;
    sum = 0;
    for (uint32_t id = first; id < end; id++)
        row_visit(row, id, row.logits[id], add);
    wide until = before + block_scan(shared, sum);
    if ((double)until <= limit && (double)(until + sum) > limit) { /* of one thread only */
        sum = until;
        uint32_t id = first;
        for (; id < end; id++) {
            row_visit(row, id, row.logits[id], add);
            if ((double)sum > limit)
                break;
        }
        shared->listed = id;
    }
    __syncthreads();
    return shared->listed;
}

/* Which bin of shared->counts and masses, in ascending order, takes the measure to the goal. */
struct crossing {
    bool found;
    uint32_t bin, count; /* of the bin */
    wide above;          /* measure before it */
};

static __device__ struct crossing find_crossing(
    struct row_shared *shared, enum measure measure, wide above, double goal) {
    wide own[2];
    for (int i = 0; i < 2; i++) {
        uint32_t bin = 2 * threadIdx.x + i;
        own[i] = measure == MEASURE_MASS ? shared->masses[bin] : shared->counts[bin];
    }
    wide before = above + block_scan(shared, own[0] + own[1]);
    if (threadIdx.x == 0)
        shared->found[0] = ROW_BINS;
    __syncthreads();
    for (int i = 0; i < 2; before += own[i++]) {
        if ((double)before >= goal || (double)(before + own[i]) < goal)
            continue;
        shared->found[0] = 2 * threadIdx.x + i;
        shared->found[1] = shared->counts[2 * threadIdx.x + i];
        shared->found[2] = before;
    }
    __syncthreads();
    struct crossing crossing = {shared->found[0] < ROW_BINS, (uint32_t)shared->found[0], 0, 0};
    if (crossing.found) {
        crossing.count = (uint32_t)shared->found[1];
        crossing.above = shared->found[2];
    }
    __syncthreads();
    return crossing;
}

/* Counts and sums the logits for which bin(x) is below ROW_BINS. */
template <typename function>
static __device__ void fill_bins(const struct row &row, enum measure measure, function bin) {
    struct row_shared *shared = row.shared;
    __syncthreads();
    for (uint32_t i = threadIdx.x; i < ROW_BINS; i += ROW_THREADS) {
        shared->counts[i] = 0;
        shared->masses[i] = 0;
    }
    __syncthreads();
    row_all(row, [&](uint32_t, float x) {
        uint32_t i = bin(x);
        if (i >= ROW_BINS)
            return;
        atomicAdd(&shared->counts[i], 1u);
        if (measure == MEASURE_MASS)
            atomicAdd(&shared->masses[i], weight_of(row, x));
    });
    __syncthreads();
}

/* Descending; count <= ROW_LIST entries of shared->list. Batcher's bitonic network. */
static __device__ void sort_list(struct row_shared *shared, uint32_t count) {
    uint32_t size = 2;
    while (size < count)
        size *= 2;
    if (threadIdx.x >= count && threadIdx.x < size)
        shared->list[threadIdx.x] = 0;
    __syncthreads();
    for (uint32_t run = 2; run <= size; run *= 2)
        for (uint32_t distance = run / 2; distance > 0; distance /= 2) {
            uint32_t i = threadIdx.x, other = i ^ distance;
            if (i < size && other > i) {
                wide a = shared->list[i], b = shared->list[other];
                bool descending = (i & run) == 0;
                if (descending ? a < b : a > b) {
                    shared->list[i] = b;
                    shared->list[other] = a;
                }
            }
            __syncthreads();
        }
}

/* Lists the logits for which in(id, x), at most ROW_LIST, by descending rank. Returns their number. */
template <typename function> static __device__ uint32_t list_ranks(const struct row &row, function in) {
    struct row_shared *shared = row.shared;
    __syncthreads();
    if (threadIdx.x == 0)
        shared->listed = 0;
    __syncthreads();
    row_all(row, [&](uint32_t id, float x) {
        if (!in(id, x))
            return;
        uint32_t place = atomicAdd(&shared->listed, 1u);
        if (place < ROW_LIST)
            shared->list[place] = rank_of(x, id);
    });
    __syncthreads();
    uint32_t count = shared->listed < ROW_LIST ? shared->listed : (uint32_t)ROW_LIST;
    sort_list(shared, count);
    return count;
}

/* The first of `count` listed ranks with which the measure reaches the goal; the last one when none does. */
static __device__ struct cut cut_listed(
    const struct row &row, enum measure measure, wide above, double goal, uint32_t count) {
    struct row_shared *shared = row.shared;
    bool mine = threadIdx.x < count;
    wide rank = mine ? shared->list[threadIdx.x] : 0;
    wide own = mine ? measured(row, measure, key_value((uint32_t)(rank >> 32))) : 0;
    wide before = above + block_scan(shared, own);
    if (threadIdx.x == 0)
        shared->found[0] = shared->list[count - 1];
    __syncthreads();
    bool first = threadIdx.x == 0 || (double)before < goal;
    if (mine && first && (double)(before + own) >= goal)
        shared->found[0] = rank;
    __syncthreads();
    rank = shared->found[0];
    __syncthreads();
    return {(uint32_t)(rank >> 32), rank_id(rank) + 1};
}

/* All the logits left are equal: as many of them, in order of id, as reach the goal. */
static __device__ struct cut cut_ties(
    const struct row &row, enum measure measure, wide above, double goal, uint32_t key) {
    wide each = measured(row, measure, key_value(key));
    double missing = ceil((goal - (double)above) / (double)each);
    wide count = missing < 1 ? 1 : missing < (double)row.vocabulary ? (wide)missing : row.vocabulary;
    while (count > 1 && (double)(above + (count - 1) * each) >= goal)
        count--;
    while (count < row.vocabulary && (double)(above + count * each) < goal)
        count++;
    uint32_t id = row_walk(row, 0, (double)(count - 1), [&](uint32_t, float x) { return (wide)(key_of(x) == key); });
    return {key, id < row.vocabulary ? id + 1 : row.vocabulary};
}

/* Where a bin holds more than can be listed: keys of ever shorter ranges. */
static __device__ struct cut cut_narrow(
    const struct row &row, enum measure measure, wide above, double goal, uint32_t bin) {
    wide lowest = 0, highest = 0;
    row_all(row, [&](uint32_t, float x) {
        wide key = key_of(x);
        if (bin_of(row, x) != bin)
            return;
        highest = key > highest ? key : highest;
        lowest = 0xffffffffu - key > lowest ? 0xffffffffu - key : lowest;
    });
    uint32_t high = (uint32_t)block_maximum(row.shared, highest);
    uint32_t low = 0xffffffffu - (uint32_t)block_maximum(row.shared, lowest);
    while (low < high) {
        uint32_t bits = 32 - (uint32_t)__clz((int)(high - low)), shift = bits > 11 ? bits - 11 : 0;
        fill_bins(row, measure, [&](float x) {
            uint32_t key = key_of(x);
            return key >= low && key <= high ? (high - key) >> shift : (uint32_t)ROW_BINS;
        });
        struct crossing crossing = find_crossing(row.shared, measure, above, goal);
        if (!crossing.found)
            break;
        above = crossing.above;
        high -= crossing.bin << shift;
        low = high - low < 1u << shift ? low : high - (1u << shift) + 1;
        if (crossing.count > ROW_LIST)
            continue;
        uint32_t count = list_ranks(row, [&](uint32_t, float x) { return key_of(x) >= low && key_of(x) <= high; });
        return cut_listed(row, measure, above, goal, count);
    }
    return cut_ties(row, measure, above, goal, low);
}

static __device__ __forceinline__ struct cut cut_everything(const struct row &row) {
    return {key_of(row.lowest), row.vocabulary};
}

/* The shortest prefix whose measure reaches goal; everything when none does. */
static __device__ struct cut cut_find(const struct row &row, enum measure measure, double goal) {
    fill_bins(row, measure, [&](float x) { return bin_of(row, x); });
    struct crossing crossing = find_crossing(row.shared, measure, 0, goal);
    if (!crossing.found)
        return cut_everything(row);
    if (crossing.count > ROW_LIST)
        return cut_narrow(row, measure, crossing.above, goal, crossing.bin);
    uint32_t count = list_ranks(row, [&](uint32_t, float x) { return bin_of(row, x) == crossing.bin; });
    return cut_listed(row, measure, crossing.above, goal, count);
}

#endif
