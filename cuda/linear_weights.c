/* SPDX-License-Identifier: Apache-2.0 */
#include "cuda/weights.h"

#include <stdlib.h>
#include <string.h>

#include "cuda/linear.h"
#include "cuda/step.h"

static const struct {
    enum tensor_type type;
    size_t value_bytes; /* float formats */
    size_t word_bytes;  /* block formats: of a row in a packed block */
    size_t scale_bytes; /* the same: f16 d and m */
} formats[LINEAR_FORMATS] = {
    [LINEAR_F32] = {TENSOR_F32, 4, 0, 0},
    [LINEAR_F16] = {TENSOR_F16, 2, 0, 0},
    [LINEAR_BF16] = {TENSOR_BF16, 2, 0, 0},
    [LINEAR_Q8_0] = {TENSOR_Q8_0, 0, 32, 2},
    [LINEAR_Q4_0] = {TENSOR_Q4_0, 0, 16, 2},
    [LINEAR_Q4_1] = {TENSOR_Q4_1, 0, 16, 4},
};

/* Packed on the host before it is sent; at least one row or strip. */
static const size_t PACK_BYTES = (size_t)1 << 20;

/* Bytes of one packed block of 32 columns by 32 rows (block formats). */
static size_t step_bytes(enum linear_format format) {
    return LINEAR_STRIP * (formats[format].word_bytes + formats[format].scale_bytes);
}

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

/* ---- packing ---- */

/* One row of a block format: words and scales go to the row's places in a strip. */
static void pack_row(const char *row, const struct backend_weight *weight, char *strip, uint32_t lane) {
    size_t word_bytes = formats[weight->format].word_bytes, scale_bytes = formats[weight->format].scale_bytes;
    for (uint32_t step = 0; step < weight->columns / LINEAR_BLOCK; step++) {
        char *scales = strip + LINEAR_STRIP * word_bytes;
        for (size_t i = 0; i < scale_bytes / 2; i++)
            memcpy(scales + (i * LINEAR_STRIP + lane) * 2, row + i * 2, 2);
        for (size_t i = 0; i < word_bytes / 4; i++) {
            uint32_t word;
            memcpy(&word, row + scale_bytes + i * 4, 4);
            if (weight->format == LINEAR_Q4_0)
                word ^= 0x88888888u;
            size_t place = weight->format == LINEAR_Q8_0 ? i % 4 * 2 + i / 4 : i;
            memcpy(strip + lane * word_bytes + place * 4, &word, 4);
        }
        row += scale_bytes + word_bytes;
        strip += step_bytes(weight->format);
    }
}

/* Strips through a buffer, as many at a time as it holds. */
static int send_strips(
    struct cuda_backend *cuda, const struct tensor *tensor, struct backend_weight *weight, struct error *error) {
    size_t most = PACK_BYTES / weight->strip_bytes > 0 ? PACK_BYTES / weight->strip_bytes : 1;
    char *buffer = malloc(most * weight->strip_bytes);
    if (buffer == NULL)
        return error_set(error, ERROR_MEMORY, "no memory to pack tensor %s", tensor->name);
    uint32_t strips = (weight->rows - 1) / LINEAR_STRIP + 1;
    for (size_t first = 0; first < strips; first += most) {
        size_t count = strips - first < most ? strips - first : most;
        memset(buffer, 0, count * weight->strip_bytes);
        for (size_t row = first * LINEAR_STRIP; row < (first + count) * LINEAR_STRIP && row < weight->rows; row++)
            pack_row(tensor_row(tensor, (uint32_t)row), weight,
                buffer + (row / LINEAR_STRIP - first) * weight->strip_bytes, row % LINEAR_STRIP);
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
        weight->strip_bytes = tensor->columns / LINEAR_BLOCK * step_bytes(format);
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
