/* SPDX-License-Identifier: Apache-2.0 */
#include "policy/eval/metrics.h"

#include "policy/eval/similarity.h"
#include "policy/eval/text.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

static const char *const metric_names[METRIC_KINDS] = {
    [METRIC_NONE] = "none",
    [METRIC_CONTAINS] = "contains",
    [METRIC_CONTAINS_ANY] = "contains-any",
    [METRIC_EXACT] = "exact",
    [METRIC_NUMBER] = "number",
    [METRIC_F1] = "f1",
    [METRIC_ROUGE_L] = "rouge-l",
    [METRIC_CLASSIFICATION] = "classification",
    [METRIC_RETRIEVAL] = "retrieval",
    [METRIC_COUNT] = "count",
    [METRIC_EDIT] = "edit",
};

const char *eval_metric_name(enum eval_metric metric) {
    return metric_names[metric];
}

const char *eval_metric_names(void) {
    return "none, contains, contains-any, exact, number, f1, rouge-l, classification, retrieval, count, edit";
}

bool eval_metric_find(const char *name, enum eval_metric *metric) {
    for (int i = 0; i < METRIC_KINDS; i++) {
        if (strcmp(name, metric_names[i]) == 0) {
            *metric = (enum eval_metric)i;
            return true;
        }
    }
    return false;
}

/* Part of a text that belongs to someone else. */
struct part {
    const char *at;
    size_t bytes;
};

static struct part whole(const char *text) {
    return (struct part){text, strlen(text)};
}

/* The line that is not empty, from the first on. */
static struct part first_line(const char *text) {
    text += strspn(text, "\n");
    return (struct part){text, strcspn(text, "\n")};
}

static bool decode(struct part part, struct eval_text *text) {
    return eval_text_decode(part.at, part.bytes, text);
}

static bool has_text(struct part part, const char *text) {
    return memmem(part.at, part.bytes, text, strlen(text)) != NULL;
}

/* What a score of two texts needs: both prepared by the same function. */
struct pair {
    struct eval_text output, answer;
};

static bool unprepared(struct eval_text *text) {
    (void)text;
    return true;
}

static bool prepare_pair(
    struct pair *pair, struct part output, const char *answer, bool (*prepare)(struct eval_text *)) {
    *pair = (struct pair){0};
    return decode(output, &pair->output) && prepare(&pair->output) && decode(whole(answer), &pair->answer) &&
           prepare(&pair->answer);
}

static void free_pair(struct pair *pair) {
    eval_text_free(&pair->output);
    eval_text_free(&pair->answer);
}

/* An answer of which nothing is left would occur everywhere. */
static bool contains_answer(const struct pair *pair) {
    return pair->answer.count > 0 && eval_text_contains(&pair->output, &pair->answer);
}

static double score_contains(struct part output, const char *answer) {
    struct pair pair;
    bool found = prepare_pair(&pair, output, answer, eval_text_lower) && contains_answer(&pair);
    free_pair(&pair);
    return found;
}

static double score_contains_any(struct part output, const char *answer) {
    struct pair pair;
    bool found = prepare_pair(&pair, output, answer, eval_text_normalise) && contains_answer(&pair);
    free_pair(&pair);
    return found;
}

/* Lower case, single spaces, no final full stop. */
static bool prepare_exact(struct eval_text *text) {
    if (!eval_text_lower(text))
        return false;
    size_t kept = 0;
    for (size_t i = 0; i < text->count; i++) {
        if (!eval_is_space(text->codes[i]))
            text->codes[kept++] = text->codes[i];
        else if (kept > 0 && text->codes[kept - 1] != ' ')
            text->codes[kept++] = ' ';
    }
    while (kept > 0 && text->codes[kept - 1] == ' ')
        kept--;
    if (kept > 1 && text->codes[kept - 1] == '.')
        kept--;
    text->count = kept;
    return true;
}

/* The first line that has more than white space. */
static struct part first_full_line(const char *output) {
    output += strspn(output, " \t\r\n");
    return (struct part){output, strcspn(output, "\r\n")};
}

static double score_exact(struct part output, const char *answer) {
    struct pair pair;
    bool same = prepare_pair(&pair, output, answer, prepare_exact) && eval_text_equal(&pair.output, &pair.answer);
    free_pair(&pair);
    return same;
}

/* A number as digits without what does not change it: sign, digits before and behind the point. */
struct number {
    bool negative;
    const char *whole, *fraction;
    size_t whole_bytes, fraction_bytes; /* whole may have commas */
};

static bool is_ascii_digit(char c) {
    return c >= '0' && c <= '9';
}

static bool is_word_byte(char c) {
    return is_ascii_digit(c) || (c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z') || c == ')' || (c & 0x80) != 0;
}

/* Reads the number whose first digit is at text + at; returns where it ends. A minus counts unless something is
 * subtracted from: "5-3" is 5 and 3. */
