/* SPDX-License-Identifier: Apache-2.0
 *
 * streaming: the first tokens (attention sinks) and the most recent ones. With `positions: cache` the engine stores
 * keys as if a slot's position were its index in the cache, as the original does; scores stay the same.
 */
#include "policy/policies.h"

static uint32_t write_stages(const struct policy_settings *settings, struct score_stage *stages) {
    (void)settings;
    stages[0] = (struct score_stage){.kind = STAGE_POSITION};
    stages[1] = (struct score_stage){.kind = STAGE_PROTECT};
    return 2;
}

static void protect_sinks(const struct policy_settings *settings, uint32_t budget, uint32_t *sinks, uint32_t *recent) {
    (void)budget, (void)recent;
    *sinks = settings->sinks;
}

const struct policy policy_streaming = {
    .name = "streaming",
    .summary = "attention sinks and the most recent tokens stay",
    .source = "StreamingLLM, Xiao et al. 2024",
    .options = OPTION_SINKS | OPTION_POSITIONS,
    .stages = write_stages,
    .protect = protect_sinks,
};
