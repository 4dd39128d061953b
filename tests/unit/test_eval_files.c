/* SPDX-License-Identifier: Apache-2.0
 *
 * Tasks from files: what items they become, and what is said of files that are wrong. The files are written here.
 */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>
#include <zlib.h>

#include "policy/eval/files.h"

static char file[64];

static void write_bytes(const char *bytes, size_t count) {
    FILE *out = fopen(file, "wb");
    assert_non_null(out);
    assert_int_equal(fwrite(bytes, 1, count, out), count);
    fclose(out);
}

static void write_text(const char *text) {
    write_bytes(text, strlen(text));
}

/* A token is a word. */
static uint32_t count_words(void *context, const char *text) {
    uint32_t words = 0;
    (void)context;
    for (; *(text += strspn(text, " \n")) != '\0'; words++)
        text += strcspn(text, " \n");
    return words;
}

struct loaded {
    struct eval_items items;
    uint32_t skipped;
};

static struct loaded load(struct eval_file_options options) {
    struct loaded loaded;
    struct error error = {0};
    options.file = file;
    options.count_tokens = count_words;
    if (eval_load(&options, &loaded.items, &loaded.skipped, &error) != 0)
        fail_msg("%s", error.message);
    return loaded;
}

static void assert_fails(struct eval_file_options options, int code, const char *part) {
    struct loaded loaded;
    struct error error = {0};
    options.file = options.file == NULL ? file : options.file;
    options.count_tokens = count_words;
    assert_int_equal(eval_load(&options, &loaded.items, &loaded.skipped, &error), code);
    assert_int_equal(error.code, code);
    if (strstr(error.message, part) == NULL)
        fail_msg("\"%s\" does not say \"%s\"", error.message, part);
    assert_int_equal(loaded.items.count, 0);
}

static void write_gsm8k(int count) {
    FILE *out = fopen(file, "w");
    assert_non_null(out);
    for (int i = 0; i < count; i++)
        fprintf(out, "{\"question\": \"What is %d?\", \"answer\": \"It is <<%d>>.\\n#### %d\"}\n", i, i, i);
    fclose(out);
}

static void gsm8k_shows_eight(void **state) {
    (void)state;
    write_gsm8k(10);
    struct loaded loaded = load((struct eval_file_options){.task = "gsm8k"});
    const struct eval_item *item = &loaded.items.items[0];
    assert_int_equal(loaded.items.count, 2);
    assert_ptr_equal(strstr(item->context, "Question: What is 0?\nAnswer: It is <<0>>.\n#### 0\n\n"), item->context);
    assert_non_null(strstr(item->context, "#### 7\n\n"));
    assert_null(strstr(item->context, "#### 8"));
    assert_string_equal(item->question, "Question: What is 8?\nAnswer:");
    assert_string_equal(item->answers[0], "It is <<8>>.\n#### 8");
    assert_int_equal(item->metric, METRIC_NUMBER);
    assert_string_equal(item->stop, "Question:");
    assert_false(item->chat);
    eval_items_free(&loaded.items);
    loaded = load((struct eval_file_options){.task = "gsm8k", .shots = file});
    assert_int_equal(loaded.items.count, 10);
    eval_items_free(&loaded.items);
}

static void gsm8k_needs_more_than_its_examples(void **state) {
    (void)state;
    write_gsm8k(8);
    assert_fails((struct eval_file_options){.task = "gsm8k"}, ERROR_FORMAT, "none is left to ask");
    write_gsm8k(7);
    assert_fails((struct eval_file_options){.task = "gsm8k"}, ERROR_FORMAT, "has 7 lines; gsm8k shows 8");
    write_text("{\"question\": \"q\", \"answer\": \"12\"}\n");
    assert_fails((struct eval_file_options){.task = "gsm8k", .shots = "/nonexistent"}, ERROR_IO, "/nonexistent");
    assert_fails((struct eval_file_options){.task = "gsm8k", .shots = file}, ERROR_FORMAT, "has 1 lines");
}

