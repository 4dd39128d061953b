/* SPDX-License-Identifier: Apache-2.0
 *
 * A pair (a, b) turns to (a cos - b sin, b cos + a sin): one product, one multiply-add, as the CPU does it.
 */
#include "cuda/device.h"

#include "cuda/pages.cuh"
#include "cuda/rope.h"

enum { THREADS = 256, TILE = KV_PAGE_SLOTS };

static __device__ float2 turn_compute(const struct rope_turns &turns, uint32_t position, uint32_t pair) {
    double sine, cosine;
    sincos((double)position * (double)turns.inverse_freq[pair], &sine, &cosine);
    return make_float2((float)cosine, (float)sine);
}

static __device__ __forceinline__ float2 turn_get(const struct rope_turns &turns, uint32_t position, uint32_t pair) {
    if (position < turns.count)
        return ((const float2 *)turns.table)[(size_t)position * turns.pairs + pair];
    return turn_compute(turns, position, pair);
}

static __device__ __forceinline__ float2 turned(float2 x, float2 turn) {
    return make_float2(fmaf(x.y, -turn.y, x.x * turn.x), fmaf(x.x, turn.y, x.y * turn.x));
}

static __global__ void __launch_bounds__(THREADS)
    fill_turns(struct rope_turns turns, float2 *table, uint32_t first, uint32_t end) {
    uint64_t at = (uint64_t)blockIdx.x * THREADS + threadIdx.x + (uint64_t)first * turns.pairs;
    if (at < (uint64_t)end * turns.pairs)
        table[at] = turn_compute(turns, (uint32_t)(at / turns.pairs), (uint32_t)(at % turns.pairs));
}

void launch_rope_turns(const struct rope_turns *turns, uint32_t first, uint32_t end, cudaStream_t stream) {
    uint64_t count = (uint64_t)(end - first) * turns->pairs;
    if (count > 0)
        KERNEL_LAUNCH(fill_turns, (uint32_t)((count + THREADS - 1) / THREADS), THREADS, 0, stream, *turns,
            (float2 *)turns->table, first, end);
}

/* ---- appending ---- */

enum { APPEND_THREADS = 128, WARPS = APPEND_THREADS / 32, PART_HEADS = 16, KEY_HEADS_MOST = 4 };

/* What a batch's blocks are: first those that rotate queries, a warp for each row and part of the query heads; then one
 * for each item, tile of tokens and part of the KV heads. */
struct append_plan {
    uint32_t heads, query_parts, part_heads; /* parts of the query heads, heads of a part */
    uint32_t tiles;                          /* of an item, at most */
    uint32_t key_parts, key_heads;           /* parts of the KV heads, heads of a part */
    uint32_t query_blocks;
    uint32_t stride; /* of a token in shared memory, in floats */
};

/* A lane has a pair of channels and all heads of its part, so that it reads the turn once. */
static __device__ void rotate_queries(const struct cuda_batch &batch, const struct rope_turns &turns,
    const struct append_plan &plan, uint32_t job, float *qkv) {
    uint32_t dim = batch.pool.layout.head_dim, half = dim / 2, kv_heads = batch.pool.layout.kv_heads;
    uint32_t number = job / plan.query_parts, first = job % plan.query_parts * plan.part_heads;
    if (number >= batch.rows_count)
        return;
    struct cuda_row row = batch.rows[number];
    uint32_t position = batch.items[row.item].position + row.token, at = batch.items[row.item].first_row + row.token;
    uint32_t end = first + plan.part_heads < plan.heads ? first + plan.part_heads : plan.heads;
    float2 *queries = (float2 *)(qkv + (size_t)at * (plan.heads + 2 * kv_heads) * dim);
    for (uint32_t pair = threadIdx.x % 32; pair < turns.pairs; pair += 32) {
        float2 turn = turn_get(turns, position, pair);
#pragma unroll 8
        for (uint32_t head = first; head < end; head++)
            queries[(size_t)head * half + pair] = turned(queries[(size_t)head * half + pair], turn);
    }
}

/* Tokens of one tile, for some KV heads; then the rotated keys, [KV head][TILE][stride]. */
struct append_tile {
    char *pages[KEY_HEADS_MOST][2];  /* of the tile's tokens, in each head */
    uint32_t places[KEY_HEADS_MOST]; /* of the first token in the first page */
    uint32_t first, count;           /* tokens of the item */
    uint32_t row, position;          /* of the first */
};

