/* SPDX-License-Identifier: Apache-2.0
 *
 * Steps on recorded examples (record.h): what the stages have in common that learn from one recorded sequence at a
 * time. A step scores all recorded heads of a sequence, lets the stage say what it makes of each head's scores, and
 * follows the gradient. Content maps are trained on whitened keys. All arithmetic is on the run's threads, in an order
 * that does not depend on their number.
 */
#ifndef POLICY_TRAIN_EXAMPLES_H
#define POLICY_TRAIN_EXAMPLES_H

#include "policy/train/record.h"

/* One head of a step. */
struct example {
    const struct recorded_sequence *sequence;
    const struct recorded_head *head;
    uint32_t slots, budget;
    double factor;       /* of the gradient, for the mean over heads */
    const float *scores; /* [slots] */
    uint32_t thread;
    double *work;    /* [slots] scratch */
    uint32_t *order; /* [slots] scratch */
    /* Out. */
    float *gradient; /* [slots] factor times the gradient by scores of what is to become small; zero before */
    double loss, reward, entropy; /* NaN before: not measured */
};

struct examples_step {
    const struct recorded_sequence *sequence;
    uint32_t budget;
    void (*learn)(void *context, struct example *example); /* on any thread, heads in any order */
    void *context;
    _Atomic int *failure; /* what `learn` sets when it failed, ERROR_MEMORY; NULL: it cannot fail */
    struct adamw_options optimiser;
    struct stage_result result; /* out: means over heads */
};

struct examples;
/* Records belong to the examples, also on a failure. Where the training has no step yet, they decide on the network's
 * normalisation and first content maps. NULL: ERROR_MEMORY, ERROR_CANCELLED. */
struct examples *examples_open(struct training *training, struct records *records, struct error *error);
void examples_close(struct examples *examples); /* NULL allowed */
const struct records *examples_records(const struct examples *examples);

/* Changes the network and the optimiser's moments; nothing when it returns ERROR_CANCELLED or ERROR_MEMORY. */
int examples_step(struct examples *examples, struct examples_step *step, struct error *error);

#endif
