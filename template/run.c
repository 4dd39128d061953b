/* SPDX-License-Identifier: Apache-2.0 */
#include "template/run.h"

#include <string.h>

enum { DEPTH_MAX = 1000 };

/* --- Limits --- */

void run_step(struct run *run, size_t steps) {
    if (steps > run->steps_left)
        arena_fail(&run->arena, "the template takes too much work");
    run->steps_left -= steps;
}

void run_enter(struct run *run) {
    if (++run->depth > DEPTH_MAX)
        arena_fail(&run->arena, "nested more than %d deep", DEPTH_MAX);
}

void run_leave(struct run *run) {
    run->depth--;
}

/* --- Names --- */

struct scope *scope_create(struct run *run, struct scope *parent) {
    struct scope *scope = arena_take(&run->arena, sizeof *scope);
    scope->parent = parent;
    return scope;
}

static struct value *scope_find(struct scope *scope, const struct string *name) {
    for (size_t i = 0; i < scope->count; i++)
        if (string_same(&scope->variables[i].name, name))
            return &scope->variables[i].value;
    return NULL;
}

void scope_set(struct run *run, struct scope *scope, const struct string *name, struct value value) {
    struct value *found = scope_find(scope, name);
    run_step(run, 1 + scope->count / 8);
    if (found != NULL) {
        *found = value;
        return;
    }
    scope->variables =
        arena_grow(&run->arena, scope->variables, &scope->capacity, scope->count + 1, sizeof *scope->variables);
    scope->variables[scope->count++] = (struct variable){*name, value};
}

struct value scope_get(struct run *run, const struct string *name) {
    for (struct scope *scope = run->scope; scope != NULL; scope = scope->parent) {
        run_step(run, 1 + scope->count / 8);
        struct value *found = scope_find(scope, name);
        if (found != NULL)
            return *found;
    }
    const struct builtin *function = builtin_find(builtin_functions, name);
    if (function != NULL)
        return (struct value){.kind = VALUE_FUNCTION, .function = function};
    return value_undefined(run, name, NULL);
}

/* --- Calls --- */

const struct builtin *builtin_find(const struct builtin *table, const struct string *name) {
    for (; table->name != NULL; table++)
        if (string_is(name, table->name))
            return table;
    return NULL;
}

const struct builtin *filter_find(const struct string *name) {
    const struct builtin *found = builtin_find(text_filters, name);
    if (found == NULL)
        found = builtin_find(list_filters, name);
    return found != NULL ? found : builtin_find(number_filters, name);
}

const struct builtin *test_find(const struct string *name) {
    return builtin_find(builtin_tests, name);
}

/* The number of the parameter with this name, or -1. */
static int builtin_parameter(const struct builtin *builtin, const struct string *name) {
    const char *at = builtin->parameters;
    for (int number = 0; *at != '\0'; number++) {
        size_t bytes = strcspn(at, " ");
        if (bytes == name->bytes && memcmp(at, name->text, bytes) == 0)
            return number;
        at += bytes + (at[bytes] == ' ');
    }
    return -1;
}

static size_t builtin_parameters(const struct builtin *builtin) {
    size_t count = builtin->parameters[0] != '\0';
    for (const char *at = builtin->parameters; *at != '\0'; at++)
        count += *at == ' ';
    return count;
}

struct value builtin_call(
    struct run *run, const struct builtin *builtin, struct value self, const struct arguments *arguments) {
    run_step(run, 1);
    if (builtin->parameters == NULL)
        return builtin->any(run, self, arguments);
    struct value args[PARAMETERS_MAX] = {{.kind = VALUE_ABSENT}};
    size_t most = builtin_parameters(builtin);
    if (arguments->count > most)
        arena_fail(&run->arena, "%s takes at most %zu arguments, not %zu", builtin->name, most, arguments->count);
    for (size_t i = 0; i < arguments->count; i++)
        args[i] = arguments->items[i];
    for (size_t i = 0; i < arguments->keywords_count; i++) {
        const struct keyword *keyword = &arguments->keywords[i];
        int number = builtin_parameter(builtin, &keyword->name);
        if (number < 0 || args[number].kind != VALUE_ABSENT)
            arena_fail(&run->arena, "%s got an unexpected argument '%.*s'", builtin->name,
                keyword->name.bytes > 60 ? 60 : (int)keyword->name.bytes, keyword->name.text);
        args[number] = keyword->value;
    }
    for (size_t i = 0; i < builtin->required; i++)
        if (args[i].kind == VALUE_ABSENT)
            arena_fail(
                &run->arena, "%s needs %u arguments (%s)", builtin->name, builtin->required, builtin->parameters);
    return builtin->call(run, self, args);
}

struct value filter_call(
    struct run *run, const struct string *name, struct value self, const struct arguments *arguments) {
    const struct builtin *filter = filter_find(name);
    if (filter == NULL)
        arena_fail(&run->arena, "there is no filter '%.*s'", name->bytes > 60 ? 60 : (int)name->bytes, name->text);
    return builtin_call(run, filter, self, arguments);
}

bool test_call(struct run *run, const struct string *name, struct value self, const struct arguments *arguments) {
    const struct builtin *test = test_find(name);
    if (test == NULL)
        arena_fail(&run->arena, "there is no test '%.*s'", name->bytes > 60 ? 60 : (int)name->bytes, name->text);
    return value_truth(run, builtin_call(run, test, self, arguments));
}

struct value value_call(struct run *run, struct value callee, const struct arguments *arguments) {
    switch (callee.kind) {
    case VALUE_FUNCTION:
        return builtin_call(run, callee.function, value_none(), arguments);
    case VALUE_METHOD:
        return builtin_call(run, callee.method->function, callee.method->self, arguments);
    case VALUE_MACRO:
        return macro_call(run, callee.macro, arguments);
    case VALUE_UNDEFINED:
        value_fail_undefined(run, callee);
    default:
        arena_fail(&run->arena, "'%s' object is not callable", value_type_name(callee));
    }
}

/* --- Arguments of builtins --- */

int64_t argument_integer(struct run *run, struct value value, int64_t otherwise, const char *name) {
    if (value.kind == VALUE_ABSENT || value.kind == VALUE_NONE)
        return otherwise;
    if (value.kind == VALUE_BOOLEAN)
        return value.boolean;
    if (value.kind != VALUE_INTEGER)
        arena_fail(&run->arena, "%s must be an integer, not '%s'", name, value_type_name(value));
    return value.integer;
}

bool argument_boolean(struct run *run, struct value value, bool otherwise) {
    return value.kind == VALUE_ABSENT ? otherwise : value_truth(run, value);
}

const struct string *argument_string(struct run *run, struct value value, const char *name) {
    if (value.kind == VALUE_ABSENT || value.kind == VALUE_NONE)
        return NULL;
    if (value.kind == VALUE_UNDEFINED)
        value_fail_undefined(run, value);
    if (value.kind != VALUE_STRING)
        arena_fail(&run->arena, "%s must be a string, not '%s'", name, value_type_name(value));
    return value.string;
}
