/* SPDX-License-Identifier: Apache-2.0
 *
 * The split path of attention (attend.h): a block takes one tile of rows and one split of slots, and leaves (m, l, o);
 * a second kernel folds the splits of a row. Lengths are read on the device: blocks beyond a view's end leave early.
 */
#include "cuda/attend.cuh"

enum {
    SPLIT_THREADS = 128, /* a warp a chunk */
    PLAIN_THREADS = ATTEND_SPLIT,
};

static __device__ __forceinline__ size_t scratch_row(
    const struct attend_work &work, const struct attend_tile &tile, const struct attend_place &place, uint32_t row) {
    return (size_t)(tile.scratch + row / place.group) * work.heads + place.head + row % place.group;
}

/* ---- tensor cores ---- */

/* A stage holds the keys or the values of a page; a warp has two. Later they hold o [16][dim + 8]. */
static __device__ __host__ __forceinline__ uint32_t stage_bytes(uint32_t dim) {
    return KV_PAGE_SLOTS * (dim * 2 + 16);
}

/* What a warp reads: the keys of its pages, then their values. */
struct page_queue {
    char *stages;
    uint32_t first, pages; /* of the chunk's pages the first that is there, and the end */
    uint32_t own;          /* number of page lane / 8 */
};

/* Asks for part i of the queue; past the end there is nothing, but still a group, so that waits count alike. */
template <enum kv_format FORMAT>
static __device__ __forceinline__ void queue_ask(
    const struct attend_work &work, const struct page_queue &queue, uint32_t i) {
    uint32_t dim = work.batch.pool.layout.head_dim, lane = threadIdx.x % 32;
    if (i < 2 * queue.pages) {
        bool keys = i < queue.pages;
        uint32_t number = __shfl_sync(ATTEND_ALL, queue.own, (int)(8 * (keys ? i : i - queue.pages)));
        const char *page = attend_page(work, number);
        char *to = queue.stages + i % 2 * stage_bytes(dim);
        bool gone = (keys ? i : i - queue.pages) < queue.first;
        for (uint32_t piece = lane; piece < 2 * dim && !gone; piece += 32) {
            if (keys)
                attend_copy_keys(to, page, piece);
            else
                attend_copy_values(to, page + attend_part_bytes<FORMAT>(dim), dim, 0, dim, piece);
        }
    }
    device_copy_commit();
}

/* When part i has come. */
static __device__ __forceinline__ const char *queue_wait(const struct page_queue &queue, uint32_t i, uint32_t dim) {
    device_copy_wait<1>();
    __syncwarp();
    return queue.stages + i % 2 * stage_bytes(dim);
}

/* Logits of a warp's chunk. */
template <enum kv_format FORMAT>
static __device__ __forceinline__ void chunk_logits(const struct attend_work &work, const struct page_queue &queue,
    const char *queries, float s[ATTEND_CHUNK_PAGES][2][4]) {
    uint32_t dim = work.batch.pool.layout.head_dim;
#pragma unroll
    for (uint32_t page = 0; page < ATTEND_CHUNK_PAGES; page++) {
        if (page < queue.pages && page >= queue.first) {
            const char *keys = queue_wait(queue, page, dim);
            attend_logits<FORMAT, 1>(queries, keys, 0, 1, dim, s + page);
            __syncwarp();
        } else {
#pragma unroll
            for (uint32_t i = 0; i < 8; i++)
                s[page][i / 4][i % 4] = -INFINITY;
        }
        if (page < queue.pages)
            queue_ask<FORMAT>(work, queue, page + 2);
    }
    attend_cap<ATTEND_CHUNK_PAGES>(work.batch.cap, work.batch.inverse_cap, s);
}

