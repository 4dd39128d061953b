/* SPDX-License-Identifier: Apache-2.0
 *
 * Pooling along positions: one block a head. Which positions may be pooled is a set of bits, [0, L); how many are set
 * below a position is its place in the order, so that nothing is sorted: scores are put in that order, and the
 * neighbours of a slot are the set bits around its own.
 */
#include "cuda/select_device.h"

enum {
    POOL_THREADS = 1024, /* at most; of means, whose sums are in the order of threads, always */
    POOL_HELD = SCORE_HELD / POOL_THREADS,
    ADAPTIVE_SCALE = 2000,
    ADAPTIVE_KERNEL = 5,
};

/* ---- the order of positions ---- */

/* Positions below words * 32. */
struct order {
    uint32_t *bits;   /* [words] */
    uint32_t *before; /* [words] bits set in words before */
    uint32_t words;
    uint32_t count; /* bits set */
};

/* What lies in shared memory after the unit. */
struct pool_space {
    uint32_t scan[WARP + 4];
    double sums[WARP];
};

SCORE_INLINE bool is_set(const struct order *order, uint32_t position) {
    return (order->bits[position / 32] >> position % 32 & 1) != 0;
}

/* Set bits below a position, which may be any number. */
SCORE_INLINE uint32_t place_of(const struct order *order, long long position) {
    if (position <= 0)
        return 0;
    if (position >= (long long)order->words * 32)
        return order->count;
    uint32_t word = (uint32_t)position / 32, bit = (uint32_t)position % 32;
    return order->before[word] + (uint32_t)__popc(order->bits[word] & ((1u << bit) - 1));
}

SCORE_INLINE bool can_pool(const struct cuda_score_unit *unit, int32_t position) {
    return position >= (int32_t)unit->sinks && position < (int32_t)unit->recent_from;
}

/* Where the bits lie: behind the unit, or in scratch. */
SCORE_INLINE struct order order_open(const struct cuda_score_unit *unit, uint32_t positions_most, uint32_t *shared) {
    struct order order;
    order.words = (unit->seen + 31) / 32;
    order.bits = positions_most > SCORE_POSITIONS_SHARED ? unit->bits : shared;
    order.before = order.bits + order.words;
    order.count = 0;
    for (uint32_t word = threadIdx.x; word < order.words; word += blockDim.x)
        order.bits[word] = 0;
    __syncthreads();
    return order;
}

SCORE_INLINE void order_add(const struct order *order, int32_t position) {
    atomicAdd(&order->bits[position / 32], 1u << position % 32); /* positions are distinct */
}

/* After all were added. */
SCORE_INLINE void order_count(struct order *order, uint32_t *scan) {
    uint32_t each = (order->words + blockDim.x - 1) / blockDim.x, own = 0;
    uint32_t first = threadIdx.x * each, end = first + each < order->words ? first + each : order->words;
    __syncthreads();
    for (uint32_t word = first; word < end; word++)
        own += (uint32_t)__popc(order->bits[word]);
    uint32_t sum = block_scan(own, scan, &order->count);
    for (uint32_t word = first; word < end; word++) {
        order->before[word] = sum;
        sum += (uint32_t)__popc(order->bits[word]);
    }
    __syncthreads();
}

/* Positions and scores of the block's slots that may be pooled, in registers as far as they go. */
struct pool_slots {
    int32_t position[POOL_HELD]; /* -1: not to be pooled */
    float score[POOL_HELD];
};

SCORE_INLINE int32_t pool_position(const struct kv_pool *pool, const struct cuda_score_unit *unit, uint32_t slot) {
    int32_t position = slot_position(pool, &unit->view, slot);
    return can_pool(unit, position) ? position : -1;
}

/* Takes the order of a head's slots, and their scores in it: sorted. Returns how many of the thread's slots are not
 * empty. */
SCORE_INLINE uint32_t pool_open(const struct kv_pool *pool, const struct cuda_score_unit *unit, struct order *order,
    float *sorted, uint32_t *scan, struct pool_slots *held) {
    uint32_t slots = unit->view.slots, used = 0;
#pragma unroll
    for (uint32_t i = 0; i < POOL_HELD; i++) {
        uint32_t slot = i * blockDim.x + threadIdx.x;
        int32_t position = slot < slots ? slot_position(pool, &unit->view, slot) : KV_NO_POSITION;
        used += position != KV_NO_POSITION;
        held->position[i] = can_pool(unit, position) ? position : -1;
        held->score[i] = slot < slots ? unit->scores[slot] : 0;
    }
#pragma unroll
    for (uint32_t i = 0; i < POOL_HELD; i++)
        if (held->position[i] >= 0)
            order_add(order, held->position[i]);
    for (uint32_t slot = POOL_HELD * blockDim.x + threadIdx.x; slot < slots; slot += blockDim.x) {
        int32_t position = slot_position(pool, &unit->view, slot);
        used += position != KV_NO_POSITION;
        if (can_pool(unit, position))
            order_add(order, position);
    }
    order_count(order, scan);
#pragma unroll
    for (uint32_t i = 0; i < POOL_HELD; i++)
        if (held->position[i] >= 0)
            sorted[place_of(order, held->position[i])] = held->score[i];
    for (uint32_t slot = POOL_HELD * blockDim.x + threadIdx.x; slot < slots; slot += blockDim.x) {
        int32_t position = pool_position(pool, unit, slot);
        if (position >= 0)
            sorted[place_of(order, position)] = unit->scores[slot];
    }
    __syncthreads();
    return used;
}

