/* SPDX-License-Identifier: Apache-2.0
 *
 * Methods of strings, lists, dictionaries and `loop`: those that change nothing.
 */
#include "template/run.h"
#include "template/text.h"

#include <string.h>
#include <utf8proc.h>

/* --- Strings: case and edges --- */

#define CASED(name, form)                                                                                              \
    static struct value name(struct run *run, struct value self, const struct value *args) {                           \
        (void)args;                                                                                                    \
        return text_cased(run, self.string, form);                                                                     \
    }
CASED(string_upper, TEXT_UPPER)
CASED(string_lower, TEXT_LOWER)
CASED(string_title, TEXT_TITLE)
CASED(string_capitalize, TEXT_CAPITALISED)
CASED(string_swapcase, TEXT_SWAPPED)

static struct value strip(struct run *run, struct value self, const struct value *args, bool left, bool right) {
    return value_string(run, string_strip(self.string, argument_string(run, args[0], "chars"), left, right));
}

static struct value string_strip_both(struct run *run, struct value self, const struct value *args) {
    return strip(run, self, args, true, true);
}

static struct value string_lstrip(struct run *run, struct value self, const struct value *args) {
    return strip(run, self, args, true, false);
}

static struct value string_rstrip(struct run *run, struct value self, const struct value *args) {
    return strip(run, self, args, false, true);
}

/* Bytes [begin, end) that the arguments start and end (in characters) stand for. */
static void bounds_of(struct run *run, struct value self, const struct value *args, size_t *begin, size_t *end) {
    int64_t length = (int64_t)value_length(run, self);
    int64_t low = argument_integer(run, args[0], 0, "start"), high = argument_integer(run, args[1], length, "end");
    low = low < 0 ? (low < -length ? 0 : low + length) : low;
    high = high < 0 ? (high < -length ? 0 : high + length) : high;
    *begin = string_offset(self.string, (size_t)(low > length ? length : low));
    *end = string_offset(self.string, (size_t)(high > length ? length : high));
    if (low > length || *end < *begin) {
        *begin = 1; /* nothing is found in there, not even the empty string */
        *end = 0;
    }
}

/* Whether the part of self begins (or ends) with a string, or one of a tuple. */
static struct value edge_is(struct run *run, struct value self, const struct value *args, bool at_end) {
    size_t begin, end;
    bounds_of(run, self, args + 1, &begin, &end);
    struct value candidates = args[0];
    if (candidates.kind != VALUE_TUPLE) {
        candidates = value_list(run, VALUE_TUPLE);
        list_add(run, candidates.list, args[0]);
    }
    for (size_t i = 0; i < candidates.list->count; i++) {
        const struct string *part = argument_string(run, candidates.list->items[i], "a prefix or suffix");
        if (part == NULL)
            arena_fail(&run->arena, "a prefix or suffix must be a string, not 'NoneType'");
        if (begin > end || part->bytes > end - begin)
            continue;
        size_t at = at_end ? end - part->bytes : begin;
        struct string here = string_part(self.string, at, at + part->bytes);
        if (string_same(&here, part))
            return value_boolean(true);
    }
    return value_boolean(false);
}

static struct value string_startswith(struct run *run, struct value self, const struct value *args) {
    return edge_is(run, self, args, false);
}

static struct value string_endswith(struct run *run, struct value self, const struct value *args) {
    return edge_is(run, self, args, true);
}

static const struct string *needed(struct run *run, struct value value, const char *name) {
    const struct string *string = argument_string(run, value, name);
    if (string == NULL)
        arena_fail(&run->arena, "%s must be a string, not 'NoneType'", name);
    return string;
}

static struct value string_removeprefix(struct run *run, struct value self, const struct value *args) {
    const struct string *prefix = needed(run, args[0], "prefix");
    struct string head =
        string_part(self.string, 0, prefix->bytes < self.string->bytes ? prefix->bytes : self.string->bytes);
    if (!string_same(&head, prefix))
        return self;
    return value_string(run, string_part(self.string, prefix->bytes, self.string->bytes));
}

static struct value string_removesuffix(struct run *run, struct value self, const struct value *args) {
    const struct string *suffix = needed(run, args[0], "suffix");
    if (suffix->bytes > self.string->bytes)
        return self;
    struct string tail = string_part(self.string, self.string->bytes - suffix->bytes, self.string->bytes);
    if (suffix->bytes == 0 || !string_same(&tail, suffix))
        return self;
    return value_string(run, string_part(self.string, 0, self.string->bytes - suffix->bytes));
}

