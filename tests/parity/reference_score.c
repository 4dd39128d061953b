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

/* ---- expected attention ---- */

/* Element (i, j) of the mean rotation over positions first .. first + n - 1. */
static double mean_rotation(const struct reference_score_layer *layer, uint32_t n, uint32_t i, uint32_t j) {
    if (i >= layer->rope_dim || j >= layer->rope_dim)
        return i == j;
    double sum = 0;
    for (uint32_t t = 0; i / 2 == j / 2 && t < n; t++) {
        double angle = ((double)layer->seen + t) * (double)layer->inverse_freq[i / 2];
        sum += i == j ? cos(angle) : i > j ? sin(angle) : -sin(angle);
    }
    return sum / n;
}

/* out [d][d] = turn m turn^T */
static void turn_matrix(const double *turn, const double *m, uint32_t dim, double *out) {
    double *half = parity_host((size_t)dim * dim * sizeof *half);
    for (uint32_t i = 0; i < dim; i++) {
        for (uint32_t j = 0; j < dim; j++) {
            for (uint32_t k = 0; k < dim; k++)
                half[i * dim + j] += turn[i * dim + k] * m[k * dim + j];
        }
    }
    for (uint32_t i = 0; i < dim; i++) {
        for (uint32_t j = 0; j < dim; j++) {
            out[i * dim + j] = 0;
            for (uint32_t k = 0; k < dim; k++)
                out[i * dim + j] += half[i * dim + k] * turn[j * dim + k];
        }
    }
    free(half);
}

static double expected_logit(const struct place *at, const double *mean, const double *covariance, uint32_t i) {
    uint32_t dim = at->layer->dim;
    const double *key = at->head->keys + (size_t)i * dim;
    double linear = 0, square = 0;
    for (uint32_t a = 0; a < dim; a++) {
        linear += key[a] * mean[a];
        for (uint32_t b = 0; b < dim; b++)
            square += key[a] * covariance[a * dim + b] * key[b];
    }
    return linear / sqrt(dim) + square / (2.0 * dim);
}

static bool is_beyond_sinks(const struct reference_score_head *head, uint32_t i) {
    return is_used(head, i) && head->positions[i] >= 4;
}

/* Adds a query head's part of the mean softmax to total [slots]. */
static void expect_head(const struct place *at, uint32_t g, const double *turn, double *total) {
    const struct reference_score_layer *layer = at->layer;
    uint32_t dim = layer->dim, h = at->k * layer->group + g;
    size_t numbers = (size_t)dim * dim;
    double *mean = parity_host(2 * dim * sizeof *mean), *turned = mean + dim;
    double *covariance = parity_host(2 * numbers * sizeof *covariance);
    double *logits = parity_host(at->head->slots * sizeof *logits), most = -INFINITY, sum = 0;
    for (uint32_t i = 0; i < dim; i++)
        mean[i] = layer->mean_sum[h * dim + i] / layer->count;
    for (uint32_t i = 0; i < dim; i++) {
        for (uint32_t j = 0; j < dim; j++) {
            size_t upper = i <= j ? i * dim + j : j * dim + i;
            covariance[i * dim + j] = layer->outer[h * numbers + upper] / layer->count - mean[i] * mean[j];
            turned[i] += turn[i * dim + j] * mean[j];
        }
    }
    turn_matrix(turn, covariance, dim, covariance + numbers);
    for (uint32_t i = 0; i < at->head->slots; i++) {
        logits[i] = is_beyond_sinks(at->head, i) ? expected_logit(at, turned, covariance + numbers, i) : -INFINITY;
        most = logits[i] > most ? logits[i] : most;
    }
    for (uint32_t i = 0; i < at->head->slots; i++)
        sum += is_beyond_sinks(at->head, i) ? exp(logits[i] - most) : 0;
    for (uint32_t i = 0; i < at->head->slots; i++)
        total[i] += is_beyond_sinks(at->head, i) ? exp(logits[i] - most) / sum / layer->group : 0;
    free(mean);
    free(covariance);
    free(logits);
}

