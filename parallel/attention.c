/* SPDX-License-Identifier: Apache-2.0
 *
 * Operations on a batch: each rank gets the views and statistics of its heads, item by item.
 */
#include "parallel/internal.h"

#include <stddef.h>
#include <string.h>

struct kv_pool parallel_pool(struct parallel *p, const struct kv_pool *pool, uint32_t rank) {
    struct kv_pool part = *pool;
    uintptr_t base = (uintptr_t)parallel_address(&p->base, pool->base, rank);
    part.base = (void *)(base - (uintptr_t)rank * pool->rank_pages * pool->page_bytes); /* of page 0, if it were here */
    part.layout.kv_heads = pool->layout.kv_heads / p->ranks_count;
    part.layout.first_head = rank * part.layout.kv_heads;
    part.layout.model_heads = pool->layout.kv_heads;
    part.rank_pages = 0;
    return part;
}

struct query_moments parallel_moments(struct parallel *p, const struct query_moments *moments, uint32_t rank) {
    return (struct query_moments){
        .count = parallel_address(&p->base, moments->count, rank),
        .sum = parallel_address(&p->base, moments->sum, rank),
        .outer = parallel_address(&p->base, moments->outer, rank),
    };
}

struct batch_call {
    struct parallel *p;
    const struct kv_batch *batch;
    const struct rope_params *rope;
    const struct query_moments *moments;
    uint32_t heads;
    const float *qkv;
    float *out;
};

/* A batch as a rank sees it, in the rank's work space. */
struct rank_batch {
    struct kv_pool pool;
    struct kv_batch batch;
    struct query_moments *moments;
};

static size_t space_bytes(const struct parallel *p, const struct kv_batch *batch) {
    size_t heads = (size_t)batch->items_count * (batch->pool->layout.kv_heads / p->ranks_count);
    return heads * (sizeof(struct kv_head_view) + sizeof(struct kv_statistics)) +
           batch->items_count * sizeof(struct query_moments);
}

/* Work space for all ranks; false: there is none, and the backend has failed. */
static bool reserve(struct parallel *p, const struct kv_batch *batch) {
    return parallel_reserve_ranks(
        p, offsetof(struct rank, batch), space_bytes(p, batch), "no memory for the tables of a batch");
}

static void cut_batch(const struct batch_call *call, uint32_t rank, struct rank_batch *part) {
    const struct kv_batch *batch = call->batch;
    uint32_t all = batch->pool->layout.kv_heads, own = all / call->p->ranks_count;
    struct kv_statistics *statistics = call->p->ranks[rank].batch.memory;
    struct kv_head_view *views = (struct kv_head_view *)(statistics + (size_t)batch->items_count * own);
    if (parallel_step_batch(call->p, batch, rank, &part->batch)) {
        part->moments = (struct query_moments *)call->p->ranks[rank].step.moments;
        if (part->moments != NULL)
            part->moments += (size_t)batch->layer * batch->items_count;
        return;
    }
    part->pool = parallel_pool(call->p, batch->pool, rank);
    part->batch = *batch;
    part->batch.pool = &part->pool;
    part->batch.views = views;
    part->batch.scored = NULL;
    part->moments = (struct query_moments *)(views + (size_t)batch->items_count * own);
    if (batch->statistics != NULL)
        part->batch.statistics = statistics;
    for (uint32_t i = 0; i < batch->items_count; i++) {
        size_t from = (size_t)i * all + rank * own, to = (size_t)i * own;
        memcpy(views + to, batch->views + from, own * sizeof *views);
        if (batch->statistics != NULL)
            memcpy(statistics + to, batch->statistics + from, own * sizeof *statistics);
    }
    for (uint32_t i = 0; call->moments != NULL && i < batch->items_count; i++)
        part->moments[i] = parallel_moments(call->p, &call->moments[i], rank);
}

static void rope_on_rank(void *context, uint32_t rank) {
    const struct batch_call *call = context;
    struct backend *on = call->p->inner[rank];
    struct rank_batch part;
    cut_batch(call, rank, &part);
    on->operations->rope_and_append(on, &part.batch, call->rope, call->heads / call->p->ranks_count,
        parallel_address(&call->p->base, call->qkv, rank));
}

void parallel_rope_and_append(
    struct backend *backend, const struct kv_batch *batch, const struct rope_params *rope, uint32_t heads, float *qkv) {
    struct batch_call call = {.p = parallel_of(backend), .batch = batch, .rope = rope, .heads = heads, .qkv = qkv};
    if (reserve(call.p, batch))
        parallel_run(call.p, rope_on_rank, &call);
}

static void attend_on_rank(void *context, uint32_t rank) {
    const struct batch_call *call = context;
    struct backend *on = call->p->inner[rank];
    struct rank_batch part;
    cut_batch(call, rank, &part);
    on->operations->attend(on, &part.batch, call->heads / call->p->ranks_count,
        parallel_address(&call->p->base, call->qkv, rank), parallel_address(&call->p->base, call->out, rank));
}

void parallel_attend(
    struct backend *backend, const struct kv_batch *batch, uint32_t heads, const float *qkv, float *out) {
    struct batch_call call = {.p = parallel_of(backend), .batch = batch, .heads = heads, .qkv = qkv, .out = out};
    if (reserve(call.p, batch))
        parallel_run(call.p, attend_on_rank, &call);
}

static void moments_on_rank(void *context, uint32_t rank) {
    const struct batch_call *call = context;
    struct backend *on = call->p->inner[rank];
    struct rank_batch part;
    cut_batch(call, rank, &part);
    on->operations->query_moments(on, &part.batch, call->heads / call->p->ranks_count,
        parallel_address(&call->p->base, call->qkv, rank), part.moments);
}

void parallel_query_moments(struct backend *backend, const struct kv_batch *batch, uint32_t heads, const float *qkv,
    const struct query_moments *moments) {
    struct batch_call call = {
        .p = parallel_of(backend), .batch = batch, .moments = moments, .heads = heads, .qkv = qkv};
    if (reserve(call.p, batch))
        parallel_run(call.p, moments_on_rank, &call);
}
