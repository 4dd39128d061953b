/* SPDX-License-Identifier: Apache-2.0
 *
 * What only some architectures ask for: norms that are added, norms of heads, biases, scales, soft caps, GELU.
 */
#include "tests/parity/parity.h"
#include "tests/parity/parity_same.h"

#include <math.h>
#include <stdlib.h>

/* Random rows on the device and on the host. */
struct rows {
    uint32_t rows, width;
    size_t count;
    float *host;
    float *device;
};

static struct rows rows_create(struct parity *parity, uint32_t rows, uint32_t width, float scale) {
    struct rows x = {.rows = rows, .width = width, .count = (size_t)rows * width};
    x.host = parity_host(x.count * sizeof *x.host);
    parity_fill_normal(parity, x.host, x.count, scale);
    x.device = parity_upload(parity, x.host, x.count * sizeof *x.host);
    return x;
}

static void rows_free(struct parity *parity, struct rows *x) {
    free(x->host);
    parity_release(parity, x->device);
}

static struct rows rows_any(struct parity *parity) {
    uint32_t rows = parity_random(parity, 1, 40), width = parity_random(parity, 1, 1200);
    return rows_create(parity, rows, width, powf(10, (float)parity_uniform(parity, -2, 2)));
}

/* Compares what the device has with want [count], and with other tiers. */
static void check_rows(struct parity *parity, const struct rows *x, const double *want, double absolute,
    double relative, const char *what) {
    float *got = parity_download(parity, x->device, x->count * sizeof *got);
    parity_check_close(parity, got, want, x->count, absolute, relative, "%s %u x %u", what, x->rows, x->width);
    parity_check_same(parity, got, x->count * sizeof *got);
    free(got);
}

/* want [width] += x / sqrt(mean(x^2) + epsilon) * weight. */
static void norm(const float *x, const float *weight, float epsilon, uint32_t width, double *want) {
    double sum = 0;
    for (uint32_t i = 0; i < width; i++)
        sum += (double)x[i] * (double)x[i];
    for (uint32_t i = 0; i < width; i++)
        want[i] += x[i] / sqrt(sum / width + (double)epsilon) * (double)weight[i];
}

static void case_norm_add(struct parity *parity) {
    struct rows x = rows_any(parity), weight = rows_create(parity, 1, x.width, 1);
    struct rows out = rows_create(parity, x.rows, x.width, 1);
    double *want = parity_host(x.count * sizeof *want);
    for (size_t i = 0; i < x.count; i++)
        want[i] = out.host[i];
    for (uint32_t row = 0; row < x.rows; row++)
        norm(x.host + (size_t)row * x.width, weight.host, 1e-5f, x.width, want + (size_t)row * x.width);
    parity->operations->rms_norm_add(parity->backend, x.device, weight.device, 1e-5f, x.rows, x.width, out.device);
    check_rows(parity, &out, want, 2e-6, 5e-7, "rms_norm_add");
    free(want);
    rows_free(parity, &x);
    rows_free(parity, &weight);
    rows_free(parity, &out);
}

static void case_head_norms(struct parity *parity) {
    uint32_t dim = 2 * parity_random(parity, 1, 128), heads = parity_random(parity, 1, 9);
    uint32_t kv_heads = parity_random(parity, 1, 4), all = heads + 2 * kv_heads;
    struct rows qkv = rows_create(parity, parity_random(parity, 1, 20), all * dim, 3);
    struct rows query = rows_create(parity, 1, dim, 1), key = rows_create(parity, 1, dim, 1);
    double *want = parity_host(qkv.count * sizeof *want);
    for (uint32_t head = 0; head < qkv.rows * all; head++) {
        const float *x = qkv.host + (size_t)head * dim;
        double *to = want + (size_t)head * dim;
        uint32_t number = head % all;
        for (uint32_t i = 0; i < dim; i++)
            to[i] = number < heads + kv_heads ? 0 : x[i];
        if (number < heads + kv_heads)
            norm(x, number < heads ? query.host : key.host, 1e-6f, dim, to);
    }
    parity->operations->head_norms(
        parity->backend, query.device, key.device, 1e-6f, qkv.rows, heads, kv_heads, dim, qkv.device);
    check_rows(parity, &qkv, want, 0, 5e-7, "head_norms");
    free(want);
    rows_free(parity, &qkv);
    rows_free(parity, &query);
    rows_free(parity, &key);
}

static void case_add_bias(struct parity *parity) {
    struct rows x = rows_any(parity), bias = rows_create(parity, 1, x.width, 1);
    double *want = parity_host(x.count * sizeof *want);
    for (size_t i = 0; i < x.count; i++)
        want[i] = (double)x.host[i] + (double)bias.host[i % x.width];
    parity->operations->add_bias(parity->backend, bias.device, x.rows, x.width, x.device);
    check_rows(parity, &x, want, 1e-30, 1e-7, "add_bias");
    free(want);
    rows_free(parity, &x);
    rows_free(parity, &bias);
}

static void case_scale(struct parity *parity) {
    struct rows x = rows_any(parity);
    float factor = (float)parity_uniform(parity, 0.1, 60);
    double *want = parity_host(x.count * sizeof *want);
    for (size_t i = 0; i < x.count; i++)
        want[i] = (double)x.host[i] * (double)factor;
    parity->operations->scale(parity->backend, factor, x.rows, x.width, x.device);
    check_rows(parity, &x, want, 1e-30, 1e-7, "scale");
    free(want);
    rows_free(parity, &x);
}

static void case_soft_cap(struct parity *parity) {
    struct rows x = rows_any(parity);
    float cap = (float)parity_uniform(parity, 1, 60);
    double *want = parity_host(x.count * sizeof *want);
    for (size_t i = 0; i < x.count; i++)
        want[i] = (double)cap * tanh((double)x.host[i] / (double)cap);
    parity->operations->soft_cap(parity->backend, cap, x.rows, x.width, x.device);
    check_rows(parity, &x, want, 3e-7 * (double)cap, 3e-7, "soft_cap");
    free(want);
    rows_free(parity, &x);
}

static void case_gelu_mul(struct parity *parity) {
    uint32_t rows = parity_random(parity, 1, 30), width = parity_random(parity, 1, 700);
    struct rows x = rows_create(parity, rows, 2 * width, parity->round % 2 == 0 ? 1 : 8);
    struct rows out = rows_create(parity, rows, width, 1);
    double *want = parity_host(out.count * sizeof *want);
    for (size_t i = 0; i < out.count; i++) {
        const float *row = x.host + i / width * 2 * width;
        double gate = row[i % width], up = row[width + i % width];
        want[i] = gate * up * (1 + tanh(sqrt(2 / M_PI) * (gate + 0.044715 * gate * gate * gate))) / 2;
    }
    parity->operations->gelu_mul(parity->backend, x.device, rows, width, out.device);
    check_rows(parity, &out, want, 1e-6, 1e-6, "gelu_mul");
    free(want);
    rows_free(parity, &x);
    rows_free(parity, &out);
}

const struct parity_case parity_traits_cases[] = {
    {.name = "rms_norm_add", .run = case_norm_add, .rounds = 20},
    {.name = "head_norms", .run = case_head_norms, .rounds = 20},
    {.name = "add_bias", .run = case_add_bias, .rounds = 20},
    {.name = "scale", .run = case_scale, .rounds = 20},
    {.name = "soft_cap", .run = case_soft_cap, .rounds = 20},
    {.name = "gelu_mul", .run = case_gelu_mul, .rounds = 20},
    {.name = NULL},
};
