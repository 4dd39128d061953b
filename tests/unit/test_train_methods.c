/* SPDX-License-Identifier: Apache-2.0
 *
 * What the methods foresight and rlkv add: the pairwise loss and its gradient, steps of low entropy, gates and their
 * file, a toy in which one head needs its cache; and which options do not go together.
 */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "engine/random.h"
#include "policy/train/adamw.h"
#include "policy/train/foresight.h"
#include "policy/train/rlkv.h"
#include "tests/unit/tiny_network.h"

enum { SLOTS = 9, RECENT = 2, BUDGET = 5, HEADS = 4 };

static const float targets[SLOTS] = {3, 0.1f, 0.2f, 5, 0, 0.3f, 4, 9, 9};

static double hinge(const float *scores, uint64_t step, float *gradient) {
    struct foresight_pairs pairs = {7, step, 3};
    double work[SLOTS];
    uint32_t order[SLOTS];
    return foresight_hinge(scores, targets, SLOTS, BUDGET, RECENT, &pairs, 2, gradient, work, order);
}

/* Slots 0, 3 and 6 are to stay beside the two most recent ones. */
static void test_hinge(void **state) {
    (void)state;
    float scores[SLOTS], gradient[SLOTS] = {0};
    for (uint32_t i = 0; i < SLOTS; i++)
        scores[i] = (float)(i * 5 % 7) / 8;
    double loss = 0;
    for (uint64_t step = 0; step < 20; step++)
        loss += hinge(scores, step, gradient);
    assert_true(loss > 0);
    for (uint32_t i = 0; i < SLOTS; i++) {
        float moved[SLOTS], unused[SLOTS];
        double difference = 0;
        for (int side = 0; side < 2; side++) {
            memcpy(moved, scores, sizeof scores);
            moved[i] += side == 0 ? 0x1p-10f : -0x1p-10f;
            for (uint64_t step = 0; step < 20; step++)
                difference += (side == 0 ? 1 : -1) * hinge(moved, step, unused);
        }
        assert_true(fabs(2 * difference / 0x1p-9 - (double)gradient[i]) < 1e-3);
        bool stays = i == 0 || i == 3 || i == 6;
        assert_true(i >= SLOTS - RECENT ? gradient[i] == 0 : stays ? gradient[i] < 0 : gradient[i] > 0);
    }
    for (uint32_t i = 0; i < SLOTS; i++) /* far enough apart */
        scores[i] = i == 0 || i == 3 || i == 6 ? 2 : 0.5f;
    assert_true(hinge(scores, 1, gradient) == 0);
}

static void test_low_entropy(void **state) {
    (void)state;
    static const float entropies[] = {0, 2, 0.5f, 3, 1, 0.1f};
    bool low[6];
    float work[6];
    static const bool expected[6] = {false, false, true, false, true, true}; /* the median is 1 */
    foresight_low_entropy(entropies, 6, low, work);
    assert_memory_equal(low, expected, sizeof low);
    foresight_low_entropy(entropies, 1, low, work);
    assert_false(low[0]);
}

/* ---- rlkv ---- */

static struct policy_network *create_gates(void) {
    struct network_shape shape = {.features = FEATURES_CONTENT,
        .inputs = 1 << INPUT_SUM,
        .hidden = 1,
        .layers = 2,
        .kv_heads = HEADS / 2,
        .head_dim = 8};
    struct policy_network *network = network_create(&shape, NULL);
    assert_non_null(network);
    return network;
}

/* Mean over the students of advantage * (m - g), less the penalty's slope; it descends. */
static void test_gradient(void **state) {
    (void)state;
    struct policy_network *network = create_gates();
    static const uint8_t masks[2][HEADS] = {{1, 0, 1, 0}, {0, 0, 1, 1}};
    static const double rewards[2] = {3, 1}; /* advantages 1 and -1 */
    float gradient[HEADS] = {0};
    network->skip[1] = (float)log(3); /* g = 0.75 */
    rlkv_gradient(network, masks[0], rewards, 2, 0.4, gradient);
    static const double expected[HEADS] = {-0.5 + 0.1, 0.4 * 0.75 * 0.25, 0.1, 0.5 + 0.1};
    for (uint32_t h = 0; h < HEADS; h++)
        assert_true(fabs((double)gradient[h] - expected[h]) < 1e-5);
    network_release(network);
}

/* Head 2 needs its cache, the others gain nothing by theirs. */
static void test_toy(void **state) {
    (void)state;
    enum { STEPS = 300, STUDENTS = 4 };
    for (uint64_t seed = 1; seed <= 3; seed++) {
        struct policy_network *network = create_gates();
        struct adamw *adamw = adamw_create(network_parameters_count(network));
        struct gradient *gradient = gradient_create(network);
        struct adamw_options options = {
            .peak = 0.05f, .total = STEPS, .beta1 = 0.9f, .beta2 = 0.999f, .epsilon = 1e-8f, .clip = 1};
        size_t at = 0;
        struct network_array array;
        for (uint32_t i = 0; network_array(network, i, &array) && array.values != network->skip; i++)
            at += array.trained ? array.count : 0;
        for (uint32_t step = 0; step < STEPS; step++) {
            uint8_t masks[STUDENTS][HEADS];
            double rewards[STUDENTS];
            for (uint32_t s = 0; s < STUDENTS; s++) {
                for (uint32_t h = 0; h < HEADS; h++)
                    masks[s][h] = (double)random_uniform(seed, s, step, h) < rlkv_gate(network, h);
                rewards[s] = masks[s][2] + 0.3 * (double)random_uniform(seed, 100 + s, step, 0);
            }
            gradient_clear(gradient);
            rlkv_gradient(network, masks[0], rewards, STUDENTS, 0.2, gradient->values + at);
            adamw_update(adamw, &options, gradient, network);
        }
        for (uint32_t h = 0; h < HEADS; h++) {
            double gate = rlkv_gate(network, h);
            if (h == 2 ? gate < 0.8 : gate > 0.4)
                fail_msg("seed %d: the gate of head %u is %g", (int)seed, h, gate);
        }
        free(gradient);
        adamw_free(adamw);
        network_release(network);
    }
}

