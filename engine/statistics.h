/* SPDX-License-Identifier: Apache-2.0
 *
 * What attention records of one sequence for its policy: the arrays of struct kv_statistics for each (layer, KV head),
 * and the moments of queries of each layer. Private to the sequence, in device memory, each head's on its rank. Knows
 * no policy: it is told what is needed, and when slots come, move and go.
 *
 * A head's arrays have room for `capacity` slots, in one allocation; columns of slots that hold no token are zero, but
 * for rows of the window that nobody reads (statistics_prune.rows_stay).
 */
#ifndef ENGINE_STATISTICS_H
#define ENGINE_STATISTICS_H

#include "engine/backend.h"
#include "engine/kv_cache.h"

struct statistics_shape {
    uint32_t layers, kv_heads, group, head_dim;
    uint32_t window, history;
    uint64_t seed;
    uint32_t content;        /* numbers of the network's content */
    uint32_t ranks;          /* struct backend; divides kv_heads; 0: 1 */
    const uint32_t *windows; /* [layers] not 0: the layer slides, and has none; NULL: no layer does. Outlives them */
};

static inline bool statistics_slides(const struct statistics_shape *shape, uint32_t layer) {
    return shape->windows != NULL && shape->windows[layer] != 0;
}

struct statistics {
    struct backend *backend;
    struct statistics_shape shape;
    uint32_t needs;                /* mask of enum statistic */
    bool moments_saved;            /* between save and restore */
    size_t bytes;                  /* device memory held, or saved */
    struct query_moments *moments; /* [layers]; sum NULL when not needed. Of several ranks rank 0's part: its heads' */
    void **memory;                 /* [layers * kv_heads] of each head's arrays; NULL while it has none */
    struct kv_statistics heads[];  /* [layers * kv_heads] */
};

/* Without any arrays yet. */
struct statistics *statistics_create(
    struct backend *backend, const struct statistics_shape *shape, uint32_t needs, struct error *error);
struct statistics *statistics_fork(const struct statistics *from, struct error *error); /* a copy of everything */
void statistics_free(struct statistics *statistics);                                    /* NULL allowed */

/* Places a head's arrays with room for `capacity` slots (a multiple of 16) from base on, a multiple of 64; returns the
 * bytes they take, a multiple of 64. base NULL: only counts. */
size_t statistics_lay_out(
    const struct statistics_shape *shape, uint32_t needs, uint32_t capacity, char *base, struct kv_statistics *out);

/* Bytes of a head's arrays with room for `slots` slots, and of the moments of all layers. */
size_t statistics_head_bytes(const struct statistics_shape *shape, uint32_t needs, uint32_t slots);
size_t statistics_moments_bytes(const struct statistics_shape *shape, uint32_t needs);

/* Slots that a head gets room for when it needs room for `slots` and will soon have some more. */
uint32_t statistics_room_for(uint32_t slots);

/* Gives every head room for its slots in kv and `count` more; a head that lacks it gets room for at least `hint`.
 * statistics_reserve_bytes: what that adds to bytes. On ERROR_MEMORY some heads may have more room, nothing else
 * changed. */
size_t statistics_reserve_bytes(
    const struct statistics *statistics, const struct kv_sequence *kv, uint32_t count, uint32_t hint);
int statistics_reserve(
    struct statistics *statistics, const struct kv_sequence *kv, uint32_t count, uint32_t hint, struct error *error);

/* A prune of one sequence, after kv_sequence_prune of these removals. Statistics of all that are pruned together have
 * the same shape. */
struct statistics_prune {
    struct statistics *statistics;
    const struct kv_removal *removals; /* [layers * kv_heads] */
    const uint32_t *slots_before;      /* the same: slots of each head before the removals */
    uint32_t needs;                    /* from now on: a part of what was needed */
    bool fit;                          /* keep no more room than needed */
    bool rows_stay;                    /* of the window, where a slot goes (backend.h, statistics_move) */
    void *work;                        /* statistics_prune_work() bytes */
};

/* Statistics follow their slots. Arrays that are no longer needed, or with more room than statistics_room_for what is
 * left (fit; else twice that), are given back; where there is no memory for smaller ones they stay. Cannot fail. One
 * call of the backend for all. moves: work space, one for each head of all. */
size_t statistics_prune_work(const struct statistics *statistics, size_t slots); /* of all heads, before */
void statistics_prune(struct statistics_prune *prunes, uint32_t count, struct statistics_move *moves);

/* A head's listed slots stay, in their order, as kv_sequence_keep does. */
void statistics_keep(
    struct statistics *statistics, uint32_t head, const uint32_t *slots, uint32_t count, uint32_t slots_before);

/* Copies everything to host memory [bytes] and gives the device's back; and the other way. Between the two only free
 * and bytes. ERROR_MEMORY: it stays out. */
void statistics_save(struct statistics *statistics, void *host);
int statistics_restore(struct statistics *statistics, const void *host, struct error *error);

/* Copies between two allocations of the backend, on each rank; `bytes` of all together. ERROR_MEMORY. The same with
 * host memory, where the ranks' bytes follow each other. */
int statistics_copy_device(struct backend *backend, void *to, const void *from, size_t bytes);
void statistics_download(struct backend *backend, void *host, const void *from, size_t bytes);
void statistics_upload(struct backend *backend, void *to, const void *host, size_t bytes);

#endif
