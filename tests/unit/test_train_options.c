/* SPDX-License-Identifier: Apache-2.0
 *
 * The table of training's options: every value can be written and read back, wrong ones are refused by name, and the
 * presets are what POLICIES and the paper say.
 */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>

#include <string.h>

#include "policy/train/train.h"

static uint32_t index_of(const char *name) {
    for (uint32_t i = 0; i < train_options_count(); i++)
        if (strcmp(train_option_name(i), name) == 0)
            return i;
    fail_msg("no option %s", name);
    return 0;
}

static void assert_value(const struct train_options *options, const char *name, const char *expected) {
    char value[256];
    train_option_value(index_of(name), options, value, sizeof value);
    assert_string_equal(value, expected);
}

static void set(struct train_options *options, const char *name, const char *value) {
    struct error error = {0};
    if (train_options_set(options, name, value, &error) != 0)
        fail_msg("%s", error.message);
}

static void test_defaults(void **state) {
    (void)state;
    struct train_options options;
    train_options_default(&options, TRAIN_DISTILLCACHE, false);
    assert_int_equal(train_options_check(&options, NULL), 0);
    assert_value(&options, "method", "distillcache");
    assert_value(&options, "recipe", "default");
    assert_value(&options, "features", "content");
    assert_value(&options, "ratios", "0.5,0.25,0.125,0.05");
    assert_value(&options, "interval", "16");
    assert_value(&options, "scope", "layer");
    assert_value(&options, "floor", "0.75");
    assert_value(&options, "summary", "1");
    assert_value(&options, "hidden", "32");
    assert_value(&options, "rank_rate", "0.003");
    assert_value(&options, "pruned_steps", "0");
    assert_value(&options, "pruned_sequences", "80");
    assert_true(options.rank_steps > 0);
}

/* The paper's numbers by their names. */
static void test_paper(void **state) {
    (void)state;
    struct train_options options;
    train_options_default(&options, TRAIN_DISTILLCACHE, true);
    assert_int_equal(train_options_check(&options, NULL), 0);
    static const char *const expected[][2] = {{"recipe", "paper"}, {"features", "paper"}, {"content", "0"},
        {"hidden", "128"}, {"interval", "1"}, {"rank_steps", "0"}, {"pruned_steps", "0"}, {"kl_steps", "10000"},
        {"learning_rate", "0.0003"}, {"warmup_steps", "500"}, {"clip", "1"}, {"discount", "0.99"}, {"entropy", "0.01"},
        {"prompt_most", "4096"}, {"reward", "kl"}, {"sampler", "gumbel"},
        {"inputs", "mean,deviation,entropy,value_norm,position"}};
    for (size_t i = 0; i < sizeof expected / sizeof expected[0]; i++)
        assert_value(&options, expected[i][0], expected[i][1]);
}

/* What is written can be read, into options that differ in everything. */
static void test_round_trip(void **state) {
    (void)state;
    struct train_options from, to;
    train_options_default(&from, TRAIN_RANKER, true);
    train_options_default(&to, TRAIN_DISTILLCACHE, false);
    for (uint32_t i = 0; i < train_options_count(); i++) {
        char value[256], again[256];
        train_option_value(i, &from, value, sizeof value);
        set(&to, train_option_name(i), value);
        train_option_value(i, &to, again, sizeof again);
        assert_string_equal(value, again);
        assert_non_null(train_option_help(i));
    }
    for (uint32_t i = 0; i < train_options_count(); i++) {
        char value[256], again[256];
        train_option_value(i, &from, value, sizeof value);
        train_option_value(i, &to, again, sizeof again);
        assert_string_equal(value, again);
    }
}

static void test_presets_keep_the_seed(void **state) {
    (void)state;
    struct train_options options;
    train_options_default(&options, TRAIN_DISTILLCACHE, false);
    set(&options, "seed", "18446744073709551615");
    set(&options, "rank_steps", "7");
    set(&options, "method", "ranker");
    assert_value(&options, "seed", "18446744073709551615");
    assert_value(&options, "rank_steps", "3000");
    assert_value(&options, "pruned_steps", "0");
    assert_value(&options, "parameter_steps", "0");
    set(&options, "features", "paper");
    assert_value(&options, "content", "0");
    assert_int_equal(train_options_check(&options, NULL), 0);
    set(&options, "features", "content");
    set(&options, "inputs", "sum,recent_2");
    assert_int_equal(options.inputs, 1 << INPUT_SUM | 1 << INPUT_RECENT_2);
    set(&options, "inputs", "all");
    assert_int_equal(options.inputs, (1 << INPUT_KINDS) - 1);
}

