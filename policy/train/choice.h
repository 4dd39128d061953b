/* SPDX-License-Identifier: Apache-2.0
 *
 * The policy as a distribution: which slots of heads that compete stay at a prune, drawn from their scores, with the
 * gradient of the draw's log-probability. Pure arithmetic; what the reinforcement stages (actor.h) and the tests that
 * enumerate all outcomes call.
 *
 * As in policy/select.h, protected slots and the `floor` best of every head stay in any case (protected ones count
 * among them). The rest of `total` is drawn from what is left of all heads together, by one of the distributions of
 * subset.h: without replacement in the order of s + Gumbel noise, or as a set. With one head and nothing protected this
 * is the paper's: top B of a head. Heads of a layer (compare) are compared by their log-softmax within the head, as
 * STAGE_LOG_SOFTMAX does, and the gradient goes through it. Which slots are the floor's does not depend on the noise:
 * the gradient is that of the draw given them.
 *
 * The log-probability and its gradient are divided by the number of slots drawn: B for the paper's.
 */
#ifndef POLICY_TRAIN_CHOICE_H
#define POLICY_TRAIN_CHOICE_H

#include "policy/train/train.h"

struct choice_head {
    uint32_t slots;
    const float *scores;       /* [slots] what is not finite is chosen last */
    const uint32_t *positions; /* [slots] */
    uint32_t floor;            /* best slots that stay in any case */
    /* Out. */
    uint8_t *keep;   /* [slots] 1: it stays */
    float *gradient; /* [slots] of the divided log-probability by scores */
};

struct choice {
    enum train_sampler sampler;
    float temperature;           /* of SAMPLER_SUBSET */
    bool compare;                /* by log-softmax within heads */
    uint32_t sinks, recent_from; /* protected: positions below, and from */
    uint64_t total;              /* slots that stay, of all heads; all when there are not more */
    double (*uniform)(void *context, uint32_t head, uint32_t slot); /* in (0, 1), independent */
    void *context;
    /* Out. */
    uint32_t drawn; /* slots drawn: 0, and no gradient, where there was nothing to choose */
    double entropy; /* -log-probability / drawn: the surrogate of the entropy per slot */
};

/* 0, or ERROR_MEMORY. */
int choice_draw(struct choice *choice, const struct choice_head *heads, uint32_t count, struct error *error);

#endif
