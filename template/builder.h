/* SPDX-License-Identifier: Apache-2.0
 *
 * A string while it grows, with the marks of its bytes (value.h).
 */
#ifndef TEMPLATE_BUILDER_H
#define TEMPLATE_BUILDER_H

#include "template/value.h"

struct builder { /* zero-initialise, except run */
    struct run *run;
    char *text;
    uint8_t *input; /* NULL while no byte is marked */
    size_t bytes, capacity, input_capacity;
};

void builder_add(struct builder *builder, const struct string *string);
void builder_text(struct builder *builder, const char *text); /* without marks */
/* bytes of text, all marked as mark is (NULL: not). */
void builder_bytes(struct builder *builder, const char *text, size_t bytes, const uint8_t *mark);
void builder_character(struct builder *builder, int32_t character, const uint8_t *mark);
void builder_format(struct builder *builder, const char *format, ...) __attribute__((format(printf, 2, 3)));
/* What it holds; the builder must not be used any more. */
struct string builder_string(const struct builder *builder);
struct value builder_value(const struct builder *builder);

#endif
