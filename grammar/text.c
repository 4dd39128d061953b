/* SPDX-License-Identifier: Apache-2.0 */
#include "grammar/text.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

/* ---- sets of code points ---- */

void code_set_add(struct code_set *set, uint32_t low, uint32_t high) {
    if (low > high)
        return;
    if (set->count == CODE_RANGES_MAX) {
        set->overflow = true;
        return;
    }
    set->ranges[set->count++] = (struct code_range){low, high};
}

static int compare_ranges(const void *a, const void *b) {
    uint32_t x = ((const struct code_range *)a)->low, y = ((const struct code_range *)b)->low;
    return x < y ? -1 : x > y;
}

void code_set_sort(struct code_set *set) {
    qsort(set->ranges, set->count, sizeof set->ranges[0], compare_ranges);
    uint32_t kept = 0;
    for (uint32_t i = 0; i < set->count; i++) {
        struct code_range range = set->ranges[i];
        if (kept > 0 && range.low <= set->ranges[kept - 1].high + 1) {
            if (range.high > set->ranges[kept - 1].high)
                set->ranges[kept - 1].high = range.high;
        } else {
            set->ranges[kept++] = range;
        }
    }
    set->count = kept;
}

void code_set_invert(struct code_set *set) {
    code_set_sort(set);
    struct code_set inverse = {.overflow = set->overflow};
    uint32_t next = 0;
    for (uint32_t i = 0; i < set->count; i++) {
        if (set->ranges[i].low > next)
            code_set_add(&inverse, next, set->ranges[i].low - 1);
        next = set->ranges[i].high + 1;
    }
    if (next <= CODE_POINT_MAX)
        code_set_add(&inverse, next, CODE_POINT_MAX);
    *set = inverse;
}

/* ---- UTF-8 (RFC 3629) ---- */

static int encode(uint32_t code, uint8_t out[4]) {
    if (code < 0x80) {
        out[0] = (uint8_t)code;
        return 1;
    }
    int count = code < 0x800 ? 2 : code < 0x10000 ? 3 : 4;
    for (int i = count - 1; i > 0; i--, code >>= 6)
        out[i] = (uint8_t)(0x80 | (code & 0x3f));
    out[0] = (uint8_t)((0xf00 >> count) | code);
    return count;
}

/* A growing list of expressions. */
struct list {
    uint32_t *items;
    size_t count, capacity;
};

static void list_add(struct expression_pool *pool, struct list *list, uint32_t item) {
    if (list->count == list->capacity) {
        size_t capacity = 2 * list->capacity + 16;
        uint32_t *items = realloc(list->items, capacity * sizeof *items);
        if (items == NULL) {
            pool->failed = true;
            return;
        }
        list->items = items;
        list->capacity = capacity;
    }
    list->items[list->count++] = item;
}

static uint32_t list_either(struct expression_pool *pool, struct list *list) {
    uint32_t either = expression_either(pool, list->items, list->count);
    free(list->items);
    return either;
}

/* Code points low..high, whose encodings have the same length, cut until the bytes behind the first that differs run
 * through all their values: then the bytes are independent of each other. */
static void add_encoded(struct expression_pool *pool, struct list *list, uint32_t low, uint32_t high) {
    for (int shift = 6; shift <= 18; shift += 6) {
        uint32_t rest = (1u << shift) - 1;
        if ((low & ~rest) == (high & ~rest))
            continue;
        if ((low & rest) != 0) {
            add_encoded(pool, list, low, low | rest);
            add_encoded(pool, list, (low | rest) + 1, high);
            return;
        }
        if ((high & rest) != rest) {
            add_encoded(pool, list, low, (high & ~rest) - 1);
            add_encoded(pool, list, high & ~rest, high);
            return;
        }
    }
    uint8_t first[4], last[4];
    int count = encode(low, first);
    encode(high, last);
    uint32_t bytes = EXPRESSION_EMPTY;
    for (int i = count - 1; i >= 0; i--)
        bytes = expression_pair(pool, expression_range(pool, first[i], last[i]), bytes);
    list_add(pool, list, bytes);
}

