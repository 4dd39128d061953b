/* SPDX-License-Identifier: Apache-2.0
 *
 * What the kernels of attention share (attend.cu, attend_prefill.cu, statistics.cu): the place of a tile, its queries,
 * and the arithmetic of a chunk on tensor cores (attend.h). Included by .cu files only.
 *
 * Fragments are those of mma.m16n8k16 (device.h): with g = lane / 4 and t = lane % 4, a lane holds of a tile's 16 rows
 * the rows g and g + 8, and of each 8 columns the columns 2 t and 2 t + 1.
 */
#ifndef CUDA_ATTEND_CUH
#define CUDA_ATTEND_CUH

#include "cuda/attend.h"
#include "cuda/device.h"
#include "cuda/pages.cuh"
#include "cuda/warp.cuh"

#include <math.h>

#define ATTEND_ALL WARP_ALL
#define ATTEND_LOG2_E 1.4426950408889634f
#define ATTEND_LN_2 0.6931471805599453f

enum { ATTEND_CHUNK_PAGES = ATTEND_CHUNK / KV_PAGE_SLOTS };

/* ---- places ---- */

/* By one access each, which the compiler does not make of a structure's parts. */
static __device__ __forceinline__ struct attend_tile attend_load_tile(const struct attend_tile *from) {
    uint4 x = *(const uint4 *)from;
    return (struct attend_tile){x.x, x.y, x.z, x.w};
}

static __device__ __forceinline__ struct attend_total attend_load_total(const struct attend_total *from) {
    float4 x = *(const float4 *)from;
    return (struct attend_total){x.x, x.y, x.z, __float_as_uint(x.w)};
}

static __device__ __forceinline__ void attend_store_total(struct attend_total *to, struct attend_total total) {
    *(float4 *)to = make_float4(total.m, total.l, total.inverse, __uint_as_float(total.seen));
}

/* A tile of one KV head: row r is token r / group, query head `head` + r % group. */
struct attend_place {
    uint32_t view;      /* index in views and statistics */
    uint32_t head;      /* first query head */
    uint32_t group;     /* query heads of the tile */
    uint32_t rows;      /* tokens * group */
    uint32_t batch_row; /* of the first token */
    uint32_t position;  /* of the first token */
};

/* item: the tile's. which: kv_head * attend_parts + part. */
static __device__ __forceinline__ struct attend_place attend_place_in(
    const struct attend_work &work, const struct kv_item &item, const struct attend_tile &tile, uint32_t which) {
    uint32_t kv_heads = work.batch.pool.layout.kv_heads, group = work.heads / kv_heads, parts = attend_parts(group);
    uint32_t kv_head = which / parts, first = which % parts * ATTEND_TILE_ROWS;
    struct attend_place place;
    place.view = tile.item * kv_heads + kv_head;
    place.head = kv_head * group + first;
    place.group = group - first < ATTEND_TILE_ROWS ? group - first : (uint32_t)ATTEND_TILE_ROWS;
    place.rows = tile.tokens * place.group;
    place.batch_row = item.first_row + tile.token;
    place.position = item.position + tile.token;
    return place;
}

static __device__ __forceinline__ struct attend_place attend_place_of(
    const struct attend_work &work, const struct attend_tile &tile, uint32_t which) {
    return attend_place_in(work, work.batch.items[tile.item], tile, which);
}

static __device__ __forceinline__ const float *attend_query(
    const struct attend_work &work, uint32_t batch_row, uint32_t head) {
    uint32_t dim = work.batch.pool.layout.head_dim;
    size_t stride = (size_t)(work.heads + 2 * work.batch.pool.layout.kv_heads) * dim;
    return work.qkv + batch_row * stride + (size_t)head * dim;
}

static __device__ __forceinline__ const char *attend_page(const struct attend_work &work, uint32_t page) {
    return page_at(work.batch.pool, page);
}