template <enum kv_format FORMAT, uint32_t TILES>
static __device__ __forceinline__ void chunk_weigh(const struct attend_work &work, const struct page_queue &queue,
    const float s[ATTEND_CHUNK_PAGES][2][4], uint32_t full, float o[TILES][4]) {
    uint32_t dim = work.batch.pool.layout.head_dim;
#pragma unroll
    for (uint32_t i = 0; i < TILES * 4; i++)
        o[i / 4][i % 4] = 0;
#pragma unroll
    for (uint32_t page = 0; page < ATTEND_CHUNK_PAGES; page++) {
        if (page >= queue.pages)
            continue;
        if (page < queue.first) {
            queue_ask<FORMAT>(work, queue, queue.pages + page + 2);
            continue;
        }
        const char *values = queue_wait(queue, queue.pages + page, dim);
        uint32_t a[attend_weight_terms<FORMAT>()][4];
        attend_pack_weights<FORMAT>(s[page], a);
#pragma unroll
        for (uint32_t tile = 0; tile < TILES; tile += 2) {
            if (tile * 8 < dim)
                attend_weigh<FORMAT>(values, tile * 8, dim, a, full >> page & 1, o + tile);
        }
        __syncwarp();
        queue_ask<FORMAT>(work, queue, queue.pages + page + 2);
    }
}

/* Logits of a warp's chunk for statistics; those of hidden slots mean nothing. */
static __device__ __forceinline__ void chunk_keep_scores(const struct attend_work &work, const struct attend_tile &tile,
    const struct attend_place &place, uint32_t chunk, uint32_t pages, const float s[ATTEND_CHUNK_PAGES][2][4]) {
    uint32_t lane = threadIdx.x % 32;
#pragma unroll
    for (uint32_t half = 0; half < 2; half++) {
        uint32_t row = lane / 4 + 8 * half;
        if (row >= place.rows)
            continue;
        float *scores = work.scores + scratch_row(work, tile, place, row) * work.splits * ATTEND_SPLIT +
                        chunk * ATTEND_CHUNK + lane % 4 * 2;
#pragma unroll
        for (uint32_t page = 0; page < ATTEND_CHUNK_PAGES; page++) {
            if (page >= pages)
                continue;
#pragma unroll
            for (uint32_t part = 0; part < 2; part++)
                *(float2 *)(scores + page * KV_PAGE_SLOTS + part * 8) =
                    make_float2(s[page][part][2 * half], s[page][part][2 * half + 1]);
        }
    }
}

/* What a warp leaves in its stages: o [16][dim + 8], so that four rows lie in different banks. */
template <uint32_t TILES>
static __device__ __forceinline__ void chunk_keep_outputs(
    float *to, const struct attend_place &place, uint32_t dim, const float o[TILES][4]) {
    uint32_t lane = threadIdx.x % 32;
#pragma unroll
    for (uint32_t tile = 0; tile < TILES; tile++) {
        if (tile * 8 >= dim)
            continue;
#pragma unroll
        for (uint32_t half = 0; half < 2; half++) {
            uint32_t row = lane / 4 + 8 * half;
            if (row < place.rows)
                *(float2 *)(to + row * (dim + 8) + tile * 8 + lane % 4 * 2) =
                    make_float2(o[tile][2 * half], o[tile][2 * half + 1]);
        }
    }
}

/* Slots of a chunk that each row sees. */
static __device__ __forceinline__ void chunk_count_seen(
    const struct attend_place &place, int2 positions, uint32_t tokens, uint32_t span, struct attend_total *totals) {
    uint32_t lane = threadIdx.x % 32;
    for (uint32_t token = 0; token < tokens; token++) {
        int32_t limit = (int32_t)(place.position + token);
        uint32_t seen = (uint32_t)(__popc(__ballot_sync(ATTEND_ALL, attend_sees(limit, positions.x, span))) +
                                   __popc(__ballot_sync(ATTEND_ALL, attend_sees(limit, positions.y, span))));
        if (lane < place.group)
            totals[token * place.group + lane].seen = seen;
    }
}

