/* SPDX-License-Identifier: Apache-2.0
 *
 * Stages that look at a slot alone: a warp takes 32 neighbouring slots, so that every array is read in whole sectors.
 */
#include "cuda/score_device.h"
#include "cuda/sums.cuh"

enum {
    CHAIN_THREADS = 128,
    CHAIN_STEPS = SCORE_SLOTS_CHUNK / CHAIN_THREADS,
    WORST_THREADS = 256,
    SHARES_THREADS = 1024,
    SHARES_HELD = SCORE_HELD / SHARES_THREADS,
    ABOVE_WORDS = STATISTIC_ABOVE_BITS / 64,
};

static_assert(STATISTIC_ABOVE_BITS == 512, "a slot's bits are read by four lanes, 16 bytes each");

/* ---- scores of their own ---- */

/* A sum below 2^53 times 2^-24, rounded once. */
SCORE_INLINE float wide_sum(uint64_t sum) {
    return (float)((double)sum * 0x1p-24);
}

/* Philox 4x32-10 (engine/philox.h): the first word of (seed, stream, step), as a number in (0, 1). */
SCORE_INLINE float uniform(uint64_t seed, uint32_t stream, uint32_t step) {
    uint32_t key0 = (uint32_t)seed, key1 = (uint32_t)(seed >> 32), c0 = 0, c1 = 0, c2 = step, c3 = stream;
    for (int round = 0; round < 10; round++) {
        uint64_t product0 = (uint64_t)0xD2511F53u * c0, product1 = (uint64_t)0xCD9E8D57u * c2;
        c0 = (uint32_t)(product1 >> 32) ^ c1 ^ key0;
        c1 = (uint32_t)product1;
        c2 = (uint32_t)(product0 >> 32) ^ c3 ^ key1;
        c3 = (uint32_t)product0;
        key0 += 0x9E3779B9u;
        key1 += 0xBB67AE85u;
    }
    return ((float)(int32_t)(c0 >> 9) + 0.5f) * 0x1p-23f;
}

/* Bits of the history that are set, of the warp's slots from `first` on: four lanes read a slot's 64 bytes. */
SCORE_INLINE float count_above(const uint64_t *above, uint32_t first, uint32_t slots) {
    uint32_t lane = threadIdx.x % WARP, count = 0;
#pragma unroll
    for (uint32_t step = 0; step < 4; step++) {
        uint32_t slot = first + step * 8 + lane / 4, bits = 0;
        if (slot < slots) {
            uint4 part = ((const uint4 *)(above + (size_t)slot * ABOVE_WORDS))[lane % 4];
            bits = (uint32_t)(__popc(part.x) + __popc(part.y) + __popc(part.z) + __popc(part.w));
        }
        bits += __shfl_xor_sync(0xffffffffu, bits, 1);
        bits += __shfl_xor_sync(0xffffffffu, bits, 2);
        uint32_t own = __shfl_sync(0xffffffffu, bits, (int)(lane % 8 * 4));
        count = lane / 8 == step ? own : count;
    }
    return (float)count;
}

/* 256 queries that gave a slot everything add up to 2^32, which a sum holds as 0. */
SCORE_INLINE bool window_is_full(const struct kv_statistics *statistics, uint32_t sum, uint32_t slot) {
    return sum == 0 && (uint64_t)statistics->window << STATISTIC_FRACTION_BITS > 0xffffffffu &&
           statistics->window_rows[slot] != 0;
}

SCORE_INLINE float window_sum(const struct kv_statistics *statistics, uint32_t slot) {
    uint32_t sum = statistics->window_sum[slot];
    return window_is_full(statistics, sum, slot) ? (float)statistics->window : (float)sum * 0x1p-24f;
}

/* Mean + gamma times the population variance over the rows of the window. */
SCORE_INLINE float window_spread(const struct cuda_score_unit *unit, uint32_t slot, float gamma) {
    const struct kv_statistics *statistics = &unit->statistics;
    uint32_t sum = statistics->window_sum[slot];
    if (window_is_full(statistics, sum, slot))
        return 1;
    float part = 1 / (float)unit->rows, mean = (float)sum * 0x1p-24f * part, squares = 0;
#pragma unroll 8
    for (uint32_t row = 0; row < unit->rows; row++) {
        float off = half_number(statistics->window_rows[(size_t)row * statistics->capacity + slot]) - mean;
        squares = fmaf(off, off, squares);
    }
    return fmaf(gamma, squares * part, mean);
}

