/* SPDX-License-Identifier: Apache-2.0 */
#include "server/structured.h"

#include "grammar/grammar.h"
#include "grammar/slice.h"

#include <string.h>

enum structured_kind { KIND_SCHEMA, KIND_CHOICE, KIND_REGEX, KIND_ANY_OBJECT };

struct structured {
    const json_t *body;
    const struct parse_context *context;
    struct request *request;
    const char *field; /* that asked for request->grammar */
};

static int structured_refuse(const char *field, const struct error *error, struct fault *fault) {
    return error->code == ERROR_MEMORY ? fault_memory(fault)
                                       : fault_invalid(fault, field, "%s: %s", field, error->message);
}

/* A schema that is an object or a boolean, or, as vLLM allows it, the JSON text of one. */
static struct grammar *structured_schema(const json_t *value, struct error *error) {
    if (!json_is_string(value))
        return grammar_of_schema(value, error);
    struct fault fault = {0};
    json_t *parsed = fields_parse(json_string_value(value), json_string_length(value), &fault);
    struct grammar *grammar = NULL;
    if (parsed == NULL)
        error_set(error, ERROR_INVALID, "the text is not a schema: %.300s", fault.message);
    else
        grammar = grammar_of_schema(parsed, error);
    json_decref(parsed);
    return grammar;
}

static struct grammar *structured_compile(enum structured_kind kind, const json_t *value, struct error *error) {
    switch (kind) {
    case KIND_CHOICE:
        return grammar_of_choices(value, error);
    case KIND_REGEX:
        if (json_is_string(value))
            return grammar_of_pattern(json_string_value(value), json_string_length(value), error);
        error_set(error, ERROR_INVALID, "it must be a string");
        return NULL;
    case KIND_ANY_OBJECT:
        return grammar_of_any_object(error);
    default:
        return structured_schema(value, error);
    }
}

static int structured_set(struct structured *structured, const char *field, enum structured_kind kind,
    const json_t *value, struct fault *fault) {
    struct error error = {0};
    struct request *request = structured->request;
    if (request->grammar != NULL)
        return fault_invalid(fault, field, "%s cannot be used together with %s", field, structured->field);
    if (structured->context->grammar_vocabulary == NULL)
        return fault_invalid(fault, field, "%s is not supported by this server", field);
    request->grammar = structured_compile(kind, value, &error);
    if (request->grammar == NULL)
        return structured_refuse(field, &error, fault);
    request->grammar_vocabulary = structured->context->grammar_vocabulary;
    slices_prepare(request->grammar_vocabulary, &request->grammar->pool);
    structured->field = field;
    return 0;
}

static int structured_read_format(struct structured *structured, struct fault *fault) {
    const char *const field = "response_format";
    const json_t *format = field_get(structured->body, field);
    const char *type = NULL;
    if (format == NULL)
        return 0;
    if (!json_is_object(format))
        return fault_invalid(fault, field, "%s must be an object, not %s", field, field_type(format));
    if (field_string(format, "type", &type, fault) != 0)
        return -1;
    if (type != NULL && strcmp(type, "text") == 0)
        return 0;
    if (type != NULL && strcmp(type, "json_object") == 0)
        return structured_set(structured, field, KIND_ANY_OBJECT, NULL, fault);
    if (type == NULL || strcmp(type, "json_schema") != 0)
        return fault_invalid(fault, field, "%s has type '%.40s'; it must be one of text, json_object, json_schema",
            field, type == NULL ? "" : type);
    const json_t *named = field_get(format, "json_schema");
    const json_t *schema = field_get(named, "schema");
    if (!json_is_object(named) || !(json_is_object(schema) || json_is_boolean(schema)))
        return fault_invalid(fault, field, "%s.json_schema.schema must be an object", field);
    return structured_set(structured, field, KIND_SCHEMA, schema, fault);
}

static int structured_read_outputs(struct structured *structured, struct fault *fault) {
    static const struct {
        const char *name, *field;
        enum structured_kind kind;
    } fields[] = {{"json", "structured_outputs.json", KIND_SCHEMA},
        {"choice", "structured_outputs.choice", KIND_CHOICE}, {"regex", "structured_outputs.regex", KIND_REGEX}};
    const char *const field = "structured_outputs";
    const json_t *outputs = field_get(structured->body, field);
    bool any_object = false;
    if (outputs == NULL)
        return 0;
    if (!json_is_object(outputs))
        return fault_invalid(fault, field, "%s must be an object, not %s", field, field_type(outputs));
    if (field_get(outputs, "grammar") != NULL || field_get(outputs, "structural_tag") != NULL)
        return fault_invalid(fault, field, "%s: grammar and structural_tag are not supported by this server", field);
    for (size_t i = 0; i < sizeof fields / sizeof fields[0]; i++) {
        const json_t *value = field_get(outputs, fields[i].name);
        if (value != NULL && structured_set(structured, fields[i].field, fields[i].kind, value, fault) != 0)
            return -1;
    }
    if (field_boolean(outputs, "json_object", &any_object, fault) != 0)
        return -1;
    return any_object ? structured_set(structured, "structured_outputs.json_object", KIND_ANY_OBJECT, NULL, fault) : 0;
}

int structured_read(
    const json_t *body, const struct parse_context *context, struct request *request, struct fault *fault) {
    static const struct {
        const char *field;
        enum structured_kind kind;
    } guided[] = {{"guided_json", KIND_SCHEMA}, {"guided_choice", KIND_CHOICE}, {"guided_regex", KIND_REGEX}};
    struct structured structured = {.body = body, .context = context, .request = request};
    if (structured_read_format(&structured, fault) != 0)
        return -1;
    for (size_t i = 0; i < sizeof guided / sizeof guided[0]; i++) {
        const json_t *value = field_get(body, guided[i].field);
        if (value != NULL && structured_set(&structured, guided[i].field, guided[i].kind, value, fault) != 0)
            return -1;
    }
    return structured_read_outputs(&structured, fault);
}
