/* SPDX-License-Identifier: Apache-2.0 */
#include "cuda/preference.h"
#include "cuda/attend_state.h"

/* Stages the heads of all layers; NULL when there was an error. *slots_most: of a head. */
static const struct preference_head *stage_heads(struct cuda_backend *cuda, const struct kv_pool *pool,
    const struct score_layer *layers, uint32_t count, uint32_t *slots_most) {
    uint32_t kv_heads = pool->layout.kv_heads;
    size_t bytes = cuda_stage_size((size_t)count * kv_heads * sizeof(struct preference_head));
    struct cuda_stage stage;
    const void *device;
    *slots_most = 0;
    for (uint32_t i = 0; i < count * kv_heads; i++) {
        const struct kv_head_view *view = &layers[i / kv_heads].heads[i % kv_heads].view;
        bytes += cuda_view_bytes(view);
        *slots_most = view->slots > *slots_most ? view->slots : *slots_most;
    }
    if (!cuda_stage_begin(cuda, bytes, &stage))
        return NULL;
    struct preference_head *to = cuda_stage_add(&stage, (size_t)count * kv_heads * sizeof *to, &device);
    for (uint32_t i = 0; i < count * kv_heads; i++) {
        const struct score_layer *layer = &layers[i / kv_heads];
        const struct score_head *from = &layer->heads[i % kv_heads];
        to[i] = (struct preference_head){
            .pages = cuda_view_stage(&stage, &from->view).pages,
            .head_rows = from->statistics.head_rows,
            .slots = from->view.slots,
            .capacity = from->statistics.capacity,
            .rows = layer->seen < from->statistics.window ? layer->seen : from->statistics.window,
            .sinks = from->sinks,
            .recent_from = from->recent_from,
        };
    }
    cuda_stage_send(cuda, &stage);
    return device;
}

void cuda_window_preference(struct backend *backend, const struct kv_pool *pool, const struct score_layer *layers,
    uint32_t count, uint32_t heads, double *entropy, double *variance) {
    struct cuda_backend *cuda = cuda_backend(backend);
    struct attend_state *state = attend_state_get(cuda);
    uint32_t kv_heads = pool->layout.kv_heads, slots_most;
    if (state == NULL || count == 0)
        return;
    const struct preference_head *device = stage_heads(cuda, pool, layers, count, &slots_most);
    uint32_t blocks = (slots_most + PREFERENCE_SLOTS - 1) / PREFERENCE_SLOTS;
    size_t parts_count = (size_t)count * kv_heads * blocks;
    struct preference *out =
        cuda_scratch_reserve(cuda, &state->preferences, (count + parts_count) * sizeof(struct preference));
    if (device == NULL || out == NULL)
        return;
    if (blocks > 0)
        preference_launch(pool, device, count, heads / kv_heads, blocks, out + count, out, cuda->stream);
    cuda_check_launch(cuda, "window_preference");
    for (uint32_t layer = 0; layer < count; layer++) {
        struct preference result = {0, 0};
        if (blocks > 0)
            cuda_download(backend, &result, out + layer, sizeof result);
        entropy[layer] = result.entropy;
        variance[layer] = result.variance;
    }
}
