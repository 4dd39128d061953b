/* SPDX-License-Identifier: Apache-2.0
 *
 * Rows of hand-made results, and what is printed of them; the file of --resume; SVG.
 */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>
#include <jansson.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "policy/eval/chart.h"
#include "policy/eval/report.h"
#include "policy/eval/resume.h"
#include "tests/unit/tiny_network.h"

static const uint32_t lengths[] = {256, 1024};
static struct eval_variant variants[] = {{.policy = "full", .ratio = 1}, {.policy = "h2o,recent=0.3", .ratio = 0.25},
    {.policy = "h2o,recent=0.3", .ratio = 0.125}, {.policy = "tova", .ratio = 0.25, .settings = {.tokens = 99}}};

static struct eval_setup setup_example(bool answers) {
    return (struct eval_setup){.model = "abc int8 f16",
        .task = answers ? "needle" : "kl",
        .seed = 4,
        .answers = answers,
        .continuation = answers ? 0 : 8,
        .layers = 2,
        .lengths = lengths,
        .lengths_count = 2,
        .variants = variants,
        .variants_count = 4};
}

static void add(struct eval_results *results, struct eval_result result) {
    result.tokens_kept = 100;
    result.tokens_seen = 400;
    result.bytes = 1000;
    result.bytes_full = 4000;
    result.tokens = 10;
    result.seconds = 0.5;
    assert_int_equal(eval_results_add(results, &result), 0);
}

static void add_kl(struct eval_results *results, uint32_t item, uint32_t part, uint32_t variant, double kl) {
    struct eval_result result = {.length = 1,
        .item = item,
        .part = part,
        .variant = variant,
        .digest = 77 + item,
        .steps = 8,
        .kl = kl,
        .top1 = 1 - kl / 4,
        .loss = 2 + kl,
        .loss_full = 2};
    strcpy(result.group, part == 0 ? "text" : "own");
    add(results, result);
}

static void add_score(struct eval_results *results, uint32_t item, uint32_t variant, double score, enum eval_error kind,
    uint32_t tokens) {
    struct eval_result result = {.item = item,
        .variant = variant,
        .digest = 5,
        .has_score = true,
        .score = score,
        .kind = kind,
        .has_gold = true,
        .gold_logprob = -1.0 - item - variant,
        .output_tokens = tokens,
        .max_tokens = 10};
    snprintf(result.group, sizeof result.group, "depth %.2f", item % 2 * 0.5);
    snprintf(result.gold, sizeof result.gold, "%u", 1000 + item);
    add(results, result);
}

static struct eval_rows make_rows(const struct eval_setup *setup, const struct eval_results *results) {
    struct eval_rows rows;
    struct error error = {0};
    if (eval_rows_create(setup, results, &rows, &error) != 0)
        fail_msg("%s", error.message);
    return rows;
}

static void kl_rows(void **state) {
    (void)state;
    struct eval_setup setup = setup_example(false);
    struct eval_results results = {0};
    const double text[] = {0.1, 0.4}, own[] = {0.3, 0.2};
    for (uint32_t i = 2; i-- > 0;) { /* order does not matter */
        add_kl(&results, i, 1, 1, own[i]);
        add_kl(&results, i, 0, 1, text[i]);
        add_kl(&results, i, 0, 0, 0);
        add_kl(&results, i, 1, 0, 0);
    }
    add_kl(&results, 9, 0, 1, 50); /* full has no such item: does not count */
    struct eval_rows rows = make_rows(&setup, &results);
    assert_int_equal(rows.count, 2);
    assert_int_equal(rows.groups_count, 4);
    const struct eval_row *row = eval_rows_find(&rows, 1, 1), *full = eval_rows_find(&rows, 1, 0);
    assert_non_null(row);
    assert_int_equal(row->n, 2);
    assert_float_equal(row->kl.mean, 0.25, 1e-12);
    assert_float_equal(row->kl.low, 0.2, 1e-12); /* items are 0.2 and 0.3 */
    assert_float_equal(row->kl.high, 0.3, 1e-12);
    assert_float_equal(row->kl_geometric, pow(0.1 * 0.4 * 0.3 * 0.2, 0.25), 1e-12);
    assert_float_equal(row->perplexity, exp(2.25), 1e-9); /* of the text alone */
    assert_float_equal(row->perplexity_full, exp(2), 1e-9);
    assert_float_equal(row->top1, 1 - 0.25 / 4, 1e-12);
    assert_float_equal(row->tokens_per_second, 20, 1e-9);
    assert_true(full->kl.mean == 0 && full->kl_geometric == 0 && full->top1 == 1);
    assert_string_equal(rows.groups[2].group, "text");
    assert_float_equal(rows.groups[2].kl.mean, 0.25, 1e-12);
    assert_float_equal(rows.groups[3].kl_geometric, sqrt(0.06), 1e-12);
    eval_rows_free(&rows);
    eval_results_free(&results);
}

