/* SPDX-License-Identifier: Apache-2.0
 *
 * The kernels of score.h. A tier's file includes its lanes_*.h, then this. Loops without lanes are such as the compiler
 * vectorises: every element on its own, integers or exact conversions, no sums.
 */
#include "engine/cpu/lanes_math.h"
#include "engine/cpu/network_body.h"
#include "engine/cpu/score.h"
#include "engine/philox.h"

#include <math.h>
#include <string.h>

#define SCORE_INLINE static inline __attribute__((always_inline))

/* Rows of a matrix that are multiplied at a time. */
enum { SCORE_BLOCK_ROWS = LANES_BLOCK_ROWS > 1 ? 4 : 1 };

static void score_sums(const uint32_t *low, const uint32_t *high, uint32_t count, float *out) {
    const struct lanes unit = lanes_set(0x1p-24f);
    uint32_t i = 0;
    for (; i + LANES <= count; i += LANES)
        lanes_store(out + i, lanes_mul(lanes_of_sums(low + i, high + i), unit));
    if (i < count)
        lanes_store_part(out + i, count - i, lanes_mul(lanes_of_sums(low + i, high + i), unit));
}

/* Up to one vector of slots. */
SCORE_INLINE void score_sums_per_query_block(const uint32_t *low, const uint32_t *high,
    const int32_t *restrict positions, double seen, uint32_t count, float *restrict out) {
    double sums[LANES];
    bool wide = counts_any_high(counts_load(low));
    for (uint32_t i = 0; !wide && i < LANES; i++)
        sums[i] = (double)(int32_t)low[i];
    for (uint32_t i = 0; wide && i < LANES; i++)
        sums[i] = (double)(int64_t)((uint64_t)high[i] << 31 | (low[i] & 0x7fffffff));
    for (uint32_t i = 0; i < count; i++)
        out[i] = (float)(sums[i] * 0x1p-24 / (seen - (double)positions[i]));
}

static void score_sums_per_query(
    const uint32_t *low, const uint32_t *high, const int32_t *positions, uint32_t seen, uint32_t count, float *out) {
    uint32_t i = 0;
    for (; i + LANES <= count; i += LANES)
        score_sums_per_query_block(low + i, high + i, positions + i, (double)seen, LANES, out + i);
    if (i < count)
        score_sums_per_query_block(low + i, high + i, positions + i, (double)seen, count - i, out + i);
}

static void score_window_sums(const uint32_t *restrict sums, uint32_t count, float *restrict out) {
    for (uint32_t i = 0; i < count; i++)
        out[i] = (float)sums[i] * 0x1p-24f;
}

/* Up to V vectors of slots; the rows are read in the widths that memory likes. */
SCORE_INLINE void score_spread_block(const uint16_t *rows, uint32_t rows_count, size_t stride, const uint32_t *sums,
    float gamma, uint32_t V, uint32_t count, float *out) {
    float part = 1 / (float)rows_count;
    float means[4][LANES];
    struct lanes mean[4], squares[4];
    for (uint32_t v = 0; v < V; v++) {
        for (uint32_t lane = 0; lane < LANES; lane++)
            means[v][lane] = (float)sums[v * LANES + lane] * 0x1p-24f * part;
        mean[v] = lanes_load(means[v]);
        squares[v] = lanes_set(0);
    }
    for (uint32_t row = 0; row < rows_count; row++) {
        for (uint32_t v = 0; v < V; v++) {
            struct lanes off = lanes_sub(lanes_load_half(rows + row * stride + v * LANES), mean[v]);
            squares[v] = lanes_fma(off, off, squares[v]);
        }
    }
    for (uint32_t v = 0; v < V; v++) {
        struct lanes score = lanes_fma(lanes_set(gamma), lanes_mul(squares[v], lanes_set(part)), mean[v]);
        uint32_t left = count - v * LANES;
        if (left >= LANES)
            lanes_store(out + v * LANES, score);
        else
            lanes_store_part(out + v * LANES, left, score);
    }
}

