/* SPDX-License-Identifier: Apache-2.0
 *
 * Stages rank and rank_pruned (internal.h): supervision on future attention. A step takes one example (record.h), a
 * budget B and m, the best slots by the present scores that are left out of the loss (0, 0.25 B or 0.6 B: what is
 * learned is the order around the budget's boundary); loss and gradient are means over the example's recorded heads
 * (listwise.h). All arithmetic is on the run's threads, in an order that does not depend on their number.
 *
 * rank: prompts, everything kept, B / L log-uniform in 0.05 to 0.4. rank_pruned: every other step on caches of students
 * that prune by the network as it was when the stage began (Ross et al. 2011, "A reduction of imitation learning": one
 * round of it), at prunes while they decode: with statistics that pruned sequences collect, with the student's own
 * budget, and with m 0 or a quarter of what a head kept before; the other steps are as in rank, on the same sequences,
 * so that the prompt's prune is not forgotten. More such steps with an m nearer to what stays did no better (README).
 */
#ifndef POLICY_TRAIN_RANK_H
#define POLICY_TRAIN_RANK_H

#include "policy/train/record.h"

/* Begins the stage on examples that are there (with students' it is rank_pruned); they belong to the stage afterwards,
 * also on a failure. The stages' begin records them and calls this. ERROR_MEMORY. */
int rank_begin_on(struct training *training, struct records *records, struct error *error);

#endif