/* --- Strings: searching --- */

/* The character at which part is found, or -1. */
static int64_t position(struct run *run, struct value self, const struct value *args, bool last) {
    const struct string *part = needed(run, args[0], "sub");
    size_t begin, end;
    bounds_of(run, self, args + 1, &begin, &end);
    if (begin > end)
        return -1;
    struct string here = string_part(self.string, 0, end);
    size_t found = SIZE_MAX;
    for (size_t at = string_find(&here, part, begin); at != SIZE_MAX; at = string_find(&here, part, at + 1)) {
        run_step(run, 1);
        found = at;
        if (!last)
            break;
    }
    if (found == SIZE_MAX)
        return -1;
    struct string before = string_part(self.string, 0, found);
    return (int64_t)string_length(&before);
}

static struct value string_find_first(struct run *run, struct value self, const struct value *args) {
    return value_integer(position(run, self, args, false));
}

static struct value string_find_last(struct run *run, struct value self, const struct value *args) {
    return value_integer(position(run, self, args, true));
}

static struct value string_index(struct run *run, struct value self, const struct value *args) {
    int64_t at = position(run, self, args, false);
    if (at < 0)
        arena_fail(&run->arena, "substring not found");
    return value_integer(at);
}

static struct value string_rindex(struct run *run, struct value self, const struct value *args) {
    int64_t at = position(run, self, args, true);
    if (at < 0)
        arena_fail(&run->arena, "substring not found");
    return value_integer(at);
}

static struct value string_count(struct run *run, struct value self, const struct value *args) {
    const struct string *part = needed(run, args[0], "sub");
    size_t begin, end;
    int64_t count = 0;
    bounds_of(run, self, args + 1, &begin, &end);
    if (begin > end)
        return value_integer(0);
    struct string here = string_part(self.string, begin, end);
    if (part->bytes == 0)
        return value_integer((int64_t)string_length(&here) + 1);
    for (size_t at = 0; (at = string_find(&here, part, at)) != SIZE_MAX; at += part->bytes) {
        run_step(run, 1);
        count++;
    }
    return value_integer(count);
}

/* --- Strings: taking apart and putting together --- */

static struct value string_split(struct run *run, struct value self, const struct value *args) {
    return text_split(
        run, self.string, argument_string(run, args[0], "sep"), argument_integer(run, args[1], -1, "maxsplit"), false);
}

static struct value string_rsplit(struct run *run, struct value self, const struct value *args) {
    return text_split(
        run, self.string, argument_string(run, args[0], "sep"), argument_integer(run, args[1], -1, "maxsplit"), true);
}

static struct value string_splitlines(struct run *run, struct value self, const struct value *args) {
    return text_split_lines(run, self.string, argument_boolean(run, args[0], false));
}

static struct value partition(struct run *run, struct value self, const struct value *args, bool last) {
    const struct string *separator = needed(run, args[0], "sep");
    const struct list *parts = text_split(run, self.string, separator, 1, last).list;
    struct value tuple = value_list(run, VALUE_TUPLE), empty = value_text(run, "");
    bool found = parts->count == 2;
    list_add(run, tuple.list, found || !last ? parts->items[0] : empty);
    list_add(run, tuple.list, found ? args[0] : empty);
    list_add(run, tuple.list, found ? parts->items[1] : last ? parts->items[0] : empty);
    return tuple;
}

static struct value string_partition(struct run *run, struct value self, const struct value *args) {
    return partition(run, self, args, false);
}

static struct value string_rpartition(struct run *run, struct value self, const struct value *args) {
    return partition(run, self, args, true);
}

static struct value string_replace(struct run *run, struct value self, const struct value *args) {
    const struct string *from = needed(run, args[0], "old"), *to = needed(run, args[1], "new");
    if (self.string->markup)
        to = text_escaped(run, args[1]).string;
    struct value text = text_replace(run, self.string, from, to, argument_integer(run, args[2], -1, "count"));
    return text_marked_up(run, text, self.string);
}

