/* SPDX-License-Identifier: Apache-2.0
 *
 * The optimiser against tests/data/mlp.json (schedule, gradient norm, parameters after three steps) and its definition.
 */
#include "policy/train/adamw.h"

#include "mlp_case.h"

#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

static double number(const json_t *object, const char *name) {
    const json_t *value = json_object_get(object, name);
    assert_true(json_is_number(value));
    return json_number_value(value);
}

static bool near(double a, double b, double relative) {
    return fabs(a - b) <= relative * fabs(b) + 1e-12;
}

static void test_schedule_of_the_fixture(void **state) {
    (void)state;
    json_t *root = mlp_load();
    const json_t *schedule = json_object_get(root, "schedule"), *rates = json_object_get(schedule, "rates");
    struct adamw_options options = {.peak = (float)number(schedule, "peak"),
        .final = (float)number(schedule, "floor"),
        .warmup = (uint32_t)number(schedule, "warmup"),
        .total = (uint32_t)number(schedule, "total")};
    uint64_t every = (uint64_t)number(schedule, "every");
    assert_true(json_array_size(rates) > 20);
    for (size_t i = 0; i < json_array_size(rates); i++)
        assert_true(near(adamw_rate(&options, i * every), json_number_value(json_array_get(rates, i)), 2e-6));
    assert_true(near(adamw_rate(&options, options.total + 1000), (double)options.final, 1e-6));
    json_decref(root);
}

/* The gradient of the case's scores; arrays that the case lacks have none. */
static void find_gradient(
    const struct mlp_case *mlp, struct network_pass *pass, float *scores, struct gradient *gradient) {
    struct train_slots slots = {.count = mlp->count, .inputs = mlp->inputs};
    struct network_array array;
    size_t offset = 0;
    gradient_clear(gradient);
    network_forward(mlp->network, 0, &slots, pass, scores);
    network_backward(mlp->network, 0, &slots, pass, mlp->d_scores, gradient);
    for (uint32_t i = 0; network_array(mlp->network, i, &array); i++) {
        if (!array.trained)
            continue;
        if (json_object_get(json_object_get(mlp->object, "parameters"), array.name) == NULL)
            memset(gradient->values + offset, 0, array.count * sizeof(float));
        offset += array.count;
    }
}

static void compare(const char *name, const char *what, const float *values, const json_t *list, size_t count) {
    size_t expected_count;
    float *expected = mlp_numbers(list, &expected_count);
    assert_int_equal(expected_count, count);
    for (size_t i = 0; i < count; i++)
        if (!(fabs((double)values[i] - (double)expected[i]) <= 5e-6 + 1e-5 * fabs((double)expected[i])))
            fail_msg("%s: %s[%zu] is %g, not %g", name, what, i, (double)values[i], (double)expected[i]);
    free(expected);
}

static void check_steps(const struct mlp_case *mlp) {
    const json_t *after = json_object_get(mlp->object, "after_steps"), *rates = json_object_get(after, "rates");
    struct adamw_options options = {.peak = (float)number(after, "peak"),
        .final = (float)number(after, "floor"),
        .warmup = (uint32_t)number(after, "warmup"),
        .total = (uint32_t)number(after, "total"),
        .beta1 = (float)number(after, "beta1"),
        .beta2 = (float)number(after, "beta2"),
        .epsilon = (float)number(after, "eps"),
        .decay = (float)number(after, "decay"),
        .clip = (float)number(after, "clip")};
    struct gradient *gradient = gradient_create(mlp->network);
    struct adamw *adamw = adamw_create(gradient->count);
    struct network_pass *pass = network_pass_create(&mlp->network->shape, mlp->count);
    float *scores = calloc(mlp->count, sizeof *scores);
    for (size_t step = 0; step < json_array_size(rates); step++) {
        assert_true(near(adamw_rate(&options, adamw->step), json_number_value(json_array_get(rates, step)), 1e-6));
        find_gradient(mlp, pass, scores, gradient);
        double norm = adamw_update(adamw, &options, gradient, mlp->network);
        if (step == 0)
            assert_true(near(norm, number(mlp->object, "gradient_norm"), 2e-6));
    }
    assert_int_equal(adamw->step, 3);
    struct network_array array;
    for (uint32_t i = 0; network_array(mlp->network, i, &array); i++) {
        const json_t *list = json_object_get(json_object_get(after, "parameters"), array.name);
        if (list != NULL)
            compare(mlp->name, array.name, array.values, list, array.count);
    }
    find_gradient(mlp, pass, scores, gradient);
    compare(mlp->name, "scores", scores, json_object_get(after, "scores"), mlp->count);
    free(scores);
    network_pass_free(pass);
    adamw_free(adamw);
    free(gradient);
}

