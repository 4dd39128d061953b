/* SPDX-License-Identifier: Apache-2.0 */
#include "server/cache_params.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { VALUE_TEXT_MAX = 64 };

/* The name of a field of the object, for faults. */
static void cache_params_name(const char *field, char name[static 80]) {
    snprintf(name, 80, "kv_cache.%s", field);
}

/* A number in the shortest form that reads back as the same double. */
static void cache_params_write_number(const json_t *number, char text[static VALUE_TEXT_MAX]) {
    int64_t integer;
    if (fields_as_integer(number, &integer)) {
        snprintf(text, VALUE_TEXT_MAX, "%lld", (long long)integer);
        return;
    }
    double value = json_number_value(number);
    for (int digits = 6; digits <= 17; digits++) {
        snprintf(text, VALUE_TEXT_MAX, "%.*g", digits, value);
        if (strtod(text, NULL) == value)
            return;
    }
}

/* A string that is a number: the option may want one, but then a JSON number. */
static bool cache_params_spells_number(const char *text) {
    char *end;
    strtod(text, &end);
    return end != text && *end == '\0';
}

/* The value's text, as policy_settings_set takes it: in buffer or borrowed from the value. NULL: a fault. */
static const char *cache_params_text(
    const json_t *value, const char *name, char buffer[static VALUE_TEXT_MAX], struct fault *fault) {
    if (json_is_boolean(value))
        return json_is_true(value) ? "true" : "false";
    if (json_is_number(value)) {
        cache_params_write_number(value, buffer);
        return buffer;
    }
    if (!json_is_string(value)) {
        fault_invalid(fault, name, "%s must be a number, a boolean or a string, not %s", name, field_type(value));
        return NULL;
    }
    const char *text = json_string_value(value);
    if (strlen(text) != json_string_length(value)) {
        fault_invalid(fault, name, "%s contains a NUL character", name);
        return NULL;
    }
    if (cache_params_spells_number(text)) {
        fault_invalid(fault, name, "%s is the string '%.40s'; a number must be written without quotes", name, text);
        return NULL;
    }
    return text;
}

/* A `policy` field: a name of the registry, with ":" and the name of a trained one behind it if wanted. */
struct policy_choice {
    const struct policy *policy;
    const char *trained; /* NULL: none is named */
};

static int cache_params_find(
    const json_t *field, const struct parse_context *context, struct policy_choice *choice, struct fault *fault) {
    const char *text = json_string_value(field);
    char name[VALUE_TEXT_MAX];
    if (text == NULL)
        return fault_invalid(fault, "kv_cache.policy", "kv_cache.policy must be a string, one of %s; not %s",
            policy_names(), field_type(field));
    bool trained = context->policies != NULL && strchr(text, ':') != NULL;
    size_t length = trained ? strcspn(text, ":") : strlen(text);
    snprintf(name, sizeof name, "%.*s", (int)(length < VALUE_TEXT_MAX ? length : VALUE_TEXT_MAX - 1), text);
    choice->policy = strlen(text) == json_string_length(field) ? policy_find(name) : NULL;
    choice->trained = trained ? text + length + 1 : NULL;
    if (choice->policy != NULL)
        return 0;
    return fault_invalid(
        fault, "kv_cache.policy", "kv_cache.policy is '%.64s'; it must be one of %s", text, policy_names());
}

/* The trained policy that was named. */
static int cache_params_apply(const struct parse_context *context, const struct policy_choice *choice,
    struct policy_settings *settings, struct fault *fault) {
    struct error error;
    if (choice->trained == NULL || policy_table_apply(context->policies, choice->trained, settings, &error) == 0)
        return 0;
    return fault_invalid(fault, "kv_cache.policy", "kv_cache.policy: %s", error.message);
}

static void cache_params_own(const struct parse_context *context, struct policy_settings *settings) {
    if (context->policies != NULL)
        policy_table_own(context->policies, settings);
    else
        policy_settings_copy(settings, context->kv_policy);
}