static void test_file(void **state) {
    (void)state;
    char folder[64], path[96];
    struct error error = {0};
    struct policy_network *network = create_gates();
    tiny_folder_create(folder);
    snprintf(path, sizeof path, "%s/gates.json", folder);
    for (uint32_t h = 0; h < HEADS; h++)
        network->skip[h] = (float)h - 1;
    assert_int_equal(rlkv_save(network, path, &error), 0);
    struct head_gates *gates = head_gates_load(path, &error);
    assert_non_null(gates);
    assert_int_equal(gates->layers, 2);
    assert_int_equal(gates->kv_heads, HEADS / 2);
    for (uint32_t h = 0; h < HEADS; h++)
        assert_true(fabs((double)gates->values[h] - 1 / (1 + exp(1 - (double)h))) < 1e-5);
    head_gates_release(gates);
    struct policy_settings settings;
    assert_int_equal(rlkv_settings(network, 0.3, &settings, &error), 0);
    assert_true(settings.ratio == 0.3 && isnan(settings.sparsity) && settings.gates->values[3] > 0.8f);
    policy_settings_release(&settings);
    assert_int_equal(rlkv_save(network, "/nowhere/gates.json", &error), ERROR_IO);
    assert_non_null(strstr(error.message, "/nowhere/gates.json"));
    unlink(path);
    tiny_folder_remove(folder);
    network_release(network);
}

/* ---- options ---- */

struct refused {
    enum train_method method;
    bool paper;
    const char *settings[3][2];
    const char *message;
};

static void test_options(void **state) {
    (void)state;
    static const struct refused list[] = {
        {TRAIN_RLKV, true, {{NULL}}, "gate_steps: "},
        {TRAIN_RLKV, false, {{"kl_steps", "1"}}, "gate_steps: stage gates is method rlkv's"},
        {TRAIN_RLKV, false, {{"gate_steps", "0"}}, "rank_steps, pruned_steps"},
        {TRAIN_RLKV, false, {{"students", "1"}}, "students: "},
        {TRAIN_FORESIGHT, false, {{"gate_steps", "1"}}, "gate_steps: "},
        {TRAIN_FORESIGHT, true, {{NULL}}, "recipe: paper is that of method distillcache, not of foresight"},
        {TRAIN_FORESIGHT, false, {{"students", "1"}}, "students: "},
        {TRAIN_RANKER, false, {{"local_steps", "1"}, {"future", "300"}}, "future: stage local"},
        {TRAIN_RANKER, false, {{"local_steps", "1"}, {"students", "1"}}, "students: stage local"},
        {TRAIN_RANKER, false, {{"kl_steps", "1"}, {"reward", "ranking"}, {"sampler", "subset"}}, "sampler: "},
        {TRAIN_RANKER, false, {{"kl_steps", "1"}, {"reward", "ranking"}, {"students", "1"}}, "students: reward"},
        {TRAIN_RANKER, false, {{"rank_steps", "0"}, {"kl_steps", "1"}}, "rank_steps: features content"},
    };
    struct train_options options;
    struct error error = {0};
    for (size_t i = 0; i < sizeof list / sizeof list[0]; i++) {
        train_options_default(&options, list[i].method, list[i].paper);
        for (int s = 0; s < 3 && list[i].settings[s][0] != NULL; s++)
            assert_int_equal(train_options_set(&options, list[i].settings[s][0], list[i].settings[s][1], &error), 0);
        assert_int_equal(train_options_check(&options, &error), ERROR_INVALID);
        if (strncmp(error.message, list[i].message, strlen(list[i].message)) != 0)
            fail_msg("\"%s\" does not begin with \"%s\"", error.message, list[i].message);
    }
    for (int method = TRAIN_DISTILLCACHE; method <= TRAIN_RLKV; method++) {
        train_options_default(&options, (enum train_method)method, false);
        if (train_options_check(&options, &error) != 0)
            fail_msg("%s: %s", train_method_name((enum train_method)method), error.message);
        assert_int_equal(train_options_scale(&options, 50, &error), 0);
        assert_int_equal(options.rank_steps + options.pruned_steps + options.local_steps + options.kl_steps +
                             options.parameter_steps + options.gate_steps,
            50);
    }
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_hinge),
        cmocka_unit_test(test_low_entropy),
        cmocka_unit_test(test_gradient),
        cmocka_unit_test(test_toy),
        cmocka_unit_test(test_file),
        cmocka_unit_test(test_options),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
