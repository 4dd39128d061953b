/* SPDX-License-Identifier: Apache-2.0
 *
 * Sixteen float lanes in one AVX-512 register. The operations are explained in lanes_scalar.h.
 */
#ifndef ENGINE_CPU_LANES_AVX512_H
#define ENGINE_CPU_LANES_AVX512_H

#include <immintrin.h>
#include <stdbool.h>
#include <stdint.h>

enum { LANES = 16 };
enum { LANES_BLOCK_ROWS = 6, LANES_BLOCK_VECTORS = 4, LANES_TALL_ROWS = 12, LANES_TALL_VECTORS = 2 };

struct lanes {
    __m512 v;
};

struct sums {
    __m512d low, high;
};

struct counts {
    __m512i v;
};

static inline struct lanes lanes_set(float value) {
    return (struct lanes){_mm512_set1_ps(value)};
}

static inline struct lanes lanes_load(const float *from) {
    return (struct lanes){_mm512_loadu_ps(from)};
}

static inline struct lanes lanes_load_part(const float *from, uint32_t count, float fill) {
    return (struct lanes){_mm512_mask_loadu_ps(_mm512_set1_ps(fill), (__mmask16)((1u << count) - 1), from)};
}

static inline void lanes_store(float *to, struct lanes a) {
    _mm512_storeu_ps(to, a.v);
}

static inline void lanes_store_part(float *to, uint32_t count, struct lanes a) {
    _mm512_mask_storeu_ps(to, (__mmask16)((1u << count) - 1), a.v);
}

static inline struct lanes lanes_add(struct lanes a, struct lanes b) {
    return (struct lanes){_mm512_add_ps(a.v, b.v)};
}

static inline struct lanes lanes_sub(struct lanes a, struct lanes b) {
    return (struct lanes){_mm512_sub_ps(a.v, b.v)};
}

static inline struct lanes lanes_mul(struct lanes a, struct lanes b) {
    return (struct lanes){_mm512_mul_ps(a.v, b.v)};
}

static inline struct lanes lanes_div(struct lanes a, struct lanes b) {
    return (struct lanes){_mm512_div_ps(a.v, b.v)};
}

static inline struct lanes lanes_sqrt(struct lanes a) {
    return (struct lanes){_mm512_sqrt_ps(a.v)};
}

static inline struct lanes lanes_fma(struct lanes a, struct lanes b, struct lanes c) {
    return (struct lanes){_mm512_fmadd_ps(a.v, b.v, c.v)};
}

static inline struct lanes lanes_max(struct lanes a, struct lanes b) {
    return (struct lanes){_mm512_max_ps(a.v, b.v)};
}

static inline struct lanes lanes_min(struct lanes a, struct lanes b) {
    return (struct lanes){_mm512_min_ps(a.v, b.v)};
}

static inline uint32_t lanes_at_least(struct lanes a, struct lanes b) {
    return _mm512_cmp_ps_mask(a.v, b.v, _CMP_GE_OQ);
}

static inline struct lanes lanes_replace(uint32_t mask, struct lanes value, struct lanes otherwise) {
    return (struct lanes){_mm512_mask_mov_ps(otherwise.v, (__mmask16)mask, value.v)};
}

static inline struct lanes lanes_keep(uint32_t mask, struct lanes value) {
    return (struct lanes){_mm512_maskz_mov_ps((__mmask16)mask, value.v)};
}

static inline struct lanes lanes_keep_unless_below(struct lanes a, struct lanes b, struct lanes value) {
    return (struct lanes){_mm512_maskz_mov_ps(_mm512_cmp_ps_mask(a.v, b.v, _CMP_NLT_UQ), value.v)};
}

static inline struct lanes lanes_swap_pairs(struct lanes a) {
    return (struct lanes){_mm512_permute_ps(a.v, 0xb1)};
}

static inline struct lanes lanes_shift_exponent(struct lanes value, struct lanes counter) {
    __m512i shift = _mm512_slli_epi32(_mm512_castps_si512(counter.v), 23);
    return (struct lanes){_mm512_castsi512_ps(_mm512_add_epi32(_mm512_castps_si512(value.v), shift))};
}

static inline __m256 lanes_low(struct lanes a) {
    return _mm512_castps512_ps256(a.v);
}

static inline __m256 lanes_high(struct lanes a) {
    return _mm512_extractf32x8_ps(a.v, 1);
}

static inline float lanes_sum(struct lanes a) {
    __m256 eight = _mm256_add_ps(lanes_low(a), lanes_high(a));
    __m128 four = _mm_add_ps(_mm256_castps256_ps128(eight), _mm256_extractf128_ps(eight, 1));
    __m128 two = _mm_add_ps(four, _mm_movehl_ps(four, four));
    return _mm_cvtss_f32(_mm_add_ss(two, _mm_movehdup_ps(two)));
}

static inline float lanes_maximum(struct lanes a) {
    __m256 eight = _mm256_max_ps(lanes_low(a), lanes_high(a));
    __m128 four = _mm_max_ps(_mm256_castps256_ps128(eight), _mm256_extractf128_ps(eight, 1));
    __m128 two = _mm_max_ps(four, _mm_movehl_ps(four, four));
    return _mm_cvtss_f32(_mm_max_ss(two, _mm_movehdup_ps(two)));
}

