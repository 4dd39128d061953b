/* SPDX-License-Identifier: Apache-2.0
 *
 * The small matrix products that training a network is made of, in float. All matrices are row-major with a stride, in
 * numbers. Written once in matrix_body.h over sixteen lanes (engine/cpu/lanes_scalar.h); a sum is one chain of fused
 * multiply-adds in ascending order (`dots`: sixteen chains and a tree), so every tier gives the same bits.
 */
#ifndef POLICY_TRAIN_MATRIX_H
#define POLICY_TRAIN_MATRIX_H

#include "engine/cpu/cpu.h"

#include <stddef.h>
#include <stdint.h>

enum { MATRIX_LANES = 16 };

/* A matrix and the distance between its rows. */
struct matrix {
    float *values;
    size_t stride;
};

/* A matrix that is only read. */
struct matrix_view {
    const float *values;
    size_t stride;
};

struct matrix_kernels {
    /* out [rows][columns] = bias [columns] + a [rows][inner] b [inner][columns]. columns: a multiple of MATRIX_LANES.
     * bias NULL: 0. */
    void (*product)(uint32_t rows, uint32_t inner, uint32_t columns, struct matrix_view a, struct matrix_view b,
        const float *bias, struct matrix out);
    /* out [rows_a][columns] += sum over r of a[r][i] b[r][j]: the transpose of a [rows][rows_a] times b
     * [rows][columns].
     */
    void (*outer)(uint32_t rows, uint32_t rows_a, uint32_t columns, struct matrix_view a, struct matrix_view b,
        struct matrix out);
    /* out [rows][count] += dot products of a's rows [inner] with b's [count][inner]. */
    void (*dots)(
        uint32_t rows, uint32_t inner, uint32_t count, struct matrix_view a, struct matrix_view b, struct matrix out);
};

extern const struct matrix_kernels matrix_kernels_scalar, matrix_kernels_avx2, matrix_kernels_avx512;

/* Those of a tier that this machine has. */
const struct matrix_kernels *matrix_kernels(enum cpu_tier tier);

#endif
