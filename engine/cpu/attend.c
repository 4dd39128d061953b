/* SPDX-License-Identifier: Apache-2.0 */
#include "engine/cpu/attend_block.h"

#include <stdatomic.h>
#include <stdlib.h>
#include <string.h>

/* A thread's way through the tasks. It takes the next one before the last split of the one before, to fetch its keys
 * meanwhile. */
struct attend_turn {
    const struct attend_job *job;
    uint32_t thread;
    const struct attend_task *next; /* NULL: there are no more */
    bool ahead;                     /* next has been taken */
};

const struct attend_kernels *cpu_attend_kernels(enum cpu_tier tier) {
#if defined(__x86_64__)
    if (tier >= CPU_AVX512)
        return &attend_kernels_avx512;
    if (tier >= CPU_AVX2)
        return &attend_kernels_avx2;
#endif
    (void)tier;
    return &attend_kernels_scalar;
}

struct attend_scratch *attend_scratch_get(struct cpu_backend *cpu) {
    if (cpu->attend_scratch != NULL)
        return cpu->attend_scratch;
    struct attend_scratch *scratch = cpu->attend_scratch = calloc(1, sizeof *scratch);
    for (int i = 0; scratch != NULL && i < ATTEND_LOCKS; i++)
        pthread_mutex_init(&scratch->locks[i], NULL);
    return scratch;
}

void cpu_attend_scratch_free(struct cpu_backend *cpu) {
    struct attend_scratch *scratch = cpu->attend_scratch;
    if (scratch == NULL)
        return;
    for (int i = 0; i < ROPE_TABLES; i++)
        rope_table_free(scratch->rope[i]);
    free(scratch->tasks);
    free(scratch->queues);
    free(scratch->blocks);
    free(scratch->partials);
    free(scratch->kept);
    for (int i = 0; i < ATTEND_LOCKS; i++)
        pthread_mutex_destroy(&scratch->locks[i]);
    free(scratch);
    cpu->attend_scratch = NULL;
}

static size_t partial_floats(const struct attend_job *job, const struct attend_block *block) {
    return sizeof(struct attend_partial) / sizeof(float) + (size_t)attend_block_rows(block) * job->stride;
}

/* What a thread computes after a split of a task that ends before split `end`. turn NULL: there are no tasks. */
static struct split_place turn_following(
    struct attend_turn *turn, const struct attend_block *block, uint32_t split, uint32_t end) {
    if (split + 1 < end)
        return (struct split_place){block, split + 1};
    if (turn == NULL)
        return (struct split_place){NULL, 0};
    turn->next = attend_tasks_take(&turn->job->tasks, turn->thread);
    turn->ahead = true;
    if (turn->next == NULL)
        return (struct split_place){NULL, 0};
    return (struct split_place){&turn->job->tasks.blocks[turn->next->block], turn->next->first};
}

/* The one way in which results are merged: m, l and o of slots after those of `total`. */
static void row_merge(const struct attend_job *job, struct attend_partial *total, uint32_t row, float next_m,
    float next_l, const float *next_o) {
    const struct attend_kernels *kernels = job->kernels;
    float *o = total->o + (size_t)row * job->stride;
    if (total->rows.l[row] == 0) {
        total->rows.m[row] = next_m;
        total->rows.l[row] = next_l;
        memcpy(o, next_o, job->stride * sizeof(float));
        return;
    }
    float m = next_m > total->rows.m[row] ? next_m : total->rows.m[row];
    float keep = kernels->exp(total->rows.m[row] - m), add = kernels->exp(next_m - m);
    total->rows.m[row] = m;
    total->rows.l[row] = total->rows.l[row] * keep + next_l * add;
    kernels->merge(o, keep, next_o, add, job->layout->head_dim);
}

static void partial_merge(
    const struct attend_job *job, uint32_t rows, struct attend_partial *total, const struct attend_partial *next) {
    for (uint32_t row = 0; row < rows; row++) {
        if (next->rows.l[row] != 0)
            row_merge(job, total, row, next->rows.m[row], next->rows.l[row], next->o + (size_t)row * job->stride);
    }
}

static void partial_clear(struct attend_partial *partial, uint32_t rows) {
    memset(partial->rows.l, 0, rows * sizeof(float));
}

/* ---- the summary slot ---- */

