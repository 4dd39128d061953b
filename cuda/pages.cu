/* SPDX-License-Identifier: Apache-2.0 */
#include "cuda/device.h"

#include "cuda/pages.cuh"
#include "cuda/pages.h"

enum { THREADS = 256, GRID_Y_MOST = 65535 };

/* ---- whole pages ---- */

/* Pages are whole vectors of sixteen bytes. */
static __global__ void __launch_bounds__(THREADS)
    copy_pages(struct kv_pool pool, const uint32_t *from, const uint32_t *to) {
    uint32_t source = from[blockIdx.x], target = to[blockIdx.x];
    const uint4 *read = (const uint4 *)page_at(pool, source);
    uint4 *write = (uint4 *)page_at(pool, target);
    uint32_t vectors = (uint32_t)(pool.page_bytes / sizeof(uint4));
    if (source == target)
        return;
    for (uint32_t i = threadIdx.x; i < vectors; i += THREADS)
        write[i] = read[i];
}

void launch_copy_pages(
    const struct kv_pool *pool, const uint32_t *from, const uint32_t *to, uint32_t count, cudaStream_t stream) {
    if (count > 0)
        KERNEL_LAUNCH(copy_pages, count, THREADS, 0, stream, *pool, from, to);
}

/* Positions follow keys and values, and begin at a multiple of four bytes, as everything before them does. */
static __global__ void __launch_bounds__(THREADS) poison_pages(struct kv_pool pool, const uint32_t *pages) {
    char *page = page_at(pool, pages[blockIdx.x]);
    uint32_t words = (uint32_t)(pool.page_bytes / sizeof(uint32_t));
    uint32_t first = (uint32_t)((uint32_t *)page_positions(pool.layout, page) - (uint32_t *)page);
    for (uint32_t i = threadIdx.x; i < words; i += THREADS)
        ((uint32_t *)page)[i] = i >= first && i < first + KV_PAGE_SLOTS ? (uint32_t)KV_NO_POSITION : 0xffffffffu;
}

void launch_poison_pages(const struct kv_pool *pool, const uint32_t *pages, uint32_t count, cudaStream_t stream) {
    if (count > 0)
        KERNEL_LAUNCH(poison_pages, count, THREADS, 0, stream, *pool, pages);
}

/* Four threads an entry, four places each. */
static __global__ void __launch_bounds__(THREADS)
    clear_places(struct kv_pool pool, const struct page_places *places, uint32_t count) {
    uint32_t entry = (blockIdx.x * THREADS + threadIdx.x) / 4, first = threadIdx.x % 4 * 4;
    if (entry >= count)
        return;
    uint2 own = ((const uint2 *)places)[entry]; /* page, places */
    int32_t *positions = page_positions(pool.layout, page_at(pool, own.x)) + first;
    uint32_t bits = own.y >> first & 15;
    if (bits == 15) {
        *(int4 *)positions = make_int4(KV_NO_POSITION, KV_NO_POSITION, KV_NO_POSITION, KV_NO_POSITION);
        return;
    }
    for (uint32_t i = 0; i < 4; i++)
        if ((bits >> i & 1) != 0)
            positions[i] = KV_NO_POSITION;
}

void launch_clear_places(
    const struct kv_pool *pool, const struct page_places *places, uint32_t count, cudaStream_t stream) {
    if (count > 0)
        KERNEL_LAUNCH(clear_places, (count * 4 + THREADS - 1) / THREADS, THREADS, 0, stream, *pool, places, count);
}

/* ---- slots ---- */

/* A block has MOVES neighbours of the list, and a thread one of them and every so many-th channel: slots near each
 * other share the sectors of a channel. */
enum { MOVES = 16, LANES = THREADS / MOVES };

static __device__ __forceinline__ char *slot_page(const struct kv_pool &pool, uint64_t slot) {
    return page_at(pool, (uint32_t)(slot / KV_PAGE_SLOTS));
}

template <typename number>
static __device__ void move_numbers(const struct kv_pool &pool, uint64_t from_slot, uint64_t to_slot, uint32_t lane) {
    const number *from = (const number *)slot_page(pool, from_slot) + from_slot % KV_PAGE_SLOTS;
    number *to = (number *)slot_page(pool, to_slot) + to_slot % KV_PAGE_SLOTS;
#pragma unroll 4
    for (uint32_t channel = lane; channel < pool.layout.head_dim; channel += LANES)
        to[channel * KV_PAGE_SLOTS] = from[channel * KV_PAGE_SLOTS];
}

/* The moves of a block. */
struct block_moves {
    uint64_t from[MOVES], to[MOVES];
};

