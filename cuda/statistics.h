/* SPDX-License-Identifier: Apache-2.0
 *
 * Statistics of attention (struct kv_statistics) on the device: launchers of statistics.cu. attend.c is the only
 * caller.
 *
 * They follow when the totals of rows are known (attend.h). A block has STATISTICS_SLOTS slots of one KV head, a thread
 * a slot, and goes through the tokens of a range, and of each token through the query heads in ascending order:
 * p = 2^(logit - m) / l, the share of a slot is the sum of p (or of its squares) times 1 / G, limited to [0, 1], 0 for
 * NaN. What is added are integers, so nothing depends on how rows are cut into ranges. Logits are those that the split
 * path kept, or, after the whole path, are computed anew with the same bits.
 *
 * Heads that have statistics have all their pages (from_slot is 0): those of sliding layers have none.
 *
 * Noise (keyformer) is a function of seed, layer, query head, the query's position and the slot's alone.
 */
#ifndef CUDA_STATISTICS_H
#define CUDA_STATISTICS_H

#include "cuda/attend.h"

enum {
    /* Statistics that are made of probabilities. */
    STATISTICS_SWEPT = STATISTIC_SUM | STATISTIC_SQUARED | STATISTIC_WINDOW | STATISTIC_HEAD_WINDOW | STATISTIC_ABOVE |
                       STATISTIC_ENTROPY | STATISTIC_NOISY,
};

/* Ranges that are done together: tokens of items, in the form of tiles. */
struct statistics_ranges {
    const struct attend_tile *ranges; /* device */
    uint32_t count;
    uint32_t tokens_most;
    bool kept;  /* work->scores holds their logits */
    bool alone; /* no item has two of them, and nothing else runs: sums need no atomics */
};

#ifdef __cplusplus
extern "C" {
#endif

/* Where an item needs STATISTIC_NOISY: noisy_pieces, then noisy. First of all. */
void statistics_launch_noise(
    const struct attend_work *work, const struct statistics_ranges *ranges, cudaStream_t stream);

/* All that is swept; of STATISTIC_ENTROPY the pieces. */
void statistics_launch_sweep(
    const struct attend_work *work, const struct statistics_ranges *ranges, cudaStream_t stream);

/* STATISTIC_ENTROPY, from entropy_pieces. */
void statistics_launch_entropy(
    const struct attend_work *work, const struct statistics_ranges *ranges, cudaStream_t stream);

/* STATISTIC_OUTPUTS of all rows of the batch, from out. */
void statistics_launch_outputs(const struct attend_work *work, cudaStream_t stream);

#ifdef __cplusplus
}
#endif

#endif
