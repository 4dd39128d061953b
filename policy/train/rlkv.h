/* SPDX-License-Identifier: Apache-2.0
 *
 * Method rlkv (Du et al. 2026, RLKV): which KV heads need all of their cache. One gate a head, learned by a
 * group-relative policy gradient with an L1 penalty, in the stage gates; the policy file is a gate file
 * (policy/budget.h, head_gates) for `--kv-policy rlkv:FILE`.
 *
 * The paper mixes the outputs of full and streaming attention by the gates while it trains, and rewards what the model
 * generates. Here the mix is a draw: head h keeps everything with probability g_h = 1 / (1 + e^-logit_h) and is
 * `streaming` otherwise, by the engine's own policy rlkv, and the reward is that of stage kl_parameter. A step rolls
 * out K = students of one prompt, each with heads m_h in {0, 1} drawn anew:
 *
 *   reward      r = -ln(mean KL + 0.02)
 *   advantage   (r - mean of the K) / their deviation
 *   gradient    of logit h: mean over students of advantage * (m_h - g_h), less gate_penalty * g_h (1 - g_h), the
 *               slope of the penalty gate_penalty * sum of g; a step of AdamW follows it
 *
 * Gates begin at 1/2, and stay there in layers that slide: these keep their window by themselves. `ratios` are those of
 * held-out comparisons, where as many heads keep everything as the budget has room for, those with the highest gates.
 *
 * The logits are the skip weights of a network of the smallest shape (network_start makes it), so that optimiser and
 * checkpoints need nothing of their own.
 */
#ifndef POLICY_TRAIN_RLKV_H
#define POLICY_TRAIN_RLKV_H

#include "policy/budget.h"
#include "policy/train/internal.h"

struct network_shape rlkv_shape(const struct model *model);

double rlkv_gate(const struct policy_network *network, uint32_t head);
/* Settings of the policy rlkv with the network's gates, at a ratio. ERROR_MEMORY. */
int rlkv_settings(
    const struct policy_network *network, double ratio, struct policy_settings *settings, struct error *error);
/* The gate file: {"gates": [[...], ...], "method": "rlkv", "fingerprint": ..., "record": {...}}. Written to FILE.tmp,
 * synced and renamed. ERROR_IO, ERROR_MEMORY. */
int rlkv_save(const struct policy_network *network, const char *file, struct error *error);

/* gradient [heads] += of minus the objective, by the logits. masks [students][heads] 0 or 1; rewards [students]. */
void rlkv_gradient(const struct policy_network *network, const uint8_t *masks, const double *rewards, uint32_t students,
    double penalty, float *gradient);

#endif
