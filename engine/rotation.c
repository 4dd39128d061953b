/* SPDX-License-Identifier: Apache-2.0
 *
 * StreamingLLM's positions in the cache (Xiao 2024). The original rotates keys by their index in the cache. Only
 * distances matter to RoPE, and the recent tokens are contiguous, so that rotating the sinks forward by as many
 * positions as tokens were evicted gives the same attention: what is number i in the cache is at i + evicted, and that
 * is where everything behind the sinks is already. Stored positions remain the original ones.
 */
#include "engine/engine_internal.h"

/* A sink that a head still holds. */
struct sink {
    uint32_t layer, head;
    uint32_t slot;
    uint32_t rank; /* number in the cache by position */
    float *key;    /* device [head_dim], unrotated */
};

size_t sequence_sink_bytes(const struct sequence *sequence) {
    const struct engine *engine = sequence->engine;
    size_t keys = (size_t)engine_heads(engine) * sequence->eviction.sinks;
    return keys * engine->model->shape.head_dim * sizeof(float);
}

typedef int (*sink_visit)(struct sequence *sequence, const struct sink *sink, struct error *error);

static int visit_head(struct sequence *sequence, struct sink sink, sink_visit visit, struct error *error) {
    const struct model_shape *shape = &sequence->engine->model->shape;
    const uint32_t *positions = kv_sequence_slot_positions(sequence->kv, sink.layer, sink.head);
    uint32_t sinks = sequence->eviction.sinks;
    struct backend *backend = sequence->engine->backend;
    uint32_t number = sink.layer * shape->kv_heads + sink.head;
    size_t first = (size_t)backend_head_on_rank(backend, shape->kv_heads, number) * sinks;
    float *keys = sequence->eviction.sink_keys; /* not yet there while they are counted */
    if (keys != NULL)
        keys = backend_address(backend, keys, backend_rank_of_head(backend, shape->kv_heads, number));
    for (sink.rank = 0; sink.rank < sinks; sink.rank++) {
        sink.slot = kv_sequence_slot_of_rank(sequence->kv, sink.layer, sink.head, sink.rank);
        if (sink.slot == KV_NO_SLOT)
            break;
        uint32_t position = positions != NULL ? positions[sink.slot] : sink.slot;
        if (position >= sinks)
            break;
        sink.key = keys + (first + position) * shape->head_dim;
        int code = visit(sequence, &sink, error);
        if (code != 0)
            return code;
    }
    return 0;
}

static int visit_sinks(struct sequence *sequence, sink_visit visit, struct error *error) {
    const struct model_shape *shape = &sequence->engine->model->shape;
    struct sink sink = {0};
    int code = 0;
    for (sink.layer = 0; sink.layer < shape->layers; sink.layer++)
        for (sink.head = sequence->engine->model->windows[sink.layer] != 0 ? shape->kv_heads : 0;
             sink.head < shape->kv_heads && code == 0; sink.head++)
            code = visit_head(sequence, sink, visit, error);
    return code;
}

static int unrotate(struct sequence *sequence, const struct sink *sink, struct error *error) {
    (void)error;
    struct engine *engine = sequence->engine;
    struct rope_params rope = transformer_rope(engine->transformer, sink->layer);
    struct kv_head_view view = kv_sequence_view(sequence->kv, sink->layer, sink->head);
    engine_operations(engine)->unrotate_slots(
        engine->backend, kv_cache_pool(engine->cache), &rope, view.pages, &sink->slot, 1, sink->key);
    return 0;
}

static int own(struct sequence *sequence, const struct sink *sink, struct error *error) {
    return kv_sequence_own(sequence->kv, sink->layer, sink->head, sink->slot, error);
}

static int rotate(struct sequence *sequence, const struct sink *sink, struct error *error) {
    (void)error;
    struct engine *engine = sequence->engine;
    struct rope_params rope = transformer_rope(engine->transformer, sink->layer);
    struct kv_head_view view = kv_sequence_view(sequence->kv, sink->layer, sink->head);
    uint32_t to = sink->rank + sequence_length(sequence) - kv_sequence_tokens(sequence->kv, sink->layer, sink->head);
    engine_operations(engine)->rotate_slots(
        engine->backend, kv_cache_pool(engine->cache), &rope, view.pages, &sink->slot, sink->key, &to, 1);
    return 0;
}

static int keep_unrotated(struct sequence *sequence, struct error *error) {
    struct engine *engine = sequence->engine;
    uint32_t sinks = sequence->eviction.settings.sinks, length = sequence_length(sequence);
    sequence->eviction.sinks = sinks < length ? sinks : length;
    size_t bytes = sequence_sink_bytes(sequence);
    int code = kv_sequence_charge(sequence->kv, sequence_device_bytes(sequence) + bytes, error);
    if (code != 0 || bytes == 0)
        return code;
    sequence->eviction.sink_keys =
        engine_operations(engine)->allocate(engine->backend, bytes / backend_ranks(engine->backend));
    if (sequence->eviction.sink_keys == NULL) {
        sequence_charge_less(sequence);
        return error_set(error, ERROR_MEMORY, "no memory for the keys of sinks");
    }
    return visit_sinks(sequence, unrotate, error);
}

int sequence_prepare_sinks(struct sequence *sequence, struct error *error) {
    if (!sequence->eviction.settings.cache_positions)
        return 0;
    int code = sequence->eviction.sink_keys == NULL ? keep_unrotated(sequence, error) : 0;
    return code == 0 ? visit_sinks(sequence, own, error) : code;
}

void sequence_rotate_sinks(struct sequence *sequence) {
    if (sequence->eviction.sink_keys != NULL)
        visit_sinks(sequence, rotate, NULL);
}