/* Bytes of a page's keys, and of its values. */
template <enum kv_format FORMAT> static __device__ __forceinline__ uint32_t attend_part_bytes(uint32_t dim) {
    return dim * KV_PAGE_SLOTS * number_bytes(FORMAT);
}

/* Whether the statistics of a view are made of probabilities. */
static __device__ __forceinline__ uint32_t attend_swept_needs(const struct attend_work &work, uint32_t view) {
    const uint32_t swept = STATISTIC_SUM | STATISTIC_SQUARED | STATISTIC_WINDOW | STATISTIC_HEAD_WINDOW |
                           STATISTIC_ABOVE | STATISTIC_ENTROPY | STATISTIC_NOISY;
    return work.batch.statistics == NULL ? 0 : work.batch.statistics[view].needs & swept;
}

/* ---- visibility of a slot ---- */

/* Differences as unsigned numbers: those of later positions are ATTEND_SPAN_ALL or more. */
static __device__ __forceinline__ bool attend_sees(int32_t row, int32_t slot, uint32_t span) {
    return (uint32_t)row - (uint32_t)slot < span;
}

/* Of rows at consecutive positions, `later` after the first: what the last of them must see of a slot by which some row
 * does, and what the first must by which all do. */
static __device__ __forceinline__ uint32_t attend_span_of_any(uint32_t span, uint32_t later) {
    return span < ATTEND_SPAN_ALL - later ? span + later : ATTEND_SPAN_ALL;
}

static __device__ __forceinline__ uint32_t attend_span_of_all(uint32_t span, uint32_t later) {
    return span == ATTEND_SPAN_ALL ? span : span > later ? span - later : 0;
}

/* Pages before it are gone. */
static __device__ __forceinline__ uint32_t attend_first_page(const struct cuda_head_view &view) {
    return view.from_slot / KV_PAGE_SLOTS;
}

/* ---- soft caps ---- */

static __device__ __forceinline__ float attend_capped(float logit, float cap, float inverse) {
    return cap * tanhf(logit * inverse);
}

template <uint32_t PAGES>
static __device__ __forceinline__ void attend_cap(float cap, float inverse, float s[PAGES][2][4]) {
    if (cap == 0)
        return;
#pragma unroll
    for (uint32_t i = 0; i < PAGES * 8; i++)
        s[i / 8][i / 4 % 2][i % 4] = attend_capped(s[i / 8][i / 4 % 2][i % 4], cap, inverse);
}

/* ---- folding ---- */

/* Adds next_l, relative to next_m, to m and l. o of the same rows becomes attend_fold_o(o, keep, next_o, add). */
static __device__ __forceinline__ void attend_fold(
    float *m, float *l, float next_m, float next_l, float *keep, float *add) {
    float most = fmaxf(*m, next_m), from = most == -INFINITY ? 0.0f : most;
    *keep = exp2f(*m - from);
    *add = exp2f(next_m - from);
    *m = most;
    *l = fmaf(next_l, *add, *l * *keep);
}

static __device__ __forceinline__ float attend_fold_o(float o, float keep, float next, float add) {
    return fmaf(next, add, o * keep);
}

/* The logit of one row with a summary slot, by a whole warp; every lane gets it. */
static __device__ __forceinline__ float attend_summary_logit(
    const struct attend_work &work, const float *summary, const float *query) {
    uint32_t dim = work.batch.pool.layout.head_dim;
    float sum = 0, cap = work.batch.cap;
    for (uint32_t i = threadIdx.x % 32; i < dim; i += 32)
        sum = fmaf(query[i] * work.batch.scale, summary[i], sum);
    sum = warp_sum(sum);
    return fmaf(summary[2 * dim], ATTEND_LOG2_E, cap == 0 ? sum : attend_capped(sum, cap, work.batch.inverse_cap));
}

/* ---- numbers of 16 bits ---- */

