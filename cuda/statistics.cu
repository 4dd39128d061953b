/* SPDX-License-Identifier: Apache-2.0 */
#include "cuda/statistics.h"
#include "cuda/attend.cuh"
#include "cuda/sums.cuh"

enum {
    SWEEP_THREADS = STATISTICS_SLOTS,
    SWEEP_PAGES = STATISTICS_SLOTS / KV_PAGE_SLOTS,
    WARP_PAGES = SWEEP_PAGES / (SWEEP_THREADS / 32),
    SCORES_STRIDE = STATISTICS_SLOTS + 8, /* so that four rows lie in different banks */
    ABOVE_WORDS = STATISTIC_ABOVE_BITS / 64,
};

/* Where logits come from. */
enum sweep_source { SWEEP_KEPT, SWEEP_F16, SWEEP_BF16 };

template <enum sweep_source SOURCE> static __device__ __host__ __forceinline__ constexpr enum kv_format sweep_format() {
    return SOURCE == SWEEP_BF16 ? KV_BF16 : KV_F16;
}

/* ---- what rows need ---- */

/* A row of a tile, in shared memory. */
struct sweep_row {
    struct attend_total total, noisy;
    uint64_t key; /* of its noise */
};

/* What a block reads of its head and item, once. */
struct sweep_head {
    struct kv_statistics to;
    struct cuda_head_view view;
    struct kv_item item;
};

/* Shared memory of a block. Behind it, of what computes logits: queries, keys [pages], scores [16][SCORES_STRIDE]. */
struct __attribute__((aligned(16))) sweep_shared {
    struct sweep_row rows[ATTEND_TILE_ROWS];
    struct sweep_head head;
};

template <enum sweep_source SOURCE> static size_t sweep_bytes(uint32_t dim) {
    size_t bytes = sizeof(struct sweep_shared);
    if (SOURCE != SWEEP_KEPT)
        bytes += attend_query_bytes<sweep_format<SOURCE>()>(dim) + (size_t)STATISTICS_SLOTS * 2 * dim +
                 ATTEND_TILE_ROWS * SCORES_STRIDE * sizeof(float);
    return bytes;
}

/* One thread's slot, and the head that it belongs to. */
struct sweep {
    const struct kv_statistics *to;
    uint32_t needs;
    uint32_t slot;
    int32_t position; /* of the slot's token */
    uint32_t group;
    uint32_t window_first, above_first; /* first tokens of the item that count */
};

/* The first token of an item that is counted in a ring: an earlier one would be written over. */
static __device__ __forceinline__ uint32_t first_counted(const struct kv_item &item, uint32_t ring, uint32_t from) {
    uint32_t first = item.rows > ring ? item.rows - ring : 0;
    return first > from ? first : from;
}

/* Finaliser of SplitMix64 (Steele et al. 2014). */
static __device__ __forceinline__ uint64_t mix(uint64_t x) {
    x += 0x9e3779b97f4a7c15u;
    x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9u;
    x = (x ^ (x >> 27)) * 0x94d049bb133111ebu;
    return x ^ (x >> 31);
}

/* 1 / tau: tau is 1 for the queries of the prompt and 1 + 0.01 n for the n-th decoded token (Adnan 2024). */
static __device__ __forceinline__ float noise_factor(const struct kv_item &item, uint32_t position) {
    return position < item.prompt ? 1.0f : 1 / (1 + 0.01f * (float)(position - item.prompt + 1));
}

/* -ln(-ln u) in units of ln 2, u = (B + 1/2) 2^-52 of the 52 highest bits B: near 1 by way of 1 - u, which has all its
 * digits there. */
static __device__ __forceinline__ float noise_gumbel(uint64_t key, int32_t position) {
    uint64_t odd = (mix(key ^ (uint32_t)position) >> 12) * 2 + 1;
    float u = __ull2float_rn(odd) * 0x1p-53f, rest = __ull2float_rn((1ull << 53) - odd) * 0x1p-53f;
    float minus_log = u >= 0.75f ? -log1pf(-rest) : -logf(u);
    return -logf(minus_log) * ATTEND_LOG2_E;
}

