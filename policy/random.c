/* SPDX-License-Identifier: Apache-2.0
 *
 * random: a control. Every token has one random score per head for good, drawn from the seed, so that who stays does
 * not depend on when prunes happen.
 */
#include "policy/policies.h"

static uint32_t write_stages(const struct policy_settings *settings, struct score_stage *stages) {
    (void)settings;
    stages[0] = (struct score_stage){.kind = STAGE_RANDOM};
    stages[1] = (struct score_stage){.kind = STAGE_PROTECT};
    return 2;
}

const struct policy policy_random = {
    .name = "random",
    .summary = "random tokens stay",
    .source = "control",
    .options = OPTION_SEED,
    .stages = write_stages,
};
