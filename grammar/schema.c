/* SPDX-License-Identifier: Apache-2.0 */
#include "grammar/schema.h"

#include "grammar/regex.h"

#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { NESTING_MAX = 200 };

uint32_t schema_fail(struct compiler *c, int code, const char *format, ...) {
    if (c->code != 0)
        return EXPRESSION_NONE;
    char message[320];
    va_list arguments;
    va_start(arguments, format);
    vsnprintf(message, sizeof message, format, arguments);
    va_end(arguments);
    c->code = error_set(c->error, code, "%s at #%s of the schema", message, c->path);
    if (c->error != NULL) /* names of the schema may have any characters */
        for (char *at = c->error->message; *at != '\0'; at++)
            if ((unsigned char)*at < 0x20 || *at == 0x7f)
                *at = '?';
    return EXPRESSION_NONE;
}

size_t schema_enter(struct compiler *c, const char *keyword, const char *name) {
    size_t before = c->path_bytes, room = c->path_bytes < sizeof c->path ? sizeof c->path - c->path_bytes : 0;
    int added = snprintf(room > 0 ? c->path + c->path_bytes : NULL, room, "/%s%s%s", keyword, name == NULL ? "" : "/",
        name == NULL ? "" : name);
    c->path_bytes += added > 0 ? (size_t)added : 0;
    return before;
}

void schema_leave(struct compiler *c, size_t before) {
    c->path_bytes = before;
    if (before < sizeof c->path)
        c->path[before] = '\0';
}

/* ---- keywords ---- */

static const char *const assertions[] = {"type", "nullable", "enum", "const", "properties", "required",
    "additionalProperties", "items", "prefixItems", "minItems", "maxItems", "minLength", "maxLength", "pattern",
    "format", "minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf", NULL};
static const char *const combining[] = {"$ref", "anyOf", "oneOf", "allOf", NULL};
static const char *const refused[] = {"not", "if", "then", "else", "dependentRequired", "dependentSchemas",
    "dependencies", "patternProperties", "propertyNames", "minProperties", "maxProperties", "unevaluatedProperties",
    "unevaluatedItems", "additionalItems", "contains", "minContains", "maxContains", "uniqueItems", "$dynamicRef",
    "$recursiveRef", "$anchor", "$dynamicAnchor", "contentEncoding", "contentMediaType", "contentSchema", NULL};

static bool listed(const char *const *names, const char *name) {
    for (; *names != NULL; names++)
        if (strcmp(*names, name) == 0)
            return true;
    return false;
}

/* Whether a refused keyword has a value that asks for nothing. */
static bool asks_nothing(const char *keyword, const json_t *value) {
    if (strcmp(keyword, "uniqueItems") == 0)
        return json_is_false(value);
    if (strcmp(keyword, "minProperties") == 0)
        return json_is_integer(value) && json_integer_value(value) == 0;
    return strncmp(keyword, "uneval", 6) == 0 && json_is_true(value);
}

static int check_keywords(struct compiler *c, const json_t *schema) {
    const char *key;
    json_t *value;
    json_object_foreach((json_t *)schema, key, value) {
        if (listed(refused, key) && !asks_nothing(key, value))
            schema_fail(c, ERROR_UNSUPPORTED, "keyword '%s' is not supported", key);
        if (strcmp(key, "$id") == 0 && schema != c->root)
            schema_fail(c, ERROR_UNSUPPORTED, "keyword '$id' is supported in front only, not");
    }
    return c->code;
}

/* The assertions of a schema without its combining keywords: NULL and no failure when there are none. */
static const json_t *without_combining(struct compiler *c, const json_t *schema, const char *but) {
    json_t *base = json_object(), *value;
    const char *key;
    bool any = false;
    json_object_foreach((json_t *)schema, key, value) {
        bool kept = listed(assertions, key) || (listed(combining, key) && strcmp(key, but) != 0);
        if (kept && json_object_set(base, key, value) != 0)
            schema_fail(c, ERROR_MEMORY, "no memory");
        any |= kept;
    }
    if (base == NULL || json_array_append_new(c->made, base) != 0)
        schema_fail(c, ERROR_MEMORY, "no memory");
    return c->code == 0 && any ? base : NULL;
}

/* ---- $ref ---- */

static int hex_digit(char digit) {
    if (digit >= '0' && digit <= '9')
        return digit - '0';
    digit = (char)(digit | 0x20);
    return digit >= 'a' && digit <= 'f' ? digit - 'a' + 10 : -1;
}