static struct value string_join(struct run *run, struct value self, const struct value *args) {
    const struct list *items = value_items(run, args[0]);
    for (size_t i = 0; i < items->count; i++)
        needed(run, items->items[i], "an item of join");
    if (!self.string->markup)
        return text_join(run, items, self.string);
    struct value escaped = value_list(run, VALUE_LIST);
    for (size_t i = 0; i < items->count; i++)
        list_add(run, escaped.list, text_escaped(run, items->items[i]));
    return text_marked_up(run, text_join(run, escaped.list, self.string), self.string);
}

/* Padding that brings self to the wanted number of characters; *fill: with what. */
static size_t padding(struct run *run, struct value self, const struct value *args, struct string *fill) {
    int64_t width = argument_integer(run, args[0], 0, "width"), length = (int64_t)value_length(run, self);
    const struct string *given = argument_string(run, args[1], "fillchar");
    *fill = given == NULL ? string_of(" ") : *given;
    if (string_length(fill) != 1)
        arena_fail(&run->arena, "The fill character must be exactly one character long");
    return width > length ? (size_t)(width - length) : 0;
}

static struct value string_ljust(struct run *run, struct value self, const struct value *args) {
    struct string fill;
    size_t count = padding(run, self, args, &fill);
    return text_padded(run, self.string, 0, count, &fill);
}

static struct value string_rjust(struct run *run, struct value self, const struct value *args) {
    struct string fill;
    size_t count = padding(run, self, args, &fill);
    return text_padded(run, self.string, count, 0, &fill);
}

static struct value string_center(struct run *run, struct value self, const struct value *args) {
    struct string fill;
    size_t count = padding(run, self, args, &fill), width = value_length(run, self) + count;
    size_t left = count / 2 + (count & width & 1);
    return text_padded(run, self.string, left, count - left, &fill);
}

static struct value string_zfill(struct run *run, struct value self, const struct value *args) {
    const struct value padded[2] = {args[0], value_text(run, "0")};
    struct string fill, sign = string_part(self.string, 0, 0);
    size_t count = padding(run, self, padded, &fill);
    if (self.string->bytes > 0 && (self.string->text[0] == '-' || self.string->text[0] == '+'))
        sign = string_part(self.string, 0, 1);
    struct string digits = string_part(self.string, sign.bytes, self.string->bytes);
    struct builder out = {.run = run};
    builder_add(&out, &sign);
    builder_add(&out, text_padded(run, &digits, count, 0, &fill).string);
    return builder_value(&out);
}

/* --- Strings: what they are made of --- */

static bool is_letter(int32_t character) {
    utf8proc_category_t category = utf8proc_category(character);
    return category >= UTF8PROC_CATEGORY_LU && category <= UTF8PROC_CATEGORY_LO;
}

static bool is_decimal(int32_t character) {
    return utf8proc_category(character) == UTF8PROC_CATEGORY_ND;
}

static bool is_numeric(int32_t character) {
    utf8proc_category_t category = utf8proc_category(character);
    return category >= UTF8PROC_CATEGORY_ND && category <= UTF8PROC_CATEGORY_NO;
}

static bool is_letter_or_number(int32_t character) {
    return is_letter(character) || is_numeric(character);
}

static struct value made_of(struct value self, bool (*is)(int32_t character)) {
    int32_t character;
    bool all = self.string->bytes > 0;
    for (size_t at = 0; all && at < self.string->bytes;) {
        at += string_character(self.string, at, &character);
        all = character >= 0 && is(character);
    }
    return value_boolean(all);
}

#define MADE_OF(name, is)                                                                                              \
    static struct value name(struct run *run, struct value self, const struct value *args) {                           \
        (void)run, (void)args;                                                                                         \
        return made_of(self, is);                                                                                      \
    }
MADE_OF(string_isalpha, is_letter)
MADE_OF(string_isdigit, is_decimal)
MADE_OF(string_isdecimal, is_decimal)
MADE_OF(string_isnumeric, is_numeric)
MADE_OF(string_isalnum, is_letter_or_number)
MADE_OF(string_isspace, character_is_space)

/* At least one letter with case, and all of this one. */
static struct value cased_as(struct value self, utf8proc_category_t wanted, utf8proc_category_t other) {
    int32_t character;
    bool some = false;
    for (size_t at = 0; at < self.string->bytes;) {
        at += string_character(self.string, at, &character);
        utf8proc_category_t category = utf8proc_category(character < 0 ? 0 : character);
        if (category == other || category == UTF8PROC_CATEGORY_LT)
            return value_boolean(false);
        some = some || category == wanted;
    }
    return value_boolean(some);
}

