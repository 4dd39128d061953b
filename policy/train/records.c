/* SPDX-License-Identifier: Apache-2.0
 *
 * What is made of recorded examples: inputs at a budget, normalisation, whitened keys. record.c collects them.
 */
#include "policy/train/record.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

enum { BUDGET_INPUTS = 1 << INPUT_BUDGET | 1 << INPUT_RECENT_8 | 1 << INPUT_RECENT_4 | 1 << INPUT_RECENT_2 };
enum { GRID = 8, BUDGET_LEAST = 32 };
static const double grid_least = 0.05, grid_most = 0.4;
static const float smallest_deviation = 1e-3f;

uint32_t records_budget(double ratio, uint32_t slots) {
    double budget = floor(ratio * slots);
    return budget > BUDGET_LEAST ? (uint32_t)budget : BUDGET_LEAST;
}

/* Exact, but for infinity and what is no number, which are not recorded. */
static float widen(uint16_t half) {
    uint32_t bits = (uint32_t)(half & 0x7fff) << 13;
    float value;
    memcpy(&value, &bits, sizeof value);
    value *= 0x1p112f;
    return (half & 0x8000) != 0 ? -value : value;
}

void records_widen(const uint16_t *from, size_t count, float *to) {
    for (size_t i = 0; i < count; i++)
        to[i] = widen(from[i]);
}

/* The shape with those of its inputs that are in the mask, and no content. */
static struct network_shape shape_of_inputs(const struct records *records, uint32_t mask) {
    struct network_shape shape = records->shape;
    shape.content = 0;
    shape.inputs &= mask;
    return shape;
}

/* Inputs that depend on the budget, of one slot after the other: their number is returned. */
static uint32_t gather_budget(const struct records *records, const uint32_t *positions, uint32_t count, uint32_t seen,
    uint32_t budget, float *out) {
    struct network_shape shape = shape_of_inputs(records, BUDGET_INPUTS);
    struct network_slots slots = {.count = count, .seen = seen, .budget = budget, .positions = positions};
    network_gather(&shape, &slots, out);
    return records->inputs - records->fixed;
}

void records_inputs(const struct records *records, const struct recorded_sequence *sequence,
    const struct recorded_head *head, uint32_t budget, float *out) {
    float moving[64 * INPUT_KINDS];
    uint32_t fixed = records->fixed, width = records->inputs;
    for (uint32_t first = 0; first < head->slots; first += 64) {
        uint32_t count = head->slots - first < 64 ? head->slots - first : 64, dynamic = 0;
        if (width > fixed)
            dynamic = gather_budget(records, head->positions + first, count, sequence->seen, budget, moving);
        for (uint32_t i = 0; i < count; i++) {
            float *row = out + (size_t)(first + i) * width;
            records_widen(head->inputs + (size_t)(first + i) * fixed, fixed, row);
            memcpy(row + fixed, moving + (size_t)i * dynamic, dynamic * sizeof *row);
        }
    }
}

void records_keys(const struct records *records, const struct recorded_head *head, float *out) {
    records_widen(head->keys, (size_t)head->slots * records->shape.head_dim, out);
}

/* ---- normalisation ---- */

/* Sums of the inputs or keys of each head: [heads], and [heads][inputs or head_dim]. */
struct moments {
    double *count, *sum, *squares;
};

static void add_head(
    const struct records *records, const struct recorded_head *head, const float *inputs, struct moments *moments) {
    size_t base = (size_t)head->head * records->inputs;
    for (uint32_t i = 0; i < head->slots; i++) {
        for (uint32_t f = 0; f < records->inputs; f++) {
            double value = inputs[(size_t)i * records->inputs + f];
            moments->sum[base + f] += value;
            moments->squares[base + f] += value * value;
        }
    }
    moments->count[head->head] += head->slots;
}

