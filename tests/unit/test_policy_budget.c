/* SPDX-License-Identifier: Apache-2.0
 *
 * Budgets: B itself against the reference's fixture, shares and gates against their definitions. Whole allocations are
 * compared with the reference in tests/model/test_policy.py.
 */
#include "policy/budget.h"

#include "engine/backend.h"
#include "tests/unit/tiny_network.h"

#include <jansson.h>
#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

static uint32_t dice = 12345;

static uint32_t throw_below(uint32_t n) {
    dice = dice * 1664525 + 1013904223;
    return (uint32_t)((uint64_t)(dice >> 8) * n >> 24);
}

static struct policy_settings parse(const char *text) {
    struct policy_settings settings;
    struct error error = {0};
    if (policy_settings_parse(text, &settings, &error) != 0)
        fail_msg("%s: %s", text, error.message);
    return settings;
}

static void test_budgets_of_the_fixture(void **state) {
    (void)state;
    char name[1024];
    snprintf(name, sizeof name, "%s/policy_scores.json", getenv("DISTILLCACHE_TEST_DATA"));
    json_t *root = json_load_file(name, 0, NULL);
    const json_t *cases = json_object_get(root, "budgets");
    assert_true(json_array_size(cases) > 20);
    for (size_t i = 0; i < json_array_size(cases); i++) {
        const json_t *object = json_array_get(cases, i);
        struct policy_settings settings;
        policy_settings_default(policy_find("h2o"), &settings);
        settings.ratio = json_number_value(json_object_get(object, "ratio"));
        settings.minimum = (uint32_t)json_integer_value(json_object_get(object, "b_min"));
        uint32_t seen = (uint32_t)json_integer_value(json_object_get(object, "seen"));
        assert_int_equal(policy_budget(&settings, seen), json_integer_value(json_object_get(object, "slots")));
    }
    json_decref(root);
    struct policy_settings tokens = parse("h2o,tokens=5");
    assert_int_equal(policy_budget(&tokens, 1000), 5); /* no minimum */
}

static void test_parts_are_exact(void **state) {
    (void)state;
    for (uint32_t tenths = 0; tenths <= 10; tenths++)
        for (uint32_t whole = 0; whole < 2000; whole++)
            assert_int_equal(budget_part(tenths / 10.0f, whole), tenths * whole / 10);
    assert_int_equal(budget_part(1, UINT32_MAX), UINT32_MAX);
    assert_int_equal(budget_part(-1, 10), 0);
    assert_int_equal(budget_part(NAN, 10), 0);
    assert_int_equal(budget_part(3, 10), 10);
}

/* Totals and caps hold, and nobody is further than one from the share that weight and caps give. */
static void test_shares_add_up(void **state) {
    (void)state;
    for (int round = 0; round < 3000; round++) {
        uint32_t count = 1 + throw_below(40), cap = throw_below(100);
        uint64_t total = throw_below(count * 110), sum = 0;
        double *weights = malloc(count * sizeof *weights);
        uint32_t *out = malloc(count * sizeof *out);
        for (uint32_t i = 0; i < count; i++)
            weights[i] = throw_below(4) == 0 ? 0 : throw_below(1000);
        budget_share_out(weights, count, total, cap, out);
        for (uint32_t i = 0; i < count; i++) {
            assert_true(out[i] <= cap);
            for (uint32_t j = 0; j < count; j++)
                assert_true(weights[i] <= weights[j] || out[i] >= out[j]);
            sum += out[i];
        }
        assert_int_equal(sum, total < (uint64_t)cap * count ? total : (uint64_t)cap * count);
        free(weights);
        free(out);
    }
}

static void test_strange_weights(void **state) {
    (void)state;
    const double weights[] = {NAN, INFINITY, -1, 2, 1};
    uint32_t out[5];
    budget_share_out(weights, 5, 9, 100, out);
    assert_memory_equal(out, ((uint32_t[]){0, 0, 0, 6, 3}), sizeof out);
    budget_share_out(weights, 3, 4, 100, out); /* no weight at all: equal shares, the first rounded up */
    assert_memory_equal(out, ((uint32_t[]){2, 1, 1}), 3 * sizeof *out);
    budget_share_out(weights, 5, UINT64_MAX, UINT32_MAX, out);
    assert_int_equal(out[0], UINT32_MAX);
    budget_share_out(weights, 0, 5, 5, out);
}

/* ---- gates ---- */

static void expect_gates_refused(const char *text, const char *word) {
    struct error error = {0};
    assert_null(head_gates_parse(text, strlen(text), "g.json", &error));
    assert_int_equal(error.code, ERROR_FORMAT);
    if (strstr(error.message, "g.json") == NULL || strstr(error.message, word) == NULL)
        fail_msg("no \"%s\" in: %s", word, error.message);
}

