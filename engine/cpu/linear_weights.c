/* SPDX-License-Identifier: Apache-2.0 */
#include "engine/cpu/linear.h"

#include "engine/block.h"

#include <stdlib.h>
#include <string.h>

static const enum tensor_type types[LINEAR_FORMATS] = {
    [LINEAR_F32] = TENSOR_F32,
    [LINEAR_F16] = TENSOR_F16,
    [LINEAR_BF16] = TENSOR_BF16,
    [LINEAR_Q8_0] = TENSOR_Q8_0,
    [LINEAR_Q4_0] = TENSOR_Q4_0,
    [LINEAR_Q4_1] = TENSOR_Q4_1,
    [LINEAR_Q5_0] = TENSOR_Q5_0,
    [LINEAR_Q5_1] = TENSOR_Q5_1,
    [LINEAR_Q2_K] = TENSOR_Q2_K,
    [LINEAR_Q3_K] = TENSOR_Q3_K,
    [LINEAR_Q4_K] = TENSOR_Q4_K,
    [LINEAR_Q5_K] = TENSOR_Q5_K,
    [LINEAR_Q6_K] = TENSOR_Q6_K,
    [LINEAR_IQ4_NL] = TENSOR_IQ4_NL,
    [LINEAR_MXFP4] = TENSOR_MXFP4,
};

size_t cpu_weight_bytes(const struct backend_weight *weight) {
    return weight->strips * weight->strip_bytes;
}

