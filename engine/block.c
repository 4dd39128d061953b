/* SPDX-License-Identifier: Apache-2.0 */
#include "engine/block.h"

#include "engine/bytes.h"

#include <string.h>

static const int8_t iq4_nl[16] = {-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113};
static const int8_t mxfp4[16] = {0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12};

static const struct {
    enum tensor_type type;
    struct block_format format;
} formats[] = {
    {TENSOR_Q8_0, {32, 32, 128, NULL}},
    {TENSOR_Q4_0, {32, 32, 8, NULL}},
    {TENSOR_Q4_1, {32, 32, 0, NULL}},
    {TENSOR_Q5_0, {32, 32, 16, NULL}},
    {TENSOR_Q5_1, {32, 32, 0, NULL}},
    {TENSOR_Q2_K, {256, 16, 0, NULL}},
    {TENSOR_Q3_K, {256, 16, 4, NULL}},
    {TENSOR_Q4_K, {256, 32, 0, NULL}},
    {TENSOR_Q5_K, {256, 32, 0, NULL}},
    {TENSOR_Q6_K, {256, 16, 32, NULL}},
    {TENSOR_IQ4_NL, {32, 32, 0, iq4_nl}},
    {TENSOR_MXFP4, {32, 32, 0, mxfp4}},
};

const struct block_format *block_format_find(enum tensor_type type) {
    for (size_t i = 0; i < sizeof formats / sizeof formats[0]; i++)
        if (formats[i].type == type)
            return &formats[i].format;
    return NULL;
}

/* ---- blocks of 32 ---- */

/* Low nibbles are the first 16 values. */
static void read_nibbles(const uint8_t *bytes, uint8_t *codes) {
    for (int i = 0; i < 16; i++) {
        codes[i] = bytes[i] & 15;
        codes[i + 16] = bytes[i] >> 4;
    }
}

/* Bit i is the fifth of value i. */
static void read_fifth_bits(const uint8_t *bytes, uint8_t *codes) {
    for (int i = 0; i < 32; i++)
        codes[i] |= (uint8_t)((bytes[i / 8] >> i % 8 & 1) << 4);
}

static void set_d(struct block *block, const uint8_t *bytes) {
    block->d_bits = load_u16(bytes);
    block->d = half_to_float(block->d_bits);
}

static void set_m(struct block *block, const uint8_t *bytes) {
    block->m_bits = load_u16(bytes);
    block->m = half_to_float(block->m_bits);
}

/* d, and m where minima says so, of formats without scales of parts; m is added in those. */
static void set_plain(struct block *block, const uint8_t *bytes, bool minima) {
    set_d(block, bytes);
    block->scales[0] = 1;
    block->minima[0] = minima;
    block->m = minima ? -half_to_float(load_u16(bytes + 2)) : 0;
    block->m_bits = minima ? load_u16(bytes + 2) : 0;
}

/* d = 2^(exponent - 128): half of what the exponent says, since the table is doubled. As bf16. */
static void set_power(struct block *block, uint8_t exponent) {
    block->d_bits = exponent < 2 ? (uint16_t)(0x20 << exponent) : (uint16_t)((exponent - 1) << 7);
    block->d = bfloat_to_float(block->d_bits);
    block->m = 0;
    block->scales[0] = 1;
    block->minima[0] = 0;
}

/* ---- blocks of 256 ---- */

/* Of Q4_K and Q5_K: eight scales and eight minima of 6 bits in 12 bytes. The first four of each have their bytes, whose
 * two highest bits complete the nibbles of the others. */
static void read_scales_k4(const uint8_t *bytes, struct block *block) {
    for (int i = 0; i < 4; i++) {
        block->scales[i] = bytes[i] & 63;
        block->minima[i] = bytes[i + 4] & 63;
        block->scales[i + 4] = (int8_t)((bytes[i + 8] & 15) | bytes[i] >> 6 << 4);
        block->minima[i + 4] = (int8_t)(bytes[i + 8] >> 4 | bytes[i + 4] >> 6 << 4);
    }
}

/* Of Q3_K: sixteen of 6 bits, less 32: nibbles in 8 bytes, then pairs of bits in 4. */
static void read_scales_k3(const uint8_t *bytes, int8_t *scales) {
    for (int i = 0; i < 16; i++) {
        int low = i < 8 ? bytes[i] & 15 : bytes[i - 8] >> 4;
        int high = bytes[8 + i % 4] >> i / 4 * 2 & 3;
        scales[i] = (int8_t)((low | high << 4) - 32);
    }
}

/* 64 values lie in the nibbles of 32 bytes. */
static void read_nibbles_k(const uint8_t *bytes, uint8_t *codes) {
    for (int i = 0; i < 256; i++)
        codes[i] = bytes[i / 64 * 32 + i % 32] >> (i % 64 < 32 ? 0 : 4) & 15;
}

