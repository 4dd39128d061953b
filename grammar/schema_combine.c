/* SPDX-License-Identifier: Apache-2.0 */
#include "grammar/schema.h"

#include <stdlib.h>
#include <string.h>

bool schema_values_equal(const json_t *a, const json_t *b) {
    if (json_is_number(a) && json_is_number(b))
        return json_number_value(a) == json_number_value(b);
    return json_equal((json_t *)a, (json_t *)b);
}

/* ---- one schema for both ---- */

enum merge_rule {
    MERGE_NONE,
    MERGE_LARGER,
    MERGE_SMALLER,
    MERGE_COMMON,
    MERGE_ALL,
    MERGE_PROPERTIES,
    MERGE_ANNOTATION
};

static enum merge_rule rule_of(const char *keyword) {
    static const struct {
        const char *keyword;
        enum merge_rule rule;
    } rules[] = {{"minimum", MERGE_LARGER}, {"exclusiveMinimum", MERGE_LARGER}, {"minLength", MERGE_LARGER},
        {"minItems", MERGE_LARGER}, {"maximum", MERGE_SMALLER}, {"exclusiveMaximum", MERGE_SMALLER},
        {"maxLength", MERGE_SMALLER}, {"maxItems", MERGE_SMALLER}, {"enum", MERGE_COMMON}, {"required", MERGE_ALL},
        {"properties", MERGE_PROPERTIES}, {"title", MERGE_ANNOTATION}, {"description", MERGE_ANNOTATION},
        {"default", MERGE_ANNOTATION}, {"examples", MERGE_ANNOTATION}, {"$defs", MERGE_ANNOTATION},
        {"definitions", MERGE_ANNOTATION}, {"$comment", MERGE_ANNOTATION}};
    for (size_t i = 0; i < sizeof rules / sizeof rules[0]; i++)
        if (strcmp(rules[i].keyword, keyword) == 0)
            return rules[i].rule;
    return MERGE_NONE;
}

static bool array_has(const json_t *array, const json_t *value) {
    size_t i;
    json_t *item;
    json_array_foreach(array, i, item) if (schema_values_equal(item, value)) return true;
    return false;
}

/* The values of a that are in b (common), or those of both. A new reference. */
static json_t *merge_lists(struct compiler *c, const json_t *a, const json_t *b, bool common) {
    json_t *out = common ? json_array() : json_copy((json_t *)a), *item;
    size_t i;
    c->work += (uint32_t)(json_array_size(a) * (json_array_size(b) / 64 + 1));
    json_array_foreach(common ? a : b, i, item) {
        if (array_has(common ? b : a, item) == common && json_array_append(out, item) != 0)
            schema_fail(c, ERROR_MEMORY, "no memory");
    }
    return out;
}

/* type lists: integer is a part of number. */
static json_t *merge_types(struct compiler *c, const json_t *a, const json_t *b) {
    static const char *const names[] = {"object", "array", "string", "integer", "number", "boolean", "null"};
    json_t *x = json_pack("{s:O}", "type", a), *y = json_pack("{s:O}", "type", b), *out = json_array();
    unsigned in_a = schema_types(c, x), in_b = schema_types(c, y);
    in_a |= in_a & TYPE_NUMBER ? TYPE_INTEGER : 0;
    in_b |= in_b & TYPE_NUMBER ? TYPE_INTEGER : 0;
    for (size_t i = 0; i < sizeof names / sizeof names[0]; i++)
        if ((in_a & in_b & (1u << i)) != 0 && json_array_append_new(out, json_string(names[i])) != 0)
            schema_fail(c, ERROR_MEMORY, "no memory");
    json_decref(x);
    json_decref(y);
    return out;
}

