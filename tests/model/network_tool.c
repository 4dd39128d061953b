/* SPDX-License-Identifier: Apache-2.0
 *
 * Runs the network of a policy file on data from standard input, for tests/model/test_network.py. One JSON object a
 * line, one JSON value a line comes back:
 *   {"op": "load", "file"} -> {"error"} or {"method", "features", "inputs": [names], "content", "hidden", "layers",
 *       "kv_heads", "head_dim", "fingerprint", "scope", "floor", "interval", "summary", "protect_recent",
 *       "protect_sinks", "record", "arrays": {name: numbers}}
 *   {"op": "save", "file", "to"} -> null
 *   {"op": "create", "file", "features", "layers", "kv_heads", "head_dim", "fingerprint", "method", "seed"} -> null, a
 *       file of random numbers (tests/unit/tiny_network.h)
 *   {"op": "score", "file", "head", "seen", "budget", "positions", "sum", "squared", "entropy", "content",
 *       "value_norm", "output_norm": lists} -> {"inputs": [numbers], "standard": [6], "normalised", "scores"}
 *   {"op": "normalised", "file", "head", "inputs": [numbers]} -> {"scores"}
 *   {"op": "allocate", "file", "seen", "tokens", "summary"} -> [budget of each head]
 */
#include "policy/budget.h"
#include "policy/network.h"
#include "tests/unit/tiny_network.h"

#include <jansson.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static void *check(void *memory) {
    if (memory == NULL) {
        fputs("network_tool: no memory\n", stderr);
        exit(1);
    }
    return memory;
}

static const char *text_of(const json_t *request, const char *key) {
    return json_string_value(json_object_get(request, key));
}

static uint32_t read_u32(const json_t *request, const char *key) {
    return (uint32_t)json_integer_value(json_object_get(request, key));
}

static float *read_list(const json_t *request, const char *key) {
    const json_t *list = json_object_get(request, key);
    size_t count = json_array_size(list);
    float *values = check(malloc(count * sizeof *values + 1));
    for (size_t i = 0; i < count; i++)
        values[i] = (float)json_number_value(json_array_get(list, i));
    return values;
}

static json_t *write_list(const float *values, size_t count) {
    json_t *list = json_array();
    for (size_t i = 0; i < count; i++)
        json_array_append_new(list, json_real((double)values[i]));
    return list;
}

static json_t *describe(const struct policy_network *network) {
    const struct network_shape *shape = &network->shape;
    enum network_input list[INPUT_KINDS];
    json_t *inputs = json_array(), *arrays = json_object();
    uint32_t count = network_inputs_list(shape, list);
    struct network_array array;
    for (uint32_t i = 0; i < count; i++)
        json_array_append_new(inputs, json_string(network_input_name(list[i])));
    for (uint32_t i = 0; network_array(network, i, &array); i++)
        json_object_set_new(arrays, array.name, write_list(array.values, array.count));
    json_t *reply = json_pack("{s:s*, s:s, s:o, s:i, s:i, s:i, s:i, s:i, s:s}", "method", network->method, "features",
        network_features_name(shape->features), "inputs", inputs, "content", shape->content, "hidden", shape->hidden,
        "layers", shape->layers, "kv_heads", shape->kv_heads, "head_dim", shape->head_dim, "fingerprint",
        network->fingerprint);
    json_t *defaults = json_pack("{s:i, s:f, s:i, s:b, s:i, s:i, s:s, s:o}", "scope", (int)network->scope, "floor",
        (double)network->floor, "interval", network->interval, "summary", (int)network->summary, "protect_recent",
        network->protect_recent, "protect_sinks", network->protect_sinks, "record", network->record, "arrays", arrays);
    json_object_update(reply, defaults);
    json_decref(defaults);
    return reply;
}

