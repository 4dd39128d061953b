/* SPDX-License-Identifier: Apache-2.0
 *
 * Filters that make text: every value is taken as its text first, as jinja2 does it.
 */
#include "template/run.h"
#include "template/text.h"

#include <string.h>
#include <utf8proc.h>

static struct value filter_upper(struct run *run, struct value self, const struct value *args) {
    (void)args;
    struct string text = value_str(run, self);
    return text_cased(run, &text, TEXT_UPPER);
}

static struct value filter_lower(struct run *run, struct value self, const struct value *args) {
    (void)args;
    struct string text = value_str(run, self);
    return text_cased(run, &text, TEXT_LOWER);
}

static struct value filter_capitalize(struct run *run, struct value self, const struct value *args) {
    (void)args;
    struct string text = value_str(run, self);
    return text_cased(run, &text, TEXT_CAPITALISED);
}

/* Words begin behind blanks, hyphens and opening brackets. */
static struct value filter_title(struct run *run, struct value self, const struct value *args) {
    (void)args;
    struct string text = value_str(run, self);
    struct builder out = {.run = run};
    int32_t character;
    bool begins = true;
    for (size_t at = 0, step; at < text.bytes; at += step) {
        step = string_character(&text, at, &character);
        struct string part = string_part(&text, at, at + step);
        bool between =
            character_is_space(character) || (character > 0 && character < 0x80 && strchr("-({[<", character));
        if (between || character < 0)
            builder_add(&out, &part);
        else
            builder_add(&out, text_cased(run, &part, begins ? TEXT_UPPER : TEXT_LOWER).string);
        begins = between;
    }
    return builder_value(&out);
}

static struct value filter_trim(struct run *run, struct value self, const struct value *args) {
    struct string text = value_str(run, self);
    return value_string(run, string_strip(&text, argument_string(run, args[0], "chars"), true, true));
}

static struct value filter_replace(struct run *run, struct value self, const struct value *args) {
    struct string text = value_str(run, self), from = value_str(run, args[0]), to = value_str(run, args[1]);
    text.markup = false;
    return text_replace(run, &text, &from, &to, argument_integer(run, args[2], -1, "count"));
}

static struct value filter_string(struct run *run, struct value self, const struct value *args) {
    (void)args;
    return value_string(run, value_str(run, self));
}

static struct value filter_escape(struct run *run, struct value self, const struct value *args) {
    (void)args;
    return text_escaped(run, self);
}

static struct value filter_safe(struct run *run, struct value self, const struct value *args) {
    (void)args;
    struct string text = value_str(run, self);
    text.markup = true;
    return value_string(run, text);
}

static struct value spaces(struct run *run, int64_t count) {
    const struct string blank = string_of(" "), empty = string_of("");
    return text_padded(run, &empty, count > 0 ? (size_t)count : 0, 0, &blank);
}

static struct value filter_indent(struct run *run, struct value self, const struct value *args) {
    struct string text = value_str(run, self);
    struct value indent =
        args[0].kind == VALUE_STRING ? args[0] : spaces(run, argument_integer(run, args[0], 4, "width"));
    return text_indented(
        run, &text, indent.string, argument_boolean(run, args[1], false), argument_boolean(run, args[2], false));
}

static struct value filter_center(struct run *run, struct value self, const struct value *args) {
    struct string text = value_str(run, self);
    const struct string blank = string_of(" ");
    int64_t width = argument_integer(run, args[0], 80, "width"), length = (int64_t)string_length(&text);
    int64_t total = width > length ? width - length : 0, left = total / 2 + (total & width & 1);
    return text_padded(run, &text, (size_t)left, (size_t)(total - left), &blank);
}

static struct value filter_wordcount(struct run *run, struct value self, const struct value *args) {
    (void)args;
    struct string text = value_str(run, self);
    int64_t count = 0;
    int32_t character;
    bool inside = false;
    for (size_t at = 0; at < text.bytes;) {
        at += string_character(&text, at, &character);
        utf8proc_category_t category = utf8proc_category(character < 0 ? 0 : character);
        bool word = (category >= UTF8PROC_CATEGORY_LU && category <= UTF8PROC_CATEGORY_LO) ||
                    (category >= UTF8PROC_CATEGORY_ND && category <= UTF8PROC_CATEGORY_NO) || character == '_';
        count += word && !inside;
        inside = word;
    }
    return value_integer(count);
}

/* `format % arguments`. */
static struct value filter_format(struct run *run, struct value self, const struct arguments *arguments) {
    struct string text = value_str(run, self);
    struct value tuple = value_list(run, VALUE_TUPLE);
    for (size_t i = 0; i < arguments->count; i++)
        list_add(run, tuple.list, arguments->items[i]);
    if (arguments->keywords_count > 0)
        arena_fail(&run->arena, "format with named arguments is not supported");
    return format_percent(run, &text, tuple);
}

static struct value filter_urlencode(struct run *run, struct value self, const struct value *args) {
    static const char plain[] = "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789_.-~/";
    (void)args;
    struct string text = value_str(run, self);
    struct builder out = {.run = run};
    for (size_t at = 0; at < text.bytes; at++) {
        struct string part = string_part(&text, at, at + 1);
        if (memchr(plain, text.text[at], sizeof plain - 1) != NULL)
            builder_add(&out, &part);
        else
            builder_format(&out, "%%%02X", (unsigned char)text.text[at]);
    }
    return builder_value(&out);
}

/* transformers' own: json.dumps, and nothing is escaped for HTML. */
static struct value filter_tojson(struct run *run, struct value self, const struct value *args) {
    struct builder out = {.run = run};
    const struct string *separators[2] = {NULL, NULL};
    struct value indent = args[1];
    if (indent.kind == VALUE_INTEGER || indent.kind == VALUE_BOOLEAN)
        indent = spaces(run, argument_integer(run, indent, 0, "indent"));
    if (args[2].kind == VALUE_LIST || args[2].kind == VALUE_TUPLE) {
        if (args[2].list->count != 2)
            arena_fail(&run->arena, "separators must be two strings");
        for (int i = 0; i < 2; i++)
            separators[i] = argument_string(run, args[2].list->items[i], "a separator");
    }
    const struct json_style style = {.indent = argument_string(run, indent, "indent"),
        .item_separator = separators[0],
        .key_separator = separators[1],
        .ascii = argument_boolean(run, args[0], false),
        .sort_keys = argument_boolean(run, args[3], false)};
    json_write(&out, self, &style);
    return builder_value(&out);
}

const struct builtin text_filters[] = {
    {"upper", "", 0, filter_upper, NULL},
    {"lower", "", 0, filter_lower, NULL},
    {"capitalize", "", 0, filter_capitalize, NULL},
    {"title", "", 0, filter_title, NULL},
    {"trim", "chars", 0, filter_trim, NULL},
    {"replace", "old new count", 2, filter_replace, NULL},
    {"string", "", 0, filter_string, NULL},
    {"escape", "", 0, filter_escape, NULL},
    {"e", "", 0, filter_escape, NULL},
    {"safe", "", 0, filter_safe, NULL},
    {"indent", "width first blank", 0, filter_indent, NULL},
    {"center", "width", 0, filter_center, NULL},
    {"wordcount", "", 0, filter_wordcount, NULL},
    {"urlencode", "", 0, filter_urlencode, NULL},
    {"format", NULL, 0, NULL, filter_format},
    {"tojson", "ensure_ascii indent separators sort_keys", 0, filter_tojson, NULL},
    {NULL, NULL, 0, NULL, NULL},
};
