/* SPDX-License-Identifier: Apache-2.0
 *
 * The kernels of statistics.h over sixteen lanes. A tier's file includes its lanes_*.h, then this.
 */
#include "engine/cpu/lanes_math.h"
#include "engine/cpu/statistics.h"

_Static_assert((int)KV_PAGE_SLOTS == (int)LANES, "one vector holds one number of a page's slots");
_Static_assert((uint64_t)ATTEND_ROWS << STATISTIC_FRACTION_BITS < 1u << 31, "a block's counts carry once at most");

#define STATISTICS_INLINE static inline __attribute__((always_inline))

static void statistics_factors(
    uint32_t rows, const float *m, const float *total_m, const float *total_l, float *factors) {
    for (uint32_t row = 0; row < rows; row += LANES) {
        struct lanes power = lanes_exp(lanes_sub(lanes_load(m + row), lanes_load(total_m + row)));
        lanes_store(factors + row, lanes_div(power, lanes_load(total_l + row)));
    }
}

static void statistics_merge(uint32_t rows, const float *m, const float *l, float *total_m, float *total_l) {
    for (uint32_t row = 0; row < rows; row += LANES) {
        struct lanes next = lanes_load(m + row), old = lanes_load(total_m + row), most = lanes_max(next, old);
        struct lanes kept = lanes_mul(lanes_load(total_l + row), lanes_exp(lanes_sub(old, most)));
        struct lanes added = lanes_mul(lanes_load(l + row), lanes_exp(lanes_sub(next, most)));
        lanes_store(total_m + row, most);
        lanes_store(total_l + row, lanes_add(kept, added));
    }
}

/* Adds to sum the p * factor, or their squares, of one token's rows for the slots of a page. */
STATISTICS_INLINE struct lanes statistics_sum(
    bool squares, const float *p, const float *factors, uint32_t heads, struct lanes sum) {
    for (uint32_t head = 0; head < heads; head++) {
        struct lanes number = lanes_load(p + head * ATTEND_SPLIT), factor = lanes_set(factors[head]);
        if (squares)
            factor = number = lanes_mul(number, factor);
        sum = lanes_fma(number, factor, sum);
    }
    return sum;
}

STATISTICS_INLINE struct lanes statistics_share(
    bool squares, const float *p, const float *factors, uint32_t heads, struct lanes scale) {
    struct lanes sum = lanes_mul(statistics_sum(squares, p, factors, heads, lanes_set(0)), scale);
    return lanes_min(lanes_max(sum, lanes_set(0)), lanes_set(1));
}

STATISTICS_INLINE struct counts statistics_integer(struct lanes share) {
    return counts_round(lanes_mul(share, lanes_set(1 << STATISTIC_FRACTION_BITS)));
}

STATISTICS_INLINE void statistics_count_heads(bool squares, uint32_t heads, const struct statistics_source *from,
    uint32_t tokens, uint32_t *low, uint32_t *high) {
    struct lanes scale = lanes_set(from->scale);
    for (uint32_t page = 0; page < from->pages; page++) {
        const float *p = from->p + page * LANES, *factors = from->factors;
        struct counts counts = counts_zero();
        for (uint32_t token = 0; token < tokens; token++, p += heads * ATTEND_SPLIT, factors += heads)
            counts = counts_add(counts, statistics_integer(statistics_share(squares, p, factors, heads, scale)));
        counts_add_carry(low + from->places[page] * LANES, high + from->places[page] * LANES, counts);
    }
}

/* The usual numbers of heads are compiled for themselves. */
STATISTICS_INLINE void statistics_count_any(
    bool squares, const struct statistics_source *from, uint32_t tokens, uint32_t *low, uint32_t *high) {
    switch (from->heads) {
    case 1:
        statistics_count_heads(squares, 1, from, tokens, low, high);
        break;
    case 3:
        statistics_count_heads(squares, 3, from, tokens, low, high);
        break;
    case 4:
        statistics_count_heads(squares, 4, from, tokens, low, high);
        break;
    default:
        statistics_count_heads(squares, from->heads, from, tokens, low, high);
    }
}

static void statistics_add_counts(
    const struct statistics_source *from, uint32_t tokens, uint32_t *low, uint32_t *high) {
    statistics_count_any(false, from, tokens, low, high);
}

static void statistics_add_square_counts(
    const struct statistics_source *from, uint32_t tokens, uint32_t *low, uint32_t *high) {
    statistics_count_any(true, from, tokens, low, high);
}