static int add_sequence(struct training *training, const struct records *records,
    const struct recorded_sequence *sequence, float *inputs, struct moments *moments) {
    uint32_t grid = records->inputs > records->fixed ? GRID : 1;
    int code = 0;
    for (uint32_t h = 0; code == 0 && h < sequence->heads_count; h++) {
        for (uint32_t g = 0; g < grid; g++) {
            double ratio = grid_least * pow(grid_most / grid_least, (g + 0.5) / GRID);
            records_inputs(records, sequence, &sequence->heads[h], records_budget(ratio, sequence->seen), inputs);
            add_head(records, &sequence->heads[h], inputs, moments);
        }
        code = train_pause(training);
    }
    return code;
}

/* A head that was never recorded gets the means of those that were. */
static void fill_missing(const struct records *records, struct moments *moments) {
    uint32_t there = 0;
    for (uint32_t h = 0; h < records->heads; h++)
        there += moments->count[h] > 0;
    for (uint32_t h = 0; h < records->heads && there > 0; h++) {
        if (moments->count[h] > 0)
            continue;
        for (uint32_t f = 0; f < records->inputs; f++) {
            size_t to = (size_t)h * records->inputs + f;
            for (uint32_t other = 0; other < records->heads; other++) {
                size_t from = (size_t)other * records->inputs + f;
                if (moments->count[other] <= 0)
                    continue;
                moments->sum[to] += moments->sum[from] / moments->count[other] / there;
                moments->squares[to] += moments->squares[from] / moments->count[other] / there;
            }
        }
        moments->count[h] = -1; /* means already, and no source for others */
    }
}

static void set_normalisation(
    const struct records *records, const struct moments *moments, struct policy_network *network) {
    uint32_t content = records->shape.content, width = content + records->inputs;
    for (uint32_t h = 0; h < records->heads; h++) {
        double count = moments->count[h] > 0 ? moments->count[h] : 1;
        for (uint32_t f = 0; f < records->inputs; f++) {
            size_t from = (size_t)h * records->inputs + f, to = (size_t)h * width + content + f;
            double mean = moments->sum[from] / count, variance = moments->squares[from] / count - mean * mean;
            float deviation = variance > 0 ? (float)sqrt(variance) : 0;
            network->mean[to] = (float)mean;
            network->scale[to] = 1 / (deviation > smallest_deviation ? deviation : smallest_deviation);
        }
    }
}

int records_normalise(struct training *training, const struct records *records, struct error *error) {
    size_t numbers = (size_t)records->heads * records->inputs;
    struct moments moments = {.count = calloc(records->heads, sizeof(double)),
        .sum = calloc(numbers + 1, sizeof(double)),
        .squares = calloc(numbers + 1, sizeof(double))};
    float *inputs = malloc(((size_t)records->slots_most * records->inputs + 1) * sizeof *inputs);
    int code = 0;
    if (moments.count == NULL || moments.sum == NULL || moments.squares == NULL || inputs == NULL)
        code = error_set(error, ERROR_MEMORY, "no memory for the normalisation of inputs");
    for (uint32_t s = 0; code == 0 && s < records->count; s++)
        code = add_sequence(training, records, &records->sequences[s], inputs, &moments);
    if (code == 0) {
        fill_missing(records, &moments);
        set_normalisation(records, &moments, training->network);
    }
    free(moments.count);
    free(moments.sum);
    free(moments.squares);
    free(inputs);
    return code;
}

/* ---- whitening ---- */

static void add_keys(const struct records *records, const struct recorded_head *head, void *context) {
    const struct moments *moments = context;
    uint32_t dim = records->shape.head_dim;
    double *sum = moments->sum + (size_t)head->head * dim, *square = moments->squares + (size_t)head->head * dim;
    moments->count[head->head] += head->slots;
    for (size_t i = 0; i < (size_t)head->slots * dim; i++) {
        double value = widen(head->keys[i]);
        sum[i % dim] += value;
        square[i % dim] += value * value;
    }
}

