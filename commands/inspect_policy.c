/* SPDX-License-Identifier: Apache-2.0 */
#include "commands/inspect_policy.h"

#include "policy/network.h"

#include <string.h>
#include <sys/stat.h>

enum { MAGIC_SIZE = 9 };

bool inspect_policy_is_file(const char *path) {
    char start[MAGIC_SIZE];
    struct stat status;
    FILE *file = stat(path, &status) == 0 && S_ISREG(status.st_mode) ? fopen(path, "rb") : NULL;
    if (file == NULL)
        return false;
    size_t count = fread(start, 1, sizeof start, file);
    fclose(file);
    return count == sizeof start && memcmp(start, "GGUF", 4) != 0 && start[MAGIC_SIZE - 1] == '{';
}

/* ---- the document ---- */

static json_t *text_or_null(const char *text) {
    return text != NULL && text[0] != '\0' ? json_string(text) : json_null();
}

static json_t *list_inputs(const struct network_shape *shape) {
    enum network_input list[INPUT_KINDS];
    json_t *inputs = json_array();
    uint32_t count = network_inputs_list(shape, list);
    int failed = shape->content > 0 ? json_array_append_new(inputs, json_string("content")) : 0;
    for (uint32_t i = 0; i < count; i++)
        failed |= json_array_append_new(inputs, json_string(network_input_name(list[i])));
    if (!failed)
        return inputs;
    json_decref(inputs);
    return NULL;
}

/* Numbers as they were written: a float has about 7 digits. */
static json_t *list_layers(const struct policy_network *network, const float *numbers) {
    json_t *list = json_array();
    int failed = 0;
    for (uint32_t layer = 0; layer < network->shape.layers; layer++)
        failed |= json_array_append_new(list, json_real((double)numbers[layer]));
    if (!failed)
        return list;
    json_decref(list);
    return NULL;
}

static json_t *describe_tensor(const struct network_array *array) {
    json_t *shape = json_array();
    int failed = 0;
    for (int i = 0; i < 3 && array->dimensions[i] != 0; i++)
        failed |= json_array_append_new(shape, json_integer(array->dimensions[i]));
    if (!failed)
        return json_pack("{s:s, s:o, s:b}", "name", array->name, "shape", shape, "trained", (int)array->trained);
    json_decref(shape);
    return NULL;
}

static json_t *list_tensors(const struct policy_network *network) {
    json_t *list = json_array();
    struct network_array array;
    int failed = 0;
    for (uint32_t i = 0; network_array(network, i, &array); i++)
        failed |= json_array_append_new(list, describe_tensor(&array));
    if (!failed)
        return list;
    json_decref(list);
    return NULL;
}

static json_t *describe_defaults(const struct policy_network *network) {
    static const char *const scopes[] = {[SCOPE_HEAD] = "head", [SCOPE_LAYER] = "layer", [SCOPE_MODEL] = "model"};
    return json_pack("{s:s, s:f, s:I, s:b, s:I, s:I}", "scope", scopes[network->scope], "floor", (double)network->floor,
        "interval", (json_int_t)network->interval, "summary", (int)network->summary, "protect_recent",
        (json_int_t)network->protect_recent, "protect_sinks", (json_int_t)network->protect_sinks);
}

