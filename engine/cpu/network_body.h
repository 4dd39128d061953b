/* SPDX-License-Identifier: Apache-2.0
 *
 * The kernels of score_network.h. A tier's file includes its lanes_*.h, then score_body.h, which includes this.
 */
#include "engine/cpu/lanes_math.h"
#include "engine/cpu/score_network.h"

#include <math.h>
#include <string.h>

/* Hidden units whose sums are kept in registers at a time, a part of NETWORK_ROWS, and vectors of slots. */
enum {
    NETWORK_BLOCK_ROWS = LANES_BLOCK_VECTORS > 1 ? NETWORK_ROWS
                         : LANES_BLOCK_ROWS > 1  ? 4
                                                 : 1,
    NETWORK_BLOCK_VECTORS = LANES_BLOCK_VECTORS > 1 ? 2 : 1,
};

static uint32_t network_next_unknown(const uint16_t *norms, const int32_t *positions, uint32_t slots, uint32_t slot) {
    for (; slot + LANES <= slots; slot += LANES) {
        uint32_t unknown = 0;
        for (uint32_t i = 0; i < LANES; i++)
            unknown |= norms[slot + i] == 0;
        for (uint32_t i = 0; unknown != 0 && i < LANES; i++)
            if (norms[slot + i] == 0 && (positions == NULL || positions[slot + i] != KV_NO_POSITION))
                return slot;
    }
    for (uint32_t i = slot; i < slots; i++)
        if (norms[i] == 0 && (positions == NULL || positions[i] != KV_NO_POSITION))
            return slot;
    return slots;
}

/* ---- keys without rotation ---- */

/* Cosines and sines of a lane's whole turn: the sum of two angles. */
static inline void network_turn(const float *low, const float *high, uint32_t rounded, float *out) {
    for (uint32_t p = 0; p < rounded; p += LANES) {
        struct lanes c = lanes_load(low + p), s = lanes_load(low + rounded + p);
        struct lanes d = lanes_load(high + p), t = lanes_load(high + rounded + p);
        lanes_store(out + p, lanes_sub(lanes_mul(c, d), lanes_mul(s, t)));
        lanes_store(out + rounded + p, lanes_add(lanes_mul(s, d), lanes_mul(c, t)));
    }
}

static void network_unturn(
    float *keys, const float *const low[LANES], const float *const high[LANES], uint32_t pairs, float *space) {
    uint32_t rounded = lanes_round_up(pairs);
    float *turns = space, *cosines = turns + (size_t)LANES * 2 * rounded, *sines = cosines + (size_t)pairs * LANES;
    for (uint32_t lane = 0; lane < LANES; lane++) {
        float *turn = turns + (size_t)lane * 2 * rounded;
        network_turn(low[lane], high[lane], rounded, turn);
        for (uint32_t p = 0; p < pairs; p++) {
            cosines[p * LANES + lane] = turn[p];
            sines[p * LANES + lane] = turn[rounded + p];
        }
    }
    for (uint32_t p = 0; p < pairs; p++) {
        float *key = keys + (size_t)2 * p * LANES;
        struct lanes x = lanes_load(key), y = lanes_load(key + LANES);
        struct lanes c = lanes_load(cosines + p * LANES), s = lanes_load(sines + p * LANES);
        lanes_store(key, lanes_fma(x, c, lanes_mul(y, s)));
        lanes_store(key + LANES, lanes_sub(lanes_mul(y, c), lanes_mul(x, s)));
    }
}

static void network_narrow(const float *numbers, float offset, uint16_t out[LANES]) {
    struct lanes x = lanes_add(lanes_load(numbers), lanes_set(offset));
    lanes_store_half(out, lanes_max(lanes_set(-65504), lanes_min(lanes_set(65504), x)));
    for (uint32_t i = 0; i < LANES; i++)
        out[i] = out[i] == 0 ? 0x8000 : out[i];
}

/* ---- inputs ---- */

/* Attention of a chunk's slots: A, A / c, and the deviation. In double, as far as differences of near numbers go. */
struct network_attention {
    float sum[NETWORK_CHUNK], mean[NETWORK_CHUNK], deviation[NETWORK_CHUNK];
};

/* Sums in units of 2^-24, of which the planes lie `stride` apart. */
static void network_sums(const uint32_t *sums, size_t stride, uint32_t count, float *out) {
    for (uint32_t i = 0; i < count; i += LANES)
        lanes_store(out + i, lanes_mul(lanes_of_sums(sums + i, sums + stride + i), lanes_set(0x1p-24f)));
}