/* ---- a run of stages ---- */

SCORE_INLINE float protect(const struct cuda_score_unit *unit, int32_t position, float score) {
    return position < (int32_t)unit->sinks || position >= (int32_t)unit->recent_from ? infinity() : score;
}

SCORE_INLINE float weighed(float score, float offset, float norm) {
    return score == infinity() ? score : (score + offset) * norm;
}

/* What a thread has of its slots, one every blockDim.x. Slots that there are not have the last one's numbers. */
struct chain_slots {
    uint32_t slot[CHAIN_STEPS];
    int32_t position[CHAIN_STEPS];
    float score[CHAIN_STEPS];
};

/* Step i of all: so that all loads of a stage are on their way together. */
#define CHAIN_ALL(expression)                                                                                          \
    _Pragma("unroll") for (uint32_t i = 0; i < CHAIN_STEPS; i++) at->score[i] = (expression);                          \
    break

SCORE_INLINE void chain_stage(
    const struct cuda_score_unit *unit, struct score_stage stage, uint32_t first, struct chain_slots *at) {
    const struct kv_statistics *statistics = &unit->statistics;
    switch (stage.kind) {
    case STAGE_POSITION:
        CHAIN_ALL((float)at->position[i]);
    case STAGE_RANDOM:
        CHAIN_ALL(uniform(unit->seed, unit->number, (uint32_t)at->position[i]));
    case STAGE_SUM:
        CHAIN_ALL(wide_sum(sum_get(statistics->sum, statistics->capacity, at->slot[i])));
    case STAGE_SUM_PER_QUERY:
        CHAIN_ALL((float)((double)sum_get(statistics->sum, statistics->capacity, at->slot[i]) * 0x1p-24 /
                          ((double)unit->seen - (double)at->position[i])));
    case STAGE_ABOVE:
        CHAIN_ALL(count_above(statistics->above, first + i * blockDim.x, unit->view.slots));
    case STAGE_WINDOW_SUM:
        CHAIN_ALL(window_sum(statistics, at->slot[i]));
    case STAGE_WINDOW_SPREAD:
        CHAIN_ALL(window_spread(unit, at->slot[i], stage.x));
    case STAGE_NOISY:
        CHAIN_ALL(wide_sum(sum_get(statistics->noisy, statistics->capacity, at->slot[i])));
    case STAGE_TIMES_OUTPUT_NORM:
        CHAIN_ALL(weighed(at->score[i], stage.x, statistics->output_norm[at->slot[i]]));
    case STAGE_PROTECT:
        CHAIN_ALL(protect(unit, at->position[i], at->score[i]));
    default:
        break;
    }
}

/* Whether a stage needs the scores that were there before it. */
SCORE_INLINE bool changes_scores(enum score_stage_kind kind) {
    return kind == STAGE_PROTECT || kind == STAGE_TIMES_OUTPUT_NORM || kind == STAGE_KIND_COUNT;
}

/* Scores of the slots that are there; NaN where a slot is empty. */
SCORE_INLINE void chain_run(
    const struct cuda_score_unit *unit, const struct cuda_score_chain *chain, uint32_t first, struct chain_slots *at) {
    for (uint32_t i = 0; i < chain->count; i++)
        chain_stage(unit, chain->stages[i], first, at);
#pragma unroll
    for (uint32_t i = 0; i < CHAIN_STEPS; i++)
        at->score[i] = at->position[i] == KV_NO_POSITION ? not_a_number() : at->score[i];
}

/* What a block of a chain has in shared memory. */
struct chain_space {
    struct cuda_score_unit unit;
    struct cuda_score_chain chain;
    uint32_t pages[SCORE_SLOTS_CHUNK / KV_PAGE_SLOTS]; /* of its slots */
};

