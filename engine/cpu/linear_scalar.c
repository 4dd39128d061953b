/* SPDX-License-Identifier: Apache-2.0 */
#include "engine/cpu/linear.h"

#include <math.h>
#include <string.h>

/* By bit patterns, so that a NaN counts as the largest. */
static float largest_magnitude(const float *x) {
    uint32_t largest = 0;
    for (uint32_t i = 0; i < LINEAR_BLOCK; i++) {
        uint32_t bits;
        memcpy(&bits, &x[i], sizeof bits);
        bits &= 0x7fffffff;
        if (bits > largest)
            largest = bits;
    }
    float magnitude;
    memcpy(&magnitude, &largest, sizeof magnitude);
    return magnitude;
}

static void round_block(const float *x, struct linear_block *block) {
    float amax = largest_magnitude(x);
    memset(block, 0, sizeof *block);
    block->scale = isfinite(amax) ? half_to_float(float_to_half(amax / 127)) : NAN;
    if (isfinite(amax) && block->scale > 0) {
        float inverse = 127 / amax;
        int32_t sum = 0;
        for (uint32_t i = 0; i < LINEAR_BLOCK; i++) {
            block->q[i] = (int8_t)rintf(x[i] * inverse);
            sum += block->q[i];
        }
        block->minus_8_sum = -8 * sum;
        block->minus_128_sum = -128 * sum;
        block->scaled_sum = block->scale * (float)sum;
    }
}

static void round_panel(const float *x, uint32_t rows, uint32_t columns, struct linear_block *panel) {
    for (uint32_t block = 0; block < columns / LINEAR_BLOCK; block++)
        for (uint32_t row = 0; row < rows; row++)
            round_block(x + (size_t)row * columns + (size_t)block * LINEAR_BLOCK, panel + (size_t)block * rows + row);
}

static void store(const struct linear_tile *tile, uint32_t row, uint32_t lane, float value) {
    float *out = tile->out + row * tile->out_stride + lane;
    *out = tile->add ? *out + value : value;
}

static float load_f32(const void *values, size_t i) {
    return ((const float *)values)[i];
}

static float load_f16(const void *values, size_t i) {
    return half_to_float(((const uint16_t *)values)[i]);
}

static float load_bf16(const void *values, size_t i) {
    return bfloat_to_float(((const uint16_t *)values)[i]);
}

static void multiply_float(const struct linear_tile *tile, float (*load)(const void *values, size_t i)) {
    const float *panel = tile->panel;
    for (uint32_t row = 0; row < tile->rows; row++) {
        for (uint32_t lane = 0; lane < LINEAR_STRIP; lane++) {
            float sum = 0;
            for (size_t column = 0; column < tile->steps; column++)
                sum = fmaf(load(tile->strip, column * LINEAR_STRIP + lane), panel[column * tile->rows + row], sum);
            store(tile, row, lane, sum);
        }
    }
}

static void multiply_f32(const struct linear_tile *tile) {
    multiply_float(tile, load_f32);
}

static void multiply_f16(const struct linear_tile *tile) {
    multiply_float(tile, load_f16);
}

static void multiply_bf16(const struct linear_tile *tile) {
    multiply_float(tile, load_bf16);
}

/* Bytes of `lane`'s words in one packed block, [groups][4] with 64 bytes between groups. */
static const uint8_t *words_of(const uint8_t *block, uint32_t groups, uint32_t lane) {
    return block + (size_t)(lane / LINEAR_LANES) * groups * 64 + (size_t)(lane % LINEAR_LANES) * 4;
}

static int32_t dot_bytes(const uint8_t *words, const int8_t *q) {
    int32_t sum = 0;
    for (uint32_t i = 0; i < LINEAR_BLOCK; i++)
        sum += words[i / 4 * 64 + i % 4] * q[i];
    return sum;
}

static int32_t dot_nibbles(const uint8_t *words, const int8_t *q) {
    int32_t sum = 0;
    for (uint32_t i = 0; i < LINEAR_BLOCK / 2; i++) {
        uint8_t pair = words[i / 4 * 64 + i % 4];
        sum += (pair & 15) * q[i] + (pair >> 4) * q[i + 16];
    }
    return sum;
}

static float multiply_lane(const struct linear_tile *tile, enum linear_format format, uint32_t row, uint32_t lane) {
    const uint8_t *strip = tile->strip;
    const struct linear_block *panel = tile->panel;
    uint32_t groups = format == LINEAR_Q8_0 ? 8 : 4;
    float sum = 0;
    for (uint32_t step = 0; step < tile->steps; step++) {
        const struct linear_block *x = &panel[(size_t)step * tile->rows + row];
        const uint8_t *words = words_of(strip, groups, lane);
        const uint16_t *scales = (const uint16_t *)(strip + (size_t)groups * 128);
        int32_t dot = format == LINEAR_Q8_0 ? dot_bytes(words, x->q) + x->minus_128_sum : dot_nibbles(words, x->q);
        if (format == LINEAR_Q4_0)
            dot += x->minus_8_sum;
        sum = fmaf((float)dot, half_to_float(scales[lane]) * x->scale, sum);
        if (format == LINEAR_Q4_1)
            sum = fmaf(half_to_float(scales[LINEAR_STRIP + lane]), x->scaled_sum, sum);
        strip += linear_step_bytes(format);
    }
    return sum;
}

static void multiply_blocks(const struct linear_tile *tile, enum linear_format format) {
    for (uint32_t row = 0; row < tile->rows; row++)
        for (uint32_t lane = 0; lane < LINEAR_STRIP; lane++)
            store(tile, row, lane, multiply_lane(tile, format, row, lane));
}

static void multiply_q8_0(const struct linear_tile *tile) {
    multiply_blocks(tile, LINEAR_Q8_0);
}

static void multiply_q4_0(const struct linear_tile *tile) {
    multiply_blocks(tile, LINEAR_Q4_0);
}

static void multiply_q4_1(const struct linear_tile *tile) {
    multiply_blocks(tile, LINEAR_Q4_1);
}

const struct linear_kernels linear_kernels_scalar = {
    .round_panel = round_panel,
    .multiply =
        {
            [LINEAR_F32] = multiply_f32,
            [LINEAR_F16] = multiply_f16,
            [LINEAR_BF16] = multiply_bf16,
            [LINEAR_Q8_0] = multiply_q8_0,
            [LINEAR_Q4_0] = multiply_q4_0,
            [LINEAR_Q4_1] = multiply_q4_1,
        },
};