static void bbh_shows_three(void **state) {
    (void)state;
    write_text(
        "{\"canary\": \"x\", \"examples\": [{\"input\": \"a\", \"target\": \"(A)\"}, {\"input\": \"b\", \"target\": "
        "\"(B)\"}, {\"input\": \"c\", \"target\": \"(C)\"}, {\"input\": \"d\", \"target\": \"(D)\"}]}");
    struct loaded loaded = load((struct eval_file_options){.task = "bbh"});
    const struct eval_item *item = &loaded.items.items[0];
    assert_int_equal(loaded.items.count, 1);
    assert_string_equal(item->context, "Q: a\nA: (A)\n\nQ: b\nA: (B)\n\nQ: c\nA: (C)\n\n");
    assert_string_equal(item->question, "Q: d\nA:");
    assert_string_equal(item->answers[0], "(D)");
    assert_int_equal(item->metric, METRIC_EXACT);
    assert_true(strlen(item->group) > 0 && strchr(item->group, '/') == NULL && strchr(item->group, '.') == NULL);
    eval_items_free(&loaded.items);
}

static void bbh_refuses_other_shapes(void **state) {
    (void)state;
    struct eval_file_options bbh = {.task = "bbh"};
    write_text("[1]");
    assert_fails(bbh, ERROR_FORMAT, "field examples: not a list");
    write_text("{\"examples\": []}");
    assert_fails(bbh, ERROR_FORMAT, "has no examples");
    write_text("{\"examples\": [1]}");
    assert_fails(bbh, ERROR_FORMAT, "example 1: not a JSON object");
    write_text("{\"examples\": [{\"input\": \"a\", \"target\": \"x\"}, {\"input\": \"a\"}, {}, {}]}");
    assert_fails(bbh, ERROR_FORMAT, "example 2: field target: missing");
    write_text("{\"examples\":\n [{]}");
    assert_fails(bbh, ERROR_FORMAT, "line 2: not JSON");
}

/* Passages of n words each; the answer of line n is "gold<n>". */
static void write_qa(int lines) {
    FILE *out = fopen(file, "w");
    assert_non_null(out);
    for (int i = 0; i < lines; i++)
        fprintf(out,
            "{\"question\": \"which %d\", \"answers\": [\"gold%dx\"], \"ctxs\": [{\"title\": \"t%d\", \"text\": \"here "
            "is "
            "gold%dx for you\", \"isgold\": true}]}\n",
            i, i, i, i);
    fclose(out);
}

static uint32_t count_occurrences(const char *text, const char *part) {
    uint32_t count = 0;
    while ((text = strstr(text, part)) != NULL) {
        count++;
        text += strlen(part);
    }
    return count;
}

static void qa_is_filled_up(void **state) {
    (void)state;
    write_qa(100);
    struct loaded loaded = load((struct eval_file_options){.task = "qa", .length = 200, .seed = 3});
    bool early = false, late = false;
    assert_int_equal(loaded.items.count, 100);
    for (size_t i = 0; i < loaded.items.count; i++) {
        const struct eval_item *item = &loaded.items.items[i];
        uint32_t words = count_words(NULL, item->context) + count_words(NULL, item->question);
        assert_in_range(words, 200 - 8, 200); /* a passage has eight words with its heading */
        assert_int_equal(count_occurrences(item->context, item->answers[0]), 1);
        assert_int_equal(item->metric, METRIC_CONTAINS_ANY);
        early |= strcmp(item->group, "gold early") == 0;
        late |= strcmp(item->group, "gold late") == 0;
    }
    assert_true(early && late);
    eval_items_free(&loaded.items);
}

static void qa_has_twenty_passages_without_a_length(void **state) {
    (void)state;
    write_qa(30);
    struct loaded loaded = load((struct eval_file_options){.task = "qa", .limit = 1});
    assert_int_equal(count_occurrences(loaded.items.items[0].context, "Document ["), 20);
    eval_items_free(&loaded.items);
    write_qa(1);
    loaded = load((struct eval_file_options){.task = "qa"});
    assert_int_equal(count_occurrences(loaded.items.items[0].context, "Document ["), 1);
    eval_items_free(&loaded.items);
}

