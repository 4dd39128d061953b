/* SPDX-License-Identifier: Apache-2.0 */
#include "engine/sentencepiece_internal.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

#include <utf8proc.h>

static const char mark[] = "\xe2\x96\x81"; /* U+2581 */
enum { MARK_BYTES = 3, TEXT_MAX = INT32_MAX /* bytes of a normalised text */ };

size_t sentencepiece_character(const char *text, size_t bytes, int32_t *character) {
    if ((unsigned char)text[0] < 0x80) {
        *character = text[0];
        return 1;
    }
    utf8proc_ssize_t used =
        utf8proc_iterate((const utf8proc_uint8_t *)text, bytes < 4 ? (utf8proc_ssize_t)bytes : 4, character);
    if (used > 0)
        return (size_t)used;
    *character = -1;
    return 1;
}

/* Reading the file. */

static int read_scores(struct sentencepiece *model, const struct gguf *gguf, struct error *error) {
    static const char key[] = "tokenizer.ggml.scores";
    const struct vocabulary *vocabulary = model->vocabulary;
    const struct gguf_pair *scores = gguf_find(gguf, key);
    if (scores == NULL)
        return 0;
    if (scores->type != GGUF_ARRAY || scores->element_type != GGUF_FLOAT32)
        return error_set(error, ERROR_FORMAT, "%s is not an array of float32", key);
    if (scores->count != vocabulary->count)
        return error_set(error, ERROR_FORMAT, "%s has %llu elements for %u tokens", key,
            (unsigned long long)scores->count, vocabulary->count);
    model->scores = scores->data;
    bool first = true;
    for (uint32_t id = 0; id < vocabulary->count; id++) {
        float score = sentencepiece_score(model, id);
        if (!isfinite(score))
            return error_set(error, ERROR_FORMAT, "%s of token %u is not finite", key, id);
        if (vocabulary->kinds[id] != TOKEN_NORMAL)
            continue;
        model->lowest = first || score < model->lowest ? score : model->lowest;
        model->highest = first || score > model->highest ? score : model->highest;
        first = false;
    }
    return 0;
}

static int read_flag(const struct gguf *gguf, const char *key, bool by_default, bool *out, struct error *error) {
    *out = by_default;
    return gguf_find(gguf, key) == NULL ? 0 : gguf_get_bool(gguf, key, out, error);
}

static int read_unknown(struct sentencepiece *model, const struct gguf *gguf, struct error *error) {
    static const char key[] = "tokenizer.ggml.unknown_token_id";
    const struct vocabulary *vocabulary = model->vocabulary;
    uint32_t id = 0;
    model->unknown = -1;
    if (gguf_find(gguf, key) != NULL) {
        int code = gguf_get_uint32(gguf, key, &id, error);
        if (code == 0 && id >= vocabulary->count)
            code = error_set(error, ERROR_FORMAT, "%s is %u, but there are %u tokens", key, id, vocabulary->count);
        model->unknown = (int32_t)id;
        return code;
    }
    while (id < vocabulary->count && vocabulary->kinds[id] != TOKEN_UNKNOWN)
        id++;
    model->unknown = id < vocabulary->count ? (int32_t)id : -1;
    return 0;
}

static bool has_space_inside(struct gguf_string text) {
    for (size_t i = 1; i < text.bytes; i++)
        if (text.text[i] == ' ' && text.text[i - 1] != ' ')
            return true;
    return false;
}

