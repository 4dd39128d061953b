/* SPDX-License-Identifier: Apache-2.0
 *
 * The policy's view of cached tokens, for the trainer.
 */
#include "engine/engine_internal.h"

#include <stdlib.h>
#include <string.h>

/* One head whose features are wanted. */
struct reading {
    struct engine *engine;
    struct backend *on; /* that has the head's memory */
    struct kv_head_view view;
    uint32_t layer, head;
    char *space; /* host, room for a number of 8 bytes a slot, and for a page */
};

/* Integer sums in units of 2^-24, in two planes of `capacity` slots. Too few for all slots, or none: zeros. */
static void read_sums(const struct reading *reading, const uint32_t *sums, uint32_t capacity, float *out) {
    uint32_t slots = reading->view.slots;
    uint32_t *host = (uint32_t *)reading->space;
    if (out == NULL || capacity < slots || sums == NULL) {
        if (out != NULL)
            memset(out, 0, slots * sizeof *out);
        return;
    }
    for (uint32_t plane = 0; plane < 2; plane++)
        reading->on->operations->download(
            reading->on, host + (size_t)plane * slots, sums + (size_t)plane * capacity, slots * sizeof *host);
    for (uint32_t i = 0; i < slots; i++)
        out[i] = (float)((double)kv_sum_get(host, slots, i) * 0x1p-24);
}

static void read_entropy(const struct reading *reading, const uint16_t *entropy, bool missing, float *out) {
    uint32_t slots = reading->view.slots;
    uint16_t *host = (uint16_t *)reading->space;
    if (out == NULL || missing || entropy == NULL) {
        if (out != NULL)
            memset(out, 0, slots * sizeof *out);
        return;
    }
    reading->on->operations->download(reading->on, host, entropy, slots * sizeof *host);
    for (uint32_t i = 0; i < slots; i++)
        out[i] = half_to_float(host[i]);
}

static void widen(enum kv_format format, const void *from, size_t count, float *out) {
    const uint16_t *narrow = from;
    if (format == KV_F32)
        memcpy(out, from, count * sizeof *out);
    for (size_t i = 0; format == KV_F16 && i < count; i++)
        out[i] = half_to_float(narrow[i]);
    for (size_t i = 0; format == KV_BF16 && i < count; i++)
        out[i] = bfloat_to_float(narrow[i]);
}

/* Rows of the window, one query head after the other. */
static int read_head_window(const struct reading *reading, const struct kv_statistics *kept, uint32_t group,
    struct head_features *out, struct error *error) {
    uint32_t slots = reading->view.slots;
    if (kept->head_rows == NULL || kept->window != out->window || kept->capacity < slots)
        return error_set(error, ERROR_INVALID, "a window of %u queries was not recorded", out->window);
    for (size_t row = 0; row < (size_t)out->window * group; row++)
        reading->on->operations->download(reading->on, out->head_window + row * out->capacity,
            kept->head_rows + row * kept->capacity, slots * sizeof *out->head_window);
    return 0;
}

/* A page's values lie slot by slot behind its keys. */
static void read_values(const struct reading *reading, float *out) {
    const struct kv_pool *pool = kv_cache_pool(reading->engine->cache);
    const struct kv_layout *layout = &pool->layout;
    size_t row = layout->head_dim * kv_format_bytes(layout->format);
    for (uint32_t first = 0; first < reading->view.slots; first += KV_PAGE_SLOTS) {
        uint32_t left = reading->view.slots - first, count = left < KV_PAGE_SLOTS ? left : KV_PAGE_SLOTS;
        const char *page = kv_pool_address(reading->engine->backend, pool, reading->view.pages[first / KV_PAGE_SLOTS]);
        reading->on->operations->download(reading->on, reading->space, page + KV_PAGE_SLOTS * row, count * row);
        widen(layout->format, reading->space, (size_t)count * layout->head_dim, out + (size_t)first * layout->head_dim);
    }
}

static int read_keys(const struct reading *reading, float *out) {
    struct engine *engine = reading->engine;
    const struct backend_operations *operations = engine_operations(engine);
    struct rope_params rope = transformer_rope(engine->transformer, reading->layer);
    size_t bytes = (size_t)reading->view.slots * engine->model->shape.head_dim * sizeof(float);
    uint32_t *slots = (uint32_t *)reading->space;
    struct backend *on = reading->on;
    float *keys = on->operations->host_memory ? out : on->operations->allocate(on, bytes);
    if (keys == NULL)
        return ERROR_MEMORY;
    for (uint32_t i = 0; i < reading->view.slots; i++)
        slots[i] = i;
    operations->unrotate_slots(
        engine->backend, kv_cache_pool(engine->cache), &rope, reading->view.pages, slots, reading->view.slots, keys);
    if (keys != out) {
        on->operations->download(on, out, keys, bytes);
        on->operations->release(on, keys);
    }
    return 0;
}

int sequence_features(
    struct sequence *sequence, uint32_t layer, uint32_t head, struct head_features *out, struct error *error) {
    struct engine *engine = sequence->engine;
    const struct model_shape *shape = &engine->model->shape;
    const struct statistics *statistics = sequence->eviction.statistics;
    if (layer >= shape->layers || head >= shape->kv_heads || sequence->swap != NULL)
        return error_set(
            error, ERROR_INVALID, "no KV head %u in layer %u, or the sequence is swapped out", head, layer);
    struct reading reading = {.engine = engine, .layer = layer, .head = head};
    reading.view = kv_sequence_view(sequence->kv, layer, head);
    reading.on = backend_of_head(engine->backend, shape->kv_heads, layer * shape->kv_heads + head);
    uint32_t slots = out->slots = engine->model->windows[layer] == 0 ? reading.view.slots : 0;
    if (slots > out->capacity)
        return error_set(error, ERROR_INVALID, "room for %u slots, there are %u", out->capacity, slots);
    if (slots == 0)
        return 0;
    struct kv_statistics none = {0};
    const struct kv_statistics *kept =
        statistics != NULL ? &statistics->heads[(size_t)layer * shape->kv_heads + head] : &none;
    int code = 0;
    reading.space = malloc(slots * sizeof(uint64_t) + kv_page_bytes(&kv_cache_pool(engine->cache)->layout));
    if (reading.space == NULL)
        return error_set(error, ERROR_MEMORY, "no memory for the features of %u slots", slots);
    if (out->positions != NULL)
        kv_sequence_positions(sequence->kv, layer, head, out->positions);
    read_sums(&reading, kept->sum, kept->capacity, out->sum);
    read_sums(&reading, kept->squared, kept->capacity, out->squared);
    read_entropy(&reading, kept->entropy, kept->capacity < slots, out->entropy);
    if (out->values != NULL)
        read_values(&reading, out->values);
    if (out->head_window != NULL)
        code = read_head_window(&reading, kept, shape->heads / shape->kv_heads, out, error);
    if (code == 0 && out->keys != NULL && read_keys(&reading, out->keys) != 0)
        code = error_set(error, ERROR_MEMORY, "no memory for the keys of %u slots", slots);
    if (code == 0 && (out->value_norm != NULL || out->output_norm != NULL))
        code = engine_operations(engine)->slot_norms(engine->backend, kv_cache_pool(engine->cache), &reading.view,
            &engine->model->layers[layer].attn_output, layer, head, shape->heads, out->value_norm, out->output_norm,
            error);
    free(reading.space);
    return code;
}
