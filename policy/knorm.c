/* SPDX-License-Identifier: Apache-2.0
 *
 * knorm: keys of small norm stay. Needs nothing from attention.
 */
#include "policy/policies.h"

static uint32_t write_stages(const struct policy_settings *settings, struct score_stage *stages) {
    (void)settings;
    stages[0] = (struct score_stage){.kind = STAGE_KEY_NORM};
    stages[1] = (struct score_stage){.kind = STAGE_PROTECT};
    return 2;
}

const struct policy policy_knorm = {
    .name = "knorm",
    .summary = "keys of small norm",
    .source = "L2 norm of keys, Devoto et al. 2024",
    .stages = write_stages,
};
