/* SPDX-License-Identifier: Apache-2.0
 *
 * What the policy-gradient stages make of rewards: returns, baselines that lower the variance without a bias, and the
 * entropy bonus.
 */
#ifndef POLICY_TRAIN_BASELINE_H
#define POLICY_TRAIN_BASELINE_H

#include <stdint.h>

/* returns [steps]: rewards[t] + discount * returns[t + 1]. returns == rewards allowed. */
void returns_discounted(const double *rewards, uint32_t steps, double discount, double *returns);

/* The surrogate of the entropy per kept slot, -logprob / kept, of the sample whose log-probability that is; 0 when
 * nothing was to choose. Its own gradient has expectation 0: `beta` times it is added to the reward, as a number. */
double entropy_surrogate(double logprob, uint32_t kept);

/* Leave-one-out (RLOO, Kool et al. 2019): advantages [samples] = reward less the mean of the other samples' rewards.
 * One sample: its reward. advantages == rewards allowed. */
void baseline_leave_one_out(const double *rewards, uint32_t samples, double *advantages);

/* Group-relative (GRPO, Shao et al. 2024): the reward less the mean of all samples, over their deviation + 1e-6. */
void baseline_group(const double *rewards, uint32_t samples, double *advantages);

/* A moving average: `decay` of the old one and the rest of the value. NaN stands for none yet. A value that is not
 * finite leaves it as it is. */
double baseline_moving(double average, double value, double decay);

/* advantages [samples] of rewards that one problem's samples got: leave-one-out where there are others, less the
 * moving average where there are not (NaN: 0). */
void baseline_advantages(const double *rewards, uint32_t samples, double average, double *advantages);

#endif
