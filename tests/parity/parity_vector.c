/* SPDX-License-Identifier: Apache-2.0
 *
 * Norms, activation, gathering, and the exponential function that the CPU's kernels share.
 */
#include "engine/cpu/vector.h"
#include "tests/parity/parity.h"
#include "tests/parity/parity_same.h"

#include <float.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>

static void case_rms_norm(struct parity *parity) {
    uint32_t rows = parity_random(parity, 1, 40), width = parity_random(parity, 1, 1200);
    float epsilon = parity->round % 2 == 0 ? 1e-5f : 1e-2f, scale = powf(10, (float)parity_uniform(parity, -3, 3));
    size_t count = (size_t)rows * width;
    float *x = parity_host(count * sizeof *x), *weight = parity_host(width * sizeof *weight);
    double *want = parity_host(count * sizeof *want);
    parity_fill_normal(parity, x, count, scale);
    parity_fill_normal(parity, weight, width, 1);
    for (uint32_t row = 0; row < rows; row++) {
        double sum = 0;
        for (uint32_t i = 0; i < width; i++)
            sum += (double)x[row * width + i] * (double)x[row * width + i];
        for (uint32_t i = 0; i < width; i++)
            want[row * width + i] = x[row * width + i] / sqrt(sum / width + (double)epsilon) * (double)weight[i];
    }
    float *device_x = parity_upload(parity, x, count * sizeof *x);
    float *device_weight = parity_upload(parity, weight, width * sizeof *weight);
    float *device_out = parity_upload(parity, NULL, count * sizeof *x);
    parity->operations->rms_norm(parity->backend, device_x, device_weight, epsilon, rows, width, device_out);
    float *got = parity_download(parity, device_out, count * sizeof *x);
    parity_check_close(parity, got, want, count, 0, 5e-7, "rms_norm %u x %u", rows, width);
    parity_check_same(parity, got, count * sizeof *got);
    parity->operations->rms_norm(parity->backend, device_x, device_weight, epsilon, rows, width, device_x);
    float *in_place = parity_download(parity, device_x, count * sizeof *x);
    parity_check_bits(parity, in_place, got, count, "rms_norm in place %u x %u", rows, width);
    uint32_t row = parity_random(parity, 0, rows - 1);
    float *device_row = parity_upload(parity, x + (size_t)row * width, width * sizeof *x);
    parity->operations->rms_norm(parity->backend, device_row, device_weight, epsilon, 1, width, device_row);
    float *alone = parity_download(parity, device_row, width * sizeof *x);
    parity_check_bits(parity, alone, got + (size_t)row * width, width, "rms_norm of a row alone");
    parity_release(parity, device_x);
    parity_release(parity, device_weight);
    parity_release(parity, device_out);
    parity_release(parity, device_row);
    free(x);
    free(weight);
    free(want);
    free(got);
    free(in_place);
    free(alone);
}

static void case_silu_mul(struct parity *parity) {
    uint32_t rows = parity_random(parity, 1, 30), width = parity_random(parity, 1, 700);
    size_t count = (size_t)rows * width;
    float *x = parity_host(2 * count * sizeof *x);
    double *want = parity_host(count * sizeof *want);
    for (uint32_t row = 0; row < rows; row++) {
        for (uint32_t i = 0; i < width; i++) {
            float gate = (float)parity_uniform(parity, -86, 100), up = parity_normal(parity);
            x[(size_t)row * 2 * width + i] = gate;
            x[((size_t)row * 2 + 1) * width + i] = up;
            want[(size_t)row * width + i] = gate / (1 + exp(-(double)gate)) * (double)up;
        }
    }
    float *device_x = parity_upload(parity, x, 2 * count * sizeof *x);
    float *device_out = parity_upload(parity, NULL, count * sizeof *x);
    parity->operations->silu_mul(parity->backend, device_x, rows, width, device_out);
    float *got = parity_download(parity, device_out, count * sizeof *x);
    parity_check_close(parity, got, want, count, 1e-37, 5e-7, "silu_mul %u x %u", rows, width);
    parity_check_same(parity, got, count * sizeof *got);
    parity_release(parity, device_x);
    parity_release(parity, device_out);
    free(x);
    free(want);
    free(got);
}

