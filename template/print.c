/* SPDX-License-Identifier: Apache-2.0
 *
 * Values as Python writes them: str, repr, and `format % values`.
 */
#include "template/run.h"
#include "template/text.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <utf8proc.h>

/* --- Numbers --- */

/* Digits and exponent as Python lays them out: exponents below -4 and from 16 on are written. */
static void float_layout(const char *digits, int count, int exponent, char out[32]) {
    int at = 0;
    if (exponent < -4 || exponent >= 16) {
        out[at++] = digits[0];
        if (count > 1)
            at += sprintf(out + at, ".%.*s", count - 1, digits + 1);
        sprintf(out + at, "e%c%02d", exponent < 0 ? '-' : '+', abs(exponent));
    } else if (exponent < 0) {
        at += sprintf(out, "0.");
        for (int i = -1; i > exponent; i--)
            out[at++] = '0';
        sprintf(out + at, "%.*s", count, digits);
    } else if (count <= exponent + 1) {
        at += sprintf(out, "%.*s", count, digits);
        for (int i = count; i < exponent + 1; i++)
            out[at++] = '0';
        sprintf(out + at, ".0");
    } else {
        sprintf(out, "%.*s.%.*s", exponent + 1, digits, count - exponent - 1, digits + exponent + 1);
    }
}

void float_repr(double number, char out[32]) {
    char text[40], digits[24];
    if (!isfinite(number)) {
        strcpy(out, isnan(number) ? "nan" : number < 0 ? "-inf" : "inf");
        return;
    }
    int precision = 0;
    do
        snprintf(text, sizeof text, "%.*e", precision, number);
    while (strtod(text, NULL) != number && ++precision < 17);
    const char *at = text;
    if (*at == '-') {
        *out++ = '-';
        at++;
    }
    int count = 0;
    for (; *at != 'e'; at++)
        if (*at != '.')
            digits[count++] = *at;
    while (count > 1 && digits[count - 1] == '0')
        count--;
    float_layout(digits, count, atoi(at + 1), out);
}

/* --- repr --- */

/* What Python's repr writes as it is. */
static bool is_printable(int32_t character) {
    switch (utf8proc_category(character)) {
    case UTF8PROC_CATEGORY_CC:
    case UTF8PROC_CATEGORY_CF:
    case UTF8PROC_CATEGORY_CS:
    case UTF8PROC_CATEGORY_CO:
    case UTF8PROC_CATEGORY_CN:
    case UTF8PROC_CATEGORY_ZL:
    case UTF8PROC_CATEGORY_ZP:
        return false;
    case UTF8PROC_CATEGORY_ZS:
        return character == ' ';
    default:
        return true;
    }
}

static void repr_character(
    struct builder *out, const struct string *string, size_t at, size_t step, int32_t character, char quote) {
    const uint8_t *mark = string->input == NULL ? NULL : string->input + at;
    char escape[16];
    if (character == quote || character == '\\')
        snprintf(escape, sizeof escape, "\\%c", character);
    else if (character == '\n' || character == '\r' || character == '\t')
        snprintf(escape, sizeof escape, "\\%c", character == '\n' ? 'n' : character == '\r' ? 'r' : 't');
    else if (character < 0 || is_printable(character)) {
        builder_bytes(out, string->text + at, step, mark);
        return;
    } else
        snprintf(escape, sizeof escape,
            character < 0x100     ? "\\x%02x"
            : character < 0x10000 ? "\\u%04x"
                                  : "\\U%08x",
            (unsigned)character);
    builder_bytes(out, escape, strlen(escape), mark);
}

static void repr_string(struct builder *out, const struct string *string) {
    const struct string single = string_of("'"), twofold = string_of("\"");
    bool swap = string_find(string, &single, 0) != SIZE_MAX && string_find(string, &twofold, 0) == SIZE_MAX;
    char quote[2] = {swap ? '"' : '\'', '\0'};
    builder_text(out, quote);
    int32_t character;
    for (size_t at = 0, step; at < string->bytes; at += step) {
        step = string_character(string, at, &character);
        repr_character(out, string, at, step, character, quote[0]);
    }
    builder_text(out, quote);
}

