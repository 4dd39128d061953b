/* SPDX-License-Identifier: Apache-2.0 */
#include "cuda/queue.h"

#include "cuda/cuda_backend.h"

#include <stdlib.h>
#include <string.h>

/* Makes an array at least `count` elements long; false when there is no memory. */
static bool reserve(void *array, uint32_t *room, uint64_t count, size_t bytes, bool zero) {
    void **memory = array;
    if (count <= *room)
        return true;
    uint64_t more = count < 2 * (uint64_t)*room ? 2 * (uint64_t)*room : count;
    void *grown = more <= UINT32_MAX ? realloc(*memory, more * bytes) : NULL;
    if (grown == NULL)
        return false;
    if (zero)
        memset((char *)grown + *room * bytes, 0, (more - *room) * bytes);
    *memory = grown;
    *room = (uint32_t)more;
    return true;
}

static size_t waiting_bytes(const struct cuda_queue *queue) {
    return queue->moves_count * sizeof *queue->moves + queue->places_count * sizeof *queue->places;
}

/* A new call on this pool; what waits is sent when it is of another pool, or much. */
static void begin_call(struct cuda_backend *cuda, const struct kv_pool *pool) {
    struct cuda_queue *queue = &cuda->queue;
    if (queue->filled && (queue->pool.base != pool->base || waiting_bytes(queue) > cuda->ring.segment_bytes / 2))
        cuda_queue_send(cuda);
    queue->call++;
    if (!queue->filled) {
        queue->pool = *pool;
        queue->oldest = queue->call;
    }
    queue->filled = true;
}

static bool touch_fits(struct cuda_queue *queue, uint32_t page) {
    return reserve(&queue->touched, &queue->pages_room, (uint64_t)page + 1, sizeof *queue->touched, true);
}

/* Whether a waiting call before this one has touched the page, or marked slots of it. */
static bool is_touched(const struct cuda_queue *queue, uint32_t page, bool marked) {
    uint64_t touched = page < queue->pages_room ? queue->touched[page] : 0;
    return touched / 2 >= queue->oldest && touched / 2 != queue->call && (!marked || touched % 2 == 1);
}

static bool any_touched(const struct cuda_queue *queue, const uint32_t *pages, const uint32_t *slots, uint32_t count) {
    for (uint32_t i = 0; i < count; i++)
        if (is_touched(queue, pages[slots[i] / KV_PAGE_SLOTS], false))
            return true;
    return false;
}

static uint64_t touch(struct cuda_queue *queue, const uint32_t *pages, uint32_t slot) {
    uint32_t page = pages[slot / KV_PAGE_SLOTS];
    queue->touched[page] = 2 * queue->call;
    return (uint64_t)page * KV_PAGE_SLOTS + slot % KV_PAGE_SLOTS;
}

void cuda_queue_moves(struct cuda_backend *cuda, const struct kv_pool *pool, const uint32_t *pages,
    const uint32_t *from, const uint32_t *to, uint32_t count) {
    struct cuda_queue *queue = &cuda->queue;
    begin_call(cuda, pool);
    if (any_touched(queue, pages, from, count) || any_touched(queue, pages, to, count)) {
        cuda_queue_send(cuda);
        begin_call(cuda, pool);
    }
    bool fits =
        reserve(&queue->moves, &queue->moves_room, (uint64_t)queue->moves_count + count, sizeof *queue->moves, false);
    for (uint32_t i = 0; i < count && fits; i++)
        fits = touch_fits(queue, pages[from[i] / KV_PAGE_SLOTS]) && touch_fits(queue, pages[to[i] / KV_PAGE_SLOTS]);
    if (!fits) {
        cuda_check(cuda, cudaErrorMemoryAllocation, "move_slots");
        return;
    }
    for (uint32_t i = 0; i < count; i++)
        queue->moves[queue->moves_count++] =
            (struct slot_pair){touch(queue, pages, from[i]), touch(queue, pages, to[i])};
}

/* Bits of the places of page `page` of a table that lie in slots [first, end). */
static uint32_t places_within(uint32_t page, uint32_t first, uint32_t end) {
    uint32_t begin = page * KV_PAGE_SLOTS, low = first > begin ? first - begin : 0;
    uint32_t high = end - begin < KV_PAGE_SLOTS ? end - begin : KV_PAGE_SLOTS;
    return ((1u << high) - 1) & ~((1u << low) - 1);
}

void cuda_queue_clear(
    struct cuda_backend *cuda, const struct kv_pool *pool, const uint32_t *pages, uint32_t first, uint32_t end) {
    struct cuda_queue *queue = &cuda->queue;
    uint32_t page = first / KV_PAGE_SLOTS, last = (end - 1) / KV_PAGE_SLOTS;
    begin_call(cuda, pool);
    bool marked = false;
    for (uint32_t i = page; i <= last; i++)
        marked |= is_touched(queue, pages[i], true);
    if (marked) {
        cuda_queue_send(cuda);
        begin_call(cuda, pool);
    }
    bool fits = reserve(&queue->places, &queue->places_room, (uint64_t)queue->places_count + last + 1 - page,
        sizeof *queue->places, false);
    for (uint32_t i = page; i <= last && fits; i++)
        fits = touch_fits(queue, pages[i]);
    if (!fits) {
        cuda_check(cuda, cudaErrorMemoryAllocation, "clear_slots");
        return;
    }
    for (uint32_t i = page; i <= last; i++) {
        queue->touched[pages[i]] = 2 * queue->call + 1;
        queue->places[queue->places_count++] = (struct page_places){pages[i], places_within(i, first, end)};
    }
}

void cuda_queue_send(struct cuda_backend *cuda) {
    struct cuda_queue *queue = &cuda->queue;
    size_t moves = queue->moves_count * sizeof *queue->moves, places = queue->places_count * sizeof *queue->places;
    struct cuda_stage stage;
    cuda->busy = true;
    if (waiting_bytes(queue) > 0 && cuda_stage_begin(cuda, cuda_stage_size(moves) + cuda_stage_size(places), &stage)) {
        const struct slot_pair *device_moves = cuda_stage_copy(&stage, queue->moves, moves);
        const struct page_places *device_places = cuda_stage_copy(&stage, queue->places, places);
        if (cuda_stage_send(cuda, &stage)) {
            launch_move_slots(&queue->pool, device_moves, queue->moves_count, cuda->stream);
            launch_clear_places(&queue->pool, device_places, queue->places_count, cuda->stream);
            cuda_check_launch(cuda, "move_slots, clear_slots");
        }
    }
    queue->moves_count = queue->places_count = 0;
    queue->filled = false;
}

void cuda_queue_free(struct cuda_queue *queue) {
    free(queue->moves);
    free(queue->places);
    free(queue->touched);
    *queue = (struct cuda_queue){0};
}