/* 24 bits behind the point. */
static __device__ __forceinline__ uint32_t share_integer(float share) {
    return (uint32_t)rintf(share * (float)(1 << STATISTIC_FRACTION_BITS));
}

/* Limited to [0, 1], 0 for NaN. */
static __device__ __forceinline__ float share_of(float sum, float scale) {
    return fminf(fmaxf(sum * scale, 0.0f), 1.0f);
}

/* ---- one slot ---- */

/* Sums over the query heads of one token. */
struct token_sums {
    float a, squared, noisy;
};

/* What a thread has yet to write. */
struct slot_sums {
    unsigned long long sum, squared, noisy;
    uint32_t window;
    uint32_t word; /* of above, ABOVE_WORDS: none */
    unsigned long long above_before, above;
};

static __device__ __forceinline__ void add_to(uint64_t *to, unsigned long long value, bool alone) {
    if (value == 0)
        return;
    if (alone)
        *to += value;
    else
        atomicAdd((unsigned long long *)to, value);
}

/* Only the bits of this thread's tokens change, so that a difference can be added. */
static __device__ __forceinline__ void write_above(const struct sweep &sweep, struct slot_sums &sums, bool alone) {
    if (sums.word < ABOVE_WORDS)
        add_to(&sweep.to->above[(size_t)sweep.slot * ABOVE_WORDS + sums.word], sums.above - sums.above_before, alone);
}

static __device__ __forceinline__ void set_above(
    const struct sweep &sweep, uint32_t position, bool above, struct slot_sums &sums, bool alone) {
    uint32_t bit = position % sweep.to->history;
    if (bit / 64 != sums.word) {
        write_above(sweep, sums, alone);
        sums.word = bit / 64;
        sums.above = sums.above_before = sweep.to->above[(size_t)sweep.slot * ABOVE_WORDS + sums.word];
    }
    unsigned long long mask = 1ull << bit % 64;
    sums.above = above ? sums.above | mask : sums.above & ~mask;
}

/* f16(share) in the place of one row of a ring; returns by how much its integer grows. */
static __device__ __forceinline__ uint32_t set_half(uint16_t *at, float share, bool wants_growth) {
    uint16_t next = __half_as_ushort(__float2half_rn(share));
    uint32_t growth = 0;
    if (wants_growth)
        growth =
            share_integer(__half2float(__ushort_as_half(next))) - share_integer(__half2float(__ushort_as_half(*at)));
    *at = next;
    return growth;
}

/* One query head of a token that sees the slot. */
static __device__ __forceinline__ void add_head(const struct sweep &sweep, const struct sweep_row &row, float score,
    float factor, uint32_t position, uint32_t token, uint32_t head, struct token_sums &sums) {
    float p = exp2f(score - row.total.m) * row.total.inverse;
    sums.a += p;
    sums.squared = fmaf(p, p, sums.squared);
    if (sweep.needs & STATISTIC_NOISY) {
        float noisy = (score + noise_gumbel(row.key, sweep.position)) * factor;
        sums.noisy += exp2f(noisy - row.noisy.m) * row.noisy.inverse;
    }
    if (sweep.needs & STATISTIC_HEAD_WINDOW && token >= sweep.window_first) {
        size_t ring_row = (size_t)(position % sweep.to->window) * sweep.group + head;
        set_half(&sweep.to->head_rows[ring_row * sweep.to->capacity + sweep.slot], share_of(p, 1), false);
    }
}

