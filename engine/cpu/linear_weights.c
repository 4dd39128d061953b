/* SPDX-License-Identifier: Apache-2.0 */
#include "engine/cpu/linear.h"

#include <stdlib.h>
#include <string.h>

static const struct {
    enum tensor_type type;
    size_t step_bytes; /* 32 rows of one packed block or column */
} formats[LINEAR_FORMATS] = {
    [LINEAR_F32] = {TENSOR_F32, LINEAR_STRIP * 4},
    [LINEAR_F16] = {TENSOR_F16, LINEAR_STRIP * 2},
    [LINEAR_BF16] = {TENSOR_BF16, LINEAR_STRIP * 2},
    [LINEAR_Q8_0] = {TENSOR_Q8_0, LINEAR_STRIP *(32 + 2)},
    [LINEAR_Q4_0] = {TENSOR_Q4_0, LINEAR_STRIP *(16 + 2)},
    [LINEAR_Q4_1] = {TENSOR_Q4_1, LINEAR_STRIP *(16 + 4)},
};

bool linear_is_float(enum linear_format format) {
    return format == LINEAR_F32 || format == LINEAR_F16 || format == LINEAR_BF16;
}

size_t linear_step_bytes(enum linear_format format) {
    return formats[format].step_bytes;
}

size_t cpu_weight_bytes(const struct backend_weight *weight) {
    return weight->strips * weight->strip_bytes;
}

static int choose_format(const struct tensor *tensor, bool exact, enum linear_format *format, struct error *error) {
    for (int candidate = 0; candidate < LINEAR_FORMATS; candidate++) {
        if (formats[candidate].type != tensor->type)
            continue;
        *format = exact ? LINEAR_F32 : (enum linear_format)candidate;
        return 0;
    }
    return error_set(error, ERROR_UNSUPPORTED, "tensor %s: the CPU backend cannot multiply with format %s",
        tensor->name, tensor_type_name(tensor->type));
}

/* Packing: each strip is one chunk of parallel work. */
struct packing {
    const struct tensor *tensor;
    struct backend_weight *weight;
    float *dequantised; /* [threads][columns] in exact mode of a format that is not F32, else NULL */
};

/* Values of `size` bytes, one a column. */
static void pack_row_values(const char *row, uint32_t columns, size_t size, char *strip, uint32_t lane) {
    for (size_t column = 0; column < columns; column++)
        memcpy(strip + (column * LINEAR_STRIP + lane) * size, row + column * size, size);
}

/* Blocks of the file: f16 d, f16 m (Q4_1), bytes q. Their words go to the lane's places. */
static void pack_row_blocks(const char *row, const struct backend_weight *weight, char *strip, uint32_t lane) {
    uint32_t groups = weight->format == LINEAR_Q8_0 ? 8 : 4;
    uint32_t flip = weight->format == LINEAR_Q8_0 ? 0x80808080u : 0; /* int8 + 128 as unsigned bytes */
    size_t scale_bytes = weight->format == LINEAR_Q4_1 ? 4 : 2;
    for (uint32_t block = 0; block < weight->steps; block++) {
        char *scales = strip + (size_t)groups * 128;
        memcpy(scales + lane * 2, row, 2);
        if (weight->format == LINEAR_Q4_1)
            memcpy(scales + LINEAR_STRIP * 2 + lane * 2, row + 2, 2);
        char *words = strip + (size_t)(lane / LINEAR_LANES) * groups * 64 + (size_t)(lane % LINEAR_LANES) * 4;
        for (uint32_t group = 0; group < groups; group++) {
            uint32_t word;
            memcpy(&word, row + scale_bytes + (size_t)group * 4, 4);
            word ^= flip;
            memcpy(words + (size_t)group * 64, &word, 4);
        }
        row += scale_bytes + (size_t)groups * 4;
        strip += linear_step_bytes(weight->format);
    }
}

static void pack_strip(void *context, uint32_t index, uint32_t thread) {
    const struct packing *packing = context;
    const struct tensor *tensor = packing->tensor;
    struct backend_weight *weight = packing->weight;
    char *strip = weight->data + index * weight->strip_bytes;
    uint32_t first = index * LINEAR_STRIP;
    for (uint32_t lane = 0; lane < LINEAR_STRIP && first + lane < weight->rows; lane++) {
        const char *row = tensor_row(tensor, first + lane);
        if (packing->dequantised != NULL) {
            float *values = packing->dequantised + (size_t)thread * weight->columns;
            tensor_dequantise_row(tensor, first + lane, values);
            pack_row_values((const char *)values, weight->columns, 4, strip, lane);
        } else if (linear_is_float(weight->format)) {
            pack_row_values(row, weight->columns, weight->format == LINEAR_F32 ? 4 : 2, strip, lane);
        } else {
            pack_row_blocks(row, weight, strip, lane);
        }
    }
}

