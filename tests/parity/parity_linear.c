/* SPDX-License-Identifier: Apache-2.0
 *
 * `linear` and `embed` for every weight format. Results must equal the reference bit for bit, so that all tiers, row
 * counts and thread counts equal each other too, and must lie within rounding of the true product. Of the CUDA
 * backend's products with F16 and BF16 weights only the latter is asked: their sums are in another order, and above
 * CUDA_UNROUNDED_ROWS rows x is rounded to the weights' format (cuda/linear.h).
 */
#include "tests/parity/parity_linear.h"
#include "tests/parity/reference_linear.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static const struct {
    enum tensor_type type;
    bool exact;
    const char *name;
} kinds[] = {
    {TENSOR_F32, false, "f32"},
    {TENSOR_F16, false, "f16"},
    {TENSOR_BF16, false, "bf16"},
    {TENSOR_Q8_0, false, "q8_0"},
    {TENSOR_Q4_0, false, "q4_0"},
    {TENSOR_Q4_1, false, "q4_1"},
    {TENSOR_F16, true, "f16 exact"},
    {TENSOR_Q8_0, true, "q8_0 exact"},
    {TENSOR_Q4_0, true, "q4_0 exact"},
    {TENSOR_Q4_1, true, "q4_1 exact"},
    {TENSOR_Q5_0, false, "q5_0"},
    {TENSOR_Q5_1, false, "q5_1"},
    {TENSOR_Q2_K, false, "q2_k"},
    {TENSOR_Q3_K, false, "q3_k"},
    {TENSOR_Q4_K, false, "q4_k"},
    {TENSOR_Q5_K, false, "q5_k"},
    {TENSOR_Q6_K, false, "q6_k"},
    {TENSOR_IQ4_NL, false, "iq4_nl"},
    {TENSOR_MXFP4, false, "mxfp4"},
    {TENSOR_Q2_K, true, "q2_k exact"},
    {TENSOR_Q5_0, true, "q5_0 exact"},
};

enum { KIND_COUNT = sizeof kinds / sizeof kinds[0], CUDA_UNROUNDED_ROWS = 8 };

static uint32_t draw_kind(struct parity *parity) {
    return parity_random(parity, 0, KIND_COUNT - 1);
}

static uint32_t block_values(uint32_t kind) {
    return tensor_format_find(kinds[kind].type)->block_values;
}

static bool keeps_bits(const struct parity *parity, uint32_t kind) {
    return !parity->cuda || kinds[kind].exact || (kinds[kind].type != TENSOR_F16 && kinds[kind].type != TENSOR_BF16);
}

/* A finite binary16 of magnitude below 2^(limit - 15), all signs and subnormals included. */
static uint16_t random_half(struct parity *parity, uint32_t limit) {
    return (uint16_t)(parity_random(parity, 0, 1) << 15 | parity_random(parity, 0, (limit << 10) - 1));
}

static void fill_row_values(struct parity *parity, enum tensor_type type, unsigned char *row, uint32_t columns) {
    for (uint32_t i = 0; i < columns; i++) {
        float value = parity_normal(parity);
        uint32_t bits;
        memcpy(&bits, &value, 4);
        uint16_t upper = (uint16_t)(bits >> 16);
        uint16_t half = random_half(parity, 17);
        if (type == TENSOR_F32)
            memcpy(row + (size_t)i * 4, &bits, 4);
        else
            memcpy(row + (size_t)i * 2, type == TENSOR_F16 ? &half : &upper, 2);
    }
}

/* Where a block's f16 d and m lie; m 0: none. Of MXFP4 d is an exponent. */
static void find_scales(enum tensor_type type, size_t *d, size_t *m) {
    *d = type == TENSOR_Q2_K ? 80 : type == TENSOR_Q3_K ? 108 : type == TENSOR_Q6_K ? 208 : 0;
    *m = type == TENSOR_Q2_K ? 82 : 0;
    if (type == TENSOR_Q4_1 || type == TENSOR_Q5_1 || type == TENSOR_Q4_K || type == TENSOR_Q5_K)
        *m = 2;
}

