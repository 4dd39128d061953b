/* SPDX-License-Identifier: Apache-2.0
 *
 * Operations on the pages of a head, or on lists of pages: whoever has them does it, without the others. And those on
 * many heads at once, each on its rank.
 */
#include "parallel/internal.h"

#include <stddef.h>

/* ---- one head ---- */

void parallel_rotate_slots(struct backend *backend, const struct kv_pool *pool, const struct rope_params *rope,
    const uint32_t *pages, const uint32_t *slots, const float *keys, const uint32_t *to, uint32_t count) {
    struct parallel *p = parallel_of(backend);
    uint32_t rank = kv_pool_rank(pool, pages[0]);
    struct kv_pool part = parallel_pool(p, pool, rank);
    p->inner[rank]->operations->rotate_slots(p->inner[rank], &part, rope, pages, slots, keys, to, count);
}

void parallel_unrotate_slots(struct backend *backend, const struct kv_pool *pool, const struct rope_params *rope,
    const uint32_t *pages, const uint32_t *slots, uint32_t count, float *keys) {
    struct parallel *p = parallel_of(backend);
    uint32_t rank = kv_pool_rank(pool, pages[0]);
    struct kv_pool part = parallel_pool(p, pool, rank);
    p->inner[rank]->operations->unrotate_slots(p->inner[rank], &part, rope, pages, slots, count, keys);
}

void parallel_move_slots(struct backend *backend, const struct kv_pool *pool, const uint32_t *pages,
    const uint32_t *from, const uint32_t *to, uint32_t count) {
    struct parallel *p = parallel_of(backend);
    uint32_t rank = kv_pool_rank(pool, pages[0]);
    struct kv_pool part = parallel_pool(p, pool, rank);
    p->inner[rank]->operations->move_slots(p->inner[rank], &part, pages, from, to, count);
}

int parallel_slot_norms(struct backend *backend, const struct kv_pool *pool, const struct kv_head_view *view,
    const struct tensor *output, uint32_t layer, uint32_t head, uint32_t heads, float *value_norm, float *output_norm,
    struct error *error) {
    struct parallel *p = parallel_of(backend);
    if (head >= pool->layout.kv_heads || heads % p->ranks_count != 0)
        return error_set(error, ERROR_INVALID, "no such head, or not its output matrix");
    uint32_t own = pool->layout.kv_heads / p->ranks_count, rank = head / own;
    struct kv_pool part = parallel_pool(p, pool, rank);
    struct tensor columns = parallel_output(p, output, rank);
    return p->inner[rank]->operations->slot_norms(p->inner[rank], &part, view, &columns, layer, head % own,
        heads / p->ranks_count, value_norm, output_norm, error);
}

/* ---- pages of several heads: runs of the same rank ---- */

static uint32_t run_of_rank(const struct kv_pool *pool, const uint32_t *pages, uint32_t count) {
    uint32_t rank = kv_pool_rank(pool, pages[0]), run = 1;
    while (run < count && kv_pool_rank(pool, pages[run]) == rank)
        run++;
    return run;
}

void parallel_copy_pages(
    struct backend *backend, const struct kv_pool *pool, const uint32_t *from, const uint32_t *to, uint32_t count) {
    struct parallel *p = parallel_of(backend);
    for (uint32_t i = 0, run; i < count; i += run) {
        uint32_t rank = kv_pool_rank(pool, to[i]);
        struct kv_pool part = parallel_pool(p, pool, rank);
        run = run_of_rank(pool, to + i, count - i);
        p->inner[rank]->operations->copy_pages(p->inner[rank], &part, from + i, to + i, run);
    }
}

