/* SPDX-License-Identifier: Apache-2.0 */
#include "template/value.h"

#include "template/run.h"

#include <math.h>
#include <string.h>
#include <utf8proc.h>

/* --- Strings --- */

struct string string_of(const char *text) {
    return (struct string){.text = text, .bytes = strlen(text)};
}

bool string_is(const struct string *string, const char *text) {
    return string->bytes == strlen(text) && memcmp(string->text, text, string->bytes) == 0;
}

bool string_same(const struct string *a, const struct string *b) {
    return a->bytes == b->bytes && (a->bytes == 0 || memcmp(a->text, b->text, a->bytes) == 0);
}

size_t string_character(const struct string *string, size_t at, int32_t *character) {
    unsigned char first = (unsigned char)string->text[at];
    *character = first;
    if (first < 0x80)
        return 1;
    utf8proc_int32_t point;
    utf8proc_ssize_t used =
        utf8proc_iterate((const utf8proc_uint8_t *)string->text + at, (utf8proc_ssize_t)(string->bytes - at), &point);
    *character = used > 0 ? point : -1;
    return used > 0 ? (size_t)used : 1;
}

size_t string_length(const struct string *string) {
    int32_t character;
    size_t count = 0;
    for (size_t at = 0; at < string->bytes; count++)
        at += string_character(string, at, &character);
    return count;
}

size_t string_offset(const struct string *string, size_t index) {
    int32_t character;
    size_t at = 0;
    for (; index > 0 && at < string->bytes; index--)
        at += string_character(string, at, &character);
    return at;
}

struct string string_part(const struct string *string, size_t begin, size_t end) {
    return (struct string){.text = string->text + begin,
        .input = string->input == NULL ? NULL : string->input + begin,
        .bytes = end > begin ? end - begin : 0,
        .markup = string->markup};
}

bool character_is_space(int32_t character) {
    if (character < 0x80)
        return character == ' ' || (character >= 9 && character <= 13) || (character >= 0x1c && character <= 0x1f);
    return character == 0x85 || character == 0xa0 || character == 0x1680 ||
           (character >= 0x2000 && character <= 0x200a) || character == 0x2028 || character == 0x2029 ||
           character == 0x202f || character == 0x205f || character == 0x3000;
}

static bool strips(int32_t character, const struct string *set) {
    if (set == NULL)
        return character_is_space(character);
    for (size_t at = 0; at < set->bytes;) {
        int32_t one;
        at += string_character(set, at, &one);
        if (one == character)
            return true;
    }
    return false;
}

struct string string_strip(const struct string *string, const struct string *set, bool left, bool right) {
    size_t begin = 0, end = string->bytes;
    int32_t character;
    while (left && begin < end) {
        size_t step = string_character(string, begin, &character);
        if (!strips(character, set))
            break;
        begin += step;
    }
    while (right && end > begin) {
        size_t at = end - 1;
        while (at > begin && ((unsigned char)string->text[at] & 0xc0) == 0x80)
            at--;
        string_character(string, at, &character);
        if (!strips(character, set))
            break;
        end = at;
    }
    return string_part(string, begin, end);
}

size_t string_find(const struct string *string, const struct string *part, size_t from) {
    if (from > string->bytes || part->bytes > string->bytes - from)
        return SIZE_MAX;
    if (part->bytes == 0)
        return from;
    const char *found = memmem(string->text + from, string->bytes - from, part->text, part->bytes);
    return found == NULL ? SIZE_MAX : (size_t)(found - string->text);
}

/* --- Making --- */

struct value value_none(void) {
    return (struct value){.kind = VALUE_NONE};
}

struct value value_boolean(bool boolean) {
    return (struct value){.kind = VALUE_BOOLEAN, .boolean = boolean};
}

struct value value_integer(int64_t integer) {
    return (struct value){.kind = VALUE_INTEGER, .integer = integer};
}

struct value value_float(double number) {
    return (struct value){.kind = VALUE_FLOAT, .number = number};
}

struct value value_string(struct run *run, struct string string) {
    struct string *copy = arena_take(&run->arena, sizeof *copy);
    *copy = string;
    return (struct value){.kind = VALUE_STRING, .string = copy};
}

struct value value_text(struct run *run, const char *text) {
    return value_string(run, string_of(text));
}

struct value value_undefined(struct run *run, const struct string *name, const char *owner) {
    struct undefined *undefined = arena_take(&run->arena, sizeof *undefined);
    *undefined = (struct undefined){.name = *name, .owner = owner};
    return (struct value){.kind = VALUE_UNDEFINED, .undefined = undefined};
}

struct value value_list(struct run *run, enum value_kind kind) {
    return (struct value){.kind = kind, .list = arena_take(&run->arena, sizeof(struct list))};
}

struct value value_dict(struct run *run, enum value_kind kind) {
    return (struct value){.kind = kind, .dict = arena_take(&run->arena, sizeof(struct dict))};
}

