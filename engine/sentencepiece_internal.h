/* SPDX-License-Identifier: Apache-2.0
 *
 * What the files of sentencepiece.h share.
 */
#ifndef ENGINE_SENTENCEPIECE_INTERNAL_H
#define ENGINE_SENTENCEPIECE_INTERNAL_H

#include "engine/character_map.h"
#include "engine/sentencepiece.h"
#include "engine/text_set.h"

struct sentencepiece {
    const struct vocabulary *vocabulary;
    struct text_set user_defined;
    struct character_map map;
    struct bpe *bpe; /* NULL: unigram */
    uint32_t *extra; /* code points that occur in pieces without being one, ascending: ids from count on */
    uint32_t extra_count;
    int32_t ascii[128];    /* the symbol of a character, -1: none */
    const uint8_t *scores; /* [count] float32, unaligned; NULL: merges are listed */
    float lowest, highest; /* scores of normal tokens */
    size_t longest;        /* bytes of a normal token */
    int32_t unknown;       /* the unknown token, -1: none */
    bool adds_space;
    bool removes_spaces;
    bool cuts_at_spaces; /* BPE whose pieces have no space behind another character: none crosses the start of a word */
};

/* One node of the lattice: the best way to a place of the text. */
struct sentencepiece_node {
    float score;
    int32_t token; /* the last piece, -1: an unknown character */
    size_t from;   /* where it begins; SIZE_MAX: no way leads here yet */
};

float sentencepiece_score(const struct sentencepiece *model, uint32_t id);

/* Fills bpe and extra, from the scores or the listed merges. */
int sentencepiece_read_merges(struct sentencepiece *model, const struct gguf *gguf, struct error *error);

/* The character at text, bytes > 0: its length; 1 with *character = -1 where it is not UTF-8. */
size_t sentencepiece_character(const char *text, size_t bytes, int32_t *character);

/* A character or byte that is no piece. after_unknown: what was appended last is the unknown token of such a one. */
int sentencepiece_fall_back(
    const struct sentencepiece *model, const char *text, size_t bytes, bool *after_unknown, struct token_list *out);

/* Part of a text without user-defined tokens. */
int sentencepiece_encode_unigram(const struct sentencepiece *model, struct sentencepiece_scratch *scratch,
    const char *text, size_t bytes, bool *after_unknown, struct token_list *out);

#endif