/* settings from the named policy (NULL: none is named), or from the server's own. */
static int cache_params_begin(
    const json_t *name, const struct parse_context *context, struct policy_settings *settings, struct fault *fault) {
    struct policy_choice choice = {.policy = context->kv_policy->policy};
    if (name != NULL && cache_params_find(name, context, &choice, fault) != 0)
        return -1;
    if (choice.policy == context->kv_policy->policy)
        cache_params_own(context, settings);
    else
        policy_settings_default(choice.policy, settings);
    return cache_params_apply(context, &choice, settings, fault);
}

static int cache_params_set(
    struct policy_settings *settings, const char *option, const json_t *value, struct fault *fault) {
    char name[80], buffer[VALUE_TEXT_MAX];
    struct error error;
    cache_params_name(option, name);
    const char *text = cache_params_text(value, name, buffer, fault);
    if (text == NULL)
        return -1;
    if (strcmp(option, "tokens") == 0 && strcmp(text, "0") == 0) /* elsewhere it means: by ratio */
        return fault_invalid(fault, name, "%s is 0; it must be at least 1", name);
    if (policy_settings_set(settings, option, text, false, &error) != 0)
        return error.code == ERROR_MEMORY ? fault_memory(fault)
                                          : fault_invalid(fault, name, "%s: %s", name, error.message);
    return 0;
}

/* Gives the policy its network, where it wants one. */
static int cache_params_resolve(
    const struct parse_context *context, struct policy_settings *settings, struct fault *fault) {
    const struct policy_model *model = &context->policy_model;
    struct error error;
    if (!policy_settings_want_network(settings))
        return 0;
    if (settings->network == NULL && context->policies != NULL)
        policy_table_apply(context->policies, NULL, settings, NULL);
    if (model->fingerprint == NULL)
        return fault_invalid(fault, "kv_cache.policy", "kv_cache.policy is '%s': no policy is trained for this model",
            settings->policy->name);
    int code = policy_settings_resolve(settings, model, NULL, &error);
    if (code == ERROR_MEMORY)
        return fault_memory(fault);
    bool value = code == ERROR_INVALID; /* an option does not go with what the network was trained with */
    return code == 0 ? 0 : fault_invalid(fault, value ? "kv_cache" : "kv_cache.policy", "kv_cache: %s", error.message);
}

/* null asks for nothing, whichever policy the option is of; a name that there is not is wrong all the same. */
static int cache_params_set_null(struct policy_settings *settings, const char *option, struct fault *fault) {
    char name[80];
    struct error error;
    if (policy_option_exists(option))
        return 0;
    cache_params_name(option, name);
    policy_settings_set(settings, option, "", false, &error); /* fails: its message lists the names */
    return fault_invalid(fault, name, "%s: %s", name, error.message);
}

static int cache_params_read_object(
    const json_t *object, const struct parse_context *context, struct policy_settings *settings, struct fault *fault) {
    const char *option;
    json_t *value;
    struct error error;
    if (field_get(object, "ratio") != NULL && field_get(object, "tokens") != NULL)
        return fault_invalid(
            fault, "kv_cache.tokens", "kv_cache.ratio and kv_cache.tokens exclude each other: give one of them");
    if (cache_params_begin(field_get(object, "policy"), context, settings, fault) != 0)
        return -1;
    json_object_foreach((json_t *)object, option, value) {
        if (strcmp(option, "policy") == 0)
            continue;
        if (json_is_null(value) ? cache_params_set_null(settings, option, fault) != 0
                                : cache_params_set(settings, option, value, fault) != 0)
            return -1;
    }
    if (policy_settings_check(settings, &error) != 0)
        return fault_invalid(fault, "kv_cache", "kv_cache: %s", error.message);
    return 0;
}

int cache_params_read(
    const json_t *body, const struct parse_context *context, struct request *request, struct fault *fault) {
    const json_t *object = field_get(body, "kv_cache");
    struct policy_settings *settings = &request->kv_policy;
    int failed;
    if (object == NULL)
        failed = cache_params_begin(NULL, context, settings, fault);
    else if (!json_is_object(object))
        failed = fault_invalid(fault, "kv_cache", "kv_cache must be an object, not %s", field_type(object));
    else
        failed = cache_params_read_object(object, context, settings, fault);
    if (failed == 0)
        failed = cache_params_resolve(context, settings, fault);
    if (failed == 0 && settings->seed == 0)
        settings->seed = request->sampling.seed;
    return failed;
}