static void expected_attention(const struct place *at, const struct score_stage *stage) {
    uint32_t dim = at->layer->dim;
    double *total = parity_host(at->head->slots * sizeof *total);
    double *turn = parity_host((size_t)dim * dim * sizeof *turn);
    for (uint32_t i = 0; i < dim; i++) {
        for (uint32_t j = 0; j < dim; j++)
            turn[i * dim + j] = mean_rotation(at->layer, stage->n, i, j);
    }
    for (uint32_t g = 0; g < at->layer->group; g++)
        expect_head(at, g, turn, total);
    for (uint32_t i = 0; i < at->head->slots; i++)
        at->head->scores[i] = is_beyond_sinks(at->head, i) ? total[i] + (double)stage->x : NAN;
    free(total);
    free(turn);
}

/* ---- what a slot adds to the output ---- */

/* out [D] = x [d] W_h */
static void project(const struct reference_score_layer *layer, uint32_t h, const double *x, double *out) {
    size_t columns = (size_t)layer->kv_heads * layer->group * layer->dim;
    for (uint32_t n = 0; n < layer->width; n++) {
        out[n] = 0;
        for (uint32_t c = 0; c < layer->dim; c++)
            out[n] += x[c] * layer->output[n * columns + (size_t)h * layer->dim + c];
    }
}

static double probability(const struct reference_score_layer *layer, const struct reference_score_head *head,
    uint32_t t, uint32_t g, uint32_t i) {
    return head->p[((size_t)t * layer->group + g) * head->slots + i];
}

static double window_output_norm(const struct reference_score_layer *layer) {
    double *one = parity_host(2 * layer->width * sizeof *one), *sum = one + layer->width, squares = 0;
    for (uint32_t t = 0; t < layer->rows; t++) {
        for (uint32_t n = 0; n < layer->width; n++)
            sum[n] = 0;
        for (uint32_t h = 0; h < layer->kv_heads * layer->group; h++) {
            size_t row = (size_t)t * layer->group + h % layer->group;
            project(layer, h, layer->heads[h / layer->group].outputs + row * layer->dim, one);
            for (uint32_t n = 0; n < layer->width; n++)
                sum[n] += one[n];
        }
        squares += norm(sum, layer->width) * norm(sum, layer->width);
    }
    free(one);
    return sqrt(squares);
}

/* The length over the window of sum over h of p[h,t,i] u_{h,i}, t by t: the same as the double sum over heads. */
static double contribution(const struct reference_score_layer *layer, uint32_t first, uint32_t end, uint32_t i) {
    double *u = parity_host((size_t)(end - first + 1) * layer->width * sizeof *u);
    double *sum = u + (size_t)(end - first) * layer->width, squares = 0;
    for (uint32_t h = first; h < end; h++)
        project(
            layer, h, layer->heads[h / layer->group].values + (size_t)i * layer->dim, u + (h - first) * layer->width);
    for (uint32_t t = 0; t < layer->rows; t++) {
        for (uint32_t n = 0; n < layer->width; n++) {
            sum[n] = 0;
            for (uint32_t h = first; h < end; h++)
                sum[n] += u[(h - first) * layer->width + n] *
                          probability(layer, &layer->heads[h / layer->group], t, h % layer->group, i);
        }
        squares += norm(sum, layer->width) * norm(sum, layer->width);
    }
    free(u);
    return sqrt(squares);
}

static void laprox(struct reference_score_layer *layer, bool whole) {
    double output = window_output_norm(layer);
    for (uint32_t k = 0; k < layer->kv_heads; k++) {
        uint32_t first = whole ? 0 : k * layer->group;
        uint32_t end = whole ? layer->kv_heads * layer->group : first + layer->group;
        for (uint32_t i = 0; i < layer->heads[k].slots; i++)
            layer->heads[k].scores[i] =
                is_used(&layer->heads[k], i) ? contribution(layer, first, end, i) / output : NAN;
    }
}

/* 1 - p, corrected by what the stored p of the row sum to, as far as rounding to f16 can explain it. */
static double others(const struct place *at, uint32_t t, uint32_t g, uint32_t i) {
    double sum = -1, p = probability(at->layer, at->head, t, g, i), bound = p / 2048;
    for (uint32_t j = 0; j < at->head->slots; j++)
        sum += is_used(at->head, j) ? probability(at->layer, at->head, t, g, j) : 0;
    sum = sum > bound ? bound : sum < -bound ? -bound : sum;
    return fmax(1 - p + sum, 1e-6);
}

