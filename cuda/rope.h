/* SPDX-License-Identifier: Apache-2.0
 *
 * Launchers of rotary position embedding, and of the appending of keys and values to pages. All pointers are device
 * addresses; nothing is waited for.
 */
#ifndef CUDA_ROPE_H
#define CUDA_ROPE_H

#include "cuda/views.h"

#include <cuda_runtime_api.h>
#include <stdint.h>

/* Cosine and sine of every pair of the positions below `count`: computed in double, rounded once, kept on the device.
 * Higher positions are computed where they are needed, which is slow. */
struct rope_turns {
    const float *table;        /* [count][pairs][2] cosine, sine */
    const float *inverse_freq; /* [pairs] */
    uint32_t count, pairs;
};

/* Where a slot lies in the pool. */
struct slot_address {
    uint32_t page, place;
};

#ifdef __cplusplus
extern "C" {
#endif

/* Fills positions first to end - 1 of the table. */
void launch_rope_turns(const struct rope_turns *turns, uint32_t first, uint32_t end, cudaStream_t stream);

/* qkv [rows, (H + 2 K) * d] of the batch: queries are rotated in place; keys are rotated, and stored with values and
 * positions at the items' new slots. */
void launch_rope_append(
    const struct cuda_batch *batch, const struct rope_turns *turns, uint32_t heads, float *qkv, cudaStream_t stream);

/* Keys [count][d] (unrotated) go to their slots, as they are at positions to [count]. */
void launch_rotate_slots(const struct kv_pool *pool, const struct rope_turns *turns, const struct slot_address *slots,
    const uint32_t *to, const float *keys, uint32_t count, cudaStream_t stream);

/* keys [count][d] = those of slots, turned back by the positions there; zero for unused slots. */
void launch_unrotate_slots(const struct kv_pool *pool, const struct rope_turns *turns, const struct slot_address *slots,
    uint32_t count, float *keys, cudaStream_t stream);

#ifdef __cplusplus
}
#endif

#ifndef __cplusplus
struct cuda_backend;

/* rope.c: turns for these frequencies and positions up to position_most. False when there was an error, and within a
 * capture when the table would have to change. */
bool rope_turns_get(
    struct cuda_backend *cuda, const struct rope_params *rope, uint32_t position_most, struct rope_turns *turns);

/* Makes all tables that there are long enough, so that layers with other frequencies than these can be captured. */
bool rope_turns_prepare(struct cuda_backend *cuda, const struct rope_params *rope, uint32_t position_most);
#endif

#endif