void list_add(struct run *run, struct list *list, struct value item) {
    list->items = arena_grow(&run->arena, list->items, &list->capacity, list->count + 1, sizeof *list->items);
    list->items[list->count++] = item;
}

static size_t dict_index(struct run *run, const struct dict *dict, struct value key) {
    size_t i = 0;
    while (i < dict->count && !value_equal(run, dict->entries[i].key, key))
        i++;
    return i;
}

void dict_set(struct run *run, struct dict *dict, struct value key, struct value value) {
    if (key.kind == VALUE_LIST || key.kind == VALUE_DICT)
        arena_fail(&run->arena, "unhashable type: '%s'", value_type_name(key));
    size_t i = dict_index(run, dict, key);
    if (i < dict->count) {
        dict->entries[i].value = value;
        return;
    }
    dict->entries = arena_grow(&run->arena, dict->entries, &dict->capacity, dict->count + 1, sizeof *dict->entries);
    dict->entries[dict->count++] = (struct entry){key, value};
}

const struct value *dict_find(struct run *run, const struct dict *dict, struct value key) {
    size_t i = dict_index(run, dict, key);
    return i < dict->count ? &dict->entries[i].value : NULL;
}

const struct value *dict_find_text(struct run *run, const struct dict *dict, const char *key) {
    const struct string text = string_of(key);
    return dict_find(run, dict, (struct value){.kind = VALUE_STRING, .string = &text});
}

/* --- Asking --- */

bool value_is_number(struct value value) {
    return value.kind == VALUE_BOOLEAN || value.kind == VALUE_INTEGER || value.kind == VALUE_FLOAT;
}

double value_number(struct value value) {
    return value.kind == VALUE_FLOAT     ? value.number
           : value.kind == VALUE_INTEGER ? (double)value.integer
                                         : (double)value.boolean;
}

const char *value_type_name(struct value value) {
    static const char *const names[] = {[VALUE_ABSENT] = "nothing",
        [VALUE_UNDEFINED] = "Undefined",
        [VALUE_NONE] = "NoneType",
        [VALUE_BOOLEAN] = "bool",
        [VALUE_INTEGER] = "int",
        [VALUE_FLOAT] = "float",
        [VALUE_STRING] = "str",
        [VALUE_LIST] = "list",
        [VALUE_TUPLE] = "tuple",
        [VALUE_DICT] = "dict",
        [VALUE_NAMESPACE] = "Namespace",
        [VALUE_FUNCTION] = "function",
        [VALUE_METHOD] = "method",
        [VALUE_MACRO] = "Macro",
        [VALUE_LOOP] = "LoopContext"};
    return names[value.kind];
}

void value_fail_undefined(struct run *run, struct value value) {
    const struct undefined *undefined = value.undefined;
    int bytes = undefined->name.bytes > 80 ? 80 : (int)undefined->name.bytes;
    if (undefined->hint != NULL)
        arena_fail(&run->arena, "%s", undefined->hint);
    if (undefined->owner != NULL)
        arena_fail(&run->arena, "'%s' object has no attribute '%.*s'", undefined->owner, bytes, undefined->name.text);
    arena_fail(&run->arena, "'%.*s' is undefined", bytes, undefined->name.text);
}

bool value_truth(struct run *run, struct value value) {
    (void)run;
    switch (value.kind) {
    case VALUE_ABSENT:
    case VALUE_UNDEFINED:
    case VALUE_NONE:
        return false;
    case VALUE_BOOLEAN:
        return value.boolean;
    case VALUE_INTEGER:
        return value.integer != 0;
    case VALUE_FLOAT:
        return value.number != 0.0;
    case VALUE_STRING:
        return value.string->bytes > 0;
    case VALUE_LIST:
    case VALUE_TUPLE:
        return value.list->count > 0;
    case VALUE_DICT:
        return value.dict->count > 0;
    default:
        return true;
    }
}

static bool list_equal(struct run *run, const struct list *a, const struct list *b) {
    if (a->count != b->count)
        return false;
    for (size_t i = 0; i < a->count; i++)
        if (!value_equal(run, a->items[i], b->items[i]))
            return false;
    return true;
}

static bool dict_equal(struct run *run, const struct dict *a, const struct dict *b) {
    if (a->count != b->count)
        return false;
    for (size_t i = 0; i < a->count; i++) {
        const struct value *other = dict_find(run, b, a->entries[i].key);
        if (other == NULL || !value_equal(run, a->entries[i].value, *other))
            return false;
    }
    return true;
}

static bool number_equal(struct value a, struct value b) {
    if (a.kind == VALUE_FLOAT || b.kind == VALUE_FLOAT)
        return value_number(a) == value_number(b);
    return (a.kind == VALUE_BOOLEAN ? a.boolean : a.integer) == (b.kind == VALUE_BOOLEAN ? b.boolean : b.integer);
}

