/* SPDX-License-Identifier: Apache-2.0
 *
 * Text as the metrics see it: code points, and words of them. The rules are those of Python's `str`, in which the
 * metrics were published: lower case (full mapping, final sigma), white space, letters and digits (by Unicode
 * category). Bytes that are not UTF-8 count as U+FFFD, one each.
 */
#ifndef POLICY_EVAL_TEXT_H
#define POLICY_EVAL_TEXT_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

struct eval_text {
    int32_t *codes;
    size_t count;
};

/* Part of an eval_text. */
struct eval_word {
    const int32_t *codes;
    size_t count;
    uint32_t id; /* the same for the same word (eval_words_number) */
};

struct eval_words {
    struct eval_word *words;
    size_t count;
};

/* false: an allocation failed. Zeroed structs may be freed. */
bool eval_text_decode(const char *bytes, size_t count, struct eval_text *text);
void eval_text_free(struct eval_text *text);
bool eval_text_lower(struct eval_text *text);
/* SQuAD's normalisation: lower case, no ASCII punctuation, no words a, an, the (as \b bounds them), single spaces. */
bool eval_text_normalise(struct eval_text *text);
bool eval_text_equal(const struct eval_text *a, const struct eval_text *b);
bool eval_text_contains(const struct eval_text *text, const struct eval_text *part);

bool eval_is_space(int32_t code);
bool eval_is_digit(int32_t code); /* any decimal digit of Unicode */

/* Words between white space. They point into codes. */
bool eval_words_split(const int32_t *codes, size_t count, struct eval_words *words);
void eval_words_free(struct eval_words *words);
/* Numbers the words of two lists, so that equal words have equal ids; ids count from 0. Returns how many there are; 0
 * also on failed allocation, which *failed tells. */
size_t eval_words_number(struct eval_words *a, struct eval_words *b, bool *failed);

#endif
