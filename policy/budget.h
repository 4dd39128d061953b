/* SPDX-License-Identifier: Apache-2.0
 *
 * How the budget is shared out over layers and KV heads. Pure arithmetic on the host.
 */
#ifndef POLICY_BUDGET_H
#define POLICY_BUDGET_H

#include "policy/policy.h"

/* Budget of a head that keeps everything. */
#define BUDGET_ALL UINT32_MAX

struct budget_input {
    const struct policy_settings *settings;
    uint32_t layers, kv_heads;
    uint32_t seen;                   /* L */
    const double *layer_preferences; /* [layers] cake: H^(1/tau1) V^(1/tau2) of the first prune; else NULL */
    const float *gates;              /* [layers * kv_heads] rlkv, hybrid: higher keeps everything; else NULL */
};

/* budgets [layers * kv_heads]: slots each head may hold (scopes layer and model: its part of the total). */
void budget_allocate(const struct budget_input *input, uint32_t *budgets);

/* Integers proportional to weights [count] that add up to min(total, cap * count), none above cap; what a cap cuts off
 * goes to the others. Largest remainders (compared at 9 decimals) round up, equal ones favour the lower index. No
 * weight at all: equal shares. out [count]. */
void budget_share_out(const double *weights, uint32_t count, uint64_t total, uint32_t cap, uint32_t *out);

/* Gates of a model's heads, from a JSON file {"gates": [[one number in [0, 1] per KV head] per layer], ...}. */
struct head_gates {
    uint32_t references;
    uint32_t layers, kv_heads;
    float values[]; /* [layers * kv_heads] */
};
struct head_gates *head_gates_load(const char *file, struct error *error); /* NULL: ERROR_IO, ERROR_FORMAT, ... */

#endif
