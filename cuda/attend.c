/* SPDX-License-Identifier: Apache-2.0
 *
 * Attention's host side: which rows go which way (attend.h), in what groups, and with what scratch memory.
 */
#include "cuda/attend.h"
#include "cuda/attend_state.h"
#include "cuda/statistics.h"
#include "cuda/step.h"

#include <stdlib.h>

enum {
    SPLIT_TILES = 4,   /* of an item with more tiles than this rows take the whole path */
    RANGE_TOKENS = 64, /* most tokens of a range */
};

/* Scratch memory that a group of ranges may take, unless one range takes more. */
static const size_t GROUP_BYTES = (size_t)256 << 20;

void cuda_attend_free(struct cuda_backend *cuda) {
    struct attend_state *state = cuda->attend;
    if (state == NULL)
        return;
    struct cuda_scratch *scratches[] = {&state->totals, &state->parts, &state->outputs, &state->scores, &state->noisy,
        &state->noisy_pieces, &state->entropy_pieces, &state->preferences};
    for (size_t i = 0; i < sizeof scratches / sizeof scratches[0]; i++)
        cuda_scratch_free(scratches[i]);
    free(state->plan.list);
    free(state->plan.groups);
    free(state);
    cuda->attend = NULL;
}

struct attend_state *attend_state_get(struct cuda_backend *cuda) {
    if (cuda->attend == NULL)
        cuda->attend = calloc(1, sizeof(struct attend_state));
    if (cuda->attend == NULL)
        cuda_check(cuda, cudaErrorMemoryAllocation, "attend");
    return cuda->attend;
}

/* ---- plan ---- */

static bool item_is_whole(const struct attend_plan *plan, const struct kv_item *item) {
    return plan->warps > 0 && item->rows > SPLIT_TILES * attend_tile_tokens(plan->group);
}

/* Adds an item's tokens from `first` on in steps. last_first: the last tokens, which see the most, come first. */
static void plan_add(struct attend_plan *plan, struct attend_tile of, uint32_t step, bool last_first) {
    uint32_t steps = (of.tokens + step - 1) / step;
    for (uint32_t i = 0; i < steps; i++) {
        uint32_t from = (last_first ? steps - 1 - i : i) * step;
        uint32_t count = of.tokens - from < step ? of.tokens - from : step;
        plan->list[plan->count++] = (struct attend_tile){of.item, of.token + from, count, of.scratch + from};
    }
}

/* Adds the items of one path. */
static void plan_add_items(struct attend_plan *plan, bool whole, uint32_t step, bool last_first) {
    for (uint32_t i = 0; i < plan->items_count; i++) {
        const struct kv_item *item = &plan->items[i];
        if (item_is_whole(plan, item) == whole)
            plan_add(plan, (struct attend_tile){i, 0, item->rows, 0}, step, last_first);
    }
}

/* The group of ranges from `from` on, before `end`: sets their scratch rows. */
static struct attend_group plan_group(struct attend_plan *plan, uint32_t from, uint32_t end, uint32_t rows_most) {
    struct attend_group group = {.first_range = from, .alone = true};
    for (uint32_t i = from; i < end; i++) {
        struct attend_tile *range = &plan->list[i];
        if (i > from && group.rows + range->tokens > rows_most)
            break;
        if (i > from && range->item == range[-1].item)
            group.alone = false;
        range->scratch = group.rows;
        group.rows += range->tokens;
        group.ranges++;
        group.tokens_most = range->tokens > group.tokens_most ? range->tokens : group.tokens_most;
    }
    return group;
}

/* Adds the ranges of one path, and their groups behind those that there are. Returns how many groups. row_bytes:
 * scratch memory of a row. */
static uint32_t plan_groups(struct attend_plan *plan, bool whole, size_t row_bytes, struct attend_group *groups) {
    uint32_t from = plan->count, count = 0;
    plan_add_items(plan, whole, RANGE_TOKENS, false);
    size_t most = row_bytes == 0 ? UINT32_MAX : GROUP_BYTES / row_bytes;
    for (uint32_t end = plan->count; from < end; from += groups[count++].ranges)
        groups[count] = plan_group(plan, from, end, most > UINT32_MAX / 2 ? UINT32_MAX / 2 : (uint32_t)most);
    return count;
}

/* Tiles of a group of the split path. */
static void plan_tiles(struct attend_plan *plan, struct attend_group *group) {
    group->first_tile = plan->count;
    for (uint32_t i = 0; i < group->ranges; i++)
        plan_add(plan, plan->list[group->first_range + i], attend_tile_tokens(plan->group), false);
    group->tiles = plan->count - group->first_tile;
}

