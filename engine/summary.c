/* SPDX-License-Identifier: Apache-2.0 */
#include "engine/summary.h"

#include "engine/statistics.h"
#include "policy/network.h"

#include <stdlib.h>
#include <string.h>

size_t summaries_bytes(uint32_t heads, uint32_t head_dim) {
    return heads * SUMMARY_NUMBERS((size_t)head_dim) * sizeof(float);
}

static float *slot_at(const struct summaries *summaries, uint32_t head) {
    struct backend *backend = summaries->backend;
    uint32_t rank = backend_rank_of_head(backend, summaries->kv_heads, head);
    float *memory = backend_address(backend, summaries->memory, rank);
    uint32_t place = backend_head_on_rank(backend, summaries->kv_heads, head);
    return memory + place * SUMMARY_NUMBERS((size_t)summaries->head_dim);
}

static float *allocate(const struct summaries *summaries) {
    struct backend *backend = summaries->backend;
    return backend->operations->allocate(backend, summaries->bytes / backend_ranks(backend));
}

struct summaries *summaries_create(struct backend *backend, uint32_t heads, uint32_t kv_heads, uint32_t head_dim) {
    struct summaries *summaries = calloc(1, sizeof *summaries + heads * sizeof *summaries->used);
    if (summaries == NULL)
        return NULL;
    summaries->backend = backend;
    summaries->heads = heads;
    summaries->kv_heads = kv_heads;
    summaries->head_dim = head_dim;
    summaries->bytes = summaries_bytes(heads, head_dim);
    summaries->memory = allocate(summaries);
    if (summaries->memory == NULL) {
        free(summaries);
        return NULL;
    }
    return summaries;
}

struct summaries *summaries_fork(const struct summaries *from) {
    struct summaries *fork = summaries_create(from->backend, from->heads, from->kv_heads, from->head_dim);
    if (fork == NULL)
        return NULL;
    fork->any = from->any;
    memcpy(fork->used, from->used, from->heads * sizeof *from->used);
    if (statistics_copy_device(from->backend, fork->memory, from->memory, from->bytes) != 0) {
        summaries_free(fork);
        return NULL;
    }
    return fork;
}

void summaries_free(struct summaries *summaries) {
    if (summaries == NULL)
        return;
    summaries->backend->operations->release(summaries->backend, summaries->memory);
    free(summaries);
}

const float *summaries_slot(const struct summaries *summaries, uint32_t head) {
    return summaries != NULL && summaries->used[head] ? slot_at(summaries, head) : NULL;
}

/* ---- evicted tokens ---- */

static int compare_positions(const void *a, const void *b, void *context) {
    const uint32_t *positions = context;
    uint32_t x = positions[*(const uint32_t *)a], y = positions[*(const uint32_t *)b];
    return x < y ? -1 : x > y;
}

/* The tokens that go, by ascending position: slots [count]. positions NULL: those of the slots' numbers. */
static uint32_t list_evicted(
    const struct kv_removal *removal, uint32_t slots_count, const uint32_t *positions, uint32_t *slots) {
    uint32_t count = 0, kept = 0;
    if (!kv_removal_compacts(removal) && removal->evict != KV_NO_SLOT)
        slots[count++] = removal->evict;
    for (uint32_t i = 0; removal->drop != NULL && i < slots_count - removal->count; i++)
        if (positions == NULL || positions[removal->drop[i]] != KV_NO_POSITION)
            slots[count++] = removal->drop[i];
    for (uint32_t slot = 0; removal->keep != NULL && slot < slots_count; slot++) {
        if (kept < removal->count && removal->keep[kept] == slot)
            kept++;
        else if (positions == NULL || positions[slot] != KV_NO_POSITION)
            slots[count++] = slot;
    }
    if (positions != NULL && count > 1)
        qsort_r(slots, count, sizeof *slots, compare_positions, (void *)positions);
    return count;
}

size_t summaries_work(uint32_t heads, size_t slots) {
    return heads * sizeof(struct summary_update) + slots * sizeof(uint32_t);
}

void summaries_add(struct summaries *summaries, const struct kv_pool *pool, const struct kv_sequence *kv,
    const struct kv_removal *removals, const struct kv_statistics *sums, const uint32_t *identity,
    const struct policy_network *network, double level, void *work) {
    uint32_t kv_heads = pool->layout.kv_heads, updates_count = 0;
    struct summary_update *updates = work;
    uint32_t *slots = (uint32_t *)(updates + summaries->heads);
    for (uint32_t i = 0; i < summaries->heads; i++) {
        const uint32_t *positions = kv_sequence_slot_positions(kv, i / kv_heads, i % kv_heads);
        struct summary_update *update = &updates[updates_count];
        *update = (struct summary_update){
            .view = kv_sequence_view(kv, i / kv_heads, i % kv_heads),
            .sum = sums[i].sum,
            .capacity = sums[i].capacity,
            .positions = positions != NULL ? positions : identity,
            .slots = slots,
            .seen = kv_sequence_length(kv),
            .offset = network != NULL ? network_summary_offset(network, i / kv_heads, level) : 0,
            .summary = slot_at(summaries, i),
        };
        update->count = list_evicted(&removals[i], update->view.slots, positions, slots);
        if (update->count == 0)
            continue;
        slots += update->count;
        summaries->any = summaries->used[i] = true;
        updates_count++;
    }
    summaries->backend->operations->summarise(summaries->backend, pool, updates, updates_count);
}

/* ---- host memory ---- */

void summaries_save(struct summaries *summaries, void *host) {
    statistics_download(summaries->backend, host, summaries->memory, summaries->bytes);
    summaries->backend->operations->release(summaries->backend, summaries->memory);
    summaries->memory = NULL;
}

int summaries_restore(struct summaries *summaries, const void *host, struct error *error) {
    summaries->memory = allocate(summaries);
    if (summaries->memory == NULL)
        return error_set(error, ERROR_MEMORY, "no memory for the summary slots of a sequence");
    statistics_upload(summaries->backend, summaries->memory, host, summaries->bytes);
    return 0;
}
