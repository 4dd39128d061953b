/* SPDX-License-Identifier: Apache-2.0
 *
 * /v1/chat/completions: the request body. Beside the shared parameters (params.h):
 *
 * | field                 | values                                                          | default          |
 * |-----------------------|-----------------------------------------------------------------|------------------|
 * | messages              | at least one {role, content[, name]}; required                  |                  |
 * | max_completion_tokens | 1 or more; wins over max_tokens                                 | the context      |
 * | max_tokens            | 1 or more                                                       | the context      |
 * | logprobs              | boolean: the chosen tokens' log-probabilities                   | false            |
 * | top_logprobs          | 0 to 20, with logprobs: that many most likely ones              | 0                |
 * | tools, functions      | empty; tool_choice none or auto                                 |                  |
 *
 * Roles: system, developer (as system), user, assistant, tool, function. Content: a string, an array of
 * {type: "text", text} parts, which are joined, or null (empty) for an assistant's message.
 */
#ifndef SERVER_CHAT_H
#define SERVER_CHAT_H

#include "server/http.h"
#include "server/params.h"

int chat_parse(const json_t *body, const struct parse_context *context, struct plan *plan, struct fault *fault);

void chat_handle(struct exchange *exchange); /* the route */

#endif
