/* SPDX-License-Identifier: Apache-2.0
 *
 * The items of each length, and their tokens.
 */
#include "commands/eval_setup.h"

#include <stdlib.h>
#include <string.h>

#include "policy/eval/files.h"
#include "policy/eval/generate.h"

enum { ITEMS_GENERATED = 100 };

static uint32_t count_tokens(void *context, const char *text) {
    const struct tokenizer *tokenizer = context;
    struct token_list list = {0};
    uint32_t count = UINT32_MAX / 2; /* no memory: too long for anything */
    if (tokenizer_encode(tokenizer, text, strlen(text), false, &list, NULL) == 0)
        count = (uint32_t)list.count;
    token_list_free(&list);
    return count;
}

void eval_set_free(struct eval_set *set) {
    for (uint32_t i = 0; set->questions != NULL && i < set->count; i++)
        eval_question_free(&set->questions[i]);
    free(set->questions);
    eval_items_free(&set->items);
}

static int allocate_questions(struct eval_set *set, size_t count, struct error *error) {
    set->questions = calloc(count + 1, sizeof *set->questions);
    return set->questions == NULL ? error_set(error, ERROR_MEMORY, "no memory for %zu items", count) : 0;
}

static uint32_t items_wanted(const struct config *config) {
    return config->limit > 0 ? config->limit : ITEMS_GENERATED;
}

/* ---- kl ---- */

/* Prose for all prompts, when there is no file. */
static uint32_t prose_tokens(const struct config *config, const struct eval_plan *plan) {
    uint64_t most = 0;
    for (uint32_t i = 0; i < plan->setup.lengths_count; i++)
        most = plan->lengths[i] > most ? plan->lengths[i] : most;
    most = (most + config->continuation + 1) * items_wanted(config);
    return most < 1u << 28 ? (uint32_t)most : 1u << 28;
}

static int add_prompts(const struct config *config, const struct eval_source *text, uint32_t length,
    struct eval_set *set, struct error *error) {
    uint32_t count = items_wanted(config);
    int code = allocate_questions(set, count, error);
    for (; set->count < count && code == 0; set->count += code == 0)
        code = eval_source_question(
            text, length, config->continuation, set->count, count, config->seed, &set->questions[set->count], error);
    return code;
}

static int add_all_prompts(
    const struct config *config, const struct tokenizer *tokenizer, struct eval_plan *plan, struct error *error) {
    struct eval_source source;
    const char *file = config->data[0] != '\0' ? config->data : NULL;
    int code = eval_source_load(tokenizer, file, config->seed, prose_tokens(config, plan), &source, error);
    for (uint32_t i = 0; i < plan->setup.lengths_count && code == 0; i++)
        code = add_prompts(config, &source, plan->lengths[i], &plan->sets[i], error);
    eval_source_free(&source);
    return code;
}

/* ---- tasks with answers ---- */

static int load_items(const struct config *config, const struct tokenizer *tokenizer, uint32_t length,
    struct eval_set *set, struct error *error) {
    if (eval_is_generated(config->task)) {
        struct eval_generate_options options = {.task = config->task,
            .length = length,
            .count = items_wanted(config),
            .seed = config->seed,
            .depth = -1,
            .count_tokens = count_tokens,
            .count_context = (void *)tokenizer};
        return eval_generate(&options, &set->items, error);
    }
    struct eval_file_options options = {.task = config->task,
        .file = config->data,
        .shots = config->shots[0] != '\0' ? config->shots : NULL,
        .length = length,
        .limit = config->limit,
        .seed = config->seed,
        .count_tokens = count_tokens,
        .count_context = (void *)tokenizer};
    return eval_load(&options, &set->items, &set->skipped, error);
}

static int add_questions(const struct config *config, const struct tokenizer *tokenizer, const struct chat_source *chat,
    uint32_t length, struct eval_set *set, struct error *error) {
    int code = load_items(config, tokenizer, length, set, error);
    if (code == 0 && set->items.count == 0)
        code = error_set(error, ERROR_INVALID, "task %s has no item of at most %u tokens (%u are longer)", config->task,
            length, set->skipped);
    if (code == 0)
        code = allocate_questions(set, set->items.count, error);
    for (; code == 0 && set->count < set->items.count; set->count += code == 0)
        code = eval_question_create(
            tokenizer, chat, &set->items.items[set->count], config->query_aware, &set->questions[set->count], error);
    return code;
}

int eval_plan_items(const struct config *config, const struct tokenizer *tokenizer, const struct chat_source *chat,
    struct eval_plan *plan, struct error *error) {
    plan->sets = calloc(plan->setup.lengths_count, sizeof *plan->sets);
    if (plan->sets == NULL)
        return error_set(error, ERROR_MEMORY, "no memory for items");
    if (!plan->setup.answers)
        return add_all_prompts(config, tokenizer, plan, error);
    int code = 0;
    for (uint32_t i = 0; i < plan->setup.lengths_count && code == 0; i++)
        code = add_questions(config, tokenizer, chat, plan->lengths[i], &plan->sets[i], error);
    return code;
}
