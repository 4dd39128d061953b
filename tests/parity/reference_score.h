/* SPDX-License-Identifier: Apache-2.0
 *
 * Reference of `score` and `window_preference`: the formulas of policy/stages.h and
 * tests/reference/reference/policies.py over plain lists in float64. Nothing is shared with engine/: pools are scans
 * over all pairs, products are loops.
 */
#ifndef TESTS_PARITY_REFERENCE_SCORE_H
#define TESTS_PARITY_REFERENCE_SCORE_H

#include "policy/stages.h"

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

enum { REFERENCE_UNUSED = 0x7fffffff }; /* position of a slot that holds nothing */

/* One KV head as numbers. Windows are in order of time, oldest first: r rows. */
struct reference_score_head {
    uint32_t slots;
    const uint32_t *positions; /* [slots] */
    const double *keys;        /* [slots][d] */
    const double *values;      /* [slots][d] */
    const double *sum;         /* [slots] sums of probabilities */
    const double *noisy;       /* [slots] */
    const double *above;       /* [slots] */
    const double *a;           /* [r][slots] */
    const double *p;           /* [r][G][slots] */
    const double *outputs;     /* [r][G][d] */
    uint32_t sinks, recent_from;
    double *scores; /* [slots] out, rounded to float after every stage */
};

struct reference_score_layer {
    struct reference_score_head *heads; /* [K] */
    uint32_t kv_heads, group, dim, width;
    uint32_t first_head, model_heads;   /* as in struct kv_layout; not 0 */
    uint32_t layer, seen, budget, rows; /* rows: r */
    uint64_t seed;
    const double *output; /* W_o [D][H*d] */
    double count;         /* moments of queries */
    const double *mean_sum;
    const double *outer;
    uint32_t rope_dim;
    const float *inverse_freq;
};

void reference_score(struct reference_score_layer *layer, const struct score_stage *stages, uint32_t count);
void reference_preference(const struct reference_score_layer *layer, double *entropy, double *variance);

#endif
