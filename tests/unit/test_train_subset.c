/* SPDX-License-Identifier: Apache-2.0
 *
 * Samplers, log-probabilities and gradients against tests/data/gumbel_topk.json, and against enumeration of all choices
 * among few slots: probabilities sum to 1, the mean of reward times gradient is the gradient of the mean reward, and
 * samples are as frequent as they are probable.
 */
#include "policy/train/subset.h"

#include "engine/random.h"

#include <jansson.h>
#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

/* ---- the fixture ---- */

static double *read_numbers(const json_t *object, const char *name, size_t *count) {
    const json_t *list = json_object_get(object, name);
    *count = json_array_size(list);
    assert_true(json_is_array(list));
    double *out = malloc((*count + 1) * sizeof *out);
    for (size_t i = 0; i < *count; i++)
        out[i] = json_number_value(json_array_get(list, i));
    return out;
}

static double number(const json_t *object, const char *name) {
    const json_t *value = json_object_get(object, name);
    assert_true(json_is_number(value));
    return json_number_value(value);
}

static void assert_close(const char *what, double found, double expected) {
    if (!(fabs(found - expected) <= 2e-6 * (1 + fabs(expected))))
        fail_msg("%s: %.9g, not %.9g", what, found, expected);
}

static void compare_indices(const json_t *object, const char *name, const uint32_t *found, uint32_t count) {
    const json_t *list = json_object_get(object, name);
    assert_int_equal(json_array_size(list), count);
    for (uint32_t j = 0; j < count; j++)
        assert_int_equal(found[j], json_integer_value(json_array_get(list, j)));
}

static void compare_gradient(const json_t *object, const char *name, const float *found, uint32_t slots) {
    size_t count;
    double *expected = read_numbers(object, name, &count);
    assert_int_equal(count, slots);
    for (uint32_t i = 0; i < slots; i++)
        assert_close(name, (double)found[i], expected[i]);
    free(expected);
}

enum { SLOTS_MAX = 300 };

static void check_ordered(const float *scores, uint32_t slots, const json_t *object) {
    uint32_t count = (uint32_t)number(object, "count"), order[SLOTS_MAX];
    double work[2 * SLOTS_MAX];
    float grad[SLOTS_MAX] = {0};
    size_t uniforms_count;
    double *uniforms = read_numbers(object, "uniforms", &uniforms_count);
    gumbel_top(scores, slots, uniforms, count, order, work);
    compare_indices(object, "order", order, count);
    assert_close("logprob", plackett_luce_logprob(scores, slots, order, count, work), number(object, "logprob"));
    plackett_luce_gradient(scores, slots, order, count, 0.5, grad, work);
    plackett_luce_gradient(scores, slots, order, count, 0.5, grad, work);
    compare_gradient(object, "grad", grad, slots);
    free(uniforms);
}

static void check_subset(const float *scores, uint32_t slots, const json_t *object) {
    uint32_t count = (uint32_t)number(object, "count"), subset[SLOTS_MAX];
    double inclusion[SLOTS_MAX];
    float grad[SLOTS_MAX] = {0};
    size_t many;
    double *uniforms = read_numbers(object, "uniforms", &many);
    double *expected = read_numbers(object, "inclusion", &many);
    struct subset_table *table = subset_table_create(scores, slots, count, number(object, "tau"));
    assert_non_null(table);
    assert_close("log_z", subset_log_z(table), number(object, "log_z"));
    subset_sample(table, uniforms, subset);
    compare_indices(object, "sample", subset, count);
    assert_close("logprob", subset_logprob(table, subset), number(object, "sample_logprob"));
    assert_int_equal(subset_inclusion(table, inclusion), 0);
    for (uint32_t i = 0; i < slots; i++)
        assert_close("inclusion", inclusion[i], expected[i]);
    assert_int_equal(subset_gradient(table, subset, 0.5, grad), 0);
    assert_int_equal(subset_gradient(table, subset, 0.5, grad), 0);
    compare_gradient(object, "sample_grad", grad, slots);
    subset_table_free(table);
    free(expected);
    free(uniforms);
}

