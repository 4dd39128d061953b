/* SPDX-License-Identifier: Apache-2.0
 *
 * Bytes that the kernels of matrix products move. A thread block reads its rows of weights and its rows of activations
 * once: the latter come from the second-level cache, which all thread blocks share.
 */
#include "tests/parity/parity_linear_product.h"
#include "tests/parity/parity_traffic.h"
#include "tests/parity/reference_linear.h"

#include <math.h>
#include <stdlib.h>

enum { OUTPUTS = 128, COLUMNS = 512 };

/* Of the kernels that multiply: rows of weights and of activations of a thread block, and bytes of a row of the latter.
 */
struct tiling {
    const char *kernel;
    double weight_rows, rows, row_bytes;
};

static struct tiling tiling_of(const struct product *p) {
    double values = p->weight->pitch;
    if (!linear_is_float(p->weight->format))
        return p->rows <= 64 ? (struct tiling){"linear_multiply_blocks", 32, 64, values / 32 * 40}
                             : (struct tiling){"linear_multiply_blocks", 128, 128, values / 32 * 40};
    if (p->rows <= LINEAR_STREAM_ROWS)
        return (struct tiling){"linear_stream_floats", 32, LINEAR_STREAM_ROWS, values * 4};
    if (p->kind->type == TENSOR_F32)
        return (struct tiling){"linear_multiply_f32", 64, 64, values * 4};
    return (struct tiling){"linear_multiply_halves", 32, 64, values * 2};
}

static double product_bytes(const struct product *p, const struct tiling *tiling) {
    double out = (double)p->rows * p->weight_rows * 4;
    return (double)p->weight->bytes * ceil(p->rows / tiling->rows) +
           p->rows * tiling->row_bytes * ceil(p->weight_rows / tiling->weight_rows) + (p->add ? 2 * out : out);
}

static void check_preparation(struct parity *parity, const struct product *p) {
    double x = (double)p->rows * p->columns;
    double scales = (p->rows + p->rows % 2) * p->columns / 32.0 * 8;
    if (!linear_is_float(p->weight->format))
        traffic_check(parity, "linear_round_blocks", x * 4 + x + scales, "R=%u", p->rows);
    else if (p->kind->type != TENSOR_F32 && p->rows > LINEAR_STREAM_ROWS)
        traffic_check(parity, "linear_halve_rows", x * 4 + x * 2, "R=%u", p->rows);
}

/* Each number of rows has its own kernels: block formats must give the reference's bits in all of them. */
static void check_bits(struct parity *parity, const struct product *p) {
    reference_linear_bits(&p->tensor.tensor, false, p->x, p->rows, p->add, p->before, p->weight_rows);
    parity_check_bits(parity, p->got, p->before, (size_t)p->rows * p->weight_rows, "%s, R=%u", p->kind->name, p->rows);
}

/* On a device so small that it takes the widest tiles that there are rows for. */
static void check_product(struct parity *parity, uint32_t rows) {
    const struct product_kind *kind = &product_kinds[parity->entry->index];
    bool halves = kind->type == TENSOR_F16 || kind->type == TENSOR_BF16;
    struct product p = product_create(parity, kind, OUTPUTS, COLUMNS, rows, parity_random(parity, 0, 1));
    uint32_t multiprocessors = product_cuda(parity)->multiprocessors;
    product_cuda(parity)->multiprocessors = 1;
    traffic_begin(parity);
    p.got = product_multiply(parity, &p, p.x, rows);
    struct tiling tiling = tiling_of(&p);
    if (!halves || rows < LINEAR_LIBRARY_ROWS)
        traffic_check(parity, tiling.kernel, product_bytes(&p, &tiling), "%s, R=%u", kind->name, rows);
    check_preparation(parity, &p);
    if (!linear_is_float(p.weight->format))
        check_bits(parity, &p);
    product_cuda(parity)->multiprocessors = multiprocessors;
    product_free(parity, &p);
}

static void case_product(struct parity *parity) {
    static const uint32_t row_counts[] = {
        1, 7, 12, 25, 50, 130, /* one for each kernel, and more */ 2, 4, 8, 16, 32, 64};
    uint32_t count = parity_is_full() ? sizeof row_counts / sizeof row_counts[0] : 6;
    for (uint32_t i = 0; i < count; i++)
        check_product(parity, row_counts[i]);
}