static void test_three_steps_of_the_fixture(void **state) {
    (void)state;
    json_t *root = mlp_load();
    for (uint32_t i = 0; i < mlp_cases(root); i++) {
        struct mlp_case mlp = mlp_case_open(root, i);
        check_steps(&mlp);
        mlp_case_close(&mlp);
    }
    json_decref(root);
}

static struct policy_network *content_network(void) {
    struct error error = {0};
    struct network_shape shape = {.features = FEATURES_CONTENT,
        .inputs = 1 << INPUT_SUM | 1 << INPUT_AGE,
        .content = 2,
        .hidden = 3,
        .layers = 2,
        .kv_heads = 1,
        .head_dim = 4};
    struct policy_network *network = network_create(&shape, &error);
    assert_non_null(network);
    struct network_array array;
    for (uint32_t i = 0; network_array(network, i, &array); i++)
        for (size_t j = 0; j < array.count; j++)
            array.values[j] = 2;
    return network;
}

static const struct adamw_options plain = {
    .peak = 0.5f, .final = 0.5f, .beta1 = 0.9f, .beta2 = 0.999f, .epsilon = 1e-8f, .decay = 0.25f};

/* The first step moves each number by the rate against its gradient's sign; decay shrinks matrices alone. */
static void test_arrays_that_are_trained(void **state) {
    (void)state;
    struct policy_network *network = content_network();
    struct gradient *gradient = gradient_create(network);
    struct adamw *adamw = adamw_create(gradient->count);
    assert_int_equal(gradient->count, network_parameters_count(network));
    for (size_t i = 0; i < gradient->count; i++)
        gradient->values[i] = i % 2 ? 3 : -0.001f;
    adamw_update(adamw, &plain, gradient, network);
    struct network_array array;
    size_t offset = 0;
    for (uint32_t i = 0; network_array(network, i, &array); i++) {
        for (size_t j = 0; j < array.count; j++) {
            float kept = array.matrix ? 2 - 2 * 0.125f : 2;
            float expected = array.trained ? kept + ((offset + j) % 2 ? -0.5f : 0.5f) : 2;
            if (!(fabsf(array.values[j] - expected) < 1e-4f))
                fail_msg("%s[%zu] is %g, not %g", array.name, j, (double)array.values[j], (double)expected);
        }
        offset += array.trained ? array.count : 0;
    }
    adamw_free(adamw);
    free(gradient);
    network_release(network);
}

static void test_clipping(void **state) {
    (void)state;
    struct policy_network *network = content_network();
    struct gradient *gradient = gradient_create(network);
    struct adamw *adamw = adamw_create(gradient->count);
    struct adamw_options options = plain;
    const float limits[] = {0, 100, 1};
    for (size_t i = 0; i < 3; i++) {
        options.clip = limits[i];
        gradient_clear(gradient);
        gradient->values[0] = 3;
        gradient->values[5] = -4;
        assert_true(near(adamw_update(adamw, &options, gradient, network), 5, 1e-6));
        assert_true(near((double)gradient->values[5], i == 2 ? -0.8 : -4, 1e-6));
    }
    adamw_free(adamw);
    free(gradient);
    network_release(network);
}

static void test_gradients_that_are_no_numbers_change_nothing(void **state) {
    (void)state;
    struct policy_network *network = content_network(), *before = network_copy(network);
    struct gradient *gradient = gradient_create(network);
    struct adamw *adamw = adamw_create(gradient->count);
    const float bad[] = {NAN, INFINITY, -INFINITY};
    for (size_t i = 0; i < 3; i++) {
        gradient->values[1] = 1;
        gradient->values[2] = bad[i];
        assert_false(isfinite(adamw_update(adamw, &plain, gradient, network)));
        assert_int_equal(adamw->step, 0);
        assert_true(adamw->first[1] == 0 && adamw->second[1] == 0);
        assert_true(gradient->values[1] == 1);
    }
    struct network_array now, was;
    for (uint32_t i = 0; network_array(network, i, &now) && network_array(before, i, &was); i++)
        assert_memory_equal(now.values, was.values, now.count * sizeof(float));
    adamw_free(adamw);
    adamw_free(NULL);
    free(gradient);
    network_release(before);
    network_release(network);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_schedule_of_the_fixture),
        cmocka_unit_test(test_three_steps_of_the_fixture),
        cmocka_unit_test(test_arrays_that_are_trained),
        cmocka_unit_test(test_clipping),
        cmocka_unit_test(test_gradients_that_are_no_numbers_change_nothing),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
