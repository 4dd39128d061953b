/* SPDX-License-Identifier: Apache-2.0
 *
 * The network: shapes, arrays, copies, inputs and scores worked out by hand. tests/model/test_network.py compares
 * inputs and scores with NumPy, on random networks.
 */
#include "policy/network.h"

#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

static const struct network_shape plain = {
    .features = FEATURES_CONTENT,
    .inputs = (1u << INPUT_KINDS) - 1,
    .content = 4,
    .hidden = 8,
    .layers = 3,
    .kv_heads = 2,
    .head_dim = 16,
};

static const struct network_shape paper = {
    .features = FEATURES_PAPER,
    .inputs = 1 << INPUT_MEAN | 1 << INPUT_VALUE_NORM | 1 << INPUT_DEVIATION | 1 << INPUT_ENTROPY | 1 << INPUT_POSITION,
    .hidden = 8,
    .layers = 3,
    .kv_heads = 2,
    .head_dim = 16,
};

/* Different numbers everywhere. */
static void fill(struct policy_network *network) {
    struct network_array array;
    uint32_t state = 1;
    for (uint32_t i = 0; network_array(network, i, &array); i++)
        for (size_t j = 0; j < array.count; j++) {
            state = state * 1664525 + 1013904223;
            array.values[j] = (float)(state >> 8) / (1 << 24);
        }
}

static struct policy_network *make(const struct network_shape *shape) {
    struct error error;
    struct policy_network *network = network_create(shape, &error);
    if (network == NULL)
        fail_msg("%s", error.message);
    fill(network);
    memset(network->fingerprint, 'a', 64);
    network->method = strdup("distillcache");
    free(network->record);
    network->record = strdup("{\"steps\": 100}");
    network->scope = SCOPE_MODEL;
    network->floor = 0.3f;
    network->interval = 5;
    network->summary = false;
    network->protect_recent = 7;
    network->protect_sinks = 1 << 30;
    return network;
}

static void expect_same(const struct policy_network *a, const struct policy_network *b) {
    struct network_array x, y;
    assert_memory_equal(&a->shape, &b->shape, sizeof a->shape);
    for (uint32_t i = 0; network_array(a, i, &x); i++) {
        assert_true(network_array(b, i, &y));
        assert_ptr_not_equal(x.values, y.values);
        assert_memory_equal(x.values, y.values, x.count * sizeof x.values[0]);
    }
    assert_int_equal(a->scope, b->scope);
    assert_true(a->floor == b->floor);
    assert_int_equal(a->interval, b->interval);
    assert_int_equal(a->summary, b->summary);
    assert_int_equal(a->protect_recent, b->protect_recent);
    assert_int_equal(a->protect_sinks, b->protect_sinks);
    assert_string_equal(a->fingerprint, b->fingerprint);
    assert_string_equal(a->method, b->method);
    assert_string_equal(a->record, b->record);
}

/* ---- memory ---- */

static void test_create(void **state) {
    (void)state;
    struct policy_network *network = network_create(&plain, NULL);
    assert_non_null(network);
    assert_int_equal(network->references, 1);
    assert_int_equal(network->scope, SCOPE_LAYER);
    assert_true(network->floor == 0.75f && network->interval == 16 && network->summary);
    assert_null(network->method);
    assert_string_equal(network->record, "{}");
    struct network_array array;
    for (uint32_t i = 0; network_array(network, i, &array); i++) {
        bool one = strcmp(array.name, "scale") == 0 || strcmp(array.name, "layer_budgets") == 0;
        for (size_t j = 0; j < array.count; j++)
            assert_true(array.values[j] == (one ? 1.0f : 0.0f));
    }
    assert_ptr_equal(network_take(network), network);
    assert_int_equal(network->references, 2);
    network_release(network);
    network_release(network);
    network_release(NULL);
}