/* Two numbers in one register, the first in its low bits. */
template <enum kv_format FORMAT> static __device__ __forceinline__ uint32_t attend_pack(float low, float high) {
    if (FORMAT == KV_F16)
        return __half_as_ushort(__float2half_rn(low)) | (uint32_t)__half_as_ushort(__float2half_rn(high)) << 16;
    return __bfloat16_as_ushort(__float2bfloat16_rn(low)) | (uint32_t)__bfloat16_as_ushort(__float2bfloat16_rn(high))
                                                                << 16;
}

template <enum kv_format FORMAT> static __device__ __forceinline__ float attend_widen(uint32_t bits) {
    if (FORMAT == KV_F16)
        return __half2float(__ushort_as_half((unsigned short)bits));
    return __uint_as_float(bits << 16);
}

/* Packs what two numbers are, and leaves in them what is missing. */
template <enum kv_format FORMAT> static __device__ __forceinline__ uint32_t attend_pack_rest(float *low, float *high) {
    uint32_t packed = attend_pack<FORMAT>(*low, *high);
    *low -= attend_widen<FORMAT>(packed & 0xffff);
    *high -= attend_widen<FORMAT>(packed >> 16);
    return packed;
}

/* Numbers of the format that a query, a probability is the sum of. */
template <enum kv_format FORMAT> static __device__ __forceinline__ constexpr uint32_t attend_query_terms() {
    return FORMAT == KV_F16 ? 2 : 3;
}

template <enum kv_format FORMAT> static __device__ __forceinline__ constexpr uint32_t attend_weight_terms() {
    return FORMAT == KV_F16 ? 1 : 2;
}

template <enum kv_format FORMAT>
static __device__ __forceinline__ void attend_mma(float *sums, const uint32_t *a, const uint32_t *b) {
    if (FORMAT == KV_F16)
        device_mma_m16n8k16_f16(sums, a, b, sums);
    else
        device_mma_m16n8k16_bf16(sums, a, b, sums);
}

/* ---- rows in shared memory ----
 *
 * A row of `dim` numbers is cut into pieces of 16 bytes. Where it is a multiple of 128 bytes, its pieces are exchanged
 * by the row's number, else 16 bytes follow it: either way the same piece of 8 rows lies in different banks. */

static __device__ __host__ __forceinline__ uint32_t attend_row_bytes(uint32_t dim) {
    return dim % 64 == 0 ? dim * 2 : dim * 2 + 16;
}

/* Piece p of a row is found in the place p ^ attend_row_turn. */
static __device__ __forceinline__ uint32_t attend_row_turn(uint32_t row, uint32_t dim) {
    return dim % 64 == 0 ? row & 7 : 0;
}

static __device__ __forceinline__ uint32_t attend_row_at(uint32_t row, uint32_t piece, uint32_t dim) {
    return row * attend_row_bytes(dim) + ((piece ^ attend_row_turn(row, dim)) << 4);
}

/* Queries of a tile: [terms][16 rows]. */
template <enum kv_format FORMAT> static __device__ __host__ __forceinline__ uint32_t attend_query_bytes(uint32_t dim) {
    return (FORMAT == KV_F16 ? 2 : 3) * ATTEND_TILE_ROWS * attend_row_bytes(dim);
}

/* Writes a tile's queries, by `count` threads of which this is number `thread`; rows that are not there are 0. */
template <enum kv_format FORMAT>
static __device__ __forceinline__ void attend_store_queries(
    const struct attend_work &work, const struct attend_place &place, uint32_t thread, uint32_t count, char *to) {
    uint32_t dim = work.batch.pool.layout.head_dim, row_bytes = attend_row_bytes(dim);
    float scale = work.batch.scale;
    for (uint32_t i = thread; i < ATTEND_TILE_ROWS * dim / 2; i += count) {
        uint32_t row = i / (dim / 2), pair = i % (dim / 2);
        float2 x = make_float2(0, 0);
        if (row < place.rows) {
            const float *query =
                attend_query(work, place.batch_row + row / place.group, place.head + row % place.group);
            x = ((const float2 *)query)[pair];
        }
        float low = x.x * scale, high = x.y * scale;
        for (uint32_t term = 0; term < attend_query_terms<FORMAT>(); term++)
            *(uint32_t *)(to + term * ATTEND_TILE_ROWS * row_bytes + attend_row_at(row, pair / 4, dim) + pair % 4 * 4) =
                attend_pack_rest<FORMAT>(&low, &high);
    }
}

