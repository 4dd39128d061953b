/* SPDX-License-Identifier: Apache-2.0
 *
 * The whole path of attention (attend.h), for prefill on tensor cores: a block takes some tiles of one KV head, a warp
 * each, and goes through all chunks that one of them sees. K of a chunk comes while the chunk before is weighed, V
 * while logits are computed. A lane keeps o of its split and of its row: for a head_dim above 128 there is a block for
 * each 128 channels of the values, with the same logits.
 */
#include "cuda/attend.cuh"

enum {
    WHOLE_THREADS = ATTEND_WHOLE_TILES * 32,
    WHOLE_CHANNELS = 128, /* most channels of a block */
    SLICE_TILES = 2,      /* of 8 channels, that are weighed at a time */
};

/* ---- what a block reads ---- */

/* What is seldom needed of a row, kept out of registers. */
struct whole_row {
    int32_t limit; /* its position */
    uint32_t seen; /* slots so far */
};

/* Shared memory, in this order. */
struct whole_shared {
    char *queries;          /* of each warp's tile */
    char *keys;             /* [pages] */
    char *values;           /* [ATTEND_CHUNK] rows */
    int32_t *positions;     /* [2][ATTEND_CHUNK] in turns */
    uint32_t *numbers;      /* [2][ATTEND_CHUNK_PAGES] of pages, in turns */
    struct whole_row *rows; /* [warps][16] */
    uint32_t *seen;         /* bit p % 32 of word p / 32: some row of the block sees a slot of page p */
};

template <enum kv_format FORMAT> static size_t whole_bytes(uint32_t dim, uint32_t warps, uint32_t slots) {
    uint32_t channels = dim < WHOLE_CHANNELS ? dim : (uint32_t)WHOLE_CHANNELS;
    return (size_t)warps * attend_query_bytes<FORMAT>(dim) + ATTEND_CHUNK * 2 * (size_t)dim +
           ATTEND_CHUNK * (2 * (size_t)channels + 16) + 2 * (ATTEND_CHUNK + ATTEND_CHUNK_PAGES) * sizeof(int32_t) +
           (size_t)warps * ATTEND_TILE_ROWS * sizeof(struct whole_row) +
           (slots / (32 * KV_PAGE_SLOTS) + 1) * sizeof(uint32_t);
}

template <enum kv_format FORMAT>
static __device__ __forceinline__ struct whole_shared whole_place(char *shared, uint32_t dim) {
    uint32_t channels = dim < WHOLE_CHANNELS ? dim : (uint32_t)WHOLE_CHANNELS;
    struct whole_shared to;
    to.queries = shared;
    to.keys = to.queries + blockDim.x / 32 * attend_query_bytes<FORMAT>(dim);
    to.values = to.keys + ATTEND_CHUNK * 2 * dim;
    to.positions = (int32_t *)(to.values + ATTEND_CHUNK * (2 * channels + 16));
    to.numbers = (uint32_t *)(to.positions + 2 * ATTEND_CHUNK);
    to.rows = (struct whole_row *)(to.numbers + 2 * ATTEND_CHUNK_PAGES);
    to.seen = (uint32_t *)(to.rows + blockDim.x / 32 * ATTEND_TILE_ROWS);
    return to;
}

/* The pages of a chunk that are seen, as a mask. */
static __device__ __forceinline__ uint32_t whole_pages(const uint32_t *seen, uint32_t chunk) {
    uint32_t first = chunk * ATTEND_CHUNK_PAGES;
    return seen[first / 32] >> first % 32 & ((1u << ATTEND_CHUNK_PAGES) - 1);
}

/* A thread's page number of a chunk, of the first threads and of pages that are seen. */
static __device__ __forceinline__ uint32_t whole_number(const struct cuda_head_view &view, uint32_t chunk) {
    uint32_t page = chunk * ATTEND_CHUNK_PAGES + threadIdx.x;
    bool there = threadIdx.x < ATTEND_CHUNK_PAGES && page < (view.slots + KV_PAGE_SLOTS - 1) / KV_PAGE_SLOTS &&
                 page >= attend_first_page(view);
    return there ? view.pages[page] : 0;
}

