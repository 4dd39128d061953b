/* SPDX-License-Identifier: Apache-2.0
 *
 * Kernels on rows of floats: norms, activation, rotation, softmax sums. Written once in vector_body.h over sixteen
 * lanes; every tier gives the same bits (lanes_scalar.h).
 *
 * Logits: NaN counts as -infinity and +infinity as FLT_MAX. `scale` is the inverse temperature. The weight of a logit
 * x is exp((x - maximum) * scale), so the largest weight is 1.
 */
#ifndef ENGINE_CPU_VECTOR_H
#define ENGINE_CPU_VECTOR_H

#include "engine/cpu/cpu.h"

/* Weights of the logits within limits. */
struct vector_tail {
    double mass;
    uint32_t count;
};

struct vector_kernels {
    /* Sum of squares: sixteen partial sums, then a tree. */
    float (*sum_squares)(const float *x, uint32_t count);
    /* out = (x * factor) * weight; x == out allowed. */
    void (*scale)(const float *x, float factor, const float *weight, uint32_t count, float *out);
    /* out += (x * factor) * weight. */
    void (*scale_add)(const float *x, float factor, const float *weight, uint32_t count, float *out);
    /* out = x * factor; x == out allowed. */
    void (*multiply)(const float *x, float factor, uint32_t count, float *out);
    /* out += x. */
    void (*add)(const float *x, uint32_t count, float *out);
    /* out = cap - 2 cap / (1 + e^(2 x / cap)), that is cap tanh(x / cap); x == out allowed. */
    void (*soft_cap)(const float *x, float cap, uint32_t count, float *out);
    /* out = gate / (1 + e^-gate) * up. */
    void (*silu_mul)(const float *gate, const float *up, uint32_t count, float *out);
    /* out = gate / (1 + e^(-2 t)) * up, t = sqrt(2 / pi) (gate + 0.044715 gate^3). */
    void (*gelu_mul)(const float *gate, const float *up, uint32_t count, float *out);
    /* out [2 * pairs] = x with the pair (2i, 2i+1) rotated: turn [4 * pairs] holds cos, cos, ... and then
     * -sin, sin, ... of every pair, interleaved per value. x == out allowed. */
    void (*rotate)(const float *x, const float *turn, uint32_t pairs, float *out);
    /* out = e^x. */
    void (*exponential)(const float *x, uint32_t count, float *out);

    /* out [count] = x where bit i % 32 of word i / 32 is set, else -infinity; x == out allowed. */
    void (*allow)(const float *x, const uint32_t *words, uint32_t count, float *out);
    /* The largest logit; -infinity when there is none. */
    float (*maximum)(const float *x, uint32_t count);
    /* The first index in [from, count) whose logit is >= low and < high; count when there is none. */
    uint32_t (*find)(const float *x, uint32_t from, uint32_t count, float low, float high);
    /* Mass and number of the logits that are >= low and < high. */
    struct vector_tail (*tail)(const float *x, uint32_t count, float maximum, float scale, float low, float high);
    /* Weights by index; 0 where the logit is < lowest. */
    void (*weights)(const float *x, uint32_t count, float maximum, float scale, float lowest, float *out);
    /* Sum of Q - P - P log(Q / P), P = exp(p - p_log_sum), Q = exp(q - q_log_sum): their Kullback-Leibler divergence
     * once both sum to 1. Each term is >= 0 and none is a difference of large numbers. */
    double (*divergence)(const float *p, const float *q, uint32_t count, double p_log_sum, double q_log_sum);
};

extern const struct vector_kernels vector_kernels_scalar, vector_kernels_avx2, vector_kernels_avx512;

#endif
