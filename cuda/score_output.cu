/* SPDX-License-Identifier: Apache-2.0
 *
 * Scores that weigh what a slot adds to the layer's output, u_{h,i} = v_i W_h: criticalkv's norms and laprox.
 */
#include "cuda/score_list.h"
#include "cuda/score_product.h"

enum { TILE_PAGES = SCORE_TILE / KV_PAGE_SLOTS };

/* ---- norms of outputs ---- */

/* Pages that have slots without a norm. */
static __global__ void __launch_bounds__(LIST_THREADS)
    score_output_list(const struct cuda_score_unit *units, struct kv_pool pool) {
    KERNEL_SHARED(struct cuda_score_unit, unit);
    struct list_space *space = (struct list_space *)(unit + 1);
    unit_load(units + blockIdx.x, unit);
    list_pages(&pool, unit, space, [&](uint32_t slot) { return unit->statistics.output_norm[slot] == 0; });
}

/* The thread's part of the L1 norms of v W_h, for 64 rows of W_o after the other and the heads of a group. */
template <typename number>
SCORE_INLINE void add_norms(const struct cuda_score_unit *unit, const number *dense, uint32_t group, uint32_t dim,
    const float *tile, float *slices, double parts[SCORE_TILE / 16]) {
    size_t stride = padded_rows(unit->width);
    for (uint32_t g = 0; g < group; g++) {
        const number *of_head = dense + (size_t)(unit->head * group + g) * dim * stride;
        for (uint32_t row = 0; row < unit->width; row += PRODUCT_ROWS) {
            float sums[4][SCORE_TILE / 16];
            product_rows<SCORE_TILE, false>(of_head + row, stride, dim, tile, slices, sums);
#pragma unroll
            for (int s = 0; s < SCORE_TILE / 16; s++)
                parts[s] += (double)(fabsf(sums[0][s]) + fabsf(sums[1][s]) + (fabsf(sums[2][s]) + fabsf(sums[3][s])));
        }
    }
}

/* Group mean of the L1 norm of v W_h, of the slots of four listed pages that have none. */
template <enum kv_format FORMAT, bool WIDE>
static __global__ void __launch_bounds__(PRODUCT_THREADS, 2)
    score_output_norms(const struct cuda_score_unit *units, struct kv_pool pool, uint32_t group) {
    KERNEL_SHARED(struct cuda_score_unit, unit);
    float *slices = (float *)(unit + 1), *tile = slices + PRODUCT_SLICES_FLOATS;
    uint32_t dim = pool.layout.head_dim;
    unit_load(units + blockIdx.y, unit);
    uint32_t pages = unit->pages_list[0], index = blockIdx.x * TILE_PAGES + page_of_warp<SCORE_TILE>();
    if (blockIdx.x * TILE_PAGES >= pages)
        return;
    const char *page = index < pages ? page_of(&pool, unit->view.pages[unit->pages_list[1 + index]]) : NULL;
    tile_values<FORMAT, SCORE_TILE, WIDE>(page != NULL ? values_of(&pool, page) : NULL, dim, tile);
    double parts[SCORE_TILE / 16] = {0, 0, 0, 0};
    if (unit->dense_halves != 0)
        add_norms(unit, (const uint16_t *)unit->dense, group, dim, tile, slices, parts);
    else
        add_norms(unit, (const float *)unit->dense, group, dim, tile, slices, parts);
    double sum = sum_rows<SCORE_TILE>(parts, slices);
    index = blockIdx.x * TILE_PAGES + threadIdx.x / KV_PAGE_SLOTS;
    if (threadIdx.x >= SCORE_TILE || index >= pages)
        return;
    uint32_t slot = unit->pages_list[1 + index] * KV_PAGE_SLOTS + threadIdx.x % KV_PAGE_SLOTS;
    if (slot < unit->view.slots && unit->statistics.output_norm[slot] == 0 &&
        slot_position(&pool, &unit->view, slot) != KV_NO_POSITION)
        unit->statistics.output_norm[slot] = (float)(sum / (double)group);
}