static struct value string_isupper(struct run *run, struct value self, const struct value *args) {
    (void)run, (void)args;
    return cased_as(self, UTF8PROC_CATEGORY_LU, UTF8PROC_CATEGORY_LL);
}

static struct value string_islower(struct run *run, struct value self, const struct value *args) {
    (void)run, (void)args;
    return cased_as(self, UTF8PROC_CATEGORY_LL, UTF8PROC_CATEGORY_LU);
}

/* The argument that a field of str.format names: by number, by name, or (empty) the next one. */
static struct value format_field(
    struct run *run, const struct string *field, const struct arguments *arguments, size_t *next) {
    size_t number = 0;
    bool digits = field->bytes > 0 && field->bytes < 6;
    for (size_t i = 0; i < field->bytes && digits; i++) {
        digits = field->text[i] >= '0' && field->text[i] <= '9';
        number = number * 10 + (size_t)(field->text[i] - '0');
    }
    if (field->bytes == 0)
        number = (*next)++;
    if ((digits || field->bytes == 0) && number < arguments->count)
        return arguments->items[number];
    for (size_t i = 0; i < arguments->keywords_count && !digits; i++)
        if (string_same(&arguments->keywords[i].name, field))
            return arguments->keywords[i].value;
    arena_fail(&run->arena, "str.format: no argument for the field '%.*s' (only numbers and names are supported)",
        field->bytes > 60 ? 60 : (int)field->bytes, field->text);
}

/* str.format, with fields that are empty, a number or a name. */
static struct value string_format(struct run *run, struct value self, const struct arguments *arguments) {
    const struct string *format = self.string;
    struct builder out = {.run = run};
    size_t next = 0;
    for (size_t at = 0; at < format->bytes;) {
        char c = format->text[at];
        bool twice = at + 1 < format->bytes && format->text[at + 1] == c;
        if ((c != '{' && c != '}') || twice) {
            struct string part = string_part(format, at, at + 1);
            builder_add(&out, &part);
            at += c == '{' || c == '}' ? 2 : 1;
            continue;
        }
        const char *end = c == '}' ? NULL : memchr(format->text + at, '}', format->bytes - at);
        if (end == NULL)
            arena_fail(&run->arena, "str.format: a single '%c'", c);
        struct string field = string_part(format, at + 1, (size_t)(end - format->text));
        struct value item = format_field(run, &field, arguments, &next);
        value_print(&out, format->markup ? text_escaped(run, item) : item);
        at = (size_t)(end - format->text) + 1;
    }
    return text_marked_up(run, builder_value(&out), format);
}

const struct builtin string_methods[] = {
    {"upper", "", 0, string_upper, NULL},
    {"lower", "", 0, string_lower, NULL},
    {"casefold", "", 0, string_lower, NULL},
    {"title", "", 0, string_title, NULL},
    {"capitalize", "", 0, string_capitalize, NULL},
    {"swapcase", "", 0, string_swapcase, NULL},
    {"strip", "chars", 0, string_strip_both, NULL},
    {"lstrip", "chars", 0, string_lstrip, NULL},
    {"rstrip", "chars", 0, string_rstrip, NULL},
    {"startswith", "prefix start end", 1, string_startswith, NULL},
    {"endswith", "suffix start end", 1, string_endswith, NULL},
    {"removeprefix", "prefix", 1, string_removeprefix, NULL},
    {"removesuffix", "suffix", 1, string_removesuffix, NULL},
    {"find", "sub start end", 1, string_find_first, NULL},
    {"rfind", "sub start end", 1, string_find_last, NULL},
    {"index", "sub start end", 1, string_index, NULL},
    {"rindex", "sub start end", 1, string_rindex, NULL},
    {"count", "sub start end", 1, string_count, NULL},
    {"split", "sep maxsplit", 0, string_split, NULL},
    {"rsplit", "sep maxsplit", 0, string_rsplit, NULL},
    {"splitlines", "keepends", 0, string_splitlines, NULL},
    {"partition", "sep", 1, string_partition, NULL},
    {"rpartition", "sep", 1, string_rpartition, NULL},
    {"replace", "old new count", 2, string_replace, NULL},
    {"join", "iterable", 1, string_join, NULL},
    {"ljust", "width fillchar", 1, string_ljust, NULL},
    {"rjust", "width fillchar", 1, string_rjust, NULL},
    {"center", "width fillchar", 1, string_center, NULL},
    {"zfill", "width", 1, string_zfill, NULL},
    {"format", NULL, 0, NULL, string_format},
    {"isalpha", "", 0, string_isalpha, NULL},
    {"isdigit", "", 0, string_isdigit, NULL},
    {"isdecimal", "", 0, string_isdecimal, NULL},
    {"isnumeric", "", 0, string_isnumeric, NULL},
    {"isalnum", "", 0, string_isalnum, NULL},
    {"isspace", "", 0, string_isspace, NULL},
    {"isupper", "", 0, string_isupper, NULL},
    {"islower", "", 0, string_islower, NULL},
    {NULL, NULL, 0, NULL, NULL},
};

