/* SPDX-License-Identifier: Apache-2.0
 *
 * The tokens of a GGUF file's byte-level vocabulary: their texts, kinds and the bytes they stand for.
 *
 * Texts are written in GPT-2's byte alphabet, where every byte is one printable character: bytes 33-126, 161-172 and
 * 174-255 are the code points of the same number, the other 68 are U+0100 and on in order. Source: Radford et al. 2019.
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

struct vocabulary {
    uint32_t count;
    const struct gguf_string *texts; /* [count], in the file */
    uint8_t *kinds;                  /* [count], enum token_kind */
    char *bytes;                     /* what the tokens stand for, one after the other */
    size_t *begin;                   /* [count + 1] into bytes */
    int32_t byte_tokens[256];        /* the token of each byte, -1 where there is none */
    uint32_t *table;                 /* ids by hash of their text, open addressing */
    uint64_t mask;
};

/* Reads tokenizer.ggml.tokens and .token_type (all normal when it is absent). A token stands for the bytes that its
 * text spells; for its text itself when it is control or user-defined, or is not written in the alphabet. */
int vocabulary_load(struct vocabulary *vocabulary, const struct gguf *gguf, struct error *error);
void vocabulary_free(struct vocabulary *vocabulary); /* also after a failed load */

/* The id of the token whose text is first and second joined, or -1. Of equal texts the last token. */
int32_t vocabulary_find(const struct vocabulary *vocabulary, struct gguf_string first, struct gguf_string second);

/* Control or user-defined. id < count. */
bool vocabulary_is_special(const struct vocabulary *vocabulary, uint32_t id);

#endif
