/* SPDX-License-Identifier: Apache-2.0
 *
 * Tokens whose texts are looked for in a text as they are: special and user-defined ones. The longest that begins at a
 * place is found in time of its length.
 */
#ifndef ENGINE_TEXT_SET_H
#define ENGINE_TEXT_SET_H

#include "engine/vocabulary.h"

enum { TEXT_SET_BYTES_MAX = 512 }; /* of a token's text: bounds the search at each place of a text */

struct text_set {
    const struct vocabulary *vocabulary;
    uint32_t *ids; /* sorted by what the tokens stand for */
    uint32_t count;
    bool begins[256]; /* by first byte of a text */
};

/* All tokens of the kinds whose bit (1 << enum token_kind) is set and that stand for a text. ERROR_MEMORY;
 * ERROR_UNSUPPORTED for one of more than TEXT_SET_BYTES_MAX bytes. The vocabulary must outlive it. */
int text_set_create(struct text_set *set, const struct vocabulary *vocabulary, unsigned kinds, struct error *error);
void text_set_free(struct text_set *set); /* also after a failed creation, and zero-initialised */

/* The token whose text is text, or -1. */
int32_t text_set_find(const struct text_set *set, const char *text, size_t bytes);

/* The longest token that text begins with, or -1. */
int32_t text_set_match(const struct text_set *set, const char *text, size_t bytes);

#endif
