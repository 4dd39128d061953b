/* SPDX-License-Identifier: Apache-2.0
 *
 * Scores from keys, and the norm of values. Keys are read a page at a time as a block, one slot a lane.
 */
#include "engine/cpu/score.h"
#include "engine/cpu/vector.h"

#include <math.h>
#include <string.h>

void score_key_norm(const struct score_unit *unit, const struct score_stage *stage, uint32_t head) {
    const struct score_head *at = &unit->layer->heads[head];
    float *keys = unit->scratch->blocks;
    (void)stage;
    for (uint32_t slot = 0; slot < at->view.slots; slot += KV_PAGE_SLOTS) {
        double squares[SCORE_LANES];
        score_page_keys(unit, &at->view, slot, keys);
        unit->kernels->squares(keys, unit->pool->layout.head_dim, squares);
        for (uint32_t lane = 0; lane < score_page_slots(&at->view, slot); lane++)
            at->scores[slot + lane] = (float)-sqrt(squares[lane]);
    }
}

enum { ANCHOR_PAGES = 32 /* that are summed in float before their sum goes on in double */ };

/* Adds the normalised keys of a page lane by lane to sums [d][16], and notes their norms. A key of no length points
 * nowhere; lanes without a slot are cleared, as zero times what they hold need not be zero. */
static void add_directions(const struct score_unit *unit, const struct kv_head_view *view, const int32_t *positions,
    uint32_t slot, float *keys, double *norms, float *sums) {
    uint32_t dim = unit->pool->layout.head_dim;
    double squares[SCORE_LANES];
    float factors[SCORE_LANES];
    unit->kernels->squares(keys, dim, squares);
    for (uint32_t lane = 0; lane < SCORE_LANES; lane++) {
        bool counts = lane < score_page_slots(view, slot) && positions[slot + lane] != KV_NO_POSITION;
        double norm = counts ? sqrt(squares[lane]) : 0;
        factors[lane] = norm > 0 ? (float)(1 / norm) : 0;
        for (uint32_t c = 0; !counts && c < dim; c++)
            keys[c * SCORE_LANES + lane] = 0;
        if (slot + lane < view->slots)
            norms[slot + lane] = norm;
    }
    unit->kernels->add_scaled(keys, factors, dim, sums);
}

static void flush_sums(uint32_t dim, float *sums, double *anchor) {
    for (uint32_t c = 0; c < dim; c++) {
        for (uint32_t lane = 0; lane < SCORE_LANES; lane++)
            anchor[c] += (double)sums[c * SCORE_LANES + lane];
    }
    memset(sums, 0, (size_t)dim * SCORE_LANES * sizeof *sums);
}

/* The sum of the normalised keys of a head, of length 1: its direction is all that matters. */
static void find_anchor(const struct score_unit *unit, uint32_t head, double *norms, float *direction) {
    const struct kv_head_view *view = &unit->layer->heads[head].view;
    uint32_t dim = unit->pool->layout.head_dim;
    float *keys = unit->scratch->blocks, *sums = keys + (size_t)dim * SCORE_LANES;
    double anchor[ATTEND_DIM_MAX] = {0}, length = 0;
    memset(sums, 0, (size_t)dim * SCORE_LANES * sizeof *sums);
    for (uint32_t slot = 0; slot < view->slots; slot += KV_PAGE_SLOTS) {
        score_page_keys(unit, view, slot, keys);
        add_directions(unit, view, unit->scratch->slots[head].positions, slot, keys, norms, sums);
        if (slot / KV_PAGE_SLOTS % ANCHOR_PAGES == ANCHOR_PAGES - 1)
            flush_sums(dim, sums, anchor);
    }
    flush_sums(dim, sums, anchor);
    for (uint32_t c = 0; c < dim; c++)
        length += anchor[c] * anchor[c];
    for (uint32_t c = 0; c < dim; c++)
        direction[c] = (float)(length > 0 ? anchor[c] / sqrt(length) : 0);
}