/* Folds the chunks of a split, by the whole block: totals [chunks][16], o in the warps' stages. */
static __device__ __forceinline__ void split_fold(const struct attend_work &work, const struct attend_tile &tile,
    const struct attend_place &place, uint32_t split, const struct attend_total *totals, const char *stages,
    uint32_t warp_bytes) {
    uint32_t dim = work.batch.pool.layout.head_dim, fours = dim / 4;
    for (uint32_t i = threadIdx.x; i < place.rows * fours; i += SPLIT_THREADS) {
        uint32_t row = i / fours, four = i % fours;
        struct attend_total total = {-INFINITY, 0, 0, 0};
        float4 o = make_float4(0, 0, 0, 0);
        for (uint32_t chunk = 0; chunk < ATTEND_SPLIT_CHUNKS; chunk++) {
            struct attend_total next = attend_load_total(&totals[chunk * ATTEND_TILE_ROWS + row]);
            total.seen += next.seen;
            if (next.l == 0)
                continue;
            float keep, add;
            attend_fold(&total.m, &total.l, next.m, next.l, &keep, &add);
            const float *from = (const float *)(stages + chunk * warp_bytes) + row * (dim + 8) + four * 4;
            float4 x = *(const float4 *)from;
            o.x = attend_fold_o(o.x, keep, x.x, add);
            o.y = attend_fold_o(o.y, keep, x.y, add);
            o.z = attend_fold_o(o.z, keep, x.z, add);
            o.w = attend_fold_o(o.w, keep, x.w, add);
        }
        size_t part = scratch_row(work, tile, place, row) * work.splits + split;
        ((float4 *)(work.outputs + part * dim))[four] = o;
        if (four == 0)
            attend_store_total(&work.parts[part], total);
    }
}

/* TILES: of 8 channels, dim / 8 or more. */
template <enum kv_format FORMAT, uint32_t TILES>
static __global__ void __launch_bounds__(SPLIT_THREADS)
    attend_split_kernel(const struct attend_work work, const struct attend_tile *tiles) {
    KERNEL_SHARED(char, shared);
    const struct attend_tile tile = attend_load_tile(&tiles[blockIdx.x]);
    const struct attend_place place = attend_place_of(work, tile, blockIdx.y);
    const struct cuda_head_view view = work.batch.views[place.view];
    uint32_t split = blockIdx.z, warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    if (split * ATTEND_SPLIT >= view.slots || split < view.from_slot / ATTEND_SPLIT)
        return;
    uint32_t dim = work.batch.pool.layout.head_dim, warp_bytes = 2 * stage_bytes(dim);
    char *stages = shared + attend_query_bytes<FORMAT>(dim);
    struct attend_total *totals = (struct attend_total *)(stages + ATTEND_SPLIT_CHUNKS * warp_bytes);
    uint32_t chunk = split * ATTEND_SPLIT_CHUNKS + warp, first_page = chunk * ATTEND_CHUNK_PAGES;
    uint32_t pages_end = (view.slots + KV_PAGE_SLOTS - 1) / KV_PAGE_SLOTS;
    uint32_t pages_gone = attend_first_page(view), span = work.batch.span;
    struct page_queue queue = {stages + warp * warp_bytes, 0, 0, 0};
    queue.first = pages_gone > first_page ? pages_gone - first_page : 0;
    if (first_page < pages_end && queue.first < ATTEND_CHUNK_PAGES)
        queue.pages =
            pages_end - first_page < ATTEND_CHUNK_PAGES ? pages_end - first_page : (uint32_t)ATTEND_CHUNK_PAGES;
    if (lane / 8 >= queue.first && lane / 8 < queue.pages)
        queue.own = view.pages[first_page + lane / 8];
    queue_ask<FORMAT>(work, queue, 0);
    queue_ask<FORMAT>(work, queue, 1);
    int2 positions =
        attend_positions(attend_page(work, queue.own) + 2 * attend_part_bytes<FORMAT>(dim), chunk * ATTEND_CHUNK, view);
    attend_store_queries<FORMAT>(work, place, threadIdx.x, SPLIT_THREADS, shared);
    __syncthreads();
    int32_t earliest = (int32_t)place.position, latest = (int32_t)(place.position + tile.tokens - 1);
    totals += warp * ATTEND_TILE_ROWS;
    if (lane < ATTEND_TILE_ROWS)
        totals[lane] = (struct attend_total){-INFINITY, 0, 0, 0};
    __syncwarp();
    uint32_t any = attend_span_of_any(span, tile.tokens - 1), all = attend_span_of_all(span, tile.tokens - 1);
    if (__any_sync(ATTEND_ALL, attend_sees(latest, positions.x, any) || attend_sees(latest, positions.y, any))) {
        float s[ATTEND_CHUNK_PAGES][2][4], o[TILES][4], m[2], l[2];
        int32_t limits[2];
        for (uint32_t half = 0; half < 2; half++) {
            uint32_t row = lane / 4 + 8 * half;
            limits[half] = earliest + (int32_t)(row < place.rows ? row / place.group : 0);
        }
        uint32_t needs = attend_swept_needs(work, place.view);
        struct attend_seen seen = attend_see(positions, earliest, all);
        chunk_logits<FORMAT>(work, queue, shared, s);
        attend_hide(seen, limits, span, s);
        if (needs != 0)
            chunk_keep_scores(work, tile, place, chunk, queue.pages, s);
        attend_softmax(s, m, l);
        chunk_weigh<FORMAT, TILES>(work, queue, s, seen.full, o);
        chunk_keep_outputs<TILES>((float *)queue.stages, place, dim, o);
        if (lane % 4 == 0) {
            for (uint32_t half = 0; half < 2; half++) {
                totals[lane / 4 + 8 * half].m = m[half];
                totals[lane / 4 + 8 * half].l = l[half];
            }
        }
        if (needs & STATISTIC_ABOVE)
            chunk_count_seen(place, positions, tile.tokens, span, totals);
    }
    device_copy_wait<0>();
    __syncthreads();
    split_fold(work, tile, place, split, totals - warp * ATTEND_TILE_ROWS, stages, warp_bytes);
}

