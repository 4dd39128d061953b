/* SPDX-License-Identifier: Apache-2.0
 *
 * Scores from what attention recorded, and cake's preference of layers.
 */
#include "engine/cpu/score.h"

#include "engine/cpu/score_state.h"

#include <math.h>
#include <stdlib.h>

void score_sum(const struct score_unit *unit, const struct score_stage *stage, uint32_t head) {
    const struct score_head *at = &unit->layer->heads[head];
    (void)stage;
    const uint32_t *low = at->statistics.sum;
    unit->kernels->sums(low, low + at->statistics.capacity, at->view.slots, at->scores);
}

void score_noisy(const struct score_unit *unit, const struct score_stage *stage, uint32_t head) {
    const struct score_head *at = &unit->layer->heads[head];
    (void)stage;
    const uint32_t *low = at->statistics.noisy;
    unit->kernels->sums(low, low + at->statistics.capacity, at->view.slots, at->scores);
}

void score_sum_per_query(const struct score_unit *unit, const struct score_stage *stage, uint32_t head) {
    const struct score_head *at = &unit->layer->heads[head];
    (void)stage;
    const uint32_t *low = at->statistics.sum;
    unit->kernels->sums_per_query(low, low + at->statistics.capacity, unit->scratch->slots[head].positions,
        unit->layer->seen, at->view.slots, at->scores);
}

void score_above(const struct score_unit *unit, const struct score_stage *stage, uint32_t head) {
    const struct score_head *at = &unit->layer->heads[head];
    (void)stage;
    unit->kernels->above(at->statistics.above, at->view.slots, at->scores);
}

/* 256 queries that gave a slot everything add up to 2^32, which a sum holds as 0: such slots get `full`. */
static void score_full_sums(const struct score_head *at, float full) {
    const struct kv_statistics *statistics = &at->statistics;
    if ((uint64_t)statistics->window << STATISTIC_FRACTION_BITS <= UINT32_MAX)
        return;
    for (uint32_t slot = 0; slot < at->view.slots; slot++) {
        if (statistics->window_sum[slot] == 0 && statistics->window_rows[slot] != 0)
            at->scores[slot] = full;
    }
}

void score_window_sum(const struct score_unit *unit, const struct score_stage *stage, uint32_t head) {
    const struct score_head *at = &unit->layer->heads[head];
    (void)stage;
    unit->kernels->window_sums(at->statistics.window_sum, at->view.slots, at->scores);
    score_full_sums(at, (float)at->statistics.window);
}

void score_window_spread(const struct score_unit *unit, const struct score_stage *stage, uint32_t head) {
    const struct score_head *at = &unit->layer->heads[head];
    const struct kv_statistics *statistics = &at->statistics;
    unit->kernels->spread(statistics->window_rows, score_window_rows(unit, statistics), statistics->capacity,
        statistics->window_sum, stage->x, at->view.slots, at->scores);
    score_full_sums(at, 1); /* the mean, without any variance */
}

/* Heads are added in ascending order; every head gets the same mean. */
void score_layer_mean(const struct score_unit *unit, const struct score_stage *stage, uint32_t head) {
    const struct score_head *heads = unit->layer->heads;
    uint32_t count = unit->pool->layout.kv_heads;
    double *total = unit->scratch->wide;
    (void)stage;
    (void)head;
    for (uint32_t slot = 0; slot < heads[0].view.slots; slot++)
        total[slot] = (double)heads[0].scores[slot];
    for (uint32_t k = 1; k < count; k++) {
        for (uint32_t slot = 0; slot < heads[0].view.slots; slot++)
            total[slot] += (double)heads[k].scores[slot];
    }
    for (uint32_t k = 0; k < count; k++) {
        for (uint32_t slot = 0; slot < heads[0].view.slots; slot++)
            heads[k].scores[slot] = (float)(total[slot] / (double)count);
    }
}

/* ---- window_preference ---- */

struct preference_job {
    const struct score_kernels *kernels;
    const struct kv_pool *pool;
    const struct score_layer *layers;
    uint32_t group;
    double *entropy, *variance;
};

/* Sixteen slots of one query head: adds the entropy and the variance of those that count. */
static void preference_block(const struct preference_job *job, const uint16_t *rows, uint32_t rows_count, size_t stride,
    const bool *counts, double *entropy, double *variance) {
    double sum[KV_PAGE_SLOTS] = {0}, squares[KV_PAGE_SLOTS] = {0};
    float p[KV_PAGE_SLOTS];
    for (uint32_t row = 0; row < rows_count; row++) {
        job->kernels->halves(rows + row * stride, p);
        for (uint32_t lane = 0; lane < KV_PAGE_SLOTS; lane++) {
            sum[lane] += (double)p[lane];
            squares[lane] += (double)p[lane] * (double)p[lane];
            if (counts[lane] && p[lane] > 0)
                *entropy -= (double)p[lane] * log((double)p[lane]);
        }
    }
    for (uint32_t lane = 0; lane < KV_PAGE_SLOTS; lane++) {
        double mean = sum[lane] / rows_count, spread = squares[lane] / rows_count - mean * mean;
        if (counts[lane] && spread > 0)
            *variance += spread;
    }
}

static void preference_head(const struct preference_job *job, const struct score_layer *layer, uint32_t head,
    double *entropy, double *variance) {
    const struct score_head *at = &layer->heads[head];
    const struct kv_statistics *statistics = &at->statistics;
    uint32_t rows = layer->seen < statistics->window ? layer->seen : statistics->window;
    size_t stride = (size_t)job->group * statistics->capacity;
    for (uint32_t slot = 0; slot < at->view.slots; slot += KV_PAGE_SLOTS) {
        char *page = kv_pool_page(job->pool, at->view.pages[slot / KV_PAGE_SLOTS]);
        const int32_t *positions = kv_page_positions(&job->pool->layout, page);
        bool counts[KV_PAGE_SLOTS];
        for (uint32_t lane = 0; lane < KV_PAGE_SLOTS; lane++) {
            uint32_t position = (uint32_t)positions[lane];
            counts[lane] = slot + lane < at->view.slots && position != KV_NO_POSITION && position >= at->sinks &&
                           position < at->recent_from;
        }
        for (uint32_t g = 0; g < job->group; g++)
            preference_block(job, statistics->head_rows + (size_t)g * statistics->capacity + slot, rows, stride, counts,
                entropy, variance);
    }
}

static void preference_work(void *context, uint32_t chunk, uint32_t thread) {
    const struct preference_job *job = context;
    double entropy = 0, variance = 0;
    (void)thread;
    for (uint32_t head = 0; head < job->pool->layout.kv_heads; head++)
        preference_head(job, &job->layers[chunk], head, &entropy, &variance);
    job->entropy[chunk] = entropy;
    job->variance[chunk] = variance;
}

void cpu_window_preference(struct backend *backend, const struct kv_pool *pool, const struct score_layer *layers,
    uint32_t count, uint32_t heads, double *entropy, double *variance) {
    struct cpu_backend *cpu = cpu_backend(backend);
    struct preference_job job = {cpu->score, pool, layers, heads / pool->layout.kv_heads, entropy, variance};
    if (count > 0)
        thread_pool_run(cpu->threads, count, preference_work, &job);
}