/* In place. */
static void whiten_keys(const struct records *records, const struct recorded_head *head, void *context) {
    uint32_t dim = records->shape.head_dim;
    const float *mean = records->key_mean + (size_t)head->head * dim;
    const float *scale = records->key_scale + (size_t)head->head * dim;
    (void)context;
    for (size_t i = 0; i < (size_t)head->slots * dim; i++)
        head->keys[i] = float_to_half((widen(head->keys[i]) - mean[i % dim]) * scale[i % dim]);
}

/* Each head of each sequence, giving way in between. */
static int visit_heads(struct training *training, const struct records *records,
    void (*visit)(const struct records *records, const struct recorded_head *head, void *context), void *context) {
    int code = 0;
    for (uint32_t s = 0; code == 0 && s < records->count; s++) {
        const struct recorded_sequence *sequence = &records->sequences[s];
        for (uint32_t h = 0; code == 0 && h < sequence->heads_count; h++) {
            visit(records, &sequence->heads[h], context);
            code = train_pause(training);
        }
    }
    return code;
}

int records_whiten_keys(struct training *training, struct records *records, struct error *error) {
    size_t numbers = (size_t)records->heads * records->shape.head_dim;
    uint32_t dim = records->shape.head_dim;
    struct moments moments = {.count = calloc(records->heads, sizeof(double)),
        .sum = calloc(numbers, sizeof(double)),
        .squares = calloc(numbers, sizeof(double))};
    records->key_mean = calloc(numbers, sizeof(float));
    records->key_scale = calloc(numbers, sizeof(float));
    int code = moments.count == NULL || moments.sum == NULL || moments.squares == NULL || records->key_mean == NULL ||
                       records->key_scale == NULL
                   ? error_set(error, ERROR_MEMORY, "no memory for recorded examples")
                   : visit_heads(training, records, add_keys, &moments);
    for (size_t i = 0; code == 0 && i < numbers; i++) {
        bool recorded = moments.count[i / dim] > 0;
        double count = recorded ? moments.count[i / dim] : 1, mean = moments.sum[i] / count;
        double variance = moments.squares[i] / count - mean * mean;
        records->key_mean[i] = (float)mean;
        records->key_scale[i] = recorded && variance > 1e-6 ? (float)(1 / sqrt(variance)) : 1;
    }
    if (code == 0)
        code = visit_heads(training, records, whiten_keys, NULL);
    free(moments.count);
    free(moments.sum);
    free(moments.squares);
    return code;
}

void records_whiten(const struct records *records, struct policy_network *network) {
    uint32_t rows = records->shape.content, dim = records->shape.head_dim;
    for (size_t r = 0; r < (size_t)records->heads * rows; r++) {
        const float *mean = records->key_mean + r / rows * dim, *scale = records->key_scale + r / rows * dim;
        float *map = network->content + r * dim;
        double offset = network->content_offset[r];
        for (uint32_t d = 0; d < dim; d++) {
            offset += (double)map[d] * mean[d];
            map[d] /= scale[d];
        }
        network->content_offset[r] = (float)offset;
    }
}

void records_unwhiten(const struct records *records, struct policy_network *network) {
    uint32_t rows = records->shape.content, dim = records->shape.head_dim;
    for (size_t r = 0; r < (size_t)records->heads * rows; r++) {
        const float *mean = records->key_mean + r / rows * dim, *scale = records->key_scale + r / rows * dim;
        float *map = network->content + r * dim;
        double offset = network->content_offset[r];
        for (uint32_t d = 0; d < dim; d++) {
            map[d] *= scale[d];
            offset -= (double)map[d] * mean[d];
        }
        network->content_offset[r] = (float)offset;
    }
}

void records_free(struct records *records) {
    if (records == NULL)
        return;
    for (uint32_t s = 0; s < records->count; s++) {
        free(records->sequences[s].heads);
        free(records->sequences[s].memory);
    }
    free(records->sequences);
    free(records->key_mean);
    free(records->key_scale);
    free(records);
}