static void statistics_window(const struct statistics_source *from, const uint16_t *masks, const uint16_t *counted,
    uint16_t *ring, uint32_t *sum) {
    struct lanes scale = lanes_set(from->scale);
    for (uint32_t page = 0; page < from->pages; page++) {
        uint16_t *row = ring + from->places[page] * LANES;
        struct lanes share = statistics_share(false, from->p + page * LANES, from->factors, from->heads, scale);
        struct lanes old = lanes_load_half(row);
        lanes_store_half(row, lanes_replace(masks[page], share, old));
        if (sum == NULL)
            continue;
        uint32_t *sums = sum + from->places[page] * LANES;
        struct lanes added = lanes_keep(masks[page], lanes_load_half(row));
        struct counts total = counts_add(counts_load(sums), statistics_integer(added));
        old = lanes_keep(masks[page] & counted[page], old);
        counts_store(sums, counts_sub(total, statistics_integer(old)));
    }
}

static void statistics_above(
    const struct statistics_source *from, const uint16_t *masks, float limit, uint16_t *above) {
    struct lanes scale = lanes_set(from->scale), limits = lanes_set(limit);
    for (uint32_t page = 0; page < from->pages; page++) {
        struct lanes share = statistics_share(false, from->p + page * LANES, from->factors, from->heads, scale);
        above[page] = (uint16_t)(masks[page] & ~lanes_at_least(limits, share));
    }
}

STATISTICS_INLINE void statistics_add_any(bool squares, const struct statistics_source *from, bool more, float *total) {
    for (uint32_t page = 0; page < from->pages; page++) {
        struct lanes sum = more ? lanes_load(total + page * LANES) : lanes_set(0);
        sum = statistics_sum(squares, from->p + page * LANES, from->factors, from->heads, sum);
        lanes_store(total + page * LANES, sum);
    }
}

static void statistics_add_sum(const struct statistics_source *from, bool more, float *total) {
    statistics_add_any(false, from, more, total);
}

static void statistics_add_squares(const struct statistics_source *from, bool more, float *total) {
    statistics_add_any(true, from, more, total);
}

static void statistics_noise(
    uint64_t key, const float *scores, const int32_t *const *positions, uint32_t pages, float factor, float *noisy) {
    struct lanes factors = lanes_set(factor);
    for (uint32_t page = 0; page < pages; page++, scores += LANES, noisy += LANES) {
        struct lanes complement, uniform = lanes_uniform(key, positions[page], &complement);
        struct lanes sum = lanes_add(lanes_load(scores), lanes_gumbel(uniform, complement));
        lanes_store(noisy, lanes_mul(sum, factors));
    }
}

STATISTICS_INLINE void statistics_products_block(
    const double *a, const double *b, size_t from_stride, uint32_t rows, double *outer, size_t stride) {
    struct sums sums[4];
    for (uint32_t i = 0; i < 4; i++)
        sums[i] = sums_load(outer + i * stride);
    for (uint32_t row = 0; row < rows; row++, a += from_stride, b += from_stride) {
        struct sums numbers = sums_load(b);
        for (uint32_t i = 0; i < 4; i++)
            sums[i] = sums_add_scaled(a[i], numbers, sums[i]);
    }
    for (uint32_t i = 0; i < 4; i++)
        sums_store(outer + i * stride, sums[i]);
}

static void statistics_products(const double *a, const double *b, size_t from_stride, uint32_t rows, uint32_t vectors,
    double *outer, size_t stride) {
    for (; vectors > 0; vectors--, b += LANES, outer += LANES)
        statistics_products_block(a, b, from_stride, rows, outer, stride);
}

static void statistics_products_of_one(const double *q, uint32_t dim, double *outer) {
    for (uint32_t i = 0; i < dim; i++, outer += dim) {
        for (uint32_t j = i; j < dim; j++)
            outer[j] += q[i] * q[j];
    }
}

#define STATISTICS_KERNELS                                                                                             \
    {                                                                                                                  \
        .factors = statistics_factors, .merge = statistics_merge, .count = statistics_add_counts,                      \
        .count_squares = statistics_add_square_counts, .window = statistics_window, .above = statistics_above,         \
        .add = statistics_add_sum, .add_squares = statistics_add_squares, .noise = statistics_noise,                   \
        .products = statistics_products, .products_of_one = statistics_products_of_one,                                \
    }
