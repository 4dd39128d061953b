/* SPDX-License-Identifier: Apache-2.0 */
#include "grammar/regex.h"

#include "grammar/text.h"

#include <stdlib.h>
#include <string.h>

enum { DEPTH_MAX = 64, COUNT_MAX = 65535, BRANCHES_MAX = 1024 };

struct regex {
    struct expression_pool *pool;
    const uint8_t *text;
    size_t bytes, at;
    bool whole; /* nothing before and behind, and in UTF-8 */
    uint32_t depth;
    struct error *error;
};

static int refuse(struct regex *regex, int code, const char *what) {
    return error_set(regex->error, code, "%s at byte %zu of the pattern", what, regex->at);
}

static int peek(const struct regex *regex) {
    return regex->at < regex->bytes ? regex->text[regex->at] : -1;
}

static bool take(struct regex *regex, char byte) {
    if (peek(regex) != (uint8_t)byte)
        return false;
    regex->at++;
    return true;
}

/* The code point here; the pattern is valid UTF-8. */
static uint32_t take_code(struct regex *regex) {
    uint8_t first = regex->text[regex->at++];
    if (first < 0x80)
        return first;
    uint32_t code = first & (first < 0xe0 ? 0x1f : first < 0xf0 ? 0x0f : 0x07);
    for (int more = first < 0xe0 ? 1 : first < 0xf0 ? 2 : 3; more > 0 && regex->at < regex->bytes; more--)
        code = code << 6 | (regex->text[regex->at++] & 0x3f);
    return code;
}

/* ---- sets ---- */

static void add_word(struct code_set *set) {
    code_set_add(set, '0', '9');
    code_set_add(set, 'A', 'Z');
    code_set_add(set, '_', '_');
    code_set_add(set, 'a', 'z');
}

/* \d and the like; false for another letter. */
static bool add_shorthand(struct code_set *set, uint32_t letter) {
    switch (letter) {
    case 'd':
        code_set_add(set, '0', '9');
        return true;
    case 'w':
        add_word(set);
        return true;
    case 's':
        code_set_add(set, '\t', '\r');
        code_set_add(set, ' ', ' ');
        return true;
    case 'D':
        code_set_add(set, 0, '0' - 1);
        code_set_add(set, '9' + 1, 0x7f);
        return true;
    case 'W':
        code_set_add(set, 0, '0' - 1);
        code_set_add(set, '9' + 1, 'A' - 1);
        code_set_add(set, 'Z' + 1, '_' - 1);
        code_set_add(set, '_' + 1, 'a' - 1);
        code_set_add(set, 'z' + 1, 0x7f);
        return true;
    case 'S':
        code_set_add(set, '!', 0x7f);
        return true;
    default:
        return false;
    }
}

static int hex_value(int byte) {
    if (byte >= '0' && byte <= '9')
        return byte - '0';
    if (byte >= 'a' && byte <= 'f')
        return byte - 'a' + 10;
    return byte >= 'A' && byte <= 'F' ? byte - 'A' + 10 : -1;
}

static int take_hex(struct regex *regex, int count, uint32_t *code) {
    *code = 0;
    for (int i = 0; i < count; i++) {
        int value = hex_value(peek(regex));
        if (value < 0)
            return refuse(regex, ERROR_INVALID, "a hexadecimal digit is missing");
        *code = *code * 16 + (uint32_t)value;
        regex->at++;
    }
    if (*code >= 0xd800 && *code <= 0xdfff)
        return refuse(regex, ERROR_UNSUPPORTED, "a surrogate is not supported");
    return 0;
}

/* Behind a backslash: a character, *code. */
static int take_escape(struct regex *regex, uint32_t *code) {
    static const char controls[] = "n\nr\rt\tf\fv\v";
    if (peek(regex) < 0)
        return refuse(regex, ERROR_INVALID, "nothing follows the backslash");
    uint32_t letter = take_code(regex);
    for (size_t i = 0; i + 1 < sizeof controls; i += 2)
        if (letter == (uint32_t)controls[i]) {
            *code = (uint32_t)controls[i + 1];
            return 0;
        }
    if (letter == 'x')
        return take_hex(regex, 2, code);
    if (letter == 'u')
        return take_hex(regex, 4, code);
    if (letter == '0' && !(peek(regex) >= '0' && peek(regex) <= '9')) {
        *code = 0;
        return 0;
    }
    if (letter >= 0x80 || (letter >= '0' && letter <= '9') || (letter >= 'a' && letter <= 'z') ||
        (letter >= 'A' && letter <= 'Z'))
        return refuse(regex, ERROR_UNSUPPORTED, "the escape is not supported");
    *code = letter;
    return 0;
}