static void test_arrays(void **state) {
    (void)state;
    struct policy_network *network = make(&plain), *other = make(&paper);
    const size_t heads = 6, inputs = 16;
    assert_int_equal(network_inputs_count(&plain), inputs);
    assert_int_equal(network_inputs_count(&paper), 5);
    assert_int_equal(
        network_parameters_count(network), heads * 4 * 16 + heads * 4 + 8 * inputs + heads * 8 + 8 + heads * inputs);
    assert_int_equal(network_parameters_count(other), 8 * 5 + 3 * 8 + 8 * 8 + 3 * 8 + 8 + 1 + 5);
    struct network_array array;
    assert_true(network_array(network, 0, &array));
    assert_string_equal(array.name, "content");
    assert_ptr_equal(array.values, network->content);
    assert_true(array.trained && array.matrix);
    assert_int_equal(array.dimensions[0], heads);
    assert_int_equal(array.dimensions[2], 16);
    assert_false(network_array(network, 12, &array));
    assert_false(network_array(other, 15, &array));
    assert_null(other->content);
    assert_null(network->mlp_b1);
    network_release(network);
    network_release(other);
}

static void test_copy(void **state) {
    (void)state;
    struct policy_network *network = make(&plain), *copy = network_copy(network);
    assert_non_null(copy);
    expect_same(network, copy);
    assert_true(network_digest(network) == network_digest(copy));
    network->w1[0] += 1;
    assert_true(network->w1[0] != copy->w1[0]);
    assert_true(network_digest(network) != network_digest(copy));
    network->w1[0] = copy->w1[0];
    network->interval++;
    assert_true(network_digest(network) != network_digest(copy));
    network_release(network);
    assert_int_equal(copy->references, 1);
    network_release(copy);
}

/* ---- for another model ---- */

/* Statistics alone, 2 layers of 2 heads, into 4 layers of one: depths 1/4 and 3/4 into 1/8, 3/8, 5/8 and 7/8. */
static void test_carry(void **state) {
    (void)state;
    struct error error = {0};
    struct network_shape shape = plain;
    shape.content = 0;
    shape.layers = 2;
    struct policy_network *network = make(&shape);
    const struct policy_model model = {.fingerprint = "b", .layers = 4, .kv_heads = 1, .head_dim = 256};
    struct policy_network *carried = network_carry(network, NULL, 0, &model, &error);
    assert_non_null(carried);
    assert_int_equal(carried->shape.layers, 4);
    assert_int_equal(carried->shape.kv_heads, 1);
    assert_int_equal(carried->shape.head_dim, 256);
    const float second[] = {0, 0.25f, 0.75f, 1}; /* part of the second layer */
    uint32_t inputs = network_inputs_count(&shape);
    const struct {
        const float *from, *to;
        uint32_t width;
    } arrays[] = {{network->mean, carried->mean, inputs}, {network->scale, carried->scale, inputs},
        {network->skip, carried->skip, inputs}, {network->b1, carried->b1, shape.hidden}};
    for (uint32_t a = 0; a < 4; a++)
        for (uint32_t layer = 0; layer < 4; layer++)
            for (uint32_t i = 0; i < arrays[a].width; i++) {
                const float *x = arrays[a].from + i;
                uint32_t width = arrays[a].width;
                float low = (x[0] + x[width]) / 2, high = (x[2 * width] + x[3 * width]) / 2;
                float want = low + second[layer] * (high - low), got = arrays[a].to[layer * width + i];
                assert_true(fabsf(got - want) < 1e-6f);
            }
    for (uint32_t layer = 0; layer < 4; layer++) {
        float want =
            network->layer_budgets[0] + second[layer] * (network->layer_budgets[1] - network->layer_budgets[0]);
        assert_true(fabsf(carried->layer_budgets[layer] - want) < 1e-6f);
    }
    assert_memory_equal(carried->w1, network->w1, (size_t)shape.hidden * inputs * sizeof(float));
    assert_memory_equal(carried->w2, network->w2, shape.hidden * sizeof(float));
    assert_string_equal(carried->fingerprint, network->fingerprint);
    assert_string_equal(carried->record, network->record);
    network_release(carried);
    network_release(network);
}