static size_t read_number(struct part text, size_t at, struct number *number) {
    size_t sign = at > 0 && text.at[at - 1] == '$' ? at - 1 : at, end = at;
    *number = (struct number){.whole = text.at + at, .fraction = text.at + at};
    number->negative = sign > 0 && text.at[sign - 1] == '-' && (sign == 1 || !is_word_byte(text.at[sign - 2]));
    while (end < text.bytes && (is_ascii_digit(text.at[end]) ||
                                   (text.at[end] == ',' && end + 1 < text.bytes && is_ascii_digit(text.at[end + 1]))))
        end++;
    number->whole_bytes = end - at;
    if (end + 1 < text.bytes && text.at[end] == '.' && is_ascii_digit(text.at[end + 1])) {
        number->fraction = text.at + end + 1;
        while (
            end + 1 + number->fraction_bytes < text.bytes && is_ascii_digit(number->fraction[number->fraction_bytes]))
            number->fraction_bytes++;
        end += 1 + number->fraction_bytes;
    }
    while (number->fraction_bytes > 0 && number->fraction[number->fraction_bytes - 1] == '0')
        number->fraction_bytes--;
    while (number->whole_bytes > 0 && (number->whole[0] == '0' || number->whole[0] == ',')) {
        number->whole++;
        number->whole_bytes--;
    }
    if (number->whole_bytes == 0 && number->fraction_bytes == 0)
        number->negative = false;
    return end;
}

static bool find_number(struct part text, struct number *number) {
    const char *marker = memmem(text.at, text.bytes, "####", 4);
    size_t at = marker == NULL ? 0 : (size_t)(marker - text.at) + 4;
    bool found = false;
    while (at < text.bytes && !(found && marker != NULL)) {
        if (is_ascii_digit(text.at[at])) {
            at = read_number(text, at, number);
            found = true;
        } else {
            at++;
        }
    }
    return found;
}

static bool same_whole(const struct number *a, const struct number *b) {
    size_t i = 0, j = 0;
    for (;; i++, j++) {
        while (i < a->whole_bytes && a->whole[i] == ',')
            i++;
        while (j < b->whole_bytes && b->whole[j] == ',')
            j++;
        if (i == a->whole_bytes || j == b->whole_bytes)
            return i == a->whole_bytes && j == b->whole_bytes;
        if (a->whole[i] != b->whole[j])
            return false;
    }
}

static double score_number(struct part output, const char *answer) {
    struct number a, b;
    return find_number(output, &a) && find_number(whole(answer), &b) && a.negative == b.negative &&
           same_whole(&a, &b) && a.fraction_bytes == b.fraction_bytes &&
           memcmp(a.fraction, b.fraction, a.fraction_bytes) == 0;
}

/* F1 of the words as a multiset. */
static double words_f1(struct eval_words *output, struct eval_words *answer) {
    bool failed;
    size_t ids = eval_words_number(output, answer, &failed), common = 0;
    uint32_t *counts = failed ? NULL : calloc(ids + 1, sizeof *counts);
    if (counts == NULL)
        return 0;
    for (size_t i = 0; i < answer->count; i++)
        counts[answer->words[i].id]++;
    for (size_t i = 0; i < output->count; i++) {
        if (counts[output->words[i].id] > 0) {
            counts[output->words[i].id]--;
            common++;
        }
    }
    free(counts);
    if (common == 0)
        return 0;
    double precision = (double)common / (double)output->count, recall = (double)common / (double)answer->count;
    return 2 * precision * recall / (precision + recall);
}

static double score_f1(struct part output, const char *answer) {
    struct pair pair;
    struct eval_words output_words = {0}, answer_words = {0};
    double score = 0;
    if (prepare_pair(&pair, output, answer, eval_text_normalise) &&
        eval_words_split(pair.output.codes, pair.output.count, &output_words) &&
        eval_words_split(pair.answer.codes, pair.answer.count, &answer_words))
        score = words_f1(&output_words, &answer_words);
    eval_words_free(&output_words);
    eval_words_free(&answer_words);
    free_pair(&pair);
    return score;
}

static double score_rouge_l(struct part output, const char *answer) {
    struct pair pair;
    double score = prepare_pair(&pair, output, answer, unprepared) ? eval_rouge_l(&pair.output, &pair.answer) : 0;
    free_pair(&pair);
    return score;
}

/* The first line without signs of a comment or of Markdown. */
static struct part code_line(struct part output) {
    const char *end = output.at + output.bytes;
    while (output.at < end && *output.at == '\n')
        output.at++;
    for (const char *at = output.at; at <= end;) {
        const char *stop = memchr(at, '\n', (size_t)(end - at));
        struct part line = {at, (size_t)((stop == NULL ? end : stop) - at)};
        if (!has_text(line, "`") && !has_text(line, "#") && !has_text(line, "//"))
            return line;
        at += line.bytes + 1;
    }
    return (struct part){end, 0};
}

static double score_edit(struct part output, const char *answer) {
    struct pair pair;
    double score = 0;
    if (prepare_pair(&pair, code_line(output), answer, unprepared)) {
        if (eval_text_equal(&pair.output, &pair.answer))
            score = 1;
        else if (pair.output.count > 0 && pair.answer.count > 0)
            score = nearbyint(100 * eval_block_ratio(&pair.output, &pair.answer)) / 100;
    }
    free_pair(&pair);
    return score;
}

