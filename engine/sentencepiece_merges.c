/* SPDX-License-Identifier: Apache-2.0
 *
 * The merges of a SentencePiece BPE model. Its file has scores of pieces: two neighbours join when what they spell
 * together is a piece. Every way to divide a piece into two that can occur is a merge here, ranked by the piece's
 * score.
 */
#include "engine/sentencepiece_internal.h"

#include <stdlib.h>
#include <string.h>

#include "engine/bytes.h"

struct found_merge {
    float score; /* of the piece that the two become */
    int32_t left, right, id;
};

struct merge_list {
    struct found_merge *merges;
    size_t count, capacity;
};

static const struct gguf_string nothing = {NULL, 0};

float sentencepiece_score(const struct sentencepiece *model, uint32_t id) {
    uint32_t bits = load_u32(model->scores + (size_t)id * 4);
    float score;
    memcpy(&score, &bits, sizeof score);
    return score;
}

static int add_merge(struct merge_list *list, struct found_merge merge) {
    if (list->count == list->capacity) {
        size_t capacity = list->capacity == 0 ? 1024 : 2 * list->capacity;
        struct found_merge *merges = realloc(list->merges, capacity * sizeof *merges);
        if (merges == NULL)
            return ERROR_MEMORY;
        list->merges = merges;
        list->capacity = capacity;
    }
    list->merges[list->count++] = merge;
    return 0;
}

static int compare_code_points(const void *a, const void *b) {
    uint32_t left = *(const uint32_t *)a, right = *(const uint32_t *)b;
    return (left > right) - (left < right);
}

/* Characters of pieces that are no pieces themselves: the algorithm joins them all the same. */
static int collect_extra(struct sentencepiece *model) {
    const struct vocabulary *vocabulary = model->vocabulary;
    size_t capacity = 0, count = 0;
    for (uint32_t id = 0; id < vocabulary->count; id++) {
        struct gguf_string text = vocabulary_bytes(vocabulary, id);
        for (size_t at = 0, length; vocabulary->kinds[id] == TOKEN_NORMAL && at < text.bytes; at += length) {
            int32_t character;
            length = sentencepiece_character(text.text + at, text.bytes - at, &character);
            struct gguf_string one = {text.text + at, length};
            if (length == text.bytes || character < 0 || vocabulary_find(vocabulary, one, nothing) >= 0)
                continue;
            if (count == capacity) {
                capacity = capacity == 0 ? 64 : 2 * capacity;
                uint32_t *extra = realloc(model->extra, capacity * sizeof *extra);
                if (extra == NULL)
                    return ERROR_MEMORY;
                model->extra = extra;
            }
            model->extra[count++] = (uint32_t)character;
        }
    }
    if (count > 0)
        qsort(model->extra, count, sizeof *model->extra, compare_code_points);
    for (size_t i = 0; i < count; i++)
        if (i == 0 || model->extra[i] != model->extra[i - 1])
            model->extra[model->extra_count++] = model->extra[i];
    return 0;
}

static int32_t find_symbol(const struct sentencepiece *model, struct gguf_string text, int32_t character) {
    int32_t id = vocabulary_find(model->vocabulary, text, nothing);
    if (id >= 0 || character < 0 || model->extra_count == 0)
        return id;
    const uint32_t wanted = (uint32_t)character;
    const uint32_t *found = bsearch(&wanted, model->extra, model->extra_count, sizeof wanted, compare_code_points);
    return found == NULL ? -1 : (int32_t)(model->vocabulary->count + (uint32_t)(found - model->extra));
}

/* All ways to divide a piece. */
static int divide_piece(struct sentencepiece *model, uint32_t id, struct merge_list *list) {
    struct gguf_string text = vocabulary_bytes(model->vocabulary, id);
    for (size_t at = 0, length; at < text.bytes; at += length) {
        int32_t first, last;
        length = sentencepiece_character(text.text + at, text.bytes - at, &first);
        if (at == 0)
            continue;
        struct gguf_string left = {text.text, at}, right = {text.text + at, text.bytes - at};
        bool one_before = sentencepiece_character(text.text, text.bytes, &last) == at;
        int32_t left_id = find_symbol(model, left, one_before ? last : -1);
        if (left_id < 0)
            continue;
        int32_t right_id = find_symbol(model, right, at + length == text.bytes ? first : -1);
        if (right_id < 0)
            continue;
        struct found_merge merge = {sentencepiece_score(model, id), left_id, right_id, (int32_t)id};
        if (add_merge(list, merge) != 0)
            return ERROR_MEMORY;
    }
    return 0;
}

static int compare_merges(const void *a, const void *b) {
    const struct found_merge *left = a, *right = b;
    if (left->score != right->score)
        return left->score > right->score ? -1 : 1;
    return (left->id > right->id) - (left->id < right->id);
}

