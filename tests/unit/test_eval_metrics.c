/* SPDX-License-Identifier: Apache-2.0
 *
 * Metrics on cases worked out by hand. tests/model/test_eval_metrics.py compares them with other implementations on
 * random texts.
 */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>
#include <math.h>
#include <string.h>

#include "policy/eval/metrics.h"

#define SCORE(metric, output, ...) score(metric, output, (char *[]){__VA_ARGS__, NULL})

static double score(enum eval_metric metric, const char *output, char **answers) {
    struct eval_item item = {.metric = metric, .answers = answers};
    while (answers[item.answers_count] != NULL)
        item.answers_count++;
    return eval_score(&item, output);
}

static void assert_score(double got, double wanted) {
    if (fabs(got - wanted) > 1e-9)
        fail_msg("score %.12g instead of %.12g", got, wanted);
}

static void names_lead_back(void **state) {
    (void)state;
    for (int i = 0; i < METRIC_KINDS; i++) {
        enum eval_metric metric;
        assert_true(eval_metric_find(eval_metric_name((enum eval_metric)i), &metric));
        assert_int_equal(metric, i);
        assert_non_null(strstr(eval_metric_names(), eval_metric_name(metric)));
    }
    assert_false(eval_metric_find("accuracy", &(enum eval_metric){METRIC_NONE}));
}

static void none_scores_nothing(void **state) {
    (void)state;
    assert_score(SCORE(METRIC_NONE, "yes", "yes"), 0);
}

static void contains_counts_answers(void **state) {
    (void)state;
    assert_score(SCORE(METRIC_CONTAINS, "They are 17 and 23.", "17", "23", "42", "99"), 0.5);
    assert_score(SCORE(METRIC_CONTAINS, "the ÉTAT", "état"), 1);
    assert_score(SCORE(METRIC_CONTAINS, "anything", ""), 0);
    assert_score(SCORE(METRIC_CONTAINS_ANY, "It was The New-York Times!", "x", "newyork times"), 1);
    assert_score(SCORE(METRIC_CONTAINS_ANY, "anything", "the"), 0);
}

static void exact_forgives_form_only(void **state) {
    (void)state;
    assert_score(SCORE(METRIC_EXACT, "\n (A) \nbecause", "(A)"), 1);
    assert_score(SCORE(METRIC_EXACT, " (B)", "(A)"), 0);
    assert_score(SCORE(METRIC_EXACT, " Valid.", "valid", "x"), 1);
    assert_score(SCORE(METRIC_EXACT, " ] ]  >", "] ] >"), 1);
    assert_score(SCORE(METRIC_EXACT, " ] ]", "] ] >"), 0);
    assert_score(SCORE(METRIC_EXACT, "", "the"), 0);
    assert_score(SCORE(METRIC_EXACT, " valid argument", "valid"), 0);
}

static void numbers_are_values(void **state) {
    (void)state;
    static const char gold[] = "16 - 3 - 4 = <<16-3-4=9>>9\n#### 1,018";
    assert_score(SCORE(METRIC_NUMBER, " She has 5.\n#### 1018", (char *)gold), 1);
    assert_score(SCORE(METRIC_NUMBER, "#### 1018 is it. 7 more", (char *)gold), 1);
    assert_score(SCORE(METRIC_NUMBER, "so 3, then 1018.00.", (char *)gold), 1);
    assert_score(SCORE(METRIC_NUMBER, "so $1,018", (char *)gold), 1);
    assert_score(SCORE(METRIC_NUMBER, "1018 or 1019", (char *)gold), 0);
    assert_score(SCORE(METRIC_NUMBER, "-1018", (char *)gold), 0);
    assert_score(SCORE(METRIC_NUMBER, "no number", (char *)gold), 0);
    assert_score(SCORE(METRIC_NUMBER, "2-1018", (char *)gold), 1);
    assert_score(SCORE(METRIC_NUMBER, "= -$3.50", "#### -3.5"), 1);
    assert_score(SCORE(METRIC_NUMBER, "-0", "#### 0"), 1);
    assert_score(SCORE(METRIC_NUMBER, "####", "#### 0"), 0);
    assert_score(SCORE(METRIC_NUMBER, "1018,", "1018"), 1);
    assert_score(SCORE(METRIC_NUMBER, "12345678901234567890123456789", "12345678901234567890123456788"), 0);
}

static void f1_counts_words(void **state) {
    (void)state;
    assert_score(SCORE(METRIC_F1, "The cat, a cat", "cat cat"), 1);
    assert_score(SCORE(METRIC_F1, "cat dog", "dog"), 2.0 / 3);
    assert_score(SCORE(METRIC_F1, "the", "the"), 0); /* nothing is left */
    assert_score(SCORE(METRIC_F1, "dog", "cat", "dog"), 1);
    assert_score(SCORE(METRIC_F1, "\xff\xfe", "cat"), 0);
}

