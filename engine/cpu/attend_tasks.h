/* SPDX-License-Identifier: Apache-2.0
 *
 * How attention is handed out to threads: blocks of rows are cut into tasks, and these lie in queues of equal cost, one
 * a thread. A thread does those of its own queue, then takes of others.
 *
 * A thread gets the same part of a batch again and again, so that what it wrote of a head's statistics is still in its
 * own caches. Blocks stay whole, so that what a thread keeps of one is too, until the queue is nearly empty; then tasks
 * become ever smaller, for threads to end at nearly the same time.
 */
#ifndef ENGINE_CPU_ATTEND_TASKS_H
#define ENGINE_CPU_ATTEND_TASKS_H

#include <stdatomic.h>
#include <stddef.h>
#include <stdint.h>

/* Rows that read one KV head of one item together: `tokens` consecutive tokens, each with `group` query heads. */
struct attend_block {
    uint32_t item;
    uint32_t kv_head;
    uint32_t token; /* the first, counted from the item's first */
    uint32_t tokens;
    uint32_t head; /* first query head */
    uint32_t group;
    uint32_t splits;
    uint32_t needs;        /* statistics for which the probabilities are kept, STATISTICS_SWEPT or fewer */
    size_t kept;           /* offset of the splits' probabilities; used when there are several tasks */
    size_t partials;       /* offset of the splits' results; used when there are several tasks */
    _Atomic uint32_t left; /* tasks of this block that have not finished */
};

/* Some splits of a block: all of them, or a part whose results the task that finishes last merges. */
struct attend_task {
    uint32_t block;
    uint32_t first;
    uint32_t end;
};

/* The tasks of one thread that nobody has taken. */
struct attend_queue {
    _Alignas(64) _Atomic uint32_t next;
    uint32_t end;
};

struct attend_tasks {
    struct attend_block *blocks;
    struct attend_task *list;
    struct attend_queue *queues; /* [threads] */
    uint32_t threads;
};

/* Arithmetic and reading of one split, in some unit. */
static inline uint64_t attend_split_cost(const struct attend_block *block) {
    return 8 + block->tokens * block->group;
}

/* Cuts blocks, whose splits cost `total`, into tasks; returns how many there are, and each block's number of them in
 * its `left`. list NULL: only counts them. */
uint32_t attend_tasks_cut(struct attend_tasks *tasks, size_t blocks_count, uint64_t total);

/* The next task for a thread, NULL when all are taken. */
const struct attend_task *attend_tasks_take(const struct attend_tasks *tasks, uint32_t thread);

#endif