/* One part of a JSON pointer in a URI fragment (RFC 6901), decoded. Returns what follows it; NULL: malformed. */
static const char *pointer_part(const char *at, char *out, size_t room) {
    size_t count = 0;
    for (; *at != '\0' && *at != '/'; at++) {
        char byte = *at;
        if (byte == '%') {
            int high = hex_digit(at[1]), low = high < 0 ? -1 : hex_digit(at[2]);
            if (low < 0)
                return NULL;
            byte = (char)(high * 16 + low);
            at += 2;
        } else if (byte == '~') {
            if (at[1] != '0' && at[1] != '1')
                return NULL;
            byte = *++at == '0' ? '~' : '/';
        }
        if (count + 1 >= room || byte == '\0')
            return NULL;
        out[count++] = byte;
    }
    out[count] = '\0';
    return at;
}

const json_t *schema_resolve(const struct compiler *c, const char *reference) {
    const json_t *at = c->root;
    char part[512];
    if (*reference++ != '#')
        return NULL;
    while (at != NULL && *reference == '/') {
        reference = pointer_part(reference + 1, part, sizeof part);
        if (reference == NULL)
            return NULL;
        if (json_is_array(at)) {
            char *end;
            unsigned long index = strtoul(part, &end, 10);
            at = part[0] >= '0' && part[0] <= '9' && *end == '\0' ? json_array_get(at, index) : NULL;
        } else {
            at = json_object_get(at, part);
        }
    }
    return *reference == '\0' ? at : NULL;
}

static const json_t *resolve(struct compiler *c, const json_t *reference) {
    if (!json_is_string(reference)) {
        schema_fail(c, ERROR_INVALID, "$ref must be a string");
        return NULL;
    }
    const json_t *target = schema_resolve(c, json_string_value(reference));
    if (target == NULL)
        schema_fail(
            c, ERROR_INVALID, "$ref '%.100s' points to nothing inside the schema", json_string_value(reference));
    return target;
}

/* The rule of a target, which is compiled later: references may go round in circles. */
static uint32_t refer(struct compiler *c, const json_t *reference) {
    const json_t *target = resolve(c, reference);
    if (target == NULL)
        return EXPRESSION_NONE;
    for (uint32_t i = 0; i < c->targets_count; i++)
        if (c->targets[i].schema == target)
            return c->targets[i].expression;
    if (c->targets_count == c->targets_capacity) {
        uint32_t capacity = 2 * c->targets_capacity + 8;
        struct schema_target *targets = realloc(c->targets, capacity * sizeof *targets);
        if (targets == NULL)
            return schema_fail(c, ERROR_MEMORY, "no memory");
        c->targets = targets;
        c->targets_capacity = capacity;
    }
    struct schema_target *new = &c->targets[c->targets_count];
    *new = (struct schema_target){.schema = target};
    snprintf(new->path, sizeof new->path, "%s", json_string_value(reference) + 1);
    new->expression = expression_rule(c->pool, &new->rule);
    c->targets_count++;
    return new->expression;
}

/* ---- types ---- */

unsigned schema_type_of(const json_t *value) {
    switch (json_typeof(value)) {
    case JSON_OBJECT:
        return TYPE_OBJECT;
    case JSON_ARRAY:
        return TYPE_ARRAY;
    case JSON_STRING:
        return TYPE_STRING;
    case JSON_INTEGER:
        return TYPE_INTEGER;
    case JSON_REAL: {
        double real = json_real_value(value);
        return real >= -1e15 && real <= 1e15 && real == (double)(int64_t)real ? TYPE_INTEGER : TYPE_NUMBER;
    }
    case JSON_NULL:
        return TYPE_NULL;
    default:
        return TYPE_BOOLEAN;
    }
}

static unsigned named_type(struct compiler *c, const json_t *name) {
    static const struct {
        const char *name;
        unsigned type;
    } types[] = {{"object", TYPE_OBJECT}, {"array", TYPE_ARRAY}, {"string", TYPE_STRING}, {"integer", TYPE_INTEGER},
        {"number", TYPE_NUMBER}, {"boolean", TYPE_BOOLEAN}, {"null", TYPE_NULL}};
    for (size_t i = 0; json_is_string(name) && i < sizeof types / sizeof types[0]; i++)
        if (strcmp(types[i].name, json_string_value(name)) == 0)
            return types[i].type;
    schema_fail(c, ERROR_INVALID, "type '%.40s' does not exist",
        json_is_string(name) ? json_string_value(name) : "(not a string)");
    return 0;
}

