/* SPDX-License-Identifier: Apache-2.0
 *
 * AVX2 kernels. A strip's 32 rows are four parts of 8 lanes. One body per kind of format is written for a constant
 * number of rows and parts and inlined for each: one row takes four parts at once, two rows two, more rows one part
 * after the other, in groups of up to four rows. There is no unsigned-by-signed product without saturation here: sums
 * of small codes are widened before they saturate (of 4 bits 16 products, 16 x 15 x 127 < 2^15; of 5 bits 8, of 6 bits
 * 4), bytes are multiplied as |w| by x with the sign of w (2 x 128 x 127 < 2^15).
 */
#include "engine/cpu/linear.h"

#include <immintrin.h>
#include <math.h>
#include <string.h>

enum { LANES = 8, ROWS = 4, PARTS = 4 };

LINEAR_INLINE __m256i broadcast_int(const void *from) {
    int32_t value;
    memcpy(&value, from, sizeof value);
    return _mm256_set1_epi32(value);
}

LINEAR_INLINE __m256 load_halves(const uint16_t *from) {
    return _mm256_cvtph_ps(_mm_load_si128((const __m128i *)from));
}

LINEAR_INLINE __m256 load_bfloats(const uint16_t *from) {
    __m256i bits = _mm256_cvtepu16_epi32(_mm_load_si128((const __m128i *)from));
    return _mm256_castsi256_ps(_mm256_slli_epi32(bits, 16));
}

LINEAR_INLINE void store(const struct linear_tile *tile, uint32_t row, uint32_t part, __m256 value) {
    float *out = tile->out + row * tile->out_stride + part * LANES;
    if (tile->add)
        value = _mm256_add_ps(_mm256_loadu_ps(out), value);
    _mm256_storeu_ps(out, value);
}

/* Each 32-bit number, by a count that is constant once loops are unrolled. */
LINEAR_INLINE __m256i shift_down(__m256i words, int count) {
    return (__m256i)(count >= 0 ? (__v8su)words >> count : (__v8su)words << -count);
}

/* The bits of `mask` of each byte, which lie `count` above where they belong. */
LINEAR_INLINE __m256i take_bits(const char *words, int count, uint8_t mask) {
    __m256i shifted = shift_down(_mm256_load_si256((const __m256i *)words), count);
    return _mm256_and_si256(shifted, _mm256_set1_epi8((char)mask));
}

/* Codes of 8 rows in columns 4 * group and the three that follow, from the planes at the first of these rows. */
LINEAR_INLINE __m256i load_codes(const char *planes, const struct linear_traits *traits, uint32_t group) {
    const char *high = planes + traits->low_bits * 64;
    const int pair = (int)(group % 4 * 2);
    __m256i codes;
    if (traits->low_bits == 8)
        codes = _mm256_load_si256((const __m256i *)(planes + group * 64));
    else if (traits->low_bits == 4)
        codes = take_bits(planes + group % 4 * 64, group < 4 ? 0 : 4, 15);
    else
        codes = take_bits(planes + group / 4 * 64, pair, 3);
    if (traits->high_bits == 1)
        codes =
            _mm256_or_si256(codes, take_bits(high, (int)group - traits->low_bits, (uint8_t)(1 << traits->low_bits)));
    if (traits->high_bits == 2)
        codes = _mm256_or_si256(
            codes, take_bits(high + group / 4 * 64, pair - traits->low_bits, (uint8_t)(3 << traits->low_bits)));
    if (linear_has_table(traits))
        codes =
            _mm256_shuffle_epi8(_mm256_broadcastsi128_si256(_mm_loadu_si128((const __m128i *)traits->table)), codes);
    return codes;
}

/* 32-bit sums of the products of 8 lanes with one part of a block, for 1 to 4 rows: codes + 128. */
LINEAR_INLINE void dot_bytes(const char *planes, const struct linear_traits *traits, uint32_t part,
    const struct linear_block *x, uint32_t rows, __m256i *dot) {
    const __m256i ones = _mm256_set1_epi16(1);
    const __m256i offset = _mm256_set1_epi8(-128);
    LINEAR_UNROLL(8)
    for (uint32_t i = 0; i < 8u / traits->parts; i++) {
        uint32_t group = linear_group(traits, part, i);
        __m256i weights = _mm256_xor_si256(load_codes(planes, traits, group), offset);
        __m256i magnitudes = _mm256_abs_epi8(weights);
        LINEAR_UNROLL(4)
        for (uint32_t row = 0; row < rows; row++) {
            __m256i signed_x = _mm256_sign_epi8(broadcast_int(x[row].q + group * 4), weights);
            __m256i pairs = _mm256_maddubs_epi16(magnitudes, signed_x);
            dot[row] = _mm256_add_epi32(dot[row], _mm256_madd_epi16(pairs, ones));
        }
    }
}

