/* SPDX-License-Identifier: Apache-2.0
 *
 * The policies themselves: one file a policy or a family defines them, policy/registry.c lists them.
 */
#ifndef POLICY_POLICIES_H
#define POLICY_POLICIES_H

#include "policy/policy.h"

extern const struct policy policy_full;
extern const struct policy policy_random;
extern const struct policy policy_streaming;
extern const struct policy policy_h2o;
extern const struct policy policy_h2o_mean;
extern const struct policy policy_scissorhands;
extern const struct policy policy_tova;
extern const struct policy policy_snapkv;
extern const struct policy policy_pyramidkv;
extern const struct policy policy_adakv;
extern const struct policy policy_criticalkv;
extern const struct policy policy_keydiff;
extern const struct policy policy_knorm;
extern const struct policy policy_keyformer;
extern const struct policy policy_expected_attention;
extern const struct policy policy_cake;
extern const struct policy policy_laprox;
extern const struct policy policy_laprox_head;
extern const struct policy policy_restkv;
extern const struct policy policy_rlkv;
extern const struct policy policy_ranker;
extern const struct policy policy_distillcache;
extern const struct policy policy_hybrid;

/* Shared by the policies that keep the window they score with: protects the last min(window, B / 2) tokens, so that
 * small budgets leave room for scored ones. */
void policy_protect_window(const struct policy_settings *settings, uint32_t budget, uint32_t *sinks, uint32_t *recent);

#endif
