/* SPDX-License-Identifier: Apache-2.0
 *
 * The rank-th largest key of a row, by a block: radix selection by digits from the top. The first keys, eight a
 * thread, stay in registers, others are made again for every digit. For .cu files.
 */
#ifndef CUDA_SELECT_DEVICE_H
#define CUDA_SELECT_DEVICE_H

#include "cuda/score_device.h"

enum {
    SELECT_THREADS = 1024,                     /* at most */
    SELECT_HELD = SCORE_HELD / SELECT_THREADS, /* keys a thread keeps */
    SELECT_DIGIT_BITS = 11,
    SELECT_DIGITS = 1 << SELECT_DIGIT_BITS,
};

/* Keys are of 64 bits: five digits of 11 bits from the top, then one of 9. */
SCORE_INLINE int digit_shift(int pass) {
    return pass < 5 ? 64 - SELECT_DIGIT_BITS * (pass + 1) : 0;
}

SCORE_INLINE uint32_t digit_of(uint64_t key, int pass) {
    return (uint32_t)(key >> digit_shift(pass)) & (pass < 5 ? SELECT_DIGITS - 1 : 511);
}

/* Bits of a key above the digit of this pass. */
SCORE_INLINE uint64_t bits_above(int pass) {
    return pass == 0 ? 0 : ~(uint64_t)0 << digit_shift(pass - 1);
}

/* Shared memory of a selection. */
struct select_space {
    uint32_t histogram[SELECT_DIGITS];
    uint32_t scan[WARP + 1];
    uint32_t pages[SCORE_HELD / KV_PAGE_SLOTS]; /* of the row's first slots */
    uint32_t digit, rank, count; /* found: the digit, the rank among keys that have it, how many have it */
};

/* From the histogram, the digit of the rank-th largest key. All threads; ends with a barrier. */
SCORE_INLINE void find_digit(struct select_space *space, uint32_t rank) {
    uint32_t each = SELECT_DIGITS / blockDim.x, high = SELECT_DIGITS - 1 - each * threadIdx.x, own = 0, total;
    for (uint32_t i = 0; i < each; i++)
        own += space->histogram[high - i];
    uint32_t before = block_scan(own, space->scan, &total);
    if (rank > before && rank <= before + own) {
        while (rank > before + space->histogram[high])
            before += space->histogram[high--];
        space->digit = high;
        space->rank = rank - before;
        space->count = space->histogram[high];
    }
    __syncthreads();
}

/* Threads of a block that has to do with rows of at most `slots` slots: a power of 2. Results do not depend on it. */
static inline uint32_t select_threads(uint32_t slots) {
    uint32_t threads = 128;
    while (threads < SELECT_THREADS && threads * SELECT_HELD < slots)
        threads *= 2;
    return threads;
}

/* A number such that exactly `rank` keys are at least as large. 1 <= rank <= keys above 0, which differ. keys(slot):
 * the key of a slot; held: those of slots threadIdx.x + i * blockDim.x, 0 where there is none. */
template <class Keys>
SCORE_INLINE uint64_t select_least(
    const Keys &keys, const uint64_t held[SELECT_HELD], uint32_t slots, uint32_t rank, struct select_space *space) {
    uint64_t found = 0;
    for (int pass = 0; pass < 6; pass++) {
        uint64_t above = bits_above(pass);
        __syncthreads();
        for (uint32_t i = threadIdx.x; i < SELECT_DIGITS; i += blockDim.x)
            space->histogram[i] = 0;
        __syncthreads();
#pragma unroll
        for (int i = 0; i < SELECT_HELD; i++)
            if (held[i] != 0 && (held[i] & above) == found)
                atomicAdd(&space->histogram[digit_of(held[i], pass)], 1u);
        for (uint32_t slot = SELECT_HELD * blockDim.x + threadIdx.x; slot < slots; slot += blockDim.x) {
            uint64_t key = keys(slot);
            if (key != 0 && (key & above) == found)
                atomicAdd(&space->histogram[digit_of(key, pass)], 1u);
        }
        __syncthreads();
        find_digit(space, rank);
        found |= (uint64_t)space->digit << digit_shift(pass);
        rank = space->rank;
        if (rank == space->count) /* all that share these digits are among them */
            break;
    }
    return found;
}

template <class Keys> SCORE_INLINE void hold_keys(const Keys &keys, uint32_t slots, uint64_t held[SELECT_HELD]) {
#pragma unroll
    for (uint32_t i = 0; i < SELECT_HELD; i++) {
        uint32_t slot = i * blockDim.x + threadIdx.x;
        held[i] = slot < slots ? keys(slot) : 0;
    }
}

/* Page numbers that keys are made with. All threads; ends with a barrier. */
SCORE_INLINE void hold_pages(const struct cuda_head_view *view, struct select_space *space) {
    for (uint32_t i = threadIdx.x; i < SCORE_HELD / KV_PAGE_SLOTS && i * KV_PAGE_SLOTS < view->slots; i += blockDim.x)
        space->pages[i] = view->pages[i];
    __syncthreads();
}

SCORE_INLINE int32_t held_position(
    const struct kv_pool *pool, const struct cuda_head_view *view, const struct select_space *space, uint32_t slot) {
    uint32_t page = slot < SCORE_HELD ? space->pages[slot / KV_PAGE_SLOTS] : view->pages[slot / KV_PAGE_SLOTS];
    return place_position(pool, page, slot);
}

/* How many keys of the row are not 0. */
template <class Keys>
SCORE_INLINE uint32_t count_keys(
    const Keys &keys, const uint64_t held[SELECT_HELD], uint32_t slots, struct select_space *space) {
    uint32_t count = 0;
#pragma unroll
    for (uint32_t i = 0; i < SELECT_HELD; i++)
        count += held[i] != 0;
    for (uint32_t slot = SELECT_HELD * blockDim.x + threadIdx.x; slot < slots; slot += blockDim.x)
        count += keys(slot) != 0;
    return block_sum(count, space->scan);
}

#endif
