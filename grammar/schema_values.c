/* SPDX-License-Identifier: Apache-2.0 */
#include "grammar/schema.h"

#include "grammar/regex.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

int schema_count(struct compiler *c, const json_t *schema, const char *keyword, uint32_t *count) {
    const json_t *value = json_object_get(schema, keyword);
    if (value == NULL)
        return 0;
    double number = json_number_value(value);
    if (!json_is_number(value) || number < 0 || number > 1e9 || number != floor(number))
        schema_fail(c, ERROR_INVALID, "%s must be a whole number from 0 to 1000000000", keyword);
    *count = c->code == 0 ? (uint32_t)number : 0;
    return c->code;
}

/* ---- objects ---- */

struct member {
    const char *name;
    const json_t *schema; /* NULL: that of additionalProperties */
    bool required;
};

struct members {
    struct member *items;
    size_t count;
    const json_t *more; /* additionalProperties; NULL: absent */
    bool closed;        /* there are no others */
};

static int add_member(struct compiler *c, struct members *members, const char *name, const json_t *schema) {
    if (strlen(name) > TEXT_NAME_MAX)
        schema_fail(c, ERROR_UNSUPPORTED, "a property's name of more than %d bytes is not supported", TEXT_NAME_MAX);
    members->items[members->count++] = (struct member){.name = name, .schema = schema};
    return c->code;
}

/* Marks a name as required; adds it when it is no listed property. listed: how many there are of those. */
static int require_member(struct compiler *c, struct members *members, const char *name, const json_t *properties) {
    bool found = json_object_get(properties, name) != NULL;
    for (size_t i = found ? 0 : json_object_size(properties); i < members->count; i++)
        if (strcmp(members->items[i].name, name) == 0) {
            members->items[i].required = true;
            return 0;
        }
    if (add_member(c, members, name, NULL) != 0)
        return c->code;
    members->items[members->count - 1].required = true;
    return 0;
}

static int read_members(struct compiler *c, const json_t *schema, struct members *members) {
    const json_t *properties = json_object_get(schema, "properties"), *required = json_object_get(schema, "required");
    const char *name;
    json_t *value;
    size_t i;
    if ((properties != NULL && !json_is_object(properties)) || (required != NULL && !json_is_array(required))) {
        schema_fail(c, ERROR_INVALID, "properties must be an object and required an array");
        return c->code;
    }
    if (json_object_size(properties) > SCHEMA_MEMBERS_MAX || json_array_size(required) > SCHEMA_MEMBERS_MAX)
        schema_fail(c, ERROR_UNSUPPORTED, "more than %d properties are not supported", SCHEMA_MEMBERS_MAX);
    c->work += (uint32_t)json_array_size(required);
    members->items = calloc(json_object_size(properties) + json_array_size(required) + 1, sizeof *members->items);
    if (members->items == NULL)
        schema_fail(c, ERROR_MEMORY, "no memory");
    if (c->code != 0)
        return c->code;
    json_object_foreach((json_t *)properties, name, value) if (add_member(c, members, name, value) != 0) return c->code;
    json_array_foreach(required, i, value) {
        if (!json_is_string(value))
            schema_fail(c, ERROR_INVALID, "required must be an array of strings");
        else
            require_member(c, members, json_string_value(value), properties);
        if (c->code != 0)
            return c->code;
    }
    members->more = json_object_get(schema, "additionalProperties");
    members->closed = members->more != NULL ? json_is_false(members->more) : json_object_size(properties) > 0;
    return 0;
}

static uint32_t more_values(struct compiler *c, const struct members *members) {
    if (members->more == NULL)
        return schema_any(c);
    size_t before = schema_enter(c, "additionalProperties", NULL);
    uint32_t value = schema_compile(c, members->more);
    schema_leave(c, before);
    return value;
}

static uint32_t member_expression(struct compiler *c, const struct member *member, uint32_t more) {
    uint32_t value = more;
    if (member->schema != NULL) {
        size_t before = schema_enter(c, "properties", member->name);
        value = schema_compile(c, member->schema);
        schema_leave(c, before);
    }
    uint32_t name = text_quoted(c->pool, member->name, strlen(member->name));
    return expression_pair(c->pool, name, expression_pair(c->pool, c->colon, value));
}

/* name: value with a name that is not among the members. */
static uint32_t other_member(struct compiler *c, const struct members *members, uint32_t more) {
    const char **names = malloc((members->count + 1) * sizeof *names);
    if (names == NULL)
        return schema_fail(c, ERROR_MEMORY, "no memory");
    for (size_t i = 0; i < members->count; i++)
        names[i] = members->items[i].name;
    uint32_t quote = expression_word(c->pool, "\"");
    uint32_t name = expression_pair(c->pool, quote, text_other_names(c->pool, names, members->count));
    free(names);
    return expression_pair(c->pool, name, expression_pair(c->pool, quote, expression_pair(c->pool, c->colon, more)));
}

/* From the last member to the first: `rest` is what may follow when something stands before, `start` when nothing does.
 */
