/* SPDX-License-Identifier: Apache-2.0
 *
 * Anyone's own prompts and answers.
 */
#include "policy/eval/files_internal.h"

#include "policy/eval/metrics.h"

#include <stdlib.h>
#include <string.h>

enum { DEFAULT_MAX_TOKENS = 64, MOST_MAX_TOKENS = 65536, MOST_ANSWER = 65536 };

static int read_prompt(struct eval_place place, struct eval_item *item, struct error *error) {
    int code = eval_field_text(place, NULL, "prompt", false, &item->context, error);
    if (code != 0)
        return code;
    if (item->context != NULL) {
        if (json_object_get(place.record->value, "context") != NULL ||
            json_object_get(place.record->value, "question") != NULL)
            return eval_field_error(place, error, "prompt", "stands beside context or question");
        item->question = strdup("");
        return item->question == NULL ? eval_out_of_memory(error) : 0;
    }
    if (json_object_get(place.record->value, "context") == NULL)
        return eval_field_error(place, error, "prompt", "missing, and so are context and question");
    code = eval_field_text(place, NULL, "context", true, &item->context, error);
    return code != 0 ? code : eval_field_text(place, NULL, "question", true, &item->question, error);
}

static int read_metric(struct eval_place place, struct eval_item *item, struct error *error) {
    char *name;
    item->metric = METRIC_F1;
    int code = eval_field_text(place, NULL, "metric", false, &name, error);
    if (code == 0 && name != NULL && !eval_metric_find(name, &item->metric)) {
        char *problem = eval_print("not one of %s", eval_metric_names());
        code = eval_field_error(place, error, "metric", problem == NULL ? "unknown" : problem);
        free(problem);
    }
    free(name);
    if (code == 0 && item->metric == METRIC_CLASSIFICATION)
        code = eval_field_texts(place, "classes", &item->classes, &item->classes_count, error);
    return code;
}

static int read_answers(struct eval_place place, struct eval_item *item, struct error *error) {
    char *answer;
    if (json_object_get(place.record->value, "answers") != NULL)
        return eval_field_texts(place, "answers", &item->answers, &item->answers_count, error);
    int code = eval_field_text(place, NULL, "answer", item->metric != METRIC_NONE, &answer, error);
    if (code != 0 || answer == NULL)
        return code;
    if (strlen(answer) > MOST_ANSWER) {
        free(answer);
        return eval_field_error(place, error, "answer", "longer than 65,536 bytes");
    }
    return eval_item_answer(item, answer, error);
}

static int read_flag(struct eval_place place, const char *field, bool *flag, struct error *error) {
    const json_t *value = json_object_get(place.record->value, field);
    if (value != NULL && !json_is_boolean(value))
        return eval_field_error(place, error, field, "neither true nor false");
    *flag = json_is_true(value);
    return 0;
}

static int read_max_tokens(struct eval_place place, struct eval_item *item, struct error *error) {
    const json_t *value = json_object_get(place.record->value, "max_tokens");
    item->max_tokens = DEFAULT_MAX_TOKENS;
    if (value == NULL)
        return 0;
    if (!json_is_integer(value) || json_integer_value(value) < 1 || json_integer_value(value) > MOST_MAX_TOKENS)
        return eval_field_error(place, error, "max_tokens", "not a whole number from 1 to 65536");
    item->max_tokens = (uint32_t)json_integer_value(value);
    return 0;
}

static int build(
    const struct eval_loader *loader, struct eval_place place, struct eval_item *item, struct error *error) {
    (void)loader;
    int code = read_prompt(place, item, error);
    if (code == 0)
        code = read_metric(place, item, error);
    if (code == 0)
        code = read_answers(place, item, error);
    if (code == 0)
        code = read_max_tokens(place, item, error);
    if (code == 0)
        code = eval_field_text(place, NULL, "stop", false, &item->stop, error);
    if (code == 0 && item->stop != NULL && item->stop[0] == '\0')
        code = eval_field_error(place, error, "stop", "empty");
    if (code == 0)
        code = eval_field_text(place, NULL, "group", false, &item->group, error);
    if (code == 0)
        code = read_flag(place, "chat", &item->chat, error);
    if (code == 0)
        code = read_flag(place, "first_line", &item->first_line, error);
    return code;
}

const struct eval_format eval_format_jsonl = {.task = "jsonl", .read = eval_data_read_lines, .build = build};
