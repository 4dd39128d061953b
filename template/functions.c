/* SPDX-License-Identifier: Apache-2.0
 *
 * Functions that every template has.
 */
#include "template/run.h"

#include <string.h>
#include <time.h>

enum { RANGE_MAX = 100000, TIME_BYTES_MAX = 4096 };

static struct value function_range(struct run *run, struct value self, const struct value *args) {
    (void)self;
    bool one = args[1].kind == VALUE_ABSENT;
    int64_t begin = one ? 0 : argument_integer(run, args[0], 0, "start");
    int64_t end = argument_integer(run, one ? args[0] : args[1], 0, "stop");
    int64_t step = argument_integer(run, args[2], 1, "step");
    if (step == 0)
        arena_fail(&run->arena, "range() arg 3 must not be zero");
    struct value list = value_list(run, VALUE_LIST);
    for (int64_t at = begin; step > 0 ? at < end : at > end;) {
        if (list.list->count == RANGE_MAX)
            arena_fail(&run->arena, "range too big: at most %d", RANGE_MAX);
        list_add(run, list.list, value_integer(at));
        if (__builtin_add_overflow(at, step, &at))
            break;
    }
    return list;
}

/* Mappings and keywords together. */
static struct value gathered(struct run *run, enum value_kind kind, const struct arguments *arguments) {
    struct value dict = value_dict(run, kind);
    for (size_t i = 0; i < arguments->count; i++) {
        if (arguments->items[i].kind != VALUE_DICT)
            arena_fail(&run->arena, "a mapping is expected, not '%s'", value_type_name(arguments->items[i]));
        const struct dict *from = arguments->items[i].dict;
        for (size_t k = 0; k < from->count; k++)
            dict_set(run, dict.dict, from->entries[k].key, from->entries[k].value);
    }
    for (size_t i = 0; i < arguments->keywords_count; i++)
        dict_set(run, dict.dict, value_string(run, arguments->keywords[i].name), arguments->keywords[i].value);
    return dict;
}

static struct value function_dict(struct run *run, struct value self, const struct arguments *arguments) {
    (void)self;
    return gathered(run, VALUE_DICT, arguments);
}

static struct value function_namespace(struct run *run, struct value self, const struct arguments *arguments) {
    (void)self;
    return gathered(run, VALUE_NAMESPACE, arguments);
}

static struct value function_raise_exception(struct run *run, struct value self, const struct value *args) {
    (void)self;
    struct string message = value_str(run, args[0]);
    arena_fail(&run->arena, "%.*s", message.bytes > 300 ? 300 : (int)message.bytes, message.text);
}

static struct value function_strftime_now(struct run *run, struct value self, const struct value *args) {
    (void)self;
    struct string format = value_str(run, args[0]);
    time_t now = (time_t)run->now;
    struct tm local;
    if (format.bytes > TIME_BYTES_MAX / 16 || memchr(format.text, '\0', format.bytes) != NULL)
        arena_fail(&run->arena, "strftime_now: a format of at most %d bytes is expected", TIME_BYTES_MAX / 16);
    if (localtime_r(&now, &local) == NULL)
        arena_fail(&run->arena, "strftime_now: no such time");
    char *copy = arena_take(&run->arena, format.bytes + 1), *text = arena_take(&run->arena, TIME_BYTES_MAX);
    memcpy(copy, format.text, format.bytes);
#pragma GCC diagnostic push
#pragma GCC diagnostic ignored "-Wformat-nonliteral"
    size_t bytes = strftime(text, TIME_BYTES_MAX, copy, &local);
#pragma GCC diagnostic pop
    return value_string(run, (struct string){.text = text, .bytes = bytes});
}

const struct builtin builtin_functions[] = {
    {"range", "start stop step", 1, function_range, NULL},
    {"dict", NULL, 0, NULL, function_dict},
    {"namespace", NULL, 0, NULL, function_namespace},
    {"raise_exception", "message", 1, function_raise_exception, NULL},
    {"strftime_now", "format", 1, function_strftime_now, NULL},
    {NULL, NULL, 0, NULL, NULL},
};
