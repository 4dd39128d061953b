/* SPDX-License-Identifier: Apache-2.0
 *
 * The cut before byte-level BPE: text is divided into pieces that merges never cross. Each pre-tokenizer of GGUF files
 * (`tokenizer.ggml.pre`) is one regular expression that matches at every position of a text.
 *
 * Patterns are those of the models' tokenizer.json (field pre_tokenizer); which names stand for the same one is
 * llama.cpp's list. A pattern that cuts in several rounds there is one here: what ends a part in an earlier round
 * counts for a look-ahead as the end of the text does. `default` is what llama.cpp does where a file does not say.
 *
 * Letters, marks, numbers and punctuation are PCRE2's tables of Unicode; spaces are Unicode's White_Space.
 */
#ifndef ENGINE_PRETOKENIZER_H
#define ENGINE_PRETOKENIZER_H

#include <stdbool.h>

#include "engine/error.h"
#include "engine/gguf.h"

struct pretokenizer; /* opaque; may be shared by threads */

/* How the models of a pre-tokenizer's name treat text beside cutting it. */
struct pretokenizer_traits {
    bool whole_pieces; /* a piece that is a token is that token, whatever its merges give (tokenizer.json:
                          ignore_merges) */
    bool adds_bos;     /* prompts begin with BOS where the file does not say otherwise */
    bool composes;     /* text is brought to Unicode's form NFC first (tokenizer.json: normalizer) */
};

/* ERROR_UNSUPPORTED with the name when it is not known, ERROR_MEMORY; *out is NULL then. */
int pretokenizer_create(struct gguf_string name, struct pretokenizer **out, struct error *error);
void pretokenizer_free(struct pretokenizer *pretokenizer);
struct pretokenizer_traits pretokenizer_traits(const struct pretokenizer *pretokenizer);

/* The names that are known, by index; NULL past the last. */
const char *pretokenizer_name(size_t index);

/* The name of the pattern that a tokenizer.json has (pre_tokenizer's Split), NULL when it is not known. */
const char *pretokenizer_find_pattern(const char *pattern);

/* What one thread needs while it cuts; zero-initialise. */
struct pretokenizer_scan {
    const struct pretokenizer *pretokenizer;
    void *match; /* pcre2_match_data */
};
int pretokenizer_begin(struct pretokenizer_scan *scan, const struct pretokenizer *pretokenizer); /* 0, ERROR_MEMORY */
void pretokenizer_end(struct pretokenizer_scan *scan);

/* The piece that begins at text[at]: its length in bytes (> 0), or 0 when memory ran out. text [bytes] is valid
 * UTF-8 and is cut from its beginning: at is 0 or the end of the piece before. at < bytes. */
size_t pretokenizer_next(const struct pretokenizer_scan *scan, const char *text, size_t bytes, size_t at);

#endif
