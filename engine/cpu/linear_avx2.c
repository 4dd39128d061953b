/* SPDX-License-Identifier: Apache-2.0
 *
 * AVX2 kernels. A strip's 32 rows are four parts of 8 lanes. One body per kind of format is written for a constant
 * number of rows and parts and inlined for each: one row takes four parts at once, two rows two, more rows one part
 * after the other, in groups of up to four rows. There is no unsigned-by-signed product without saturation here:
 * nibbles are too small to saturate (8 x 2 x 15 x 127 < 2^15), bytes are multiplied as |w| by x with the sign of w
 * (2 x 128 x 127 < 2^15).
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

/* The 8 lanes' words of one group. */
LINEAR_INLINE __m256i load_words(const char *strip, uint32_t groups, uint32_t group, uint32_t part) {
    return _mm256_load_si256((const __m256i *)(strip + (part / 2 * groups + group) * 64 + part % 2 * 32));
}

/* 32-bit sums of the products of 8 lanes with 32 values of x, for 1 to 4 rows. */
LINEAR_INLINE void dot_bytes(
    const char *strip, uint32_t part, const struct linear_block *x, uint32_t rows, __m256i *dot) {
    const __m256i ones = _mm256_set1_epi16(1);
    const __m256i offset = _mm256_set1_epi8(-128);
    LINEAR_UNROLL(4)
    for (uint32_t row = 0; row < rows; row++)
        dot[row] = _mm256_setzero_si256();
    LINEAR_UNROLL(8)
    for (uint32_t group = 0; group < 8; group++) {
        __m256i weights = _mm256_xor_si256(load_words(strip, 8, group, part), offset);
        __m256i magnitudes = _mm256_abs_epi8(weights);
        LINEAR_UNROLL(4)
        for (uint32_t row = 0; row < rows; row++) {
            __m256i signed_x = _mm256_sign_epi8(broadcast_int(x[row].q + group * 4), weights);
            __m256i pairs = _mm256_maddubs_epi16(magnitudes, signed_x);
            dot[row] = _mm256_add_epi32(dot[row], _mm256_madd_epi16(pairs, ones));
        }
    }
}

LINEAR_INLINE void dot_nibbles(
    const char *strip, uint32_t part, const struct linear_block *x, uint32_t rows, __m256i *dot) {
    const __m256i low_nibbles = _mm256_set1_epi8(15);
    __m256i pairs[ROWS];
    LINEAR_UNROLL(4)
    for (uint32_t row = 0; row < rows; row++)
        pairs[row] = _mm256_setzero_si256();
    LINEAR_UNROLL(4)
    for (uint32_t group = 0; group < 4; group++) {
        __m256i words = load_words(strip, 4, group, part);
        __m256i low = _mm256_and_si256(words, low_nibbles);
        __m256i high = _mm256_and_si256(_mm256_srli_epi32(words, 4), low_nibbles);
        LINEAR_UNROLL(4)
        for (uint32_t row = 0; row < rows; row++) {
            __m256i first = _mm256_maddubs_epi16(low, broadcast_int(x[row].q + group * 4));
            __m256i second = _mm256_maddubs_epi16(high, broadcast_int(x[row].q + 16 + group * 4));
            pairs[row] = _mm256_add_epi16(pairs[row], _mm256_add_epi16(first, second));
        }
    }
    LINEAR_UNROLL(4)
    for (uint32_t row = 0; row < rows; row++)
        dot[row] = _mm256_madd_epi16(pairs[row], _mm256_set1_epi16(1));
}

/* Rows first_row..first_row + rows of the panel with parts first_part..first_part + parts of the strip. */
LINEAR_INLINE void multiply_blocks(const struct linear_tile *tile, enum linear_format format, uint32_t first_row,
    uint32_t rows, uint32_t first_part, uint32_t parts) {
    const uint32_t groups = format == LINEAR_Q8_0 ? 8 : 4;
    const size_t step_bytes = LINEAR_STRIP * (groups * 4 + (format == LINEAR_Q4_1 ? 4 : 2));
    const char *strip = tile->strip;
    const struct linear_block *x = (const struct linear_block *)tile->panel + first_row;
    __m256 sum[ROWS][PARTS];
    LINEAR_UNROLL(4)
    for (uint32_t row = 0; row < rows; row++)
        LINEAR_UNROLL(4)
    for (uint32_t part = 0; part < parts; part++)
        sum[row][part] = _mm256_setzero_ps();

    for (uint32_t step = 0; step < tile->steps; step++, strip += step_bytes, x += tile->rows) {
        const uint16_t *scales = (const uint16_t *)(strip + groups * 128) + first_part * LANES;
        LINEAR_UNROLL(4)
        for (uint32_t part = 0; part < parts; part++) {
            __m256i dot[ROWS];
            if (format == LINEAR_Q8_0)
                dot_bytes(strip, first_part + part, x, rows, dot);
            else
                dot_nibbles(strip, first_part + part, x, rows, dot);
            __m256 d = load_halves(scales + part * LANES);
            LINEAR_UNROLL(4)
            for (uint32_t row = 0; row < rows; row++) {
                if (format == LINEAR_Q4_0)
                    dot[row] = _mm256_add_epi32(dot[row], broadcast_int(&x[row].minus_8_sum));
                __m256 scale = _mm256_mul_ps(d, _mm256_set1_ps(x[row].scale));
                sum[row][part] = _mm256_fmadd_ps(_mm256_cvtepi32_ps(dot[row]), scale, sum[row][part]);
                if (format == LINEAR_Q4_1)
                    sum[row][part] = _mm256_fmadd_ps(load_halves(scales + LINEAR_STRIP + part * LANES),
                        _mm256_set1_ps(x[row].scaled_sum), sum[row][part]);
            }
        }
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
    __m256i sums = _mm256_setzero_si256();
    for (uint32_t i = 0; i < LINEAR_BLOCK; i += LANES) {
        __m256i q = _mm256_cvtps_epi32(_mm256_mul_ps(_mm256_loadu_ps(x + i), inverse));
        sums = _mm256_add_epi32(sums, q);
        __m128i words = _mm_packs_epi32(_mm256_castsi256_si128(q), _mm256_extracti128_si256(q, 1));
        _mm_storel_epi64((__m128i *)(block->q + i), _mm_packs_epi16(words, words));
    }
    int32_t sum = reduce_add(sums);
    block->scaled_sum = scale * (float)sum;
    block->minus_8_sum = -8 * sum;
    block->minus_128_sum = -128 * sum;
}

#include "engine/cpu/linear_body.h"

const struct linear_kernels linear_kernels_avx2 = LINEAR_KERNELS;
