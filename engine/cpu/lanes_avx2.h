/* SPDX-License-Identifier: Apache-2.0
 *
 * Sixteen float lanes in two AVX2 registers. The operations are explained in lanes_scalar.h.
 */
#ifndef ENGINE_CPU_LANES_AVX2_H
#define ENGINE_CPU_LANES_AVX2_H

#include <immintrin.h>
#include <stdbool.h>
#include <stdint.h>
#include <string.h>

enum { LANES = 16 };
enum { LANES_BLOCK_ROWS = 6, LANES_BLOCK_VECTORS = 1, LANES_TALL_ROWS = 0, LANES_TALL_VECTORS = 0 };

struct lanes {
    __m256 low, high;
};

struct sums {
    __m256d v[4];
};

struct counts {
    __m256i low, high;
};

static inline struct lanes lanes_set(float value) {
    return (struct lanes){_mm256_set1_ps(value), _mm256_set1_ps(value)};
}

static inline struct lanes lanes_load(const float *from) {
    return (struct lanes){_mm256_loadu_ps(from), _mm256_loadu_ps(from + 8)};
}

static inline void lanes_store(float *to, struct lanes a) {
    _mm256_storeu_ps(to, a.low);
    _mm256_storeu_ps(to + 8, a.high);
}

static inline struct lanes lanes_load_part(const float *from, uint32_t count, float fill) {
    float buffer[LANES];
    lanes_store(buffer, lanes_set(fill));
    memcpy(buffer, from, count * sizeof(float));
    return lanes_load(buffer);
}

static inline void lanes_store_part(float *to, uint32_t count, struct lanes a) {
    float buffer[LANES];
    lanes_store(buffer, a);
    memcpy(to, buffer, count * sizeof(float));
}

static inline struct lanes lanes_add(struct lanes a, struct lanes b) {
    return (struct lanes){_mm256_add_ps(a.low, b.low), _mm256_add_ps(a.high, b.high)};
}

static inline struct lanes lanes_sub(struct lanes a, struct lanes b) {
    return (struct lanes){_mm256_sub_ps(a.low, b.low), _mm256_sub_ps(a.high, b.high)};
}

static inline struct lanes lanes_mul(struct lanes a, struct lanes b) {
    return (struct lanes){_mm256_mul_ps(a.low, b.low), _mm256_mul_ps(a.high, b.high)};
}

static inline struct lanes lanes_div(struct lanes a, struct lanes b) {
    return (struct lanes){_mm256_div_ps(a.low, b.low), _mm256_div_ps(a.high, b.high)};
}

static inline struct lanes lanes_sqrt(struct lanes a) {
    return (struct lanes){_mm256_sqrt_ps(a.low), _mm256_sqrt_ps(a.high)};
}

static inline struct lanes lanes_fma(struct lanes a, struct lanes b, struct lanes c) {
    return (struct lanes){_mm256_fmadd_ps(a.low, b.low, c.low), _mm256_fmadd_ps(a.high, b.high, c.high)};
}

static inline struct lanes lanes_max(struct lanes a, struct lanes b) {
    return (struct lanes){_mm256_max_ps(a.low, b.low), _mm256_max_ps(a.high, b.high)};
}

static inline struct lanes lanes_min(struct lanes a, struct lanes b) {
    return (struct lanes){_mm256_min_ps(a.low, b.low), _mm256_min_ps(a.high, b.high)};
}

static inline uint32_t lanes_at_least(struct lanes a, struct lanes b) {
    uint32_t low = (uint32_t)_mm256_movemask_ps(_mm256_cmp_ps(a.low, b.low, _CMP_GE_OQ));
    uint32_t high = (uint32_t)_mm256_movemask_ps(_mm256_cmp_ps(a.high, b.high, _CMP_GE_OQ));
    return low | high << 8;
}

/* All ones in the lanes whose bit of the low eight is set. */
static inline __m256 lanes_spread(uint32_t mask) {
    const __m256i bit = _mm256_setr_epi32(1, 2, 4, 8, 16, 32, 64, 128);
    __m256i all = _mm256_and_si256(_mm256_set1_epi32((int)mask), bit);
    return _mm256_castsi256_ps(_mm256_cmpeq_epi32(all, bit));
}

static inline struct lanes lanes_replace(uint32_t mask, struct lanes value, struct lanes otherwise) {
    return (struct lanes){_mm256_blendv_ps(otherwise.low, value.low, lanes_spread(mask)),
        _mm256_blendv_ps(otherwise.high, value.high, lanes_spread(mask >> 8))};
}

static inline struct lanes lanes_keep(uint32_t mask, struct lanes value) {
    return (struct lanes){
        _mm256_and_ps(value.low, lanes_spread(mask)), _mm256_and_ps(value.high, lanes_spread(mask >> 8))};
}