static void repr_items(struct builder *out, struct value value) {
    const struct list *list = value.list;
    bool tuple = value.kind == VALUE_TUPLE;
    builder_text(out, tuple ? "(" : "[");
    for (size_t i = 0; i < list->count; i++) {
        if (i > 0)
            builder_text(out, ", ");
        value_repr(out, list->items[i]);
    }
    builder_text(out, tuple && list->count == 1 ? ",)" : tuple ? ")" : "]");
}

static void repr_dict(struct builder *out, const struct dict *dict) {
    builder_text(out, "{");
    for (size_t i = 0; i < dict->count; i++) {
        if (i > 0)
            builder_text(out, ", ");
        value_repr(out, dict->entries[i].key);
        builder_text(out, ": ");
        value_repr(out, dict->entries[i].value);
    }
    builder_text(out, "}");
}

void value_repr(struct builder *out, struct value value) {
    char number[32];
    run_enter(out->run);
    switch (value.kind) {
    case VALUE_ABSENT:
    case VALUE_UNDEFINED:
        builder_text(out, "Undefined");
        break;
    case VALUE_NONE:
        builder_text(out, "None");
        break;
    case VALUE_BOOLEAN:
        builder_text(out, value.boolean ? "True" : "False");
        break;
    case VALUE_INTEGER:
        builder_format(out, "%lld", (long long)value.integer);
        break;
    case VALUE_FLOAT:
        float_repr(value.number, number);
        builder_text(out, number);
        break;
    case VALUE_STRING:
        repr_string(out, value.string);
        break;
    case VALUE_LIST:
    case VALUE_TUPLE:
        repr_items(out, value);
        break;
    case VALUE_DICT:
        repr_dict(out, value.dict);
        break;
    case VALUE_NAMESPACE:
        builder_text(out, "<Namespace ");
        repr_dict(out, value.dict);
        builder_text(out, ">");
        break;
    default:
        builder_format(out, "<%s>", value_type_name(value));
    }
    run_leave(out->run);
}

void value_print(struct builder *out, struct value value) {
    if (value.kind == VALUE_STRING)
        builder_add(out, value.string);
    else if (value.kind != VALUE_UNDEFINED)
        value_repr(out, value);
}

struct string value_str(struct run *run, struct value value) {
    if (value.kind == VALUE_STRING)
        return *value.string;
    struct builder text = {.run = run};
    value_print(&text, value);
    return builder_string(&text);
}

/* --- format % values --- */

/* One conversion: %[flags][width][.precision]kind. */
struct conversion {
    char flags[8];
    int width, precision; /* -1: none */
    char kind;
};

enum { WIDTH_MAX = 400 };

static size_t read_number(struct run *run, const struct string *format, size_t at, int *number) {
    *number = 0;
    while (at < format->bytes && format->text[at] >= '0' && format->text[at] <= '9') {
        *number = *number * 10 + (format->text[at++] - '0');
        if (*number > WIDTH_MAX)
            arena_fail(&run->arena, "a width of more than %d in a format", WIDTH_MAX);
    }
    return at;
}

/* Reads a conversion behind '%' at `at`; returns where it ends. */
static size_t read_conversion(struct run *run, const struct string *format, size_t at, struct conversion *conversion) {
    size_t flags = 0;
    *conversion = (struct conversion){.width = 0, .precision = -1};
    while (at < format->bytes && memchr("-+ 0#", format->text[at], 5) != NULL && flags < 5)
        conversion->flags[flags++] = format->text[at++];
    at = read_number(run, format, at, &conversion->width);
    if (at < format->bytes && format->text[at] == '.')
        at = read_number(run, format, at + 1, &conversion->precision);
    if (at >= format->bytes)
        arena_fail(&run->arena, "incomplete format");
    conversion->kind = format->text[at];
    return at + 1;
}