/* Random bytes as integers, so that the extreme ones occur; some blocks have all bits of q set or none. */
static void fill_row_blocks(struct parity *parity, enum tensor_type type, unsigned char *row, uint32_t columns) {
    const struct tensor_format *format = tensor_format_find(type);
    size_t d, m;
    find_scales(type, &d, &m);
    for (uint32_t block = 0; block < columns / format->block_values; block++, row += format->block_bytes) {
        uint16_t scales[2] = {random_half(parity, 14), random_half(parity, 17)};
        uint32_t kind = parity_random(parity, 0, 15);
        for (size_t i = 0; i < format->block_bytes; i++)
            row[i] = kind == 0 ? 0x80 : kind == 1 ? 0xff : kind == 2 ? 0 : (unsigned char)parity_random_bits(parity);
        if (type == TENSOR_MXFP4) {
            row[0] = (unsigned char)parity_random(parity, 96, 140); /* values that f16 holds */
            continue;
        }
        memcpy(row + d, &scales[0], 2);
        if (m > 0)
            memcpy(row + m, &scales[1], 2);
    }
}

void parity_fill_tensor(
    struct parity *parity, struct test_tensor *test, enum tensor_type type, uint32_t rows, uint32_t columns) {
    size_t row_bytes = tensor_row_bytes(type, columns);
    test->memory = parity_host(rows * row_bytes + 1);
    snprintf(test->name, sizeof test->name, "random %u x %u", rows, columns);
    test->tensor = (struct tensor){.name = test->name,
        .type = type,
        .rows = rows,
        .columns = columns,
        .data = test->memory + 1,
        .bytes = rows * row_bytes};
    for (uint32_t row = 0; row < rows; row++) {
        unsigned char *at = test->memory + 1 + row * row_bytes;
        if (tensor_format_find(type)->block_values == 1)
            fill_row_values(parity, type, at, columns);
        else
            fill_row_blocks(parity, type, at, columns);
    }
}

void parity_fill_activations(struct parity *parity, float *x, uint32_t rows, uint32_t columns) {
    for (uint32_t row = 0; row < rows; row++) {
        float scale = (float)exp(parity_uniform(parity, -12, 4));
        for (uint32_t i = 0; i < columns; i++) {
            float *value = &x[(size_t)row * columns + i];
            uint32_t kind = (row + i / 32) % 8;
            if (kind == 0 && i % 64 < 32)
                *value = 0;
            else if (kind == 1)
                *value = i % 32 == 0 ? 127 : (float)parity_random(parity, 0, 253) / 2 - 63;
            else
                *value = scale * parity_normal(parity) * (kind == 2 && i % 32 == 5 ? 100 : 1);
        }
    }
}

struct shape {
    uint32_t weights;
    uint32_t weight_rows[LINEAR_WEIGHTS_MAX];
    uint32_t kind[LINEAR_WEIGHTS_MAX];
    uint32_t sum_rows;
    uint32_t columns;
    uint32_t rows;
    bool add;
};

static struct shape draw_shape(struct parity *parity) {
    struct shape shape = {.weights = parity_random(parity, 1, LINEAR_WEIGHTS_MAX), .add = parity_random(parity, 0, 1)};
    shape.columns = 32 * parity_random(parity, 1, 12);
    bool whole = parity_random(parity, 0, 1);
    bool same = parity_random(parity, 0, 2) > 0;
    bool is_float = block_values(parity->entry->index) == 1;
    if (is_float && (shape.weights == 1 || same) && !whole)
        shape.columns -= parity_random(parity, 0, 31);
    for (uint32_t i = 0; i < shape.weights; i++) {
        shape.weight_rows[i] = whole ? 32 * parity_random(parity, 1, 3) : parity_random(parity, 1, 100);
        shape.kind[i] = same || i == 0 ? parity->entry->index : draw_kind(parity);
        shape.sum_rows += shape.weight_rows[i];
        if (block_values(shape.kind[i]) > 32) /* the others' blocks are whole then too */
            shape.columns = (shape.columns + 255) / 256 * 256;
    }
    shape.rows = parity_random(parity, 0, 3) == 0 ? parity_random(parity, 17, 70) : parity_random(parity, 1, 17);
    return shape;
}

