/* SPDX-License-Identifier: Apache-2.0 */
#include "engine/tokenizer.h"

#include <stdlib.h>
#include <string.h>

#include <utf8proc.h>

#include "engine/bpe.h"
#include "engine/pretokenizer.h"
#include "engine/vocabulary.h"

#define SPECIAL_BYTES_LIMIT 512 /* of a special token's text: bounds the search at each position of a text */
#define TEXT_BYTES_LIMIT INT32_MAX

struct tokenizer {
    struct vocabulary vocabulary;
    struct bpe *bpe;
    struct pretokenizer *pretokenizer;
    uint32_t *specials; /* ids of special tokens, sorted by text; without those that have none */
    uint32_t special_count;
    bool starts_special[256]; /* by first byte of a text */
    bool *ends;               /* [vocabulary.count] */
    int32_t bos, eos;
    bool adds_bos;
};

/* Lists of ids. */

static int reserve(struct token_list *list, size_t more) {
    if (more <= list->capacity - list->count)
        return 0;
    if (more > SIZE_MAX / 16 - list->count)
        return ERROR_MEMORY;
    size_t capacity = list->count + more;
    if (capacity < 2 * list->capacity)
        capacity = 2 * list->capacity;
    if (capacity < 64)
        capacity = 64;
    int32_t *ids = realloc(list->ids, capacity * sizeof *ids);
    if (ids == NULL)
        return ERROR_MEMORY;
    list->ids = ids;
    list->capacity = capacity;
    return 0;
}

int token_list_append(struct token_list *list, int32_t id) {
    if (reserve(list, 1) != 0)
        return ERROR_MEMORY;
    list->ids[list->count++] = id;
    return 0;
}

void token_list_free(struct token_list *list) {
    free(list->ids);
    *list = (struct token_list){0};
}

/* Reading the file. */

static int check_model(const struct gguf *gguf, struct error *error) {
    struct gguf_string model;
    int code = gguf_get_string(gguf, "tokenizer.ggml.model", &model, error);
    char shown[64];
    if (code == 0 && (model.bytes != 4 || memcmp(model.text, "gpt2", 4) != 0))
        code = error_set(error, ERROR_UNSUPPORTED, "tokenizer model \"%s\" is not supported (gpt2 is)",
            gguf_string_show(model, shown, sizeof shown));
    return code;
}

static int read_pretokenizer(struct tokenizer *tokenizer, const struct gguf *gguf, struct error *error) {
    struct gguf_string name;
    int code = gguf_get_string(gguf, "tokenizer.ggml.pre", &name, error);
    return code == 0 ? pretokenizer_create(name, &tokenizer->pretokenizer, error) : code;
}

/* A merge is two tokens' texts with a space between, which is no character of the alphabet. */
static int read_merge(struct tokenizer *tokenizer, struct gguf_string merge, uint64_t number, struct error *error) {
    const struct gguf_string none = {NULL, 0};
    const char *space = merge.bytes < 3 ? NULL : memchr(merge.text + 1, ' ', merge.bytes - 2);
    if (space == NULL)
        return error_set(error, ERROR_FORMAT, "merge %llu is not two texts", (unsigned long long)number);
    struct gguf_string left = {merge.text, (size_t)(space - merge.text)};
    struct gguf_string right = {space + 1, merge.bytes - left.bytes - 1};
    int32_t left_id = vocabulary_find(&tokenizer->vocabulary, left, none);
    int32_t right_id = vocabulary_find(&tokenizer->vocabulary, right, none);
    int32_t id = vocabulary_find(&tokenizer->vocabulary, left, right);
    if (left_id < 0 || right_id < 0 || id < 0)
        return error_set(error, ERROR_FORMAT, "merge %llu: the vocabulary has no token for its %s part",
            (unsigned long long)number,
            left_id < 0    ? "left"
            : right_id < 0 ? "right"
                           : "joined");
    bpe_add(tokenizer->bpe, left_id, right_id, id);
    return 0;
}

static int read_merges(struct tokenizer *tokenizer, const struct gguf *gguf, struct error *error) {
    static const char key[] = "tokenizer.ggml.merges";
    const struct gguf_pair *merges = gguf_find(gguf, key);
    if (merges == NULL || merges->type != GGUF_ARRAY || merges->element_type != GGUF_STRING)
        return error_set(error, ERROR_FORMAT, "%s is %s", key, merges == NULL ? "missing" : "not an array of strings");
    if (merges->count > INT32_MAX / 2)
        return error_set(error, ERROR_FORMAT, "%s has %llu elements; at most %d", key,
            (unsigned long long)merges->count, INT32_MAX / 2);
    tokenizer->bpe = bpe_create((size_t)merges->count);
    if (tokenizer->bpe == NULL)
        return error_set(error, ERROR_MEMORY, "no memory for %llu merges", (unsigned long long)merges->count);
    for (uint64_t i = 0; i < merges->count; i++) {
        int code = read_merge(tokenizer, merges->strings[i], i, error);
        if (code != 0)
            return code;
    }
    return 0;
}

