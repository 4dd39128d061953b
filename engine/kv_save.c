/* SPDX-License-Identifier: Apache-2.0
 *
 * A sequence's pages go to host memory and come back.
 */
#include "engine/kv_internal.h"

static void *page_address(const struct kv_pool *pool, uint32_t page) {
    return (char *)pool->base + (size_t)page * pool->page_bytes;
}

uint64_t kv_sequence_pages_saved(const struct kv_sequence *sequence) {
    uint64_t count = 0;
    for (uint32_t i = 0; i < sequence->cache->pages.heads; i++)
        count += kv_pages_for(sequence->heads[i].slots);
    return count;
}

void kv_sequence_save(struct kv_sequence *sequence, void *host) {
    struct kv_pages *pages = &sequence->cache->pages;
    struct backend *backend = pages->backend;
    const struct kv_pool *pool = &pages->pool;
    char *to = host;
    for (uint32_t i = 0; i < pages->heads; i++)
        for (uint32_t p = 0; p < sequence->heads[i].pages_count; p++, to += pool->page_bytes)
            backend->operations->download(
                backend, to, page_address(pool, sequence->heads[i].pages[p]), pool->page_bytes);
    kv_sequence_drop_pages(sequence);
    kv_sequence_drop_tables(sequence);
    for (uint32_t i = 0; i < pages->heads; i++)
        sequence->heads[i].pages_count = 0;
    sequence->saved = true;
}

int kv_sequence_restore(struct kv_sequence *sequence, const void *host, struct error *error) {
    struct kv_pages *pages = &sequence->cache->pages;
    struct backend *backend = pages->backend;
    uint64_t needed = kv_sequence_pages_saved(sequence);
    if (needed > kv_pages_available(pages))
        return error_set(error, ERROR_PAGES, "%llu KV pages are needed to go on with a sequence, %u are free",
            (unsigned long long)needed, kv_pages_available(pages));
    const char *from = host;
    for (uint32_t i = 0; i < pages->heads; i++) {
        struct kv_head *head = &sequence->heads[i]; /* its table kept its capacity */
        uint32_t count = kv_pages_for(head->slots);
        for (; head->pages_count < count; head->pages_count++, from += pages->pool.page_bytes) {
            uint32_t page = kv_pages_take(pages);
            head->pages[head->pages_count] = page;
            kv_head_touch(head, head->pages_count);
            backend->operations->upload(backend, page_address(&pages->pool, page), from, pages->pool.page_bytes);
        }
    }
    sequence->saved = false;
    return 0;
}