static inline struct lanes lanes_keep_unless_below(struct lanes a, struct lanes b, struct lanes value) {
    return (struct lanes){_mm256_and_ps(value.low, _mm256_cmp_ps(a.low, b.low, _CMP_NLT_UQ)),
        _mm256_and_ps(value.high, _mm256_cmp_ps(a.high, b.high, _CMP_NLT_UQ))};
}

static inline struct lanes lanes_swap_pairs(struct lanes a) {
    return (struct lanes){_mm256_permute_ps(a.low, 0xb1), _mm256_permute_ps(a.high, 0xb1)};
}

static inline __m256 lanes_shift_eight(__m256 value, __m256 counter) {
    __m256i shift = _mm256_slli_epi32(_mm256_castps_si256(counter), 23);
    return _mm256_castsi256_ps(_mm256_add_epi32(_mm256_castps_si256(value), shift));
}

static inline struct lanes lanes_shift_exponent(struct lanes value, struct lanes counter) {
    return (struct lanes){lanes_shift_eight(value.low, counter.low), lanes_shift_eight(value.high, counter.high)};
}

static inline float lanes_sum(struct lanes a) {
    __m256 eight = _mm256_add_ps(a.low, a.high);
    __m128 four = _mm_add_ps(_mm256_castps256_ps128(eight), _mm256_extractf128_ps(eight, 1));
    __m128 two = _mm_add_ps(four, _mm_movehl_ps(four, four));
    return _mm_cvtss_f32(_mm_add_ss(two, _mm_movehdup_ps(two)));
}

static inline float lanes_maximum(struct lanes a) {
    __m256 eight = _mm256_max_ps(a.low, a.high);
    __m128 four = _mm_max_ps(_mm256_castps256_ps128(eight), _mm256_extractf128_ps(eight, 1));
    __m128 two = _mm_max_ps(four, _mm_movehl_ps(four, four));
    return _mm_cvtss_f32(_mm_max_ss(two, _mm_movehdup_ps(two)));
}

static inline struct lanes lanes_load_half(const uint16_t *from) {
    return (struct lanes){_mm256_cvtph_ps(_mm_loadu_si128((const __m128i *)from)),
        _mm256_cvtph_ps(_mm_loadu_si128((const __m128i *)(from + 8)))};
}

static inline __m256 lanes_widen_bfloat(const uint16_t *from) {
    __m256i wide = _mm256_cvtepu16_epi32(_mm_loadu_si128((const __m128i *)from));
    return _mm256_castsi256_ps(_mm256_slli_epi32(wide, 16));
}

static inline struct lanes lanes_load_bfloat(const uint16_t *from) {
    return (struct lanes){lanes_widen_bfloat(from), lanes_widen_bfloat(from + 8)};
}

static inline void lanes_store_half(uint16_t *to, struct lanes a) {
    enum { NEAREST = _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC };
    _mm_storeu_si128((__m128i *)to, _mm256_cvtps_ph(a.low, NEAREST));
    _mm_storeu_si128((__m128i *)(to + 8), _mm256_cvtps_ph(a.high, NEAREST));
}

/* Adds just under half of the last place, and one more when that place is odd; NaN only gets its quiet bit. */
static inline __m128i lanes_narrow_bfloat(__m256 value) {
    __m256i bits = _mm256_castps_si256(value);
    __m256i odd = _mm256_and_si256(_mm256_srli_epi32(bits, 16), _mm256_set1_epi32(1));
    __m256i rounded = _mm256_add_epi32(bits, _mm256_add_epi32(odd, _mm256_set1_epi32(0x7fff)));
    __m256i quiet = _mm256_or_si256(bits, _mm256_set1_epi32(0x400000));
    __m256i nan = _mm256_castps_si256(_mm256_cmp_ps(value, value, _CMP_UNORD_Q));
    rounded = _mm256_srli_epi32(_mm256_blendv_epi8(rounded, quiet, nan), 16);
    return _mm_packus_epi32(_mm256_castsi256_si128(rounded), _mm256_extracti128_si256(rounded, 1));
}

static inline void lanes_store_bfloat(uint16_t *to, struct lanes a) {
    _mm_storeu_si128((__m128i *)to, lanes_narrow_bfloat(a.low));
    _mm_storeu_si128((__m128i *)(to + 8), lanes_narrow_bfloat(a.high));
}

static inline uint32_t lanes_after_eight(const int32_t *positions, int32_t limit) {
    __m256i eight = _mm256_loadu_si256((const __m256i *)positions);
    __m256i after = _mm256_cmpgt_epi32(eight, _mm256_set1_epi32(limit));
    return (uint32_t)_mm256_movemask_ps(_mm256_castsi256_ps(after));
}

static inline uint32_t lanes_not_after(const int32_t *positions, int32_t limit) {
    return ~(lanes_after_eight(positions, limit) | lanes_after_eight(positions + 8, limit) << 8) & 0xffff;
}