static void test_gate_texts(void **state) {
    (void)state;
    const char *text = "{\"gates\": [[1, 0, 0.5]]}";
    struct head_gates *gates = head_gates_parse(text, strlen(text), "g.json", NULL);
    assert_non_null(gates);
    assert_int_equal(gates->layers, 1);
    assert_int_equal(gates->kv_heads, 3);
    assert_ptr_equal(head_gates_take(gates), gates);
    head_gates_release(gates);
    assert_true(gates->values[2] == 0.5f);
    head_gates_release(gates);
    head_gates_release(NULL);
    assert_null(head_gates_take(NULL));
    expect_gates_refused("", "not JSON");
    expect_gates_refused("{\"gates\": [[1]]", "line 1");
    expect_gates_refused("[]", "\"gates\"");
    expect_gates_refused("{}", "\"gates\"");
    expect_gates_refused("{\"gates\": []}", "\"gates\"");
    expect_gates_refused("{\"gates\": [[]]}", "\"gates\"");
    expect_gates_refused("{\"gates\": [1]}", "\"gates\"");
    expect_gates_refused("{\"gates\": [[1], [1, 0]]}", "layer 1");
    expect_gates_refused("{\"gates\": [[1], 1]}", "layer 1");
    expect_gates_refused("{\"gates\": [[1, 1.5]]}", "KV head 1");
    expect_gates_refused("{\"gates\": [[-0.1]]}", "KV head 0");
    expect_gates_refused("{\"gates\": [[true]]}", "KV head 0");
    expect_gates_refused("{\"gates\": [[\"1\"]]}", "KV head 0");
}

static void test_gates_from_attention(void **state) {
    (void)state;
    enum { SEEN = 200 };
    uint32_t sums[SEEN] = {0};
    uint32_t positions[SEEN];
    for (uint32_t i = 0; i < SEEN; i++)
        positions[i] = SEEN - 1 - i; /* slots are in no order */
    assert_true(head_gate_from_attention(sums, positions, SEEN, SEEN) == 0);
    sums[SEEN - 1 - 15] = 3;  /* the last sink */
    sums[SEEN - 1 - 136] = 4; /* the first recent token */
    assert_true(head_gate_from_attention(sums, positions, SEEN, SEEN) == 0);
    sums[SEEN - 1 - 16] = 1;
    sums[SEEN - 1 - 135] = 2;
    assert_true(head_gate_from_attention(sums, positions, SEEN, SEEN) == 0.3f);
    positions[SEEN - 1 - 135] = KV_NO_POSITION;
    assert_true(head_gate_from_attention(sums, positions, SEEN, SEEN) == 0.125f);
    assert_true(head_gate_from_attention(sums, positions, SEEN, 64) == 0); /* all are recent */
    assert_true(head_gate_from_attention(NULL, NULL, 0, 0) == 0);
}

/* Equal gates: the lower layer, then the lower head; what is not a number comes last. */
static void test_equal_gates(void **state) {
    (void)state;
    struct policy_settings settings = parse("rlkv,sparsity=0.5");
    const float gates[] = {0.5f, NAN, 0.5f, -0.0f, 0.5f, 0.0f};
    uint32_t budgets[6];
    struct budget_input input = {.settings = &settings, .layers = 2, .kv_heads = 3, .seen = 1000, .gates = gates};
    budget_allocate(&input, budgets);
    assert_memory_equal(budgets, ((uint32_t[]){BUDGET_ALL, 80, BUDGET_ALL, 80, BUDGET_ALL, 80}), sizeof budgets);
    settings.sparsity = 1.0f / 3;
    budget_allocate(&input, budgets);
    assert_int_equal(budgets[3], BUDGET_ALL);
    assert_int_equal(budgets[5], 80);
    settings.sparsity = 1;
    budget_allocate(&input, budgets);
    for (int i = 0; i < 6; i++)
        assert_int_equal(budgets[i], 80);
    settings.sparsity = 0;
    budget_allocate(&input, budgets);
    assert_int_equal(budgets[1], BUDGET_ALL);
}

/* Without what they share out by, policies give every head B. */
static void test_equal_budgets(void **state) {
    (void)state;
    static const char *const texts[] = {"h2o", "cake", "hybrid", "rlkv,ratio=0.25", "tova", "laprox"};
    for (size_t i = 0; i < sizeof texts / sizeof texts[0]; i++) {
        struct policy_settings settings = parse(texts[i]);
        uint32_t budgets[6];
        struct budget_input input = {.settings = &settings, .layers = 2, .kv_heads = 3, .seen = 1001};
        budget_allocate(&input, budgets);
        for (int head = 0; head < 6; head++)
            assert_int_equal(budgets[head], 250);
    }
}

/* Nothing may be evicted while the sequence is not longer than B. */
static void test_short_sequences_are_left_alone(void **state) {
    (void)state;
    static const char *const texts[] = {"pyramidkv,tokens=100", "cake,tokens=100", "hybrid,tokens=100",
        "rlkv,tokens=100", "pyramidkv,tokens=1", "cake,tokens=1"};
    const double preferences[] = {5, 1, 0};
    const float gates[] = {0.5f, 1, 0, 0, 0, 0.25f};
    for (size_t i = 0; i < sizeof texts / sizeof texts[0]; i++) {
        struct policy_settings settings = parse(texts[i]);
        for (uint32_t seen = 1; seen <= settings.tokens; seen++) {
            uint32_t budgets[6];
            struct budget_input input = {.settings = &settings,
                .layers = 3,
                .kv_heads = 2,
                .seen = seen,
                .layer_preferences = preferences,
                .gates = gates};
            budget_allocate(&input, budgets);
            for (int head = 0; head < 6; head++)
                assert_true(budgets[head] >= seen);
        }
    }
}