SCORE_INLINE void chain_load(
    const struct cuda_score_unit *unit, const struct cuda_score_chain *chain, struct chain_space *space) {
    const uint32_t *words = (const uint32_t *)chain;
    for (uint32_t i = threadIdx.x; i < sizeof *chain / sizeof *words; i += CHAIN_THREADS)
        ((uint32_t *)&space->chain)[i] = words[i];
    unit_load(unit, &space->unit);
    uint32_t index = blockIdx.x * (SCORE_SLOTS_CHUNK / KV_PAGE_SLOTS) + threadIdx.x;
    if (threadIdx.x < SCORE_SLOTS_CHUNK / KV_PAGE_SLOTS && index * KV_PAGE_SLOTS < space->unit.view.slots)
        space->pages[threadIdx.x] = space->unit.view.pages[index];
    __syncthreads();
}

static __global__ void __launch_bounds__(CHAIN_THREADS, 6)
    score_chain(const struct cuda_score_unit *units, struct kv_pool pool, const struct cuda_score_chain *from) {
    KERNEL_SHARED(struct chain_space, space);
    chain_load(units + blockIdx.y, from, space);
    const struct cuda_score_unit *unit = &space->unit;
    const struct cuda_score_chain *chain = &space->chain;
    uint32_t slots = unit->view.slots, lane = threadIdx.x % WARP;
    uint32_t first = blockIdx.x * SCORE_SLOTS_CHUNK + threadIdx.x - lane; /* of the warp */
    struct chain_slots at;
    if (first >= slots)
        return;
#pragma unroll
    for (uint32_t i = 0; i < CHAIN_STEPS; i++) {
        uint32_t slot = first + i * CHAIN_THREADS + lane;
        at.slot[i] = slot < slots ? slot : slots - 1;
        at.position[i] =
            place_position(&pool, space->pages[at.slot[i] % SCORE_SLOTS_CHUNK / KV_PAGE_SLOTS], at.slot[i]);
        at.score[i] = 0;
    }
    if (changes_scores(chain->stages[0].kind)) {
#pragma unroll
        for (uint32_t i = 0; i < CHAIN_STEPS; i++)
            if (first + i * CHAIN_THREADS + lane < slots)
                at.score[i] = unit->scores[at.slot[i]];
    }
    chain_run(unit, chain, first, &at);
#pragma unroll
    for (uint32_t i = 0; i < CHAIN_STEPS; i++)
        if (first + i * CHAIN_THREADS + lane < slots)
            unit->scores[at.slot[i]] = at.score[i];
}

void launch_score_chain(const struct cuda_score_call *call, const struct cuda_score_chain *chain, cudaStream_t stream) {
    uint32_t chunks = (call->slots_most + SCORE_SLOTS_CHUNK - 1) / SCORE_SLOTS_CHUNK;
    for (uint32_t first = 0; chunks > 0 && first < call->count; first += SCORE_UNITS_GRID) {
        uint32_t count = units_at_once(call->count - first);
        KERNEL_LAUNCH(score_chain, dim3(chunks, count), dim3(CHAIN_THREADS), sizeof(struct chain_space), stream,
            call->units + first, call->pool, chain);
    }
}

/* ---- the mean over a layer's heads ---- */

static __global__ void __launch_bounds__(CHAIN_THREADS)
    score_layer_mean(const struct cuda_score_unit *units, struct kv_pool pool) {
    const struct cuda_score_unit *layer = units + (size_t)blockIdx.y * pool.layout.kv_heads;
    KERNEL_SHARED(float *, scores); /* of each head */
    for (uint32_t k = threadIdx.x; k < pool.layout.kv_heads; k += CHAIN_THREADS)
        scores[k] = layer[k].scores;
    uint32_t slots = layer->view.slots, count = pool.layout.kv_heads;
    __syncthreads();
    for (uint32_t step = 0; step < CHAIN_STEPS; step++) {
        uint32_t slot = blockIdx.x * SCORE_SLOTS_CHUNK + step * CHAIN_THREADS + threadIdx.x;
        if (slot >= slots)
            break;
        double total = 0;
#pragma unroll 4
        for (uint32_t k = 0; k < count; k++)
            total += (double)scores[k][slot];
        float mean = (float)(total / (double)count);
        for (uint32_t k = 0; k < count; k++)
            scores[k][slot] = mean;
    }
}

