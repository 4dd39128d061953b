/* SPDX-License-Identifier: Apache-2.0
 *
 * Attachments: memory that is left with blocks of shared prefixes, and gives way to whatever else wants a page.
 */
#include "engine/kv_internal.h"

struct kv_attachment *kv_pages_attachment(
    const struct kv_pages *pages, uint32_t block, const struct kv_attachment_wanted *wanted) {
    struct kv_attachment *attachment = pages->attachments[block];
    while (attachment != NULL && !wanted->accepts(attachment, wanted->context))
        attachment = attachment->next_of_block;
    return attachment;
}

/* ---- the list of all, by their last use ---- */

static void list_append(struct kv_pages *pages, struct kv_attachment *attachment) {
    attachment->newer = NULL;
    attachment->older = pages->newest;
    if (pages->newest != NULL)
        pages->newest->newer = attachment;
    else
        pages->oldest = attachment;
    pages->newest = attachment;
}

static void list_remove(struct kv_pages *pages, struct kv_attachment *attachment) {
    if (attachment->older != NULL)
        attachment->older->newer = attachment->newer;
    else
        pages->oldest = attachment->newer;
    if (attachment->newer != NULL)
        attachment->newer->older = attachment->older;
    else
        pages->newest = attachment->older;
}

void kv_pages_touch_attachment(struct kv_pages *pages, struct kv_attachment *attachment) {
    list_remove(pages, attachment);
    list_append(pages, attachment);
}

/* ---- who goes ---- */

static void release(struct kv_pages *pages, struct kv_attachment *attachment) {
    struct kv_attachment **link = &pages->attachments[attachment->block];
    while (*link != attachment)
        link = &(*link)->next_of_block;
    *link = attachment->next_of_block;
    list_remove(pages, attachment);
    pages->attached_bytes -= attachment->bytes;
    attachment->release(attachment);
}

void kv_pages_release_attachments(struct kv_pages *pages, uint32_t block) {
    while (pages->attachments[block] != NULL)
        release(pages, pages->attachments[block]);
}

bool kv_pages_have_place(const struct kv_pages *pages, size_t attached_bytes) {
    return kv_pages_of(pages, pages->charged_bytes + attached_bytes) <= kv_pages_places(pages);
}

void kv_pages_fit_attachments(struct kv_pages *pages) {
    while (pages->oldest != NULL && !kv_pages_have_place(pages, pages->attached_bytes))
        release(pages, pages->oldest);
}

/* ---- sequences leave them ---- */

size_t kv_cache_attached_most(const struct kv_cache *cache) {
    const struct kv_pages *pages = &cache->pages;
    return pages->index != NULL ? pages->total * pages->pool.page_bytes / KV_ATTACHED_PART : 0;
}

/* The published block that ends where the sequence does, or PREFIX_NO_BLOCK. */
static uint32_t end_block(const struct kv_sequence *sequence) {
    bool complete = sequence->length > 0 && sequence->length % KV_PAGE_SLOTS == 0;
    if (!complete || sequence->pruned || sequence->published != sequence->length / KV_PAGE_SLOTS)
        return PREFIX_NO_BLOCK;
    return kv_sequence_last_block(sequence);
}

bool kv_sequence_can_attach(const struct kv_sequence *sequence, size_t bytes) {
    const struct kv_pages *pages = &sequence->cache->pages;
    return end_block(sequence) != PREFIX_NO_BLOCK && bytes <= kv_cache_attached_most(sequence->cache) &&
           kv_pages_have_place(pages, bytes);
}

bool kv_sequence_attach(struct kv_sequence *sequence, struct kv_attachment *attachment) {
    struct kv_pages *pages = &sequence->cache->pages;
    size_t most = kv_cache_attached_most(sequence->cache), bytes = attachment->bytes;
    if (!kv_sequence_can_attach(sequence, bytes))
        return false;
    while (pages->attached_bytes > most - bytes || !kv_pages_have_place(pages, pages->attached_bytes + bytes))
        release(pages, pages->oldest);
    attachment->block = end_block(sequence);
    attachment->next_of_block = pages->attachments[attachment->block];
    pages->attachments[attachment->block] = attachment;
    list_append(pages, attachment);
    pages->attached_bytes += bytes;
    return true;
}

bool kv_sequence_has_attached(struct kv_sequence *sequence, const struct kv_attachment_wanted *wanted) {
    struct kv_pages *pages = &sequence->cache->pages;
    uint32_t block = end_block(sequence);
    struct kv_attachment *found = block != PREFIX_NO_BLOCK ? kv_pages_attachment(pages, block, wanted) : NULL;
    if (found != NULL)
        kv_pages_touch_attachment(pages, found);
    return found != NULL;
}

bool kv_cache_release_attached(struct kv_cache *cache) {
    struct kv_pages *pages = &cache->pages;
    bool any = pages->oldest != NULL;
    while (pages->oldest != NULL)
        release(pages, pages->oldest);
    return any;
}

size_t kv_cache_attached(const struct kv_cache *cache) {
    return cache->pages.attached_bytes;
}