static void score_rows(void **state) {
    (void)state;
    struct eval_setup setup = setup_example(true);
    struct eval_results results = {0};
    for (uint32_t i = 0; i < 4; i++) {
        add_score(&results, i, 0, i < 3, i < 3 ? EVAL_RIGHT : EVAL_WRONG, 4);
        add_score(&results, i, 1, i == 0, i == 0 ? EVAL_RIGHT : i == 1 ? EVAL_REPETITIVE : EVAL_WRONG, 6);
    }
    add_score(&results, 2, 1, 1, EVAL_RIGHT, 6); /* a later result takes the place of an earlier one */
    struct eval_rows rows = make_rows(&setup, &results);
    const struct eval_row *row = eval_rows_find(&rows, 0, 1);
    assert_int_equal(row->n, 4);
    assert_float_equal(row->score.mean, 0.5, 1e-12);
    assert_float_equal(row->score_difference.mean, -0.25, 1e-12);
    assert_float_equal(row->score_full, 0.75, 1e-12);
    assert_int_equal(row->full_right, 3);
    assert_int_equal(row->errors[EVAL_RIGHT], 2);
    assert_int_equal(row->errors[EVAL_REPETITIVE], 1);
    assert_int_equal(row->errors[EVAL_WRONG], 0); /* item 3: full is wrong, too */
    assert_float_equal(row->length_ratio, 1.5, 1e-12);
    assert_float_equal(row->gold_logprob.mean, -3.5, 1e-12);
    assert_float_equal(row->gold_difference.mean, -1, 1e-12);
    assert_true(row->gold_difference.low == -1 && row->gold_difference.high == -1);
    assert_true(row->chance == 0 && row->claimed);
    eval_rows_free(&rows);
    eval_results_free(&results);
}

/* Chance is that of guessing one of the classes, or always the most frequent answer. */
static void claims_need_fifteen_points(void **state) {
    (void)state;
    struct eval_setup setup = setup_example(true);
    for (int kind = 0; kind < 4; kind++) {
        struct eval_results results = {0};
        for (uint32_t i = 0; i < 20; i++)
            add_score(&results, i, 0, i < (kind == 0 ? 2 : 12), EVAL_RIGHT, 4);
        for (uint32_t i = 0; i < 20; i++) {
            results.list[i].chance = kind == 2 ? 0.5 : 0;
            if (kind == 3 && i % 2 == 0)
                strcpy(results.list[i].gold, "yes");
        }
        struct eval_rows rows = make_rows(&setup, &results);
        assert_float_equal(rows.list[0].chance, kind >= 2 ? 0.5 : 0, 1e-12);
        assert_int_equal(rows.list[0].claimed, kind == 1);
        eval_rows_free(&rows);
        eval_results_free(&results);
    }
}

static json_t *find_row(json_t *document, const char *list, const char *policy) {
    size_t i;
    json_t *row;
    json_array_foreach(json_object_get(document, list), i,
        row) if (strcmp(json_string_value(json_object_get(row, "kv_policy")), policy) == 0) return row;
    return NULL;
}

static void json_has_what_was_measured(void **state) {
    (void)state;
    struct eval_setup setup = setup_example(true);
    struct eval_results results = {0};
    add_score(&results, 0, 0, 1, EVAL_RIGHT, 4);
    add_score(&results, 0, 1, 0.5, EVAL_RIGHT, 4);
    add_score(&results, 0, 3, NAN, EVAL_WRONG, 4);
    struct eval_rows rows = make_rows(&setup, &results);
    struct eval_report report = {.setup = &setup, .rows = &rows, .model = "tiny", .items = 1, .complete = true};
    char *text = eval_report_json(&report);
    json_t *document = json_loads(text, 0, NULL);
    assert_non_null(document);
    assert_int_equal(json_array_size(json_object_get(document, "rows")), 3);
    json_t *row = find_row(document, "rows", "h2o,recent=0.3"), *tokens = find_row(document, "rows", "tova");
    assert_float_equal(json_number_value(json_object_get(row, "kv_ratio")), 0.25, 0);
    assert_null(json_object_get(row, "kl"));
    assert_null(json_object_get(row, "perplexity"));
    assert_null(json_object_get(row, "group"));
    assert_float_equal(json_number_value(json_object_get(row, "score")), 0.5, 0);
    assert_int_equal(json_array_size(json_object_get(row, "score_ci")), 2);
    assert_true(json_is_true(json_object_get(row, "claimed")));
    assert_int_equal(json_integer_value(json_object_get(row, "length")), 256);
    assert_null(json_object_get(tokens, "kv_ratio"));
    assert_int_equal(json_integer_value(json_object_get(tokens, "kv_tokens")), 99);
    assert_true(json_is_null(json_object_get(tokens, "score")));
    assert_non_null(json_object_get(find_row(document, "groups", "full"), "group"));
    json_decref(document);
    free(text);
    eval_rows_free(&rows);
    eval_results_free(&results);
}

