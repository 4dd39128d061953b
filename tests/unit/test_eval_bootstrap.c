/* SPDX-License-Identifier: Apache-2.0 */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>

#include <math.h>
#include <stdlib.h>

#include "policy/eval/bootstrap.h"

static void nothing_one_and_equal(void **state) {
    (void)state;
    double one[] = {3.5}, equal[] = {2, 2, 2, 2, 2};
    struct bootstrap_interval interval = bootstrap_mean(NULL, 0, 1);
    assert_true(interval.mean == 0 && interval.low == 0 && interval.high == 0);
    interval = bootstrap_mean(one, 1, 1);
    assert_true(interval.mean == 3.5 && interval.low == 3.5 && interval.high == 3.5);
    interval = bootstrap_mean(equal, 5, 1);
    assert_true(interval.mean == 2 && interval.low == 2 && interval.high == 2);
}

/* Of many values the interval is that of the normal approximation: mean +- 1.96 s / sqrt(n). */
static void width_of_many_values(void **state) {
    (void)state;
    enum { COUNT = 400 };
    double values[COUNT], sum = 0, squares = 0;
    for (int i = 0; i < COUNT; i++) {
        values[i] = (i * 7919 % COUNT) / (double)COUNT; /* uniform */
        sum += values[i];
        squares += values[i] * values[i];
    }
    double mean = sum / COUNT, error = sqrt((squares / COUNT - mean * mean) / COUNT);
    struct bootstrap_interval interval = bootstrap_mean(values, COUNT, 42);
    assert_float_equal(interval.mean, mean, 1e-12);
    assert_float_equal(interval.low, mean - 1.96 * error, 0.25 * error);
    assert_float_equal(interval.high, mean + 1.96 * error, 0.25 * error);
}

/* Two values, 0 and 1: means of resamples are 0, 0.5 and 1 with probabilities 1/4, 1/2, 1/4. */
static void two_values_by_hand(void **state) {
    (void)state;
    double values[] = {0, 1};
    struct bootstrap_interval interval = bootstrap_mean(values, 2, 3);
    assert_true(interval.mean == 0.5 && interval.low == 0 && interval.high == 1);
}

/* The same items are drawn for every policy: the interval of a shifted copy is the shifted interval, and that of a
 * constant difference is a point. */
static void policies_are_paired(void **state) {
    (void)state;
    enum { COUNT = 23 };
    double a[COUNT], b[COUNT], difference[COUNT];
    for (int i = 0; i < COUNT; i++) {
        a[i] = i * i % 17;
        b[i] = a[i] + 5;
        difference[i] = b[i] - a[i];
    }
    struct bootstrap_interval x = bootstrap_mean(a, COUNT, 9), y = bootstrap_mean(b, COUNT, 9);
    struct bootstrap_interval d = bootstrap_mean(difference, COUNT, 9);
    assert_float_equal(y.low - x.low, 5, 1e-9);
    assert_float_equal(y.high - x.high, 5, 1e-9);
    assert_true(d.low == 5 && d.high == 5);
    assert_true(x.low < x.mean && x.mean < x.high);
    struct bootstrap_interval other = bootstrap_mean(a, COUNT, 10);
    assert_true(other.low != x.low || other.high != x.high);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(nothing_one_and_equal),
        cmocka_unit_test(width_of_many_values),
        cmocka_unit_test(two_values_by_hand),
        cmocka_unit_test(policies_are_paired),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
