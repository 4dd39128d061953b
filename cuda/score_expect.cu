/* SPDX-License-Identifier: Apache-2.0
 *
 * Expected attention (policy/expected_attention.c): logits of keys under what queries are expected to be, k mu /
 * sqrt(d)
 * + k S k / (2 d), and their mean softmax over the group. mu and S are turned by the mean rotation of positions to
 * come.
 */
#include "cuda/score_product.h"

enum {
    QUERY_THREADS = 256,
    EXPECT_THREADS = 1024,
    EXPECT_HELD = SCORE_HELD / EXPECT_THREADS,
    MOMENTS_FROM = 4, /* first position that counts */
};

/* A query head's part of a unit's scratch: mean [d, padded], covariance [d][d, padded] turned; behind all of them
 * logits [G][slots, rounded up to 64]. */
SCORE_INLINE size_t query_floats(uint32_t dim) {
    return (dim + 1) * padded_rows(dim);
}

SCORE_INLINE float *logits_of(const struct cuda_score_unit *unit, uint32_t group, uint32_t g, uint32_t dim) {
    size_t slots = ((size_t)unit->view.slots + SCORE_TILE - 1) / SCORE_TILE * SCORE_TILE;
    return unit->space + group * query_floats(dim) + g * slots;
}

size_t score_expect_floats(uint32_t slots, uint32_t group, uint32_t dim) {
    size_t stride = ((size_t)dim + SCORE_ROWS - 1) / SCORE_ROWS * SCORE_ROWS;
    return group * ((dim + 1) * stride + ((size_t)slots + SCORE_TILE - 1) / SCORE_TILE * SCORE_TILE);
}

/* ---- expected queries ---- */

/* Mean of the turns of one pair over n positions from `first`: the sum of a geometric series of e^(i angle). */
SCORE_INLINE double2 mean_turn(double frequency, uint32_t first, uint32_t n) {
    double half = sin(frequency / 2), middle = frequency * ((double)first + ((double)n - 1) / 2);
    double length = half != 0 ? sin(frequency * (double)n / 2) / ((double)n * half) : 1;
    return make_double2(cos(middle) * length, sin(middle) * length);
}

/* Row `i` of the mean rotation: two channels that it joins, and their factors. */
struct turn_row {
    uint32_t even, odd;
    double by_even, by_odd;
};

SCORE_INLINE struct turn_row turn_row(const double2 *turns, uint32_t rope_dim, uint32_t i) {
    struct turn_row row = {i, i, 1, 0};
    if (i >= rope_dim)
        return row;
    double2 turn = turns[i / 2];
    row.even = i / 2 * 2;
    row.odd = row.even + 1;
    row.by_even = i % 2 == 0 ? turn.x : turn.y;
    row.by_odd = i % 2 == 0 ? -turn.y : turn.x;
    return row;
}

/* The moments of one query head, as the layer has them. */
struct moments {
    const double *sum, *outer; /* [d], [d][d] upper triangle */
    double part;
    uint32_t dim;
};

SCORE_INLINE double covariance(const struct moments *moments, uint32_t i, uint32_t j) {
    size_t at = i <= j ? (size_t)i * moments->dim + j : (size_t)j * moments->dim + i;
    double part = moments->part;
    return moments->outer[at] * part - moments->sum[i] * part * (moments->sum[j] * part);
}

/* Element (i, j) of the turned covariance. */
SCORE_INLINE double turned(const struct moments *moments, struct turn_row i, struct turn_row j) {
    double sum = i.by_even * j.by_even * covariance(moments, i.even, j.even);
    sum += i.by_even * j.by_odd * covariance(moments, i.even, j.odd);
    sum += i.by_odd * j.by_even * covariance(moments, i.odd, j.even);
    return sum + i.by_odd * j.by_odd * covariance(moments, i.odd, j.odd);
}