/* --- Lists --- */

static struct value list_index(struct run *run, struct value self, const struct value *args) {
    for (size_t i = 0; i < self.list->count; i++)
        if (value_equal(run, self.list->items[i], args[0]))
            return value_integer((int64_t)i);
    arena_fail(&run->arena, "the value is not in the list");
}

static struct value list_count(struct run *run, struct value self, const struct value *args) {
    int64_t count = 0;
    for (size_t i = 0; i < self.list->count; i++)
        count += value_equal(run, self.list->items[i], args[0]);
    return value_integer(count);
}

static struct value list_copy(struct run *run, struct value self, const struct value *args) {
    (void)run, (void)args;
    return self; /* lists never change */
}

const struct builtin list_methods[] = {
    {"index", "value", 1, list_index, NULL},
    {"count", "value", 1, list_count, NULL},
    {"copy", "", 0, list_copy, NULL},
    {NULL, NULL, 0, NULL, NULL},
};

/* --- Dictionaries --- */

static struct value dict_keys(struct run *run, struct value self, const struct value *args) {
    (void)args;
    struct value list = value_list(run, VALUE_LIST);
    for (size_t i = 0; i < self.dict->count; i++)
        list_add(run, list.list, self.dict->entries[i].key);
    return list;
}

static struct value dict_values(struct run *run, struct value self, const struct value *args) {
    (void)args;
    struct value list = value_list(run, VALUE_LIST);
    for (size_t i = 0; i < self.dict->count; i++)
        list_add(run, list.list, self.dict->entries[i].value);
    return list;
}

static struct value dict_items(struct run *run, struct value self, const struct value *args) {
    (void)args;
    const struct string name = string_of("items");
    const struct arguments none = {.count = 0};
    return filter_call(run, &name, self, &none);
}

static struct value dict_get(struct run *run, struct value self, const struct value *args) {
    const struct value *found = dict_find(run, self.dict, args[0]);
    if (found != NULL)
        return *found;
    return args[1].kind == VALUE_ABSENT ? value_none() : args[1];
}

static struct value dict_copy(struct run *run, struct value self, const struct value *args) {
    (void)run, (void)args;
    return self; /* nor do dictionaries */
}

const struct builtin dict_methods[] = {
    {"keys", "", 0, dict_keys, NULL},
    {"values", "", 0, dict_values, NULL},
    {"items", "", 0, dict_items, NULL},
    {"get", "key default", 1, dict_get, NULL},
    {"copy", "", 0, dict_copy, NULL},
    {NULL, NULL, 0, NULL, NULL},
};

/* --- loop --- */

static struct value loop_cycle(struct run *run, struct value self, const struct arguments *arguments) {
    if (arguments->count == 0)
        arena_fail(&run->arena, "no items for cycling given");
    return arguments->items[self.loop->index0 % arguments->count];
}

static struct value loop_changed(struct run *run, struct value self, const struct arguments *arguments) {
    struct value now = value_list(run, VALUE_TUPLE);
    for (size_t i = 0; i < arguments->count; i++)
        list_add(run, now.list, arguments->items[i]);
    bool same = self.loop->changed->kind != VALUE_ABSENT && value_equal(run, *self.loop->changed, now);
    *self.loop->changed = now;
    return value_boolean(!same);
}

const struct builtin loop_methods[] = {
    {"cycle", NULL, 0, NULL, loop_cycle},
    {"changed", NULL, 0, NULL, loop_changed},
    {NULL, NULL, 0, NULL, NULL},
};