void launch_score_layer_mean(const struct cuda_score_call *call, cudaStream_t stream) {
    uint32_t chunks = (call->slots_most + SCORE_SLOTS_CHUNK - 1) / SCORE_SLOTS_CHUNK;
    uint32_t kv_heads = call->pool.layout.kv_heads, layers = call->count / kv_heads;
    for (uint32_t first = 0; chunks > 0 && first < layers; first += SCORE_UNITS_GRID) {
        uint32_t count = units_at_once(layers - first);
        KERNEL_LAUNCH(score_layer_mean, dim3(chunks, count), dim3(CHAIN_THREADS), kv_heads * sizeof(float *), stream,
            call->units + (size_t)first * kv_heads, call->pool);
    }
}

/* ---- the slot that goes ---- */

/* A key and its slot; empty slots have the largest key of all. */
struct ranked {
    uint64_t key;
    uint32_t slot;
};

/* What a block of scores and their worst has in shared memory. */
struct worst_space {
    struct cuda_score_unit unit;
    struct cuda_score_chain chain;
    struct ranked lowest[WORST_THREADS / WARP];
};

SCORE_INLINE struct ranked lower(struct ranked a, struct ranked b) {
    return b.key < a.key ? b : a;
}

SCORE_INLINE struct ranked warp_lowest(struct ranked least) {
#pragma unroll
    for (uint32_t step = WARP / 2; step > 0; step /= 2) {
        struct ranked other;
        other.key = __shfl_xor_sync(0xffffffffu, least.key, step);
        other.slot = __shfl_xor_sync(0xffffffffu, least.slot, step);
        least = lower(least, other);
    }
    return least;
}

#define NO_RANK ((uint64_t)-1)

SCORE_INLINE struct ranked rank_of(float score, int32_t position, uint32_t slot) {
    struct ranked own = {slot_key(score, position), slot};
    own.key = own.key == 0 ? NO_RANK : own.key;
    return own;
}

/* The unit's worst slot, from the lowest of each thread's. lowest: shared, one a warp. */
SCORE_INLINE void write_worst(const struct cuda_score_unit *unit, struct ranked least, struct ranked *lowest) {
    least = warp_lowest(least);
    if (threadIdx.x % WARP == 0)
        lowest[threadIdx.x / WARP] = least;
    __syncthreads();
    if (threadIdx.x < WARP) {
        least = lowest[threadIdx.x % (WORST_THREADS / WARP)];
        least = warp_lowest(least);
        if (threadIdx.x == 0)
            *unit->worst = least.slot;
    }
}

static __global__ void __launch_bounds__(WORST_THREADS)
    score_worst(const struct cuda_score_unit *units, struct kv_pool pool) {
    KERNEL_SHARED(struct cuda_score_unit, unit);
    struct ranked least = {NO_RANK, 0xffffffffu};
    unit_load(units + blockIdx.x, unit);
    if (unit->worst == NULL)
        return;
#pragma unroll 4
    for (uint32_t slot = threadIdx.x; slot < unit->view.slots; slot += WORST_THREADS)
        least = lower(least, rank_of(unit->scores[slot], slot_position(&pool, &unit->view, slot), slot));
    write_worst(unit, least, (struct ranked *)(unit + 1));
}

void launch_score_worst(const struct cuda_score_call *call, cudaStream_t stream) {
    size_t shared = sizeof(struct cuda_score_unit) + WORST_THREADS / WARP * sizeof(struct ranked);
    KERNEL_LAUNCH(score_worst, dim3(call->count), dim3(WORST_THREADS), shared, stream, call->units, call->pool);
}

/* Scores and their worst at once: no score is written. A lane reads its slots' page numbers itself, so that no warp
 * waits for another. */
