/* SPDX-License-Identifier: Apache-2.0
 *
 * keyformer: accumulated attention with Gumbel noise on the logits and a temperature that rises while tokens are
 * generated, 1 + 0.01 n for the n-th of them. The noise is attention's business (STATISTIC_NOISY).
 */
#include "policy/budget.h"
#include "policy/policies.h"

static uint32_t need_noisy(const struct policy_settings *settings, bool first) {
    (void)settings, (void)first;
    return STATISTIC_NOISY;
}

static uint32_t write_stages(const struct policy_settings *settings, struct score_stage *stages) {
    (void)settings;
    stages[0] = (struct score_stage){.kind = STAGE_NOISY};
    stages[1] = (struct score_stage){.kind = STAGE_PROTECT};
    return 2;
}

static void protect_recent(const struct policy_settings *settings, uint32_t budget, uint32_t *sinks, uint32_t *recent) {
    (void)sinks;
    *recent = budget_part(settings->recent, budget);
}

static void set_defaults(struct policy_settings *settings) {
    settings->recent = 0.3f;
}

const struct policy policy_keyformer = {
    .name = "keyformer",
    .summary = "accumulated attention with Gumbel noise, and recent tokens",
    .source = "Keyformer, Adnan et al. 2024",
    .options = OPTION_RECENT | OPTION_SEED,
    .defaults = set_defaults,
    .needs = need_noisy,
    .stages = write_stages,
    .protect = protect_recent,
};