/* The same token's sums over all query heads. */
static __device__ __forceinline__ void add_token(const struct sweep &sweep, const struct token_sums &token_sums,
    uint32_t seen, uint32_t position, uint32_t token, struct slot_sums &sums, bool alone) {
    float scale = 1 / (float)sweep.group, share = share_of(token_sums.a, scale);
    sums.sum += share_integer(share);
    sums.squared += share_integer(share_of(token_sums.squared, scale));
    if (sweep.needs & STATISTIC_NOISY)
        sums.noisy += share_integer(share_of(token_sums.noisy, scale));
    if (sweep.needs & STATISTIC_WINDOW && token >= sweep.window_first) {
        size_t at = (size_t)(position % sweep.to->window) * sweep.to->capacity + sweep.slot;
        sums.window += set_half(&sweep.to->window_rows[at], share, true);
    }
    if (sweep.needs & STATISTIC_ABOVE && token >= sweep.above_first)
        set_above(sweep, position, share > 1 / (float)seen, sums, alone);
}

static __device__ __forceinline__ void write_sums(const struct sweep &sweep, struct slot_sums &sums, bool alone) {
    if (sweep.needs & STATISTIC_SUM)
        sum_add(sweep.to->sum, sweep.to->capacity, sweep.slot, sums.sum, alone);
    if (sweep.needs & STATISTIC_SQUARED)
        sum_add(sweep.to->squared, sweep.to->capacity, sweep.slot, sums.squared, alone);
    if (sweep.needs & STATISTIC_NOISY)
        sum_add(sweep.to->noisy, sweep.to->capacity, sweep.slot, sums.noisy, alone);
    if (sweep.needs & STATISTIC_WINDOW && sums.window != 0) {
        if (alone)
            sweep.to->window_sum[sweep.slot] += sums.window;
        else
            atomicAdd(&sweep.to->window_sum[sweep.slot], sums.window);
    }
    if (sweep.needs & STATISTIC_ABOVE)
        write_above(sweep, sums, alone);
}

/* ---- the sweep ---- */

/* By threads from `first` on, a word each: a structure is read by one access. */
static __device__ __forceinline__ void load_words(void *to, const void *from, uint32_t bytes, uint32_t first) {
    uint32_t word = threadIdx.x - first;
    if (word < bytes / 4)
        ((uint32_t *)to)[word] = ((const uint32_t *)from)[word];
}

static __device__ __forceinline__ void load_head(
    const struct attend_work &work, uint32_t item, uint32_t view, struct sweep_head *head) {
    static_assert(sizeof head->to <= 64 * 4 && sizeof head->view <= 32 * 4, "a thread a word");
    load_words(&head->to, &work.batch.statistics[view], sizeof head->to, 0);
    load_words(&head->view, &work.batch.views[view], sizeof head->view, 64);
    load_words(&head->item, &work.batch.items[item], sizeof head->item, 96);
    __syncthreads();
}

/* The rows of a tile into shared memory, by its first 16 threads. noise: keys and noisy totals too (noisy NULL: none).
 */
static __device__ __forceinline__ void load_rows(const struct attend_work &work, const struct attend_place &place,
    uint32_t scratch, uint64_t noise, const struct attend_total *noisy, bool keys, struct sweep_row *rows) {
    uint32_t row = threadIdx.x;
    if (row >= place.rows)
        return;
    uint32_t token = row / place.group, head = place.head + row % place.group;
    uint32_t first_head = work.batch.pool.layout.first_head * place.group; /* query heads of the model before these */
    attend_store_total(
        &rows[row].total, attend_load_total(&work.totals[(size_t)(place.batch_row + token) * work.heads + head]));
    if (keys)
        rows[row].key = mix(mix(noise ^ (first_head + head)) ^ (place.position + token));
    if (noisy != NULL)
        attend_store_total(&rows[row].noisy, attend_load_total(&noisy[(size_t)(scratch + token) * work.heads + head]));
}

