/* SPDX-License-Identifier: Apache-2.0
 *
 * What the host sides of attention, its statistics and the layer preference keep from call to call (cuda->attend).
 */
#ifndef CUDA_ATTEND_STATE_H
#define CUDA_ATTEND_STATE_H

#include "cuda/attend.h"
#include "cuda/cuda_backend.h"

/* Consecutive ranges and tiles that share scratch memory, one launch each. */
struct attend_group {
    uint32_t first_range, ranges;
    uint32_t first_tile, tiles;
    uint32_t rows, tokens_most;
    bool alone;
};

/* What is done of a batch: groups of the split path, with tiles; then tiles of the whole path, and its groups. */
struct attend_plan {
    const struct kv_item *items;
    uint32_t items_count;
    uint32_t group; /* query heads of a KV head */
    uint32_t warps; /* tiles of a block of the whole path; 0: it is not for this layout */
    struct attend_tile *list;
    uint32_t count;
    struct attend_group *groups;
    uint32_t split_groups, whole_groups;
    uint32_t first_whole_tile, whole_tiles;
};

struct attend_state {
    struct cuda_scratch totals, parts, outputs, scores, noisy, noisy_pieces, entropy_pieces; /* struct attend_work */
    struct attend_plan plan; /* of the last call, or of the step under way; list and groups are kept */
    size_t rows_capacity;    /* rows of a batch that list and groups have room for */
    struct cuda_scratch preferences;
};

/* Made on first use; NULL (and an error kept) when there is no memory. */
struct attend_state *attend_state_get(struct cuda_backend *cuda);

/* The plan of batches with these items (which must stay), bounds and needs, to be found in the state. NULL when there
 * was an error. The list goes to the device by the caller's hand. */
const struct attend_plan *attend_plan_get(
    struct cuda_backend *cuda, const struct cuda_batch *bounds, const struct kv_item *items, uint32_t heads);

#endif
