/* SPDX-License-Identifier: Apache-2.0
 *
 * Characters, strings and numbers of JSON (RFC 8259) as expressions.
 *
 * A character is written in one of two ways. Plainly: as itself in UTF-8, the quotation mark and the backslash behind a
 * backslash, and control characters as \b \f \n \r \t or \u00XX, so that there is one way only (but for the case of
 * hexadecimal digits). Freely: in any way that JSON has, \uXXXX with surrogate pairs included. Lone surrogates are
 * never written. Strings with conditions on their characters (pattern, format, names, enum) are written plainly.
 */
#ifndef GRAMMAR_TEXT_H
#define GRAMMAR_TEXT_H

#include "grammar/expression.h"

enum { CODE_POINT_MAX = 0x10ffff, CODE_RANGES_MAX = 512, TEXT_NAME_MAX = 256, NUMBER_DIGITS_MAX = 15 };

/* A set of code points: ranges in any order, which may overlap until code_set_sort. */
struct code_set {
    uint32_t count;
    bool overflow; /* more than CODE_RANGES_MAX ranges were added */
    struct code_range {
        uint32_t low, high;
    } ranges[CODE_RANGES_MAX];
};
void code_set_add(struct code_set *set, uint32_t low, uint32_t high);
void code_set_sort(struct code_set *set); /* ascending, neither overlapping nor touching */
void code_set_invert(struct code_set *set);

/* One character of the set, written plainly inside a JSON string; raw: in UTF-8, as it is. Surrogates are left out. */
uint32_t text_characters(struct expression_pool *pool, const struct code_set *set, bool raw);
/* Any character, written plainly; written freely. Both are `text`. */
uint32_t text_any_plain(struct expression_pool *pool);
uint32_t text_any_free(struct expression_pool *pool);

/* The whole of a text: plainly between quotation marks. */
uint32_t text_quoted(struct expression_pool *pool, const char *text, size_t bytes);
/* A JSON string, without its quotation marks, that is none of names [count], which are UTF-8 of at most
 * TEXT_NAME_MAX bytes. */
uint32_t text_other_names(struct expression_pool *pool, const char *const *names, size_t count);

/* White space between tokens: nothing, a space, or a line feed and up to 20 spaces. */
uint32_t text_space(struct expression_pool *pool);

/* Whole numbers low..high, without leading zeros; at most NUMBER_DIGITS_MAX digits, to which the limits are cut. */
uint32_t text_integer(struct expression_pool *pool, int64_t low, int64_t high);
/* Any number: NUMBER_DIGITS_MAX digits before and behind the point, an exponent of at most two digits. */
uint32_t text_number(struct expression_pool *pool);
/* A number between whole limits, which may be left out themselves: without exponent, with NUMBER_DIGITS_MAX digits in
 * all, of which the limits say how many are before the point (9, if one of them is not there). */
struct number_limits {
    bool has_low, has_high, without_low, without_high;
    int64_t low, high;
};
uint32_t text_decimal(struct expression_pool *pool, const struct number_limits *limits);

#endif
