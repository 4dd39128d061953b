/* SPDX-License-Identifier: Apache-2.0 */
#include "engine/cpu/attend_block.h"

#include <stdlib.h>
#include <string.h>

const struct kv_statistics *attend_block_to(const struct attend_job *job, const struct attend_block *block) {
    if (job->batch->statistics == NULL)
        return NULL;
    const struct kv_statistics *to =
        &job->batch->statistics[(size_t)block->item * job->layout->kv_heads + block->kv_head];
    return to->needs == 0 ? NULL : to;
}

uint32_t attend_first_counted(const struct kv_item *item, uint32_t ring, uint32_t from) {
    uint32_t first = item->rows > ring ? item->rows - ring : 0;
    return first > from ? first : from;
}

uint32_t attend_block_needs(const struct attend_job *job, const struct attend_block *block) {
    const struct kv_statistics *to = attend_block_to(job, block);
    const struct kv_item *item = &job->batch->items[block->item];
    uint32_t end = block->token + block->tokens;
    if (to == NULL)
        return 0;
    uint32_t needs = to->needs & STATISTICS_SWEPT;
    if (attend_first_counted(item, to->window, item->window_from) >= end)
        needs &= ~(uint32_t)(STATISTIC_WINDOW | STATISTIC_HEAD_WINDOW);
    if (attend_first_counted(item, to->history, 0) >= end)
        needs &= ~(uint32_t)STATISTIC_ABOVE;
    return needs;
}

const struct score_layer *attend_block_scored(const struct attend_job *job, const struct attend_block *block) {
    if (job->score == NULL || job->batch->scored[block->item].heads == NULL)
        return NULL;
    return &job->batch->scored[block->item];
}

void attend_block_pack(const struct attend_job *job, const struct attend_block *block, float *q) {
    const struct kv_layout *layout = job->layout;
    uint32_t dim = layout->head_dim;
    size_t stride = (size_t)(job->heads + 2 * layout->kv_heads) * dim;
    float scale = job->batch->scale != 0 ? job->batch->scale : (float)(1 / sqrt((double)dim));
    size_t first = job->batch->items[block->item].first_row + block->token;
    for (uint32_t token = 0; token < block->tokens; token++) {
        const float *from = job->qkv + (first + token) * stride + (size_t)block->head * dim;
        for (uint32_t g = 0; g < block->group; g++, from += dim) {
            for (uint32_t c = 0; c < dim; c++)
                q[(size_t)c * ATTEND_ROWS + token * block->group + g] = from[c] * scale;
        }
    }
}

static uint32_t split_slots(const struct kv_head_view *view, uint32_t split) {
    uint32_t first = split * ATTEND_SPLIT;
    return view->slots - first < ATTEND_SPLIT ? view->slots - first : ATTEND_SPLIT;
}

/* Of a page's slots those that a row at `position` sees. */
static uint32_t page_seen(const struct attend_job *job, const int32_t *positions, int32_t position) {
    uint32_t seen = job->kernels->visible(positions, position);
    if (job->batch->window != 0 && (uint32_t)position >= job->batch->window)
        seen &= ~job->kernels->visible(positions, position - (int32_t)job->batch->window);
    return seen;
}

/* The same of all rows from one position to another together. */
static uint32_t page_seen_by_some(
    const struct attend_job *job, const int32_t *positions, int32_t earliest, int32_t latest) {
    uint32_t seen = job->kernels->visible(positions, latest);
    if (job->batch->window != 0 && (uint32_t)earliest >= job->batch->window)
        seen &= ~job->kernels->visible(positions, earliest - (int32_t)job->batch->window);
    return seen;
}

