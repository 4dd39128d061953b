/* SPDX-License-Identifier: Apache-2.0
 *
 * What kernels see of a batch and of page tables: the structs of backend.h with device addresses in them. Included by
 * .c and .cu files. Kernels take struct cuda_batch by value; all pointers in it are device addresses.
 *
 * kv_item, kv_statistics and query_moments hold numbers and device addresses only: kernels read them as they are.
 */
#ifndef CUDA_VIEWS_H
#define CUDA_VIEWS_H

#ifdef __cplusplus
extern "C" {
#endif

#include "engine/backend.h"

/* One (sequence, layer, KV head). Slot s lies in pages[s / P], place s % P. */
struct cuda_head_view {
    const uint32_t *pages; /* [ceil(slots / P)] */
    const float *summary;  /* [SUMMARY_NUMBERS(d)] or NULL */
    uint32_t slots;        /* those of this batch's new tokens included */
    uint32_t first_slot;   /* of the item's first new token */
    uint32_t from_slot;    /* slots before it, whole pages, are gone */
    uint32_t unused;       /* the last four numbers are read as one, 16-byte aligned */
};

/* No window. Differences of positions are below it. */
#define ATTEND_SPAN_ALL 0x80000000u

/* A row of the batch: the token-th of its item. */
struct cuda_row {
    uint32_t item, token;
};

/* A struct kv_batch. Row items[i].first_row + t belongs to the t-th token of item i. */
struct cuda_batch {
    struct kv_pool pool;
    const struct kv_item *items;            /* [items_count] */
    const struct cuda_head_view *views;     /* [items_count * K] */
    const struct kv_statistics *statistics; /* [items_count * K], or NULL: no item needs any */
    const struct cuda_row *rows;            /* [rows_count] item by item */
    uint32_t items_count, rows_count, layer;
    uint32_t span; /* a row sees a slot whose position is up to span - 1 before its own; ATTEND_SPAN_ALL: all of them */
    float scale;   /* of q k, for logits in units of ln 2 */
    float cap;     /* of these logits; 0: none */
    float inverse_cap; /* 1 / cap, or 0; found here, since kernels have no register for a division */
    /* Upper bounds, for grids: kernels leave early. */
    uint32_t slots_most;    /* of a view's slots */
    uint32_t rows_most;     /* of an item's rows */
    uint32_t position_most; /* of a row's position */
    uint32_t needs;         /* union of statistics' needs */
};

#ifdef __cplusplus
}
#endif

/* ---- host side (views.c) ---- */

#ifndef __cplusplus

#include "cuda/cuda_backend.h"

/* Fills *out: of a batch of the step under way by what lies on the device already (step.h), else by staging items,
 * rows, views with their pages, and statistics in one asynchronous copy. False when there is nothing to do (no rows) or
 * there was an error. */
bool cuda_batch_stage(struct cuda_backend *cuda, const struct kv_batch *batch, struct cuda_batch *out);

/* Sets the upper bounds of *out from items, views [views_count] and statistics (NULL: none). */
void cuda_batch_bound(const struct kv_item *items, uint32_t items_count, const struct kv_head_view *views,
    size_t views_count, const struct kv_statistics *statistics, struct cuda_batch *out);

/* Sets span, scale and cap of *out. */
void cuda_batch_vary(const struct kv_batch *batch, struct cuda_batch *out);

/* One view in a stage of the caller's: its bytes there, and its pages added, unless the device has them. */
size_t cuda_view_bytes(const struct kv_head_view *view);
struct cuda_head_view cuda_view_stage(struct cuda_stage *stage, const struct kv_head_view *view);

#endif

#endif
