/* SPDX-License-Identifier: Apache-2.0
 *
 * What the network keeps of a slot (policy/network.h), computed once: content from the key without its rotation, norms
 * of the value and of what it adds to the layer's output. No output is formed: the length of v W_h is that of F_h v.
 *
 * One launch lists the pages of every head that have slots without numbers; the next takes four of them a block.
 */
#include "cuda/score_list.h"
#include "cuda/score_product.h"

enum { CONTENT = NETWORK_CONTENT_MAX, TILE_PAGES = SCORE_TILE / KV_PAGE_SLOTS };

static_assert((uint32_t)CONTENT == 16, "four threads of a slot have four numbers each");

/* The row of ln |v|, in which 0 means that the slot has no numbers. */
SCORE_INLINE uint16_t *norms_row(const struct kv_statistics *statistics) {
    return statistics->content_rows + (size_t)statistics->content * statistics->capacity;
}

static __global__ void __launch_bounds__(LIST_THREADS)
    score_numbers_list(const struct cuda_score_unit *units, struct kv_pool pool) {
    KERNEL_SHARED(struct cuda_score_unit, unit);
    struct list_space *space = (struct list_space *)(unit + 1);
    unit_load(units + blockIdx.x, unit);
    const uint16_t *norms = norms_row(&unit->statistics);
    list_pages(&pool, unit, space, [&](uint32_t slot) { return norms[slot] == 0; });
}

/* ---- one tile ---- */

/* What a block works in, after its unit. */
struct numbers_space {
    uint32_t slots[SCORE_TILE];    /* of the head */
    int32_t positions[SCORE_TILE]; /* KV_NO_POSITION: nothing to compute */
    float parts[4][SCORE_TILE];
    float frequencies[SCORE_DIM_MAX / 2];
    float slices[PRODUCT_SLICES_FLOATS];
};

/* Cosine and sine of position * frequency. The product is split in what float holds of it and the rest; quarter turns
 * are taken off exactly (a position below 2^20 leaves a multiple of 2^-23); then polynomials on [-pi/4, pi/4], those of
 * Cephes' sinf and cosf. */
SCORE_INLINE float2 turn_of(int32_t position, float frequency) {
    const float quarter = 0x1.921fb6p+0f, rest = -0x1.777a5cp-25f; /* pi / 2 = quarter + rest */
    float whole = (float)position, angle = whole * frequency, lost = fmaf(whole, frequency, -angle);
    float quarters = rintf(angle * 0x1.45f306p-1f);
    float x = fmaf(-quarters, quarter, angle);
    x = fmaf(-quarters, rest, x) + lost;
    float square = x * x;
    float sine =
        fmaf(fmaf(fmaf(-1.9515295891e-4f, square, 8.3321608736e-3f), square, -1.6666654611e-1f) * square, x, x);
    float cosine =
        fmaf(fmaf(fmaf(2.443315711809948e-5f, square, -1.388731625493765e-3f), square, 4.166664568298827e-2f),
            square * square, fmaf(-0.5f, square, 1.0f));
    int turns = (int)quarters & 3;
    float c = turns & 1 ? sine : cosine, s = turns & 1 ? cosine : sine;
    return make_float2(turns == 1 || turns == 2 ? -c : c, turns & 2 ? -s : s);
}

/* Undoes the rotation of the tile's keys. */
SCORE_INLINE void tile_unturn(float *tile, uint32_t pairs, const struct numbers_space *space) {
    uint32_t slot = threadIdx.x % SCORE_TILE;
    int32_t position = space->positions[slot] != KV_NO_POSITION ? space->positions[slot] : 0;
    for (uint32_t pair = threadIdx.x / SCORE_TILE; pair < pairs; pair += PRODUCT_THREADS / SCORE_TILE) {
        float *even = tile + tile_at<SCORE_TILE>(2 * pair, slot), *odd = tile + tile_at<SCORE_TILE>(2 * pair + 1, slot);
        float2 turn = turn_of(position, space->frequencies[pair]);
        float x = *even, y = *odd;
        *even = fmaf(x, turn.x, y * turn.y);
        *odd = y * turn.x - x * turn.y;
    }
}

/* f16, at most 65504 and never +0. */
SCORE_INLINE uint16_t narrow(float number) {
    uint16_t bits = __half_as_ushort(__float2half_rn(fmaxf(-65504, fminf(65504, number))));
    return bits == 0 ? 0x8000 : bits;
}

