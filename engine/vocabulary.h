/* SPDX-License-Identifier: Apache-2.0
 *
 * The tokens of a GGUF file's vocabulary: their texts, kinds and the bytes they stand for.
 *
 * Texts are written in one of two ways:
 *   SPELLING_ALPHABET  GPT-2's byte alphabet, where every byte is one printable character: bytes 33-126, 161-172 and
 *                      174-255 are the code points of the same number, the other 68 are U+0100 and on in order.
 *                      Source: Radford et al. 2019.
 *   SPELLING_MARKS     UTF-8 with U+2581 for a space; tokens of kind byte are "<0x00>" to "<0xFF>". Source: Kudo,
 *                      Richardson 2018, "SentencePiece".
 */
#ifndef ENGINE_VOCABULARY_H
#define ENGINE_VOCABULARY_H

#include <stdbool.h>

#include "engine/error.h"
#include "engine/gguf.h"

enum token_kind { /* numbers of tokenizer.ggml.token_type */
    TOKEN_NORMAL = 1,
    TOKEN_UNKNOWN = 2,
    TOKEN_CONTROL = 3,
    TOKEN_USER_DEFINED = 4,
    TOKEN_UNUSED = 5,
    TOKEN_BYTE = 6,
};

enum spelling { SPELLING_ALPHABET, SPELLING_MARKS };

struct vocabulary {
    enum spelling spelling;
    uint32_t count;
    const struct gguf_string *texts; /* [count], in the file */
    uint8_t *kinds;                  /* [count], enum token_kind */
    char *bytes;                     /* what the tokens stand for, one after the other */
    size_t *begin;                   /* [count + 1] into bytes */
    int32_t byte_tokens[256];        /* the token of each byte, -1 where there is none */
    uint32_t *table;                 /* ids by hash of their key, open addressing */
    uint64_t mask;
    uint16_t characters[256]; /* the alphabet: the code point of each byte */
};

/* Reads tokenizer.ggml.tokens and .token_type (all normal when it is absent). A token stands for the bytes that its
 * text spells; for its text itself when it is control, unknown or (in the alphabet) user-defined, or is not written in
 * the spelling. */
int vocabulary_load(
    struct vocabulary *vocabulary, const struct gguf *gguf, enum spelling spelling, struct error *error);
void vocabulary_free(struct vocabulary *vocabulary); /* also after a failed load */

/* The id of the token whose key is first and second joined, or -1. Of equal keys the last token. Keys are the texts of
 * all tokens in the alphabet, and the bytes that normal tokens stand for in the other spelling. */
int32_t vocabulary_find(const struct vocabulary *vocabulary, struct gguf_string first, struct gguf_string second);

/* What a token stands for, id < count; points into the vocabulary. */
struct gguf_string vocabulary_bytes(const struct vocabulary *vocabulary, uint32_t id);

/* Writes a piece of text [bytes] in the alphabet, at most 2 * bytes: the bytes written. */
size_t vocabulary_write_alphabet(const struct vocabulary *vocabulary, const char *text, size_t bytes, char *out);

/* Whether a token is no text of the model's own: control or unknown, and in the alphabet user-defined. id < count. */
bool vocabulary_is_special(const struct vocabulary *vocabulary, uint32_t id);

#endif
