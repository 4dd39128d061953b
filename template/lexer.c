/* SPDX-License-Identifier: Apache-2.0 */
#include "template/lexer.h"

#include <errno.h>
#include <stdlib.h>
#include <string.h>
#include <utf8proc.h>

enum { BRACKETS_MAX = 256 };

struct lexer {
    struct arena *arena;
    struct string source;
    size_t at;
    uint32_t line;
    bool line_begins;            /* the last tag ended with a newline, or there was none yet */
    char brackets[BRACKETS_MAX]; /* closing ones that are awaited */
    size_t brackets_count;
    struct token *tokens;
    size_t count, capacity;
};

static char lexer_peek(const struct lexer *lexer, size_t ahead) {
    size_t at = lexer->at + ahead;
    return at < lexer->source.bytes ? lexer->source.text[at] : '\0';
}

static bool lexer_sees(const struct lexer *lexer, size_t at, const char *text) {
    size_t bytes = strlen(text);
    return at <= lexer->source.bytes && lexer->source.bytes - at >= bytes &&
           memcmp(lexer->source.text + at, text, bytes) == 0;
}

static void lexer_go(struct lexer *lexer, size_t to) {
    for (; lexer->at < to; lexer->at++)
        lexer->line += lexer->source.text[lexer->at] == '\n';
    lexer->arena->line = lexer->line;
}

static struct token *lexer_add(struct lexer *lexer, enum token_kind kind, struct string text) {
    lexer->tokens = arena_grow(lexer->arena, lexer->tokens, &lexer->capacity, lexer->count + 1, sizeof *lexer->tokens);
    struct token *token = &lexer->tokens[lexer->count++];
    *token = (struct token){.kind = kind, .line = lexer->line, .text = text};
    return token;
}

/* The source with \n as the only newline and without a last one. */
static struct string lexer_normalise(struct arena *arena, const char *source, size_t bytes) {
    char *text = arena_take(arena, bytes + 1);
    size_t count = 0;
    for (size_t i = 0; i < bytes; i++) {
        if (source[i] == '\r' && i + 1 < bytes && source[i + 1] == '\n')
            continue;
        text[count++] = source[i] == '\r' ? '\n' : source[i];
    }
    if (count > 0 && text[count - 1] == '\n')
        count--;
    return (struct string){.text = text, .bytes = count};
}

/* --- Text between tags --- */

static size_t lexer_skip_space(const struct lexer *lexer, size_t at) {
    int32_t character;
    while (at < lexer->source.bytes) {
        size_t step = string_character(&lexer->source, at, &character);
        if (!character_is_space(character))
            break;
        at += step;
    }
    return at;
}

/* Text [begin, end) before a tag whose sign is '-', '+' or none. */
static struct string lexer_text_before(const struct lexer *lexer, size_t begin, size_t end, char sign, bool prints) {
    struct string text = string_part(&lexer->source, begin, end);
    if (sign == '-')
        return string_strip(&text, NULL, false, true);
    if (sign == '+' || prints)
        return text;
    const char *newline = text.bytes == 0 ? NULL : memrchr(text.text, '\n', text.bytes);
    size_t line = newline == NULL ? 0 : (size_t)(newline - text.text) + 1;
    if (line == 0 && !lexer->line_begins)
        return text;
    struct string last = string_part(&text, line, text.bytes);
    last = string_strip(&last, NULL, true, false);
    return last.bytes == 0 ? string_part(&text, 0, line) : text;
}

static void lexer_add_text(struct lexer *lexer, struct string text) {
    if (text.bytes > 0)
        lexer_add(lexer, TOKEN_TEXT, text);
}

/* The end of a tag at `at` ("%}" with a sign before it), and what is trimmed behind it; 0: none is there. */
static size_t lexer_tag_end(const struct lexer *lexer, size_t at, const char *end, bool trim_newline) {
    char sign = at < lexer->source.bytes ? lexer->source.text[at] : '\0';
    size_t mark = sign == '-' || (sign == '+' && trim_newline) ? at + 1 : at;
    if (!lexer_sees(lexer, mark, end))
        return 0;
    size_t after = mark + 2;
    if (sign == '-')
        return lexer_skip_space(lexer, after);
    if (trim_newline && sign != '+' && after < lexer->source.bytes && lexer->source.text[after] == '\n')
        after++;
    return after;
}

static void lexer_leave_tag(struct lexer *lexer, size_t to) {
    lexer_go(lexer, to);
    lexer->line_begins = to > 0 && lexer->source.text[to - 1] == '\n';
}