/* Every line has as many fields as the first; quotes and commas of a policy's text stay inside theirs. */
static void csv_is_rectangular(void **state) {
    (void)state;
    char *text = NULL;
    size_t bytes = 0;
    struct eval_setup setup = setup_example(true);
    struct eval_results results = {0};
    add_score(&results, 0, 0, 1, EVAL_RIGHT, 4);
    add_score(&results, 0, 1, 0.5, EVAL_RIGHT, 4);
    struct eval_rows rows = make_rows(&setup, &results);
    struct eval_report report = {.setup = &setup, .rows = &rows, .model = "tiny"};
    FILE *out = open_memstream(&text, &bytes);
    eval_report_csv(&report, out);
    fclose(out);
    size_t fields = 0, lines = 0;
    bool quoted = false;
    for (size_t i = 0, count = 1; i < bytes; i++) {
        quoted ^= text[i] == '"';
        count += text[i] == ',' && !quoted;
        if (text[i] != '\n')
            continue;
        fields = lines == 0 ? count : fields;
        assert_int_equal(count, fields);
        count = 1;
        lines++;
    }
    assert_int_equal(lines, 5); /* names, two rows, two groups */
    free(text);
    eval_rows_free(&rows);
    eval_results_free(&results);
}

static char *temporary_file(void) {
    char *name = strdup("/tmp/test_eval_XXXXXX");
    int file = mkstemp(name);
    assert_true(file >= 0);
    close(file);
    return name;
}

static void append_text(const char *name, const char *text) {
    FILE *file = fopen(name, "a");
    fputs(text, file);
    fclose(file);
}

static void write_results(const char *name, const struct eval_setup *setup, const struct eval_results *results) {
    struct eval_resume resume;
    struct eval_results had = {0};
    struct error error = {0};
    assert_int_equal(eval_resume_open(&resume, name, setup, &had, &error), 0);
    for (size_t i = 0; i < results->count; i++)
        if (eval_resume_append(&resume, setup, &results->list[i], &error) != 0)
            fail_msg("%s", error.message);
    eval_resume_close(&resume);
    eval_results_free(&had);
}

static struct eval_results read_results(const char *name, const struct eval_setup *setup, uint32_t *torn) {
    struct eval_resume resume;
    struct eval_results results = {0};
    struct error error = {0};
    if (eval_resume_open(&resume, name, setup, &results, &error) != 0)
        fail_msg("%s", error.message);
    *torn = resume.torn;
    eval_resume_close(&resume);
    return results;
}

/* Two prompts, a short one whose ends meet among them, by hand. */
static void positions_by_hand(void **state) {
    (void)state;
    uint32_t kept[100];
    struct eval_positions some, none = {0}, mean;
    struct eval_positions_sum sum = {0};
    for (uint32_t i = 0; i < 100; i++)
        kept[i] = i == 0 ? 6 : i < 4 ? 3 : i >= 99 ? 6 : i >= 68 ? 2 : 1; /* of 6 heads */
    eval_positions_measure(kept, 100, 6, &some);
    assert_float_equal(some.sinks, 15.0 / 24, 1e-12);
    assert_float_equal(some.recent, (31 * 2 + 6) / (32 * 6.0), 1e-12);
    assert_float_equal(some.between, 1 / 6.0, 1e-12);
    assert_float_equal(some.first[3], 0.5, 1e-12);
    assert_true(some.first[0] == 1 && some.distance[0] == 1);
    assert_float_equal(some.distance[5], 1 / 3.0, 1e-12); /* 17 to 32 from the end */
    assert_float_equal(some.distance[7], 1 / 6.0, 1e-12); /* 65 to 128, of which there are 92 */
    assert_true(isnan(some.distance[8]));
    eval_positions_add(&sum, &some);
    eval_positions_add(&sum, &none); /* of a file that an older program wrote: does not count */
    eval_positions_measure(kept, 9, 6, &some);
    assert_float_equal(some.recent, 1 / 6.0, 1e-12); /* the 5 tokens that are no sinks */
    assert_true(isnan(some.between) && isnan(some.distance[1]));
    assert_float_equal(some.distance[0], 1 / 6.0, 1e-12); /* position 8 */
    eval_positions_add(&sum, &some);
    eval_positions_mean(&sum, &mean);
    assert_float_equal(mean.between, 1 / 6.0, 1e-12); /* of the first prompt alone */
    assert_float_equal(mean.distance[0], (1 + 1 / 6.0) / 2, 1e-12);
    eval_positions_measure(kept, 3, 6, &some);
    assert_true(isnan(some.recent) && isnan(some.first[3]) && isnan(some.distance[0]));
}

