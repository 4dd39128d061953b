/* SPDX-License-Identifier: Apache-2.0 */
#include "tests/parity/reference_score.h"

#include "tests/parity/parity.h"

#include "engine/random.h"

#include <math.h>
#include <stdlib.h>

struct place {
    struct reference_score_layer *layer;
    struct reference_score_head *head;
    uint32_t k;
};

static bool is_used(const struct reference_score_head *head, uint32_t i) {
    return head->positions[i] != REFERENCE_UNUSED;
}

static bool is_protected(const struct reference_score_head *head, uint32_t i) {
    return head->positions[i] < head->sinks || head->positions[i] >= head->recent_from;
}

static bool is_free(const struct reference_score_head *head, uint32_t i) {
    return is_used(head, i) && !is_protected(head, i);
}

static double norm(const double *x, uint32_t count) {
    double sum = 0;
    for (uint32_t i = 0; i < count; i++)
        sum += x[i] * x[i];
    return sqrt(sum);
}

/* ---- window ---- */

static double window_sum(const struct place *at, uint32_t i) {
    double sum = 0;
    for (uint32_t t = 0; t < at->layer->rows; t++)
        sum += at->head->a[t * at->head->slots + i];
    return sum;
}

static double window_variance(const struct place *at, uint32_t i) {
    double mean = window_sum(at, i) / at->layer->rows, sum = 0;
    for (uint32_t t = 0; t < at->layer->rows; t++) {
        double off = at->head->a[t * at->head->slots + i] - mean;
        sum += off * off;
    }
    return sum / at->layer->rows;
}

/* ---- keys ---- */

static void key_difference(const struct place *at) {
    uint32_t dim = at->layer->dim, slots = at->head->slots;
    double *anchor = parity_host(dim * sizeof *anchor);
    for (uint32_t i = 0; i < slots; i++) {
        const double *key = at->head->keys + (size_t)i * dim;
        for (uint32_t c = 0; is_used(at->head, i) && c < dim; c++)
            anchor[c] += key[c] / norm(key, dim);
    }
    for (uint32_t i = 0; i < slots; i++) {
        const double *key = at->head->keys + (size_t)i * dim;
        double dot = 0;
        for (uint32_t c = 0; c < dim; c++)
            dot += key[c] * anchor[c];
        at->head->scores[i] = -dot / norm(key, dim) / norm(anchor, dim);
    }
    free(anchor);
}

/* ---- pooling ---- */

static double pool_one(const struct reference_score_head *head, const double *scores, uint32_t i, int64_t kernel,
    int64_t shift, bool mean) {
    double most = -INFINITY, sum = 0;
    uint32_t count = 0;
    for (uint32_t j = 0; j < head->slots; j++) {
        int64_t off = (int64_t)head->positions[j] - (int64_t)head->positions[i] + shift;
        if (!is_free(head, j) || (j != i && llabs(off) > kernel / 2))
            continue;
        most = scores[j] > most ? scores[j] : most;
        sum += scores[j];
        count++;
    }
    return mean ? sum / count : most;
}

static void pool(const struct reference_score_head *head, int64_t kernel, int64_t shift, bool mean) {
    double *scores = parity_host(head->slots * sizeof *scores);
    for (uint32_t i = 0; i < head->slots; i++)
        scores[i] = head->scores[i];
    for (uint32_t i = 0; i < head->slots; i++) {
        if (is_free(head, i))
            head->scores[i] = pool_one(head, scores, i, kernel, shift, mean);
    }
    free(scores);
}

/* ---- the best ---- */

static bool is_better(const struct reference_score_head *head, uint32_t i, uint32_t j) {
    double a = isnan(head->scores[i]) ? -INFINITY : head->scores[i];
    double b = isnan(head->scores[j]) ? -INFINITY : head->scores[j];
    return a > b || (a == b && head->positions[i] > head->positions[j]);
}

static void protect_best(const struct reference_score_head *head, uint32_t count) {
    bool *best = parity_host(head->slots);
    for (uint32_t i = 0; i < head->slots; i++) {
        uint32_t better = 0;
        for (uint32_t j = 0; j < head->slots; j++)
            better += j != i && is_used(head, j) && is_better(head, j, i);
        best[i] = is_used(head, i) && better < count;
    }
    for (uint32_t i = 0; i < head->slots; i++) {
        if (best[i])
            head->scores[i] = INFINITY;
    }
    free(best);
}

/* ---- stages ---- */

