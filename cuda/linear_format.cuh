/* SPDX-License-Identifier: Apache-2.0
 *
 * Reading weights of block formats as they lie on the device (cuda/linear.h): a lane's codes as signed bytes, and the
 * scales of two rows. With code the level or, of formats whose levels are code - offset, the code itself, and p the
 * part of a block of 32 that a column lies in, a weight is d[p] * code + m[p], both exact in float32 (Q4_0: 16 * code).
 */
#ifndef CUDA_LINEAR_FORMAT_CUH
#define CUDA_LINEAR_FORMAT_CUH

#include "cuda/linear_device.cuh"

/* Of a format; a step is what a strip has of 32 columns. */
template <int FORMAT_> struct block_format {
    static constexpr int FORMAT = FORMAT_;
    static constexpr struct linear_layout LAYOUT = linear_layouts[FORMAT_];
    static constexpr int LOW = LAYOUT.low, HIGH = LAYOUT.high, HEAD = LAYOUT.head;
    static constexpr int HIGH_AT = LINEAR_HIGH_AT(LAYOUT), SCALES_AT = LINEAR_SCALES_AT(LAYOUT);
    static constexpr int STEP = LINEAR_STEP_BYTES(LAYOUT);
    static constexpr int PARTS = FORMAT_ == LINEAR_Q2_K || FORMAT_ == LINEAR_Q3_K || FORMAT_ == LINEAR_Q6_K ? 2 : 1;
    static constexpr bool TABLE = FORMAT_ == LINEAR_IQ4_NL || FORMAT_ == LINEAR_MXFP4;
    static constexpr bool MINIMA = !TABLE && FORMAT_ != LINEAR_Q8_0 && FORMAT_ != LINEAR_Q4_0;
};

/* Of two rows, even (x) and odd: what a head and a step have of them. */
template <int PARTS> struct block_scales { float2 d[PARTS], m[PARTS]; };

/* The bytes of a strip at which a step begins. */
template <class F> static __device__ inline size_t block_step_at(uint32_t step) {
    return (size_t)step * F::STEP + (step / LINEAR_SUPER_STEPS + 1) * (size_t)F::HEAD;
}

/* ---- codes ---- */

/* Two bits at 0, 4, 8, 12 of the half-word to the low ends of four bytes, and those at 2, 6, 10, 14. */
static __device__ inline void block_spread_pairs(uint32_t pairs, uint32_t b[2]) {
    const uint32_t twice = __byte_perm(pairs, 0, 0x1100);
    const uint32_t spread = (twice & 0x000f000fu) | (twice >> 4 & 0x0f000f00u);
    b[0] = spread & 0x03030303u;
    b[1] = spread >> 2 & 0x03030303u;
}

/* Bit i of a nibble to the low end of byte i. */
static __device__ inline uint32_t block_spread_bits(uint32_t nibble) {
    return nibble * 0x00204081u & 0x01010101u;
}

/* What the table has for the four nibbles of a half-word. __byte_perm chooses among 8 bytes by 3 bits of each. */
template <int FORMAT> static __device__ inline uint32_t block_look_up(uint32_t nibbles) {
    constexpr bool NL = FORMAT == LINEAR_IQ4_NL;
    const uint32_t by = nibbles & 0x7777u;
    const uint32_t first = NL ? __byte_perm(0xbfad9881u, 0xf6eaddcfu, by) : __byte_perm(0x03020100u, 0x0c080604u, by);
    const uint32_t last = NL ? __byte_perm(0x26190d01u, 0x71594535u, by) : __byte_perm(0xfdfeff00u, 0xf4f8fafcu, by);
    return __byte_perm(first, last, 0x3210u | (nibbles >> 1 & 0x4444u));
}

/* The two registers of mma's second operand: columns 4 t .. 4 t + 3 and 16 + 4 t .. of row 8 * tile + g, for the lane
 * 4 g + t. */
template <class F>
static __device__ inline void block_load_codes(const unsigned char *step, uint32_t tile, uint32_t lane, uint32_t b[2]) {
    const uint32_t at = tile * 32 + lane;
    if (F::LOW == 8) {
        const uint2 pair = ((const uint2 *)step)[at];
        b[0] = pair.x;
        b[1] = pair.y;
    } else if (F::TABLE) {
        const uint32_t word = ((const uint32_t *)step)[at];
        b[0] = block_look_up<F::FORMAT>(word & 0xffffu);
        b[1] = block_look_up<F::FORMAT>(word >> 16);
    } else if (F::FORMAT == LINEAR_Q4_0) { /* 16 times the value, as signed bytes */
        const uint32_t word = ((const uint32_t *)step)[at];
        b[0] = word << 4 & 0xf0f0f0f0u;
        b[1] = word & 0xf0f0f0f0u;
    } else if (F::LOW == 4) {
        const uint32_t word = ((const uint32_t *)step)[at];
        b[0] = word & 0x0f0f0f0fu;
        b[1] = word >> 4 & 0x0f0f0f0fu;
    } else {
        block_spread_pairs(((const unsigned short *)step)[at], b);
    }
    if (F::HIGH == 1) {
        const uint32_t bits = (step + F::HIGH_AT)[at];
        b[0] |= block_spread_bits(bits & 15) << F::LOW;
        b[1] |= block_spread_bits(bits >> 4) << F::LOW;
    } else if (F::HIGH == 2) {
        uint32_t pairs[2];
        block_spread_pairs(((const unsigned short *)(step + F::HIGH_AT))[at], pairs);
        b[0] |= pairs[0] << F::LOW;
        b[1] |= pairs[1] << F::LOW;
    }
}

