/* SPDX-License-Identifier: Apache-2.0 */
#include "cuda/weights.h"

#include <stdlib.h>
#include <string.h>

#include "cuda/linear.h"
#include "cuda/step.h"
#include "engine/block.h"

static const struct {
    enum tensor_type type;
    size_t value_bytes; /* float formats */
} formats[LINEAR_FORMATS] = {
    [LINEAR_F32] = {TENSOR_F32, 4},
    [LINEAR_F16] = {TENSOR_F16, 2},
    [LINEAR_BF16] = {TENSOR_BF16, 2},
    [LINEAR_Q8_0] = {TENSOR_Q8_0, 0},
    [LINEAR_Q4_0] = {TENSOR_Q4_0, 0},
    [LINEAR_Q4_1] = {TENSOR_Q4_1, 0},
    [LINEAR_Q5_0] = {TENSOR_Q5_0, 0},
    [LINEAR_Q5_1] = {TENSOR_Q5_1, 0},
    [LINEAR_IQ4_NL] = {TENSOR_IQ4_NL, 0},
    [LINEAR_MXFP4] = {TENSOR_MXFP4, 0},
    [LINEAR_Q2_K] = {TENSOR_Q2_K, 0},
    [LINEAR_Q3_K] = {TENSOR_Q3_K, 0},
    [LINEAR_Q4_K] = {TENSOR_Q4_K, 0},
    [LINEAR_Q5_K] = {TENSOR_Q5_K, 0},
    [LINEAR_Q6_K] = {TENSOR_Q6_K, 0},
};

/* Packed on the host before it is sent; at least one row or strip. */
static const size_t PACK_BYTES = (size_t)1 << 20;

size_t cuda_weight_bytes(const struct backend_weight *weight) {
    return weight->bytes;
}

static int choose_format(const struct tensor *tensor, bool exact, enum linear_format *format, struct error *error) {
    for (int candidate = 0; candidate < LINEAR_FORMATS; candidate++) {
        if (formats[candidate].type != tensor->type)
            continue;
        *format = exact ? LINEAR_F32 : (enum linear_format)candidate;
        return 0;
    }
    return error_set(error, ERROR_UNSUPPORTED, "tensor %s: the CUDA backend cannot multiply with format %s",
        tensor->name, tensor_type_name(tensor->type));
}

static size_t strip_bytes(enum linear_format format, uint32_t columns) {
    const struct linear_layout *layout = &linear_layouts[format];
    size_t steps = columns / LINEAR_BLOCK;
    return steps * LINEAR_STEP_BYTES(*layout) + steps / LINEAR_SUPER_STEPS * layout->head;
}

/* ---- packing ---- */

/* Of 4 codes at each of two places, two bits each from `shift` on. */
static void pack_pairs(const uint8_t *first, const uint8_t *last, uint32_t shift, uint8_t out[2]) {
    uint8_t nibbles[4];
    for (int i = 0; i < 4; i++)
        nibbles[i] = (uint8_t)((first[i] >> shift & 3) | (last[i] >> shift & 3) << 2);
    out[0] = (uint8_t)(nibbles[0] | nibbles[1] << 4);
    out[1] = (uint8_t)(nibbles[2] | nibbles[3] << 4);
}

/* Nibbles of columns 4 t .. (first) and 16 + 4 t ..: side by side, or, for a table, one after another. */
static void pack_nibbles(const uint8_t *first, const uint8_t *last, bool table, uint8_t out[4]) {
    for (int i = 0; i < 4; i++)
        out[i] = (uint8_t)((first[i] & 15) | (last[i] & 15) << 4);
    if (!table)
        return;
    for (int i = 0; i < 2; i++) {
        out[i] = (uint8_t)((first[2 * i] & 15) | (first[2 * i + 1] & 15) << 4);
        out[2 + i] = (uint8_t)((last[2 * i] & 15) | (last[2 * i + 1] & 15) << 4);
    }
}

/* The codes of 32 columns of row `row`. */
static void pack_codes(enum linear_format format, const uint8_t codes[32], uint32_t row, uint8_t *step) {
    const struct linear_layout *layout = &linear_layouts[format];
    bool table = format == LINEAR_IQ4_NL || format == LINEAR_MXFP4;
    for (uint32_t t = 0; t < 4; t++) {
        const uint8_t *first = codes + 4 * t, *last = codes + 16 + 4 * t;
        uint32_t lane = row * 4 + t;
        uint8_t *high = step + LINEAR_HIGH_AT(*layout);
        if (layout->low == 8) {
            memcpy(step + lane * 8, first, 4);
            memcpy(step + lane * 8 + 4, last, 4);
        } else if (layout->low == 4) {
            pack_nibbles(first, last, table, step + lane * 4);
        } else {
            pack_pairs(first, last, 0, step + lane * 2);
        }
        if (layout->high == 2)
            pack_pairs(first, last, layout->low, high + lane * 2);
        for (uint32_t i = 0; layout->high == 1 && i < 4; i++)
            high[lane] |= (uint8_t)(first[i] >> layout->low << i | last[i] >> layout->low << (4 + i));
    }
}