static json_t *describe(const struct policy_network *network, const char *path) {
    const struct network_shape *shape = &network->shape;
    json_t *sizes = json_pack("{s:I, s:I, s:I, s:I, s:I}", "layers", (json_int_t)shape->layers, "kv_heads",
        (json_int_t)shape->kv_heads, "head_dim", (json_int_t)shape->head_dim, "content", (json_int_t)shape->content,
        "hidden", (json_int_t)shape->hidden);
    json_t *name = json_string(path); /* NULL: a path that is no UTF-8 */
    return json_pack("{s:o, s:s, s:o, s:s, s:o, s:o, s:I, s:o, s:o, s:o, s:o, s:o, s:o, s:o, s:o}", "file",
        name != NULL ? name : json_null(), "kind", "policy", "method", text_or_null(network->method), "features",
        network_features_name(shape->features), "inputs", list_inputs(shape), "shape", sizes, "parameters",
        (json_int_t)network_parameters_count(network), "fingerprint", text_or_null(network->fingerprint), "defaults",
        describe_defaults(network), "layer_budgets", list_layers(network, network->layer_budgets),
        "layer_budget_slopes", list_layers(network, network->layer_budget_slopes), "summary_offsets",
        list_layers(network, network->summary_offsets), "summary_slopes", list_layers(network, network->summary_slopes),
        "record", json_loads(network->record, 0, NULL), "tensors", list_tensors(network));
}

json_t *inspect_policy_describe(const char *path, struct error *error) {
    struct policy_network *network = network_load(path, error);
    if (network == NULL)
        return NULL;
    json_t *document = describe(network, path);
    network_release(network);
    if (document == NULL)
        error_set(error, ERROR_MEMORY, "%.200s: no memory to describe the file", path);
    return document;
}

/* ---- as text ---- */

static void print_value(const json_t *value, FILE *out) {
    if (json_is_string(value)) {
        for (const char *at = json_string_value(value); *at != '\0'; at++)
            putc((unsigned char)*at < ' ' || *at == 0x7f ? '?' : *at, out);
    } else if (json_is_null(value)) {
        fputs("none", out);
    } else if (json_is_boolean(value)) {
        fputs(json_is_true(value) ? "yes" : "no", out);
    } else {
        json_dumpf(value, out, JSON_ENCODE_ANY | JSON_REAL_PRECISION(6));
    }
    putc('\n', out);
}

static void print_object(const char *title, const json_t *object, FILE *out) {
    const char *key;
    json_t *value;
    fprintf(out, "\n%s\n", title);
    json_object_foreach((json_t *)object, key, value) {
        fprintf(out, "  ");
        for (const char *at = key; *at != '\0'; at++)
            putc((unsigned char)*at < ' ' || *at == 0x7f ? '?' : *at, out);
        fprintf(out, "%*s", (int)(strlen(key) < 24 ? 25 - strlen(key) : 1), "");
        print_value(value, out);
    }
}

static void print_inputs(const json_t *inputs, FILE *out) {
    fprintf(out, "%-14s ", "inputs");
    for (size_t i = 0; i < json_array_size(inputs); i++)
        fprintf(out, "%s%s", i > 0 ? ", " : "", json_string_value(json_array_get(inputs, i)));
    putc('\n', out);
}

static void print_layers(const char *title, const json_t *numbers, FILE *out) {
    fprintf(out, "\n%s", title);
    for (size_t i = 0; i < json_array_size(numbers); i++)
        fprintf(out, "%s%.4g", i % 10 == 0 ? "\n  " : " ", json_real_value(json_array_get(numbers, i)));
    putc('\n', out);
}

void inspect_policy_print(const json_t *document, FILE *out) {
    static const char *const facts[] = {"file", "kind", "method", "features", "fingerprint", "parameters"};
    for (size_t i = 0; i < sizeof facts / sizeof facts[0]; i++) {
        fprintf(out, "%-14s ", facts[i]);
        print_value(json_object_get(document, facts[i]), out);
    }
    print_inputs(json_object_get(document, "inputs"), out);
    print_object("shape", json_object_get(document, "shape"), out);
    print_object("defaults", json_object_get(document, "defaults"), out);
    print_layers("layer budgets", json_object_get(document, "layer_budgets"), out);
    print_layers("their slopes by ln(4 B / L)", json_object_get(document, "layer_budget_slopes"), out);
    print_layers("summary slots' offsets", json_object_get(document, "summary_offsets"), out);
    print_layers("their slopes by ln(4 B / L)", json_object_get(document, "summary_slopes"), out);
    print_object("record", json_object_get(document, "record"), out);
}