/* ---- the maximum ---- */

SCORE_INLINE float pool_most(
    const struct order *order, const float *sorted, uint32_t position, uint32_t reach, float own) {
    uint32_t last = order->words * 32 - 1, place = place_of(order, position), above = place, below = place;
    float most = own;
    for (uint32_t step = 1; step <= reach; step++) {
        if (position + step <= last && is_set(order, position + step)) {
            float other = sorted[++above];
            most = other > most ? other : most;
        }
        if (step <= position && is_set(order, position - step)) {
            float other = sorted[--below];
            most = other > most ? other : most;
        }
    }
    return most;
}

static __global__ void __launch_bounds__(POOL_THREADS) score_pool_max(const struct cuda_score_unit *units,
    struct kv_pool pool, uint32_t reach, uint32_t positions_most, bool sorted_shared) {
    KERNEL_SHARED(struct cuda_score_unit, unit);
    struct pool_space *space = (struct pool_space *)(unit + 1);
    float *sorted = (float *)(space + 1);
    uint32_t *bits = (uint32_t *)(sorted + (sorted_shared ? SCORE_HELD : 0));
    struct pool_slots held;
    unit_load(units + blockIdx.x, unit);
    uint32_t slots = unit->view.slots;
    if (slots == 0)
        return;
    if (!sorted_shared)
        sorted = unit->sorted;
    struct order order = order_open(unit, positions_most, bits);
    pool_open(&pool, unit, &order, sorted, space->scan, &held);
#pragma unroll
    for (uint32_t i = 0; i < POOL_HELD; i++)
        if (held.position[i] >= 0)
            unit->scores[i * blockDim.x + threadIdx.x] =
                pool_most(&order, sorted, (uint32_t)held.position[i], reach, held.score[i]);
    for (uint32_t slot = POOL_HELD * blockDim.x + threadIdx.x; slot < slots; slot += blockDim.x) {
        int32_t position = pool_position(&pool, unit, slot);
        if (position >= 0)
            unit->scores[slot] = pool_most(&order, sorted, (uint32_t)position, reach, unit->scores[slot]);
    }
}

/* Bytes of shared memory of a block that pools; sorted: scores in order lie there too. */
static size_t pool_shared(const struct cuda_score_call *call, bool sorted) {
    uint32_t words = (call->positions_most + 31) / 32;
    size_t bits = call->positions_most > SCORE_POSITIONS_SHARED ? 0 : 2 * (size_t)words * sizeof(uint32_t);
    return sizeof(struct cuda_score_unit) + sizeof(struct pool_space) + (sorted ? SCORE_HELD * sizeof(float) : 0) +
           bits;
}

void launch_score_pool_max(const struct cuda_score_call *call, uint32_t reach, cudaStream_t stream) {
    bool sorted = call->slots_most <= SCORE_HELD;
    KERNEL_LAUNCH(score_pool_max, dim3(call->count), dim3(select_threads(call->slots_most)), pool_shared(call, sorted),
        stream, call->units, call->pool, reach, call->positions_most, sorted);
}

/* ---- restkv's mean ---- */

/* Keys of the slots that may be pooled, by a query's attention (f16, not negative: bits are in the order of values),
 * then by position; never 0. */
struct attention_keys {
    const struct kv_pool *pool;
    const struct cuda_score_unit *unit;
    const uint16_t *row;
    __device__ __forceinline__ uint64_t at(uint32_t slot, int32_t position) const {
        return can_pool(unit, position) ? (uint64_t)(row[slot] + 1u) << 32 | (uint32_t)position : 0;
    }
    __device__ __forceinline__ uint64_t operator()(uint32_t slot) const {
        return at(slot, slot_position(pool, &unit->view, slot));
    }
};

struct usable {
    uint32_t free, protected_; /* slots */
};

