/* SPDX-License-Identifier: Apache-2.0
 *
 * Sixteen float lanes in plain C. lanes_scalar.h, lanes_avx2.h and lanes_avx512.h define the same operations, and the
 * kernels (vector_body.h, attend_body.h) are written once over them. Every operation rounds each lane the same way in
 * every tier, so the tiers agree bit for bit.
 *
 *   lanes_max, lanes_min       the second operand where either is NaN
 *   lanes_at_least             mask of the lanes where a >= b; false for NaN
 *   lanes_keep                 value where the mask bit is set, else zero
 *   lanes_replace              value where the mask bit is set, else otherwise
 *   lanes_swap_pairs           lanes 2i and 2i + 1 exchanged
 *   lanes_shift_exponent       value * 2^n, n being the low bits of the pattern of `counter` (see lanes_math.h)
 *   lanes_sum, lanes_maximum   over lanes, in a fixed tree: halves, quarters, pairs, neighbours
 *   lanes_load_part            the first `count` lanes, `fill` in the others
 *   lanes_load_half, _bfloat   of 16 stored numbers, exact; lanes_store_half, _bfloat round to nearest even
 *   lanes_not_after            mask of the positions that are <= limit
 *   lanes_ascends_near         whether index [16] ascends by less than 32 in all, and this tier gains by knowing it:
 *   lanes_pick_near            then from[index[i] - index[0]], of 32-bit numbers; from [32] is read
 *   lanes_put_near             then to[index[i] - index[0]] = lane i
 *   lanes_difference           a - b - shift in double, rounded once
 *   sums                       sixteen double accumulators; sums_fma adds the product, which is exact in double
 *   counts                     sixteen 32-bit integers; counts_round takes numbers in [0, 2^31), half to even
 *   counts_any_high            whether bit 31 is set in some lane
 *   counts_add_carry           adds numbers below 2^31 to sixteen sums in two planes (backend.h, struct kv_statistics)
 *   lanes_of_counts            numbers below 2^31 as floats, half to even
 *   lanes_mantissa             x = mantissa * 2^exponent, mantissa in [sqrt(1/2), sqrt(2)), for normal x > 0
 *   lanes_uniform              u in (0, 1) and its complement 1 - u, of the 52 highest bits of mix(key ^ position)
 *   lanes_mix                  SplitMix64's finaliser (Steele et al. 2014)
 *   sums_add_scaled            a * b + sums, for a product that is exact
 */
#ifndef ENGINE_CPU_LANES_SCALAR_H
#define ENGINE_CPU_LANES_SCALAR_H

#include "engine/tensor.h"

#include <math.h>
#include <stdbool.h>
#include <string.h>

enum { LANES = 16 };

/* The largest block of rows and vectors that the tier's registers hold as accumulators (attend_body.h). Here none: a
 * larger one gains nothing beside calls of fmaf, and each size is compiled anew, which takes sanitizers long. Where
 * there are more rows than LANES_TALL_ROWS, if that is not 0, blocks of so many rows are preferred. */
enum { LANES_BLOCK_ROWS = 1, LANES_BLOCK_VECTORS = 1, LANES_TALL_ROWS = 0, LANES_TALL_VECTORS = 0 };

struct lanes {
    float v[LANES];
};

struct sums {
    double v[LANES];
};

struct counts {
    uint32_t v[LANES];
};

/* Values alone have no bounds to check, and checking them takes half the time of a run with sanitizers. */
#define LANES_VALUE static inline __attribute__((no_sanitize("address,bounds")))

#define LANES_EACH for (int i = 0; i < LANES; i++)

LANES_VALUE struct lanes lanes_set(float value) {
    struct lanes r;
    LANES_EACH r.v[i] = value;
    return r;
}

static inline struct lanes lanes_load(const float *from) {
    struct lanes r;
    memcpy(r.v, from, sizeof r.v);
    return r;
}

static inline struct lanes lanes_load_part(const float *from, uint32_t count, float fill) {
    struct lanes r = lanes_set(fill);
    memcpy(r.v, from, count * sizeof(float));
    return r;
}

static inline void lanes_store(float *to, struct lanes a) {
    memcpy(to, a.v, sizeof a.v);
}

static inline void lanes_store_part(float *to, uint32_t count, struct lanes a) {
    memcpy(to, a.v, count * sizeof(float));
}

