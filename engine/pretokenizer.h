/* SPDX-License-Identifier: Apache-2.0
 *
 * The cut before byte-level BPE: text is divided into pieces that merges never cross. Each pre-tokenizer of GGUF files
 * (`tokenizer.ggml.pre`) is one regular expression that matches at every position of a text.
 *
 * smollm: each \p{N} alone, then GPT-2's pattern over what lies between. Both are one pattern here: the end of a run
 * between numbers counts for the look-ahead as the end of the text does.
 */
#ifndef ENGINE_PRETOKENIZER_H
#define ENGINE_PRETOKENIZER_H

#include "engine/error.h"
#include "engine/gguf.h"

struct pretokenizer; /* opaque; may be shared by threads */

/* ERROR_UNSUPPORTED with the name when it is not known, ERROR_MEMORY; *out is NULL then. */
int pretokenizer_create(struct gguf_string name, struct pretokenizer **out, struct error *error);
void pretokenizer_free(struct pretokenizer *pretokenizer);

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
