/* SPDX-License-Identifier: Apache-2.0 */
#include "cuda/preference.h"
#include "cuda/device.h"
#include "cuda/pages.cuh"
#include "cuda/warp.cuh"

/* Whether a slot counts: it is used and not protected. */
static __device__ __forceinline__ bool slot_counts(
    const struct kv_pool &pool, const struct preference_head &head, uint32_t slot) {
    if (slot >= head.slots)
        return false;
    char *page = page_at(pool, head.pages[slot / KV_PAGE_SLOTS]);
    uint32_t position = (uint32_t)page_positions(pool.layout, page)[slot % KV_PAGE_SLOTS];
    return position != KV_NO_POSITION && position >= head.sinks && position < head.recent_from;
}

/* A thread a slot, all of its query heads and rows. */
static __global__ void __launch_bounds__(PREFERENCE_SLOTS) preference_slots_kernel(
    const struct kv_pool pool, const struct preference_head *heads, uint32_t group, struct preference *parts) {
    KERNEL_SHARED(struct preference, warps);
    const struct preference_head head = heads[blockIdx.y];
    uint32_t slot = blockIdx.x * PREFERENCE_SLOTS + threadIdx.x, warp = threadIdx.x / 32;
    struct preference total = {0, 0};
    if (slot_counts(pool, head, slot)) {
        for (uint32_t g = 0; g < group; g++) {
            const uint16_t *column = head.head_rows + (size_t)g * head.capacity + slot;
            double sum = 0, squares = 0;
            for (uint32_t row = 0; row < head.rows; row++) {
                float p = __half2float(__ushort_as_half(column[(size_t)row * group * head.capacity]));
                sum += (double)p;
                squares += (double)(p * p); /* exact */
                total.entropy -= p > 0 ? (double)(p * logf(p)) : 0;
            }
            double mean = sum / head.rows, spread = squares / head.rows - mean * mean;
            total.variance += spread > 0 ? spread : 0;
        }
    }
    total = {warp_sum(total.entropy), warp_sum(total.variance)};
    if (threadIdx.x % 32 == 0)
        warps[warp] = total;
    __syncthreads();
    if (threadIdx.x != 0)
        return;
    total = warps[0];
    for (warp = 1; warp < PREFERENCE_SLOTS / 32; warp++) {
        total.entropy += warps[warp].entropy;
        total.variance += warps[warp].variance;
    }
    parts[(size_t)blockIdx.y * gridDim.x + blockIdx.x] = total;
}

/* A warp a layer. */
static __global__ void __launch_bounds__(32)
    preference_layers_kernel(const struct preference *parts, uint32_t count, struct preference *out) {
    struct preference total = {0, 0};
    for (uint32_t i = threadIdx.x; i < count; i += 32) {
        double2 part = ((const double2 *)parts)[(size_t)blockIdx.x * count + i];
        total.entropy += part.x;
        total.variance += part.y;
    }
    total = {warp_sum(total.entropy), warp_sum(total.variance)};
    if (threadIdx.x == 0)
        out[blockIdx.x] = total;
}

extern "C" void preference_launch(const struct kv_pool *pool, const struct preference_head *heads, uint32_t layers,
    uint32_t group, uint32_t blocks, struct preference *parts, struct preference *out, cudaStream_t stream) {
    uint32_t kv_heads = pool->layout.kv_heads;
    KERNEL_LAUNCH(preference_slots_kernel, dim3(blocks, layers * kv_heads), dim3(PREFERENCE_SLOTS),
        PREFERENCE_SLOTS / 32 * sizeof(struct preference), stream, *pool, heads, group, parts);
    KERNEL_LAUNCH(preference_layers_kernel, dim3(layers), dim3(32), 0, stream, parts, blocks * kv_heads, out);
}