static void add_range(struct expression_pool *pool, struct list *list, uint32_t low, uint32_t high) {
    static const struct code_range lengths[] = {
        {0x80, 0x7ff}, {0x800, 0xd7ff}, {0xe000, 0xffff}, {0x10000, CODE_POINT_MAX}};
    for (size_t i = 0; i < sizeof lengths / sizeof lengths[0]; i++) {
        uint32_t from = low > lengths[i].low ? low : lengths[i].low;
        uint32_t to = high < lengths[i].high ? high : lengths[i].high;
        if (from <= to)
            add_encoded(pool, list, from, to);
    }
}

/* An ASCII character that a JSON string cannot show as it is. */
static uint32_t escaped(struct expression_pool *pool, uint32_t code) {
    static const char letters[] = "\"\"\\\\\bb\ff\nn\rr\tt";
    for (size_t i = 0; i + 1 < sizeof letters; i += 2)
        if ((uint32_t)letters[i] == code)
            return expression_bytes(pool, (char[]){'\\', letters[i + 1]}, 2);
    char start[] = "\\u00_", last = "0123456789abcdef"[code & 15];
    start[4] = (char)('0' + (code >> 4));
    struct byte_set set = {0};
    byte_set_add(&set, (uint8_t)last);
    if (last >= 'a')
        byte_set_add(&set, (uint8_t)(last - 'a' + 'A'));
    return expression_pair(pool, expression_word(pool, start), expression_class(pool, &set));
}

static bool shows_itself(uint32_t code) {
    return code >= 0x20 && code != '"' && code != '\\';
}

uint32_t text_characters(struct expression_pool *pool, const struct code_set *given, bool raw) {
    struct code_set set = *given;
    struct byte_set ascii = {0};
    struct list list = {0};
    code_set_sort(&set);
    for (uint32_t i = 0; i < set.count; i++) {
        struct code_range range = set.ranges[i];
        for (uint32_t code = range.low; code <= range.high && code < 0x80; code++) {
            if (raw || shows_itself(code))
                byte_set_add(&ascii, (uint8_t)code);
            else
                list_add(pool, &list, escaped(pool, code));
        }
        add_range(pool, &list, range.low, range.high);
    }
    list_add(pool, &list, expression_class(pool, &ascii));
    return list_either(pool, &list);
}

uint32_t text_any_plain(struct expression_pool *pool) {
    struct code_set all = {.count = 1, .ranges = {{0, CODE_POINT_MAX}}};
    return expression_mark_text(pool, text_characters(pool, &all, false));
}

/* count bytes out of a set that is written as ranges: "09afAF". */
static uint32_t digits(struct expression_pool *pool, const char *ranges, uint32_t count) {
    struct byte_set set = {0};
    for (; *ranges != '\0'; ranges += 2)
        for (int byte = ranges[0]; byte <= ranges[1]; byte++)
            byte_set_add(&set, (uint8_t)byte);
    return expression_repeat(pool, expression_class(pool, &set), count, count);
}

static uint32_t sequence(struct expression_pool *pool, const uint32_t *parts, size_t count) {
    uint32_t all = EXPRESSION_EMPTY;
    while (count > 0)
        all = expression_pair(pool, parts[--count], all);
    return all;
}

#define SEQUENCE(pool, ...)                                                                                            \
    sequence(pool, (const uint32_t[]){__VA_ARGS__}, sizeof((const uint32_t[]){__VA_ARGS__}) / sizeof(uint32_t))

uint32_t text_any_free(struct expression_pool *pool) {
    const char *const hex = "09afAF";
    struct code_set shown = {.count = 1, .ranges = {{0x20, CODE_POINT_MAX}}};
    code_set_invert(&shown);
    code_set_add(&shown, '"', '"');
    code_set_add(&shown, '\\', '\\');
    code_set_invert(&shown);
    uint32_t codes[] = {
        digits(pool, "\"\"\\\\//bbffnnrrtt", 1),
        SEQUENCE(pool, expression_word(pool, "u"), digits(pool, "09acefACEF", 1), digits(pool, hex, 3)),
        SEQUENCE(
            pool, expression_word(pool, "u"), digits(pool, "ddDD", 1), digits(pool, "07", 1), digits(pool, hex, 2)),
        SEQUENCE(pool, expression_word(pool, "u"), digits(pool, "ddDD", 1), digits(pool, "89abAB", 1),
            digits(pool, hex, 2), expression_word(pool, "\\u"), digits(pool, "ddDD", 1), digits(pool, "cfCF", 1),
            digits(pool, hex, 2)),
    };
    uint32_t code = expression_either(pool, codes, sizeof codes / sizeof codes[0]);
    uint32_t escape = expression_pair(pool, expression_word(pool, "\\"), code);
    return expression_mark_text(pool, expression_either_two(pool, text_characters(pool, &shown, false), escape));
}