static double slot_score(const struct place *at, const struct score_stage *stage, uint32_t i) {
    const struct reference_score_head *head = at->head;
    uint32_t dim = at->layer->dim;
    switch (stage->kind) {
    case STAGE_POSITION:
        return head->positions[i];
    case STAGE_RANDOM:
        return random_uniform(at->layer->seed, at->layer->layer * at->layer->kv_heads + at->k, head->positions[i], 0);
    case STAGE_SUM:
        return head->sum[i];
    case STAGE_SUM_PER_QUERY:
        return head->sum[i] / ((double)at->layer->seen - head->positions[i]);
    case STAGE_ABOVE:
        return head->above[i];
    case STAGE_WINDOW_SUM:
        return window_sum(at, i);
    case STAGE_WINDOW_SPREAD:
        return window_sum(at, i) / at->layer->rows + (double)stage->x * window_variance(at, i);
    case STAGE_NOISY:
        return head->noisy[i];
    case STAGE_KEY_NORM:
        return -norm(head->keys + (size_t)i * dim, dim);
    case STAGE_TIMES_VALUE_NORM:
        return head->scores[i] * norm(head->values + (size_t)i * dim, dim);
    case STAGE_PROTECT:
        return is_protected(head, i) ? INFINITY : head->scores[i];
    default:
        return head->scores[i];
    }
}

static void head_stage(const struct place *at, const struct score_stage *stage) {
    switch (stage->kind) {
    case STAGE_KEY_DIFFERENCE:
        key_difference(at);
        break;
    case STAGE_POOL_MAX:
        pool(at->head, stage->n, 0, false);
        break;
    case STAGE_PROTECT_BEST:
        protect_best(at->head, at->layer->budget / 2);
        break;
    default:
        for (uint32_t i = 0; i < at->head->slots; i++)
            at->head->scores[i] = slot_score(at, stage, i);
        break;
    }
}

static void layer_mean(struct reference_score_layer *layer) {
    for (uint32_t i = 0; i < layer->heads[0].slots; i++) {
        double sum = 0;
        for (uint32_t k = 0; k < layer->kv_heads; k++)
            sum += layer->heads[k].scores[i];
        for (uint32_t k = 0; k < layer->kv_heads; k++)
            layer->heads[k].scores[i] = sum / layer->kv_heads;
    }
}

/* Scores are floats from stage to stage, and an unused slot has none. */
static void round_scores(struct reference_score_layer *layer) {
    for (uint32_t k = 0; k < layer->kv_heads; k++) {
        struct reference_score_head *head = &layer->heads[k];
        for (uint32_t i = 0; i < head->slots; i++)
            head->scores[i] = is_used(head, i) ? (double)(float)head->scores[i] : NAN;
    }
}

void reference_score(struct reference_score_layer *layer, const struct score_stage *stages, uint32_t count) {
    for (uint32_t s = 0; s < count; s++) {
        if (stages[s].kind == STAGE_LAYER_MEAN) {
            layer_mean(layer);
        } else {
            for (uint32_t k = 0; k < layer->kv_heads; k++) {
                struct place at = {layer, &layer->heads[k], k};
                head_stage(&at, &stages[s]);
            }
        }
        round_scores(layer);
    }
}

/* Adds what one slot of one query head adds to both. */
static void preference_slot(const struct reference_score_layer *layer, const struct reference_score_head *head,
    uint32_t g, uint32_t i, double *entropy, double *variance) {
    double mean = 0, spread = 0;
    for (uint32_t t = 0; t < layer->rows; t++) {
        double p = head->p[((size_t)t * layer->group + g) * head->slots + i];
        mean += p / layer->rows;
        *entropy -= p > 0 ? p * log(p) : 0;
    }
    for (uint32_t t = 0; t < layer->rows; t++) {
        double off = head->p[((size_t)t * layer->group + g) * head->slots + i] - mean;
        spread += off * off / layer->rows;
    }
    *variance += spread;
}

void reference_preference(const struct reference_score_layer *layer, double *entropy, double *variance) {
    *entropy = *variance = 0;
    for (uint32_t k = 0; k < layer->kv_heads; k++) {
        for (uint32_t g = 0; g < layer->group; g++) {
            for (uint32_t i = 0; i < layer->heads[k].slots; i++) {
                if (is_free(&layer->heads[k], i))
                    preference_slot(layer, &layer->heads[k], g, i, entropy, variance);
            }
        }
    }
}