static uint32_t members_expression(struct compiler *c, const struct members *members, uint32_t more) {
    uint32_t other = members->closed ? EXPRESSION_NONE : other_member(c, members, more);
    uint32_t rest = expression_repeat(c->pool, expression_pair(c->pool, c->comma, other), 0, EXPRESSION_UNBOUNDED);
    uint32_t start = expression_optional(c->pool, expression_pair(c->pool, other, rest));
    for (size_t i = members->count; i-- > 0 && c->code == 0;) {
        const struct member *member = &members->items[i];
        uint32_t one = member_expression(c, member, more);
        uint32_t first = expression_pair(c->pool, one, rest);
        uint32_t later = expression_pair(c->pool, expression_pair(c->pool, c->comma, one), rest);
        start = member->required ? first : expression_either_two(c->pool, first, start);
        rest = member->required ? later : expression_either_two(c->pool, later, rest);
    }
    return start;
}

uint32_t schema_object(struct compiler *c, const json_t *schema) {
    struct members members = {0};
    uint32_t all = EXPRESSION_NONE;
    if (read_members(c, schema, &members) == 0) {
        bool others = !members.closed || members.count > json_object_size(json_object_get(schema, "properties"));
        uint32_t more = !others ? EXPRESSION_NONE : more_values(c, &members);
        all = members_expression(c, &members, more);
    }
    free(members.items);
    uint32_t close = expression_pair(c->pool, c->space, expression_word(c->pool, "}"));
    uint32_t open = expression_pair(c->pool, expression_word(c->pool, "{"), c->space);
    return expression_pair(c->pool, open, expression_pair(c->pool, all, close));
}

/* ---- arrays ---- */

static uint32_t item_expression(struct compiler *c, const json_t *prefix, size_t index) {
    char number[24];
    snprintf(number, sizeof number, "%zu", index);
    size_t before = schema_enter(c, "prefixItems", number);
    uint32_t item = schema_compile(c, json_array_get(prefix, index));
    schema_leave(c, before);
    return item;
}

static uint32_t items_expression(struct compiler *c, const json_t *schema) {
    const json_t *items = json_object_get(schema, "items");
    if (items == NULL)
        return schema_any(c);
    size_t before = schema_enter(c, "items", NULL);
    uint32_t item = json_is_array(items) ? schema_fail(c, ERROR_UNSUPPORTED,
                                               "keyword 'items' with an array is not supported; prefixItems is")
                                         : schema_compile(c, items);
    schema_leave(c, before);
    return item;
}

static uint32_t less(uint32_t count, uint32_t by) {
    return count == EXPRESSION_UNBOUNDED ? count : count > by ? count - by : 0;
}

/* Elements, from the last prefix item to the first: `rest` is what may follow i elements. */
static uint32_t elements(struct compiler *c, const json_t *prefix, uint32_t item, uint32_t least, uint32_t most) {
    uint32_t count = (uint32_t)json_array_size(prefix);
    uint32_t rest = EXPRESSION_EMPTY, start;
    if (count == 0) {
        uint32_t others =
            expression_repeat(c->pool, expression_pair(c->pool, c->comma, item), less(least, 1), less(most, 1));
        start = most == 0 ? EXPRESSION_EMPTY : expression_pair(c->pool, item, others);
        return least == 0 ? expression_optional(c->pool, start) : start;
    }
    start = rest =
        expression_repeat(c->pool, expression_pair(c->pool, c->comma, item), less(least, count), less(most, count));
    for (uint32_t i = count; i-- > 0 && c->code == 0;) {
        uint32_t one = item_expression(c, prefix, i);
        if (i > 0)
            one = expression_pair(c->pool, c->comma, one);
        start = i >= most ? EXPRESSION_EMPTY : expression_pair(c->pool, one, rest);
        if (i >= least && i < most)
            start = expression_optional(c->pool, start);
        rest = start;
    }
    return start;
}

uint32_t schema_array(struct compiler *c, const json_t *schema) {
    uint32_t least = 0, most = EXPRESSION_UNBOUNDED;
    const json_t *prefix = json_object_get(schema, "prefixItems");
    if (prefix != NULL && !json_is_array(prefix))
        return schema_fail(c, ERROR_INVALID, "prefixItems must be an array");
    if (schema_count(c, schema, "minItems", &least) != 0 || schema_count(c, schema, "maxItems", &most) != 0)
        return EXPRESSION_NONE;
    if (least > most)
        return EXPRESSION_NONE;
    uint32_t all = elements(c, prefix, items_expression(c, schema), least, most);
    uint32_t close = expression_pair(c->pool, c->space, expression_word(c->pool, "]"));
    uint32_t open = expression_pair(c->pool, expression_word(c->pool, "["), c->space);
    return expression_pair(c->pool, open, expression_pair(c->pool, all, close));
}

/* ---- strings ---- */