static __global__ void __launch_bounds__(WORST_THREADS)
    score_chain_worst(const struct cuda_score_unit *units, struct kv_pool pool, const struct cuda_score_chain *from) {
    KERNEL_SHARED(struct worst_space, space);
    const struct cuda_score_unit *unit = &space->unit;
    struct ranked least = {NO_RANK, 0xffffffffu};
    for (uint32_t i = threadIdx.x; i < sizeof *from / sizeof(uint32_t); i += WORST_THREADS)
        ((uint32_t *)&space->chain)[i] = ((const uint32_t *)from)[i];
    unit_load(units + blockIdx.x, &space->unit);
    if (unit->worst == NULL)
        return;
    uint32_t slots = unit->view.slots, lane = threadIdx.x % WARP;
    for (uint32_t first = threadIdx.x - lane; first < slots; first += CHAIN_STEPS * WORST_THREADS) {
        struct chain_slots at;
#pragma unroll
        for (uint32_t i = 0; i < CHAIN_STEPS; i++) {
            uint32_t slot = first + i * WORST_THREADS + lane;
            at.slot[i] = slot < slots ? slot : slots - 1;
            at.position[i] = slot_position(&pool, &unit->view, at.slot[i]);
            at.score[i] = 0;
        }
        chain_run(unit, &space->chain, first, &at);
#pragma unroll
        for (uint32_t i = 0; i < CHAIN_STEPS; i++)
            if (first + i * WORST_THREADS + lane < slots)
                least = lower(least, rank_of(at.score[i], at.position[i], at.slot[i]));
    }
    write_worst(unit, least, space->lowest);
}

void launch_score_chain_worst(
    const struct cuda_score_call *call, const struct cuda_score_chain *chain, cudaStream_t stream) {
    KERNEL_LAUNCH(score_chain_worst, dim3(call->count), dim3(WORST_THREADS), sizeof(struct worst_space), stream,
        call->units, call->pool, chain);
}

/* ---- shares ---- */

SCORE_INLINE bool is_counted(float score) {
    return score < infinity(); /* neither +infinity nor NaN */
}

/* One block a head: its first SCORE_HELD scores stay in registers, others are read again. */
static __global__ void __launch_bounds__(SHARES_THREADS) score_log_softmax(const struct cuda_score_unit *units) {
    KERNEL_SHARED(struct cuda_score_unit, unit);
    double *space = (double *)(unit + 1);
    unit_load(units + blockIdx.x, unit);
    uint32_t slots = unit->view.slots;
    float *scores = unit->scores, held[SHARES_HELD], most = -infinity();
#pragma unroll
    for (uint32_t i = 0; i < SHARES_HELD; i++) {
        uint32_t slot = i * SHARES_THREADS + threadIdx.x;
        held[i] = slot < slots ? scores[slot] : infinity();
        most = is_counted(held[i]) ? fmaxf(most, held[i]) : most;
    }
    for (uint32_t slot = SCORE_HELD + threadIdx.x; slot < slots; slot += SHARES_THREADS)
        most = is_counted(scores[slot]) ? fmaxf(most, scores[slot]) : most;
    most = block_most(most, (float *)space);
    if (most == -infinity())
        return;
    double sum = 0;
#pragma unroll
    for (uint32_t i = 0; i < SHARES_HELD; i++)
        sum += is_counted(held[i]) ? (double)expf(held[i] - most) : 0;
    for (uint32_t slot = SCORE_HELD + threadIdx.x; slot < slots; slot += SHARES_THREADS)
        sum += is_counted(scores[slot]) ? (double)expf(scores[slot] - most) : 0;
    double shift = (double)most + log(block_sum(sum, space));
#pragma unroll
    for (uint32_t i = 0; i < SHARES_HELD; i++) {
        uint32_t slot = i * SHARES_THREADS + threadIdx.x;
        if (slot < slots)
            scores[slot] = is_counted(held[i]) ? (float)((double)held[i] - shift) : held[i];
    }
    for (uint32_t slot = SCORE_HELD + threadIdx.x; slot < slots; slot += SHARES_THREADS)
        if (is_counted(scores[slot]))
            scores[slot] = (float)((double)scores[slot] - shift);
}

void launch_score_log_softmax(const struct cuda_score_call *call, cudaStream_t stream) {
    size_t shared = sizeof(struct cuda_score_unit) + WARP * sizeof(double);
    KERNEL_LAUNCH(score_log_softmax, dim3(call->count), dim3(SHARES_THREADS), shared, stream, call->units);
}