/* Blocks: (row of the covariance, g, unit). The lower triangle, with what mirrors it added to it. */
static __global__ void __launch_bounds__(QUERY_THREADS) score_expect_query(const struct cuda_score_unit *units,
    uint32_t dim, uint32_t group, uint32_t rope_dim, const float *inverse_freq, uint32_t n) {
    KERNEL_SHARED(struct cuda_score_unit, unit);
    double2 *turns = (double2 *)(unit + 1); /* [rope_dim / 2] */
    uint32_t column = blockIdx.x, g = blockIdx.y;
    unit_load(units + blockIdx.z, unit);
    if (unit->view.slots == 0)
        return;
    for (uint32_t pair = threadIdx.x; pair < rope_dim / 2; pair += QUERY_THREADS)
        turns[pair] = mean_turn((double)inverse_freq[pair], unit->seen, n);
    __syncthreads();
    uint32_t h = unit->head * group + g, count = *unit->moments.count;
    const struct moments moments = {unit->moments.sum + (size_t)h * dim, unit->moments.outer + (size_t)h * dim * dim,
        count > 0 ? 1 / (double)count : 0, dim};
    float *mean = unit->space + g * query_floats(dim), *to = mean + (column + 1) * padded_rows(dim);
    struct turn_row across = turn_row(turns, rope_dim, column);
    for (uint32_t row = threadIdx.x; row < padded_rows(dim); row += QUERY_THREADS) {
        double value = 0;
        if (row < dim && row >= column)
            value = turned(&moments, turn_row(turns, rope_dim, row), across) * (row > column ? 2 : 1);
        to[row] = (float)(value / (2 * (double)dim));
    }
    if (column == 0 && threadIdx.x < dim) {
        struct turn_row own = turn_row(turns, rope_dim, threadIdx.x);
        double sum = own.by_even * moments.sum[own.even] + own.by_odd * moments.sum[own.odd];
        mean[threadIdx.x] = (float)(sum * moments.part / sqrt((double)dim));
    }
}

/* ---- logits ---- */

template <enum kv_format FORMAT>
static __global__ void __launch_bounds__(PRODUCT_THREADS)
    score_expect_logits(const struct cuda_score_unit *units, struct kv_pool pool, uint32_t group) {
    KERNEL_SHARED(struct cuda_score_unit, unit);
    float *slices = (float *)(unit + 1), *tile = slices + PRODUCT_SLICES_FLOATS;
    uint32_t dim = pool.layout.head_dim, first = blockIdx.x * SCORE_TILE;
    unit_load(units + blockIdx.y, unit);
    if (first >= unit->view.slots)
        return;
    uint32_t slot = first + page_of_warp<SCORE_TILE>() * KV_PAGE_SLOTS;
    const char *page = slot < unit->view.slots ? page_of(&pool, unit->view.pages[slot / KV_PAGE_SLOTS]) : NULL;
    tile_keys<FORMAT, SCORE_TILE>(page, dim, tile);
    size_t stride = padded_rows(dim);
    for (uint32_t g = 0; g < group; g++) {
        const float *mean = unit->space + g * query_floats(dim), *matrix = mean + stride;
        double parts[SCORE_TILE / 16] = {0, 0, 0, 0};
        for (uint32_t row = 0; row < dim; row += PRODUCT_ROWS) {
            float sums[4][SCORE_TILE / 16];
            product_rows<SCORE_TILE, false>(
                matrix + row, stride, row + PRODUCT_ROWS < dim ? row + PRODUCT_ROWS : dim, tile, slices, sums);
#pragma unroll
            for (uint32_t r = 0; r < 4; r++) {
                uint32_t channel = row + product_row() + r;
                float keys[SCORE_TILE / 16];
                if (channel >= dim)
                    break;
                tile_read<SCORE_TILE>(tile, channel, keys);
                float linear = mean[channel];
#pragma unroll
                for (int s = 0; s < SCORE_TILE / 16; s++)
                    parts[s] += (double)keys[s] * ((double)sums[r][s] + (double)linear);
            }
        }
        double logit = sum_rows<SCORE_TILE>(parts, slices);
        if (threadIdx.x < SCORE_TILE)
            logits_of(unit, group, g, dim)[first + threadIdx.x] = (float)logit;
    }
}

/* ---- shares ---- */

/* Whether a slot has a share: sinks and empty ones have none. */
SCORE_INLINE bool has_share(const struct kv_pool *pool, const struct cuda_score_unit *unit, uint32_t slot) {
    int32_t position = slot_position(pool, &unit->view, slot);
    return position >= MOMENTS_FROM && position != KV_NO_POSITION;
}

/* Group mean of the softmax of logits over slots that have a share, plus epsilon. The first SCORE_HELD slots stay in
 * registers, others are read again. */
