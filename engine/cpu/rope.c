/* SPDX-License-Identifier: Apache-2.0
 *
 * Rotary position embedding and the appending of new keys and values to pages.
 *
 * Angles and their sines and cosines are computed in double and rounded once, so that a position's turn is the same
 * everywhere. All layers of a step use the same positions: the turns of the last batch are kept by row, for global and
 * for sliding layers.
 */
#include "engine/cpu/attend.h"
#include "engine/cpu/vector.h"

#include <stdlib.h>
#include <string.h>

enum { ROPE_ROWS_PER_CHUNK = 16 };

/* turns [rows][2 * dim]: cos, cos, ... and -sin, sin, ... of each pair (vector.h, rotate). */
struct rope_table {
    uint32_t dim;
    uint32_t rows;       /* capacity */
    float *inverse_freq; /* [dim / 2] that the turns were computed with */
    uint32_t *positions; /* [rows] */
    float *turns;
};

struct rope_job {
    struct cpu_backend *cpu;
    const struct kv_batch *batch;
    const struct rope_params *rope;
    struct rope_table *table; /* NULL: compute each turn again */
    uint32_t heads;
    float *qkv;
};

void rope_table_free(struct rope_table *table) {
    if (table == NULL)
        return;
    free(table->inverse_freq);
    free(table->positions);
    free(table->turns);
    free(table);
}

static struct rope_table *table_create(const struct rope_params *rope, uint32_t rows) {
    struct rope_table *table = calloc(1, sizeof *table);
    if (table == NULL)
        return NULL;
    table->dim = rope->dim;
    table->rows = rows;
    table->inverse_freq = malloc(rope->dim / 2 * sizeof(float) + 1);
    table->positions = malloc(rows * sizeof(uint32_t));
    table->turns = malloc((size_t)rows * 2 * rope->dim * sizeof(float) + 1);
    if (table->inverse_freq == NULL || table->positions == NULL || table->turns == NULL) {
        rope_table_free(table);
        return NULL;
    }
    memcpy(table->inverse_freq, rope->inverse_freq, rope->dim / 2 * sizeof(float));
    memset(table->positions, 0xff, rows * sizeof(uint32_t)); /* no token has this position */
    return table;
}

static bool table_serves(const struct rope_table *table, const struct rope_params *rope, uint32_t rows) {
    return table != NULL && table->rows >= rows && table->dim == rope->dim &&
           memcmp(table->inverse_freq, rope->inverse_freq, rope->dim / 2 * sizeof(float)) == 0;
}

/* A table for rows rows of these frequencies: a kept one if it fits. NULL when there is no memory. */
static struct rope_table *table_get(struct cpu_backend *cpu, const struct rope_params *rope, uint32_t rows) {
    struct attend_scratch *scratch = attend_scratch_get(cpu);
    if (scratch == NULL)
        return NULL;
    for (uint32_t i = 0; i < ROPE_TABLES; i++)
        if (table_serves(scratch->rope[i], rope, rows))
            return scratch->rope[i];
    struct rope_table **oldest = &scratch->rope[scratch->rope_oldest];
    scratch->rope_oldest = (scratch->rope_oldest + 1) % ROPE_TABLES;
    rope_table_free(*oldest);
    *oldest = table_create(rope, rows);
    return *oldest;
}

void rope_turn(const struct rope_params *rope, uint32_t position, float *turn) {
    for (uint32_t pair = 0; pair < rope->dim / 2; pair++) {
        double angle = (double)position * (double)rope->inverse_freq[pair];
        float cosine = (float)cos(angle), sine = (float)sin(angle);
        turn[2 * pair] = turn[2 * pair + 1] = cosine;
        turn[rope->dim + 2 * pair] = -sine;
        turn[rope->dim + 2 * pair + 1] = sine;
    }
}

/* The turn of a row; space is used when nothing is kept. Each row is touched by one thread only. */
static const float *turn_get(const struct rope_job *job, uint32_t row, uint32_t position, float *space) {
    if (job->table == NULL) {
        rope_turn(job->rope, position, space);
        return space;
    }
    float *turn = job->table->turns + (size_t)row * 2 * job->rope->dim;
    if (job->table->positions[row] != position) {
        rope_turn(job->rope, position, turn);
        job->table->positions[row] = position;
    }
    return turn;
}