/* Of the block's slots; the first ones' positions are at hand. */
SCORE_INLINE struct usable count_usable(const struct kv_pool *pool, const struct cuda_score_unit *unit,
    const int32_t positions[SELECT_HELD], uint32_t *scan) {
    uint32_t free = 0, used = 0;
#pragma unroll
    for (uint32_t i = 0; i < SELECT_HELD; i++) {
        used += positions[i] != KV_NO_POSITION;
        free += can_pool(unit, positions[i]);
    }
    for (uint32_t slot = SELECT_HELD * blockDim.x + threadIdx.x; slot < unit->view.slots; slot += blockDim.x) {
        int32_t position = slot_position(pool, &unit->view, slot);
        used += position != KV_NO_POSITION;
        free += can_pool(unit, position);
    }
    struct usable usable;
    usable.free = block_sum(free, scan);
    usable.protected_ = block_sum(used, scan) - usable.free;
    return usable;
}

/* Slots whose positions are summed: 0: there is nothing to go by. */
SCORE_INLINE uint32_t best_count(const struct cuda_score_unit *unit, struct usable usable) {
    if (unit->rows < 2 || usable.free == 0 || unit->budget <= usable.protected_)
        return 0;
    uint32_t left = unit->budget - usable.protected_;
    return left < usable.free ? left : usable.free;
}

/* row_sums[t]: positions of the best slots of the window's query t, oldest first. */
static __global__ void __launch_bounds__(SELECT_THREADS)
    score_best_sums(const struct cuda_score_unit *units, struct kv_pool pool) {
    KERNEL_SHARED(struct cuda_score_unit, unit);
    struct select_space *space = (struct select_space *)(unit + 1);
    double *sums = (double *)(space + 1);
    uint64_t held[SELECT_HELD];
    int32_t positions[SELECT_HELD];
    unit_load(units + blockIdx.y, unit);
    const struct kv_statistics *statistics = &unit->statistics;
    if (blockIdx.x >= unit->rows / 2 * 2)
        return;
    uint32_t ring = (unit->first_row + blockIdx.x) % statistics->window, slots = unit->view.slots;
    const struct attention_keys keys = {&pool, unit, statistics->window_rows + (size_t)ring * statistics->capacity};
#pragma unroll
    for (uint32_t i = 0; i < SELECT_HELD; i++) {
        uint32_t slot = i * blockDim.x + threadIdx.x;
        positions[i] = slot < slots ? slot_position(&pool, &unit->view, slot) : KV_NO_POSITION;
    }
    uint32_t count = best_count(unit, count_usable(&pool, unit, positions, space->scan));
    double sum = 0; /* of integers below 2^53 */
    if (count > 0) {
#pragma unroll
        for (uint32_t i = 0; i < SELECT_HELD; i++)
            held[i] = keys.at(i * blockDim.x + threadIdx.x, positions[i]);
        uint64_t least = select_least(keys, held, slots, count, space);
        least = least > 0 ? least : 1;
#pragma unroll
        for (uint32_t i = 0; i < SELECT_HELD; i++)
            sum += held[i] >= least ? (double)(uint32_t)held[i] : 0;
        for (uint32_t slot = SELECT_HELD * blockDim.x + threadIdx.x; slot < slots; slot += blockDim.x) {
            uint64_t key = keys(slot);
            sum += key >= least ? (double)(uint32_t)key : 0;
        }
    }
    sum = block_sum(sum, sums);
    if (threadIdx.x == 0)
        unit->row_sums[blockIdx.x] = (uint64_t)sum;
}

struct pool_kernel {
    long long reach, shift;
};

/* All threads; the sums of positions are added up by one warp (integers, in any order). space [2]: shared. */
SCORE_INLINE struct pool_kernel adapt_kernel(const struct cuda_score_unit *unit, uint32_t count, double *space) {
    struct pool_kernel kernel = {ADAPTIVE_KERNEL / 2, 0};
    uint32_t half = unit->rows / 2;
    if (count == 0)
        return kernel;
    if (threadIdx.x < WARP) {
        double sums[2] = {0, 0};
        for (uint32_t t = threadIdx.x; t < half; t += WARP) {
            sums[0] += (double)unit->row_sums[t];
            sums[1] += (double)unit->row_sums[half + t];
        }
        sums[0] = warp_sum(sums[0]);
        sums[1] = warp_sum(sums[1]);
        if (threadIdx.x == 0) {
            space[0] = sums[0];
            space[1] = sums[1];
        }
    }
    __syncthreads();
    double move = (space[0] - space[1]) / ((double)half * (double)count), size = move < 0 ? -move : move;
    kernel.shift = (long long)floor(move / ADAPTIVE_SCALE) + (move > 0 ? 0 : 1);
    long long steps = 2 * (long long)floor(size / ADAPTIVE_SCALE) + 1;
    kernel.reach = (steps > (long long)ADAPTIVE_KERNEL ? steps : (long long)ADAPTIVE_KERNEL) / 2;
    __syncthreads();
    return kernel;
}

