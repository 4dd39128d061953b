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
    const float *weight;
    const uint32_t *rows_wanted;
    float epsilon;
    uint32_t rows;
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

static void norm_row(const struct rows_job *job, uint32_t row) {
    const float *x = job->x + (size_t)row * job->width;
    float mean = job->kernels->sum_squares(x, job->width) / (float)job->width;
    float factor = 1 / sqrtf(mean + job->epsilon);
    job->kernels->scale(x, factor, job->weight, job->width, job->out + (size_t)row * job->width);
}

void cpu_rms_norm(struct backend *backend, const float *x, const float *weight, float epsilon, uint32_t rows,
    uint32_t width, float *out) {
    struct rows_job job = {
        .x = x, .weight = weight, .epsilon = epsilon, .rows = rows, .width = width, .out = out, .one = norm_row};
    rows_run(cpu_backend(backend), &job);
}

static void silu_row(const struct rows_job *job, uint32_t row) {
    const float *gate = job->x + (size_t)row * 2 * job->width;
    job->kernels->silu_mul(gate, gate + job->width, job->width, job->out + (size_t)row * job->width);
}

void cpu_silu_mul(struct backend *backend, const float *gate_up, uint32_t rows, uint32_t width, float *out) {
    struct rows_job job = {.x = gate_up, .rows = rows, .width = width, .out = out, .one = silu_row};
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