static void check_true_product(struct parity *parity, const struct shape *shape, const struct tensor *tensor,
    uint32_t weight, const float *x, const float *before, const float *got, size_t first) {
    size_t count = (size_t)shape->rows * tensor->rows;
    double *value = parity_host(count * sizeof *value);
    double *bound = parity_host(count * sizeof *bound);
    bool rounded = !keeps_bits(parity, shape->kind[weight]) && shape->rows > CUDA_UNROUNDED_ROWS;
    reference_linear_true(
        tensor, kinds[shape->kind[weight]].exact, rounded ? tensor->type : TENSOR_F32, x, shape->rows, value, bound);
    for (size_t i = 0; i < count; i++) {
        size_t at = i / tensor->rows * shape->sum_rows + first + i % tensor->rows;
        double want = value[i] + (shape->add ? (double)before[at] : 0);
        double limit = bound[i] + fabs(want) * 0x1p-23;
        if (!parity_check_true(parity, fabs(got[at] - want) <= limit, "%s %ux%u, row %zu: %g is not within %g of %g",
                kinds[shape->kind[weight]].name, tensor->rows, tensor->columns, i / tensor->rows, (double)got[at],
                limit, want))
            break;
    }
    free(value);
    free(bound);
}

/* Of the columns of one weight. */
static void check_same_bits(struct parity *parity, const struct shape *shape, uint32_t weight, const float *got,
    const float *want, uint32_t first) {
    for (uint32_t row = 0; row < shape->rows; row++) {
        size_t at = (size_t)row * shape->sum_rows + first;
        if (!parity_check_bits(parity, got + at, want + at, shape->weight_rows[weight],
                "R=%u, %u columns, %u weights with %u rows, add %d: row %u of weight %u (%s)", shape->rows,
                shape->columns, shape->weights, shape->sum_rows, shape->add, row, weight,
                kinds[shape->kind[weight]].name))
            return;
    }
}

/* Runs the operation; the result is new host memory. */
static float *run_linear(struct parity *parity, const struct shape *shape, const struct test_tensor *tensors,
    const float *x, const float *before) {
    struct backend_weight *weights[LINEAR_WEIGHTS_MAX] = {NULL};
    struct error error = {.message = ""};
    float *got = NULL;
    size_t out_bytes = (size_t)shape->rows * shape->sum_rows * sizeof *before;
    float *device_x = parity_upload(parity, x, (size_t)shape->rows * shape->columns * sizeof *x);
    float *device_out = parity_upload(parity, before, out_bytes);
    for (uint32_t i = 0; i < shape->weights; i++) {
        weights[i] =
            parity->operations->weight_create(parity->backend, &tensors[i].tensor, kinds[shape->kind[i]].exact, &error);
        if (!parity_check_true(parity, weights[i] != NULL, "%s", error.message))
            goto done;
    }
    parity->operations->linear(parity->backend, (const struct backend_weight *const *)weights, shape->weights, device_x,
        shape->rows, shape->add, device_out);
    got = parity_download(parity, device_out, out_bytes);
done:
    for (uint32_t i = 0; i < shape->weights; i++)
        parity->operations->weight_free(parity->backend, weights[i]);
    parity_release(parity, device_x);
    parity_release(parity, device_out);
    return got;
}

