/* SPDX-License-Identifier: Apache-2.0 */
#include "cuda/moments.h"
#include "cuda/cuda_backend.h"
#include "cuda/step.h"

void cuda_query_moments(struct backend *backend, const struct kv_batch *batch, uint32_t heads, const float *qkv,
    const struct query_moments *moments) {
    struct cuda_backend *cuda = cuda_backend(backend);
    size_t bytes = batch->items_count * sizeof *moments;
    struct cuda_batch views;
    struct cuda_stage stage;
    if (!cuda_batch_stage(cuda, batch, &views))
        return;
    const struct query_moments *device = cuda_step_moments(cuda, batch, moments);
    if (device == NULL) {
        if (!cuda_stage_begin(cuda, cuda_stage_size(bytes), &stage))
            return;
        device = cuda_stage_copy(&stage, moments, bytes);
        cuda_stage_send(cuda, &stage);
    }
    moments_launch(&views, heads, qkv, device, cuda->stream);
    cuda_check_launch(cuda, "query_moments");
}