static void pad(struct builder *out, const struct conversion *conversion, const struct string *text) {
    size_t length = string_length(text), width = (size_t)conversion->width;
    bool left = strchr(conversion->flags, '-') != NULL;
    for (size_t i = length; !left && i < width; i++)
        builder_text(out, " ");
    builder_add(out, text);
    for (size_t i = length; left && i < width; i++)
        builder_text(out, " ");
}

static void convert_number(struct builder *out, const struct conversion *conversion, struct value value) {
    struct run *run = out->run;
    char format[40], text[1024];
    if (!value_is_number(value))
        arena_fail(&run->arena, "%%%c format: a number is required, not %s", conversion->kind, value_type_name(value));
    bool real = strchr("eEfFgG", conversion->kind) != NULL;
    snprintf(format, sizeof format, conversion->precision < 0 ? "%%%s*%s%c" : "%%%s*.*%s%c", conversion->flags,
        real ? "" : "ll", conversion->kind == 'i' || conversion->kind == 'u' ? 'd' : conversion->kind);
    long long integer = value.kind == VALUE_FLOAT ? 0 : value.kind == VALUE_BOOLEAN ? value.boolean : value.integer;
    if (!real && value.kind == VALUE_FLOAT) {
        if (!(fabs(value.number) < 9e18) || conversion->kind == 'x' || conversion->kind == 'X' ||
            conversion->kind == 'o')
            arena_fail(&run->arena, "%%%c format: an integer is required", conversion->kind);
        integer = (long long)value.number;
    }
    int width = conversion->width, precision = conversion->precision, bytes;
#pragma GCC diagnostic push
#pragma GCC diagnostic ignored "-Wformat-nonliteral"
    if (real && precision < 0)
        bytes = snprintf(text, sizeof text, format, width, value_number(value));
    else if (real)
        bytes = snprintf(text, sizeof text, format, width, precision, value_number(value));
    else if (precision < 0)
        bytes = snprintf(text, sizeof text, format, width, integer);
    else
        bytes = snprintf(text, sizeof text, format, width, precision, integer);
#pragma GCC diagnostic pop
    if (bytes < 0 || (size_t)bytes >= sizeof text)
        arena_fail(&run->arena, "a number of too many digits in a format");
    builder_text(out, text);
}

static void convert(struct builder *out, const struct conversion *conversion, struct value value) {
    struct run *run = out->run;
    if (conversion->kind == 's' || conversion->kind == 'r') {
        struct builder text = {.run = run};
        if (conversion->kind == 's')
            value_print(&text, value);
        else
            value_repr(&text, value);
        struct string string = builder_string(&text);
        if (conversion->precision >= 0)
            string = string_part(&string, 0, string_offset(&string, (size_t)conversion->precision));
        pad(out, conversion, &string);
    } else if (conversion->kind != '\0' && strchr("diuoxXeEfFgG", conversion->kind) != NULL) {
        convert_number(out, conversion, value);
    } else {
        arena_fail(&run->arena, "unsupported format character (%d)", (unsigned char)conversion->kind);
    }
}

struct value format_percent(struct run *run, const struct string *format, struct value value) {
    struct builder out = {.run = run};
    size_t used = 0, given = value.kind == VALUE_TUPLE ? value.list->count : 1;
    for (size_t at = 0; at < format->bytes;) {
        size_t end = at;
        while (end < format->bytes && format->text[end] != '%')
            end++;
        struct string text = string_part(format, at, end);
        builder_add(&out, &text);
        at = end;
        if (at == format->bytes)
            break;
        struct conversion conversion;
        at = read_conversion(run, format, at + 1, &conversion);
        if (conversion.kind == '%') {
            builder_text(&out, "%");
            continue;
        }
        if (used == given)
            arena_fail(&run->arena, "not enough arguments for format string");
        struct value item = value.kind == VALUE_TUPLE ? value.list->items[used] : value;
        convert(&out, &conversion, format->markup && conversion.kind == 's' ? text_escaped(run, item) : item);
        used++;
    }
    bool mapping = value.kind == VALUE_DICT && used == 0;
    if (used < given && !mapping)
        arena_fail(&run->arena, "not all arguments converted during string formatting");
    return text_marked_up(run, builder_value(&out), format);
}
