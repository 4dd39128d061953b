/* SPDX-License-Identifier: Apache-2.0 */
#include "engine/tensor.h"

#include "engine/block.h"
#include "engine/bytes.h"

#include <stdio.h>
#include <string.h>

static const struct tensor_format formats[] = {
    {TENSOR_F32, "F32", 1, 4},
    {TENSOR_F16, "F16", 1, 2},
    {TENSOR_BF16, "BF16", 1, 2},
    {TENSOR_Q8_0, "Q8_0", 32, 34},
    {TENSOR_Q4_0, "Q4_0", 32, 18},
    {TENSOR_Q4_1, "Q4_1", 32, 20},
    {TENSOR_Q5_0, "Q5_0", 32, 22},
    {TENSOR_Q5_1, "Q5_1", 32, 24},
    {TENSOR_Q2_K, "Q2_K", 256, 84},
    {TENSOR_Q3_K, "Q3_K", 256, 110},
    {TENSOR_Q4_K, "Q4_K", 256, 144},
    {TENSOR_Q5_K, "Q5_K", 256, 176},
    {TENSOR_Q6_K, "Q6_K", 256, 210},
    {TENSOR_IQ4_NL, "IQ4_NL", 32, 18},
    {TENSOR_MXFP4, "MXFP4", 32, 17},
};

/* Every number that ggml has given out; gaps are formats that were withdrawn. */
static const char *const type_names[] = {
    [0] = "F32",
    [1] = "F16",
    [2] = "Q4_0",
    [3] = "Q4_1",
    [6] = "Q5_0",
    [7] = "Q5_1",
    [8] = "Q8_0",
    [9] = "Q8_1",
    [10] = "Q2_K",
    [11] = "Q3_K",
    [12] = "Q4_K",
    [13] = "Q5_K",
    [14] = "Q6_K",
    [15] = "Q8_K",
    [16] = "IQ2_XXS",
    [17] = "IQ2_XS",
    [18] = "IQ3_XXS",
    [19] = "IQ1_S",
    [20] = "IQ4_NL",
    [21] = "IQ3_S",
    [22] = "IQ2_S",
    [23] = "IQ4_XS",
    [24] = "I8",
    [25] = "I16",
    [26] = "I32",
    [27] = "I64",
    [28] = "F64",
    [29] = "IQ1_M",
    [30] = "BF16",
    [34] = "TQ1_0",
    [35] = "TQ2_0",
    [39] = "MXFP4",
};

const struct tensor_format *tensor_format_find(uint32_t type) {
    for (size_t i = 0; i < sizeof formats / sizeof formats[0]; i++)
        if ((uint32_t)formats[i].type == type)
            return &formats[i];
    return NULL;
}

void tensor_format_names(char names[TENSOR_FORMAT_NAMES_BYTES]) {
    size_t at = 0;
    for (size_t i = 0; i < sizeof formats / sizeof formats[0] && at < TENSOR_FORMAT_NAMES_BYTES; i++)
        at += (size_t)snprintf(names + at, TENSOR_FORMAT_NAMES_BYTES - at, "%s%s", i == 0 ? "" : ", ", formats[i].name);
}

const char *tensor_type_name(uint32_t type) {
    static _Thread_local char text[24];
    if (type < sizeof type_names / sizeof type_names[0] && type_names[type] != NULL)
        return type_names[type];
    snprintf(text, sizeof text, "type %u", type);
    return text;
}

size_t tensor_row_bytes(enum tensor_type type, uint32_t columns) {
    const struct tensor_format *format = tensor_format_find(type);
    return (size_t)(columns / format->block_values) * format->block_bytes;
}

const void *tensor_row(const struct tensor *tensor, uint32_t row) {
    size_t stride = tensor->stride != 0 ? tensor->stride : tensor_row_bytes(tensor->type, tensor->columns);
    return (const char *)tensor->data + row * stride;
}

struct tensor tensor_cut_rows(const struct tensor *tensor, uint32_t first, uint32_t count) {
    struct tensor part = *tensor;
    size_t skipped = (size_t)((const char *)tensor_row(tensor, first) - (const char *)tensor->data);
    part.data = (const char *)tensor->data + skipped;
    part.rows = count;
    part.first_row += first;
    part.bytes -= skipped;
    return part;
}

struct tensor tensor_cut_columns(const struct tensor *tensor, uint32_t first, uint32_t count) {
    struct tensor part = *tensor;
    size_t skipped = tensor_row_bytes(tensor->type, first);
    part.stride = tensor->stride != 0 ? tensor->stride : tensor_row_bytes(tensor->type, tensor->columns);
    part.data = (const char *)tensor->data + skipped;
    part.columns = count;
    part.first_column += first;
    part.bytes -= skipped;
    return part;
}

