/* SPDX-License-Identifier: Apache-2.0
 *
 * A block has one head, a thread one channel of keys and of values. Slots are added in the order given, so that means
 * do not depend on how evictions were cut into calls; what they need is found by all threads, some slots at a time.
 */
#include "cuda/summarise.h"
#include "cuda/device.h"
#include "cuda/pages.cuh"
#include "cuda/sums.cuh"

enum {
    CHANNELS = 256,   /* threads: the largest head_dim */
    QUEUE_SLOTS = 64, /* whose weights are in shared memory at a time */
    AHEAD = 8,        /* slots whose numbers are under way */
};

struct __attribute__((aligned(16))) queued_slot {
    const char *page;
    uint32_t place;
    float weight, weighted; /* w, w ln w */
};

/* Mean attention on a token by those that could see it. The bound keeps w ln w finite for a token that none looked at.
 */
static __device__ __forceinline__ struct queued_slot queue_slot(
    const struct kv_pool &pool, const struct cuda_summary_update &update, uint32_t slot) {
    uint32_t place = slot % KV_PAGE_SLOTS;
    char *page = page_at(pool, update.view.pages[slot / KV_PAGE_SLOTS]);
    double queries = update.seen - (uint32_t)page_positions(pool.layout, page)[place],
           mean = (double)sum_get(update.sum, update.capacity, slot) * 0x1p-24 / queries;
    float weight = (float)(mean > 0x1p-24 ? mean : 0x1p-24);
    return (struct queued_slot){page, place, weight, (float)((double)weight * log((double)weight))};
}

static __global__ void __launch_bounds__(CHANNELS, 2)
    summarise_kernel(const struct kv_pool pool, const struct cuda_summary_update *updates) {
    KERNEL_SHARED(struct queued_slot, queue);
    const struct cuda_summary_update update = updates[blockIdx.x];
    enum kv_format format = pool.layout.format;
    uint32_t channel = threadIdx.x, dim = pool.layout.head_dim;
    uint32_t values_at = dim * KV_PAGE_SLOTS * number_bytes(format);
    if (update.count == 0)
        return;
    bool works = channel < dim;
    float key = works ? update.summary[channel] : 0, value = works ? update.summary[dim + channel] : 0;
    float weight = update.summary[2 * dim + 1], weighted = update.summary[2 * dim + 2];
    for (uint32_t first = 0; first < update.count; first += QUEUE_SLOTS) {
        uint32_t count = update.count - first < QUEUE_SLOTS ? update.count - first : (uint32_t)QUEUE_SLOTS;
        __syncthreads();
        for (uint32_t i = threadIdx.x; i < count; i += blockDim.x)
            queue[i] = queue_slot(pool, update, update.slots[first + i]);
        __syncthreads();
        for (uint32_t i = 0; i < count; i += AHEAD) {
            float keys[AHEAD], values[AHEAD];
#pragma unroll
            for (uint32_t ahead = 0; ahead < AHEAD; ahead++) {
                keys[ahead] = values[ahead] = 0;
                if (i + ahead < count && works) {
                    const struct queued_slot &slot = queue[i + ahead];
                    keys[ahead] = number_load(format, slot.page, channel * KV_PAGE_SLOTS + slot.place);
                    values[ahead] = number_load(format, slot.page + values_at, slot.place * dim + channel);
                }
            }
#pragma unroll
            for (uint32_t ahead = 0; ahead < AHEAD; ahead++) {
                if (i + ahead >= count)
                    continue;
                float w = queue[i + ahead].weight;
                weight += w;
                weighted += queue[i + ahead].weighted;
                float share = w / weight;
                key += share * (keys[ahead] - key);
                value += share * (values[ahead] - value);
            }
        }
    }
    __syncthreads(); /* all have read the totals before */
    if (works) {
        update.summary[channel] = key;
        update.summary[dim + channel] = value;
    }
    if (threadIdx.x == 0) {
        double total = (double)weight;
        update.summary[2 * dim] = (float)(log(total) - (double)weighted / total + (double)update.offset);
        update.summary[2 * dim + 1] = weight;
        update.summary[2 * dim + 2] = weighted;
    }
}

extern "C" void summarise_launch(
    const struct kv_pool *pool, const struct cuda_summary_update *updates, uint32_t count, cudaStream_t stream) {
    if (count > 0)
        KERNEL_LAUNCH(summarise_kernel, dim3(count), dim3((pool->layout.head_dim + 31) / 32 * 32),
            QUEUE_SLOTS * sizeof(struct queued_slot), stream, *pool, updates);
}
