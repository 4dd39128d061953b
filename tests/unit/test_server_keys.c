/* SPDX-License-Identifier: Apache-2.0
 *
 * Keys: which are taken and which let in; rates over a made-up clock. The API's tests have the reading of files.
 */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>

#include "server/keys.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { KEYS = 3 };

static struct key_set *make_keys(uint32_t per_minute) {
    char *texts[] = {"one,two", "three"};
    const struct string_list list = {texts, 2};
    struct error error = {0};
    struct key_set *keys = keys_create(&list, "", per_minute, &error);
    if (keys == NULL)
        fail_msg("%s", error.message);
    return keys;
}

static int check(const struct key_set *keys, const char *authorization, const char *x_api_key) {
    struct fault fault = {0};
    int number = keys_check(keys, authorization, x_api_key, &fault);
    assert_int_equal(fault.status, number < 0 ? 401 : 0);
    return number;
}

static void test_numbers(void **state) {
    (void)state;
    struct key_set *keys = make_keys(0);
    assert_int_equal(keys_count(keys), KEYS);
    assert_int_equal(check(keys, "Bearer one", NULL), 0);
    assert_int_equal(check(keys, "bearer  two", "one"), 1);
    assert_int_equal(check(keys, NULL, "three"), 2);
    const char *const wrong[] = {"", "on", "onee", "oneone", "three ", "thre", "One", "one,two", "t"};
    for (size_t i = 0; i < sizeof wrong / sizeof wrong[0]; i++)
        assert_int_equal(check(keys, NULL, wrong[i]), -1);
    assert_int_equal(check(keys, NULL, NULL), -1);
    assert_int_equal(check(keys, "Basic one", "one"), -1);
    struct fault fault = {0};
    for (int i = 0; i < 1000; i++) /* no limit */
        assert_int_equal(keys_take(keys, 0, 1, &fault), 0);
    keys_free(keys);
}

static void test_one(void **state) {
    (void)state;
    struct error error = {0};
    struct key_set *keys = keys_create_one("admin-key", "a,b", &error); /* one key, commas included */
    assert_non_null(keys);
    assert_int_equal(check(keys, "Bearer a,b", NULL), 0);
    assert_int_equal(check(keys, "Bearer a", NULL), -1);
    keys_free(keys);
    keys = keys_create_one("admin-key", "", &error);
    assert_int_equal(keys_count(keys), 0);
    keys_free(keys);
    assert_null(keys_create_one("admin-key", "not one", &error));
    assert_non_null(strstr(error.message, "admin-key"));
    assert_null(strstr(error.message, "not one"));
}

/* Random arrivals: never more than the limit allows in any window that begins at a full bucket, never fewer than it
 * promises, and who waits as long as he is told is served. */
static void test_rates(void **state) {
    (void)state;
    srand(5);
    for (unsigned round = 0; round < 200; round++) {
        uint32_t limit = 1 + (uint32_t)rand() % 100;
        struct key_set *keys = make_keys(limit);
        struct fault fault;
        double now = 1000, begin = now, credit = limit, last = now;
        unsigned taken = 0, refused = 0;
        for (unsigned i = 0; i < 500; i++) {
            now += (double)rand() / RAND_MAX * 60 / limit; /* on average twice as fast as allowed */
            credit = credit + (now - last) * limit / 60;
            credit = credit > limit ? limit : credit;
            last = now;
            fault = (struct fault){0};
            bool served = keys_take(keys, 0, now, &fault) == 0;
            if (credit > 1 + 1e-6 || credit < 1 - 1e-6)
                assert_int_equal(served, credit >= 1);
            taken += served;
            credit -= served;
            if (served)
                continue;
            refused++;
            assert_int_equal(fault.status, 429);
            assert_true(fault.retry_after_ms > 0 && fault.retry_after_ms <= 60000 / limit + 1);
            if (rand() % 8 != 0)
                continue;
            now += fault.retry_after_ms * 1e-3;
            assert_int_equal(keys_take(keys, 0, now, &fault), 0);
            credit += (now - last) * limit / 60 - 1;
            last = now;
            taken++;
        }
        assert_true(taken <= limit + (now - begin) * limit / 60 + 1e-6);
        assert_true(refused > 0);
        assert_int_equal(keys_take(keys, 1, now, &fault), 0); /* another key's bucket is its own */
        keys_free(keys);
    }
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_numbers),
        cmocka_unit_test(test_one),
        cmocka_unit_test(test_rates),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