/* What the pieces are like. */
static void look_at_pieces(struct sentencepiece *model) {
    const struct vocabulary *vocabulary = model->vocabulary;
    model->cuts_at_spaces = model->bpe != NULL;
    for (uint32_t id = 0; id < vocabulary->count; id++) {
        struct gguf_string text = vocabulary_bytes(vocabulary, id);
        if (vocabulary->kinds[id] != TOKEN_NORMAL &&
            (model->bpe != NULL || vocabulary->kinds[id] != TOKEN_USER_DEFINED))
            continue;
        model->cuts_at_spaces &= !has_space_inside(text);
        model->longest = text.bytes > model->longest ? text.bytes : model->longest;
    }
    for (int i = 0; i < 128; i++) {
        const char one = (char)i;
        model->ascii[i] = vocabulary_find(vocabulary, (struct gguf_string){&one, 1}, (struct gguf_string){NULL, 0});
        for (uint32_t extra = 0; model->ascii[i] < 0 && extra < model->extra_count; extra++)
            if (model->extra[extra] == (uint32_t)i)
                model->ascii[i] = (int32_t)(vocabulary->count + extra);
    }
}

static int check_unigram(const struct sentencepiece *model, struct error *error) {
    if (model->scores == NULL)
        return error_set(error, ERROR_FORMAT, "tokenizer.ggml.scores is missing");
    for (uint32_t id = 0; id < model->vocabulary->count; id++)
        if (model->vocabulary->kinds[id] == TOKEN_NORMAL &&
            vocabulary_bytes(model->vocabulary, id).bytes > TEXT_SET_BYTES_MAX)
            return error_set(error, ERROR_UNSUPPORTED, "the text of token %u has %zu bytes; at most %d", id,
                vocabulary_bytes(model->vocabulary, id).bytes, TEXT_SET_BYTES_MAX);
    return 0;
}

struct sentencepiece *sentencepiece_create(
    const struct gguf *gguf, const struct vocabulary *vocabulary, bool unigram, struct error *error) {
    struct sentencepiece *model = calloc(1, sizeof *model);
    if (model == NULL) {
        error_set(error, ERROR_MEMORY, "no memory for the tokenizer");
        return NULL;
    }
    model->vocabulary = vocabulary;
    int code = read_scores(model, gguf, error);
    if (code == 0)
        code = read_flag(gguf, "tokenizer.ggml.add_space_prefix", true, &model->adds_space, error);
    if (code == 0)
        code = read_flag(gguf, "tokenizer.ggml.remove_extra_whitespaces", false, &model->removes_spaces, error);
    if (code == 0)
        code = character_map_read(&model->map, gguf, error);
    if (code == 0)
        code = read_unknown(model, gguf, error);
    if (code == 0)
        code = text_set_create(&model->user_defined, vocabulary, 1u << TOKEN_USER_DEFINED, error);
    if (code == 0)
        code = unigram ? check_unigram(model, error) : sentencepiece_read_merges(model, gguf, error);
    if (code != 0) {
        sentencepiece_free(model);
        return NULL;
    }
    look_at_pieces(model);
    return model;
}

void sentencepiece_free(struct sentencepiece *model) {
    if (model == NULL)
        return;
    text_set_free(&model->user_defined);
    bpe_free(model->bpe);
    free(model->extra);
    free(model);
}

bool sentencepiece_adds_space(const struct sentencepiece *model) {
    return model->adds_space;
}

void sentencepiece_scratch_free(struct sentencepiece_scratch *scratch) {
    bpe_scratch_free(&scratch->bpe);
    free(scratch->text);
    free(scratch->nodes);
    *scratch = (struct sentencepiece_scratch){0};
}

/* Encoding. */

/* A text on its way to scratch->text. */
struct normalised {
    size_t bytes;
    bool begun; /* what came was more than spaces that go */
    bool after_space;
};

/* Room for `more` bytes behind those that are there. */
static int make_room(struct sentencepiece_scratch *scratch, size_t bytes, size_t more) {
    if (more > TEXT_MAX - bytes)
        return ERROR_MEMORY;
    if (bytes + more <= scratch->capacity)
        return 0;
    size_t capacity = bytes + more + bytes / 2;
    char *text = realloc(scratch->text, capacity);
    if (text == NULL)
        return ERROR_MEMORY;
    scratch->text = text;
    scratch->capacity = capacity;
    return 0;
}