void launch_score_output_norms(const struct cuda_score_call *call, cudaStream_t stream) {
    uint32_t tiles = (call->slots_most + SCORE_TILE - 1) / SCORE_TILE, dim = call->pool.layout.head_dim;
    size_t list = sizeof(struct cuda_score_unit) + sizeof(struct list_space);
    size_t shared = sizeof(struct cuda_score_unit) + (PRODUCT_SLICES_FLOATS + (size_t)dim * SCORE_TILE) * sizeof(float);
    bool wide = dim * kv_format_bytes(call->pool.layout.format) % sizeof(uint4) == 0;
    KERNEL_LAUNCH(score_output_list, dim3(call->count), dim3(LIST_THREADS), list, stream, call->units, call->pool);
    for (uint32_t first = 0; tiles > 0 && first < call->count; first += SCORE_UNITS_GRID)
        SCORE_FORMATS_WIDE(call->pool.layout.format, wide, score_output_norms,
            dim3(tiles, units_at_once(call->count - first)), dim3(PRODUCT_THREADS), shared, stream, call->units + first,
            call->pool, call->group);
}

/* ---- norm of the layer's output over the window ---- */

/* Outputs of a query head at up to 64 queries of the window, ring rows from `first` on, as a tile; zeros beyond. */
SCORE_INLINE void tile_outputs(
    const struct cuda_score_unit *unit, uint32_t group, uint32_t g, uint32_t first, uint32_t dim, float *tile) {
    const float *outputs = unit->statistics.outputs + ((size_t)first * group + g) * dim;
    uint32_t left = unit->rows - first;
    tile_rows<SCORE_TILE>(
        [&](uint32_t query) { return query < left ? outputs + (size_t)query * group * dim : NULL; }, dim, tile);
}

/* Sums of squares of 64 rows of W_o times all outputs: space[row / 64] of the layer's first unit, doubles. */
static __global__ void __launch_bounds__(PRODUCT_THREADS)
    score_window_norm(const struct cuda_score_unit *units, struct kv_pool pool, uint32_t group) {
    uint32_t kv_heads = pool.layout.kv_heads, dim = pool.layout.head_dim, row = blockIdx.x * PRODUCT_ROWS;
    const struct cuda_score_unit *layer = units + (size_t)blockIdx.y * kv_heads;
    KERNEL_SHARED(double, space);
    float *slices = (float *)(space + WARP), *tile = slices + PRODUCT_SLICES_FLOATS;
    if (row >= layer->width)
        return;
    size_t stride = padded_rows(layer->width);
    double total = 0;
    for (uint32_t first = 0; first < layer->rows; first += SCORE_TILE) {
        float all[4][SCORE_TILE / 16] = {{0}};
        for (uint32_t h = 0; h < kv_heads * group; h++) {
            float sums[4][SCORE_TILE / 16];
            __syncthreads();
            tile_outputs(&layer[h / group], group, h % group, first, dim, tile);
            size_t at = (size_t)h * dim * stride + row;
            if (layer->dense_halves != 0)
                product_rows<SCORE_TILE, false>((const uint16_t *)layer->dense + at, stride, dim, tile, slices, sums);
            else
                product_rows<SCORE_TILE, false>((const float *)layer->dense + at, stride, dim, tile, slices, sums);
#pragma unroll
            for (int r = 0; r < 4; r++)
#pragma unroll
                for (int s = 0; s < SCORE_TILE / 16; s++)
                    all[r][s] += sums[r][s];
        }
#pragma unroll
        for (int r = 0; r < 4; r++)
#pragma unroll
            for (int s = 0; s < SCORE_TILE / 16; s++)
                total += (double)all[r][s] * (double)all[r][s];
    }
    total = block_sum(total, space);
    if (threadIdx.x == 0)
        ((double *)layer->space)[blockIdx.x] = total;
}

