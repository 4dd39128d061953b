/* SPDX-License-Identifier: Apache-2.0 */
#include "tests/parity/reference_linear.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

double reference_half(uint16_t bits) {
    int exponent = bits >> 10 & 31;
    double fraction = bits & 1023;
    double value = exponent == 0 ? fraction * 0x1p-24 : (1024 + fraction) * (double)(1u << exponent) * 0x1p-25;
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

/* 32 values of a row: in each of `parts` equal parts, value = d * q + m. */
struct block {
    int parts;
    double d[2], m[2];
    int q[32];
};

/* Bytes of a block in the file, and its values. */
static size_t stored_bytes(enum tensor_type type) {
    switch (type) {
    case TENSOR_Q8_0:
        return 34;
    case TENSOR_Q4_0:
    case TENSOR_IQ4_NL:
        return 18;
    case TENSOR_Q4_1:
        return 20;
    case TENSOR_Q5_0:
        return 22;
    case TENSOR_Q5_1:
        return 24;
    case TENSOR_Q2_K:
        return 84;
    case TENSOR_Q3_K:
        return 110;
    case TENSOR_Q4_K:
        return 144;
    case TENSOR_Q5_K:
        return 176;
    case TENSOR_Q6_K:
        return 210;
    case TENSOR_MXFP4:
        return 17;
    default:
        return 0;
    }
}

static bool is_k(enum tensor_type type) {
    return type >= TENSOR_Q2_K && type <= TENSOR_Q6_K;
}

static int nibble_of(const unsigned char *q, int i) {
    return i < 16 ? q[i] & 15 : q[i - 16] >> 4;
}

/* Bit `bit` of the string of bits that begins at `bytes`. */
static int bit_of(const unsigned char *bytes, int bit) {
    return bytes[bit / 8] >> bit % 8 & 1;
}

/* Value i of 32, of formats with blocks of 32. */
static int plain_code(enum tensor_type type, const unsigned char *at, int i) {
    static const int nl[16] = {-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113};
    static const int e2m1[8] = {0, 1, 2, 3, 4, 6, 8, 12}; /* doubled; the fourth bit is the sign */
    switch (type) {
    case TENSOR_Q8_0:
        return at[2 + i] < 128 ? at[2 + i] : at[2 + i] - 256;
    case TENSOR_Q4_0:
        return nibble_of(at + 2, i) - 8;
    case TENSOR_Q4_1:
        return nibble_of(at + 4, i);
    case TENSOR_Q5_0:
        return nibble_of(at + 6, i) + 16 * bit_of(at + 2, i);
    case TENSOR_Q5_1:
        return nibble_of(at + 8, i) + 16 * bit_of(at + 4, i);
    case TENSOR_IQ4_NL:
        return nl[nibble_of(at + 2, i)];
    default: {
        int code = nibble_of(at + 1, i);
        return code < 8 ? e2m1[code] : -e2m1[code - 8];
    }
    }
}

/* Value i of 256. Bytes hold values of two or four runs of 32, one above the other. */
static int k_code(enum tensor_type type, const unsigned char *at, int i) {
    int byte = i % 32, run = i / 32;
    switch (type) {
    case TENSOR_Q2_K:
        return at[16 + run / 4 * 32 + byte] >> 2 * (run % 4) & 3;
    case TENSOR_Q3_K:
        return (at[32 + run / 4 * 32 + byte] >> 2 * (run % 4) & 3) + 4 * (at[byte] >> run & 1);
    case TENSOR_Q4_K:
        return at[16 + run / 2 * 32 + byte] >> 4 * (run % 2) & 15;
    case TENSOR_Q5_K:
        return (at[48 + run / 2 * 32 + byte] >> 4 * (run % 2) & 15) + 16 * (at[16 + byte] >> run & 1);
    default: { /* Q6_K */
        int nibble = at[run / 4 * 64 + run % 2 * 32 + byte] >> (run % 4 < 2 ? 0 : 4) & 15;
        return nibble + 16 * (at[128 + run / 4 * 32 + byte] >> 2 * (run % 4) & 3);
    }
    }
}

/* Six bits: number n of Q4_K's and Q5_K's scales (0 to 7) and minima (8 to 15). */
static int k4_scale(const unsigned char *at, int n) {
    int i = n % 8;
    if (i < 4)
        return at[i + n / 8 * 4] & 63;
    return (n < 8 ? at[i + 4] & 15 : at[i + 4] >> 4) + 16 * (at[i - 4 + n / 8 * 4] >> 6);
}

/* Part p of the 256 values: of 16 or 32. */
static void k_scales(enum tensor_type type, const unsigned char *at, int p, double *d, double *m) {
    *m = 0;
    switch (type) {
    case TENSOR_Q2_K:
        *d = reference_half(read_16(at + 80)) * (at[p] & 15);
        *m = -reference_half(read_16(at + 82)) * (at[p] >> 4);
        return;
    case TENSOR_Q3_K: {
        int low = p < 8 ? at[96 + p] & 15 : at[96 + p - 8] >> 4, high = at[104 + p % 4] >> 2 * (p / 4) & 3;
        *d = reference_half(read_16(at + 108)) * (low + 16 * high - 32);
        *m = -4 * *d;
        return;
    }
    case TENSOR_Q6_K:
        *d = reference_half(read_16(at + 208)) * (at[192 + p] < 128 ? at[192 + p] : at[192 + p] - 256);
        *m = -32 * *d;
        return;
    default:
        *d = reference_half(read_16(at)) * k4_scale(at + 4, p);
        *m = -reference_half(read_16(at + 2)) * k4_scale(at + 4, p + 8);
    }
}

static struct block read_block(const struct tensor *tensor, uint32_t row, uint32_t index) {
    enum tensor_type type = tensor->type;
    uint32_t values = is_k(type) ? 256 : 32, stored = index * 32 / values;
    size_t row_bytes = tensor->columns / values * stored_bytes(type);
    const unsigned char *at = (const unsigned char *)tensor->data + row * row_bytes + stored * stored_bytes(type);
    struct block block = {.parts = 1};
    if (is_k(type)) {
        block.parts = type == TENSOR_Q4_K || type == TENSOR_Q5_K ? 1 : 2;
        for (int p = 0; p < block.parts; p++)
            k_scales(type, at, (int)(index % 8) * block.parts + p, &block.d[p], &block.m[p]);
        for (int i = 0; i < 32; i++)
            block.q[i] = k_code(type, at, (int)(index % 8) * 32 + i);
        return block;
    }
    block.d[0] = type == TENSOR_MXFP4 ? ldexp(1, at[0] - 128) : reference_half(read_16(at));
    if (type == TENSOR_Q4_1 || type == TENSOR_Q5_1)
        block.m[0] = reference_half(read_16(at + 2));
    else if (type == TENSOR_Q5_0)
        block.m[0] = -16 * block.d[0];
    for (int i = 0; i < 32; i++)
        block.q[i] = plain_code(type, at, i);
    return block;
}

static bool has_minima(enum tensor_type type) {
    return is_k(type) || type == TENSOR_Q4_1 || type == TENSOR_Q5_1 || type == TENSOR_Q5_0;
}

static bool has_blocks(const struct tensor *tensor) {
    return stored_bytes(tensor->type) > 0;
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
            values[index * 32 + i] =
                (float)(block.d[i * block.parts / 32] * block.q[i] + block.m[i * block.parts / 32]);
    }
}