void parallel_clear_slots(
    struct backend *backend, const struct kv_pool *pool, const uint32_t *pages, uint32_t first, uint32_t end) {
    struct parallel *p = parallel_of(backend);
    uint32_t pages_end = (end + KV_PAGE_SLOTS - 1) / KV_PAGE_SLOTS;
    for (uint32_t i = first / KV_PAGE_SLOTS, run; i < pages_end; i += run) {
        uint32_t rank = kv_pool_rank(pool, pages[i]), start = i * KV_PAGE_SLOTS;
        struct kv_pool part = parallel_pool(p, pool, rank);
        run = run_of_rank(pool, pages + i, pages_end - i);
        uint32_t run_end = (i + run) * KV_PAGE_SLOTS;
        p->inner[rank]->operations->clear_slots(p->inner[rank], &part, pages + i,
            (first > start ? first : start) - start, (end < run_end ? end : run_end) - start);
    }
}

void parallel_poison_pages(struct backend *backend, const struct kv_pool *pool, const uint32_t *pages, uint32_t count) {
    struct parallel *p = parallel_of(backend);
    for (uint32_t i = 0, run; i < count; i += run) {
        uint32_t rank = kv_pool_rank(pool, pages[i]);
        struct kv_pool part = parallel_pool(p, pool, rank);
        run = run_of_rank(pool, pages + i, count - i);
        p->inner[rank]->operations->poison_pages(p->inner[rank], &part, pages + i, run);
    }
}

/* ---- many heads: each rank those that it has ---- */

struct lists_call {
    struct parallel *p;
    const struct kv_pool *pool;
    const struct summary_update *updates;
    const struct statistics_move *moves;
    const struct kv_table_write *writes;
    uint32_t count, group, head_dim;
};

static void summarise_on_rank(void *context, uint32_t rank) {
    const struct lists_call *call = context;
    struct backend *on = call->p->inner[rank];
    struct kv_pool part = parallel_pool(call->p, call->pool, rank);
    struct summary_update *own = call->p->ranks[rank].batch.memory;
    uint32_t count = 0;
    for (uint32_t i = 0; i < call->count; i++)
        if (call->updates[i].count > 0 && kv_pool_rank(call->pool, call->updates[i].view.pages[0]) == rank)
            own[count++] = call->updates[i];
    on->operations->summarise(on, &part, own, count);
}

static bool reserve(struct parallel *p, size_t bytes) {
    return parallel_reserve_ranks(p, offsetof(struct rank, batch), bytes, "no memory for lists by head");
}

void parallel_summarise(
    struct backend *backend, const struct kv_pool *pool, const struct summary_update *updates, uint32_t count) {
    struct lists_call call = {.p = parallel_of(backend), .pool = pool, .updates = updates, .count = count};
    if (reserve(call.p, count * sizeof *updates))
        parallel_run(call.p, summarise_on_rank, &call);
}

static void write_on_rank(void *context, uint32_t rank) {
    const struct lists_call *call = context;
    struct backend *on = call->p->inner[rank];
    struct kv_table_write *own = call->p->ranks[rank].batch.memory;
    uint32_t count = 0;
    for (uint32_t i = 0; i < call->count; i++)
        if (call->writes[i].rank == rank)
            own[count++] = call->writes[i];
    if (count > 0)
        on->operations->write_tables(on, own, count);
}

void parallel_write_tables(struct backend *backend, const struct kv_table_write *writes, uint32_t count) {
    struct lists_call call = {.p = parallel_of(backend), .writes = writes, .count = count};
    if (reserve(call.p, count * sizeof *writes))
        parallel_run(call.p, write_on_rank, &call);
}

static void move_on_rank(void *context, uint32_t rank) {
    const struct lists_call *call = context;
    struct backend *on = call->p->inner[rank];
    struct statistics_move *own = call->p->ranks[rank].batch.memory;
    uint32_t count = 0;
    for (uint32_t i = 0; i < call->count; i++)
        if (call->moves[i].rank == rank)
            own[count++] = call->moves[i];
    if (count > 0)
        on->operations->move_statistics(on, own, count, call->group, call->head_dim);
}

void parallel_move_statistics(
    struct backend *backend, const struct statistics_move *moves, uint32_t count, uint32_t group, uint32_t head_dim) {
    struct lists_call call = {
        .p = parallel_of(backend), .moves = moves, .count = count, .group = group, .head_dim = head_dim};
    if (reserve(call.p, count * sizeof *moves))
        parallel_run(call.p, move_on_rank, &call);
}