/* ---- laprox ---- */

/* What a block works in, after its unit; then two tiles [d][S]. */
template <int S> struct laprox_space {
    double norm[WARP];
    float weights[16][S];
    float slices[PRODUCT_SLICES_FLOATS];
};

SCORE_INLINE const uint16_t *probabilities(const struct cuda_score_unit *unit, uint32_t group, uint32_t g) {
    return unit->statistics.head_rows + (size_t)g * unit->statistics.capacity;
}

/* sum over t of p_h p_g of the thread's slots, from `first` on; a thread of sixteen has every sixteenth t. */
template <int S>
SCORE_INLINE void pair_weights(const struct cuda_score_unit *of_h, uint32_t h, const struct cuda_score_unit *of_g,
    uint32_t g, uint32_t group, uint32_t first, struct laprox_space<S> *space, float weights[S / 16]) {
    uint32_t slot = threadIdx.x % 16 * (S / 16), part = threadIdx.x / 16;
    const uint16_t *p = probabilities(of_h, group, h) + first + slot, *q = probabilities(of_g, group, g) + first + slot;
    size_t p_step = (size_t)group * of_h->statistics.capacity, q_step = (size_t)group * of_g->statistics.capacity;
    bool there = first + slot < of_h->statistics.capacity && first + slot < of_g->statistics.capacity;
    float sums[S / 16];
#pragma unroll
    for (int s = 0; s < S / 16; s++)
        sums[s] = 0;
    bool same = p == q;
    uint32_t rows = there ? of_h->rows : 0;
    for (uint32_t t = part; t < rows; t += 16) {
        float of_p[S / 16], of_q[S / 16];
        read_probabilities<S>(p + t * p_step, of_p);
        if (same) {
#pragma unroll
            for (int s = 0; s < S / 16; s++)
                of_q[s] = of_p[s];
        } else {
            read_probabilities<S>(q + t * q_step, of_q);
        }
#pragma unroll
        for (int s = 0; s < S / 16; s++)
            sums[s] = fmaf(of_p[s], of_q[s], sums[s]);
    }
    __syncthreads();
#pragma unroll
    for (int s = 0; s < S / 16; s++)
        space->weights[part][s * 16 + threadIdx.x % 16] = sums[s];
    __syncthreads();
#pragma unroll
    for (int s = 0; s < S / 16; s++) {
        weights[s] = 0;
        for (uint32_t i = 0; i < 16; i++)
            weights[s] += space->weights[i][s * 16 + threadIdx.x % 16];
    }
}

/* Adds weight times u_h . u_g: the length of F_h v for h = g, else v_h (W_h W_g^T) v_g, twice. */
template <int S>
SCORE_INLINE void add_pair(const float *matrix, bool same, uint32_t dim, const float *of_h, const float *of_g,
    const float weights[S / 16], struct laprox_space<S> *space, double total[S / 16]) {
    float parts[S / 16];
#pragma unroll
    for (int s = 0; s < S / 16; s++)
        parts[s] = 0;
    for (uint32_t row = 0; row < dim; row += PRODUCT_ROWS) {
        float sums[4][S / 16];
        uint32_t depth = same && row + PRODUCT_ROWS < dim ? row + PRODUCT_ROWS : dim;
        product_rows<S, false>(matrix + row, padded_rows(dim), depth, of_g, space->slices, sums);
#pragma unroll
        for (uint32_t r = 0; r < 4; r++) {
            float with[S / 16];
            if (row + product_row() + r >= dim)
                break;
            if (!same)
                tile_read<S>(of_h, row + product_row() + r, with);
#pragma unroll
            for (int s = 0; s < S / 16; s++)
                parts[s] = fmaf(sums[r][s], same ? sums[r][s] : with[s], parts[s]);
        }
    }
#pragma unroll
    for (int s = 0; s < S / 16; s++)
        total[s] += (same ? 1.0 : 2.0) * (double)weights[s] * (double)parts[s];
}

