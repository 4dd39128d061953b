/* SPDX-License-Identifier: Apache-2.0
 *
 * Operations on strings that filters and methods share; marks (value.h) follow the characters. Letters are mapped one
 * to one: Python's few mappings of one character to several ("ß" to "SS") are not done.
 */
#ifndef TEMPLATE_TEXT_H
#define TEMPLATE_TEXT_H

#include "template/run.h"

enum text_case {
    TEXT_UPPER,
    TEXT_LOWER,
    TEXT_CAPITALISED, /* the first character upper, the others lower */
    TEXT_TITLE,       /* Python's str.title: as above for each run of letters */
    TEXT_SWAPPED,
};
struct value text_cased(struct run *run, const struct string *string, enum text_case form);

/* At most `most` replacements; < 0: all. */
struct value text_replace(
    struct run *run, const struct string *string, const struct string *from, const struct string *to, int64_t most);

/* separator NULL: runs of whitespace. most < 0: no limit. from_right: as rsplit. */
struct value text_split(
    struct run *run, const struct string *string, const struct string *separator, int64_t most, bool from_right);
struct value text_split_lines(struct run *run, const struct string *string, bool keep_ends);

/* Items, as text, with `between` between them. */
struct value text_join(struct run *run, const struct list *items, const struct string *between);

/* `fill` (one character) at the left and right up to `width` characters. */
struct value text_padded(
    struct run *run, const struct string *string, size_t left, size_t right, const struct string *fill);

struct value text_indented(
    struct run *run, const struct string *string, const struct string *indent, bool first, bool blank);

/* The text of a value with HTML's special characters replaced, as markup; markup itself stays as it is. */
struct value text_escaped(struct run *run, struct value value);
/* text, a string, as markup if `like` is. */
struct value text_marked_up(struct run *run, struct value text, const struct string *like);

#endif
