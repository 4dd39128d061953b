/* SPDX-License-Identifier: Apache-2.0
 *
 * Stage rank (internal.h: stage_rank): supervision on future attention. A step takes one recorded sequence, a budget
 * B / L that is log-uniform in 0.05 to 0.4, and m, the best slots by the present scores that are left out of the loss
 * (0, 0.25 B or 0.6 B: what is learned is the order around the budget's boundary); loss and gradient are means over the
 * sequence's recorded heads (listwise.h). All arithmetic is on the run's threads, in an order that does not depend on
 * their number.
 */
#ifndef POLICY_TRAIN_RANK_H
#define POLICY_TRAIN_RANK_H

#include "policy/train/record.h"

/* Begins the stage on examples that are there; they belong to the stage afterwards, also on a failure. stage_rank.begin
 * records them and calls this. ERROR_MEMORY. */
int rank_begin_on(struct training *training, struct records *records, struct error *error);

#endif