/* Values of a block's moves, four bytes a thread: d is even. */
static __device__ void move_values(const struct kv_pool &pool, const struct block_moves *moves, uint32_t count) {
    uint32_t words = pool.layout.head_dim * number_bytes(pool.layout.format) / 4;
    for (uint32_t i = threadIdx.x; i < count * words; i += THREADS) {
        uint64_t source = moves->from[i / words], target = moves->to[i / words];
        const uint32_t *from = (const uint32_t *)page_values(pool.layout, slot_page(pool, source));
        uint32_t *to = (uint32_t *)page_values(pool.layout, slot_page(pool, target));
        to[target % KV_PAGE_SLOTS * words + i % words] = from[source % KV_PAGE_SLOTS * words + i % words];
    }
}

static __global__ void __launch_bounds__(THREADS)
    move_slots(struct kv_pool pool, const struct slot_pair *pairs, uint32_t count) {
    KERNEL_SHARED(struct block_moves, moves);
    uint32_t first = blockIdx.x * MOVES, left = count - first, mine = threadIdx.x % MOVES;
    uint32_t some = left < MOVES ? left : (uint32_t)MOVES;
    if (threadIdx.x < some) {
        moves->from[threadIdx.x] = pairs[first + threadIdx.x].from;
        moves->to[threadIdx.x] = pairs[first + threadIdx.x].to;
    }
    __syncthreads();
    if (mine < some && pool.layout.format == KV_F32)
        move_numbers<uint32_t>(pool, moves->from[mine], moves->to[mine], threadIdx.x / MOVES);
    else if (mine < some)
        move_numbers<uint16_t>(pool, moves->from[mine], moves->to[mine], threadIdx.x / MOVES);
    move_values(pool, moves, some);
    if (threadIdx.x < some) {
        uint64_t from = moves->from[threadIdx.x], to = moves->to[threadIdx.x];
        page_positions(pool.layout, slot_page(pool, to))[to % KV_PAGE_SLOTS] =
            page_positions(pool.layout, slot_page(pool, from))[from % KV_PAGE_SLOTS];
    }
}

void launch_move_slots(const struct kv_pool *pool, const struct slot_pair *pairs, uint32_t count, cudaStream_t stream) {
    if (count > 0)
        KERNEL_LAUNCH(
            move_slots, (count + MOVES - 1) / MOVES, THREADS, sizeof(struct block_moves), stream, *pool, pairs, count);
}

/* A slot outside of pages: keys [d], values [d], position. */
size_t launch_slot_bytes(const struct kv_layout *layout) {
    return 2 * (size_t)layout->head_dim * kv_format_bytes(layout->format) + sizeof(int32_t);
}

/* Between slots and space: one block a slot. number: uint32_t or uint16_t. */
template <typename number, bool OUT>
static __device__ void move_through(const struct kv_pool &pool, uint64_t slot, number *keys) {
    uint32_t dim = pool.layout.head_dim, place = (uint32_t)(slot % KV_PAGE_SLOTS);
    number *page_keys = (number *)slot_page(pool, slot) + place;
    number *values = (number *)page_values(pool.layout, slot_page(pool, slot)) + (size_t)place * dim;
    int32_t *position = page_positions(pool.layout, slot_page(pool, slot)) + place, *kept = (int32_t *)(keys + 2 * dim);
    for (uint32_t i = threadIdx.x; i < dim; i += THREADS) {
        if (OUT) {
            keys[i] = page_keys[i * KV_PAGE_SLOTS];
            keys[dim + i] = values[i];
        } else {
            page_keys[i * KV_PAGE_SLOTS] = keys[i];
            values[i] = keys[dim + i];
        }
    }
    if (threadIdx.x == 0 && OUT)
        *kept = *position;
    else if (threadIdx.x == 0)
        *position = *kept;
}

template <bool OUT>
static __global__ void __launch_bounds__(THREADS)
    move_slots_through(struct kv_pool pool, const struct slot_pair *pairs, char *space, uint32_t slot_bytes) {
    uint64_t slot = OUT ? pairs[blockIdx.x].from : pairs[blockIdx.x].to;
    char *at = space + (size_t)blockIdx.x * slot_bytes;
    if (pool.layout.format == KV_F32)
        move_through<uint32_t, OUT>(pool, slot, (uint32_t *)at);
    else
        move_through<uint16_t, OUT>(pool, slot, (uint16_t *)at);
}

void launch_move_slots_through(
    const struct kv_pool *pool, const struct slot_pair *pairs, uint32_t count, void *space, cudaStream_t stream) {
    if (count == 0)
        return;
    uint32_t bytes = (uint32_t)launch_slot_bytes(&pool->layout);
    KERNEL_LAUNCH(move_slots_through<true>, count, THREADS, 0, stream, *pool, pairs, (char *)space, bytes);
    KERNEL_LAUNCH(move_slots_through<false>, count, THREADS, 0, stream, *pool, pairs, (char *)space, bytes);
}

