/* SPDX-License-Identifier: Apache-2.0
 *
 * Room for new tokens: count what it takes, reserve host memory, then do what can no longer fail.
 */
#include "engine/kv_internal.h"

#include <stdlib.h>
#include <string.h>

/* At least count, and enough more that growth by one stays O(1) amortised. */
static uint32_t grown_capacity(uint32_t capacity, uint32_t count) {
    uint32_t doubled = capacity < UINT32_MAX / 2 ? 2 * capacity : UINT32_MAX;
    uint32_t least = count < KV_PAGE_SLOTS ? KV_PAGE_SLOTS : count;
    return doubled > least ? doubled : least;
}

int kv_head_reserve_pages(struct kv_head *head, uint32_t count) {
    if (count <= head->pages_capacity)
        return 0;
    uint32_t capacity = grown_capacity(head->pages_capacity, count);
    uint32_t *pages = realloc(head->pages, capacity * sizeof *pages);
    if (pages == NULL)
        return ERROR_MEMORY;
    head->pages = pages;
    head->pages_capacity = capacity;
    return 0;
}

int kv_head_reserve_slots(struct kv_head *head, uint32_t count) {
    if (count <= head->slots_capacity && head->positions != NULL)
        return 0;
    uint32_t capacity = grown_capacity(head->slots_capacity, count);
    uint32_t *positions = malloc(kv_order_numbers(capacity) * sizeof *positions);
    if (positions == NULL)
        return ERROR_MEMORY;
    if (head->positions != NULL) {
        memcpy(positions, head->positions, head->slots * sizeof *positions);
        memcpy(positions + capacity, head->order, head->order_count * sizeof *positions);
        free(head->positions);
    }
    head->positions = positions;
    head->order = positions + capacity;
    head->slots_capacity = capacity;
    return 0;
}

/* The existing page that appending count tokens would write to, as an index into the head's table; pages_count when
 * only new pages are written. */
static uint32_t page_to_write(const struct kv_head *head, uint32_t count) {
    if (count == 1 && head->marked != KV_NO_SLOT)
        return head->marked / KV_PAGE_SLOTS;
    return head->slots / KV_PAGE_SLOTS;
}

static uint64_t pages_after(const struct kv_head *head, uint32_t count) {
    if (count == 1 && head->marked != KV_NO_SLOT)
        return head->pages_count;
    return ((uint64_t)head->slots + count + KV_PAGE_SLOTS - 1) / KV_PAGE_SLOTS;
}

uint32_t kv_sequence_pages_needed(const struct kv_sequence *sequence, uint32_t count) {
    const struct kv_pages *pages = &sequence->cache->pages;
    uint64_t by_rank[BACKEND_RANKS_MAX] = {0};
    for (uint32_t i = 0; count > 0 && i < pages->heads; i++) {
        const struct kv_head *head = &sequence->heads[i];
        uint32_t written = page_to_write(head, count);
        by_rank[head->rank] += pages_after(head, count) - head->pages_count;
        by_rank[head->rank] += written < head->pages_count && kv_pages_is_shared(pages, head->pages[written]);
    }
    uint64_t needed = kv_pages_of_ranks(pages, by_rank);
    return needed < UINT32_MAX ? (uint32_t)needed : UINT32_MAX;
}

static int reserve(struct kv_sequence *sequence, uint32_t count) {
    for (uint32_t i = 0; i < sequence->cache->pages.heads; i++) {
        struct kv_head *head = &sequence->heads[i];
        if (kv_head_reserve_pages(head, (uint32_t)pages_after(head, count)) != 0)
            return ERROR_MEMORY;
        if (head->positions != NULL && kv_head_reserve_slots(head, head->slots + count) != 0)
            return ERROR_MEMORY;
    }
    return 0;
}

