/* SPDX-License-Identifier: Apache-2.0
 *
 * snapkv and what differs from it by budgets only: the attention of the last w queries, pooled along positions; the
 * window itself stays. pyramidkv gives lower layers more (budget.c), adakv lets the heads of a layer compete.
 */
#include "policy/policies.h"

void policy_protect_window(const struct policy_settings *settings, uint32_t budget, uint32_t *sinks, uint32_t *recent) {
    (void)sinks;
    *recent = settings->window < budget / 2 ? settings->window : budget / 2;
}

static uint32_t need_window(const struct policy_settings *settings, bool first) {
    (void)settings, (void)first;
    return STATISTIC_WINDOW;
}

/* Protected slots are marked first: they do not spread to their neighbours. */
static uint32_t write_stages(const struct policy_settings *settings, struct score_stage *stages) {
    stages[0] = (struct score_stage){.kind = STAGE_WINDOW_SUM};
    stages[1] = (struct score_stage){.kind = STAGE_PROTECT};
    stages[2] = (struct score_stage){.kind = STAGE_POOL_MAX, .n = settings->kernel};
    return 3;
}

static void set_adakv_defaults(struct policy_settings *settings) {
    settings->scope = SCOPE_LAYER;
}

const struct policy policy_snapkv = {
    .name = "snapkv",
    .summary = "attention of the last queries, pooled along positions",
    .source = "SnapKV, Li et al. 2024",
    .options = OPTION_WINDOW | OPTION_KERNEL | OPTION_DECODE,
    .needs = need_window,
    .stages = write_stages,
    .protect = policy_protect_window,
};

const struct policy policy_pyramidkv = {
    .name = "pyramidkv",
    .summary = "snapkv with budgets that fall over the layers",
    .source = "PyramidKV, Cai et al. 2024",
    .options = OPTION_WINDOW | OPTION_KERNEL | OPTION_DECODE | OPTION_BETA,
    .needs = need_window,
    .stages = write_stages,
    .protect = policy_protect_window,
    .allocation = ALLOCATE_PYRAMID,
};

const struct policy policy_adakv = {
    .name = "adakv",
    .summary = "snapkv with budgets shared out over a layer's heads by their scores",
    .source = "Ada-KV, Feng et al. 2024",
    .options = OPTION_WINDOW | OPTION_KERNEL | OPTION_DECODE,
    .defaults = set_adakv_defaults,
    .needs = need_window,
    .stages = write_stages,
    .protect = policy_protect_window,
};
