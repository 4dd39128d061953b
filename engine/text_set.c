/* SPDX-License-Identifier: Apache-2.0 */
#include "engine/text_set.h"

#include <stdlib.h>
#include <string.h>

static int compare(struct gguf_string left, struct gguf_string right) {
    size_t common = left.bytes < right.bytes ? left.bytes : right.bytes;
    int order = memcmp(left.text, right.text, common);
    return order != 0 ? order : (left.bytes > right.bytes) - (left.bytes < right.bytes);
}

static int compare_tokens(const void *a, const void *b, void *vocabulary) {
    return compare(
        vocabulary_bytes(vocabulary, *(const uint32_t *)a), vocabulary_bytes(vocabulary, *(const uint32_t *)b));
}

int text_set_create(struct text_set *set, const struct vocabulary *vocabulary, unsigned kinds, struct error *error) {
    uint32_t count = 0;
    *set = (struct text_set){.vocabulary = vocabulary};
    for (uint32_t id = 0; id < vocabulary->count; id++)
        count += kinds >> vocabulary->kinds[id] & 1;
    set->ids = malloc(((size_t)count + 1) * sizeof *set->ids);
    if (set->ids == NULL)
        return error_set(error, ERROR_MEMORY, "no memory for %u special tokens", count);
    for (uint32_t id = 0; id < vocabulary->count; id++) {
        struct gguf_string text = vocabulary_bytes(vocabulary, id);
        if ((kinds >> vocabulary->kinds[id] & 1) == 0 || text.bytes == 0)
            continue;
        if (text.bytes > TEXT_SET_BYTES_MAX)
            return error_set(error, ERROR_UNSUPPORTED, "the text of special token %u has %zu bytes; at most %d", id,
                text.bytes, TEXT_SET_BYTES_MAX);
        set->ids[set->count++] = id;
        set->begins[(unsigned char)text.text[0]] = true;
    }
    qsort_r(set->ids, set->count, sizeof *set->ids, compare_tokens, (void *)vocabulary);
    return 0;
}

void text_set_free(struct text_set *set) {
    free(set->ids);
    *set = (struct text_set){0};
}

/* The first of ids[low, high) whose byte at `depth` is not below `byte`. All have more bytes than depth. */
static uint32_t lower_bound(const struct text_set *set, uint32_t low, uint32_t high, size_t depth, unsigned byte) {
    while (low < high) {
        uint32_t middle = low + (high - low) / 2;
        if ((unsigned char)vocabulary_bytes(set->vocabulary, set->ids[middle]).text[depth] < byte)
            low = middle + 1;
        else
            high = middle;
    }
    return low;
}

int32_t text_set_match(const struct text_set *set, const char *text, size_t bytes) {
    uint32_t low = 0, high = set->count; /* those that begin with text[0, depth) */
    int32_t longest = -1;
    if (bytes == 0 || !set->begins[(unsigned char)text[0]])
        return -1;
    for (size_t depth = 0;; depth++) {
        while (low < high && vocabulary_bytes(set->vocabulary, set->ids[low]).bytes == depth)
            longest = (int32_t)set->ids[low++];
        if (low == high || depth == bytes)
            return longest;
        unsigned byte = (unsigned char)text[depth];
        low = lower_bound(set, low, high, depth, byte);
        high = lower_bound(set, low, high, depth, byte + 1);
    }
}

int32_t text_set_find(const struct text_set *set, const char *text, size_t bytes) {
    uint32_t low = 0, high = set->count;
    if (bytes == 0 || !set->begins[(unsigned char)text[0]])
        return -1;
    while (low < high) {
        uint32_t middle = low + (high - low) / 2;
        int order = compare(vocabulary_bytes(set->vocabulary, set->ids[middle]), (struct gguf_string){text, bytes});
        if (order == 0)
            return (int32_t)set->ids[middle];
        if (order < 0)
            low = middle + 1;
        else
            high = middle;
    }
    return -1;
}
