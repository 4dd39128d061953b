/* SPDX-License-Identifier: Apache-2.0
 *
 * Launchers of what computes nothing: pages and slots are copied, moved and marked, and statistics follow their slots.
 * All pointers are device addresses; nothing is waited for.
 */
#ifndef CUDA_PAGES_H
#define CUDA_PAGES_H

#include "engine/backend.h"

#include <cuda_runtime_api.h>
#include <stdint.h>

/* A slot of the pool: page * P + place. */
struct slot_pair {
    uint64_t from, to;
};

/* Slots of one page: bit p of places stands for place p. */
struct page_places {
    uint32_t page, places;
};

/* How the elements of a row may be moved. */
enum move_order {
    MOVE_ANY,       /* no element is read after another was written there: all at once */
    MOVE_ASCENDING, /* from and to ascend, to <= from: in parts, each read before it is written */
    MOVE_SERIAL,    /* one after the other */
};

/* One array of one head, as rows of elements: element from_slots[i] of each row of `from` goes to element to_slots[i]
 * of the same row of `to` (from_slots NULL: i to i, rows may be long), then [clear_first, clear_end) of `to` is zeroed.
 */
struct array_move {
    const char *from;
    char *to;
    const uint32_t *from_slots, *to_slots; /* [count] */
    uint32_t element_bytes;                /* 2, 4, or a power of two of at least 8 */
    uint32_t rows;
    uint32_t from_stride, to_stride; /* elements of a row */
    uint32_t count;
    uint32_t clear_first, clear_end;
    enum move_order order;
};

#ifdef __cplusplus
extern "C" {
#endif

/* Pages from[i] -> to[i]; no page is in both lists. */
void launch_copy_pages(
    const struct kv_pool *pool, const uint32_t *from, const uint32_t *to, uint32_t count, cudaStream_t stream);

/* Slots by pairs; no slot is in both lists, none twice among the targets. */
void launch_move_slots(const struct kv_pool *pool, const struct slot_pair *pairs, uint32_t count, cudaStream_t stream);

/* The same through `space` [count * bytes of a slot (launch_slot_bytes)]: any slot may be in both lists. */
void launch_move_slots_through(
    const struct kv_pool *pool, const struct slot_pair *pairs, uint32_t count, void *space, cudaStream_t stream);
size_t launch_slot_bytes(const struct kv_layout *layout);

/* Positions of places become KV_NO_POSITION. */
void launch_clear_places(
    const struct kv_pool *pool, const struct page_places *places, uint32_t count, cudaStream_t stream);

/* All bits of pages set, positions KV_NO_POSITION. */
void launch_poison_pages(const struct kv_pool *pool, const uint32_t *pages, uint32_t count, cudaStream_t stream);

/* moves [count], of which the largest has rows_most rows. */
void launch_move_arrays(const struct array_move *moves, uint32_t count, uint32_t rows_most, cudaStream_t stream);

#ifdef __cplusplus
}
#endif

#endif