/* ---- pages in shared memory ----
 *
 * Keys: channel c takes 32 bytes, its two halves of 8 slots exchanged when c / 4 is odd, so that 8 channels of one half
 * lie in different banks. Values: a slot is a row. */

static __device__ __forceinline__ uint32_t attend_key_at(uint32_t channel, uint32_t half) {
    return channel * 32 + ((half ^ (channel >> 2 & 1)) << 4);
}

/* Asks for piece i (16 bytes) of a page's keys [2 * dim], or of its values' `channels` (a multiple of 8) channels from
 * `from` on [2 * channels]. */
static __device__ __forceinline__ void attend_copy_keys(char *to, const char *keys, uint32_t i) {
    device_copy_async_16(to + attend_key_at(i / 2, i % 2), keys + i * 16);
}

static __device__ __forceinline__ void attend_copy_values(
    char *to, const char *values, uint32_t dim, uint32_t from, uint32_t channels, uint32_t i) {
    uint32_t slot = i / (channels / 8), piece = i % (channels / 8);
    device_copy_async_16(
        to + attend_row_at(slot, piece, channels), values + ((size_t)slot * dim + from) * 2 + piece * 16);
}

/* Logits of a tile's rows with the slots of PAGES pages that lie `stride` bytes apart, those whose bit is set in
 * `pages`: s [page][half][4]. */
template <enum kv_format FORMAT, uint32_t PAGES>
static __device__ __forceinline__ void attend_logits(
    const char *queries, const char *keys, uint32_t stride, uint32_t pages, uint32_t dim, float s[PAGES][2][4]) {
    uint32_t lane = threadIdx.x % 32, row_bytes = attend_row_bytes(dim);
    uint32_t turn = attend_row_turn(lane % 16, dim);
    const char *query = queries + lane % 16 * row_bytes;
#pragma unroll
    for (uint32_t page = 0; page < PAGES; page++) {
#pragma unroll
        for (uint32_t i = 0; i < 4; i++)
            s[page][0][i] = s[page][1][i] = 0;
    }
    for (uint32_t channel = 0; channel < dim; channel += 16) {
        uint32_t q[attend_query_terms<FORMAT>()][4];
#pragma unroll
        for (uint32_t term = 0; term < attend_query_terms<FORMAT>(); term++)
            device_ldmatrix_x4(
                q[term], query + term * ATTEND_TILE_ROWS * row_bytes + (((channel / 8 + lane / 16) ^ turn) << 4));
#pragma unroll
        for (uint32_t page = 0; page < PAGES; page++) {
            if ((pages >> page & 1) == 0)
                continue;
            uint32_t k[4];
            device_ldmatrix_x4_trans(k, keys + page * stride + attend_key_at(channel + lane % 16, lane / 16));
#pragma unroll
            for (uint32_t term = 0; term < attend_query_terms<FORMAT>(); term++) {
                attend_mma<FORMAT>(s[page][0], q[term], k);
                attend_mma<FORMAT>(s[page][1], q[term], k + 2);
            }
        }
    }
}

/* ---- visibility ---- */

/* Positions of a chunk's slots: a lane's are those of slots 2 lane and 2 lane + 1. */
struct attend_seen {
    int2 positions;
    uint32_t full; /* bit p: every row sees all slots of page p */
};

