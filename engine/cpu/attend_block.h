/* SPDX-License-Identifier: Apache-2.0
 *
 * Inside attention (attend.h): one call of it, how its rows fall into blocks, and what is computed of one split of a
 * block. attend.c shares blocks out and merges their splits; attend_later.c adds the statistics of blocks that kept
 * nothing. Nobody else includes this.
 */
#ifndef ENGINE_CPU_ATTEND_BLOCK_H
#define ENGINE_CPU_ATTEND_BLOCK_H

#include "engine/cpu/attend.h"
#include "engine/cpu/attend_tasks.h"
#include "engine/cpu/score_state.h"
#include "engine/cpu/statistics.h"

/* One call of attention. */
struct attend_job {
    const struct attend_kernels *kernels;
    const struct attend_format_kernels *format;
    const struct kv_batch *batch;
    const struct kv_layout *layout;
    const struct score_call *score; /* NULL: nothing is scored */
    struct attend_tasks tasks;
    float *partials;
    const struct statistics_kernels *statistics;
    pthread_mutex_t *locks; /* [ATTEND_LOCKS] */
    char *kept;             /* memory for blocks of several tasks, then of one task, a share for each thread */
    size_t kept_shared;     /* bytes of the former */
    size_t kept_thread;     /* bytes of a share */
    uint32_t heads;
    uint32_t stride; /* of o rows */
    const float *qkv;
    float *out;
};

/* m and l of each row. */
struct split_softmax {
    float m[ATTEND_ROWS];
    float l[ATTEND_ROWS]; /* 0: the row sees nothing here, and m and o mean nothing */
};

/* One split of one block, or several merged. */
struct attend_partial {
    struct split_softmax rows;
    float o[]; /* [rows][stride] */
};

/* What is computed next; block NULL: nothing. */
struct split_place {
    const struct attend_block *block;
    uint32_t split;
};

/* What a block's computation keeps on the stack. */
struct attend_workspace {
    float q[ATTEND_ROWS * ATTEND_DIM_MAX] __attribute__((aligned(64)));
    float scores[ATTEND_ROWS * ATTEND_SPLIT] __attribute__((aligned(64)));
};

/* The pages of one split that some row of a block sees. */
struct attend_pages {
    uint32_t count;
    const char *pages[ATTEND_PAGES];
    uint8_t places[ATTEND_PAGES];    /* which of the split's pages they are */
    const char *ahead[ATTEND_PAGES]; /* what the kernels read next, to be fetched meanwhile */
    uint16_t seen[ATTEND_PAGES];     /* slots that some token sees */
    bool uniform[ATTEND_PAGES];      /* all tokens see them */
    uint32_t used[ATTEND_PAGES];     /* slots before the end of the sequence, as a mask */
};

/* How an item's rows fall into blocks. */
struct attend_shape {
    uint32_t group;        /* query heads a KV head */
    uint32_t block_group;  /* of which in one block */
    uint32_t block_tokens; /* tokens in one block */
};

static inline uint32_t attend_divide_up(uint32_t a, uint32_t b) {
    return a / b + (a % b != 0);
}

static inline uint32_t attend_block_rows(const struct attend_block *block) {
    return block->tokens * block->group;
}

static inline const struct kv_head_view *attend_block_view(
    const struct attend_job *job, const struct attend_block *block) {
    return &job->batch->views[(size_t)block->item * job->layout->kv_heads + block->kv_head];
}

static inline int32_t attend_token_position(
    const struct attend_job *job, const struct attend_block *block, uint32_t token) {
    return (int32_t)(job->batch->items[block->item].position + block->token + token);
}

/* ---- blocks of a batch ---- */

struct attend_shape attend_shape(const struct attend_job *job);
uint32_t attend_item_blocks(const struct attend_job *job, struct attend_shape shape, uint32_t item);
/* Block `index` of an item: the last tokens first, since they see the most; KV heads innermost. */
void attend_block_set(
    const struct attend_job *job, struct attend_shape shape, uint32_t item, uint32_t index, struct attend_block *block);

/* ---- statistics of a block ---- */

/* Statistics of a block's KV head; NULL when there are none. */
const struct kv_statistics *attend_block_to(const struct attend_job *job, const struct attend_block *block);
/* The first row of an item that is counted in a ring of `ring` rows: an earlier one would be written over. */
uint32_t attend_first_counted(const struct kv_item *item, uint32_t ring, uint32_t from);
/* Statistics that need the probabilities of a block's rows. */
uint32_t attend_block_needs(const struct attend_job *job, const struct attend_block *block);
/* The rows of a block as statistics want them. Only for a block whose statistics are not NULL. */
struct statistics_rows attend_block_statistics(
    const struct attend_job *job, const struct attend_block *block, uint32_t needs);
struct statistics_part attend_block_part(const struct attend_job *job, const struct attend_block *block);
/* The layer by which a block's head is scored; NULL: it is not. */
const struct score_layer *attend_block_scored(const struct attend_job *job, const struct attend_block *block);

/* ---- a split of a block ---- */

/* Queries of a block times 1 / sqrt(d): q [d][ATTEND_ROWS], row = token * group + head. */
void attend_block_pack(const struct attend_job *job, const struct attend_block *block, float *q);
/* Scores of a block's rows with the summary slot of its head, which there must be. */
void attend_summary_scores(
    const struct attend_job *job, const struct attend_block *block, const float *q, float scores[STATISTICS_ROWS]);
/* Finds the pages of a split, and turns its scores into p, m and l. Keeps them where `kept` is not NULL: then scores
 * are kept->p. Returns false when no row sees anything in it. */
bool attend_split_score(const struct attend_job *job, const struct attend_block *block, uint32_t split, const float *q,
    struct attend_pages *found, uint16_t masks[][ATTEND_PAGES], float *scores, struct split_softmax *to,
    struct statistics_split *kept);
/* Computes one split alone. Returns false when no row sees anything in it. */
bool attend_split_run(const struct attend_job *job, const struct attend_block *block, uint32_t split,
    struct split_place next, struct attend_workspace *workspace, struct attend_partial *partial,
    struct statistics_split *kept);

/* attend_later.c: chunk = item * K + KV head of a struct attend_job; for thread_pool_run. */
void attend_later_work(void *context, uint32_t chunk, uint32_t thread);

#endif
