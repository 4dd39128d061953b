/* SPDX-License-Identifier: Apache-2.0
 *
 * Lists the pages of a head that have slots for which something is still to be computed. For .cu files.
 */
#ifndef CUDA_SCORE_LIST_H
#define CUDA_SCORE_LIST_H

#include "cuda/score_device.h"

enum { LIST_THREADS = 256, LIST_PAGES = LIST_THREADS / KV_PAGE_SLOTS };

struct list_space {
    uint32_t pages[LIST_PAGES]; /* of the slots that are looked at */
    uint32_t wanted[LIST_PAGES];
};

/* unit.pages_list: pages with a slot that is not empty and for which unknown(slot) holds, ascending. All threads. */
template <class Unknown>
SCORE_INLINE void list_pages(
    const struct kv_pool *pool, const struct cuda_score_unit *unit, struct list_space *space, const Unknown &unknown) {
    uint32_t slots = unit->view.slots, count = 0, lane = threadIdx.x % WARP, own = threadIdx.x / KV_PAGE_SLOTS;
    for (uint32_t first = 0; first < slots; first += LIST_THREADS) {
        uint32_t slot = first + threadIdx.x, page = first / KV_PAGE_SLOTS + threadIdx.x;
        if (threadIdx.x < LIST_PAGES && page * KV_PAGE_SLOTS < slots)
            space->pages[threadIdx.x] = unit->view.pages[page];
        __syncthreads();
        bool wanted = slot < slots && unknown(slot) && place_position(pool, space->pages[own], slot) != KV_NO_POSITION;
        uint32_t which = __ballot_sync(0xffffffffu, wanted) >> (lane & 16) & 0xffff;
        if (threadIdx.x % KV_PAGE_SLOTS == 0)
            space->wanted[own] = which != 0;
        __syncthreads();
        if (threadIdx.x < WARP) {
            uint32_t all = __ballot_sync(0xffffffffu, lane < LIST_PAGES && space->wanted[lane % LIST_PAGES] != 0);
            if ((all >> lane & 1) != 0)
                unit->pages_list[1 + count + (uint32_t)__popc(all & ((1u << lane) - 1))] = page;
            count += (uint32_t)__popc(all);
        }
    }
    if (threadIdx.x == 0)
        unit->pages_list[0] = count;
}

#endif
