/* SPDX-License-Identifier: Apache-2.0
 *
 * Generated tasks, so that a stranger's clone can evaluate without data: the same seed gives the same items.
 *   needle             one sentence with a number at a depth of filler text; asked for at the end
 *   multi-needle       four of them, all asked for
 *   kv-retrieval       JSON object of random keys and values; one key asked for
 *   variable-tracking  chains of assignments (RULER); which variables have a value
 *   arithmetic         sums with facts spread over filler text
 */
#ifndef POLICY_EVAL_GENERATE_H
#define POLICY_EVAL_GENERATE_H

#include "policy/eval/item.h"

/* Counts the tokens of a text (the model's tokenizer). */
typedef uint32_t (*eval_count_tokens)(void *context, const char *text);

struct eval_generate_options {
    const char *task;
    uint32_t length; /* most tokens of context and question */
    uint32_t count;  /* items */
    uint64_t seed;
    double depth; /* of the needle, 0 to 1; negative: spread evenly over the items */
    eval_count_tokens count_tokens;
    void *count_context;
};

const char *eval_generated_tasks(void); /* "needle, multi-needle, ..." */
bool eval_is_generated(const char *task);
/* ERROR_INVALID (unknown task, length too short for it), ERROR_MEMORY. */
int eval_generate(const struct eval_generate_options *options, struct eval_items *items, struct error *error);

#endif
