/* SPDX-License-Identifier: Apache-2.0
 *
 * The kernels of vector.h over sixteen lanes. A tier's file includes its lanes_*.h, then this.
 */
#include "engine/cpu/lanes_math.h"
#include "engine/cpu/vector.h"

#include <float.h>
#include <math.h>

static float vector_sum_squares(const float *x, uint32_t count) {
    struct lanes sum = lanes_set(0);
    uint32_t i = 0;
    for (; i + LANES <= count; i += LANES) {
        struct lanes value = lanes_load(x + i);
        sum = lanes_fma(value, value, sum);
    }
    if (i < count) {
        struct lanes value = lanes_load_part(x + i, count - i, 0);
        sum = lanes_fma(value, value, sum);
    }
    return lanes_sum(sum);
}

static void vector_scale(const float *x, float factor, const float *weight, uint32_t count, float *out) {
    struct lanes scale = lanes_set(factor);
    uint32_t i = 0;
    for (; i + LANES <= count; i += LANES)
        lanes_store(out + i, lanes_mul(lanes_mul(lanes_load(x + i), scale), lanes_load(weight + i)));
    for (; i < count; i++)
        out[i] = x[i] * factor * weight[i];
}

static void vector_scale_add(const float *x, float factor, const float *weight, uint32_t count, float *out) {
    struct lanes scale = lanes_set(factor);
    uint32_t i = 0;
    for (; i + LANES <= count; i += LANES)
        lanes_store(out + i,
            lanes_add(lanes_load(out + i), lanes_mul(lanes_mul(lanes_load(x + i), scale), lanes_load(weight + i))));
    if (i < count) {
        uint32_t rest = count - i;
        struct lanes more =
            lanes_mul(lanes_mul(lanes_load_part(x + i, rest, 0), scale), lanes_load_part(weight + i, rest, 0));
        lanes_store_part(out + i, rest, lanes_add(lanes_load_part(out + i, rest, 0), more));
    }
}

static void vector_multiply(const float *x, float factor, uint32_t count, float *out) {
    struct lanes scale = lanes_set(factor);
    uint32_t i = 0;
    for (; i + LANES <= count; i += LANES)
        lanes_store(out + i, lanes_mul(lanes_load(x + i), scale));
    for (; i < count; i++)
        out[i] = x[i] * factor;
}

static void vector_add(const float *x, uint32_t count, float *out) {
    uint32_t i = 0;
    for (; i + LANES <= count; i += LANES)
        lanes_store(out + i, lanes_add(lanes_load(out + i), lanes_load(x + i)));
    for (; i < count; i++)
        out[i] = out[i] + x[i];
}

static void vector_soft_cap(const float *x, float cap, uint32_t count, float *out) {
    uint32_t i = 0;
    for (; i + LANES <= count; i += LANES)
        lanes_store(out + i, lanes_soft_cap(lanes_load(x + i), cap));
    if (i < count)
        lanes_store_part(out + i, count - i, lanes_soft_cap(lanes_load_part(x + i, count - i, 0), cap));
}

/* sqrt(2 / pi) is 0.79788456. */
static inline struct lanes vector_gelu(struct lanes gate, struct lanes up) {
    struct lanes cube = lanes_mul(lanes_mul(gate, gate), gate);
    struct lanes t = lanes_fma(cube, lanes_set(0.044715f), gate);
    struct lanes below = lanes_add(lanes_set(1), lanes_exp(lanes_mul(t, lanes_set(-2 * 0.79788456f))));
    return lanes_mul(lanes_div(gate, below), up);
}

static void vector_gelu_mul(const float *gate, const float *up, uint32_t count, float *out) {
    uint32_t i = 0;
    for (; i + LANES <= count; i += LANES)
        lanes_store(out + i, vector_gelu(lanes_load(gate + i), lanes_load(up + i)));
    if (i < count) {
        struct lanes gates = lanes_load_part(gate + i, count - i, 0);
        lanes_store_part(out + i, count - i, vector_gelu(gates, lanes_load_part(up + i, count - i, 0)));
    }
}

static inline struct lanes vector_silu(struct lanes gate, struct lanes up) {
    struct lanes one = lanes_set(1);
    struct lanes below = lanes_add(one, lanes_exp(lanes_sub(lanes_set(0), gate)));
    return lanes_mul(lanes_div(gate, below), up);
}

