/* SPDX-License-Identifier: Apache-2.0
 *
 * What the blocks of quantised weight formats hold: small integers, and a scale for each part of the block. With
 * level = table[code] where the format has a table, else code - offset, and p the part that value i lies in,
 *
 *   value i = (d * scales[p]) * level i - m * minima[p]
 *
 * each operation rounded to float32 (all but the subtraction are exact). Layouts: GGUF specification and ggml's
 * quantisation types; IQ4_NL's and MXFP4's tables (OCP Microscaling Formats 1.0: E2M1, doubled) from there too.
 */
#ifndef ENGINE_BLOCK_H
#define ENGINE_BLOCK_H

#include "engine/tensor.h"

enum { BLOCK_VALUES_MAX = 256, BLOCK_PARTS_MAX = 16 };

/* Constant of a format. */
struct block_format {
    uint32_t values;      /* of a block */
    uint32_t part_values; /* 16 or 32 */
    int32_t offset;       /* level = code - offset */
    const int8_t *table;  /* [16] level = table[code]; NULL: none */
};

struct block {
    uint8_t codes[BLOCK_VALUES_MAX];
    int8_t scales[BLOCK_PARTS_MAX]; /* 1 where the format has d alone */
    int8_t minima[BLOCK_PARTS_MAX]; /* 0 where it has none; 1 where it has m alone */
    float d, m;
    uint16_t d_bits, m_bits; /* as the file has them: f16; of MXFP4 bf16, which holds every power of two; m of Q4_1 and
                              * Q5_1 is added there, so that it is -m here */
};

/* NULL for formats of single values. */
const struct block_format *block_format_find(enum tensor_type type);

/* The block at `bytes`, of a format that block_format_find knows. */
void block_read(enum tensor_type type, const uint8_t *bytes, struct block *block);

/* Its values: out [format->values]. */
void block_dequantise(const struct block_format *format, const struct block *block, float *out);

#endif