static void key_store(const struct kv_layout *layout, const void *key, char *page, uint32_t place) {
    if (layout->format == KV_F32) {
        const float *from = key;
        float *to = (float *)page + place;
        for (uint32_t channel = 0; channel < layout->head_dim; channel++)
            to[(size_t)channel * KV_PAGE_SLOTS] = from[channel];
    } else {
        const uint16_t *from = key;
        uint16_t *to = (uint16_t *)page + place;
        for (uint32_t channel = 0; channel < layout->head_dim; channel++)
            to[(size_t)channel * KV_PAGE_SLOTS] = from[channel];
    }
}

/* One token: rotates its queries and keys, stores its keys, values and position in every KV head. */
static void token_append(const struct rope_job *job, uint32_t item, uint32_t token) {
    const struct kv_batch *batch = job->batch;
    const struct kv_layout *layout = &batch->pool->layout;
    const struct attend_format_kernels *format = &job->cpu->attend->formats[layout->format];
    uint32_t dim = layout->head_dim, pairs = job->rope->dim / 2;
    uint32_t row = batch->items[item].first_row + token, position = batch->items[item].position + token;
    float space[2 * ATTEND_DIM_MAX], narrow[ATTEND_DIM_MAX];
    const float *turn = turn_get(job, row, position, space);
    float *queries = job->qkv + (size_t)row * (job->heads + 2 * layout->kv_heads) * dim;
    float *keys = queries + (size_t)job->heads * dim, *values = keys + (size_t)layout->kv_heads * dim;
    for (uint32_t head = 0; head < job->heads + layout->kv_heads; head++) /* keys follow the queries */
        job->cpu->vector->rotate(queries + (size_t)head * dim, turn, pairs, queries + (size_t)head * dim);
    for (uint32_t head = 0; head < layout->kv_heads; head++) {
        const struct kv_head_view *view = &batch->views[(size_t)item * layout->kv_heads + head];
        uint32_t slot = view->first_slot + token, place = slot % KV_PAGE_SLOTS;
        char *page = kv_pool_page(batch->pool, view->pages[slot / KV_PAGE_SLOTS]);
        format->narrow(keys + (size_t)head * dim, dim, narrow);
        key_store(layout, narrow, page, place);
        format->narrow(values + (size_t)head * dim, dim,
            kv_page_values(layout, page) + (size_t)place * dim * kv_number_bytes(layout->format));
        kv_page_positions(layout, page)[place] = (int32_t)position;
    }
}

/* Rows first to end, counted over all items in order. */
static void rope_part(void *context, uint32_t first, uint32_t end, uint32_t thread) {
    const struct rope_job *job = context;
    uint32_t left = end - first;
    (void)thread;
    for (uint32_t item = 0; left > 0; item++) {
        uint32_t rows = job->batch->items[item].rows;
        for (; first < rows && left > 0; first++, left--)
            token_append(job, item, first);
        first -= rows < first ? rows : first;
    }
}

void cpu_rope_and_append(
    struct backend *backend, const struct kv_batch *batch, const struct rope_params *rope, uint32_t heads, float *qkv) {
    uint32_t rows = 0, rows_end = 0;
    for (uint32_t item = 0; item < batch->items_count; item++) {
        uint32_t end = batch->items[item].first_row + batch->items[item].rows;
        rows += batch->items[item].rows;
        rows_end = end > rows_end ? end : rows_end;
    }
    if (rows == 0)
        return;
    struct rope_job job = {
        .cpu = cpu_backend(backend),
        .batch = batch,
        .rope = rope,
        .table = table_get(cpu_backend(backend), rope, rows_end),
        .heads = heads,
        .qkv = qkv,
    };
    cpu_run_rows(job.cpu, rows, ROPE_ROWS_PER_CHUNK, rope_part, &job);
}
