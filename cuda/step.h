/* SPDX-License-Identifier: Apache-2.0
 *
 * A step (struct kv_step of engine/backend.h): everything that a batch's operations need from the host goes up in one
 * copy, into device memory that stays where it is from step to step; the operations find their parts there. Page tables
 * are there already as a rule (tables.h), and so are statistics' addresses and sizes: layers in which they changed
 * since the step before are copied. Steps that repeat are captured and run as graphs (graph.h).
 *
 * Such a step is rounded up, so that few graphs serve many batches: to rows that do nothing (no slots, no needs, token
 * 0 at position 0), as long as every other row keeps its bits, and to longer upper bounds, at which blocks leave early.
 */
#ifndef CUDA_STEP_H
#define CUDA_STEP_H

#include "cuda/views.h"

struct attend_tile;

/* What an operation was called with, on the device, if it is a part of the step under way; else NULL (false). */
bool cuda_step_batch(struct cuda_backend *cuda, const struct kv_batch *batch, struct cuda_batch *out);
const int32_t *cuda_step_tokens(struct cuda_backend *cuda, const int32_t *tokens);
const uint32_t *cuda_step_wanted(struct cuda_backend *cuda, const uint32_t *wanted);
const struct query_moments *cuda_step_moments(
    struct cuda_backend *cuda, const struct kv_batch *batch, const struct query_moments *moments);
/* The list of attention's plan (attend_state.h), which is the same in all layers. */
const struct attend_tile *cuda_step_tiles(struct cuda_backend *cuda, const struct kv_batch *batch);

#endif