static int choose_format(const struct tensor *tensor, bool exact, enum linear_format *format, struct error *error) {
    for (int candidate = 0; candidate < LINEAR_FORMATS; candidate++) {
        if (types[candidate] != tensor->type)
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

/* Four codes' bits from `shift` on, `mask` of each. */
static uint32_t bits_of(const uint8_t *codes, uint32_t group, unsigned shift, uint32_t mask) {
    uint32_t four;
    memcpy(&four, codes + (size_t)group * 4, 4);
    return four >> shift & mask;
}

/* Words of two bits a code, 16 codes each. */
static void put_pairs(const uint8_t *codes, unsigned shift, uint32_t words[2]) {
    for (uint32_t w = 0; w < 2; w++) {
        words[w] = 0;
        for (uint32_t pair = 0; pair < 4; pair++)
            words[w] |= bits_of(codes, w * 4 + pair, shift, 0x03030303) << 2 * pair;
    }
}

/* The words of 32 codes, in the order of the planes. */
static void pack_codes(const struct linear_traits *traits, const uint8_t *codes, uint32_t words[8]) {
    if (traits->low_bits == 8)
        memcpy(words, codes, LINEAR_BLOCK);
    else if (traits->low_bits == 4)
        for (uint32_t g = 0; g < 4; g++)
            words[g] = bits_of(codes, g, 0, 0x0f0f0f0f) | bits_of(codes, g + 4, 0, 0x0f0f0f0f) << 4;
    else
        put_pairs(codes, 0, words);
    uint32_t *high = words + traits->low_bits;
    if (traits->high_bits == 2) {
        put_pairs(codes, traits->low_bits, high);
    } else if (traits->high_bits == 1) {
        *high = 0;
        for (uint32_t g = 0; g < 8; g++)
            *high |= bits_of(codes, g, traits->low_bits, 0x01010101) << g;
    }
}

/* A row's blocks, as the file has them. */
static void pack_row_blocks(
    const struct tensor *tensor, uint32_t row, enum linear_format format, char *strip, uint32_t lane) {
    const struct linear_traits traits = linear_traits_of(format);
    const struct tensor_format *stored = tensor_format_find(tensor->type);
    const size_t block_bytes = linear_block_bytes(&traits), words_count = linear_words(&traits);
    const uint8_t *from = tensor_row(tensor, row);
    struct block block;
    for (uint32_t column = 0; column < tensor->columns; column += stored->block_values, from += stored->block_bytes) {
        block_read(tensor->type, from, &block);
        uint16_t *d = (uint16_t *)(strip + (traits.k ? 0 : words_count * 128)); /* before the blocks, or behind words */
        d[lane] = block.d_bits;
        if (traits.minima)
            d[LINEAR_STRIP + lane] = block.m_bits;
        strip += linear_super_bytes(&traits);
        for (uint32_t i = 0; i < stored->block_values / LINEAR_BLOCK; i++, strip += block_bytes) {
            uint32_t words[8];
            pack_codes(&traits, block.codes + (size_t)i * LINEAR_BLOCK, words);
            char *to = strip + lane / LINEAR_LANES * words_count * 64 + (size_t)(lane % LINEAR_LANES) * 4;
            for (uint32_t w = 0; w < words_count; w++)
                memcpy(to + (size_t)w * 64, &words[w], 4);
            int8_t *scales = (int8_t *)strip + words_count * 128;
            for (uint32_t part = 0; traits.k && part < traits.parts; part++) {
                scales[part * LINEAR_STRIP + lane] = block.scales[i * traits.parts + part];
                if (traits.minima)
                    scales[(traits.parts + part) * LINEAR_STRIP + lane] = block.minima[i * traits.parts + part];
            }
        }
    }
}

static void pack_strip(void *context, uint32_t index, uint32_t thread) {
    const struct packing *packing = context;
    const struct tensor *tensor = packing->tensor;
    struct backend_weight *weight = packing->weight;
    char *strip = weight->data + index * weight->strip_bytes;
    uint32_t first = index * LINEAR_STRIP;
    for (uint32_t lane = 0; lane < LINEAR_STRIP && first + lane < weight->rows; lane++) {
        if (packing->dequantised != NULL) {
            float *values = packing->dequantised + (size_t)thread * weight->columns;
            tensor_dequantise_row(tensor, first + lane, values);
            pack_row_values((const char *)values, weight->columns, 4, strip, lane);
        } else if (linear_is_float(weight->format)) {
            pack_row_values(
                tensor_row(tensor, first + lane), weight->columns, weight->format == LINEAR_F32 ? 4 : 2, strip, lane);
        } else {
            pack_row_blocks(tensor, first + lane, weight->format, strip, lane);
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
    weight->strip_bytes = linear_strip_bytes(format, weight->steps);
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
    enum linear_format format = weight->format;
    struct linear_traits traits = linear_traits_of(format);
    uint32_t part_columns = LINEAR_BLOCK / traits.parts;
    for (uint32_t step = 0; step < weight->steps; step++, out += LINEAR_BLOCK) {
        const uint16_t *super;
        const uint8_t *block = linear_find_block(format, strip, step, &super);
        uint8_t codes[LINEAR_BLOCK];
        linear_codes(format, block, lane, codes);
        for (uint32_t i = 0; i < LINEAR_BLOCK; i++) {
            uint32_t part = i / part_columns;
            int level = codes[i] - traits.start - traits.offset;
            float scaled = linear_scale(format, block, super, lane, part) * (float)level;
            out[i] = traits.minima ? scaled + linear_minimum(format, block, super, lane, part) : scaled;
        }
    }
}

void cpu_embed(
    struct backend *backend, const struct backend_weight *weight, const int32_t *tokens, uint32_t rows, float *out) {
    (void)backend;
    for (uint32_t row = 0; row < rows; row++) {
        uint32_t token = (uint32_t)tokens[row];
        const char *strip = weight->data + token / LINEAR_STRIP * weight->strip_bytes;
        float *values = out + (size_t)row * weight->columns;
        if (token >= weight->rows)
            memset(values, 0, weight->columns * sizeof *values);
        else if (linear_is_float(weight->format))
            unpack_values(weight, strip, token % LINEAR_STRIP, values);
        else
            unpack_blocks(weight, strip, token % LINEAR_STRIP, values);
    }
}
