/* SPDX-License-Identifier: Apache-2.0
 *
 * Reward ranking: what stage kl learns from instead of rollouts when `reward` is ranking. A ranking of a head's slots
 * is judged as a whole, over budgets: with f_i what slot i is worth to the teacher's queries that follow the prompt
 * (their attention on it times its output norm, record.h: targets), and b_1 to b_n the budgets of all `ratios` of the
 * prompt, the utility of an order of slots is
 *
 *   U = 1/n sum over budgets b of (sum of f over the first b slots of the order) / (the same of the best b slots)
 *
 * between 0 and 1. A step takes one recorded sequence; for each recorded head it draws K = students orders of the
 * largest budget's length from the network's scores (Plackett-Luce), rewards each with its utility and the entropy
 * bonus, and follows advantage * gradient of ln pi / length, advantages by leave-one-out, mean over heads. The order
 * inside a budget counts as far as smaller budgets do. No student is run: nothing here is pruned, and what the network
 * is fed with at INPUT_BUDGET is the largest budget.
 */
#ifndef POLICY_TRAIN_RANKING_H
#define POLICY_TRAIN_RANKING_H

#include "policy/train/internal.h"

/* The stage's functions (internal.h). */
int ranking_begin(struct training *training, struct error *error);
int ranking_step(struct training *training, struct stage_result *result, struct error *error);
void ranking_end(struct training *training);

/* The utility of an order. worth [slots] >= 0; order and best: [the largest budget] slots, best: of the largest worth
 * in descending order; budgets [count] ascending, at least 1. 1 where nothing is worth anything. */
double ranking_utility(
    const float *worth, const uint32_t *order, const uint32_t *best, const uint32_t *budgets, uint32_t count);

#endif
