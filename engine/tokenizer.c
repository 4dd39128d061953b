/* SPDX-License-Identifier: Apache-2.0 */
#include "engine/tokenizer.h"

#include <stdlib.h>
#include <string.h>

#include <utf8proc.h>

#include "engine/bpe.h"
#include "engine/compose.h"
#include "engine/pretokenizer.h"
#include "engine/sentencepiece.h"
#include "engine/text_set.h"
#include "engine/vocabulary.h"

#define TEXT_BYTES_LIMIT INT32_MAX

enum tokenizer_model { MODEL_GPT2, MODEL_LLAMA, MODEL_T5, MODELS };
static const char *const model_names[MODELS] = {"gpt2", "llama", "t5"};

struct tokenizer {
    enum tokenizer_model model;
    struct vocabulary vocabulary;
    struct bpe *bpe;                   /* gpt2 */
    struct pretokenizer *pretokenizer; /* gpt2 */
    struct pretokenizer_traits traits; /* gpt2 */
    struct sentencepiece *pieces;      /* llama, t5 */
    struct text_set specials;
    size_t longest; /* bytes of a normal token's text */
    bool *ends;     /* [vocabulary.count] */
    int32_t bos, eos;
    bool adds_bos, adds_eos;
};

const char *tokenizer_model_name(size_t index) {
    return index < MODELS ? model_names[index] : NULL;
}

/* Reading the file. */

static int read_model(struct tokenizer *tokenizer, const struct gguf *gguf, struct error *error) {
    struct gguf_string model;
    int code = gguf_get_string(gguf, "tokenizer.ggml.model", &model, error);
    char shown[64];
    if (code != 0)
        return code;
    for (int i = 0; i < MODELS; i++) {
        tokenizer->model = (enum tokenizer_model)i;
        if (strlen(model_names[i]) == model.bytes && memcmp(model.text, model_names[i], model.bytes) == 0)
            return 0;
    }
    return error_set(error, ERROR_UNSUPPORTED, "tokenizer model \"%s\" is not supported (gpt2, llama and t5 are)",
        gguf_string_show(model, shown, sizeof shown));
}

