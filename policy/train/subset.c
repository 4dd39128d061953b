/* SPDX-License-Identifier: Apache-2.0 */
#include "policy/train/subset.h"

#include "engine/error.h"
#include "policy/train/top.h"

#include <math.h>
#include <stdbool.h>
#include <stdlib.h>

/* How far below the lowest finite score -infinity counts: beyond what any noise makes up for. */
static const double LOWEST_GAP = 1000;

/* What stands for -infinity among these scores. */
static double lowest_of(const float *scores, uint32_t slots) {
    double lowest = INFINITY;
    for (uint32_t i = 0; i < slots; i++)
        if (isfinite(scores[i]) && (double)scores[i] < lowest)
            lowest = (double)scores[i];
    return (lowest == INFINITY ? 0 : lowest) - LOWEST_GAP;
}

static double finite_score(float score, double lowest) {
    return isfinite(score) ? (double)score : lowest;
}

/* ln(e^a + e^b) for numbers below +infinity. */
static double log_add(double a, double b) {
    double high = a > b ? a : b, low = a > b ? b : a;
    return high - low < 40 ? high + log1p(exp(low - high)) : high;
}

void gumbel_top(
    const float *scores, uint32_t slots, const double *uniforms, uint32_t count, uint32_t *order, double *work) {
    double lowest = lowest_of(scores, slots);
    for (uint32_t i = 0; i < slots; i++)
        work[i] = finite_score(scores[i], lowest) - log(-log(uniforms[i]));
    top_of(work, slots, count, order);
}

/* remaining [count]: ln of the sum of e^score over the slots left before each draw; chosen [slots]: 1 or 0. */
static void remaining_sums(const float *scores, uint32_t slots, double lowest, const uint32_t *order, uint32_t count,
    double *remaining, double *chosen) {
    for (uint32_t i = 0; i < slots; i++)
        chosen[i] = 0;
    for (uint32_t j = 0; j < count; j++)
        chosen[order[j]] = 1;
    double highest = -INFINITY, sum = 0;
    for (uint32_t i = 0; i < slots; i++)
        if (chosen[i] == 0)
            highest = fmax(highest, finite_score(scores[i], lowest));
    for (uint32_t i = 0; i < slots; i++)
        if (chosen[i] == 0)
            sum += exp(finite_score(scores[i], lowest) - highest);
    double running = sum > 0 ? highest + log(sum) : -INFINITY;
    for (uint32_t j = count; j-- > 0;) {
        running = log_add(running, finite_score(scores[order[j]], lowest));
        remaining[j] = running;
    }
}

double plackett_luce_logprob(const float *scores, uint32_t slots, const uint32_t *order, uint32_t count, double *work) {
    double lowest = lowest_of(scores, slots), logprob = 0;
    remaining_sums(scores, slots, lowest, order, count, work, work + count);
    for (uint32_t j = 0; j < count; j++)
        logprob += finite_score(scores[order[j]], lowest) - work[j];
    return logprob;
}

/* The gradient of slot i: 1 if it was chosen, less the sum of its probabilities e^(s_i - remaining_j) over the draws j
 * that it took part in: all up to its own, or all. */
void plackett_luce_gradient(const float *scores, uint32_t slots, const uint32_t *order, uint32_t count, double factor,
    float *grad, double *work) {
    if (count == 0)
        return;
    double lowest = lowest_of(scores, slots), *chosen = work + count;
    remaining_sums(scores, slots, lowest, order, count, work, chosen);
    double draws = -INFINITY; /* ln of the sum of e^-remaining so far */
    for (uint32_t j = 0; j < count; j++) {
        uint32_t i = order[j];
        draws = log_add(draws, -work[j]);
        grad[i] += (float)(factor * (1 - exp(finite_score(scores[i], lowest) + draws)));
    }
    for (uint32_t i = 0; i < slots; i++)
        if (chosen[i] == 0)
            grad[i] -= (float)(factor * exp(finite_score(scores[i], lowest) + draws));
}

/* The k-subset distribution. With x = scores / tau, rows[i][b] is ln of the elementary symmetric polynomial of degree b
 * of e^x[0], ..., e^x[i-1]: the weight of all choices of b among the first i. */
struct subset_table {
    uint32_t slots, count;
    double tau;
    double *x;    /* [slots] */
    double *rows; /* [slots + 1][count + 1] */
};

