/* SPDX-License-Identifier: Apache-2.0
 *
 * cake: mean and spread of a token's attention over the window. Layers whose attention is widely and changeably spread
 * get more of the budget: layer preferences H^(1/tau1) V^(1/tau2), from the entropy and the variance of the window's
 * attention of every query head, are taken at the first prune and stay.
 */
#include "policy/policies.h"

static uint32_t need_window(const struct policy_settings *settings, bool first) {
    (void)settings;
    return first ? STATISTIC_WINDOW | STATISTIC_HEAD_WINDOW : STATISTIC_WINDOW;
}

static uint32_t write_stages(const struct policy_settings *settings, struct score_stage *stages) {
    stages[0] = (struct score_stage){.kind = STAGE_WINDOW_SPREAD, .x = settings->gamma};
    stages[1] = (struct score_stage){.kind = STAGE_PROTECT};
    return 2;
}

const struct policy policy_cake = {
    .name = "cake",
    .summary = "mean and variance of recent attention, budgets by layer",
    .source = "CAKE, Qin et al. 2025",
    .options = OPTION_WINDOW | OPTION_GAMMA | OPTION_TAU,
    .needs = need_window,
    .stages = write_stages,
    .protect = policy_protect_window,
    .allocation = ALLOCATE_CAKE,
};
