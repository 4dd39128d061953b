/* SPDX-License-Identifier: Apache-2.0 */
#include "engine/cpu/linear.h"

bool linear_is_float(enum linear_format format) {
    return format == LINEAR_F32 || format == LINEAR_F16 || format == LINEAR_BF16;
}

size_t linear_strip_bytes(enum linear_format format, uint32_t steps) {
    if (linear_is_float(format))
        return (size_t)steps * LINEAR_STRIP * (format == LINEAR_F32 ? 4 : 2);
    struct linear_traits traits = linear_traits_of(format);
    return steps * linear_block_bytes(&traits) + steps / LINEAR_SUPER * linear_super_bytes(&traits);
}

const uint8_t *linear_find_block(enum linear_format format, const void *strip, uint32_t step, const uint16_t **super) {
    struct linear_traits traits = linear_traits_of(format);
    size_t block = linear_block_bytes(&traits), ahead = linear_super_bytes(&traits);
    const uint8_t *group = (const uint8_t *)strip + step / LINEAR_SUPER * (LINEAR_SUPER * block + ahead);
    *super = (const uint16_t *)group;
    return group + ahead + step % LINEAR_SUPER * block;
}

/* Pairs of bits of two words, 16 columns each, moved up by `shift` and added. */
static void add_pairs(const uint8_t *words, unsigned shift, uint8_t *codes) {
    for (uint32_t i = 0; i < LINEAR_BLOCK; i++)
        codes[i] |= (uint8_t)((words[i / 16 * 64 + i % 4] >> i % 16 / 4 * 2 & 3) << shift);
}

void linear_codes(enum linear_format format, const uint8_t *block, uint32_t lane, uint8_t codes[LINEAR_BLOCK]) {
    const struct linear_traits traits = linear_traits_of(format);
    const uint8_t *low = block + (size_t)(lane / LINEAR_LANES) * linear_words(&traits) * 64 + lane % LINEAR_LANES * 4;
    const uint8_t *high = low + (size_t)traits.low_bits * 64;
    for (uint32_t i = 0; i < LINEAR_BLOCK; i++) {
        if (traits.low_bits == 8)
            codes[i] = low[i / 4 * 64 + i % 4];
        else
            codes[i] = traits.low_bits == 4 ? low[i % 16 / 4 * 64 + i % 4] >> (i < 16 ? 0 : 4) & 15 : 0;
    }
    if (traits.low_bits == 2)
        add_pairs(low, 0, codes);
    if (traits.high_bits == 2)
        add_pairs(high, traits.low_bits, codes);
    for (uint32_t i = 0; i < LINEAR_BLOCK && traits.high_bits == 1; i++)
        codes[i] |= (uint8_t)((high[i % 4] >> i / 4 & 1) << traits.low_bits);
    for (uint32_t i = 0; i < LINEAR_BLOCK && linear_has_table(&traits); i++)
        codes[i] = traits.table[codes[i]];
}

static const uint8_t *scales_of(const struct linear_traits *traits, const uint8_t *block) {
    return block + (size_t)linear_words(traits) * 128;
}

float linear_scale(
    enum linear_format format, const uint8_t *block, const uint16_t *super, uint32_t lane, uint32_t part) {
    struct linear_traits traits = linear_traits_of(format);
    const uint8_t *scales = scales_of(&traits, block);
    if (traits.k)
        return half_to_float(super[lane]) * (float)(int8_t)scales[part * LINEAR_STRIP + lane];
    uint16_t d = ((const uint16_t *)scales)[lane];
    return traits.bfloat ? bfloat_to_float(d) : half_to_float(d);
}

float linear_minimum(
    enum linear_format format, const uint8_t *block, const uint16_t *super, uint32_t lane, uint32_t part) {
    struct linear_traits traits = linear_traits_of(format);
    const uint8_t *scales = scales_of(&traits, block);
    if (traits.offset > 0)
        return linear_scale(format, block, super, lane, part) * -(float)traits.offset;
    if (!traits.minima)
        return 0;
    if (!traits.k)
        return half_to_float(((const uint16_t *)scales)[LINEAR_STRIP + lane]);
    float minimum = (float)(int8_t)scales[(traits.parts + part) * LINEAR_STRIP + lane];
    return -(half_to_float(super[LINEAR_STRIP + lane]) * minimum);
}
