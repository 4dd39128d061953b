/* SPDX-License-Identifier: Apache-2.0 */
#include "server/fields.h"

#include "engine/log.h"

#include <math.h>
#include <pthread.h>
#include <stdio.h>
#include <string.h>

enum {
    DEPTH_MAX = 64,
    CONTAINERS_MAX = 65536,
    LOGGED_MAX = 64, /* names of unknown fields that are remembered; later ones are not logged */
    NAME_MAX_BYTES = 64,
};

/* Counts nesting and containers before the parser, which recurses and allocates for each of them. */
static int fields_scan(const char *body, size_t bytes, struct fault *fault) {
    unsigned depth = 0, containers = 0;
    bool in_string = false;
    for (size_t i = 0; i < bytes; i++) {
        char c = body[i];
        if (in_string) {
            if (c == '\\')
                i++;
            else if (c == '"')
                in_string = false;
            continue;
        }
        if (c == '"')
            in_string = true;
        if (c == ']' || c == '}')
            depth -= depth > 0;
        if (c != '[' && c != '{')
            continue;
        if (++depth > DEPTH_MAX)
            return fault_invalid(fault, NULL, "the body is nested more than %d levels deep", DEPTH_MAX);
        if (++containers > CONTAINERS_MAX)
            return fault_invalid(fault, NULL, "the body has more than %d arrays and objects", CONTAINERS_MAX);
    }
    return 0;
}

json_t *fields_parse(const char *body, size_t bytes, struct fault *fault) {
    if (bytes == 0) {
        fault_invalid(fault, NULL, "the body is empty; a JSON object is expected");
        return NULL;
    }
    if (fields_scan(body, bytes, fault) != 0)
        return NULL;
    json_error_t error;
    json_t *value = json_loadb(body, bytes, JSON_REJECT_DUPLICATES | JSON_ALLOW_NUL, &error);
    if (value == NULL) {
        if (json_error_code(&error) == json_error_out_of_memory)
            fault_memory(fault);
        else
            fault_invalid(fault, NULL, "the body is not valid JSON: %s (line %d, column %d)", error.text, error.line,
                error.column);
        return NULL;
    }
    if (!json_is_object(value)) {
        json_decref(value);
        fault_invalid(fault, NULL, "the body must be a JSON object, not an array");
        return NULL;
    }
    return value;
}

json_t *field_get(const json_t *object, const char *name) {
    json_t *value = json_object_get(object, name);
    return json_is_null(value) ? NULL : value;
}

const char *field_type(const json_t *value) {
    switch (json_typeof(value)) {
    case JSON_OBJECT:
        return "an object";
    case JSON_ARRAY:
        return "an array";
    case JSON_STRING:
        return "a string";
    case JSON_TRUE:
    case JSON_FALSE:
        return "a boolean";
    case JSON_NULL:
        return "null";
    default:
        return "a number";
    }
}

bool fields_as_integer(const json_t *number, int64_t *value) {
    if (json_is_integer(number)) {
        *value = json_integer_value(number);
        return true;
    }
    if (!json_is_real(number))
        return false;
    double real = json_real_value(number);
    if (!(fabs(real) <= 9007199254740992.0) || real != floor(real)) /* 2^53: doubles are exact up to there */
        return false;
    *value = (int64_t)real;
    return true;
}

int field_integer(
    const json_t *object, const char *name, int64_t low, int64_t high, int64_t *value, struct fault *fault) {
    const json_t *field = field_get(object, name);
    if (field == NULL)
        return 0;
    if (!json_is_number(field))
        return fault_invalid(fault, name, "%s must be an integer, not %s", name, field_type(field));
    int64_t number;
    if (!fields_as_integer(field, &number))
        return fault_invalid(fault, name, "%s must be an integer, not %.17g", name, json_number_value(field));
    if (number < low || number > high)
        return fault_invalid(fault, name, "%s is %lld; it must be between %lld and %lld", name, (long long)number,
            (long long)low, (long long)high);
    *value = number;
    return 0;
}