static void run_shape(struct parity *parity, const struct shape *shape) {
    struct test_tensor tensors[LINEAR_WEIGHTS_MAX];
    for (uint32_t i = 0; i < shape->weights; i++)
        parity_fill_tensor(parity, &tensors[i], kinds[shape->kind[i]].type, shape->weight_rows[i], shape->columns);
    float *x = parity_host((size_t)shape->rows * shape->columns * sizeof *x);
    parity_fill_activations(parity, x, shape->rows, shape->columns);
    size_t out_count = (size_t)shape->rows * shape->sum_rows;
    float *before = parity_host(out_count * sizeof *before);
    float *want = parity_host(out_count * sizeof *want);
    parity_fill_normal(parity, before, out_count, 1);
    memcpy(want, before, out_count * sizeof *want);

    float *got = run_linear(parity, shape, tensors, x, before);
    for (uint32_t i = 0, first = 0; i < shape->weights && got != NULL; first += shape->weight_rows[i++]) {
        reference_linear_bits(
            &tensors[i].tensor, kinds[shape->kind[i]].exact, x, shape->rows, shape->add, want + first, shape->sum_rows);
        check_true_product(parity, shape, &tensors[i].tensor, i, x, before, got, first);
        if (keeps_bits(parity, shape->kind[i]))
            check_same_bits(parity, shape, i, got, want, first);
    }
    for (uint32_t i = 0; i < shape->weights; i++)
        free(tensors[i].memory);
    free(x);
    free(before);
    free(want);
    free(got);
}

static void case_linear(struct parity *parity) {
    struct shape shape = draw_shape(parity);
    run_shape(parity, &shape);
}

/* Enough rows that they are taken in several tiles. */
static void case_many_rows(struct parity *parity) {
    struct shape shape = {.weights = 1, .weight_rows = {parity_random(parity, 1, 40)}, .columns = 3072, .rows = 250};
    shape.kind[0] = draw_kind(parity);
    shape.sum_rows = shape.weight_rows[0];
    run_shape(parity, &shape);
}

/* A NaN or an infinity spoils its row's results and nothing else. */
static void case_not_finite(struct parity *parity) {
    enum { COLUMNS = 256 };
    struct shape shape = {.weights = 1, .weight_rows = {40}, .columns = COLUMNS, .rows = 3};
    do
        shape.kind[0] = draw_kind(parity);
    while (block_values(shape.kind[0]) == 1 || kinds[shape.kind[0]].exact);
    shape.sum_rows = shape.weight_rows[0];
    struct test_tensor tensor;
    parity_fill_tensor(parity, &tensor, kinds[shape.kind[0]].type, shape.sum_rows, shape.columns);
    float x[3 * COLUMNS];
    float before[3 * 40] = {0};
    float want[3 * 40];
    parity_fill_normal(parity, x, 3 * COLUMNS, 1);
    x[COLUMNS + parity_random(parity, 0, COLUMNS - 1)] = parity->round % 2 ? NAN : INFINITY;
    reference_linear_bits(&tensor.tensor, false, x, 3, false, want, 40);
    float *got = run_linear(parity, &shape, &tensor, x, before);
    if (got != NULL) {
        parity_check_true(parity, isnan(got[40]) && isnan(want[40]), "row 1 is not NaN");
        parity_check_bits(parity, got, want, 3 * 40, "row 1 not finite");
    }
    free(got);
    free(tensor.memory);
}

static void case_embed(struct parity *parity) {
    uint32_t kind = draw_kind(parity);
    uint32_t vocabulary = parity_random(parity, 1, 200);
    uint32_t columns = block_values(kind) > 32 ? 256 : 32 * parity_random(parity, 1, 8);
    uint32_t rows = parity_random(parity, 1, 20);
    struct test_tensor tensor;
    parity_fill_tensor(parity, &tensor, kinds[kind].type, vocabulary, columns);
    struct error error = {.message = ""};
    struct backend_weight *weight =
        parity->operations->weight_create(parity->backend, &tensor.tensor, kinds[kind].exact, &error);
    float *device_out = parity_upload(parity, NULL, (size_t)rows * columns * sizeof(float));
    if (parity_check_true(parity, weight != NULL, "%s", error.message)) {
        int32_t tokens[20];
        double values[8 * 32];
        for (uint32_t row = 0; row < rows; row++)
            tokens[row] = (int32_t)parity_random(parity, 0, vocabulary + 2); /* some are no rows */
        tokens[0] = rows > 1 ? -1 : tokens[0];
        parity->operations->embed(parity->backend, weight, tokens, rows, device_out);
        float *got = parity_download(parity, device_out, (size_t)rows * columns * sizeof(float));
        for (uint32_t row = 0; row < rows; row++) {
            memset(values, 0, sizeof values);
            if ((uint32_t)tokens[row] < vocabulary)
                reference_weight_row(&tensor.tensor, (uint32_t)tokens[row], values);
            parity_check_close(parity, got + (size_t)row * columns, values, columns, 0, 0, "%s, token %d of %u",
                kinds[kind].name, tokens[row], vocabulary);
        }
        free(got);
    }
    parity->operations->weight_free(parity->backend, weight);
    parity_release(parity, device_out);
    free(tensor.memory);
}

