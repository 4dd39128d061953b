/* SPDX-License-Identifier: Apache-2.0 */
#include "policy/train/output.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "engine/cpu/threads.h"

/* Of one layer. */
struct gram_job {
    const float *dense; /* [rows][heads * dim] W_o */
    uint32_t rows, heads, dim;
    double *sums; /* [threads][dim][dim] */
    float *grams; /* [heads][dim][dim] */
};

static void gram_work(void *context, uint32_t head, uint32_t thread) {
    const struct gram_job *job = context;
    size_t dim = job->dim, columns = (size_t)job->heads * dim;
    double *sums = job->sums + thread * dim * dim;
    memset(sums, 0, dim * dim * sizeof *sums);
    for (uint32_t r = 0; r < job->rows; r++) {
        const float *row = job->dense + r * columns + head * dim;
        for (size_t i = 0; i < dim; i++)
            for (size_t j = 0; j < dim; j++)
                sums[i * dim + j] += (double)row[i] * (double)row[j];
    }
    for (size_t i = 0; i < dim * dim; i++)
        job->grams[head * dim * dim + i] = (float)sums[i];
}

/* W_o of a layer: rows one after the other. */
static void dequantise(const struct tensor *output, float *dense) {
    for (uint32_t r = 0; r < output->rows; r++)
        tensor_dequantise_row(output, r, dense + r * (size_t)output->columns);
}

float *output_grams(struct training *training, const struct model *model, struct error *error) {
    const struct model_shape *shape = &model->shape;
    struct thread_pool *threads = training->threads;
    size_t square = (size_t)shape->head_dim * shape->head_dim, layer_numbers = shape->heads * square, rows = 0;
    for (uint32_t l = 0; l < shape->layers; l++)
        rows = model->layers[l].attn_output.rows > rows ? model->layers[l].attn_output.rows : rows;
    float *grams = malloc(shape->layers * layer_numbers * sizeof *grams);
    float *dense = malloc(rows * shape->heads * shape->head_dim * sizeof *dense);
    double *sums = malloc(thread_pool_size(threads) * square * sizeof *sums);
    int code = grams != NULL && dense != NULL && sums != NULL
                   ? 0
                   : error_set(error, ERROR_MEMORY, "no memory for products of the output matrices");
    for (uint32_t l = 0; code == 0 && l < shape->layers; l++) {
        if (model->windows[l] != 0)
            continue;
        const struct tensor *output = &model->layers[l].attn_output;
        dequantise(output, dense);
        struct gram_job job = {.dense = dense,
            .rows = (uint32_t)output->rows,
            .heads = shape->heads,
            .dim = shape->head_dim,
            .sums = sums,
            .grams = grams + l * layer_numbers};
        thread_pool_run(threads, shape->heads, gram_work, &job);
        if (train_pause(training) != 0)
            code = error_set(error, ERROR_CANCELLED, "stopped");
    }
    free(dense);
    free(sums);
    if (code == 0)
        return grams;
    free(grams);
    return NULL;
}

size_t output_work(const struct records *records, uint32_t slots) {
    size_t dim = records->shape.head_dim, rows = (size_t)RECORD_QUERIES * records->group;
    return rows * slots + slots * dim + rows * dim + rows + dim;
}

/* |x W_h|. */
static double norm_of(const float *gram, const float *x, uint32_t dim) {
    double sum = 0;
    for (uint32_t i = 0; i < dim; i++) {
        float row = 0;
        for (uint32_t j = 0; j < dim; j++)
            row += gram[(size_t)i * dim + j] * x[j];
        sum += (double)row * (double)x[i];
    }
    return sum > 0 ? sqrt(sum) : 0;
}

static const float *gram_of(const struct output *output, uint32_t row) {
    return output->grams + (size_t)(row % output->group) * output->dim * output->dim;
}

/* out [dim]: the output of those that stay and of later tokens; keep NULL: all. */
static void mix(const struct output *output, uint32_t row, const uint8_t *keep, float *out) {
    uint32_t dim = output->dim;
    const float *later = output->later + (size_t)row * (1 + dim),
                *attention = output->attention + (size_t)row * output->slots;
    float all = later[0];
    memcpy(out, later + 1, dim * sizeof *out);
    for (uint32_t i = 0; i < output->slots; i++) {
        if (keep != NULL && !keep[i])
            continue;
        const float *value = output->values + (size_t)i * dim;
        all += attention[i];
        for (uint32_t d = 0; d < dim; d++)
            out[d] += attention[i] * value[d];
    }
    for (uint32_t d = 0; d < dim; d++)
        out[d] = all > 0 ? out[d] / all : 0;
}

void output_open(const struct records *records, const struct recorded_sequence *sequence,
    const struct recorded_head *head, const float *grams, float *work, struct output *out) {
    size_t dim = records->shape.head_dim, rows = (size_t)sequence->queries * records->group, slots = head->slots;
    uint32_t kv_heads = records->shape.kv_heads;
    size_t first = (size_t)(head->head / kv_heads) * kv_heads * records->group + head->head % kv_heads * records->group;
    *out = (struct output){.slots = head->slots,
        .rows = (uint32_t)rows,
        .group = records->group,
        .dim = records->shape.head_dim,
        .grams = grams + first * dim * dim,
        .later = head->later,
        .attention = work,
        .values = work + rows * slots,
        .whole = work + rows * slots + slots * dim,
        .norms = work + rows * slots + slots * dim + rows * dim,
        .kept = work + rows * slots + slots * dim + rows * dim + rows};
    records_widen(head->attention, rows * slots, out->attention);
    records_widen(head->values, slots * dim, out->values);
    for (uint32_t r = 0; r < rows; r++) {
        mix(out, r, NULL, out->whole + r * dim);
        out->norms[r] = (float)norm_of(gram_of(out, r), out->whole + r * dim, out->dim);
    }
}

double output_error(const struct output *output, const uint8_t *keep) {
    double sum = 0;
    uint32_t counted = 0;
    for (uint32_t r = 0; r < output->rows; r++) {
        if (!(output->norms[r] > 0))
            continue;
        mix(output, r, keep, output->kept);
        for (uint32_t d = 0; d < output->dim; d++)
            output->kept[d] -= output->whole[(size_t)r * output->dim + d];
        sum += norm_of(gram_of(output, r), output->kept, output->dim) / (double)output->norms[r];
        counted++;
    }
    return counted > 0 ? sum / counted : 0;
}
