/* SPDX-License-Identifier: Apache-2.0
 *
 * Text to token ids and back: byte-level BPE as in GPT-2, read from GGUF metadata (`tokenizer.ggml.*`).
 *
 * Encoding: special tokens (types control and user-defined) are found first when asked for; the text between is cut by
 * the pre-tokenizer's pattern (`smollm`: each \p{N} alone, then GPT-2's pattern), mapped to GPT-2's byte alphabet and
 * merged by rank. Bytes that the vocabulary has no token for are dropped, before merging. Text may be any bytes, NUL
 * included; bytes that are not UTF-8 are encoded one by one through the byte alphabet. The time is O(n log n) in the
 * bytes of any text.
 * All functions are safe to call from several threads on one tokenizer.
 * Sources: Radford et al. 2019; Sennrich et al. 2016; GGUF specification.
 */
#ifndef ENGINE_TOKENIZER_H
#define ENGINE_TOKENIZER_H

#include "engine/error.h"
#include "engine/gguf.h"

struct tokenizer; /* opaque */

struct token_list { /* a growing array of ids; zero-initialise, free with token_list_free */
    int32_t *ids;
    size_t count;
    size_t capacity;
};
int token_list_append(struct token_list *list, int32_t id); /* 0 or ERROR_MEMORY */
void token_list_free(struct token_list *list);

/* The tokenizer of a file, which must outlive it. Fails with the name of an unsupported model or pre-tokenizer. */
struct tokenizer *tokenizer_create(const struct gguf *gguf, struct error *error);
void tokenizer_free(struct tokenizer *tokenizer);

uint32_t tokenizer_vocabulary(const struct tokenizer *tokenizer);
int32_t tokenizer_bos(const struct tokenizer *tokenizer);   /* -1 when there is none */
int32_t tokenizer_eos(const struct tokenizer *tokenizer);   /* -1 when there is none */
bool tokenizer_adds_bos(const struct tokenizer *tokenizer); /* tokenizer.ggml.add_bos_token */
/* True for tokens that end a generation: the metadata's eos, eot and eom, and control tokens with a known end name. */
bool tokenizer_is_end(const struct tokenizer *tokenizer, int32_t token);
/* Appends all of them to out, ascending. ERROR_MEMORY. */
int tokenizer_list_ends(const struct tokenizer *tokenizer, struct token_list *out);
bool tokenizer_is_special(const struct tokenizer *tokenizer, int32_t token); /* control or user-defined */

/* Appends the ids of text [bytes] to out. parse_special: the texts of special tokens become those tokens, the longest
 * where several begin. ERROR_MEMORY only (also for texts over 2^31 - 1 bytes); out is then as before. */
int tokenizer_encode(const struct tokenizer *tokenizer, const char *text, size_t bytes, bool parse_special,
    struct token_list *out, struct error *error);

/* The same with parse_special, but a special token is none where any of its bytes is marked (not 0): text of strangers
 * between the tokens of a chat template. marks: [bytes]; NULL: nothing is marked. */
int tokenizer_encode_marked(const struct tokenizer *tokenizer, const char *text, const uint8_t *marks, size_t bytes,
    struct token_list *out, struct error *error);

/* The bytes a token stands for, borrowed; a special token is its own text, and so is one that is not written in the
 * byte alphabet. Length in *bytes. token must be in range. They need not be whole UTF-8 characters. */
const char *tokenizer_token_bytes(const struct tokenizer *tokenizer, int32_t token, size_t *bytes);

#endif
