/* SPDX-License-Identifier: Apache-2.0 */
#include "commands/engine_config.h"

#include "engine/log.h"
#include "engine/quantise.h"
#include "policy/network.h"

#include <stdio.h>
#include <string.h>

static enum kv_format kv_format_of(const char *name) {
    return strcmp(name, "f32") == 0 ? KV_F32 : strcmp(name, "bf16") == 0 ? KV_BF16 : KV_F16;
}

struct engine_options engine_options_of(const struct config *config) {
    return (struct engine_options){
        .backend = {.cpu_features = config->cpu_features,
            .threads = config->threads,
            .name = config->backend,
            .ranks = config->tensor_parallel,
            .all_reduce = config->all_reduce,
            .hosts = {.world = config->world,
                .rendezvous = config->rendezvous,
                .key = config->rendezvous_key,
                .version = DISTILLCACHE_VERSION}},
        .kv_bytes = config->kv_memory,
        .kv_format = kv_format_of(config->kv_format),
        .batch_rows = config->batch_tokens,
        .context = config->context,
        .exact = strcmp(config->precision, "f32") == 0,
        .prefix_sharing = config->prefix_sharing,
    };
}

struct model *engine_open_model(const struct config *config, struct error *error) {
    struct model *model = model_open(config->model, error);
    if (model != NULL)
        (void)quantise_find_format(config->quantize, &model->quantise); /* the option's choices are its formats */
    return model;
}

int engine_error_of_file(const struct config *config, struct error *error) {
    struct error plain = *error;
    if (strncmp(plain.message, config->model, strlen(config->model)) != 0)
        error_set(error, plain.code, "%s: %s", config->model, plain.message);
    return plain.code;
}

int engine_resolve_policies(
    const struct engine *engine, struct policy_settings *policies, size_t count, struct error *error) {
    const struct policy_model model = engine_policy_model(engine);
    for (size_t i = 0; i < count; i++) {
        bool foreign;
        int code = policy_settings_resolve(&policies[i], &model, &foreign, error);
        if (code != 0)
            return code;
        if (foreign)
            log_event(LOG_WARNING, NULL, "the policy was trained for another model", "kv_policy",
                LOG_STRING(policies[i].policy->name), "trained_for", LOG_STRING(policies[i].network->fingerprint),
                "model", LOG_STRING(model.fingerprint), NULL);
    }
    return 0;
}

int chat_config_open(const struct config *config, const struct model *model, const struct tokenizer *tokenizer,
    struct chat_config *chat, struct error *error) {
    if (config->chat_template[0] == '\0') {
        chat->template = chat_template_open(model->file, tokenizer, &chat->refusal);
        return 0;
    }
    chat->template = chat_template_read(config->chat_template, tokenizer, error);
    return chat->template != NULL ? 0 : error->code;
}

struct chat_source chat_config_source(const struct chat_config *chat) {
    return (struct chat_source){chat->template, chat->refusal.message};
}

void chat_config_close(struct chat_config *chat) {
    chat_template_free(chat->template);
    chat->template = NULL;
}