static void lexer_comment(struct lexer *lexer) {
    for (size_t at = lexer->at; at < lexer->source.bytes; at++) {
        if (lexer->source.text[at] != '#' && lexer->source.text[at] != '-' && lexer->source.text[at] != '+')
            continue;
        size_t end = lexer_tag_end(lexer, at, "#}", true);
        if (end == 0)
            continue;
        lexer_leave_tag(lexer, end);
        return;
    }
    arena_fail(lexer->arena, "a comment has no end");
}

/* After "{%" and its sign: the end of "raw %}" at that place, 0: it is another tag. `word`: raw, endraw. */
static size_t lexer_raw_tag(const struct lexer *lexer, size_t at, const char *word, bool trim_newline) {
    at = lexer_skip_space(lexer, at);
    if (!lexer_sees(lexer, at, word))
        return 0;
    return lexer_tag_end(lexer, lexer_skip_space(lexer, at + strlen(word)), "%}", trim_newline);
}

static void lexer_raw(struct lexer *lexer, size_t begin) {
    lexer_leave_tag(lexer, begin);
    for (size_t at = begin; at < lexer->source.bytes; at++) {
        if (!lexer_sees(lexer, at, "{%"))
            continue;
        char sign = at + 2 < lexer->source.bytes ? lexer->source.text[at + 2] : '\0';
        bool signed_tag = sign == '-' || sign == '+';
        size_t end = lexer_raw_tag(lexer, at + (signed_tag ? 3 : 2), "endraw", true);
        if (end == 0)
            continue;
        lexer_add_text(lexer, lexer_text_before(lexer, begin, at, signed_tag ? sign : '\0', false));
        lexer_leave_tag(lexer, end);
        return;
    }
    arena_fail(lexer->arena, "a raw block has no end");
}

/* --- Inside of tags --- */

