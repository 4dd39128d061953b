/* SPDX-License-Identifier: Apache-2.0
 *
 * Scores from keys, and the norm of values. A warp takes a page at a time: its keys are one run of memory, of which
 * each lane reads 16 bytes at a time, always of the same slots; what lanes have of a slot is then added up.
 */
#include "cuda/score_device.h"

enum {
    KEYS_THREADS = 256,
    KEYS_WARPS = KEYS_THREADS / WARP,
    KEYS_PAGES = SCORE_KEYS_CHUNK / KV_PAGE_SLOTS / KEYS_WARPS, /* a warp */
};

/* How a page's keys [d][16] lie in 16-byte parts: LANES lanes to a channel, SLOTS slots to a lane. MOST parts a lane.
 */
template <enum kv_format FORMAT> struct key_parts {
    static const uint32_t SLOTS = FORMAT == KV_F32 ? 4 : 8;
    static const uint32_t LANES = KV_PAGE_SLOTS / SLOTS;
    static const uint32_t MOST = SCORE_DIM_MAX * LANES / WARP;
};

/* Adds up what lanes of the same slots have: each lane gets the sum of one slot, part_slot. */
template <uint32_t SLOTS> SCORE_INLINE float sum_parts(float parts[SLOTS]) {
    uint32_t lane = threadIdx.x % WARP, step = WARP / 2;
#pragma unroll
    for (uint32_t half = SLOTS / 2; half > 0; half /= 2, step /= 2) {
        bool upper = (lane & step) != 0;
#pragma unroll
        for (uint32_t i = 0; i < half; i++) {
            float sent = upper ? parts[i] : parts[i + half], kept = upper ? parts[i + half] : parts[i];
            parts[i] = kept + __shfl_xor_sync(0xffffffffu, sent, step);
        }
    }
#pragma unroll
    for (; step >= KV_PAGE_SLOTS / SLOTS; step /= 2)
        parts[0] += __shfl_xor_sync(0xffffffffu, parts[0], step);
    return parts[0];
}

/* The slot of the page that a lane has the sum of, and a lane that has it. */
template <uint32_t SLOTS> SCORE_INLINE uint32_t part_slot(void) {
    uint32_t lane = threadIdx.x % WARP, slot = lane % (KV_PAGE_SLOTS / SLOTS) * SLOTS, step = WARP / 2;
#pragma unroll
    for (uint32_t half = SLOTS / 2; half > 0; half /= 2, step /= 2)
        slot += (lane & step) != 0 ? half : 0;
    return slot;
}

template <uint32_t SLOTS> SCORE_INLINE uint32_t part_lane(uint32_t slot) {
    uint32_t lane = slot / SLOTS, step = WARP / 2;
#pragma unroll
    for (uint32_t half = SLOTS / 2; half > 0; half /= 2, step /= 2)
        lane += (slot & half) != 0 ? step : 0;
    return lane;
}

/* Whether the lane writes its slot: the first of those that have it. */
template <uint32_t SLOTS> SCORE_INLINE bool part_writes(void) {
    return part_lane<SLOTS>(part_slot<SLOTS>()) == threadIdx.x % WARP;
}

/* Sums over the channels of a page's keys: squares, and products with direction [d] unless that is NULL. */
template <enum kv_format FORMAT>
SCORE_INLINE void sum_channels(
    const uint4 *keys, uint32_t dim, const float *direction, float squares[8], float products[8]) {
    const uint32_t SLOTS = key_parts<FORMAT>::SLOTS, LANES = key_parts<FORMAT>::LANES;
#pragma unroll
    for (uint32_t i = 0; i < SLOTS; i++)
        squares[i] = products[i] = 0;
#pragma unroll 4
    for (uint32_t part = threadIdx.x % WARP; part < dim * LANES; part += WARP) {
        float numbers[8], along = direction != NULL ? direction[part / LANES] : 0;
        widen<FORMAT>(keys[part], numbers);
#pragma unroll
        for (uint32_t i = 0; i < SLOTS; i++) {
            squares[i] = fmaf(numbers[i], numbers[i], squares[i]);
            products[i] = fmaf(numbers[i], along, products[i]);
        }
    }
}

/* ---- norms, and cosines with the anchor ---- */