/* The keys of a block's slots into shared memory. Returns how many pages there are. */
template <enum kv_format FORMAT>
static __device__ __forceinline__ uint32_t load_keys(
    const struct attend_work &work, const struct cuda_head_view &view, uint32_t first_slot, char *keys) {
    uint32_t dim = work.batch.pool.layout.head_dim, slots = view.slots - first_slot;
    uint32_t pages = slots < STATISTICS_SLOTS ? (slots + KV_PAGE_SLOTS - 1) / KV_PAGE_SLOTS : (uint32_t)SWEEP_PAGES;
    for (uint32_t page = threadIdx.x / 32; page < pages; page += SWEEP_THREADS / 32) {
        const char *from = attend_page(work, view.pages[first_slot / KV_PAGE_SLOTS + page]);
        for (uint32_t piece = threadIdx.x % 32; piece < 2 * dim; piece += 32)
            attend_copy_keys(keys + page * 32 * dim, from, piece);
    }
    device_copy_commit();
    device_copy_wait<0>();
    __syncthreads();
    return pages;
}

/* Logits of a tile with a block's slots: scores [16][SCORES_STRIDE]. A warp has two pages. */
template <enum kv_format FORMAT>
static __device__ __forceinline__ void compute_scores(const struct attend_work &work, const struct attend_place &place,
    char *queries, const char *keys, uint32_t pages, float *scores) {
    uint32_t dim = work.batch.pool.layout.head_dim, first = threadIdx.x / 32 * WARP_PAGES, lane = threadIdx.x % 32;
    uint32_t own = first < pages ? (pages - first < WARP_PAGES ? pages - first : (uint32_t)WARP_PAGES) : 0;
    attend_store_queries<FORMAT>(work, place, threadIdx.x, SWEEP_THREADS, queries);
    __syncthreads();
    float s[WARP_PAGES][2][4];
    attend_logits<FORMAT, WARP_PAGES>(queries, keys + first * 32 * dim, 32 * dim, (1u << own) - 1, dim, s);
    attend_cap<WARP_PAGES>(work.batch.cap, work.batch.inverse_cap, s);
#pragma unroll
    for (uint32_t i = 0; i < WARP_PAGES * 4; i++) {
        uint32_t page = i / 4, half = i / 2 % 2, row = i % 2 * 8 + lane / 4;
        float *to = scores + row * SCORES_STRIDE + (first + page) * KV_PAGE_SLOTS + half * 8 + lane % 4 * 2;
        *(float2 *)to = make_float2(s[page][half][i % 2 * 2], s[page][half][i % 2 * 2 + 1]);
    }
}

/* m and l of a warp's slots. */
static __device__ __forceinline__ void keep_noise_piece(float noisy, struct attend_piece *to) {
    float most = warp_most(noisy);
    float sum = warp_sum(exp2f(noisy - (most == -INFINITY ? 0.0f : most)));
    if (threadIdx.x % 32 == 0)
        *to = (struct attend_piece){most, sum};
}

