/* SPDX-License-Identifier: Apache-2.0 */
#include "policy/eval/text.h"

#include <stdlib.h>
#include <string.h>
#include <utf8proc.h>

enum {
    REPLACEMENT = 0xFFFD,
    CAPITAL_I_WITH_DOT = 0x130, /* the one code whose lower case is two */
    COMBINING_DOT = 0x307,
    CAPITAL_SIGMA = 0x3A3,
    SIGMA = 0x3C3,
    FINAL_SIGMA = 0x3C2,
};

bool eval_text_decode(const char *bytes, size_t count, struct eval_text *text) {
    const utf8proc_uint8_t *at = (const utf8proc_uint8_t *)bytes;
    *text = (struct eval_text){0};
    if (count > SIZE_MAX / sizeof *text->codes - 1)
        return false;
    text->codes = malloc((count + 1) * sizeof *text->codes);
    if (text->codes == NULL)
        return false;
    while (count > 0) {
        utf8proc_int32_t code;
        utf8proc_ssize_t length = utf8proc_iterate(at, (utf8proc_ssize_t)count, &code);
        if (length <= 0) {
            length = 1;
            code = REPLACEMENT;
        }
        text->codes[text->count++] = code;
        at += length;
        count -= (size_t)length;
    }
    return true;
}

void eval_text_free(struct eval_text *text) {
    free(text->codes);
    *text = (struct eval_text){0};
}

/* What stands between the letters of a word without being part of its case (Unicode's Case_Ignorable). */
static bool is_case_ignorable(int32_t code) {
    static const int32_t marks[] = {'\'', '.', ':', '^', '`', 0xA8, 0xAD, 0xAF, 0xB4, 0xB7, 0xB8, 0x387, 0x55F, 0x5F4,
        0x2018, 0x2019, 0x2024, 0x2027, 0xFE13, 0xFE52, 0xFE55, 0xFF07, 0xFF0E, 0xFF1A};
    for (size_t i = 0; i < sizeof marks / sizeof marks[0]; i++)
        if (code == marks[i])
            return true;
    switch (utf8proc_category(code)) {
    case UTF8PROC_CATEGORY_MN:
    case UTF8PROC_CATEGORY_ME:
    case UTF8PROC_CATEGORY_CF:
    case UTF8PROC_CATEGORY_LM:
    case UTF8PROC_CATEGORY_SK:
        return true;
    default:
        return false;
    }
}

static bool is_cased(int32_t code) {
    switch (utf8proc_category(code)) {
    case UTF8PROC_CATEGORY_LU:
    case UTF8PROC_CATEGORY_LL:
    case UTF8PROC_CATEGORY_LT:
        return true;
    default: /* the ordinals; Roman numerals and circled letters */
        return code == 0xAA || code == 0xBA || utf8proc_tolower(code) != code || utf8proc_toupper(code) != code;
    }
}

/* A sigma ends its word when a cased letter stands before it and none behind it. */
static bool is_final_sigma(const struct eval_text *text, size_t at) {
    size_t before = at, behind = at + 1;
    while (before > 0 && is_case_ignorable(text->codes[before - 1]))
        before--;
    if (before == 0 || !is_cased(text->codes[before - 1]))
        return false;
    while (behind < text->count && is_case_ignorable(text->codes[behind]))
        behind++;
    return behind == text->count || !is_cased(text->codes[behind]);
}

bool eval_text_lower(struct eval_text *text) {
    struct eval_text lower = {malloc((2 * text->count + 1) * sizeof *text->codes), 0};
    if (lower.codes == NULL)
        return false;
    for (size_t i = 0; i < text->count; i++) {
        int32_t code = text->codes[i];
        if (code == CAPITAL_I_WITH_DOT) {
            lower.codes[lower.count++] = 'i';
            lower.codes[lower.count++] = COMBINING_DOT;
        } else if (code == CAPITAL_SIGMA) {
            lower.codes[lower.count++] = is_final_sigma(text, i) ? FINAL_SIGMA : SIGMA;
        } else {
            lower.codes[lower.count++] = utf8proc_tolower(code);
        }
    }
    free(text->codes);
    *text = lower;
    return true;
}

bool eval_is_space(int32_t code) {
    return (code >= 0x9 && code <= 0xD) || (code >= 0x1C && code <= 0x20) || code == 0x85 || code == 0xA0 ||
           code == 0x1680 || (code >= 0x2000 && code <= 0x200A) || code == 0x2028 || code == 0x2029 || code == 0x202F ||
           code == 0x205F || code == 0x3000;
}

bool eval_is_digit(int32_t code) {
    return utf8proc_category(code) == UTF8PROC_CATEGORY_ND;
}