static void pack_sixes(uint8_t *scales, uint32_t row, uint32_t first, uint32_t second) {
    scales[row] = (uint8_t)((first & 15) | (second & 15) << 4);
    scales[32 + row / 2] |= (uint8_t)((first >> 4 | second >> 4 << 2) << row % 2 * 4);
}

/* The scales of the 32 columns `index` of a block. */
static void pack_scales(
    enum linear_format format, const struct block *block, uint32_t index, uint32_t row, uint8_t *scales) {
    const int8_t *s = block->scales, *m = block->minima;
    switch (format) {
    case LINEAR_MXFP4: /* d is 2^(exponent - 128), a subnormal number below exponent 2 */
        scales[row] = (uint8_t)(block->d_bits < 0x80 ? block->d_bits >> 6 : (block->d_bits >> 7) + 1);
        return;
    case LINEAR_Q4_K:
    case LINEAR_Q5_K:
        pack_sixes(scales, row, (uint8_t)s[index], (uint8_t)m[index]);
        return;
    case LINEAR_Q3_K:
        pack_sixes(scales, row, (uint32_t)(s[2 * index] + 32), (uint32_t)(s[2 * index + 1] + 32));
        return;
    case LINEAR_Q2_K:
        for (uint32_t part = 0; part < 2; part++)
            scales[2 * row + part] = (uint8_t)(s[2 * index + part] | m[2 * index + part] << 4);
        return;
    case LINEAR_Q6_K:
        memcpy(scales + (size_t)2 * row, s + (size_t)2 * index, 2);
        return;
    default:
        memcpy(scales + (size_t)row * 2, &block->d_bits, 2);
        if (linear_layouts[format].scales > 64)
            memcpy(scales + 64 + (size_t)row * 2, &block->m_bits, 2);
    }
}

/* Codes that products take as numbers of two's complement. */
static void change_codes(enum linear_format format, struct block *block) {
    uint8_t sign = format == LINEAR_Q8_0 ? 0x80 : format == LINEAR_Q4_0 ? 8 : 0;
    for (uint32_t i = 0; i < LINEAR_BLOCK && sign != 0; i++)
        block->codes[i] ^= sign;
}

/* One row of a block format: codes and scales go to the row's places in a strip, which is zero. */
static void pack_row(const struct tensor *tensor, const struct backend_weight *weight, uint32_t row, uint8_t *strip) {
    const struct linear_layout *layout = &linear_layouts[weight->format];
    const uint8_t *from = tensor_row(tensor, row);
    uint32_t values = tensor_format_find(tensor->type)->block_values, lane = row % LINEAR_STRIP;
    struct block block;
    for (uint32_t column = 0; column < weight->columns; column += values) {
        block_read(tensor->type, from, &block);
        change_codes(weight->format, &block);
        if (layout->head > 0)
            memcpy(strip + (size_t)lane * 2, &block.d_bits, 2);
        if (layout->head > 64)
            memcpy(strip + 64 + (size_t)lane * 2, &block.m_bits, 2);
        strip += layout->head;
        for (uint32_t index = 0; index < values / LINEAR_BLOCK; index++) {
            pack_codes(weight->format, block.codes + (size_t)index * LINEAR_BLOCK, lane, strip);
            pack_scales(weight->format, &block, index, lane, strip + LINEAR_SCALES_AT(*layout));
            strip += LINEAR_STEP_BYTES(*layout);
        }
        from += tensor_format_find(tensor->type)->block_bytes;
    }
}

/* Strips through a buffer, as many at a time as it holds. */
static int send_strips(
    struct cuda_backend *cuda, const struct tensor *tensor, struct backend_weight *weight, struct error *error) {
    size_t most = PACK_BYTES / weight->strip_bytes > 0 ? PACK_BYTES / weight->strip_bytes : 1;
    uint8_t *buffer = malloc(most * weight->strip_bytes);
    if (buffer == NULL)
        return error_set(error, ERROR_MEMORY, "no memory to pack tensor %s", tensor->name);
    uint32_t strips = (weight->rows - 1) / LINEAR_STRIP + 1;
    for (size_t first = 0; first < strips; first += most) {
        size_t count = strips - first < most ? strips - first : most;
        memset(buffer, 0, count * weight->strip_bytes);
        for (size_t row = first * LINEAR_STRIP; row < (first + count) * LINEAR_STRIP && row < weight->rows; row++)
            pack_row(tensor, weight, (uint32_t)row, buffer + (row / LINEAR_STRIP - first) * weight->strip_bytes);
        cuda_upload_bytes(cuda, weight->data + first * weight->strip_bytes, buffer, count * weight->strip_bytes);
    }
    free(buffer);
    return 0;
}

