/* SPDX-License-Identifier: Apache-2.0
 *
 * The parameters that say what form an answer must have, read into request->grammar.
 *
 * | field                                  | the answer is                                                |
 * |----------------------------------------|--------------------------------------------------------------|
 * | response_format {type: text}           | any text                                                     |
 * | response_format {type: json_object}    | a JSON object                                                |
 * | response_format {type: json_schema, json_schema: {name, schema, strict, description}} | JSON that satisfies the |
 * |                                        | schema, whatever strict says                                 |
 * | guided_json                            | the same, for a schema, as an object or as a string          |
 * | guided_choice                          | one of an array of strings                                   |
 * | guided_regex                           | a text that a pattern matches from end to end                |
 * | structured_outputs {json, choice, regex, json_object} | the same as vLLM's newer name                 |
 * At most one of them may ask for something. grammar/grammar.h has the subset of JSON Schema, grammar/regex.h that of
 * patterns; what is outside is a fault that names the keyword and its place.
 */
#ifndef SERVER_STRUCTURED_H
#define SERVER_STRUCTURED_H

#include "server/params.h"

int structured_read(
    const json_t *body, const struct parse_context *context, struct request *request, struct fault *fault);

#endif
