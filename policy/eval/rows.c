/* SPDX-License-Identifier: Apache-2.0 */
#include "policy/eval/rows.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

static const double kl_least = 1e-9, claim_points = 0.15;

/* A result with that of `full` for the same item and part. */
struct pair {
    const struct eval_result *own, *full;
    size_t order; /* of the results: a later one replaces an earlier one */
};

struct pairs {
    struct pair *list; /* by length, variant, item, part */
    size_t count;
    double *values; /* [count] work space */
};

static int compare_numbers(uint64_t a, uint64_t b) {
    return (a > b) - (a < b);
}

static int compare_places(const struct eval_result *a, const struct eval_result *b, bool with_variant) {
    int order = compare_numbers(a->length, b->length);
    if (order == 0 && with_variant)
        order = compare_numbers(a->variant, b->variant);
    if (order == 0)
        order = compare_numbers(a->item, b->item);
    return order != 0 ? order : compare_numbers(a->part, b->part);
}

static int compare_pairs(const void *a, const void *b) {
    const struct pair *x = a, *y = b;
    int order = compare_places(x->own, y->own, true);
    return order != 0 ? order : compare_numbers(x->order, y->order);
}

/* The pair of `full` at a place, by bisection; the list is sorted and has one entry a place. */
static const struct eval_result *find_full(const struct pairs *pairs, const struct eval_result *result) {
    struct eval_result place = *result;
    size_t low = 0, high = pairs->count;
    place.variant = 0;
    while (low < high) {
        size_t middle = (low + high) / 2;
        int order = compare_places(pairs->list[middle].own, &place, true);
        if (order == 0)
            return pairs->list[middle].own;
        if (order < 0)
            low = middle + 1;
        else
            high = middle;
    }
    return NULL;
}

static int pair_up(const struct eval_results *results, struct pairs *pairs, struct error *error) {
    pairs->list = calloc(results->count + 1, sizeof *pairs->list);
    pairs->values = calloc(results->count + 1, sizeof *pairs->values);
    if (pairs->list == NULL || pairs->values == NULL)
        return error_set(error, ERROR_MEMORY, "no memory for a report of %zu results", results->count);
    for (size_t i = 0; i < results->count; i++)
        pairs->list[i] = (struct pair){.own = &results->list[i], .order = i};
    qsort(pairs->list, results->count, sizeof *pairs->list, compare_pairs);
    for (size_t i = 0; i < results->count; i++) {
        bool replaced = i + 1 < results->count && compare_places(pairs->list[i].own, pairs->list[i + 1].own, true) == 0;
        if (!replaced)
            pairs->list[pairs->count++] = pairs->list[i];
    }
    for (size_t i = 0; i < pairs->count; i++)
        pairs->list[i].full = find_full(pairs, pairs->list[i].own);
    return 0;
}

/* ---- one row ---- */

typedef double (*measure)(const struct pair *pair);

static double kl_of(const struct pair *pair) {
    return pair->own->kl;
}
static double top1_of(const struct pair *pair) {
    return pair->own->top1;
}
static double score_of(const struct pair *pair) {
    return pair->own->score;
}
static double score_difference_of(const struct pair *pair) {
    return pair->own->score - pair->full->score;
}
static double full_score_of(const struct pair *pair) {
    return pair->full->score;
}
static double gold_of(const struct pair *pair) {
    return pair->own->gold_logprob;
}
static double gold_difference_of(const struct pair *pair) {
    return pair->own->gold_logprob - pair->full->gold_logprob;
}
static double full_gold_of(const struct pair *pair) {
    return pair->full->gold_logprob;
}
static double length_ratio_of(const struct pair *pair) {
    double full = pair->full->output_tokens;
    return (pair->own->output_tokens + (full == 0)) / (full + (full == 0));
}
static double kept_of(const struct pair *pair) {
    return pair->own->tokens_kept;
}
static double seen_of(const struct pair *pair) {
    return pair->own->tokens_seen;
}
static double bytes_of(const struct pair *pair) {
    return pair->own->bytes;
}
static double full_bytes_of(const struct pair *pair) {
    return pair->own->bytes_full;
}

/* Pairs of one row, in order of items. */
struct slice {
    const struct pair **pairs;
    size_t count;
    double *values;
};

static uint32_t count_items(const struct slice *slice) {
    uint32_t items = 0;
    for (size_t i = 0; i < slice->count; i++)
        items += i == 0 || slice->pairs[i]->own->item != slice->pairs[i - 1]->own->item;
    return items;
}