static void test_fixture(void **state) {
    (void)state;
    char name[1024];
    snprintf(name, sizeof name, "%s/gumbel_topk.json", getenv("DISTILLCACHE_TEST_DATA"));
    json_t *root = json_load_file(name, 0, NULL);
    const json_t *cases = json_object_get(root, "cases");
    assert_true(json_array_size(cases) >= 6);
    for (size_t i = 0; i < json_array_size(cases); i++) {
        const json_t *object = json_array_get(cases, i);
        const json_t *ordered = json_object_get(object, "ordered"), *subsets = json_object_get(object, "subsets");
        float scores[SLOTS_MAX];
        size_t slots;
        double *numbers = read_numbers(object, "scores", &slots);
        assert_true(slots <= SLOTS_MAX && json_array_size(ordered) > 0 && json_array_size(subsets) > 0);
        for (size_t j = 0; j < slots; j++)
            scores[j] = (float)numbers[j];
        for (size_t j = 0; j < json_array_size(ordered); j++)
            check_ordered(scores, (uint32_t)slots, json_array_get(ordered, j));
        for (size_t j = 0; j < json_array_size(subsets); j++)
            check_subset(scores, (uint32_t)slots, json_array_get(subsets, j));
        free(numbers);
    }
    json_decref(root);
}

/* ---- enumeration ---- */

enum { FEW = 7, CHOICES_MAX = 5040 };

/* All ordered choices of `count` of `slots`, or all subsets. */
struct choices {
    uint32_t slots, count, total;
    bool ordered;
    uint32_t list[CHOICES_MAX][FEW];
};

static void extend(struct choices *choices, uint32_t *prefix, uint32_t length, uint32_t used) {
    if (length == choices->count) {
        assert_true(choices->total < CHOICES_MAX);
        memcpy(choices->list[choices->total++], prefix, length * sizeof *prefix);
        return;
    }
    for (uint32_t i = !choices->ordered && length > 0 ? prefix[length - 1] + 1 : 0; i < choices->slots; i++) {
        if (used >> i & 1)
            continue;
        prefix[length] = i;
        extend(choices, prefix, length + 1, used | 1u << i);
    }
}

static void enumerate(struct choices *choices, bool ordered, uint32_t slots, uint32_t count) {
    uint32_t prefix[FEW];
    *choices = (struct choices){.slots = slots, .count = count, .ordered = ordered};
    extend(choices, prefix, 0, 0);
}

static const double tau = 0.75;

static double probability(const struct choices *choices, const float *scores, uint32_t index) {
    double work[2 * FEW];
    if (choices->ordered)
        return exp(plackett_luce_logprob(scores, choices->slots, choices->list[index], choices->count, work));
    struct subset_table *table = subset_table_create(scores, choices->slots, choices->count, tau);
    double logprob = subset_logprob(table, choices->list[index]);
    subset_table_free(table);
    return exp(logprob);
}

static void add_gradient(
    const struct choices *choices, const float *scores, uint32_t index, double factor, float *grad) {
    double work[2 * FEW];
    if (choices->ordered) {
        plackett_luce_gradient(scores, choices->slots, choices->list[index], choices->count, factor, grad, work);
        return;
    }
    struct subset_table *table = subset_table_create(scores, choices->slots, choices->count, tau);
    assert_int_equal(subset_gradient(table, choices->list[index], factor, grad), 0);
    subset_table_free(table);
}

/* Any number of the choice: here it depends on the order too. */
static double reward(uint32_t index) {
    return (double)random_uniform(5, 9, 0, index) - 0.5;
}

static double mean_reward(const struct choices *choices, const float *scores) {
    double mean = 0;
    for (uint32_t k = 0; k < choices->total; k++)
        mean += probability(choices, scores, k) * reward(k);
    return mean;
}

/* Scores are multiples of the step, so that differences of floats are exact. */
static const float STEP = 0x1p-10f;

static void draw_scores(uint32_t seed, uint32_t slots, float scale, float *scores) {
    for (uint32_t i = 0; i < slots; i++)
        scores[i] = roundf(scale * (2 * random_uniform(seed, 0, 0, i) - 1) / STEP) * STEP;
}

static void check_estimator(struct choices *choices, uint32_t seed) {
    float scores[FEW], grad[FEW] = {0};
    double total = 0;
    draw_scores(seed, choices->slots, 2, scores);
    for (uint32_t k = 0; k < choices->total; k++) {
        double p = probability(choices, scores, k);
        total += p;
        add_gradient(choices, scores, k, p * reward(k), grad);
    }
    assert_true(fabs(total - 1) < 1e-12);
    for (uint32_t i = 0; i < choices->slots; i++) {
        float was = scores[i];
        scores[i] = was + STEP;
        double above = mean_reward(choices, scores);
        scores[i] = was - STEP;
        double slope = (above - mean_reward(choices, scores)) / (2 * (double)STEP);
        scores[i] = was;
        if (!(fabs((double)grad[i] - slope) < 1e-6))
            fail_msg(
                "%u of %u, slot %u: %g, differences %g", choices->count, choices->slots, i, (double)grad[i], slope);
    }
}

