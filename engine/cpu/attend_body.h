/* SPDX-License-Identifier: Apache-2.0
 *
 * The kernels of attend.h over sixteen lanes. A tier's file includes its lanes_*.h, then this.
 *
 * Scores and weighted sums are small matrix products: blocks of R rows times V vectors stay in registers. The block
 * functions are inlined with constant R and V, so that the compiler unrolls them; their order of operations for one
 * lane does not depend on R or V.
 */
#include "engine/cpu/attend.h"
#include "engine/cpu/lanes_math.h"

#include <string.h>

#define ATTEND_INLINE static inline __attribute__((always_inline))

/* Many rows are taken in taller and narrower blocks: then a page's numbers are widened less often. */
enum { LANES_MOST_ROWS = LANES_TALL_ROWS > LANES_BLOCK_ROWS ? LANES_TALL_ROWS : LANES_BLOCK_ROWS };

_Static_assert((int)KV_PAGE_SLOTS == (int)LANES, "one vector holds one channel of a page");

/* 16 numbers of a page, `offset` numbers from `from`. */
ATTEND_INLINE struct lanes attend_load(enum kv_format format, const char *from, size_t offset) {
    if (format == KV_F32)
        return lanes_load((const float *)from + offset);
    if (format == KV_F16)
        return lanes_load_half((const uint16_t *)from + offset);
    return lanes_load_bfloat((const uint16_t *)from + offset);
}

/* Scores of R rows against V pages; what lies ahead is fetched if `fetch`. */
ATTEND_INLINE void attend_scores_block(enum kv_format format, uint32_t R, uint32_t V, bool fetch, const float *q,
    uint32_t dim, const char *const *pages, const char *const *ahead, float *scores) {
    struct lanes sums[LANES_MOST_ROWS][LANES_BLOCK_VECTORS];
    for (uint32_t r = 0; r < R; r++) {
        for (uint32_t v = 0; v < V; v++)
            sums[r][v] = lanes_set(0);
    }
    for (uint32_t c = 0; c < dim; c++) {
        struct lanes keys[LANES_BLOCK_VECTORS];
        for (uint32_t v = 0; v < V; v++) {
            keys[v] = attend_load(format, pages[v], (size_t)c * LANES);
            if (fetch)
                __builtin_prefetch(ahead[v] + (size_t)c * LANES * kv_number_bytes(format), 0, 2);
        }
        for (uint32_t r = 0; r < R; r++) {
            struct lanes query = lanes_set(q[c * ATTEND_ROWS + r]);
            for (uint32_t v = 0; v < V; v++)
                sums[r][v] = lanes_fma(query, keys[v], sums[r][v]);
        }
    }
    for (uint32_t r = 0; r < R; r++) {
        for (uint32_t v = 0; v < V; v++)
            lanes_store(scores + r * ATTEND_SPLIT + v * LANES, sums[r][v]);
    }
}

/* R rows against all pages, V at a time. */
ATTEND_INLINE void attend_scores_rows(enum kv_format format, uint32_t R, uint32_t V, bool fetch, const float *q,
    uint32_t dim, const char *const *pages, const char *const *ahead, uint32_t count, float *scores) {
    uint32_t page = 0;
    for (; page + V <= count; page += V)
        attend_scores_block(format, R, V, fetch, q, dim, pages + page, ahead + page, scores + page * LANES);
    for (; V > 1 && page < count; page++)
        attend_scores_block(format, R, 1, fetch, q, dim, pages + page, ahead + page, scores + page * LANES);
}

