/* SPDX-License-Identifier: Apache-2.0
 *
 * The loss of the rank stage: scores of a head's slots against what the slots will be worth. Listwise cross-entropy
 * (Cao et al. 2007, "Learning to rank": ListNet's top-one form), with the slots that are safe left out, so that what is
 * learned is the order around the budget's boundary.
 */
#ifndef POLICY_TRAIN_LISTWISE_H
#define POLICY_TRAIN_LISTWISE_H

#include <stdint.h>

/* scores [slots] finite; targets [slots] >= 0: future attention times output norm. The `left_out` slots with the
 * highest scores (of equal ones the higher index) take no part. Over the others, p = targets / their sum and loss =
 * -sum_i p_i ln softmax(scores)_i gradient [slots] = factor * d loss / d scores (0 for those left out; written, not
 * added). Returns the loss, without the factor. 0 and no gradient when nothing is left, or no target is above 0.
 * left_out may be any number. work [slots], order [slots]: scratch. */
double listwise_loss(const float *scores, const float *targets, uint32_t slots, uint32_t left_out, double factor,
    float *gradient, double *work, uint32_t *order);

#endif