static uint32_t matched(struct compiler *c, const char *keyword, const char *pattern, size_t bytes) {
    struct error error = {0};
    uint32_t expression = EXPRESSION_NONE;
    int code = regex_compile(c->pool, pattern, bytes, false, &expression, &error);
    return code == 0 ? expression : schema_fail(c, code, "keyword '%s': %.200s", keyword, error.message);
}

static uint32_t characters(struct compiler *c, const json_t *schema) {
    const json_t *pattern = json_object_get(schema, "pattern"), *format = json_object_get(schema, "format");
    uint32_t least = 0, most = EXPRESSION_UNBOUNDED;
    if (schema_count(c, schema, "minLength", &least) != 0 || schema_count(c, schema, "maxLength", &most) != 0)
        return EXPRESSION_NONE;
    bool counted = least > 0 || most != EXPRESSION_UNBOUNDED;
    if (pattern == NULL && format == NULL)
        return least > most ? EXPRESSION_NONE : expression_repeat(c->pool, c->free_character, least, most);
    if (counted || (pattern != NULL && format != NULL))
        return schema_fail(c, ERROR_UNSUPPORTED, "keyword '%s' beside %s is not supported",
            pattern != NULL ? "pattern" : "format", counted ? "minLength or maxLength" : "format");
    if (!json_is_string(pattern != NULL ? pattern : format))
        return schema_fail(c, ERROR_INVALID, "pattern and format must be strings");
    if (pattern != NULL)
        return matched(c, "pattern", json_string_value(pattern), json_string_length(pattern));
    const char *known = schema_format(json_string_value(format));
    return known != NULL ? matched(c, "format", known, strlen(known))
                         : schema_fail(c, ERROR_UNSUPPORTED, "keyword 'format' with '%.40s' is not supported",
                               json_string_value(format));
}

uint32_t schema_string(struct compiler *c, const json_t *schema) {
    uint32_t quote = expression_word(c->pool, "\"");
    return expression_pair(c->pool, quote, expression_pair(c->pool, characters(c, schema), quote));
}

/* ---- numbers ---- */

/* A limit as a whole number: *value. For integers a limit between two is moved inwards, for numbers it is refused. */
static void read_limit(struct compiler *c, const json_t *schema, const char *keyword, bool upper, bool integer,
    bool *found, int64_t *value) {
    const json_t *limit = json_object_get(schema, keyword);
    if (limit == NULL)
        return;
    if (!json_is_number(limit)) {
        schema_fail(c, ERROR_INVALID, "%s must be a number", keyword);
        return;
    }
    *found = true;
    if (json_is_integer(limit)) {
        *value = json_integer_value(limit);
        return;
    }
    double real = json_real_value(limit), whole = upper ? floor(real) : ceil(real);
    bool exclusive = keyword[0] == 'e';
    if (real != whole && !integer)
        schema_fail(c, ERROR_UNSUPPORTED, "keyword '%s' of a number is supported with whole limits only", keyword);
    if (exclusive && real != whole) /* the next whole number is inside, and an exclusive limit leaves itself out */
        whole += upper ? 1 : -1;
    *value = whole < -1e18 ? -(int64_t)1e18 : whole > 1e18 ? (int64_t)1e18 : (int64_t)whole;
}

static struct number_limits read_limits(struct compiler *c, const json_t *schema, bool integer) {
    struct number_limits limits = {0};
    bool low = false, high = false;
    int64_t without_low = 0, without_high = 0;
    read_limit(c, schema, "minimum", false, integer, &limits.has_low, &limits.low);
    read_limit(c, schema, "maximum", true, integer, &limits.has_high, &limits.high);
    read_limit(c, schema, "exclusiveMinimum", false, integer, &low, &without_low);
    read_limit(c, schema, "exclusiveMaximum", true, integer, &high, &without_high);
    if (low && (!limits.has_low || without_low >= limits.low)) {
        limits.has_low = limits.without_low = true;
        limits.low = without_low;
    }
    if (high && (!limits.has_high || without_high <= limits.high)) {
        limits.has_high = limits.without_high = true;
        limits.high = without_high;
    }
    return limits;
}

uint32_t schema_number(struct compiler *c, const json_t *schema, bool integer) {
    const json_t *multiple = json_object_get(schema, "multipleOf");
    if (multiple != NULL && !(integer && json_is_number(multiple) && json_number_value(multiple) == 1))
        return schema_fail(c, ERROR_UNSUPPORTED, "keyword 'multipleOf' is supported as 1 of integers only, not");
    struct number_limits limits = read_limits(c, schema, integer);
    if (c->code != 0)
        return EXPRESSION_NONE;
    if (!integer)
        return limits.has_low || limits.has_high ? text_decimal(c->pool, &limits) : text_number(c->pool);
    int64_t low = limits.has_low ? limits.low : INT64_MIN, high = limits.has_high ? limits.high : INT64_MAX;
    if ((limits.without_low && low == INT64_MAX) || (limits.without_high && high == INT64_MIN))
        return EXPRESSION_NONE;
    return text_integer(c->pool, low + limits.without_low, high - limits.without_high);
}