static void test_estimators_are_unbiased(void **state) {
    (void)state;
    struct choices *choices = malloc(sizeof *choices);
    for (uint32_t slots = 2; slots <= FEW; slots++)
        for (uint32_t count = 1; count <= slots; count++) {
            enumerate(choices, false, slots, count);
            check_estimator(choices, slots * 10 + count);
            if (slots == FEW && count > 4) /* thousands of orders */
                continue;
            enumerate(choices, true, slots, count);
            check_estimator(choices, slots * 10 + count);
        }
    free(choices);
}

/* ---- samples ---- */

enum { DRAWS = 40000 };

static uint32_t find(const struct choices *choices, const uint32_t *choice) {
    for (uint32_t k = 0; k < choices->total; k++)
        if (memcmp(choices->list[k], choice, choices->count * sizeof *choice) == 0)
            return k;
    fail_msg("a sample is no choice");
    return 0;
}

static void draw_uniforms(uint32_t draw, uint32_t slots, double *uniforms) {
    for (uint32_t i = 0; i < slots; i++)
        uniforms[i] = (double)random_uniform(31, 1, draw, i);
}

static int ascending(const void *a, const void *b) {
    return (*(const uint32_t *)a > *(const uint32_t *)b) - (*(const uint32_t *)a < *(const uint32_t *)b);
}

/* Chi-square of the frequencies of samples against the choices' probabilities. `gumbel`: samples of gumbel_top, sorted
 * when the choices have no order. */
static double chi_square(const struct choices *choices, const float *scores, bool gumbel) {
    uint32_t *counts = calloc(choices->total, sizeof *counts), choice[FEW];
    double uniforms[FEW], work[FEW], result = 0;
    struct subset_table *table = subset_table_create(scores, choices->slots, choices->count, tau);
    for (uint32_t draw = 0; draw < DRAWS; draw++) {
        draw_uniforms(draw, choices->slots, uniforms);
        if (gumbel)
            gumbel_top(scores, choices->slots, uniforms, choices->count, choice, work);
        else
            subset_sample(table, uniforms, choice);
        if (!choices->ordered)
            qsort(choice, choices->count, sizeof *choice, ascending);
        counts[find(choices, choice)]++;
    }
    for (uint32_t k = 0; k < choices->total; k++) {
        double expected = DRAWS * probability(choices, scores, k);
        result += (counts[k] - expected) * (counts[k] - expected) / expected;
    }
    subset_table_free(table);
    free(counts);
    return result;
}

/* Five slots, two chosen: 20 orders, 10 subsets. Critical values for one error in a thousand. */
static void test_samples_are_as_frequent_as_probable(void **state) {
    (void)state;
    struct choices *choices = malloc(sizeof *choices);
    float scores[FEW];
    draw_scores(3, 5, 1.5f, scores);
    enumerate(choices, true, 5, 2);
    assert_int_equal(choices->total, 20);
    assert_true(chi_square(choices, scores, true) < 43.82); /* 19 degrees of freedom */
    enumerate(choices, false, 5, 2);
    assert_int_equal(choices->total, 10);
    assert_true(chi_square(choices, scores, false) < 27.88); /* 9 */
    assert_true(chi_square(choices, scores, true) > 100);    /* the two must not be mixed */
    free(choices);
}

/* ---- limits ---- */

static void test_lowest_scores_are_chosen_last(void **state) {
    (void)state;
    const float scores[] = {-INFINITY, 1, -INFINITY, -2, 0, -INFINITY};
    uint32_t order[6], subset[6];
    double uniforms[6], work[12], inclusion[6];
    for (uint32_t draw = 0; draw < 200; draw++) {
        draw_uniforms(draw, 6, uniforms);
        gumbel_top(scores, 6, uniforms, 4, order, work);
        for (uint32_t j = 0; j < 4; j++)
            assert_true((scores[order[j]] == -INFINITY) == (j == 3));
        assert_true(isfinite(plackett_luce_logprob(scores, 6, order, 4, work)));
        float grad[6] = {0};
        plackett_luce_gradient(scores, 6, order, 4, 1, grad, work);
        for (uint32_t i = 0; i < 6; i++)
            assert_true(isfinite(grad[i]));
        for (uint32_t count = 1; count <= 6; count++) {
            struct subset_table *table = subset_table_create(scores, 6, count, 1);
            uint32_t lowest = 0;
            subset_sample(table, uniforms, subset);
            for (uint32_t j = 0; j < count; j++) {
                lowest += scores[subset[j]] == -INFINITY;
                assert_true(subset[j] < 6 && (j == 0 || subset[j] > subset[j - 1]));
            }
            assert_int_equal(lowest, count > 3 ? count - 3 : 0);
            assert_true(isfinite(subset_logprob(table, subset)));
            assert_int_equal(subset_inclusion(table, inclusion), 0);
            for (uint32_t i = 0; i < 6; i++) {
                double expected = scores[i] == -INFINITY ? (count > 3 ? (count - 3) / 3.0 : 0) : 1;
                if (count >= 3)
                    assert_true(fabs(inclusion[i] - expected) < 1e-9);
            }
            subset_table_free(table);
        }
    }
}

