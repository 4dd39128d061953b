/* SPDX-License-Identifier: Apache-2.0 */
#include "policy/train/baseline.h"

#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>

static void assert_near(double a, double b) {
    if (!(fabs(a - b) < 1e-12))
        fail_msg("%.15g, not %.15g", a, b);
}

static void test_returns(void **state) {
    (void)state;
    const double rewards[] = {-1, 2, 0.5, -4};
    double returns[4];
    returns_discounted(rewards, 4, 0.5, returns);
    assert_near(returns[0], -1 + 0.5 * 2 + 0.25 * 0.5 + 0.125 * -4);
    assert_near(returns[1], 2 + 0.5 * 0.5 + 0.25 * -4);
    assert_near(returns[2], 0.5 + 0.5 * -4);
    assert_near(returns[3], -4);
    double own[] = {1, 1, 1};
    returns_discounted(own, 3, 1, own);
    assert_near(own[0], 3);
    returns_discounted(own, 0, 1, own);
    assert_near(own[0], 3);
}

static void test_leave_one_out(void **state) {
    (void)state;
    const double rewards[] = {1, 2, 6};
    double advantages[3];
    baseline_leave_one_out(rewards, 3, advantages);
    assert_near(advantages[0], 1 - (2.0 + 6) / 2);
    assert_near(advantages[1], 2 - (1.0 + 6) / 2);
    assert_near(advantages[2], 6 - (1.0 + 2) / 2);
    double same[] = {-7, -7};
    baseline_leave_one_out(same, 2, same);
    assert_near(same[0], 0);
    assert_near(same[1], 0);
    baseline_leave_one_out(rewards, 1, advantages);
    assert_near(advantages[0], 1);
}

static void test_moving_average(void **state) {
    (void)state;
    double average = baseline_moving(NAN, -2, 0.9);
    assert_near(average, -2);
    average = baseline_moving(average, 8, 0.9);
    assert_near(average, 0.9 * -2 + 0.1 * 8);
    assert_near(baseline_moving(average, INFINITY, 0.9), average);
    assert_near(baseline_moving(average, NAN, 0.9), average);
    assert_true(isnan(baseline_moving(NAN, NAN, 0.9)));
}

static void test_advantages(void **state) {
    (void)state;
    const double rewards[] = {1, 3};
    double advantages[2];
    baseline_advantages(rewards, 2, 100, advantages); /* the others are the better baseline */
    assert_near(advantages[0], -2);
    assert_near(advantages[1], 2);
    baseline_advantages(rewards, 1, 0.25, advantages);
    assert_near(advantages[0], 0.75);
    baseline_advantages(rewards, 1, NAN, advantages);
    assert_near(advantages[0], 1);
}

static void test_entropy(void **state) {
    (void)state;
    assert_near(entropy_surrogate(-12, 4), 3);
    assert_near(entropy_surrogate(0, 0), 0);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_returns),
        cmocka_unit_test(test_leave_one_out),
        cmocka_unit_test(test_moving_average),
        cmocka_unit_test(test_advantages),
        cmocka_unit_test(test_entropy),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
