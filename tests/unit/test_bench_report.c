/* SPDX-License-Identifier: Apache-2.0 */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>
#include <jansson.h>
#include <stdlib.h>
#include <string.h>

#include "commands/bench_report.h"

static void median_of_odd_even_and_one(void **state) {
    (void)state;
    double odd[] = {5, 1, 100};
    double even[] = {4, 1, 3, 2};
    double one[] = {7};
    assert_float_equal(bench_median(odd, 3), 5, 0);
    assert_float_equal(bench_median(even, 4), 2.5, 0);
    assert_float_equal(bench_median(one, 1), 7, 0);
}

/* The median of the ratios is not the ratio of the medians: here 2 against 3 / 2. */
static void ratio_is_taken_per_pair(void **state) {
    (void)state;
    const double own[] = {1, 2, 3};
    const double peer[] = {3, 4, 0.3};
    assert_float_equal(bench_pair_ratio(own, peer, 3), 2, 1e-12);
}

static struct bench_report report_example(const struct bench_run *runs, size_t count) {
    struct bench_report report = {.runs = runs, .runs_count = count, .resident_bytes = 123456789012};
    strcpy(report.machine.cpu, "Test CPU");
    strcpy(report.machine.features, "avx2 fma");
    strcpy(report.machine.backend, "cpu, avx2, 2 threads");
    report.machine.cores = 4;
    report.machine.threads = 2;
    report.machine.memory_bytes = 1u << 30;
    report.machine.load_average = 0.5;
    report.machine.core_to_core_ns = 28.5;
    return report;
}

static json_t *parse(const struct bench_report *report) {
    char *text = bench_report_json(report);
    assert_non_null(text);
    json_t *document = json_loads(text, 0, NULL);
    assert_non_null(document);
    free(text);
    return document;
}

static const struct bench_run decode_run = {
    .work = "decode",
    .batch = 8,
    .depth = 512,
    .kv_policy = "full",
    .kv_ratio = 1,
    .tokens_per_second = 1600.25,
    .step_ms = 5,
    .phases = {{"attend", 0.001, 1000.4}, {"logits", 0.002, 2000.6}},
    .phases_count = 2,
    .bytes_per_step = 3001,
    .read_bandwidth_fraction = 0.75,
    .peer_tokens_per_second = 800,
    .ratio = 2,
};

static void json_has_every_measured_key(void **state) {
    (void)state;
    struct bench_report report = report_example(&decode_run, 1);
    json_t *document = parse(&report);
    assert_int_equal(json_object_size(document), 3);
    assert_int_equal(json_integer_value(json_object_get(document, "resident_bytes")), 123456789012);
    json_t *run = json_array_get(json_object_get(document, "runs"), 0);
    static const char *const keys[] = {"work", "batch", "depth", "kv_policy", "kv_ratio", "tokens_per_second",
        "step_ms", "phases", "bytes_per_step", "read_bandwidth_fraction", "peer_tokens_per_second", "ratio",
        "kv_tokens", "kv_settings", "ratio_full", "ratio_full_allowed", "ratio_full_reached", "kv_tokens_kept",
        "statistics_bytes", "policy_percent", "training"};
    assert_int_equal(json_object_size(run), sizeof keys / sizeof *keys);
    for (size_t i = 0; i < sizeof keys / sizeof *keys; i++)
        assert_non_null(json_object_get(run, keys[i]));
    assert_string_equal(json_string_value(json_object_get(run, "work")), "decode");
    assert_int_equal(json_integer_value(json_object_get(run, "depth")), 512);
    assert_int_equal(json_integer_value(json_object_get(run, "bytes_per_step")), 3001);
    json_t *machine = json_object_get(document, "machine");
    assert_float_equal(json_real_value(json_object_get(machine, "load_average")), 0.5, 0);
    assert_float_equal(json_real_value(json_object_get(machine, "core_to_core_ns")), 28.5, 0);
    assert_float_equal(json_real_value(json_object_get(run, "tokens_per_second")), 1600.25, 1e-9);
    assert_float_equal(json_real_value(json_object_get(run, "ratio")), 2, 0);
    json_t *logits = json_object_get(json_object_get(run, "phases"), "logits");
    assert_float_equal(json_real_value(json_object_get(logits, "seconds")), 0.002, 1e-12);
    assert_int_equal(json_integer_value(json_object_get(logits, "bytes")), 2001);
    json_decref(document);
}

static void json_says_null_where_nothing_was_measured(void **state) {
    (void)state;
    struct bench_run run = {.work = "request",
        .batch = 1,
        .depth = 1,
        .kv_policy = "full",
        .kv_ratio = 1,
        .tokens_per_second = 10,
        .step_ms = 100,
        .phases = {{"queued", 0.1, -1}},
        .phases_count = 1};
    struct bench_report report = report_example(&run, 1);
    json_t *document = parse(&report);
    json_t *object = json_array_get(json_object_get(document, "runs"), 0);
    assert_int_equal(json_object_size(object), 21);
    static const char *const policy[] = {"kv_tokens", "kv_settings", "ratio_full", "ratio_full_allowed",
        "ratio_full_reached", "kv_tokens_kept", "statistics_bytes", "policy_percent", "training"};
    for (size_t i = 0; i < sizeof policy / sizeof *policy; i++)
        assert_true(json_is_null(json_object_get(object, policy[i])));
    assert_true(json_is_null(json_object_get(object, "ratio")));
    assert_true(json_is_null(json_object_get(object, "peer_tokens_per_second")));
    assert_true(json_is_null(json_object_get(object, "bytes_per_step")));
    assert_true(json_is_null(json_object_get(object, "read_bandwidth_fraction")));
    assert_null(json_object_get(json_object_get(json_object_get(object, "phases"), "queued"), "bytes"));
    assert_null(json_object_get(json_object_get(document, "machine"), "peer"));
    json_decref(document);
}

