/* SPDX-License-Identifier: Apache-2.0
 *
 * Generated tasks: same seed, same items; never longer than asked; the answer is in the text, where it should be, once.
 */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>

#include <ctype.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "policy/eval/generate.h"
#include "policy/eval/prose.h"

static const char *const names[] = {"needle", "multi-needle", "kv-retrieval", "variable-tracking", "arithmetic"};
enum { NAMES = 5 };

/* Words, marks and digits, as a tokenizer that knows every word. */
static uint32_t count_words(void *context, const char *text) {
    uint32_t count = 0;
    (void)context;
    for (size_t i = 0; text[i] != '\0'; i++) {
        bool inside = i > 0 && isalpha((unsigned char)text[i]) && isalpha((unsigned char)text[i - 1]);
        count += text[i] != ' ' && !inside;
    }
    return count;
}

static struct eval_items generate(const char *task, uint32_t length, uint32_t count, uint64_t seed, double depth) {
    struct eval_items items = {0};
    struct error error = {0};
    struct eval_generate_options options = {
        .task = task, .length = length, .count = count, .seed = seed, .depth = depth, .count_tokens = count_words};
    if (eval_generate(&options, &items, &error) != 0)
        fail_msg("%s: %s", task, error.message);
    assert_int_equal(items.count, count);
    return items;
}

static bool same_text(const char *a, const char *b) {
    return a == b || (a != NULL && b != NULL && strcmp(a, b) == 0);
}

static bool same_item(const struct eval_item *a, const struct eval_item *b) {
    bool same = same_text(a->context, b->context) && same_text(a->question, b->question) &&
                same_text(a->stop, b->stop) && same_text(a->group, b->group) && a->answers_count == b->answers_count &&
                a->max_tokens == b->max_tokens && a->metric == b->metric;
    for (uint32_t i = 0; i < a->answers_count && same; i++)
        same = same_text(a->answers[i], b->answers[i]);
    return same;
}

static size_t occurrences(const char *text, const char *part) {
    size_t count = 0;
    for (const char *at = strstr(text, part); at != NULL; at = strstr(at + 1, part))
        count++;
    return count;
}

static void seed_decides(void **state) {
    (void)state;
    for (int t = 0; t < NAMES; t++) {
        struct eval_items a = generate(names[t], 300, 6, 5, -1), b = generate(names[t], 300, 6, 5, -1);
        struct eval_items other = generate(names[t], 300, 6, 6, -1), more = generate(names[t], 300, 9, 5, -1);
        for (int i = 0; i < 6; i++) {
            assert_true(same_item(&a.items[i], &b.items[i]));
            assert_true(same_item(&a.items[i], &more.items[i])); /* the count changes nothing */
            assert_false(same_text(a.items[i].context, other.items[i].context));
            for (int j = 0; j < i; j++)
                assert_false(same_text(a.items[i].context, a.items[j].context));
        }
        eval_items_free(&a);
        eval_items_free(&b);
        eval_items_free(&other);
        eval_items_free(&more);
    }
}

/* Below the length, and not more than one sentence or so below it. */
static void length_is_used_and_kept(void **state) {
    (void)state;
    for (int t = 0; t < NAMES; t++) {
        for (uint32_t length = 260; length < 2000; length += 411) {
            struct eval_items items = generate(names[t], length, 4, length, -1);
            for (int i = 0; i < 4; i++) {
                uint32_t count = count_words(NULL, items.items[i].context) + count_words(NULL, items.items[i].question);
                assert_in_range(count, length - 45, length);
            }
            eval_items_free(&items);
        }
    }
}

static void answers_stand_in_the_text_once(void **state) {
    (void)state;
    for (int t = 0; t < NAMES - 1; t++) { /* sums are not in the text */
        struct eval_items items = generate(names[t], 900, 20, 1, -1);
        for (int i = 0; i < 20; i++) {
            const struct eval_item *item = &items.items[i];
            assert_true(item->answers_count >= 1);
            for (uint32_t a = 0; a < item->answers_count; a++) {
                size_t found = occurrences(item->context, item->answers[a]);
                if (strcmp(names[t], "variable-tracking") == 0)
                    assert_in_range(found, 1, 2); /* where it is assigned, and where it is read */
                else
                    assert_int_equal(found, 1);
                assert_null(strstr(item->question, item->answers[a]));
            }
            assert_int_equal(item->metric, METRIC_CONTAINS);
        }
        eval_items_free(&items);
    }
}

static void needle_lies_at_its_depth(void **state) {
    (void)state;
    const double depths[] = {0, 0.3, 0.5, 1};
    for (int d = 0; d < 4; d++) {
        struct eval_items items = generate("needle", 3000, 3, 7, depths[d]);
        for (int i = 0; i < 3; i++) {
            const char *context = items.items[i].context, *text = strstr(context, "\n\n") + 2;
            double place = (double)(strstr(context, items.items[i].answers[0]) - text) / (double)strlen(text);
            assert_float_equal(place, depths[d], 0.05);
        }
        eval_items_free(&items);
    }
    struct eval_items spread = generate("needle", 500, 5, 7, -1);
    assert_string_equal(spread.items[0].group, "depth 0.00");
    assert_string_equal(spread.items[3].group, "depth 0.75");
    eval_items_free(&spread);
}