/* Statistics go on to a multiple of 16 slots. */
static void score_spread(const uint16_t *rows, uint32_t rows_count, size_t stride, const uint32_t *sums, float gamma,
    uint32_t count, float *out) {
    uint32_t i = 0;
    for (; i + 4 * LANES <= count; i += 4 * LANES)
        score_spread_block(rows + i, rows_count, stride, sums + i, gamma, 4, 4 * LANES, out + i);
    for (; i < count; i += LANES)
        score_spread_block(rows + i, rows_count, stride, sums + i, gamma, 1, count - i, out + i);
}

static void score_above_bits(const uint64_t *restrict bits, uint32_t count, float *restrict out) {
    enum { WORDS = STATISTIC_ABOVE_BITS / 64 };
    for (uint32_t i = 0; i < count; i++) {
        int total = 0;
        for (uint32_t word = 0; word < WORDS; word++)
            total += __builtin_popcountll(bits[(size_t)i * WORDS + word]);
        out[i] = (float)total;
    }
}

static void score_positions(const int32_t *restrict positions, uint32_t count, float *restrict out) {
    for (uint32_t i = 0; i < count; i++)
        out[i] = (float)positions[i];
}

static void score_uniform(
    const int32_t *restrict positions, uint64_t seed, uint32_t stream, uint32_t count, float *restrict out) {
    for (uint32_t i = 0; i < count; i++) {
        uint32_t words[4];
        philox_words(seed, stream, (uint32_t)positions[i], 0, words);
        out[i] = philox_uniform(words[0]);
    }
}

static int32_t score_last_position(const int32_t *positions, uint32_t count) {
    int32_t last = -1;
    for (uint32_t i = 0; i < count; i++)
        last = positions[i] > last ? positions[i] : last;
    return last;
}

static void score_protect_slots(
    const int32_t *restrict positions, int32_t sinks, int32_t recent_from, uint32_t count, float *restrict scores) {
    for (uint32_t i = 0; i < count; i++) {
        int32_t position = positions[i];
        float score = scores[i];
        score = (position < sinks) | (position >= recent_from) ? INFINITY : score;
        scores[i] = position == KV_NO_POSITION ? NAN : score;
    }
}

/* Holes are few: most vectors are copied as they are. */
static void score_close(const uint32_t *restrict order, uint32_t count, uint32_t *restrict to) {
    for (uint32_t i = 0; i < count; i += LANES) {
        uint32_t left = count - i < LANES ? count - i : LANES, holes = 0;
        for (uint32_t lane = 0; left == LANES && lane < LANES; lane++)
            holes |= order[i + lane] == KV_NO_SLOT;
        if (left == LANES && holes == 0) {
            memcpy(to, order + i, LANES * sizeof *to);
            to += LANES;
            continue;
        }
        for (uint32_t lane = 0; lane < left; lane++)
            if (order[i + lane] != KV_NO_SLOT)
                *to++ = order[i + lane];
    }
}

/* Blocks of slots that ascend with few gaps, as most do, are picked out of two vectors and not one by one. */
static void score_gather(const int32_t *restrict positions, const float *restrict scores, uint32_t slots,
    const uint32_t *restrict order, uint32_t count, int32_t *restrict out_positions, float *restrict out_scores) {
    for (uint32_t i = 0; i < count; i += LANES) {
        uint32_t left = count - i < LANES ? count - i : LANES;
        if (left == LANES && (uint64_t)order[i] + 2 * LANES <= slots && lanes_ascends_near(order + i)) {
            struct lanes picked = lanes_pick_near(positions + order[i], order + i);
            memcpy(out_positions + i, &picked, sizeof picked);
            lanes_store(out_scores + i, lanes_pick_near(scores + order[i], order + i));
            continue;
        }
        for (uint32_t lane = 0; lane < left; lane++) {
            out_positions[i + lane] = positions[order[i + lane]];
            out_scores[i + lane] = scores[order[i + lane]];
        }
    }
}

