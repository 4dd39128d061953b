/* SPDX-License-Identifier: Apache-2.0
 *
 * The kernels of statistics.h over sixteen lanes. A tier's file includes its lanes_*.h, then this.
 */
#include "engine/cpu/lanes_math.h"
#include "engine/cpu/statistics.h"

_Static_assert((int)KV_PAGE_SLOTS == (int)LANES, "one vector holds one number of a page's slots");

#define STATISTICS_INLINE static inline __attribute__((always_inline))

static void statistics_factors(const float *m, const float *total_m, const float *total_l, float *factors) {
    for (uint32_t row = 0; row < STATISTICS_ROWS; row += LANES) {
        struct lanes power = lanes_exp(lanes_sub(lanes_load(m + row), lanes_load(total_m + row)));
        lanes_store(factors + row, lanes_div(power, lanes_load(total_l + row)));
    }
}

static void statistics_merge(const float *m, const float *l, float *total_m, float *total_l) {
    for (uint32_t row = 0; row < STATISTICS_ROWS; row += LANES) {
        struct lanes next = lanes_load(m + row), old = lanes_load(total_m + row), most = lanes_max(next, old);
        struct lanes kept = lanes_mul(lanes_load(total_l + row), lanes_exp(lanes_sub(old, most)));
        struct lanes sum = lanes_fma(lanes_load(l + row), lanes_exp(lanes_sub(next, most)), kept);
        lanes_store(total_m + row, most);
        lanes_store(total_l + row, sum);
    }
}

STATISTICS_INLINE void statistics_sum_rows(
    bool squares, const float *p, const float *factors, uint32_t rows, uint32_t pages, bool more, float *total) {
    for (uint32_t page = 0; page < pages; page++) {
        struct lanes sum = more ? lanes_load(total + page * LANES) : lanes_set(0);
        for (uint32_t row = 0; row < rows; row++) {
            struct lanes numbers = lanes_load(p + row * ATTEND_SPLIT + page * LANES), factor = lanes_set(factors[row]);
            if (squares)
                factor = numbers = lanes_mul(numbers, factor);
            sum = lanes_fma(numbers, factor, sum);
        }
        lanes_store(total + page * LANES, sum);
    }
}

static void statistics_mean(
    const float *p, const float *factors, uint32_t rows, uint32_t pages, bool more, float *total) {
    statistics_sum_rows(false, p, factors, rows, pages, more, total);
}

static void statistics_square(
    const float *p, const float *factors, uint32_t rows, uint32_t pages, bool more, float *total) {
    statistics_sum_rows(true, p, factors, rows, pages, more, total);
}

STATISTICS_INLINE struct lanes statistics_share(const float *x, struct lanes scale) {
    return lanes_min(lanes_max(lanes_mul(lanes_load(x), scale), lanes_set(0)), lanes_set(1));
}

STATISTICS_INLINE struct counts statistics_integer(struct lanes share) {
    return counts_round(lanes_mul(share, lanes_set(1 << STATISTIC_FRACTION_BITS)));
}

static void statistics_add_counts(
    const float *x, uint32_t tokens, uint32_t pages, const uint8_t *places, float scale, uint64_t *sum) {
    struct lanes scales = lanes_set(scale);
    for (uint32_t page = 0; page < pages; page++) {
        struct counts counts = counts_zero();
        for (uint32_t token = 0; token < tokens; token++) {
            struct lanes share = statistics_share(x + token * ATTEND_SPLIT + page * LANES, scales);
            counts = counts_add(counts, statistics_integer(share));
        }
        counts_add_wide(sum + places[page] * LANES, counts);
    }
}

static void statistics_window(const float *x, const uint16_t *masks, uint32_t pages, const uint8_t *places, float scale,
    uint16_t *ring, uint32_t *sum) {
    struct lanes scales = lanes_set(scale);
    for (uint32_t page = 0; page < pages; page++) {
        uint16_t *row = ring + places[page] * LANES;
        uint32_t *sums = sum + places[page] * LANES;
        struct lanes old = lanes_load_half(row);
        lanes_store_half(row, lanes_replace(masks[page], statistics_share(x + page * LANES, scales), old));
        struct counts total = counts_add(counts_load(sums), statistics_integer(lanes_load_half(row)));
        counts_store(sums, counts_sub(total, statistics_integer(old)));
    }
}

static void statistics_head(
    const float *x, const uint16_t *masks, uint32_t pages, const uint8_t *places, float scale, uint16_t *ring) {
    struct lanes scales = lanes_set(scale);
    for (uint32_t page = 0; page < pages; page++) {
        uint16_t *row = ring + places[page] * LANES;
        struct lanes share = statistics_share(x + page * LANES, scales);
        lanes_store_half(row, lanes_replace(masks[page], share, lanes_load_half(row)));
    }
}

static void statistics_above(
    const float *x, const uint16_t *masks, uint32_t pages, float scale, float limit, uint16_t *above) {
    struct lanes scales = lanes_set(scale), limits = lanes_set(limit);
    for (uint32_t page = 0; page < pages; page++) {
        uint32_t not_above = lanes_at_least(limits, statistics_share(x + page * LANES, scales));
        above[page] = (uint16_t)(masks[page] & ~not_above);
    }
}

#define STATISTICS_KERNELS                                                                                             \
    {                                                                                                                  \
        .factors = statistics_factors, .merge = statistics_merge, .mean = statistics_mean,                             \
        .square = statistics_square, .count = statistics_add_counts, .window = statistics_window,                      \
        .head = statistics_head, .above = statistics_above,                                                            \
    }