int tensor_check_size(const struct tensor *tensor, struct error *error) {
    uint32_t block = tensor_format_find(tensor->type)->block_values;
    if (tensor->rows == 0 || tensor->columns == 0 || tensor->columns % block != 0)
        return error_set(error, ERROR_FORMAT, "tensor %s is %u x %u, it must have whole blocks of %u columns",
            tensor->name, tensor->rows, tensor->columns, block);
    size_t row_bytes = tensor_row_bytes(tensor->type, tensor->columns);
    size_t need = (tensor->rows - 1) * (tensor->stride != 0 ? tensor->stride : row_bytes) + row_bytes;
    if (tensor->bytes < need)
        return error_set(error, ERROR_FORMAT, "tensor %s has %zu bytes, %u x %u need %zu", tensor->name, tensor->bytes,
            tensor->rows, tensor->columns, need);
    return 0;
}

static float float_from_bits(uint32_t bits) {
    float value;
    memcpy(&value, &bits, sizeof value);
    return value;
}

static uint32_t float_bits(float value) {
    uint32_t bits;
    memcpy(&bits, &value, sizeof bits);
    return bits;
}

float half_to_float(uint16_t half) {
    uint32_t sign = (uint32_t)(half & 0x8000) << 16;
    uint32_t exponent = half >> 10 & 0x1f;
    uint32_t fraction = half & 0x3ff;
    if (exponent == 0x1f)
        return float_from_bits(sign | 0x7f800000 | fraction << 13);
    if (exponent == 0) {
        float magnitude = (float)fraction * 0x1p-24f; /* subnormal: exact in binary32 */
        return sign ? -magnitude : magnitude;
    }
    return float_from_bits(sign | (exponent + 127 - 15) << 23 | fraction << 13);
}

/* Drops the low `shift` bits, rounding to nearest even. */
static uint32_t round_shift(uint32_t bits, unsigned shift) {
    uint32_t kept = bits >> shift;
    uint32_t rest = bits & ((1u << shift) - 1);
    uint32_t tie = 1u << (shift - 1);
    return kept + (rest > tie || (rest == tie && (kept & 1)));
}

uint16_t float_to_half(float value) {
    uint32_t bits = float_bits(value);
    uint32_t sign = bits >> 16 & 0x8000;
    uint32_t magnitude = bits & 0x7fffffff;
    if (magnitude > 0x7f800000)
        return (uint16_t)(sign | 0x7e00 | (magnitude >> 13 & 0x3ff));
    if (magnitude >= 0x47800000) /* 65536 and up, infinity too; 65520 to 65536 carry into infinity below */
        return (uint16_t)(sign | 0x7c00);
    if (magnitude >= 0x38800000) /* 2^-14: normal; a carry out of the fraction rightly raises the exponent */
        return (uint16_t)(sign | (round_shift(magnitude, 13) - ((127 - 15) << 10)));
    if (magnitude < 0x33000000) /* below 2^-25, half of the smallest subnormal */
        return (uint16_t)sign;
    unsigned exponent = magnitude >> 23;
    uint32_t significand = (magnitude & 0x7fffff) | 0x800000;
    return (uint16_t)(sign | round_shift(significand, 126 - exponent));
}

float bfloat_to_float(uint16_t value) {
    return float_from_bits((uint32_t)value << 16);
}

uint16_t float_to_bfloat(float value) {
    uint32_t bits = float_bits(value);
    if ((bits & 0x7fffffff) > 0x7f800000)
        return (uint16_t)(bits >> 16 | 0x40); /* quiet, so that a payload in the low half does not turn into infinity */
    return (uint16_t)round_shift(bits, 16);
}

static float load_value(enum tensor_type type, const uint8_t *bytes) {
    if (type == TENSOR_F32)
        return float_from_bits(load_u32(bytes));
    return type == TENSOR_F16 ? half_to_float(load_u16(bytes)) : bfloat_to_float(load_u16(bytes));
}

void tensor_dequantise_row(const struct tensor *tensor, uint32_t row, float *out) {
    const struct tensor_format *format = tensor_format_find(tensor->type);
    const struct block_format *blocks = block_format_find(tensor->type);
    const uint8_t *bytes = tensor_row(tensor, row);
    struct block block;
    for (uint32_t column = 0; column < tensor->columns; column += format->block_values, bytes += format->block_bytes) {
        if (blocks == NULL) {
            out[column] = load_value(tensor->type, bytes);
            continue;
        }
        block_read(tensor->type, bytes, &block);
        block_dequantise(blocks, &block, out + column);
    }
}