void kv_cache_flush_batch(struct kv_cache *cache) {
    struct kv_page_batch *batch = &cache->batch;
    struct backend *backend = cache->pages.backend;
    const struct kv_pool *pool = &cache->pages.pool;
    if (batch->copies > 0)
        backend->operations->copy_pages(backend, pool, batch->copy_from, batch->copy_to, batch->copies);
    if (batch->fresh_count > 0)
        backend->operations->clear_slots(backend, pool, batch->fresh, 0, batch->fresh_count * KV_PAGE_SLOTS);
    for (uint32_t i = 0; i < batch->copies; i++)
        kv_pages_drop(&cache->pages, batch->copy_from[i]);
    batch->copies = batch->fresh_count = 0;
}

void kv_cache_own_page(struct kv_cache *cache, struct kv_head *head, uint32_t page) {
    struct kv_page_batch *batch = &cache->batch;
    if (!kv_pages_is_shared(&cache->pages, head->pages[page]))
        return;
    if (batch->copies == KV_BATCH_PAGES)
        kv_cache_flush_batch(cache);
    batch->copy_from[batch->copies] = head->pages[page];
    head->pages[page] = kv_pages_take(&cache->pages, head->rank);
    kv_head_touch(head, page);
    batch->copy_to[batch->copies++] = head->pages[page];
}

static void add_fresh_page(struct kv_cache *cache, struct kv_head *head) {
    struct kv_page_batch *batch = &cache->batch;
    if (batch->fresh_count == KV_BATCH_PAGES)
        kv_cache_flush_batch(cache);
    uint32_t page = kv_pages_take(&cache->pages, head->rank);
    batch->fresh[batch->fresh_count++] = page;
    kv_head_touch(head, head->pages_count);
    head->pages[head->pages_count++] = page;
}

/* New tokens have the largest positions: they come last in the order, before a slot that is marked. */
static void add_positions(struct kv_head *head, uint32_t position, uint32_t count) {
    uint32_t at = head->order_count - (head->marked != KV_NO_SLOT);
    for (uint32_t i = 0; i < count; i++)
        head->positions[head->slots + i] = position + i;
    if (head->order_stale)
        return;
    for (uint32_t i = 0; i < count; i++)
        head->order[at + i] = head->slots + i;
    if (head->marked != KV_NO_SLOT)
        head->order[at + count] = head->marked;
    head->order_count += count;
}

static void append_to_head(struct kv_cache *cache, struct kv_head *head, uint32_t position, uint32_t count) {
    uint32_t written = page_to_write(head, count);
    if (written < head->pages_count)
        kv_cache_own_page(cache, head, written);
    if (count == 1 && head->marked != KV_NO_SLOT) { /* it is the last of the order already */
        head->positions[head->marked] = position;
        head->first_new = head->marked;
        head->marked = KV_NO_SLOT;
        return;
    }
    uint32_t pages_count = (uint32_t)pages_after(head, count);
    while (head->pages_count < pages_count)
        add_fresh_page(cache, head);
    if (head->positions != NULL)
        add_positions(head, position, count);
    head->first_new = head->slots;
    head->slots += count;
}

int kv_sequence_append(struct kv_sequence *sequence, uint32_t count, struct error *error) {
    struct kv_cache *cache = sequence->cache;
    if (count == 0)
        return 0;
    if (count > KV_NO_POSITION - sequence->length)
        return error_set(error, ERROR_CONTEXT, "a sequence of %u tokens cannot take %u more", sequence->length, count);
    uint32_t needed = kv_sequence_pages_needed(sequence, count);
    uint32_t available = kv_pages_available(&cache->pages);
    if (needed > available)
        return error_set(
            error, ERROR_PAGES, "%u more tokens need %u KV pages of which %u are free", count, needed, available);
    if (reserve(sequence, count) != 0)
        return error_set(error, ERROR_MEMORY, "no memory for the page tables of %u more tokens", count);
    for (uint32_t i = 0; i < cache->pages.heads; i++)
        append_to_head(cache, &sequence->heads[i], sequence->length, count);
    kv_cache_flush_batch(cache);
    sequence->length += count;
    return 0;
}
