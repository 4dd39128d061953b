/* SPDX-License-Identifier: Apache-2.0
 *
 * Moments of queries before rotation. The product of two floats is exact in double, so every way of adding them in
 * order of position gives the same bits.
 */
#include "engine/cpu/cpu.h"

/* The first tokens draw attention for no reason of their content; policies leave them out (kvpress). */
enum { POSITIONS_LEFT_OUT = 4 };

struct moments_job {
    const struct kv_batch *batch;
    const struct query_moments *moments;
    const float *qkv;
    uint32_t heads;
};

/* The first row of an item that counts. */
static uint32_t first_row(const struct kv_item *item) {
    uint32_t left_out = item->position < POSITIONS_LEFT_OUT ? POSITIONS_LEFT_OUT - item->position : 0;
    return left_out < item->rows ? left_out : item->rows;
}

static void add_row(const float *query, uint32_t dim, double *sum, double *outer) {
    for (uint32_t i = 0; i < dim; i++) {
        double a = (double)query[i];
        sum[i] += a;
        for (uint32_t j = i; j < dim; j++)
            outer[(size_t)i * dim + j] += a * (double)query[j];
    }
}

static void moments_work(void *context, uint32_t chunk, uint32_t thread) {
    const struct moments_job *job = context;
    const struct kv_layout *layout = &job->batch->pool->layout;
    uint32_t item_number = chunk / job->heads, head = chunk % job->heads, dim = layout->head_dim;
    const struct kv_item *item = &job->batch->items[item_number];
    const struct query_moments *to = &job->moments[item_number];
    size_t stride = (size_t)(job->heads + 2 * layout->kv_heads) * dim;
    (void)thread;
    if (to->sum == NULL)
        return;
    uint32_t first = first_row(item);
    if (head == 0)
        *to->count += item->rows - first;
    for (uint32_t row = first; row < item->rows; row++) {
        const float *query = job->qkv + (item->first_row + row) * stride + (size_t)head * dim;
        add_row(query, dim, to->sum + (size_t)head * dim, to->outer + (size_t)head * dim * dim);
    }
}

void cpu_query_moments(struct backend *backend, const struct kv_batch *batch, uint32_t heads, const float *qkv,
    const struct query_moments *moments) {
    struct moments_job job = {batch, moments, qkv, heads};
    thread_pool_run(cpu_backend(backend)->threads, batch->items_count * heads, moments_work, &job);
}
