/* SPDX-License-Identifier: Apache-2.0
 *
 * h2o: heavy hitters, by the attention accumulated over all queries since the token entered; a part of B goes to the
 * most recent tokens, so that a new token has time to collect. h2o_mean divides by the number of those queries, and
 * protects nothing.
 */
#include "policy/budget.h"
#include "policy/policies.h"

static uint32_t need_sum(const struct policy_settings *settings, bool first) {
    (void)settings, (void)first;
    return STATISTIC_SUM;
}

static uint32_t write_stages(const struct policy_settings *settings, struct score_stage *stages) {
    (void)settings;
    stages[0] = (struct score_stage){.kind = STAGE_SUM};
    stages[1] = (struct score_stage){.kind = STAGE_PROTECT};
    return 2;
}

static uint32_t write_mean_stages(const struct policy_settings *settings, struct score_stage *stages) {
    (void)settings;
    stages[0] = (struct score_stage){.kind = STAGE_SUM_PER_QUERY};
    stages[1] = (struct score_stage){.kind = STAGE_PROTECT};
    return 2;
}

/* The heavy hitters' part is rounded down, the recent tokens get the rest. */
static void protect_recent(const struct policy_settings *settings, uint32_t budget, uint32_t *sinks, uint32_t *recent) {
    (void)sinks;
    *recent = budget - budget_part(1 - settings->recent, budget);
}

const struct policy policy_h2o = {
    .name = "h2o",
    .summary = "largest accumulated attention, and recent tokens",
    .source = "H2O, Zhang et al. 2023",
    .options = OPTION_RECENT,
    .needs = need_sum,
    .stages = write_stages,
    .protect = protect_recent,
};

const struct policy policy_h2o_mean = {
    .name = "h2o_mean",
    .summary = "largest mean attention per query that could see the token",
    .source = "ObservedAttention of kvpress, Devoto et al. 2025",
    .needs = need_sum,
    .stages = write_mean_stages,
};
