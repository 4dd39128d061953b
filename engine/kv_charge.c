/* SPDX-License-Identifier: Apache-2.0
 *
 * Memory outside the pool that counts against it. The pages it stands for stay on the free list, where they are taken
 * last: what was never taken has never been touched, so that it costs nothing while it is charged.
 */
#include "engine/kv_internal.h"

size_t kv_sequence_charged(const struct kv_sequence *sequence) {
    return sequence->charged;
}

size_t kv_cache_charged(const struct kv_cache *cache) {
    return cache->pages.charged_bytes;
}

size_t kv_cache_pages_of(const struct kv_cache *cache, size_t bytes) {
    return kv_pages_of(&cache->pages, bytes);
}

int kv_sequence_charge(struct kv_sequence *sequence, size_t bytes, struct error *error) {
    struct kv_pages *pages = &sequence->cache->pages;
    size_t total = pages->charged_bytes - sequence->charged;
    if (bytes > SIZE_MAX / 2 - total)
        return error_set(error, ERROR_PAGES, "%zu bytes are more than the KV pool has", bytes);
    total += bytes;
    size_t charged = kv_pages_of(pages, total);
    size_t most = kv_pages_places(pages);
    if (charged > most && charged > pages->charged)
        return error_set(error, ERROR_PAGES, "%zu bytes of statistics take %zu KV pages more, %u are free", bytes,
            charged - pages->charged, kv_pages_available(pages));
    pages->charged_bytes = total;
    sequence->charged = bytes;
    pages->charged = (uint32_t)charged;
    kv_pages_fit_attachments(pages);
    return 0;
}