static void test_equal_scores_take_the_latest(void **state) {
    (void)state;
    const float scores[] = {0, 0, 0, 0, 0};
    const double uniforms[] = {0.5, 0.5, 0.5, 0.5, 0.25};
    uint32_t order[5];
    double work[5];
    gumbel_top(scores, 5, uniforms, 5, order, work);
    const uint32_t expected[] = {3, 2, 1, 0, 4};
    assert_memory_equal(order, expected, sizeof expected);
    gumbel_top(scores, 5, uniforms, 0, order, work);
}

static double sum_of(const float *values, uint32_t count) {
    double sum = 0;
    for (uint32_t i = 0; i < count; i++) {
        assert_true(isfinite(values[i]));
        sum += (double)values[i];
    }
    return sum;
}

/* Scores within +-100; the gradient sums to 0, since a constant added to all scores changes nothing. */
static void test_many_slots_stay_finite(void **state) {
    (void)state;
    enum { MANY = 4000, KEPT = 1000 };
    float *scores = malloc(MANY * sizeof *scores), *grad = calloc(MANY, sizeof *grad);
    double *uniforms = malloc(MANY * sizeof *uniforms), *work = malloc((MANY + KEPT) * sizeof *work);
    double *inclusion = malloc(MANY * sizeof *inclusion), total = 0;
    uint32_t *order = malloc(MANY * sizeof *order);
    draw_scores(8, MANY, 100, scores);
    draw_uniforms(1, MANY, uniforms);
    gumbel_top(scores, MANY, uniforms, KEPT, order, work);
    double logprob = plackett_luce_logprob(scores, MANY, order, KEPT, work);
    assert_true(isfinite(logprob) && logprob < 0);
    plackett_luce_gradient(scores, MANY, order, KEPT, 1, grad, work);
    assert_true(fabs(sum_of(grad, MANY)) < 1e-3);

    struct subset_table *table = subset_table_create(scores, MANY, KEPT, 1);
    assert_non_null(table);
    memset(grad, 0, MANY * sizeof *grad);
    subset_sample(table, uniforms, order);
    for (uint32_t j = 1; j < KEPT; j++)
        assert_true(order[j] > order[j - 1] && order[j] < MANY);
    assert_true(isfinite(subset_logprob(table, order)) && subset_logprob(table, order) < 1e-6);
    assert_int_equal(subset_gradient(table, order, 1, grad), 0);
    assert_true(fabs(sum_of(grad, MANY)) < 1e-3);
    assert_int_equal(subset_inclusion(table, inclusion), 0);
    for (uint32_t i = 0; i < MANY; i++)
        total += inclusion[i];
    assert_true(fabs(total - KEPT) < 1e-5);
    subset_table_free(table);
    free(scores);
    free(grad);
    free(uniforms);
    free(work);
    free(inclusion);
    free(order);
}

/* Work that grew with slots times count would not end. */
static void test_orders_take_linear_time(void **state) {
    (void)state;
    enum { MANY = 1000000, KEPT = 500000 };
    float *scores = malloc(MANY * sizeof *scores), *grad = calloc(MANY, sizeof *grad);
    double *uniforms = malloc(MANY * sizeof *uniforms), *work = malloc((MANY + KEPT) * sizeof *work);
    uint32_t *order = malloc(KEPT * sizeof *order);
    draw_scores(8, MANY, 3, scores);
    draw_uniforms(2, MANY, uniforms);
    gumbel_top(scores, MANY, uniforms, KEPT, order, work);
    assert_true(isfinite(plackett_luce_logprob(scores, MANY, order, KEPT, work)));
    plackett_luce_gradient(scores, MANY, order, KEPT, 1, grad, work);
    assert_true(fabs(sum_of(grad, MANY)) < 0.1);
    free(scores);
    free(grad);
    free(uniforms);
    free(work);
    free(order);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_fixture),
        cmocka_unit_test(test_estimators_are_unbiased),
        cmocka_unit_test(test_samples_are_as_frequent_as_probable),
        cmocka_unit_test(test_lowest_scores_are_chosen_last),
        cmocka_unit_test(test_equal_scores_take_the_latest),
        cmocka_unit_test(test_many_slots_stay_finite),
        cmocka_unit_test(test_orders_take_linear_time),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