/* ---- plain arithmetic: a thread a slot for logits, a thread a channel for outputs ---- */

template <enum kv_format FORMAT> static __device__ __forceinline__ float read_number(const char *from, uint32_t i) {
    if (FORMAT == KV_F32)
        return ((const float *)from)[i];
    return attend_widen<FORMAT>(((const uint16_t *)from)[i]);
}

/* Rows come in order of their tokens: a slot is seen by all rows from this one on. */
static __device__ __forceinline__ uint32_t first_row_that_sees(
    const struct attend_place &place, uint32_t tokens, int32_t position) {
    if (position <= (int32_t)place.position)
        return 0;
    uint32_t later = (uint32_t)position - place.position;
    return later >= tokens ? (uint32_t)ATTEND_TILE_ROWS : later * place.group;
}

/* And by none from this one on, where there is a window. */
static __device__ __forceinline__ uint32_t first_row_beyond(
    const struct attend_place &place, uint32_t tokens, int32_t position, uint32_t span) {
    int64_t token = (int64_t)position + span - place.position;
    if (span == ATTEND_SPAN_ALL || token >= tokens)
        return ATTEND_TILE_ROWS;
    return token > 0 ? (uint32_t)token * place.group : 0;
}

/* Logits of one slot with all rows; queries [dim][16]. */
template <enum kv_format FORMAT>
static __device__ __forceinline__ void plain_logits(const float *queries, const char *page, uint32_t place,
    uint32_t dim, float cap, float inverse, float s[ATTEND_TILE_ROWS]) {
#pragma unroll
    for (uint32_t row = 0; row < ATTEND_TILE_ROWS; row++)
        s[row] = 0;
#pragma unroll 4
    for (uint32_t channel = 0; channel < dim; channel++) {
        float key = read_number<FORMAT>(page, channel * KV_PAGE_SLOTS + place);
#pragma unroll
        for (uint32_t row = 0; row < ATTEND_TILE_ROWS; row += 4) {
            float4 query = *(const float4 *)(queries + channel * ATTEND_TILE_ROWS + row);
            s[row] = fmaf(query.x, key, s[row]);
            s[row + 1] = fmaf(query.y, key, s[row + 1]);
            s[row + 2] = fmaf(query.z, key, s[row + 2]);
            s[row + 3] = fmaf(query.w, key, s[row + 3]);
        }
    }
    if (cap != 0) {
#pragma unroll
        for (uint32_t row = 0; row < ATTEND_TILE_ROWS; row++)
            s[row] = attend_capped(s[row], cap, inverse);
    }
}