ATTEND_INLINE void attend_scores(enum kv_format format, const float *q, uint32_t rows, uint32_t dim,
    const char *const *pages, const char *const *ahead, uint32_t count, float *scores) {
    enum { V = LANES_BLOCK_VECTORS };
    uint32_t row = 0;
    if (LANES_TALL_ROWS > 0 && row + LANES_TALL_ROWS <= rows) {
        attend_scores_rows(format, LANES_TALL_ROWS, LANES_TALL_VECTORS, true, q, dim, pages, ahead, count, scores);
        row = LANES_TALL_ROWS;
    }
    for (; LANES_TALL_ROWS > 0 && row + LANES_TALL_ROWS <= rows; row += LANES_TALL_ROWS)
        attend_scores_rows(format, LANES_TALL_ROWS, LANES_TALL_VECTORS, false, q + row, dim, pages, ahead, count,
            scores + row * ATTEND_SPLIT);
    for (; row + LANES_BLOCK_ROWS <= rows; row += LANES_BLOCK_ROWS)
        attend_scores_rows(
            format, LANES_BLOCK_ROWS, V, true, q + row, dim, pages, ahead, count, scores + row * ATTEND_SPLIT);
    q += row;
    scores += row * ATTEND_SPLIT;
    switch (rows - row) { /* a block of as many rows as the tier's or more would be compiled for nothing */
    case 5:
        if (LANES_BLOCK_ROWS > 5)
            attend_scores_rows(format, 5, V, true, q, dim, pages, ahead, count, scores);
        break;
    case 4:
        if (LANES_BLOCK_ROWS > 4)
            attend_scores_rows(format, 4, V, true, q, dim, pages, ahead, count, scores);
        break;
    case 3:
        if (LANES_BLOCK_ROWS > 3)
            attend_scores_rows(format, 3, V, true, q, dim, pages, ahead, count, scores);
        break;
    case 2:
        if (LANES_BLOCK_ROWS > 2)
            attend_scores_rows(format, 2, V, true, q, dim, pages, ahead, count, scores);
        break;
    case 1:
        if (LANES_BLOCK_ROWS > 1)
            attend_scores_rows(format, 1, V, true, q, dim, pages, ahead, count, scores);
        break;
    }
}

/* What one slot adds to V vectors of o for R rows. */
ATTEND_INLINE void attend_weigh_slot(enum kv_format format, uint32_t R, uint32_t V, const float *p, const char *values,
    struct lanes sums[LANES_MOST_ROWS][LANES_BLOCK_VECTORS]) {
    struct lanes value[LANES_BLOCK_VECTORS];
    for (uint32_t v = 0; v < V; v++)
        value[v] = attend_load(format, values, v * LANES);
    for (uint32_t r = 0; r < R; r++) {
        struct lanes weight = lanes_set(p[r * ATTEND_SPLIT]);
        for (uint32_t v = 0; v < V; v++)
            sums[r][v] = lanes_fma(weight, value[v], sums[r][v]);
    }
}

/* V vectors of o for R rows, starting at channel `from` of the values; what lies ahead is fetched if `fetch`. */
ATTEND_INLINE void attend_weigh_block(enum kv_format format, uint32_t R, uint32_t V, bool fetch, const float *p,
    uint32_t stride, uint32_t dim, uint32_t from, const char *const *pages, const char *const *ahead,
    const uint16_t *masks, uint32_t count, float *o) {
    const size_t bytes = kv_number_bytes(format);
    size_t values_at = ((size_t)dim * LANES + from) * bytes;
    struct lanes sums[LANES_MOST_ROWS][LANES_BLOCK_VECTORS];
    for (uint32_t r = 0; r < R; r++) {
        for (uint32_t v = 0; v < V; v++)
            sums[r][v] = lanes_load(o + r * stride + from + v * LANES);
    }
    for (uint32_t page = 0; page < count; page++) {
        for (uint32_t mask = masks[page]; mask != 0; mask &= mask - 1) {
            uint32_t slot = (uint32_t)__builtin_ctz(mask);
            size_t at = values_at + (size_t)slot * dim * bytes;
            for (uint32_t line = 0; fetch && line < V * LANES * bytes; line += 64)
                __builtin_prefetch(ahead[page] + at + line, 0, 2);
            attend_weigh_slot(format, R, V, p + page * LANES + slot, pages[page] + at, sums);
        }
    }
    for (uint32_t r = 0; r < R; r++) {
        for (uint32_t v = 0; v < V; v++)
            lanes_store(o + r * stride + from + v * LANES, sums[r][v]);
    }
}

/* R rows, all channels. The last vector of a slot may reach past its channels: into the next slot's, or, in the last
 * slot, into the positions, which take 64 bytes as one vector of floats does. Those lanes of o are never used. */
