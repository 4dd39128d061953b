/* SPDX-License-Identifier: Apache-2.0
 *
 * restkv: the error of the layer's output when the token alone is dropped and attention renormalised. For query t,
 *
 *     e_t(i) = sum over the group's h of p / max(1 - p, 1e-6) * |(o_{h,t} - v_i) W_h|,  p = p[h,t,i]
 *
 * smoothed from the window's oldest query on, e = e_0, then e = smoothing e_t + (1 - smoothing) e, and pooled by a mean
 * over unprotected slots j with |pos_j - pos_i + shift| <= kernel / 2 (and i itself). Kernel and shift come from how
 * far the head's attention moves: c_t is the mean position of the n unprotected slots with the largest a[t,i] (n = B
 * less the protected slots; equal ones: the later slots), m = mean of c_t over the window's first half less that over
 * its second half. kernel = max(5, 2 floor(|m| / 2000) + 1), shift = floor(m / 2000), plus 1 where m <= 0. A window of
 * one query or n <= 0: kernel 5, shift 0.
 */
#include "policy/policies.h"

static void set_defaults(struct policy_settings *settings) {
    settings->interval = 16; /* products with the output matrix per slot */
}

static uint32_t need_heads(const struct policy_settings *settings, bool first) {
    (void)settings, (void)first;
    return STATISTIC_HEAD_WINDOW | STATISTIC_OUTPUTS | STATISTIC_WINDOW;
}

static uint32_t write_stages(const struct policy_settings *settings, struct score_stage *stages) {
    stages[0] = (struct score_stage){.kind = STAGE_DROP_ERROR, .x = settings->smoothing};
    stages[1] = (struct score_stage){.kind = STAGE_PROTECT};
    stages[2] = (struct score_stage){.kind = STAGE_POOL_ADAPTIVE};
    return 3;
}

const struct policy policy_restkv = {
    .name = "restkv",
    .summary = "error of the output when the token alone is dropped",
    .source = "ReST-KV (an-yongqi/rest-kv)",
    .options = OPTION_WINDOW | OPTION_SMOOTHING,
    .defaults = set_defaults,
    .needs = need_heads,
    .stages = write_stages,
    .protect = policy_protect_window,
};