/* No use here: see lanes_scalar.h. */
static inline bool lanes_ascends_near(const uint32_t *index) {
    (void)index;
    return false;
}

static inline struct lanes lanes_pick_near(const void *from, const uint32_t *index) {
    (void)index;
    return lanes_load(from);
}

static inline void lanes_put_near(float *to, const uint32_t *index, struct lanes a) {
    (void)index;
    lanes_store(to, a);
}

static inline struct sums sums_zero(void) {
    return (struct sums){{_mm256_setzero_pd(), _mm256_setzero_pd(), _mm256_setzero_pd(), _mm256_setzero_pd()}};
}

static inline struct sums sums_add(struct sums s, struct lanes a) {
    s.v[0] = _mm256_add_pd(s.v[0], _mm256_cvtps_pd(_mm256_castps256_ps128(a.low)));
    s.v[1] = _mm256_add_pd(s.v[1], _mm256_cvtps_pd(_mm256_extractf128_ps(a.low, 1)));
    s.v[2] = _mm256_add_pd(s.v[2], _mm256_cvtps_pd(_mm256_castps256_ps128(a.high)));
    s.v[3] = _mm256_add_pd(s.v[3], _mm256_cvtps_pd(_mm256_extractf128_ps(a.high, 1)));
    return s;
}

static inline struct sums sums_fma(struct sums s, struct lanes a, struct lanes b) {
    const __m128 x[4] = {_mm256_castps256_ps128(a.low), _mm256_extractf128_ps(a.low, 1), _mm256_castps256_ps128(a.high),
        _mm256_extractf128_ps(a.high, 1)};
    const __m128 y[4] = {_mm256_castps256_ps128(b.low), _mm256_extractf128_ps(b.low, 1), _mm256_castps256_ps128(b.high),
        _mm256_extractf128_ps(b.high, 1)};
    for (int i = 0; i < 4; i++)
        s.v[i] = _mm256_fmadd_pd(_mm256_cvtps_pd(x[i]), _mm256_cvtps_pd(y[i]), s.v[i]);
    return s;
}

static inline __m128 lanes_difference_four(__m128 a, __m128 b, double shift) {
    __m256d difference = _mm256_sub_pd(_mm256_cvtps_pd(a), _mm256_cvtps_pd(b));
    return _mm256_cvtpd_ps(_mm256_sub_pd(difference, _mm256_set1_pd(shift)));
}

static inline __m256 lanes_difference_eight(__m256 a, __m256 b, double shift) {
    __m128 low = lanes_difference_four(_mm256_castps256_ps128(a), _mm256_castps256_ps128(b), shift);
    __m128 high = lanes_difference_four(_mm256_extractf128_ps(a, 1), _mm256_extractf128_ps(b, 1), shift);
    return _mm256_set_m128(high, low);
}

static inline struct lanes lanes_difference(struct lanes a, struct lanes b, double shift) {
    return (struct lanes){lanes_difference_eight(a.low, b.low, shift), lanes_difference_eight(a.high, b.high, shift)};
}

static inline __m256 lanes_mantissa_eight(__m256 x, __m256 *exponent) {
    const __m256i root = _mm256_set1_epi32(0x3f3504f3), one = _mm256_set1_epi32(0x3f800000);
    __m256i bits = _mm256_add_epi32(_mm256_castps_si256(x), _mm256_sub_epi32(one, root));
    *exponent = _mm256_cvtepi32_ps(_mm256_sub_epi32(_mm256_srli_epi32(bits, 23), _mm256_set1_epi32(127)));
    bits = _mm256_add_epi32(_mm256_and_si256(bits, _mm256_set1_epi32(0x7fffff)), root);
    return _mm256_castsi256_ps(bits);
}

static inline struct lanes lanes_mantissa(struct lanes x, struct lanes *exponent) {
    return (struct lanes){lanes_mantissa_eight(x.low, &exponent->low), lanes_mantissa_eight(x.high, &exponent->high)};
}

/* The low 64 bits of products, from those of 32-bit halves. */
static inline __m256i lanes_multiply(__m256i a, uint64_t factor) {
    __m256i b = _mm256_set1_epi64x((long long)factor), high = _mm256_set1_epi64x((long long)(factor >> 32));
    __m256i cross = _mm256_add_epi64(_mm256_mul_epu32(_mm256_srli_epi64(a, 32), b), _mm256_mul_epu32(a, high));
    return _mm256_add_epi64(_mm256_mul_epu32(a, b), _mm256_slli_epi64(cross, 32));
}