static void json_says_what_a_policy_reached(void **state) {
    (void)state;
    struct bench_run run = decode_run;
    run.kv_policy = "h2o";
    run.kv_ratio = 0.25;
    strcpy(run.kv_settings, "h2o, ratio 0.25");
    run.ratio_full = 2;
    run.ratio_full_allowed = 2.5;
    run.kv_tokens_kept = 128;
    run.has_policy_percent = true;
    run.policy_percent = -0.5;
    struct bench_report report = report_example(&run, 1);
    json_t *document = parse(&report);
    json_t *object = json_array_get(json_object_get(document, "runs"), 0);
    assert_float_equal(json_real_value(json_object_get(object, "kv_ratio")), 0.25, 0);
    assert_string_equal(json_string_value(json_object_get(object, "kv_settings")), "h2o, ratio 0.25");
    assert_float_equal(json_real_value(json_object_get(object, "ratio_full_reached")), 0.8, 1e-12);
    assert_float_equal(json_real_value(json_object_get(object, "kv_tokens_kept")), 128, 0);
    assert_true(json_is_integer(json_object_get(object, "statistics_bytes"))); /* none, which was measured */
    assert_float_equal(json_real_value(json_object_get(object, "policy_percent")), -0.5, 0);
    json_decref(document);
    run.kv_ratio = 0;
    run.kv_tokens = 512;
    document = parse(&report);
    object = json_array_get(json_object_get(document, "runs"), 0);
    assert_true(json_is_null(json_object_get(object, "kv_ratio")));
    assert_int_equal(json_integer_value(json_object_get(object, "kv_tokens")), 512);
    json_decref(document);
}

static void json_says_what_training_cost(void **state) {
    (void)state;
    struct bench_run run = decode_run;
    run.work = "training";
    run.has_beside = true;
    run.beside = (struct bench_beside){.share = 0.25, .inter_token_ms = 15, .growth = 1.25, .first_token_ms_most = 60};
    struct bench_report report = report_example(&run, 1);
    json_t *document = parse(&report);
    json_t *training = json_object_get(json_array_get(json_object_get(document, "runs"), 0), "training");
    static const char *const keys[] = {"share", "share_used", "inter_token_ms", "inter_token_ms_alone",
        "inter_token_p99_ms", "inter_token_p99_ms_alone", "growth", "growth_allowed", "tokens_per_second_alone",
        "training_tokens_per_second", "first_token_ms", "first_token_ms_most", "first_token_ms_alone", "yield_ms_most"};
    assert_int_equal(json_object_size(training), sizeof keys / sizeof *keys);
    for (size_t i = 0; i < sizeof keys / sizeof *keys; i++)
        assert_non_null(json_object_get(training, keys[i]));
    assert_float_equal(json_real_value(json_object_get(training, "share")), 0.25, 0);
    assert_float_equal(json_real_value(json_object_get(training, "inter_token_ms")), 15, 0);
    assert_float_equal(json_real_value(json_object_get(training, "growth")), 1.25, 0);
    assert_float_equal(json_real_value(json_object_get(training, "first_token_ms_most")), 60, 0);
    assert_true(json_is_null(json_object_get(training, "training_tokens_per_second")));
    json_decref(document);
}

static void json_survives_text_that_is_not_utf8(void **state) {
    (void)state;
    struct bench_report report = report_example(NULL, 0);
    strcpy(report.machine.cpu, "\xff\xfe");
    strcpy(report.machine.peer, "AVX2 = 1");
    json_t *document = parse(&report);
    assert_int_equal(json_array_size(json_object_get(document, "runs")), 0);
    json_t *machine = json_object_get(document, "machine");
    assert_string_equal(json_string_value(json_object_get(machine, "cpu")), "(not UTF-8)");
    assert_string_equal(json_string_value(json_object_get(machine, "peer")), "AVX2 = 1");
    json_decref(document);
}

static void table_has_a_line_per_run(void **state) {
    (void)state;
    struct bench_report report = report_example(&decode_run, 1);
    char *text = NULL;
    size_t bytes = 0;
    FILE *out = open_memstream(&text, &bytes);
    assert_non_null(out);
    bench_report_table(&report, out);
    fclose(out);
    assert_non_null(strstr(text, "decode       full                   8    512     1600.2     5.000"));
    assert_non_null(strstr(text, "0.750"));
    assert_non_null(strstr(text, "attend"));
    assert_non_null(strstr(text, "core to core 28 ns")); /* 28.5, the even one */
    free(text);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(median_of_odd_even_and_one),
        cmocka_unit_test(ratio_is_taken_per_pair),
        cmocka_unit_test(json_has_every_measured_key),
        cmocka_unit_test(json_says_null_where_nothing_was_measured),
        cmocka_unit_test(json_says_what_a_policy_reached),
        cmocka_unit_test(json_says_what_training_cost),
        cmocka_unit_test(json_survives_text_that_is_not_utf8),
        cmocka_unit_test(table_has_a_line_per_run),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
