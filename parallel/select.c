/* SPDX-License-Identifier: Apache-2.0
 *
 * Selection: where heads do not compete with each other, each rank's device selects among its own, if it can; else
 * scores come to the host from the ranks whose heads they are of.
 */
#include "parallel/internal.h"

#include <string.h>

/* What one selection works on, in memory that the next one uses again. */
struct select_space {
    struct select_row *rows;
    float *scores;  /* [slots of all rows] */
    uint32_t *keep; /* the same */
};

static size_t slots_of(const struct selection *selection) {
    size_t slots = 0;
    for (uint32_t i = 0; i < selection->rows_count; i++)
        slots += selection->rows[i].view.slots;
    return slots;
}

static size_t words_of(const struct selected_row *row) {
    return ((size_t)row->view.slots + 31) / 32;
}

static void fetch_rows(struct parallel *p, const struct kv_pool *pool, const struct selection *selection,
    const struct select_space *space) {
    uint32_t own = pool->layout.kv_heads / p->ranks_count;
    size_t at = 0;
    for (uint32_t i = 0; i < selection->rows_count; i++) {
        const struct selected_row *row = &selection->rows[i];
        struct backend *on = p->inner[row->head / own];
        if (row->view.slots > 0)
            on->operations->download(on, space->scores + at, row->scores, row->view.slots * sizeof *space->scores);
        space->rows[i] = (struct select_row){
            .layer = row->layer,
            .head = row->head,
            .slots = row->view.slots,
            .budget = row->budget,
            .scores = space->scores + at,
            .positions = row->positions,
            .keep = space->keep + at,
        };
        at += row->view.slots;
    }
}

/* Bits of the slots that stay, from `bits` on; returns where the next begin. */
static uint32_t *set_bits(struct selection *selection, const struct select_space *space, uint32_t *bits) {
    for (uint32_t i = 0; i < selection->rows_count; i++) {
        const struct select_row *row = &space->rows[i];
        memset(bits, 0, words_of(&selection->rows[i]) * sizeof *bits);
        for (uint32_t k = 0; k < row->kept; k++)
            bits[row->keep[k] / 32] |= 1u << row->keep[k] % 32;
        selection->rows[i].stays = bits;
        bits += words_of(&selection->rows[i]);
    }
    return bits;
}

/* ---- by the ranks ---- */

struct select_call {
    struct parallel *p;
    const struct kv_pool *pool;
    const struct selection *selections;
    uint32_t count;
    struct error errors[BACKEND_RANKS_MAX];
};

static bool ranks_select(const struct parallel *p) {
    for (uint32_t rank = 0; rank < p->ranks_count; rank++)
        if (p->inner[rank]->operations->select == NULL)
            return false;
    return true;
}

static uint32_t rank_of_row(const struct select_call *call, const struct selected_row *row) {
    return row->head / (call->pool->layout.kv_heads / call->p->ranks_count);
}

/* The rank's rows of all selections of heads that do not compete. */
static void select_on_rank(void *context, uint32_t rank) {
    struct select_call *call = context;
    struct backend *on = call->p->inner[rank];
    struct kv_pool pool = parallel_pool(call->p, call->pool, rank);
    struct selected_row *rows = call->p->ranks[rank].batch.memory;
    struct selection own = {.rows = rows, .scope = SCOPE_HEAD};
    for (uint32_t i = 0; i < call->count; i++)
        for (uint32_t r = 0; call->selections[i].scope == SCOPE_HEAD && r < call->selections[i].rows_count; r++)
            if (rank_of_row(call, &call->selections[i].rows[r]) == rank)
                rows[own.rows_count++] = call->selections[i].rows[r];
    if (own.rows_count == 0) {
        on->operations->synchronize(on); /* who selects waits, also for what comes late */
        return;
    }
    if (on->operations->select(on, &pool, &own, 1, &call->errors[rank]) != 0)
        return;
    for (uint32_t i = 0, at = 0; i < call->count; i++)
        for (uint32_t r = 0; call->selections[i].scope == SCOPE_HEAD && r < call->selections[i].rows_count; r++)
            if (rank_of_row(call, &call->selections[i].rows[r]) == rank)
                call->selections[i].rows[r].stays = rows[at++].stays;
}

static int select_on_ranks(struct select_call *call, struct error *error) {
    size_t rows = 0;
    for (uint32_t i = 0; i < call->count; i++)
        rows += call->selections[i].scope == SCOPE_HEAD ? call->selections[i].rows_count : 0;
    for (uint32_t rank = 0; rank < call->p->ranks_count; rank++)
        if (parallel_reserve(&call->p->ranks[rank].batch, rows * sizeof(struct selected_row)) == NULL)
            return error_set(error, ERROR_MEMORY, "no memory to select among %zu heads", rows);
    parallel_run(call->p, select_on_rank, call);
    for (uint32_t rank = 0; rank < call->p->ranks_count; rank++)
        if (call->errors[rank].code != 0)
            return error_set(error, call->errors[rank].code, "%s", call->errors[rank].message);
    return communicator_check(call->p->communicator, error);
}

/* ---- the operation ---- */

static int select_on_host(struct parallel *p, const struct kv_pool *pool, const struct selection *selections,
    uint32_t count, bool heads_too, struct error *error) {
    size_t slots = 0, rows = 0, words = 0;
    for (uint32_t i = 0; i < count; i++) {
        size_t of = slots_of(&selections[i]);
        slots = of > slots ? of : slots;
        rows = selections[i].rows_count > rows ? selections[i].rows_count : rows;
        for (uint32_t r = 0; r < selections[i].rows_count; r++)
            words += words_of(&selections[i].rows[r]);
    }
    struct select_space space;
    space.rows = parallel_reserve(&p->select,
        rows * sizeof *space.rows + slots * (sizeof *space.scores + sizeof *space.keep) + words * sizeof(uint32_t));
    if (space.rows == NULL)
        return error_set(error, ERROR_MEMORY, "no memory to select among %zu slots", slots);
    space.scores = (float *)(space.rows + rows);
    space.keep = (uint32_t *)(space.scores + slots);
    uint32_t *bits = space.keep + slots;
    for (uint32_t i = 0; i < count; i++) {
        struct selection selection = selections[i];
        if (selection.scope == SCOPE_HEAD && !heads_too)
            continue;
        fetch_rows(p, pool, &selection, &space);
        int code = select_slots(
            space.rows, selection.rows_count, selection.scope, selection.floor_part, &p->select_scratch, error);
        if (code != 0)
            return code;
        bits = set_bits(&selection, &space, bits);
    }
    return communicator_check(p->communicator, error);
}

int parallel_select(struct backend *backend, const struct kv_pool *pool, const struct selection *selections,
    uint32_t count, struct error *error) {
    struct select_call call = {.p = parallel_of(backend), .pool = pool, .selections = selections, .count = count};
    bool by_ranks = ranks_select(call.p);
    int code = by_ranks ? select_on_ranks(&call, error) : 0;
    return code == 0 ? select_on_host(call.p, pool, selections, count, !by_ranks, error) : code;
}