static void score_scatter(
    const float *restrict from, const uint32_t *restrict order, uint32_t count, float *restrict scores) {
    for (uint32_t i = 0; i < count; i += LANES) {
        uint32_t left = count - i < LANES ? count - i : LANES;
        if (left == LANES && lanes_ascends_near(order + i)) {
            lanes_put_near(scores + order[i], order + i, lanes_load(from + i));
            continue;
        }
        for (uint32_t lane = 0; lane < left; lane++)
            scores[order[i + lane]] = from[i + lane];
    }
}

/* Positions are distinct and ascend, so whoever is at most R positions away is at most R places away. */
SCORE_INLINE void score_pool_reach(
    const int32_t *restrict positions, const float *restrict scores, uint32_t count, int R, float *restrict out) {
    for (uint32_t i = 0; i < count; i++) {
        const int32_t *position = positions + i;
        const float *score = scores + i;
        float most = *score;
        for (int step = 1; step <= R; step++) {
            float after = position[step] - *position <= R ? score[step] : -INFINITY;
            float before = *position - position[-step] <= R ? score[-step] : -INFINITY;
            most = after > most ? after : most;
            most = before > most ? before : most;
        }
        out[i] = most;
    }
}

static void score_pool(const int32_t *positions, const float *scores, uint32_t count, uint32_t reach, float *out) {
    switch (reach) { /* a constant, so that the compiler unrolls over neighbours and vectorises over slots */
    case 0:
        memcpy(out, scores, count * sizeof *out);
        break;
    case 1:
        score_pool_reach(positions, scores, count, 1, out);
        break;
    case 2:
        score_pool_reach(positions, scores, count, 2, out);
        break;
    case 3:
        score_pool_reach(positions, scores, count, 3, out);
        break;
    case 4:
        score_pool_reach(positions, scores, count, 4, out);
        break;
    case 5:
        score_pool_reach(positions, scores, count, 5, out);
        break;
    case 6:
        score_pool_reach(positions, scores, count, 6, out);
        break;
    case 7:
        score_pool_reach(positions, scores, count, 7, out);
        break;
    default:
        score_pool_reach(positions, scores, count, SCORE_POOL_FIXED, out);
        break;
    }
}

/* Blocks. */

SCORE_INLINE void score_products_rows(uint32_t R, const float *x, size_t x_stride, const float *m, size_t row_stride,
    size_t column_stride, uint32_t columns, float *out) {
    struct lanes sums[SCORE_BLOCK_ROWS];
    for (uint32_t r = 0; r < R; r++)
        sums[r] = lanes_set(0);
    for (uint32_t c = 0; c < columns; c++) {
        struct lanes value = lanes_load(x + c * x_stride);
        for (uint32_t r = 0; r < R; r++)
            sums[r] = lanes_fma(lanes_set(m[r * row_stride + c * column_stride]), value, sums[r]);
    }
    for (uint32_t r = 0; r < R; r++)
        lanes_store(out + r * LANES, sums[r]);
}

static void score_products(const float *x, size_t x_stride, const float *m, size_t row_stride, size_t column_stride,
    uint32_t rows, uint32_t columns, bool lower, float *out) {
    uint32_t r = 0;
    for (; r + SCORE_BLOCK_ROWS <= rows; r += SCORE_BLOCK_ROWS) { /* what lies beyond a row's end is zero */
        uint32_t end = lower && r + SCORE_BLOCK_ROWS < columns ? r + SCORE_BLOCK_ROWS : columns;
        score_products_rows(
            SCORE_BLOCK_ROWS, x, x_stride, m + r * row_stride, row_stride, column_stride, end, out + (size_t)r * LANES);
    }
    for (; r < rows; r++) {
        uint32_t end = lower && r + 1 < columns ? r + 1 : columns;
        score_products_rows(
            1, x, x_stride, m + r * row_stride, row_stride, column_stride, end, out + (size_t)r * LANES);
    }
}

/* The sum of two chains: one would wait for itself. */
SCORE_INLINE void score_join(struct sums even, struct sums odd, double out[LANES]) {
    double part[LANES];
    sums_store(out, even);
    sums_store(part, odd);
    for (uint32_t lane = 0; lane < LANES; lane++)
        out[lane] += part[lane];
}

