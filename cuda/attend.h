/* SPDX-License-Identifier: Apache-2.0
 *
 * Attention over pages on the device: launchers of attend.cu and attend_prefill.cu. attend.c is the only caller.
 *
 * How a row (one query head of one token) is computed, in every kernel, so that its bits depend neither on the batch
 * nor on how a prompt was cut into pieces, nor on which kernel did it: logits  in units of ln 2: q times the scale
 * and log2(e) (cuda_batch.scale), times k; then the soft cap, where there is one chunk   64 slots (ATTEND_CHUNK) alone:
 * m the largest visible logit, p = 2^(logit - m), l the sum of p, o the sum of p v, in a fixed order split ATTEND_SPLIT
 * slots: its chunks folded in ascending order: m' = max(m, next m), l' = l 2^(m - m') + next l 2^(next m - m'), o
 * likewise; what sees nothing (l = 0) changes nothing row its splits folded in ascending order, then the head's summary
 * slot; out = o / l Without tensor cores a split is one chunk.
 *
 * Tensor cores take f16 or bf16 operands. Keys and values are in the cache's format as they are; a query is the sum of
 * 2 (f16) or 3 (bf16) numbers of that format, so that logits are as exact as in float32; p is rounded to f16, or is the
 * sum of 2 numbers of bf16. They serve a head_dim that is a multiple of 16; other shapes and f32 are done with plain
 * float32 arithmetic (`attend_has_tensor_cores`).
 *
 * Tolerances against float64: 3e-5 of values of standard deviation 1 for f32 and bf16, 5e-4 for f16 (p has 11 bits);
 * statistics are as the CPU's, since they are made of logits and not of rounded p. A value in the cache that is not
 * finite reaches the rows that see its slot, and no others.
 *
 * Two ways to share out the work:
 *   split path    a block takes one tile of rows and one split; results are merged by a second kernel. For decode and
 *                 short pieces of a prompt: K and V are read once for each KV head.
 *   whole path    a block takes up to 8 tiles of rows and all their splits. For prefill, on tensor cores only.
 * A tile is up to 16 rows: some tokens of an item times the query heads of one KV head, or, of a group of more than 16,
 * a part of one token's heads (attend_parts).
 */
#ifndef CUDA_ATTEND_H
#define CUDA_ATTEND_H

#include "cuda/views.h"

#include <cuda_runtime_api.h>

enum {
    ATTEND_TILE_ROWS = 16,
    ATTEND_CHUNK = 64,
    ATTEND_SPLIT_CHUNKS = ATTEND_SPLIT / ATTEND_CHUNK,
    ATTEND_WHOLE_TILES = 8, /* most tiles of a block on the whole path */
    ATTEND_DIM_MOST = 256,  /* the largest head_dim */
    STATISTICS_SLOTS = 128, /* slots of a block of statistics.cu */
    STATISTICS_PIECE = 32,  /* slots whose part of a row's sum is kept apart (entropy, noise) */
};

/* Some tokens of an item. `scratch`: where their rows begin in the arrays by scratch row. */
struct __attribute__((aligned(16))) attend_tile {
    uint32_t item, token, tokens, scratch;
};

/* What is known of a row, or of a part of its slots. */
struct __attribute__((aligned(16))) attend_total {
    float m, l;
    float inverse; /* 1 / l, of whole rows */
    uint32_t seen; /* visible slots, a summary slot counted */
};

/* Of STATISTICS_PIECE slots of a row, with noise. */
struct __attribute__((aligned(8))) attend_piece {
    float m, l;
};

/* One call of attend: what all its kernels share. Pointers are device memory. */
struct attend_work {
    struct cuda_batch batch;
    uint32_t heads; /* H */
    const float *qkv;
    float *out;
    uint32_t splits;             /* upper bound of a view's splits */
    struct attend_total *totals; /* [batch rows][H] */
    struct attend_total *parts;  /* [scratch rows][H][splits] */
    float *outputs;              /* [scratch rows][H][splits][d] */
    float *scores;               /* [scratch rows][H][splits * ATTEND_SPLIT] logits of visible slots; NULL: unwanted */
    struct attend_total *noisy;  /* [scratch rows][H] */
    struct attend_piece *noisy_pieces; /* [scratch rows][H][pieces] */
    float *entropy_pieces;             /* [scratch rows][H][pieces] sum of p ln p */
    uint32_t pieces;                   /* splits * ATTEND_SPLIT / STATISTICS_PIECE */
};

#ifdef __CUDACC__
#define ATTEND_INLINE static inline __host__ __device__
#else
#define ATTEND_INLINE static inline
#endif

/* Tiles that the query heads of one KV head take. */
ATTEND_INLINE uint32_t attend_parts(uint32_t group) {
    return (group + ATTEND_TILE_ROWS - 1) / ATTEND_TILE_ROWS;
}

/* Most tokens of a tile. */
ATTEND_INLINE uint32_t attend_tile_tokens(uint32_t group) {
    return group >= ATTEND_TILE_ROWS ? 1 : ATTEND_TILE_ROWS / group;
}

ATTEND_INLINE bool attend_has_tensor_cores(const struct kv_layout *layout) {
    return layout->format != KV_F32 && layout->head_dim % 16 == 0 && layout->head_dim <= ATTEND_DIM_MOST;
}

#ifdef __cplusplus
extern "C" {
#endif

/* attend.cu: parts, outputs and scores (of heads whose statistics want them) of tiles [count], each of at most
 * attend_tile_tokens tokens. */
void attend_launch_splits(
    const struct attend_work *work, const struct attend_tile *tiles, uint32_t count, cudaStream_t stream);

/* attend.cu: totals and out of the same tiles, from parts and outputs. */
void attend_launch_merge(
    const struct attend_work *work, const struct attend_tile *tiles, uint32_t count, cudaStream_t stream);

/* attend_prefill.cu: how many tiles a block of the whole path takes when it can have shared_bytes. */
uint32_t attend_whole_tiles(const struct kv_layout *layout, uint32_t slots_most, size_t shared_bytes);

/* attend_prefill.cu: totals and out of tiles [count], each of at most `warps` times attend_tile_tokens tokens. */
void attend_launch_whole(const struct attend_work *work, const struct attend_tile *tiles, uint32_t count,
    uint32_t warps, cudaStream_t stream);

#ifdef __cplusplus
}
#endif

#endif
