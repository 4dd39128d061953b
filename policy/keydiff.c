/* SPDX-License-Identifier: Apache-2.0
 *
 * keydiff: keys that differ most from the mean direction of the head's keys. Needs nothing from attention.
 */
#include "policy/policies.h"

static uint32_t write_stages(const struct policy_settings *settings, struct score_stage *stages) {
    (void)settings;
    stages[0] = (struct score_stage){.kind = STAGE_KEY_DIFFERENCE};
    stages[1] = (struct score_stage){.kind = STAGE_PROTECT};
    return 2;
}

const struct policy policy_keydiff = {
    .name = "keydiff",
    .summary = "keys least like the head's mean key",
    .source = "KeyDiff, Park et al. 2025",
    .stages = write_stages,
};