static __global__ void __launch_bounds__(EXPECT_THREADS)
    score_expect_shares(const struct cuda_score_unit *units, struct kv_pool pool, uint32_t group, float epsilon) {
    KERNEL_SHARED(struct cuda_score_unit, unit);
    double *space = (double *)(unit + 1);
    float shares[EXPECT_HELD], held[EXPECT_HELD];
    uint32_t counts = 0; /* bit i: slot i of the thread's has a share */
    unit_load(units + blockIdx.x, unit);
    uint32_t slots = unit->view.slots;
#pragma unroll
    for (uint32_t i = 0; i < EXPECT_HELD; i++) {
        uint32_t slot = i * EXPECT_THREADS + threadIdx.x;
        counts |= (slot < slots && has_share(&pool, unit, slot) ? 1u : 0u) << i;
        shares[i] = epsilon;
    }
    for (uint32_t g = 0; g < group; g++) {
        const float *logits = logits_of(unit, group, g, pool.layout.head_dim);
        float most = -infinity();
        double sum = 0;
#pragma unroll
        for (uint32_t i = 0; i < EXPECT_HELD; i++) {
            held[i] = (counts >> i & 1) != 0 ? logits[i * EXPECT_THREADS + threadIdx.x] : -infinity();
            most = fmaxf(most, held[i]);
        }
        for (uint32_t slot = SCORE_HELD + threadIdx.x; slot < slots; slot += EXPECT_THREADS)
            most = has_share(&pool, unit, slot) ? fmaxf(most, logits[slot]) : most;
        most = block_most(most, (float *)space);
#pragma unroll
        for (uint32_t i = 0; i < EXPECT_HELD; i++)
            sum += (counts >> i & 1) != 0 ? (double)expf(held[i] - most) : 0;
        for (uint32_t slot = SCORE_HELD + threadIdx.x; slot < slots; slot += EXPECT_THREADS)
            sum += has_share(&pool, unit, slot) ? (double)expf(logits[slot] - most) : 0;
        sum = block_sum(sum, space) * (double)group;
#pragma unroll
        for (uint32_t i = 0; i < EXPECT_HELD; i++)
            shares[i] += (float)((double)expf(held[i] - most) / sum);
        for (uint32_t slot = SCORE_HELD + threadIdx.x; slot < slots; slot += EXPECT_THREADS) {
            float share = (float)((double)expf(logits[slot] - most) / sum);
            float before = g == 0 ? epsilon : unit->scores[slot];
            unit->scores[slot] = has_share(&pool, unit, slot) ? before + share : not_a_number();
        }
    }
#pragma unroll
    for (uint32_t i = 0; i < EXPECT_HELD; i++) {
        uint32_t slot = i * EXPECT_THREADS + threadIdx.x;
        if (slot < slots)
            unit->scores[slot] = (counts >> i & 1) != 0 ? shares[i] : not_a_number();
    }
}

void launch_score_expected_attention(const struct cuda_score_call *call, uint32_t rope_dim, const float *inverse_freq,
    uint32_t n, float epsilon, cudaStream_t stream) {
    uint32_t tiles = (call->slots_most + SCORE_TILE - 1) / SCORE_TILE, dim = call->pool.layout.head_dim;
    size_t query = sizeof(struct cuda_score_unit) + rope_dim / 2 * sizeof(double2);
    size_t logits = sizeof(struct cuda_score_unit) + (PRODUCT_SLICES_FLOATS + (size_t)dim * SCORE_TILE) * sizeof(float);
    size_t shares = sizeof(struct cuda_score_unit) + WARP * sizeof(double);
    for (uint32_t first = 0; tiles > 0 && first < call->count; first += SCORE_UNITS_GRID) {
        uint32_t some = units_at_once(call->count - first);
        KERNEL_LAUNCH(score_expect_query, dim3(dim, call->group, some), dim3(QUERY_THREADS), query, stream,
            call->units + first, dim, call->group, rope_dim, inverse_freq, n > 0 ? n : 1);
        SCORE_FORMATS(call->pool.layout.format, score_expect_logits, dim3(tiles, some), dim3(PRODUCT_THREADS), logits,
            stream, call->units + first, call->pool, call->group);
    }
    KERNEL_LAUNCH(score_expect_shares, dim3(call->count), dim3(EXPECT_THREADS), shares, stream, call->units, call->pool,
        call->group, epsilon);
}