/* The values of a unit's slots from `first` on. */
template <enum kv_format FORMAT, int S, bool WIDE>
SCORE_INLINE void laprox_values(
    const struct kv_pool *pool, const struct cuda_score_unit *unit, uint32_t first, float *tile) {
    uint32_t slot = first + page_of_warp<S>() * KV_PAGE_SLOTS;
    const char *page = slot < unit->view.slots ? page_of(pool, unit->view.pages[slot / KV_PAGE_SLOTS]) : NULL;
    tile_values<FORMAT, S, WIDE>(page != NULL ? values_of(pool, page) : NULL, pool->layout.head_dim, tile);
}

/* Scores of S slots by the query heads of KV heads first_head to end_head - 1. */
template <enum kv_format FORMAT, int S, bool WIDE>
SCORE_INLINE double laprox_tile(const struct cuda_score_unit *layer, const struct kv_pool *pool, uint32_t group,
    uint32_t first_head, uint32_t end_head, uint32_t first, struct laprox_space<S> *space) {
    uint32_t dim = pool->layout.head_dim, heads = pool->layout.kv_heads * group;
    float *of_g = (float *)(space + 1), *other = of_g + (size_t)dim * S;
    size_t matrix = (size_t)dim * padded_rows(dim);
    double total[S / 16];
#pragma unroll
    for (int s = 0; s < S / 16; s++)
        total[s] = 0;
    for (uint32_t kg = first_head; kg < end_head; kg++) {
        __syncthreads();
        laprox_values<FORMAT, S, WIDE>(pool, &layer[kg], first, of_g);
        for (uint32_t kh = first_head; kh <= kg; kh++) {
            const float *of_h = kh == kg ? of_g : other;
            __syncthreads();
            if (kh != kg)
                laprox_values<FORMAT, S, WIDE>(pool, &layer[kh], first, other);
            for (uint32_t pair = 0; pair < group * group; pair++) {
                uint32_t h = kh * group + pair / group, g = kg * group + pair % group;
                float weights[S / 16];
                if (h > g)
                    continue;
                pair_weights<S>(&layer[kh], h % group, &layer[kg], g % group, group, first, space, weights);
                add_pair<S>(h == g ? layer->factors + h * matrix : layer->grams + ((size_t)h * heads + g) * matrix,
                    h == g, dim, of_h, of_g, weights, space, total);
            }
        }
    }
    return sum_rows<S>(total, space->slices);
}

/* WHOLE: of all heads of a layer, a block of the layer's first unit for every tile; else a unit alone. */
template <enum kv_format FORMAT, int S, bool WIDE, bool WHOLE>
static __global__ void __launch_bounds__(PRODUCT_THREADS, 2)
    score_laprox(const struct cuda_score_unit *units, struct kv_pool pool, uint32_t group) {
    KERNEL_SHARED(struct laprox_space<S>, space);
    uint32_t kv_heads = pool.layout.kv_heads, number = WHOLE ? 0 : blockIdx.y % kv_heads;
    const struct cuda_score_unit *layer = units + (WHOLE ? blockIdx.y * kv_heads : blockIdx.y - number);
    uint32_t first = blockIdx.x * S, slots = layer[number].view.slots,
             tiles = (layer->width + SCORE_ROWS - 1) / SCORE_ROWS;
    if (first >= slots)
        return;
    double norm = 0;
    for (uint32_t i = threadIdx.x; i < tiles; i += PRODUCT_THREADS)
        norm += ((const double *)layer->space)[i];
    float square = (float)block_sum(norm, space->norm), inverse = square > 0 ? 1 / square : 0;
    double total =
        laprox_tile<FORMAT, S, WIDE>(layer, &pool, group, number, WHOLE ? kv_heads : number + 1, first, space);
    uint32_t slot = first + threadIdx.x;
    if (threadIdx.x >= S || slot >= slots)
        return;
    float score = sqrtf((float)(total > 0 ? total : 0) * inverse);
    if (slot_position(&pool, &layer[number].view, slot) == KV_NO_POSITION)
        score = not_a_number();
    for (uint32_t k = number; k < (WHOLE ? kv_heads : number + 1); k++)
        layer[k].scores[slot] = score;
}