/* One row by one warp: p [ATTEND_SPLIT], logits before. */
static __device__ __forceinline__ void plain_softmax(float *p, struct attend_total *total) {
    uint32_t lane = threadIdx.x % 32;
    float s[ATTEND_SPLIT / 32], most = -INFINITY, sum = 0;
#pragma unroll
    for (uint32_t i = 0; i < ATTEND_SPLIT / 32; i++) {
        s[i] = p[i * 32 + lane];
        most = fmaxf(most, s[i]);
    }
    most = warp_most(most);
    float from = most == -INFINITY ? 0.0f : most;
#pragma unroll
    for (uint32_t i = 0; i < ATTEND_SPLIT / 32; i++) {
        s[i] = exp2f(s[i] - from);
        sum += s[i];
        p[i * 32 + lane] = s[i];
    }
    sum = warp_sum(sum);
    if (lane == 0) {
        total->m = most;
        total->l = sum;
    }
}

/* o of one channel over every `step`-th page from `first` on, but for those before `gone`. A p of 0 keeps what may be
 * NaN from the rows that do not see it. */
template <enum kv_format FORMAT>
static __device__ __forceinline__ void plain_weigh(const struct attend_work &work, const uint32_t *numbers,
    uint32_t pages, uint32_t gone, uint32_t first, uint32_t step, uint32_t channel, uint32_t rows, const float *p,
    float o[ATTEND_TILE_ROWS]) {
    uint32_t dim = work.batch.pool.layout.head_dim;
    for (uint32_t page = first; page < pages; page += step) {
        if (page < gone)
            continue;
        const char *values = attend_page(work, numbers[page]) + attend_part_bytes<FORMAT>(dim);
        for (uint32_t place = 0; place < KV_PAGE_SLOTS; place += 4) {
            float v[4];
#pragma unroll
            for (uint32_t i = 0; i < 4; i++)
                v[i] = read_number<FORMAT>(values, (place + i) * dim + channel);
#pragma unroll
            for (uint32_t row = 0; row < ATTEND_TILE_ROWS; row++) {
                if (row >= rows)
                    continue;
                float4 weight = *(const float4 *)(p + row * ATTEND_SPLIT + page * KV_PAGE_SLOTS + place);
                o[row] = weight.x != 0 ? fmaf(weight.x, v[0], o[row]) : o[row];
                o[row] = weight.y != 0 ? fmaf(weight.y, v[1], o[row]) : o[row];
                o[row] = weight.z != 0 ? fmaf(weight.z, v[2], o[row]) : o[row];
                o[row] = weight.w != 0 ? fmaf(weight.w, v[3], o[row]) : o[row];
            }
        }
    }
}

/* Bytes: queries [dim][16], later o [16][dim]; p [16][ATTEND_SPLIT]; totals [16]; page numbers; seen [warps][16]. */
static __device__ __host__ __forceinline__ uint32_t plain_bytes(uint32_t dim) {
    return ATTEND_TILE_ROWS * (dim + ATTEND_SPLIT) * 4 + ATTEND_TILE_ROWS * (uint32_t)sizeof(struct attend_total) +
           ATTEND_SPLIT / KV_PAGE_SLOTS * 4 + PLAIN_THREADS / 32 * ATTEND_TILE_ROWS * 4;
}