LANES_VALUE struct lanes lanes_add(struct lanes a, struct lanes b) {
    LANES_EACH a.v[i] += b.v[i];
    return a;
}

LANES_VALUE struct lanes lanes_sub(struct lanes a, struct lanes b) {
    LANES_EACH a.v[i] -= b.v[i];
    return a;
}

LANES_VALUE struct lanes lanes_mul(struct lanes a, struct lanes b) {
    LANES_EACH a.v[i] *= b.v[i];
    return a;
}

LANES_VALUE struct lanes lanes_div(struct lanes a, struct lanes b) {
    LANES_EACH a.v[i] /= b.v[i];
    return a;
}

LANES_VALUE struct lanes lanes_sqrt(struct lanes a) {
    LANES_EACH a.v[i] = sqrtf(a.v[i]);
    return a;
}

LANES_VALUE struct lanes lanes_fma(struct lanes a, struct lanes b, struct lanes c) {
    LANES_EACH c.v[i] = fmaf(a.v[i], b.v[i], c.v[i]);
    return c;
}

LANES_VALUE struct lanes lanes_max(struct lanes a, struct lanes b) {
    LANES_EACH b.v[i] = a.v[i] > b.v[i] ? a.v[i] : b.v[i];
    return b;
}

LANES_VALUE struct lanes lanes_min(struct lanes a, struct lanes b) {
    LANES_EACH b.v[i] = a.v[i] < b.v[i] ? a.v[i] : b.v[i];
    return b;
}

LANES_VALUE uint32_t lanes_at_least(struct lanes a, struct lanes b) {
    uint32_t mask = 0;
    LANES_EACH mask |= (uint32_t)(a.v[i] >= b.v[i]) << i;
    return mask;
}

LANES_VALUE struct lanes lanes_replace(uint32_t mask, struct lanes value, struct lanes otherwise) {
    LANES_EACH value.v[i] = mask >> i & 1 ? value.v[i] : otherwise.v[i];
    return value;
}

LANES_VALUE struct lanes lanes_keep(uint32_t mask, struct lanes value) {
    return lanes_replace(mask, value, lanes_set(0));
}

/* As lanes_keep(not (a < b), value), for tiers where a comparison's own mask is cheaper than bits. */
LANES_VALUE struct lanes lanes_keep_unless_below(struct lanes a, struct lanes b, struct lanes value) {
    LANES_EACH value.v[i] = a.v[i] < b.v[i] ? 0 : value.v[i];
    return value;
}

LANES_VALUE struct lanes lanes_swap_pairs(struct lanes a) {
    struct lanes r;
    LANES_EACH r.v[i] = a.v[i ^ 1];
    return r;
}

LANES_VALUE struct lanes lanes_shift_exponent(struct lanes value, struct lanes counter) {
    LANES_EACH {
        uint32_t bits, shift;
        memcpy(&bits, &value.v[i], sizeof bits);
        memcpy(&shift, &counter.v[i], sizeof shift);
        bits += shift << 23;
        memcpy(&value.v[i], &bits, sizeof bits);
    }
    return value;
}

LANES_VALUE float lanes_sum(struct lanes a) {
    for (int half = LANES / 2; half > 0; half /= 2) {
        for (int i = 0; i < half; i++)
            a.v[i] += a.v[i + half];
    }
    return a.v[0];
}

LANES_VALUE float lanes_maximum(struct lanes a) {
    for (int half = LANES / 2; half > 0; half /= 2) {
        for (int i = 0; i < half; i++)
            a.v[i] = a.v[i] > a.v[i + half] ? a.v[i] : a.v[i + half];
    }
    return a.v[0];
}

static inline struct lanes lanes_load_half(const uint16_t *from) {
    struct lanes r;
    LANES_EACH r.v[i] = half_to_float(from[i]);
    return r;
}

static inline struct lanes lanes_load_bfloat(const uint16_t *from) {
    struct lanes r;
    LANES_EACH r.v[i] = bfloat_to_float(from[i]);
    return r;
}

static inline void lanes_store_half(uint16_t *to, struct lanes a) {
    LANES_EACH to[i] = float_to_half(a.v[i]);
}

static inline void lanes_store_bfloat(uint16_t *to, struct lanes a) {
    LANES_EACH to[i] = float_to_bfloat(a.v[i]);
}