static void vector_silu_mul(const float *gate, const float *up, uint32_t count, float *out) {
    uint32_t i = 0;
    for (; i + LANES <= count; i += LANES)
        lanes_store(out + i, vector_silu(lanes_load(gate + i), lanes_load(up + i)));
    if (i < count) {
        struct lanes gates = lanes_load_part(gate + i, count - i, 0);
        lanes_store_part(out + i, count - i, vector_silu(gates, lanes_load_part(up + i, count - i, 0)));
    }
}

static void vector_rotate(const float *x, const float *turn, uint32_t pairs, float *out) {
    const float *sine = turn + 2 * (size_t)pairs;
    uint32_t count = 2 * pairs, i = 0;
    for (; i + LANES <= count; i += LANES) {
        struct lanes value = lanes_load(x + i);
        struct lanes straight = lanes_mul(value, lanes_load(turn + i));
        lanes_store(out + i, lanes_fma(lanes_swap_pairs(value), lanes_load(sine + i), straight));
    }
    if (i < count) {
        struct lanes value = lanes_load_part(x + i, count - i, 0);
        struct lanes straight = lanes_mul(value, lanes_load_part(turn + i, count - i, 0));
        struct lanes crossed = lanes_load_part(sine + i, count - i, 0);
        lanes_store_part(out + i, count - i, lanes_fma(lanes_swap_pairs(value), crossed, straight));
    }
}

static void vector_exponential(const float *x, uint32_t count, float *out) {
    uint32_t i = 0;
    for (; i + LANES <= count; i += LANES)
        lanes_store(out + i, lanes_exp(lanes_load(x + i)));
    if (i < count)
        lanes_store_part(out + i, count - i, lanes_exp(lanes_load_part(x + i, count - i, 0)));
}

/* Up to sixteen logits; -infinity fills the lanes beyond the end. */
static inline struct lanes vector_logits(const float *x, uint32_t count) {
    return count >= LANES ? lanes_load(x) : lanes_load_part(x, count, -INFINITY);
}

static void vector_allow(const float *x, const uint32_t *words, uint32_t count, float *out) {
    const struct lanes nothing = lanes_set(-INFINITY);
    uint32_t i = 0;
    for (; i + LANES <= count; i += LANES)
        lanes_store(out + i, lanes_replace(words[i / 32] >> i % 32, lanes_load(x + i), nothing));
    if (i < count) {
        struct lanes value = lanes_load_part(x + i, count - i, 0);
        lanes_store_part(out + i, count - i, lanes_replace(words[i / 32] >> i % 32, value, nothing));
    }
}

static float vector_maximum(const float *x, uint32_t count) {
    struct lanes most[4];
    for (int j = 0; j < 4; j++)
        most[j] = lanes_set(-INFINITY);
    uint32_t i = 0;
    for (; i + 4 * LANES <= count; i += 4 * LANES) {
        for (uint32_t j = 0; j < 4; j++) /* four chains hide the latency; NaN as first operand is ignored */
            most[j] = lanes_max(lanes_load(x + i + j * LANES), most[j]);
    }
    for (; i < count; i += LANES)
        most[0] = lanes_max(vector_logits(x + i, count - i), most[0]);
    float largest = lanes_maximum(lanes_max(lanes_max(most[0], most[1]), lanes_max(most[2], most[3])));
    return largest > FLT_MAX ? FLT_MAX : largest;
}

static inline struct lanes vector_weight(struct lanes x, struct lanes maximum, struct lanes scale) {
    return lanes_exp(lanes_mul(lanes_sub(lanes_min(lanes_set(FLT_MAX), x), maximum), scale));
}

/* Lanes with low <= logit < high, of the first `count`: the fill is -infinity, which a low of -infinity finds. */
static inline uint32_t vector_within(struct lanes value, struct lanes low, struct lanes high, uint32_t count) {
    uint32_t found = lanes_at_least(value, low);
    if (found != 0)
        found &= ~lanes_at_least(lanes_min(lanes_set(FLT_MAX), value), high);
    return count < LANES ? found & ((1u << count) - 1) : found;
}

static uint32_t vector_find(const float *x, uint32_t from, uint32_t count, float low, float high) {
    struct lanes lows = lanes_set(low), highs = lanes_set(high);
    for (uint32_t i = from; i < count; i += LANES) {
        uint32_t found = vector_within(vector_logits(x + i, count - i), lows, highs, count - i);
        if (found != 0)
            return i + (uint32_t)__builtin_ctz(found);
    }
    return count;
}