static void split_find_pages(
    const struct attend_job *job, const struct attend_block *block, uint32_t split, struct attend_pages *found) {
    const struct kv_head_view *view = attend_block_view(job, block);
    uint32_t slots = split_slots(view, split),
             gone = view->from_slot > split * ATTEND_SPLIT ? view->from_slot - split * ATTEND_SPLIT : 0;
    int32_t earliest = attend_token_position(job, block, 0),
            latest = attend_token_position(job, block, block->tokens - 1);
    found->count = 0;
    for (uint32_t slot = gone; slot < slots; slot += KV_PAGE_SLOTS) {
        char *page = kv_pool_page(job->batch->pool, view->pages[(split * ATTEND_SPLIT + slot) / KV_PAGE_SLOTS]);
        const int32_t *positions = kv_page_positions(job->layout, page);
        uint32_t used = slots - slot < KV_PAGE_SLOTS ? (1u << (slots - slot)) - 1 : 0xffff;
        uint32_t last = page_seen(job, positions, latest) & used, first = last, seen = last;
        if (block->tokens > 1) {
            first = page_seen(job, positions, earliest) & used;
            seen = page_seen_by_some(job, positions, earliest, latest) & used;
        }
        if (seen == 0)
            continue;
        uint32_t i = found->count++;
        found->pages[i] = page;
        found->places[i] = (uint8_t)(slot / KV_PAGE_SLOTS);
        found->used[i] = used;
        found->seen[i] = (uint16_t)seen;
        found->uniform[i] = first == seen && last == seen;
    }
}

/* After the keys of a split its values are read. */
static void split_expect_values(const struct attend_job *job, struct attend_pages *found) {
    for (uint32_t i = 0; i < found->count; i++)
        found->ahead[i] = kv_page_values(job->layout, (char *)found->pages[i]);
}

/* After the values of a split the keys of `next` are read. The positions there are fetched now: they come first. */
static void split_expect_keys(const struct attend_job *job, struct split_place next, struct attend_pages *found) {
    const struct kv_head_view *view = next.block == NULL ? NULL : attend_block_view(job, next.block);
    uint32_t first = next.split * ATTEND_PAGES, pages = view == NULL ? 0 : attend_divide_up(view->slots, KV_PAGE_SLOTS);
    size_t values_at = (size_t)job->layout->head_dim * KV_PAGE_SLOTS * kv_number_bytes(job->layout->format);
    for (uint32_t i = 0; i < found->count; i++) {
        const char *page = found->pages[0]; /* is there already */
        if (first + i < pages && (first + i) * KV_PAGE_SLOTS >= view->from_slot) {
            page = kv_pool_page(job->batch->pool, view->pages[first + i]);
            __builtin_prefetch(kv_page_positions(job->layout, (char *)page), 0, 2);
        }
        found->ahead[i] = (const char *)((uintptr_t)page - values_at); /* to which the kernels add the same */
    }
}

