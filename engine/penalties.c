/* SPDX-License-Identifier: Apache-2.0 */
#include "engine/penalties.h"

#include <stdlib.h>
#include <string.h>

bool penalty_options_neutral(const struct penalty_options *options) {
    return options->presence == 0 && options->frequency == 0 && options->repetition == 1 && options->biases_count == 0;
}

void penalties_free(struct penalties *penalties) {
    free(penalties->changes);
    free(penalties->times);
    *penalties = (struct penalties){0};
}

static int penalties_reserve(struct penalties *penalties, uint32_t capacity) {
    if (capacity <= penalties->capacity)
        return 0;
    struct logit_change *changes = realloc(penalties->changes, capacity * sizeof *changes);
    if (changes == NULL)
        return ERROR_MEMORY;
    penalties->changes = changes;
    uint32_t *times = realloc(penalties->times, capacity * sizeof *times);
    if (times == NULL)
        return ERROR_MEMORY;
    penalties->times = times;
    penalties->capacity = capacity;
    return 0;
}

static int compare_ids(const void *a, const void *b) {
    int32_t left = *(const int32_t *)a, right = *(const int32_t *)b;
    return (left > right) - (left < right);
}

/* The index of the token's change, or of the first behind it. */
static uint32_t penalties_find(const struct penalties *penalties, int32_t token) {
    uint32_t low = 0, high = penalties->count;
    while (low < high) {
        uint32_t middle = low + (high - low) / 2;
        if (penalties->changes[middle].token < token)
            low = middle + 1;
        else
            high = middle;
    }
    return low;
}

static void penalties_repeat(struct logit_change *change, const struct penalty_options *options) {
    change->positive = 1 / options->repetition;
    change->negative = options->repetition;
}

/* Tokens of the prompt and biased ones, in order. There is room. */
static void penalties_list(
    struct penalties *penalties, const struct penalty_options *options, int32_t *ids, uint32_t ids_count) {
    for (uint32_t i = 0; i < options->biases_count; i++)
        ids[ids_count++] = options->biases[i].token;
    qsort(ids, ids_count, sizeof *ids, compare_ids);
    for (uint32_t i = 0; i < ids_count; i++)
        if (i == 0 || ids[i] != ids[i - 1]) {
            penalties->times[penalties->count] = 0;
            penalties->changes[penalties->count++] =
                (struct logit_change){.token = ids[i], .positive = 1, .negative = 1};
        }
}

int penalties_begin(
    struct penalties *penalties, const struct penalty_options *options, const int32_t *tokens, uint32_t tokens_count) {
    uint32_t of_prompt = options->repetition == 1 ? 0 : tokens_count;
    uint32_t most = of_prompt + options->biases_count;
    if (most == 0)
        return 0;
    int32_t *ids = malloc(most * sizeof *ids);
    if (ids == NULL || penalties_reserve(penalties, most) != 0) {
        free(ids);
        return ERROR_MEMORY;
    }
    if (of_prompt > 0)
        memcpy(ids, tokens, of_prompt * sizeof *ids);
    penalties_list(penalties, options, ids, of_prompt);
    free(ids);
    for (uint32_t i = 0; i < of_prompt; i++)
        penalties_repeat(&penalties->changes[penalties_find(penalties, tokens[i])], options);
    for (uint32_t i = 0; i < options->biases_count; i++)
        penalties->changes[penalties_find(penalties, options->biases[i].token)].add = options->biases[i].bias;
    return 0;
}

int penalties_add(struct penalties *penalties, const struct penalty_options *options, int32_t token) {
    if (options->presence == 0 && options->frequency == 0 && options->repetition == 1)
        return 0;
    uint32_t at = penalties_find(penalties, token), behind = penalties->count - at;
    if (behind == 0 || penalties->changes[at].token != token) {
        if (penalties->count == penalties->capacity && penalties_reserve(penalties, 2 * penalties->count + 16) != 0)
            return ERROR_MEMORY;
        memmove(penalties->changes + at + 1, penalties->changes + at, behind * sizeof *penalties->changes);
        memmove(penalties->times + at + 1, penalties->times + at, behind * sizeof *penalties->times);
        penalties->changes[at] = (struct logit_change){.token = token, .positive = 1, .negative = 1};
        penalties->times[at] = 0;
        penalties->count++;
    }
    struct logit_change *change = &penalties->changes[at];
    penalties_repeat(change, options);
    if (penalties->times[at]++ == 0)
        change->add -= options->presence;
    change->add -= options->frequency;
    return 0;
}
