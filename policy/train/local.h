/* SPDX-License-Identifier: Apache-2.0
 *
 * Stage local (internal.h: stage_local): a policy gradient with a reward for each head by itself, which has far more
 * signal than the KL of a rollout that all heads share (POLICIES.md, what was measured). A step takes one recorded
 * sequence and one of `ratios`; for each recorded head it draws K = students sets of B slots from the network's scores
 * (choice.h, the head alone) and rewards each with minus the error of the head's own output (output.h) and the entropy
 * bonus. Advantages by leave-one-out over the K; the gradient of ln pi / B times the advantage, mean over heads. A
 * summary slot is not taken into account, nor how heads of a layer compete.
 */
#ifndef POLICY_TRAIN_LOCAL_H
#define POLICY_TRAIN_LOCAL_H

#include "policy/train/internal.h"

enum { LOCAL_FUTURE_MAX = 256 /* queries after the prompt; the engine keeps no more */ };

#endif