static void test_refusals(void **state) {
    (void)state;
    static const char *const wrong[][3] = {
        {"colour", "red", "no option is called \"colour\": method, recipe, seed"},
        {"method", "h2o", "method: \"h2o\" is not one of distillcache, ranker, foresight, rlkv"},
        {"hidden", "0", "hidden: \"0\" is not a whole number from 1 to 256"},
        {"hidden", "3.5", "hidden: \"3.5\" is not a whole number"},
        {"hidden", "1e1x", "hidden: "},
        {"hidden", "", "hidden: "},
        {"hidden", " 3", "hidden: "},
        {"seed", "-1", "seed: "},
        {"seed", "18446744073709551616", "seed: "},
        {"discount", "nan", "discount: "},
        {"discount", "1.5", "discount: \"1.5\" is not a number from 0 to 1"},
        {"copying", "0x1", "copying: "},
        {"summary", "yes", "summary: \"yes\" is not 0 or 1"},
        {"ratios", "0.5,,0.1", "ratios: "},
        {"ratios", "0", "ratios: \"0\" is not 1 to 16 numbers above 0 up to 1"},
        {"ratios", "", "ratios: "},
        {"ratios", ".1,.1,.1,.1,.1,.1,.1,.1,.1,.1,.1,.1,.1,.1,.1,.1,.1", "ratios: "},
        {"inputs", "sum,", "inputs: "},
        {"inputs", "sums", "inputs: \"sums\" is not all, or of these, separated by commas: sum, mean"},
    };
    for (size_t i = 0; i < sizeof wrong / sizeof wrong[0]; i++) {
        struct train_options options, before;
        struct error error = {0};
        train_options_default(&options, TRAIN_DISTILLCACHE, false);
        train_options_default(&before, TRAIN_DISTILLCACHE, false);
        assert_int_equal(train_options_set(&options, wrong[i][0], wrong[i][1], &error), ERROR_INVALID);
        if (strncmp(error.message, wrong[i][2], strlen(wrong[i][2])) != 0)
            fail_msg("\"%s\" does not begin with \"%s\"", error.message, wrong[i][2]);
        assert_memory_equal(&options, &before, sizeof options);
    }
}

static void test_whole(void **state) {
    (void)state;
    static const char *const wrong[][2] = {{"prompt_least", "5000"}, {"rank_steps", "0"}};
    struct train_options options;
    for (size_t i = 0; i < sizeof wrong / sizeof wrong[0]; i++) {
        train_options_default(&options, TRAIN_RANKER, false);
        set(&options, wrong[i][0], wrong[i][1]);
        assert_int_equal(train_options_check(&options, NULL), ERROR_INVALID);
    }
    train_options_default(&options, TRAIN_RANKER, false);
    set(&options, "features", "paper");
    set(&options, "inputs", "sum");
    assert_int_equal(train_options_check(&options, NULL), ERROR_INVALID);
}

static void test_scale(void **state) {
    (void)state;
    struct train_options options;
    struct error error;
    train_options_default(&options, TRAIN_RANKER, false);
    options.rank_steps = 3000;
    options.local_steps = 0;
    options.kl_steps = 1000;
    options.parameter_steps = 500;
    assert_int_equal(train_options_scale(&options, 90, &error), 0);
    assert_int_equal(options.rank_steps + options.kl_steps + options.parameter_steps, 90);
    assert_in_range(options.rank_steps, 58, 61);
    assert_int_equal(options.local_steps, 0);
    assert_int_equal(train_options_scale(&options, 3, &error), 0);
    assert_int_equal(options.rank_steps, 1);
    assert_int_equal(options.parameter_steps, 1);
    assert_int_equal(train_options_scale(&options, 2, &error), ERROR_INVALID);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_defaults),
        cmocka_unit_test(test_paper),
        cmocka_unit_test(test_round_trip),
        cmocka_unit_test(test_presets_keep_the_seed),
        cmocka_unit_test(test_refusals),
        cmocka_unit_test(test_whole),
        cmocka_unit_test(test_scale),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