/* Divisions as the plain computation has them: where nothing but rounding is left of the variance, it is the same. */
static void network_attend(const struct network_chunk *chunk, uint32_t count, struct network_attention *out) {
    const int32_t *restrict positions = chunk->positions;
    double seen = (double)chunk->seen;
    if (chunk->sum == NULL)
        return;
    network_sums(chunk->sum, chunk->stride, count, out->sum);
    network_sums(chunk->squared != NULL ? chunk->squared : chunk->sum, chunk->stride, count, out->deviation);
    for (uint32_t i = 0; i < count; i++) {
        double queries = seen - (double)positions[i];
        double mean = (double)out->sum[i] / queries, variance = (double)out->deviation[i] / queries - mean * mean;
        out->mean[i] = (float)mean;
        out->deviation[i] = (float)variance;
    }
    for (uint32_t i = 0; i < count; i += LANES) {
        struct lanes variance = lanes_max(lanes_load(out->deviation + i), lanes_set(0));
        lanes_store(out->deviation + i, lanes_sqrt(variance));
    }
}

/* ln(1e-6 + x * factor) */
static void network_logs(const float *x, float factor, uint32_t count, float *out) {
    for (uint32_t i = 0; i < count; i += LANES)
        lanes_store(out + i, lanes_log(lanes_fma(lanes_load(x + i), lanes_set(factor), lanes_set(1e-6f))));
}

static void network_halves(const uint16_t *from, uint32_t count, float *out) {
    for (uint32_t i = 0; i < count; i += LANES)
        lanes_store(out + i, lanes_load_half(from + i));
}

static void network_entropy(const struct network_chunk *chunk, const float *places, uint32_t count, float *out) {
    bool paper = chunk->shape->features == FEATURES_PAPER;
    struct lanes whole = lanes_set(logf(chunk->seen > 2 ? (float)chunk->seen : 2));
    for (uint32_t i = 0; i < count; i += LANES) {
        struct lanes least = paper ? whole : lanes_log(lanes_add(lanes_load(places + i), lanes_set(2)));
        lanes_store(out + i, lanes_div(lanes_load_half(chunk->entropy + i), least));
    }
}

static void network_age(float seen, const float *places, uint32_t count, float *out) {
    for (uint32_t i = 0; i < count; i += LANES) { /* 1 + age, exact */
        struct lanes queries = lanes_sub(lanes_set(seen), lanes_load(places + i));
        lanes_store(out + i, lanes_mul(lanes_log(queries), lanes_set(1 / 6.0f)));
    }
}

/* 1 when age < limit. */
static void network_recent(float seen, const float *places, float limit, uint32_t count, float *out) {
    for (uint32_t i = 0; i < count; i += LANES) {
        struct lanes age = lanes_sub(lanes_set(seen - 1), lanes_load(places + i));
        lanes_store(out + i, lanes_keep(~lanes_at_least(age, lanes_set(limit)) & 0xffff, lanes_set(1)));
    }
}

static void network_fill(float value, uint32_t count, float *out) {
    for (uint32_t i = 0; i < count; i++)
        out[i] = value;
}

static void network_shares(float seen, const float *places, uint32_t count, float *out) {
    for (uint32_t i = 0; i < count; i += LANES)
        lanes_store(out + i, lanes_mul(lanes_load(places + i), lanes_set(1 / seen)));
}

/* One input of a chunk. places: positions as floats. */
static void network_input_row(const struct network_chunk *chunk, enum network_input input,
    const struct network_attention *attention, const float *places, uint32_t count, float *out) {
    float seen = (float)chunk->seen, budget = (float)chunk->budget;
    float factor = chunk->shape->features == FEATURES_PAPER ? 1 : seen;
    size_t content = chunk->shape->content;
    switch (input) {
    case INPUT_SUM:
        network_logs(attention->sum, 1, count, out);
        break;
    case INPUT_MEAN:
        network_logs(attention->mean, factor, count, out);
        break;
    case INPUT_DEVIATION:
        network_logs(attention->deviation, factor, count, out);
        break;
    case INPUT_ENTROPY:
        network_entropy(chunk, places, count, out);
        break;
    case INPUT_VALUE_NORM:
        network_halves(chunk->rows + content * chunk->stride, count, out);
        break;
    case INPUT_OUTPUT_NORM:
        network_halves(chunk->rows + (content + 1) * chunk->stride, count, out);
        break;
    case INPUT_POSITION:
        network_shares(seen, places, count, out);
        break;
    case INPUT_AGE:
        network_age(seen, places, count, out);
        break;
    case INPUT_BUDGET:
        network_fill(chunk->budget_input, count, out);
        break;
    case INPUT_RECENT_8:
        network_recent(seen, places, budget / 8, count, out);
        break;
    case INPUT_RECENT_4:
        network_recent(seen, places, budget / 4, count, out);
        break;
    default:
        network_recent(seen, places, budget / 2, count, out);
        break;
    }
}