/* earliest: position of the first row; span: attend_span_of_all. */
static __device__ __forceinline__ struct attend_seen attend_see(int2 positions, int32_t earliest, uint32_t span) {
    struct attend_seen seen = {positions, 0};
    uint32_t all =
        __ballot_sync(ATTEND_ALL, attend_sees(earliest, positions.x, span) && attend_sees(earliest, positions.y, span));
#pragma unroll
    for (uint32_t page = 0; page < ATTEND_CHUNK_PAGES; page++)
        seen.full |= (all >> 8 * page & 0xff) == 0xff ? 1u << page : 0;
    return seen;
}

/* Positions of slots beyond the end, or before the first that is there, count as unused. from: those of the page of
 * slot 2 lane of the chunk. */
static __device__ __forceinline__ int2 attend_positions(
    const char *from, uint32_t first_slot, const struct cuda_head_view &view) {
    uint32_t lane = threadIdx.x % 32, slot = first_slot + 2 * lane;
    int2 positions = make_int2(KV_NO_POSITION, KV_NO_POSITION);
    if (slot < view.slots && slot >= view.from_slot) {
        positions = ((const int2 *)from)[lane % 8];
        if (slot + 1 >= view.slots)
            positions.y = KV_NO_POSITION;
    }
    return positions;
}

/* Logits of hidden slots become -infinity. limits: positions of the lane's rows g and g + 8. */
static __device__ __forceinline__ void attend_hide(
    const struct attend_seen &seen, const int32_t limits[2], uint32_t span, float s[ATTEND_CHUNK_PAGES][2][4]) {
    uint32_t lane = threadIdx.x % 32;
#pragma unroll
    for (uint32_t page = 0; page < ATTEND_CHUNK_PAGES; page++) {
        if (seen.full >> page & 1)
            continue;
#pragma unroll
        for (uint32_t half = 0; half < 2; half++) {
            int from = (int)(8 * page + 4 * half + lane % 4);
            int32_t x = __shfl_sync(ATTEND_ALL, seen.positions.x, from);
            int32_t y = __shfl_sync(ATTEND_ALL, seen.positions.y, from);
#pragma unroll
            for (uint32_t row = 0; row < 2; row++) {
                float *pair = &s[page][half][2 * row];
                pair[0] = attend_sees(limits[row], x, span) ? pair[0] : -INFINITY;
                pair[1] = attend_sees(limits[row], y, span) ? pair[1] : -INFINITY;
            }
        }
    }
}

/* ---- softmax and weighted sums ---- */

/* Logits of a chunk become p; m and l are those of rows g and g + 8, the same in the four lanes of a row. */
static __device__ __forceinline__ void attend_softmax(float s[ATTEND_CHUNK_PAGES][2][4], float m[2], float l[2]) {
#pragma unroll
    for (uint32_t row = 0; row < 2; row++) {
        float most = -INFINITY, sum = 0;
#pragma unroll
        for (uint32_t page = 0; page < ATTEND_CHUNK_PAGES; page++) {
#pragma unroll
            for (uint32_t half = 0; half < 2; half++)
                most = fmaxf(most, fmaxf(s[page][half][2 * row], s[page][half][2 * row + 1]));
        }
        most = fmaxf(most, __shfl_xor_sync(ATTEND_ALL, most, 1));
        most = fmaxf(most, __shfl_xor_sync(ATTEND_ALL, most, 2));
        float from = most == -INFINITY ? 0.0f : most;
#pragma unroll
        for (uint32_t page = 0; page < ATTEND_CHUNK_PAGES; page++) {
#pragma unroll
            for (uint32_t half = 0; half < 2; half++) {
#pragma unroll
                for (uint32_t column = 0; column < 2; column++) {
                    float *p = &s[page][half][2 * row + column];
                    *p = exp2f(*p - from);
                    sum += *p;
                }
            }
        }
        sum += __shfl_xor_sync(ATTEND_ALL, sum, 1);
        sum += __shfl_xor_sync(ATTEND_ALL, sum, 2);
        m[row] = most;
        l[row] = sum;
    }
}

