/* SPDX-License-Identifier: Apache-2.0 */
#include "tests/parity/reference_linear.h"

#include <math.h>
#include <string.h>

double reference_half(uint16_t bits) {
    int exponent = bits >> 10 & 31;
    double fraction = bits & 1023;
    double value = exponent == 0 ? ldexp(fraction, -24) : ldexp(1024 + fraction, exponent - 25);
    if (exponent == 31)
        value = fraction == 0 ? (double)INFINITY : (double)NAN;
    return bits & 0x8000 ? -value : value;
}

double reference_round_to_half(double value) {
    if (value == 0 || !isfinite(value))
        return value;
    int exponent;
    frexp(value, &exponent); /* value = f * 2^exponent, f in [0.5, 1) */
    int ulp = exponent - 11 > -24 ? exponent - 11 : -24;
    double rounded = ldexp(nearbyint(ldexp(value, -ulp)), ulp);
    return fabs(rounded) > 65504 ? copysign((double)INFINITY, value) : rounded;
}

static uint16_t read_16(const unsigned char *bytes) {
    return (uint16_t)(bytes[0] | bytes[1] << 8);
}

/* One block of 32: d, m and the integers, so that value = d * q + m. */
struct block {
    double d;
    double m;
    int q[32];
};

static struct block read_block(const struct tensor *tensor, uint32_t row, uint32_t index) {
    size_t bytes = tensor->type == TENSOR_Q8_0 ? 34 : tensor->type == TENSOR_Q4_0 ? 18 : 20;
    const unsigned char *at =
        (const unsigned char *)tensor->data + ((size_t)row * (tensor->columns / 32) + index) * bytes;
    struct block block = {.d = reference_half(read_16(at))};
    const unsigned char *q = at + 2;
    if (tensor->type == TENSOR_Q4_1) {
        block.m = reference_half(read_16(at + 2));
        q = at + 4;
    }
    for (int i = 0; i < 32; i++) {
        int nibble = i < 16 ? q[i % 16] & 15 : q[i % 16] >> 4;
        if (tensor->type == TENSOR_Q8_0)
            block.q[i] = q[i] < 128 ? q[i] : q[i] - 256;
        else
            block.q[i] = tensor->type == TENSOR_Q4_0 ? nibble - 8 : nibble;
    }
    return block;
}

static bool has_blocks(const struct tensor *tensor) {
    return tensor->type == TENSOR_Q8_0 || tensor->type == TENSOR_Q4_0 || tensor->type == TENSOR_Q4_1;
}

static double read_value(const struct tensor *tensor, size_t index) {
    if (tensor->type == TENSOR_F16) {
        uint16_t half;
        memcpy(&half, (const char *)tensor->data + index * 2, 2);
        return reference_half(half);
    }
    uint32_t bits = 0;
    if (tensor->type == TENSOR_F32)
        memcpy(&bits, (const char *)tensor->data + index * 4, 4);
    else
        bits = (uint32_t)read_16((const unsigned char *)tensor->data + index * 2) << 16;
    float value;
    memcpy(&value, &bits, 4);
    return value;
}

void reference_weight_row(const struct tensor *tensor, uint32_t row, double *values) {
    if (!has_blocks(tensor)) {
        for (uint32_t i = 0; i < tensor->columns; i++)
            values[i] = read_value(tensor, (size_t)row * tensor->columns + i);
        return;
    }
    for (uint32_t index = 0; index < tensor->columns / 32; index++) {
        struct block block = read_block(tensor, row, index);
        for (int i = 0; i < 32; i++)
            values[index * 32 + i] = (float)(block.d * block.q[i] + block.m);
    }
}

static float largest(const float *x) {
    float amax = 0;
    for (int i = 0; i < 32; i++) {
        if (isnan(x[i]))
            return NAN;
        amax = fmaxf(amax, fabsf(x[i]));
    }
    return amax;
}

/* Activations of a block, rounded by the rule. Returns the scale. */
static float round_activations(const float *x, int q[32]) {
    float amax = largest(x);
    memset(q, 0, 32 * sizeof q[0]);
    if (!isfinite(amax))
        return NAN;
    float scale = (float)reference_round_to_half(amax / 127.0f);
    if (scale == 0)
        return 0;
    float inverse = 127.0f / amax;
    for (int i = 0; i < 32; i++)
        q[i] = (int)nearbyintf(x[i] * inverse);
    return scale;
}

