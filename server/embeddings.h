/* SPDX-License-Identifier: Apache-2.0
 *
 * /v1/embeddings: a vector for each text, of the model's hidden states after the final norm (engine/pooling.h).
 *
 * | field              | values                                                                    | default  |
 * |--------------------|---------------------------------------------------------------------------|----------|
 * | input              | as prompts.h has it, none empty, at most 2,048 texts                      | required |
 * | model              | the served model's id                                                     | it       |
 * | encoding_format    | float: numbers; base64: of 32-bit floats, little-endian                   | float    |
 * | dimensions         | as many as the model's vectors have. Fewer are refused: the first numbers |          |
 * |                    | of a vector mean something only for models trained for that               | all      |
 * | pooling            | mean, last                                                                | (below)  |
 * | normalize          | boolean: vectors of length 1                                              | true     |
 * | embd_normalize     | the same by llama.cpp's name: 2 or -1                                     | 2        |
 * | add_special_tokens | boolean: put the model's BOS token before text, if it wants one           | true     |
 *
 * Without the field pooling is what the model file asks for in its key ARCHITECTURE.pooling_type (1 mean, 3 last), and
 * mean where it asks for nothing. A file that asks for another one (2 the first token's, 4 a classifier) was trained
 * for vectors that are not computed here: requests must then choose one.
 *
 * Nothing of the texts stays in the KV cache, and no eviction policy is used on them.
 */
#ifndef SERVER_EMBEDDINGS_H
#define SERVER_EMBEDDINGS_H

#include "server/http.h"
#include "server/params.h"

int embeddings_parse(const json_t *body, const struct parse_context *context, struct plan *plan, struct fault *fault);

void embeddings_handle(struct exchange *exchange); /* the route */

#endif
