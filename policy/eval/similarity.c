/* SPDX-License-Identifier: Apache-2.0 */
#include "policy/eval/similarity.h"

#include <stdlib.h>
#include <string.h>

enum {
    RATIO_CHARACTERS = 2048,
    POPULAR_FROM = 200,    /* length from which frequent characters start no block */
    SENTENCE_WORDS = 8192, /* of the output */
};

/* A position of b, sorted by its character. */
struct place {
    int32_t code;
    uint32_t at;
};

struct matcher {
    const int32_t *a, *b;
    struct place *places; /* of b without popular characters */
    size_t places_count;
    struct run { /* length of the common run that ends at [place of b], in the row of a that wrote it last */
        uint32_t row, length;
    } * runs, *next_runs;
    uint32_t row; /* counts rows of all searches, so that runs never need clearing */
};

struct block {
    size_t a, b, length;
};

static int compare_places(const void *a, const void *b) {
    const struct place *x = a, *y = b;
    if (x->code != y->code)
        return x->code < y->code ? -1 : 1;
    return x->at < y->at ? -1 : x->at > y->at;
}

/* First place of a character, or where it would be. */
static size_t find_places(const struct matcher *matcher, int32_t code) {
    size_t low = 0, high = matcher->places_count;
    while (low < high) {
        size_t middle = (low + high) / 2;
        if (matcher->places[middle].code < code)
            low = middle + 1;
        else
            high = middle;
    }
    return low;
}

static void drop_popular(struct matcher *matcher, size_t length) {
    size_t most = length / 100 + 1, kept = 0;
    for (size_t i = 0, end; i < matcher->places_count; i = end) {
        for (end = i; end < matcher->places_count && matcher->places[end].code == matcher->places[i].code;)
            end++;
        if (end - i > most)
            continue;
        memmove(matcher->places + kept, matcher->places + i, (end - i) * sizeof *matcher->places);
        kept += end - i;
    }
    matcher->places_count = kept;
}

static bool prepare_matcher(
    struct matcher *matcher, const int32_t *a, size_t a_count, const int32_t *b, size_t b_count) {
    (void)a_count;
    *matcher = (struct matcher){.a = a, .b = b};
    matcher->places = malloc((b_count + 1) * sizeof *matcher->places);
    matcher->runs = calloc(b_count + 1, sizeof *matcher->runs);
    matcher->next_runs = calloc(b_count + 1, sizeof *matcher->next_runs);
    if (matcher->places == NULL || matcher->runs == NULL || matcher->next_runs == NULL)
        return false;
    for (size_t i = 0; i < b_count; i++)
        matcher->places[i] = (struct place){b[i], (uint32_t)i};
    matcher->places_count = b_count;
    qsort(matcher->places, b_count, sizeof *matcher->places, compare_places);
    if (b_count >= POPULAR_FROM)
        drop_popular(matcher, b_count);
    return true;
}

static void free_matcher(struct matcher *matcher) {
    free(matcher->places);
    free(matcher->runs);
    free(matcher->next_runs);
}

/* Characters too frequent to start a block may lengthen one. */
static void extend_block(
    const struct matcher *matcher, size_t a_low, size_t a_high, size_t b_low, size_t b_high, struct block *block) {
    while (block->a > a_low && block->b > b_low && matcher->a[block->a - 1] == matcher->b[block->b - 1]) {
        block->a--;
        block->b--;
        block->length++;
    }
    while (block->a + block->length < a_high && block->b + block->length < b_high &&
           matcher->a[block->a + block->length] == matcher->b[block->b + block->length])
        block->length++;
}

static struct block find_block(struct matcher *matcher, size_t a_low, size_t a_high, size_t b_low, size_t b_high) {
    struct block best = {a_low, b_low, 0};
    matcher->row++; /* no run continues from an earlier search */
    for (size_t i = a_low; i < a_high; i++) {
        uint32_t row = ++matcher->row;
        size_t place = find_places(matcher, matcher->a[i]);
        for (; place < matcher->places_count && matcher->places[place].code == matcher->a[i]; place++) {
            size_t j = matcher->places[place].at;
            if (j < b_low || j >= b_high)
                continue;
            /* runs[j] is the run that ends before j, so that j 0 needs no case of its own. */
            uint32_t length = 1 + (matcher->runs[j].row == row - 1 ? matcher->runs[j].length : 0);
            matcher->next_runs[j + 1] = (struct run){row, length};
            if (length > best.length)
                best = (struct block){i + 1 - length, j + 1 - length, length};
        }
        struct run *runs = matcher->runs;
        matcher->runs = matcher->next_runs;
        matcher->next_runs = runs;
    }
    extend_block(matcher, a_low, a_high, b_low, b_high, &best);
    return best;
}

static size_t count_matches(struct matcher *matcher, size_t a_low, size_t a_high, size_t b_low, size_t b_high) {
    size_t matches = 0;
    while (a_low < a_high && b_low < b_high) {
        struct block block = find_block(matcher, a_low, a_high, b_low, b_high);
        if (block.length == 0)
            break;
        matches += block.length + count_matches(matcher, a_low, block.a, b_low, block.b);
        a_low = block.a + block.length;
        b_low = block.b + block.length;
    }
    return matches;
}

static size_t cut(size_t count) {
    return count < RATIO_CHARACTERS ? count : RATIO_CHARACTERS;
}

double eval_block_ratio(const struct eval_text *a, const struct eval_text *b) {
    size_t a_count = cut(a->count), b_count = cut(b->count);
    double ratio = 0;
    if (a_count + b_count == 0)
        return 1;
    struct matcher matcher;
    if (prepare_matcher(&matcher, a->codes, a_count, b->codes, b_count))
        ratio = 2.0 * (double)count_matches(&matcher, 0, a_count, 0, b_count) / (double)(a_count + b_count);
    free_matcher(&matcher);
    return ratio;
}

