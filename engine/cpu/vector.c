/* SPDX-License-Identifier: Apache-2.0 */
#include "engine/cpu/vector.h"

#include <math.h>
#include <string.h>

enum { ROWS_PER_CHUNK = 8 };

const struct vector_kernels *cpu_vector_kernels(enum cpu_tier tier) {
#if defined(__x86_64__)
    if (tier >= CPU_AVX512)
        return &vector_kernels_avx512;
    if (tier >= CPU_AVX2)
        return &vector_kernels_avx2;
#endif
    (void)tier;
    return &vector_kernels_scalar;
}

/* What the row-wise operations need; each uses some of it. */
struct rows_job {
    const struct vector_kernels *kernels;
    const float *x;
    const float *weight, *key_weight;
    const uint32_t *rows_wanted;
    float epsilon, factor;
    uint32_t rows;
    uint32_t heads, kv_heads;
    uint32_t width;
    float *out;
    void (*one)(const struct rows_job *job, uint32_t row);
};

static void rows_part(void *context, uint32_t first, uint32_t end, uint32_t thread) {
    const struct rows_job *job = context;
    (void)thread;
    for (uint32_t row = first; row < end; row++)
        job->one(job, row);
}

static void rows_run(struct cpu_backend *cpu, struct rows_job *job) {
    job->kernels = cpu->vector;
    cpu_run_rows(cpu, job->rows, ROWS_PER_CHUNK, rows_part, job);
}

/* What an RMS norm multiplies x [width] by, before its weights. */
static float norm_factor(const struct rows_job *job, const float *x) {
    return 1 / sqrtf(job->kernels->sum_squares(x, job->width) / (float)job->width + job->epsilon);
}

static void norm_row(const struct rows_job *job, uint32_t row) {
    const float *x = job->x + (size_t)row * job->width;
    job->kernels->scale(x, norm_factor(job, x), job->weight, job->width, job->out + (size_t)row * job->width);
}

void cpu_rms_norm(struct backend *backend, const float *x, const float *weight, float epsilon, uint32_t rows,
    uint32_t width, float *out) {
    struct rows_job job = {
        .x = x, .weight = weight, .epsilon = epsilon, .rows = rows, .width = width, .out = out, .one = norm_row};
    rows_run(cpu_backend(backend), &job);
}

static void norm_add_row(const struct rows_job *job, uint32_t row) {
    const float *x = job->x + (size_t)row * job->width;
    job->kernels->scale_add(x, norm_factor(job, x), job->weight, job->width, job->out + (size_t)row * job->width);
}

void cpu_rms_norm_add(struct backend *backend, const float *x, const float *weight, float epsilon, uint32_t rows,
    uint32_t width, float *out) {
    struct rows_job job = {
        .x = x, .weight = weight, .epsilon = epsilon, .rows = rows, .width = width, .out = out, .one = norm_add_row};
    rows_run(cpu_backend(backend), &job);
}

static void head_norms_row(const struct rows_job *job, uint32_t row) {
    uint32_t heads = job->heads + job->kv_heads, dim = job->width;
    float *head = job->out + (size_t)row * (heads + job->kv_heads) * dim;
    for (uint32_t i = 0; i < heads; i++, head += dim)
        job->kernels->scale(head, norm_factor(job, head), i < job->heads ? job->weight : job->key_weight, dim, head);
}

void cpu_head_norms(struct backend *backend, const float *query_weight, const float *key_weight, float epsilon,
    uint32_t rows, uint32_t heads, uint32_t kv_heads, uint32_t head_dim, float *qkv) {
    struct rows_job job = {.weight = query_weight,
        .key_weight = key_weight,
        .epsilon = epsilon,
        .rows = rows,
        .heads = heads,
        .kv_heads = kv_heads,
        .width = head_dim,
        .out = qkv,
        .one = head_norms_row};
    rows_run(cpu_backend(backend), &job);
}

static void bias_row(const struct rows_job *job, uint32_t row) {
    job->kernels->add(job->x, job->width, job->out + (size_t)row * job->width);
}

void cpu_add_bias(struct backend *backend, const float *bias, uint32_t rows, uint32_t width, float *x) {
    struct rows_job job = {.x = bias, .rows = rows, .width = width, .out = x, .one = bias_row};
    rows_run(cpu_backend(backend), &job);
}

static void scale_row(const struct rows_job *job, uint32_t row) {
    float *x = job->out + (size_t)row * job->width;
    job->kernels->multiply(x, job->factor, job->width, x);
}

void cpu_scale(struct backend *backend, float factor, uint32_t rows, uint32_t width, float *x) {
    struct rows_job job = {.factor = factor, .rows = rows, .width = width, .out = x, .one = scale_row};
    rows_run(cpu_backend(backend), &job);
}

static void cap_row(const struct rows_job *job, uint32_t row) {
    float *x = job->out + (size_t)row * job->width;
    job->kernels->soft_cap(x, job->factor, job->width, x);
}

/* A row of logits is long: one is a chunk. */
void cpu_soft_cap(struct backend *backend, float cap, uint32_t rows, uint32_t width, float *x) {
    struct cpu_backend *cpu = cpu_backend(backend);
    struct rows_job job = {
        .kernels = cpu->vector, .factor = cap, .rows = rows, .width = width, .out = x, .one = cap_row};
    cpu_run_rows(cpu, rows, 1, rows_part, &job);
}

static void silu_row(const struct rows_job *job, uint32_t row) {
    const float *gate = job->x + (size_t)row * 2 * job->width;
    job->kernels->silu_mul(gate, gate + job->width, job->width, job->out + (size_t)row * job->width);
}

void cpu_silu_mul(struct backend *backend, const float *gate_up, uint32_t rows, uint32_t width, float *out) {
    struct rows_job job = {.x = gate_up, .rows = rows, .width = width, .out = out, .one = silu_row};
    rows_run(cpu_backend(backend), &job);
}

static void gelu_row(const struct rows_job *job, uint32_t row) {
    const float *gate = job->x + (size_t)row * 2 * job->width;
    job->kernels->gelu_mul(gate, gate + job->width, job->width, job->out + (size_t)row * job->width);
}

void cpu_gelu_mul(struct backend *backend, const float *gate_up, uint32_t rows, uint32_t width, float *out) {
    struct rows_job job = {.x = gate_up, .rows = rows, .width = width, .out = out, .one = gelu_row};
    rows_run(cpu_backend(backend), &job);
}

static void gather_row(const struct rows_job *job, uint32_t row) {
    const float *from = job->x + (size_t)job->rows_wanted[row] * job->width;
    memcpy(job->out + (size_t)row * job->width, from, job->width * sizeof(float));
}

void cpu_gather_rows(
    struct backend *backend, const float *x, const uint32_t *rows_wanted, uint32_t count, uint32_t width, float *out) {
    struct rows_job job = {
        .x = x, .rows_wanted = rows_wanted, .rows = count, .width = width, .out = out, .one = gather_row};
    rows_run(cpu_backend(backend), &job);
}
