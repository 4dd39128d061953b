/* SPDX-License-Identifier: Apache-2.0 */
#include "tests/unit/quantise.h"

#include <math.h>
#include <string.h>

static void store_u16(uint8_t *to, uint16_t value) {
    to[0] = (uint8_t)value;
    to[1] = (uint8_t)(value >> 8);
}

/* Stores scale as f16 and returns what will be read back. */
static float store_half(uint8_t *to, float value) {
    uint16_t half = float_to_half(value);
    store_u16(to, half);
    return half_to_float(half);
}

static int quotient(float value, float scale, int low, int high) {
    int rounded = scale == 0 ? 0 : (int)lrintf(value / scale);
    return rounded < low ? low : rounded > high ? high : rounded;
}

static void pack_nibbles(const int *numbers, uint8_t *out) {
    for (int j = 0; j < 16; j++)
        out[j] = (uint8_t)(numbers[j] | numbers[j + 16] << 4);
}

static void quantise_block(enum tensor_type type, const float *x, uint8_t *out) {
    float low = x[0];
    float high = x[0];
    float largest = 0;
    int numbers[32];
    for (int j = 0; j < 32; j++) {
        low = fminf(low, x[j]);
        high = fmaxf(high, x[j]);
        largest = fmaxf(largest, fabsf(x[j]));
    }
    if (type == TENSOR_Q8_0) {
        float scale = store_half(out, largest / 127);
        for (int j = 0; j < 32; j++)
            out[2 + j] = (uint8_t)(int8_t)quotient(x[j], scale, -127, 127);
    } else if (type == TENSOR_Q4_0) {
        float scale = store_half(out, largest / 7);
        for (int j = 0; j < 32; j++)
            numbers[j] = quotient(x[j], scale, -8, 7) + 8;
        pack_nibbles(numbers, out + 2);
    } else {
        float scale = store_half(out, (high - low) / 15);
        float minimum = store_half(out + 2, low);
        for (int j = 0; j < 32; j++)
            numbers[j] = quotient(x[j] - minimum, scale, 0, 15);
        pack_nibbles(numbers, out + 4);
    }
}

void test_quantise(enum tensor_type type, const float *values, size_t count, void *out) {
    const struct tensor_format *format = tensor_format_find(type);
    uint8_t *block = out;
    for (size_t i = 0; i < count; i += format->block_values) {
        uint32_t bits;
        memcpy(&bits, &values[i], sizeof bits);
        if (type == TENSOR_F32) {
            store_u16(block, (uint16_t)bits);
            store_u16(block + 2, (uint16_t)(bits >> 16));
        } else if (type == TENSOR_F16) {
            store_u16(block, float_to_half(values[i]));
        } else if (type == TENSOR_BF16) {
            store_u16(block, float_to_bfloat(values[i]));
        } else {
            quantise_block(type, values + i, block);
        }
        block += format->block_bytes;
    }
}