ATTEND_INLINE void attend_weigh_rows(enum kv_format format, uint32_t R, uint32_t V, bool fetch, const float *p,
    uint32_t stride, uint32_t dim, const char *const *pages, const char *const *ahead, const uint16_t *masks,
    uint32_t count, float *o) {
    uint32_t from = 0;
    for (; from + V * LANES <= stride; from += V * LANES)
        attend_weigh_block(format, R, V, fetch, p, stride, dim, from, pages, ahead, masks, count, o);
    for (; V > 1 && from < dim; from += LANES)
        attend_weigh_block(format, R, 1, fetch, p, stride, dim, from, pages, ahead, masks, count, o);
}

ATTEND_INLINE void attend_weigh(enum kv_format format, const float *p, uint32_t rows, uint32_t stride, uint32_t dim,
    const char *const *pages, const char *const *ahead, const uint16_t *masks, uint32_t count, float *o) {
    enum { V = LANES_BLOCK_VECTORS };
    uint32_t row = 0;
    if (LANES_TALL_ROWS > 0 && row + LANES_TALL_ROWS <= rows) {
        attend_weigh_rows(
            format, LANES_TALL_ROWS, LANES_TALL_VECTORS, true, p, stride, dim, pages, ahead, masks, count, o);
        row = LANES_TALL_ROWS;
    }
    for (; LANES_TALL_ROWS > 0 && row + LANES_TALL_ROWS <= rows; row += LANES_TALL_ROWS)
        attend_weigh_rows(format, LANES_TALL_ROWS, LANES_TALL_VECTORS, false, p + row * ATTEND_SPLIT, stride, dim,
            pages, ahead, masks, count, o + row * stride);
    for (; row + LANES_BLOCK_ROWS <= rows; row += LANES_BLOCK_ROWS)
        attend_weigh_rows(format, LANES_BLOCK_ROWS, V, true, p + row * ATTEND_SPLIT, stride, dim, pages, ahead, masks,
            count, o + row * stride);
    p += row * ATTEND_SPLIT;
    o += row * stride;
    switch (rows - row) { /* as in attend_scores */
    case 5:
        if (LANES_BLOCK_ROWS > 5)
            attend_weigh_rows(format, 5, V, true, p, stride, dim, pages, ahead, masks, count, o);
        break;
    case 4:
        if (LANES_BLOCK_ROWS > 4)
            attend_weigh_rows(format, 4, V, true, p, stride, dim, pages, ahead, masks, count, o);
        break;
    case 3:
        if (LANES_BLOCK_ROWS > 3)
            attend_weigh_rows(format, 3, V, true, p, stride, dim, pages, ahead, masks, count, o);
        break;
    case 2:
        if (LANES_BLOCK_ROWS > 2)
            attend_weigh_rows(format, 2, V, true, p, stride, dim, pages, ahead, masks, count, o);
        break;
    case 1:
        if (LANES_BLOCK_ROWS > 1)
            attend_weigh_rows(format, 1, V, true, p, stride, dim, pages, ahead, masks, count, o);
        break;
    }
}

ATTEND_INLINE void attend_store(enum kv_format format, void *out, uint32_t offset, struct lanes value) {
    if (format == KV_F32)
        lanes_store((float *)out + offset, value);
    else if (format == KV_F16)
        lanes_store_half((uint16_t *)out + offset, value);
    else
        lanes_store_bfloat((uint16_t *)out + offset, value);
}

ATTEND_INLINE void attend_narrow(enum kv_format format, const float *x, uint32_t count, void *out) {
    uint32_t i = 0;
    for (; i + LANES <= count; i += LANES)
        attend_store(format, out, i, lanes_load(x + i));
    if (i == count)
        return;
    float rest[LANES]; /* as wide as any format */
    attend_store(format, rest, 0, lanes_load_part(x + i, count - i, 0));
    size_t bytes = kv_number_bytes(format);
    memcpy((char *)out + i * bytes, rest, (count - i) * bytes);
}

static uint32_t attend_visible(const int32_t *positions, int32_t limit) {
    return lanes_not_after(positions, limit);
}

static void attend_cap(float *x, uint32_t count, float cap) {
    for (uint32_t i = 0; i < count; i += LANES)
        lanes_store(x + i, lanes_soft_cap(lanes_load(x + i), cap));
}