/* One more slot after the last split: all rows see it, p = 1. Sets scores; returns whether there is one. */
static bool block_add_summary(const struct attend_job *job, const struct attend_block *block, const float *q,
    struct attend_partial *total, float scores[STATISTICS_ROWS]) {
    uint32_t dim = job->layout->head_dim;
    const float *summary = attend_block_view(job, block)->summary;
    float value[ATTEND_DIM_MAX] = {0}; /* in whole vectors */
    if (summary == NULL)
        return false;
    memcpy(value, summary + dim, dim * sizeof *value);
    attend_summary_scores(job, block, q, scores);
    for (uint32_t row = 0; row < attend_block_rows(block); row++)
        row_merge(job, total, row, scores[row], 1, value);
    return true;
}

/* The ring of outputs: a row of it is one token's, so that no two blocks write the same. */
static void block_keep_outputs(const struct attend_job *job, const struct attend_block *block) {
    const struct kv_statistics *to = attend_block_to(job, block);
    if (to == NULL || (to->needs & STATISTIC_OUTPUTS) == 0)
        return;
    const struct kv_item *item = &job->batch->items[block->item];
    uint32_t dim = job->layout->head_dim, from = attend_first_counted(item, to->window, item->window_from);
    uint32_t group = job->heads / job->layout->kv_heads, first = block->head - block->kv_head * group;
    for (uint32_t token = 0; token < block->tokens; token++) {
        if (block->token + token < from)
            continue;
        const float *out =
            job->out + ((size_t)(item->first_row + block->token + token) * job->heads + block->head) * dim;
        size_t row = (size_t)((uint32_t)attend_token_position(job, block, token) % to->window) * group + first;
        memcpy(to->outputs + row * dim, out, (size_t)block->group * dim * sizeof(float));
    }
}

static void block_finish(
    const struct attend_job *job, const struct attend_block *block, const struct attend_partial *total) {
    uint32_t dim = job->layout->head_dim;
    size_t first = job->batch->items[block->item].first_row + block->token;
    for (uint32_t row = 0; row < attend_block_rows(block); row++) {
        size_t token = first + row / block->group, head = block->head + row % block->group;
        float *out = job->out + (token * job->heads + head) * dim;
        if (total->rows.l[row] == 0)
            memset(out, 0, dim * sizeof(float));
        else
            job->kernels->scale(total->o + (size_t)row * job->stride, 1 / total->rows.l[row], dim, out);
    }
    block_keep_outputs(job, block);
}

/* A partial result on the stack. */
union attend_partial_space {
    struct attend_partial partial;
    float floats[2 * ATTEND_ROWS + ATTEND_ROWS * ATTEND_DIM_MAX];
};

static size_t block_kept_bytes(const struct attend_block *block) {
    return block->needs == 0 ? 0 : block->splits * statistics_split_bytes(block->needs, attend_block_rows(block));
}

/* What is kept of a split; NULL when the block keeps nothing. */
static struct statistics_split *block_kept(const struct attend_block *block, char *kept, uint32_t split) {
    if (block->needs == 0)
        return NULL;
    return (struct statistics_split *)(kept + split * statistics_split_bytes(block->needs, attend_block_rows(block)));
}

/* Adds what the splits of a whole block have left. summary: scores with the summary slot, or NULL. */
static void block_add_statistics(
    const struct attend_job *job, const struct attend_block *block, char *kept, const float *summary) {
    if (block->needs == 0 || block->splits == 0)
        return;
    struct statistics_rows rows = attend_block_statistics(job, block, block->needs);
    size_t view = (size_t)block->item * job->layout->kv_heads + block->kv_head;
    statistics_add(job->statistics, &rows, attend_block_part(job, block), block_kept(block, kept, 0),
        statistics_split_bytes(block->needs, attend_block_rows(block)), block->splits, summary,
        &job->locks[view % ATTEND_LOCKS]);
}

/* When all splits are merged. */
static void block_end(const struct attend_job *job, const struct attend_block *block, const float *q,
    struct attend_partial *total, char *kept, uint32_t thread) {
    float scores[STATISTICS_ROWS];
    bool summary = block_add_summary(job, block, q, total, scores);
    block_finish(job, block, total);
    block_add_statistics(job, block, kept, summary ? scores : NULL);
    const struct score_layer *scored = attend_block_scored(job, block);
    if (scored != NULL && scored->heads[block->kv_head].worst != NULL)
        score_head_alone(job->score, scored, block->kv_head, thread);
}