/* Sets `seen`: a thread looks at a page. latest: position of the block's last row; span: attend_span_of_any. */
template <enum kv_format FORMAT>
static __device__ __forceinline__ void whole_find_seen(
    const struct attend_work &work, const struct cuda_head_view &view, int32_t latest, uint32_t span, uint32_t *seen) {
    uint32_t positions_at = 2 * attend_part_bytes<FORMAT>(work.batch.pool.layout.head_dim);
    uint32_t pages = (view.slots + KV_PAGE_SLOTS - 1) / KV_PAGE_SLOTS, lane = threadIdx.x % 32;
    for (uint32_t base = threadIdx.x / 32 * 32; base < pages; base += blockDim.x) {
        uint32_t page = base + lane;
        bool sees = false;
        if (page < pages && page >= attend_first_page(view)) {
            const int4 *positions = (const int4 *)(attend_page(work, view.pages[page]) + positions_at);
#pragma unroll
            for (uint32_t four = 0; four < 4; four++) {
                int4 p = positions[four];
                uint32_t slot = page * KV_PAGE_SLOTS + four * 4;
                sees = sees || (attend_sees(latest, p.x, span) && slot < view.slots) ||
                       (attend_sees(latest, p.y, span) && slot + 1 < view.slots) ||
                       (attend_sees(latest, p.z, span) && slot + 2 < view.slots) ||
                       (attend_sees(latest, p.w, span) && slot + 3 < view.slots);
            }
        }
        uint32_t any = __ballot_sync(ATTEND_ALL, sees);
        if (lane == 0)
            seen[base / 32] = any;
    }
}

/* The next chunk that is seen, from `from` on; `chunks`: there is none. */
static __device__ __forceinline__ uint32_t whole_next(const uint32_t *seen, uint32_t from, uint32_t chunks) {
    while (from < chunks) {
        uint32_t first = from * ATTEND_CHUNK_PAGES, left = seen[first / 32] >> first % 32;
        if (left != 0)
            return (first + (uint32_t)__ffs((int)left) - 1) / ATTEND_CHUNK_PAGES;
        from = (first / 32 + 1) * (32 / ATTEND_CHUNK_PAGES);
    }
    return chunks;
}

/* Asks for the keys and positions of a chunk's pages (a mask); turn: whose numbers and positions. */
template <enum kv_format FORMAT>
static __device__ __forceinline__ void whole_ask_keys(
    const struct attend_work &work, const struct whole_shared &to, uint32_t pages, uint32_t turn) {
    uint32_t dim = work.batch.pool.layout.head_dim, thread = threadIdx.x;
    for (uint32_t page = 0; page < ATTEND_CHUNK_PAGES; page++) {
        if ((pages >> page & 1) == 0)
            continue;
        const char *from = attend_page(work, to.numbers[turn * ATTEND_CHUNK_PAGES + page]);
        for (uint32_t piece = thread; piece < 2 * dim; piece += blockDim.x)
            attend_copy_keys(to.keys + page * 32 * dim, from, piece);
        if (thread < 4)
            device_copy_async_16(to.positions + turn * ATTEND_CHUNK + page * KV_PAGE_SLOTS + thread * 4,
                from + 2 * attend_part_bytes<FORMAT>(dim) + thread * 16);
    }
}

