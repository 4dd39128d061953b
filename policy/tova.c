/* SPDX-License-Identifier: Apache-2.0
 *
 * tova: the last query's attention, averaged over all heads of the layer; every head holds the same slots. The last
 * query is a window of one.
 */
#include "policy/policies.h"

static void set_defaults(struct policy_settings *settings) {
    settings->scope = SCOPE_LAYER;
    settings->window = 1;
}

static uint32_t need_window(const struct policy_settings *settings, bool first) {
    (void)settings, (void)first;
    return STATISTIC_WINDOW;
}

static uint32_t write_stages(const struct policy_settings *settings, struct score_stage *stages) {
    (void)settings;
    stages[0] = (struct score_stage){.kind = STAGE_WINDOW_SUM};
    stages[1] = (struct score_stage){.kind = STAGE_LAYER_MEAN};
    stages[2] = (struct score_stage){.kind = STAGE_PROTECT};
    return 3;
}

static void protect_newest(const struct policy_settings *settings, uint32_t budget, uint32_t *sinks, uint32_t *recent) {
    (void)settings, (void)budget, (void)sinks;
    *recent = 1;
}

const struct policy policy_tova = {
    .name = "tova",
    .summary = "attention of the last query, one set of tokens per layer",
    .source = "TOVA, Oren et al. 2024",
    .defaults = set_defaults,
    .needs = need_window,
    .stages = write_stages,
    .protect = protect_newest,
    .shared = true,
};