/* A token id of the metadata: -1 when the key is absent. */
static int read_id(
    const struct tokenizer *tokenizer, const struct gguf *gguf, const char *key, int32_t *out, struct error *error) {
    uint32_t id;
    *out = -1;
    if (gguf_find(gguf, key) == NULL)
        return 0;
    int code = gguf_get_uint32(gguf, key, &id, error);
    if (code != 0)
        return code;
    if (id >= tokenizer->vocabulary.count)
        return error_set(
            error, ERROR_FORMAT, "%s is %u, but there are %u tokens", key, id, tokenizer->vocabulary.count);
    *out = (int32_t)id;
    return 0;
}

/* Models end a turn with tokens that the metadata does not always name. */
static bool has_end_name(struct gguf_string text) {
    static const char *const names[] = {
        "<|im_end|>", "<|endoftext|>", "<|eot_id|>", "<|end_of_text|>", "</s>", "<end_of_turn>", "<|end|>"};
    for (size_t i = 0; i < sizeof names / sizeof names[0]; i++)
        if (strlen(names[i]) == text.bytes && memcmp(names[i], text.text, text.bytes) == 0)
            return true;
    return false;
}

static int read_ends(struct tokenizer *tokenizer, const struct gguf *gguf, struct error *error) {
    static const char *const keys[] = {
        "tokenizer.ggml.eos_token_id", "tokenizer.ggml.eot_token_id", "tokenizer.ggml.eom_token_id"};
    const struct vocabulary *vocabulary = &tokenizer->vocabulary;
    tokenizer->ends = calloc(vocabulary->count, sizeof *tokenizer->ends);
    if (tokenizer->ends == NULL)
        return error_set(error, ERROR_MEMORY, "no memory for %u tokens", vocabulary->count);
    for (uint32_t id = 0; id < vocabulary->count; id++)
        tokenizer->ends[id] = vocabulary->kinds[id] == TOKEN_CONTROL && has_end_name(vocabulary->texts[id]);
    for (size_t i = 0; i < sizeof keys / sizeof keys[0]; i++) {
        int32_t id;
        int code = read_id(tokenizer, gguf, keys[i], &id, error);
        if (code != 0)
            return code;
        if (id >= 0)
            tokenizer->ends[id] = true;
        if (i == 0)
            tokenizer->eos = id;
    }
    return 0;
}

static int read_begin(struct tokenizer *tokenizer, const struct gguf *gguf, struct error *error) {
    static const char key[] = "tokenizer.ggml.add_bos_token";
    int code = read_id(tokenizer, gguf, "tokenizer.ggml.bos_token_id", &tokenizer->bos, error);
    if (code == 0 && gguf_find(gguf, key) != NULL)
        code = gguf_get_bool(gguf, key, &tokenizer->adds_bos, error);
    if (code == 0 && tokenizer->adds_bos && tokenizer->bos < 0)
        code = error_set(error, ERROR_FORMAT, "%s is true, but there is no tokenizer.ggml.bos_token_id", key);
    return code;
}

/* Special tokens. */

static int compare_specials(const void *a, const void *b, void *context) {
    const struct gguf_string *texts = context;
    struct gguf_string left = texts[*(const uint32_t *)a], right = texts[*(const uint32_t *)b];
    size_t common = left.bytes < right.bytes ? left.bytes : right.bytes;
    int order = memcmp(left.text, right.text, common);
    return order != 0 ? order : (left.bytes > right.bytes) - (left.bytes < right.bytes);
}

static int collect_specials(struct tokenizer *tokenizer, struct error *error) {
    const struct vocabulary *vocabulary = &tokenizer->vocabulary;
    uint32_t count = 0;
    for (uint32_t id = 0; id < vocabulary->count; id++)
        count += vocabulary_is_special(vocabulary, id);
    tokenizer->specials = malloc(((size_t)count + 1) * sizeof *tokenizer->specials);
    if (tokenizer->specials == NULL)
        return error_set(error, ERROR_MEMORY, "no memory for %u special tokens", count);
    for (uint32_t id = 0; id < vocabulary->count; id++) {
        struct gguf_string text = vocabulary->texts[id];
        if (!vocabulary_is_special(vocabulary, id) || text.bytes == 0)
            continue;
        if (text.bytes > SPECIAL_BYTES_LIMIT)
            return error_set(error, ERROR_UNSUPPORTED, "the text of special token %u has %zu bytes; at most %d", id,
                text.bytes, SPECIAL_BYTES_LIMIT);
        tokenizer->specials[tokenizer->special_count++] = id;
        tokenizer->starts_special[(unsigned char)text.text[0]] = true;
    }
    qsort_r(tokenizer->specials, tokenizer->special_count, sizeof *tokenizer->specials, compare_specials,
        (void *)vocabulary->texts);
    return 0;
}

