/* SPDX-License-Identifier: Apache-2.0
 *
 * Policies by gates of heads: heads with high gates keep everything. Gates come from a file, or without one from the
 * attention until the first prune (head_gate_from_attention). The budgets of both are in budget.c.
 *
 * rlkv: the other heads are `streaming`. hybrid: they are scored by the policy `base`.
 */
#include "policy/policies.h"

static uint32_t need_gates(const struct policy_settings *settings, bool first) {
    return first && settings->gates == NULL ? STATISTIC_WINDOW : 0;
}

static void set_rlkv_defaults(struct policy_settings *settings) {
    settings->sinks = 16;
    settings->recent_tokens = 64;
}

static uint32_t write_rlkv_stages(const struct policy_settings *settings, struct score_stage *stages) {
    return policy_streaming.stages(settings, stages);
}

static void protect_rlkv(const struct policy_settings *settings, uint32_t budget, uint32_t *sinks, uint32_t *recent) {
    policy_streaming.protect(settings, budget, sinks, recent);
}

static void set_hybrid_defaults(struct policy_settings *settings) {
    settings->base = &policy_h2o;
}

static uint32_t need_hybrid(const struct policy_settings *settings, bool first) {
    uint32_t needs = settings->base->needs != NULL ? settings->base->needs(settings, first) : 0;
    return needs | need_gates(settings, first);
}

static uint32_t write_hybrid_stages(const struct policy_settings *settings, struct score_stage *stages) {
    return settings->base->stages(settings, stages);
}

static void protect_hybrid(const struct policy_settings *settings, uint32_t budget, uint32_t *sinks, uint32_t *recent) {
    if (settings->base->protect != NULL)
        settings->base->protect(settings, budget, sinks, recent);
}

const struct policy policy_rlkv = {
    .name = "rlkv",
    .summary = "heads with high gates keep everything, the others sinks and recent tokens",
    .source = "RLKV, Du et al. 2026 (Kurt232/RLKV)",
    .options = OPTION_SPARSITY | OPTION_SINKS | OPTION_RECENT_TOKENS | OPTION_GATES,
    .defaults = set_rlkv_defaults,
    .needs = need_gates,
    .stages = write_rlkv_stages,
    .protect = protect_rlkv,
    .allocation = ALLOCATE_GATES,
    .heads_differ = true,
};

/* The options of every base: those that the chosen one does not have are not read. */
const struct policy policy_hybrid = {
    .name = "hybrid",
    .summary = "heads with high gates keep everything, the others follow a base policy",
    .source = "DistillCache, appendix E.3",
    .options = OPTION_FULL_HEADS | OPTION_BASE | OPTION_GATES | OPTION_SINKS | OPTION_RECENT | OPTION_WINDOW |
               OPTION_KERNEL | OPTION_NETWORK,
    .defaults = set_hybrid_defaults,
    .needs = need_hybrid,
    .stages = write_hybrid_stages,
    .protect = protect_hybrid,
    .allocation = ALLOCATE_GATES,
    .heads_differ = true,
};
