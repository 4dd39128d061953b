/* SPDX-License-Identifier: Apache-2.0
 *
 * Text to token ids and back, read from GGUF metadata (`tokenizer.ggml.*`). By tokenizer.ggml.model:
 *   gpt2    byte-level BPE as in GPT-2: text is cut by the pre-tokenizer's pattern (pretokenizer.h), mapped to GPT-2's
 *           byte alphabet and merged by rank. Bytes that the vocabulary has no token for are dropped, before merging;
 *           bytes that are not UTF-8 are encoded one by one through the alphabet.
 *   llama   SentencePiece BPE, also gemma's and mistral's; sentencepiece.h
 *   t5      SentencePiece unigram; sentencepiece.h
 *
 * Special tokens (control, and with gpt2 user-defined ones) are found first, when asked for. A SentencePiece model
 * takes the text behind each as a text of its own, with its leading space. Text may be any bytes, NUL included. The
 * time is O(n log n) in the bytes of any text. All functions are safe to call from several threads on one tokenizer.
 * Sources: Radford et al. 2019; Sennrich et al. 2016; GGUF specification; what keys mean where they are absent:
 * llama.cpp.
 */
#ifndef ENGINE_TOKENIZER_H
#define ENGINE_TOKENIZER_H

#include "engine/error.h"
#include "engine/gguf.h"
#include "engine/token_list.h"

struct tokenizer; /* opaque */

/* The tokenizer of a file, which must outlive it. Fails with the name of an unsupported model or pre-tokenizer. */
struct tokenizer *tokenizer_create(const struct gguf *gguf, struct error *error);
void tokenizer_free(struct tokenizer *tokenizer);

uint32_t tokenizer_vocabulary(const struct tokenizer *tokenizer);
int32_t tokenizer_bos(const struct tokenizer *tokenizer); /* -1 when there is none */
int32_t tokenizer_eos(const struct tokenizer *tokenizer); /* -1 when there is none */
/* Whether prompts that are text begin with BOS, and end with EOS: tokenizer.ggml.add_bos_token and .add_eos_token; when
 * those are absent, what models of that kind do. */
bool tokenizer_adds_bos(const struct tokenizer *tokenizer);
bool tokenizer_adds_eos(const struct tokenizer *tokenizer);
/* True for tokens that end a generation: the metadata's eos, eot and eom, and control tokens with a known end name. */
bool tokenizer_is_end(const struct tokenizer *tokenizer, int32_t token);
/* Appends all of them to out, ascending. ERROR_MEMORY. */
int tokenizer_list_ends(const struct tokenizer *tokenizer, struct token_list *out);
/* A token that is no text of the model's own: control, unknown with SentencePiece, user-defined with gpt2. */
bool tokenizer_is_special(const struct tokenizer *tokenizer, int32_t token);

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

/* The bytes to leave out at the beginning of a token (0 or 1) when a whole text is decoded, whose tokens before it were
 * all special: the space that encoding put there. */
size_t tokenizer_leading_space(const struct tokenizer *tokenizer, int32_t token);

/* The values of tokenizer.ggml.model that are supported, by index; NULL past the last. */
const char *tokenizer_model_name(size_t index);

#endif