/* weight_create refuses what it cannot use. */
static void case_refusals(struct parity *parity) {
    unsigned char data[64] = {0};
    const struct tensor wrong[] = {
        {.name = "t", .type = TENSOR_Q8_0, .rows = 1, .columns = 33, .data = data, .bytes = 64},
        {.name = "t", .type = TENSOR_Q8_0, .rows = 2, .columns = 32, .data = data, .bytes = 64},
        {.name = "t", .type = TENSOR_F32, .rows = 0, .columns = 4, .data = data, .bytes = 64},
        {.name = "t", .type = (enum tensor_type)16, .rows = 1, .columns = 256, .data = data, .bytes = 64},
    };
    for (size_t i = 0; i < sizeof wrong / sizeof wrong[0]; i++) {
        struct error error = {.code = 0};
        struct backend_weight *weight = parity->operations->weight_create(parity->backend, &wrong[i], false, &error);
        parity_check_true(parity, weight == NULL && error.code < 0 && strstr(error.message, "tensor t") != NULL,
            "tensor %zu: %s", i, error.message);
    }
}

const struct parity_case parity_linear_cases[] = {
    {.name = "linear f32", .run = case_linear, .rounds = 8, .index = 0},
    {.name = "linear f16", .run = case_linear, .rounds = 8, .index = 1},
    {.name = "linear bf16", .run = case_linear, .rounds = 8, .index = 2},
    {.name = "linear q8_0", .run = case_linear, .rounds = 20, .index = 3},
    {.name = "linear q4_0", .run = case_linear, .rounds = 20, .index = 4},
    {.name = "linear q4_1", .run = case_linear, .rounds = 20, .index = 5},
    {.name = "linear f16 exact", .run = case_linear, .rounds = 4, .index = 6},
    {.name = "linear q8_0 exact", .run = case_linear, .rounds = 4, .index = 7},
    {.name = "linear q4_0 exact", .run = case_linear, .rounds = 4, .index = 8},
    {.name = "linear q4_1 exact", .run = case_linear, .rounds = 4, .index = 9},
    {.name = "linear q5_0", .run = case_linear, .rounds = 12, .index = 10},
    {.name = "linear q5_1", .run = case_linear, .rounds = 12, .index = 11},
    {.name = "linear q2_k", .run = case_linear, .rounds = 12, .index = 12},
    {.name = "linear q3_k", .run = case_linear, .rounds = 12, .index = 13},
    {.name = "linear q4_k", .run = case_linear, .rounds = 12, .index = 14},
    {.name = "linear q5_k", .run = case_linear, .rounds = 12, .index = 15},
    {.name = "linear q6_k", .run = case_linear, .rounds = 12, .index = 16},
    {.name = "linear iq4_nl", .run = case_linear, .rounds = 12, .index = 17},
    {.name = "linear mxfp4", .run = case_linear, .rounds = 12, .index = 18},
    {.name = "linear q2_k exact", .run = case_linear, .rounds = 2, .index = 19},
    {.name = "linear q5_0 exact", .run = case_linear, .rounds = 2, .index = 20},
    {.name = "linear many rows", .run = case_many_rows, .rounds = 2},
    {.name = "linear not finite", .run = case_not_finite, .rounds = 6},
    {.name = "linear refusals", .run = case_refusals},
    {.name = "embed", .run = case_embed, .rounds = 20},
    {.name = NULL},
};
