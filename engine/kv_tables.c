/* SPDX-License-Identifier: Apache-2.0
 *
 * Copies of page tables in device memory, kept up to date by what changed. A change is mostly one page at the end, or
 * one that was copied before it was written; a head remembers the range in which its changes lie.
 */
#include "engine/kv_internal.h"

#include <stdlib.h>

enum { WRITES_LEAST = 256 };

static uint32_t *device_table(const struct kv_sequence *sequence, uint32_t head) {
    struct backend *backend = sequence->cache->pages.backend;
    uint32_t place = backend_head_on_rank(backend, sequence->cache->pages.pool.layout.kv_heads, head);
    uint32_t *tables = backend_address(backend, sequence->device_tables, sequence->heads[head].rank);
    return tables + (size_t)place * sequence->device_pages;
}

const uint32_t *kv_sequence_device_table(const struct kv_sequence *sequence, uint32_t head) {
    if (sequence->device_tables == NULL || sequence->heads[head].changed_end != 0)
        return NULL;
    return device_table(sequence, head);
}

static void touch_all(struct kv_sequence *sequence) {
    for (uint32_t i = 0; i < sequence->cache->pages.heads; i++) {
        struct kv_head *head = &sequence->heads[i];
        head->changed_first = 0;
        head->changed_end = head->pages_count;
    }
}

void kv_sequence_drop_tables(struct kv_sequence *sequence) {
    struct backend *backend = sequence->cache->pages.backend;
    if (sequence->device_tables == NULL)
        return;
    backend->operations->release(backend, sequence->device_tables);
    sequence->device_tables = NULL;
    sequence->device_pages = 0;
    touch_all(sequence);
}

/* Room for the longest table, and for some growth. False when there is no memory. */
static bool reserve_tables(struct kv_sequence *sequence) {
    struct backend *backend = sequence->cache->pages.backend;
    uint32_t heads = sequence->cache->pages.heads, most = 0;
    for (uint32_t i = 0; i < heads; i++)
        most = sequence->heads[i].pages_count > most ? sequence->heads[i].pages_count : most;
    if (most <= sequence->device_pages && sequence->device_tables != NULL)
        return true;
    kv_sequence_drop_tables(sequence);
    uint32_t pages = (most + most / 2 + KV_PAGE_SLOTS) / KV_PAGE_SLOTS * KV_PAGE_SLOTS;
    sequence->device_tables = backend->operations->allocate(
        backend, (size_t)(heads / backend_ranks(backend)) * pages * sizeof *sequence->device_tables);
    if (sequence->device_tables == NULL)
        return false;
    sequence->device_pages = pages;
    touch_all(sequence);
    return true;
}

/* Room for one more write; sends what there is when memory for more is short. */
static bool reserve_write(struct kv_cache *cache) {
    if (cache->writes_count < cache->writes_capacity)
        return true;
    uint32_t capacity = cache->writes_capacity == 0 ? WRITES_LEAST : 2 * cache->writes_capacity;
    struct kv_table_write *writes = realloc(cache->writes, capacity * sizeof *writes);
    if (writes == NULL) {
        kv_cache_send_tables(cache);
        return cache->writes_capacity > 0;
    }
    cache->writes = writes;
    cache->writes_capacity = capacity;
    return true;
}

void kv_sequence_gather_tables(struct kv_sequence *sequence) {
    struct kv_cache *cache = sequence->cache;
    if (cache->pages.backend->operations->write_tables == NULL || sequence->saved || !reserve_tables(sequence))
        return;
    for (uint32_t i = 0; i < cache->pages.heads; i++) {
        struct kv_head *head = &sequence->heads[i];
        uint32_t first = head->changed_first;
        uint32_t end = head->changed_end < head->pages_count ? head->changed_end : head->pages_count;
        if (first < end) {
            if (!reserve_write(cache))
                continue;
            cache->writes[cache->writes_count++] = (struct kv_table_write){
                .to = device_table(sequence, i) + first,
                .from = head->pages + first,
                .count = end - first,
                .rank = head->rank,
            };
        }
        head->changed_first = head->changed_end = 0;
    }
}

void kv_cache_send_tables(struct kv_cache *cache) {
    struct backend *backend = cache->pages.backend;
    if (cache->writes_count > 0)
        backend->operations->write_tables(backend, cache->writes, cache->writes_count);
    cache->writes_count = 0;
}