/* Tiles begin where pages of the item's first head do; heads of an item mostly agree in that. By the first warp. */
static __device__ void find_tile(const struct cuda_batch &batch, const struct append_plan &plan, uint32_t item_number,
    uint32_t tile_number, uint32_t first_head, uint32_t heads, struct append_tile *tile) {
    const struct cuda_head_view *views = batch.views + (size_t)item_number * batch.pool.layout.kv_heads;
    uint32_t before = views[0].first_slot % KV_PAGE_SLOTS, rows = batch.items[item_number].rows;
    uint32_t first = tile_number == 0 ? 0 : tile_number * TILE - before, end = (tile_number + 1) * TILE - before;
    end = end < rows ? end : rows;
    if (threadIdx.x == 0) {
        tile->first = first;
        tile->count = first < end ? end - first : 0;
        tile->row = batch.items[item_number].first_row + first;
        tile->position = batch.items[item_number].position + first;
    }
    if (threadIdx.x < heads && first < end) {
        const struct cuda_head_view &view = views[first_head + threadIdx.x];
        uint32_t slot = view.first_slot + first, page = slot / KV_PAGE_SLOTS;
        uint32_t last = (slot + end - first - 1) / KV_PAGE_SLOTS;
        tile->places[threadIdx.x] = slot % KV_PAGE_SLOTS;
        tile->pages[threadIdx.x][0] = page_at(batch.pool, view.pages[page]);
        tile->pages[threadIdx.x][1] = last > page ? page_at(batch.pool, view.pages[last]) : NULL;
    }
}

/* Keys go to shared memory, values and positions to their pages. */
static __device__ void append_values(const struct cuda_batch &batch, const struct rope_turns &turns,
    const struct append_plan &plan, const struct append_tile *tile, uint32_t first_head, uint32_t heads,
    const float *qkv, float *keys) {
    const struct kv_layout &layout = batch.pool.layout;
    uint32_t dim = layout.head_dim, half = dim / 2, row_stride = (plan.heads + 2 * layout.kv_heads) * half;
    const float2 *row = (const float2 *)qkv + (size_t)tile->row * row_stride + (plan.heads + first_head) * half;
    for (uint32_t i = threadIdx.x; i < tile->count * half; i += APPEND_THREADS) {
        uint32_t token = i / half, pair = i % half;
        const float2 *from = row + (size_t)token * row_stride + pair;
        bool turns_here = pair < turns.pairs;
        float2 turn = turns_here ? turn_get(turns, tile->position + token, pair) : make_float2(1, 0);
        for (uint32_t head = 0; head < heads; head++) {
            float2 key = from[head * half], value = from[(layout.kv_heads + head) * half];
            uint32_t place = tile->places[head] + token;
            char *page = tile->pages[head][place / KV_PAGE_SLOTS];
            *(float2 *)(keys + (head * TILE + token) * plan.stride + 2 * pair) = turns_here ? turned(key, turn) : key;
            number_store_pair(
                layout.format, page_values(layout, page), place % KV_PAGE_SLOTS * dim + 2 * pair, value.x, value.y);
        }
    }
    for (uint32_t i = threadIdx.x; i < tile->count * heads; i += APPEND_THREADS) {
        uint32_t head = i / tile->count, token = i % tile->count, place = tile->places[head] + token;
        page_positions(layout, tile->pages[head][place / KV_PAGE_SLOTS])[place % KV_PAGE_SLOTS] =
            (int32_t)(tile->position + token);
    }
}

/* A whole page of keys: sixteen bytes, that is 8 or 4 slots of one channel, a thread at a time. */
static __device__ void store_keys_page(const struct kv_layout &layout, const float *keys, uint32_t stride, char *page) {
    uint32_t each = 16 / number_bytes(layout.format), parts = KV_PAGE_SLOTS / each;
    for (uint32_t i = threadIdx.x; i < layout.head_dim * parts; i += APPEND_THREADS) {
        const float *from = keys + i % parts * each * stride + i / parts;
        uint32_t words[4];
#pragma unroll
        for (uint32_t w = 0; w < 4; w++) {
            if (layout.format == KV_F32)
                words[w] = __float_as_uint(from[w * stride]);
            else
                words[w] = narrow_bits(layout.format, from[2 * w * stride]) |
                           (uint32_t)narrow_bits(layout.format, from[(2 * w + 1) * stride]) << 16;
        }
        ((uint4 *)page)[i] = make_uint4(words[0], words[1], words[2], words[3]);
    }
}

