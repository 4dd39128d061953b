/* SPDX-License-Identifier: Apache-2.0 */
#include "engine/quantise.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

enum { BLOCK = 32 };

int quantise_find_format(const char *name, enum tensor_type *format) {
    static const struct {
        const char *name;
        enum tensor_type format;
    } known[] = {{"none", TENSOR_F32}, {"q8_0", TENSOR_Q8_0}, {"q4_0", TENSOR_Q4_0}};
    for (size_t i = 0; i < sizeof known / sizeof known[0]; i++) {
        if (strcmp(known[i].name, name) == 0) {
            *format = known[i].format;
            return 0;
        }
    }
    return ERROR_INVALID;
}

bool quantise_takes(const struct tensor *tensor, enum tensor_type format) {
    bool stored = tensor->type == TENSOR_F32 || tensor->type == TENSOR_F16 || tensor->type == TENSOR_BF16;
    bool wanted = format == TENSOR_Q8_0 || format == TENSOR_Q4_0;
    return stored && wanted && tensor->rows > 1 && tensor->columns % BLOCK == 0;
}

static float largest(const float *values) {
    float found = values[0];
    for (int i = 1; i < BLOCK; i++)
        if (fabsf(values[i]) > fabsf(found) || isnan(values[i]))
            found = values[i];
    return found;
}

/* Writes the scale; what values are multiplied by, or -1 when the scale is no finite number. */
static int write_scale(float scale, uint8_t *out, float *inverse) {
    uint16_t half = float_to_half(scale);
    out[0] = (uint8_t)half;
    out[1] = (uint8_t)(half >> 8);
    *inverse = scale == 0 ? 0 : 1 / scale;
    return isfinite(half_to_float(half)) && isfinite(*inverse) ? 0 : -1;
}

static int quantise_q8_0(const float *values, uint8_t *out) {
    float inverse;
    if (write_scale(fabsf(largest(values)) / 127, out, &inverse) != 0)
        return -1;
    for (int i = 0; i < BLOCK; i++)
        out[2 + i] = (uint8_t)(int8_t)roundf(values[i] * inverse);
    return 0;
}

static uint8_t code_q4_0(float value, float inverse) {
    float code = value * inverse + 8.5F; /* two roundings: the product's, the sum's */
    return code >= 15 ? 15 : (uint8_t)code;
}

static int quantise_q4_0(const float *values, uint8_t *out) {
    float inverse;
    if (write_scale(largest(values) / -8, out, &inverse) != 0)
        return -1;
    for (int i = 0; i < BLOCK / 2; i++)
        out[2 + i] = (uint8_t)(code_q4_0(values[i], inverse) | code_q4_0(values[BLOCK / 2 + i], inverse) << 4);
    return 0;
}

int quantise_tensor(
    const struct tensor *tensor, enum tensor_type format, struct tensor *out, void **memory, struct error *error) {
    const struct tensor_format *stored = tensor_format_find(format);
    const size_t row_bytes = tensor_row_bytes(format, tensor->columns);
    float *values = malloc(tensor->columns * sizeof *values);
    uint8_t *blocks = malloc(tensor->rows * row_bytes);
    int code = values == NULL || blocks == NULL ? ERROR_MEMORY : 0;
    if (code != 0)
        error_set(error, code, "no memory to quantise tensor %s", tensor->name);
    uint8_t *block = blocks;
    for (uint32_t row = 0; code == 0 && row < tensor->rows; row++) {
        tensor_dequantise_row(tensor, row, values);
        for (uint32_t column = 0; code == 0 && column < tensor->columns; column += BLOCK) {
            int failed =
                format == TENSOR_Q8_0 ? quantise_q8_0(values + column, block) : quantise_q4_0(values + column, block);
            if (failed != 0)
                code = error_set(error, ERROR_FORMAT,
                    "tensor %s, row %u, columns from %u: too large for format %s, or "
                    "not numbers",
                    tensor->name, row, column, stored->name);
            block += stored->block_bytes;
        }
    }
    free(values);
    if (code != 0) {
        free(blocks);
        return code;
    }
    *out = (struct tensor){.name = tensor->name,
        .type = format,
        .rows = tensor->rows,
        .columns = tensor->columns,
        .data = blocks,
        .bytes = tensor->rows * row_bytes};
    *memory = blocks;
    return 0;
}
