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

static float sum_blocks(const struct linear_tile *tile, enum linear_format format, uint32_t row, uint32_t lane) {
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

static float load_value(enum linear_format format, const void *strip, size_t i) {
    if (format == LINEAR_F32)
        return ((const float *)strip)[i];
    uint16_t value = ((const uint16_t *)strip)[i];
    return format == LINEAR_F16 ? half_to_float(value) : bfloat_to_float(value);
}

static float sum_values(const struct linear_tile *tile, enum linear_format format, uint32_t row, uint32_t lane) {
    const float *panel = tile->panel;
    float sum = 0;
    for (size_t column = 0; column < tile->steps; column++) {
        float weight = load_value(format, tile->strip, column * LINEAR_STRIP + lane);
        sum = fmaf(weight, panel[column * tile->rows + row], sum);
    }
    return sum;
}

LINEAR_INLINE void multiply(const struct linear_tile *tile, enum linear_format format) {
    for (uint32_t row = 0; row < tile->rows; row++) {
        for (uint32_t lane = 0; lane < LINEAR_STRIP; lane++) {
            float sum =
                linear_is_float(format) ? sum_values(tile, format, row, lane) : sum_blocks(tile, format, row, lane);
            float *out = tile->out + row * tile->out_stride + lane;
            *out = tile->add ? *out + sum : sum;
        }
    }
}

#include "engine/cpu/linear_body.h"

const struct linear_kernels linear_kernels_scalar = LINEAR_KERNELS;