/* Of the same shape nothing changes, but for layers that are not of the source: they lie between its own. */
static void test_carry_layers(void **state) {
    (void)state;
    struct error error = {0};
    struct network_shape shape = plain;
    shape.content = 0;
    shape.layers = 5;
    struct policy_network *network = make(&shape);
    const struct policy_model model = {
        .fingerprint = "b", .layers = 5, .kv_heads = shape.kv_heads, .head_dim = shape.head_dim};
    struct policy_network *carried = network_carry(network, NULL, 0, &model, &error);
    assert_non_null(carried);
    expect_same(network, carried);
    network_release(carried);
    carried = network_carry(network, (const uint32_t[]){1, 3}, 2, &model, &error);
    assert_non_null(carried);
    size_t row = network_inputs_count(&shape), layer = row * shape.kv_heads;
    assert_memory_equal(carried->skip, network->skip + layer, layer * sizeof(float));
    assert_memory_equal(carried->skip + layer, network->skip + layer, layer * sizeof(float));
    assert_memory_equal(carried->skip + 3 * layer, network->skip + 3 * layer, layer * sizeof(float));
    assert_memory_equal(carried->skip + 4 * layer, network->skip + 3 * layer, layer * sizeof(float));
    for (size_t i = 0; i < row; i++) {
        const float *one = network->skip + layer + i, *three = network->skip + 3 * layer + i;
        float want = (one[0] + one[row] + three[0] + three[row]) / 4;
        assert_true(fabsf(carried->skip[2 * layer + i] - want) < 1e-6f);
        assert_true(fabsf(carried->skip[2 * layer + row + i] - want) < 1e-6f);
    }
    assert_true(
        fabsf(carried->summary_offsets[2] - (network->summary_offsets[1] + network->summary_offsets[3]) / 2) < 1e-6f);
    network_release(carried);
    network_release(network);
}

/* The paper's features have nothing of a head's own; keys are read by one model alone; and shapes have limits. */
static void test_carry_features(void **state) {
    (void)state;
    struct error error = {0};
    struct policy_network *network = make(&paper);
    struct policy_model model = {.fingerprint = "b", .layers = 1, .kv_heads = 5, .head_dim = 64};
    struct policy_network *carried = network_carry(network, NULL, 0, &model, &error);
    assert_non_null(carried);
    struct network_array x, y;
    for (uint32_t i = 0; network_array(network, i, &x) && network_array(carried, i, &y); i++)
        if (strncmp(x.name, "layer", 5) != 0 && strncmp(x.name, "summary", 7) != 0)
            assert_memory_equal(x.values, y.values, x.count * sizeof x.values[0]);
    assert_true(carried->layer_budgets[0] == network->layer_budgets[1]); /* the middle one of three */
    network_release(carried);
    model.layers = 0;
    assert_null(network_carry(network, NULL, 0, &model, &error));
    assert_int_equal(error.code, ERROR_INVALID);
    model.layers = 1;
    network_release(network);
    network = make(&plain);
    assert_null(network_carry(network, NULL, 0, &model, &error));
    assert_int_equal(error.code, ERROR_UNSUPPORTED);
    assert_non_null(strstr(error.message, "3 layers of 2 KV heads of width 16, this model has 1 of 5 of 64"));
    network_release(network);
}

static void refuse_shape(struct network_shape shape, const char *words) {
    struct error error = {0};
    assert_null(network_create(&shape, &error));
    assert_int_equal(error.code, ERROR_INVALID);
    if (strstr(error.message, words) == NULL)
        fail_msg("\"%s\" does not say %s", error.message, words);
}

static void test_shapes(void **state) {
    (void)state;
    struct network_shape shape = plain;
    shape.content = NETWORK_CONTENT_MAX + 1;
    refuse_shape(shape, "content");
    shape = plain;
    shape.hidden = 0;
    refuse_shape(shape, "hidden is 0");
    shape.hidden = NETWORK_HIDDEN_MAX + 1;
    refuse_shape(shape, "hidden is 257");
    shape = plain;
    shape.layers = 0;
    refuse_shape(shape, "layers");
    shape = plain;
    shape.kv_heads = UINT32_MAX;
    refuse_shape(shape, "kv_heads");
    shape = plain;
    shape.head_dim = 1025;
    refuse_shape(shape, "head_dim");
    shape = plain;
    shape.inputs = 0;
    shape.content = 0;
    refuse_shape(shape, "inputs");
    shape = plain;
    shape.inputs = 1u << INPUT_KINDS;
    refuse_shape(shape, "inputs");
    shape = paper;
    shape.content = 1;
    refuse_shape(shape, "content");
    shape = paper;
    shape.inputs |= 1 << INPUT_AGE;
    refuse_shape(shape, "inputs");
    shape = plain;
    shape.layers = shape.kv_heads = shape.head_dim = 1024;
    shape.content = 16;
    refuse_shape(shape, "numbers");
    shape = plain;
    shape.features = (enum network_features)2;
    refuse_shape(shape, "features");
}

