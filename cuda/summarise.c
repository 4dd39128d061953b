/* SPDX-License-Identifier: Apache-2.0 */
#include "cuda/summarise.h"
#include "cuda/cuda_backend.h"

static size_t updates_bytes(const struct summary_update *updates, uint32_t count) {
    size_t bytes = cuda_stage_size(count * sizeof(struct cuda_summary_update));
    for (uint32_t i = 0; i < count; i++)
        bytes += cuda_view_bytes(&updates[i].view) + cuda_stage_size(updates[i].count * sizeof *updates[i].slots);
    return bytes;
}

void cuda_summarise(
    struct backend *backend, const struct kv_pool *pool, const struct summary_update *updates, uint32_t count) {
    struct cuda_backend *cuda = cuda_backend(backend);
    const void *device;
    struct cuda_stage stage;
    if (count == 0 || !cuda_stage_begin(cuda, updates_bytes(updates, count), &stage))
        return;
    struct cuda_summary_update *to = cuda_stage_add(&stage, count * sizeof *to, &device);
    for (uint32_t i = 0; i < count; i++) {
        const struct summary_update *from = &updates[i];
        to[i] = (struct cuda_summary_update){
            .view = cuda_view_stage(&stage, &from->view),
            .sum = from->sum,
            .capacity = from->capacity,
            .slots = cuda_stage_copy(&stage, from->slots, from->count * sizeof *from->slots),
            .summary = from->summary,
            .count = from->count,
            .seen = from->seen,
            .offset = from->offset,
        };
    }
    cuda_stage_send(cuda, &stage);
    summarise_launch(pool, device, count, cuda->stream);
    cuda_check_launch(cuda, "summarise");
}