static void question_names_what_the_fact_names(void **state) {
    (void)state;
    struct eval_items items = generate("multi-needle", 600, 10, 3, -1);
    for (int i = 0; i < 10; i++) {
        assert_int_equal(items.items[i].answers_count, 4);
        for (uint32_t a = 0; a < 4; a++) {
            char name[32], fact[80];
            const char *at = strstr(items.items[i].context, items.items[i].answers[a]);
            while (strncmp(at, "The special", 11) != 0)
                at--;
            assert_int_equal(sscanf(at, "The special magic number for %31[A-Za-z]", name), 1);
            snprintf(fact, sizeof fact, "number for %s is", name);
            assert_int_equal(occurrences(items.items[i].context, fact), 1);
            assert_int_equal(occurrences(items.items[i].question, name), 2);
        }
    }
    eval_items_free(&items);
}

/* Keys and values of the object are distinct, and the pair asked for is one of them. */
static void pairs_are_distinct(void **state) {
    (void)state;
    struct eval_items items = generate("kv-retrieval", 1500, 3, 3, -1);
    for (int i = 0; i < 3; i++) {
        char *text = strdup(items.items[i].context), *rest = NULL;
        char *lines[512];
        size_t count = 0;
        for (char *line = strtok_r(text, "\n", &rest); line != NULL; line = strtok_r(NULL, "\n", &rest))
            if (line[0] == '"')
                lines[count++] = line;
        assert_true(count > 50);
        for (size_t a = 0; a < count; a++) {
            char key[32];
            snprintf(key, sizeof key, "%.*s", (int)strcspn(lines[a] + 1, "\"") + 2, lines[a]);
            assert_int_equal(occurrences(items.items[i].context, key), 1);
        }
        assert_true(strstr(items.items[i].context, "}") != NULL && strstr(items.items[i].context, ",\n}") == NULL);
        free(text);
    }
    eval_items_free(&items);
}

/* The facts are read by the test's own means, and added. */
static void sums_are_right(void **state) {
    (void)state;
    struct eval_items items = generate("arithmetic", 400, 30, 11, -1);
    for (int i = 0; i < 30; i++) {
        char first[16], second[16], fact[32], good[16];
        const char *question = strstr(items.items[i].question, "How many");
        int sum = 0;
        assert_int_equal(sscanf(question, "How many %15s do %15s and %15s have", good, first, second), 3);
        assert_string_not_equal(first, second);
        for (int side = 0; side < 2; side++) {
            int number = 0;
            snprintf(fact, sizeof fact, "%s has ", side == 0 ? first : second);
            assert_int_equal(occurrences(items.items[i].context, fact), 1);
            assert_int_equal(sscanf(strstr(items.items[i].context, fact) + strlen(fact), "%d", &number), 1);
            sum += number;
        }
        assert_int_equal(atoi(items.items[i].answers[0]), sum);
    }
    eval_items_free(&items);
}

static void chains_are_followed(void **state) {
    (void)state;
    struct eval_items items = generate("variable-tracking", 700, 10, 2, -1);
    for (int i = 0; i < 10; i++) {
        const struct eval_item *item = &items.items[i];
        char fact[32], value[16];
        assert_int_equal(sscanf(strstr(item->question, "the value ") + 10, "%15[0-9]", value), 1);
        snprintf(fact, sizeof fact, "VAR %s = %s.", item->answers[0], value);
        assert_non_null(strstr(item->context, fact));
        for (uint32_t a = 1; a < item->answers_count; a++) {
            snprintf(fact, sizeof fact, "VAR %s = VAR %s.", item->answers[a], item->answers[a - 1]);
            assert_non_null(strstr(item->context, fact));
        }
    }
    eval_items_free(&items);
}

static void refusals_say_why(void **state) {
    (void)state;
    struct eval_items items = {0};
    struct error error = {0};
    struct eval_generate_options options = {.task = "needles", .length = 500, .count = 1, .count_tokens = count_words};
    assert_int_equal(eval_generate(&options, &items, &error), ERROR_INVALID);
    assert_non_null(strstr(error.message, "multi-needle"));
    options.task = "needle";
    options.length = 20;
    assert_int_equal(eval_generate(&options, &items, &error), ERROR_INVALID);
    assert_non_null(strstr(error.message, "too short"));
    eval_items_free(&items);
    for (int t = 0; t < NAMES; t++) {
        assert_true(eval_is_generated(names[t]));
        assert_non_null(strstr(eval_generated_tasks(), names[t]));
    }
    assert_false(eval_is_generated("kl"));
}

/* Filler has no digits, ends in a full stop, and fits its buffer. */
static void prose_is_plain(void **state) {
    (void)state;
    char a[PROSE_SENTENCE_MAX], b[PROSE_SENTENCE_MAX];
    size_t same = 0;
    for (uint32_t i = 0; i < 5000; i++) {
        size_t bytes = prose_sentence(1, i % 7, i, a);
        assert_int_equal(bytes, strlen(a));
        assert_true(bytes > 10 && bytes < PROSE_SENTENCE_MAX - 2);
        assert_int_equal(a[bytes - 1], '.');
        assert_true(isupper((unsigned char)a[0]));
        assert_null(strpbrk(a, "0123456789"));
        assert_null(strstr(a, "  "));
        prose_sentence(1, i % 7, i + 1, b);
        same += strcmp(a, b) == 0;
    }
    assert_in_range(same, 0, 5);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(seed_decides),
        cmocka_unit_test(length_is_used_and_kept),
        cmocka_unit_test(answers_stand_in_the_text_once),
        cmocka_unit_test(needle_lies_at_its_depth),
        cmocka_unit_test(question_names_what_the_fact_names),
        cmocka_unit_test(pairs_are_distinct),
        cmocka_unit_test(sums_are_right),
        cmocka_unit_test(chains_are_followed),
        cmocka_unit_test(refusals_say_why),
        cmocka_unit_test(prose_is_plain),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