/* One member of a class; *shorthand: it was one of those, which can be no end of a range. */
static int take_member(struct regex *regex, struct code_set *set, uint32_t *code, bool *shorthand) {
    *shorthand = false;
    if (peek(regex) < 0)
        return refuse(regex, ERROR_INVALID, "] is missing");
    if (!take(regex, '\\')) {
        *code = take_code(regex);
        return 0;
    }
    if (peek(regex) >= 0 && add_shorthand(set, (uint32_t)peek(regex))) {
        regex->at++;
        *shorthand = true;
        return 0;
    }
    if (take(regex, 'b')) {
        *code = '\b';
        return 0;
    }
    return take_escape(regex, code);
}

/* Behind [ */
static int take_class(struct regex *regex, struct code_set *set) {
    bool inverted = take(regex, '^'), any_shorthand = false, shorthand;
    if (peek(regex) == ']')
        return refuse(regex, ERROR_UNSUPPORTED, "an empty class is not supported");
    while (!take(regex, ']')) {
        uint32_t low, high;
        int code = take_member(regex, set, &low, &shorthand);
        if (code != 0)
            return code;
        any_shorthand |= shorthand;
        bool range = peek(regex) == '-' && regex->at + 1 < regex->bytes && regex->text[regex->at + 1] != ']';
        if (!range) {
            if (!shorthand)
                code_set_add(set, low, low);
            continue;
        }
        regex->at++;
        if (shorthand)
            return refuse(regex, ERROR_UNSUPPORTED, "a range of classes is not supported");
        code = take_member(regex, set, &high, &shorthand);
        if (code != 0)
            return code;
        if (shorthand || low > high)
            return refuse(regex, ERROR_INVALID, "a range ends before it begins");
        code_set_add(set, low, high);
    }
    if (inverted) {
        code_set_invert(set);
        if (any_shorthand) { /* printable ASCII: what is a letter or a space beyond it depends on the engine */
            code_set_invert(set);
            code_set_add(set, 0, 0x1f);
            code_set_add(set, 0x80, CODE_POINT_MAX);
            code_set_invert(set);
        }
    }
    if (set->overflow)
        return refuse(regex, ERROR_UNSUPPORTED, "the class has too many ranges");
    return 0;
}

static __attribute__((noinline)) int take_characters(struct regex *regex, uint32_t *out) {
    struct code_set set;
    uint32_t character = 0;
    int code = 0;
    set.count = 0;
    set.overflow = false;
    if (take(regex, '[')) {
        code = take_class(regex, &set);
    } else if (take(regex, '.')) {
        code_set_add(&set, '\n', '\n');
        code_set_add(&set, '\r', '\r');
        code_set_add(&set, 0x2028, 0x2029);
        code_set_invert(&set);
    } else if (take(regex, '\\')) {
        if (peek(regex) >= 0 && add_shorthand(&set, (uint32_t)peek(regex)))
            regex->at++;
        else if ((code = take_escape(regex, &character)) == 0)
            code_set_add(&set, character, character);
    } else {
        character = take_code(regex);
        code_set_add(&set, character, character);
    }
    if (code == 0)
        *out = text_characters(regex->pool, &set, regex->whole);
    return code;
}

/* ---- structure ---- */

static int take_branches(struct regex *regex, bool top, uint32_t *out);

/* Behind ( */
static int take_group(struct regex *regex, uint32_t *out) {
    if (take(regex, '?')) {
        if (take(regex, '<')) {
            if (peek(regex) == '=' || peek(regex) == '!')
                return refuse(regex, ERROR_UNSUPPORTED, "look-around is not supported");
            while (peek(regex) >= 0 && peek(regex) != '>')
                regex->at++;
            if (!take(regex, '>'))
                return refuse(regex, ERROR_INVALID, "> is missing");
        } else if (!take(regex, ':')) {
            return refuse(regex, ERROR_UNSUPPORTED, "the kind of group is not supported");
        }
    }
    int code = take_branches(regex, false, out);
    if (code != 0)
        return code;
    return take(regex, ')') ? 0 : refuse(regex, ERROR_INVALID, ") is missing");
}

static int take_atom(struct regex *regex, uint32_t *out) {
    switch (peek(regex)) {
    case '(':
        regex->at++;
        return take_group(regex, out);
    case '*':
    case '+':
    case '?':
        return refuse(regex, ERROR_INVALID, "there is nothing to repeat");
    case '^':
    case '$':
        return refuse(regex, ERROR_UNSUPPORTED, "^ and $ are supported at the ends of the whole pattern only");
    default:
        return take_characters(regex, out);
    }
}