static inline uint32_t lanes_not_after(const int32_t *positions, int32_t limit) {
    uint32_t mask = 0;
    LANES_EACH mask |= (uint32_t)(positions[i] <= limit) << i;
    return mask;
}

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

LANES_VALUE struct sums sums_zero(void) {
    return (struct sums){{0}};
}

LANES_VALUE struct sums sums_add(struct sums s, struct lanes a) {
    LANES_EACH s.v[i] += (double)a.v[i];
    return s;
}

LANES_VALUE struct sums sums_fma(struct sums s, struct lanes a, struct lanes b) {
    LANES_EACH s.v[i] += (double)a.v[i] * (double)b.v[i];
    return s;
}

LANES_VALUE struct lanes lanes_difference(struct lanes a, struct lanes b, double shift) {
    LANES_EACH a.v[i] = (float)((double)a.v[i] - (double)b.v[i] - shift);
    return a;
}

static inline struct lanes lanes_mantissa(struct lanes x, struct lanes *exponent) {
    const uint32_t root = 0x3f3504f3; /* bits of sqrt(1/2) */
    LANES_EACH {
        uint32_t bits;
        memcpy(&bits, &x.v[i], sizeof bits);
        bits += 0x3f800000 - root;
        exponent->v[i] = (float)((int32_t)(bits >> 23) - 127);
        bits = (bits & 0x7fffff) + root;
        memcpy(&x.v[i], &bits, sizeof bits);
    }
    return x;
}

LANES_VALUE uint64_t lanes_mix(uint64_t x) {
    x += 0x9e3779b97f4a7c15u;
    x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9u;
    x = (x ^ (x >> 27)) * 0x94d049bb133111ebu;
    return x ^ (x >> 31);
}

static inline struct lanes lanes_uniform(uint64_t key, const int32_t *positions, struct lanes *complement) {
    struct lanes r;
    LANES_EACH {
        uint64_t bits = lanes_mix(key ^ (uint32_t)positions[i]) >> 12 | 0x3ff0000000000000u;
        double uniform;
        memcpy(&uniform, &bits, sizeof uniform);
        uniform -= 1 - 0x1p-53;
        r.v[i] = (float)uniform;
        complement->v[i] = (float)(1 - uniform);
    }
    return r;
}

LANES_VALUE struct counts counts_zero(void) {
    return (struct counts){{0}};
}

LANES_VALUE struct counts counts_round(struct lanes a) {
    struct counts r;
    LANES_EACH r.v[i] = (uint32_t)lrintf(a.v[i]);
    return r;
}

static inline struct counts counts_load(const uint32_t *from) {
    struct counts r;
    memcpy(r.v, from, sizeof r.v);
    return r;
}

static inline void counts_store(uint32_t *to, struct counts a) {
    memcpy(to, a.v, sizeof a.v);
}

LANES_VALUE struct counts counts_add(struct counts a, struct counts b) {
    LANES_EACH a.v[i] += b.v[i];
    return a;
}

LANES_VALUE struct counts counts_sub(struct counts a, struct counts b) {
    LANES_EACH a.v[i] -= b.v[i];
    return a;
}

LANES_VALUE bool counts_any_high(struct counts a) {
    uint32_t any = 0;
    LANES_EACH any |= a.v[i];
    return any >> 31 != 0;
}

static inline void counts_add_carry(uint32_t *low, uint32_t *high, struct counts a) {
    struct counts old = counts_load(low), sum = a, next;
    LANES_EACH sum.v[i] += old.v[i] & 0x7fffffff;
    LANES_EACH next.v[i] = sum.v[i] | (old.v[i] & 0x80000000);
    counts_store(low, next);
    if (counts_any_high(sum))
        LANES_EACH high[i] += sum.v[i] >> 31;
}

LANES_VALUE struct lanes lanes_of_counts(struct counts a) {
    struct lanes r;
    LANES_EACH r.v[i] = (float)(int32_t)a.v[i];
    return r;
}

static inline struct sums sums_load(const double *from) {
    struct sums s;
    memcpy(s.v, from, sizeof s.v);
    return s;
}

LANES_VALUE struct sums sums_add_scaled(double a, struct sums b, struct sums s) {
    LANES_EACH s.v[i] += a * b.v[i];
    return s;
}

static inline void sums_store(double *to, struct sums s) {
    memcpy(to, s.v, sizeof s.v);
}

#endif
