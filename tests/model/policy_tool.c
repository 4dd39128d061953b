/* SPDX-License-Identifier: Apache-2.0
 *
 * Runs functions of policy/ on data from standard input, for tests/model/test_policy.py. One JSON object a line, one
 * JSON value a line comes back:
 *   {"op": "select", "scope": "layer", "floor": 0.2, "rows": [{"layer", "head", "budget" (null: all), "scores":
 * [number, null (NaN), "inf" or "-inf"], "positions": [number, null (an empty slot)]}]}      -> [[kept slots] per row]
 *   {"op": "share", "weights": [...], "total": n, "cap": n}                               -> [shares]
 *   {"op": "allocate", "policy": TEXT, "layers", "kv_heads", "seen", "preferences", "gates"} -> [budgets], null: all
 *   {"op": "protect", "policy": TEXT, "seen", "budget"}                                   -> [sinks, recent_from]
 *   {"op": "table"} -> {"policies": [{"name", "source", "shared", "common": {name: default}, "options": {name:
 * default}}], "options": [{"name", "allowed", "help"}]}
 */
#include "policy/budget.h"
#include "policy/select.h"

#include "engine/backend.h"

#include <jansson.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static void *check(void *memory) {
    if (memory == NULL) {
        fputs("policy_tool: no memory\n", stderr);
        exit(1);
    }
    return memory;
}

static uint32_t read_u32(const json_t *object, const char *key) {
    return (uint32_t)json_integer_value(json_object_get(object, key));
}

static float read_score(const json_t *value) {
    if (json_is_null(value))
        return NAN;
    if (json_is_string(value))
        return json_string_value(value)[0] == '-' ? -INFINITY : INFINITY;
    return (float)json_number_value(value);
}

static struct policy_settings read_policy(const json_t *request) {
    struct policy_settings settings;
    struct error error;
    if (policy_settings_parse(json_string_value(json_object_get(request, "policy")), &settings, &error) != 0) {
        fprintf(stderr, "policy_tool: %s\n", error.message);
        exit(1);
    }
    return settings;
}

static json_t *write_list(const uint32_t *values, size_t count) {
    json_t *list = json_array();
    for (size_t i = 0; i < count; i++)
        json_array_append_new(list, values[i] == BUDGET_ALL ? json_null() : json_integer(values[i]));
    return list;
}

static struct select_row read_row(const json_t *object) {
    const json_t *scores = json_object_get(object, "scores"), *positions = json_object_get(object, "positions");
    uint32_t slots = (uint32_t)json_array_size(scores);
    float *score = check(malloc(slots * sizeof *score + 1));
    uint32_t *position = check(malloc(slots * sizeof *position + 1));
    for (uint32_t i = 0; i < slots; i++) {
        const json_t *at = json_array_get(positions, i);
        score[i] = read_score(json_array_get(scores, i));
        position[i] = json_is_null(at) ? KV_NO_POSITION : (uint32_t)json_integer_value(at);
    }
    return (struct select_row){
        .layer = read_u32(object, "layer"),
        .head = read_u32(object, "head"),
        .slots = slots,
        .budget = json_is_null(json_object_get(object, "budget")) ? BUDGET_ALL : read_u32(object, "budget"),
        .scores = score,
        .positions = position,
        .keep = check(malloc(slots * sizeof(uint32_t) + 1)),
    };
}

static json_t *run_select(const json_t *request, struct select_scratch *scratch) {
    const json_t *objects = json_object_get(request, "rows");
    const char *scope = json_string_value(json_object_get(request, "scope"));
    float floor = (float)json_number_value(json_object_get(request, "floor"));
    uint32_t count = (uint32_t)json_array_size(objects);
    struct select_row *rows = check(malloc(count * sizeof *rows + 1));
    for (uint32_t i = 0; i < count; i++)
        rows[i] = read_row(json_array_get(objects, i));
    enum policy_scope chosen = scope[0] == 'h' ? SCOPE_HEAD : scope[0] == 'l' ? SCOPE_LAYER : SCOPE_MODEL;
    json_t *kept = json_array();
    if (select_slots(rows, count, chosen, floor, scratch, NULL) != 0)
        check(NULL);
    for (uint32_t i = 0; i < count; i++) {
        json_array_append_new(kept, write_list(rows[i].keep, rows[i].kept));
        free((void *)rows[i].scores);
        free((void *)rows[i].positions);
        free(rows[i].keep);
    }
    free(rows);
    return kept;
}

