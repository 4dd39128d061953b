/* SPDX-License-Identifier: Apache-2.0
 *
 * Policies by the trained network (network.h), which a file or the one that ships for the model gives. distillcache: by
 * the whole training; ranker: by its first stage alone. Nothing is protected: the network has learned what to keep.
 */
#include "policy/network.h"
#include "policy/policies.h"

/* Until the network is known: what the default features are made of. */
static uint32_t need_inputs(const struct policy_settings *settings, bool first) {
    (void)first;
    if (settings->network == NULL)
        return STATISTIC_SUM | STATISTIC_SQUARED | STATISTIC_ENTROPY | STATISTIC_CONTENT;
    return network_needs(&settings->network->shape) | STATISTIC_CONTENT;
}

static uint32_t write_stages(const struct policy_settings *settings, struct score_stage *stages) {
    uint32_t count = 0;
    stages[count++] = (struct score_stage){.kind = STAGE_NETWORK};
    if (settings->scope != SCOPE_HEAD)
        stages[count++] = (struct score_stage){.kind = STAGE_LOG_SOFTMAX};
    stages[count++] = (struct score_stage){.kind = STAGE_PROTECT};
    return count;
}

static void set_defaults(struct policy_settings *settings) {
    settings->scope = SCOPE_LAYER;
    settings->floor = 0.75f;
    settings->interval = 16;
}

const struct policy policy_ranker = {
    .name = "ranker",
    .summary = "a network trained to predict future attention",
    .source = "DistillCache, appendix F.6",
    .options = OPTION_NETWORK,
    .defaults = set_defaults,
    .needs = need_inputs,
    .stages = write_stages,
    .allocation = ALLOCATE_NETWORK,
};

const struct policy policy_distillcache = {
    .name = "distillcache",
    .summary = "a network trained to keep the model's outputs",
    .source = "DistillCache",
    .options = OPTION_NETWORK,
    .defaults = set_defaults,
    .needs = need_inputs,
    .stages = write_stages,
    .allocation = ALLOCATE_NETWORK,
};
