/* SPDX-License-Identifier: Apache-2.0
 *
 * JSON into values of a rendering.
 */
#ifndef TEMPLATE_JSON_H
#define TEMPLATE_JSON_H

#include "template/value.h"

#include <jansson.h>

/* marks: [at least the bytes of the longest string], all 1: the strings' marks; NULL: none. Strings under plain_key
 * (NULL: none) of the object, or of those in the list, get none; deeper ones do. Texts are borrowed from the JSON. */
struct value json_value(struct run *run, const json_t *json, const uint8_t *marks, const char *plain_key);

/* Bytes of the longest string or key in it. */
size_t json_longest(const json_t *json);

#endif
