/* SPDX-License-Identifier: Apache-2.0 */
#include "mlp_case.h"

#include <setjmp.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

json_t *mlp_load(void) {
    char name[1024];
    snprintf(name, sizeof name, "%s/mlp.json", getenv("DISTILLCACHE_TEST_DATA"));
    json_t *root = json_load_file(name, 0, NULL);
    assert_non_null(root);
    return root;
}

uint32_t mlp_cases(const json_t *root) {
    return (uint32_t)json_array_size(json_object_get(root, "cases"));
}

static size_t count_numbers(const json_t *list) {
    size_t total = 0;
    if (!json_is_array(list))
        return 1;
    for (size_t i = 0; i < json_array_size(list); i++)
        total += count_numbers(json_array_get(list, i));
    return total;
}

static float *copy_numbers(const json_t *list, float *out) {
    if (!json_is_array(list)) {
        *out = (float)json_number_value(list);
        return out + 1;
    }
    for (size_t i = 0; i < json_array_size(list); i++)
        out = copy_numbers(json_array_get(list, i), out);
    return out;
}

float *mlp_numbers(const json_t *list, size_t *count) {
    *count = count_numbers(list);
    float *out = malloc((*count + 1) * sizeof *out);
    assert_non_null(out);
    copy_numbers(list, out);
    return out;
}

/* A network with any number of inputs, which network_create refuses to make: in one allocation, as those it makes. */
static struct policy_network *make_network(uint32_t features, uint32_t hidden) {
    size_t square = (size_t)hidden * hidden, numbers = square + (size_t)(features + 8) * hidden + features + 2;
    struct policy_network *network = calloc(1, sizeof *network + numbers * sizeof(float));
    assert_non_null(network);
    network->references = 1;
    network->record = strdup("{}");
    network->shape = (struct network_shape){.features = FEATURES_PAPER,
        .inputs = (1u << (features < INPUT_KINDS ? features : INPUT_KINDS)) - 1,
        .content = features < INPUT_KINDS ? 0 : features - INPUT_KINDS,
        .hidden = hidden,
        .layers = 1,
        .kv_heads = 1,
        .head_dim = 16};
    struct {
        float **array;
        size_t count;
    } parts[] = {{&network->w1, (size_t)features * hidden}, {&network->mlp_b1, hidden}, {&network->g1, hidden},
        {&network->o1, hidden}, {&network->w2, square}, {&network->mlp_b2, hidden}, {&network->g2, hidden},
        {&network->o2, hidden}, {&network->w3, hidden}, {&network->b3, 1}, {&network->mlp_skip, features},
        {&network->layer_budgets, 1}, {&network->layer_budget_slopes, 1}, {&network->summary_offsets, 1},
        {&network->summary_slopes, 1}};
    float *next = (float *)(network + 1);
    for (size_t i = 0; i < sizeof parts / sizeof *parts; i++) {
        *parts[i].array = next;
        next += parts[i].count;
    }
    return network;
}

struct mlp_case mlp_case_open(const json_t *root, uint32_t index) {
    const json_t *object = json_array_get(json_object_get(root, "cases"), index);
    struct mlp_case mlp = {.object = object, .name = json_string_value(json_object_get(object, "name"))};
    size_t inputs, scores, d_scores;
    mlp.network = make_network((uint32_t)json_integer_value(json_object_get(object, "features")),
        (uint32_t)json_integer_value(json_object_get(object, "hidden")));
    struct network_array array;
    for (uint32_t i = 0; network_array(mlp.network, i, &array); i++) {
        const json_t *list = json_object_get(json_object_get(object, "parameters"), array.name);
        if (list == NULL)
            continue;
        assert_int_equal(count_numbers(list), array.count);
        copy_numbers(list, array.values);
    }
    mlp.inputs = mlp_numbers(json_object_get(object, "x"), &inputs);
    mlp.scores = mlp_numbers(json_object_get(object, "scores"), &scores);
    mlp.d_scores = mlp_numbers(json_object_get(object, "score_gradient"), &d_scores);
    mlp.count = (uint32_t)scores;
    assert_int_equal(inputs, scores * network_inputs_count(&mlp.network->shape));
    assert_int_equal(d_scores, scores);
    return mlp;
}

void mlp_case_close(struct mlp_case *mlp) {
    network_release(mlp->network);
    free(mlp->inputs);
    free(mlp->scores);
    free(mlp->d_scores);
}