/* p of one page as an operand: a [terms][4]. */
template <enum kv_format FORMAT>
static __device__ __forceinline__ void attend_pack_weights(
    const float p[2][4], uint32_t a[attend_weight_terms<FORMAT>()][4]) {
#pragma unroll
    for (uint32_t i = 0; i < 4; i++) { /* rows g, g + 8; then the other half's */
        float low = p[i / 2][i % 2 * 2], high = p[i / 2][i % 2 * 2 + 1];
#pragma unroll
        for (uint32_t term = 0; term < attend_weight_terms<FORMAT>(); term++)
            a[term][i] = attend_pack_rest<FORMAT>(&low, &high);
    }
}

/* Numbers that are infinite or NaN, as masks of their bits. */
template <enum kv_format FORMAT> static __device__ __forceinline__ uint32_t attend_not_finite(uint32_t pair) {
    const uint32_t exponent = FORMAT == KV_F16 ? 0x7c007c00u : 0x7f807f80u;
    const uint32_t one = FORMAT == KV_F16 ? 0x04000400u : 0x00800080u;
    return (((pair & exponent) + one) >> 15 & 0x00010001u) * 0xffffu;
}

/* The same for numbers that are not 0. */
static __device__ __forceinline__ uint32_t attend_not_zero(uint32_t pair) {
    return (((pair & 0x7fff7fffu) + 0x7fff7fffu) >> 15 & 0x00010001u) * 0xffffu;
}

/* Values that are infinite or NaN must not reach the rows that do not see their slots: 0 times them is NaN. They are
 * taken out of v, and what they have a weight in that is not 0 becomes NaN. */
template <enum kv_format FORMAT>
static __device__ __forceinline__ void attend_take_out(uint32_t v[4], const uint32_t a[4], float o[2][4]) {
    const uint32_t ones = FORMAT == KV_F16 ? 0x3c003c00u : 0x3f803f80u;
    uint32_t seen[4];
#pragma unroll
    for (uint32_t i = 0; i < 4; i++)
        seen[i] = attend_not_zero(a[i]) & ones;
#pragma unroll
    for (uint32_t half = 0; half < 2; half++) {
        uint32_t bad[2] = {attend_not_finite<FORMAT>(v[2 * half]), attend_not_finite<FORMAT>(v[2 * half + 1])};
        float counts[4] = {0, 0, 0, 0};
        v[2 * half] &= ~bad[0];
        v[2 * half + 1] &= ~bad[1];
        bad[0] &= ones;
        bad[1] &= ones;
        attend_mma<FORMAT>(counts, seen, bad);
#pragma unroll
        for (uint32_t i = 0; i < 4; i++)
            o[half][i] = counts[i] == 0 ? o[half][i] : NAN;
    }
}

/* o [2][4] += p v over the slots of one page, for 16 channels from `channel` of a row of `channels` on. full: every row
 * sees all slots. */
template <enum kv_format FORMAT>
static __device__ __forceinline__ void attend_weigh(const char *values, uint32_t channel, uint32_t channels,
    const uint32_t a[attend_weight_terms<FORMAT>()][4], bool full, float o[2][4]) {
    uint32_t lane = threadIdx.x % 32, v[4];
    device_ldmatrix_x4_trans(v, values + attend_row_at(lane % 16, channel / 8 + lane / 16, channels));
    if (!full) {
        uint32_t bad = attend_not_finite<FORMAT>(v[0]) | attend_not_finite<FORMAT>(v[1]) |
                       attend_not_finite<FORMAT>(v[2]) | attend_not_finite<FORMAT>(v[3]);
        if (__any_sync(ATTEND_ALL, bad != 0))
            attend_take_out<FORMAT>(v, a[0], o);
    }
#pragma unroll
    for (uint32_t term = 0; term < attend_weight_terms<FORMAT>(); term++) {
        attend_mma<FORMAT>(o[0], a[term], v);
        attend_mma<FORMAT>(o[1], a[term], v + 2);
    }
}

#endif
