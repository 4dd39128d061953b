/* SPDX-License-Identifier: Apache-2.0
 *
 * The listwise loss against its definition written out in double, its gradient against central differences.
 */
#include "policy/train/listwise.h"

#include "engine/random.h"

#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

enum { SLOTS = 40 };

static void draw(uint32_t seed, float *scores, float *targets) {
    for (uint32_t i = 0; i < SLOTS; i++) {
        scores[i] = 4 * random_uniform(seed, 0, 0, i) - 2;
        float u = random_uniform(seed, 1, 0, i);
        targets[i] = u < 0.3f ? 0 : u * u * 5;
    }
}

/* Number of slots that come before slot i by score, of equal ones the higher index. */
static uint32_t rank_of(const float *scores, uint32_t i) {
    uint32_t rank = 0;
    for (uint32_t j = 0; j < SLOTS; j++)
        rank += scores[j] > scores[i] || (scores[j] == scores[i] && j > i);
    return rank;
}

/* With `fixed` deciding who is left out, and values in double. */
static double plain_loss(const double *scores, const float *fixed, const float *targets, uint32_t left_out) {
    double total = 0, weights = 0, loss = 0;
    for (uint32_t i = 0; i < SLOTS; i++) {
        if (rank_of(fixed, i) < left_out)
            continue;
        total += (double)targets[i];
        weights += exp(scores[i]);
    }
    for (uint32_t i = 0; i < SLOTS && total > 0; i++)
        if (rank_of(fixed, i) >= left_out)
            loss -= (double)targets[i] / total * (scores[i] - log(weights));
    return loss;
}

static void check(const float *scores, const float *targets, uint32_t left_out, double factor) {
    float gradient[SLOTS];
    double work[SLOTS], values[SLOTS];
    uint32_t order[SLOTS];
    double loss = listwise_loss(scores, targets, SLOTS, left_out, factor, gradient, work, order);
    for (uint32_t i = 0; i < SLOTS; i++)
        values[i] = (double)scores[i];
    assert_true(fabs(loss - plain_loss(values, scores, targets, left_out)) < 1e-9);
    for (uint32_t i = 0; i < SLOTS; i++) {
        const double step = 1e-5;
        values[i] = (double)scores[i] + step;
        double above = plain_loss(values, scores, targets, left_out);
        values[i] = (double)scores[i] - step;
        double slope = (above - plain_loss(values, scores, targets, left_out)) / (2 * step);
        values[i] = (double)scores[i];
        if (fabs((double)gradient[i] - factor * slope) > 1e-7)
            fail_msg("left out %u, slot %u: %g, differences %g", left_out, i, (double)gradient[i], factor * slope);
        if (rank_of(scores, i) < left_out)
            assert_true(gradient[i] == 0);
    }
}

static void test_loss_and_gradient(void **state) {
    (void)state;
    float scores[SLOTS], targets[SLOTS];
    for (uint32_t seed = 1; seed <= 5; seed++) {
        draw(seed, scores, targets);
        const uint32_t left_out[] = {0, 1, 7, 24, SLOTS - 2};
        for (size_t i = 0; i < sizeof left_out / sizeof *left_out; i++)
            check(scores, targets, left_out[i], seed % 2 ? 1.0 : 0.25);
    }
}

static void test_equal_scores_leave_the_latest_out(void **state) {
    (void)state;
    float scores[SLOTS] = {0}, targets[SLOTS], gradient[SLOTS];
    double work[SLOTS];
    uint32_t order[SLOTS];
    for (uint32_t i = 0; i < SLOTS; i++)
        targets[i] = 1;
    targets[0] = 3;
    check(scores, targets, 10, 1);
    listwise_loss(scores, targets, SLOTS, 10, 1, gradient, work, order);
    for (uint32_t i = 0; i < SLOTS; i++)
        assert_true((gradient[i] == 0) == (i >= SLOTS - 10));
}

static void test_nothing_to_learn(void **state) {
    (void)state;
    float scores[SLOTS], targets[SLOTS], gradient[SLOTS];
    double work[SLOTS];
    uint32_t order[SLOTS];
    draw(3, scores, targets);
    const uint32_t all[] = {SLOTS, SLOTS + 1, 1000};
    for (size_t i = 0; i < 3; i++) {
        memset(gradient, 1, sizeof gradient);
        assert_true(listwise_loss(scores, targets, SLOTS, all[i], 1, gradient, work, order) == 0);
        for (uint32_t j = 0; j < SLOTS; j++)
            assert_true(gradient[j] == 0);
    }
    memset(targets, 0, sizeof targets);
    memset(gradient, 1, sizeof gradient);
    assert_true(listwise_loss(scores, targets, SLOTS, 3, 1, gradient, work, order) == 0);
    for (uint32_t j = 0; j < SLOTS; j++)
        assert_true(gradient[j] == 0);
}

static void test_wide_scores_stay_finite(void **state) {
    (void)state;
    enum { MANY = 4000 };
    float *scores = malloc(MANY * sizeof *scores), *targets = malloc(MANY * sizeof *targets);
    float *gradient = malloc(MANY * sizeof *gradient);
    double *work = malloc(MANY * sizeof *work), sum = 0;
    uint32_t *order = malloc(MANY * sizeof *order);
    for (uint32_t i = 0; i < MANY; i++) {
        scores[i] = 200 * random_uniform(9, 0, 0, i) - 100;
        targets[i] = random_uniform(9, 1, 0, i);
    }
    double loss = listwise_loss(scores, targets, MANY, 100, 1, gradient, work, order);
    assert_true(isfinite(loss) && loss > 0);
    for (uint32_t i = 0; i < MANY; i++) {
        assert_true(isfinite(gradient[i]));
        sum += (double)gradient[i];
    }
    assert_true(fabs(sum) < 1e-5); /* both distributions sum to 1 */
    free(scores);
    free(targets);
    free(gradient);
    free(work);
    free(order);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_loss_and_gradient),
        cmocka_unit_test(test_equal_scores_leave_the_latest_out),
        cmocka_unit_test(test_nothing_to_learn),
        cmocka_unit_test(test_wide_scores_stay_finite),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