static void rouge_joins_subsequences(void **state) {
    (void)state;
    /* Lin 2004, section 3.2: the union of "w1 w2" and "w1 w3 w5" is four of the five words, of seven different ones. */
    double precision = 4.0 / 8, recall = 4.0 / 5;
    assert_score(SCORE(METRIC_ROUGE_L, "w1 w2 w6 w7 w8. w1 w3 w8 w9 w5", "w1 w2 w3 w4 w5"),
        2 * precision * recall / (precision + recall + 1e-8));
    assert_score(SCORE(METRIC_ROUGE_L, "...", "w1"), 0);
    assert_score(SCORE(METRIC_ROUGE_L, "", "w1"), 0);
}

static void classes_share_the_point(void **state) {
    (void)state;
    char *classes[] = {"Date", "Number", "Other date"}, *answer[] = {"Date"}, *longer[] = {"Other date"};
    struct eval_item item = {
        .metric = METRIC_CLASSIFICATION, .answers = answer, .answers_count = 1, .classes = classes, .classes_count = 3};
    assert_score(eval_score(&item, "Date"), 1);
    assert_score(eval_score(&item, "Date or Number"), 0.5);
    assert_score(eval_score(&item, "Number"), 0);
    item.answers = longer;
    classes[0] = "date";
    assert_score(eval_score(&item, "Other date"), 1); /* "date" is part of the answer */
}

static void numbers_share_the_point(void **state) {
    (void)state;
    assert_score(SCORE(METRIC_RETRIEVAL, "Paragraph 12, or 3", "Paragraph 12"), 0.5);
    assert_score(SCORE(METRIC_RETRIEVAL, "\u6bb5\u843d12", "\u6bb5\u843d12"), 1);
    assert_score(SCORE(METRIC_RETRIEVAL, "Paragraph 1", "Paragraph 12"), 0);
    assert_score(SCORE(METRIC_RETRIEVAL, "12", "12"), 0); /* names no paragraph */
    assert_score(SCORE(METRIC_COUNT, "7 7 8 9", "7"), 0.5);
    assert_score(SCORE(METRIC_COUNT, "none", "7"), 0);
}

static void edit_takes_the_line_of_code(void **state) {
    (void)state;
    assert_score(SCORE(METRIC_EDIT, "\n```python\n# sum\nx = 1\ny = 2", "x = 1"), 1);
    assert_score(SCORE(METRIC_EDIT, "abcd", "bcde"), 0.75);
    assert_score(SCORE(METRIC_EDIT, "abc", "xyz"), 0);
    assert_score(SCORE(METRIC_EDIT, "# only a comment", "x"), 0);
    assert_score(SCORE(METRIC_EDIT, "ab", "abx"), 0.8);
}

static void first_line_skips_empty_ones(void **state) {
    (void)state;
    char *answers[] = {"Paris"};
    struct eval_item item = {.metric = METRIC_F1, .answers = answers, .answers_count = 1, .first_line = true};
    assert_score(eval_score(&item, "\n\nParis\nand London"), 1);
    assert_score(eval_score(&item, "London\nParis"), 0);
    assert_score(eval_score(&item, ""), 0);
}

static void errors_have_kinds(void **state) {
    (void)state;
    int32_t tokens[300];
    for (int i = 0; i < 300; i++)
        tokens[i] = i;
    assert_int_equal(eval_classify(0.5, tokens, 300, 300, 10), EVAL_RIGHT);
    assert_int_equal(eval_classify(0.4, tokens, 300, 300, 10), EVAL_OVER_LENGTH);
    assert_int_equal(eval_classify(0.4, tokens, 300, 300, 300), EVAL_WRONG);
    assert_int_equal(eval_classify(0, tokens, 299, 300, 10), EVAL_WRONG);
    assert_int_equal(eval_classify(0, tokens, 0, 300, 10), EVAL_WRONG);
    for (int i = 44; i < 300; i++) /* 64 tokens, four times */
        tokens[i] = 1000 + i % 64;
    assert_int_equal(eval_classify(0, tokens, 300, 300, 10), EVAL_REPETITIVE);
    assert_int_equal(eval_classify(0, tokens, 299, 300, 10), EVAL_WRONG);
    for (int i = 292; i < 300; i++) /* two tokens, four times */
        tokens[i] = i % 2;
    assert_int_equal(eval_classify(0, tokens, 300, 300, 10), EVAL_REPETITIVE);
    assert_int_equal(eval_classify(0, tokens + 296, 4, 300, 10), EVAL_WRONG);
    for (int i = 0; i < EVAL_ERROR_KINDS; i++)
        assert_true(strlen(eval_error_name((enum eval_error)i)) > 0);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(names_lead_back),
        cmocka_unit_test(none_scores_nothing),
        cmocka_unit_test(contains_counts_answers),
        cmocka_unit_test(exact_forgives_form_only),
        cmocka_unit_test(numbers_are_values),
        cmocka_unit_test(f1_counts_words),
        cmocka_unit_test(rouge_joins_subsequences),
        cmocka_unit_test(classes_share_the_point),
        cmocka_unit_test(numbers_share_the_point),
        cmocka_unit_test(edit_takes_the_line_of_code),
        cmocka_unit_test(first_line_skips_empty_ones),
        cmocka_unit_test(errors_have_kinds),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
