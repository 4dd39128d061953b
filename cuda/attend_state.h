/* SPDX-License-Identifier: Apache-2.0
 *
 * What the host sides of attention, its statistics and the layer preference keep from call to call (cuda->attend).
 */
#ifndef CUDA_ATTEND_STATE_H
#define CUDA_ATTEND_STATE_H

#include "cuda/cuda_backend.h"

struct attend_tile;
struct attend_group;

struct attend_state {
    struct cuda_scratch totals, parts, outputs, scores, noisy, noisy_pieces, entropy_pieces; /* struct attend_work */
    struct attend_tile *list;                                                                /* host, of the plan */
    struct attend_group *groups;
    size_t rows_capacity; /* rows of a batch that list and groups have room for */
    struct cuda_scratch preferences;
};

/* Made on first use; NULL (and an error kept) when there is no memory. */
struct attend_state *attend_state_get(struct cuda_backend *cuda);

#endif