template <enum kv_format FORMAT>
static __device__ __forceinline__ void whole_ask_values(const struct attend_work &work, const struct whole_shared &to,
    uint32_t pages, uint32_t turn, uint32_t from_channel, uint32_t channels) {
    uint32_t dim = work.batch.pool.layout.head_dim;
    for (uint32_t page = 0; page < ATTEND_CHUNK_PAGES; page++) {
        if ((pages >> page & 1) == 0)
            continue;
        const char *from =
            attend_page(work, to.numbers[turn * ATTEND_CHUNK_PAGES + page]) + attend_part_bytes<FORMAT>(dim);
        char *values = to.values + page * KV_PAGE_SLOTS * attend_row_bytes(channels);
        for (uint32_t piece = threadIdx.x; piece < 2 * channels; piece += blockDim.x)
            attend_copy_values(values, from, dim, from_channel, channels, piece);
    }
}

/* ---- what a warp computes ---- */

/* Of the lane's two rows: a split's result so far, or a row's. */
template <uint32_t TILES> struct whole_sums {
    float m[2], l[2];
    float o[TILES][4];
};

template <uint32_t TILES> static __device__ __forceinline__ void whole_clear(struct whole_sums<TILES> &sums) {
#pragma unroll
    for (uint32_t row = 0; row < 2; row++) {
        sums.m[row] = -INFINITY;
        sums.l[row] = 0;
    }
#pragma unroll
    for (uint32_t i = 0; i < TILES * 4; i++)
        sums.o[i / 4][i % 4] = 0;
}

/* Weighs a chunk's values, some channels at a time, and folds them into its split. */
template <enum kv_format FORMAT, uint32_t TILES>
static __device__ __forceinline__ void whole_weigh(const char *values, uint32_t pages, uint32_t channels, uint32_t full,
    const float s[ATTEND_CHUNK_PAGES][2][4], const float m[2], const float l[2], struct whole_sums<TILES> &split) {
    uint32_t a[ATTEND_CHUNK_PAGES][attend_weight_terms<FORMAT>()][4], row_bytes = attend_row_bytes(channels);
    float keep[2], add[2];
#pragma unroll
    for (uint32_t page = 0; page < ATTEND_CHUNK_PAGES; page++)
        attend_pack_weights<FORMAT>(s[page], a[page]);
#pragma unroll
    for (uint32_t row = 0; row < 2; row++)
        attend_fold(&split.m[row], &split.l[row], m[row], l[row], &keep[row], &add[row]);
#pragma unroll
    for (uint32_t first = 0; first < TILES; first += SLICE_TILES) {
        float o[SLICE_TILES][4];
#pragma unroll
        for (uint32_t i = 0; i < SLICE_TILES * 4; i++)
            o[i / 4][i % 4] = 0;
#pragma unroll
        for (uint32_t page = 0; page < ATTEND_CHUNK_PAGES; page++) {
            if ((pages >> page & 1) == 0)
                continue;
#pragma unroll
            for (uint32_t tile = 0; tile < SLICE_TILES; tile += 2) {
                if ((first + tile) * 8 < channels)
                    attend_weigh<FORMAT>(values + page * KV_PAGE_SLOTS * row_bytes, (first + tile) * 8, channels,
                        a[page], full >> page & 1, o + tile);
            }
        }
#pragma unroll
        for (uint32_t i = 0; i < SLICE_TILES * 4; i++) {
            uint32_t row = i % 4 / 2;
            float *to = &split.o[first + i / 4][i % 4];
            *to = attend_fold_o(*to, keep[row], o[i / 4][i % 4], add[row]);
        }
    }
}

/* Folds a finished split into its row. */
template <uint32_t TILES>
static __device__ __forceinline__ void whole_end_split(
    struct whole_sums<TILES> &split, struct whole_sums<TILES> &total) {
    float keep[2], add[2];
#pragma unroll
    for (uint32_t row = 0; row < 2; row++)
        attend_fold(&total.m[row], &total.l[row], split.m[row], split.l[row], &keep[row], &add[row]);
#pragma unroll
    for (uint32_t i = 0; i < TILES * 4; i++) {
        uint32_t row = i % 4 / 2;
        total.o[i / 4][i % 4] = attend_fold_o(total.o[i / 4][i % 4], keep[row], split.o[i / 4][i % 4], add[row]);
    }
    whole_clear(split);
}