static double *table_row(const struct subset_table *table, uint32_t i) {
    return table->rows + (size_t)i * (table->count + 1);
}

/* Weights when one more slot can be chosen; out == row allowed. */
static void add_slot(const double *row, double x, uint32_t count, double *out) {
    for (uint32_t b = count; b > 0; b--)
        out[b] = row[b - 1] == -INFINITY ? row[b] : log_add(row[b], row[b - 1] + x);
    out[0] = 0;
}

static void no_slot(uint32_t count, double *row) {
    row[0] = 0;
    for (uint32_t b = 1; b <= count; b++)
        row[b] = -INFINITY;
}

struct subset_table *subset_table_create(const float *scores, uint32_t slots, uint32_t count, double tau) {
    struct subset_table *table = calloc(1, sizeof *table);
    size_t columns = (size_t)count + 1, lines = (size_t)slots + 1;
    if (table == NULL)
        return NULL;
    *table = (struct subset_table){.slots = slots, .count = count, .tau = tau};
    table->x = calloc(lines, sizeof(double));
    if (columns <= SIZE_MAX / sizeof(double) / lines)
        table->rows = malloc(lines * columns * sizeof(double));
    if (table->x == NULL || table->rows == NULL) {
        subset_table_free(table);
        return NULL;
    }
    double lowest = lowest_of(scores, slots);
    no_slot(count, table->rows);
    for (uint32_t i = 0; i < slots; i++) {
        table->x[i] = finite_score(scores[i], lowest) / tau;
        add_slot(table_row(table, i), table->x[i], count, table_row(table, i + 1));
    }
    return table;
}

void subset_table_free(struct subset_table *table) {
    if (table == NULL)
        return;
    free(table->x);
    free(table->rows);
    free(table);
}

double subset_log_z(const struct subset_table *table) {
    return table_row(table, table->slots)[table->count];
}

/* From the last slot down: slot i joins with its probability given how many are still to be chosen among 0 to i. */
void subset_sample(const struct subset_table *table, const double *uniforms, uint32_t *subset) {
    uint32_t left = table->count;
    for (uint32_t i = table->slots; i-- > 0 && left > 0;) {
        double joins = exp(table->x[i] + table_row(table, i)[left - 1] - table_row(table, i + 1)[left]);
        if (i < left || uniforms[i] < joins) /* i < left: all that remain are needed */
            subset[--left] = i;
    }
}

double subset_logprob(const struct subset_table *table, const uint32_t *subset) {
    double sum = 0;
    for (uint32_t j = 0; j < table->count; j++)
        sum += table->x[subset[j]];
    return sum - subset_log_z(table);
}

/* ln of the weight of all choices that contain slot i, but for e^x[i] itself: b among the slots before it, the rest
 * among those after it. */
static double weight_of_others(const double *before, const double *after, uint32_t count) {
    double highest = -INFINITY, sum = 0;
    for (uint32_t b = 0; b < count; b++)
        highest = fmax(highest, before[b] + after[count - 1 - b]);
    if (highest == -INFINITY)
        return highest;
    for (uint32_t b = 0; b < count; b++)
        sum += exp(before[b] + after[count - 1 - b] - highest);
    return highest + log(sum);
}

int subset_inclusion(const struct subset_table *table, double *inclusion) {
    double *after = malloc(((size_t)table->count + 1) * sizeof *after);
    double log_z = subset_log_z(table);
    if (after == NULL)
        return ERROR_MEMORY;
    no_slot(table->count, after);
    for (uint32_t i = table->slots; i-- > 0;) {
        double others = weight_of_others(table_row(table, i), after, table->count);
        inclusion[i] = fmin(exp(table->x[i] + others - log_z), 1);
        add_slot(after, table->x[i], table->count, after);
    }
    free(after);
    return 0;
}

int subset_gradient(const struct subset_table *table, const uint32_t *subset, double factor, float *grad) {
    double *inclusion = malloc(((size_t)table->slots + 1) * sizeof *inclusion), scale = factor / table->tau;
    int result = ERROR_MEMORY;
    if (inclusion == NULL || subset_inclusion(table, inclusion) != 0)
        goto out;
    for (uint32_t j = 0; j < table->count; j++)
        inclusion[subset[j]] -= 1;
    for (uint32_t i = 0; i < table->slots; i++)
        grad[i] -= (float)(scale * inclusion[i]);
    result = 0;
out:
    free(inclusion);
    return result;
}
