/* SPDX-License-Identifier: Apache-2.0 */
#include "policy/eval/results.h"

#include <stdlib.h>

void eval_result_clear(struct eval_result *result) {
    free(result->output);
    free(result->kept);
    result->output = result->kept = NULL;
}

int eval_results_add(struct eval_results *results, struct eval_result *result) {
    if (results->count == results->capacity) {
        size_t capacity = results->capacity * 2 + 64;
        struct eval_result *grown = realloc(results->list, capacity * sizeof *grown);
        if (grown == NULL) {
            eval_result_clear(result);
            return ERROR_MEMORY;
        }
        results->list = grown;
        results->capacity = capacity;
    }
    results->list[results->count++] = *result;
    result->output = result->kept = NULL;
    return 0;
}

void eval_results_free(struct eval_results *results) {
    for (size_t i = 0; i < results->count; i++)
        eval_result_clear(&results->list[i]);
    free(results->list);
    *results = (struct eval_results){0};
}

const struct eval_result *eval_results_find(
    const struct eval_results *results, uint32_t length, uint32_t item, uint32_t part, uint32_t variant) {
    for (size_t i = results->count; i-- > 0;) {
        const struct eval_result *result = &results->list[i];
        if (result->length == length && result->item == item && result->part == part && result->variant == variant)
            return result;
    }
    return NULL;
}