/* The same for codes of up to 6 bits. */
LINEAR_INLINE void dot_small(const char *planes, const struct linear_traits *traits, uint32_t part,
    const struct linear_block *x, uint32_t rows, __m256i *dot) {
    const uint32_t bits = traits->low_bits + traits->high_bits, groups = 8u / traits->parts;
    const uint32_t narrow = bits <= 4 ? 8 : bits == 5 ? 4 : 2; /* groups between two widenings */
    __m256i pairs[ROWS];
    LINEAR_UNROLL(8)
    for (uint32_t i = 0; i < groups; i++) {
        uint32_t group = linear_group(traits, part, i);
        __m256i codes = load_codes(planes, traits, group);
        LINEAR_UNROLL(4)
        for (uint32_t row = 0; row < rows; row++) {
            __m256i products = _mm256_maddubs_epi16(codes, broadcast_int(x[row].q + group * 4));
            pairs[row] = i % narrow == 0 ? products : _mm256_add_epi16(pairs[row], products);
            if (i % narrow == narrow - 1 || i == groups - 1)
                dot[row] = _mm256_add_epi32(dot[row], _mm256_madd_epi16(pairs[row], _mm256_set1_epi16(1)));
        }
    }
}

LINEAR_INLINE void dot_part(const char *planes, const struct linear_traits *traits, uint32_t part,
    const struct linear_block *x, uint32_t rows, __m256i *dot) {
    LINEAR_UNROLL(4)
    for (uint32_t row = 0; row < rows; row++)
        dot[row] = traits->start == 8 ? broadcast_int(&x[row].minus_8_sum) : _mm256_setzero_si256();
    if (traits->start == 128)
        dot_bytes(planes, traits, part, x, rows, dot);
    else
        dot_small(planes, traits, part, x, rows, dot);
}

LINEAR_INLINE __m256 load_bytes(const char *from) {
    return _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_loadl_epi64((const __m128i *)from)));
}

/* Of the 8 rows from `lane` on. */
LINEAR_INLINE __m256 load_scale(
    const struct linear_traits *traits, const char *scales, const uint16_t *super, uint32_t lane, uint32_t part) {
    const uint16_t *d = (const uint16_t *)scales + lane;
    if (traits->k)
        return _mm256_mul_ps(load_halves(super + lane), load_bytes(scales + part * LINEAR_STRIP + lane));
    return traits->bfloat ? load_bfloats(d) : load_halves(d);
}

LINEAR_INLINE __m256 load_minimum(const struct linear_traits *traits, const char *scales, const uint16_t *super,
    uint32_t lane, uint32_t part, __m256 scale) {
    if (traits->offset > 0)
        return _mm256_mul_ps(scale, _mm256_set1_ps(-(float)traits->offset));
    if (!traits->k)
        return load_halves((const uint16_t *)scales + LINEAR_STRIP + lane);
    __m256 minimum = load_bytes(scales + (traits->parts + part) * LINEAR_STRIP + lane);
    __m256 product = _mm256_mul_ps(load_halves(super + LINEAR_STRIP + lane), minimum);
    return _mm256_xor_ps(product, _mm256_set1_ps(-0.0f));
}