/* The first of specials[low, high) whose byte at `depth` is not below `byte`. All have more bytes than depth. */
static uint32_t lower_bound(
    const struct tokenizer *tokenizer, uint32_t low, uint32_t high, size_t depth, unsigned byte) {
    while (low < high) {
        uint32_t middle = low + (high - low) / 2;
        if ((unsigned char)tokenizer->vocabulary.texts[tokenizer->specials[middle]].text[depth] < byte)
            low = middle + 1;
        else
            high = middle;
    }
    return low;
}

/* The longest special token that text begins with, or -1. */
static int32_t match_special(const struct tokenizer *tokenizer, const char *text, size_t bytes) {
    const struct gguf_string *texts = tokenizer->vocabulary.texts;
    uint32_t low = 0, high = tokenizer->special_count; /* those that begin with text[0, depth) */
    int32_t longest = -1;
    for (size_t depth = 0;; depth++) {
        while (low < high && texts[tokenizer->specials[low]].bytes == depth)
            longest = (int32_t)tokenizer->specials[low++];
        if (low == high || depth == bytes)
            return longest;
        unsigned byte = (unsigned char)text[depth];
        low = lower_bound(tokenizer, low, high, depth, byte);
        high = lower_bound(tokenizer, low, high, depth, byte + 1);
    }
}

/* The tokenizer itself. */

struct tokenizer *tokenizer_create(const struct gguf *gguf, struct error *error) {
    struct tokenizer *tokenizer = calloc(1, sizeof *tokenizer);
    if (tokenizer == NULL) {
        error_set(error, ERROR_MEMORY, "no memory for the tokenizer");
        return NULL;
    }
    if (check_model(gguf, error) != 0 || read_pretokenizer(tokenizer, gguf, error) != 0 ||
        vocabulary_load(&tokenizer->vocabulary, gguf, error) != 0 || read_merges(tokenizer, gguf, error) != 0 ||
        read_ends(tokenizer, gguf, error) != 0 || read_begin(tokenizer, gguf, error) != 0 ||
        collect_specials(tokenizer, error) != 0) {
        tokenizer_free(tokenizer);
        return NULL;
    }
    return tokenizer;
}

void tokenizer_free(struct tokenizer *tokenizer) {
    if (tokenizer == NULL)
        return;
    vocabulary_free(&tokenizer->vocabulary);
    bpe_free(tokenizer->bpe);
    pretokenizer_free(tokenizer->pretokenizer);
    free(tokenizer->specials);
    free(tokenizer->ends);
    free(tokenizer);
}

uint32_t tokenizer_vocabulary(const struct tokenizer *tokenizer) {
    return tokenizer->vocabulary.count;
}

int32_t tokenizer_bos(const struct tokenizer *tokenizer) {
    return tokenizer->bos;
}

int32_t tokenizer_eos(const struct tokenizer *tokenizer) {
    return tokenizer->eos;
}

bool tokenizer_adds_bos(const struct tokenizer *tokenizer) {
    return tokenizer->adds_bos;
}

static bool in_range(const struct tokenizer *tokenizer, int32_t token) {
    return token >= 0 && (uint32_t)token < tokenizer->vocabulary.count;
}

bool tokenizer_is_end(const struct tokenizer *tokenizer, int32_t token) {
    return in_range(tokenizer, token) && tokenizer->ends[token];
}

int tokenizer_list_ends(const struct tokenizer *tokenizer, struct token_list *out) {
    int code = 0;
    for (uint32_t token = 0; token < tokenizer->vocabulary.count && code == 0; token++)
        if (tokenizer->ends[token])
            code = token_list_append(out, (int32_t)token);
    return code;
}

bool tokenizer_is_special(const struct tokenizer *tokenizer, int32_t token) {
    return in_range(tokenizer, token) && vocabulary_is_special(&tokenizer->vocabulary, (uint32_t)token);
}

const char *tokenizer_token_bytes(const struct tokenizer *tokenizer, int32_t token, size_t *bytes) {
    const size_t *begin = tokenizer->vocabulary.begin + token;
    *bytes = begin[1] - begin[0];
    return tokenizer->vocabulary.bytes + begin[0];
}

/* Encoding. */

struct encoding {
    const struct tokenizer *tokenizer;
    struct pretokenizer_scan scan;
    struct bpe_scratch scratch;
    struct token_list *out;
};

/* One piece: the tokens of its bytes, merged. Bytes without a token are dropped first, so that their neighbours meet.
 */
