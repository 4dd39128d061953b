/* SPDX-License-Identifier: Apache-2.0
 *
 * Evaluation items and metrics for comparisons in Python. JSON lines on standard output.
 *   eval_tool score                            of lines {metric, output, answers, classes?, first_line?} on standard
 *                                              input: a score a line
 *   eval_tool load TASK FILE [OPTION VALUE]... items of a file; --shots FILE, --length N, --limit N, --seed N. A token
 * is a word here. Prints the number of skipped items last
 */
#include <jansson.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "policy/eval/files.h"
#include "policy/eval/metrics.h"

static char **list_texts(const json_t *list, uint32_t *count) {
    *count = (uint32_t)json_array_size(list);
    char **texts = calloc(*count + 1, sizeof *texts);
    for (uint32_t i = 0; texts != NULL && i < *count; i++)
        texts[i] = strdup(json_string_value(json_array_get(list, i)));
    return texts;
}

static int score_line(const json_t *line) {
    struct eval_items items = {0};
    struct eval_item *item = eval_items_add(&items);
    if (item == NULL || !eval_metric_find(json_string_value(json_object_get(line, "metric")), &item->metric))
        return 1;
    item->answers = list_texts(json_object_get(line, "answers"), &item->answers_count);
    item->classes = list_texts(json_object_get(line, "classes"), &item->classes_count);
    item->first_line = json_is_true(json_object_get(line, "first_line"));
    printf("%.17g\n", eval_score(item, json_string_value(json_object_get(line, "output"))));
    eval_items_free(&items);
    return 0;
}

static int score_lines(void) {
    int code = 0;
    json_error_t problem;
    json_t *line;
    while (code == 0 && (line = json_loadf(stdin, JSON_DISABLE_EOF_CHECK, &problem)) != NULL) {
        code = score_line(line);
        json_decref(line);
    }
    return code;
}

static uint32_t count_words(void *context, const char *text) {
    uint32_t words = 0;
    (void)context;
    for (; *(text += strspn(text, " \n\t")) != '\0'; words++)
        text += strcspn(text, " \n\t");
    return words;
}

static json_t *texts_of(char *const *texts, uint32_t count) {
    json_t *list = json_array();
    for (uint32_t i = 0; i < count; i++)
        json_array_append_new(list, json_string(texts[i]));
    return list;
}

static void print_item(const struct eval_item *item) {
    json_t *line = json_pack("{ss ss so so ss? si sb sb ss ss?}", "context", item->context, "question", item->question,
        "answers", texts_of(item->answers, item->answers_count), "classes",
        texts_of(item->classes, item->classes_count), "stop", item->stop, "max_tokens", (int)item->max_tokens, "chat",
        item->chat, "first_line", item->first_line, "metric", eval_metric_name(item->metric), "group", item->group);
    json_dumpf(line, stdout, JSON_COMPACT);
    putchar('\n');
    json_decref(line);
}

static int load(int count, char **words) {
    struct eval_file_options options = {.task = words[0], .file = words[1], .count_tokens = count_words};
    struct eval_items items;
    struct error error;
    uint32_t skipped;
    for (int i = 2; i + 1 < count; i += 2) {
        if (strcmp(words[i], "--shots") == 0)
            options.shots = words[i + 1];
        else if (strcmp(words[i], "--length") == 0)
            options.length = (uint32_t)strtoul(words[i + 1], NULL, 10);
        else if (strcmp(words[i], "--limit") == 0)
            options.limit = (uint32_t)strtoul(words[i + 1], NULL, 10);
        else if (strcmp(words[i], "--seed") == 0)
            options.seed = strtoul(words[i + 1], NULL, 10);
    }
    if (eval_load(&options, &items, &skipped, &error) != 0) {
        fprintf(stderr, "%s\n", error.message);
        return 1;
    }
    for (size_t i = 0; i < items.count; i++)
        print_item(&items.items[i]);
    printf("%u\n", skipped);
    eval_items_free(&items);
    return 0;
}

int main(int argc, char **argv) {
    if (argc == 2 && strcmp(argv[1], "score") == 0)
        return score_lines();
    if (argc >= 4 && strcmp(argv[1], "load") == 0)
        return load(argc - 2, argv + 2);
    fprintf(stderr, "usage: %s score | load TASK FILE [OPTION VALUE]...\n", argv[0]);
    return 2;
}