static json_t *run_score(const struct policy_network *network, const json_t *request) {
    const struct network_shape *shape = &network->shape;
    const json_t *places = json_object_get(request, "positions");
    uint32_t count = (uint32_t)json_array_size(places), width = network_inputs_count(shape);
    uint32_t *positions = check(malloc(count * sizeof *positions + 1)), head = read_u32(request, "head");
    for (uint32_t i = 0; i < count; i++)
        positions[i] = (uint32_t)json_integer_value(json_array_get(places, i));
    float *lists[] = {read_list(request, "sum"), read_list(request, "squared"), read_list(request, "entropy"),
        read_list(request, "content"), read_list(request, "value_norm"), read_list(request, "output_norm")};
    struct network_slots slots = {.count = count,
        .seen = read_u32(request, "seen"),
        .budget = read_u32(request, "budget"),
        .positions = positions,
        .sum = lists[0],
        .squared = lists[1],
        .entropy = lists[2],
        .content = lists[3],
        .value_norm = lists[4],
        .output_norm = lists[5]};
    float *inputs = check(malloc((size_t)count * width * sizeof *inputs + 1)), standard[6] = {0};
    float *scores = check(malloc(count * sizeof *scores + 1));
    network_gather(shape, &slots, inputs);
    json_t *gathered = write_list(inputs, (size_t)count * width);
    network_standardise(shape, inputs, count, standard);
    network_normalise(network, head, standard, count, inputs);
    network_score(network, head, inputs, count, scores);
    json_t *reply = json_pack("{s:o, s:o, s:o, s:o}", "inputs", gathered, "standard", write_list(standard, 6),
        "normalised", write_list(inputs, (size_t)count * width), "scores", write_list(scores, count));
    for (size_t i = 0; i < sizeof lists / sizeof lists[0]; i++)
        free(lists[i]);
    free(positions);
    free(inputs);
    free(scores);
    return reply;
}

static json_t *run_normalised(const struct policy_network *network, const json_t *request) {
    uint32_t width = network_inputs_count(&network->shape);
    uint32_t count = (uint32_t)json_array_size(json_object_get(request, "inputs")) / width;
    float *inputs = read_list(request, "inputs"), *scores = check(malloc(count * sizeof *scores + 1));
    network_score(network, read_u32(request, "head"), inputs, count, scores);
    json_t *reply = json_pack("{s:o}", "scores", write_list(scores, count));
    free(inputs);
    free(scores);
    return reply;
}

static json_t *run_allocate(struct policy_network *network, const json_t *request) {
    struct policy_settings settings;
    uint32_t heads = network->shape.layers * network->shape.kv_heads;
    uint32_t *budgets = check(malloc(heads * sizeof *budgets));
    policy_settings_default(policy_find("distillcache"), &settings);
    settings.tokens = read_u32(request, "tokens");
    settings.summary = json_is_true(json_object_get(request, "summary"));
    settings.network = network;
    struct budget_input input = {.settings = &settings,
        .layers = network->shape.layers,
        .kv_heads = network->shape.kv_heads,
        .seen = read_u32(request, "seen")};
    budget_allocate(&input, budgets);
    json_t *reply = json_array();
    for (uint32_t i = 0; i < heads; i++)
        json_array_append_new(reply, json_integer(budgets[i]));
    free(budgets);
    return reply;
}

static json_t *run_with(struct policy_network *network, const char *operation, const json_t *request) {
    if (strcmp(operation, "load") == 0)
        return describe(network);
    if (strcmp(operation, "save") == 0)
        return network_save(network, text_of(request, "to"), NULL) == 0 ? json_null() : NULL;
    if (strcmp(operation, "score") == 0)
        return run_score(network, request);
    if (strcmp(operation, "normalised") == 0)
        return run_normalised(network, request);
    return strcmp(operation, "allocate") == 0 ? run_allocate(network, request) : NULL;
}

static json_t *run_create(const json_t *request) {
    bool paper = strcmp(text_of(request, "features"), "paper") == 0;
    struct network_shape shape = tiny_network_shape(paper ? FEATURES_PAPER : FEATURES_CONTENT,
        read_u32(request, "layers"), read_u32(request, "kv_heads"), read_u32(request, "head_dim"));
    struct policy_network *network = tiny_network_create(&shape, read_u32(request, "seed"));
    snprintf(network->fingerprint, sizeof network->fingerprint, "%s", text_of(request, "fingerprint"));
    free(network->method);
    network->method = strdup(text_of(request, "method"));
    int code = network_save(network, text_of(request, "file"), NULL);
    network_release(network);
    return code == 0 ? json_null() : NULL;
}

static json_t *run(const json_t *request) {
    struct error error;
    if (text_of(request, "op") == NULL || text_of(request, "file") == NULL)
        return NULL;
    if (strcmp(text_of(request, "op"), "create") == 0)
        return run_create(request);
    struct policy_network *network = network_load(text_of(request, "file"), &error);
    if (network == NULL)
        return json_pack("{s:s}", "error", error.message);
    json_t *reply = run_with(network, text_of(request, "op"), request);
    network_release(network);
    return reply;
}

int main(void) {
    char *line = NULL;
    size_t capacity = 0;
    int code = 0;
    while (code == 0 && getline(&line, &capacity, stdin) > 0) {
        json_t *request = json_loads(line, 0, NULL), *reply = run(request);
        code = reply == NULL || json_dumpf(reply, stdout, JSON_COMPACT | JSON_ENCODE_ANY) != 0;
        putchar('\n');
        json_decref(reply);
        json_decref(request);
    }
    free(line);
    return code;
}