void score_key_difference(const struct score_unit *unit, const struct score_stage *stage, uint32_t head) {
    const struct score_head *at = &unit->layer->heads[head];
    uint32_t dim = unit->pool->layout.head_dim;
    float *keys = unit->scratch->blocks, direction[ATTEND_DIM_MAX];
    double *norms = unit->scratch->wide;
    (void)stage;
    find_anchor(unit, head, norms, direction);
    for (uint32_t slot = 0; slot < at->view.slots; slot += KV_PAGE_SLOTS) {
        double dots[SCORE_LANES];
        score_page_keys(unit, &at->view, slot, keys);
        unit->kernels->exact_products(keys, SCORE_LANES, direction, dim, 1, 1, dim, dots);
        for (uint32_t lane = 0; lane < score_page_slots(&at->view, slot); lane++)
            at->scores[slot + lane] = (float)(norms[slot + lane] > 0 ? -dots[lane] / norms[slot + lane] : 0);
    }
}

/* ---- expected attention ---- */

enum { MOMENTS_FROM = 4 /* first position that moments count, and that the softmax is over */ };

/* Mean of the turns of one pair over n positions from `first`: the sum of a geometric series of e^(i angle). */
static void mean_turn(double frequency, uint32_t first, uint32_t n, double *cosine, double *sine) {
    double half = sin(frequency / 2), middle = frequency * ((double)first + ((double)n - 1) / 2);
    double length = half != 0 ? sin(frequency * (double)n / 2) / ((double)n * half) : 1;
    *cosine = cos(middle) * length;
    *sine = sin(middle) * length;
}

/* What the queries of one query head are expected to be. */
struct expected_query {
    float *mean;       /* [d] turned, over sqrt(d) */
    float *covariance; /* [d][d] turned, over 2d; lower triangle, what mirrors it added to it */
};

/* Turns the pairs of x by the mean turns: x is count vectors, channel c of vector v at x[c * stride + v * next]. */
static void turn_pairs(
    const struct score_unit *unit, const double *turns, double *x, size_t stride, size_t next, uint32_t count) {
    for (uint32_t pair = 0; pair < unit->layer->rope->dim / 2; pair++) {
        double cosine = turns[2 * pair], sine = turns[2 * pair + 1];
        for (uint32_t v = 0; v < count; v++) {
            double *even = x + 2 * pair * stride + v * next, *odd = even + stride;
            double turned = *even * cosine - *odd * sine;
            *odd = *even * sine + *odd * cosine;
            *even = turned;
        }
    }
}

static void expect_query(const struct score_unit *unit, uint32_t query_head, const double *turns, double *square,
    const struct expected_query *query) {
    const struct query_moments *moments = &unit->layer->moments;
    uint32_t dim = unit->pool->layout.head_dim, count = *moments->count;
    const double *sum = moments->sum + (size_t)query_head * dim;
    const double *outer = moments->outer + (size_t)query_head * dim * dim;
    double mean[ATTEND_DIM_MAX], part = count > 0 ? 1 / (double)count : 0;
    for (uint32_t i = 0; i < dim; i++)
        mean[i] = sum[i] * part;
    for (uint32_t i = 0; i < dim; i++) {
        for (uint32_t j = i; j < dim; j++)
            square[i * dim + j] = square[j * dim + i] = outer[i * dim + j] * part - mean[i] * mean[j];
    }
    turn_pairs(unit, turns, mean, 1, 0, 1);
    turn_pairs(unit, turns, square, dim, 1, dim);
    turn_pairs(unit, turns, square, 1, dim, dim);
    for (uint32_t i = 0; i < dim; i++) {
        query->mean[i] = (float)(mean[i] / sqrt(dim));
        for (uint32_t j = 0; j < dim; j++) {
            double both = j < i ? square[i * dim + j] + square[j * dim + i] : square[i * dim + j];
            query->covariance[i * dim + j] = j <= i ? (float)(both / (2 * (double)dim)) : 0;
        }
    }
}

