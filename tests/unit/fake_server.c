/* SPDX-License-Identifier: Apache-2.0
 *
 * The server on the fake scheduler and tokenizer (fake_scheduler.h), and fake jobs (fake_train.h), for tests of
 * everything that needs no model: fake_server serve --model ANY [options of `distillcache serve`] with FAKE_STEP_US,
 * FAKE_MAX_RUNNING, FAKE_TOKENS_MAX, FAKE_LOAD_MS, FAKE_TRAIN_STEP_MS in the environment.
 */
#include "config/config.h"
#include "engine/chat_template.h"
#include "engine/log.h"
#include "policy/policy.h"
#include "server/server.h"
#include "tests/unit/fake_scheduler.h"
#include "tests/unit/fake_train.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

extern char **environ;

static unsigned fake_environment(const char *name, unsigned otherwise) {
    const char *value = getenv(name);
    return value == NULL ? otherwise : (unsigned)strtoul(value, NULL, 10);
}

struct fake {
    const struct config *config;
    struct scheduler *scheduler;
    struct tokenizer *tokenizer;
    struct chat_template *chat_template;
    struct policy_settings *policies; /* one */
    size_t policies_count;
};

/* As `distillcache serve` does it. */
static int fake_read_policy(struct fake *fake, const struct server_hooks *hooks, struct error *error) {
    const struct policy_model model = FAKE_TRAIN_MODEL;
    const struct trained_policies *trained;
    int code = hooks->open_policies(hooks->context, &model, &trained, error);
    if (code == 0)
        code = config_policies(fake->config, trained, &fake->policies, &fake->policies_count, error);
    if (code == 0)
        code = hooks->take_own_policy(hooks->context, &fake->policies[0], error);
    return code == 0 ? policy_settings_resolve(&fake->policies[0], &model, NULL, error) : code;
}

static int fake_load(void *context, const struct server_hooks *hooks, struct server_model *model, struct error *error) {
    struct fake *fake = context;
    if (strcmp(fake->config->model, "broken") == 0)
        return error_set(error, ERROR_FORMAT, "broken: not a model");
    if (fake_read_policy(fake, hooks, error) != 0)
        return error->code;
    usleep(fake_environment("FAKE_LOAD_MS", 0) * 1000);
    struct fake_options options = {.step_us = fake_environment("FAKE_STEP_US", 1000),
        .max_running = fake_environment("FAKE_MAX_RUNNING", 64),
        .max_waiting = fake->config->max_waiting,
        .tokens_max = fake_environment("FAKE_TOKENS_MAX", 8192),
        .wake = hooks->wake,
        .wake_context = hooks->context};
    fake->scheduler = fake_scheduler_create(&options);
    fake->tokenizer = fake_tokenizer_create(false);
    const char *template = fake->config->chat_template;
    fake->chat_template = template[0] != '\0'
                              ? chat_template_read(template, fake->tokenizer, error)
                              : chat_template_create(FAKE_TEMPLATE, strlen(FAKE_TEMPLATE), fake->tokenizer, error);
    if (fake->chat_template == NULL)
        return error->code;
    enum tool_format format = tool_format_find(fake->config->tool_call_format);
    if (format != TOOL_FORMAT_UNKNOWN)
        chat_template_set_format(fake->chat_template, format);
    *model = (struct server_model){.scheduler = fake->scheduler,
        .tokenizer = fake->tokenizer,
        .chat_template = fake->chat_template,
        .fingerprint = FAKE_FINGERPRINT,
        .vocabulary = FAKE_VOCABULARY,
        .width = FAKE_WIDTH,
        .pooling = POOLING_MEAN,
        .context = options.tokens_max,
        .tokens_max = options.tokens_max,
        .kv_policy = fake->policies[0],
        .policy_model = FAKE_TRAIN_MODEL,
        .train = fake_train,
        .evaluate = fake_evaluate};
    return 0;
}

int main(int count, char **arguments) {
    struct config config;
    struct error error = {0};
    if (count < 2 || strcmp(arguments[1], "serve") != 0) {
        fprintf(stderr, "usage: fake_server serve --model ANY [options]\n");
        return 2;
    }
    if (config_load(&config, CONFIG_SERVE, count - 2, arguments + 2, environ, &error) != 0 ||
        log_open(LOG_INFO, strcmp(config.log_format, "json") == 0, &error) != 0) {
        fprintf(stderr, "fake_server: %s\n", error.message);
        config_free(&config);
        return 2;
    }
    struct fake fake = {.config = &config};
    struct server *server = server_create(&config, &error);
    int code = server == NULL ? error.code : server_run(server, fake_load, &fake, &error);
    if (code != 0)
        fprintf(stderr, "fake_server: %s\n", error.message);
    scheduler_free(fake.scheduler);
    server_free(server);
    config_free_policies(fake.policies, fake.policies_count);
    chat_template_free(fake.chat_template);
    tokenizer_free(fake.tokenizer);
    config_free(&config);
    log_close();
    return code == 0 ? 0 : 1;
}
