/* SPDX-License-Identifier: Apache-2.0
 *
 * A step of a batch (struct kv_step): each rank gets its part of all layers before the first operation, and all do the
 * step in the same way, which is the least that one of them offers. A sum that is part of what one rank has captured
 * must be part of what the others have.
 */
#include "parallel/internal.h"

#include <stddef.h>
#include <string.h>

struct step_call {
    struct parallel *p;
    const struct kv_step *step;
    uint32_t slots_most;
    enum step_way way, ways[BACKEND_RANKS_MAX];
    uint32_t rows[BACKEND_RANKS_MAX];
    bool done[BACKEND_RANKS_MAX];
};

/* ---- a rank's part ---- */

static size_t heads_of(const struct kv_step *step) {
    return (size_t)step->pool->layout.layers * step->items_count * step->pool->layout.kv_heads;
}

static size_t part_bytes(const struct parallel *p, const struct kv_step *step) {
    size_t heads = heads_of(step) / p->ranks_count, items = (size_t)step->pool->layout.layers * step->items_count;
    return heads * (sizeof *step->statistics + sizeof *step->views) + items * sizeof *step->moments +
           step->rows * sizeof *step->tokens;
}

static bool reserve(struct parallel *p, const struct kv_step *step) {
    return parallel_reserve_ranks(
        p, offsetof(struct rank, step_space), part_bytes(p, step), "no memory for the tables of a step");
}

static void cut_heads(
    const struct step_call *call, uint32_t rank, struct kv_head_view *views, struct kv_statistics *statistics) {
    const struct kv_step *step = call->step;
    uint32_t all = step->pool->layout.kv_heads, own = all / call->p->ranks_count;
    size_t lists = (size_t)step->pool->layout.layers * step->items_count;
    for (size_t i = 0; i < lists; i++) {
        memcpy(views + i * own, step->views + i * all + rank * own, own * sizeof *views);
        if (step->statistics != NULL)
            memcpy(statistics + i * own, step->statistics + i * all + rank * own, own * sizeof *statistics);
    }
}

static void cut_step(const struct step_call *call, uint32_t rank) {
    const struct kv_step *step = call->step;
    struct rank *of = &call->p->ranks[rank];
    size_t heads = heads_of(step) / call->p->ranks_count;
    size_t items = (size_t)step->pool->layout.layers * step->items_count;
    struct kv_statistics *statistics = of->step_space.memory;
    struct kv_head_view *views = (struct kv_head_view *)(statistics + heads);
    struct query_moments *moments = (struct query_moments *)(views + heads);
    int32_t *tokens = (int32_t *)(moments + items);
    cut_heads(call, rank, views, statistics);
    for (size_t i = 0; step->moments != NULL && i < items; i++)
        moments[i] = parallel_moments(call->p, &step->moments[i], rank);
    parallel_own_tokens(call->p, rank, step->tokens, step->rows, tokens);
    of->step_pool = parallel_pool(call->p, step->pool, rank);
    of->step = *step;
    of->step.pool = &of->step_pool;
    of->step.views = views;
    of->step.statistics = step->statistics != NULL ? statistics : NULL;
    of->step.moments = step->moments != NULL ? moments : NULL;
    of->step.scored = NULL;
    of->step.tokens = tokens;
    of->step.heads = step->heads / call->p->ranks_count;
    of->step.slots_most = call->slots_most;
}

bool parallel_step_batch(const struct parallel *p, const struct kv_batch *batch, uint32_t rank, struct kv_batch *part) {
    const struct kv_step *whole = &p->step, *own = &p->ranks[rank].step;
    size_t lists = (size_t)batch->layer * batch->items_count;
    if (!p->stepping || batch->items != whole->items || batch->items_count != whole->items_count ||
        batch->views != whole->views + lists * whole->pool->layout.kv_heads)
        return false;
    size_t heads = lists * own->pool->layout.kv_heads;
    *part = *batch;
    part->pool = own->pool;
    part->views = own->views + heads;
    part->statistics = own->statistics != NULL ? own->statistics + heads : NULL;
    part->scored = NULL;
    return true;
}

/* ---- operations ---- */

static void begin_on_rank(void *context, uint32_t rank) {
    struct step_call *call = context;
    struct backend *on = call->p->inner[rank];
    cut_step(call, rank);
    call->ways[rank] = on->operations->step_begin(on, &call->p->ranks[rank].step, &call->rows[rank]);
}

enum step_way parallel_step_begin(struct backend *backend, const struct kv_step *step, uint32_t *rows) {
    struct parallel *p = parallel_of(backend);
    struct step_call call = {.p = p, .step = step, .way = STEP_REPLAY};
    *rows = step->rows;
    p->stepping = false;
    if (!reserve(p, step))
        return STEP_CALLS;
    /* Memory that moves makes what was captured void; only the ranks know that. All else that they choose by is the
     * same, the longest view too. */
    for (size_t i = 0; i < heads_of(step); i++)
        call.slots_most = step->views[i].slots > call.slots_most ? step->views[i].slots : call.slots_most;
    for (uint32_t rank = 0; rank < p->ranks_count; rank++)
        call.rows[rank] = step->rows;
    parallel_run(p, begin_on_rank, &call);
    p->step = *step;
    p->stepping = true;
    for (uint32_t rank = 0; rank < p->ranks_count; rank++)
        call.way = call.ways[rank] < call.way ? call.ways[rank] : call.way;
    *rows = call.rows[0];
    return call.way;
}

static void start_on_rank(void *context, uint32_t rank) {
    struct step_call *call = context;
    struct backend *on = call->p->inner[rank];
    call->done[rank] = on->operations->step_start(on, call->way);
}

static void end_on_rank(void *context, uint32_t rank) {
    struct step_call *call = context;
    struct backend *on = call->p->inner[rank];
    call->done[rank] = on->operations->step_end(on);
}

/* Whether all ranks could; also when the backend has failed, since then nothing is to be done again. */
static bool all_do(struct step_call *call, crew_work work) {
    bool all = true;
    for (uint32_t rank = 0; rank < call->p->ranks_count; rank++)
        call->done[rank] = true;
    parallel_run(call->p, work, call);
    for (uint32_t rank = 0; rank < call->p->ranks_count; rank++)
        all = all && call->done[rank];
    return all || communicator_check(call->p->communicator, NULL) != 0;
}

bool parallel_step_start(struct backend *backend, enum step_way way) {
    struct step_call call = {.p = parallel_of(backend), .way = way};
    if (way == STEP_REPLAY)
        call.p->stepping = false;
    if (all_do(&call, start_on_rank))
        return true;
    parallel_step_end(backend); /* for those that have begun to capture */
    return false;
}

bool parallel_step_end(struct backend *backend) {
    struct step_call call = {.p = parallel_of(backend)};
    bool all = all_do(&call, end_on_rank);
    call.p->stepping = false;
    return all;
}
