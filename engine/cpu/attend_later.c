/* SPDX-License-Identifier: Apache-2.0 */
#include "engine/cpu/attend_block.h"

/* Statistics of blocks that have kept nothing, from scores computed anew: of large groups, and without memory. */

enum { PARTS_KEPT = 16 /* whose totals are kept; others are computed for each split */ };

/* A part of a group's rows, of one token or several. */
struct later_part {
    struct attend_block block;
    float q[ATTEND_ROWS * ATTEND_DIM_MAX] __attribute__((aligned(64)));
};

/* Space for one split. */
union later_split {
    struct statistics_split split;
    char bytes[sizeof(struct statistics_split) + 2 * ATTEND_ROWS * ATTEND_SPLIT * sizeof(float)];
};

static void later_split(
    const struct attend_job *job, const struct later_part *part, uint32_t split, struct statistics_split *to) {
    struct attend_pages found;
    struct split_softmax softmax;
    attend_split_score(job, &part->block, split, part->q, &found, to->masks, to->p, &softmax, to);
}

static void later_totals(const struct attend_job *job, const struct later_part *part,
    const struct statistics_rows *rows, struct statistics_totals *totals) {
    union later_split space;
    statistics_begin(totals);
    for (uint32_t split = 0; split < part->block.splits; split++) {
        later_split(job, part, split, &space.split);
        statistics_total(job->statistics, rows, attend_block_part(job, &part->block), &space.split, totals);
    }
    if (attend_block_view(job, &part->block)->summary != NULL) {
        float scores[STATISTICS_ROWS];
        attend_summary_scores(job, &part->block, part->q, scores);
        statistics_total_summary(job->statistics, rows, attend_block_part(job, &part->block), scores, totals);
    }
}

/* All parts of the tokens of `first`, a block that begins with its group's first head. */
static void later_tokens(const struct attend_job *job, const struct attend_block *first, uint32_t needs) {
    struct statistics_totals totals[PARTS_KEPT];
    struct statistics_work work;
    struct later_part part;
    union later_split space;
    double entropies[ATTEND_ROWS] = {0};
    uint32_t group = job->heads / job->layout->kv_heads, heads = first->group, parts = attend_divide_up(group, heads);
    struct statistics_rows rows = attend_block_statistics(job, first, needs);
    for (uint32_t split = 0; split < first->splits; split++) {
        for (uint32_t i = 0; i < parts; i++) {
            part.block = *first;
            part.block.needs = needs;
            part.block.head += i * heads;
            part.block.group = i + 1 < parts ? heads : group - i * heads;
            attend_block_pack(job, &part.block, part.q);
            struct statistics_part place = attend_block_part(job, &part.block);
            struct statistics_totals *of = &totals[i < PARTS_KEPT ? i : PARTS_KEPT - 1];
            if (split == 0 || (parts > PARTS_KEPT && i >= PARTS_KEPT - 1))
                later_totals(job, &part, &rows, of);
            if (split == 0 && needs & STATISTIC_ENTROPY)
                statistics_entropy(&rows, place, of, entropies);
            later_split(job, &part, split, &space.split);
            statistics_gather(job->statistics, &rows, place, &space.split, split, of, &work);
            if (i + 1 == parts)
                statistics_count(job->statistics, &rows, place, &space.split, split, of, &work);
        }
    }
    if (needs & STATISTIC_ENTROPY && first->splits > 0)
        statistics_store_entropy(&rows, entropies);
}

void attend_later_work(void *context, uint32_t chunk, uint32_t thread) {
    const struct attend_job *job = context;
    struct attend_shape shape = attend_shape(job);
    uint32_t kv_heads = job->layout->kv_heads, item = chunk / kv_heads;
    uint32_t tiles = attend_divide_up(job->batch->items[item].rows, shape.block_tokens);
    uint32_t parts = attend_divide_up(shape.group, shape.block_group);
    (void)thread;
    for (uint32_t tile = 0; tile < tiles; tile++) {
        struct attend_block block;
        attend_block_set(job, shape, item, tile * kv_heads * parts + chunk % kv_heads, &block);
        uint32_t needs = attend_block_needs(job, &block);
        if (needs != 0)
            later_tokens(job, &block, needs);
    }
}
