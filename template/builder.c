/* SPDX-License-Identifier: Apache-2.0 */
#include "template/builder.h"

#include "template/run.h"

#include <stdio.h>
#include <string.h>
#include <utf8proc.h>

/* Room for `more` bytes, and for their marks if there are any or were. */
static void builder_reserve(struct builder *builder, size_t more, bool marked) {
    struct run *run = builder->run;
    size_t wanted = builder->bytes + more;
    if (more > run->bytes_max || wanted > run->bytes_max)
        arena_fail(&run->arena, "a text of more than %zu bytes", run->bytes_max);
    run_step(run, 1 + more / 64);
    builder->text = arena_grow(&run->arena, builder->text, &builder->capacity, wanted, 1);
    if (marked || builder->input != NULL)
        builder->input = arena_grow(&run->arena, builder->input, &builder->input_capacity, builder->capacity, 1);
}

void builder_add(struct builder *builder, const struct string *string) {
    if (string->bytes == 0)
        return;
    builder_reserve(builder, string->bytes, string->input != NULL);
    memcpy(builder->text + builder->bytes, string->text, string->bytes);
    if (string->input != NULL)
        memcpy(builder->input + builder->bytes, string->input, string->bytes);
    builder->bytes += string->bytes;
}

void builder_bytes(struct builder *builder, const char *text, size_t bytes, const uint8_t *mark) {
    bool marked = mark != NULL && *mark != 0;
    if (bytes == 0)
        return;
    builder_reserve(builder, bytes, marked);
    memcpy(builder->text + builder->bytes, text, bytes);
    if (marked)
        memset(builder->input + builder->bytes, 1, bytes);
    builder->bytes += bytes;
}

void builder_text(struct builder *builder, const char *text) {
    builder_bytes(builder, text, strlen(text), NULL);
}

void builder_character(struct builder *builder, int32_t character, const uint8_t *mark) {
    utf8proc_uint8_t text[4];
    utf8proc_ssize_t bytes = utf8proc_encode_char(character, text);
    builder_bytes(builder, (const char *)text, (size_t)bytes, mark);
}

void builder_format(struct builder *builder, const char *format, ...) {
    char text[512];
    va_list arguments;
    va_start(arguments, format);
    int bytes = vsnprintf(text, sizeof text, format, arguments);
    va_end(arguments);
    if (bytes < 0 || (size_t)bytes >= sizeof text)
        arena_fail(&builder->run->arena, "a number of too many digits");
    builder_bytes(builder, text, (size_t)bytes, NULL);
}

struct string builder_string(const struct builder *builder) {
    return (struct string){
        .text = builder->text == NULL ? "" : builder->text, .input = builder->input, .bytes = builder->bytes};
}

struct value builder_value(const struct builder *builder) {
    return value_string(builder->run, builder_string(builder));
}