/* All splits of a block, merged as they come. kept: memory for block_kept_bytes. */
static void block_run_whole(
    const struct attend_job *job, const struct attend_block *block, struct attend_turn *turn, char *kept) {
    struct attend_workspace workspace;
    union attend_partial_space total, next;
    uint32_t rows = attend_block_rows(block);
    partial_clear(&total.partial, rows);
    attend_block_pack(job, block, workspace.q);
    for (uint32_t split = 0; split < block->splits; split++) {
        struct split_place following = turn_following(turn, block, split, block->splits);
        if (attend_split_run(job, block, split, following, &workspace, &next.partial, block_kept(block, kept, split)))
            partial_merge(job, rows, &total.partial, &next.partial);
    }
    block_end(job, block, workspace.q, &total.partial, kept, turn != NULL ? turn->thread : 0);
}

static struct attend_partial *block_partial(
    const struct attend_job *job, const struct attend_block *block, uint32_t split) {
    return (struct attend_partial *)(job->partials + block->partials + split * partial_floats(job, block));
}

/* Some splits of a block, kept apart; the last task of the block merges all of them in order. */
static void block_run_part(
    const struct attend_job *job, struct attend_block *block, uint32_t first, uint32_t end, struct attend_turn *turn) {
    struct attend_workspace workspace;
    uint32_t rows = attend_block_rows(block);
    char *kept = block->needs == 0 ? NULL : job->kept + block->kept;
    attend_block_pack(job, block, workspace.q);
    for (uint32_t split = first; split < end; split++) {
        struct attend_partial *partial = block_partial(job, block, split);
        struct split_place following = turn_following(turn, block, split, end);
        if (!attend_split_run(job, block, split, following, &workspace, partial, block_kept(block, kept, split)))
            partial_clear(partial, rows);
    }
    if (atomic_fetch_sub_explicit(&block->left, 1, memory_order_acq_rel) != 1)
        return;
    struct attend_partial *total = block_partial(job, block, 0);
    for (uint32_t split = 1; split < block->splits; split++)
        partial_merge(job, rows, total, block_partial(job, block, split));
    block_end(job, block, workspace.q, total, kept, turn->thread);
}

static void task_run(const struct attend_task *task, struct attend_turn *turn) {
    const struct attend_job *job = turn->job;
    struct attend_block *block = &job->tasks.blocks[task->block];
    if (task->end - task->first == block->splits)
        block_run_whole(job, block, turn,
            block->needs == 0 ? NULL : job->kept + job->kept_shared + turn->thread * job->kept_thread);
    else
        block_run_part(job, block, task->first, task->end, turn);
}

/* One chunk a thread, which does tasks as long as there are any: a chunk that comes late finds none. */
static void attend_work(void *context, uint32_t chunk, uint32_t thread) {
    struct attend_turn turn = {.job = context, .thread = thread};
    (void)chunk;
    turn.next = attend_tasks_take(&turn.job->tasks, thread);
    while (turn.next != NULL) {
        const struct attend_task *task = turn.next;
        turn.ahead = false;
        task_run(task, &turn);
        if (!turn.ahead) /* a block without slots */
            turn.next = attend_tasks_take(&turn.job->tasks, thread);
    }
}

static uint32_t heads_count(const struct attend_job *job) {
    return job->batch->items_count * job->layout->kv_heads;
}

static bool grow(void **memory, size_t *capacity, size_t count, size_t bytes) {
    if (count <= *capacity)
        return true;
    void *larger = aligned_alloc(64, (count * bytes + 63) / 64 * 64);
    if (larger == NULL)
        return false;
    free(*memory);
    *memory = larger;
    *capacity = count;
    return true;
}

