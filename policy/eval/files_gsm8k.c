/* SPDX-License-Identifier: Apache-2.0
 *
 * GSM8K (Cobbe et al. 2021): {question, answer}, the answer a solution that ends in "#### number". The form of the
 * prompt is that of EleutherAI's lm-evaluation-harness: solutions as they stand, calculator annotations included.
 */
#include "policy/eval/files_internal.h"

#include <stdlib.h>
#include <string.h>

enum { SHOTS = 8, MAX_TOKENS = 256 };

static int read_fields(struct eval_place place, char **question, char **answer, struct error *error) {
    *answer = NULL;
    int code = eval_field_text(place, NULL, "question", true, question, error);
    if (code == 0)
        code = eval_field_text(place, NULL, "answer", true, answer, error);
    if (code != 0)
        return code;
    const char *mark = strstr(*answer, "####");
    if (mark == NULL || strpbrk(mark, "0123456789") == NULL)
        return eval_field_error(place, error, "answer", "has no number behind ####");
    return 0;
}

static int show(struct eval_place place, FILE *out, struct error *error) {
    char *question, *answer;
    int code = read_fields(place, &question, &answer, error);
    if (code == 0)
        fprintf(out, "Question: %s\nAnswer: %s\n\n", question, answer);
    free(question);
    free(answer);
    return code;
}

static int build(
    const struct eval_loader *loader, struct eval_place place, struct eval_item *item, struct error *error) {
    char *question, *answer;
    int code = read_fields(place, &question, &answer, error);
    if (code == 0) {
        item->metric = METRIC_NUMBER;
        item->max_tokens = MAX_TOKENS;
        item->context = strdup(loader->examples);
        item->question = eval_print("Question: %s\nAnswer:", question);
        item->stop = strdup("Question:");
        code = item->context == NULL || item->question == NULL || item->stop == NULL ? eval_out_of_memory(error) : 0;
    }
    if (code == 0) {
        code = eval_item_answer(item, answer, error);
        answer = NULL;
    }
    free(question);
    free(answer);
    return code;
}

const struct eval_format eval_format_gsm8k = {
    .task = "gsm8k", .read = eval_data_read_lines, .shots = SHOTS, .show = show, .build = build};