/* The slots that one token sees. Returns false when it sees none. */
static bool token_masks(const struct attend_job *job, const struct attend_block *block, uint32_t token,
    const struct attend_pages *found, uint16_t masks[ATTEND_PAGES]) {
    int32_t limit = attend_token_position(job, block, token);
    uint32_t any = 0;
    for (uint32_t i = 0; i < found->count; i++) {
        masks[i] = found->seen[i];
        if (!found->uniform[i]) {
            const int32_t *positions = kv_page_positions(job->layout, (char *)found->pages[i]);
            masks[i] = (uint16_t)(page_seen(job, positions, limit) & found->used[i]);
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
            job->format->weigh(p + page * KV_PAGE_SLOTS, attend_block_rows(block), job->stride, dim, pages, ahead,
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

struct statistics_rows attend_block_statistics(
    const struct attend_job *job, const struct attend_block *block, uint32_t needs) {
    const struct kv_item *item = &job->batch->items[block->item];
    size_t view = (size_t)block->item * job->layout->kv_heads + block->kv_head;
    const struct kv_statistics *to = &job->batch->statistics[view];
    uint32_t window = attend_first_counted(item, to->window, item->window_from),
             above = attend_first_counted(item, to->history, 0);
    return (struct statistics_rows){
        .to = to,
        .needs = needs,
        .layer = job->batch->layer,
        .position = (uint32_t)attend_token_position(job, block, 0),
        .tokens = block->tokens,
        .group = job->heads / job->layout->kv_heads,
        .own_slot = attend_block_view(job, block)->first_slot + block->token,
        .prompt = item->prompt,
        .window_token = window > block->token ? window - block->token : 0,
        .above_token = above > block->token ? above - block->token : 0,
    };
}

struct statistics_part attend_block_part(const struct attend_job *job, const struct attend_block *block) {
    uint32_t group = job->heads / job->layout->kv_heads;
    uint32_t before = job->layout->first_head * group; /* heads of the model, of other ranks */
    return (struct statistics_part){before + block->head, block->head - block->kv_head * group, block->group};
}

static void split_add_noise(const struct attend_job *job, const struct attend_block *block, uint32_t row,
    const struct attend_pages *found, const float *scores, struct statistics_split *kept) {
    const int32_t *positions[ATTEND_PAGES];
    for (uint32_t i = 0; i < found->count; i++)
        positions[i] = kv_page_positions(job->layout, (char *)found->pages[i]);
    struct statistics_rows rows = attend_block_statistics(job, block, block->needs);
    statistics_add_noise(
        job->statistics, &rows, attend_block_part(job, block), row, scores, positions, job->kernels, kept);
}

/* What the ring's rows hold of slots whose tokens came after the rows' queries is nobody's. */
static void split_find_counted(const struct attend_job *job, const struct statistics_rows *rows,
    const struct attend_pages *found, struct statistics_split *kept) {
    for (uint32_t token = rows->window_token; token < rows->tokens; token++) {
        int32_t left = (int32_t)(rows->position + token - rows->to->window); /* below 0: nobody */
        for (uint32_t i = 0; i < found->count; i++)
            kept->counted[token][i] =
                (uint16_t)job->kernels->visible(kv_page_positions(job->layout, (char *)found->pages[i]), left);
    }
}

/* Before the rows of a split: nothing is seen yet; what will be written is fetched. */
static void split_begin_kept(const struct attend_job *job, const struct attend_block *block, uint32_t split,
    const struct attend_pages *found, struct statistics_split *kept) {
    struct statistics_rows rows = attend_block_statistics(job, block, block->needs);
    statistics_split_clear(&rows, kept);
    if (found->count == 0)
        return;
    kept->pages = found->count;
    memcpy(kept->places, found->places, sizeof kept->places);
    if (rows.needs & STATISTIC_WINDOW)
        split_find_counted(job, &rows, found, kept);
    if (block->tokens == 1)
        statistics_expect(&rows, split, found->places[found->count - 1] + 1u);
}

static void row_clear(
    const struct attend_job *job, const struct attend_block *block, uint32_t row, struct statistics_split *kept) {
    struct statistics_rows rows = attend_block_statistics(job, block, block->needs);
    statistics_row_clear(&rows, attend_block_part(job, block), row, kept);
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

bool attend_split_score(const struct attend_job *job, const struct attend_block *block, uint32_t split, const float *q,
    struct attend_pages *found, uint16_t masks[][ATTEND_PAGES], float *scores, struct split_softmax *to,
    struct statistics_split *kept) {
    split_find_pages(job, block, split, found);
    if (kept != NULL)
        split_begin_kept(job, block, split, found, kept);
    const struct score_layer *scored = attend_block_scored(job, block);
    if (scored != NULL)
        score_expect(scored, block->kv_head, split * ATTEND_SPLIT, split_slots(attend_block_view(job, block), split));
    if (found->count == 0)
        return false;
    uint32_t dim = job->layout->head_dim;
    split_expect_values(job, found);
    job->format->scores(q, attend_block_rows(block), dim, found->pages, found->ahead, found->count, scores);
    for (uint32_t row = 0; job->batch->cap != 0 && row < attend_block_rows(block); row++)
        job->kernels->cap(scores + (size_t)row * ATTEND_SPLIT, found->count * KV_PAGE_SLOTS, job->batch->cap);
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

bool attend_split_run(const struct attend_job *job, const struct attend_block *block, uint32_t split,
    struct split_place next, struct attend_workspace *workspace, struct attend_partial *partial,
    struct statistics_split *kept) {
    struct attend_pages found;
    uint16_t own_masks[ATTEND_ROWS][ATTEND_PAGES], (*masks)[ATTEND_PAGES] = kept != NULL ? kept->masks : own_masks;
    float *scores = kept != NULL ? kept->p : workspace->scores;
    if (!attend_split_score(job, block, split, workspace->q, &found, masks, scores, &partial->rows, kept))
        return false;
    memset(partial->o, 0, (size_t)attend_block_rows(block) * job->stride * sizeof(float));
    split_expect_keys(job, next, &found);
    split_weigh(job, block, &found, masks, scores, partial->o);
    return true;
}

/* The slot's key is the first slot of a page of its own, so that the kernels of pages serve. */
void attend_summary_scores(
    const struct attend_job *job, const struct attend_block *block, const float *q, float scores[STATISTICS_ROWS]) {
    uint32_t dim = job->layout->head_dim;
    const float *summary = attend_block_view(job, block)->summary;
    float page[ATTEND_DIM_MAX * KV_PAGE_SLOTS] __attribute__((aligned(64)));
    float products[ATTEND_ROWS * ATTEND_SPLIT] __attribute__((aligned(64)));
    const char *pages[] = {(const char *)page};
    memset(page, 0, (size_t)dim * KV_PAGE_SLOTS * sizeof *page);
    memset(scores, 0, STATISTICS_ROWS * sizeof *scores);
    for (uint32_t i = 0; i < dim; i++)
        page[i * KV_PAGE_SLOTS] = summary[i];
    job->kernels->formats[KV_F32].scores(q, attend_block_rows(block), dim, pages, pages, 1, products);
    for (uint32_t row = 0; row < attend_block_rows(block); row++) {
        if (job->batch->cap != 0)
            job->kernels->cap(products + (size_t)row * ATTEND_SPLIT, KV_PAGE_SLOTS, job->batch->cap);
        scores[row] = products[row * ATTEND_SPLIT] + summary[2 * dim];
    }
}

/* ---- blocks of a batch ---- */

struct attend_shape attend_shape(const struct attend_job *job) {
    uint32_t group = job->heads / job->layout->kv_heads;
    if (group >= ATTEND_ROWS)
        return (struct attend_shape){group, ATTEND_ROWS, 1};
    return (struct attend_shape){group, group, ATTEND_ROWS / group};
}

uint32_t attend_item_blocks(const struct attend_job *job, struct attend_shape shape, uint32_t item) {
    return attend_divide_up(job->batch->items[item].rows, shape.block_tokens) *
           attend_divide_up(shape.group, shape.block_group) * job->layout->kv_heads;
}

void attend_block_set(const struct attend_job *job, struct attend_shape shape, uint32_t item, uint32_t index,
    struct attend_block *block) {
    uint32_t kv_heads = job->layout->kv_heads, parts = attend_divide_up(shape.group, shape.block_group);
    uint32_t rows = job->batch->items[item].rows;
    uint32_t tile = attend_divide_up(rows, shape.block_tokens) - 1 - index / (kv_heads * parts);
    uint32_t part = index / kv_heads % parts;
    block->item = item;
    block->kv_head = index % kv_heads;
    block->token = tile * shape.block_tokens;
    block->tokens = rows - block->token < shape.block_tokens ? rows - block->token : shape.block_tokens;
    uint32_t head = part * shape.block_group;
    block->head = block->kv_head * shape.group + head;
    block->group = shape.group - head < shape.block_group ? shape.group - head : shape.block_group;
    block->splits = attend_divide_up(attend_block_view(job, block)->slots, ATTEND_SPLIT);
    block->needs = parts == 1 ? attend_block_needs(job, block) : 0; /* a mean needs the whole group: later_tokens */
    atomic_init(&block->left, 1);
}
