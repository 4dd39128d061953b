/* SPDX-License-Identifier: Apache-2.0
 *
 * Moves and marks of slots that wait for each other: a prune asks for them head by head, hundreds of times, and a copy
 * and a launch for each would cost more than the work. They are kept on the host until another operation begins
 * (cuda_backend()), then sent together: all moves, then all marks. So a call may move nothing in a page that another
 * waiting call touches, nor mark slots of a page of which another marks some; where it would, what waits is sent first.
 */
#ifndef CUDA_QUEUE_H
#define CUDA_QUEUE_H

#include "cuda/pages.h"

#include <stdbool.h>

struct cuda_backend;

struct cuda_queue {
    bool filled;         /* something waits */
    struct kv_pool pool; /* of what waits */
    struct slot_pair *moves;
    struct page_places *places;
    uint32_t moves_count, moves_room, places_count, places_room;
    uint64_t *touched; /* [pages_room] 2 * the call that last touched a page, + 1 if it marked; 0: none */
    uint32_t pages_room;
    uint64_t call, oldest; /* numbers of the current call, and of the oldest that waits */
};

/* A slot of the pool of each of `count` moves, distinct targets, no slot both source and target. */
void cuda_queue_moves(struct cuda_backend *cuda, const struct kv_pool *pool, const uint32_t *pages,
    const uint32_t *from, const uint32_t *to, uint32_t count);

/* Slots [first, end) of a page table become unused. first < end. */
void cuda_queue_clear(
    struct cuda_backend *cuda, const struct kv_pool *pool, const uint32_t *pages, uint32_t first, uint32_t end);

void cuda_queue_send(struct cuda_backend *cuda);
void cuda_queue_free(struct cuda_queue *queue); /* what waits is forgotten */

#endif
