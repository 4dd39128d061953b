/* SPDX-License-Identifier: Apache-2.0
 *
 * What a call of `score` (backend.h) must bring along, whatever the backend: for each kind of stage the statistics that
 * it reads, and whether it needs the output matrix or the same slots in all heads of a layer.
 */
#ifndef ENGINE_SCORE_CHECK_H
#define ENGINE_SCORE_CHECK_H

#include "engine/backend.h"

enum { SCORE_HEAD_DIM_MAX = 256 };

/* ERROR_INVALID: statistics, the matrix, moments or the network are missing or another model's. ERROR_UNSUPPORTED: no
 * such stage, heads with different slots where they must hold the same, or a shape that is none. heads: H. */
int score_check(
    const struct kv_pool *pool, const struct score_layer *layers, uint32_t count, uint32_t heads, struct error *error);

bool score_has_stage(const struct score_layer *layer, enum score_stage_kind kind);

#endif