static inline struct lanes lanes_load_half(const uint16_t *from) {
    return (struct lanes){_mm512_cvtph_ps(_mm256_loadu_si256((const __m256i *)from))};
}

static inline struct lanes lanes_load_bfloat(const uint16_t *from) {
    __m512i wide = _mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i *)from));
    return (struct lanes){_mm512_castsi512_ps(_mm512_slli_epi32(wide, 16))};
}

static inline void lanes_store_half(uint16_t *to, struct lanes a) {
    _mm256_storeu_si256((__m256i *)to, _mm512_cvtps_ph(a.v, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC));
}

/* Adds just under half of the last place, and one more when that place is odd; NaN only gets its quiet bit. */
static inline void lanes_store_bfloat(uint16_t *to, struct lanes a) {
    __m512i bits = _mm512_castps_si512(a.v);
    __m512i odd = _mm512_and_si512(_mm512_srli_epi32(bits, 16), _mm512_set1_epi32(1));
    __m512i rounded = _mm512_add_epi32(bits, _mm512_add_epi32(odd, _mm512_set1_epi32(0x7fff)));
    __m512i quiet = _mm512_or_si512(bits, _mm512_set1_epi32(0x400000));
    rounded = _mm512_mask_mov_epi32(rounded, _mm512_cmp_ps_mask(a.v, a.v, _CMP_UNORD_Q), quiet);
    _mm256_storeu_si256((__m256i *)to, _mm512_cvtepi32_epi16(_mm512_srli_epi32(rounded, 16)));
}

static inline uint32_t lanes_not_after(const int32_t *positions, int32_t limit) {
    return _mm512_cmple_epi32_mask(_mm512_loadu_si512(positions), _mm512_set1_epi32(limit));
}

static inline bool lanes_ascends_near(const uint32_t *index) {
    __m512i at = _mm512_loadu_si512(index), next = _mm512_maskz_loadu_epi32(0x7fff, index + 1);
    return _mm512_cmplt_epu32_mask(at, next) == 0x7fff && index[LANES - 1] - index[0] < 2 * LANES;
}

static inline struct lanes lanes_pick_near(const void *from, const uint32_t *index) {
    const float *numbers = from;
    __m512i at = _mm512_sub_epi32(_mm512_loadu_si512(index), _mm512_set1_epi32((int)index[0]));
    return (struct lanes){_mm512_permutex2var_ps(_mm512_loadu_ps(numbers), at, _mm512_loadu_ps(numbers + LANES))};
}

/* Ascending lanes are expanded into the places that their bits name, sixteen places at a time. */
static inline void lanes_put_near(float *to, const uint32_t *index, struct lanes a) {
    __m512i at = _mm512_sub_epi32(_mm512_loadu_si512(index), _mm512_set1_epi32((int)index[0]));
    uint32_t places = (uint32_t)_mm512_reduce_or_epi32(_mm512_sllv_epi32(_mm512_set1_epi32(1), at));
    __mmask16 low = (__mmask16)places, high = (__mmask16)(places >> LANES);
    __mmask16 rest = (__mmask16)(0xffffu << __builtin_popcount(low));
    _mm512_mask_storeu_ps(to, low, _mm512_maskz_expand_ps(low, a.v));
    _mm512_mask_storeu_ps(to + LANES, high, _mm512_maskz_expand_ps(high, _mm512_maskz_compress_ps(rest, a.v)));
}

static inline struct sums sums_zero(void) {
    return (struct sums){_mm512_setzero_pd(), _mm512_setzero_pd()};
}

static inline struct sums sums_fma(struct sums s, struct lanes a, struct lanes b) {
    s.low = _mm512_fmadd_pd(_mm512_cvtps_pd(lanes_low(a)), _mm512_cvtps_pd(lanes_low(b)), s.low);
    s.high = _mm512_fmadd_pd(_mm512_cvtps_pd(lanes_high(a)), _mm512_cvtps_pd(lanes_high(b)), s.high);
    return s;
}

static inline struct sums sums_add(struct sums s, struct lanes a) {
    s.low = _mm512_add_pd(s.low, _mm512_cvtps_pd(lanes_low(a)));
    s.high = _mm512_add_pd(s.high, _mm512_cvtps_pd(lanes_high(a)));
    return s;
}

static inline __m256 lanes_difference_eight(__m256 a, __m256 b, double shift) {
    __m512d difference = _mm512_sub_pd(_mm512_cvtps_pd(a), _mm512_cvtps_pd(b));
    return _mm512_cvtpd_ps(_mm512_sub_pd(difference, _mm512_set1_pd(shift)));
}

static inline struct lanes lanes_difference(struct lanes a, struct lanes b, double shift) {
    __m256 low = lanes_difference_eight(lanes_low(a), lanes_low(b), shift);
    __m256 high = lanes_difference_eight(lanes_high(a), lanes_high(b), shift);
    return (struct lanes){_mm512_insertf32x8(_mm512_castps256_ps512(low), high, 1)};
}