/* Activations of a width that needs padding, and rows that f16 does not hold: divided before, multiplied after. */
static void case_rows(struct parity *parity) {
    enum { ROWS = 70, WIDTH = 1000, PITCH = 1008 };
    struct product p = product_create(parity, &product_kinds[PRODUCT_F16 + 2], OUTPUTS, WIDTH, ROWS, false);
    traffic_begin(parity);
    p.got = product_multiply(parity, &p, p.x, p.rows);
    traffic_check(parity, "linear_pad_rows", ROWS * (double)(WIDTH + PITCH) * sizeof(float), "%d x %d", ROWS, WIDTH);
    product_free(parity, &p);
    p = product_create(parity, &product_kinds[PRODUCT_F16], OUTPUTS, COLUMNS, ROWS, true);
    for (uint32_t row = 0; row < ROWS; row++)
        p.x[row * COLUMNS] = 1e6f;
    traffic_begin(parity);
    p.got = product_multiply(parity, &p, p.x, p.rows);
    traffic_check(
        parity, "linear_rescale_rows", 2 * ROWS * (2.0 * OUTPUTS + 1) * sizeof(float), "%d x %d, twice", ROWS, OUTPUTS);
    product_free(parity, &p);
}

/* Weights to f16 for cuBLASLt. */
static void check_dequantise(struct parity *parity, const struct product_kind *kind) {
    struct linear_limits limits = *product_limits(parity);
    struct product p = product_create(parity, kind, OUTPUTS, COLUMNS, 4, false);
    product_limits(parity)->blocks_library = 1;
    traffic_begin(parity);
    p.got = product_multiply(parity, &p, p.x, p.rows);
    *product_limits(parity) = limits;
    traffic_check(
        parity, "linear_dequantise_strips", (double)p.weight->bytes + (double)OUTPUTS * COLUMNS * 2, "%s", kind->name);
    product_free(parity, &p);
}

static void case_dequantise(struct parity *parity) {
    for (uint32_t i = 0; i < PRODUCT_BLOCK_KINDS; i++)
        check_dequantise(parity, &product_kinds[i]);
}

/* A row lies in pieces: a sector for each run of bits and of scales of a step, and for d and m of a head. */
static double embedded_row_bytes(enum linear_format format) {
    const struct linear_layout *layout = &linear_layouts[format];
    uint32_t runs = 1 + (layout->high > 0) + 1 + (layout->scales == 128 || layout->scales == 48);
    return COLUMNS / 32 * runs * 32.0 + COLUMNS / 256 * (layout->head / 64) * 32.0;
}

static void check_embed(struct parity *parity, uint32_t index) {
    const struct product_kind *kind = &product_kinds[index];
    bool blocks = index < PRODUCT_BLOCK_KINDS;
    struct product p = product_create(parity, kind, OUTPUTS, COLUMNS, 1, false);
    int32_t tokens[] = {5, 127, 64, 0};
    uint32_t count = sizeof tokens / sizeof tokens[0];
    float *out = parity_upload(parity, NULL, (size_t)count * COLUMNS * sizeof *out);
    traffic_begin(parity);
    parity->operations->embed(parity->backend, p.weight, tokens, count, out);
    double row = blocks ? embedded_row_bytes(p.weight->format) : (double)p.weight->bytes / OUTPUTS;
    traffic_check(
        parity, blocks ? "linear_embed_blocks" : "linear_embed_values", count * (row + COLUMNS * 4), "%s", kind->name);
    parity_release(parity, out);
    product_free(parity, &p);
}

static void case_embed(struct parity *parity) {
    for (uint32_t i = 0; i < PRODUCT_KINDS; i++)
        check_embed(parity, i);
}

const struct parity_case parity_traffic_linear_cases[] = {
    {.name = "traffic linear q8_0", .run = case_product, .index = 0},
    {.name = "traffic linear q4_0", .run = case_product, .index = 1},
    {.name = "traffic linear q4_1", .run = case_product, .index = 2},
    {.name = "traffic linear q5_0", .run = case_product, .index = 3},
    {.name = "traffic linear q5_1", .run = case_product, .index = 4},
    {.name = "traffic linear iq4_nl", .run = case_product, .index = 5},
    {.name = "traffic linear mxfp4", .run = case_product, .index = 6},
    {.name = "traffic linear q2_k", .run = case_product, .index = 7},
    {.name = "traffic linear q3_k", .run = case_product, .index = 8},
    {.name = "traffic linear q4_k", .run = case_product, .index = 9},
    {.name = "traffic linear q5_k", .run = case_product, .index = 10},
    {.name = "traffic linear q6_k", .run = case_product, .index = 11},
    {.name = "traffic linear f16", .run = case_product, .index = 12},
    {.name = "traffic linear bf16", .run = case_product, .index = 13},
    {.name = "traffic linear f32", .run = case_product, .index = 14},
    {.name = "traffic rows", .run = case_rows},
    {.name = "traffic dequantise", .run = case_dequantise},
    {.name = "traffic embed", .run = case_embed},
    {.name = NULL},
};
