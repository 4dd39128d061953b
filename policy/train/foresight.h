/* SPDX-License-Identifier: Apache-2.0
 *
 * Method foresight (Dong et al. 2026, ForesightKV): a network that learns which evictions hindsight would choose, then
 * refines them by rollouts. It is a preset of options and two things that stages do differently:
 *
 *   rank   golden evictions: the B slots that get most from the queries that follow (record.h: targets) are to stay,
 *          all others to go; the loss is the mean over pairs of one of each of max(0, 1 - (score that stays - score
 * that goes)). Pairs are drawn by the seed, as many as there are slots. kl     group-relative: a return counts as its
 * distance from the mean of the K students in their deviations; and only steps with low entropy earn anything, those of
 * a rollout whose next-token distribution by the teacher has an entropy up to the median. That is where a pruned cache
 * loses most: what was sure becomes unsure.
 *
 * The network scores every head's slots (scope head) with the 128 most recent ones protected, as in the paper. Other
 * than there:
 *   - one network for all heads, with biases and skip weights by head, and content from the key through a learned map
 *     of 16 numbers instead of whole keys and values; of the value its norm and its norm after the output matrix;
 *   - attention statistics are those of policy/network.h (accumulated, mean, deviation, entropy of the own row) instead
 *     of the paper's eight (maximum, minimum and sum of the step, sums of the last 8, 16 and 32, accumulated, decayed
 * by 0.9): the engine keeps sums over all queries;
 *   - a rollout prunes every `interval` steps by draws from the network, and is rewarded by -KL to the teacher's whole
 *     distribution.
 */
#ifndef POLICY_TRAIN_FORESIGHT_H
#define POLICY_TRAIN_FORESIGHT_H

#include <stdbool.h>
#include <stdint.h>

/* What is drawn of pairs depends on these. */
struct foresight_pairs {
    uint64_t seed, step;
    uint32_t head;
};

/* scores, targets [slots]; the last `recent` slots stay in any case, count in the budget and take no part. gradient
 * [slots] += factor times the gradient of the loss. Returns the loss; 0 when nothing is to choose. work, order [slots]:
 * scratch. */
double foresight_hinge(const float *scores, const float *targets, uint32_t slots, uint32_t budget, uint32_t recent,
    const struct foresight_pairs *pairs, double factor, float *gradient, double *work, uint32_t *order);

/* low [steps]: entropies up to their median; entropies of steps from 1 on count, step 0 is never low. work [steps]. */
void foresight_low_entropy(const float *entropies, uint32_t steps, bool *low, float *work);

#endif