static bool is_punctuation(int32_t code) {
    return code > 0 && code < 128 && strchr("!\"#$%&'()*+,-./:;<=>?@[\\]^_`{|}~", code) != NULL;
}

/* \w of Python's re, on texts that have no underscore left. */
static bool is_word(int32_t code) {
    switch (utf8proc_category(code)) {
    case UTF8PROC_CATEGORY_LU:
    case UTF8PROC_CATEGORY_LL:
    case UTF8PROC_CATEGORY_LT:
    case UTF8PROC_CATEGORY_LM:
    case UTF8PROC_CATEGORY_LO:
    case UTF8PROC_CATEGORY_ND:
    case UTF8PROC_CATEGORY_NL:
    case UTF8PROC_CATEGORY_NO:
        return true;
    default:
        return false;
    }
}

static bool is_article(const int32_t *codes, size_t count) {
    return (count == 1 && codes[0] == 'a') || (count == 2 && codes[0] == 'a' && codes[1] == 'n') ||
           (count == 3 && codes[0] == 't' && codes[1] == 'h' && codes[2] == 'e');
}

static void remove_punctuation(struct eval_text *text) {
    size_t kept = 0;
    for (size_t i = 0; i < text->count; i++)
        if (!is_punctuation(text->codes[i]))
            text->codes[kept++] = text->codes[i];
    text->count = kept;
}

static void blank_articles(struct eval_text *text) {
    for (size_t i = 0; i < text->count;) {
        size_t end = i;
        while (end < text->count && is_word(text->codes[end]))
            end++;
        if (is_article(text->codes + i, end - i))
            for (size_t j = i; j < end; j++)
                text->codes[j] = ' ';
        i = end > i ? end : i + 1;
    }
}

static void join_words(struct eval_text *text) {
    size_t kept = 0;
    for (size_t i = 0; i < text->count; i++) {
        if (!eval_is_space(text->codes[i]))
            text->codes[kept++] = text->codes[i];
        else if (kept > 0 && text->codes[kept - 1] != ' ')
            text->codes[kept++] = ' ';
    }
    if (kept > 0 && text->codes[kept - 1] == ' ')
        kept--;
    text->count = kept;
}

bool eval_text_normalise(struct eval_text *text) {
    if (!eval_text_lower(text))
        return false;
    remove_punctuation(text);
    blank_articles(text);
    join_words(text);
    return true;
}

bool eval_text_equal(const struct eval_text *a, const struct eval_text *b) {
    return a->count == b->count && memcmp(a->codes, b->codes, a->count * sizeof *a->codes) == 0;
}

bool eval_text_contains(const struct eval_text *text, const struct eval_text *part) {
    if (part->count > text->count)
        return false;
    for (size_t i = 0; i <= text->count - part->count; i++)
        if (memcmp(text->codes + i, part->codes, part->count * sizeof *part->codes) == 0)
            return true;
    return false;
}

bool eval_words_split(const int32_t *codes, size_t count, struct eval_words *words) {
    *words = (struct eval_words){malloc((count / 2 + 1) * sizeof *words->words), 0};
    if (words->words == NULL)
        return false;
    for (size_t i = 0; i < count;) {
        size_t end = i;
        while (end < count && !eval_is_space(codes[end]))
            end++;
        if (end > i)
            words->words[words->count++] = (struct eval_word){codes + i, end - i, 0};
        i = end + 1;
    }
    return true;
}

void eval_words_free(struct eval_words *words) {
    free(words->words);
    *words = (struct eval_words){0};
}

static int compare_words(const void *a, const void *b) {
    const struct eval_word *x = *(struct eval_word *const *)a, *y = *(struct eval_word *const *)b;
    size_t common = x->count < y->count ? x->count : y->count;
    int order = common == 0 ? 0 : memcmp(x->codes, y->codes, common * sizeof *x->codes);
    if (order != 0)
        return order;
    return x->count < y->count ? -1 : x->count > y->count;
}

size_t eval_words_number(struct eval_words *a, struct eval_words *b, bool *failed) {
    size_t count = a->count + b->count, ids = 0;
    struct eval_word **sorted = malloc((count + 1) * sizeof(struct eval_word *));
    *failed = sorted == NULL;
    if (sorted == NULL)
        return 0;
    for (size_t i = 0; i < count; i++)
        sorted[i] = i < a->count ? &a->words[i] : &b->words[i - a->count];
    qsort(sorted, count, sizeof(struct eval_word *), compare_words);
    for (size_t i = 0; i < count; i++) {
        if (i == 0 || compare_words(&sorted[i - 1], &sorted[i]) != 0)
            ids++;
        sorted[i]->id = (uint32_t)ids - 1;
    }
    free(sorted);
    return ids;
}