/* Adds one part of a block: `rows` rows of x with the 8 rows of the strip from `lane` on. */
LINEAR_INLINE void add_part(const char *strip, const struct linear_traits *traits, const uint16_t *super, uint32_t lane,
    uint32_t part, const struct linear_block *x, uint32_t rows, __m256 sum[ROWS][PARTS], uint32_t at) {
    const size_t half_bytes = linear_words(traits) * 64;
    const char *scales = strip + 2 * half_bytes;
    const char *planes = strip + lane / LINEAR_LANES * half_bytes + lane % LINEAR_LANES * 4;
    __m256i dot[ROWS];
    dot_part(planes, traits, part, x, rows, dot);
    __m256 d = load_scale(traits, scales, super, lane, part);
    LINEAR_UNROLL(4)
    for (uint32_t row = 0; row < rows; row++) {
        __m256 scale = _mm256_mul_ps(d, _mm256_set1_ps(x[row].scale));
        sum[row][at] = _mm256_fmadd_ps(_mm256_cvtepi32_ps(dot[row]), scale, sum[row][at]);
    }
    if (!traits->minima && traits->offset == 0)
        return;
    __m256 minimum = load_minimum(traits, scales, super, lane, part, d);
    LINEAR_UNROLL(4)
    for (uint32_t row = 0; row < rows; row++) {
        float scaled = traits->parts == 1 ? x[row].scaled_sum : x[row].scaled_half[part];
        sum[row][at] = _mm256_fmadd_ps(minimum, _mm256_set1_ps(scaled), sum[row][at]);
    }
}

/* Rows first_row..first_row + rows of the panel with parts first_part..first_part + parts of the strip. */
LINEAR_INLINE void multiply_blocks(const struct linear_tile *tile, enum linear_format format, uint32_t first_row,
    uint32_t rows, uint32_t first_part, uint32_t parts) {
    const struct linear_traits traits = linear_traits_of(format);
    const size_t block_bytes = linear_block_bytes(&traits);
    const char *strip = tile->strip;
    const uint16_t *super = NULL;
    const struct linear_block *x = (const struct linear_block *)tile->panel + first_row;
    __m256 sum[ROWS][PARTS];
    LINEAR_UNROLL(4)
    for (uint32_t row = 0; row < rows; row++)
        LINEAR_UNROLL(4)
    for (uint32_t part = 0; part < parts; part++)
        sum[row][part] = _mm256_setzero_ps();

    for (uint32_t step = 0; step < tile->steps; step++, strip += block_bytes, x += tile->rows) {
        if (traits.k && step % LINEAR_SUPER == 0) {
            super = (const uint16_t *)strip;
            strip += linear_super_bytes(&traits);
        }
        LINEAR_UNROLL(4)
        for (uint32_t at = 0; at < parts; at++)
            LINEAR_UNROLL(2)
        for (uint32_t part = 0; part < traits.parts; part++)
            add_part(strip, &traits, super, (first_part + at) * LANES, part, x, rows, sum, at);
    }
    LINEAR_UNROLL(4)
    for (uint32_t row = 0; row < rows; row++)
        LINEAR_UNROLL(4)
    for (uint32_t part = 0; part < parts; part++)
        store(tile, first_row + row, first_part + part, sum[row][part]);
}

LINEAR_INLINE __m256 load_values(enum linear_format format, const void *strip, size_t index) {
    if (format == LINEAR_F32)
        return _mm256_load_ps((const float *)strip + index);
    const uint16_t *values = (const uint16_t *)strip + index;
    return format == LINEAR_F16 ? load_halves(values) : load_bfloats(values);
}

LINEAR_INLINE void multiply_floats(const struct linear_tile *tile, enum linear_format format, uint32_t first_row,
    uint32_t rows, uint32_t first_part, uint32_t parts) {
    const float *x = (const float *)tile->panel + first_row;
    __m256 sum[ROWS][PARTS];
    LINEAR_UNROLL(4)
    for (uint32_t row = 0; row < rows; row++)
        LINEAR_UNROLL(4)
    for (uint32_t part = 0; part < parts; part++)
        sum[row][part] = _mm256_setzero_ps();
    for (size_t column = 0; column < tile->steps; column++, x += tile->rows) {
        LINEAR_UNROLL(4)
        for (uint32_t part = 0; part < parts; part++) {
            __m256 weights = load_values(format, tile->strip, column * LINEAR_STRIP + (first_part + part) * LANES);
            LINEAR_UNROLL(4)
            for (uint32_t row = 0; row < rows; row++)
                sum[row][part] = _mm256_fmadd_ps(weights, _mm256_set1_ps(x[row]), sum[row][part]);
        }
    }
    LINEAR_UNROLL(4)
    for (uint32_t row = 0; row < rows; row++)
        LINEAR_UNROLL(4)
    for (uint32_t part = 0; part < parts; part++)
        store(tile, first_row + row, first_part + part, sum[row][part]);
}

