/* SPDX-License-Identifier: Apache-2.0
 *
 * restkv's error (policy/restkv.c): how far the output of each query of the window moves when a slot is dropped,
 * p / (1 - p) |F_h (v - o_h)| added over the group's heads, smoothed over the window.
 */
#include "cuda/score_product.h"

enum { ROW_THREADS = 256, EXCESS_QUERIES = 16 /* of a block */ };

/* Where a unit's scratch has what its window is made of: turned outputs [G][d][rows, padded], then excess [G][rows,
 * padded]. */
SCORE_INLINE size_t window_stride(const struct cuda_score_unit *unit) {
    return padded_rows(unit->rows);
}

SCORE_INLINE float *excess_of(const struct cuda_score_unit *unit, uint32_t group, uint32_t dim) {
    return unit->space + (size_t)group * dim * window_stride(unit);
}

size_t score_drop_floats(uint32_t window, uint32_t group, uint32_t dim) {
    size_t stride = ((size_t)window + SCORE_ROWS - 1) / SCORE_ROWS * SCORE_ROWS;
    return (size_t)group * (dim + 1) * stride;
}

SCORE_INLINE uint32_t ring_row(const struct cuda_score_unit *unit, uint32_t t) {
    return (unit->first_row + t) % unit->statistics.window;
}

/* F_h o_h of 64 queries of the window, oldest first. Blocks: (64 queries, g, unit). */
static __global__ void __launch_bounds__(PRODUCT_THREADS)
    score_drop_outputs(const struct cuda_score_unit *units, uint32_t dim, uint32_t group) {
    KERNEL_SHARED(struct cuda_score_unit, unit);
    float *slices = (float *)(unit + 1), *tile = slices + PRODUCT_SLICES_FLOATS;
    uint32_t first = blockIdx.x * SCORE_TILE, g = blockIdx.y;
    unit_load(units + blockIdx.z, unit);
    if (first >= unit->rows || unit->view.slots == 0)
        return;
    size_t stride = padded_rows(dim), window = window_stride(unit);
    const float *factor = unit->factors + (size_t)(unit->head * group + g) * dim * stride;
    tile_rows<SCORE_TILE>(
        [&](uint32_t query) {
            uint32_t t = first + query;
            const float *outputs = unit->statistics.outputs + ((size_t)ring_row(unit, t) * group + g) * dim;
            return t < unit->rows ? outputs : NULL;
        },
        dim, tile);
    for (uint32_t row = 0; row < dim; row += PRODUCT_ROWS) {
        float sums[4][SCORE_TILE / 16];
        product_rows<SCORE_TILE, false>(
            factor + row, stride, row + PRODUCT_ROWS < dim ? row + PRODUCT_ROWS : dim, tile, slices, sums);
#pragma unroll
        for (uint32_t r = 0; r < 4; r++) {
            float *to =
                unit->space + ((size_t)g * dim + row + product_row() + r) * window + first + product_slot<SCORE_TILE>();
            if (row + product_row() + r < dim)
                *(float4 *)to = make_float4(sums[r][0], sums[r][1], sums[r][2], sums[r][3]);
        }
    }
}

/* p is stored with 11 bits, and 1 - p of a large p would be mostly its rounding error. Over all slots p sums to 1, but
 * for what was evicted since: what the stored ones sum to beyond 1 is, within what rounding can be, that error. Blocks:
 * (EXCESS_QUERIES queries, g, unit), so that positions are read once for all of them. */