static void case_gather_rows(struct parity *parity) {
    uint32_t rows = parity_random(parity, 1, 50), width = parity_random(parity, 1, 300);
    uint32_t count = parity_random(parity, 1, 60);
    float *x = parity_host((size_t)rows * width * sizeof *x), *want = parity_host((size_t)count * width * sizeof *want);
    uint32_t *wanted = parity_host(count * sizeof *wanted);
    parity_fill_normal(parity, x, (size_t)rows * width, 1);
    for (uint32_t i = 0; i < count; i++) {
        wanted[i] = parity_random(parity, 0, rows - 1);
        memcpy(want + (size_t)i * width, x + (size_t)wanted[i] * width, width * sizeof *x);
    }
    float *device_x = parity_upload(parity, x, (size_t)rows * width * sizeof *x);
    float *device_out = parity_upload(parity, NULL, (size_t)count * width * sizeof *x);
    parity->operations->gather_rows(parity->backend, device_x, wanted, count, width, device_out);
    float *got = parity_download(parity, device_out, (size_t)count * width * sizeof *x);
    parity_check_bits(parity, got, want, (size_t)count * width, "gather_rows %u of %u x %u", count, rows, width);
    parity_release(parity, device_x);
    parity_release(parity, device_out);
    free(x);
    free(want);
    free(wanted);
    free(got);
}

/* Every 997th float between -100 and 100 (and its negative), and the ends of the range. */
static void case_exponential(struct parity *parity) {
    if (parity->cuda) {
        parity_skip(parity, "a kernel of the CPU backend, no operation");
        return;
    }
    const struct vector_kernels *kernels = cpu_backend(parity->backend)->vector;
    static const float special[] = {0, -0.0f, -INFINITY, -FLT_MAX, -87.34f, -1e10f, -103, 88.72f, -87.32f, FLT_MIN};
    uint32_t specials = sizeof special / sizeof special[0], last, first;
    float lowest = 0x1p-30f, highest = 100;
    memcpy(&first, &lowest, sizeof first);
    memcpy(&last, &highest, sizeof last);
    uint32_t count = specials + 2 * ((last - first) / 997 + 1);
    float *x = parity_host(count * sizeof *x), *got = parity_host(count * sizeof *got);
    memcpy(x, special, sizeof special);
    for (uint32_t bits = first, i = specials; bits <= last; bits += 997, i += 2) {
        memcpy(&x[i], &bits, sizeof bits);
        x[i + 1] = -x[i];
    }
    kernels->exponential(x, count, got);
    double worst = 0;
    for (uint32_t i = 0; i < count; i++) {
        if ((double)x[i] >= -87.33 && (double)x[i] <= 88.72)
            worst = fmax(worst, fabs((double)got[i] / exp((double)x[i]) - 1));
        else if (x[i] < 0)
            parity_check_true(parity, got[i] == 0, "exp(%a) is %a, not 0", (double)x[i], (double)got[i]);
        else
            parity_check_true(parity, got[i] > 3e38f, "exp(%a) is %a", (double)x[i], (double)got[i]);
    }
    parity_check_true(parity, worst < 1.2e-7, "relative error of exp: %g", worst);
    parity_check_true(parity, got[0] == 1 && got[1] == 1, "exp(0) is not 1");
    parity_check_same(parity, got, count * sizeof *got);
    free(x);
    free(got);
}

struct timed {
    struct parity *parity;
    uint32_t rows;
    float *x;
    float *weight;
    float *out;
};

static void work_rms_norm(void *context) {
    struct timed *timed = context;
    timed->parity->operations->rms_norm(
        timed->parity->backend, timed->x, timed->weight, 1e-5f, timed->rows, 576, timed->out);
}

static void work_silu_mul(void *context) {
    struct timed *timed = context;
    timed->parity->operations->silu_mul(timed->parity->backend, timed->x, timed->rows, 1536, timed->out);
}

/* The widths of SmolLM2-135M. */
static void time_vectors(struct parity *parity) {
    static const uint32_t rows[] = {1, 8, 512};
    size_t count = (size_t)512 * 2 * 1536;
    float *x = parity_host(count * sizeof *x);
    parity_fill_normal(parity, x, count, 1);
    struct timed timed = {.parity = parity};
    timed.x = parity_upload(parity, x, count * sizeof *x);
    timed.weight = parity_upload(parity, x, 576 * sizeof *x);
    timed.out = parity_upload(parity, NULL, count * sizeof *x);
    for (size_t i = 0; i < sizeof rows / sizeof rows[0]; i++) {
        timed.rows = rows[i];
        parity_time(parity, work_rms_norm, &timed, rows[i] * 576.0 * 8, 0, "rms_norm %u x 576", rows[i]);
        parity_time(parity, work_silu_mul, &timed, rows[i] * 1536.0 * 12, 0, "silu_mul %u x 1536", rows[i]);
    }
    parity_release(parity, timed.x);
    parity_release(parity, timed.weight);
    parity_release(parity, timed.out);
    free(x);
}

const struct parity_case parity_vector_cases[] = {
    {.name = "rms_norm", .run = case_rms_norm, .rounds = 20, .time = time_vectors},
    {.name = "silu_mul", .run = case_silu_mul, .rounds = 20},
    {.name = "gather_rows", .run = case_gather_rows, .rounds = 10},
    {.name = "exponential", .run = case_exponential},
    {.name = NULL},
};