/* NOISE: only noisy_pieces. */
template <enum sweep_source SOURCE, bool NOISE>
static __global__ void __launch_bounds__(SWEEP_THREADS, 4)
    statistics_sweep_kernel(const struct attend_work work, const struct attend_tile *ranges, bool alone) {
    KERNEL_SHARED(struct sweep_shared, shared);
    const enum kv_format FORMAT = sweep_format<SOURCE>();
    const struct attend_tile range = attend_load_tile(&ranges[blockIdx.x]);
    uint32_t kv_heads = work.batch.pool.layout.kv_heads, dim = work.batch.pool.layout.head_dim;
    uint32_t view_index = range.item * kv_heads + blockIdx.y, first_slot = blockIdx.z * STATISTICS_SLOTS;
    if (work.batch.statistics == NULL)
        return;
    load_head(work, range.item, view_index, &shared->head);
    const struct cuda_head_view &view = shared->head.view;
    const struct kv_item &item = shared->head.item;
    struct sweep_row *rows = shared->rows;
    struct sweep sweep;
    sweep.to = &shared->head.to;
    sweep.needs = sweep.to->needs & STATISTICS_SWEPT;
    if (first_slot >= view.slots || (NOISE ? sweep.needs & STATISTIC_NOISY : sweep.needs) == 0)
        return;
    sweep.slot = first_slot + threadIdx.x;
    sweep.group = work.heads / kv_heads;
    sweep.window_first = first_counted(item, sweep.to->window, item.window_from);
    sweep.above_first = first_counted(item, sweep.to->history, 0);
    sweep.position = KV_NO_POSITION;
    if (sweep.slot < view.slots) {
        char *page = page_at(work.batch.pool, view.pages[sweep.slot / KV_PAGE_SLOTS]);
        sweep.position = page_positions(work.batch.pool.layout, page)[sweep.slot % KV_PAGE_SLOTS];
    }
    char *queries = (char *)(shared + 1), *keys = queries + attend_query_bytes<FORMAT>(dim);
    float *scores = (float *)(keys + STATISTICS_SLOTS * 2 * dim);
    uint32_t pages = 0;
    if (SOURCE != SWEEP_KEPT)
        pages = load_keys<FORMAT>(work, view, first_slot, keys);

    uint32_t parts = attend_parts(sweep.group), tile_tokens = attend_tile_tokens(sweep.group);
    uint64_t noise = sweep.needs & STATISTIC_NOISY ? mix(mix(sweep.to->seed) ^ work.batch.layer) : 0;
    uint32_t piece = first_slot / STATISTICS_PIECE + threadIdx.x / STATISTICS_PIECE;
    struct slot_sums sums = {0, 0, 0, 0, ABOVE_WORDS, 0, 0};
    struct token_sums token_sums = {0, 0, 0};
    for (uint32_t step = 0; step < (range.tokens + tile_tokens - 1) / tile_tokens * parts; step++) {
        uint32_t first = step / parts * tile_tokens, part = step % parts, scratch = range.scratch + first;
        struct attend_tile tile = {range.item, range.token + first, range.tokens - first, 0};
        tile.tokens = tile.tokens < tile_tokens ? tile.tokens : tile_tokens;
        const struct attend_place place = attend_place_in(work, item, tile, blockIdx.y * parts + part);
        load_rows(work, place, scratch, noise,
            NOISE                           ? NULL
            : sweep.needs & STATISTIC_NOISY ? work.noisy
                                            : NULL,
            sweep.needs & STATISTIC_NOISY, rows);
        if (SOURCE != SWEEP_KEPT)
            compute_scores<FORMAT>(work, place, queries, keys, pages, scores);
        __syncthreads();
        for (uint32_t token = 0; token < tile.tokens; token++) {
            uint32_t position = place.position + token;
            bool sees = attend_sees((int32_t)position, sweep.position, work.batch.span);
            float factor = sweep.needs & STATISTIC_NOISY ? noise_factor(item, position) : 1;
            if (part == 0)
                token_sums = (struct token_sums){0, 0, 0};
            for (uint32_t head = 0; head < place.group; head++) {
                const struct sweep_row &row = rows[token * place.group + head];
                size_t scratch_row = (size_t)(scratch + token) * work.heads + place.head + head;
                float score = 0;
                if (SOURCE != SWEEP_KEPT)
                    score = scores[(token * place.group + head) * SCORES_STRIDE + threadIdx.x];
                else if (sees)
                    score = work.scores[scratch_row * work.splits * ATTEND_SPLIT + sweep.slot];
                if (NOISE) {
                    float noisy = sees ? (score + noise_gumbel(row.key, sweep.position)) * factor : -INFINITY;
                    keep_noise_piece(noisy, &work.noisy_pieces[scratch_row * work.pieces + piece]);
                    continue;
                }
                if (sees)
                    add_head(sweep, row, score, factor, position, tile.token + token, part * ATTEND_TILE_ROWS + head,
                        token_sums);
                if (sweep.needs & STATISTIC_ENTROPY) {
                    float below = score - row.total.m, p = sees ? exp2f(below) * row.total.inverse : 0;
                    float term = p > 0 ? p * (below * ATTEND_LN_2 - logf(row.total.l)) : 0;
                    term = warp_sum(term);
                    if (threadIdx.x % 32 == 0)
                        work.entropy_pieces[scratch_row * work.pieces + piece] = term;
                }
            }
            if (!NOISE && sees && part == parts - 1)
                add_token(
                    sweep, token_sums, rows[token * place.group].total.seen, position, tile.token + token, sums, alone);
        }
        __syncthreads();
    }
    if (!NOISE && sweep.slot < view.slots)
        write_sums(sweep, sums, alone);
}

