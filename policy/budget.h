/* SPDX-License-Identifier: Apache-2.0
 *
 * How the budget is shared out over layers and KV heads. Pure arithmetic on the host.
 */
#ifndef POLICY_BUDGET_H
#define POLICY_BUDGET_H

#include "policy/policy.h"

/* Budget of a head that keeps everything. */
#define BUDGET_ALL UINT32_MAX

/* floor(part * whole), exact for a part with up to six decimals (a float 0.7 is a little less than 0.7). */
uint32_t budget_part(float part, uint32_t whole);

struct budget_input {
    const struct policy_settings *settings;
    uint32_t layers, kv_heads;       /* that the policy is about: of a model with sliding layers, its global ones */
    const uint32_t *numbers;         /* [layers] their places among the model's, ascending; NULL: 0, 1, ... */
    uint32_t seen;                   /* L */
    const double *layer_preferences; /* [layers] cake: H^(1/tau1) V^(1/tau2) of the first prune; else NULL */
    const float *gates;              /* [layers * kv_heads] rlkv, hybrid: higher keeps everything; else NULL */
};

/* budgets [layers * kv_heads]: slots each head may hold (scopes layer and model: its part of the total; shared
 * policies: the layer's one row has the budget of any of its heads). Every weight and gate there is counts:
 *   pyramid  B beyond the window falls linearly over the layers (pyramidkv, policy/snapkv.c)
 *   cake     B beyond the window by layer_preferences (policy/cake.c); NULL: equal
 *   network  B beyond the first slot (two, with a summary slot) by network_layer_budget, no layer more than what was
 *            seen; no network, or one that lacks a layer or has more, where all layers are there: equal
 *   gates    rlkv: the lowest gates get sinks + recent_tokens. hybrid: the highest get all. Equal gates: the lower
 *            layer, then the lower head ranks higher. NULL: equal */
void budget_allocate(const struct budget_input *input, uint32_t *budgets);

/* The least that a head may hold once `seen` tokens were seen, where it is known before budgets are allocated: a prune
 * with no head over it evicts nothing. rlkv's heads that do not keep everything have their number whatever the ratio.
 */
uint32_t budget_least(const struct policy_settings *settings, uint32_t seen);

/* Integers proportional to weights [count] that add up to min(total, cap * count), none above cap; what a cap cuts off
 * goes to the others. Largest remainders (compared at 9 decimals) round up, equal ones favour the lower index. No
 * weight at all: equal shares (what is not a positive number is no weight). out [count]. */
void budget_share_out(const double *weights, uint32_t count, uint64_t total, uint32_t cap, uint32_t *out);

/* Gates of a model's heads, from a JSON file {"gates": [[one number in [0, 1] per KV head] per layer], ...}. */
struct head_gates {
    uint32_t references;
    uint32_t layers, kv_heads;
    float values[]; /* [layers * kv_heads] */
};
struct head_gates *head_gates_load(const char *file, struct error *error); /* NULL: ERROR_IO, ERROR_FORMAT, ... */
/* The same from text; name: of the file, for messages. */
struct head_gates *head_gates_parse(const char *text, size_t bytes, const char *name, struct error *error);
struct head_gates *head_gates_take(struct head_gates *gates); /* one more reference (any thread); NULL: NULL */
void head_gates_release(struct head_gates *gates);            /* one less; NULL allowed */

/* Gate of a head without a file, at the first prune: the share of the last queries' attention (the sums of
 * STATISTIC_WINDOW) that lies outside the first HEAD_GATE_SINKS and the last HEAD_GATE_RECENT tokens, in [0, 1]; 0
 * without any attention. A head that looks there needs its cache. Not the attention of all queries: of a head that
 * looks at its neighbours alone, nearly all lies there too. Empty slots are skipped. */
enum { HEAD_GATE_SINKS = 16, HEAD_GATE_RECENT = 64 };
float head_gate_from_attention(const uint32_t *sums, const uint32_t *positions, uint32_t slots, uint32_t seen);

#endif