/* Part of the numbers in the output that are the same digits as number. */
static double score_digits(struct part output, struct part number) {
    struct eval_text text = {0}, wanted = {0};
    size_t numbers = 0, right = 0;
    if (decode(output, &text) && decode(number, &wanted)) {
        for (size_t i = 0; i < text.count;) {
            size_t end = i;
            while (end < text.count && eval_is_digit(text.codes[end]))
                end++;
            numbers += end > i;
            struct eval_text found = {text.codes + i, end - i};
            right += end > i && eval_text_equal(&found, &wanted);
            i = end > i ? end : i + 1;
        }
    }
    eval_text_free(&text);
    eval_text_free(&wanted);
    return numbers == 0 ? 0 : (double)right / (double)numbers;
}

static double score_count(struct part output, const char *answer) {
    return score_digits(output, whole(answer));
}

/* The number of "Paragraph 12" or of its Chinese form. */
static double score_retrieval(struct part output, const char *answer) {
    static const char *const words[] = {"Paragraph ", "\u6bb5\u843d"};
    for (size_t i = 0; i < sizeof words / sizeof words[0]; i++) {
        const char *at = answer;
        while ((at = strstr(at, words[i])) != NULL) {
            at += strlen(words[i]);
            size_t digits = strspn(at, "0123456789");
            if (digits > 0)
                return score_digits(output, (struct part){at, digits});
        }
    }
    return 0;
}

/* Classes in the output that are not merely part of the answer. LongBench removes those from the list while it walks
 * it, which leaves the one behind each unseen; scores are comparable only if that is done here too. */
static double score_classification(const struct eval_item *item, struct part output, const char *answer) {
    const char **matched = malloc((item->classes_count + 1) * sizeof *matched);
    size_t count = 0;
    bool among = false;
    if (matched == NULL)
        return 0;
    for (uint32_t i = 0; i < item->classes_count; i++)
        if (has_text(output, item->classes[i]))
            matched[count++] = item->classes[i];
    for (size_t i = 0; i < count; i++) {
        if (strstr(answer, matched[i]) == NULL || strcmp(matched[i], answer) == 0)
            continue;
        size_t first = 0; /* of those with the same name */
        while (strcmp(matched[first], matched[i]) != 0)
            first++;
        memmove(matched + first, matched + first + 1, (count - first - 1) * sizeof *matched);
        count--;
    }
    for (size_t i = 0; i < count; i++)
        among |= strcmp(matched[i], answer) == 0;
    free(matched);
    return among ? 1.0 / (double)count : 0;
}

static double score_answer(const struct eval_item *item, struct part output, const char *answer) {
    switch (item->metric) {
    case METRIC_CONTAINS:
        return score_contains(output, answer);
    case METRIC_CONTAINS_ANY:
        return score_contains_any(output, answer);
    case METRIC_EXACT:
        return score_exact(output, answer);
    case METRIC_NUMBER:
        return score_number(output, answer);
    case METRIC_F1:
        return score_f1(output, answer);
    case METRIC_ROUGE_L:
        return score_rouge_l(output, answer);
    case METRIC_CLASSIFICATION:
        return score_classification(item, output, answer);
    case METRIC_RETRIEVAL:
        return score_retrieval(output, answer);
    case METRIC_COUNT:
        return score_count(output, answer);
    case METRIC_EDIT:
        return score_edit(output, answer);
    case METRIC_NONE:
    case METRIC_KINDS:
        break;
    }
    return 0;
}

double eval_score(const struct eval_item *item, const char *output) {
    struct part part = item->first_line ? first_line(output) : whole(output);
    double best = 0, sum = 0;
    if (item->metric == METRIC_EXACT)
        part = first_full_line(output);
    for (uint32_t i = 0; i < item->answers_count; i++) {
        double score = score_answer(item, part, item->answers[i]);
        best = score > best ? score : best;
        sum += score;
    }
    if (item->metric == METRIC_CONTAINS && item->answers_count > 0)
        return sum / item->answers_count;
    return best;
}

const char *eval_error_name(enum eval_error kind) {
    static const char *const names[EVAL_ERROR_KINDS] = {"right", "repetitive", "over_length", "wrong"};
    return names[kind];
}

static bool is_repetitive(const int32_t *tokens, uint32_t count) {
    for (uint32_t period = 1; period <= 64 && 4 * period <= count; period++) {
        const int32_t *tail = tokens + count - 4 * period;
        if (memcmp(tail, tail + period, 3 * period * sizeof *tail) == 0)
            return true;
    }
    return false;
}

enum eval_error eval_classify(
    double score, const int32_t *tokens, uint32_t count, uint32_t max_tokens, uint32_t full_count) {
    if (score >= 0.5)
        return EVAL_RIGHT;
    if (is_repetitive(tokens, count))
        return EVAL_REPETITIVE;
    if (count >= max_tokens && full_count < max_tokens)
        return EVAL_OVER_LENGTH;
    return EVAL_WRONG;
}
