/* SPDX-License-Identifier: Apache-2.0 */
#include "commands/engine_config.h"

#include <stdio.h>
#include <string.h>

static enum kv_format kv_format_of(const char *name) {
    return strcmp(name, "f32") == 0 ? KV_F32 : strcmp(name, "bf16") == 0 ? KV_BF16 : KV_F16;
}

struct engine_options engine_options_of(const struct config *config) {
    return (struct engine_options){
        .backend = {.cpu_features = config->cpu_features, .threads = config->threads},
        .kv_bytes = config->kv_memory,
        .kv_format = kv_format_of(config->kv_format),
        .batch_rows = config->batch_tokens,
        .context = config->context,
        .exact = strcmp(config->precision, "f32") == 0,
        .prefix_sharing = config->prefix_sharing,
    };
}

int engine_error_of_file(const struct config *config, struct error *error) {
    struct error plain = *error;
    if (strncmp(plain.message, config->model, strlen(config->model)) != 0)
        error_set(error, plain.code, "%s: %s", config->model, plain.message);
    return plain.code;
}