static void resume_keeps_everything(void **state) {
    (void)state;
    struct eval_setup setup = setup_example(true), kl = setup_example(false);
    struct eval_results written = {0}, written_kl = {0};
    char *name = temporary_file();
    uint32_t torn;
    add_score(&written, 3, 1, 1.0 / 3, EVAL_OVER_LENGTH, 9);
    written.list[0].kept = malloc(2 * KEPT_BINS + 1);
    memset(written.list[0].kept, 'o', 2 * KEPT_BINS);
    written.list[0].kept[2 * KEPT_BINS] = '\0';
    written.list[0].output = strdup("a \"b\"\nc");
    eval_positions_measure((const uint32_t[12]){2, 1, 2, 0, 1, 2, 0, 0, 2, 1, 1, 2}, 12, 2, &written.list[0].positions);
    add_score(&written, 4, 3, 0, EVAL_WRONG, 9);
    add_kl(&written_kl, 2, 1, 2, 0.1);
    write_results(name, &setup, &written);
    write_results(name, &kl, &written_kl);
    struct eval_results results = read_results(name, &setup, &torn);
    assert_int_equal(torn, 0);
    assert_int_equal(results.count, 2);
    struct eval_result *a = &results.list[0], *b = &written.list[0];
    assert_true(a->score == b->score && a->gold_logprob == b->gold_logprob && a->kind == b->kind);
    assert_true(a->item == 3 && a->variant == 1 && a->length == 0 && a->digest == 5 && a->has_gold && a->has_score);
    assert_true(a->output_tokens == 9 && a->tokens == 10 && a->seconds == 0.5 && a->bytes_full == 4000);
    assert_string_equal(a->group, b->group);
    assert_string_equal(a->gold, b->gold);
    assert_string_equal(a->kept, b->kept);
    assert_true(a->positions.present && a->positions.sinks == 0.625 && a->positions.recent == 9 / 16.0);
    assert_true(isnan(a->positions.between) && a->positions.first[6] == 0 && a->positions.distance[2] == 0.75);
    assert_false(results.list[1].positions.present);
    assert_int_equal(results.list[1].variant, 3);
    eval_results_free(&results);
    results = read_results(name, &kl, &torn);
    assert_int_equal(results.count, 1);
    assert_true(results.list[0].kl == 0.1 && results.list[0].loss == 2.1 && results.list[0].steps == 8);
    assert_true(results.list[0].variant == 2 && results.list[0].part == 1 && results.list[0].length == 1);
    eval_results_free(&results);
    eval_results_free(&written);
    eval_results_free(&written_kl);
    unlink(name);
    free(name);
}

/* A policy's file may hold another network by now: the results of the old one are none of the new one's. */
static void resume_tells_networks_apart(void **state) {
    (void)state;
    struct eval_variant trained[] = {
        {.policy = "full", .ratio = 1}, {.policy = "distillcache:a", .ratio = 0.25, .settings = {.ratio = 0.25}}};
    struct network_shape shape = tiny_network_shape(FEATURES_CONTENT, 2, 1, 4);
    struct policy_network *network = tiny_network_create(&shape, 1), *other = tiny_network_create(&shape, 2);
    struct eval_setup setup = setup_example(true);
    struct eval_results written = {0};
    char *name = temporary_file();
    uint32_t torn;
    setup.variants = trained;
    setup.variants_count = 2;
    trained[1].settings.network = network;
    add_score(&written, 0, 1, 1, EVAL_RIGHT, 4);
    write_results(name, &setup, &written);
    struct policy_network *const cases[] = {network, other, NULL};
    for (int i = 0; i < 3; i++) {
        trained[1].settings.network = cases[i];
        struct eval_results results = read_results(name, &setup, &torn);
        assert_int_equal(results.count, i == 0);
        eval_results_free(&results);
    }
    eval_results_free(&written);
    network_release(network);
    network_release(other);
    unlink(name);
    free(name);
}