/* sums[i]: of the first i sorted scores, in double. */
SCORE_INLINE void sum_sorted(const float *sorted, uint32_t count, double *sums, double *space) {
    uint32_t lane = threadIdx.x % WARP, warp = threadIdx.x / WARP;
    double carry = 0;
    for (uint32_t first = 0; first < count; first += POOL_THREADS) {
        uint32_t i = first + threadIdx.x;
        double own = i < count ? (double)sorted[i] : 0, sum = own;
#pragma unroll
        for (uint32_t step = 1; step < WARP; step *= 2) {
            double before = __shfl_up_sync(0xffffffffu, sum, step);
            sum += lane >= step ? before : 0;
        }
        if (lane == WARP - 1)
            space[warp] = sum;
        __syncthreads();
        double base = carry;
        for (uint32_t w = 0; w < POOL_THREADS / WARP; w++) {
            base += w < warp ? space[w] : 0;
            carry += space[w];
        }
        if (i < count)
            sums[i + 1] = base + sum;
        __syncthreads();
    }
    if (threadIdx.x == 0)
        sums[0] = 0;
    __syncthreads();
}

/* Mean over the slots at most reach away from a slot's position less shift, and the slot itself. */
SCORE_INLINE float pool_average(
    const struct order *order, const double *sums, struct pool_kernel kernel, uint32_t position, float score) {
    long long middle = (long long)position - kernel.shift;
    uint32_t first = place_of(order, middle - kernel.reach), end = place_of(order, middle + kernel.reach + 1);
    uint32_t place = place_of(order, position);
    bool inside = place >= first && place < end;
    double sum = sums[end] - sums[first] + (inside ? 0 : (double)score);
    return (float)(sum / (double)(end - first + (inside ? 0 : 1)));
}

/* held: sums and sorted scores lie in shared memory. Sorted scores are the second half of the sums' memory: by chunks
 * of POOL_THREADS, a chunk's sums never reach scores that were not read yet. */
static __global__ void __launch_bounds__(POOL_THREADS)
    score_pool_mean(const struct cuda_score_unit *units, struct kv_pool pool, uint32_t positions_most, bool is_held) {
    KERNEL_SHARED(struct cuda_score_unit, unit);
    struct pool_space *space = (struct pool_space *)(unit + 1);
    double *sums = (double *)(space + 1);
    uint32_t *bits = (uint32_t *)(sums + (is_held ? SCORE_HELD + 1 : 0));
    float *sorted = (float *)sums + SCORE_HELD;
    struct pool_slots held;
    struct usable usable;
    unit_load(units + blockIdx.x, unit);
    uint32_t slots = unit->view.slots;
    if (slots == 0)
        return;
    if (!is_held) {
        sums = unit->sums;
        sorted = unit->sorted;
    }
    struct order order = order_open(unit, positions_most, bits);
    uint32_t used = pool_open(&pool, unit, &order, sorted, space->scan, &held);
    usable.free = order.count;
    usable.protected_ = block_sum(used, space->scan) - usable.free;
    struct pool_kernel kernel = adapt_kernel(unit, best_count(unit, usable), space->sums);
    sum_sorted(sorted, order.count, sums, space->sums);
#pragma unroll
    for (uint32_t i = 0; i < POOL_HELD; i++)
        if (held.position[i] >= 0)
            unit->scores[i * blockDim.x + threadIdx.x] =
                pool_average(&order, sums, kernel, (uint32_t)held.position[i], held.score[i]);
    for (uint32_t slot = POOL_HELD * blockDim.x + threadIdx.x; slot < slots; slot += blockDim.x) {
        int32_t position = pool_position(&pool, unit, slot);
        if (position >= 0)
            unit->scores[slot] = pool_average(&order, sums, kernel, (uint32_t)position, unit->scores[slot]);
    }
}

void launch_score_pool_adaptive(const struct cuda_score_call *call, uint32_t window_most, cudaStream_t stream) {
    size_t shared = sizeof(struct cuda_score_unit) + sizeof(struct select_space) + WARP * sizeof(double);
    bool held = call->slots_most <= SCORE_HELD;
    size_t sums = held ? (SCORE_HELD + 1) * sizeof(double) : 0;
    for (uint32_t first = 0; window_most > 1 && first < call->count; first += SCORE_UNITS_GRID) {
        uint32_t count = units_at_once(call->count - first);
        KERNEL_LAUNCH(score_best_sums, dim3(window_most, count), dim3(select_threads(call->slots_most)), shared, stream,
            call->units + first, call->pool);
    }
    KERNEL_LAUNCH(score_pool_mean, dim3(call->count), dim3(POOL_THREADS), pool_shared(call, false) + sums, stream,
        call->units, call->pool, call->positions_most, held);
}