static bool take_count(struct regex *regex, uint32_t *count) {
    size_t from = regex->at;
    for (*count = 0; peek(regex) >= '0' && peek(regex) <= '9'; regex->at++)
        if (*count <= COUNT_MAX)
            *count = *count * 10 + (uint32_t)(peek(regex) - '0');
    return regex->at > from;
}

/* {m}, {m,} or {m,n}; *found: there is one. Braces that are none stand for themselves. */
static int take_braces(struct regex *regex, uint32_t *low, uint32_t *high, bool *found) {
    size_t from = regex->at;
    regex->at++;
    *found = take_count(regex, low);
    *high = *low;
    if (*found && take(regex, ',') && !take_count(regex, high))
        *high = EXPRESSION_UNBOUNDED;
    *found = *found && take(regex, '}');
    if (!*found) {
        regex->at = from;
        return 0;
    }
    if (*low > COUNT_MAX || (*high > COUNT_MAX && *high != EXPRESSION_UNBOUNDED))
        return refuse(regex, ERROR_UNSUPPORTED, "a count is too large");
    return *low > *high ? refuse(regex, ERROR_INVALID, "the counts are out of order") : 0;
}

static int take_repeat(struct regex *regex, uint32_t *part) {
    uint32_t low = 0, high = EXPRESSION_UNBOUNDED;
    bool found = true;
    int code = 0;
    if (take(regex, '+'))
        low = 1;
    else if (take(regex, '?'))
        high = 1;
    else if (peek(regex) == '{')
        code = take_braces(regex, &low, &high, &found);
    else
        found = take(regex, '*');
    if (code != 0 || !found)
        return code;
    take(regex, '?');
    *part = expression_repeat(regex->pool, *part, low, high);
    if (peek(regex) == '*' || peek(regex) == '+' || peek(regex) == '?')
        return refuse(regex, ERROR_INVALID, "a repetition is repeated");
    return 0;
}

static bool ends_branch(const struct regex *regex) {
    return peek(regex) < 0 || peek(regex) == '|' || peek(regex) == ')';
}

/* One alternative. At the top it may have anchors, and gets any text where it has none. */
static int take_branch(struct regex *regex, bool top, uint32_t *out) {
    uint32_t any = EXPRESSION_EMPTY;
    if (top && !regex->whole)
        any = expression_repeat(regex->pool, text_any_plain(regex->pool), 0, EXPRESSION_UNBOUNDED);
    uint32_t all = top && !take(regex, '^') ? any : EXPRESSION_EMPTY;
    while (!ends_branch(regex)) {
        if (top && peek(regex) == '$' && (regex->at + 1 == regex->bytes || regex->text[regex->at + 1] == '|')) {
            regex->at++;
            *out = all;
            return 0;
        }
        uint32_t atom;
        int code = take_atom(regex, &atom);
        if (code == 0)
            code = take_repeat(regex, &atom);
        if (code != 0)
            return code;
        all = expression_pair(regex->pool, all, atom);
    }
    *out = expression_pair(regex->pool, all, any);
    return 0;
}

static int take_branches(struct regex *regex, bool top, uint32_t *out) {
    uint32_t *parts = malloc(BRANCHES_MAX * sizeof *parts);
    size_t count = 0;
    int code = parts == NULL ? error_set(regex->error, ERROR_MEMORY, "no memory for the pattern") : 0;
    if (++regex->depth > DEPTH_MAX)
        code = refuse(regex, ERROR_UNSUPPORTED, "the groups are nested too deeply");
    bool more = true;
    while (code == 0 && more) {
        if (count == BRANCHES_MAX) {
            code = refuse(regex, ERROR_UNSUPPORTED, "there are too many alternatives");
            break;
        }
        code = take_branch(regex, top, &parts[count++]);
        more = take(regex, '|');
    }
    regex->depth--;
    if (code == 0)
        *out = expression_either(regex->pool, parts, count);
    free(parts);
    return code;
}

int regex_compile(
    struct expression_pool *pool, const char *pattern, size_t bytes, bool whole, uint32_t *out, struct error *error) {
    struct regex regex = {
        .pool = pool, .text = (const uint8_t *)pattern, .bytes = bytes, .whole = whole, .error = error};
    int code = take_branches(&regex, true, out);
    if (code == 0 && regex.at < bytes)
        code = refuse(&regex, ERROR_INVALID, ") has no beginning");
    return code;
}