/* The types that the keywords of a schema without `type` are about. */
static unsigned types_spoken_of(const json_t *schema) {
    static const struct {
        const char *keyword;
        unsigned type;
    } about[] = {{"properties", TYPE_OBJECT}, {"required", TYPE_OBJECT}, {"additionalProperties", TYPE_OBJECT},
        {"items", TYPE_ARRAY}, {"prefixItems", TYPE_ARRAY}, {"minItems", TYPE_ARRAY}, {"maxItems", TYPE_ARRAY},
        {"minLength", TYPE_STRING}, {"maxLength", TYPE_STRING}, {"pattern", TYPE_STRING}, {"format", TYPE_STRING},
        {"minimum", TYPE_NUMBER}, {"maximum", TYPE_NUMBER}, {"exclusiveMinimum", TYPE_NUMBER},
        {"exclusiveMaximum", TYPE_NUMBER}, {"multipleOf", TYPE_NUMBER}};
    unsigned types = 0;
    for (size_t i = 0; i < sizeof about / sizeof about[0]; i++)
        if (json_object_get(schema, about[i].keyword) != NULL)
            types |= about[i].type;
    return types != 0 ? types : TYPES_ALL;
}

unsigned schema_types(struct compiler *c, const json_t *schema) {
    const json_t *type = json_object_get(schema, "type");
    unsigned types = 0;
    size_t i;
    json_t *name;
    if (type == NULL)
        types = types_spoken_of(schema);
    else if (!json_is_array(type))
        types = named_type(c, type);
    json_array_foreach(type, i, name) types |= named_type(c, name);
    if (types == 0)
        schema_fail(c, ERROR_INVALID, "type is empty");
    if (json_is_true(json_object_get(schema, "nullable")))
        types |= TYPE_NULL;
    if (types & TYPE_NUMBER)
        types &= ~(unsigned)TYPE_INTEGER;
    return c->code == 0 ? types : 0;
}

/* ---- enum, const ---- */

static uint32_t literal(struct compiler *c, const json_t *value) {
    char *text = json_dumps(value, JSON_COMPACT | JSON_ENCODE_ANY);
    if (text == NULL)
        return schema_fail(c, ERROR_MEMORY, "no memory");
    uint32_t expression = expression_word(c->pool, text);
    free(text);
    return expression;
}

static bool type_allows(unsigned types, const json_t *value) {
    unsigned type = schema_type_of(value);
    return (types & type) != 0 || (type == TYPE_INTEGER && (types & TYPE_NUMBER) != 0);
}

static uint32_t given_values(struct compiler *c, const json_t *schema) {
    const json_t *values = json_object_get(schema, "enum"), *constant = json_object_get(schema, "const");
    const char *key;
    json_t *value;
    json_object_foreach((json_t *)schema, key, value) {
        if (listed(assertions, key) && strcmp(key, "type") != 0 && strcmp(key, "enum") != 0 &&
            strcmp(key, "const") != 0 && strcmp(key, "nullable") != 0)
            return schema_fail(c, ERROR_UNSUPPORTED, "keyword '%s' beside enum or const is not supported", key);
    }
    if (values != NULL && !json_is_array(values))
        return schema_fail(c, ERROR_INVALID, "enum must be an array");
    unsigned types = schema_types(c, schema);
    size_t count = 0, i, size = values == NULL ? 1 : json_array_size(values);
    uint32_t *parts = malloc((size + 1) * sizeof *parts);
    if (parts == NULL)
        return schema_fail(c, ERROR_MEMORY, "no memory");
    for (i = 0; i < size && c->code == 0; i++) {
        const json_t *one = values == NULL ? constant : json_array_get(values, i);
        if (type_allows(types, one) && (constant == NULL || schema_values_equal(one, constant)))
            parts[count++] = literal(c, one);
    }
    uint32_t either = expression_either(c->pool, parts, count);
    free(parts);
    return either;
}

/* ---- one schema ---- */

