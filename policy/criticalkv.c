/* SPDX-License-Identifier: Apache-2.0
 *
 * criticalkv: half of B by snapkv; the rest by its score times how much the token's value moves the layer's output.
 */
#include "policy/policies.h"

/* Added to a score before it is multiplied, so that a token without attention in the window is still told apart. */
static const float score_offset = 1e-4f;

static void set_defaults(struct policy_settings *settings) {
    settings->interval = 16; /* the output matrix in floats, and a product with it per slot */
}

static uint32_t need_statistics(const struct policy_settings *settings, bool first) {
    (void)settings, (void)first;
    return STATISTIC_WINDOW | STATISTIC_OUTPUT_NORM;
}

static uint32_t write_stages(const struct policy_settings *settings, struct score_stage *stages) {
    stages[0] = (struct score_stage){.kind = STAGE_WINDOW_SUM};
    stages[1] = (struct score_stage){.kind = STAGE_PROTECT};
    stages[2] = (struct score_stage){.kind = STAGE_POOL_MAX, .n = settings->kernel};
    stages[3] = (struct score_stage){.kind = STAGE_PROTECT_BEST};
    stages[4] = (struct score_stage){.kind = STAGE_TIMES_OUTPUT_NORM, .x = score_offset};
    return 5;
}

const struct policy policy_criticalkv = {
    .name = "criticalkv",
    .summary = "half by snapkv, half by its score times the value's effect on the output",
    .source = "CriticalKV, Feng et al. 2025",
    .options = OPTION_WINDOW | OPTION_KERNEL | OPTION_DECODE,
    .defaults = set_defaults,
    .needs = need_statistics,
    .stages = write_stages,
    .protect = policy_protect_window,
};