/* ---- names ---- */

/* The code point at text, which is valid UTF-8; *bytes: its length. */
static uint32_t decode(const char *text, size_t *bytes) {
    const uint8_t *at = (const uint8_t *)text;
    *bytes = at[0] < 0x80 ? 1 : at[0] < 0xe0 ? 2 : at[0] < 0xf0 ? 3 : 4;
    uint32_t code = *bytes == 1 ? at[0] : at[0] & (0x7fu >> *bytes);
    for (size_t i = 1; i < *bytes; i++)
        code = code << 6 | (at[i] & 0x3f);
    return code;
}

uint32_t text_quoted(struct expression_pool *pool, const char *text, size_t bytes) {
    uint32_t all = EXPRESSION_EMPTY;
    size_t from = 0, at = 0, length;
    all = expression_word(pool, "\"");
    for (; at < bytes; at += length) {
        uint32_t code = decode(text + at, &length);
        if (shows_itself(code))
            continue;
        all = expression_pair(pool, all, expression_bytes(pool, text + from, at - from));
        all = expression_pair(pool, all, escaped(pool, code));
        from = at + length;
    }
    all = expression_pair(pool, all, expression_bytes(pool, text + from, at - from));
    return expression_pair(pool, all, expression_word(pool, "\""));
}

static int compare_names(const void *a, const void *b) {
    return strcmp(*(const char *const *)a, *(const char *const *)b);
}

static __attribute__((noinline)) uint32_t one_character(struct expression_pool *pool, uint32_t code) {
    struct code_set one = {.count = 1, .ranges = {{code, code}}};
    return text_characters(pool, &one, false);
}

/* Strings whose first `depth` bytes are those that the sorted names have in common, from there on. any: any character.
 */
static uint32_t other_names_from(
    struct expression_pool *pool, const char *const *names, size_t count, size_t depth, uint32_t any) {
    struct code_set others = {0};
    struct list list = {0};
    bool taken = count > 0 && names[0][depth] == '\0';
    if (!taken)
        list_add(pool, &list, EXPRESSION_EMPTY);
    for (size_t i = taken ? 1 : 0; i < count && !pool->failed;) {
        size_t bytes, same, end = i + 1;
        uint32_t code = decode(names[i] + depth, &bytes);
        while (end < count && decode(names[end] + depth, &same) == code)
            end++;
        code_set_add(&others, code, code);
        uint32_t rest = other_names_from(pool, names + i, end - i, depth + bytes, any);
        list_add(pool, &list, expression_pair(pool, one_character(pool, code), rest));
        i = end;
    }
    if (others.overflow)
        pool->failed = pool->too_large = true;
    code_set_invert(&others);
    uint32_t rest = expression_repeat(pool, any, 0, EXPRESSION_UNBOUNDED);
    list_add(pool, &list, expression_pair(pool, text_characters(pool, &others, false), rest));
    return list_either(pool, &list);
}

uint32_t text_other_names(struct expression_pool *pool, const char *const *names, size_t count) {
    uint32_t any = text_any_plain(pool);
    if (count == 0)
        return expression_repeat(pool, any, 0, EXPRESSION_UNBOUNDED);
    const char **sorted = malloc(count * sizeof *sorted);
    if (sorted == NULL) {
        pool->failed = true;
        return EXPRESSION_NONE;
    }
    memcpy(sorted, names, count * sizeof *sorted);
    qsort(sorted, count, sizeof *sorted, compare_names);
    size_t distinct = 0;
    for (size_t i = 0; i < count; i++)
        if (distinct == 0 || strcmp(sorted[i], sorted[distinct - 1]) != 0)
            sorted[distinct++] = sorted[i];
    uint32_t all = other_names_from(pool, sorted, distinct, 0, any);
    free(sorted);
    return all;
}