template <enum kv_format FORMAT>
static __global__ void __launch_bounds__(PLAIN_THREADS)
    attend_plain_kernel(const struct attend_work work, const struct attend_tile *tiles) {
    KERNEL_SHARED(float, queries);
    const struct attend_tile tile = attend_load_tile(&tiles[blockIdx.x]);
    const struct attend_place place = attend_place_of(work, tile, blockIdx.y);
    const struct cuda_head_view view = work.batch.views[place.view];
    uint32_t dim = work.batch.pool.layout.head_dim, thread = threadIdx.x, warp = thread / 32, lane = thread % 32;
    uint32_t split = blockIdx.z, first_slot = split * ATTEND_SPLIT, rows = place.rows;
    if (first_slot >= view.slots || split < view.from_slot / ATTEND_SPLIT)
        return;
    float *p = queries + ATTEND_TILE_ROWS * dim, *outputs = queries;
    struct attend_total *totals = (struct attend_total *)(p + ATTEND_TILE_ROWS * ATTEND_SPLIT);
    uint32_t *numbers = (uint32_t *)(totals + ATTEND_TILE_ROWS), *seen = numbers + ATTEND_SPLIT / KV_PAGE_SLOTS;
    uint32_t slots = view.slots - first_slot < ATTEND_SPLIT ? view.slots - first_slot : (uint32_t)ATTEND_SPLIT;
    uint32_t pages = (slots + KV_PAGE_SLOTS - 1) / KV_PAGE_SLOTS, span = work.batch.span;
    uint32_t slots_gone = view.from_slot > first_slot ? view.from_slot - first_slot : 0;
    uint32_t gone = slots_gone / KV_PAGE_SLOTS;
    if (thread >= gone && thread < pages)
        numbers[thread] = view.pages[first_slot / KV_PAGE_SLOTS + thread];
    float scale = work.batch.scale;
    for (uint32_t i = thread; i < ATTEND_TILE_ROWS * dim; i += PLAIN_THREADS) {
        uint32_t row = i % ATTEND_TILE_ROWS, channel = i / ATTEND_TILE_ROWS;
        queries[i] = row >= rows ? 0
                                 : attend_query(work, place.batch_row + row / place.group,
                                       place.head + row % place.group)[channel] *
                                       scale;
    }
    __syncthreads();

    int32_t position = KV_NO_POSITION;
    float s[ATTEND_TILE_ROWS] = {0};
    if (thread < slots && thread >= slots_gone) {
        const char *page = attend_page(work, numbers[thread / KV_PAGE_SLOTS]);
        position = ((const int32_t *)(page + 2 * attend_part_bytes<FORMAT>(dim)))[thread % KV_PAGE_SLOTS];
        plain_logits<FORMAT>(queries, page, thread % KV_PAGE_SLOTS, dim, work.batch.cap, work.batch.inverse_cap, s);
    }
    bool keep_scores = attend_swept_needs(work, place.view) != 0 && thread < slots;
    uint32_t first_row = first_row_that_sees(place, tile.tokens, position);
    uint32_t end_row = first_row_beyond(place, tile.tokens, position, span);
#pragma unroll
    for (uint32_t row = 0; row < ATTEND_TILE_ROWS; row++) {
        if (row >= rows)
            continue;
        p[row * ATTEND_SPLIT + thread] = row >= first_row && row < end_row ? s[row] : -INFINITY;
        if (keep_scores)
            work.scores[scratch_row(work, tile, place, row) * work.splits * ATTEND_SPLIT + first_slot + thread] =
                s[row];
    }
    for (uint32_t token = 0; token < tile.tokens; token++) {
        uint32_t sees = __ballot_sync(ATTEND_ALL, attend_sees((int32_t)(place.position + token), position, span));
        if (lane == 0)
            seen[warp * ATTEND_TILE_ROWS + token] = (uint32_t)__popc(sees);
    }
    __syncthreads();
    for (uint32_t row = warp; row < rows; row += PLAIN_THREADS / 32)
        plain_softmax(p + row * ATTEND_SPLIT, &totals[row]);
    __syncthreads();

    uint32_t columns = (dim + 31) / 32 * 32, teams = PLAIN_THREADS / columns;
    uint32_t team = thread / columns, channel = thread % columns;
    bool works = team < teams && channel < dim;
    float o[ATTEND_TILE_ROWS] = {0};
    if (works)
        plain_weigh<FORMAT>(work, numbers, pages, gone, team, teams, channel, rows, p, o);
    for (uint32_t turn = 0; turn < teams; turn++) {
#pragma unroll
        for (uint32_t row = 0; row < ATTEND_TILE_ROWS; row++) {
            if (works && team == turn && row < rows)
                outputs[row * dim + channel] = turn == 0 ? o[row] : outputs[row * dim + channel] + o[row];
        }
        __syncthreads();
    }
    for (uint32_t row = warp; row < rows; row += PLAIN_THREADS / 32) {
        size_t part = scratch_row(work, tile, place, row) * work.splits + split;
        for (uint32_t i = lane; i < dim; i += 32)
            work.outputs[part * dim + i] = outputs[row * dim + i];
        if (lane == 0) {
            uint32_t sees = 0;
            for (uint32_t other = 0; other < PLAIN_THREADS / 32; other++)
                sees += seen[other * ATTEND_TILE_ROWS + row / place.group];
            attend_store_total(&work.parts[part], (struct attend_total){totals[row].m, totals[row].l, 0, sees});
        }
    }
}