static void network_inputs(const struct network_chunk *chunk, float *out) {
    uint32_t count = lanes_round_up(chunk->count);
    struct network_attention attention;
    float places[NETWORK_CHUNK];
    for (uint32_t i = 0; i < count; i++)
        places[i] = (float)chunk->positions[i];
    network_attend(chunk, count, &attention);
    for (uint32_t j = 0; j < chunk->shape->content; j++, out += NETWORK_CHUNK)
        network_halves(chunk->rows + j * chunk->stride, count, out);
    for (uint32_t j = 0; j < chunk->list_count; j++, out += NETWORK_CHUNK)
        network_input_row(chunk, chunk->list[j], &attention, places, count, out);
}

/* What is not a number stays that. */
static void network_normalise_row(float *x, uint32_t count, float offset, float factor, float limit) {
    for (uint32_t i = 0; i < count; i += LANES) {
        struct lanes normal = lanes_mul(lanes_sub(lanes_load(x + i), lanes_set(offset)), lanes_set(factor));
        lanes_store(x + i, lanes_max(lanes_set(-limit), lanes_min(lanes_set(limit), normal)));
    }
}

/* ---- scores ---- */

/* NETWORK_BLOCK_ROWS hidden units from `unit` on, for V vectors of slots: adds what they are worth to scores. */
static inline __attribute__((always_inline)) void network_units(const struct network_weights *weights, const float *x,
    uint32_t unit, uint32_t V, struct lanes scores[NETWORK_BLOCK_VECTORS]) {
    const float *w1 = weights->w1 + (size_t)unit / NETWORK_ROWS * NETWORK_ROWS * weights->inputs + unit % NETWORK_ROWS;
    struct lanes sums[NETWORK_BLOCK_ROWS][NETWORK_BLOCK_VECTORS];
    for (uint32_t r = 0; r < NETWORK_BLOCK_ROWS; r++)
        for (uint32_t v = 0; v < V; v++)
            sums[r][v] = lanes_set(weights->b1[unit + r]);
    for (uint32_t f = 0; f < weights->inputs; f++, w1 += NETWORK_ROWS, x += NETWORK_CHUNK) {
        struct lanes values[NETWORK_BLOCK_VECTORS];
        for (uint32_t v = 0; v < V; v++)
            values[v] = lanes_load(x + v * LANES);
        for (uint32_t r = 0; r < NETWORK_BLOCK_ROWS; r++) {
            struct lanes weight = lanes_set(w1[r]);
            for (uint32_t v = 0; v < V; v++)
                sums[r][v] = lanes_fma(weight, values[v], sums[r][v]);
        }
    }
    for (uint32_t r = 0; r < NETWORK_BLOCK_ROWS; r++) {
        struct lanes weight = lanes_set(weights->w2[unit + r]);
        for (uint32_t v = 0; v < V; v++)
            scores[v] = lanes_fma(weight, lanes_max(lanes_set(0), sums[r][v]), scores[v]);
    }
}

static inline __attribute__((always_inline)) void network_content_block(
    const struct network_weights *weights, const float *x, uint32_t V, float *out) {
    struct lanes scores[NETWORK_BLOCK_VECTORS];
    for (uint32_t v = 0; v < V; v++)
        scores[v] = lanes_set(0);
    for (uint32_t f = 0; f < weights->inputs; f++)
        for (uint32_t v = 0; v < V; v++)
            scores[v] =
                lanes_fma(lanes_set(weights->skip[f]), lanes_load(x + f * NETWORK_CHUNK + v * LANES), scores[v]);
    for (uint32_t unit = 0; unit < weights->hidden; unit += NETWORK_BLOCK_ROWS)
        network_units(weights, x, unit, V, scores);
    for (uint32_t v = 0; v < V; v++)
        lanes_store(out + v * LANES, scores[v]);
}