static double drop_error(const struct place *at, double smoothing, uint32_t i) {
    const struct reference_score_layer *layer = at->layer;
    double *off = parity_host((layer->dim + layer->width) * sizeof *off), smooth = 0;
    for (uint32_t t = 0; t < layer->rows; t++) {
        double error = 0;
        for (uint32_t g = 0; g < layer->group; g++) {
            for (uint32_t c = 0; c < layer->dim; c++)
                off[c] = at->head->outputs[((size_t)t * layer->group + g) * layer->dim + c] -
                         at->head->values[(size_t)i * layer->dim + c];
            project(layer, at->k * layer->group + g, off, off + layer->dim);
            error += probability(layer, at->head, t, g, i) / others(at, t, g, i) * norm(off + layer->dim, layer->width);
        }
        smooth = t == 0 ? error : smoothing * error + (1 - smoothing) * smooth;
    }
    free(off);
    return smooth;
}

static double output_l1(const struct place *at, uint32_t i) {
    const struct reference_score_layer *layer = at->layer;
    double *u = parity_host(layer->width * sizeof *u), sum = 0;
    for (uint32_t g = 0; g < layer->group; g++) {
        project(layer, at->k * layer->group + g, at->head->values + (size_t)i * layer->dim, u);
        for (uint32_t n = 0; n < layer->width; n++)
            sum += fabs(u[n]);
    }
    free(u);
    return sum / layer->group;
}

/* ---- the adaptive kernel ---- */

/* Sum of the positions of the free slots that fewer than count others beat: by a, then by later position. */
static double sum_of_best(const struct place *at, const double *a, uint32_t count) {
    const struct reference_score_head *head = at->head;
    double sum = 0;
    for (uint32_t i = 0; i < head->slots; i++) {
        uint32_t better = 0;
        for (uint32_t j = 0; j < head->slots; j++)
            better += is_free(head, j) && (a[j] > a[i] || (a[j] == a[i] && head->positions[j] > head->positions[i]));
        sum += is_free(head, i) && better < count ? (double)head->positions[i] : 0;
    }
    return sum;
}

static void pool_adaptive(const struct place *at) {
    const struct reference_score_head *head = at->head;
    uint32_t half = at->layer->rows / 2, usable = 0, protected = 0;
    for (uint32_t i = 0; i < head->slots; i++) {
        usable += is_free(head, i);
        protected += is_used(head, i) && is_protected(head, i);
    }
    if (half == 0 || usable == 0 || at->layer->budget <= protected) {
        pool(head, 5, 0, true);
        return;
    }
    uint32_t count = at->layer->budget - protected < usable ? at->layer->budget - protected : usable;
    double move = 0;
    for (uint32_t t = 0; t < 2 * half; t++)
        move += (t < half ? 1 : -1) * sum_of_best(at, head->a + (size_t)t * head->slots, count);
    move = move / half / count;
    double shift = move > 0 ? floor(move / 2000) : floor(move / 2000) + 1;
    pool(head, (int64_t)fmax(5, 2 * floor(fabs(move) / 2000) + 1), (int64_t)shift, true);
}

/* ---- stages ---- */

static double slot_score(const struct place *at, const struct score_stage *stage, uint32_t i) {
    const struct reference_score_head *head = at->head;
    uint32_t dim = at->layer->dim;
    switch (stage->kind) {
    case STAGE_POSITION:
        return head->positions[i];
    case STAGE_RANDOM:
        return random_uniform(at->layer->seed,
            at->layer->layer * at->layer->model_heads + at->layer->first_head + at->k, head->positions[i], 0);
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
        return isinf(head->scores[i]) ? head->scores[i] : head->scores[i] * norm(head->values + (size_t)i * dim, dim);
    case STAGE_DROP_ERROR:
        return is_used(head, i) ? drop_error(at, (double)stage->x, i) : NAN;
    case STAGE_TIMES_OUTPUT_NORM:
        return isinf(head->scores[i]) ? head->scores[i] : (head->scores[i] + (double)stage->x) * output_l1(at, i);
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
    case STAGE_EXPECTED_ATTENTION:
        expected_attention(at, stage);
        break;
    case STAGE_POOL_ADAPTIVE:
        pool_adaptive(at);
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
        } else if (stages[s].kind == STAGE_LAPROX || stages[s].kind == STAGE_LAPROX_HEAD) {
            laprox(layer, stages[s].kind == STAGE_LAPROX);
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
