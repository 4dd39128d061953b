/* SPDX-License-Identifier: Apache-2.0
 *
 * What all tiers' matrix products have in common. A tier's file defines
 *   multiply(tile, format)   one tile, for a constant format
 *   round_block(x, block)    32 activations
 * then includes this and makes its table of LINEAR_KERNELS.
 */
#include "engine/cpu/linear.h"

static void multiply_f32(const struct linear_tile *tile) {
    multiply(tile, LINEAR_F32);
}

static void multiply_f16(const struct linear_tile *tile) {
    multiply(tile, LINEAR_F16);
}

static void multiply_bf16(const struct linear_tile *tile) {
    multiply(tile, LINEAR_BF16);
}

static void multiply_q8_0(const struct linear_tile *tile) {
    multiply(tile, LINEAR_Q8_0);
}

static void multiply_q4_0(const struct linear_tile *tile) {
    multiply(tile, LINEAR_Q4_0);
}

static void multiply_q4_1(const struct linear_tile *tile) {
    multiply(tile, LINEAR_Q4_1);
}

static void multiply_q5_0(const struct linear_tile *tile) {
    multiply(tile, LINEAR_Q5_0);
}

static void multiply_q5_1(const struct linear_tile *tile) {
    multiply(tile, LINEAR_Q5_1);
}

static void multiply_q2_k(const struct linear_tile *tile) {
    multiply(tile, LINEAR_Q2_K);
}

static void multiply_q3_k(const struct linear_tile *tile) {
    multiply(tile, LINEAR_Q3_K);
}

static void multiply_q4_k(const struct linear_tile *tile) {
    multiply(tile, LINEAR_Q4_K);
}

static void multiply_q5_k(const struct linear_tile *tile) {
    multiply(tile, LINEAR_Q5_K);
}

static void multiply_q6_k(const struct linear_tile *tile) {
    multiply(tile, LINEAR_Q6_K);
}

static void multiply_iq4_nl(const struct linear_tile *tile) {
    multiply(tile, LINEAR_IQ4_NL);
}

static void multiply_mxfp4(const struct linear_tile *tile) {
    multiply(tile, LINEAR_MXFP4);
}

static void round_panel(const float *x, uint32_t rows, uint32_t columns, struct linear_block *panel) {
    for (uint32_t row = 0; row < rows; row++)
        for (uint32_t block = 0; block < columns / LINEAR_BLOCK; block++)
            round_block(x + (size_t)row * columns + (size_t)block * LINEAR_BLOCK, panel + (size_t)block * rows + row);
}

#define LINEAR_KERNELS                                                                                                 \
    {                                                                                                                  \
        .round_panel = round_panel, .multiply = {                                                                      \
            [LINEAR_F32] = multiply_f32,                                                                               \
            [LINEAR_F16] = multiply_f16,                                                                               \
            [LINEAR_BF16] = multiply_bf16,                                                                             \
            [LINEAR_Q8_0] = multiply_q8_0,                                                                             \
            [LINEAR_Q4_0] = multiply_q4_0,                                                                             \
            [LINEAR_Q4_1] = multiply_q4_1,                                                                             \
            [LINEAR_Q5_0] = multiply_q5_0,                                                                             \
            [LINEAR_Q5_1] = multiply_q5_1,                                                                             \
            [LINEAR_Q2_K] = multiply_q2_k,                                                                             \
            [LINEAR_Q3_K] = multiply_q3_k,                                                                             \
            [LINEAR_Q4_K] = multiply_q4_k,                                                                             \
            [LINEAR_Q5_K] = multiply_q5_k,                                                                             \
            [LINEAR_Q6_K] = multiply_q6_k,                                                                             \
            [LINEAR_IQ4_NL] = multiply_iq4_nl,                                                                         \
            [LINEAR_MXFP4] = multiply_mxfp4,                                                                           \
        }                                                                                                              \
    }