/* C k + o of the tile's keys: a thread has four numbers of a slot. content: [d][16] shared. */
SCORE_INLINE void tile_content(const struct cuda_score_unit *unit, const struct cuda_score_network *network,
    const float *offsets, const float *tile, const float *content, uint32_t dim, const struct numbers_space *space) {
    uint32_t slot = threadIdx.x % SCORE_TILE, first = threadIdx.x / SCORE_TILE * 4;
    float sums[4] = {0, 0, 0, 0};
#pragma unroll 4
    for (uint32_t c = 0; c < dim; c++) {
        float4 m = *(const float4 *)(content + c * CONTENT + first);
        float x = tile[tile_at<SCORE_TILE>(c, slot)];
        sums[0] = fmaf(m.x, x, sums[0]);
        sums[1] = fmaf(m.y, x, sums[1]);
        sums[2] = fmaf(m.z, x, sums[2]);
        sums[3] = fmaf(m.w, x, sums[3]);
    }
    if (space->positions[slot] == KV_NO_POSITION)
        return;
#pragma unroll
    for (uint32_t i = 0; i < 4; i++)
        if (first + i < network->content)
            unit->statistics.content_rows[(size_t)(first + i) * unit->statistics.capacity + space->slots[slot]] =
                narrow(sums[i] + offsets[first + i]);
}

/* Length of a slot's value, for threads below SCORE_TILE. */
SCORE_INLINE float tile_length(const float *tile, uint32_t dim, struct numbers_space *space) {
    uint32_t slot = threadIdx.x % SCORE_TILE, part = threadIdx.x / SCORE_TILE;
    float sum = 0;
    for (uint32_t c = part; c < dim; c += PRODUCT_THREADS / SCORE_TILE) {
        float x = tile[tile_at<SCORE_TILE>(c, slot)];
        sum = fmaf(x, x, sum);
    }
    space->parts[part][slot] = sum;
    __syncthreads();
    return sqrtf(space->parts[0][slot] + space->parts[1][slot] + (space->parts[2][slot] + space->parts[3][slot]));
}

/* Mean over the group of |F_h v|, for threads below SCORE_TILE. */
SCORE_INLINE float tile_output_length(
    const float *factors, uint32_t group, const float *tile, uint32_t dim, struct numbers_space *space) {
    size_t stride = padded_rows(dim);
    double total = 0;
    for (uint32_t g = 0; g < group; g++, factors += dim * stride) {
        double parts[SCORE_TILE / 16] = {0, 0, 0, 0};
        for (uint32_t row = 0; row < dim; row += PRODUCT_ROWS) {
            float sums[4][SCORE_TILE / 16];
            uint32_t depth = row + PRODUCT_ROWS < dim ? row + PRODUCT_ROWS : dim;
            product_rows<SCORE_TILE, false>(factors + row, stride, depth, tile, space->slices, sums);
#pragma unroll
            for (int s = 0; s < SCORE_TILE / 16; s++)
                parts[s] += (double)fmaf(sums[0][s], sums[0][s], sums[1][s] * sums[1][s]) +
                            (double)fmaf(sums[2][s], sums[2][s], sums[3][s] * sums[3][s]);
        }
        total += sqrt(sum_rows<SCORE_TILE>(parts, space->slices));
    }
    return (float)(total / (double)group);
}

SCORE_INLINE float log_of(float length) {
    return logf(1e-6f + length);
}

/* The block's slots: of four listed pages, or of four pages in a row. */
SCORE_INLINE const char *tile_open(const struct kv_pool *pool, const struct cuda_score_unit *unit, bool listed,
    uint32_t pages, struct numbers_space *space) {
    uint32_t index = blockIdx.x * TILE_PAGES + page_of_warp<SCORE_TILE>(), lane = threadIdx.x % WARP;
    const char *page = NULL;
    uint32_t number = 0;
    if (index < pages) {
        number = listed ? unit->pages_list[1 + index] : index;
        page = page_of(pool, unit->view.pages[number]);
    }
    if (turn_of_warp<SCORE_TILE>() == 0 && lane < KV_PAGE_SLOTS) {
        uint32_t slot = number * KV_PAGE_SLOTS + lane, at = page_of_warp<SCORE_TILE>() * KV_PAGE_SLOTS + lane;
        bool wanted = page != NULL && slot < unit->view.slots;
        if (wanted && listed)
            wanted = norms_row(&unit->statistics)[slot] == 0;
        space->slots[at] = page != NULL ? slot : 0xffffffffu; /* none of the head */
        space->positions[at] = wanted ? positions_of(pool, page)[lane] : (int32_t)KV_NO_POSITION;
    }
    return page;
}