static __device__ void store_keys(
    const struct kv_layout &layout, const struct append_tile *tile, uint32_t head, const float *keys, uint32_t stride) {
    uint32_t first = tile->places[head], count = tile->count;
    if (count == TILE && first == 0) {
        store_keys_page(layout, keys, stride, tile->pages[head][0]);
        return;
    }
    for (uint32_t i = threadIdx.x; i < count * layout.head_dim; i += APPEND_THREADS) {
        uint32_t token = i % count, channel = i / count, place = first + token;
        number_store(layout.format, tile->pages[head][place / KV_PAGE_SLOTS],
            (size_t)channel * KV_PAGE_SLOTS + place % KV_PAGE_SLOTS, keys[token * stride + channel]);
    }
}

static __device__ void append_tile(const struct cuda_batch &batch, const struct rope_turns &turns,
    const struct append_plan &plan, uint32_t block, const float *qkv, struct append_tile *tile) {
    uint32_t kv_heads = batch.pool.layout.kv_heads, first_head = block % plan.key_parts * plan.key_heads;
    uint32_t heads = first_head + plan.key_heads < kv_heads ? plan.key_heads : kv_heads - first_head;
    float *keys = (float *)(tile + 1);
    if (threadIdx.x < 32)
        find_tile(batch, plan, block / plan.key_parts / plan.tiles, block / plan.key_parts % plan.tiles, first_head,
            heads, tile);
    __syncthreads();
    if (tile->count == 0)
        return;
    append_values(batch, turns, plan, tile, first_head, heads, qkv, keys);
    __syncthreads();
    for (uint32_t head = 0; head < heads; head++)
        store_keys(batch.pool.layout, tile, head, keys + head * TILE * plan.stride, plan.stride);
}

static __global__ void __launch_bounds__(APPEND_THREADS)
    rope_append(struct cuda_batch batch, struct rope_turns turns, struct append_plan plan, float *qkv) {
    KERNEL_SHARED(struct append_tile, tile);
    if (blockIdx.x < plan.query_blocks)
        rotate_queries(batch, turns, plan, blockIdx.x * WARPS + threadIdx.x / 32, qkv);
    else
        append_tile(batch, turns, plan, blockIdx.x - plan.query_blocks, qkv, tile);
}

static uint32_t parts_of(uint32_t count, uint32_t each) {
    return (count + each - 1) / each;
}

/* Few rows: many blocks of few heads, since nothing else fills the device. Many rows: turns are read once for several
 * heads. The stride is 2 modulo 8: sixteen tokens of a channel, and two channels, lie in different banks. */
void launch_rope_append(
    const struct cuda_batch *batch, const struct rope_turns *turns, uint32_t heads, float *qkv, cudaStream_t stream) {
    uint32_t dim = batch->pool.layout.head_dim, kv_heads = batch->pool.layout.kv_heads;
    uint32_t most = batch->rows_count < 64 ? 1 : dim > 128 ? 2 : (uint32_t)KEY_HEADS_MOST;
    struct append_plan plan;
    plan.heads = heads;
    plan.query_parts = parts_of(heads, batch->rows_count < 64 ? PART_HEADS / 2 : PART_HEADS);
    plan.part_heads = parts_of(heads, plan.query_parts);
    plan.query_blocks = parts_of(batch->rows_count * plan.query_parts, WARPS);
    plan.tiles = (batch->rows_most + TILE - 2) / TILE + 1;
    plan.key_parts = parts_of(kv_heads, most);
    plan.key_heads = parts_of(kv_heads, plan.key_parts);
    plan.stride = (dim + 13) / 8 * 8 + 2;
    uint32_t blocks = plan.query_blocks + batch->items_count * plan.tiles * plan.key_parts;
    size_t shared = sizeof(struct append_tile) + (size_t)plan.key_heads * TILE * plan.stride * sizeof(float);
    KERNEL_LAUNCH(rope_append, blocks, APPEND_THREADS, shared, stream, *batch, *turns, plan, qkv);
}

/* ---- keys in the cache ---- */

/* SLOT_TILE slots of the list are turned by a block, in shared memory [SLOT_TILE][stride]: there a lane has a pair of
 * channels, so that keys and turns are read in a row; in pages a lane has a slot, since neighbours share the sectors of
 * a channel. */
enum { SLOT_TILE = 16 };

static_assert(THREADS % SLOT_TILE == 0, "a thread keeps its slot");

/* 2 modulo 8, as that of launch_rope_append. */
static __device__ __host__ __forceinline__ uint32_t slot_stride(uint32_t dim) {
    return (dim + 13) / 8 * 8 + 2;
}

static __device__ __forceinline__ uint32_t slots_of_block(uint32_t count) {
    uint32_t left = count - blockIdx.x * SLOT_TILE;
    return left < SLOT_TILE ? left : (uint32_t)SLOT_TILE;
}

