/* SPDX-License-Identifier: Apache-2.0
 *
 * AVX-512 VNNI kernels. One body per kind of format is written for a constant number of rows and inlined into each case
 * of a switch, so that all accumulators stay in registers: 8 rows x 2 halves of a strip take 16 of the 32.
 */
#include "engine/cpu/linear.h"

#include <immintrin.h>
#include <math.h>
#include <string.h>

/* Bytes by which weights are asked for in advance when there are PREFETCH_ROWS or more: then arithmetic outlasts what
 * the processor's own prefetching looks ahead; with fewer rows it only gets in the way. Past a strip lies the next one.
 * Not into the first-level cache, whose few open requests would limit how many are on their way (T0: 3.22 ms for all of
 * a model's layers with 4 rows, T2: 2.82); 4 KB ahead are too few, 20 KB do no more. */
enum { PREFETCH_AHEAD = 10240, PREFETCH_ROWS = 4 };

LINEAR_INLINE __m512i broadcast_int(const void *from) {
    int32_t value;
    memcpy(&value, from, sizeof value);
    return _mm512_set1_epi32(value);
}

/* sums += unsigned bytes of weights times the 4 signed bytes at `from`. As an instruction with a broadcast operand,
 * which GCC 12 does not make of the intrinsics: a register for the broadcast would be one too many. */
LINEAR_INLINE __m512i dot_add(__m512i sums, __m512i weights, const int8_t *from) {
    __asm__("vpdpbusd %2%{1to16%}, %1, %0" : "+v"(sums) : "v"(weights), "m"(*(const int8_t(*)[4])from));
    return sums;
}

LINEAR_INLINE __m512 load_halves(const uint16_t *from) {
    return _mm512_cvtph_ps(_mm256_load_si256((const __m256i *)from));
}

LINEAR_INLINE __m512 load_bfloats(const uint16_t *from) {
    __m512i bits = _mm512_cvtepu16_epi32(_mm256_load_si256((const __m256i *)from));
    return _mm512_castsi512_ps(_mm512_slli_epi32(bits, 16));
}

LINEAR_INLINE void store(const struct linear_tile *tile, uint32_t row, uint32_t half, __m512 value) {
    float *out = tile->out + row * tile->out_stride + half * LINEAR_LANES;
    if (tile->add)
        value = _mm512_add_ps(_mm512_loadu_ps(out), value);
    _mm512_storeu_ps(out, value);
}

/* Each 32-bit number, by a count that is constant once loops are unrolled. */
LINEAR_INLINE __m512i shift_down(__m512i words, int count) {
    return (__m512i)(count >= 0 ? (__v16su)words >> count : (__v16su)words << -count);
}

/* The bits of `mask` of each byte, which lie `count` above where they belong. */
LINEAR_INLINE __m512i take_bits(const char *words, int count, uint8_t mask) {
    return _mm512_and_si512(shift_down(_mm512_load_si512(words), count), _mm512_set1_epi8((char)mask));
}

/* Codes of 16 rows in columns 4 * group and the three that follow, from one half's planes. */
LINEAR_INLINE __m512i load_codes(const char *planes, const struct linear_traits *traits, uint32_t group) {
    const char *high = planes + traits->low_bits * 64;
    const int pair = (int)(group % 4 * 2);
    __m512i codes;
    if (traits->low_bits == 8)
        codes = _mm512_load_si512(planes + group * 64);
    else if (traits->low_bits == 4)
        codes = take_bits(planes + group % 4 * 64, group < 4 ? 0 : 4, 15);
    else
        codes = take_bits(planes + group / 4 * 64, pair, 3);
    if (traits->high_bits == 1)
        codes =
            _mm512_or_si512(codes, take_bits(high, (int)group - traits->low_bits, (uint8_t)(1 << traits->low_bits)));
    if (traits->high_bits == 2)
        codes = _mm512_or_si512(
            codes, take_bits(high + group / 4 * 64, pair - traits->low_bits, (uint8_t)(3 << traits->low_bits)));
    if (linear_has_table(traits))
        codes = _mm512_shuffle_epi8(_mm512_broadcast_i32x4(_mm_loadu_si128((const __m128i *)traits->table)), codes);
    return codes;
}

/* Where the integer dot product starts, to take back the offset of codes. */
LINEAR_INLINE __m512i dot_start(const struct linear_traits *traits, const struct linear_block *x) {
    if (traits->start == 128)
        return broadcast_int(&x->minus_128_sum);
    return traits->start == 8 ? broadcast_int(&x->minus_8_sum) : _mm512_setzero_si512();
}