static int pack(
    struct cpu_backend *cpu, const struct tensor *tensor, struct backend_weight *weight, struct error *error) {
    struct packing packing = {.tensor = tensor, .weight = weight};
    if (weight->format == LINEAR_F32 && tensor->type != TENSOR_F32) {
        packing.dequantised = calloc((size_t)thread_pool_size(cpu->threads) * weight->columns, sizeof(float));
        if (packing.dequantised == NULL)
            return error_set(error, ERROR_MEMORY, "no memory to dequantise tensor %s", tensor->name);
    }
    thread_pool_run(cpu->threads, weight->strips, pack_strip, &packing);
    free(packing.dequantised);
    return 0;
}

struct backend_weight *cpu_weight_create(
    struct backend *backend, const struct tensor *tensor, bool exact, struct error *error) {
    struct cpu_backend *cpu = cpu_backend(backend);
    enum linear_format format = LINEAR_F32;
    if (choose_format(tensor, exact, &format, error) != 0 || tensor_check_size(tensor, error) != 0)
        return NULL;
    struct linear_scratch *scratch = linear_scratch_of(cpu);
    struct backend_weight *weight = calloc(1, sizeof *weight);
    if (scratch == NULL || weight == NULL) {
        free(weight);
        error_set(error, ERROR_MEMORY, "no memory for tensor %s", tensor->name);
        return NULL;
    }
    weight->format = format;
    weight->rows = tensor->rows;
    weight->columns = tensor->columns;
    weight->steps = linear_is_float(format) ? tensor->columns : tensor->columns / LINEAR_BLOCK;
    weight->strips = (tensor->rows - 1) / LINEAR_STRIP + 1;
    weight->strip_bytes = weight->steps * linear_step_bytes(format);
    weight->data = cpu_slab_allocate(&scratch->open, cpu_weight_bytes(weight), &weight->slab);
    if (weight->data == NULL) {
        error_set(error, ERROR_MEMORY, "no memory for tensor %s, %zu bytes", tensor->name, cpu_weight_bytes(weight));
        goto fail;
    }
    if (linear_scratch_reserve(scratch, weight, error) != 0 || pack(cpu, tensor, weight, error) != 0)
        goto fail;
    return weight;
fail:
    cpu_weight_free(backend, weight);
    return NULL;
}

void cpu_weight_free(struct backend *backend, struct backend_weight *weight) {
    if (weight == NULL)
        return;
    if (weight->slab != NULL)
        cpu_slab_release(&linear_scratch_of(cpu_backend(backend))->open, weight->slab);
    free(weight);
}

/* Reading single rows back, for embeddings. */

static void unpack_values(const struct backend_weight *weight, const char *strip, uint32_t lane, float *out) {
    for (size_t column = 0; column < weight->columns; column++) {
        size_t at = column * LINEAR_STRIP + lane;
        if (weight->format == LINEAR_F32)
            out[column] = ((const float *)strip)[at];
        else if (weight->format == LINEAR_F16)
            out[column] = half_to_float(((const uint16_t *)strip)[at]);
        else
            out[column] = bfloat_to_float(((const uint16_t *)strip)[at]);
    }
}

static void unpack_blocks(const struct backend_weight *weight, const char *strip, uint32_t lane, float *out) {
    uint32_t groups = weight->format == LINEAR_Q8_0 ? 8 : 4;
    for (uint32_t block = 0; block < weight->steps; block++, out += LINEAR_BLOCK) {
        const uint16_t *scales = (const uint16_t *)(strip + (size_t)groups * 128);
        float d = half_to_float(scales[lane]);
        const uint8_t *words =
            (const uint8_t *)strip + (size_t)(lane / LINEAR_LANES) * groups * 64 + (size_t)(lane % LINEAR_LANES) * 4;
        for (uint32_t i = 0; i < groups * 4; i++) {
            int value = words[i / 4 * 64 + i % 4];
            if (weight->format == LINEAR_Q8_0) {
                out[i] = d * (float)(value - 128);
            } else if (weight->format == LINEAR_Q4_0) {
                out[i] = d * (float)((value & 15) - 8);
                out[i + 16] = d * (float)((value >> 4) - 8);
            } else {
                float m = half_to_float(scales[LINEAR_STRIP + lane]);
                out[i] = d * (float)(value & 15) + m;
                out[i + 16] = d * (float)(value >> 4) + m;
            }
        }
        strip += linear_step_bytes(weight->format);
    }
}

void cpu_embed(
    struct backend *backend, const struct backend_weight *weight, const int32_t *tokens, uint32_t rows, float *out) {
    (void)backend;
    for (uint32_t row = 0; row < rows; row++) {
        uint32_t token = (uint32_t)tokens[row];
        const char *strip = weight->data + token / LINEAR_STRIP * weight->strip_bytes;
        float *values = out + (size_t)row * weight->columns;
        if (linear_is_float(weight->format))
            unpack_values(weight, strip, token % LINEAR_STRIP, values);
        else
            unpack_blocks(weight, strip, token % LINEAR_STRIP, values);
    }
}