static __global__ void __launch_bounds__(THREADS) rotate_slots(struct kv_pool pool, struct rope_turns turns,
    const struct slot_address *slots, const uint32_t *to, const float *keys, uint32_t count) {
    KERNEL_SHARED(float, tile);
    uint32_t dim = pool.layout.head_dim, half = dim / 2, stride = slot_stride(dim), some = slots_of_block(count);
    size_t first = (size_t)blockIdx.x * SLOT_TILE;
    for (uint32_t i = threadIdx.x; i < some * half; i += THREADS) {
        uint32_t slot = i / half, pair = i % half;
        float2 key = ((const float2 *)keys)[(first + slot) * half + pair];
        if (pair < turns.pairs)
            key = turned(key, turn_get(turns, to[first + slot], pair));
        *(float2 *)(tile + slot * stride + 2 * pair) = key;
    }
    __syncthreads();
    uint32_t own = threadIdx.x % SLOT_TILE;
    if (own >= some)
        return;
    struct slot_address slot = slots[first + own];
    char *page = page_at(pool, slot.page);
    for (uint32_t channel = threadIdx.x / SLOT_TILE; channel < dim; channel += THREADS / SLOT_TILE)
        number_store(
            pool.layout.format, page, (size_t)channel * KV_PAGE_SLOTS + slot.place, tile[own * stride + channel]);
}

/* What the pages hold, 0 of empty slots, and the positions. */
static __device__ __forceinline__ void load_slots(
    const struct kv_pool &pool, const struct slot_address *slots, uint32_t some, float *tile, int32_t *positions) {
    uint32_t dim = pool.layout.head_dim, stride = slot_stride(dim), own = threadIdx.x % SLOT_TILE;
    if (own >= some)
        return;
    struct slot_address slot = slots[own];
    char *page = page_at(pool, slot.page);
    int32_t position = page_positions(pool.layout, page)[slot.place];
    if (threadIdx.x < SLOT_TILE)
        positions[own] = position;
    for (uint32_t channel = threadIdx.x / SLOT_TILE; channel < dim; channel += THREADS / SLOT_TILE) {
        float number = 0;
        if (position != KV_NO_POSITION)
            number = number_load(pool.layout.format, page, (size_t)channel * KV_PAGE_SLOTS + slot.place);
        tile[own * stride + channel] = number;
    }
}

static __global__ void __launch_bounds__(THREADS) unrotate_slots(
    struct kv_pool pool, struct rope_turns turns, const struct slot_address *slots, uint32_t count, float *keys) {
    KERNEL_SHARED(float, tile);
    uint32_t dim = pool.layout.head_dim, half = dim / 2, stride = slot_stride(dim), some = slots_of_block(count);
    int32_t *positions = (int32_t *)(tile + SLOT_TILE * stride); /* [SLOT_TILE] */
    size_t first = (size_t)blockIdx.x * SLOT_TILE;
    load_slots(pool, slots + first, some, tile, positions);
    __syncthreads();
    for (uint32_t i = threadIdx.x; i < some * half; i += THREADS) {
        uint32_t slot = i / half, pair = i % half;
        float2 key = *(const float2 *)(tile + slot * stride + 2 * pair);
        if (positions[slot] != KV_NO_POSITION && pair < turns.pairs) {
            float2 turn = turn_get(turns, (uint32_t)positions[slot], pair);
            key = turned(key, make_float2(turn.x, -turn.y));
        }
        ((float2 *)keys)[(first + slot) * half + pair] = key;
    }
}

static size_t tile_bytes(uint32_t dim) {
    return SLOT_TILE * (slot_stride(dim) * sizeof(float) + sizeof(int32_t));
}

void launch_rotate_slots(const struct kv_pool *pool, const struct rope_turns *turns, const struct slot_address *slots,
    const uint32_t *to, const float *keys, uint32_t count, cudaStream_t stream) {
    if (count > 0)
        KERNEL_LAUNCH(rotate_slots, parts_of(count, SLOT_TILE), THREADS, tile_bytes(pool->layout.head_dim), stream,
            *pool, *turns, slots, to, keys, count);
}

void launch_unrotate_slots(const struct kv_pool *pool, const struct rope_turns *turns, const struct slot_address *slots,
    uint32_t count, float *keys, cudaStream_t stream) {
    if (count > 0)
        KERNEL_LAUNCH(unrotate_slots, parts_of(count, SLOT_TILE), THREADS, tile_bytes(pool->layout.head_dim), stream,
            *pool, *turns, slots, count, keys);
}