/* Logits of all slots under one expected query: wide [slots]. */
static void expected_logits(const struct score_unit *unit, const struct kv_head_view *view,
    const struct expected_query *query, float *keys, double *logits) {
    uint32_t dim = unit->pool->layout.head_dim;
    float *products = keys + (size_t)dim * SCORE_LANES;
    for (uint32_t slot = 0; slot < view->slots; slot += KV_PAGE_SLOTS) {
        double mean[SCORE_LANES], square[SCORE_LANES];
        score_page_keys(unit, view, slot, keys);
        unit->kernels->exact_products(keys, SCORE_LANES, query->mean, dim, 1, 1, dim, mean);
        unit->kernels->products(keys, SCORE_LANES, query->covariance, dim, 1, dim, dim, true, products);
        unit->kernels->dots(keys, products, dim, square);
        for (uint32_t lane = 0; lane < score_page_slots(view, slot); lane++)
            logits[slot + lane] = mean[lane] + square[lane];
    }
}

/* Adds `part` times the softmax of the logits over slots beyond the sinks to total; weights [slots] is space. */
static void add_softmax(const struct score_unit *unit, const int32_t *positions, uint32_t slots, const double *logits,
    double part, float *weights, double *total) {
    double most = -INFINITY, sum = 0;
    for (uint32_t slot = 0; slot < slots; slot++) {
        if (positions[slot] >= MOMENTS_FROM && positions[slot] != KV_NO_POSITION && logits[slot] > most)
            most = logits[slot];
    }
    for (uint32_t slot = 0; slot < slots; slot++) {
        bool counts = positions[slot] >= MOMENTS_FROM && positions[slot] != KV_NO_POSITION;
        weights[slot] = counts ? (float)(logits[slot] - most) : -INFINITY;
    }
    unit->cpu->vector->exponential(weights, slots, weights);
    for (uint32_t slot = 0; slot < slots; slot++)
        sum += (double)weights[slot];
    for (uint32_t slot = 0; slot < slots; slot++)
        total[slot] += (double)weights[slot] * part / sum;
}

void score_expected_attention(const struct score_unit *unit, const struct score_stage *stage, uint32_t head) {
    const struct score_head *at = &unit->layer->heads[head];
    const struct rope_params *rope = unit->layer->rope;
    const int32_t *positions = unit->scratch->slots[head].positions;
    uint32_t dim = unit->pool->layout.head_dim, slots = at->view.slots;
    double turns[ATTEND_DIM_MAX], *square = unit->scratch->square;
    double *total = unit->scratch->wide, *logits = total + slots;
    float *keys = unit->scratch->blocks;
    struct expected_query query = {.covariance = keys + (size_t)2 * dim * SCORE_LANES};
    query.mean = query.covariance + (size_t)dim * dim;
    for (uint32_t pair = 0; pair < rope->dim / 2; pair++)
        mean_turn((double)rope->inverse_freq[pair], unit->layer->seen, stage->n > 0 ? stage->n : 1, &turns[2 * pair],
            &turns[2 * pair + 1]);
    for (uint32_t slot = 0; slot < slots; slot++)
        total[slot] = 0;
    for (uint32_t g = 0; g < unit->group; g++) {
        expect_query(unit, head * unit->group + g, turns, square, &query);
        expected_logits(unit, &at->view, &query, keys, logits);
        add_softmax(unit, positions, slots, logits, 1 / (double)unit->group, unit->scratch->near_scores, total);
    }
    for (uint32_t slot = 0; slot < slots; slot++)
        at->scores[slot] = positions[slot] < MOMENTS_FROM ? NAN : (float)(total[slot] + (double)stage->x);
}

void score_times_value_norm(const struct score_unit *unit, const struct score_stage *stage, uint32_t head) {
    const struct score_head *at = &unit->layer->heads[head];
    float *values = unit->scratch->blocks;
    (void)stage;
    for (uint32_t slot = 0; slot < at->view.slots; slot += KV_PAGE_SLOTS) {
        double squares[SCORE_LANES];
        score_page_values(unit, &at->view, slot, values);
        unit->kernels->squares(values, unit->pool->layout.head_dim, squares);
        for (uint32_t lane = 0; lane < score_page_slots(&at->view, slot); lane++) {
            float *score = &at->scores[slot + lane];
            *score = isinf(*score) ? *score : (float)((double)*score * sqrt(squares[lane])); /* protected stay so */
        }
    }
}
