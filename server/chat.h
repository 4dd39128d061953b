/* SPDX-License-Identifier: Apache-2.0
 *
 * /v1/chat/completions: the request body. Beside the shared parameters (params.h) and those of the prompt
 * (chat_messages.h):
 *
 * | field                 | values                                                          | default          |
 * |-----------------------|-----------------------------------------------------------------|------------------|
 * | max_completion_tokens | 1 or more; wins over max_tokens                                 | the context      |
 * | max_tokens            | 1 or more                                                       | the context      |
 * | logprobs              | boolean: the chosen tokens' log-probabilities                   | false            |
 * | top_logprobs          | 0 to 20, with logprobs: that many most likely ones              | 0                |
 * | add_special_tokens    | boolean: BOS in front of a prompt whose template writes none    | false            |
 * | functions             | empty                                                           |                  |
 *
 * POST /apply-template (llama.cpp's): the fields of the prompt -> {"prompt": text}.
 */
#ifndef SERVER_CHAT_H
#define SERVER_CHAT_H

#include "server/http.h"
#include "server/params.h"

int chat_parse(const json_t *body, const struct parse_context *context, struct plan *plan, struct fault *fault);

void chat_handle(struct exchange *exchange); /* the routes */
void apply_template_handle(struct exchange *exchange);

#endif