static float largest(const float *x) {
    float amax = 0;
    for (int i = 0; i < 32; i++) {
        if (isnan(x[i]))
            return NAN;
        amax = fabsf(x[i]) > amax ? fabsf(x[i]) : amax;
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

static void *host(size_t bytes) {
    void *memory = malloc(bytes);
    if (memory == NULL)
        abort();
    return memory;
}

/* Rows of activations, rounded: each once, not for every column. */
struct rounded {
    uint32_t blocks; /* of a row */
    float *scales;   /* [rows][blocks] */
    int *q;          /* [rows][blocks][32] */
};

static struct rounded round_rows(const float *x, uint32_t rows, uint32_t columns) {
    size_t blocks = (size_t)rows * (columns / 32);
    struct rounded rounded = {
        .blocks = columns / 32, .scales = host(blocks * sizeof(float)), .q = host(blocks * 32 * sizeof(int))};
    for (size_t i = 0; i < blocks; i++)
        rounded.scales[i] = round_activations(x + i * 32, rounded.q + i * 32);
    return rounded;
}

static float product_of_blocks(
    enum tensor_type type, const struct block *weights, const struct rounded *rounded, uint32_t row) {
    float sum = 0;
    for (uint32_t index = 0; index < rounded->blocks; index++) {
        const struct block *block = &weights[index];
        const int *q = rounded->q + ((size_t)row * rounded->blocks + index) * 32;
        float scale = rounded->scales[(size_t)row * rounded->blocks + index];
        for (int p = 0; p < block->parts; p++) {
            int dot = 0, sum_q = 0;
            for (int i = p * 32 / block->parts; i < (p + 1) * 32 / block->parts; i++) {
                dot += block->q[i] * q[i];
                sum_q += q[i];
            }
            sum = fmaf((float)dot, (float)block->d[p] * scale, sum);
            if (has_minima(type))
                sum = fmaf((float)block->m[p], scale * (float)sum_q, sum);
        }
    }
    return sum;
}

static void put(float *place, float result, bool add) {
    *place = add ? *place + result : result;
}

static void linear_of_blocks(
    const struct tensor *tensor, const float *x, uint32_t rows, bool add, float *out, size_t stride) {
    struct rounded rounded = round_rows(x, rows, tensor->columns);
    struct block weights[tensor->columns / 32];
    for (uint32_t column = 0; column < tensor->rows; column++) {
        for (uint32_t index = 0; index < rounded.blocks; index++)
            weights[index] = read_block(tensor, column, index);
        for (uint32_t row = 0; row < rows; row++)
            put(out + row * stride + column, product_of_blocks(tensor->type, weights, &rounded, row), add);
    }
    free(rounded.scales);
    free(rounded.q);
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
    if (has_blocks(tensor) && !exact) {
        linear_of_blocks(tensor, x, rows, add, out, stride);
        return;
    }
    for (uint32_t column = 0; column < tensor->rows; column++) {
        reference_weight_row(tensor, column, weights);
        for (size_t row = 0; row < rows; row++)
            put(out + row * stride + column, product_of_floats(weights, x + row * tensor->columns, tensor->columns),
                add);
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

/* How far each activation of a row may be from x. */
static void activation_errors(
    enum tensor_type rounded_to, bool blocks, const float *x, uint32_t columns, double *error) {
    double largest_x = 0;
    for (uint32_t i = 0; i < columns; i++)
        largest_x = fmax(largest_x, fabs(x[i]));
    for (uint32_t i = 0; i < columns; i++) {
        if (rounded_to != TENSOR_F32)
            error[i] = half_error(rounded_to, x[i], largest_x);
        else if (!blocks)
            error[i] = 0;
        else
            error[i] = i % 32 == 0 ? activation_error(x + i) : error[i - 1];
    }
}

void reference_linear_true(const struct tensor *tensor, bool exact, enum tensor_type rounded_to, const float *x,
    uint32_t rows, double *value, double *bound) {
    uint32_t columns = tensor->columns;
    double weights[columns], w_error[columns];
    double *x_error = host((size_t)rows * columns * sizeof *x_error);
    bool blocks = has_blocks(tensor) && !exact;
    for (size_t row = 0; row < rows; row++)
        activation_errors(rounded_to, blocks, x + row * columns, columns, x_error + row * columns);
    for (uint32_t column = 0; column < tensor->rows; column++) {
        reference_weight_row(tensor, column, weights);
        for (uint32_t i = 0; i < columns; i++)
            w_error[i] = rounded_to != TENSOR_F32 && blocks ? half_error(rounded_to, weights[i], 0) : 0;
        for (size_t row = 0; row < rows; row++) {
            const float *activations = x + row * columns;
            const double *own = x_error + row * columns;
            double sum = 0, magnitude = 0, error = 0;
            for (uint32_t i = 0; i < columns; i++) {
                sum += weights[i] * activations[i];
                magnitude += fabs(weights[i] * activations[i]);
                error += fabs(weights[i]) * own[i] + w_error[i] * (fabs(activations[i]) + own[i]);
            }
            value[row * tensor->rows + column] = sum;
            bound[row * tensor->rows + column] = error + (magnitude + error) * (columns + 4) * 0x1p-23 + 1e-30;
        }
    }
    free(x_error);
}
