/* SPDX-License-Identifier: Apache-2.0
 *
 * The optimiser: gradient clipping by global norm, AdamW (Loshchilov and Hutter 2019; decay decoupled, on matrices
 * only), and the schedule of linear warm-up and half a cosine. As in tests/reference/reference/mlp.py, which tests
 * compare with through tests/data/mlp.json.
 */
#ifndef POLICY_TRAIN_ADAMW_H
#define POLICY_TRAIN_ADAMW_H

#include "policy/train/gradient.h"

struct adamw_options {
    float peak, final; /* learning rates at the end of the warm-up and of training */
    uint32_t warmup, total;
    float beta1, beta2, epsilon, decay; /* 0.9, 0.999, 1e-8, 0.01 */
    float clip;                         /* 0: none */
};

struct adamw {
    uint64_t step; /* updates done */
    size_t count;
    float *first, *second; /* [count] moments */
};
struct adamw *adamw_create(size_t count); /* NULL on failed allocation */
void adamw_free(struct adamw *adamw);     /* NULL allowed */

double adamw_rate(const struct adamw_options *options, uint64_t step); /* of step 0, 1, ... */
/* Clips gradient in place, updates the network's trained arrays. Returns the gradient's norm before clipping; when that
 * is not finite, nothing else is done. */
double adamw_update(struct adamw *adamw, const struct adamw_options *options, struct gradient *gradient,
    struct policy_network *network);

#endif