static void qa_takes_no_passage_that_answers(void **state) {
    (void)state;
    write_text(
        "{\"question\": \"q\", \"answers\": [\"The Moon\"], \"ctxs\": [{\"title\": \"own\", \"text\": \"nothing\"}, "
        "{\"title\": \"gold\", \"text\": \"moon\", \"isgold\": true}]}\n"
        "{\"question\": \"q\", \"answers\": [\"x\"], \"ctxs\": [{\"title\": \"full\", \"text\": \"a MOON!\", "
        "\"isgold\": true}]}\n"
        "{\"question\": \"q\", \"answers\": [\"x\"], \"ctxs\": [{\"title\": \"other\", \"text\": \"sun\", \"isgold\": "
        "true}]}\n");
    struct loaded loaded = load((struct eval_file_options){.task = "qa"});
    const char *context = loaded.items.items[0].context;
    assert_non_null(strstr(context, "own"));
    assert_non_null(strstr(context, "other"));
    assert_null(strstr(context, "full"));
    eval_items_free(&loaded.items);
}

static void qa_names_what_is_wrong(void **state) {
    (void)state;
    struct eval_file_options qa = {.task = "qa"};
    write_text("{\"question\": \"q\", \"answers\": [], \"ctxs\": []}");
    assert_fails(qa, ERROR_FORMAT, "line 1: field answers");
    write_text("\n\n{\"question\": \"q\", \"answers\": [\"a\", 1]}");
    assert_fails(qa, ERROR_FORMAT, "line 3: field answers: not a list of texts");
    write_text("{\"question\": \"q\", \"answers\": [\"a\"], \"ctxs\": [{\"title\": \"t\", \"text\": \"x\"}]}");
    assert_fails(qa, ERROR_FORMAT, "field ctxs: no passage has isgold true");
    write_text("{\"question\": \"q\", \"answers\": [\"a\"], \"ctxs\": [{\"title\": \"t\", \"isgold\": true}]}");
    assert_fails(qa, ERROR_FORMAT, "field ctxs");
    write_text("{\"question\": \"q\", \"answers\": [\"a\"]}");
    assert_fails(qa, ERROR_FORMAT, "field ctxs: missing");
}

static void kv_prints_the_object(void **state) {
    (void)state;
    write_text("{\"ordered_kv_records\": [[\"a\", \"1\"], [\"b\\\"\", \"2\"]], \"key\": \"a\", \"value\": \"1\"}\n");
    struct loaded loaded = load((struct eval_file_options){.task = "kv"});
    const struct eval_item *item = &loaded.items.items[0];
    assert_non_null(strstr(item->context, "JSON data:\n{\"a\": \"1\",\n \"b\\\"\": \"2\"}\n"));
    assert_string_equal(item->question, "\nKey: \"a\"\nCorresponding value:");
    assert_string_equal(item->answers[0], "1");
    assert_int_equal(item->metric, METRIC_CONTAINS);
    eval_items_free(&loaded.items);
    write_text("{\"ordered_kv_records\": [[\"a\", \"1\"]], \"key\": \"a\", \"value\": \"2\"}\n");
    assert_fails((struct eval_file_options){.task = "kv"}, ERROR_FORMAT, "field key: not in ordered_kv_records");
    write_text("{\"ordered_kv_records\": [[\"a\"]], \"key\": \"a\", \"value\": \"2\"}\n");
    assert_fails((struct eval_file_options){.task = "kv"}, ERROR_FORMAT, "field ordered_kv_records");
}

static void longbench_knows_its_datasets(void **state) {
    (void)state;
    struct eval_file_options longbench = {.task = "longbench"};
    write_text("{\"input\": \"Q\", \"context\": \"C\", \"answers\": [\"loc\"], \"all_classes\": [\"loc\", \"num\"], "
               "\"dataset\": \"trec_e\"}\n");
    struct loaded loaded = load(longbench);
    assert_string_equal(loaded.items.items[0].question, "\nQ");
    assert_int_equal(loaded.items.items[0].classes_count, 2);
    assert_int_equal(loaded.items.items[0].metric, METRIC_CLASSIFICATION);
    eval_items_free(&loaded.items);
    write_text("{\"input\": \"Q\", \"context\": \"C\", \"answers\": [\"loc\"], \"all_classes\": null, \"dataset\": "
               "\"trec\"}\n");
    assert_fails(longbench, ERROR_FORMAT, "line 1: field all_classes");
    write_text("{\"context\": \"C\", \"answers\": [\"x\"], \"dataset\": \"nosuch\"}\n");
    assert_fails(longbench, ERROR_FORMAT, "line 1: field dataset");
    write_text("{\"input\": \"Q\", \"context\": \"C\", \"answers\": [\"x\"], \"dataset\": \"vcsum\"}\n");
    assert_fails(longbench, ERROR_UNSUPPORTED, "vcsum");
    write_text("{\"input\": \"Q\", \"context\": \"C\", \"answers\": [\"x\"], \"dataset\": \"passage_retrieval_en\"}\n");
    assert_fails(longbench, ERROR_FORMAT, "field answers: names no paragraph");
}