/* The products of one half's 16 rows with one part of a block of each row. */
LINEAR_INLINE void dot_part(const char *planes, const struct linear_traits *traits, uint32_t part,
    const struct linear_block *x, uint32_t rows, __m512i dot[LINEAR_PANEL]) {
    LINEAR_UNROLL(8)
    for (uint32_t row = 0; row < rows; row++)
        dot[row] = dot_start(traits, &x[row]);
    LINEAR_UNROLL(8)
    for (uint32_t i = 0; i < 8u / traits->parts; i++) {
        uint32_t group = linear_group(traits, part, i);
        __m512i codes = load_codes(planes, traits, group);
        LINEAR_UNROLL(8)
        for (uint32_t row = 0; row < rows; row++)
            dot[row] = dot_add(dot[row], codes, x[row].q + group * 4);
    }
}

LINEAR_INLINE __m512 load_bytes(const char *from) {
    return _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_load_si128((const __m128i *)from)));
}

LINEAR_INLINE __m512 load_scale(
    const struct linear_traits *traits, const char *scales, const uint16_t *super, uint32_t half, uint32_t part) {
    const uint16_t *d = (const uint16_t *)scales + half * LINEAR_LANES;
    if (traits->k)
        return _mm512_mul_ps(
            load_halves(super + half * LINEAR_LANES), load_bytes(scales + part * LINEAR_STRIP + half * LINEAR_LANES));
    return traits->bfloat ? load_bfloats(d) : load_halves(d);
}

LINEAR_INLINE __m512 load_minimum(const struct linear_traits *traits, const char *scales, const uint16_t *super,
    uint32_t half, uint32_t part, __m512 scale) {
    if (traits->offset > 0)
        return _mm512_mul_ps(scale, _mm512_set1_ps(-(float)traits->offset));
    if (!traits->k)
        return load_halves((const uint16_t *)scales + LINEAR_STRIP + half * LINEAR_LANES);
    __m512 minimum = load_bytes(scales + (traits->parts + part) * LINEAR_STRIP + half * LINEAR_LANES);
    __m512 m = load_halves(super + LINEAR_STRIP + half * LINEAR_LANES);
    return _mm512_xor_ps(_mm512_mul_ps(m, minimum), _mm512_set1_ps(-0.0f));
}

/* A strip's bytes are loaded in the order in which they lie: out of order they come from memory at half the speed. */
LINEAR_INLINE void multiply_blocks(const struct linear_tile *tile, enum linear_format format, uint32_t rows) {
    const struct linear_traits traits = linear_traits_of(format);
    const size_t half_bytes = linear_words(&traits) * 64, block_bytes = linear_block_bytes(&traits);
    const char *strip = tile->strip;
    const uint16_t *super = NULL;
    const struct linear_block *x = tile->panel;
    __m512 sum[LINEAR_PANEL][2];
    LINEAR_UNROLL(8)
    for (uint32_t row = 0; row < rows; row++)
        sum[row][0] = sum[row][1] = _mm512_setzero_ps();

    for (uint32_t step = 0; step < tile->steps; step++, strip += block_bytes, x += rows) {
        if (traits.k && step % LINEAR_SUPER == 0) {
            super = (const uint16_t *)strip;
            strip += linear_super_bytes(&traits);
        }
        const char *scales = strip + 2 * half_bytes;
        LINEAR_UNROLL(17)
        for (size_t at = 0; at < block_bytes && rows >= PREFETCH_ROWS; at += 64)
            _mm_prefetch(strip + PREFETCH_AHEAD + at, _MM_HINT_T2);
        LINEAR_UNROLL(2)
        for (uint32_t half = 0; half < 2; half++) {
            LINEAR_UNROLL(2)
            for (uint32_t part = 0; part < traits.parts; part++) {
                __m512i dot[LINEAR_PANEL];
                dot_part(strip + half * half_bytes, &traits, part, x, rows, dot);
                __m512 d = load_scale(&traits, scales, super, half, part);
                LINEAR_UNROLL(8)
                for (uint32_t row = 0; row < rows; row++) {
                    __m512 scale = _mm512_mul_ps(d, _mm512_set1_ps(x[row].scale));
                    sum[row][half] = _mm512_fmadd_ps(_mm512_cvtepi32_ps(dot[row]), scale, sum[row][half]);
                }
                if (!traits.minima && traits.offset == 0)
                    continue;
                __m512 minimum = load_minimum(&traits, scales, super, half, part, d);
                LINEAR_UNROLL(8)
                for (uint32_t row = 0; row < rows; row++) {
                    float scaled = traits.parts == 1 ? x[row].scaled_sum : x[row].scaled_half[part];
                    sum[row][half] = _mm512_fmadd_ps(minimum, _mm512_set1_ps(scaled), sum[row][half]);
                }
            }
        }
    }
    LINEAR_UNROLL(8)
    for (uint32_t row = 0; row < rows; row++) {
        store(tile, row, 0, sum[row][0]);
        store(tile, row, 1, sum[row][1]);
    }
}

