/* SPDX-License-Identifier: Apache-2.0
 *
 * A sequence's pages go to host memory and come back.
 */
#include "engine/kv_internal.h"

uint64_t kv_sequence_pages_saved(const struct kv_sequence *sequence) {
    uint64_t count = 0;
    for (uint32_t i = 0; i < sequence->cache->pages.heads; i++)
        count += kv_pages_for(sequence->heads[i].slots) - sequence->heads[i].gone;
    return count;
}

uint64_t kv_sequence_pages_to_restore(const struct kv_sequence *sequence) {
    uint64_t by_rank[BACKEND_RANKS_MAX] = {0};
    for (uint32_t i = 0; i < sequence->cache->pages.heads; i++)
        by_rank[sequence->heads[i].rank] += kv_pages_for(sequence->heads[i].slots) - sequence->heads[i].gone;
    return kv_pages_of_ranks(&sequence->cache->pages, by_rank);
}

void kv_sequence_save(struct kv_sequence *sequence, void *host) {
    struct kv_pages *pages = &sequence->cache->pages;
    const struct kv_pool *pool = &pages->pool;
    char *to = host;
    for (uint32_t i = 0; i < pages->heads; i++) {
        const struct kv_head *head = &sequence->heads[i];
        struct backend *on = backend_of_rank(pages->backend, head->rank);
        for (uint32_t p = head->gone; p < head->pages_count; p++, to += pool->page_bytes)
            on->operations->download(on, to, kv_pool_address(pages->backend, pool, head->pages[p]), pool->page_bytes);
    }
    kv_sequence_drop_pages(sequence);
    kv_sequence_drop_tables(sequence);
    for (uint32_t i = 0; i < pages->heads; i++)
        sequence->heads[i].pages_count = sequence->heads[i].gone;
    sequence->saved = true;
}

int kv_sequence_restore(struct kv_sequence *sequence, const void *host, struct error *error) {
    struct kv_pages *pages = &sequence->cache->pages;
    uint64_t needed = kv_sequence_pages_to_restore(sequence);
    if (needed > kv_pages_available(pages))
        return error_set(error, ERROR_PAGES, "%llu KV pages are needed to go on with a sequence, %u are free",
            (unsigned long long)needed, kv_pages_available(pages));
    const char *from = host;
    for (uint32_t i = 0; i < pages->heads; i++) {
        struct kv_head *head = &sequence->heads[i]; /* its table kept its capacity */
        struct backend *on = backend_of_rank(pages->backend, head->rank);
        uint32_t count = kv_pages_for(head->slots);
        for (; head->pages_count < count; head->pages_count++, from += pages->pool.page_bytes) {
            uint32_t page = kv_pages_take(pages, head->rank);
            head->pages[head->pages_count] = page;
            kv_head_touch(head, head->pages_count);
            on->operations->upload(
                on, kv_pool_address(pages->backend, &pages->pool, page), from, pages->pool.page_bytes);
        }
    }
    sequence->saved = false;
    return 0;
}
