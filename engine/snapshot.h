/* SPDX-License-Identifier: Apache-2.0
 *
 * Snapshots of statistics: what attention recorded of a prefix for policies that sum over all queries, as it was when
 * exactly the prefix was computed. Left with the prefix's last block (kv_attachment), so that a sequence that reuses
 * the prefix can go on from there. In device memory, one allocation.
 *
 * A snapshot has per-slot arrays of sums and entropies, and the moments of queries. They depend on the tokens alone,
 * noisy sums also on the seed. Statistics of a window are not in it: what follows the prefix computes the window anew.
 * Numbers that stages keep of a slot are not either: the first prune computes them.
 */
#ifndef ENGINE_SNAPSHOT_H
#define ENGINE_SNAPSHOT_H

#include "engine/statistics.h"

struct snapshot {
    struct kv_attachment attachment; /* the first member; it frees the snapshot */
    struct backend *backend;
    struct statistics_shape shape;
    uint32_t needs; /* mask of enum statistic, as policy_prefix_needs has them */
    uint32_t tokens;
    char *memory; /* device, on each rank: arrays of each of its heads, then the moments of all layers */
};

/* Device memory of a snapshot of `tokens` tokens, a multiple of 16. */
size_t snapshot_bytes(const struct statistics_shape *shape, uint32_t needs, uint32_t tokens);

/* Copies the statistics `needs`, which `from` has, of its first `tokens` slots in each head: all there are. NULL: no
 * memory. The copy is released by whoever has the attachment. */
struct snapshot *snapshot_create(const struct statistics *from, uint32_t needs, uint32_t tokens);

/* Whether it has what a sequence with these statistics needs. */
bool snapshot_serves(const struct snapshot *snapshot, const struct statistics_shape *shape, uint32_t needs);

/* Copies what `to` has of it to the first slots of its heads, which have room for them and hold zeros. ERROR_MEMORY;
 * then nothing changed. */
int snapshot_restore(const struct snapshot *snapshot, struct statistics *to);

#endif