int field_number(const json_t *object, const char *name, double low, double high, double *value, struct fault *fault) {
    const json_t *field = field_get(object, name);
    if (field == NULL)
        return 0;
    if (!json_is_number(field))
        return fault_invalid(fault, name, "%s must be a number, not %s", name, field_type(field));
    double number = json_number_value(field);
    if (!(number >= low && number <= high))
        return fault_invalid(fault, name, "%s is %g; it must be between %g and %g", name, number, low, high);
    *value = number;
    return 0;
}

int field_boolean(const json_t *object, const char *name, bool *value, struct fault *fault) {
    const json_t *field = field_get(object, name);
    if (field == NULL)
        return 0;
    if (!json_is_boolean(field))
        return fault_invalid(fault, name, "%s must be true or false, not %s", name, field_type(field));
    *value = json_is_true(field);
    return 0;
}

int field_string(const json_t *object, const char *name, const char **value, struct fault *fault) {
    const json_t *field = field_get(object, name);
    if (field == NULL)
        return 0;
    if (!json_is_string(field))
        return fault_invalid(fault, name, "%s must be a string, not %s", name, field_type(field));
    if (strlen(json_string_value(field)) != json_string_length(field))
        return fault_invalid(fault, name, "%s contains a NUL character", name);
    *value = json_string_value(field);
    return 0;
}

static bool field_asks(const json_t *value, enum field_refusal refusal) {
    switch (refusal) {
    case REFUSE_NONZERO:
        return !json_is_number(value) || json_number_value(value) != 0.0;
    case REFUSE_NOT_ONE:
        return !json_is_number(value) || json_number_value(value) != 1.0;
    case REFUSE_TRUE:
        return !json_is_false(value);
    case REFUSE_NONEMPTY:
        if (json_is_string(value))
            return json_string_length(value) > 0;
        if (json_is_array(value))
            return json_array_size(value) > 0;
        if (json_is_object(value))
            return json_object_size(value) > 0;
        return !json_is_false(value);
    case REFUSE_PRESENT:
        break;
    }
    return true;
}

/* True the first time a name is seen. Bodies are parsed on several threads. */
static bool fields_first_time(const char *name) {
    static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
    static char names[LOGGED_MAX][NAME_MAX_BYTES];
    static unsigned count;
    char cut[NAME_MAX_BYTES];
    snprintf(cut, sizeof cut, "%s", name);
    pthread_mutex_lock(&lock);
    bool first = count < LOGGED_MAX;
    for (unsigned i = 0; first && i < count; i++)
        first = strcmp(names[i], cut) != 0;
    if (first)
        memcpy(names[count++], cut, sizeof cut);
    pthread_mutex_unlock(&lock);
    return first;
}

static bool fields_in(const char *const *names, const char *name) {
    for (; *names != NULL; names++)
        if (strcmp(*names, name) == 0)
            return true;
    return false;
}

static const struct field_unsupported *fields_find(const struct field_unsupported *table, const char *name) {
    for (; table->name != NULL; table++)
        if (strcmp(table->name, name) == 0)
            return table;
    return NULL;
}

int fields_check(const json_t *object, const char *const *known, const struct field_unsupported *unsupported,
    const char *request_id, struct fault *fault) {
    const char *name;
    json_t *value;
    json_object_foreach((json_t *)object, name, value) {
        if (fields_in(known, name))
            continue;
        const struct field_unsupported *entry = fields_find(unsupported, name);
        if (entry == NULL) {
            if (fields_first_time(name))
                log_event(LOG_INFO, request_id, "unknown field ignored", "field", LOG_STRING(name), NULL);
            continue;
        }
        if (!json_is_null(value) && field_asks(value, entry->refusal))
            return fault_invalid(fault, name, "%s is not supported by this server", name);
    }
    return 0;
}
