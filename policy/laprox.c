/* SPDX-License-Identifier: Apache-2.0
 *
 * laprox: what a token contributes to the layer's output over the window. With u_{h,i} = v_i W_h, p the attention of
 * the last w queries t and O the Frobenius norm of the layer's attention output over those queries as it was computed,
 *
 *     score(i) = sqrt( sum over h, h' of (sum over t of p[h,t,i] p[h',t,i]) (u_{h,i} . u_{h',i}) ) / O
 *
 * the norm of token i's part of the output, so that layers compare. h and h' run over all query heads of the layer
 * (laprox: one set of slots per layer), or over those of one KV head's group (laprox_head). The formula is our reading
 * of the paper's abstract, not the authors' code. O = sqrt(sum over t of |sum over h of o_{h,t} W_h|^2), from the
 * recorded outputs o; a sum below 0 (rounding) counts as 0.
 */
#include "policy/policies.h"

static void set_defaults(struct policy_settings *settings) {
    settings->scope = SCOPE_MODEL;
    settings->interval = 16; /* products with the output matrix per slot */
}

static uint32_t need_heads(const struct policy_settings *settings, bool first) {
    (void)settings, (void)first;
    return STATISTIC_HEAD_WINDOW | STATISTIC_OUTPUTS;
}

static uint32_t write_stages(const struct policy_settings *settings, struct score_stage *stages) {
    (void)settings;
    stages[0] = (struct score_stage){.kind = STAGE_LAPROX};
    stages[1] = (struct score_stage){.kind = STAGE_PROTECT};
    return 2;
}

static uint32_t write_head_stages(const struct policy_settings *settings, struct score_stage *stages) {
    (void)settings;
    stages[0] = (struct score_stage){.kind = STAGE_LAPROX_HEAD};
    stages[1] = (struct score_stage){.kind = STAGE_PROTECT};
    return 2;
}

const struct policy policy_laprox = {
    .name = "laprox",
    .summary = "contribution to the layer's output, one set of tokens per layer",
    .source = "LaProx (abstract; the formula is our reading)",
    .options = OPTION_WINDOW,
    .defaults = set_defaults,
    .needs = need_heads,
    .stages = write_stages,
    .shared = true,
};

const struct policy policy_laprox_head = {
    .name = "laprox_head",
    .summary = "laprox within one KV head's group",
    .source = "LaProx (abstract; the formula is our reading)",
    .options = OPTION_WINDOW,
    .defaults = set_defaults,
    .needs = need_heads,
    .stages = write_head_stages,
};
