/* SPDX-License-Identifier: Apache-2.0
 *
 * Paths of the CUDA backend's matrix products that `linear` takes on some devices or for some shapes only
 * (cuda/linear.h), each asked for by its limits.
 */
#include "tests/parity/parity_linear_product.h"
#include "tests/parity/reference_linear.h"

#include <math.h>
#include <stdlib.h>

enum { LARGE_ROW = 2 };

static void check_true_product(struct parity *parity, const struct product *p, enum tensor_type rounded_to) {
    size_t count = (size_t)p->rows * p->weight_rows;
    double *value = parity_host(count * sizeof *value);
    double *bound = parity_host(count * sizeof *bound);
    reference_linear_true(&p->tensor.tensor, p->kind->exact, rounded_to, p->x, p->rows, value, bound);
    for (size_t i = 0; i < count; i++) {
        double want = value[i] + (p->add ? (double)p->before[i] : 0);
        double limit = bound[i] + fabs(want) * 0x1p-23;
        if (!parity_check_true(parity, fabs(p->got[i] - want) <= limit,
                "%s %ux%u, R=%u, row %zu: %g is not within %g of %g", p->kind->name, p->weight_rows, p->columns,
                p->rows, i / p->weight_rows, (double)p->got[i], limit, want))
            break;
    }
    free(value);
    free(bound);
}

/* Enough rows and weights for the kernel of four strips by 128 rows, the last ones of both in part. */
static void case_wide(struct parity *parity) {
    const struct product_kind *kind = &product_kinds[parity->round % PRODUCT_BLOCK_KINDS];
    struct product p = product_create(parity, kind, parity_random(parity, 100, 300), 32 * parity_random(parity, 1, 9),
        parity_random(parity, 65, 300), parity_random(parity, 0, 1));
    uint32_t multiprocessors = product_cuda(parity)->multiprocessors;
    product_cuda(parity)->multiprocessors = 1;
    p.got = product_multiply(parity, &p, p.x, p.rows);
    product_cuda(parity)->multiprocessors = multiprocessors;
    reference_linear_bits(&p.tensor.tensor, false, p.x, p.rows, p.add, p.before, p.weight_rows);
    parity_check_bits(parity, p.got, p.before, (size_t)p.rows * p.weight_rows, "%s %ux%u, R=%u, add %d", kind->name,
        p.weight_rows, p.columns, p.rows, p.add);
    product_free(parity, &p);
}

/* Rows so long that the rings of all kernels go round more than once; by the kernels for few rows, some and many. */
static void case_long_rows(struct parity *parity) {
    const uint32_t rows[] = {1, 12, 7, 40, 20};
    const struct product_kind *kind = &product_kinds[parity->round % PRODUCT_KINDS];
    uint32_t numbers = sizeof rows / sizeof rows[0], first = parity_is_full() ? 0 : parity->round % numbers;
    for (uint32_t i = first; i < (parity_is_full() ? numbers : first + 1); i++) {
        struct product p = product_create(
            parity, kind, parity_random(parity, 1, 40), 32 * parity_random(parity, 100, 112), rows[i], true);
        p.got = product_multiply(parity, &p, p.x, p.rows);
        if (!linear_is_float(p.weight->format)) {
            reference_linear_bits(&p.tensor.tensor, false, p.x, p.rows, p.add, p.before, p.weight_rows);
            parity_check_bits(parity, p.got, p.before, (size_t)p.rows * p.weight_rows, "%s %ux%u, R=%u", kind->name,
                p.weight_rows, p.columns, p.rows);
        } else {
            bool halves = kind->type != TENSOR_F32 && p.rows > LINEAR_STREAM_ROWS;
            check_true_product(parity, &p, halves ? kind->type : TENSOR_F32);
        }
        product_free(parity, &p);
    }
}

/* More rows than are prepared at once. */
static void case_rows_at_once(struct parity *parity) {
    const struct product_kind *kind = &product_kinds[parity->entry->index];
    struct product p = product_create(parity, kind, 5, 64, LINEAR_ROWS_AT_ONCE + 3, true);
    p.got = product_multiply(parity, &p, p.x, p.rows);
    check_true_product(parity, &p, kind->type == TENSOR_F16 || kind->type == TENSOR_BF16 ? kind->type : TENSOR_F32);
    product_free(parity, &p);
}

