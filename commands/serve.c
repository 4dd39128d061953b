/* SPDX-License-Identifier: Apache-2.0
 *
 * `distillcache serve`: the model, the engine, the scheduler and the HTTP server, from a configuration.
 */
#include "commands/commands.h"
#include "commands/engine_config.h"
#include "commands/serve_evaluate.h"
#include "engine/background.h"
#include "engine/log.h"
#include "grammar/vocabulary.h"
#include "policy/train/train.h"
#include "server/server.h"

#include <stdio.h>
#include <stdlib.h>

struct serve {
    const struct config *config;
    struct model *model;
    struct tokenizer *tokenizer;
    struct grammar_vocabulary *grammar_vocabulary;
    struct engine *engine;
    struct background *background; /* of jobs; NULL: there is no state directory */
    struct scheduler *scheduler;
    struct policy_settings *policies; /* one */
    size_t policies_count;
    struct chat_config chat;
};

/* The server's own policy, which the model must be able to have. */
static int serve_read_policy(struct serve *serve, const struct server_hooks *hooks, struct error *error) {
    const struct config *config = serve->config;
    const struct policy_model model = engine_policy_model(serve->engine);
    const struct trained_policies *trained;
    int code = hooks->open_policies(hooks->context, &model, &trained, error);
    if (code == 0)
        code = config_policies(config, trained, &serve->policies, &serve->policies_count, error);
    if (code == 0)
        code = hooks->take_own_policy(hooks->context, &serve->policies[0], error);
    if (code != 0)
        return code;
    code = engine_resolve_policies(serve->engine, serve->policies, serve->policies_count, error);
    if (code != 0)
        return code;
    bool budget = config->kv_tokens > 0 || (config->kv_ratio.count > 0 && strtod(config->kv_ratio.items[0], NULL) < 1);
    if (budget && policy_settings_keep_all(&serve->policies[0]))
        log_event(LOG_WARNING, NULL, "kv-ratio and kv-tokens have no effect", "kv_policy",
            LOG_STRING(serve->policies[0].policy->name), NULL);
    struct sequence *sequence = sequence_create(serve->engine);
    if (sequence == NULL)
        return error_set(error, ERROR_MEMORY, "no memory for a sequence");
    code = sequence_set_policy(sequence, &serve->policies[0], 1, error);
    sequence_free(sequence);
    return code;
}

static int serve_read_template(struct serve *serve, struct error *error) {
    enum tool_format format = tool_format_find(serve->config->tool_call_format);
    int code = chat_config_open(serve->config, serve->model, serve->tokenizer, &serve->chat, error);
    if (code != 0)
        return code;
    if (serve->chat.template == NULL)
        log_event(LOG_WARNING, NULL, "no chats", "why", LOG_STRING(serve->chat.refusal.message), NULL);
    else if (format != TOOL_FORMAT_UNKNOWN)
        chat_template_set_format(serve->chat.template, format);
    return 0;
}

/* server_load: runs on its own thread while the server answers /health already. */
static int serve_load(
    void *context, const struct server_hooks *hooks, struct server_model *model, struct error *error) {
    struct serve *serve = context;
    const struct config *config = serve->config;
    serve->model = engine_open_model(config, error);
    if (serve->model == NULL)
        return engine_error_of_file(config, error);
    serve->tokenizer = tokenizer_create(serve->model->file, error);
    if (serve->tokenizer == NULL)
        return engine_error_of_file(config, error);
    struct engine_options engine_options = engine_options_of(config);
    serve->grammar_vocabulary = grammar_vocabulary_create(serve->tokenizer, serve->model->shape.vocabulary, error);
    if (serve->grammar_vocabulary == NULL)
        return error->code;
    serve->engine = engine_open(serve->model, &engine_options, error);
    if (serve->engine == NULL)
        return error->code;
    if (serve_read_policy(serve, hooks, error) != 0)
        return error->code;
    if (config->state_dir[0] != '\0' && (serve->background = background_create(config->training_share, error)) == NULL)
        return error->code;
    struct scheduler_options options = {.max_sequences = config->max_sequences,
        .max_waiting = config->max_waiting,
        .prefill_chunk = config->prefill_chunk,
        .kv_policy = serve->policies[0],
        .swap_bytes = config->kv_swap,
        .background = serve->background,
        .wake = hooks->wake,
        .wake_context = hooks->context};
    serve->scheduler = scheduler_create(serve->engine, serve->tokenizer, &options, error);
    if (serve->scheduler == NULL)
        return error->code;
    if (serve_read_template(serve, error) != 0)
        return error->code;
    *model = (struct server_model){.scheduler = serve->scheduler,
        .tokenizer = serve->tokenizer,
        .grammar_vocabulary = serve->grammar_vocabulary,
        .fingerprint = serve->model->fingerprint,
        .chat_template = serve->chat.template,
        .chat_refusal = serve->chat.refusal.message,
        .vocabulary = serve->model->shape.vocabulary,
        .width = serve->model->shape.width,
        .pooling = serve->model->pooling,
        .context = engine_context(serve->engine),
        .tokens_max = engine_tokens_max(serve->engine),
        .kv_policy = serve->policies[0],
        .policy_model = engine_policy_model(serve->engine),
        .engine = serve->engine,
        .background = serve->background,
        .train = train_run,
        .evaluate = serve_evaluate};
    char policy[200];
    policy_settings_describe(&model->kv_policy, policy, sizeof policy);
    log_event(LOG_INFO, NULL, "model loaded", "file", LOG_STRING(config->model), "backend",
        LOG_STRING(engine_describe(serve->engine)), "context", LOG_INT(model->tokens_max), "kv_policy",
        LOG_STRING(policy), NULL);
    uint32_t wanted = config->context == 0 ? serve->model->shape.context : config->context;
    if (model->tokens_max < wanted)
        log_event(LOG_WARNING, NULL, "context cut to what kv-memory holds", "context", LOG_INT(model->tokens_max),
            "wanted", LOG_INT(wanted), NULL);
    return 0;
}

int command_serve(const struct config *config) {
    struct serve serve = {.config = config};
    struct error error = {0};
    struct server *server = server_create(config, &error);
    int code = server == NULL ? error.code : server_run(server, serve_load, &serve, &error);
    if (code != 0)
        fprintf(stderr, "distillcache: %s\n", error.message);
    /* The scheduler's thread wakes the server, the server's threads use the tokenizer. */
    scheduler_free(serve.scheduler);
    background_free(serve.background);
    server_free(server);
    config_free_policies(serve.policies, serve.policies_count);
    engine_close(serve.engine);
    chat_config_close(&serve.chat);
    grammar_vocabulary_free(serve.grammar_vocabulary);
    tokenizer_free(serve.tokenizer);
    model_free(serve.model);
    return code == 0 ? EXIT_OK : EXIT_FAILED;
}
