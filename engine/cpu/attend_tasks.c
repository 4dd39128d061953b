/* SPDX-License-Identifier: Apache-2.0 */
#include "engine/cpu/attend_tasks.h"

/* A task is at most 1 / SHARE of what is left of its queue. */
enum { SHARE = 2 };

/* Splits that the next task takes of a block, of a queue in which work of cost `room` is still missing. */
static uint32_t task_splits(const struct attend_tasks *tasks, uint32_t splits, uint64_t cost, uint64_t room) {
    uint64_t most = room / SHARE / cost;
    if (tasks->threads == 1 || splits <= most)
        return splits;
    return most < 1 ? 1 : (uint32_t)most;
}

/* Cost of all queues before `queue`. */
static uint64_t cost_before(const struct attend_tasks *tasks, uint64_t total, uint32_t queue) {
    return queue == tasks->threads ? total : total / tasks->threads * queue;
}

uint32_t attend_tasks_cut(struct attend_tasks *tasks, size_t blocks_count, uint64_t total) {
    uint64_t done = 0, limit = cost_before(tasks, total, 1);
    uint32_t count = 0, queue = 0;
    atomic_init(&tasks->queues[0].next, 0);
    for (size_t i = 0; i < blocks_count; i++) {
        struct attend_block *block = &tasks->blocks[i];
        uint32_t first = 0, before = count;
        do { /* a block without slots is a task too */
            uint64_t cost = attend_split_cost(block);
            uint32_t splits = task_splits(tasks, block->splits - first, cost, limit - done);
            if (tasks->list != NULL)
                tasks->list[count] = (struct attend_task){(uint32_t)i, first, first + splits};
            count++;
            first += splits;
            done += splits * cost;
            while (done >= limit && queue + 1 < tasks->threads) {
                tasks->queues[queue++].end = count;
                atomic_init(&tasks->queues[queue].next, count);
                limit = cost_before(tasks, total, queue + 1);
            }
        } while (first < block->splits);
        atomic_init(&block->left, count - before);
    }
    tasks->queues[queue].end = count;
    return count;
}

const struct attend_task *attend_tasks_take(const struct attend_tasks *tasks, uint32_t thread) {
    for (uint32_t i = 0; i < tasks->threads; i++) {
        struct attend_queue *queue = &tasks->queues[(thread + i) % tasks->threads];
        if (atomic_load_explicit(&queue->next, memory_order_relaxed) >= queue->end)
            continue;
        uint32_t task = atomic_fetch_add_explicit(&queue->next, 1, memory_order_relaxed);
        if (task < queue->end)
            return &tasks->list[task];
    }
    return NULL;
}