static void test_needs(void **state) {
    (void)state;
    struct network_shape shape = plain;
    assert_int_equal(network_needs(&plain), STATISTIC_SUM | STATISTIC_SQUARED | STATISTIC_ENTROPY | STATISTIC_CONTENT);
    assert_int_equal(network_needs(&paper),
        STATISTIC_SUM | STATISTIC_SQUARED | STATISTIC_ENTROPY | STATISTIC_CONTENT | STATISTIC_STANDARD);
    shape.content = 0;
    shape.inputs = 1 << INPUT_POSITION | 1 << INPUT_RECENT_8;
    assert_int_equal(network_needs(&shape), 0);
    shape.inputs = 1 << INPUT_MEAN;
    assert_int_equal(network_needs(&shape), STATISTIC_SUM);
    shape.inputs = 1 << INPUT_OUTPUT_NORM;
    assert_int_equal(network_needs(&shape), STATISTIC_CONTENT);
    shape = paper;
    shape.inputs = 1 << INPUT_POSITION;
    assert_int_equal(network_needs(&shape), 0);
}

/* ---- inputs and scores ---- */

static void expect_close(float value, double expected) {
    if (!(fabs((double)value - expected) <= 1e-5 * fmax(1, fabs(expected))))
        fail_msg("%.9g, not %.9g", (double)value, expected);
}

/* Two slots of 100 tokens, budget 40: an old one, and the newest. */
static const struct network_slots two = {
    .count = 2,
    .seen = 100,
    .budget = 40,
    .positions = (const uint32_t[]){20, 99},
    .sum = (const float[]){8, 0.5f},
    .squared = (const float[]){2, 0.25f},
    .entropy = (const float[]){1.5f, 3},
    .content = (const float[]){1, 2, 3, 4, 5, 6, 7, 8},
    .value_norm = (const float[]){-0.5f, 0.25f},
    .output_norm = (const float[]){1.25f, -2},
};

static void test_gather_content(void **state) {
    (void)state;
    float inputs[2 * 16];
    network_gather(&plain, &two, inputs);
    const double deviation = sqrt(2 / 80.0 - 0.01);
    const double first[] = {1, 2, 3, 4, log(8 + 1e-6), log(10 + 1e-6), log(100 * deviation + 1e-6), 1.5 / log(22), -0.5,
        1.25, 0.2, log(80) / 6, log(0.4) + 1.5, 0, 0, 0};
    const double second[] = {5, 6, 7, 8, log(0.5 + 1e-6), log(50 + 1e-6), log(1e-6), 3 / log(101), 0.25, -2, 0.99, 0,
        log(0.4) + 1.5, 1, 1, 1};
    for (int f = 0; f < 16; f++) {
        expect_close(inputs[f], first[f]);
        expect_close(inputs[16 + f], second[f]);
    }
}

/* age < B / 8: 40 / 8 is 5, and 39 / 8 is 4.875. */
static void test_recency(void **state) {
    (void)state;
    const struct network_shape shape = {.inputs = 1 << INPUT_RECENT_8 | 1 << INPUT_RECENT_4 | 1 << INPUT_RECENT_2,
        .hidden = 1,
        .layers = 1,
        .kv_heads = 1,
        .head_dim = 1};
    const uint32_t positions[] = {95, 94, 79, 80, 90};
    struct network_slots slots = {.count = 5, .seen = 100, .budget = 40, .positions = positions};
    float inputs[15];
    network_gather(&shape, &slots, inputs); /* ages 4, 5, 20, 19, 9 */
    const float by_40[] = {1, 1, 1, 0, 1, 1, 0, 0, 0, 0, 0, 1, 0, 1, 1};
    assert_memory_equal(inputs, by_40, sizeof inputs);
    slots.budget = 36; /* 4.5, 9, 18 */
    network_gather(&shape, &slots, inputs);
    const float by_36[] = {1, 1, 1, 0, 1, 1, 0, 0, 0, 0, 0, 0, 0, 0, 1};
    assert_memory_equal(inputs, by_36, sizeof inputs);
}