static __device__ __forceinline__ void whole_begin_rows(const struct attend_place &place, struct whole_row *rows) {
    uint32_t row = threadIdx.x % 32;
    if (row < ATTEND_TILE_ROWS)
        rows[row] = (struct whole_row){(int32_t)(place.position + (row < place.rows ? row / place.group : 0)), 0};
}

/* Counts the slots of a chunk that each row sees. */
static __device__ __forceinline__ void whole_count_seen(int2 positions, uint32_t span, struct whole_row *rows) {
    uint32_t lane = threadIdx.x % 32;
    for (uint32_t row = 0; row < ATTEND_TILE_ROWS; row++) {
        int32_t limit = rows[row].limit;
        uint32_t count = (uint32_t)(__popc(__ballot_sync(ATTEND_ALL, attend_sees(limit, positions.x, span))) +
                                    __popc(__ballot_sync(ATTEND_ALL, attend_sees(limit, positions.y, span))));
        if (lane == 0)
            rows[row].seen += count;
        __syncwarp();
    }
}

template <uint32_t TILES>
static __device__ __forceinline__ void whole_add_summary(const struct attend_work &work,
    const struct attend_place &place, const float *summary, uint32_t from, uint32_t channels,
    struct whole_sums<TILES> &total) {
    uint32_t lane = threadIdx.x % 32, dim = work.batch.pool.layout.head_dim;
    float logits[2] = {0, 0}, keep[2], add[2];
    for (uint32_t row = 0; row < place.rows; row++) {
        const float *query = attend_query(work, place.batch_row + row / place.group, place.head + row % place.group);
        float logit = attend_summary_logit(work, summary, query);
        logits[0] = row == lane / 4 ? logit : logits[0];
        logits[1] = row == lane / 4 + 8 ? logit : logits[1];
    }
#pragma unroll
    for (uint32_t row = 0; row < 2; row++)
        attend_fold(&total.m[row], &total.l[row], logits[row], 1, &keep[row], &add[row]);
#pragma unroll
    for (uint32_t i = 0; i < TILES * 4; i++) {
        uint32_t row = i % 4 / 2, channel = i / 4 * 8 + lane % 4 * 2 + i % 2;
        if (i / 4 * 8 < channels)
            total.o[i / 4][i % 4] =
                attend_fold_o(total.o[i / 4][i % 4], keep[row], summary[dim + from + channel], add[row]);
    }
}

template <uint32_t TILES>
static __device__ __forceinline__ void whole_store(const struct attend_work &work, const struct attend_place &place,
    uint32_t from, uint32_t channels, bool summary, const struct whole_row *rows,
    const struct whole_sums<TILES> &total) {
    uint32_t lane = threadIdx.x % 32, dim = work.batch.pool.layout.head_dim;
#pragma unroll
    for (uint32_t half = 0; half < 2; half++) {
        uint32_t row = lane / 4 + 8 * half;
        if (row >= place.rows)
            continue;
        size_t at = (size_t)(place.batch_row + row / place.group) * work.heads + place.head + row % place.group;
        float inverse = total.l[half] == 0 ? 0 : 1 / total.l[half];
        float *out = work.out + at * dim + from + lane % 4 * 2;
#pragma unroll
        for (uint32_t tile = 0; tile < TILES; tile++) {
            if (tile * 8 < channels)
                *(float2 *)(out + tile * 8) =
                    make_float2(total.o[tile][2 * half] * inverse, total.o[tile][2 * half + 1] * inverse);
        }
        if (lane % 4 == 0 && from == 0)
            attend_store_total(&work.totals[at],
                (struct attend_total){total.m[half], total.l[half], inverse, rows[row].seen + summary});
    }
}

/* ---- the kernel ---- */

