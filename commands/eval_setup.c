/* SPDX-License-Identifier: Apache-2.0 */
#include "commands/eval_setup.h"

#include "commands/engine_config.h"

#include <stdlib.h>
#include <string.h>

#include "policy/eval/files.h"
#include "policy/eval/generate.h"
#include "policy/trained.h"

enum { LENGTH_GENERATED = 1024, LENGTH_RESERVE = 768 /* of a conversation's frame and the answer, for files */ };

static int check_task(const struct config *config, struct error *error) {
    const char *task = config->task;
    bool from_file = eval_is_file_task(task);
    if (strcmp(task, "kl") != 0 && !eval_is_generated(task) && !from_file)
        return error_set(error, ERROR_INVALID, "no task '%.80s', there are: kl; generated: %s; from files: %s", task,
            eval_generated_tasks(), eval_file_tasks());
    if (from_file && config->data[0] == '\0')
        return error_set(error, ERROR_INVALID, "task %s needs its file: --data FILE", task);
    if (eval_is_generated(task) && config->data[0] != '\0')
        return error_set(error, ERROR_INVALID, "task %s is generated and takes no --data", task);
    return 0;
}

/* ---- variants ---- */

static bool names_seed(const char *text) {
    return strstr(text, ",seed=") != NULL;
}

static uint32_t shortest(const struct eval_plan *plan) {
    uint32_t least = plan->lengths[0];
    for (uint32_t i = 1; i < plan->setup.lengths_count; i++)
        least = plan->lengths[i] < least ? plan->lengths[i] : least;
    return least;
}

/* The settings of one policy of the command line with all its budgets, behind the variants there are. */
static int add_policy(const struct config *config, const struct trained_policies *trained, const struct engine *engine,
    char *text, struct eval_plan *plan, struct error *error) {
    struct config one = {.kv_policy = {&text, 1}, .kv_ratio = config->kv_ratio, .kv_tokens = config->kv_tokens};
    struct policy_settings *list = NULL;
    size_t settings_count = 0;
    int code = config_policies(&one, trained, &list, &settings_count, error);
    for (size_t i = 0; i < settings_count && code == 0; i++) {
        if (strcmp(list[i].policy->name, "full") == 0)
            continue; /* it is there already */
        code = policy_settings_take_trained(trained, &list[i], error);
        if (code == 0)
            code = engine_resolve_policies(engine, &list[i], 1, error);
        if (code != 0)
            break;
        struct eval_variant *variant = &plan->variants[plan->setup.variants_count++];
        policy_settings_copy(&variant->settings, &list[i]);
        variant->policy = strdup(text);
        variant->ratio = list[i].ratio;
        if (strcmp(config->kv_ratio_of, "bytes") == 0)
            variant->settings.ratio = engine_ratio_of_bytes(engine, &list[i], list[i].ratio, shortest(plan));
        if (!names_seed(text))
            variant->settings.seed = config->seed;
        if (variant->policy == NULL)
            code = error_set(error, ERROR_MEMORY, "no memory for policies");
    }
    config_free_policies(list, settings_count);
    return code;
}

static int add_variants(const struct config *config, const struct trained_policies *trained,
    const struct engine *engine, struct eval_plan *plan, struct error *error) {
    size_t ratios = config->kv_ratio.count > 0 ? config->kv_ratio.count : 1;
    plan->variants = calloc(1 + config->kv_policy.count * ratios, sizeof *plan->variants);
    if (plan->variants == NULL || (plan->variants[0].policy = strdup("full")) == NULL)
        return error_set(error, ERROR_MEMORY, "no memory for policies");
    plan->setup.variants = plan->variants;
    policy_settings_default(policy_find("full"), &plan->variants[0].settings);
    plan->variants[0].ratio = 1;
    plan->setup.variants_count = 1;
    int code = 0;
    for (size_t i = 0; i < config->kv_policy.count && code == 0; i++)
        code = add_policy(config, trained, engine, config->kv_policy.items[i], plan, error);
    return code;
}

/* ---- lengths ---- */

static uint32_t length_of_task(const struct config *config, const struct engine *engine) {
    uint32_t most = engine_tokens_max(engine);
    if (!eval_is_file_task(config->task))
        return most < 2 * LENGTH_GENERATED ? most / 2 : LENGTH_GENERATED;
    return most > 2 * LENGTH_RESERVE ? most - LENGTH_RESERVE : most / 2;
}

static int add_lengths(
    const struct config *config, const struct engine *engine, struct eval_plan *plan, struct error *error) {
    size_t count = config->length.count;
    plan->lengths = calloc(count, sizeof *plan->lengths);
    if (plan->lengths == NULL)
        return error_set(error, ERROR_MEMORY, "no memory for %zu lengths", count);
    for (size_t i = 0; i < count; i++) {
        uint32_t length = (uint32_t)strtoul(config->length.items[i], NULL, 10); /* was checked */
        plan->lengths[i] = length > 0 ? length : length_of_task(config, engine);
        if (plan->lengths[i] > engine_tokens_max(engine))
            return error_set(error, ERROR_CONTEXT,
                "length %u is over the %u tokens of a sequence (--context, --kv-memory)", plan->lengths[i],
                engine_tokens_max(engine));
    }
    plan->setup.lengths = plan->lengths;
    plan->setup.lengths_count = (uint32_t)count;
    return 0;
}

/* ---- all ---- */

int eval_plan_create(const struct config *config, const struct trained_policies *trained, const struct engine *engine,
    const struct tokenizer *tokenizer, const struct chat_source *chat, struct eval_plan *plan, struct error *error) {
    const struct model *model = engine_model(engine);
    *plan = (struct eval_plan){0};
    const bool smaller = model->quantise != TENSOR_F32; /* without it the key is that of older result files */
    snprintf(plan->model_key, sizeof plan->model_key, "%s %s %s%s%s", model->fingerprint, config->precision,
        config->kv_format, smaller ? " " : "", smaller ? config->quantize : "");
    plan->setup = (struct eval_setup){.model = plan->model_key,
        .task = config->task,
        .seed = config->seed,
        .query_aware = config->query_aware,
        .answers = strcmp(config->task, "kl") != 0,
        .layers = model->shape.layers};
    plan->setup.continuation = plan->setup.answers ? 0 : config->continuation;
    int code = check_task(config, error);
    if (code == 0)
        code = add_lengths(config, engine, plan, error);
    if (code == 0)
        code = add_variants(config, trained, engine, plan, error);
    return code == 0 ? eval_plan_items(config, tokenizer, chat, plan, error) : code;
}

void eval_plan_free(struct eval_plan *plan) {
    for (uint32_t i = 0; plan->sets != NULL && i < plan->setup.lengths_count; i++)
        eval_set_free(&plan->sets[i]);
    for (uint32_t i = 0; plan->variants != NULL && i < plan->setup.variants_count; i++) {
        policy_settings_release(&plan->variants[i].settings);
        free(plan->variants[i].policy);
    }
    free(plan->sets);
    free(plan->variants);
    free(plan->lengths);
}
