/* SPDX-License-Identifier: Apache-2.0 */
#include "engine/snapshot.h"

#include <stdlib.h>

enum { MOVES_AT_ONCE = 64 };

static uint32_t heads_count(const struct statistics_shape *shape) {
    return shape->layers * shape->kv_heads;
}

/* Layers before `end` that have statistics. */
static uint32_t kept_layers(const struct statistics_shape *shape, uint32_t end) {
    uint32_t count = 0;
    for (uint32_t layer = 0; layer < end; layer++)
        count += !statistics_slides(shape, layer);
    return count;
}

static uint32_t kept_heads(const struct statistics_shape *shape) {
    return kept_layers(shape, shape->layers) * shape->kv_heads;
}

static size_t head_bytes(const struct statistics_shape *shape, uint32_t needs, uint32_t tokens) {
    return statistics_head_bytes(shape, needs, tokens);
}

size_t snapshot_bytes(const struct statistics_shape *shape, uint32_t needs, uint32_t tokens) {
    return kept_heads(shape) * head_bytes(shape, needs, tokens) + statistics_moments_bytes(shape, needs);
}

static void release(struct kv_attachment *attachment) {
    struct snapshot *snapshot = (struct snapshot *)attachment;
    snapshot->backend->operations->release(snapshot->backend, snapshot->memory);
    free(snapshot);
}

/* The arrays of one head. */
static struct kv_statistics arrays_of(const struct snapshot *snapshot, uint32_t head) {
    struct kv_statistics arrays;
    uint32_t kv_heads = snapshot->shape.kv_heads;
    char *base =
        backend_address(snapshot->backend, snapshot->memory, backend_rank_of_head(snapshot->backend, kv_heads, head));
    uint32_t number = kept_layers(&snapshot->shape, head / kv_heads) * kv_heads + head % kv_heads;
    base += backend_head_on_rank(snapshot->backend, kv_heads, number) *
            head_bytes(&snapshot->shape, snapshot->needs, snapshot->tokens);
    statistics_lay_out(&snapshot->shape, snapshot->needs, snapshot->tokens, base, &arrays);
    return arrays;
}

static char *moments_of(const struct snapshot *snapshot) {
    uint32_t heads = kept_heads(&snapshot->shape) / backend_ranks(snapshot->backend);
    return snapshot->memory + heads * head_bytes(&snapshot->shape, snapshot->needs, snapshot->tokens);
}

/* Copies columns between the snapshot and heads of a sequence, a few heads at a time. */
static void move_columns(const struct snapshot *snapshot, const struct kv_statistics *heads, bool restore) {
    const struct statistics_shape *shape = &snapshot->shape;
    struct kv_statistics arrays[MOVES_AT_ONCE];
    struct statistics_move moves[MOVES_AT_ONCE];
    const struct backend_operations *operations = snapshot->backend->operations;
    uint32_t count = 0;
    for (uint32_t head = 0; head < heads_count(shape); head++) {
        if (statistics_slides(shape, head / shape->kv_heads))
            continue;
        arrays[count] = arrays_of(snapshot, head);
        moves[count] = (struct statistics_move){
            .rank = backend_rank_of_head(snapshot->backend, shape->kv_heads, head),
            .from = restore ? &arrays[count] : &heads[head],
            .to = restore ? &heads[head] : &arrays[count],
            .count = snapshot->tokens,
        };
        if (++count == MOVES_AT_ONCE) {
            operations->move_statistics(snapshot->backend, moves, count, shape->group, shape->head_dim);
            count = 0;
        }
    }
    if (count > 0)
        operations->move_statistics(snapshot->backend, moves, count, shape->group, shape->head_dim);
}

struct snapshot *snapshot_create(const struct statistics *from, uint32_t needs, uint32_t tokens) {
    const struct backend_operations *operations = from->backend->operations;
    struct snapshot *snapshot = calloc(1, sizeof *snapshot);
    if (snapshot == NULL)
        return NULL;
    *snapshot = (struct snapshot){
        .attachment = {.bytes = snapshot_bytes(&from->shape, needs, tokens), .release = release},
        .backend = from->backend,
        .shape = from->shape,
        .needs = needs,
        .tokens = tokens,
    };
    size_t moments = statistics_moments_bytes(&from->shape, needs);
    snapshot->memory = operations->allocate(from->backend, snapshot->attachment.bytes / backend_ranks(from->backend));
    if (snapshot->memory == NULL || (moments > 0 && statistics_copy_device(from->backend, moments_of(snapshot),
                                                        from->moments[0].count, moments) != 0)) {
        release(&snapshot->attachment);
        return NULL;
    }
    move_columns(snapshot, from->heads, false);
    return snapshot;
}

bool snapshot_serves(const struct snapshot *snapshot, const struct statistics_shape *shape, uint32_t needs) {
    return (needs & ~snapshot->needs) == 0 && (!(needs & STATISTIC_NOISY) || snapshot->shape.seed == shape->seed);
}

int snapshot_restore(const struct snapshot *snapshot, struct statistics *to) {
    size_t moments = statistics_moments_bytes(&to->shape, to->needs);
    if (moments > 0 && statistics_copy_device(to->backend, to->moments[0].count, moments_of(snapshot), moments) != 0)
        return ERROR_MEMORY;
    move_columns(snapshot, to->heads, true);
    return 0;
}