/* Fills blocks and tasks. Returns the number of tasks, 0 when there is no memory for them. */
static uint32_t attend_plan(struct attend_job *job, struct attend_scratch *scratch, uint32_t threads) {
    struct attend_shape shape = attend_shape(job);
    size_t blocks_count = 0, partials = 0;
    for (uint32_t item = 0; item < job->batch->items_count; item++)
        blocks_count += attend_item_blocks(job, shape, item);
    if (!grow(&scratch->blocks, &scratch->blocks_capacity, blocks_count, sizeof(struct attend_block)) ||
        !grow(&scratch->queues, &scratch->queues_capacity, threads, sizeof(struct attend_queue)))
        return 0;
    job->tasks = (struct attend_tasks){scratch->blocks, NULL, scratch->queues, threads};
    struct attend_block *block = job->tasks.blocks;
    uint64_t cost = 0;
    for (uint32_t item = 0; item < job->batch->items_count; item++) {
        uint32_t count = attend_item_blocks(job, shape, item);
        for (uint32_t index = 0; index < count; index++, block++) {
            attend_block_set(job, shape, item, index, block);
            cost += block->splits * attend_split_cost(block);
        }
    }
    uint32_t tasks_count = attend_tasks_cut(&job->tasks, blocks_count, cost);
    for (size_t i = 0; i < blocks_count; i++) {
        block = &job->tasks.blocks[i];
        bool whole = atomic_load_explicit(&block->left, memory_order_relaxed) == 1;
        size_t kept = block_kept_bytes(block);
        block->kept = job->kept_shared;
        if (!whole)
            job->kept_shared += kept;
        else if (kept > job->kept_thread)
            job->kept_thread = kept;
        block->partials = partials;
        partials += whole ? 0 : block->splits * partial_floats(job, block);
    }
    if (!grow(&scratch->tasks, &scratch->tasks_capacity, tasks_count, sizeof(struct attend_task)) ||
        !grow(&scratch->partials, &scratch->partials_capacity, partials, sizeof(float)) ||
        !grow(&scratch->kept, &scratch->kept_capacity, job->kept_shared + threads * job->kept_thread, 1))
        return 0;
    job->kept = scratch->kept;
    job->tasks.list = scratch->tasks;
    job->partials = scratch->partials;
    return attend_tasks_cut(&job->tasks, blocks_count, cost);
}

/* Needs no memory but its stack: one block after the other. */
static void attend_serially(struct attend_job *job) {
    struct attend_shape shape = attend_shape(job);
    for (uint32_t item = 0; item < job->batch->items_count; item++) {
        uint32_t count = attend_item_blocks(job, shape, item);
        for (uint32_t index = 0; index < count; index++) {
            struct attend_block block;
            attend_block_set(job, shape, item, index, &block);
            block.needs = 0;
            block_run_whole(job, &block, NULL, NULL);
        }
    }
    for (uint32_t head = 0; job->batch->statistics != NULL && head < heads_count(job); head++)
        attend_later_work(job, head, 0);
}

/* Scratch for the heads that are scored. False: none is, or they have to be scored later, since there is no memory or
 * their statistics come after the blocks. */
static bool scored_prepare(
    struct cpu_backend *cpu, const struct kv_batch *batch, uint32_t heads, struct score_call *call) {
    if (batch->scored == NULL || heads / batch->pool->layout.kv_heads > ATTEND_ROWS)
        return false;
    *call = (struct score_call){cpu, score_state_get(cpu), batch->pool, batch->scored, batch->items_count, heads};
    return call->state != NULL && score_scratch_prepare(call, NULL) == 0;
}

void cpu_attend(struct backend *backend, const struct kv_batch *batch, uint32_t heads, const float *qkv, float *out) {
    struct cpu_backend *cpu = cpu_backend(backend);
    struct attend_scratch *scratch = attend_scratch_get(cpu);
    const struct kv_layout *layout = &batch->pool->layout;
    struct attend_job job = {
        .kernels = cpu->attend,
        .format = &cpu->attend->formats[layout->format],
        .batch = batch,
        .layout = layout,
        .statistics = cpu->statistics,
        .locks = scratch == NULL ? NULL : scratch->locks,
        .heads = heads,
        .stride = attend_stride(layout->head_dim),
        .qkv = qkv,
        .out = out,
    };
    struct score_call score;
    if (scored_prepare(cpu, batch, heads, &score))
        job.score = &score;
    uint32_t threads = thread_pool_size(cpu->threads);
    uint32_t tasks = scratch == NULL ? 0 : attend_plan(&job, scratch, threads);
    if (tasks == 0) {
        job.score = NULL;
        attend_serially(&job);
        return;
    }
    thread_pool_run(cpu->threads, tasks < threads ? tasks : threads, attend_work, &job);
    if (batch->statistics != NULL && heads / layout->kv_heads > ATTEND_ROWS)
        thread_pool_run(cpu->threads, heads_count(&job), attend_later_work, &job);
}
