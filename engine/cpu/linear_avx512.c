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

/* Where the integer dot product starts, to take back the offset of unsigned weights. */
LINEAR_INLINE __m512i dot_start(enum linear_format format, const struct linear_block *x) {
    if (format == LINEAR_Q8_0)
        return broadcast_int(&x->minus_128_sum);
    if (format == LINEAR_Q4_0)
        return broadcast_int(&x->minus_8_sum);
    return _mm512_setzero_si512();
}

/* The products of one half's 16 rows with one block of each row. */
LINEAR_INLINE void dot_block(const char *words, enum linear_format format, const struct linear_block *x, uint32_t rows,
    __m512i dot[LINEAR_PANEL]) {
    const uint32_t groups = format == LINEAR_Q8_0 ? 8 : 4;
    const __m512i low_nibbles = _mm512_set1_epi8(15);
    LINEAR_UNROLL(8)
    for (uint32_t row = 0; row < rows; row++)
        dot[row] = dot_start(format, &x[row]);
    LINEAR_UNROLL(8)
    for (uint32_t group = 0; group < groups; group++) {
        __m512i word = _mm512_load_si512(words + group * 64);
        __m512i low = format == LINEAR_Q8_0 ? word : _mm512_and_si512(word, low_nibbles);
        LINEAR_UNROLL(8)
        for (uint32_t row = 0; row < rows; row++)
            dot[row] = dot_add(dot[row], low, x[row].q + group * 4);
        if (format == LINEAR_Q8_0)
            continue;
        __m512i high = _mm512_and_si512(_mm512_srli_epi32(word, 4), low_nibbles);
        LINEAR_UNROLL(8)
        for (uint32_t row = 0; row < rows; row++)
            dot[row] = dot_add(dot[row], high, x[row].q + 16 + group * 4);
    }
}

/* A strip's bytes are loaded in the order in which they lie: out of order they come from memory at half the speed. */
LINEAR_INLINE void multiply_blocks(const struct linear_tile *tile, enum linear_format format, uint32_t rows) {
    const uint32_t groups = format == LINEAR_Q8_0 ? 8 : 4;
    const size_t step_bytes = LINEAR_STRIP * (groups * 4 + (format == LINEAR_Q4_1 ? 4 : 2));
    const char *strip = tile->strip;
    const struct linear_block *x = tile->panel;
    __m512 sum[LINEAR_PANEL][2];
    LINEAR_UNROLL(8)
    for (uint32_t row = 0; row < rows; row++)
        sum[row][0] = sum[row][1] = _mm512_setzero_ps();

    for (uint32_t step = 0; step < tile->steps; step++, strip += step_bytes, x += rows) {
        const uint16_t *scales = (const uint16_t *)(strip + groups * 128);
        LINEAR_UNROLL(17)
        for (size_t at = 0; at < step_bytes && rows >= PREFETCH_ROWS; at += 64)
            _mm_prefetch(strip + PREFETCH_AHEAD + at, _MM_HINT_T2);
        LINEAR_UNROLL(2)
        for (uint32_t half = 0; half < 2; half++) {
            __m512i dot[LINEAR_PANEL];
            dot_block(strip + half * groups * 64, format, x, rows, dot);
            __m512 d = load_halves(scales + half * LINEAR_LANES);
            LINEAR_UNROLL(8)
            for (uint32_t row = 0; row < rows; row++) {
                __m512 scale = _mm512_mul_ps(d, _mm512_set1_ps(x[row].scale));
                sum[row][half] = _mm512_fmadd_ps(_mm512_cvtepi32_ps(dot[row]), scale, sum[row][half]);
            }
            if (format != LINEAR_Q4_1)
                continue;
            __m512 m = load_halves(scales + LINEAR_STRIP + half * LINEAR_LANES);
            LINEAR_UNROLL(8)
            for (uint32_t row = 0; row < rows; row++)
                sum[row][half] = _mm512_fmadd_ps(m, _mm512_set1_ps(x[row].scaled_sum), sum[row][half]);
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
    int32_t sum = _mm512_reduce_add_epi32(_mm512_add_epi32(q_low, q_high));
    _mm_storeu_si128((__m128i *)block->q, _mm512_cvtepi32_epi8(q_low));
    _mm_storeu_si128((__m128i *)(block->q + 16), _mm512_cvtepi32_epi8(q_high));
    block->scale = scale;
    block->scaled_sum = scale * (float)sum;
    block->minus_8_sum = -8 * sum;
    block->minus_128_sum = -128 * sum;
}

#include "engine/cpu/linear_body.h"

const struct linear_kernels linear_kernels_avx512 = LINEAR_KERNELS;