/* Block formats through f16 and cuBLASLt, in several parts; a row that is not finite becomes NaN, and no other. */
static void case_library(struct parity *parity) {
    struct linear_limits limits = *product_limits(parity);
    const struct product_kind *kind = &product_kinds[parity->round % PRODUCT_BLOCK_KINDS];
    struct product p = product_create(parity, kind, parity_random(parity, 1, 100), 32 * parity_random(parity, 1, 9),
        parity_random(parity, 2, 70), parity_random(parity, 0, 1));
    product_limits(parity)->blocks_library = 1;
    product_limits(parity)->dequantised_bytes = parity_random(parity, 0, 1) ? 1 : limits.dequantised_bytes;
    p.got = product_multiply(parity, &p, p.x, p.rows);
    check_true_product(parity, &p, TENSOR_F16);
    p.x[parity_random(parity, 0, p.columns - 1)] = parity->round % 2 ? NAN : -INFINITY;
    float *spoilt = product_multiply(parity, &p, p.x, p.rows);
    for (uint32_t i = 0; i < p.weight_rows; i++)
        parity_check_true(parity, isnan(spoilt[i]), "%s: element %u of a row that is not finite", kind->name, i);
    parity_check_bits(parity, spoilt + p.weight_rows, p.got + p.weight_rows, (size_t)(p.rows - 1) * p.weight_rows,
        "%s: rows beside one that is not finite", kind->name);
    free(spoilt);
    *product_limits(parity) = limits;
    product_free(parity, &p);
}

/* Activations that f16 cannot hold, by the kernel for halves and by cuBLASLt. */
static void case_large(struct parity *parity) {
    struct linear_limits limits = *product_limits(parity);
    bool blocks = parity->round % 3 == 2;
    struct product p = product_create(parity,
        blocks ? &product_kinds[parity->round % PRODUCT_BLOCK_KINDS] : &product_kinds[PRODUCT_F16], 40, 96,
        parity->round % 2 ? 20 : LINEAR_LIBRARY_ROWS + 1, parity_random(parity, 0, 1));
    for (uint32_t i = 0; i < p.columns; i++)
        p.x[LARGE_ROW * p.columns + i] = (float)ldexp(parity_normal(parity), (int)parity_random(parity, 10, 60));
    if (blocks)
        product_limits(parity)->blocks_library = 1;
    p.got = product_multiply(parity, &p, p.x, p.rows);
    check_true_product(parity, &p, TENSOR_F16);
    *product_limits(parity) = limits;
    product_free(parity, &p);
}

/* With limits.deterministic a row's bits do not depend on how many rows there are. */
static void case_deterministic(struct parity *parity) {
    struct linear_limits limits = *product_limits(parity);
    struct product p = product_create(parity, &product_kinds[parity->entry->index], parity_random(parity, 1, 70),
        32 * parity_random(parity, 1, 5), parity_random(parity, 65, 150), false);
    product_limits(parity)->deterministic = true;
    product_limits(parity)->blocks_library = 1;
    p.got = product_multiply(parity, &p, p.x, p.rows);
    for (uint32_t i = 0; i < 4; i++) {
        uint32_t count = i == 0 ? 1 : parity_random(parity, 1, 40), first = parity_random(parity, 0, p.rows - count);
        float *alone = product_multiply(parity, &p, p.x + (size_t)first * p.columns, count);
        parity_check_bits(parity, alone, p.got + (size_t)first * p.weight_rows, (size_t)count * p.weight_rows,
            "%s: rows %u to %u of %u", p.kind->name, first, first + count, p.rows);
        free(alone);
    }
    *product_limits(parity) = limits;
    product_free(parity, &p);
}

const struct parity_case parity_linear_paths_cases[] = {
    {.name = "linear paths, wide", .run = case_wide, .rounds = 6},
    {.name = "linear paths, long rows", .run = case_long_rows, .rounds = 8 * PRODUCT_KINDS},
    {.name = "linear paths, rows at once, q8_0", .run = case_rows_at_once, .index = 0},
    {.name = "linear paths, rows at once, f16", .run = case_rows_at_once, .index = PRODUCT_F16},
    {.name = "linear paths, rows at once, f32", .run = case_rows_at_once, .index = PRODUCT_F16 + 2},
    {.name = "linear paths, library", .run = case_library, .rounds = 8 * PRODUCT_BLOCK_KINDS},
    {.name = "linear paths, large", .run = case_large, .rounds = 12},
    {.name = "linear paths, deterministic q8_0", .run = case_deterministic, .rounds = 2, .index = 0},
    {.name = "linear paths, deterministic q4_1", .run = case_deterministic, .rounds = 2, .index = 2},
    {.name = "linear paths, deterministic q6_k", .run = case_deterministic, .rounds = 2, .index = PRODUCT_F16 - 1},
    {.name = "linear paths, deterministic f16", .run = case_deterministic, .rounds = 2, .index = PRODUCT_F16},
    {.name = "linear paths, deterministic bf16", .run = case_deterministic, .rounds = 2, .index = PRODUCT_F16 + 1},
    {.name = "linear paths, deterministic f32", .run = case_deterministic, .rounds = 2, .index = PRODUCT_F16 + 2},
    {.name = NULL},
};