/* Appends text with its spaces as the model wants them. */
static int put(const struct sentencepiece *model, struct sentencepiece_scratch *scratch, const char *text, size_t bytes,
    struct normalised *to) {
    if (make_room(scratch, to->bytes, bytes + 1) != 0)
        return ERROR_MEMORY;
    char *out = scratch->text;
    bool goes = model->removes_spaces && bytes == 1 && text[0] == ' '; /* before the text */
    if (!to->begun && !goes && model->adds_space)
        out[to->bytes++] = ' ';
    to->begun |= !goes;
    for (size_t at = 0; at < bytes;) {
        bool is_mark = bytes - at >= MARK_BYTES && memcmp(text + at, mark, MARK_BYTES) == 0;
        char one = is_mark ? ' ' : text[at];
        at += is_mark ? MARK_BYTES : 1;
        if (one == ' ' && to->after_space && model->removes_spaces)
            continue;
        to->after_space = one == ' ';
        out[to->bytes++] = one;
    }
    return 0;
}

/* Bytes from text on that go together, and what they become. */
static size_t next_part(
    const struct sentencepiece *model, const char *text, size_t bytes, const char **as, size_t *as_bytes) {
    int32_t token = text_set_match(&model->user_defined, text, bytes), character;
    size_t length = token < 0 ? character_map_match(&model->map, text, bytes, as) : 0;
    if (length > 0) {
        *as_bytes = strlen(*as);
        return length;
    }
    length = token >= 0 ? vocabulary_bytes(model->vocabulary, (uint32_t)token).bytes
                        : sentencepiece_character(text, bytes, &character);
    *as = text;
    *as_bytes = length;
    return length;
}

/* Writes the normalised text to scratch->text. */
static int normalise(const struct sentencepiece *model, struct sentencepiece_scratch *scratch, const char *text,
    size_t bytes, struct normalised *out) {
    *out = (struct normalised){.after_space = model->removes_spaces};
    if (make_room(scratch, 0, bytes + 1) != 0)
        return ERROR_MEMORY;
    if (model->map.count == 0 && bytes > 0 && put(model, scratch, text, bytes, out) != 0)
        return ERROR_MEMORY;
    for (size_t at = 0, length; model->map.count > 0 && at < bytes; at += length) {
        const char *as;
        size_t as_bytes;
        length = next_part(model, text + at, bytes - at, &as, &as_bytes);
        if (put(model, scratch, as, as_bytes, out) != 0)
            return ERROR_MEMORY;
    }
    while (model->removes_spaces && out->bytes > 0 && scratch->text[out->bytes - 1] == ' ')
        out->bytes--;
    return 0;
}

int sentencepiece_fall_back(
    const struct sentencepiece *model, const char *text, size_t bytes, bool *after_unknown, struct token_list *out) {
    const int32_t *byte_tokens = model->vocabulary->byte_tokens;
    bool spelled = true;
    for (size_t i = 0; i < bytes; i++)
        spelled &= byte_tokens[(unsigned char)text[i]] >= 0;
    for (size_t i = 0; spelled && i < bytes; i++)
        if (token_list_append(out, byte_tokens[(unsigned char)text[i]]) != 0)
            return ERROR_MEMORY;
    if (!spelled && !*after_unknown && model->unknown >= 0 && token_list_append(out, model->unknown) != 0)
        return ERROR_MEMORY;
    *after_unknown = !spelled;
    return 0;
}

/* The symbol of a character, -1: it is neither a piece nor part of one. */
static int32_t find_symbol(const struct sentencepiece *model, const char *text, size_t bytes, int32_t character) {
    if (character >= 0 && character < 128)
        return model->ascii[character];
    int32_t id = vocabulary_find(model->vocabulary, (struct gguf_string){text, bytes}, (struct gguf_string){NULL, 0});
    uint32_t low = 0, high = model->extra_count;
    if (id >= 0 || character < 0)
        return id;
    while (low < high) {
        uint32_t middle = low + (high - low) / 2;
        if (model->extra[middle] < (uint32_t)character)
            low = middle + 1;
        else
            high = middle;
    }
    bool found = low < model->extra_count && model->extra[low] == (uint32_t)character;
    return found ? (int32_t)(model->vocabulary->count + low) : -1;
}

