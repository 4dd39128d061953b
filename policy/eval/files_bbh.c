/* SPDX-License-Identifier: Apache-2.0
 *
 * BIG-Bench Hard (Suzgun et al. 2022): {examples: [{input, target}]}, answered at once. Rows are also reported by the
 * file's name, which is the name of the task.
 */
#include "policy/eval/files_internal.h"

#include <stdlib.h>
#include <string.h>

enum { SHOTS = 3, MAX_TOKENS = 64 };

static int show(struct eval_place place, FILE *out, struct error *error) {
    char *input, *target = NULL;
    int code = eval_field_text(place, NULL, "input", true, &input, error);
    if (code == 0)
        code = eval_field_text(place, NULL, "target", true, &target, error);
    if (code == 0)
        fprintf(out, "Q: %s\nA: %s\n\n", input, target);
    free(input);
    free(target);
    return code;
}

/* "dyck_languages" of "data/bbh/dyck_languages.json.gz". */
static char *task_of_file(const char *file) {
    const char *slash = strrchr(file, '/'), *name = slash == NULL ? file : slash + 1;
    return strndup(name, strcspn(name, "."));
}

static int build(
    const struct eval_loader *loader, struct eval_place place, struct eval_item *item, struct error *error) {
    char *input, *target;
    int code = eval_field_text(place, NULL, "input", true, &input, error);
    if (code == 0) {
        item->metric = METRIC_EXACT;
        item->max_tokens = MAX_TOKENS;
        item->context = strdup(loader->examples);
        item->question = eval_print("Q: %s\nA:", input);
        item->stop = strdup("\n");
        item->group = task_of_file(place.data->name);
        if (item->context == NULL || item->question == NULL || item->stop == NULL || item->group == NULL)
            code = eval_out_of_memory(error);
    }
    if (code == 0)
        code = eval_field_text(place, NULL, "target", true, &target, error);
    if (code == 0)
        code = eval_item_answer(item, target, error);
    free(input);
    return code;
}

const struct eval_format eval_format_bbh = {
    .task = "bbh", .read = eval_data_read_examples, .shots = SHOTS, .show = show, .build = build};