/* ---- columns of statistics ---- */

enum { ROWS = 4 }; /* of an array that a block moves together: lists of slots are read once for them */

template <typename word> struct rows {
    const word *from[ROWS];
    word *to[ROWS];
    uint32_t count;
};

template <typename word>
static __device__ __forceinline__ void rows_copy(const struct rows<word> &rows, uint32_t from, uint32_t to) {
    word kept[ROWS];
#pragma unroll
    for (uint32_t r = 0; r < ROWS; r++)
        kept[r] = r < rows.count ? rows.from[r][from] : 0;
#pragma unroll
    for (uint32_t r = 0; r < ROWS; r++)
        if (r < rows.count)
            rows.to[r][to] = kept[r];
}

/* One element is read and another written before the next ones are. */
template <typename word>
static __device__ void rows_ascend(const struct array_move &move, uint32_t shift, const struct rows<word> &rows) {
    uint32_t words = move.count << shift, within = (1u << shift) - 1;
    for (uint32_t first = 0; first < words; first += THREADS) {
        uint32_t i = first + threadIdx.x;
        bool mine = i < words;
        uint32_t from = mine ? (move.from_slots[i >> shift] << shift) + (i & within) : 0;
        uint32_t to = mine ? (move.to_slots[i >> shift] << shift) + (i & within) : 0;
        word kept[ROWS];
#pragma unroll
        for (uint32_t r = 0; r < ROWS; r++)
            kept[r] = mine && r < rows.count ? rows.from[r][from] : 0;
        __syncthreads();
#pragma unroll
        for (uint32_t r = 0; r < ROWS; r++)
            if (mine && r < rows.count)
                rows.to[r][to] = kept[r];
        __syncthreads();
    }
}

/* Word by word; an element is 2^shift words. */
template <typename word>
static __device__ void move_rows(const struct array_move &move, uint32_t shift, const struct rows<word> &rows) {
    uint32_t words = move.count << shift, within = (1u << shift) - 1;
    const uint32_t *from_slots = move.from_slots, *to_slots = move.to_slots;
    bool serial = from_slots != NULL && move.order == MOVE_SERIAL;
    if (from_slots != NULL && move.order == MOVE_ASCENDING) {
        rows_ascend(move, shift, rows);
    } else if (from_slots != NULL || rows.from[0] != rows.to[0]) {
        uint32_t first = serial ? (threadIdx.x == 0 ? 0 : words) : threadIdx.x;
        for (uint32_t i = first; i < words; i += serial ? 1 : (uint32_t)THREADS) {
            uint32_t from = from_slots != NULL ? (from_slots[i >> shift] << shift) + (i & within) : i;
            uint32_t to = from_slots != NULL ? (to_slots[i >> shift] << shift) + (i & within) : i;
            rows_copy(rows, from, to);
        }
    }
    __syncthreads();
    for (uint32_t i = (move.clear_first << shift) + threadIdx.x; i < move.clear_end << shift; i += THREADS)
#pragma unroll
        for (uint32_t r = 0; r < ROWS; r++)
            if (r < rows.count)
                rows.to[r][i] = 0;
}

template <typename word> static __device__ void move_array(const struct array_move &move, uint32_t shift) {
    size_t from_row = (size_t)move.from_stride << shift, to_row = (size_t)move.to_stride << shift;
    for (uint32_t first = blockIdx.x * ROWS; first < move.rows; first += gridDim.x * ROWS) {
        struct rows<word> rows;
#pragma unroll
        for (uint32_t r = 0; r < ROWS; r++) {
            rows.from[r] = (const word *)move.from + (first + r) * from_row;
            rows.to[r] = (word *)move.to + (first + r) * to_row;
        }
        rows.count = move.rows - first < ROWS ? move.rows - first : (uint32_t)ROWS;
        move_rows(move, shift, rows);
    }
}

static __global__ void __launch_bounds__(THREADS) move_arrays(const struct array_move *moves) {
    struct array_move move = moves[blockIdx.y];
    if (move.element_bytes == 2)
        move_array<uint16_t>(move, 0);
    else if (move.element_bytes == 4)
        move_array<uint32_t>(move, 0);
    else
        move_array<uint64_t>(move, (uint32_t)__ffs((int)move.element_bytes) - 4);
}

void launch_move_arrays(const struct array_move *moves, uint32_t count, uint32_t rows_most, cudaStream_t stream) {
    for (uint32_t done = 0, part; done < count && rows_most > 0; done += part) {
        part = count - done;
        part = part < GRID_Y_MOST ? part : (uint32_t)GRID_Y_MOST;
        KERNEL_LAUNCH(move_arrays, dim3((rows_most + ROWS - 1) / ROWS, part), THREADS, 0, stream, moves + done);
    }
}
