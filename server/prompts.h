/* SPDX-License-Identifier: Apache-2.0
 *
 * Prompts in a field of a body, as OpenAI has them: a string, an array of strings, an array of token ids, or an array
 * of arrays of token ids (not mixed, none empty).
 */
#ifndef SERVER_PROMPTS_H
#define SERVER_PROMPTS_H

#include "server/params.h"

/* Reads the field, which must be there, into request->prompts; with request->n choices each they are at most
 * CHOICES_MAX choices. The texts of special tokens become those tokens; add_special: with the BOS token in front of
 * text, if the model wants one. An empty text is the token that a text begins with. */
int prompts_read(const json_t *body, const char *name, bool add_special, const struct parse_context *context,
    struct request *request, struct fault *fault);

#endif
