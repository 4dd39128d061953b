/* SPDX-License-Identifier: Apache-2.0 */
#include "template/json.h"

#include "template/run.h"

#include <math.h>
#include <stdio.h>
#include <string.h>

/* --- Reading --- */

size_t json_longest(const json_t *json) {
    size_t longest = json_is_string(json) ? json_string_length(json) : 0, i;
    const char *key;
    json_t *item;
    if (json_is_array(json)) {
        json_array_foreach(json, i, item) {
            size_t one = json_longest(item);
            longest = one > longest ? one : longest;
        }
    } else if (json_is_object(json)) {
        json_object_foreach((json_t *)json, key, item) {
            size_t one = json_longest(item), bytes = strlen(key);
            longest = one > longest ? one : longest;
            longest = bytes > longest ? bytes : longest;
        }
    }
    return longest;
}

static struct value json_object_value(
    struct run *run, const json_t *json, const uint8_t *marks, const char *plain_key) {
    struct value dict = value_dict(run, VALUE_DICT);
    const char *key;
    json_t *item;
    dict.dict->entries =
        arena_grow(&run->arena, NULL, &dict.dict->capacity, json_object_size(json) + 1, sizeof *dict.dict->entries);
    json_object_foreach((json_t *)json, key, item) {
        bool plain = plain_key != NULL && strcmp(key, plain_key) == 0 && json_is_string(item);
        struct value name = value_string(run, (struct string){.text = key, .input = marks, .bytes = strlen(key)});
        struct value value = json_value(run, item, plain ? NULL : marks, NULL);
        dict.dict->entries[dict.dict->count++] = (struct entry){name, value}; /* keys of an object differ */
    }
    return dict;
}

struct value json_value(struct run *run, const json_t *json, const uint8_t *marks, const char *plain_key) {
    struct value list;
    size_t i;
    json_t *item;
    run_step(run, 1);
    switch (json_typeof(json)) {
    case JSON_STRING:
        return value_string(
            run, (struct string){.text = json_string_value(json), .input = marks, .bytes = json_string_length(json)});
    case JSON_INTEGER:
        return value_integer(json_integer_value(json));
    case JSON_REAL:
        return value_float(json_real_value(json));
    case JSON_TRUE:
    case JSON_FALSE:
        return value_boolean(json_is_true(json));
    case JSON_ARRAY:
        run_enter(run);
        list = value_list(run, VALUE_LIST);
        json_array_foreach(json, i, item) list_add(run, list.list, json_value(run, item, marks, plain_key));
        run_leave(run);
        return list;
    case JSON_OBJECT:
        run_enter(run);
        list = json_object_value(run, json, marks, plain_key);
        run_leave(run);
        return list;
    default:
        return value_none();
    }
}

/* --- Writing --- */

static void write_value(struct builder *out, struct value value, const struct json_style *style, unsigned depth);

/* As \\u escapes of UTF-16. Bytes that are not UTF-8 stay. */
static void write_escaped(struct builder *out, const struct string *string, size_t at, size_t step, int32_t character) {
    const uint8_t *mark = string->input == NULL ? NULL : string->input + at;
    char text[16];
    if (character < 0) {
        builder_bytes(out, string->text + at, step, mark);
        return;
    }
    if (character < 0x10000)
        snprintf(text, sizeof text, "\\u%04x", (unsigned)character);
    else
        snprintf(text, sizeof text, "\\u%04x\\u%04x", 0xd7c0 + ((unsigned)character >> 10),
            0xdc00 + ((unsigned)character & 0x3ff));
    builder_bytes(out, text, strlen(text), mark);
}

static void write_string(struct builder *out, const struct string *string, bool ascii) {
    static const char escaped[] = "\"\\\b\f\n\r\t", letters[] = "\"\\bfnrt";
    size_t plain = 0; /* where what is not written yet begins */
    int32_t character;
    builder_text(out, "\"");
    for (size_t at = 0, step; at < string->bytes; at += step) {
        step = string_character(string, at, &character);
        const char *found = character > 0 && character < 0x80 ? memchr(escaped, character, sizeof escaped - 1) : NULL;
        if (found == NULL && (character < 0 || character >= 0x20) && (!ascii || character < 0x80))
            continue;
        struct string part = string_part(string, plain, at);
        builder_add(out, &part);
        if (found != NULL)
            builder_format(out, "\\%c", letters[found - escaped]);
        else
            write_escaped(out, string, at, step, character);
        plain = at + step;
    }
    struct string part = string_part(string, plain, string->bytes);
    builder_add(out, &part);
    builder_text(out, "\"");
}