/* Means of the parts of each item: slice->values [items]; returns their number. */
static size_t item_means(const struct slice *slice, measure of) {
    size_t items = 0;
    for (size_t i = 0; i < slice->count;) {
        size_t end = i;
        double sum = 0;
        for (; end < slice->count && slice->pairs[end]->own->item == slice->pairs[i]->own->item; end++)
            sum += of(slice->pairs[end]);
        slice->values[items++] = sum / (double)(end - i);
        i = end;
    }
    return items;
}

static struct bootstrap_interval interval_of(const struct slice *slice, uint64_t seed, measure of) {
    return bootstrap_mean(slice->values, item_means(slice, of), seed);
}

static double mean_of(const struct slice *slice, measure of) {
    size_t items = item_means(slice, of);
    double sum = 0;
    for (size_t i = 0; i < items; i++)
        sum += slice->values[i];
    return items > 0 ? sum / (double)items : 0;
}

static bool is_text(const struct pair *pair) {
    return strcmp(pair->own->group, "text") == 0;
}

static void fill_perplexity(const struct slice *slice, struct eval_row *row) {
    double own = 0, full = 0, steps = 0;
    bool text = false;
    for (size_t i = 0; i < slice->count; i++)
        text = text || is_text(slice->pairs[i]);
    for (size_t i = 0; i < slice->count; i++) {
        const struct eval_result *result = slice->pairs[i]->own;
        if (text && !is_text(slice->pairs[i]))
            continue;
        own += result->loss * result->steps;
        full += result->loss_full * result->steps;
        steps += result->steps;
    }
    row->perplexity = exp(own / steps);
    row->perplexity_full = exp(full / steps);
}

static void fill_kl(const struct slice *slice, uint64_t seed, struct eval_row *row) {
    double logs = 0, most = 0;
    row->has_kl = true;
    row->kl = interval_of(slice, seed, kl_of);
    row->top1 = mean_of(slice, top1_of);
    for (size_t i = 0; i < slice->count; i++) {
        logs += log(fmax(kl_least, slice->pairs[i]->own->kl));
        most = fmax(most, slice->pairs[i]->own->kl);
    }
    row->kl_geometric = most > kl_least ? exp(logs / (double)slice->count) : most;
    fill_perplexity(slice, row);
}

/* What guessing could reach: one of the classes, or always the most frequent answer, where answers repeat. */
static double chance_of(const struct slice *slice) {
    double classes = 0;
    size_t most = 1;
    for (size_t i = 0; i < slice->count; i++) {
        size_t same = 0;
        const struct eval_result *result = slice->pairs[i]->full;
        for (size_t j = 0; j < slice->count; j++)
            same += result->gold[0] != '\0' && strcmp(result->gold, slice->pairs[j]->full->gold) == 0;
        most = same > most ? same : most;
        classes += result->chance;
    }
    double guess = most > 1 ? (double)most / (double)slice->count : 0;
    return fmax(guess, classes / (double)slice->count);
}

static void fill_score(const struct slice *slice, uint64_t seed, struct eval_row *row) {
    row->has_score = true;
    row->score = interval_of(slice, seed, score_of);
    row->score_difference = interval_of(slice, seed, score_difference_of);
    row->score_full = mean_of(slice, full_score_of);
    row->chance = chance_of(slice);
    row->claimed = row->score_full >= row->chance + claim_points;
    for (size_t i = 0; i < slice->count; i++) {
        if (slice->pairs[i]->full->score < 0.5)
            continue;
        row->full_right++;
        row->errors[slice->pairs[i]->own->kind]++;
    }
}

static void fill_positions(const struct slice *slice, struct eval_row *row) {
    struct eval_positions_sum sum = {0};
    for (size_t i = 0; i < slice->count; i++)
        eval_positions_add(&sum, &slice->pairs[i]->own->positions);
    eval_positions_mean(&sum, &row->positions);
}