static void score_exact_products(const float *x, size_t x_stride, const float *m, size_t row_stride,
    size_t column_stride, uint32_t rows, uint32_t columns, double *out) {
    for (uint32_t r = 0; r < rows; r++, m += row_stride) {
        struct sums even = sums_zero(), odd = sums_zero();
        uint32_t c = 0;
        for (; c + 2 <= columns; c += 2) {
            even = sums_fma(even, lanes_set(m[c * column_stride]), lanes_load(x + c * x_stride));
            odd = sums_fma(odd, lanes_set(m[(c + 1) * column_stride]), lanes_load(x + (c + 1) * x_stride));
        }
        if (c < columns)
            even = sums_fma(even, lanes_set(m[c * column_stride]), lanes_load(x + c * x_stride));
        score_join(even, odd, out + (size_t)r * LANES);
    }
}

static void score_dots(const float *x, const float *y, uint32_t rows, double out[SCORE_LANES]) {
    struct sums even = sums_zero(), odd = sums_zero();
    uint32_t r = 0;
    for (; r + 2 <= rows; r += 2, x += 2 * LANES, y += 2 * LANES) {
        even = sums_fma(even, lanes_load(x), lanes_load(y));
        odd = sums_fma(odd, lanes_load(x + LANES), lanes_load(y + LANES));
    }
    if (r < rows)
        even = sums_fma(even, lanes_load(x), lanes_load(y));
    score_join(even, odd, out);
}

/* As score_dots of x with itself, converting it once. */
static void score_squares(const float *x, uint32_t rows, double out[SCORE_LANES]) {
    struct sums even = sums_zero(), odd = sums_zero();
    uint32_t r = 0;
    for (; r + 2 <= rows; r += 2, x += 2 * LANES) {
        struct lanes first = lanes_load(x), second = lanes_load(x + LANES);
        even = sums_fma(even, first, first);
        odd = sums_fma(odd, second, second);
    }
    if (r < rows) {
        struct lanes last = lanes_load(x);
        even = sums_fma(even, last, last);
    }
    score_join(even, odd, out);
}

SCORE_INLINE void score_distances_rows(
    uint32_t R, const float *x, const float *m, size_t m_stride, uint32_t columns, float *out) {
    struct lanes sums[SCORE_BLOCK_ROWS];
    for (uint32_t r = 0; r < R; r++)
        sums[r] = lanes_set(0);
    for (uint32_t c = 0; c < columns; c++) {
        struct lanes value = lanes_load(x + (size_t)c * LANES);
        for (uint32_t r = 0; r < R; r++) {
            struct lanes off = lanes_sub(value, lanes_set(m[r * m_stride + c]));
            sums[r] = lanes_fma(off, off, sums[r]);
        }
    }
    for (uint32_t r = 0; r < R; r++)
        lanes_store(out + r * LANES, sums[r]);
}

static void score_distances(
    const float *x, const float *m, size_t m_stride, uint32_t rows, uint32_t columns, float *out) {
    uint32_t r = 0;
    for (; r + SCORE_BLOCK_ROWS <= rows; r += SCORE_BLOCK_ROWS)
        score_distances_rows(SCORE_BLOCK_ROWS, x, m + r * m_stride, m_stride, columns, out + (size_t)r * LANES);
    for (; r < rows; r++)
        score_distances_rows(1, x, m + r * m_stride, m_stride, columns, out + (size_t)r * LANES);
}

/* See score_output.c. What rounding took from p or gave it is at most its 2^-11th part. */
static void score_drop_errors(const uint16_t *p, size_t p_stride, const uint32_t *ring, const float *excess,
    const float *squares, uint32_t rows, float *total) {
    struct lanes one = lanes_set(1), zero = lanes_set(0);
    for (uint32_t row = 0; row < rows; row++) {
        struct lanes part = lanes_load_half(p + ring[row] * p_stride), bound = lanes_mul(part, lanes_set(0x1p-11f));
        struct lanes rounding = lanes_max(lanes_sub(zero, bound), lanes_min(bound, lanes_set(excess[row])));
        struct lanes others = lanes_max(lanes_set(1e-6f), lanes_add(lanes_sub(one, part), rounding));
        struct lanes error = lanes_sqrt(lanes_load(squares + (size_t)row * LANES));
        struct lanes sum = lanes_load(total + (size_t)row * LANES);
        lanes_store(total + (size_t)row * LANES, lanes_fma(lanes_div(part, others), error, sum));
    }
}