uint32_t schema_any(struct compiler *c) {
    if (c->any != EXPRESSION_NONE)
        return c->any;
    uint32_t rule;
    c->any = expression_rule(c->pool, &rule);
    if (c->any == EXPRESSION_NONE) /* the pool failed: its parts would ask for the rule again */
        return EXPRESSION_NONE;
    json_t *empty = json_object();
    if (empty == NULL || json_array_append_new(c->made, empty) != 0)
        return schema_fail(c, ERROR_MEMORY, "no memory");
    uint32_t parts[] = {schema_object(c, empty), schema_array(c, empty), schema_string(c, empty), text_number(c->pool),
        expression_word(c->pool, "true"), expression_word(c->pool, "false"), expression_word(c->pool, "null")};
    expression_define(c->pool, rule, expression_either(c->pool, parts, sizeof parts / sizeof parts[0]));
    return c->any;
}

static uint32_t plain_schema(struct compiler *c, const json_t *schema) {
    if (json_object_get(schema, "enum") != NULL || json_object_get(schema, "const") != NULL)
        return given_values(c, schema);
    unsigned types = schema_types(c, schema);
    if (types == TYPES_ALL && json_object_get(schema, "type") == NULL && types_spoken_of(schema) == TYPES_ALL)
        return schema_any(c);
    uint32_t parts[8], count = 0;
    if (types & TYPE_OBJECT)
        parts[count++] = schema_object(c, schema);
    if (types & TYPE_ARRAY)
        parts[count++] = schema_array(c, schema);
    if (types & TYPE_STRING)
        parts[count++] = schema_string(c, schema);
    if (types & (TYPE_INTEGER | TYPE_NUMBER))
        parts[count++] = schema_number(c, schema, (types & TYPE_INTEGER) != 0);
    if (types & TYPE_BOOLEAN)
        parts[count++] =
            expression_either_two(c->pool, expression_word(c->pool, "true"), expression_word(c->pool, "false"));
    if (types & TYPE_NULL)
        parts[count++] = expression_word(c->pool, "null");
    return expression_either(c->pool, parts, count);
}

static uint32_t compile_merged(struct compiler *c, const json_t *base, const json_t *part) {
    const json_t *merged = base == NULL ? part : schema_merge(c, base, part);
    return merged == NULL ? EXPRESSION_NONE : schema_compile(c, merged);
}

static uint32_t compile_branches(struct compiler *c, const json_t *schema, const char *keyword) {
    const json_t *branches = json_object_get(schema, keyword), *base = without_combining(c, schema, keyword);
    size_t count = json_array_size(branches), i, j;
    if (!json_is_array(branches) || count == 0)
        return schema_fail(c, ERROR_INVALID, "%s must be an array that is not empty", keyword);
    for (i = 0; keyword[0] == 'o' && i < count; i++)
        for (j = i + 1; j < count; j++)
            if (c->code == 0 && ++c->work > SCHEMA_WORK_MAX)
                return schema_fail(c, ERROR_UNSUPPORTED, "the schema is too large");
            else if (!schema_disjoint(c, json_array_get(branches, i), json_array_get(branches, j)))
                return schema_fail(c, ERROR_UNSUPPORTED,
                    "keyword 'oneOf' is supported where branches differ by type, const, enum, or a required property "
                    "with const or enum; %zu and %zu may both hold",
                    i, j);
    uint32_t *parts = malloc(count * sizeof *parts);
    if (parts == NULL)
        return schema_fail(c, ERROR_MEMORY, "no memory");
    for (i = 0; i < count; i++) {
        char number[24];
        snprintf(number, sizeof number, "%zu", i);
        size_t before = schema_enter(c, keyword, number);
        parts[i] = c->code != 0 ? EXPRESSION_NONE : compile_merged(c, base, json_array_get(branches, i));
        schema_leave(c, before);
    }
    uint32_t either = expression_either(c->pool, parts, count);
    free(parts);
    return either;
}

static uint32_t compile_all_of(struct compiler *c, const json_t *schema) {
    const json_t *parts = json_object_get(schema, "allOf"), *merged = without_combining(c, schema, "allOf");
    size_t i;
    json_t *part;
    if (!json_is_array(parts) || json_array_size(parts) == 0)
        return schema_fail(c, ERROR_INVALID, "allOf must be an array that is not empty");
    json_array_foreach(parts, i, part) {
        merged = merged == NULL ? part : schema_merge(c, merged, part);
        if (merged == NULL || c->code != 0)
            return EXPRESSION_NONE;
    }
    return schema_compile(c, merged);
}