static struct vector_tail vector_tail(
    const float *x, uint32_t count, float maximum, float scale, float low, float high) {
    struct lanes most = lanes_set(maximum), scales = lanes_set(scale), lows = lanes_set(low), highs = lanes_set(high);
    struct vector_tail tail = {0, 0};
    struct sums mass = sums_zero();
    for (uint32_t i = 0; i < count; i += LANES) {
        struct lanes value = vector_logits(x + i, count - i);
        uint32_t chosen = vector_within(value, lows, highs, count - i);
        if (chosen == 0)
            continue;
        tail.count += (uint32_t)__builtin_popcount(chosen);
        mass = sums_add(mass, lanes_keep(chosen, vector_weight(value, most, scales)));
    }
    if (tail.count != 0)
        tail.mass = sums_total(mass);
    return tail;
}

static void vector_weights(const float *x, uint32_t count, float maximum, float scale, float lowest, float *out) {
    struct lanes most = lanes_set(maximum), scales = lanes_set(scale), least = lanes_set(lowest);
    for (uint32_t i = 0; i < count; i += LANES) {
        struct lanes value = vector_logits(x + i, count - i);
        struct lanes weight = lanes_keep(lanes_at_least(value, least), vector_weight(value, most, scales));
        if (count - i >= LANES)
            lanes_store(out + i, weight);
        else
            lanes_store_part(out + i, count - i, weight);
    }
}

/* NaN becomes -infinity, +infinity becomes FLT_MAX. */
static inline struct lanes vector_clean(struct lanes x) {
    struct lanes bottom = lanes_set(-INFINITY);
    return lanes_replace(lanes_at_least(x, bottom), lanes_min(lanes_set(FLT_MAX), x), bottom);
}

/* e^d - 1 - d for |d| <= 1/2, by its series. */
static inline struct lanes vector_exp_excess(struct lanes d) {
    static const float terms[] = {1.0f / 5040, 1.0f / 720, 1.0f / 120, 1.0f / 24, 1.0f / 6, 0.5f};
    struct lanes sum = lanes_set(1.0f / 40320);
    for (int i = 0; i < 6; i++)
        sum = lanes_fma(sum, d, lanes_set(terms[i]));
    return lanes_mul(lanes_mul(sum, d), d);
}

static double vector_divergence(const float *p, const float *q, uint32_t count, double p_log_sum, double q_log_sum) {
    struct lanes p_log = lanes_set((float)p_log_sum), q_log = lanes_set((float)q_log_sum);
    struct lanes half = lanes_set(0.5f);
    double shift = q_log_sum - p_log_sum;
    struct sums total = sums_zero();
    for (uint32_t i = 0; i < count; i += LANES) {
        struct lanes p_logit = vector_clean(vector_logits(p + i, count - i));
        struct lanes q_logit = vector_clean(vector_logits(q + i, count - i));
        struct lanes p_part = lanes_exp(lanes_sub(p_logit, p_log)), q_part = lanes_exp(lanes_sub(q_logit, q_log));
        struct lanes d = lanes_difference(q_logit, p_logit, shift);
        uint32_t near = lanes_at_least(half, d) & lanes_at_least(d, lanes_set(-0.5f));
        struct lanes close = lanes_mul(p_part, vector_exp_excess(d));
        /* P log(Q / P) is 0 where P is, even if d is infinite there. */
        struct lanes crossed = lanes_keep(lanes_at_least(p_part, lanes_set(FLT_MIN)), lanes_mul(p_part, d));
        struct lanes far = lanes_sub(lanes_sub(q_part, p_part), crossed);
        total = sums_add(total, lanes_replace(near, close, far));
    }
    return sums_total(total);
}

#define VECTOR_KERNELS                                                                                                 \
    {                                                                                                                  \
        .sum_squares = vector_sum_squares, .scale = vector_scale, .scale_add = vector_scale_add,                       \
        .multiply = vector_multiply, .add = vector_add, .soft_cap = vector_soft_cap, .gelu_mul = vector_gelu_mul,      \
        .silu_mul = vector_silu_mul, .rotate = vector_rotate, .exponential = vector_exponential,                       \
        .allow = vector_allow, .maximum = vector_maximum, .find = vector_find, .tail = vector_tail,                    \
        .weights = vector_weights, .divergence = vector_divergence                                                     \
    }