static int encode_piece(struct encoding *encoding, const char *text, size_t bytes) {
    const int32_t *byte_tokens = encoding->tokenizer->vocabulary.byte_tokens;
    struct token_list *out = encoding->out;
    if (reserve(out, bytes) != 0)
        return ERROR_MEMORY;
    int32_t *ids = out->ids + out->count;
    size_t count = 0;
    for (size_t i = 0; i < bytes; i++) {
        int32_t id = byte_tokens[(unsigned char)text[i]];
        if (id >= 0)
            ids[count++] = id;
    }
    if (bpe_merge(encoding->tokenizer->bpe, &encoding->scratch, ids, &count) != 0)
        return ERROR_MEMORY;
    out->count += count;
    return 0;
}

static int encode_valid(struct encoding *encoding, const char *text, size_t bytes) {
    for (size_t at = 0; at < bytes;) {
        size_t piece = pretokenizer_next(&encoding->scan, text, bytes, at);
        if (piece == 0 || encode_piece(encoding, text + at, piece) != 0)
            return ERROR_MEMORY;
        at += piece;
    }
    return 0;
}

/* Bytes from the beginning of text that are valid UTF-8. */
static size_t valid_length(const char *text, size_t bytes) {
    size_t at = 0;
    while (at < bytes) {
        if ((unsigned char)text[at] < 0x80) {
            at++;
            continue;
        }
        utf8proc_int32_t character;
        utf8proc_ssize_t used =
            utf8proc_iterate((const utf8proc_uint8_t *)text + at, (utf8proc_ssize_t)(bytes - at), &character);
        if (used <= 0)
            break;
        at += (size_t)used;
    }
    return at;
}

/* Text without special tokens. A byte that is not UTF-8 is a piece of its own. */
static int encode_plain(struct encoding *encoding, const char *text, size_t bytes) {
    for (size_t at = 0; at < bytes;) {
        size_t valid = valid_length(text + at, bytes - at);
        int code = valid > 0 ? encode_valid(encoding, text + at, valid) : encode_piece(encoding, text + at, 1);
        if (code != 0)
            return code;
        at += valid > 0 ? valid : 1;
    }
    return 0;
}

/* Bytes from the beginning that are not marked, as far as a special token may reach. */
static size_t unmarked_length(const uint8_t *marks, size_t bytes) {
    size_t most = bytes < SPECIAL_BYTES_LIMIT ? bytes : SPECIAL_BYTES_LIMIT, count = 0;
    while (count < most && (marks == NULL || marks[count] == 0))
        count++;
    return count;
}

static int encode_special(struct encoding *encoding, const char *text, const uint8_t *marks, size_t bytes) {
    const struct tokenizer *tokenizer = encoding->tokenizer;
    size_t plain = 0; /* where the text that is not encoded yet begins */
    for (size_t at = 0; at < bytes;) {
        int32_t token = -1;
        if (tokenizer->starts_special[(unsigned char)text[at]])
            token = match_special(tokenizer, text + at, unmarked_length(marks == NULL ? NULL : marks + at, bytes - at));
        if (token < 0) {
            at++;
            continue;
        }
        if (encode_plain(encoding, text + plain, at - plain) != 0 || token_list_append(encoding->out, token) != 0)
            return ERROR_MEMORY;
        at += tokenizer->vocabulary.texts[token].bytes;
        plain = at;
    }
    return encode_plain(encoding, text + plain, bytes - plain);
}

static int encode(const struct tokenizer *tokenizer, const char *text, const uint8_t *marks, size_t bytes,
    bool parse_special, struct token_list *out, struct error *error) {
    if (bytes > TEXT_BYTES_LIMIT)
        return error_set(error, ERROR_MEMORY, "a text of %zu bytes; at most %d", bytes, TEXT_BYTES_LIMIT);
    struct encoding encoding = {.tokenizer = tokenizer, .out = out};
    size_t before = out->count;
    int code = pretokenizer_begin(&encoding.scan, tokenizer->pretokenizer);
    if (code == 0)
        code = parse_special ? encode_special(&encoding, text, marks, bytes) : encode_plain(&encoding, text, bytes);
    pretokenizer_end(&encoding.scan);
    bpe_scratch_free(&encoding.scratch);
    if (code != 0) {
        out->count = before;
        return error_set(error, code, "no memory to encode a text of %zu bytes", bytes);
    }
    return 0;
}

int tokenizer_encode(const struct tokenizer *tokenizer, const char *text, size_t bytes, bool parse_special,
    struct token_list *out, struct error *error) {
    return encode(tokenizer, text, NULL, bytes, parse_special, out, error);
}

int tokenizer_encode_marked(const struct tokenizer *tokenizer, const char *text, const uint8_t *marks, size_t bytes,
    struct token_list *out, struct error *error) {
    return encode(tokenizer, text, marks, bytes, true, out, error);
}