static int read_pretokenizer(struct tokenizer *tokenizer, const struct gguf *gguf, struct error *error) {
    static const char key[] = "tokenizer.ggml.pre";
    struct gguf_string name = {"default", 7};
    int code = gguf_find(gguf, key) == NULL ? 0 : gguf_get_string(gguf, key, &name, error);
    if (code == 0)
        code = pretokenizer_create(name, &tokenizer->pretokenizer, error);
    if (code == 0)
        tokenizer->traits = pretokenizer_traits(tokenizer->pretokenizer);
    /* What a name implies a tokenizer.json says itself (directory.h); these keys are ours. */
    static const char whole[] = "tokenizer.ggml.ignore_merges", nfc[] = "tokenizer.ggml.nfc";
    if (code == 0 && gguf_find(gguf, whole) != NULL)
        code = gguf_get_bool(gguf, whole, &tokenizer->traits.whole_pieces, error);
    if (code == 0 && gguf_find(gguf, nfc) != NULL)
        code = gguf_get_bool(gguf, nfc, &tokenizer->traits.composes, error);
    return code;
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
    bpe_add(tokenizer->bpe, left_id, right_id, id, (uint32_t)number);
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

/* A flag that asks for a token which must then exist; by_default only where it does. */
static int read_flag(const struct gguf *gguf, const char *key, const char *token_key, int32_t token, bool by_default,
    bool *out, struct error *error) {
    *out = by_default && token >= 0;
    if (gguf_find(gguf, key) == NULL)
        return 0;
    int code = gguf_get_bool(gguf, key, out, error);
    if (code == 0 && *out && token < 0)
        code = error_set(error, ERROR_FORMAT, "%s is true, but there is no %s", key, token_key);
    return code;
}

/* After the ends, which have EOS. */
static int read_frame(struct tokenizer *tokenizer, const struct gguf *gguf, struct error *error) {
    static const char bos[] = "tokenizer.ggml.bos_token_id";
    bool bos_by_default = tokenizer->model == MODEL_LLAMA || tokenizer->traits.adds_bos;
    int code = read_id(tokenizer, gguf, bos, &tokenizer->bos, error);
    if (code == 0)
        code = read_flag(
            gguf, "tokenizer.ggml.add_bos_token", bos, tokenizer->bos, bos_by_default, &tokenizer->adds_bos, error);
    if (code == 0)
        code = read_flag(gguf, "tokenizer.ggml.add_eos_token", "tokenizer.ggml.eos_token_id", tokenizer->eos,
            tokenizer->model == MODEL_T5, &tokenizer->adds_eos, error);
    return code;
}

/* The tokenizer itself. */

static int load_gpt2(struct tokenizer *tokenizer, const struct gguf *gguf, struct error *error) {
    const struct vocabulary *vocabulary = &tokenizer->vocabulary;
    int code = read_pretokenizer(tokenizer, gguf, error);
    if (code == 0)
        code = vocabulary_load(&tokenizer->vocabulary, gguf, SPELLING_ALPHABET, error);
    if (code == 0)
        code = read_merges(tokenizer, gguf, error);
    for (uint32_t id = 0; code == 0 && id < vocabulary->count; id++)
        if (vocabulary->kinds[id] == TOKEN_NORMAL && vocabulary->texts[id].bytes > tokenizer->longest)
            tokenizer->longest = vocabulary->texts[id].bytes;
    return code;
}

static int load_sentencepiece(struct tokenizer *tokenizer, const struct gguf *gguf, struct error *error) {
    int code = vocabulary_load(&tokenizer->vocabulary, gguf, SPELLING_MARKS, error);
    if (code != 0)
        return code;
    tokenizer->pieces = sentencepiece_create(gguf, &tokenizer->vocabulary, tokenizer->model == MODEL_T5, error);
    return tokenizer->pieces == NULL ? ERROR_FORMAT : 0; /* the message has its code */
}

static unsigned special_kinds(const struct tokenizer *tokenizer) {
    unsigned other = tokenizer->model == MODEL_GPT2 ? TOKEN_USER_DEFINED : TOKEN_UNKNOWN;
    return 1u << TOKEN_CONTROL | 1u << other;
}

struct tokenizer *tokenizer_create(const struct gguf *gguf, struct error *error) {
    struct tokenizer *tokenizer = calloc(1, sizeof *tokenizer);
    if (tokenizer == NULL) {
        error_set(error, ERROR_MEMORY, "no memory for the tokenizer");
        return NULL;
    }
    int code = read_model(tokenizer, gguf, error);
    if (code == 0)
        code = tokenizer->model == MODEL_GPT2 ? load_gpt2(tokenizer, gguf, error)
                                              : load_sentencepiece(tokenizer, gguf, error);
    if (code != 0 || read_ends(tokenizer, gguf, error) != 0 || read_frame(tokenizer, gguf, error) != 0 ||
        text_set_create(&tokenizer->specials, &tokenizer->vocabulary, special_kinds(tokenizer), error) != 0) {
        tokenizer_free(tokenizer);
        return NULL;
    }
    return tokenizer;
}

void tokenizer_free(struct tokenizer *tokenizer) {
    if (tokenizer == NULL)
        return;
    sentencepiece_free(tokenizer->pieces);
    text_set_free(&tokenizer->specials);
    bpe_free(tokenizer->bpe);
    pretokenizer_free(tokenizer->pretokenizer);
    vocabulary_free(&tokenizer->vocabulary);
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

bool tokenizer_adds_eos(const struct tokenizer *tokenizer) {
    return tokenizer->adds_eos;
}

size_t tokenizer_leading_space(const struct tokenizer *tokenizer, int32_t token) {
    size_t bytes;
    if (tokenizer->pieces == NULL || !sentencepiece_adds_space(tokenizer->pieces) ||
        vocabulary_is_special(&tokenizer->vocabulary, (uint32_t)token))
        return 0;
    const char *text = tokenizer_token_bytes(tokenizer, token, &bytes);
    return bytes > 0 && text[0] == ' ';
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
    struct sentencepiece_scratch pieces;
    struct token_list *out;
};

/* The token that a whole piece is, or -1. */
static int32_t find_whole(const struct tokenizer *tokenizer, const char *text, size_t bytes) {
    enum { SHORT = 128 };
    char alphabet[2 * SHORT];
    if (bytes > SHORT || bytes > tokenizer->longest)
        return -1;
    size_t written = vocabulary_write_alphabet(&tokenizer->vocabulary, text, bytes, alphabet);
    int32_t id =
        vocabulary_find(&tokenizer->vocabulary, (struct gguf_string){alphabet, written}, (struct gguf_string){NULL, 0});
    return id >= 0 && tokenizer->vocabulary.kinds[id] == TOKEN_NORMAL ? id : -1;
}

/* One piece: the tokens of its bytes, merged. Bytes without a token are dropped first, so that their neighbours meet.
 */
static int encode_piece(struct encoding *encoding, const char *text, size_t bytes) {
    const struct tokenizer *tokenizer = encoding->tokenizer;
    const int32_t *byte_tokens = tokenizer->vocabulary.byte_tokens;
    struct token_list *out = encoding->out;
    int32_t whole = tokenizer->traits.whole_pieces ? find_whole(tokenizer, text, bytes) : -1;
    if (whole >= 0)
        return token_list_append(out, whole);
    if (token_list_reserve(out, bytes) != 0)
        return ERROR_MEMORY;
    int32_t *ids = out->ids + out->count;
    size_t count = 0;
    for (size_t i = 0; i < bytes; i++) {
        int32_t id = byte_tokens[(unsigned char)text[i]];
        if (id >= 0)
            ids[count++] = id;
    }
    if (bpe_merge(tokenizer->bpe, &encoding->scratch, ids, &count) != 0)
        return ERROR_MEMORY;
    out->count += count;
    return 0;
}

static int encode_pieces(struct encoding *encoding, const char *text, size_t bytes) {
    for (size_t at = 0; at < bytes;) {
        size_t piece = pretokenizer_next(&encoding->scan, text, bytes, at);
        if (piece == 0 || encode_piece(encoding, text + at, piece) != 0)
            return ERROR_MEMORY;
        at += piece;
    }
    return 0;
}

static int encode_valid(struct encoding *encoding, const char *text, size_t bytes) {
    char *composed = NULL;
    if (encoding->tokenizer->traits.composes && compose_text(text, &bytes, &composed) != 0)
        return ERROR_MEMORY;
    int code = encode_pieces(encoding, composed != NULL ? composed : text, bytes);
    free(composed);
    return code;
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
    const struct sentencepiece *pieces = encoding->tokenizer->pieces;
    if (pieces != NULL)
        return bytes == 0 ? 0 : sentencepiece_encode(pieces, &encoding->pieces, text, bytes, encoding->out);
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
    size_t most = bytes < TEXT_SET_BYTES_MAX ? bytes : TEXT_SET_BYTES_MAX, count = 0;
    while (count < most && (marks == NULL || marks[count] == 0))
        count++;
    return count;
}

static int encode_special(struct encoding *encoding, const char *text, const uint8_t *marks, size_t bytes) {
    const struct tokenizer *tokenizer = encoding->tokenizer;
    size_t plain = 0; /* where the text that is not encoded yet begins */
    for (size_t at = 0; at < bytes;) {
        int32_t token = -1;
        if (tokenizer->specials.begins[(unsigned char)text[at]])
            token = text_set_match(
                &tokenizer->specials, text + at, unmarked_length(marks == NULL ? NULL : marks + at, bytes - at));
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
    int code = tokenizer->pretokenizer == NULL ? 0 : pretokenizer_begin(&encoding.scan, tokenizer->pretokenizer);
    if (code == 0)
        code = parse_special ? encode_special(&encoding, text, marks, bytes) : encode_plain(&encoding, text, bytes);
    pretokenizer_end(&encoding.scan);
    bpe_scratch_free(&encoding.scratch);
    sentencepiece_scratch_free(&encoding.pieces);
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
