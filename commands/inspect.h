/* SPDX-License-Identifier: Apache-2.0
 *
 * `distillcache inspect FILE`: what a GGUF file holds and whether this program can run it, as text or with --json as
 * one document on standard output. Any well-formed GGUF file will do; a broken one gives a message and exit code 1.
 *
 *   {"file", "bytes", "gguf_version", "architecture", "name",
 *    "runnable": true|false, "reason": why not, "fingerprint": of a runnable model,
 *    "shape": {"layers", "heads", "kv_heads", "head_dim", "width", "ff_width", "vocabulary", "context", "rope_dim",
 *              "rope_base", "norm_epsilon", "global_layers"},   of a model that is not supported: what its keys say
 *    "tokenizer": {"model", "pre", "tokens", "merges", "bos", "eos", "adds_bos", "chat_template": true|false,
 *                  "chat_templates": names of the variants, the plain one being "default"},
 *    "metadata": {KEY: value, or {"array_of": TYPE, "count"}},
 *    "tensors": [{"name", "format", "shape": [rows, columns] slowest dimension first, "values", "bytes", "offset"}],
 *    "totals": {"tensors", "values", "bytes", "formats": {FORMAT: {"tensors", "values", "bytes"}}},
 *    "supported": {"architectures": [NAME], "formats": [NAME]},   that this program can run
 *    "unsupported": [{"kind": "architecture"|"format"|"model"|"tokenizer", "name", "format" of a tensor}]}
 * A policy file (safetensors) is described as commands/inspect_policy.h says; only its document has "kind".
 * What a file does not say is absent; the bytes of a format that the program does not know are null and not in totals.
 */
#ifndef COMMANDS_INSPECT_H
#define COMMANDS_INSPECT_H

#include "config/config.h"

#include <jansson.h>

/* The document; the caller releases it. NULL with a message for a file that is not well formed. */
json_t *inspect_describe(const char *path, struct error *error);

/* The document as text. */
void inspect_print(const json_t *document, FILE *out);

/* Reads config->file; exit code of the process: 0, or 1 after a message. */
int command_inspect(const struct config *config);

#endif
