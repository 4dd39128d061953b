/* SPDX-License-Identifier: Apache-2.0
 *
 * Functions of sixteen lanes, common to all tiers: include after one lanes_*.h.
 */
#ifndef ENGINE_CPU_LANES_MATH_H
#define ENGINE_CPU_LANES_MATH_H

/* e^x with a relative error of about 1e-7: exactly 0 below -87.33 (so for -infinity), exactly 1 at 0, the value at
 * 88.72 above it. x = n ln 2 + r, and e^r is 1 + r + r^2 c(r), c of degree 4 fitted by minimax on |r| <= ln 2 / 2
 * (relative error 4e-9). Adding 1.5 * 2^23 rounds x / ln 2 to the integer n and leaves it in the low bits. */
static inline struct lanes lanes_exp(struct lanes x) {
    const struct lanes rounder = lanes_set(0x1.8p23f);
    x = lanes_min(lanes_set(88.72f), x);
    struct lanes counter = lanes_fma(x, lanes_set(0x1.715476p0f), rounder);
    struct lanes n = lanes_sub(counter, rounder);
    struct lanes r = lanes_fma(n, lanes_set(-0x1.62e43p-1f), x);
    r = lanes_fma(n, lanes_set(0x1.05c610p-29f), r);
    struct lanes p = lanes_set(0x1.6a2254p-10f);
    p = lanes_fma(p, r, lanes_set(0x1.123b02p-7f));
    p = lanes_fma(p, r, lanes_set(0x1.5558f8p-5f));
    p = lanes_fma(p, r, lanes_set(0x1.55549p-3f));
    p = lanes_fma(p, r, lanes_set(0x1.fffffcp-2f));
    p = lanes_fma(p, r, lanes_set(1));
    p = lanes_fma(p, r, lanes_set(1));
    return lanes_keep_unless_below(x, lanes_set(-87.33f), lanes_shift_exponent(p, counter));
}

/* cap tanh(x / cap) with an error of about 1e-7 cap. */
static inline struct lanes lanes_soft_cap(struct lanes x, float cap) {
    struct lanes above = lanes_add(lanes_set(1), lanes_exp(lanes_mul(x, lanes_set(2 / cap))));
    return lanes_sub(lanes_set(cap), lanes_div(lanes_set(2 * cap), above));
}

/* ln(1 + f) + exponent ln 2 with an error of about 1e-7 of either part, for 1 + f in [sqrt(1/2), sqrt(2)): f - f^2 / 2
 * + f^3 c(f), c of degree 7 fitted by minimax (relative error 6e-9). */
static inline struct lanes lanes_log_near_one(struct lanes f, struct lanes exponent) {
    struct lanes c = lanes_set(-0x1.38b576p-4f), square = lanes_mul(f, f);
    c = lanes_fma(c, f, lanes_set(0x1.055b68p-3f));
    c = lanes_fma(c, f, lanes_set(-0x1.0d8542p-3f));
    c = lanes_fma(c, f, lanes_set(0x1.22da1ep-3f));
    c = lanes_fma(c, f, lanes_set(-0x1.547244p-3f));
    c = lanes_fma(c, f, lanes_set(0x1.99a008p-3f));
    c = lanes_fma(c, f, lanes_set(-0x1.000226p-2f));
    c = lanes_fma(c, f, lanes_set(0x1.555554p-2f));
    struct lanes rest = lanes_fma(square, lanes_set(-0.5f), lanes_mul(c, lanes_mul(square, f)));
    rest = lanes_fma(exponent, lanes_set(-0x1.05c610p-29f), rest);
    return lanes_fma(exponent, lanes_set(0x1.62e43p-1f), lanes_add(f, rest));
}

/* ln x for normal x > 0. */
static inline struct lanes lanes_log(struct lanes x) {
    struct lanes exponent, mantissa = lanes_mantissa(x, &exponent);
    return lanes_log_near_one(lanes_sub(mantissa, lanes_set(1)), exponent);
}

/* -ln(-ln u), u = 1 - complement: near 1 the logarithm is that of the complement, which has all its digits. */
static inline struct lanes lanes_gumbel(struct lanes u, struct lanes complement) {
    const struct lanes zero = lanes_set(0);
    struct lanes exponent, f = lanes_sub(lanes_mantissa(u, &exponent), lanes_set(1));
    uint32_t near_one = lanes_at_least(u, lanes_set(0.75f));
    f = lanes_replace(near_one, lanes_sub(zero, complement), f);
    exponent = lanes_replace(near_one, zero, exponent);
    return lanes_sub(zero, lanes_log(lanes_sub(zero, lanes_log_near_one(f, exponent))));
}

/* Sixteen sums below 2^63 in two planes (backend.h, struct kv_statistics), rounded once. */
static inline struct lanes lanes_of_sums(const uint32_t *low, const uint32_t *high) {
    struct counts counts = counts_load(low);
    if (!counts_any_high(counts))
        return lanes_of_counts(counts);
    float sums[LANES];
    for (uint32_t i = 0; i < LANES; i++)
        sums[i] = (float)(int64_t)((uint64_t)high[i] << 31 | (low[i] & 0x7fffffff));
    return lanes_load(sums);
}

/* Rounding up to whole vectors. */
static inline uint32_t lanes_round_up(uint32_t count) {
    return (count + LANES - 1) / LANES * LANES;
}

/* Sums are added in ascending order of lanes. */
static inline double sums_total(struct sums s) {
    double lanes[LANES], total = 0;
    sums_store(lanes, s);
    for (int i = 0; i < LANES; i++)
        total += lanes[i];
    return total;
}

#endif