/* Slots of a tile: as many as two tiles leave room for. */
static bool is_large(uint32_t dim) {
    return dim > 128;
}

#define LAPROX_LAUNCH(FORMAT, S, WIDE, WHOLE)                                                                          \
    KERNEL_LAUNCH(score_laprox<FORMAT, S, WIDE, WHOLE>, grid, dim3(PRODUCT_THREADS),                                   \
        sizeof(struct laprox_space<S>) + 2 * (size_t)dim * S * sizeof(float), stream, units, call->pool, call->group)

#define LAPROX_SIZES(FORMAT, WIDE, WHOLE)                                                                              \
    do {                                                                                                               \
        if (is_large(dim))                                                                                             \
            LAPROX_LAUNCH(FORMAT, 32, WIDE, WHOLE);                                                                    \
        else                                                                                                           \
            LAPROX_LAUNCH(FORMAT, 64, WIDE, WHOLE);                                                                    \
    } while (0)

#define LAPROX_WIDTHS(FORMAT, WHOLE)                                                                                   \
    do {                                                                                                               \
        if (wide)                                                                                                      \
            LAPROX_SIZES(FORMAT, true, WHOLE);                                                                         \
        else                                                                                                           \
            LAPROX_SIZES(FORMAT, false, WHOLE);                                                                        \
    } while (0)

template <bool WHOLE>
static void launch_laprox(
    const struct cuda_score_call *call, const struct cuda_score_unit *units, dim3 grid, cudaStream_t stream) {
    uint32_t dim = call->pool.layout.head_dim;
    bool wide = dim * kv_format_bytes(call->pool.layout.format) % sizeof(uint4) == 0;
    if (call->pool.layout.format == KV_F32)
        LAPROX_WIDTHS(KV_F32, WHOLE);
    else if (call->pool.layout.format == KV_F16)
        LAPROX_WIDTHS(KV_F16, WHOLE);
    else
        LAPROX_WIDTHS(KV_BF16, WHOLE);
}

void launch_score_laprox(const struct cuda_score_call *call, bool whole, uint32_t width_most, cudaStream_t stream) {
    uint32_t dim = call->pool.layout.head_dim, kv_heads = call->pool.layout.kv_heads, layers = call->count / kv_heads;
    uint32_t slots = is_large(dim) ? 32 : 64, tiles = (call->slots_most + slots - 1) / slots;
    size_t shared = WARP * sizeof(double) + (PRODUCT_SLICES_FLOATS + (size_t)dim * SCORE_TILE) * sizeof(float);
    uint32_t at_once = whole ? (uint32_t)SCORE_UNITS_GRID : (uint32_t)SCORE_UNITS_GRID / kv_heads;
    for (uint32_t first = 0; tiles > 0 && first < layers; first += at_once) {
        uint32_t count = layers - first < at_once ? layers - first : at_once;
        const struct cuda_score_unit *units = call->units + (size_t)first * kv_heads;
        KERNEL_LAUNCH(score_window_norm, dim3((width_most + SCORE_ROWS - 1) / SCORE_ROWS, count), dim3(PRODUCT_THREADS),
            shared, stream, units, call->pool, call->group);
        if (whole)
            launch_laprox<true>(call, units, dim3(tiles, count), stream);
        else
            launch_laprox<false>(call, units, dim3(tiles, count * kv_heads), stream);
    }
}