static void score_add_scaled(const float *x, const float factors[SCORE_LANES], uint32_t rows, float *sums) {
    struct lanes factor = lanes_load(factors);
    for (uint32_t r = 0; r < rows; r++) {
        float *sum = sums + (size_t)r * LANES;
        lanes_store(sum, lanes_fma(lanes_load(x + (size_t)r * LANES), factor, lanes_load(sum)));
    }
}

static void score_add_absolute(const float *x, uint32_t rows, double out[SCORE_LANES]) {
    struct sums sum = sums_zero();
    for (uint32_t r = 0; r < rows; r++) {
        struct lanes value = lanes_load(x + (size_t)r * LANES);
        sum = sums_add(sum, lanes_max(value, lanes_sub(lanes_set(0), value)));
    }
    double total[LANES];
    sums_store(total, sum);
    for (uint32_t lane = 0; lane < LANES; lane++)
        out[lane] += total[lane];
}

static void score_logs(const float x[SCORE_LANES], float out[SCORE_LANES]) {
    lanes_store(out, lanes_log(lanes_add(lanes_load(x), lanes_set(1e-6f))));
}

static void score_halves(const uint16_t *from, float out[SCORE_LANES]) {
    lanes_store(out, lanes_load_half(from));
}

SCORE_INLINE struct lanes score_load(enum kv_format format, const char *from, size_t offset) {
    if (format == KV_F32)
        return lanes_load((const float *)from + offset);
    if (format == KV_F16)
        return lanes_load_half((const uint16_t *)from + offset);
    return lanes_load_bfloat((const uint16_t *)from + offset);
}

SCORE_INLINE float score_number(enum kv_format format, const char *from, size_t offset) {
    if (format == KV_F32)
        return ((const float *)from)[offset];
    if (format == KV_F16)
        return half_to_float(((const uint16_t *)from)[offset]);
    return bfloat_to_float(((const uint16_t *)from)[offset]);
}

SCORE_INLINE void score_keys_block(
    enum kv_format format, const char *page, const char *ahead, uint32_t dim, float *block) {
    for (uint32_t c = 0; c < dim; c++) {
        __builtin_prefetch(ahead + (size_t)c * LANES * kv_number_bytes(format), 0, 2);
        lanes_store(block + (size_t)c * LANES, score_load(format, page, (size_t)c * LANES));
    }
}

/* Values lie by slot: turned around, sixteen channels at a time. */
SCORE_INLINE void score_values_block(
    enum kv_format format, const char *page, const char *ahead, uint32_t dim, float *block) {
    size_t values_at = (size_t)dim * LANES * kv_number_bytes(format);
    const char *values = page + values_at;
    for (uint32_t slot = 0; slot < LANES; slot++) {
        size_t row = (size_t)slot * dim;
        uint32_t c = 0;
        for (; c + LANES <= dim; c += LANES) {
            float part[LANES];
            __builtin_prefetch(ahead + values_at + (row + c) * kv_number_bytes(format), 0, 2);
            lanes_store(part, score_load(format, values, row + c));
            for (uint32_t i = 0; i < LANES; i++)
                block[(size_t)(c + i) * LANES + slot] = part[i];
        }
        for (; c < dim; c++)
            block[(size_t)c * LANES + slot] = score_number(format, values, row + c);
    }
}

SCORE_INLINE struct lanes score_some(const float *scores, uint32_t i, uint32_t count) {
    return count - i >= LANES ? lanes_load(scores + i) : lanes_load_part(scores + i, count - i, INFINITY);
}