static float product_of_blocks(const struct tensor *tensor, uint32_t row, const float *x) {
    float sum = 0;
    for (uint32_t index = 0; index < tensor->columns / 32; index++) {
        struct block block = read_block(tensor, row, index);
        int q[32];
        float scale = round_activations(x + (size_t)index * 32, q);
        int dot = 0;
        int sum_q = 0;
        for (int i = 0; i < 32; i++) {
            dot += block.q[i] * q[i];
            sum_q += q[i];
        }
        sum = fmaf((float)dot, (float)block.d * scale, sum);
        if (tensor->type == TENSOR_Q4_1)
            sum = fmaf((float)block.m, scale * (float)sum_q, sum);
    }
    return sum;
}

static float product_of_floats(const double *weights, const float *x, uint32_t columns) {
    float sum = 0;
    for (uint32_t i = 0; i < columns; i++)
        sum = fmaf((float)weights[i], x[i], sum);
    return sum;
}

void reference_linear_bits(
    const struct tensor *tensor, bool exact, const float *x, uint32_t rows, bool add, float *out, size_t stride) {
    double weights[tensor->columns];
    for (uint32_t column = 0; column < tensor->rows; column++) {
        reference_weight_row(tensor, column, weights);
        for (size_t row = 0; row < rows; row++) {
            const float *activations = x + row * tensor->columns;
            float result = has_blocks(tensor) && !exact ? product_of_blocks(tensor, column, activations)
                                                        : product_of_floats(weights, activations, tensor->columns);
            float *place = out + row * stride + column;
            *place = add ? *place + result : result;
        }
    }
}

/* How far a rounded activation may be from x: half a step of q, the step's own rounding to f16 (relative 2^-11, at
 * least half its smallest step), and float32 noise. */
static double activation_error(const float *block) {
    double amax = largest(block);
    double step = amax / 127;
    return 0.5 * step + amax * 0x1p-11 + 127 * 0x1p-25 + amax * 0x1p-20;
}

/* The same for x as f16 or bf16: half a unit in the last place, or of the smallest number. Rows that f16 cannot hold
 * are divided by a power of two first, which leaves their largest at 2^14 at least. */
static double half_error(enum tensor_type type, double x, double row_largest) {
    if (type == TENSOR_BF16)
        return fabs(x) * 0x1p-8 + 0x1p-134;
    return fabs(x) * 0x1p-11 + 0x1p-25 * fmax(1, row_largest * 0x1p-14);
}

void reference_linear_true(const struct tensor *tensor, bool exact, enum tensor_type rounded_to, const float *x,
    uint32_t rows, double *value, double *bound) {
    double weights[tensor->columns];
    bool halves = rounded_to != TENSOR_F32;
    bool blocks = has_blocks(tensor) && !exact;
    for (uint32_t column = 0; column < tensor->rows; column++) {
        reference_weight_row(tensor, column, weights);
        for (size_t row = 0; row < rows; row++) {
            const float *activations = x + row * tensor->columns;
            double sum = 0, magnitude = 0, error = 0, largest_x = 0;
            for (uint32_t i = 0; i < tensor->columns; i++)
                largest_x = fmax(largest_x, fabs(activations[i]));
            for (uint32_t i = 0; i < tensor->columns; i++) {
                double x_error = halves   ? half_error(rounded_to, activations[i], largest_x)
                                 : blocks ? activation_error(activations + i / 32 * 32)
                                          : 0;
                double w_error = halves && blocks ? half_error(rounded_to, weights[i], 0) : 0;
                sum += weights[i] * activations[i];
                magnitude += fabs(weights[i] * activations[i]);
                error += fabs(weights[i]) * x_error + w_error * (fabs(activations[i]) + x_error);
            }
            value[row * tensor->rows + column] = sum;
            bound[row * tensor->rows + column] = error + (magnitude + error) * (tensor->columns + 4) * 0x1p-23 + 1e-30;
        }
    }
}
