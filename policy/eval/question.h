/* SPDX-License-Identifier: Apache-2.0
 *
 * An item as tokens: what is computed before the first prune, what follows it, and what the answer should be.
 *
 * Context, question and answer are encoded one by one, so that a question is the same tokens whether it is seen before
 * the prune (query-aware: part of the prompt) or after it (fed as decode steps). The gold answer gets a space before it
 * unless the question ends in white space or an opening mark, or is a chat.
 */
#ifndef POLICY_EVAL_QUESTION_H
#define POLICY_EVAL_QUESTION_H

#include "engine/chat_template.h"
#include "engine/tokenizer.h"
#include "policy/eval/item.h"

struct eval_question {
    struct token_list prompt; /* the prune comes after it */
    struct token_list asked;  /* fed after the prune; empty when the question is part of the prompt */
    struct token_list gold;   /* the gold answer; empty: none */
    struct token_list text;   /* kl: what follows the prompt in the text, steps + 1 tokens; else empty */
    uint64_t digest;          /* over all tokens */
};

/* chat: writes items that are chats, as the server does, with CHAT_FIXED_TIME. ERROR_UNSUPPORTED: there is none, or it
 * does not write a user's message as it is; ERROR_INVALID: no words at all; ERROR_MEMORY. */
int eval_question_create(const struct tokenizer *tokenizer, const struct chat_source *chat,
    const struct eval_item *item, bool query_aware, struct eval_question *question, struct error *error);
void eval_question_free(struct eval_question *question);

/* The bytes of a text file, NUL-terminated; the caller frees them. NULL: ERROR_IO, ERROR_INVALID (too large),
 * ERROR_MEMORY. */
char *eval_text_read(const char *file, size_t *bytes, struct error *error);
/* Where the second half of a text's lines begins: the first may be trained on, the second is evaluated. */
size_t eval_text_half(const char *text, size_t bytes);

/* Long text that kl takes its prompts from. */
struct eval_source {
    struct token_list tokens;
};
/* file: the second half of its lines (the first may have been trained on); NULL: `tokens` tokens of generated prose. */
int eval_source_load(const struct tokenizer *tokenizer, const char *file, uint64_t seed, uint32_t tokens,
    struct eval_source *text, struct error *error);
void eval_source_free(struct eval_source *text);
/* Prompt number `index` of `count`: length tokens, and steps + 1 that follow. Prompts are spread evenly over the text,
 * each at a place in its part that the seed decides; they overlap only in a text that is too short for them.
 * ERROR_INVALID: the text is shorter than one. */
int eval_source_question(const struct eval_source *text, uint32_t length, uint32_t steps, uint32_t index,
    uint32_t count, uint64_t seed, struct eval_question *question, struct error *error);

#endif