uint32_t text_space(struct expression_pool *pool) {
    uint32_t spaces = expression_repeat(pool, expression_word(pool, " "), 0, 20);
    uint32_t line = expression_pair(pool, expression_word(pool, "\n"), spaces);
    return expression_either(pool, (const uint32_t[]){EXPRESSION_EMPTY, expression_word(pool, " "), line}, 3);
}

/* ---- numbers ---- */

static uint32_t digit(struct expression_pool *pool, char low, char high) {
    return expression_range(pool, (uint8_t)low, (uint8_t)high);
}

static uint32_t any_digits(struct expression_pool *pool, uint32_t low, uint32_t high) {
    return expression_repeat(pool, digit(pool, '0', '9'), low, high);
}

/* Strings of digits between two of the same length, bytewise. */
static uint32_t digits_between(struct expression_pool *pool, const char *low, const char *high) {
    size_t length = strlen(low);
    if (length == 0)
        return EXPRESSION_EMPTY;
    if (low[0] == high[0])
        return expression_pair(pool, digit(pool, low[0], low[0]), digits_between(pool, low + 1, high + 1));
    char zeros[NUMBER_DIGITS_MAX + 1] = {0}, nines[NUMBER_DIGITS_MAX + 1] = {0};
    memset(zeros, '0', length - 1);
    memset(nines, '9', length - 1);
    char from = low[0], to = high[0];
    uint32_t parts[3] = {0};
    if (strcmp(low + 1, zeros) != 0)
        parts[0] = expression_pair(pool, digit(pool, from, from), digits_between(pool, low + 1, nines)), from++;
    if (strcmp(high + 1, nines) != 0)
        parts[1] = expression_pair(pool, digit(pool, to, to), digits_between(pool, zeros, high + 1)), to--;
    if (from <= to)
        parts[2] =
            expression_pair(pool, digit(pool, from, to), any_digits(pool, (uint32_t)length - 1, (uint32_t)length - 1));
    return expression_either(pool, parts, 3);
}

static int64_t largest_integer(uint32_t digits_count) {
    int64_t power = 1;
    while (digits_count-- > 0)
        power *= 10;
    return power - 1;
}

/* 0 <= low. */
static uint32_t natural(struct expression_pool *pool, int64_t low, int64_t high) {
    uint32_t parts[NUMBER_DIGITS_MAX], count = 0;
    for (uint32_t length = 1; length <= NUMBER_DIGITS_MAX; length++) {
        int64_t first = length == 1 ? 0 : largest_integer(length - 1) + 1, last = largest_integer(length);
        first = first > low ? first : low;
        last = last < high ? last : high;
        if (first > last)
            continue;
        char from[24], to[24];
        snprintf(from, sizeof from, "%lld", (long long)first);
        snprintf(to, sizeof to, "%lld", (long long)last);
        parts[count++] = digits_between(pool, from, to);
    }
    return expression_either(pool, parts, count);
}

uint32_t text_integer(struct expression_pool *pool, int64_t low, int64_t high) {
    int64_t most = largest_integer(NUMBER_DIGITS_MAX);
    low = low < -most ? -most : low;
    high = high > most ? most : high;
    if (low > high)
        return EXPRESSION_NONE;
    uint32_t positive = high >= 0 ? natural(pool, low > 0 ? low : 0, high) : EXPRESSION_NONE;
    uint32_t negative = low < 0 ? natural(pool, high < 0 ? -high : 1, -low) : EXPRESSION_NONE;
    return expression_either_two(pool, positive, expression_pair(pool, expression_word(pool, "-"), negative));
}

static uint32_t point(struct expression_pool *pool, uint32_t behind) {
    return expression_pair(pool, expression_word(pool, "."), behind);
}