/* The warp's page number `index` of the block's chunk: its first slot. */
SCORE_INLINE uint32_t page_first(uint32_t index) {
    return blockIdx.x * SCORE_KEYS_CHUNK + (index * KEYS_WARPS + threadIdx.x / WARP) * KV_PAGE_SLOTS;
}

template <enum kv_format FORMAT, bool DIFFERENCE>
static __global__ void __launch_bounds__(KEYS_THREADS)
    score_keys(const struct cuda_score_unit *units, struct kv_pool pool, uint32_t chunks) {
    const uint32_t SLOTS = key_parts<FORMAT>::SLOTS;
    KERNEL_SHARED(struct cuda_score_unit, unit);
    float *direction = DIFFERENCE ? (float *)(unit + 1) : NULL; /* [d] */
    uint32_t dim = pool.layout.head_dim;
    unit_load(units + blockIdx.y, unit);
    if (blockIdx.x * SCORE_KEYS_CHUNK >= unit->view.slots)
        return;
    if (DIFFERENCE) {
        for (uint32_t c = threadIdx.x; c < dim; c += KEYS_THREADS)
            direction[c] = unit->anchor[(size_t)chunks * dim + c];
        __syncthreads();
    }
    for (uint32_t i = 0; i < KEYS_PAGES; i++) {
        uint32_t first = page_first(i), slot = first + part_slot<SLOTS>();
        float squares[8], products[8];
        if (first >= unit->view.slots)
            break;
        const char *page = page_of(&pool, unit->view.pages[first / KV_PAGE_SLOTS]);
        bool writes = part_writes<SLOTS>() && slot < unit->view.slots;
        int32_t position = writes ? positions_of(&pool, page)[slot % KV_PAGE_SLOTS] : KV_NO_POSITION;
        sum_channels<FORMAT>((const uint4 *)page, dim, direction, squares, products);
        float norm = sqrtf(sum_parts<SLOTS>(squares)), score = -norm;
        if (DIFFERENCE) {
            float product = sum_parts<SLOTS>(products);
            score = norm > 0 ? -product / norm : 0;
        }
        if (writes)
            unit->scores[slot] = position == KV_NO_POSITION ? not_a_number() : score;
    }
}

/* ---- the anchor ---- */

/* The chunk's sum of normalised keys: unit.anchor[chunk][d]. A key of no length points nowhere. */
template <enum kv_format FORMAT>
static __global__ void __launch_bounds__(KEYS_THREADS)
    score_directions(const struct cuda_score_unit *units, struct kv_pool pool) {
    const uint32_t SLOTS = key_parts<FORMAT>::SLOTS, LANES = key_parts<FORMAT>::LANES, MOST = key_parts<FORMAT>::MOST;
    KERNEL_SHARED(struct cuda_score_unit, unit);
    float *sums = (float *)(unit + 1); /* [KEYS_WARPS][d] */
    uint32_t dim = pool.layout.head_dim, lane = threadIdx.x % WARP, warp = threadIdx.x / WARP;
    float total[MOST];
    unit_load(units + blockIdx.y, unit);
    uint32_t slots = unit->view.slots;
    if (blockIdx.x * SCORE_KEYS_CHUNK >= slots)
        return;
#pragma unroll
    for (uint32_t j = 0; j < MOST; j++)
        total[j] = 0;
    for (uint32_t i = 0; i < KEYS_PAGES; i++) {
        uint32_t first = page_first(i), slot = first + part_slot<SLOTS>();
        if (first >= slots)
            break;
        const char *page = page_of(&pool, unit->view.pages[first / KV_PAGE_SLOTS]);
        bool there = slot < slots && positions_of(&pool, page)[slot % KV_PAGE_SLOTS] != KV_NO_POSITION;
        uint4 held[MOST];
        float squares[8], factors[8];
#pragma unroll
        for (uint32_t s = 0; s < SLOTS; s++)
            squares[s] = 0;
#pragma unroll
        for (uint32_t j = 0; j < MOST; j++) {
            float numbers[8];
            if (j * WARP + lane >= dim * LANES)
                continue;
            held[j] = ((const uint4 *)page)[j * WARP + lane];
            widen<FORMAT>(held[j], numbers);
#pragma unroll
            for (uint32_t s = 0; s < SLOTS; s++)
                squares[s] = fmaf(numbers[s], numbers[s], squares[s]);
        }
        float square = sum_parts<SLOTS>(squares), factor = there && square > 0 ? 1 / sqrtf(square) : 0;
#pragma unroll
        for (uint32_t s = 0; s < SLOTS; s++)
            factors[s] = __shfl_sync(0xffffffffu, factor, (int)part_lane<SLOTS>(lane % LANES * SLOTS + s));
#pragma unroll
        for (uint32_t j = 0; j < MOST; j++) {
            float numbers[8];
            if (j * WARP + lane >= dim * LANES)
                continue;
            widen<FORMAT>(held[j], numbers);
#pragma unroll
            for (uint32_t s = 0; s < SLOTS; s++) /* what an empty slot holds may be no number */
                total[j] = factors[s] > 0 ? fmaf(numbers[s], factors[s], total[j]) : total[j];
        }
    }
#pragma unroll
    for (uint32_t j = 0; j < MOST; j++) {
        float sum = total[j];
#pragma unroll
        for (uint32_t step = 1; step < LANES; step *= 2)
            sum += __shfl_xor_sync(0xffffffffu, sum, step);
        if (lane % LANES == 0 && j * WARP + lane < dim * LANES)
            sums[warp * dim + (j * WARP + lane) / LANES] = sum;
    }
    __syncthreads();
    for (uint32_t c = threadIdx.x; c < dim; c += KEYS_THREADS) {
        float sum = 0;
        for (uint32_t w = 0; w < KEYS_WARPS; w++)
            sum += sums[w * dim + c];
        unit->anchor[(size_t)blockIdx.x * dim + c] = sum;
    }
}

