/* SPDX-License-Identifier: Apache-2.0 */
#include "tests/unit/fake_scheduler.h"

#include <stdlib.h>
#include <string.h>

struct tokenizer {
    bool adds_bos;
    char bytes[256];
};

static const char *const specials[] = {"<|im_start|>", "<|im_end|>", "<|endoftext|>"};

int token_list_append(struct token_list *list, int32_t id) {
    if (list->count == list->capacity) {
        size_t capacity = list->capacity == 0 ? 16 : list->capacity * 2;
        int32_t *ids = realloc(list->ids, capacity * sizeof *ids);
        if (ids == NULL)
            return ERROR_MEMORY;
        list->ids = ids;
        list->capacity = capacity;
    }
    list->ids[list->count++] = id;
    return 0;
}

void token_list_free(struct token_list *list) {
    free(list->ids);
    *list = (struct token_list){0};
}

struct tokenizer *fake_tokenizer_create(bool adds_bos) {
    struct tokenizer *tokenizer = calloc(1, sizeof *tokenizer);
    if (tokenizer == NULL)
        abort();
    tokenizer->adds_bos = adds_bos;
    for (int i = 0; i < 256; i++)
        tokenizer->bytes[i] = (char)i;
    return tokenizer;
}

void tokenizer_free(struct tokenizer *tokenizer) {
    free(tokenizer);
}

uint32_t tokenizer_vocabulary(const struct tokenizer *tokenizer) {
    (void)tokenizer;
    return FAKE_VOCABULARY;
}

int32_t tokenizer_bos(const struct tokenizer *tokenizer) {
    (void)tokenizer;
    return FAKE_BOS;
}

int32_t tokenizer_eos(const struct tokenizer *tokenizer) {
    (void)tokenizer;
    return FAKE_EOS;
}

bool tokenizer_adds_bos(const struct tokenizer *tokenizer) {
    return tokenizer->adds_bos;
}

bool tokenizer_is_end(const struct tokenizer *tokenizer, int32_t token) {
    (void)tokenizer;
    return token == 257 || token == 258;
}

bool tokenizer_adds_eos(const struct tokenizer *tokenizer) {
    (void)tokenizer;
    return false;
}

size_t tokenizer_leading_space(const struct tokenizer *tokenizer, int32_t token) {
    (void)tokenizer;
    (void)token;
    return 0;
}

bool tokenizer_is_special(const struct tokenizer *tokenizer, int32_t token) {
    (void)tokenizer;
    return token >= 256;
}

static bool any_marked(const uint8_t *marks, size_t bytes) {
    for (size_t i = 0; marks != NULL && i < bytes; i++)
        if (marks[i] != 0)
            return true;
    return false;
}

static int fake_encode(
    const char *text, const uint8_t *marks, size_t bytes, bool parse_special, struct token_list *out) {
    for (size_t i = 0; i < bytes;) {
        int32_t token = (unsigned char)text[i];
        size_t step = 1;
        for (int s = 0; parse_special && s < 3; s++) {
            size_t length = strlen(specials[s]);
            if (bytes - i >= length && memcmp(text + i, specials[s], length) == 0 &&
                !any_marked(marks == NULL ? NULL : marks + i, length)) {
                token = 256 + s;
                step = length;
            }
        }
        if (token_list_append(out, token) != 0)
            return ERROR_MEMORY;
        i += step;
    }
    return 0;
}

int tokenizer_encode(const struct tokenizer *tokenizer, const char *text, size_t bytes, bool parse_special,
    struct token_list *out, struct error *error) {
    (void)tokenizer;
    int code = fake_encode(text, NULL, bytes, parse_special, out);
    return code == 0 ? 0 : error_set(error, code, "out of memory");
}

int tokenizer_encode_marked(const struct tokenizer *tokenizer, const char *text, const uint8_t *marks, size_t bytes,
    struct token_list *out, struct error *error) {
    (void)tokenizer;
    int code = fake_encode(text, marks, bytes, true, out);
    return code == 0 ? 0 : error_set(error, code, "out of memory");
}

const char *tokenizer_token_bytes(const struct tokenizer *tokenizer, int32_t token, size_t *bytes) {
    if (token >= 256) {
        *bytes = strlen(specials[token - 256]);
        return specials[token - 256];
    }
    *bytes = 1;
    return &tokenizer->bytes[token];
}