/* Every row has at most a range and a tile of its own. */
static bool plan_reserve(struct cuda_backend *cuda, struct attend_state *state, uint32_t rows) {
    struct attend_plan *plan = &state->plan;
    if (rows > state->rows_capacity) {
        free(plan->list);
        free(plan->groups);
        plan->list = malloc(2 * (size_t)rows * sizeof *plan->list);
        plan->groups = malloc(rows * sizeof *plan->groups);
        state->rows_capacity = plan->list == NULL || plan->groups == NULL ? 0 : rows;
    }
    return rows <= state->rows_capacity || cuda_check(cuda, cudaErrorMemoryAllocation, "attend");
}

static void plan_fill(struct attend_plan *plan, size_t split_row_bytes, size_t whole_row_bytes) {
    plan->split_groups = plan_groups(plan, false, split_row_bytes, plan->groups);
    for (uint32_t i = 0; i < plan->split_groups; i++)
        plan_tiles(plan, &plan->groups[i]);
    if (plan->warps == 0)
        return;
    plan->whole_groups = plan_groups(plan, true, whole_row_bytes, plan->groups + plan->split_groups);
    plan->first_whole_tile = plan->count;
    plan_add_items(plan, true, plan->warps * attend_tile_tokens(plan->group), true);
    plan->whole_tiles = plan->count - plan->first_whole_tile;
}

/* ---- scratch ---- */

/* Bytes of a row's pieces of noise and entropy. */
static size_t piece_row_bytes(const struct attend_work *work) {
    size_t bytes = work->batch.needs & STATISTIC_NOISY ? sizeof(struct attend_piece) : 0;
    bytes += work->batch.needs & STATISTIC_ENTROPY ? sizeof(float) : 0;
    return bytes * work->heads * work->pieces;
}

static size_t split_row_bytes(const struct attend_work *work) {
    size_t numbers = work->batch.pool.layout.head_dim + (work->batch.needs & STATISTICS_SWEPT ? ATTEND_SPLIT : 0);
    size_t split = sizeof(struct attend_total) + numbers * sizeof(float);
    return work->heads * work->splits * split + piece_row_bytes(work);
}

/* Arrays by scratch row for `rows` rows; those of the split path only with `split`. */
static bool scratch_reserve(
    struct cuda_backend *cuda, struct attend_state *state, struct attend_work *work, uint32_t rows, bool split) {
    size_t heads = (size_t)rows * work->heads, splits = heads * work->splits;
    uint32_t dim = work->batch.pool.layout.head_dim, needs = work->batch.needs;
    if (split) {
        work->parts = cuda_scratch_reserve(cuda, &state->parts, splits * sizeof *work->parts);
        work->outputs = cuda_scratch_reserve(cuda, &state->outputs, splits * dim * sizeof(float));
        if (work->parts == NULL || work->outputs == NULL)
            return false;
    }
    if (split && needs & STATISTICS_SWEPT) {
        work->scores = cuda_scratch_reserve(cuda, &state->scores, splits * ATTEND_SPLIT * sizeof(float));
        if (work->scores == NULL)
            return false;
    }
    if (needs & STATISTIC_NOISY) {
        work->noisy = cuda_scratch_reserve(cuda, &state->noisy, heads * sizeof *work->noisy);
        work->noisy_pieces =
            cuda_scratch_reserve(cuda, &state->noisy_pieces, heads * work->pieces * sizeof *work->noisy_pieces);
        if (work->noisy == NULL || work->noisy_pieces == NULL)
            return false;
    }
    if (needs & STATISTIC_ENTROPY) {
        work->entropy_pieces = cuda_scratch_reserve(cuda, &state->entropy_pieces, heads * work->pieces * sizeof(float));
        if (work->entropy_pieces == NULL)
            return false;
    }
    return true;
}

static uint32_t splits_of(const struct cuda_batch *batch) {
    return (batch->slots_most + ATTEND_SPLIT - 1) / ATTEND_SPLIT;
}

static struct attend_work begin_work(const struct cuda_batch *batch, uint32_t heads) {
    uint32_t splits = splits_of(batch);
    return (struct attend_work){
        .batch = *batch,
        .heads = heads,
        .splits = splits,
        .pieces = splits * (ATTEND_SPLIT / STATISTICS_PIECE),
    };
}