/* The sum of all chunks, of length 1, behind them. */
static __global__ void __launch_bounds__(KEYS_THREADS)
    score_anchor(const struct cuda_score_unit *units, uint32_t dim, uint32_t chunks) {
    KERNEL_SHARED(struct cuda_score_unit, unit);
    double *space = (double *)(unit + 1), sum = 0;
    unit_load(units + blockIdx.x, unit);
    uint32_t own = (unit->view.slots + SCORE_KEYS_CHUNK - 1) / SCORE_KEYS_CHUNK, c = threadIdx.x;
#pragma unroll 8
    for (uint32_t chunk = 0; chunk < own; chunk++)
        sum += c < dim ? (double)unit->anchor[(size_t)chunk * dim + c] : 0;
    double length = block_sum(sum * sum, space);
    if (c < dim)
        unit->anchor[(size_t)chunks * dim + c] = (float)(length > 0 ? sum / sqrt(length) : 0);
}

static_assert((uint32_t)SCORE_DIM_MAX <= (uint32_t)KEYS_THREADS, "a thread has a channel");

static uint32_t keys_chunks(uint32_t slots) {
    return (slots + SCORE_KEYS_CHUNK - 1) / SCORE_KEYS_CHUNK;
}

size_t score_anchor_floats(uint32_t slots, uint32_t dim) {
    return ((size_t)keys_chunks(slots) + 1) * dim;
}

/* ---- norms of values ---- */

/* Sum of squares of one value: eight lanes each read a part of its row. WIDE: rows are whole parts of 16 bytes. */
template <enum kv_format FORMAT, bool WIDE> SCORE_INLINE float row_squares(const char *row, uint32_t dim) {
    uint32_t lane = threadIdx.x % 8;
    float sum = 0;
    if (WIDE) {
        const uint32_t NUMBERS = FORMAT == KV_F32 ? 4 : 8;
#pragma unroll 2
        for (uint32_t part = lane; part < dim / NUMBERS; part += 8) {
            float numbers[8];
            widen<FORMAT>(((const uint4 *)row)[part], numbers);
#pragma unroll
            for (uint32_t i = 0; i < NUMBERS; i++)
                sum = fmaf(numbers[i], numbers[i], sum);
        }
    } else {
        for (uint32_t c = lane; c < dim; c += 8) {
            float number = number_load(FORMAT, row, c);
            sum = fmaf(number, number, sum);
        }
    }
#pragma unroll
    for (uint32_t step = 4; step > 0; step /= 2)
        sum += __shfl_xor_sync(0xffffffffu, sum, step);
    return sum;
}