static json_t *merge_properties(struct compiler *c, const json_t *a, const json_t *b) {
    json_t *out = json_copy((json_t *)a), *value;
    const char *name;
    json_object_foreach((json_t *)b, name, value) {
        json_t *own = json_object_get(a, name), *both = NULL;
        if (own == NULL)
            both = json_incref(value);
        else if (json_equal(own, value))
            continue;
        else /* merged when it is compiled */
            both = json_pack("{s:[O,O]}", "allOf", own, value);
        if (both == NULL || json_object_set_new(out, name, both) != 0)
            schema_fail(c, ERROR_MEMORY, "no memory");
    }
    return out;
}

/* additionalProperties speaks of the properties beside it: merging must not bring others under it or from under it. */
static void check_additional(struct compiler *c, const json_t *a, const json_t *b) {
    const json_t *more = json_object_get(a, "additionalProperties");
    const char *name;
    json_t *value;
    if (more == NULL || json_is_true(more))
        return;
    json_object_foreach(json_object_get(b, "properties"), name,
        value) if (json_object_get(json_object_get(a, "properties"), name) == NULL) {
        schema_fail(c, ERROR_UNSUPPORTED,
            "keyword 'additionalProperties' beside allOf, anyOf or $ref that adds the property '%.60s' is not "
            "supported",
            name);
        return;
    }
}

static json_t *merge_values(struct compiler *c, const char *keyword, json_t *a, json_t *b) {
    if (json_equal(a, b))
        return json_incref(a);
    if (strcmp(keyword, "type") == 0)
        return merge_types(c, a, b);
    enum merge_rule rule = rule_of(keyword);
    bool numbers = json_is_number(a) && json_is_number(b), arrays = json_is_array(a) && json_is_array(b);
    bool a_is_larger = numbers && json_number_value(a) > json_number_value(b);
    if (rule == MERGE_ANNOTATION)
        return json_incref(a);
    if (numbers && (rule == MERGE_LARGER || rule == MERGE_SMALLER))
        return json_incref(a_is_larger == (rule == MERGE_LARGER) ? a : b);
    if (arrays && (rule == MERGE_COMMON || rule == MERGE_ALL))
        return merge_lists(c, a, b, rule == MERGE_COMMON);
    if (rule == MERGE_PROPERTIES && json_is_object(a) && json_is_object(b))
        return merge_properties(c, a, b);
    if (strcmp(keyword, "additionalProperties") == 0 && (json_is_true(a) || json_is_true(b)))
        return json_incref(json_is_true(a) ? b : a);
    schema_fail(c, ERROR_UNSUPPORTED, "keyword '%s' twice in what allOf, anyOf or $ref join is not supported", keyword);
    return NULL;
}

/* A schema that only refers is its target. */
static const json_t *follow(const struct compiler *c, const json_t *schema) {
    for (int i = 0; i < 16 && json_object_size(schema) == 1 && json_is_string(json_object_get(schema, "$ref")); i++) {
        const json_t *target = schema_resolve(c, json_string_value(json_object_get(schema, "$ref")));
        if (target == NULL)
            break;
        schema = target;
    }
    return schema;
}

const json_t *schema_merge(struct compiler *c, const json_t *a, const json_t *b) {
    a = follow(c, a);
    b = follow(c, b);
    c->work +=
        (uint32_t)(json_object_size(a) + json_object_size(b) + json_object_size(json_object_get(a, "properties")) +
                   json_object_size(json_object_get(b, "properties")));
    if (c->work > SCHEMA_WORK_MAX)
        schema_fail(c, ERROR_UNSUPPORTED, "the schema is too large");
    if (json_is_true(a) || json_is_false(b))
        return b;
    if (json_is_true(b) || json_is_false(a))
        return a;
    if (!json_is_object(a) || !json_is_object(b))
        schema_fail(c, ERROR_INVALID, "a schema must be an object or a boolean");
    if (json_is_true(json_object_get(a, "nullable")) || json_is_true(json_object_get(b, "nullable")))
        schema_fail(c, ERROR_UNSUPPORTED, "keyword 'nullable' in what allOf, anyOf or $ref join is not supported");
    check_additional(c, a, b);
    check_additional(c, b, a);
    json_t *merged = json_copy((json_t *)a), *value;
    if (merged == NULL || json_array_append_new(c->made, merged) != 0)
        schema_fail(c, ERROR_MEMORY, "no memory");
    const char *keyword;
    json_object_foreach((json_t *)b, keyword, value) {
        if (c->code != 0)
            return NULL;
        json_t *own = json_object_get(a, keyword);
        json_t *both = own == NULL ? json_incref(value) : merge_values(c, keyword, own, value);
        if (c->code != 0)
            json_decref(both);
        else if (json_object_set_new(merged, keyword, both) != 0)
            schema_fail(c, ERROR_MEMORY, "no memory");
    }
    return c->code == 0 ? merged : NULL;
}

