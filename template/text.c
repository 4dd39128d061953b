/* SPDX-License-Identifier: Apache-2.0 */
#include "template/text.h"

#include <string.h>
#include <utf8proc.h>

static const uint8_t *mark_at(const struct string *string, size_t at) {
    return string->input == NULL ? NULL : string->input + at;
}

static bool is_cased(int32_t character) {
    utf8proc_category_t category = utf8proc_category(character);
    return category == UTF8PROC_CATEGORY_LU || category == UTF8PROC_CATEGORY_LL || category == UTF8PROC_CATEGORY_LT;
}

struct value text_cased(struct run *run, const struct string *string, enum text_case form) {
    struct builder out = {.run = run};
    bool begins = true; /* the text, or with TEXT_TITLE a word */
    int32_t character;
    for (size_t at = 0, step; at < string->bytes; at += step) {
        step = string_character(string, at, &character);
        if (character < 0) {
            builder_bytes(&out, string->text + at, step, mark_at(string, at));
            begins = form == TEXT_TITLE;
            continue;
        }
        bool upper = form == TEXT_UPPER || ((form == TEXT_CAPITALISED || form == TEXT_TITLE) && begins) ||
                     (form == TEXT_SWAPPED && utf8proc_category(character) == UTF8PROC_CATEGORY_LL);
        int32_t mapped = upper ? ((form == TEXT_UPPER || form == TEXT_SWAPPED) ? utf8proc_toupper(character)
                                                                               : utf8proc_totitle(character))
                               : utf8proc_tolower(character);
        builder_character(&out, mapped, mark_at(string, at));
        begins = form == TEXT_TITLE && !is_cased(character);
    }
    return text_marked_up(run, builder_value(&out), string);
}

/* Python puts the new text also before each character and at the end when `from` is empty. */
static struct value replace_empty(struct run *run, const struct string *string, const struct string *to, int64_t most) {
    struct builder out = {.run = run};
    int32_t character;
    for (size_t at = 0, step; at < string->bytes; at += step) {
        if (most != 0)
            builder_add(&out, to);
        most -= most > 0;
        step = string_character(string, at, &character);
        struct string part = string_part(string, at, at + step);
        builder_add(&out, &part);
    }
    if (most != 0)
        builder_add(&out, to);
    return builder_value(&out);
}

struct value text_replace(
    struct run *run, const struct string *string, const struct string *from, const struct string *to, int64_t most) {
    if (from->bytes == 0)
        return replace_empty(run, string, to, most);
    struct builder out = {.run = run};
    size_t at = 0;
    for (; most != 0; most -= most > 0) {
        size_t found = string_find(string, from, at);
        if (found == SIZE_MAX)
            break;
        struct string part = string_part(string, at, found);
        builder_add(&out, &part);
        builder_add(&out, to);
        at = found + from->bytes;
    }
    struct string rest = string_part(string, at, string->bytes);
    builder_add(&out, &rest);
    return builder_value(&out);
}

/* --- Splitting --- */

static void add_part(struct run *run, struct value list, const struct string *string, size_t begin, size_t end) {
    run_step(run, 1 + (end - begin) / 64);
    list_add(run, list.list, value_string(run, string_part(string, begin, end)));
}

static void reverse_list(struct list *list) {
    for (size_t i = 0; i < list->count / 2; i++) {
        struct value swap = list->items[i];
        list->items[i] = list->items[list->count - 1 - i];
        list->items[list->count - 1 - i] = swap;
    }
}

/* The last place before `end` at which part is found; SIZE_MAX: nowhere. */
static size_t find_last(const struct string *string, const struct string *part, size_t end) {
    if (part->bytes > end)
        return SIZE_MAX;
    for (size_t at = end - part->bytes + 1; at > 0; at--) {
        struct string here = string_part(string, at - 1, at - 1 + part->bytes);
        if (string_same(&here, part))
            return at - 1;
    }
    return SIZE_MAX;
}

static struct value split_words(struct run *run, const struct string *string, int64_t most) {
    struct value list = value_list(run, VALUE_LIST);
    struct string rest = string_strip(string, NULL, true, false);
    int32_t character;
    while (rest.bytes > 0) {
        size_t end = 0;
        if (most == 0)
            end = rest.bytes;
        while (end < rest.bytes) {
            size_t step = string_character(&rest, end, &character);
            if (character_is_space(character))
                break;
            end += step;
        }
        add_part(run, list, &rest, 0, end);
        rest = string_part(&rest, end, rest.bytes);
        rest = string_strip(&rest, NULL, true, false);
        most -= most > 0;
    }
    return list;
}

