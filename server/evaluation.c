/* SPDX-License-Identifier: Apache-2.0 */
#include "server/evaluation.h"

#include "config/options.h"
#include "policy/policy.h"
#include "policy/trained.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { TEXT_MAX = 256 };

struct evaluation_field {
    const char *name, *option;
    bool list;
};
static const struct evaluation_field evaluation_fields[] = {{"task", "task", false}, {"ratios", "kv-ratio", true},
    {"tokens", "kv-tokens", false}, {"lengths", "length", true}, {"limit", "limit", false}, {"seed", "seed", false},
    {"query_aware", "query-aware", false}, {"continuation", "continuation", false}};

/* A scalar as the text that the option takes. */
static int evaluation_text(const char *name, const json_t *value, char out[TEXT_MAX], struct fault *fault) {
    int64_t integer;
    if (fields_as_integer(value, &integer))
        snprintf(out, TEXT_MAX, "%lld", (long long)integer);
    else if (json_is_number(value))
        snprintf(out, TEXT_MAX, "%.15f", json_number_value(value)); /* the option takes digits and a point alone */
    else if (json_is_boolean(value))
        snprintf(out, TEXT_MAX, "%s", json_is_true(value) ? "true" : "false");
    else if (json_is_string(value) && json_string_length(value) < TEXT_MAX &&
             strlen(json_string_value(value)) == json_string_length(value))
        snprintf(out, TEXT_MAX, "%s", json_string_value(value));
    else
        return fault_invalid(
            fault, name, "%s has a value that is too long, or not a number, a boolean or a text", name);
    return 0;
}

static int evaluation_set(
    struct config *config, const char *option, const char *text, const char *name, struct fault *fault) {
    struct error error;
    if (option_parse(option_find(option), config, text, name, &error) == 0)
        return 0;
    return error.code == ERROR_MEMORY ? fault_memory(fault) : fault_invalid(fault, name, "%s", error.message);
}

static int evaluation_set_value(
    struct config *config, const struct evaluation_field *field, const json_t *value, struct fault *fault) {
    char text[TEXT_MAX];
    if (evaluation_text(field->name, value, text, fault) != 0)
        return -1;
    return evaluation_set(config, field->option, text, field->name, fault);
}

static int evaluation_read_field(
    const json_t *request, const struct evaluation_field *field, struct config *config, struct fault *fault) {
    const json_t *value = field_get(request, field->name);
    size_t index;
    json_t *item;
    if (value == NULL)
        return 0;
    option_clear_list(option_find(field->option), config);
    if (!json_is_array(value))
        return evaluation_set_value(config, field, value, fault);
    if (!field->list || json_array_size(value) == 0 || json_array_size(value) > OPTION_LIST_MAX)
        return fault_invalid(fault, field->name,
            field->list ? "%s must be an array of 1 to 64 numbers" : "%s must not be an array", field->name);
    json_array_foreach(value, index, item) {
        if (evaluation_set_value(config, field, item, fault) != 0)
            return -1;
    }
    return 0;
}

/* Before the option's own check, which would read the files that a text names. */
static int evaluation_check_policy(const char *text, const struct trained_policies *trained, struct fault *fault) {
    struct policy_settings settings;
    struct error error;
    if (policy_settings_parse_trained(text, trained, &settings, &error) != 0)
        return error.code == ERROR_MEMORY ? fault_memory(fault)
                                          : fault_invalid(fault, "policies", "policies: %s", error.message);
    policy_settings_release(&settings);
    return 0;
}

static int evaluation_read_policies(
    const json_t *request, const struct trained_policies *trained, struct config *config, struct fault *fault) {
    const json_t *list = field_get(request, "policies");
    size_t index;
    json_t *item;
    if (list == NULL)
        return 0;
    if (!json_is_array(list) || json_array_size(list) == 0 || json_array_size(list) > OPTION_LIST_MAX)
        return fault_invalid(fault, "policies", "policies must be an array of 1 to %d texts", OPTION_LIST_MAX);
    option_clear_list(option_find("kv-policy"), config);
    json_array_foreach(list, index, item) {
        if (!json_is_string(item) || json_string_length(item) >= TEXT_MAX ||
            strlen(json_string_value(item)) != json_string_length(item))
            return fault_invalid(fault, "policies", "policies must be an array of short texts");
        if (evaluation_check_policy(json_string_value(item), trained, fault) != 0 ||
            evaluation_set(config, "kv-policy", json_string_value(item), "policies", fault) != 0)
            return -1;
    }
    return 0;
}

static int evaluation_check_repeated(const struct config *config, struct fault *fault) {
    const char *value, *option = config_repeated(config, &value), *name = "policies";
    if (option == NULL)
        return 0;
    for (size_t i = 0; i < sizeof evaluation_fields / sizeof evaluation_fields[0]; i++)
        if (strcmp(evaluation_fields[i].option, option) == 0)
            name = evaluation_fields[i].name;
    return fault_invalid(fault, name, "%s: %.80s is given twice", name, value);
}

/* What the budgets and policies give together. */
static int evaluation_check(const struct config *config, const struct trained_policies *trained, struct fault *fault) {
    struct policy_settings *list = NULL;
    size_t count = 0;
    struct error error;
    int code = config_policies(config, trained, &list, &count, &error);
    config_free_policies(list, count);
    return code == 0              ? 0
           : code == ERROR_MEMORY ? fault_memory(fault)
                                  : fault_invalid(fault, "policies", "%s", error.message);
}

int evaluation_config(const json_t *request, const struct trained_policies *trained, const char *file,
    struct config *config, struct fault *fault) {
    struct error error;
    if (config_set_defaults(config, &error) != 0)
        return fault_memory(fault);
    if (field_get(request, "task") == NULL)
        return fault_invalid(fault, "task",
            "task is required: kl, needle, multi-needle, kv-retrieval, "
            "variable-tracking, arithmetic; with data: gsm8k, bbh, qa, longbench, "
            "jsonl, kv");
    for (size_t i = 0; i < sizeof evaluation_fields / sizeof evaluation_fields[0]; i++)
        if (evaluation_read_field(request, &evaluation_fields[i], config, fault) != 0)
            return -1;
    if (file != NULL && evaluation_set(config, "data", file, "data", fault) != 0)
        return -1;
    if (evaluation_read_policies(request, trained, config, fault) != 0)
        return -1;
    if (evaluation_check_repeated(config, fault) != 0)
        return -1;
    return evaluation_check(config, trained, fault);
}