LINEAR_INLINE __m512 load_values(enum linear_format format, const void *strip, size_t index) {
    if (format == LINEAR_F32)
        return _mm512_load_ps((const float *)strip + index);
    const uint16_t *values = (const uint16_t *)strip + index;
    return format == LINEAR_F16 ? load_halves(values) : load_bfloats(values);
}

LINEAR_INLINE void multiply_floats(const struct linear_tile *tile, enum linear_format format, uint32_t rows) {
    const float *x = tile->panel;
    __m512 sum[LINEAR_PANEL][2];
    LINEAR_UNROLL(8)
    for (uint32_t row = 0; row < rows; row++)
        sum[row][0] = sum[row][1] = _mm512_setzero_ps();
    for (size_t column = 0; column < tile->steps; column++, x += rows) {
        LINEAR_UNROLL(2)
        for (uint32_t half = 0; half < 2; half++) {
            __m512 weights = load_values(format, tile->strip, column * LINEAR_STRIP + half * LINEAR_LANES);
            LINEAR_UNROLL(8)
            for (uint32_t row = 0; row < rows; row++)
                sum[row][half] = _mm512_fmadd_ps(weights, _mm512_set1_ps(x[row]), sum[row][half]);
        }
    }
    LINEAR_UNROLL(8)
    for (uint32_t row = 0; row < rows; row++) {
        store(tile, row, 0, sum[row][0]);
        store(tile, row, 1, sum[row][1]);
    }
}

LINEAR_INLINE void multiply_rows(const struct linear_tile *tile, enum linear_format format, uint32_t rows) {
    if (format == LINEAR_F32 || format == LINEAR_F16 || format == LINEAR_BF16)
        multiply_floats(tile, format, rows);
    else
        multiply_blocks(tile, format, rows);
}

LINEAR_INLINE void multiply(const struct linear_tile *tile, enum linear_format format) {
    switch (tile->rows) {
    case 1:
        multiply_rows(tile, format, 1);
        break;
    case 2:
        multiply_rows(tile, format, 2);
        break;
    case 3:
        multiply_rows(tile, format, 3);
        break;
    case 4:
        multiply_rows(tile, format, 4);
        break;
    case 5:
        multiply_rows(tile, format, 5);
        break;
    case 6:
        multiply_rows(tile, format, 6);
        break;
    case 7:
        multiply_rows(tile, format, 7);
        break;
    default:
        multiply_rows(tile, format, LINEAR_PANEL);
        break;
    }
}

/* Nearest binary16, as float. */
LINEAR_INLINE float round_to_half(float value) {
    return _mm_cvtss_f32(_mm_cvtph_ps(_mm_cvtps_ph(_mm_set_ss(value), _MM_FROUND_TO_NEAREST_INT)));
}

static void round_block(const float *x, struct linear_block *block) {
    __m512 low = _mm512_loadu_ps(x);
    __m512 high = _mm512_loadu_ps(x + 16);
    const __m512i magnitude = _mm512_set1_epi32(0x7fffffff);
    __m512i bits = _mm512_max_epi32(
        _mm512_and_si512(_mm512_castps_si512(low), magnitude), _mm512_and_si512(_mm512_castps_si512(high), magnitude));
    int32_t largest = _mm512_reduce_max_epi32(bits);
    float amax;
    memcpy(&amax, &largest, sizeof amax);
    float scale = isfinite(amax) ? round_to_half(amax / 127) : NAN;
    if (!(scale > 0)) {
        memset(block, 0, sizeof *block);
        block->scale = scale;
        return;
    }
    __m512 inverse = _mm512_set1_ps(127 / amax);
    __m512i q_low = _mm512_cvtps_epi32(_mm512_mul_ps(low, inverse));
    __m512i q_high = _mm512_cvtps_epi32(_mm512_mul_ps(high, inverse));
    int32_t low_sum = _mm512_reduce_add_epi32(q_low), high_sum = _mm512_reduce_add_epi32(q_high);
    int32_t sum = low_sum + high_sum;
    _mm_storeu_si128((__m128i *)block->q, _mm512_cvtepi32_epi8(q_low));
    _mm_storeu_si128((__m128i *)(block->q + 16), _mm512_cvtepi32_epi8(q_high));
    block->scale = scale;
    block->scaled_sum = scale * (float)sum;
    block->minus_8_sum = -8 * sum;
    block->minus_128_sum = -128 * sum;
    block->scaled_half[0] = scale * (float)low_sum;
    block->scaled_half[1] = scale * (float)high_sum;
}

#include "engine/cpu/linear_body.h"

const struct linear_kernels linear_kernels_avx512 = LINEAR_KERNELS;
