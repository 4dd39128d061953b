/* SPDX-License-Identifier: Apache-2.0
 *
 * Calls that must come: tool_choice "required", or a function by its name.
 *
 * The answer is then written by a grammar, in the format in which the model writes calls: the names of the request's
 * functions, and arguments that satisfy their schemas (grammar/grammar.h has the subset of JSON Schema), whether strict
 * is asked for or not. The marker that opens a call is put at the end of the prompt, where it is the token that the
 * model was trained with.
 *
 * | tool_choice                          | calls                                                           |
 * |--------------------------------------|-----------------------------------------------------------------|
 * | required                             | one or more of any functions; with parallel_tool_calls false one |
 * | {type: function, function: {name}}   | one, of that function                                           |
 */
#ifndef SERVER_FORCED_CALLS_H
#define SERVER_FORCED_CALLS_H

#include "server/params.h"
#include "template/template.h"

/* Reads tool_choice, before the tools: *wanted: whether the model sees them at all; *forced; *name: of the one
 * function, or NULL. Borrows from the body. */
int forced_calls_read_choice(const json_t *body, bool *wanted, bool *forced, const char **name, struct fault *fault);

/* Fills set->forced and set->only, when the set has its names and its format. */
int forced_calls_choose(struct tool_set *set, bool forced, const char *name, struct fault *fault);

/* What opens a call in the format: at the end of the prompt. May be empty. */
const char *forced_calls_opening(enum tool_format format);

/* Puts the opening behind the prompt's text. */
int forced_calls_open(const struct tool_set *set, struct template_text *text, struct fault *fault);

/* The grammar of what follows, into the request: of the body's tools, which are those of the set. */
int forced_calls_compile(const json_t *tools, const struct tool_set *set, const struct parse_context *context,
    struct request *request, struct fault *fault);

#endif