static void resume_takes_its_own_only(void **state) {
    (void)state;
    struct eval_setup setup = setup_example(true);
    struct eval_results written = {0};
    char *name = temporary_file();
    uint32_t torn;
    add_score(&written, 0, 1, 1, EVAL_RIGHT, 4);
    write_results(name, &setup, &written);
    for (int change = 0; change < 6; change++) {
        static const uint32_t other_lengths[] = {512, 2048};
        static struct eval_variant other[] = {{.policy = "full", .ratio = 1}, {.policy = "h2o", .ratio = 0.25}};
        struct eval_setup changed = setup;
        changed.seed += change == 0;
        changed.model = change == 1 ? "abc f32 f16" : setup.model;
        changed.task = change == 2 ? "arithmetic" : setup.task;
        changed.query_aware = change == 3;
        changed.lengths = change == 4 ? other_lengths : lengths;
        changed.variants = change == 5 ? other : variants;
        changed.variants_count = change == 5 ? 2 : 4;
        struct eval_results results = read_results(name, &changed, &torn);
        assert_int_equal(results.count, 0);
        eval_results_free(&results);
    }
    eval_results_free(&written);
    unlink(name);
    free(name);
}

static void resume_survives_a_torn_line(void **state) {
    (void)state;
    struct eval_setup setup = setup_example(true);
    struct eval_results written = {0};
    struct eval_resume resume;
    struct eval_results results;
    struct error error = {0};
    char *name = temporary_file();
    uint32_t torn;
    add_score(&written, 0, 1, 1, EVAL_RIGHT, 4);
    write_results(name, &setup, &written);
    append_text(name, "{\"model\": \"abc int8 f16\", \"ta");
    write_results(name, &setup, &written); /* begins a line of its own */
    results = read_results(name, &setup, &torn);
    assert_int_equal(torn, 1);
    assert_int_equal(results.count, 2);
    eval_results_free(&results);
    append_text(name, "[1, 2]\n");
    results = (struct eval_results){0};
    assert_int_equal(eval_resume_open(&resume, name, &setup, &results, &error), ERROR_FORMAT);
    assert_non_null(strstr(error.message, "line 4"));
    eval_results_free(&results);
    eval_results_free(&written);
    unlink(name);
    free(name);
    assert_int_equal(eval_resume_open(&resume, "/nonexistent/file", &setup, &results, &error), ERROR_IO);
}

static void charts_escape_and_survive(void **state) {
    (void)state;
    char *text = NULL;
    size_t bytes = 0;
    struct chart_point points[] = {{1, 2, 1, 3}, {0, 0, 0, 0}, {NAN, 1, 1, 1}, {0.5, INFINITY, 0, 0}};
    struct chart_series series = {.name = "a<b>&\"c\"\x01\xff", .points = points, .count = 4};
    struct chart chart = {.title = "<", .x_label = "&", .y_label = ">", .log_x = true, .log_y = true};
    chart.series = &series;
    chart.count = 1;
    FILE *out = open_memstream(&text, &bytes);
    chart_write_lines(&chart, out);
    fclose(out);
    assert_non_null(strstr(text, "a&lt;b&gt;&amp;&quot;c&quot;??"));
    assert_null(strstr(text, "nan"));
    assert_null(strstr(text, "inf"));
    free(text);
    chart.count = 0;
    out = open_memstream(&text, &bytes);
    chart_write_lines(&chart, out);
    fclose(out);
    assert_null(strstr(text, "nan"));
    assert_null(strstr(text, "inf"));
    assert_non_null(strstr(text, "</svg>"));
    free(text);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(kl_rows),
        cmocka_unit_test(score_rows),
        cmocka_unit_test(claims_need_fifteen_points),
        cmocka_unit_test(json_has_what_was_measured),
        cmocka_unit_test(csv_is_rectangular),
        cmocka_unit_test(positions_by_hand),
        cmocka_unit_test(resume_keeps_everything),
        cmocka_unit_test(resume_tells_networks_apart),
        cmocka_unit_test(resume_takes_its_own_only),
        cmocka_unit_test(resume_survives_a_torn_line),
        cmocka_unit_test(charts_escape_and_survive),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