static inline struct lanes lanes_mantissa(struct lanes x, struct lanes *exponent) {
    const __m512i root = _mm512_set1_epi32(0x3f3504f3), one = _mm512_set1_epi32(0x3f800000);
    __m512i bits = _mm512_add_epi32(_mm512_castps_si512(x.v), _mm512_sub_epi32(one, root));
    exponent->v = _mm512_cvtepi32_ps(_mm512_sub_epi32(_mm512_srli_epi32(bits, 23), _mm512_set1_epi32(127)));
    bits = _mm512_add_epi32(_mm512_and_si512(bits, _mm512_set1_epi32(0x7fffff)), root);
    return (struct lanes){_mm512_castsi512_ps(bits)};
}

static inline __m512i lanes_mix(__m512i x) {
    x = _mm512_add_epi64(x, _mm512_set1_epi64((long long)0x9e3779b97f4a7c15u));
    x = _mm512_xor_si512(x, _mm512_srli_epi64(x, 30));
    x = _mm512_mullo_epi64(x, _mm512_set1_epi64((long long)0xbf58476d1ce4e5b9u));
    x = _mm512_xor_si512(x, _mm512_srli_epi64(x, 27));
    x = _mm512_mullo_epi64(x, _mm512_set1_epi64((long long)0x94d049bb133111ebu));
    return _mm512_xor_si512(x, _mm512_srli_epi64(x, 31));
}

static inline __m512d lanes_uniform_eight(uint64_t key, __m256i positions) {
    __m512i bits = _mm512_xor_si512(_mm512_set1_epi64((long long)key), _mm512_cvtepu32_epi64(positions));
    bits = _mm512_srli_epi64(lanes_mix(bits), 12);
    bits = _mm512_or_si512(bits, _mm512_set1_epi64(0x3ff0000000000000));
    return _mm512_sub_pd(_mm512_castsi512_pd(bits), _mm512_set1_pd(1 - 0x1p-53));
}

static inline struct lanes lanes_narrow(__m512d low, __m512d high) {
    __m512 first = _mm512_castps256_ps512(_mm512_cvtpd_ps(low));
    return (struct lanes){_mm512_insertf32x8(first, _mm512_cvtpd_ps(high), 1)};
}

static inline struct lanes lanes_uniform(uint64_t key, const int32_t *positions, struct lanes *complement) {
    const __m512d one = _mm512_set1_pd(1);
    __m512d low = lanes_uniform_eight(key, _mm256_loadu_si256((const __m256i *)positions));
    __m512d high = lanes_uniform_eight(key, _mm256_loadu_si256((const __m256i *)(positions + 8)));
    *complement = lanes_narrow(_mm512_sub_pd(one, low), _mm512_sub_pd(one, high));
    return lanes_narrow(low, high);
}

static inline struct counts counts_zero(void) {
    return (struct counts){_mm512_setzero_si512()};
}

static inline struct counts counts_round(struct lanes a) {
    return (struct counts){_mm512_cvt_roundps_epi32(a.v, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC)};
}

static inline struct counts counts_load(const uint32_t *from) {
    return (struct counts){_mm512_loadu_si512(from)};
}

static inline void counts_store(uint32_t *to, struct counts a) {
    _mm512_storeu_si512(to, a.v);
}

static inline struct counts counts_add(struct counts a, struct counts b) {
    return (struct counts){_mm512_add_epi32(a.v, b.v)};
}

static inline struct counts counts_sub(struct counts a, struct counts b) {
    return (struct counts){_mm512_sub_epi32(a.v, b.v)};
}

static inline bool counts_any_high(struct counts a) {
    return _mm512_movepi32_mask(a.v) != 0;
}

static inline void counts_add_carry(uint32_t *low, uint32_t *high, struct counts a) {
    const __m512i flag = _mm512_set1_epi32(INT32_MIN);
    struct counts old = counts_load(low), sum = counts_add((struct counts){_mm512_andnot_si512(flag, old.v)}, a);
    counts_store(low, (struct counts){_mm512_or_si512(sum.v, _mm512_and_si512(flag, old.v))});
    if (counts_any_high(sum))
        counts_store(high, counts_add(counts_load(high), (struct counts){_mm512_srli_epi32(sum.v, 31)}));
}

static inline struct lanes lanes_of_counts(struct counts a) {
    return (struct lanes){_mm512_cvtepi32_ps(a.v)};
}

static inline struct sums sums_load(const double *from) {
    return (struct sums){_mm512_loadu_pd(from), _mm512_loadu_pd(from + 8)};
}

static inline struct sums sums_add_scaled(double a, struct sums b, struct sums s) {
    __m512d factor = _mm512_set1_pd(a);
    return (struct sums){_mm512_fmadd_pd(factor, b.low, s.low), _mm512_fmadd_pd(factor, b.high, s.high)};
}

static inline void sums_store(double *to, struct sums s) {
    _mm512_storeu_pd(to, s.low);
    _mm512_storeu_pd(to + 8, s.high);
}

#endif