static void jsonl_has_defaults(void **state) {
    (void)state;
    write_text(
        "{\"prompt\": \"p\", \"answer\": \"a\"}\r\n \n{\"context\": \"c\", \"question\": \"q\", \"answers\": [\"1\", "
        "\"2\"], \"metric\": \"contains\", \"max_tokens\": 5, \"stop\": \";\", \"chat\": true, \"first_line\": true, "
        "\"group\": \"g\"}\n{\"prompt\": \"p\", \"metric\": \"none\"}");
    struct loaded loaded = load((struct eval_file_options){.task = "jsonl"});
    assert_int_equal(loaded.items.count, 3);
    struct eval_item *item = &loaded.items.items[0];
    assert_string_equal(item->context, "p");
    assert_string_equal(item->question, "");
    assert_int_equal(item->metric, METRIC_F1);
    assert_int_equal(item->max_tokens, 64);
    assert_false(item->chat || item->first_line);
    assert_null(item->stop);
    item++;
    assert_string_equal(item->question, "q");
    assert_int_equal(item->answers_count, 2);
    assert_int_equal(item->max_tokens, 5);
    assert_string_equal(item->stop, ";");
    assert_string_equal(item->group, "g");
    assert_true(item->chat && item->first_line);
    assert_int_equal(loaded.items.items[2].answers_count, 0);
    eval_items_free(&loaded.items);
}

static void jsonl_names_what_is_wrong(void **state) {
    (void)state;
    static const char *const cases[][2] = {
        {"{\"answer\": \"a\"}", "field prompt"},
        {"{\"prompt\": 1, \"answer\": \"a\"}", "field prompt: not a text"},
        {"{\"prompt\": \"p\", \"question\": \"q\", \"answer\": \"a\"}", "field prompt: stands beside"},
        {"{\"context\": \"c\", \"answer\": \"a\"}", "field question: missing"},
        {"{\"prompt\": \"p\"}", "field answer: missing"},
        {"{\"prompt\": \"p\", \"answer\": \"a\", \"metric\": \"good\"}", "field metric: not one of none, contains"},
        {"{\"prompt\": \"p\", \"answer\": \"a\", \"metric\": \"classification\"}", "field classes: missing"},
        {"{\"prompt\": \"p\", \"answer\": \"a\", \"max_tokens\": 0}", "field max_tokens"},
        {"{\"prompt\": \"p\", \"answer\": \"a\", \"max_tokens\": 1.5}", "field max_tokens"},
        {"{\"prompt\": \"p\", \"answer\": \"a\", \"stop\": \"\"}", "field stop: empty"},
        {"{\"prompt\": \"p\", \"answer\": \"a\", \"chat\": 1}", "field chat"},
        {"{\"prompt\": \"p\", \"answer\": \"\xff\"}", "line 1: not JSON"},
        {"{\"prompt\": \"p\\u0000\", \"answer\": \"a\"}", "line 1: not JSON"},
        {"{\"prompt\": \"p\", \"answer\": \"a\"} x", "line 1: not JSON"},
        {"[1]", "line 1: not a JSON object"},
        {"\n \n", "has no lines"},
        {"", "has no lines"},
    };
    for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++) {
        write_text(cases[i][0]);
        assert_fails((struct eval_file_options){.task = "jsonl"}, ERROR_FORMAT, cases[i][1]);
    }
}

static void messages_quote_no_control_characters(void **state) {
    (void)state;
    struct eval_file_options options = {.task = "jsonl", .file = file};
    struct eval_items items;
    struct error error;
    uint32_t skipped;
    write_text("{\"prompt\": \x1b[31m}");
    assert_int_equal(eval_load(&options, &items, &skipped, &error), ERROR_FORMAT);
    assert_null(strpbrk(error.message, "\n\x1b"));
}