/* ---- pieces put together: a warp a row ---- */

/* Lane i takes every 32nd piece, then lanes are folded in pairs; missing pieces change nothing. */
static __global__ void __launch_bounds__(32)
    statistics_noise_kernel(const struct attend_work work, const struct attend_tile *ranges) {
    const struct attend_tile range = attend_load_tile(&ranges[blockIdx.x]);
    uint32_t head = blockIdx.y, token = blockIdx.z, lane = threadIdx.x, kv_heads = work.batch.pool.layout.kv_heads;
    uint32_t view_index = range.item * kv_heads + head / (work.heads / kv_heads);
    if (token >= range.tokens || (attend_swept_needs(work, view_index) & STATISTIC_NOISY) == 0)
        return;
    const struct cuda_head_view view = work.batch.views[view_index];
    const struct kv_item item = work.batch.items[range.item];
    size_t row = (size_t)(range.scratch + token) * work.heads + head;
    uint32_t pieces = (view.slots + STATISTICS_PIECE - 1) / STATISTICS_PIECE;
    float m = -INFINITY, l = 0, keep, add;
    for (uint32_t i = lane; i < pieces; i += 32) {
        float2 piece = ((const float2 *)work.noisy_pieces)[row * work.pieces + i]; /* m, l */
        if (piece.y != 0)
            attend_fold(&m, &l, piece.x, piece.y, &keep, &add);
    }
    for (unsigned lanes = 16; lanes > 0; lanes /= 2) {
        float next_m = __shfl_down_sync(ATTEND_ALL, m, lanes), next_l = __shfl_down_sync(ATTEND_ALL, l, lanes);
        attend_fold(&m, &l, next_m, next_l, &keep, &add);
    }
    if (view.summary != NULL) { /* its logit has no noise, only tau */
        uint32_t position = item.position + range.token + token, batch_row = item.first_row + range.token + token;
        float logit = attend_summary_logit(work, view.summary, attend_query(work, batch_row, head));
        attend_fold(&m, &l, logit * noise_factor(item, position), 1, &keep, &add);
    }
    if (lane == 0)
        attend_store_total(&work.noisy[row], (struct attend_total){m, l, l == 0 ? 0 : 1 / l, 0});
}

/* A warp a token and KV head. */
static __global__ void __launch_bounds__(32)
    statistics_entropy_kernel(const struct attend_work work, const struct attend_tile *ranges) {
    const struct attend_tile range = attend_load_tile(&ranges[blockIdx.x]);
    uint32_t kv_heads = work.batch.pool.layout.kv_heads, group = work.heads / kv_heads, token = blockIdx.z;
    uint32_t view_index = range.item * kv_heads + blockIdx.y, lane = threadIdx.x;
    if (token >= range.tokens || (attend_swept_needs(work, view_index) & STATISTIC_ENTROPY) == 0)
        return;
    const struct cuda_head_view view = work.batch.views[view_index];
    const struct kv_statistics *to = &work.batch.statistics[view_index];
    uint32_t batch_row = work.batch.items[range.item].first_row + range.token + token;
    uint32_t pieces = (view.slots + STATISTICS_PIECE - 1) / STATISTICS_PIECE;
    double sum = 0;
    for (uint32_t g = 0; g < group; g++) {
        uint32_t head = blockIdx.y * group + g;
        size_t row = (size_t)(range.scratch + token) * work.heads + head;
        double part = 0;
        for (uint32_t i = lane; i < pieces; i += 32)
            part -= (double)work.entropy_pieces[row * work.pieces + i];
        part = warp_sum(part);
        sum += part;
        if (view.summary == NULL)
            continue;
        const struct attend_total total = attend_load_total(&work.totals[(size_t)batch_row * work.heads + head]);
        float logit = attend_summary_logit(work, view.summary, attend_query(work, batch_row, head));
        float below = logit - total.m, p = exp2f(below) * total.inverse;
        if (p > 0)
            sum -= (double)(p * (below * ATTEND_LN_2 - logf(total.l)));
    }
    float mean = (float)(sum / group);
    if (lane == 0)
        to->entropy[view.first_slot + range.token + token] = __half_as_ushort(__float2half_rn(mean > 0 ? mean : 0));
}