/* The lowest score, or NaN when there is one. */
static float score_lowest(const float *scores, uint32_t count) {
    struct lanes low = lanes_set(INFINITY), least = lanes_set(-INFINITY);
    uint32_t numbers = 0xffff;
    for (uint32_t i = 0; i < count; i += LANES) {
        struct lanes x = score_some(scores, i, count);
        low = lanes_min(x, low);
        numbers &= lanes_at_least(x, least);
    }
    return numbers != 0xffff ? NAN : -lanes_maximum(lanes_sub(lanes_set(-0.0f), low));
}

/* The slot with the lowest position of those that score no more than `limit`, NaN included, in [first, end). */
SCORE_INLINE void score_oldest(
    const float *scores, const int32_t *positions, float limit, uint32_t first, uint32_t end, uint32_t *oldest) {
    for (uint32_t i = first; i < end; i++)
        if (!(scores[i] > limit) && positions[i] != KV_NO_POSITION &&
            (*oldest == UINT32_MAX || positions[i] < positions[*oldest]))
            *oldest = i;
}

static uint32_t score_worst(const float *scores, const int32_t *positions, uint32_t count) {
    uint32_t worst = UINT32_MAX, i = 0;
    float lowest = score_lowest(scores, count);
    if (lowest != lowest) { /* of an empty slot, or such as no policy gives: they come before all numbers */
        score_oldest(scores, positions, -INFINITY, 0, count, &worst);
        if (worst != UINT32_MAX)
            return worst;
        lowest = INFINITY;
        for (i = 0; i < count; i++)
            lowest = scores[i] < lowest ? scores[i] : lowest;
        score_oldest(scores, positions, lowest, 0, count, &worst);
        return worst;
    }
    for (struct lanes limit = lanes_set(lowest); i < count; i += LANES)
        if (lanes_at_least(limit, score_some(scores, i, count)) != 0)
            score_oldest(scores, positions, lowest, i, count - i < LANES ? count : i + LANES, &worst);
    return worst;
}

static void score_keys_f32(const char *page, const char *ahead, uint32_t dim, float *block) {
    score_keys_block(KV_F32, page, ahead, dim, block);
}

static void score_keys_f16(const char *page, const char *ahead, uint32_t dim, float *block) {
    score_keys_block(KV_F16, page, ahead, dim, block);
}

static void score_keys_bf16(const char *page, const char *ahead, uint32_t dim, float *block) {
    score_keys_block(KV_BF16, page, ahead, dim, block);
}

static void score_values_f32(const char *page, const char *ahead, uint32_t dim, float *block) {
    score_values_block(KV_F32, page, ahead, dim, block);
}

static void score_values_f16(const char *page, const char *ahead, uint32_t dim, float *block) {
    score_values_block(KV_F16, page, ahead, dim, block);
}

static void score_values_bf16(const char *page, const char *ahead, uint32_t dim, float *block) {
    score_values_block(KV_BF16, page, ahead, dim, block);
}

#define SCORE_KERNELS                                                                                                  \
    {                                                                                                                  \
        .sums = score_sums, .sums_per_query = score_sums_per_query, .window_sums = score_window_sums,                  \
        .spread = score_spread, .above = score_above_bits, .positions = score_positions, .uniform = score_uniform,     \
        .last_position = score_last_position, .protect = score_protect_slots, .gather = score_gather,                  \
        .scatter = score_scatter, .pool_max = score_pool, .products = score_products,                                  \
        .exact_products = score_exact_products, .squares = score_squares, .dots = score_dots,                          \
        .distances = score_distances, .drop_errors = score_drop_errors, .add_scaled = score_add_scaled,                \
        .add_absolute = score_add_absolute, .halves = score_halves, .logs = score_logs, .worst = score_worst,          \
        .close = score_close, .network = NETWORK_KERNELS, .formats = {                                                 \
            [KV_F32] = {score_keys_f32, score_values_f32},                                                             \
            [KV_F16] = {score_keys_f16, score_values_f16},                                                             \
            [KV_BF16] = {score_keys_bf16, score_values_bf16},                                                          \
        }                                                                                                              \
    }