static __global__ void __launch_bounds__(ROW_THREADS)
    score_drop_excess(const struct cuda_score_unit *units, struct kv_pool pool, uint32_t group) {
    KERNEL_SHARED(struct cuda_score_unit, unit);
    double *space = (double *)(unit + 1), sums[EXCESS_QUERIES];
    uint32_t first = blockIdx.x * EXCESS_QUERIES, g = blockIdx.y;
    unit_load(units + blockIdx.z, unit);
    if (first >= unit->rows)
        return;
    uint32_t queries = unit->rows - first < EXCESS_QUERIES ? unit->rows - first : (uint32_t)EXCESS_QUERIES;
    size_t capacity = unit->statistics.capacity;
    const uint16_t *p = unit->statistics.head_rows + g * capacity;
#pragma unroll
    for (uint32_t t = 0; t < EXCESS_QUERIES; t++)
        sums[t] = 0;
    for (uint32_t slot = threadIdx.x; slot < unit->view.slots; slot += ROW_THREADS) {
        if (slot_position(&pool, &unit->view, slot) == KV_NO_POSITION)
            continue;
#pragma unroll
        for (uint32_t t = 0; t < EXCESS_QUERIES; t++)
            if (t < queries)
                sums[t] += (double)half_number(p[ring_row(unit, first + t) * group * capacity + slot]);
    }
    float *out = excess_of(unit, group, pool.layout.head_dim) + g * window_stride(unit) + first;
#pragma unroll
    for (uint32_t t = 0; t < EXCESS_QUERIES; t++) {
        double sum = block_sum(sums[t], space); /* exact in any order */
        if (threadIdx.x == 0 && t < queries)
            out[t] = (float)(sum - 1);
    }
}

SCORE_INLINE float drop_error_of(float p, float excess, float square) {
    float bound = p * 0x1p-11f, rounding = excess < bound ? excess : bound;
    rounding = rounding > -bound ? rounding : -bound;
    float others = 1 - p + rounding;
    return p / (others > 1e-6f ? others : 1e-6f) * sqrtf(square);
}

/* Adds the errors of the thread's four queries and slots. */
template <int S>
SCORE_INLINE void add_errors(const struct cuda_score_unit *unit, uint32_t group, uint32_t g, uint32_t dim,
    uint32_t first_query, uint32_t first_slot, const float squares[4][S / 16], float total[4][S / 16]) {
    uint32_t slot = first_slot + product_slot<S>(), capacity = unit->statistics.capacity;
    uint32_t query = first_query + product_row();
    if (query >= unit->rows || slot >= capacity)
        return;
    const float4 four = *(const float4 *)(excess_of(unit, group, dim) + g * window_stride(unit) + query);
    const float beyond[4] = {four.x, four.y, four.z, four.w};
#pragma unroll
    for (uint32_t r = 0; r < 4; r++) {
        if (query + r >= unit->rows)
            break;
        float p[S / 16];
        read_probabilities<S>(
            unit->statistics.head_rows + ((size_t)ring_row(unit, query + r) * group + g) * capacity + slot, p);
#pragma unroll
        for (int s = 0; s < S / 16; s++)
            total[r][s] += drop_error_of(p[s], beyond[r], squares[r][s]);
    }
}

template <enum kv_format FORMAT, int S, bool WIDE>
static __global__ void __launch_bounds__(PRODUCT_THREADS, 2)
    score_drop(const struct cuda_score_unit *units, struct kv_pool pool, uint32_t group, float smoothing) {
    KERNEL_SHARED(struct cuda_score_unit, unit);
    float *slices = (float *)(unit + 1), *tile = slices + PRODUCT_SLICES_FLOATS;
    uint32_t dim = pool.layout.head_dim, first = blockIdx.x * S;
    float *turned = tile + (size_t)dim * S; /* F_h v [d][S]; then errors [64][S] */
    unit_load(units + blockIdx.y, unit);
    if (first >= unit->view.slots)
        return;
    uint32_t slot = first + page_of_warp<S>() * KV_PAGE_SLOTS;
    const char *page = slot < unit->view.slots ? page_of(&pool, unit->view.pages[slot / KV_PAGE_SLOTS]) : NULL;
    tile_values<FORMAT, S, WIDE>(page != NULL ? values_of(&pool, page) : NULL, dim, tile);
    size_t stride = padded_rows(dim), window = window_stride(unit);
    double smooth = 0;
    for (uint32_t query = 0; query < unit->rows; query += PRODUCT_ROWS) {
        float total[4][S / 16] = {{0}};
        for (uint32_t g = 0; g < group; g++) {
            const float *factor = unit->factors + (size_t)(unit->head * group + g) * dim * stride;
            float sums[4][S / 16];
            for (uint32_t row = 0; row < dim; row += PRODUCT_ROWS) {
                product_rows<S, false>(
                    factor + row, stride, row + PRODUCT_ROWS < dim ? row + PRODUCT_ROWS : dim, tile, slices, sums);
#pragma unroll
                for (uint32_t r = 0; r < 4; r++)
                    if (row + product_row() + r < dim)
                        tile_write<S>(turned, row + product_row() + r, sums[r]);
            }
            product_rows<S, true>(unit->space + (size_t)g * dim * window + query, window, dim, turned, slices, sums);
            add_errors<S>(unit, group, g, dim, query, first, sums, total);
        }
#pragma unroll
        for (uint32_t r = 0; r < 4; r++)
            tile_write<S>(turned, product_row() + r, total[r]);
        __syncthreads();
        for (uint32_t t = 0; threadIdx.x < S && t < PRODUCT_ROWS && query + t < unit->rows; t++) {
            double error = (double)turned[tile_at<S>(t, threadIdx.x)];
            smooth = query + t == 0 ? error : smooth + (double)smoothing * (error - smooth);
        }
        __syncthreads();
    }
    slot = first + threadIdx.x;
    if (threadIdx.x < S && slot < unit->view.slots)
        unit->scores[slot] = slot_position(&pool, &unit->view, slot) == KV_NO_POSITION ? not_a_number() : (float)smooth;
}