/* ---- scales ---- */

/* Two f16, or what they are of: of rows 2 * pair and 2 * pair + 1. */
static __device__ inline uint32_t block_load_pair(const unsigned char *halves, uint32_t pair) {
    return ((const uint32_t *)halves)[pair];
}

static __device__ inline float2 block_to_floats(uint32_t pair) {
    return make_float2(__half2float(__ushort_as_half((unsigned short)pair)),
        __half2float(__ushort_as_half((unsigned short)(pair >> 16))));
}

static __device__ inline float2 block_times(float2 a, float b) {
    return make_float2(a.x * b, a.y * b);
}

/* 2^(exponent - 128). */
static __device__ inline float block_power(uint32_t exponent) {
    return __uint_as_float(exponent < 2 ? 0x00200000u << exponent : (exponent - 1) << 23);
}

/* A head's d and m of a pair of rows, as bits: kept for its eight steps. */
template <class F> static __device__ inline uint2 block_load_head(const unsigned char *head, uint32_t pair) {
    if (F::HEAD == 0)
        return make_uint2(0, 0);
    return make_uint2(block_load_pair(head, pair), F::HEAD > 64 ? block_load_pair(head + 64, pair) : 0);
}

/* Two numbers of 6 bits a row: low nibbles in two bytes, the bits above them in one. */
static __device__ inline void block_load_sixes(
    const unsigned char *scales, uint32_t pair, uint32_t first[2], uint32_t second[2]) {
    const uint32_t low = ((const unsigned short *)scales)[pair], high = scales[32 + pair];
    first[0] = (low & 15) | (high & 3) << 4;
    second[0] = (low >> 4 & 15) | (high >> 2 & 3) << 4;
    first[1] = (low >> 8 & 15) | (high >> 4 & 3) << 4;
    second[1] = low >> 12 | high >> 6 << 4;
}

template <class F>
static __device__ inline struct block_scales<F::PARTS> block_load_scales(
    const unsigned char *step, uint2 head, uint32_t pair) {
    constexpr int FORMAT = F::FORMAT, LAST = F::PARTS - 1;
    const unsigned char *at = step + F::SCALES_AT;
    struct block_scales<F::PARTS> s;
    if (F::HEAD == 0 && FORMAT != LINEAR_MXFP4)
        s.d[0] = block_to_floats(block_load_pair(at, pair));
    const float2 d = block_to_floats(head.x), m = block_to_floats(head.y);
    if (FORMAT == LINEAR_MXFP4) {
        const uint32_t exponents = ((const unsigned short *)at)[pair];
        s.d[0] = make_float2(block_power(exponents & 255), block_power(exponents >> 8));
    } else if (FORMAT == LINEAR_Q4_0) {
        s.d[0] = block_times(s.d[0], 0.0625f);
    } else if (FORMAT == LINEAR_Q4_1 || FORMAT == LINEAR_Q5_1) {
        s.m[0] = block_to_floats(block_load_pair(at + 64, pair));
    } else if (FORMAT == LINEAR_Q5_0) {
        s.m[0] = block_times(s.d[0], -16);
    } else if (FORMAT == LINEAR_Q4_K || FORMAT == LINEAR_Q5_K) {
        uint32_t scale[2], minimum[2];
        block_load_sixes(at, pair, scale, minimum);
        s.d[0] = make_float2(d.x * (float)scale[0], d.y * (float)scale[1]);
        s.m[0] = make_float2(-(m.x * (float)minimum[0]), -(m.y * (float)minimum[1]));
    } else if (FORMAT == LINEAR_Q3_K) {
        uint32_t first[2], second[2];
        block_load_sixes(at, pair, first, second);
        s.d[0] = make_float2(d.x * (float)((int)first[0] - 32), d.y * (float)((int)first[1] - 32));
        s.d[LAST] = make_float2(d.x * (float)((int)second[0] - 32), d.y * (float)((int)second[1] - 32));
    } else if (FORMAT == LINEAR_Q2_K) {
        const uint32_t word = ((const uint32_t *)at)[pair]; /* bytes: first and last part of one row, of the other */
        s.d[0] = make_float2(d.x * (float)(word & 15), d.y * (float)(word >> 16 & 15));
        s.d[LAST] = make_float2(d.x * (float)(word >> 8 & 15), d.y * (float)(word >> 24 & 15));
        s.m[0] = make_float2(-(m.x * (float)(word >> 4 & 15)), -(m.y * (float)(word >> 20 & 15)));
        s.m[LAST] = make_float2(-(m.x * (float)(word >> 12 & 15)), -(m.y * (float)(word >> 28)));
    } else if (FORMAT == LINEAR_Q6_K) {
        const int word = ((const int *)at)[pair];
        s.d[0] = make_float2(d.x * (float)(signed char)word, d.y * (float)(signed char)(word >> 16));
        s.d[LAST] = make_float2(d.x * (float)(signed char)(word >> 8), d.y * (float)(word >> 24));
    }
    if (FORMAT == LINEAR_Q3_K || FORMAT == LINEAR_Q6_K) {
        s.m[0] = block_times(s.d[0], FORMAT == LINEAR_Q3_K ? -4 : -32);
        s.m[LAST] = block_times(s.d[LAST], FORMAT == LINEAR_Q3_K ? -4 : -32);
    }
    return s;
}

#endif