static double *read_numbers(const json_t *list) {
    size_t count = json_array_size(list);
    double *numbers = check(malloc(count * sizeof *numbers + 1));
    for (size_t i = 0; i < count; i++)
        numbers[i] = json_number_value(json_array_get(list, i));
    return numbers;
}

static json_t *run_share(const json_t *request) {
    const json_t *list = json_object_get(request, "weights");
    uint32_t count = (uint32_t)json_array_size(list), *out = check(malloc(count * sizeof *out + 1));
    double *weights = read_numbers(list);
    budget_share_out(
        weights, count, (uint64_t)json_integer_value(json_object_get(request, "total")), read_u32(request, "cap"), out);
    json_t *shares = write_list(out, count);
    free(weights);
    free(out);
    return shares;
}

static json_t *run_allocate(const json_t *request) {
    struct policy_settings settings = read_policy(request);
    const json_t *gates = json_object_get(request, "gates"), *preferences = json_object_get(request, "preferences");
    struct budget_input input = {.settings = &settings,
        .layers = read_u32(request, "layers"),
        .kv_heads = read_u32(request, "kv_heads"),
        .seen = read_u32(request, "seen")};
    size_t heads = (size_t)input.layers * input.kv_heads;
    double *numbers = read_numbers(preferences);
    float *values = check(malloc(heads * sizeof *values + 1));
    for (size_t i = 0; i < heads; i++)
        values[i] = (float)json_number_value(json_array_get(gates, i));
    input.layer_preferences = json_is_array(preferences) ? numbers : NULL;
    input.gates = json_is_array(gates) ? values : NULL;
    uint32_t *budgets = check(malloc(heads * sizeof *budgets + 1));
    budget_allocate(&input, budgets);
    json_t *out = write_list(budgets, heads);
    free(budgets);
    free(values);
    free(numbers);
    policy_settings_release(&settings);
    return out;
}

static json_t *run_protect(const json_t *request) {
    struct policy_settings settings = read_policy(request);
    uint32_t bounds[2];
    policy_protection(&settings, read_u32(request, "seen"), read_u32(request, "budget"), &bounds[0], &bounds[1]);
    policy_settings_release(&settings);
    return write_list(bounds, 2);
}

static json_t *write_options(const struct policy *policy, bool common) {
    json_t *options = json_object();
    struct policy_settings settings;
    policy_settings_default(policy, &settings);
    for (uint32_t i = 0; i < policy_options_count(); i++) {
        char value[64];
        policy_option_value(i, &settings, value, sizeof value);
        if (policy_option_common(i) == common && policy_option_applies(i, policy))
            json_object_set_new(options, policy_option_name(i), json_string(value));
    }
    return options;
}

static json_t *write_policy(const struct policy *policy) {
    return json_pack("{s:s, s:s, s:b, s:o, s:o}", "name", policy->name, "source", policy->source, "shared",
        (int)policy->shared, "common", write_options(policy, true), "options", write_options(policy, false));
}

static json_t *write_table(void) {
    json_t *policies = json_array(), *options = json_array();
    for (uint32_t i = 0; i < policy_count(); i++)
        json_array_append_new(policies, write_policy(policy_at(i)));
    for (uint32_t i = 0; i < policy_options_count(); i++) {
        char text[128];
        policy_option_allowed(i, text, sizeof text);
        json_array_append_new(options, json_pack("{s:s, s:s, s:s}", "name", policy_option_name(i), "allowed", text,
                                           "help", policy_option_help(i)));
    }
    return json_pack("{s:o, s:o}", "policies", policies, "options", options);
}

static json_t *run(const json_t *request, struct select_scratch *scratch) {
    const char *operation = json_string_value(json_object_get(request, "op"));
    if (operation == NULL)
        return NULL;
    if (strcmp(operation, "select") == 0)
        return run_select(request, scratch);
    if (strcmp(operation, "share") == 0)
        return run_share(request);
    if (strcmp(operation, "allocate") == 0)
        return run_allocate(request);
    if (strcmp(operation, "protect") == 0)
        return run_protect(request);
    return strcmp(operation, "table") == 0 ? write_table() : NULL;
}

int main(void) {
    struct select_scratch scratch = {0};
    char *line = NULL;
    size_t capacity = 0;
    int code = 0;
    while (code == 0 && getline(&line, &capacity, stdin) > 0) {
        json_t *request = json_loads(line, 0, NULL), *reply = run(request, &scratch);
        code = reply == NULL || json_dumpf(reply, stdout, JSON_COMPACT) != 0;
        putchar('\n');
        json_decref(reply);
        json_decref(request);
    }
    free(line);
    select_scratch_free(&scratch);
    return code;
}