#define DROP_LAUNCH(FORMAT, S, WIDE)                                                                                   \
    KERNEL_LAUNCH(score_drop<FORMAT, S, WIDE>, dim3((call->slots_most + S - 1) / S, some), dim3(PRODUCT_THREADS),      \
        sizeof(struct cuda_score_unit) +                                                                               \
            (PRODUCT_SLICES_FLOATS + ((size_t)dim + (dim > 64 ? dim : 64)) * S) * sizeof(float),                       \
        stream, units, call->pool, call->group, smoothing)

#define DROP_SIZES(FORMAT)                                                                                             \
    do {                                                                                                               \
        if (dim > 128 && wide)                                                                                         \
            DROP_LAUNCH(FORMAT, 32, true);                                                                             \
        else if (dim > 128)                                                                                            \
            DROP_LAUNCH(FORMAT, 32, false);                                                                            \
        else if (wide)                                                                                                 \
            DROP_LAUNCH(FORMAT, 64, true);                                                                             \
        else                                                                                                           \
            DROP_LAUNCH(FORMAT, 64, false);                                                                            \
    } while (0)

static void launch_drop(const struct cuda_score_call *call, const struct cuda_score_unit *units, uint32_t some,
    float smoothing, cudaStream_t stream) {
    uint32_t dim = call->pool.layout.head_dim;
    bool wide = dim * kv_format_bytes(call->pool.layout.format) % sizeof(uint4) == 0;
    if (call->pool.layout.format == KV_F32)
        DROP_SIZES(KV_F32);
    else if (call->pool.layout.format == KV_F16)
        DROP_SIZES(KV_F16);
    else
        DROP_SIZES(KV_BF16);
}

void launch_score_drop_error(
    const struct cuda_score_call *call, uint32_t window_most, float smoothing, cudaStream_t stream) {
    uint32_t dim = call->pool.layout.head_dim;
    size_t outputs =
        sizeof(struct cuda_score_unit) + (PRODUCT_SLICES_FLOATS + (size_t)dim * SCORE_TILE) * sizeof(float);
    size_t excess = sizeof(struct cuda_score_unit) + WARP * sizeof(double);
    for (uint32_t first = 0; call->slots_most > 0 && first < call->count; first += SCORE_UNITS_GRID) {
        const struct cuda_score_unit *units = call->units + first;
        uint32_t some = units_at_once(call->count - first);
        KERNEL_LAUNCH(score_drop_outputs, dim3((window_most + SCORE_TILE - 1) / SCORE_TILE, call->group, some),
            dim3(PRODUCT_THREADS), outputs, stream, units, dim, call->group);
        KERNEL_LAUNCH(score_drop_excess, dim3((window_most + EXCESS_QUERIES - 1) / EXCESS_QUERIES, call->group, some),
            dim3(ROW_THREADS), excess, stream, units, call->pool, call->group);
        launch_drop(call, units, some, smoothing, stream);
    }
}