/* ---- a network's layers ---- */

static void test_layers_of_a_network(void **state) {
    (void)state;
    struct network_shape shape = tiny_network_shape(FEATURES_CONTENT, 4, 2, 16);
    struct policy_settings settings = parse("distillcache,tokens=101");
    settings.network = tiny_network_create(&shape, 1);
    struct budget_input input = {.settings = &settings, .layers = 4, .kv_heads = 2, .seen = 1000};
    uint32_t budgets[8];
    memcpy(settings.network->layer_budgets, (const float[]){0.5f, 1, 2, 0.5f}, 4 * sizeof(float));
    budget_allocate(&input, budgets);
    const uint32_t by_weight[] = {51, 51, 101, 101, 201, 201, 51, 51}; /* one, and 100 times the weight */
    assert_memory_equal(budgets, by_weight, sizeof budgets);
    input.seen = 150; /* what one layer cannot use goes to the others */
    budget_allocate(&input, budgets);
    const uint32_t capped[] = {64, 64, 126, 126, 150, 150, 64, 64}; /* 1 + 251 / 4, 1 + 251 / 2, largest rests up */
    assert_memory_equal(budgets, capped, sizeof budgets);
    input.seen = 90; /* nothing is over the budget, so nothing may go */
    budget_allocate(&input, budgets);
    for (int i = 0; i < 8; i++)
        assert_true(budgets[i] >= 90);
    /* Of a model with sliding layers: those that are pruned, by their places. */
    input.seen = 1000;
    input.layers = 2;
    input.numbers = (const uint32_t[]){0, 2};
    budget_allocate(&input, budgets);
    const uint32_t by_place[] = {41, 41, 161, 161}; /* one, and 200 times the weight's part of 2.5 */
    assert_memory_equal(budgets, by_place, sizeof by_place);
    input.numbers = (const uint32_t[]){0, 4}; /* which the network does not have */
    budget_allocate(&input, budgets);
    assert_true(budgets[0] == 101 && budgets[3] == 101);
    input.layers = 4;
    input.numbers = NULL;
    /* A layer without weight keeps the newest token, and with a summary one beside it. */
    input.seen = 1000;
    memcpy(settings.network->layer_budgets, (const float[]){4, 0, 0, 0}, 4 * sizeof(float));
    budget_allocate(&input, budgets);
    assert_int_equal(budgets[0], 401);
    assert_int_equal(budgets[7], 1);
    settings.summary = true;
    budget_allocate(&input, budgets);
    assert_int_equal(budgets[0], 2 + 4 * 99);
    assert_int_equal(budgets[7], 2);
    /* Slopes: at half a quarter the layers' weights are as 2^slope to 1; at the quarter they do not count. */
    settings.summary = false;
    settings.tokens = 125;
    memcpy(settings.network->layer_budgets, (const float[]){1, 1, 1, 1}, 4 * sizeof(float));
    memcpy(settings.network->layer_budget_slopes, (const float[]){-1, -1, 0, 0}, 4 * sizeof(float));
    budget_allocate(&input, budgets);
    const uint32_t by_level[] = {166, 166, 166, 166, 84, 84, 84, 84}; /* 1 + 124 * 4 / 6 * {2, 1} */
    assert_memory_equal(budgets, by_level, sizeof budgets);
    settings.tokens = 250;
    budget_allocate(&input, budgets);
    for (int i = 0; i < 8; i++)
        assert_int_equal(budgets[i], 250);
    memset(settings.network->layer_budget_slopes, 0, 4 * sizeof(float));
    settings.summary = true;
    /* Equal weights: what every policy gives. */
    for (int layer = 0; layer < 4; layer++)
        settings.network->layer_budgets[layer] = 1;
    for (settings.tokens = 1; settings.tokens < 300; settings.tokens++) {
        budget_allocate(&input, budgets);
        for (int i = 0; i < 8; i++)
            assert_int_equal(budgets[i], settings.tokens);
    }
    policy_settings_release(&settings);
    budget_allocate(&input, budgets); /* no network yet */
    assert_int_equal(budgets[3], 300);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_budgets_of_the_fixture),
        cmocka_unit_test(test_parts_are_exact),
        cmocka_unit_test(test_shares_add_up),
        cmocka_unit_test(test_strange_weights),
        cmocka_unit_test(test_gate_texts),
        cmocka_unit_test(test_gates_from_attention),
        cmocka_unit_test(test_equal_gates),
        cmocka_unit_test(test_equal_budgets),
        cmocka_unit_test(test_short_sequences_are_left_alone),
        cmocka_unit_test(test_layers_of_a_network),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