/* entropy: also sets t. */
ATTEND_INLINE float attend_softmax_any(
    bool entropy, float *scores, const uint16_t *masks, uint32_t pages, float *l, float *t) {
    struct lanes hidden = lanes_set(-INFINITY), most = hidden, sum = lanes_set(0), weighted = sum;
    for (uint32_t page = 0; page < pages; page++) {
        struct lanes visible = lanes_replace(masks[page], lanes_load(scores + page * LANES), hidden);
        lanes_store(scores + page * LANES, visible);
        most = lanes_max(visible, most);
    }
    float m = lanes_maximum(most);
    most = lanes_set(m);
    for (uint32_t page = 0; page < pages; page++) {
        struct lanes difference = lanes_sub(lanes_load(scores + page * LANES), most), p = lanes_exp(difference);
        lanes_store(scores + page * LANES, p);
        sum = lanes_add(sum, p);
        if (entropy) /* where p is 0, the difference may be infinite */
            weighted = lanes_fma(p, lanes_max(difference, lanes_set(-88)), weighted);
    }
    *l = lanes_sum(sum);
    if (entropy)
        *t = lanes_sum(weighted);
    return m;
}

static float attend_softmax(float *scores, const uint16_t *masks, uint32_t pages, float *l) {
    return attend_softmax_any(false, scores, masks, pages, l, NULL);
}

static float attend_softmax_entropy(float *scores, const uint16_t *masks, uint32_t pages, float *l, float *t) {
    return attend_softmax_any(true, scores, masks, pages, l, t);
}

static void attend_merge(float *total, float keep, const float *o, float add, uint32_t dim) {
    struct lanes keeps = lanes_set(keep), adds = lanes_set(add);
    for (uint32_t i = 0; i < dim; i += LANES)
        lanes_store(total + i, lanes_fma(lanes_load(o + i), adds, lanes_mul(lanes_load(total + i), keeps)));
}

static void attend_scale(const float *x, float factor, uint32_t dim, float *out) {
    struct lanes factors = lanes_set(factor);
    uint32_t i = 0;
    for (; i + LANES <= dim; i += LANES)
        lanes_store(out + i, lanes_mul(lanes_load(x + i), factors));
    if (i < dim)
        lanes_store_part(out + i, dim - i, lanes_mul(lanes_load_part(x + i, dim - i, 0), factors));
}

static float attend_exp(float x) {
    float out[LANES];
    lanes_store(out, lanes_exp(lanes_set(x)));
    return out[0];
}

/* The kernels of one format, under names of their own. */
#define ATTEND_FORMAT(name, format)                                                                                    \
    static void attend_scores_##name(const float *q, uint32_t rows, uint32_t dim, const char *const *pages,            \
        const char *const *ahead, uint32_t count, float *scores) {                                                     \
        attend_scores(format, q, rows, dim, pages, ahead, count, scores);                                              \
    }                                                                                                                  \
    static void attend_weigh_##name(const float *p, uint32_t rows, uint32_t stride, uint32_t dim,                      \
        const char *const *pages, const char *const *ahead, const uint16_t *masks, uint32_t count, float *o) {         \
        attend_weigh(format, p, rows, stride, dim, pages, ahead, masks, count, o);                                     \
    }                                                                                                                  \
    static void attend_narrow_##name(const float *x, uint32_t count, void *out) {                                      \
        attend_narrow(format, x, count, out);                                                                          \
    }

ATTEND_FORMAT(f32, KV_F32)
ATTEND_FORMAT(f16, KV_F16)
ATTEND_FORMAT(bf16, KV_BF16)

#define ATTEND_KERNELS                                                                                                 \
    {                                                                                                                  \
        .visible = attend_visible, .cap = attend_cap, .softmax = attend_softmax,                                       \
        .softmax_entropy = attend_softmax_entropy, .merge = attend_merge, .scale = attend_scale, .exp = attend_exp,    \
        .formats = {                                                                                                   \
            [KV_F32] = {attend_scores_f32, attend_weigh_f32, attend_narrow_f32},                                       \
            [KV_F16] = {attend_scores_f16, attend_weigh_f16, attend_narrow_f16},                                       \
            [KV_BF16] = {attend_scores_bf16, attend_weigh_bf16, attend_narrow_bf16},                                   \
        }                                                                                                              \
    }