template <enum kv_format FORMAT, bool WIDE>
static __global__ void __launch_bounds__(KEYS_THREADS)
    score_value_norms(const struct cuda_score_unit *units, struct kv_pool pool) {
    KERNEL_SHARED(struct cuda_score_unit, unit);
    uint32_t dim = pool.layout.head_dim, lane = threadIdx.x % WARP;
    size_t row_bytes = (size_t)dim * number_bytes(FORMAT);
    unit_load(units + blockIdx.y, unit);
    for (uint32_t i = 0; i < KEYS_PAGES; i++) {
        uint32_t first = page_first(i), slot = first + lane % KV_PAGE_SLOTS;
        if (first >= unit->view.slots)
            break;
        const char *page = page_of(&pool, unit->view.pages[first / KV_PAGE_SLOTS]);
        const char *values = values_of(&pool, page);
        bool writes = lane < KV_PAGE_SLOTS && slot < unit->view.slots;
        int32_t position = writes ? positions_of(&pool, page)[lane] : KV_NO_POSITION;
        float score = writes ? unit->scores[slot] : 0, square = 0;
#pragma unroll
        for (uint32_t step = 0; step < 4; step++) {
            float sum = row_squares<FORMAT, WIDE>(values + (step * 4 + lane / 8) * row_bytes, dim);
            float own = __shfl_sync(0xffffffffu, sum, (int)(lane % 4 * 8));
            square = lane % KV_PAGE_SLOTS / 4 == step ? own : square;
        }
        score = isinf(score) ? score : score * sqrtf(square);
        if (writes)
            unit->scores[slot] = position == KV_NO_POSITION ? not_a_number() : score;
    }
}

/* ---- launches ---- */

static void launch_keys(const struct cuda_score_call *call, bool difference, cudaStream_t stream) {
    uint32_t chunks = keys_chunks(call->slots_most), dim = call->pool.layout.head_dim;
    size_t shared = sizeof(struct cuda_score_unit) + (difference ? dim * sizeof(float) : 0);
    for (uint32_t first = 0; chunks > 0 && first < call->count; first += SCORE_UNITS_GRID) {
        dim3 grid(chunks, units_at_once(call->count - first));
        SCORE_FORMATS_WIDE(call->pool.layout.format, difference, score_keys, grid, dim3(KEYS_THREADS), shared, stream,
            call->units + first, call->pool, chunks);
    }
}

void launch_score_key_norm(const struct cuda_score_call *call, cudaStream_t stream) {
    launch_keys(call, false, stream);
}

void launch_score_key_difference(const struct cuda_score_call *call, cudaStream_t stream) {
    uint32_t chunks = keys_chunks(call->slots_most), dim = call->pool.layout.head_dim;
    size_t sums = sizeof(struct cuda_score_unit) + KEYS_WARPS * dim * sizeof(float);
    size_t space = sizeof(struct cuda_score_unit) + WARP * sizeof(double);
    if (chunks == 0)
        return;
    for (uint32_t first = 0; first < call->count; first += SCORE_UNITS_GRID) {
        dim3 grid(chunks, units_at_once(call->count - first));
        SCORE_FORMATS(call->pool.layout.format, score_directions, grid, dim3(KEYS_THREADS), sums, stream,
            call->units + first, call->pool);
    }
    KERNEL_LAUNCH(score_anchor, dim3(call->count), dim3(KEYS_THREADS), space, stream, call->units, dim, chunks);
    launch_keys(call, true, stream);
}

void launch_score_times_value_norm(const struct cuda_score_call *call, cudaStream_t stream) {
    uint32_t chunks = keys_chunks(call->slots_most);
    bool wide = call->pool.layout.head_dim * kv_format_bytes(call->pool.layout.format) % sizeof(uint4) == 0;
    for (uint32_t first = 0; chunks > 0 && first < call->count; first += SCORE_UNITS_GRID) {
        dim3 grid(chunks, units_at_once(call->count - first));
        SCORE_FORMATS_WIDE(call->pool.layout.format, wide, score_value_norms, grid, dim3(KEYS_THREADS),
            sizeof(struct cuda_score_unit), stream, call->units + first, call->pool);
    }
}
