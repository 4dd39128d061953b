/* SPDX-License-Identifier: Apache-2.0
 *
 * Reference of the statistics of attention, in float64, straight from engine/backend.h and policy/stages.h.
 */
#ifndef TESTS_PARITY_REFERENCE_STATISTICS_H
#define TESTS_PARITY_REFERENCE_STATISTICS_H

#include "tests/parity/reference_attend.h"

/* What the rows of one item add for one KV head, by slot; every array of `slots` or more numbers, from zero. */
struct reference_statistics {
    uint32_t slots, rows, group;
    bool *visible;   /* [rows][slots] */
    double *p;       /* [rows][G][slots] */
    double *a;       /* [rows][slots] mean over the group */
    double *squared; /* [slots] sum over rows of the mean of p^2 */
    double *noisy;   /* [slots] */
    double *entropy; /* [rows] group mean */
};

/* summary: host, or NULL. variant: without a window. */
struct reference_statistics reference_statistics(const struct reference_pool *pool, const struct kv_item *item,
    const struct kv_head_view *view, const float *summary, struct reference_variant variant, uint32_t kv_head,
    uint32_t layer, uint64_t seed, uint32_t heads, const float *qkv);
void reference_statistics_free(struct reference_statistics *statistics);

/* Gumbel noise of keyformer: a function of its arguments alone. */
double reference_gumbel(uint64_t seed, uint32_t layer, uint32_t head, uint32_t query, uint32_t slot);

/* Adds one head's rows [rows][stride] of d numbers to sum [d] and to the upper triangle of outer [d][d]; rows at
 * positions below 4 are left out. Returns how many were added. */
uint32_t reference_moments(
    const float *queries, size_t stride, uint32_t position, uint32_t rows, uint32_t dim, double *sum, double *outer);

#endif