static uint32_t compile_object(struct compiler *c, const json_t *schema) {
    const json_t *reference = json_object_get(schema, "$ref");
    if (check_keywords(c, schema) != 0)
        return EXPRESSION_NONE;
    if (reference != NULL) {
        const json_t *base = without_combining(c, schema, "$ref");
        if (base == NULL)
            return c->code != 0 ? EXPRESSION_NONE : refer(c, reference);
        const json_t *target = resolve(c, reference);
        return target == NULL ? EXPRESSION_NONE : compile_merged(c, base, target);
    }
    if (json_object_get(schema, "allOf") != NULL)
        return compile_all_of(c, schema);
    if (json_object_get(schema, "anyOf") != NULL)
        return compile_branches(c, schema, "anyOf");
    if (json_object_get(schema, "oneOf") != NULL)
        return compile_branches(c, schema, "oneOf");
    return plain_schema(c, schema);
}

uint32_t schema_compile(struct compiler *c, const json_t *schema) {
    if (c->code != 0 || c->pool->failed)
        return EXPRESSION_NONE;
    if (++c->work > SCHEMA_WORK_MAX || c->depth > NESTING_MAX)
        return schema_fail(c, ERROR_UNSUPPORTED, "the schema is too large or nested too deeply");
    if (json_is_boolean(schema))
        return json_is_true(schema) ? schema_any(c) : EXPRESSION_NONE;
    if (!json_is_object(schema))
        return schema_fail(c, ERROR_INVALID, "a schema must be an object or a boolean");
    c->depth++;
    uint32_t expression = compile_object(c, schema);
    c->depth--;
    return expression;
}

/* ---- whole grammars ---- */

static void start_compiler(struct compiler *c, struct grammar *grammar, const json_t *root, struct error *error) {
    *c = (struct compiler){.pool = &grammar->pool, .root = root, .error = error, .made = json_array()};
    if (c->made == NULL)
        schema_fail(c, ERROR_MEMORY, "no memory");
    c->space = text_space(c->pool);
    c->comma = expression_pair(c->pool, expression_word(c->pool, ","), c->space);
    c->colon = expression_either_two(c->pool, expression_word(c->pool, ":"), expression_word(c->pool, ": "));
    c->free_character = text_any_free(c->pool);
    c->plain_character = text_any_plain(c->pool);
}

static void compile_targets(struct compiler *c) {
    while (c->targets_done < c->targets_count && c->code == 0) {
        struct schema_target target = c->targets[c->targets_done++]; /* the array may move */
        snprintf(c->path, sizeof c->path, "%s", target.path);
        c->path_bytes = strlen(c->path);
        expression_define(c->pool, target.rule, schema_compile(c, target.schema));
    }
}

static struct grammar *start_grammar(struct error *error) {
    struct grammar *grammar = calloc(1, sizeof *grammar);
    if (grammar == NULL)
        error_set(error, ERROR_MEMORY, "no memory for the grammar");
    else
        pool_start(&grammar->pool);
    return grammar;
}

/* Checks what was built. code: of a failure before. */
static struct grammar *finish_grammar(struct grammar *grammar, int code, struct error *error) {
    struct expression_pool *pool = &grammar->pool;
    if (code == 0 && pool->failed)
        code = pool->too_large ? error_set(error, ERROR_UNSUPPORTED, "the grammar is too large")
                               : error_set(error, ERROR_MEMORY, "no memory for the grammar");
    if (code == 0)
        pool_finish(pool);
    if (code == 0 && !pool->expressions[grammar->root].productive)
        code = error_set(error, ERROR_INVALID, "there is nothing that satisfies it");
    if (code == 0)
        return grammar;
    grammar_free(grammar);
    return NULL;
}

struct grammar *grammar_of_schema(const json_t *schema, struct error *error) {
    struct grammar *grammar = start_grammar(error);
    if (grammar == NULL)
        return NULL;
    struct compiler c;
    start_compiler(&c, grammar, schema, error);
    grammar->root = schema_compile(&c, schema);
    compile_targets(&c);
    json_decref(c.made);
    free(c.targets);
    return finish_grammar(grammar, c.code, error);
}

struct grammar *grammar_of_any_object(struct error *error) {
    json_t *schema = json_pack("{s:s}", "type", "object");
    struct grammar *grammar = NULL;
    if (schema == NULL)
        error_set(error, ERROR_MEMORY, "no memory for the grammar");
    else
        grammar = grammar_of_schema(schema, error);
    json_decref(schema);
    return grammar;
}