static int merges_from_scores(struct sentencepiece *model) {
    struct merge_list list = {0};
    int code = collect_extra(model);
    for (uint32_t id = 0; code == 0 && id < model->vocabulary->count; id++)
        if (model->vocabulary->kinds[id] == TOKEN_NORMAL &&
            vocabulary_find(model->vocabulary, vocabulary_bytes(model->vocabulary, id), nothing) == (int32_t)id)
            code = divide_piece(model, id, &list);
    if (code == 0 && (list.count >= UINT32_MAX / 2 || (model->bpe = bpe_create(list.count)) == NULL))
        code = ERROR_MEMORY;
    if (code == 0 && list.count > 0)
        qsort(list.merges, list.count, sizeof *list.merges, compare_merges);
    uint32_t rank = 0;
    for (size_t i = 0; code == 0 && i < list.count; i++) {
        rank += i > 0 && list.merges[i].score != list.merges[i - 1].score;
        bpe_add(model->bpe, list.merges[i].left, list.merges[i].right, list.merges[i].id, rank);
    }
    free(list.merges);
    return code;
}

/* Marks become spaces, in place of a copy: at most the text's bytes. */
static struct gguf_string without_marks(struct gguf_string text, char *out) {
    size_t written = 0;
    for (size_t at = 0; at < text.bytes;) {
        bool mark = text.bytes - at >= 3 && memcmp(text.text + at, "\xe2\x96\x81", 3) == 0;
        out[written++] = mark ? ' ' : text.text[at];
        at += mark ? 3 : 1;
    }
    return (struct gguf_string){out, written};
}

/* "left right" of the file. */
static int list_merge(struct sentencepiece *model, struct gguf_string merge, uint32_t rank, struct error *error) {
    const char *space = merge.bytes < 3 ? NULL : memchr(merge.text + 1, ' ', merge.bytes - 2);
    char *copy = space == NULL ? NULL : malloc(merge.bytes);
    if (copy == NULL)
        return space == NULL ? error_set(error, ERROR_FORMAT, "merge %u is not two texts", rank)
                             : error_set(error, ERROR_MEMORY, "no memory for merge %u", rank);
    size_t before = (size_t)(space - merge.text);
    struct gguf_string left = without_marks((struct gguf_string){merge.text, before}, copy);
    struct gguf_string right =
        without_marks((struct gguf_string){space + 1, merge.bytes - before - 1}, copy + left.bytes);
    const struct gguf_string parts[] = {left, right, {copy, left.bytes + right.bytes}};
    static const char *const names[] = {"left", "right", "joined"};
    int32_t ids[3];
    int code = 0;
    bool used = true;
    for (int i = 0; code == 0 && i < 3; i++) {
        ids[i] = vocabulary_find(model->vocabulary, parts[i], nothing);
        used &= ids[i] >= 0;
        /* User-defined tokens are found before anything is merged, so that their merges never come up. */
        if (ids[i] < 0 && text_set_find(&model->user_defined, parts[i].text, parts[i].bytes) < 0)
            code =
                error_set(error, ERROR_FORMAT, "merge %u: the vocabulary has no token for its %s part", rank, names[i]);
    }
    if (code == 0 && used)
        bpe_add(model->bpe, ids[0], ids[1], ids[2], rank);
    free(copy);
    return code;
}

static int merges_from_list(struct sentencepiece *model, const struct gguf_pair *merges, struct error *error) {
    int code = 0;
    if (merges->count > INT32_MAX / 2)
        return error_set(
            error, ERROR_FORMAT, "there are %llu merges; at most %d", (unsigned long long)merges->count, INT32_MAX / 2);
    model->bpe = bpe_create((size_t)merges->count);
    if (model->bpe == NULL)
        return error_set(error, ERROR_MEMORY, "no memory for %llu merges", (unsigned long long)merges->count);
    for (uint32_t i = 0; code == 0 && i < merges->count; i++)
        code = list_merge(model, merges->strings[i], i, error);
    return code;
}

int sentencepiece_read_merges(struct sentencepiece *model, const struct gguf *gguf, struct error *error) {
    const struct gguf_pair *merges = gguf_find(gguf, "tokenizer.ggml.merges");
    if (model->scores == NULL && merges != NULL && merges->type == GGUF_ARRAY && merges->element_type == GGUF_STRING)
        return merges_from_list(model, merges, error);
    if (model->scores == NULL)
        return error_set(error, ERROR_FORMAT, "tokenizer.ggml.scores is missing");
    int code = merges_from_scores(model);
    return code != 0 ? error_set(error, code, "no memory for the tokenizer's merges") : 0;
}
