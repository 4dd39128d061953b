/* SPDX-License-Identifier: Apache-2.0
 *
 * The kernels of matrix.h, over one of lanes_*.h: include after it. A tile is as many accumulators as registers hold.
 */
#ifndef POLICY_TRAIN_MATRIX_BODY_H
#define POLICY_TRAIN_MATRIX_BODY_H

#include "policy/train/matrix.h"

_Static_assert((int)MATRIX_LANES == (int)LANES, "matrix.h promises as many");

/* Rows of a tile: each is one accumulator. */
enum { MATRIX_TILE = LANES_BLOCK_VECTORS > 1 ? 8 : LANES_BLOCK_ROWS > 1 ? 6 : 1, DOTS_TILE = MATRIX_TILE > 1 ? 4 : 1 };

/* The columns [at, at + LANES) of `tile` rows of a product; tile is a constant where this is inlined. */
static inline __attribute__((always_inline)) void product_tile(uint32_t tile, uint32_t inner, const float *a,
    size_t stride, struct matrix_view b, struct lanes start, struct matrix out) {
    struct lanes sums[MATRIX_TILE];
    for (uint32_t r = 0; r < tile; r++)
        sums[r] = start;
    for (uint32_t k = 0; k < inner; k++) {
        struct lanes right = lanes_load(b.values + k * b.stride);
        for (uint32_t r = 0; r < tile; r++)
            sums[r] = lanes_fma(lanes_set(a[r * stride + k]), right, sums[r]);
    }
    for (uint32_t r = 0; r < tile; r++)
        lanes_store(out.values + r * out.stride, sums[r]);
}

static void matrix_product(uint32_t rows, uint32_t inner, uint32_t columns, struct matrix_view a, struct matrix_view b,
    const float *bias, struct matrix out) {
    for (uint32_t at = 0; at < columns; at += LANES) {
        struct lanes start = bias != NULL ? lanes_load(bias + at) : lanes_set(0);
        struct matrix_view right = {b.values + at, b.stride};
        uint32_t row = 0;
        for (; row + MATRIX_TILE <= rows; row += MATRIX_TILE)
            product_tile(MATRIX_TILE, inner, a.values + row * a.stride, a.stride, right, start,
                (struct matrix){out.values + row * out.stride + at, out.stride});
        for (; row < rows; row++)
            product_tile(1, inner, a.values + row * a.stride, a.stride, right, start,
                (struct matrix){out.values + row * out.stride + at, out.stride});
    }
}

/* Columns [at, at + width) of `tile` rows of the sum of outer products. */
static inline __attribute__((always_inline)) void outer_tile(uint32_t tile, uint32_t rows, uint32_t width,
    const float *a, size_t stride, struct matrix_view b, struct matrix out) {
    struct lanes sums[MATRIX_TILE];
    for (uint32_t i = 0; i < tile; i++)
        sums[i] = lanes_load_part(out.values + i * out.stride, width, 0);
    for (uint32_t r = 0; r < rows; r++) {
        const float *from = b.values + r * b.stride;
        struct lanes right = width == LANES ? lanes_load(from) : lanes_load_part(from, width, 0);
        for (uint32_t i = 0; i < tile; i++)
            sums[i] = lanes_fma(lanes_set(a[r * stride + i]), right, sums[i]);
    }
    for (uint32_t i = 0; i < tile; i++)
        lanes_store_part(out.values + i * out.stride, width, sums[i]);
}

static void matrix_outer(
    uint32_t rows, uint32_t rows_a, uint32_t columns, struct matrix_view a, struct matrix_view b, struct matrix out) {
    for (uint32_t at = 0; at < columns; at += LANES) {
        uint32_t width = columns - at < LANES ? columns - at : LANES, i = 0;
        struct matrix_view right = {b.values + at, b.stride};
        for (; i + MATRIX_TILE <= rows_a; i += MATRIX_TILE)
            outer_tile(MATRIX_TILE, rows, width, a.values + i, a.stride, right,
                (struct matrix){out.values + i * out.stride + at, out.stride});
        for (; i < rows_a; i++)
            outer_tile(1, rows, width, a.values + i, a.stride, right,
                (struct matrix){out.values + i * out.stride + at, out.stride});
    }
}

/* `tile` dot products of one row. */
static inline __attribute__((always_inline)) void dots_tile(
    uint32_t tile, uint32_t inner, const float *a, struct matrix_view b, float *out) {
    struct lanes sums[DOTS_TILE];
    for (uint32_t i = 0; i < tile; i++)
        sums[i] = lanes_set(0);
    uint32_t k = 0;
    for (; k + LANES <= inner; k += LANES) {
        struct lanes left = lanes_load(a + k);
        for (uint32_t i = 0; i < tile; i++)
            sums[i] = lanes_fma(left, lanes_load(b.values + i * b.stride + k), sums[i]);
    }
    if (k < inner) {
        struct lanes left = lanes_load_part(a + k, inner - k, 0);
        for (uint32_t i = 0; i < tile; i++)
            sums[i] = lanes_fma(left, lanes_load_part(b.values + i * b.stride + k, inner - k, 0), sums[i]);
    }
    for (uint32_t i = 0; i < tile; i++)
        out[i] += lanes_sum(sums[i]);
}

static void matrix_dots(
    uint32_t rows, uint32_t inner, uint32_t count, struct matrix_view a, struct matrix_view b, struct matrix out) {
    for (uint32_t r = 0; r < rows; r++) {
        const float *row = a.values + r * a.stride;
        uint32_t i = 0;
        for (; i + DOTS_TILE <= count; i += DOTS_TILE)
            dots_tile(DOTS_TILE, inner, row, (struct matrix_view){b.values + i * b.stride, b.stride},
                out.values + r * out.stride + i);
        for (; i < count; i++)
            dots_tile(1, inner, row, (struct matrix_view){b.values + i * b.stride, b.stride},
                out.values + r * out.stride + i);
    }
}

#define MATRIX_KERNELS                                                                                                 \
    { .product = matrix_product, .outer = matrix_outer, .dots = matrix_dots }

#endif