const struct attend_plan *attend_plan_get(
    struct cuda_backend *cuda, const struct cuda_batch *bounds, const struct kv_item *items, uint32_t heads) {
    struct attend_state *state = attend_state_get(cuda);
    const struct kv_layout *layout = &bounds->pool.layout;
    if (state == NULL || !plan_reserve(cuda, state, bounds->rows_count))
        return NULL;
    const struct attend_work work = begin_work(bounds, heads);
    struct attend_plan *plan = &state->plan;
    *plan = (struct attend_plan){
        .items = items,
        .items_count = bounds->items_count,
        .group = heads / layout->kv_heads,
        .warps = attend_has_tensor_cores(layout)
                     ? attend_whole_tiles(layout, bounds->slots_most, cuda->shared_bytes_max)
                     : 0,
        .list = plan->list,
        .groups = plan->groups,
    };
    plan_fill(plan, split_row_bytes(&work), piece_row_bytes(&work));
    return plan;
}

/* ---- launches ---- */

static void run_statistics(struct cuda_backend *cuda, const struct attend_work *work, const struct attend_tile *list,
    const struct attend_group *group, bool kept) {
    const struct statistics_ranges ranges = {
        list + group->first_range, group->ranges, group->tokens_most, kept, group->alone};
    if ((work->batch.needs & STATISTICS_SWEPT) == 0)
        return;
    if (work->batch.needs & STATISTIC_NOISY)
        statistics_launch_noise(work, &ranges, cuda->stream);
    statistics_launch_sweep(work, &ranges, cuda->stream);
    if (work->batch.needs & STATISTIC_ENTROPY)
        statistics_launch_entropy(work, &ranges, cuda->stream);
    cuda_check_launch(cuda, "attend");
}

static void run_plan(struct cuda_backend *cuda, struct attend_state *state, const struct attend_plan *plan,
    const struct attend_tile *list, struct attend_work *work) {
    for (uint32_t i = 0; i < plan->split_groups; i++) {
        const struct attend_group *group = &plan->groups[i];
        if (!scratch_reserve(cuda, state, work, group->rows, true))
            return;
        attend_launch_splits(work, list + group->first_tile, group->tiles, cuda->stream);
        attend_launch_merge(work, list + group->first_tile, group->tiles, cuda->stream);
        cuda_check_launch(cuda, "attend");
        run_statistics(cuda, work, list, group, true);
    }
    attend_launch_whole(work, list + plan->first_whole_tile, plan->whole_tiles, plan->warps, cuda->stream);
    cuda_check_launch(cuda, "attend");
    for (uint32_t i = 0; i < plan->whole_groups; i++) {
        const struct attend_group *group = &plan->groups[plan->split_groups + i];
        if (!scratch_reserve(cuda, state, work, group->rows, false))
            return;
        run_statistics(cuda, work, list, group, false);
    }
    if (work->batch.needs & STATISTIC_OUTPUTS)
        statistics_launch_outputs(work, cuda->stream);
    cuda_check_launch(cuda, "attend");
}

/* The plan's list on the device. NULL when there was an error. */
static const struct attend_tile *stage_list(struct cuda_backend *cuda, const struct attend_plan *plan) {
    struct cuda_stage stage;
    if (!cuda_stage_begin(cuda, cuda_stage_size(plan->count * sizeof *plan->list), &stage))
        return NULL;
    const struct attend_tile *list = cuda_stage_copy(&stage, plan->list, plan->count * sizeof *plan->list);
    return cuda_stage_send(cuda, &stage) ? list : NULL;
}

void cuda_attend(struct backend *backend, const struct kv_batch *batch, uint32_t heads, const float *qkv, float *out) {
    struct cuda_backend *cuda = cuda_backend(backend);
    struct attend_state *state = attend_state_get(cuda);
    struct cuda_batch staged;
    if (state == NULL || !cuda_batch_stage(cuda, batch, &staged))
        return;
    const struct attend_tile *list = cuda_step_tiles(cuda, batch);
    if (list == NULL) {
        const struct attend_plan *plan = attend_plan_get(cuda, &staged, batch->items, heads);
        list = plan != NULL ? stage_list(cuda, plan) : NULL;
    }
    struct attend_work work = begin_work(&staged, heads);
    work.qkv = qkv;
    work.out = out;
    work.totals = cuda_scratch_reserve(cuda, &state->totals, (size_t)staged.rows_count * heads * sizeof *work.totals);
    if (list != NULL && work.totals != NULL)
        run_plan(cuda, state, &state->plan, list, &work);
}
