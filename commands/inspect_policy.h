/* SPDX-License-Identifier: Apache-2.0
 *
 * `distillcache inspect FILE` of a policy file: the network, what it was trained for and how, as text or as a document.
 *
 *   {"file", "kind": "policy", "method": or null, "features": "content"|"paper", "inputs": [names],
 *    "shape": {"layers", "kv_heads", "head_dim", "content", "hidden"}, "parameters": trained numbers,
 *    "fingerprint": of the model that it was trained for, or null,
 *    "defaults": {"scope", "floor", "interval", "summary": true|false, "protect_recent", "protect_sinks"},
 *    "layer_budgets", "layer_budget_slopes", "summary_offsets", "summary_slopes": [one number per layer],
 *    "record": object, "tensors": [{"name", "shape", "trained": true|false}]}
 */
#ifndef COMMANDS_INSPECT_POLICY_H
#define COMMANDS_INSPECT_POLICY_H

#include "engine/error.h"

#include <jansson.h>
#include <stdbool.h>
#include <stdio.h>

/* The file looks like a safetensors file: whether it is a good one is not known yet. */
bool inspect_policy_is_file(const char *path);

/* The document; the caller releases it. NULL with a message for a file that is no policy file. */
json_t *inspect_policy_describe(const char *path, struct error *error);

void inspect_policy_print(const json_t *document, FILE *out);

#endif