/* ---- whether both can hold ---- */

/* A schema's const or enum as an array; NULL when it has neither. A new reference. */
static json_t *values_of(const json_t *schema) {
    json_t *constant = json_object_get(schema, "const"), *values = json_object_get(schema, "enum");
    return constant != NULL ? json_pack("[O]", constant) : json_is_array(values) ? json_incref(values) : NULL;
}

static bool values_disjoint(struct compiler *c, const json_t *a, const json_t *b) {
    json_t *of_a = values_of(a), *of_b = values_of(b);
    bool disjoint = of_a != NULL && of_b != NULL;
    size_t i;
    if (disjoint)
        c->work += (uint32_t)(json_array_size(of_a) * (json_array_size(of_b) / 64 + 1));
    if (c->work > SCHEMA_WORK_MAX)
        disjoint = false;
    for (i = 0; disjoint && i < json_array_size(of_a); i++)
        disjoint = !array_has(of_b, json_array_get(of_a, i));
    json_decref(of_a);
    json_decref(of_b);
    return disjoint;
}

/* The types of the values that satisfy a schema; written: that are written for it. */
static unsigned possible_types(struct compiler *c, const json_t *schema, bool written) {
    static const char *const combining[] = {"$ref", "anyOf", "oneOf", "allOf"};
    json_t *values = values_of(schema), *item;
    unsigned types = values == NULL ? TYPES_ALL : 0;
    bool known = json_object_get(schema, "type") != NULL || written;
    size_t i;
    for (i = 0; i < sizeof combining / sizeof combining[0]; i++)
        known = known && (json_object_get(schema, combining[i]) == NULL || json_object_get(schema, "type") != NULL);
    json_array_foreach(values, i, item) types |= schema_type_of(item);
    if (values == NULL && known)
        types = schema_types(c, schema);
    json_decref(values);
    return types & TYPE_NUMBER ? types | TYPE_INTEGER : types;
}

static bool requires(const json_t *schema, const char *name) {
    size_t i;
    json_t *item;
    json_array_foreach(json_object_get(schema, "required"), i,
        item) if (json_is_string(item) && strcmp(json_string_value(item), name) == 0) return true;
    return false;
}

bool schema_disjoint(struct compiler *c, const json_t *a, const json_t *b) {
    const char *name;
    json_t *value;
    a = follow(c, a);
    b = follow(c, b);
    if (json_is_false(a) || json_is_false(b))
        return true;
    if (!json_is_object(a) || !json_is_object(b))
        return false;
    if ((possible_types(c, a, false) & possible_types(c, b, false)) == 0 || values_disjoint(c, a, b))
        return true;
    if (possible_types(c, a, true) != TYPE_OBJECT || possible_types(c, b, true) != TYPE_OBJECT)
        return false;
    json_object_foreach(json_object_get(a, "properties"), name, value) {
        const json_t *other = json_object_get(json_object_get(b, "properties"), name);
        c->work++;
        if (other != NULL && requires(a, name) && requires(b, name) &&
            values_disjoint(c, follow(c, value), follow(c, other)))
            return true;
    }
    return false;
}