/* The warp's part of a block's tile. */
static __device__ __forceinline__ struct attend_tile whole_tile(
    const struct attend_work &work, const struct attend_tile &block) {
    uint32_t most = attend_tile_tokens(work.heads / work.batch.pool.layout.kv_heads);
    uint32_t first = threadIdx.x / 32 * most;
    struct attend_tile own = {block.item, block.token + first, 0, 0};
    if (first < block.tokens)
        own.tokens = block.tokens - first < most ? block.tokens - first : most;
    return own;
}

/* TILES: of 8 channels, those of a block or more. */
template <enum kv_format FORMAT, uint32_t TILES>
static __global__ void __launch_bounds__(WHOLE_THREADS, 1)
    attend_whole_kernel(const struct attend_work work, const struct attend_tile *tiles) {
    KERNEL_SHARED(char, memory);
    uint32_t warp = threadIdx.x / 32, lane = threadIdx.x % 32, dim = work.batch.pool.layout.head_dim;
    const struct attend_tile block = attend_load_tile(&tiles[blockIdx.x]), own = whole_tile(work, block);
    const struct attend_place place = attend_place_of(work, own, blockIdx.y);
    const struct cuda_head_view view = work.batch.views[place.view];
    const struct whole_shared shared = whole_place<FORMAT>(memory, dim);
    uint32_t from = blockIdx.z * WHOLE_CHANNELS;
    uint32_t channels = dim - from < WHOLE_CHANNELS ? dim - from : (uint32_t)WHOLE_CHANNELS;
    uint32_t chunks = (view.slots + ATTEND_CHUNK - 1) / ATTEND_CHUNK;
    int32_t block_latest = (int32_t)(place.position - (own.token - block.token) + block.tokens - 1);
    struct whole_row *rows = shared.rows + warp * ATTEND_TILE_ROWS;
    whole_begin_rows(place, rows);
    uint32_t span = work.batch.span, later = own.tokens > 0 ? own.tokens - 1 : 0;
    whole_find_seen<FORMAT>(work, view, block_latest, attend_span_of_any(span, block.tokens - 1), shared.seen);
    char *queries = shared.queries + warp * attend_query_bytes<FORMAT>(dim);
    attend_store_queries<FORMAT>(work, place, lane, 32, queries);
    __syncthreads();

    struct whole_sums<TILES> split, total;
    whole_clear(split);
    whole_clear(total);
    uint32_t turn = 0, chunk = whole_next(shared.seen, 0, chunks);
    if (threadIdx.x < ATTEND_CHUNK_PAGES)
        shared.numbers[threadIdx.x] = whole_number(view, chunk);
    __syncthreads();
    if (chunk < chunks)
        whole_ask_keys<FORMAT>(work, shared, whole_pages(shared.seen, chunk), turn);
    device_copy_commit();
    while (chunk < chunks) {
        uint32_t pages = whole_pages(shared.seen, chunk);
        device_copy_wait<0>();
        __syncthreads(); /* keys are there, and nobody needs the values before */
        whole_ask_values<FORMAT>(work, shared, pages, turn, from, channels);
        device_copy_commit();
        uint32_t next = whole_next(shared.seen, chunk + 1, chunks), number = whole_number(view, next);
        const int32_t *own_positions = shared.positions + turn * ATTEND_CHUNK + lane / 8 * KV_PAGE_SLOTS;
        int2 positions = make_int2(KV_NO_POSITION, KV_NO_POSITION);
        if (pages >> lane / 8 & 1)
            positions = attend_positions((const char *)own_positions, chunk * ATTEND_CHUNK, view);
        int32_t earliest = rows[0].limit, latest = own.tokens > 0 ? earliest + (int32_t)later : -1;
        uint32_t any = attend_span_of_any(span, later);
        bool sees =
            __any_sync(ATTEND_ALL, attend_sees(latest, positions.x, any) || attend_sees(latest, positions.y, any));
        float s[ATTEND_CHUNK_PAGES][2][4], m[2], l[2];
        if (sees)
            attend_logits<FORMAT, ATTEND_CHUNK_PAGES>(queries, shared.keys, 32 * dim, pages, dim, s);
        turn ^= 1;
        if (threadIdx.x < ATTEND_CHUNK_PAGES)
            shared.numbers[turn * ATTEND_CHUNK_PAGES + threadIdx.x] = number;
        __syncthreads(); /* nobody needs the keys, and the next pages are known */
        if (next < chunks)
            whole_ask_keys<FORMAT>(work, shared, whole_pages(shared.seen, next), turn);
        device_copy_commit();
        struct attend_seen visible = attend_see(positions, rows[0].limit, attend_span_of_all(span, later));
        if (sees) {
            int32_t limits[2] = {rows[lane / 4].limit, rows[lane / 4 + 8].limit};
            attend_cap<ATTEND_CHUNK_PAGES>(work.batch.cap, work.batch.inverse_cap, s);
            attend_hide(visible, limits, span, s);
            attend_softmax(s, m, l);
            if (attend_swept_needs(work, place.view) & STATISTIC_ABOVE)
                whole_count_seen(positions, span, rows);
        }
        device_copy_wait<1>();
        __syncthreads(); /* values are there */
        if (sees)
            whole_weigh<FORMAT, TILES>(shared.values, pages, channels, visible.full, s, m, l, split);
        if (next / ATTEND_SPLIT_CHUNKS != chunk / ATTEND_SPLIT_CHUNKS || next >= chunks)
            whole_end_split(split, total);
        chunk = next;
    }
    /* Found anew, so that the loop need not keep it in registers. */
    const struct attend_place end =
        attend_place_of(work, whole_tile(work, attend_load_tile(&tiles[blockIdx.x])), blockIdx.y);
    const float *summary = work.batch.views[end.view].summary;
    if (summary != NULL)
        whole_add_summary(work, end, summary, from, channels, total);
    whole_store(work, end, from, channels, summary != NULL, rows, total);
}

