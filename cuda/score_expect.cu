/* SPDX-License-Identifier: Apache-2.0
 *
 * Expected attention (policy/expected_attention.c): logits of keys under what queries are expected to be,
 * k mu / sqrt(d) + k S k / (2 d), and their mean softmax over the group. mu and S are turned by the mean rotation of
 * positions to come.
 */
#include "cuda/score_product.h"

enum {
    QUERY_THREADS = 256,
    QUERY_PAIRS = 8, /* of columns, a block */
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

/* Channels come in pairs (2 i, 2 i + 1), which the mean rotation joins: the even one of a turned pair is
 * turn.x even - turn.y odd, the odd one turn.y even + turn.x odd. Pairs beyond rope_dim have the turn (1, 0). */
SCORE_INLINE double2 turn_row(double2 turn, bool odd) {
    return odd ? make_double2(turn.y, turn.x) : make_double2(turn.x, -turn.y);
}

/* What a block reads of one query head. */
struct query_moments_part {
    const double *outer;  /* [d][d] upper triangle, device */
    const double2 *sums;  /* [d / 2] shared */
    const double2 *turns; /* [d / 2] shared */
    double part;          /* 1 / count */
    uint32_t dim;
};

/* Covariance of the channels of two pairs. */
struct pair_covariance {
    double2 even, odd; /* x: with the even channel of the other pair, y: with its odd one */
};

SCORE_INLINE double covariance(double product, double a, double b, double part) {
    return product * part - a * part * (b * part);
}

/* Of the pair `column` with the pair `row` >= column. */
SCORE_INLINE struct pair_covariance covariance_of(
    const struct query_moments_part *from, uint32_t column, uint32_t row) {
    const double2 *outer = (const double2 *)from->outer + (size_t)column * from->dim + row;
    double2 even = outer[0], odd = outer[from->dim / 2];
    double2 across = from->sums[column], down = from->sums[row];
    if (row == column)
        odd.x = even.y; /* the triangle has it once */
    struct pair_covariance out;
    out.even.x = covariance(even.x, down.x, across.x, from->part);
    out.even.y = covariance(even.y, down.y, across.x, from->part);
    out.odd.x = covariance(odd.x, down.x, across.y, from->part);
    out.odd.y = covariance(odd.y, down.y, across.y, from->part);
    return out;
}

/* An element of the turned covariance: across and down are turn_row of its column and its row. */
SCORE_INLINE double turned(const struct pair_covariance *of, double2 across, double2 down) {
    double sum = down.x * across.x * of->even.x;
    sum += down.x * across.y * of->odd.x;
    sum += down.y * across.x * of->even.y;
    return sum + down.y * across.y * of->odd.y;
}

/* Rows 2 row and 2 row + 1 of a column of the lower triangle, with what mirrors them added to them; 0 above it. */
SCORE_INLINE float2 turned_rows(
    const struct query_moments_part *from, const struct pair_covariance *of, uint32_t column, uint32_t row) {
    double2 across = turn_row(from->turns[column / 2], column % 2 == 1);
    double values[2];
#pragma unroll
    for (uint32_t i = 0; i < 2; i++) {
        uint32_t channel = 2 * row + i;
        values[i] = turned(of, across, turn_row(from->turns[row], i == 1)) * (channel > column ? 2 : 1);
        values[i] = channel < column ? 0 : values[i] / (2 * (double)from->dim);
    }
    return make_float2((float)values[0], (float)values[1]);
}

/* The head's sums and the pairs' turns into shared memory. */
SCORE_INLINE void load_pairs(const double *sums, uint32_t dim, uint32_t rope_dim, const float *inverse_freq,
    uint32_t seen, uint32_t n, double2 *to_sums, double2 *to_turns) {
    for (uint32_t pair = threadIdx.x; pair < dim / 2; pair += QUERY_THREADS) {
        to_sums[pair] = ((const double2 *)sums)[pair];
        to_turns[pair] = pair < rope_dim / 2 ? mean_turn((double)inverse_freq[pair], seen, n) : make_double2(1, 0);
    }
    __syncthreads();
}

/* Blocks: (QUERY_PAIRS pairs of columns, g, unit). Each number of the moments is read once. */
static __global__ void __launch_bounds__(QUERY_THREADS) score_expect_query(const struct cuda_score_unit *units,
    uint32_t dim, uint32_t group, uint32_t rope_dim, const float *inverse_freq, uint32_t n) {
    KERNEL_SHARED(struct cuda_score_unit, unit);
    double2 *turns = (double2 *)(unit + 1), *sums = turns + dim / 2;
    uint32_t g = blockIdx.y, pairs = dim / 2, rows = padded_rows(dim) / 2;
    unit_load(units + blockIdx.z, unit);
    if (unit->view.slots == 0)
        return;
    uint32_t h = unit->head * group + g, count = *unit->moments.count;
    load_pairs(unit->moments.sum + (size_t)h * dim, dim, rope_dim, inverse_freq, unit->seen, n, sums, turns);
    const struct query_moments_part from = {
        unit->moments.outer + (size_t)h * dim * dim, sums, turns, count > 0 ? 1 / (double)count : 0, dim};
    float *mean = unit->space + g * query_floats(dim);
    for (uint32_t i = threadIdx.x; i < QUERY_PAIRS * rows; i += QUERY_THREADS) {
        uint32_t column = blockIdx.x * QUERY_PAIRS + i / rows, row = i % rows;
        float2 even = make_float2(0, 0), odd = even;
        if (column >= pairs)
            break;
        if (row >= column && row < pairs) {
            const struct pair_covariance of = covariance_of(&from, column, row);
            even = turned_rows(&from, &of, 2 * column, row);
            odd = turned_rows(&from, &of, 2 * column + 1, row);
        }
        float2 *to = (float2 *)(mean + (size_t)(2 * column + 1) * 2 * rows) + row;
        to[0] = even;
        to[rows] = odd;
    }
    if (blockIdx.x == 0 && threadIdx.x < pairs) {
        double2 sum = sums[threadIdx.x], even = turn_row(turns[threadIdx.x], false);
        double2 odd = turn_row(turns[threadIdx.x], true);
        double scale = sqrt((double)dim);
        ((float2 *)mean)[threadIdx.x] = make_float2((float)((even.x * sum.x + even.y * sum.y) * from.part / scale),
            (float)((odd.x * sum.x + odd.y * sum.y) * from.part / scale));
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
    uint32_t query_blocks = (dim / 2 + QUERY_PAIRS - 1) / QUERY_PAIRS;
    size_t query = sizeof(struct cuda_score_unit) + dim * sizeof(double2);
    size_t logits = sizeof(struct cuda_score_unit) + (PRODUCT_SLICES_FLOATS + (size_t)dim * SCORE_TILE) * sizeof(float);
    size_t shares = sizeof(struct cuda_score_unit) + WARP * sizeof(double);
    for (uint32_t first = 0; tiles > 0 && first < call->count; first += SCORE_UNITS_GRID) {
        uint32_t some = units_at_once(call->count - first);
        KERNEL_LAUNCH(score_expect_query, dim3(query_blocks, call->group, some), dim3(QUERY_THREADS), query, stream,
            call->units + first, dim, call->group, rope_dim, inverse_freq, n > 0 ? n : 1);
        SCORE_FORMATS(call->pool.layout.format, score_expect_logits, dim3(tiles, some), dim3(PRODUCT_THREADS), logits,
            stream, call->units + first, call->pool, call->group);
    }
    KERNEL_LAUNCH(score_expect_shares, dim3(call->count), dim3(EXPECT_THREADS), shares, stream, call->units, call->pool,
        call->group, epsilon);
}