static void compressed_files_are_read(void **state) {
    (void)state;
    static const char line[] = "{\"prompt\": \"p\", \"answer\": \"a\"}\n";
    gzFile out = gzopen(file, "wb");
    for (int i = 0; i < 5000; i++)
        assert_int_equal(gzwrite(out, line, sizeof line - 1), sizeof line - 1);
    gzclose(out);
    struct loaded loaded = load((struct eval_file_options){.task = "jsonl"});
    assert_int_equal(loaded.items.count, 5000);
    eval_items_free(&loaded.items);

    char bytes[4096];
    FILE *in = fopen(file, "rb");
    size_t count = fread(bytes, 1, sizeof bytes, in);
    fclose(in);
    assert_true(count > 100);
    write_bytes(bytes, count - 20);
    assert_fails((struct eval_file_options){.task = "jsonl"}, ERROR_FORMAT, file);
    bytes[count / 2] ^= 0x55;
    write_bytes(bytes, count);
    assert_fails((struct eval_file_options){.task = "jsonl"}, ERROR_FORMAT, file);
}

static void lengths_and_limits_choose(void **state) {
    (void)state;
    FILE *out = fopen(file, "w");
    for (int i = 1; i <= 50; i++) {
        fprintf(out, "{\"answer\": \"%d\", \"prompt\": \"", i);
        for (int j = 0; j < i; j++)
            fputs("w ", out);
        fputs("\"}\n", out);
    }
    fclose(out);
    struct loaded loaded = load((struct eval_file_options){.task = "jsonl", .length = 20});
    assert_int_equal(loaded.items.count, 20);
    assert_int_equal(loaded.skipped, 30);
    eval_items_free(&loaded.items);
    loaded = load((struct eval_file_options){.task = "jsonl", .length = 20, .limit = 5, .seed = 9});
    assert_int_equal(loaded.items.count, 5);
    for (size_t i = 0; i < 5; i++) {
        assert_in_range(atoi(loaded.items.items[i].answers[0]), 1, 20);
        assert_true(i == 0 || atoi(loaded.items.items[i - 1].answers[0]) < atoi(loaded.items.items[i].answers[0]));
    }
    eval_items_free(&loaded.items);
    write_text("{\"prompt\": \"a b c\", \"answer\": \"a\"}\n");
    assert_fails((struct eval_file_options){.task = "jsonl", .length = 2}, ERROR_INVALID, "the shortest has 3");
}

static void other_things_are_no_files(void **state) {
    (void)state;
    assert_fails((struct eval_file_options){.task = "jsonl", .file = "/"}, ERROR_IO, "is not a file");
    assert_fails((struct eval_file_options){.task = "jsonl", .file = "/nonexistent"}, ERROR_IO, "cannot open");
    assert_fails((struct eval_file_options){.task = "glue"}, ERROR_INVALID, eval_file_tasks());
    write_text("{\"prompt\": \"p\", \"answer\": \"a\"}\n");
    assert_fails((struct eval_file_options){.task = "jsonl", .shots = file}, ERROR_INVALID, "shows no examples");
    assert_true(eval_is_file_task("qa"));
    assert_false(eval_is_file_task("needle"));
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(gsm8k_shows_eight),
        cmocka_unit_test(gsm8k_needs_more_than_its_examples),
        cmocka_unit_test(bbh_shows_three),
        cmocka_unit_test(bbh_refuses_other_shapes),
        cmocka_unit_test(qa_is_filled_up),
        cmocka_unit_test(qa_has_twenty_passages_without_a_length),
        cmocka_unit_test(qa_takes_no_passage_that_answers),
        cmocka_unit_test(qa_names_what_is_wrong),
        cmocka_unit_test(kv_prints_the_object),
        cmocka_unit_test(longbench_knows_its_datasets),
        cmocka_unit_test(jsonl_has_defaults),
        cmocka_unit_test(jsonl_names_what_is_wrong),
        cmocka_unit_test(messages_quote_no_control_characters),
        cmocka_unit_test(compressed_files_are_read),
        cmocka_unit_test(lengths_and_limits_choose),
        cmocka_unit_test(other_things_are_no_files),
    };
    snprintf(file, sizeof file, "/tmp/test_eval_files.XXXXXX");
    int descriptor = mkstemp(file);
    if (descriptor < 0)
        return 1;
    close(descriptor);
    int failed = cmocka_run_group_tests(tests, NULL, NULL);
    unlink(file);
    return failed;
}