/* ---- launchers ---- */

extern "C" uint32_t attend_whole_tiles(const struct kv_layout *layout, uint32_t slots, size_t shared_bytes) {
    uint32_t warps = ATTEND_WHOLE_TILES;
    while (
        warps > 1 && (layout->format == KV_F16 ? whole_bytes<KV_F16>(layout->head_dim, warps, slots)
                                               : whole_bytes<KV_BF16>(layout->head_dim, warps, slots)) > shared_bytes)
        warps--;
    return warps;
}

template <enum kv_format FORMAT>
static void launch_whole(const struct attend_work *work, const struct attend_tile *tiles, uint32_t count,
    uint32_t warps, cudaStream_t stream) {
    const struct kv_layout *layout = &work->batch.pool.layout;
    uint32_t dim = layout->head_dim, parts = attend_parts(work->heads / layout->kv_heads);
    dim3 grid(count, layout->kv_heads * parts, (dim + WHOLE_CHANNELS - 1) / WHOLE_CHANNELS);
    size_t bytes = whole_bytes<FORMAT>(dim, warps, work->batch.slots_most);
    if (dim <= 64)
        KERNEL_LAUNCH(attend_whole_kernel<FORMAT, 8>, grid, dim3(warps * 32), bytes, stream, *work, tiles);
    else
        KERNEL_LAUNCH(attend_whole_kernel<FORMAT, 16>, grid, dim3(warps * 32), bytes, stream, *work, tiles);
}

extern "C" void attend_launch_whole(const struct attend_work *work, const struct attend_tile *tiles, uint32_t count,
    uint32_t warps, cudaStream_t stream) {
    if (count == 0)
        return;
    if (work->batch.pool.layout.format == KV_F16)
        launch_whole<KV_F16>(work, tiles, count, warps, stream);
    else
        launch_whole<KV_BF16>(work, tiles, count, warps, stream);
}
