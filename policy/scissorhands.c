/* SPDX-License-Identifier: Apache-2.0
 *
 * scissorhands: how many of the last `history` queries gave the token more than an equal share of their attention,
 * 1 / (slots the query saw).
 */
#include "policy/policies.h"

static uint32_t need_above(const struct policy_settings *settings, bool first) {
    (void)settings, (void)first;
    return STATISTIC_ABOVE;
}

static uint32_t write_stages(const struct policy_settings *settings, struct score_stage *stages) {
    (void)settings;
    stages[0] = (struct score_stage){.kind = STAGE_ABOVE};
    stages[1] = (struct score_stage){.kind = STAGE_PROTECT};
    return 2;
}

static void protect_recent(const struct policy_settings *settings, uint32_t budget, uint32_t *sinks, uint32_t *recent) {
    (void)budget, (void)sinks;
    *recent = settings->recent_tokens;
}

static void set_defaults(struct policy_settings *settings) {
    settings->recent_tokens = 10;
}

const struct policy policy_scissorhands = {
    .name = "scissorhands",
    .summary = "tokens that many recent queries gave more than their share",
    .source = "Scissorhands, Liu et al. 2023",
    .options = OPTION_HISTORY | OPTION_RECENT_TOKENS,
    .defaults = set_defaults,
    .needs = need_above,
    .stages = write_stages,
    .protect = protect_recent,
};