/* All parts of a strip, as many at once as there are registers for: rows x parts <= 4 (blocks) or 8 (floats). */
LINEAR_INLINE void multiply_rows(
    const struct linear_tile *tile, enum linear_format format, uint32_t first_row, uint32_t rows) {
    const bool is_float = format == LINEAR_F32 || format == LINEAR_F16 || format == LINEAR_BF16;
    const uint32_t parts = is_float ? (rows <= 2 ? 4 : 2) : (rows == 1 ? 4 : rows == 2 ? 2 : 1);
    for (uint32_t part = 0; part < PARTS; part += parts) {
        if (is_float)
            multiply_floats(tile, format, first_row, rows, part, parts);
        else
            multiply_blocks(tile, format, first_row, rows, part, parts);
    }
}

LINEAR_INLINE void multiply(const struct linear_tile *tile, enum linear_format format) {
    uint32_t row = 0;
    for (; row + ROWS <= tile->rows; row += ROWS)
        multiply_rows(tile, format, row, ROWS);
    switch (tile->rows - row) {
    case 1:
        multiply_rows(tile, format, row, 1);
        break;
    case 2:
        multiply_rows(tile, format, row, 2);
        break;
    case 3:
        multiply_rows(tile, format, row, 3);
        break;
    default:
        break;
    }
}

/* Nearest binary16, as float. */
LINEAR_INLINE float round_to_half(float value) {
    return _mm_cvtss_f32(_mm_cvtph_ps(_mm_cvtps_ph(_mm_set_ss(value), _MM_FROUND_TO_NEAREST_INT)));
}

LINEAR_INLINE int32_t reduce_max(__m256i values) {
    __m128i four = _mm_max_epi32(_mm256_castsi256_si128(values), _mm256_extracti128_si256(values, 1));
    __m128i two = _mm_max_epi32(four, _mm_shuffle_epi32(four, 0x4e));
    return _mm_cvtsi128_si32(_mm_max_epi32(two, _mm_shuffle_epi32(two, 0xb1)));
}

LINEAR_INLINE int32_t reduce_add(__m256i values) {
    __m128i four = _mm_add_epi32(_mm256_castsi256_si128(values), _mm256_extracti128_si256(values, 1));
    __m128i two = _mm_add_epi32(four, _mm_shuffle_epi32(four, 0x4e));
    return _mm_cvtsi128_si32(_mm_add_epi32(two, _mm_shuffle_epi32(two, 0xb1)));
}

static void round_block(const float *x, struct linear_block *block) {
    const __m256i magnitude = _mm256_set1_epi32(0x7fffffff);
    __m256i bits = _mm256_setzero_si256();
    for (uint32_t i = 0; i < LINEAR_BLOCK; i += LANES)
        bits = _mm256_max_epi32(bits, _mm256_and_si256(_mm256_loadu_si256((const __m256i *)(x + i)), magnitude));
    int32_t largest = reduce_max(bits);
    float amax;
    memcpy(&amax, &largest, sizeof amax);
    float scale = isfinite(amax) ? round_to_half(amax / 127) : NAN;
    memset(block, 0, sizeof *block);
    block->scale = scale;
    if (!(scale > 0))
        return;
    __m256 inverse = _mm256_set1_ps(127 / amax);
    __m256i sums[2] = {_mm256_setzero_si256(), _mm256_setzero_si256()};
    for (uint32_t i = 0; i < LINEAR_BLOCK; i += LANES) {
        __m256i q = _mm256_cvtps_epi32(_mm256_mul_ps(_mm256_loadu_ps(x + i), inverse));
        sums[i / 16] = _mm256_add_epi32(sums[i / 16], q);
        __m128i words = _mm_packs_epi32(_mm256_castsi256_si128(q), _mm256_extracti128_si256(q, 1));
        _mm_storel_epi64((__m128i *)(block->q + i), _mm_packs_epi16(words, words));
    }
    int32_t low_sum = reduce_add(sums[0]), high_sum = reduce_add(sums[1]);
    int32_t sum = low_sum + high_sum;
    block->scaled_sum = scale * (float)sum;
    block->minus_8_sum = -8 * sum;
    block->minus_128_sum = -128 * sum;
    block->scaled_half[0] = scale * (float)low_sum;
    block->scaled_half[1] = scale * (float)high_sum;
}

#include "engine/cpu/linear_body.h"

const struct linear_kernels linear_kernels_avx2 = LINEAR_KERNELS;