struct grammar *grammar_of_choices(const json_t *texts, struct error *error) {
    struct grammar *grammar = start_grammar(error);
    if (grammar == NULL)
        return NULL;
    int code = 0;
    size_t count = json_array_size(texts), i;
    json_t *text;
    uint32_t *parts = malloc((count + 1) * sizeof *parts);
    if (parts == NULL)
        code = error_set(error, ERROR_MEMORY, "no memory for the grammar");
    else if (count == 0)
        code = error_set(error, ERROR_INVALID, "it must be an array of at least one string");
    for (i = 0; code == 0 && i < count; i++) {
        text = json_array_get(texts, i);
        if (!json_is_string(text) || json_string_length(text) == 0)
            code = error_set(error, ERROR_INVALID, "entry %zu is not a string, or empty", i);
        else
            parts[i] = expression_bytes(&grammar->pool, json_string_value(text), json_string_length(text));
    }
    if (code == 0)
        grammar->root = expression_either(&grammar->pool, parts, count);
    free(parts);
    return finish_grammar(grammar, code, error);
}

/* Arguments of a function: an object that satisfies its schema. References are looked up in the schema itself. */
static int compile_arguments(
    struct grammar *grammar, const struct grammar_function *function, uint32_t *arguments, struct error *error) {
    const char *type = json_string_value(json_object_get(function->parameters, "type"));
    bool plain = function->parameters == NULL || (type != NULL && strcmp(type, "object") == 0);
    json_t *schema = function->parameters == NULL
                         ? json_pack("{s:s, s:{}, s:b}", "type", "object", "properties", "additionalProperties", 0)
                     : plain ? json_incref((json_t *)function->parameters)
                             : json_pack("{s:[O, {s:s}]}", "allOf", function->parameters, "type", "object");
    if (schema == NULL)
        return error_set(error, ERROR_MEMORY, "no memory for the grammar");
    struct compiler c;
    struct error failure = {0};
    start_compiler(&c, grammar, plain ? schema : function->parameters, &failure);
    *arguments = schema_compile(&c, schema);
    compile_targets(&c);
    json_decref(c.made);
    free(c.targets);
    json_decref(schema);
    return c.code == 0 ? 0 : error_set(error, c.code, "parameters of %.64s: %s", function->name, failure.message);
}

/* One call, of any of the functions. */
static int compile_call(
    struct grammar *grammar, const struct grammar_calls *calls, uint32_t *call, struct error *error) {
    struct expression_pool *pool = &grammar->pool;
    uint32_t *parts = malloc((calls->count + 1) * sizeof *parts);
    int code = parts == NULL ? error_set(error, ERROR_MEMORY, "no memory for the grammar") : 0;
    for (size_t i = 0; code == 0 && i < calls->count; i++) {
        const struct grammar_function *function = &calls->functions[i];
        uint32_t arguments, name = text_quoted(pool, function->name, strlen(function->name));
        code = compile_arguments(grammar, function, &arguments, error);
        uint32_t rest = expression_pair(pool, expression_word(pool, calls->middle), arguments);
        parts[i] = expression_pair(pool, name, rest);
    }
    if (code == 0)
        *call = expression_pair(pool, expression_word(pool, calls->begin),
            expression_pair(pool, expression_either(pool, parts, calls->count), expression_word(pool, calls->end)));
    free(parts);
    return code;
}

struct grammar *grammar_of_calls(const struct grammar_calls *calls, struct error *error) {
    struct grammar *grammar = start_grammar(error);
    if (grammar == NULL)
        return NULL;
    struct expression_pool *pool = &grammar->pool;
    uint32_t call = EXPRESSION_NONE;
    int code = compile_call(grammar, calls, &call, error);
    uint32_t more = expression_pair(pool, expression_word(pool, calls->between), call);
    uint32_t all =
        calls->most > 1 ? expression_pair(pool, call, expression_repeat(pool, more, 0, calls->most - 1)) : call;
    uint32_t open = expression_word(pool, calls->open);
    if (calls->blank)
        open = expression_pair(pool, expression_optional(pool, expression_word(pool, " ")), open);
    grammar->root = expression_pair(pool, open, expression_pair(pool, all, expression_word(pool, calls->close)));
    return finish_grammar(grammar, code, error);
}

struct grammar *grammar_of_pattern(const char *pattern, size_t bytes, struct error *error) {
    struct grammar *grammar = start_grammar(error);
    if (grammar == NULL)
        return NULL;
    int code = regex_compile(&grammar->pool, pattern, bytes, true, &grammar->root, error);
    return finish_grammar(grammar, code, error);
}

void grammar_free(struct grammar *grammar) {
    if (grammar == NULL)
        return;
    pool_release(&grammar->pool);
    free(grammar);
}
