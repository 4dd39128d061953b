/* SPDX-License-Identifier: Apache-2.0
 *
 * The networks of policy/network.h for training: scores of a head's slots with what the backward pass needs, and
 * gradients of all trained arrays. FEATURES_CONTENT: also through the content map. Pure float32 arithmetic with a fixed
 * order of sums: the same bits on every run, whatever the threads. Checked against tests/data/mlp.json (paper) and
 * central differences (content).
 */
#ifndef POLICY_TRAIN_GRADIENT_H
#define POLICY_TRAIN_GRADIENT_H

#include "policy/network.h"

/* Numbers in the order of network_array, trained arrays only, one after the other. */
struct gradient {
    size_t count;
    float values[];
};
struct gradient *gradient_create(const struct policy_network *network); /* zero; NULL on failed allocation */
void gradient_clear(struct gradient *gradient);
void gradient_add(struct gradient *to, const struct gradient *from);
void gradient_scale(struct gradient *gradient, float factor);

/* What one head's slots are fed with: inputs before normalisation without content [count][F - content], and keys before
 * RoPE [count][head_dim] (FEATURES_CONTENT; NULL for the paper's). */
struct train_slots {
    uint32_t count;
    const float *inputs;
    const float *keys;
    const float *standard; /* [6], FEATURES_PAPER; NULL: its inputs are normalised already */
};

/* Work space for `count` slots of a network of this shape. */
struct network_pass;
struct network_pass *network_pass_create(const struct network_shape *shape, uint32_t count); /* NULL: no memory */
void network_pass_free(struct network_pass *pass);                                           /* NULL allowed */
uint32_t network_pass_capacity(const struct network_pass *pass);

/* scores [count]; keeps in pass what backward needs. count <= capacity. */
void network_forward(const struct policy_network *network, uint32_t head, const struct train_slots *slots,
    struct network_pass *pass, float *scores);
/* Adds the gradient of sum_i d_scores[i] * score[i] of the last forward of this pass. Nothing flows through what is
 * clamped. */
void network_backward(const struct policy_network *network, uint32_t head, const struct train_slots *slots,
    struct network_pass *pass, const float *d_scores, struct gradient *gradient);

#endif