template <enum kv_format FORMAT, bool WIDE>
static __global__ void __launch_bounds__(PRODUCT_THREADS)
    score_numbers(const struct cuda_score_unit *units, struct kv_pool pool, struct cuda_score_network network,
        uint32_t group, uint32_t rope_pairs, const float *inverse_freq) {
    KERNEL_SHARED(struct cuda_score_unit, unit);
    struct numbers_space *space = (struct numbers_space *)(unit + 1);
    float *tile = (float *)(space + 1);
    uint32_t dim = pool.layout.head_dim;
    float *content = tile + (size_t)dim * SCORE_TILE; /* [d][16] */
    unit_load(units + blockIdx.y, unit);
    bool listed = unit->norms == NULL;
    uint32_t pages = listed ? unit->pages_list[0] : (unit->view.slots + KV_PAGE_SLOTS - 1) / KV_PAGE_SLOTS;
    if (blockIdx.x * TILE_PAGES >= pages)
        return;
    const char *page = tile_open(&pool, unit, listed, pages, space);
    size_t head = unit->number;
    if (listed && network.content > 0) {
        const float4 *rows = (const float4 *)(network.content_rows + head * dim * CONTENT);
        for (uint32_t i = threadIdx.x; i < dim * CONTENT / 4; i += PRODUCT_THREADS)
            ((float4 *)content)[i] = rows[i];
        for (uint32_t i = threadIdx.x; i < rope_pairs; i += PRODUCT_THREADS)
            space->frequencies[i] = inverse_freq[i];
        tile_keys<FORMAT, SCORE_TILE>(page, dim, tile);
        __syncthreads();
        tile_unturn(tile, rope_pairs, space);
        __syncthreads();
        tile_content(unit, &network, network.content_offset + head * CONTENT, tile, content, dim, space);
    }
    __syncthreads();
    tile_values<FORMAT, SCORE_TILE, WIDE>(page != NULL ? values_of(&pool, page) : NULL, dim, tile);
    __syncthreads();
    float value = log_of(tile_length(tile, dim, space)), output = 0;
    if (network.weighs)
        output = log_of(tile_output_length(
            unit->factors + (size_t)unit->head * group * dim * padded_rows(dim), group, tile, dim, space));
    if (threadIdx.x >= SCORE_TILE)
        return;
    uint32_t slot = space->slots[threadIdx.x];
    bool there = space->positions[threadIdx.x] != KV_NO_POSITION;
    if (!listed && slot < unit->view.slots) {
        unit->norms[slot] = there ? value : 0;
        unit->norms[unit->view.slots + slot] = there ? output : 0;
    } else if (listed && there) {
        if (network.weighs)
            norms_row(&unit->statistics)[unit->statistics.capacity + slot] = narrow(output);
        norms_row(&unit->statistics)[slot] = narrow(value);
    }
}

/* ---- launches ---- */

static size_t numbers_shared(uint32_t dim, bool content) {
    return sizeof(struct cuda_score_unit) + sizeof(struct numbers_space) +
           (size_t)dim * (SCORE_TILE + (content ? CONTENT : 0)) * sizeof(float);
}

static void launch_numbers(const struct cuda_score_call *call, const struct cuda_score_network *network,
    uint32_t rope_pairs, const float *inverse_freq, cudaStream_t stream) {
    uint32_t tiles = (call->slots_most + SCORE_TILE - 1) / SCORE_TILE;
    size_t shared = numbers_shared(call->pool.layout.head_dim, network->content > 0);
    bool wide = call->pool.layout.head_dim * kv_format_bytes(call->pool.layout.format) % sizeof(uint4) == 0;
    for (uint32_t first = 0; tiles > 0 && first < call->count; first += SCORE_UNITS_GRID) {
        uint32_t count = units_at_once(call->count - first);
        SCORE_FORMATS_WIDE(call->pool.layout.format, wide, score_numbers, dim3(tiles, count), dim3(PRODUCT_THREADS),
            shared, stream, call->units + first, call->pool, *network, call->group, rope_pairs, inverse_freq);
    }
}

void launch_score_numbers(const struct cuda_score_call *call, const struct cuda_score_network *network,
    uint32_t rope_dim, const float *inverse_freq, cudaStream_t stream) {
    size_t shared = sizeof(struct cuda_score_unit) + sizeof(struct list_space);
    KERNEL_LAUNCH(score_numbers_list, dim3(call->count), dim3(LIST_THREADS), shared, stream, call->units, call->pool);
    launch_numbers(call, network, rope_dim / 2, inverse_freq, stream);
}

void launch_score_norms(const struct cuda_score_call *call, bool weighs, cudaStream_t stream) {
    struct cuda_score_network network = {};
    network.weighs = weighs;
    launch_numbers(call, &network, 0, NULL, stream);
}
