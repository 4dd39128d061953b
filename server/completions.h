/* SPDX-License-Identifier: Apache-2.0
 *
 * /v1/completions: the request body. Beside the shared parameters (params.h):
 *
 * | field      | values                                                                      | default |
 * |------------|-----------------------------------------------------------------------------|---------|
 * | prompt     | as prompts.h has it                                                         | required |
 * | max_tokens | 0 (only with echo) or more                                                  | 16      |
 * | logprobs   | 0 to 5: the chosen token's, and that many most likely ones                  | none    |
 * | echo       | boolean: the prompt comes back before the completion                        | false   |
 * | add_special_tokens | boolean: put the model's BOS token before text, if it wants one     | true    |
 *
 * The texts of special tokens in a prompt become those tokens. Text is echoed from its tokens; what the vocabulary
 * cannot say is lost.
 */
#ifndef SERVER_COMPLETIONS_H
#define SERVER_COMPLETIONS_H

#include "server/http.h"
#include "server/params.h"

int completions_parse(const json_t *body, const struct parse_context *context, struct plan *plan, struct fault *fault);

void completions_handle(struct exchange *exchange); /* the route */

#endif