static void network_content(const struct network_weights *weights, const float *x, uint32_t count, float *out) {
    uint32_t i = 0;
    for (; NETWORK_BLOCK_VECTORS > 1 && i + NETWORK_BLOCK_VECTORS * LANES <= count; i += NETWORK_BLOCK_VECTORS * LANES)
        network_content_block(weights, x + i, NETWORK_BLOCK_VECTORS, out + i);
    for (; i < count; i += LANES)
        network_content_block(weights, x + i, 1, out + i);
}

static struct lanes network_mean(struct sums sums, uint32_t count) {
    double total[LANES];
    float mean[LANES];
    sums_store(total, sums);
    for (uint32_t lane = 0; lane < LANES; lane++)
        mean[lane] = (float)(total[lane] / (double)count);
    return lanes_load(mean);
}

static void network_layer_norm(float *h, uint32_t hidden, const float *bias, const float *gain, const float *offset) {
    struct sums total = sums_zero(), squares = sums_zero();
    for (uint32_t j = 0; j < hidden; j++) {
        struct lanes value = lanes_add(lanes_load(h + (size_t)j * LANES), lanes_set(bias[j]));
        lanes_store(h + (size_t)j * LANES, value);
        total = sums_add(total, value);
    }
    struct lanes mean = network_mean(total, hidden);
    for (uint32_t j = 0; j < hidden; j++) {
        struct lanes centred = lanes_sub(lanes_load(h + (size_t)j * LANES), mean);
        lanes_store(h + (size_t)j * LANES, centred);
        squares = sums_fma(squares, centred, centred);
    }
    struct lanes variance = lanes_add(network_mean(squares, hidden), lanes_set(1e-5f));
    struct lanes inverse = lanes_div(lanes_set(1), lanes_sqrt(variance));
    for (uint32_t j = 0; j < hidden; j++) {
        struct lanes unit = lanes_mul(lanes_load(h + (size_t)j * LANES), inverse);
        struct lanes value = lanes_fma(unit, lanes_set(gain[j]), lanes_set(offset[j]));
        lanes_store(h + (size_t)j * LANES, lanes_max(lanes_set(0), value));
    }
}

/* The lanes of x that are numbers below +infinity. */
static inline uint32_t network_counted(struct lanes x) {
    return lanes_at_least(x, lanes_set(-INFINITY)) & ~lanes_at_least(x, lanes_set(INFINITY)) & 0xffff;
}

static inline struct lanes network_some(const float *scores, uint32_t i, uint32_t count) {
    return count - i >= LANES ? lanes_load(scores + i) : lanes_load_part(scores + i, count - i, INFINITY);
}

static void network_log_softmax(float *scores, uint32_t count) {
    const struct lanes none = lanes_set(-INFINITY);
    struct lanes most = none;
    for (uint32_t i = 0; i < count; i += LANES) {
        struct lanes x = network_some(scores, i, count);
        most = lanes_max(lanes_replace(network_counted(x), x, none), most);
    }
    float highest = lanes_maximum(most);
    if (highest == -INFINITY)
        return;
    struct sums sums = sums_zero();
    for (uint32_t i = 0; i < count; i += LANES) {
        struct lanes x = network_some(scores, i, count);
        struct lanes below = lanes_sub(lanes_replace(network_counted(x), x, none), lanes_set(highest));
        sums = sums_add(sums, lanes_exp(below));
    }
    double shift = log(sums_total(sums));
    for (uint32_t i = 0; i < count; i += LANES) {
        struct lanes x = network_some(scores, i, count);
        struct lanes less = lanes_replace(network_counted(x), lanes_difference(x, lanes_set(highest), shift), x);
        if (count - i >= LANES)
            lanes_store(scores + i, less);
        else
            lanes_store_part(scores + i, count - i, less);
    }
}

#define NETWORK_KERNELS                                                                                                \
    {                                                                                                                  \
        .next_unknown = network_next_unknown, .unturn = network_unturn, .narrow = network_narrow,                      \
        .inputs = network_inputs, .normalise = network_normalise_row, .content = network_content,                      \
        .layer_norm = network_layer_norm, .log_softmax = network_log_softmax,                                          \
    }