/* A warp a row and KV head. */
static __global__ void __launch_bounds__(32) statistics_outputs_kernel(const struct attend_work work) {
    const struct cuda_row row = work.batch.rows[blockIdx.x];
    uint32_t kv_heads = work.batch.pool.layout.kv_heads, view_index = row.item * kv_heads + blockIdx.y;
    const struct kv_statistics *to = &work.batch.statistics[view_index];
    if ((to->needs & STATISTIC_OUTPUTS) == 0)
        return;
    const struct kv_item item = work.batch.items[row.item];
    if (row.token < first_counted(item, to->window, item.window_from))
        return;
    uint32_t numbers = work.heads / kv_heads * work.batch.pool.layout.head_dim;
    const float *from = work.out + ((size_t)(item.first_row + row.token) * kv_heads + blockIdx.y) * numbers;
    float *out = to->outputs + (size_t)((item.position + row.token) % to->window) * numbers;
#pragma unroll 4
    for (uint32_t i = threadIdx.x; i < numbers; i += 32)
        out[i] = from[i];
}

/* ---- launchers ---- */

template <enum sweep_source SOURCE, bool NOISE>
static void launch_sweep(const struct attend_work *work, const struct statistics_ranges *ranges, cudaStream_t stream) {
    const struct kv_layout *layout = &work->batch.pool.layout;
    dim3 grid(ranges->count, layout->kv_heads, (work->batch.slots_most + STATISTICS_SLOTS - 1) / STATISTICS_SLOTS);
    KERNEL_LAUNCH(statistics_sweep_kernel<SOURCE, NOISE>, grid, dim3(SWEEP_THREADS),
        sweep_bytes<SOURCE>(layout->head_dim), stream, *work, ranges->ranges, ranges->alone);
}

template <bool NOISE>
static void launch_any_sweep(
    const struct attend_work *work, const struct statistics_ranges *ranges, cudaStream_t stream) {
    if (ranges->kept)
        launch_sweep<SWEEP_KEPT, NOISE>(work, ranges, stream);
    else if (work->batch.pool.layout.format == KV_F16)
        launch_sweep<SWEEP_F16, NOISE>(work, ranges, stream);
    else
        launch_sweep<SWEEP_BF16, NOISE>(work, ranges, stream);
}

extern "C" void statistics_launch_noise(
    const struct attend_work *work, const struct statistics_ranges *ranges, cudaStream_t stream) {
    launch_any_sweep<true>(work, ranges, stream);
    KERNEL_LAUNCH(statistics_noise_kernel, dim3(ranges->count, work->heads, ranges->tokens_most), dim3(32), 0, stream,
        *work, ranges->ranges);
}

extern "C" void statistics_launch_sweep(
    const struct attend_work *work, const struct statistics_ranges *ranges, cudaStream_t stream) {
    launch_any_sweep<false>(work, ranges, stream);
}

extern "C" void statistics_launch_entropy(
    const struct attend_work *work, const struct statistics_ranges *ranges, cudaStream_t stream) {
    dim3 grid(ranges->count, work->batch.pool.layout.kv_heads, ranges->tokens_most);
    KERNEL_LAUNCH(statistics_entropy_kernel, grid, dim3(32), 0, stream, *work, ranges->ranges);
}

extern "C" void statistics_launch_outputs(const struct attend_work *work, cudaStream_t stream) {
    dim3 grid(work->batch.rows_count, work->batch.pool.layout.kv_heads);
    KERNEL_LAUNCH(statistics_outputs_kernel, grid, dim3(32), 0, stream, *work);
}