/* 128 values lie in the pairs of bits of 32 bytes. */
static void read_pairs_k(const uint8_t *bytes, uint8_t *codes) {
    for (int i = 0; i < 256; i++)
        codes[i] = bytes[i / 128 * 32 + i % 32] >> i % 128 / 32 * 2 & 3;
}

/* 256 values have a bit each in 32 bytes; it goes to `place`. */
static void read_bits_k(const uint8_t *bytes, int place, uint8_t *codes) {
    for (int i = 0; i < 256; i++)
        codes[i] |= (uint8_t)((bytes[i % 32] >> i / 32 & 1) << place);
}

static void read_q2_k(const uint8_t *bytes, struct block *block) {
    for (int i = 0; i < 16; i++) {
        block->scales[i] = bytes[i] & 15;
        block->minima[i] = (int8_t)(bytes[i] >> 4);
    }
    read_pairs_k(bytes + 16, block->codes);
    set_d(block, bytes + 80);
    set_m(block, bytes + 82);
}

static void read_q3_k(const uint8_t *bytes, struct block *block) {
    read_pairs_k(bytes + 32, block->codes);
    read_bits_k(bytes, 2, block->codes);
    read_scales_k3(bytes + 96, block->scales);
    set_d(block, bytes + 108);
}

static void read_q4_k(const uint8_t *bytes, struct block *block) {
    set_d(block, bytes);
    set_m(block, bytes + 2);
    read_scales_k4(bytes + 4, block);
    read_nibbles_k(bytes + 16, block->codes);
}

static void read_q5_k(const uint8_t *bytes, struct block *block) {
    set_d(block, bytes);
    set_m(block, bytes + 2);
    read_scales_k4(bytes + 4, block);
    read_nibbles_k(bytes + 48, block->codes);
    read_bits_k(bytes + 16, 4, block->codes);
}

/* 128 values: nibbles in 64 bytes, low ones first, and the pairs of bits above them in 32. */
static void read_q6_k(const uint8_t *bytes, struct block *block) {
    read_pairs_k(bytes + 128, block->codes);
    for (int i = 0; i < 256; i++) {
        int nibble = bytes[i / 128 * 64 + i % 64] >> (i % 128 < 64 ? 0 : 4) & 15;
        block->codes[i] = (uint8_t)(nibble | block->codes[i] << 4);
    }
    memcpy(block->scales, bytes + 192, 16);
    set_d(block, bytes + 208);
}

void block_read(enum tensor_type type, const uint8_t *bytes, struct block *block) {
    switch (type) {
    case TENSOR_Q8_0:
        set_plain(block, bytes, false);
        for (int i = 0; i < 32; i++)
            block->codes[i] = bytes[2 + i] ^ 0x80;
        return;
    case TENSOR_Q4_0:
    case TENSOR_IQ4_NL:
        set_plain(block, bytes, false);
        read_nibbles(bytes + 2, block->codes);
        return;
    case TENSOR_Q4_1:
        set_plain(block, bytes, true);
        read_nibbles(bytes + 4, block->codes);
        return;
    case TENSOR_Q5_0:
        set_plain(block, bytes, false);
        read_nibbles(bytes + 6, block->codes);
        read_fifth_bits(bytes + 2, block->codes);
        return;
    case TENSOR_Q5_1:
        set_plain(block, bytes, true);
        read_nibbles(bytes + 8, block->codes);
        read_fifth_bits(bytes + 4, block->codes);
        return;
    case TENSOR_MXFP4:
        set_power(block, bytes[0]);
        read_nibbles(bytes + 1, block->codes);
        return;
    default:
        break;
    }
    memset(block->minima, 0, sizeof block->minima);
    block->m = 0;
    block->m_bits = 0;
    if (type == TENSOR_Q2_K)
        read_q2_k(bytes, block);
    else if (type == TENSOR_Q3_K)
        read_q3_k(bytes, block);
    else if (type == TENSOR_Q4_K)
        read_q4_k(bytes, block);
    else if (type == TENSOR_Q5_K)
        read_q5_k(bytes, block);
    else if (type == TENSOR_Q6_K)
        read_q6_k(bytes, block);
}

void block_dequantise(const struct block_format *format, const struct block *block, float *out) {
    for (uint32_t i = 0; i < format->values; i++) {
        uint32_t part = i / format->part_values;
        int32_t level = format->table != NULL ? format->table[block->codes[i]] : block->codes[i] - format->offset;
        float scaled = block->d * (float)block->scales[part] * (float)level;
        out[i] = block->minima[part] != 0 ? scaled - block->m * (float)block->minima[part] : scaled;
    }
}