static void fill_row(const struct slice *slice, uint64_t seed, struct eval_row *row) {
    const struct eval_result *first = slice->pairs[0]->own;
    double tokens = 0, seconds = 0;
    row->length = first->length;
    row->variant = first->variant;
    row->n = count_items(slice);
    if (first->steps > 0)
        fill_kl(slice, seed, row);
    else if (first->has_score)
        fill_score(slice, seed, row);
    if (first->has_gold) {
        row->has_gold = true;
        row->gold_logprob = interval_of(slice, seed, gold_of);
        row->gold_difference = interval_of(slice, seed, gold_difference_of);
        row->gold_logprob_full = mean_of(slice, full_gold_of);
    }
    row->has_output = first->steps == 0;
    row->length_ratio = row->has_output ? mean_of(slice, length_ratio_of) : 0;
    for (size_t i = 0; i < slice->count; i++) {
        if (slice->pairs[i]->own->part > 0)
            continue; /* time is that of the whole item */
        tokens += slice->pairs[i]->own->tokens;
        seconds += slice->pairs[i]->own->seconds;
    }
    row->tokens_per_second = seconds > 0 ? tokens / seconds : 0;
    row->tokens_kept = mean_of(slice, kept_of);
    row->tokens_seen = mean_of(slice, seen_of);
    row->bytes = mean_of(slice, bytes_of);
    row->bytes_full = mean_of(slice, full_bytes_of);
    fill_positions(slice, row);
}

/* ---- all rows ---- */

static bool same_row(const struct pair *a, const struct pair *b) {
    return a->own->length == b->own->length && a->own->variant == b->own->variant;
}

static size_t take_group(struct slice *slice, const struct pairs *pairs, size_t begin, size_t end, const char *group) {
    slice->count = 0;
    for (size_t i = begin; i < end; i++)
        if (pairs->list[i].full != NULL && (group == NULL || strcmp(pairs->list[i].own->group, group) == 0))
            slice->pairs[slice->count++] = &pairs->list[i];
    return slice->count;
}

static bool group_is_done(const struct eval_rows *rows, size_t first, const char *group) {
    for (size_t i = first; i < rows->groups_count; i++)
        if (strcmp(rows->groups[i].group, group) == 0)
            return true;
    return false;
}

static void add_groups(
    struct eval_rows *rows, struct slice *slice, const struct pairs *pairs, size_t begin, size_t end, uint64_t seed) {
    size_t first = rows->groups_count;
    for (size_t i = begin; i < end; i++) {
        const char *group = pairs->list[i].own->group;
        if (group[0] == '\0' || group_is_done(rows, first, group) || take_group(slice, pairs, begin, end, group) == 0)
            continue;
        struct eval_row *row = &rows->groups[rows->groups_count++];
        fill_row(slice, seed, row);
        strcpy(row->group, group);
    }
}

static void add_rows(
    const struct eval_setup *setup, struct eval_rows *rows, struct slice *slice, const struct pairs *pairs) {
    for (size_t begin = 0, end; begin < pairs->count; begin = end) {
        for (end = begin + 1; end < pairs->count && same_row(&pairs->list[begin], &pairs->list[end]); end++)
            ;
        if (take_group(slice, pairs, begin, end, NULL) == 0)
            continue;
        fill_row(slice, setup->seed, &rows->list[rows->count++]);
        add_groups(rows, slice, pairs, begin, end, setup->seed);
    }
}

int eval_rows_create(
    const struct eval_setup *setup, const struct eval_results *results, struct eval_rows *rows, struct error *error) {
    struct pairs pairs = {0};
    struct slice slice = {0};
    *rows = (struct eval_rows){0};
    int code = pair_up(results, &pairs, error);
    slice.pairs = calloc(results->count + 1, sizeof *slice.pairs);
    slice.values = pairs.values;
    rows->list = calloc(results->count + 1, sizeof *rows->list);
    rows->groups = calloc(results->count + 1, sizeof *rows->groups);
    if (code == 0 && (slice.pairs == NULL || rows->list == NULL || rows->groups == NULL))
        code = error_set(error, ERROR_MEMORY, "no memory for a report of %zu results", results->count);
    if (code == 0)
        add_rows(setup, rows, &slice, &pairs);
    free(slice.pairs);
    free(pairs.list);
    free(pairs.values);
    if (code != 0)
        eval_rows_free(rows);
    return code;
}

void eval_rows_free(struct eval_rows *rows) {
    free(rows->list);
    free(rows->groups);
    *rows = (struct eval_rows){0};
}

const struct eval_row *eval_rows_find(const struct eval_rows *rows, uint32_t length, uint32_t variant) {
    for (size_t i = 0; i < rows->count; i++)
        if (rows->list[i].length == length && rows->list[i].variant == variant)
            return &rows->list[i];
    return NULL;
}
