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
        int32_t sums[2] = {0};
        for (uint32_t i = 0; i < LINEAR_BLOCK; i++) {
            block->q[i] = (int8_t)rintf(x[i] * inverse);
            sums[i / 16] += block->q[i];
        }
        int32_t sum = sums[0] + sums[1];
        block->scaled_half[0] = block->scale * (float)sums[0];
        block->scaled_half[1] = block->scale * (float)sums[1];
        block->minus_8_sum = -8 * sum;
        block->minus_128_sum = -128 * sum;
        block->scaled_sum = block->scale * (float)sum;
    }
}

static int32_t dot_codes(const uint8_t *codes, int start, const int8_t *q, uint32_t count) {
    int32_t dot = 0;
    for (uint32_t i = 0; i < count; i++)
        dot += (codes[i] - start) * q[i];
    return dot;
}

/* Adds a block of row `lane`, for all rows of the panel. */
static void add_block(
    const struct linear_tile *tile, enum linear_format format, uint32_t step, uint32_t lane, float sums[LINEAR_PANEL]) {
    const struct linear_traits traits = linear_traits_of(format);
    const struct linear_block *x = (const struct linear_block *)tile->panel + (size_t)step * tile->rows;
    const uint32_t columns = LINEAR_BLOCK / traits.parts;
    const uint16_t *super;
    const uint8_t *block = linear_find_block(format, tile->strip, step, &super);
    uint8_t codes[LINEAR_BLOCK];
    linear_codes(format, block, lane, codes);
    for (uint32_t part = 0; part < traits.parts; part++) {
        float scale = linear_scale(format, block, super, lane, part);
        float minimum = linear_minimum(format, block, super, lane, part);
        for (uint32_t row = 0; row < tile->rows; row++) {
            int32_t dot = dot_codes(codes + part * columns, traits.start, x[row].q + part * columns, columns);
            sums[row] = fmaf((float)dot, scale * x[row].scale, sums[row]);
            if (traits.minima || traits.offset > 0)
                sums[row] = fmaf(minimum, traits.parts == 1 ? x[row].scaled_sum : x[row].scaled_half[part], sums[row]);
        }
    }
}

static float load_value(enum linear_format format, const void *strip, size_t i) {
    if (format == LINEAR_F32)
        return ((const float *)strip)[i];
    uint16_t value = ((const uint16_t *)strip)[i];
    return format == LINEAR_F16 ? half_to_float(value) : bfloat_to_float(value);
}

static void add_column(
    const struct linear_tile *tile, enum linear_format format, uint32_t step, uint32_t lane, float sums[LINEAR_PANEL]) {
    const float *x = (const float *)tile->panel + (size_t)step * tile->rows;
    float weight = load_value(format, tile->strip, (size_t)step * LINEAR_STRIP + lane);
    for (uint32_t row = 0; row < tile->rows; row++)
        sums[row] = fmaf(weight, x[row], sums[row]);
}

LINEAR_INLINE void multiply(const struct linear_tile *tile, enum linear_format format) {
    for (uint32_t lane = 0; lane < LINEAR_STRIP; lane++) {
        float sums[LINEAR_PANEL] = {0};
        for (uint32_t step = 0; step < tile->steps; step++) {
            if (linear_is_float(format))
                add_column(tile, format, step, lane, sums);
            else
                add_block(tile, format, step, lane, sums);
        }
        for (uint32_t row = 0; row < tile->rows; row++) {
            float *out = tile->out + row * tile->out_stride + lane;
            *out = tile->add ? *out + sums[row] : sums[row];
        }
    }
}

#include "engine/cpu/linear_body.h"

const struct linear_kernels linear_kernels_scalar = LINEAR_KERNELS;