/* ROUGE-L. */

/* Which way the longest common subsequence of two prefixes goes on from their ends. */
enum step { STEP_BOTH, STEP_REFERENCE, STEP_OUTPUT };

struct sentence {
    const struct eval_word *words;
    size_t count;
};

struct rouge {
    struct eval_words output, reference; /* of all sentences */
    struct sentence *output_sentences, *reference_sentences;
    size_t output_count, reference_count;
    bool *matched; /* [word ids] in the subsequence of some pair of sentences */
    size_t ids;
};

/* Splits a text at full stops into sentences of words. A sentence of white space only has one word, the empty one: the
 * package splits its empty line so. */
static bool split_sentences(
    const struct eval_text *text, struct eval_words *words, struct sentence **sentences, size_t *count) {
    size_t stops = 0;
    for (size_t i = 0; i < text->count; i++)
        stops += text->codes[i] == '.';
    words->words = malloc((text->count / 2 + stops + 2) * sizeof *words->words);
    *sentences = malloc((stops + 1) * sizeof **sentences);
    if (words->words == NULL || *sentences == NULL)
        return false;
    for (size_t i = 0; i < text->count;) {
        size_t end = i;
        while (end < text->count && text->codes[end] != '.')
            end++;
        struct eval_words part;
        if (end > i) {
            if (!eval_words_split(text->codes + i, end - i, &part))
                return false;
            struct eval_word *to = words->words + words->count;
            if (part.count == 0)
                part.words[part.count++] = (struct eval_word){text->codes, 0, 0};
            memcpy(to, part.words, part.count * sizeof *to);
            words->count += part.count;
            (*sentences)[(*count)++] = (struct sentence){to, part.count};
            eval_words_free(&part);
        }
        i = end + 1;
    }
    return true;
}

/* Fills steps [(reference + 1), (output + 1)] for the longest common subsequence. */
static bool fill_steps(struct sentence reference, struct sentence output, uint8_t *steps) {
    size_t width = output.count + 1;
    uint32_t *above = calloc(2 * width, sizeof *above), *row = above == NULL ? NULL : above + width;
    if (above == NULL)
        return false;
    uint32_t *lengths = above;
    for (size_t i = 1; i <= reference.count; i++) {
        row[0] = 0;
        for (size_t j = 1; j <= output.count; j++) {
            enum step step = above[j] > row[j - 1] ? STEP_REFERENCE : STEP_OUTPUT;
            if (reference.words[i - 1].id == output.words[j - 1].id)
                step = STEP_BOTH;
            row[j] = step == STEP_BOTH ? above[j - 1] + 1 : step == STEP_REFERENCE ? above[j] : row[j - 1];
            steps[i * width + j] = (uint8_t)step;
        }
        uint32_t *swap = above;
        above = row;
        row = swap;
    }
    free(lengths);
    return true;
}

static bool match_sentences(struct rouge *rouge, struct sentence reference, struct sentence output) {
    if (output.count > SENTENCE_WORDS)
        output.count = SENTENCE_WORDS;
    size_t width = output.count + 1;
    if (reference.count + 1 > SIZE_MAX / width)
        return false;
    uint8_t *steps = malloc((reference.count + 1) * width);
    bool done = steps != NULL && fill_steps(reference, output, steps);
    for (size_t i = reference.count, j = output.count; done && i > 0 && j > 0;) {
        enum step step = steps[i * width + j];
        if (step == STEP_BOTH)
            rouge->matched[reference.words[i - 1].id] = true;
        i -= step != STEP_OUTPUT;
        j -= step != STEP_REFERENCE;
    }
    free(steps);
    return done;
}

static size_t count_different(const struct eval_words *words, bool *seen, size_t ids) {
    size_t count = 0;
    memset(seen, 0, ids * sizeof *seen);
    for (size_t i = 0; i < words->count; i++) {
        count += !seen[words->words[i].id];
        seen[words->words[i].id] = true;
    }
    return count;
}

static double rouge_f(struct rouge *rouge) {
    size_t common = 0;
    for (size_t i = 0; i < rouge->ids; i++)
        common += rouge->matched[i];
    double recall = (double)common / (double)count_different(&rouge->reference, rouge->matched, rouge->ids);
    double precision = (double)common / (double)count_different(&rouge->output, rouge->matched, rouge->ids);
    return 2.0 * ((precision * recall) / (precision + recall + 1e-8));
}

double eval_rouge_l(const struct eval_text *output, const struct eval_text *reference) {
    struct rouge rouge = {0};
    double f = 0;
    bool failed = false;
    if (!split_sentences(output, &rouge.output, &rouge.output_sentences, &rouge.output_count) ||
        !split_sentences(reference, &rouge.reference, &rouge.reference_sentences, &rouge.reference_count))
        goto out;
    if (rouge.output_count == 0 || rouge.reference_count == 0)
        goto out;
    rouge.ids = eval_words_number(&rouge.output, &rouge.reference, &failed);
    rouge.matched = failed ? NULL : calloc(rouge.ids + 1, sizeof *rouge.matched);
    if (rouge.matched == NULL)
        goto out;
    for (size_t i = 0; i < rouge.reference_count; i++)
        for (size_t j = 0; j < rouge.output_count; j++)
            if (!match_sentences(&rouge, rouge.reference_sentences[i], rouge.output_sentences[j]))
                goto out;
    f = rouge_f(&rouge);
out:
    eval_words_free(&rouge.output);
    eval_words_free(&rouge.reference);
    free(rouge.output_sentences);
    free(rouge.reference_sentences);
    free(rouge.matched);
    return f;
}