static inline __m256i lanes_mix(__m256i x) {
    x = _mm256_add_epi64(x, _mm256_set1_epi64x((long long)0x9e3779b97f4a7c15u));
    x = lanes_multiply(_mm256_xor_si256(x, _mm256_srli_epi64(x, 30)), 0xbf58476d1ce4e5b9u);
    x = lanes_multiply(_mm256_xor_si256(x, _mm256_srli_epi64(x, 27)), 0x94d049bb133111ebu);
    return _mm256_xor_si256(x, _mm256_srli_epi64(x, 31));
}

static inline __m256d lanes_uniform_four(uint64_t key, const int32_t *positions) {
    __m256i wide = _mm256_cvtepu32_epi64(_mm_loadu_si128((const __m128i *)positions));
    __m256i bits = _mm256_srli_epi64(lanes_mix(_mm256_xor_si256(_mm256_set1_epi64x((long long)key), wide)), 12);
    bits = _mm256_or_si256(bits, _mm256_set1_epi64x(0x3ff0000000000000));
    return _mm256_sub_pd(_mm256_castsi256_pd(bits), _mm256_set1_pd(1 - 0x1p-53));
}

static inline __m256 lanes_uniform_eight(uint64_t key, const int32_t *positions, __m256 *complement) {
    const __m256d one = _mm256_set1_pd(1);
    __m256d low = lanes_uniform_four(key, positions), high = lanes_uniform_four(key, positions + 4);
    *complement = _mm256_set_m128(_mm256_cvtpd_ps(_mm256_sub_pd(one, high)), _mm256_cvtpd_ps(_mm256_sub_pd(one, low)));
    return _mm256_set_m128(_mm256_cvtpd_ps(high), _mm256_cvtpd_ps(low));
}

static inline struct lanes lanes_uniform(uint64_t key, const int32_t *positions, struct lanes *complement) {
    return (struct lanes){lanes_uniform_eight(key, positions, &complement->low),
        lanes_uniform_eight(key, positions + 8, &complement->high)};
}

static inline struct counts counts_zero(void) {
    return (struct counts){_mm256_setzero_si256(), _mm256_setzero_si256()};
}

static inline struct counts counts_round(struct lanes a) {
    return (struct counts){_mm256_cvtps_epi32(a.low), _mm256_cvtps_epi32(a.high)};
}

static inline struct counts counts_load(const uint32_t *from) {
    return (struct counts){_mm256_loadu_si256((const __m256i *)from), _mm256_loadu_si256((const __m256i *)(from + 8))};
}

static inline void counts_store(uint32_t *to, struct counts a) {
    _mm256_storeu_si256((__m256i *)to, a.low);
    _mm256_storeu_si256((__m256i *)(to + 8), a.high);
}

static inline struct counts counts_add(struct counts a, struct counts b) {
    return (struct counts){_mm256_add_epi32(a.low, b.low), _mm256_add_epi32(a.high, b.high)};
}

static inline struct counts counts_sub(struct counts a, struct counts b) {
    return (struct counts){_mm256_sub_epi32(a.low, b.low), _mm256_sub_epi32(a.high, b.high)};
}

static inline bool counts_any_high(struct counts a) {
    return _mm256_movemask_ps(_mm256_castsi256_ps(_mm256_or_si256(a.low, a.high))) != 0;
}

static inline void counts_add_carry(uint32_t *low, uint32_t *high, struct counts a) {
    const __m256i flag = _mm256_set1_epi32(INT32_MIN);
    struct counts old = counts_load(low);
    struct counts sum =
        counts_add((struct counts){_mm256_andnot_si256(flag, old.low), _mm256_andnot_si256(flag, old.high)}, a);
    counts_store(low, (struct counts){_mm256_or_si256(sum.low, _mm256_and_si256(flag, old.low)),
                          _mm256_or_si256(sum.high, _mm256_and_si256(flag, old.high))});
    if (counts_any_high(sum))
        counts_store(high, counts_add(counts_load(high),
                               (struct counts){_mm256_srli_epi32(sum.low, 31), _mm256_srli_epi32(sum.high, 31)}));
}

static inline struct lanes lanes_of_counts(struct counts a) {
    return (struct lanes){_mm256_cvtepi32_ps(a.low), _mm256_cvtepi32_ps(a.high)};
}

static inline struct sums sums_load(const double *from) {
    return (struct sums){
        {_mm256_loadu_pd(from), _mm256_loadu_pd(from + 4), _mm256_loadu_pd(from + 8), _mm256_loadu_pd(from + 12)}};
}

static inline struct sums sums_add_scaled(double a, struct sums b, struct sums s) {
    __m256d factor = _mm256_set1_pd(a);
    for (int i = 0; i < 4; i++)
        s.v[i] = _mm256_fmadd_pd(factor, b.v[i], s.v[i]);
    return s;
}

static inline void sums_store(double *to, struct sums s) {
    for (int i = 0; i < 4; i++)
        _mm256_storeu_pd(to + 4 * i, s.v[i]);
}

#endif