static bool is_name_start(char c) {
    return (c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z') || c == '_' || (unsigned char)c >= 0x80;
}

static bool is_digit(char c) {
    return c >= '0' && c <= '9';
}

static bool is_name_part(char c) {
    return is_name_start(c) || is_digit(c);
}

static int digit_value(char c) {
    if (is_digit(c))
        return c - '0';
    if (c >= 'a' && c <= 'f')
        return c - 'a' + 10;
    return c >= 'A' && c <= 'F' ? c - 'A' + 10 : 99;
}

/* The character of an escape with `digits` hexadecimal ones at text; \N{...} is not supported. */
static size_t lexer_hexadecimal(struct lexer *lexer, const char *text, size_t left, size_t digits, char *out) {
    uint32_t point = 0;
    for (size_t i = 0; i < digits; i++) {
        if (i >= left || digit_value(text[i]) > 15)
            arena_fail(lexer->arena, "an escape in a string needs %zu hexadecimal digits", digits);
        point = point * 16 + (uint32_t)digit_value(text[i]);
    }
    if (point > 0x10ffff || (point >= 0xd800 && point < 0xe000))
        arena_fail(lexer->arena, "an escape in a string stands for no character");
    return (size_t)utf8proc_encode_char((utf8proc_int32_t)point, (utf8proc_uint8_t *)out);
}

/* One escape at text (behind the backslash): writes to out, at most 4 bytes, their number in *written; returns the
 * bytes read. */
static size_t lexer_escape(struct lexer *lexer, const char *text, size_t left, char *out, size_t *written) {
    static const char plain[] = "\\'\"abfnrtv", meaning[] = "\\'\"\a\b\f\n\r\t\v";
    const char *found = memchr(plain, text[0], sizeof plain - 1);
    *written = 1;
    if (found != NULL) {
        out[0] = meaning[found - plain];
        return 1;
    }
    if (text[0] >= '0' && text[0] <= '7') {
        size_t digits = 0;
        int value = 0;
        for (; digits < 3 && digits < left && text[digits] >= '0' && text[digits] <= '7'; digits++)
            value = value * 8 + (text[digits] - '0');
        *written = (size_t)utf8proc_encode_char(value, (utf8proc_uint8_t *)out);
        return digits;
    }
    size_t digits = text[0] == 'x' ? 2 : text[0] == 'u' ? 4 : text[0] == 'U' ? 8 : 0;
    if (digits > 0) {
        *written = lexer_hexadecimal(lexer, text + 1, left - 1, digits, out);
        return 1 + digits;
    }
    if (text[0] == 'N')
        arena_fail(lexer->arena, "escapes by name (\\N) are not supported");
    if (text[0] == '\n') {
        *written = 0;
        return 1;
    }
    out[0] = '\\'; /* an unknown one stays as it is */
    return 0;
}

static void lexer_string(struct lexer *lexer) {
    char quote = lexer_peek(lexer, 0);
    size_t end = lexer->at + 1;
    while (end < lexer->source.bytes && lexer->source.text[end] != quote)
        end += lexer->source.text[end] == '\\' ? 2 : 1;
    if (end >= lexer->source.bytes)
        arena_fail(lexer->arena, "a string has no end");
    const char *text = lexer->source.text;
    char *out = arena_take(lexer->arena, end - lexer->at + 4);
    size_t bytes = 0, written;
    for (size_t at = lexer->at + 1; at < end;) {
        if (text[at] == '\\') {
            at++;
            at += lexer_escape(lexer, text + at, end - at, out + bytes, &written);
            bytes += written;
        } else {
            out[bytes++] = text[at++];
        }
    }
    lexer_add(lexer, TOKEN_STRING, (struct string){.text = out, .bytes = bytes});
    lexer_go(lexer, end + 1);
}

/* Digits of a base with single underscores between them, copied to out. */
static size_t lexer_digits(const struct lexer *lexer, size_t at, int base, char *out, size_t *count, size_t room) {
    for (; at < lexer->source.bytes; at++) {
        char c = lexer->source.text[at];
        bool joins = c == '_' && *count > 0 && at + 1 < lexer->source.bytes &&
                     digit_value(lexer->source.text[at + 1]) < base && lexer->source.text[at - 1] != '_';
        if (joins)
            continue;
        if (digit_value(c) >= base || *count + 1 >= room)
            break;
        out[(*count)++] = c;
    }
    return at;
}

static void lexer_number(struct lexer *lexer) {
    char digits[400];
    size_t count = 0, at = lexer->at;
    char second = lexer_peek(lexer, 1) | 0x20;
    int base = second == 'x' ? 16 : second == 'o' ? 8 : second == 'b' ? 2 : 10;
    bool real = false;
    if (lexer_peek(lexer, 0) != '0' || digit_value(lexer_peek(lexer, 2)) >= base)
        base = 10;
    if (base != 10)
        at += 2;
    at = lexer_digits(lexer, at, base, digits, &count, sizeof digits - 8);
    const char *text = lexer->source.text;
    size_t left = lexer->source.bytes;
    if (base == 10 && at + 1 < left && text[at] == '.' && is_digit(text[at + 1])) {
        real = true;
        digits[count++] = '.';
        at = lexer_digits(lexer, at + 1, 10, digits, &count, sizeof digits - 8);
    }
    if (base == 10 && at < left && (text[at] | 0x20) == 'e') {
        size_t mark = at + 1;
        bool signs = mark < left && (text[mark] == '+' || text[mark] == '-');
        if (mark + signs < left && is_digit(text[mark + signs])) {
            real = true;
            digits[count++] = 'e';
            if (signs)
                digits[count++] = text[mark];
            at = lexer_digits(lexer, mark + signs, 10, digits, &count, sizeof digits);
        }
    }
    if (at < left && is_digit(text[at]))
        arena_fail(lexer->arena, "a number of too many digits");
    digits[count] = '\0';
    struct token *token =
        lexer_add(lexer, real ? TOKEN_FLOAT : TOKEN_INTEGER, string_part(&lexer->source, lexer->at, at));
    errno = 0;
    if (real)
        token->number = strtod(digits, NULL);
    else
        token->integer = strtoll(digits, NULL, base);
    if (!real && errno == ERANGE)
        arena_fail(lexer->arena, "the integer %.40s does not fit 64 bits", digits);
    lexer_go(lexer, at);
}

static void lexer_bracket(struct lexer *lexer, char c) {
    if (c == '(' || c == '[' || c == '{') {
        if (lexer->brackets_count == BRACKETS_MAX)
            arena_fail(lexer->arena, "brackets are nested more than %d deep", BRACKETS_MAX);
        lexer->brackets[lexer->brackets_count++] = c == '(' ? ')' : c == '[' ? ']' : '}';
    } else if (c == ')' || c == ']' || c == '}') {
        if (lexer->brackets_count == 0)
            arena_fail(lexer->arena, "unexpected '%c'", c);
        char expected = lexer->brackets[--lexer->brackets_count];
        if (c != expected)
            arena_fail(lexer->arena, "unexpected '%c', expected '%c'", c, expected);
    }
}

static void lexer_operator(struct lexer *lexer) {
    static const char *const two[] = {"//", "**", "==", "!=", ">=", "<="};
    size_t bytes = 1;
    for (size_t i = 0; i < sizeof two / sizeof two[0]; i++)
        if (lexer_sees(lexer, lexer->at, two[i]))
            bytes = 2;
    char c = lexer_peek(lexer, 0);
    if (bytes == 1 && (c == '\0' || strchr("+-/*%~[](){}><=.:|,;", c) == NULL))
        arena_fail(lexer->arena,
            (unsigned char)c > ' ' && (unsigned char)c < 0x7f ? "unexpected '%c'" : "unexpected byte %d",
            (unsigned char)c);
    lexer_bracket(lexer, c);
    lexer_add(lexer, TOKEN_OPERATOR, string_part(&lexer->source, lexer->at, lexer->at + bytes));
    lexer_go(lexer, lexer->at + bytes);
}

/* The inside of a tag up to its end. */
static void lexer_inside(struct lexer *lexer, bool prints) {
    lexer->brackets_count = 0;
    for (;;) {
        lexer_go(lexer, lexer_skip_space(lexer, lexer->at));
        if (lexer->at >= lexer->source.bytes)
            arena_fail(lexer->arena, "unexpected end of the template inside of a tag");
        size_t end = lexer->brackets_count > 0 ? 0 : lexer_tag_end(lexer, lexer->at, prints ? "}}" : "%}", !prints);
        char c = lexer_peek(lexer, 0);
        if (end > 0) {
            lexer_add(lexer, prints ? TOKEN_PRINT_END : TOKEN_BLOCK_END, string_of(prints ? "}}" : "%}"));
            lexer_leave_tag(lexer, end);
            return;
        }
        if (is_name_start(c)) {
            size_t at = lexer->at;
            while (at < lexer->source.bytes && is_name_part(lexer->source.text[at]))
                at++;
            lexer_add(lexer, TOKEN_NAME, string_part(&lexer->source, lexer->at, at));
            lexer_go(lexer, at);
        } else if (is_digit(c)) {
            lexer_number(lexer);
        } else if (c == '\'' || c == '"') {
            lexer_string(lexer);
        } else {
            lexer_operator(lexer);
        }
    }
}

/* A tag that begins at `tag`, with the text before it from lexer->at. */
static void lexer_tag(struct lexer *lexer, size_t tag) {
    char kind = lexer->source.text[tag + 1];
    char sign = tag + 2 < lexer->source.bytes ? lexer->source.text[tag + 2] : '\0';
    bool signed_tag = sign == '-' || sign == '+';
    size_t inside = tag + (signed_tag ? 3 : 2);
    lexer_add_text(lexer, lexer_text_before(lexer, lexer->at, tag, signed_tag ? sign : '\0', kind == '{'));
    size_t raw = kind == '%' ? lexer_raw_tag(lexer, inside, "raw", false) : 0;
    lexer_go(lexer, inside);
    if (raw > 0) {
        lexer_raw(lexer, raw);
    } else if (kind == '#') {
        lexer_comment(lexer);
    } else {
        lexer_add(
            lexer, kind == '{' ? TOKEN_PRINT_BEGIN : TOKEN_BLOCK_BEGIN, string_part(&lexer->source, tag, tag + 2));
        lexer_inside(lexer, kind == '{');
    }
}

struct token *lexer_run(struct arena *arena, const char *source, size_t bytes, size_t *count) {
    struct lexer lexer = {
        .arena = arena, .source = lexer_normalise(arena, source, bytes), .line = 1, .line_begins = true};
    arena->line = 1;
    while (lexer.at < lexer.source.bytes) {
        size_t tag = lexer.at;
        while (tag + 1 < lexer.source.bytes && !(lexer.source.text[tag] == '{' && lexer.source.text[tag + 1] != '\0' &&
                                                   strchr("{%#", lexer.source.text[tag + 1]) != NULL))
            tag++;
        if (tag + 1 >= lexer.source.bytes) {
            lexer_add_text(&lexer, string_part(&lexer.source, lexer.at, lexer.source.bytes));
            lexer_go(&lexer, lexer.source.bytes);
        } else {
            lexer_tag(&lexer, tag);
        }
    }
    lexer_add(&lexer, TOKEN_END, string_of("the end of the template"));
    *count = lexer.count;
    return lexer.tokens;
}
