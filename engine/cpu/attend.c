/* SPDX-License-Identifier: Apache-2.0 */
#include "engine/cpu/attend.h"
#include "engine/cpu/attend_tasks.h"
#include "engine/cpu/score_state.h"
#include "engine/cpu/statistics.h"

#include <stdatomic.h>
#include <stdlib.h>
#include <string.h>

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

/* A thread's way through the tasks. It takes the next one before the last split of the one before, to fetch its keys
 * meanwhile. */
struct attend_turn {
    const struct attend_job *job;
    uint32_t thread;
    const struct attend_task *next; /* NULL: there are no more */
    bool ahead;                     /* next has been taken */
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

/* What block_run keeps on its stack. */
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
    uint16_t seen[ATTEND_PAGES];     /* slots that the last token sees; earlier tokens see no others */
    bool uniform[ATTEND_PAGES];      /* the first token sees them too */
    uint32_t used[ATTEND_PAGES];     /* slots before the end of the sequence, as a mask */
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
    rope_table_free(scratch->rope);
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

static uint32_t divide_up(uint32_t a, uint32_t b) {
    return a / b + (a % b != 0);
}

static uint32_t block_rows(const struct attend_block *block) {
    return block->tokens * block->group;
}

static size_t partial_floats(const struct attend_job *job, const struct attend_block *block) {
    return sizeof(struct attend_partial) / sizeof(float) + (size_t)block_rows(block) * job->stride;
}

static const struct kv_head_view *block_view(const struct attend_job *job, const struct attend_block *block) {
    return &job->batch->views[(size_t)block->item * job->layout->kv_heads + block->kv_head];
}

static int32_t token_position(const struct attend_job *job, const struct attend_block *block, uint32_t token) {
    return (int32_t)(job->batch->items[block->item].position + block->token + token);
}

/* Statistics of a block's KV head; NULL when there are none. */
static const struct kv_statistics *block_to(const struct attend_job *job, const struct attend_block *block) {
    if (job->batch->statistics == NULL)
        return NULL;
    const struct kv_statistics *to =
        &job->batch->statistics[(size_t)block->item * job->layout->kv_heads + block->kv_head];
    return to->needs == 0 ? NULL : to;
}

/* The first row of an item that is counted in a ring of `ring` rows: an earlier one would be written over. */
static uint32_t first_counted(const struct kv_item *item, uint32_t ring, uint32_t from) {
    uint32_t first = item->rows > ring ? item->rows - ring : 0;
    return first > from ? first : from;
}

/* Statistics that need the probabilities of a block's rows. */
static uint32_t block_needs(const struct attend_job *job, const struct attend_block *block) {
    const struct kv_statistics *to = block_to(job, block);
    const struct kv_item *item = &job->batch->items[block->item];
    uint32_t end = block->token + block->tokens;
    if (to == NULL)
        return 0;
    uint32_t needs = to->needs & STATISTICS_SWEPT;
    if (first_counted(item, to->window, item->window_from) >= end)
        needs &= ~(uint32_t)(STATISTIC_WINDOW | STATISTIC_HEAD_WINDOW);
    if (first_counted(item, to->history, 0) >= end)
        needs &= ~(uint32_t)STATISTIC_ABOVE;
    return needs;
}

/* The layer by which a block's head is scored; NULL: it is not. */
static const struct score_layer *block_scored(const struct attend_job *job, const struct attend_block *block) {
    if (job->score == NULL || job->batch->scored[block->item].heads == NULL)
        return NULL;
    return &job->batch->scored[block->item];
}

/* Queries of a block times 1 / sqrt(d): q [rows][d], row = token * group + head. */
static void block_pack_queries(const struct attend_job *job, const struct attend_block *block, float *q) {
    const struct kv_layout *layout = job->layout;
    uint32_t dim = layout->head_dim;
    size_t stride = (size_t)(job->heads + 2 * layout->kv_heads) * dim;
    float scale = (float)(1 / sqrt((double)dim));
    size_t first = job->batch->items[block->item].first_row + block->token;
    for (uint32_t token = 0; token < block->tokens; token++) {
        const float *from = job->qkv + (first + token) * stride + (size_t)block->head * dim;
        for (uint32_t g = 0; g < block->group; g++)
            job->kernels->scale(from + (size_t)g * dim, scale, dim, q + (size_t)(token * block->group + g) * dim);
    }
}

static uint32_t split_slots(const struct kv_head_view *view, uint32_t split) {
    uint32_t first = split * ATTEND_SPLIT;
    return view->slots - first < ATTEND_SPLIT ? view->slots - first : ATTEND_SPLIT;
}

static void split_find_pages(
    const struct attend_job *job, const struct attend_block *block, uint32_t split, struct attend_pages *found) {
    const struct kv_head_view *view = block_view(job, block);
    uint32_t slots = split_slots(view, split);
    int32_t earliest = token_position(job, block, 0), latest = token_position(job, block, block->tokens - 1);
    found->count = 0;
    for (uint32_t slot = 0; slot < slots; slot += KV_PAGE_SLOTS) {
        char *page = kv_pool_page(job->batch->pool, view->pages[(split * ATTEND_SPLIT + slot) / KV_PAGE_SLOTS]);
        const int32_t *positions = kv_page_positions(job->layout, page);
        uint32_t used = slots - slot < KV_PAGE_SLOTS ? (1u << (slots - slot)) - 1 : 0xffff;
        uint32_t seen = job->kernels->visible(positions, latest) & used;
        if (seen == 0)
            continue;
        uint32_t i = found->count++;
        found->pages[i] = page;
        found->places[i] = (uint8_t)(slot / KV_PAGE_SLOTS);
        found->used[i] = used;
        found->seen[i] = (uint16_t)seen;
        found->uniform[i] = block->tokens == 1 || (job->kernels->visible(positions, earliest) & used) == seen;
    }
}

/* After the keys of a split its values are read. */
static void split_expect_values(const struct attend_job *job, struct attend_pages *found) {
    for (uint32_t i = 0; i < found->count; i++)
        found->ahead[i] = kv_page_values(job->layout, (char *)found->pages[i]);
}

/* After the values of a split the keys of `next` are read. The positions there are fetched now: they come first. */
static void split_expect_keys(const struct attend_job *job, struct split_place next, struct attend_pages *found) {
    const struct kv_head_view *view = next.block == NULL ? NULL : block_view(job, next.block);
    uint32_t first = next.split * ATTEND_PAGES, pages = view == NULL ? 0 : divide_up(view->slots, KV_PAGE_SLOTS);
    size_t values_at = (size_t)job->layout->head_dim * KV_PAGE_SLOTS * kv_number_bytes(job->layout->format);
    for (uint32_t i = 0; i < found->count; i++) {
        const char *page = found->pages[0]; /* is there already */
        if (first + i < pages) {
            page = kv_pool_page(job->batch->pool, view->pages[first + i]);
            __builtin_prefetch(kv_page_positions(job->layout, (char *)page), 0, 2);
        }
        found->ahead[i] = (const char *)((uintptr_t)page - values_at); /* to which the kernels add the same */
    }
}

/* The slots that one token sees. Returns false when it sees none. */
static bool token_masks(const struct attend_job *job, const struct attend_block *block, uint32_t token,
    const struct attend_pages *found, uint16_t masks[ATTEND_PAGES]) {
    int32_t limit = token_position(job, block, token);
    uint32_t any = 0;
    for (uint32_t i = 0; i < found->count; i++) {
        masks[i] = found->seen[i];
        if (!found->uniform[i]) {
            const int32_t *positions = kv_page_positions(job->layout, (char *)found->pages[i]);
            masks[i] = (uint16_t)(job->kernels->visible(positions, limit) & found->used[i]);
        }
        any |= masks[i];
    }
    return any != 0;
}

/* Adds p v page by page in ascending order; pages that all rows see alike go together. */
static void split_weigh(const struct attend_job *job, const struct attend_block *block,
    const struct attend_pages *found, uint16_t masks[][ATTEND_PAGES], const float *p, float *o) {
    uint32_t dim = job->layout->head_dim, page = 0;
    while (page < found->count) {
        uint32_t end = page + 1;
        while (end < found->count && found->uniform[end] == found->uniform[page])
            end++;
        const char *const *pages = found->pages + page, *const *ahead = found->ahead + page;
        if (found->uniform[page]) {
            job->format->weigh(p + page * KV_PAGE_SLOTS, block_rows(block), job->stride, dim, pages, ahead,
                found->seen + page, end - page, o);
        } else {
            for (uint32_t token = 0; token < block->tokens; token++) {
                size_t row = token * block->group;
                job->format->weigh(p + row * ATTEND_SPLIT + page * KV_PAGE_SLOTS, block->group, job->stride, dim, pages,
                    ahead, masks[token] + page, end - page, o + row * job->stride);
            }
        }
        page = end;
    }
}

/* The rows of a block as statistics want them. Only for a block whose statistics are not NULL. */
static struct statistics_rows block_statistics(
    const struct attend_job *job, const struct attend_block *block, uint32_t needs) {
    const struct kv_item *item = &job->batch->items[block->item];
    size_t view = (size_t)block->item * job->layout->kv_heads + block->kv_head;
    const struct kv_statistics *to = &job->batch->statistics[view];
    uint32_t window = first_counted(item, to->window, item->window_from), above = first_counted(item, to->history, 0);
    return (struct statistics_rows){
        .to = to,
        .needs = needs,
        .layer = job->batch->layer,
        .position = (uint32_t)token_position(job, block, 0),
        .tokens = block->tokens,
        .group = job->heads / job->layout->kv_heads,
        .own_slot = block_view(job, block)->first_slot + block->token,
        .prompt = item->prompt,
        .window_token = window > block->token ? window - block->token : 0,
        .above_token = above > block->token ? above - block->token : 0,
    };
}

static struct statistics_part block_part(const struct attend_job *job, const struct attend_block *block) {
    uint32_t group = job->heads / job->layout->kv_heads;
    return (struct statistics_part){block->head, block->head - block->kv_head * group, block->group};
}

static void split_add_noise(const struct attend_job *job, const struct attend_block *block, uint32_t row,
    const struct attend_pages *found, const float *scores, struct statistics_split *kept) {
    const int32_t *positions[ATTEND_PAGES];
    for (uint32_t i = 0; i < found->count; i++)
        positions[i] = kv_page_positions(job->layout, (char *)found->pages[i]);
    struct statistics_rows rows = block_statistics(job, block, block->needs);
    statistics_add_noise(job->statistics, &rows, block_part(job, block), row, scores, positions, job->kernels, kept);
}

/* Before the rows of a split: nothing is seen yet; what will be written is fetched. */
static void split_begin_kept(const struct attend_job *job, const struct attend_block *block, uint32_t split,
    const struct attend_pages *found, struct statistics_split *kept) {
    struct statistics_rows rows = block_statistics(job, block, block->needs);
    statistics_split_clear(&rows, kept);
    if (found->count == 0)
        return;
    kept->pages = found->count;
    memcpy(kept->places, found->places, sizeof kept->places);
    if (block->tokens == 1)
        statistics_expect(&rows, split, found->places[found->count - 1] + 1u);
}

static void row_clear(
    const struct attend_job *job, const struct attend_block *block, uint32_t row, struct statistics_split *kept) {
    struct statistics_rows rows = block_statistics(job, block, block->needs);
    statistics_row_clear(&rows, block_part(job, block), row, kept);
}

/* m and l of one row whose scores become p. */
static void row_softmax(const struct attend_job *job, const struct attend_block *block, uint32_t row,
    const struct attend_pages *found, const uint16_t *masks, float *scores, struct split_softmax *to,
    struct statistics_split *kept) {
    if (kept != NULL && block->needs & STATISTIC_NOISY)
        split_add_noise(job, block, row, found, scores, kept);
    if (kept != NULL && block->needs & STATISTIC_ENTROPY)
        to->m[row] = job->kernels->softmax_entropy(scores, masks, found->count, &to->l[row], &kept->t[row]);
    else
        to->m[row] = job->kernels->softmax(scores, masks, found->count, &to->l[row]);
    if (kept != NULL) {
        kept->m[row] = to->m[row];
        kept->l[row] = to->l[row];
    }
}

/* Finds the pages of a split, and turns its scores into p, m and l. Keeps them where `kept` is not NULL: then scores
 * are kept->p. Returns false when no row sees anything in it. */
static bool split_score(const struct attend_job *job, const struct attend_block *block, uint32_t split, const float *q,
    struct attend_pages *found, uint16_t masks[][ATTEND_PAGES], float *scores, struct split_softmax *to,
    struct statistics_split *kept) {
    split_find_pages(job, block, split, found);
    if (kept != NULL)
        split_begin_kept(job, block, split, found, kept);
    const struct score_layer *scored = block_scored(job, block);
    if (scored != NULL)
        score_expect(scored, block->kv_head, split * ATTEND_SPLIT, split_slots(block_view(job, block), split));
    if (found->count == 0)
        return false;
    uint32_t dim = job->layout->head_dim;
    split_expect_values(job, found);
    job->format->scores(q, block_rows(block), dim, dim, found->pages, found->ahead, found->count, scores);
    for (uint32_t token = 0; token < block->tokens; token++) {
        bool sees = token_masks(job, block, token, found, masks[token]);
        for (uint32_t row = token * block->group; row < (token + 1) * block->group; row++) {
            to->l[row] = 0;
            if (sees)
                row_softmax(job, block, row, found, masks[token], scores + (size_t)row * ATTEND_SPLIT, to, kept);
            else if (kept != NULL)
                row_clear(job, block, row, kept);
        }
    }
    return true;
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

/* Computes one split alone. Returns false when no row sees anything in it. */
static bool split_run(const struct attend_job *job, const struct attend_block *block, uint32_t split,
    struct split_place next, struct attend_workspace *workspace, struct attend_partial *partial,
    struct statistics_split *kept) {
    struct attend_pages found;
    uint16_t own_masks[ATTEND_ROWS][ATTEND_PAGES], (*masks)[ATTEND_PAGES] = kept != NULL ? kept->masks : own_masks;
    float *scores = kept != NULL ? kept->p : workspace->scores;
    if (!split_score(job, block, split, workspace->q, &found, masks, scores, &partial->rows, kept))
        return false;
    memset(partial->o, 0, (size_t)block_rows(block) * job->stride * sizeof(float));
    split_expect_keys(job, next, &found);
    split_weigh(job, block, &found, masks, scores, partial->o);
    return true;
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

/* Scores of a block's rows with the summary slot of its head, which there must be. Its key is the first slot of a page
 * of its own, so that the kernels of pages serve. */
static void summary_scores(
    const struct attend_job *job, const struct attend_block *block, const float *q, float scores[STATISTICS_ROWS]) {
    uint32_t dim = job->layout->head_dim;
    const float *summary = block_view(job, block)->summary;
    float page[ATTEND_DIM_MAX * KV_PAGE_SLOTS] __attribute__((aligned(64)));
    float products[ATTEND_ROWS * ATTEND_SPLIT] __attribute__((aligned(64)));
    const char *pages[] = {(const char *)page};
    memset(page, 0, (size_t)dim * KV_PAGE_SLOTS * sizeof *page);
    memset(scores, 0, STATISTICS_ROWS * sizeof *scores);
    for (uint32_t i = 0; i < dim; i++)
        page[i * KV_PAGE_SLOTS] = summary[i];
    job->kernels->formats[KV_F32].scores(q, block_rows(block), dim, dim, pages, pages, 1, products);
    for (uint32_t row = 0; row < block_rows(block); row++)
        scores[row] = products[row * ATTEND_SPLIT] + summary[2 * dim];
}

/* One more slot after the last split: all rows see it, p = 1. Sets scores; returns whether there is one. */
static bool block_add_summary(const struct attend_job *job, const struct attend_block *block, const float *q,
    struct attend_partial *total, float scores[STATISTICS_ROWS]) {
    uint32_t dim = job->layout->head_dim;
    const float *summary = block_view(job, block)->summary;
    float value[ATTEND_DIM_MAX] = {0}; /* in whole vectors */
    if (summary == NULL)
        return false;
    memcpy(value, summary + dim, dim * sizeof *value);
    summary_scores(job, block, q, scores);
    for (uint32_t row = 0; row < block_rows(block); row++)
        row_merge(job, total, row, scores[row], 1, value);
    return true;
}

/* The ring of outputs: a row of it is one token's, so that no two blocks write the same. */
static void block_keep_outputs(const struct attend_job *job, const struct attend_block *block) {
    const struct kv_statistics *to = block_to(job, block);
    if (to == NULL || (to->needs & STATISTIC_OUTPUTS) == 0)
        return;
    const struct kv_item *item = &job->batch->items[block->item];
    uint32_t dim = job->layout->head_dim, from = first_counted(item, to->window, item->window_from);
    uint32_t group = job->heads / job->layout->kv_heads, first = block->head - block->kv_head * group;
    for (uint32_t token = 0; token < block->tokens; token++) {
        if (block->token + token < from)
            continue;
        const float *out =
            job->out + ((size_t)(item->first_row + block->token + token) * job->heads + block->head) * dim;
        size_t row = (size_t)((uint32_t)token_position(job, block, token) % to->window) * group + first;
        memcpy(to->outputs + row * dim, out, (size_t)block->group * dim * sizeof(float));
    }
}

static void block_finish(
    const struct attend_job *job, const struct attend_block *block, const struct attend_partial *total) {
    uint32_t dim = job->layout->head_dim;
    size_t first = job->batch->items[block->item].first_row + block->token;
    for (uint32_t row = 0; row < block_rows(block); row++) {
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
    return block->needs == 0 ? 0 : block->splits * statistics_split_bytes(block->needs, block_rows(block));
}

/* What is kept of a split; NULL when the block keeps nothing. */
static struct statistics_split *block_kept(const struct attend_block *block, char *kept, uint32_t split) {
    if (block->needs == 0)
        return NULL;
    return (struct statistics_split *)(kept + split * statistics_split_bytes(block->needs, block_rows(block)));
}

/* Adds what the splits of a whole block have left. summary: scores with the summary slot, or NULL. */
static void block_add_statistics(
    const struct attend_job *job, const struct attend_block *block, char *kept, const float *summary) {
    if (block->needs == 0 || block->splits == 0)
        return;
    struct statistics_rows rows = block_statistics(job, block, block->needs);
    size_t view = (size_t)block->item * job->layout->kv_heads + block->kv_head;
    statistics_add(job->statistics, &rows, block_part(job, block), block_kept(block, kept, 0),
        statistics_split_bytes(block->needs, block_rows(block)), block->splits, summary,
        &job->locks[view % ATTEND_LOCKS]);
}

/* When all splits are merged. */
static void block_end(const struct attend_job *job, const struct attend_block *block, const float *q,
    struct attend_partial *total, char *kept, uint32_t thread) {
    float scores[STATISTICS_ROWS];
    bool summary = block_add_summary(job, block, q, total, scores);
    block_finish(job, block, total);
    block_add_statistics(job, block, kept, summary ? scores : NULL);
    const struct score_layer *scored = block_scored(job, block);
    if (scored != NULL && scored->heads[block->kv_head].worst != NULL)
        score_head_alone(job->score, scored, block->kv_head, thread);
}

/* All splits of a block, merged as they come. kept: memory for block_kept_bytes. */
static void block_run_whole(
    const struct attend_job *job, const struct attend_block *block, struct attend_turn *turn, char *kept) {
    struct attend_workspace workspace;
    union attend_partial_space total, next;
    uint32_t rows = block_rows(block);
    partial_clear(&total.partial, rows);
    block_pack_queries(job, block, workspace.q);
    for (uint32_t split = 0; split < block->splits; split++) {
        struct split_place following = turn_following(turn, block, split, block->splits);
        if (split_run(job, block, split, following, &workspace, &next.partial, block_kept(block, kept, split)))
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
    uint32_t rows = block_rows(block);
    char *kept = block->needs == 0 ? NULL : job->kept + block->kept;
    block_pack_queries(job, block, workspace.q);
    for (uint32_t split = first; split < end; split++) {
        struct attend_partial *partial = block_partial(job, block, split);
        struct split_place following = turn_following(turn, block, split, end);
        if (!split_run(job, block, split, following, &workspace, partial, block_kept(block, kept, split)))
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

/* How an item's rows fall into blocks. */
struct attend_shape {
    uint32_t group;        /* query heads a KV head */
    uint32_t block_group;  /* of which in one block */
    uint32_t block_tokens; /* tokens in one block */
};

static struct attend_shape attend_shape(const struct attend_job *job) {
    uint32_t group = job->heads / job->layout->kv_heads;
    if (group >= ATTEND_ROWS)
        return (struct attend_shape){group, ATTEND_ROWS, 1};
    return (struct attend_shape){group, group, ATTEND_ROWS / group};
}

static uint32_t item_blocks(const struct attend_job *job, struct attend_shape shape, uint32_t item) {
    return divide_up(job->batch->items[item].rows, shape.block_tokens) * divide_up(shape.group, shape.block_group) *
           job->layout->kv_heads;
}

/* Block `index` of an item: the last tokens first, since they see the most; KV heads innermost. */
static void block_set(const struct attend_job *job, struct attend_shape shape, uint32_t item, uint32_t index,
    struct attend_block *block) {
    uint32_t kv_heads = job->layout->kv_heads, parts = divide_up(shape.group, shape.block_group);
    uint32_t rows = job->batch->items[item].rows;
    uint32_t tile = divide_up(rows, shape.block_tokens) - 1 - index / (kv_heads * parts);
    uint32_t part = index / kv_heads % parts;
    block->item = item;
    block->kv_head = index % kv_heads;
    block->token = tile * shape.block_tokens;
    block->tokens = rows - block->token < shape.block_tokens ? rows - block->token : shape.block_tokens;
    uint32_t head = part * shape.block_group;
    block->head = block->kv_head * shape.group + head;
    block->group = shape.group - head < shape.block_group ? shape.group - head : shape.block_group;
    block->splits = divide_up(block_view(job, block)->slots, ATTEND_SPLIT);
    block->needs = parts == 1 ? block_needs(job, block) : 0; /* a mean needs the whole group: later_tokens */
    atomic_init(&block->left, 1);
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
        blocks_count += item_blocks(job, shape, item);
    if (!grow(&scratch->blocks, &scratch->blocks_capacity, blocks_count, sizeof(struct attend_block)) ||
        !grow(&scratch->queues, &scratch->queues_capacity, threads, sizeof(struct attend_queue)))
        return 0;
    job->tasks = (struct attend_tasks){scratch->blocks, NULL, scratch->queues, threads};
    struct attend_block *block = job->tasks.blocks;
    uint64_t cost = 0;
    for (uint32_t item = 0; item < job->batch->items_count; item++) {
        uint32_t count = item_blocks(job, shape, item);
        for (uint32_t index = 0; index < count; index++, block++) {
            block_set(job, shape, item, index, block);
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
    split_score(job, &part->block, split, part->q, &found, to->masks, to->p, &softmax, to);
}

static void later_totals(const struct attend_job *job, const struct later_part *part,
    const struct statistics_rows *rows, struct statistics_totals *totals) {
    union later_split space;
    statistics_begin(totals);
    for (uint32_t split = 0; split < part->block.splits; split++) {
        later_split(job, part, split, &space.split);
        statistics_total(job->statistics, rows, block_part(job, &part->block), &space.split, totals);
    }
    if (block_view(job, &part->block)->summary != NULL) {
        float scores[STATISTICS_ROWS];
        summary_scores(job, &part->block, part->q, scores);
        statistics_total_summary(job->statistics, rows, block_part(job, &part->block), scores, totals);
    }
}

/* All parts of the tokens of `first`, a block that begins with its group's first head. */
static void later_tokens(const struct attend_job *job, const struct attend_block *first, uint32_t needs) {
    struct statistics_totals totals[PARTS_KEPT];
    struct statistics_work work;
    struct later_part part;
    union later_split space;
    double entropies[ATTEND_ROWS] = {0};
    uint32_t group = job->heads / job->layout->kv_heads, heads = first->group, parts = divide_up(group, heads);
    struct statistics_rows rows = block_statistics(job, first, needs);
    for (uint32_t split = 0; split < first->splits; split++) {
        for (uint32_t i = 0; i < parts; i++) {
            part.block = *first;
            part.block.needs = needs;
            part.block.head += i * heads;
            part.block.group = i + 1 < parts ? heads : group - i * heads;
            block_pack_queries(job, &part.block, part.q);
            struct statistics_part place = block_part(job, &part.block);
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

static void later_work(void *context, uint32_t chunk, uint32_t thread) {
    const struct attend_job *job = context;
    struct attend_shape shape = attend_shape(job);
    uint32_t kv_heads = job->layout->kv_heads, item = chunk / kv_heads;
    uint32_t tiles = divide_up(job->batch->items[item].rows, shape.block_tokens);
    uint32_t parts = divide_up(shape.group, shape.block_group);
    (void)thread;
    for (uint32_t tile = 0; tile < tiles; tile++) {
        struct attend_block block;
        block_set(job, shape, item, tile * kv_heads * parts + chunk % kv_heads, &block);
        uint32_t needs = block_needs(job, &block);
        if (needs != 0)
            later_tokens(job, &block, needs);
    }
}

/* Needs no memory but its stack: one block after the other. */
static void attend_serially(struct attend_job *job) {
    struct attend_shape shape = attend_shape(job);
    for (uint32_t item = 0; item < job->batch->items_count; item++) {
        uint32_t count = item_blocks(job, shape, item);
        for (uint32_t index = 0; index < count; index++) {
            struct attend_block block;
            block_set(job, shape, item, index, &block);
            block.needs = 0;
            block_run_whole(job, &block, NULL, NULL);
        }
    }
    for (uint32_t head = 0; job->batch->statistics != NULL && head < heads_count(job); head++)
        later_work(job, head, 0);
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
        thread_pool_run(cpu->threads, heads_count(&job), later_work, &job);
}