static struct value split_words_right(struct run *run, const struct string *string, int64_t most) {
    struct value list = value_list(run, VALUE_LIST);
    struct string rest = string_strip(string, NULL, false, true);
    int32_t character;
    while (rest.bytes > 0) {
        size_t begin = rest.bytes;
        if (most == 0)
            begin = 0;
        while (begin > 0) {
            size_t at = begin - 1;
            while (at > 0 && ((unsigned char)rest.text[at] & 0xc0) == 0x80)
                at--;
            string_character(&rest, at, &character);
            if (character_is_space(character))
                break;
            begin = at;
        }
        add_part(run, list, &rest, begin, rest.bytes);
        rest = string_part(&rest, 0, begin);
        rest = string_strip(&rest, NULL, false, true);
        most -= most > 0;
    }
    reverse_list(list.list);
    return list;
}

struct value text_split(
    struct run *run, const struct string *string, const struct string *separator, int64_t most, bool from_right) {
    if (separator == NULL)
        return from_right ? split_words_right(run, string, most) : split_words(run, string, most);
    if (separator->bytes == 0)
        arena_fail(&run->arena, "empty separator");
    struct value list = value_list(run, VALUE_LIST);
    size_t begin = 0, end = string->bytes;
    while (most != 0) {
        size_t found = from_right ? find_last(string, separator, end) : string_find(string, separator, begin);
        if (found == SIZE_MAX)
            break;
        if (from_right)
            add_part(run, list, string, found + separator->bytes, end);
        else
            add_part(run, list, string, begin, found);
        begin = from_right ? 0 : found + separator->bytes;
        end = from_right ? found : end;
        most -= most > 0;
    }
    add_part(run, list, string, begin, end);
    if (from_right)
        reverse_list(list.list);
    return list;
}

static bool ends_line(int32_t character) {
    return (character >= 10 && character <= 13) || (character >= 0x1c && character <= 0x1e) || character == 0x85 ||
           character == 0x2028 || character == 0x2029;
}

struct value text_split_lines(struct run *run, const struct string *string, bool keep_ends) {
    struct value list = value_list(run, VALUE_LIST);
    int32_t character;
    for (size_t at = 0, begin = 0; at < string->bytes;) {
        size_t step = string_character(string, at, &character);
        if (!ends_line(character)) {
            at += step;
            if (at == string->bytes)
                add_part(run, list, string, begin, at);
            continue;
        }
        size_t end = at + step;
        if (character == '\r' && end < string->bytes && string->text[end] == '\n')
            end++;
        add_part(run, list, string, begin, keep_ends ? end : at);
        at = begin = end;
    }
    return list;
}

/* --- Markup --- */

struct value text_marked_up(struct run *run, struct value text, const struct string *like) {
    if (!like->markup)
        return text;
    struct string copy = *text.string;
    copy.markup = true;
    return value_string(run, copy);
}

struct value text_escaped(struct run *run, struct value value) {
    static const char plain[] = "&<>'\"";
    static const char *const escapes[] = {"&amp;", "&lt;", "&gt;", "&#39;", "&#34;"};
    struct string text = value_str(run, value);
    struct builder out = {.run = run};
    if (text.markup)
        return value;
    size_t begin = 0; /* of what is not written yet */
    for (size_t at = 0; at < text.bytes; at++) {
        const char *found = memchr(plain, text.text[at], sizeof plain - 1);
        if (found == NULL)
            continue;
        struct string part = string_part(&text, begin, at);
        builder_add(&out, &part);
        builder_text(&out, escapes[found - plain]);
        begin = at + 1;
    }
    struct string part = string_part(&text, begin, text.bytes);
    builder_add(&out, &part);
    struct string escaped = builder_string(&out);
    escaped.markup = true;
    return value_string(run, escaped);
}

/* --- Putting together --- */

struct value text_join(struct run *run, const struct list *items, const struct string *between) {
    struct builder out = {.run = run};
    for (size_t i = 0; i < items->count; i++) {
        if (i > 0)
            builder_add(&out, between);
        run_step(run, 1);
        value_print(&out, items->items[i]);
    }
    return builder_value(&out);
}

struct value text_padded(
    struct run *run, const struct string *string, size_t left, size_t right, const struct string *fill) {
    struct builder out = {.run = run};
    for (size_t i = 0; i < left; i++)
        builder_add(&out, fill);
    builder_add(&out, string);
    for (size_t i = 0; i < right; i++)
        builder_add(&out, fill);
    return text_marked_up(run, builder_value(&out), string);
}

struct value text_indented(
    struct run *run, const struct string *string, const struct string *indent, bool first, bool blank) {
    struct builder out = {.run = run};
    const struct string newline = string_of("\n");
    struct string whole = *string;
    const struct list *lines = text_split_lines(run, &whole, false).list;
    /* As jinja2: a newline is put behind the text before it is split, so that a last empty line stays. */
    bool ends = string->bytes > 0 && string->text[string->bytes - 1] == '\n';
    for (size_t i = 0; i < lines->count + (ends || lines->count == 0); i++) {
        const struct string empty = string_of("");
        const struct string *line = i < lines->count ? lines->items[i].string : &empty;
        if (i > 0)
            builder_add(&out, &newline);
        if (i == 0 ? first : (blank || line->bytes > 0))
            builder_add(&out, indent);
        builder_add(&out, line);
    }
    return builder_value(&out);
}