static void write_break(struct builder *out, const struct json_style *style, unsigned depth) {
    if (style->indent == NULL)
        return;
    builder_text(out, "\n");
    for (unsigned i = 0; i < depth; i++)
        builder_add(out, style->indent);
}

static void write_list(struct builder *out, const struct list *list, const struct json_style *style, unsigned depth) {
    builder_text(out, "[");
    for (size_t i = 0; i < list->count; i++) {
        if (i > 0)
            builder_add(out, style->item_separator);
        write_break(out, style, depth + 1);
        write_value(out, list->items[i], style, depth + 1);
    }
    if (list->count > 0)
        write_break(out, style, depth);
    builder_text(out, "]");
}

/* Keys that are not strings are written as Python's json does. */
static struct value key_text(struct run *run, struct value key) {
    if (key.kind == VALUE_STRING)
        return key;
    if (key.kind == VALUE_BOOLEAN)
        return value_text(run, key.boolean ? "true" : "false");
    if (key.kind == VALUE_NONE)
        return value_text(run, "null");
    if (key.kind == VALUE_INTEGER || key.kind == VALUE_FLOAT)
        return value_string(run, value_str(run, key));
    arena_fail(&run->arena, "keys must be str, int, float, bool or None, not %s", value_type_name(key));
}

/* The entries in order of their keys. */
static const struct dict *sorted_dict(struct run *run, const struct dict *dict) {
    struct sortable *sortable = arena_take(&run->arena, dict->count * sizeof *sortable);
    struct value sorted = value_dict(run, VALUE_DICT);
    for (size_t i = 0; i < dict->count; i++)
        sortable[i] = (struct sortable){dict->entries[i].key, dict->entries[i].key, dict->entries[i].value};
    value_sort(run, sortable, dict->count, false);
    for (size_t i = 0; i < dict->count; i++)
        dict_set(run, sorted.dict, sortable[i].item, sortable[i].second);
    return sorted.dict;
}

static void write_dict(struct builder *out, const struct dict *dict, const struct json_style *style, unsigned depth) {
    if (style->sort_keys)
        dict = sorted_dict(out->run, dict);
    builder_text(out, "{");
    for (size_t i = 0; i < dict->count; i++) {
        if (i > 0)
            builder_add(out, style->item_separator);
        write_break(out, style, depth + 1);
        write_string(out, key_text(out->run, dict->entries[i].key).string, style->ascii);
        builder_add(out, style->key_separator);
        write_value(out, dict->entries[i].value, style, depth + 1);
    }
    if (dict->count > 0)
        write_break(out, style, depth);
    builder_text(out, "}");
}

static void write_value(struct builder *out, struct value value, const struct json_style *style, unsigned depth) {
    run_enter(out->run);
    run_step(out->run, 1);
    switch (value.kind) {
    case VALUE_NONE:
        builder_text(out, "null");
        break;
    case VALUE_BOOLEAN:
        builder_text(out, value.boolean ? "true" : "false");
        break;
    case VALUE_FLOAT:
        if (!isfinite(value.number)) {
            builder_text(out, isnan(value.number) ? "NaN" : value.number < 0 ? "-Infinity" : "Infinity");
            break;
        }
        value_repr(out, value);
        break;
    case VALUE_INTEGER:
        value_repr(out, value);
        break;
    case VALUE_STRING:
        write_string(out, value.string, style->ascii);
        break;
    case VALUE_LIST:
    case VALUE_TUPLE:
        write_list(out, value.list, style, depth);
        break;
    case VALUE_DICT:
        write_dict(out, value.dict, style, depth);
        break;
    default:
        arena_fail(&out->run->arena, "object of type %s is not JSON serializable", value_type_name(value));
    }
    run_leave(out->run);
}

void json_write(struct builder *out, struct value value, const struct json_style *style) {
    const struct string comma = string_of(","), comma_blank = string_of(", "), colon = string_of(": ");
    struct json_style whole = *style;
    if (whole.item_separator == NULL)
        whole.item_separator = style->indent != NULL ? &comma : &comma_blank;
    if (whole.key_separator == NULL)
        whole.key_separator = &colon;
    write_value(out, value, &whole, 0);
}