uint32_t text_number(struct expression_pool *pool) {
    uint32_t minus = expression_optional(pool, expression_word(pool, "-"));
    uint32_t more = expression_pair(pool, digit(pool, '1', '9'), any_digits(pool, 0, NUMBER_DIGITS_MAX - 1));
    uint32_t whole = expression_either_two(pool, expression_word(pool, "0"), more);
    uint32_t fraction = expression_optional(pool, point(pool, any_digits(pool, 1, NUMBER_DIGITS_MAX)));
    uint32_t sign = expression_optional(pool, digits(pool, "++--", 1));
    uint32_t exponent =
        expression_optional(pool, SEQUENCE(pool, digits(pool, "eeEE", 1), sign, any_digits(pool, 1, 2)));
    return SEQUENCE(pool, minus, whole, fraction, exponent);
}

/* A range of numbers of one sign, by their size: 0 <= low, and how many digits there are behind the point. */
struct sizes {
    int64_t low, high;
    bool with_low, with_high; /* themselves included */
    uint32_t behind;
};

static uint32_t decimal_sizes(struct expression_pool *pool, const struct sizes *sizes) {
    int64_t low = sizes->low, high = sizes->high;
    uint32_t behind = sizes->behind;
    if (low > high || (low == high && !(sizes->with_low && sizes->with_high)))
        return EXPRESSION_NONE;
    uint32_t zeros = expression_repeat(pool, expression_word(pool, "0"), 1, behind);
    uint32_t whole = behind == 0 ? EXPRESSION_EMPTY : expression_optional(pool, point(pool, zeros));
    if (low == high)
        return expression_pair(pool, natural(pool, low, low), whole);
    uint32_t any = behind == 0 ? EXPRESSION_EMPTY : expression_optional(pool, point(pool, any_digits(pool, 1, behind)));
    uint32_t above = EXPRESSION_NONE; /* a fraction that is not 0: zeros, another digit, any digits */
    for (uint32_t i = behind; i-- > 0;)
        above = expression_either_two(pool,
            expression_pair(pool, digit(pool, '1', '9'), any_digits(pool, 0, behind - 1 - i)),
            expression_pair(pool, expression_word(pool, "0"), above));
    uint32_t parts[] = {
        expression_pair(pool, natural(pool, low, low), sizes->with_low ? any : point(pool, above)),
        low + 1 <= high - 1 ? expression_pair(pool, natural(pool, low + 1, high - 1), any) : EXPRESSION_NONE,
        sizes->with_high ? expression_pair(pool, natural(pool, high, high), whole) : EXPRESSION_NONE,
    };
    return expression_either(pool, parts, 3);
}

static uint32_t digits_of(int64_t value) {
    uint32_t count = 1;
    for (; value >= 10 || value <= -10; value /= 10)
        count++;
    return count;
}

/* Up to 15 digits a decimal number and the double next to it keep their order, so that a limit holds for both. */
uint32_t text_decimal(struct expression_pool *pool, const struct number_limits *limits) {
    uint32_t before = limits->has_low && limits->has_high ? 1 : 9;
    if (limits->has_low && digits_of(limits->low) > before)
        before = digits_of(limits->low);
    if (limits->has_high && digits_of(limits->high) > before)
        before = digits_of(limits->high);
    before = before < NUMBER_DIGITS_MAX ? before : NUMBER_DIGITS_MAX;
    int64_t most = largest_integer(before);
    int64_t low = limits->has_low && limits->low > -most ? limits->low : -most;
    int64_t high = limits->has_high && limits->high < most ? limits->high : most;
    if (low > high)
        return EXPRESSION_NONE;
    bool with_low = !(limits->has_low && limits->without_low && low == limits->low);
    bool with_high = !(limits->has_high && limits->without_high && high == limits->high);
    uint32_t behind = NUMBER_DIGITS_MAX - before, up = EXPRESSION_NONE, down = EXPRESSION_NONE;
    if (high >= 0)
        up = decimal_sizes(pool, &(struct sizes){low > 0 ? low : 0, high, low < 0 || with_low, with_high, behind});
    if (low < 0)
        down =
            decimal_sizes(pool, &(struct sizes){high < 0 ? -high : 0, -low, high > 0 || with_high, with_low, behind});
    return expression_either_two(pool, up, expression_pair(pool, expression_word(pool, "-"), down));
}