/* ---- merging ---- */

/* A warp a row; a lane has the channels 2 lane and 2 lane + 1 of each 64, PAIRS times. Of each 32 splits it holds the m
 * and l of one. Outputs of AHEAD splits are under way at a time. */
template <uint32_t PAIRS, uint32_t AHEAD>
static __global__ void __launch_bounds__(32)
    attend_merge_kernel(const struct attend_work work, const struct attend_tile *tiles) {
    const struct attend_tile tile = attend_load_tile(&tiles[blockIdx.x]);
    uint32_t head = blockIdx.y, token = blockIdx.z, lane = threadIdx.x;
    if (token >= tile.tokens)
        return;
    uint32_t dim = work.batch.pool.layout.head_dim, kv_heads = work.batch.pool.layout.kv_heads;
    const struct cuda_head_view *view =
        &work.batch.views[(size_t)tile.item * kv_heads + head / (work.heads / kv_heads)];
    const uint4 counts = *(const uint4 *)&view->slots; /* slots, first_slot, from_slot: by one access */
    uint32_t splits = (counts.x + ATTEND_SPLIT - 1) / ATTEND_SPLIT, seen = 0;
    uint32_t batch_row = work.batch.items[tile.item].first_row + tile.token + token;
    size_t first = ((size_t)(tile.scratch + token) * work.heads + head) * work.splits;
    float m = -INFINITY, l = 0, keep, add;
    float2 o[PAIRS];
#pragma unroll
    for (uint32_t pair = 0; pair < PAIRS; pair++)
        o[pair] = make_float2(0, 0);
    for (uint32_t base = counts.z / ATTEND_SPLIT; base < splits; base += 32) {
        struct attend_total mine = {-INFINITY, 0, 0, 0};
        if (base + lane < splits)
            mine = attend_load_total(&work.parts[first + base + lane]);
        seen += mine.seen;
        uint32_t count = splits - base < 32 ? splits - base : 32;
        for (uint32_t i = 0; i < count; i += AHEAD) {
            float2 next[AHEAD][PAIRS];
            float next_l[AHEAD];
#pragma unroll
            for (uint32_t ahead = 0; ahead < AHEAD; ahead++) {
                next_l[ahead] = __shfl_sync(ATTEND_ALL, mine.l, (int)(i + ahead));
#pragma unroll
                for (uint32_t pair = 0; pair < PAIRS; pair++) {
                    next[ahead][pair] = make_float2(0, 0);
                    if (next_l[ahead] != 0 && 64 * pair + 2 * lane < dim)
                        next[ahead][pair] =
                            ((const float2 *)(work.outputs + (first + base + i + ahead) * dim))[32 * pair + lane];
                }
            }
#pragma unroll
            for (uint32_t ahead = 0; ahead < AHEAD; ahead++) {
                float next_m = __shfl_sync(ATTEND_ALL, mine.m, (int)(i + ahead));
                if (next_l[ahead] == 0)
                    continue;
                attend_fold(&m, &l, next_m, next_l[ahead], &keep, &add);
#pragma unroll
                for (uint32_t pair = 0; pair < PAIRS; pair++) {
                    o[pair].x = attend_fold_o(o[pair].x, keep, next[ahead][pair].x, add);
                    o[pair].y = attend_fold_o(o[pair].y, keep, next[ahead][pair].y, add);
                }
            }
        }
    }
    seen = warp_sum(seen);
    const float *summary = view->summary;
    if (summary != NULL) {
        float logit = attend_summary_logit(work, summary, attend_query(work, batch_row, head));
        attend_fold(&m, &l, logit, 1, &keep, &add);
        seen++;
#pragma unroll
        for (uint32_t pair = 0; pair < PAIRS; pair++) {
            uint32_t channel = 64 * pair + 2 * lane;
            if (channel < dim) {
                o[pair].x = attend_fold_o(o[pair].x, keep, summary[dim + channel], add);
                o[pair].y = attend_fold_o(o[pair].y, keep, summary[dim + channel + 1], add);
            }
        }
    }
    size_t row = (size_t)batch_row * work.heads + head;
    float inverse = l == 0 ? 0 : 1 / l;
#pragma unroll
    for (uint32_t pair = 0; pair < PAIRS; pair++) {
        if (64 * pair + 2 * lane < dim)
            ((float2 *)(work.out + row * dim))[32 * pair + lane] =
                make_float2(o[pair].x * inverse, o[pair].y * inverse);
    }
    if (lane == 0)
        attend_store_total(&work.totals[row], (struct attend_total){m, l, inverse, seen});
}

