/* SPDX-License-Identifier: Apache-2.0
 *
 * What is evicted goes into its head's summary slot. A head is one thread's, its slots are taken in the order given,
 * and there is one version for all tiers: means are the same bits everywhere.
 */
#include "engine/cpu/attend.h"

#include <math.h>

static float read_number(enum kv_format format, const char *from, size_t offset) {
    if (format == KV_F32)
        return ((const float *)from)[offset];
    uint16_t bits = ((const uint16_t *)from)[offset];
    if (format == KV_F16)
        return half_to_float(bits);
    union {
        uint32_t bits;
        float number;
    } wide = {.bits = (uint32_t)bits << 16};
    return wide.number;
}

/* Mean attention on a token by those that could see it. The bound keeps w ln w finite for a token that none looked at.
 */
static float slot_weight(const struct summary_update *update, uint32_t slot) {
    double queries = update->seen - update->positions[slot];
    double mean = (double)kv_sum_get(update->sum, update->capacity, slot) * 0x1p-24 / queries;
    return (float)fmax(mean, 0x1p-24);
}

static void add_slot(const struct kv_pool *pool, const struct summary_update *update, uint32_t slot) {
    const struct kv_layout *layout = &pool->layout;
    uint32_t dim = layout->head_dim, place = slot % KV_PAGE_SLOTS;
    char *page = kv_pool_page(pool, update->view.pages[slot / KV_PAGE_SLOTS]);
    const char *values = kv_page_values(layout, page);
    float *key = update->summary, *value = key + dim, *total = value + dim + 1, weight = slot_weight(update, slot);
    total[0] += weight;
    total[1] += (float)((double)weight * log((double)weight));
    float share = weight / total[0];
    for (uint32_t i = 0; i < dim; i++)
        key[i] += share * (read_number(layout->format, page, (size_t)i * KV_PAGE_SLOTS + place) - key[i]);
    for (uint32_t i = 0; i < dim; i++)
        value[i] += share * (read_number(layout->format, values, (size_t)place * dim + i) - value[i]);
}

struct summarise_job {
    const struct kv_pool *pool;
    const struct summary_update *updates;
};

static void summarise_head(void *context, uint32_t chunk, uint32_t thread) {
    const struct summarise_job *job = context;
    const struct summary_update *update = &job->updates[chunk];
    uint32_t dim = job->pool->layout.head_dim;
    (void)thread;
    if (update->count == 0)
        return;
    for (uint32_t i = 0; i < update->count; i++)
        add_slot(job->pool, update, update->slots[i]);
    float *logit = update->summary + 2 * (size_t)dim;
    double weight = (double)logit[1];
    logit[0] = (float)(log(weight) - (double)logit[2] / weight + (double)update->offset);
}

void cpu_summarise(
    struct backend *backend, const struct kv_pool *pool, const struct summary_update *updates, uint32_t count) {
    struct summarise_job job = {pool, updates};
    thread_pool_run(cpu_backend(backend)->threads, count, summarise_head, &job);
}
