/* SPDX-License-Identifier: Apache-2.0
 *
 * Stage kl (internal.h: stage_kl): the paper's policy gradient. A step takes one prompt and one of `ratios`, and rolls
 * out K students (rollout.h) whose prunes are draws from the network (actor.h), on statistics of their own.
 *
 *   reward      of step t: r_t = -KL_t(teacher || student), plus `entropy` times the entropy of the prune before it (a
 *               number: nothing is differentiated through it)
 *   return      of the prune after step t: the sum of r_(t+1), r_(t+2), ... discounted by `discount`: to the end of the
 *               rollout (reward kl), or over the next 8 steps (reward rollout8, ForesightKV's utility)
 *   advantage   the return less the mean of the other students' at the same prune. A single student: less what the
 *               moving average of rewards per step at this ratio gives for so many steps (with others it would cancel)
 *   gradient    the mean over students of the sum over prunes of advantage * gradient of the sum over heads (or groups
 *               of heads) of ln pi / slots drawn; a step of AdamW follows it
 *
 * With FEATURES_CONTENT the content maps stay as they are: what one rollout says about them is noise, which Adam would
 * make steps of full size of. Method foresight: group-relative, and not all steps earn (foresight.h). With reward
 * ranking the stage is another one, on recorded examples (ranking.h).
 */
#ifndef POLICY_TRAIN_REINFORCE_H
#define POLICY_TRAIN_REINFORCE_H

#include "policy/train/internal.h"

enum { REINFORCE_HORIZON = 8 /* of reward rollout8 */ };

/* Rollouts of one problem. */
struct reinforce_rollouts {
    uint32_t students, steps, prunes;
    const double *rewards;    /* [students][steps] */
    const uint32_t *prune_at; /* [prunes] the step after which it was done; at most steps - 2 */
    uint32_t horizon;         /* steps that a return counts; UINT32_MAX: all */
    double discount;
    double average; /* of rewards per step; NaN: none yet */
    bool group;     /* group-relative: the return less the mean of all, over their deviation */
};

/* advantages [students][prunes]. work [students]. */
void reinforce_advantages(const struct reinforce_rollouts *rollouts, double *advantages, double *work);

/* The optimiser of the stages that learn by policy gradients, for `steps` steps. */
struct adamw_options reinforce_optimiser(const struct train_options *options, uint32_t steps);
/* Sets to 0 what belongs to the content maps. */
void reinforce_keep_content(const struct policy_network *network, struct gradient *gradient);

#endif
