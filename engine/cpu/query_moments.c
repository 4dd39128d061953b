/* SPDX-License-Identifier: Apache-2.0
 *
 * Moments of queries before rotation. The product of two floats is exact in double, so every way of adding them in
 * order of position gives the same bits.
 */
#include "engine/cpu/statistics.h"

#include <string.h>

/* The first tokens draw attention for no reason of their content; policies leave them out (kvpress). */
enum { POSITIONS_LEFT_OUT = 4 };

struct moments_job {
    const struct statistics_kernels *kernels;
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

/* Rows that are turned into doubles at a time, `stride` apart: the next multiple of 16. */
enum { ROWS = 32 };

/* The next queries of one head: q [count][stride], zero beyond their dim numbers. */
static void widen_rows(
    const float *from, size_t from_stride, uint32_t count, uint32_t dim, uint32_t stride, double *q) {
    for (uint32_t row = 0; row < count; row++, from += from_stride, q += stride) {
        for (uint32_t i = 0; i < dim; i++)
            q[i] = (double)from[i];
        for (uint32_t i = dim; i < stride; i++)
            q[i] = 0;
    }
}

/* Rows i .. i + 3 of outer from their diagonal on. The kernel takes whole vectors of four rows: those that reach below
 * the diagonal or past the last column go by way of a copy. */
static void add_products(const struct statistics_kernels *kernels, const double *q, uint32_t count, uint32_t i,
    uint32_t dim, double *outer) {
    double part[4][16];
    uint32_t stride = attend_stride(dim);
    uint32_t whole = (i + 4 + 15) / 16 * 16, rows = dim - i < 4 ? dim - i : 4;
    uint32_t vectors = rows == 4 && dim > whole ? (dim - whole) / 16 : 0;
    if (vectors > 0)
        kernels->products(q + i, q + whole, stride, count, vectors, outer + (size_t)i * dim + whole, dim);
    for (uint32_t column = i / 16 * 16; column < dim; column += 16) {
        if (vectors > 0 && column == whole)
            column += 16 * vectors;
        if (column >= dim)
            break;
        uint32_t width = dim - column < 16 ? dim - column : 16;
        memset(part, 0, sizeof part);
        for (uint32_t k = 0; k < rows; k++)
            memcpy(part[k], outer + (size_t)(i + k) * dim + column, width * sizeof(double));
        kernels->products(q + i, q + column, stride, count, 1, part[0], 16);
        for (uint32_t k = 0; k < rows; k++) {
            uint32_t from = i + k > column ? i + k - column : 0;
            if (from < width)
                memcpy(outer + (size_t)(i + k) * dim + column + from, part[k] + from, (width - from) * sizeof(double));
        }
    }
}

static void add_rows(const struct statistics_kernels *kernels, const double *q, uint32_t count, uint32_t dim,
    double *sum, double *outer) {
    uint32_t stride = attend_stride(dim);
    for (uint32_t row = 0; row < count; row++) {
        for (uint32_t i = 0; i < dim; i++)
            sum[i] += q[row * stride + i];
    }
    if (count < 4) { /* memory is what takes the time: in the order in which it lies */
        for (uint32_t row = 0; row < count; row++)
            kernels->products_of_one(q + row * stride, dim, outer);
        return;
    }
    for (uint32_t i = 0; i < dim; i += 4)
        add_products(kernels, q, count, i, dim, outer);
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
    double q[ROWS * ATTEND_DIM_MAX];
    for (uint32_t row = first; row < item->rows; row += ROWS) {
        uint32_t count = item->rows - row < ROWS ? item->rows - row : ROWS;
        widen_rows(job->qkv + (item->first_row + row) * stride + (size_t)head * dim, stride, count, dim,
            attend_stride(dim), q);
        add_rows(job->kernels, q, count, dim, to->sum + (size_t)head * dim, to->outer + (size_t)head * dim * dim);
    }
}

void cpu_query_moments(struct backend *backend, const struct kv_batch *batch, uint32_t heads, const float *qkv,
    const struct query_moments *moments) {
    struct moments_job job = {cpu_backend(backend)->statistics, batch, moments, qkv, heads};
    thread_pool_run(cpu_backend(backend)->threads, batch->items_count * heads, moments_work, &job);
}