static void test_gather_paper(void **state) {
    (void)state;
    struct policy_network *network = make(&paper);
    float inputs[2 * 5], standard[6];
    network_gather(&paper, &two, inputs);
    const double first[] = {log(0.1 + 1e-6), -0.5, log(sqrt(2 / 80.0 - 0.01) + 1e-6), 1.5 / log(100), 0.2};
    const double second[] = {log(0.5 + 1e-6), 0.25, log(1e-6), 3 / log(100), 0.99};
    for (int f = 0; f < 5; f++) {
        expect_close(inputs[f], first[f]);
        expect_close(inputs[5 + f], second[f]);
    }
    network_standardise(&paper, inputs, 2, standard);
    for (int f = 0; f < 3; f++) {
        expect_close(standard[2 * f], (first[f] + second[f]) / 2);
        expect_close(standard[2 * f + 1], 1 / (fabs(first[f] - second[f]) / 2 + 1e-6));
    }
    standard[3] = 1e6f; /* clamped */
    network_normalise(network, 0, standard, 2, inputs);
    const double normal[] = {-1, -8, 1, 2 * 1.5 / log(100) - 1, -0.6};
    for (int f = 0; f < 5; f++)
        expect_close(inputs[f], normal[f]);
    assert_true(inputs[6] == 8);
    network_release(network);
}

/* The paper's inputs one may leave out: those that stay are standardised in order. */
static void test_paper_subset(void **state) {
    (void)state;
    struct network_shape shape = paper;
    shape.inputs = 1 << INPUT_DEVIATION | 1 << INPUT_POSITION;
    struct policy_network *network = make(&shape);
    float inputs[4], standard[6];
    network_gather(&shape, &two, inputs);
    network_standardise(&shape, inputs, 2, standard);
    assert_true(standard[1] > 0 && standard[2] == 0 && standard[3] == 0 && standard[5] == 0);
    network_normalise(network, 0, standard, 2, inputs);
    expect_close(inputs[0], 1);
    expect_close(inputs[1], -0.6);
    network_release(network);
}

static void test_normalise_and_score(void **state) {
    (void)state;
    const struct network_shape shape = {.features = FEATURES_CONTENT,
        .inputs = 1 << INPUT_SUM | 1 << INPUT_POSITION,
        .hidden = 2,
        .layers = 1,
        .kv_heads = 2,
        .head_dim = 4};
    struct policy_network *network = network_create(&shape, NULL);
    float inputs[] = {3, 0.5f, 100, -100}, scores[2];
    /* Head 1: (x - 1) * 2 and (x - 0) * 1. */
    network->mean[2] = 1;
    network->scale[2] = 2;
    network_normalise(network, 1, NULL, 2, inputs);
    const float normal[] = {4, 0.5f, 6, -6};
    assert_memory_equal(inputs, normal, sizeof normal);
    memcpy(network->w1, (const float[]){1, 2, -1, 0}, 4 * sizeof(float));
    memcpy(network->b1 + 2, (const float[]){0.5f, 1}, 2 * sizeof(float));
    memcpy(network->w2, (const float[]){2, 3}, 2 * sizeof(float));
    memcpy(network->skip + 2, (const float[]){0.25f, 10}, 2 * sizeof(float));
    network_score(network, 1, inputs, 2, scores);
    assert_true(scores[0] == 2 * 5.5f + 0 + 1 + 5);
    assert_true(scores[1] == 0 + 0 + 1.5f - 60);
    network_score(network, 0, inputs, 2, scores);
    assert_true(scores[0] == 2 * 5);
    inputs[0] = NAN;
    network_score(network, 1, inputs, 2, scores);
    assert_true(isnan(scores[0]) && !isnan(scores[1]));
    network_release(network);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_create),
        cmocka_unit_test(test_arrays),
        cmocka_unit_test(test_copy),
        cmocka_unit_test(test_carry),
        cmocka_unit_test(test_carry_layers),
        cmocka_unit_test(test_carry_features),
        cmocka_unit_test(test_shapes),
        cmocka_unit_test(test_needs),
        cmocka_unit_test(test_gather_content),
        cmocka_unit_test(test_recency),
        cmocka_unit_test(test_gather_paper),
        cmocka_unit_test(test_paper_subset),
        cmocka_unit_test(test_normalise_and_score),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