bool value_equal(struct run *run, struct value a, struct value b) {
    run_step(run, 1);
    if (value_is_number(a) && value_is_number(b))
        return number_equal(a, b);
    if (a.kind != b.kind)
        return false;
    switch (a.kind) {
    case VALUE_STRING:
        return string_same(a.string, b.string);
    case VALUE_LIST:
    case VALUE_TUPLE: {
        run_enter(run);
        bool equal = list_equal(run, a.list, b.list);
        run_leave(run);
        return equal;
    }
    case VALUE_DICT: {
        run_enter(run);
        bool equal = dict_equal(run, a.dict, b.dict);
        run_leave(run);
        return equal;
    }
    case VALUE_NAMESPACE:
        return a.dict == b.dict;
    case VALUE_FUNCTION:
        return a.function == b.function;
    case VALUE_MACRO:
        return a.macro == b.macro;
    case VALUE_LOOP:
        return a.loop == b.loop;
    case VALUE_METHOD:
        return a.method == b.method;
    default: /* undefined, none */
        return true;
    }
}

int value_order(struct run *run, struct value a, struct value b, const char *operation) {
    run_step(run, 1);
    if (a.kind == VALUE_UNDEFINED)
        value_fail_undefined(run, a);
    if (b.kind == VALUE_UNDEFINED)
        value_fail_undefined(run, b);
    if (value_is_number(a) && value_is_number(b)) {
        if (a.kind == VALUE_INTEGER && b.kind == VALUE_INTEGER)
            return (a.integer > b.integer) - (a.integer < b.integer);
        return (value_number(a) > value_number(b)) - (value_number(a) < value_number(b));
    }
    if (a.kind == VALUE_STRING && b.kind == VALUE_STRING) {
        size_t common = a.string->bytes < b.string->bytes ? a.string->bytes : b.string->bytes;
        int order = common == 0 ? 0 : memcmp(a.string->text, b.string->text, common);
        return order != 0 ? order : (a.string->bytes > b.string->bytes) - (a.string->bytes < b.string->bytes);
    }
    if ((a.kind == VALUE_LIST || a.kind == VALUE_TUPLE) && a.kind == b.kind) {
        run_enter(run);
        int order = 0;
        for (size_t i = 0; order == 0 && i < a.list->count && i < b.list->count; i++)
            if (!value_equal(run, a.list->items[i], b.list->items[i]))
                order = value_order(run, a.list->items[i], b.list->items[i], operation);
        run_leave(run);
        return order != 0 ? order : (a.list->count > b.list->count) - (a.list->count < b.list->count);
    }
    arena_fail(&run->arena, "'%s' not supported between instances of '%s' and '%s'", operation, value_type_name(a),
        value_type_name(b));
}

const struct list *value_items(struct run *run, struct value value) {
    if (value.kind == VALUE_LIST || value.kind == VALUE_TUPLE)
        return value.list;
    struct value items = value_list(run, VALUE_LIST);
    if (value.kind == VALUE_DICT) {
        for (size_t i = 0; i < value.dict->count; i++)
            list_add(run, items.list, value.dict->entries[i].key);
    } else if (value.kind == VALUE_STRING) {
        int32_t character;
        for (size_t at = 0, step; at < value.string->bytes; at += step) {
            run_step(run, 1);
            step = string_character(value.string, at, &character);
            struct string part = string_part(value.string, at, at + step);
            part.markup = false;
            list_add(run, items.list, value_string(run, part));
        }
    } else if (value.kind != VALUE_UNDEFINED) {
        arena_fail(&run->arena, "'%s' object is not iterable", value_type_name(value));
    }
    return items.list;
}

bool value_contains(struct run *run, struct value container, struct value item) {
    if (container.kind == VALUE_STRING) {
        if (item.kind != VALUE_STRING)
            arena_fail(&run->arena, "'in <string>' requires string as left operand, not %s", value_type_name(item));
        run_step(run, container.string->bytes / 64);
        return string_find(container.string, item.string, 0) != SIZE_MAX;
    }
    if (container.kind == VALUE_DICT)
        return dict_find(run, container.dict, item) != NULL;
    const struct list *items = value_items(run, container);
    for (size_t i = 0; i < items->count; i++)
        if (value_equal(run, items->items[i], item))
            return true;
    return false;
}

size_t value_length(struct run *run, struct value value) {
    switch (value.kind) {
    case VALUE_UNDEFINED:
        return 0;
    case VALUE_STRING:
        run_step(run, value.string->bytes / 64);
        return string_length(value.string);
    case VALUE_LIST:
    case VALUE_TUPLE:
        return value.list->count;
    case VALUE_DICT:
        return value.dict->count;
    default:
        arena_fail(&run->arena, "object of type '%s' has no len()", value_type_name(value));
    }
}