/* Symbols that stayed single may be characters that are no pieces. */
static int append_symbols(
    const struct sentencepiece *model, const int32_t *ids, size_t count, bool *after_unknown, struct token_list *out) {
    for (size_t i = 0; i < count; i++) {
        if ((uint32_t)ids[i] < model->vocabulary->count) {
            if (token_list_append(out, ids[i]) != 0)
                return ERROR_MEMORY;
            *after_unknown = false;
            continue;
        }
        char text[4];
        size_t bytes = (size_t)utf8proc_encode_char(
            (utf8proc_int32_t)model->extra[(uint32_t)ids[i] - model->vocabulary->count], (utf8proc_uint8_t *)text);
        if (sentencepiece_fall_back(model, text, bytes, after_unknown, out) != 0)
            return ERROR_MEMORY;
    }
    return 0;
}

/* Characters that all are symbols: ids [count]. */
static int merge_symbols(const struct sentencepiece *model, struct sentencepiece_scratch *scratch, int32_t *ids,
    size_t count, bool *after_unknown, struct token_list *out) {
    if (count == 0)
        return 0;
    if (bpe_merge(model->bpe, &scratch->bpe, ids, &count) != 0)
        return ERROR_MEMORY;
    return append_symbols(model, ids, count, after_unknown, out);
}

static int encode_merges(const struct sentencepiece *model, struct sentencepiece_scratch *scratch, const char *text,
    size_t bytes, bool *after_unknown, struct token_list *out) {
    enum { SHORT = 64 };
    int32_t short_ids[SHORT], *ids = bytes <= SHORT ? short_ids : malloc(bytes * sizeof *ids);
    size_t count = 0;
    int code = ids == NULL ? ERROR_MEMORY : 0;
    for (size_t at = 0, length; code == 0 && at < bytes; at += length) {
        int32_t character;
        length = sentencepiece_character(text + at, bytes - at, &character);
        int32_t symbol = find_symbol(model, text + at, length, character);
        if (symbol >= 0) {
            ids[count++] = symbol;
            continue;
        }
        code = merge_symbols(model, scratch, ids, count, after_unknown, out);
        if (code == 0)
            code = sentencepiece_fall_back(model, text + at, length, after_unknown, out);
        count = 0;
    }
    if (code == 0)
        code = merge_symbols(model, scratch, ids, count, after_unknown, out);
    if (ids != short_ids)
        free(ids);
    return code;
}

int sentencepiece_encode(const struct sentencepiece *model, struct sentencepiece_scratch *scratch, const char *text,
    size_t bytes, struct token_list *out) {
    struct normalised normalised;
    if (normalise(model, scratch, text, bytes, &normalised) != 0)
        return ERROR_MEMORY;
    text = scratch->text;
    bytes = normalised.bytes;
    size_t begin = 0; /* of what is not encoded yet */
    bool after_unknown = false;
    for (size_t at = 0; at <= bytes;) {
        int32_t token = model->bpe == NULL ? -1 : text_set_match(&model->user_defined, text + at, bytes - at);
        bool cut = at == bytes || token >= 0 ||
                   (model->cuts_at_spaces && at > begin && text[at] == ' ' && text[at - 1] != ' ');
        if (cut && at > begin) {
            int code = model->bpe != NULL ? encode_merges(model, scratch, text + begin, at - begin, &after_unknown, out)
                                          : sentencepiece_encode_unigram(
                                                model, scratch, text + begin, at - begin, &after_unknown, out);
            if (code != 0)
                return code;
        }
        begin = cut ? at : begin;
        if (token >= 0) {
            if (token_list_append(out, token) != 0)
                return ERROR_MEMORY;
            after_unknown = false;
            at += vocabulary_bytes(model->vocabulary, (uint32_t)token).bytes;
            begin = at;
            continue;
        }
        at++;
    }
    return 0;
}