/* One row of a float format, [pitch]; what is left of it stays as it was: zero. */
static void pack_values(const struct tensor *tensor, const struct backend_weight *weight, uint32_t row, char *out) {
    if (weight->format == LINEAR_F32 && tensor->type != TENSOR_F32) {
        tensor_dequantise_row(tensor, row, (float *)out);
        return;
    }
    size_t bytes = weight->columns * formats[weight->format].value_bytes;
    memcpy(out, tensor_row(tensor, row), bytes);
}

static int send_rows(
    struct cuda_backend *cuda, const struct tensor *tensor, struct backend_weight *weight, struct error *error) {
    if (weight->pitch == weight->columns && tensor->type == formats[weight->format].type && tensor->stride == 0) {
        cuda_upload_bytes(cuda, weight->data, tensor->data, weight->bytes);
        return 0;
    }
    size_t row_bytes = weight->pitch * formats[weight->format].value_bytes;
    size_t most = PACK_BYTES / row_bytes > 0 ? PACK_BYTES / row_bytes : 1;
    char *buffer = calloc(most, row_bytes);
    if (buffer == NULL)
        return error_set(error, ERROR_MEMORY, "no memory to pack tensor %s", tensor->name);
    for (size_t first = 0; first < weight->rows; first += most) {
        size_t count = weight->rows - first < most ? weight->rows - first : most;
        for (size_t i = 0; i < count; i++)
            pack_values(tensor, weight, (uint32_t)(first + i), buffer + i * row_bytes);
        cuda_upload_bytes(cuda, weight->data + first * row_bytes, buffer, count * row_bytes);
    }
    free(buffer);
    return 0;
}

/* ---- operations ---- */

struct backend_weight *cuda_weight_create(
    struct backend *backend, const struct tensor *tensor, bool exact, struct error *error) {
    struct cuda_backend *cuda = cuda_backend(backend);
    enum linear_format format = LINEAR_F32;
    if (choose_format(tensor, exact, &format, error) != 0 || tensor_check_size(tensor, error) != 0)
        return NULL;
    struct backend_weight *weight = calloc(1, sizeof *weight);
    if (weight == NULL) {
        error_set(error, ERROR_MEMORY, "no memory for tensor %s", tensor->name);
        return NULL;
    }
    weight->format = format;
    weight->rows = tensor->rows;
    weight->columns = tensor->columns;
    weight->pitch = tensor->columns;
    if (linear_is_float(format)) {
        weight->pitch = (tensor->columns + LINEAR_PITCH - 1) / LINEAR_PITCH * LINEAR_PITCH;
        weight->bytes = (size_t)weight->rows * weight->pitch * formats[format].value_bytes;
    } else {
        weight->strip_bytes = strip_bytes(format, tensor->columns);
        weight->bytes = ((size_t)(weight->rows - 1) / LINEAR_STRIP + 1) * weight->strip_bytes;
    }
    weight->data = cuda_allocate(backend, weight->bytes);
    if (weight->data == NULL) {
        error_set(error, ERROR_MEMORY, "no memory for tensor %s, %zu bytes", tensor->name, weight->bytes);
        goto fail;
    }
    if (linear_is_float(format) ? send_rows(cuda, tensor, weight, error) != 0
                                : send_strips(cuda, tensor, weight, error) != 0)
        goto fail;
    return weight;
fail:
    cuda_weight_free(backend, weight);
    return NULL;
}

void cuda_weight_free(struct backend *backend, struct backend_weight *weight) {
    if (weight == NULL)
        return;
    cuda_release(backend, weight->data);
    free(weight);
}

void cuda_embed(
    struct backend *backend, const struct backend_weight *weight, const int32_t *tokens, uint32_t rows, float *out) {
    struct cuda_backend *cuda = cuda_backend(backend);
    const int32_t *device_tokens = cuda_step_tokens(cuda, tokens);
    if (rows == 0)
        return;
    if (device_tokens == NULL) {
        struct cuda_stage stage;
        if (!cuda_stage_begin(cuda, cuda_stage_size(rows * sizeof *tokens), &stage))
            return;
        device_tokens = cuda_stage_copy(&stage, tokens, rows * sizeof *tokens);
        if (!cuda_stage_send(cuda, &stage))
            return;
    }
    launch_linear_embed(weight, device_tokens, rows, out, cuda->stream);
    cuda_check_launch(cuda, "embed");
}
