/* SPDX-License-Identifier: Apache-2.0
 *
 * expected_attention: the attention that future queries will pay if they are like the past ones (normal, with the mean
 * and covariance of the sequence's queries), times the norm of the value.
 */
#include "policy/policies.h"

static uint32_t need_moments(const struct policy_settings *settings, bool first) {
    (void)settings, (void)first;
    return STATISTIC_MOMENTS;
}

static uint32_t write_stages(const struct policy_settings *settings, struct score_stage *stages) {
    stages[0] = (struct score_stage){.kind = STAGE_EXPECTED_ATTENTION, .x = settings->epsilon, .n = settings->future};
    stages[1] = (struct score_stage){.kind = STAGE_TIMES_VALUE_NORM};
    stages[2] = (struct score_stage){.kind = STAGE_PROTECT};
    return 3;
}

static void protect_sinks(const struct policy_settings *settings, uint32_t budget, uint32_t *sinks, uint32_t *recent) {
    (void)budget, (void)recent;
    *sinks = settings->sinks;
}

static void set_defaults(struct policy_settings *settings) {
    settings->interval = 16; /* a product of two matrices per head and prune */
}

const struct policy policy_expected_attention = {
    .name = "expected_attention",
    .summary = "attention expected of future queries, times the value's norm",
    .source = "Expected Attention, Devoto et al. 2025 (kvpress)",
    .options = OPTION_SINKS | OPTION_EPSILON | OPTION_FUTURE,
    .defaults = set_defaults,
    .needs = need_moments,
    .stages = write_stages,
    .protect = protect_sinks,
};
