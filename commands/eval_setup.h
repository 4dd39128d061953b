/* SPDX-License-Identifier: Apache-2.0
 *
 * What `eval` runs: variants, lengths and items, from the configuration.
 */
#ifndef COMMANDS_EVAL_SETUP_H
#define COMMANDS_EVAL_SETUP_H

#include "config/config.h"
#include "engine/engine.h"
#include "policy/eval/question.h"
#include "policy/eval/results.h"

/* setup is filled; its texts belong to the variants and to `model_key`, its lengths to `lengths`. */
struct eval_plan {
    struct eval_setup setup;
    struct eval_variant *variants;
    uint32_t *lengths;
    char model_key[160];
    struct eval_set *sets; /* [lengths] */
};

/* The items of one length. */
struct eval_set {
    struct eval_items items; /* empty for kl */
    struct eval_question *questions;
    uint32_t count;   /* of questions */
    uint32_t skipped; /* too long */
};

/* ERROR_INVALID: a task that there is not, one without its file, a policy that is none; ERROR_IO, ERROR_FORMAT of
 * files; ERROR_MEMORY. To be freed in any case. */
int eval_plan_create(const struct config *config, const struct trained_policies *trained, const struct engine *engine,
    const struct tokenizer *tokenizer, const struct chat_source *chat, struct eval_plan *plan, struct error *error);
void eval_plan_free(struct eval_plan *plan);

/* eval_items.c: fills plan->sets. */
int eval_plan_items(const struct config *config, const struct tokenizer *tokenizer, const struct chat_source *chat,
    struct eval_plan *plan, struct error *error);
void eval_set_free(struct eval_set *set);

#endif
