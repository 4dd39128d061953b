/* SPDX-License-Identifier: Apache-2.0
 *
 * Regular expressions of `pattern` (ECMA-262, as JSON Schema recommends) as expressions.
 *
 * | supported                                     | notes                                                          |
 * |-----------------------------------------------|----------------------------------------------------------------|
 * | characters, \. and other escaped punctuation | code points                                                    |
 * | \n \r \t \f \v \0 \xHH \uHHHH \cA          |                                                                |
 * | .                                             | anything but line ends (\n \r U+2028 U+2029)                   |
 * | [a-z_] [^a-z]                                 |                                                                |
 * | \d \w \s \D \W \S                             | ASCII; the capital ones too, and [^...] with one of the six:   |
 * |                                               | what engines disagree about is never written                  |
 * | x|y  (x)  (?:x)  (?<name>x)                   |                                                                |
 * | * + ? {m} {m,} {m,n}, lazy ones alike         | counts up to 65,535                                            |
 * | ^ $                                           | ^ only where a text may begin, $ only where it may end         |
 *
 * Not supported (ERROR_UNSUPPORTED): look-around, back-references, \b, \B, \p, flags. Without ^ and $ any text may
 * stand before and behind, as `pattern` searches.
 */
#ifndef GRAMMAR_REGEX_H
#define GRAMMAR_REGEX_H

#include "engine/error.h"
#include "grammar/expression.h"

/* *out: the texts in which the pattern (UTF-8) is found, written plainly without quotation marks;
 * whole: that it matches from end to end, in UTF-8.
 * ERROR_INVALID: no regular expression; ERROR_UNSUPPORTED. Messages name the place. */
int regex_compile(
    struct expression_pool *pool, const char *pattern, size_t bytes, bool whole, uint32_t *out, struct error *error);

#endif