/* ---- launchers ---- */

template <enum kv_format FORMAT>
static void launch_split(
    const struct attend_work *work, const struct attend_tile *tiles, dim3 grid, cudaStream_t stream) {
    uint32_t dim = work->batch.pool.layout.head_dim;
    size_t bytes = attend_query_bytes<FORMAT>(dim) + ATTEND_SPLIT_CHUNKS * 2 * stage_bytes(dim) +
                   ATTEND_SPLIT_CHUNKS * ATTEND_TILE_ROWS * sizeof(struct attend_total);
    if (dim <= 64)
        KERNEL_LAUNCH(attend_split_kernel<FORMAT, 8>, grid, dim3(SPLIT_THREADS), bytes, stream, *work, tiles);
    else if (dim <= 128)
        KERNEL_LAUNCH(attend_split_kernel<FORMAT, 16>, grid, dim3(SPLIT_THREADS), bytes, stream, *work, tiles);
    else
        KERNEL_LAUNCH(attend_split_kernel<FORMAT, 32>, grid, dim3(SPLIT_THREADS), bytes, stream, *work, tiles);
}

extern "C" void attend_launch_splits(
    const struct attend_work *work, const struct attend_tile *tiles, uint32_t count, cudaStream_t stream) {
    const struct kv_layout *layout = &work->batch.pool.layout;
    uint32_t parts = attend_parts(work->heads / layout->kv_heads);
    dim3 grid(count, layout->kv_heads * parts, (work->batch.slots_most + ATTEND_SPLIT - 1) / ATTEND_SPLIT);
    size_t bytes = plain_bytes(layout->head_dim);
    if (count == 0)
        return;
    if (attend_has_tensor_cores(layout) && layout->format == KV_F16)
        launch_split<KV_F16>(work, tiles, grid, stream);
    else if (attend_has_tensor_cores(layout))
        launch_split<KV_BF16>(work, tiles, grid, stream);
    else if (layout->format == KV_F16)
        KERNEL_LAUNCH(attend_plain_kernel<KV_F16>, grid, dim3(PLAIN_THREADS), bytes, stream, *work, tiles);
    else if (layout->format == KV_BF16)
        KERNEL_LAUNCH(attend_plain_kernel<KV_BF16>, grid, dim3(PLAIN_THREADS), bytes, stream, *work, tiles);
    else
        KERNEL_LAUNCH(attend_plain_kernel<KV_F32>, grid, dim3(PLAIN_THREADS), bytes, stream, *work, tiles);
}

extern "C" void attend_launch_merge(
    const struct attend_work *work, const struct attend_tile *tiles, uint32_t count, cudaStream_t stream) {
    const struct kv_layout *layout = &work->batch.pool.layout;
    dim3 grid(count, work->heads, attend_tile_tokens(work->heads / layout->kv_heads));
    if (count == 0)
        return;
    if (layout->head_dim <= 64)
        KERNEL_LAUNCH(attend_merge_kernel<1, 16>, grid, dim3(32), 0, stream, *work, tiles);
    else if (layout->head_dim <= 128)
        KERNEL_LAUNCH(attend_merge_kernel<2, 16>, grid, dim3(32), 0, stream, *work, tiles);
    else
        KERNEL_LAUNCH(attend_merge_kernel<4, 8>, grid, dim3(32), 0, stream, *work, tiles);
}
