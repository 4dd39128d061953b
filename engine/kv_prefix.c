/* SPDX-License-Identifier: Apache-2.0
 *
 * Shared prefixes: sequences meet the index of blocks.
 */
#include "engine/kv_internal.h"

uint32_t kv_sequence_last_block(const struct kv_sequence *sequence) {
    const struct prefix_index *index = sequence->cache->pages.index;
    uint32_t block = sequence->last_block;
    if (index == NULL || block == PREFIX_NO_BLOCK)
        return PREFIX_NO_BLOCK;
    const struct prefix_block *at = &index->blocks[block];
    return at->used && at->generation == sequence->last_generation ? block : PREFIX_NO_BLOCK;
}

static void remember_block(struct kv_sequence *sequence, uint32_t published, uint32_t block) {
    sequence->published = published;
    sequence->last_block = block;
    sequence->last_generation = block != PREFIX_NO_BLOCK ? sequence->cache->pages.index->blocks[block].generation : 0;
}

/* Walks the index along tokens, at most `most` blocks: returns how many are there. */
static uint32_t match_blocks(const struct prefix_index *index, const int32_t *tokens, uint32_t most, uint32_t *last) {
    uint32_t count = 0;
    *last = PREFIX_NO_BLOCK;
    for (; count < most; count++) {
        uint32_t block = prefix_index_find(index, *last, tokens + (size_t)count * KV_PAGE_SLOTS);
        if (block == PREFIX_NO_BLOCK)
            break;
        *last = block;
    }
    return count;
}

static uint32_t blocks_within(uint32_t count, uint32_t limit) {
    return (count < limit ? count : limit) / KV_PAGE_SLOTS;
}

/* How a block that is held in part is spread over ranks is not counted: all of them may be one rank's. */
static uint32_t unheld_of_block(const struct kv_pages *pages, uint32_t block) {
    const struct prefix_index *index = pages->index;
    uint32_t unheld = index->pages_a_block - index->blocks[block].pages_held;
    return unheld < index->pages_a_block / pages->ranks ? unheld * pages->ranks : index->pages_a_block;
}

/* A prefix in the index. */
struct found_prefix {
    uint32_t blocks;
    uint32_t last;   /* PREFIX_NO_BLOCK without any */
    uint32_t unheld; /* pages of them that nobody holds: they leave the available ones when the prefix is taken */
    struct kv_attachment *attachment; /* NULL when none is wanted */
};

/* Whether its pages can be taken, and what is attached to it stays. */
static bool can_be_taken(const struct kv_pages *pages, const struct found_prefix *found, bool wanted) {
    if (!wanted)
        return found->unheld <= kv_pages_available(pages);
    if (found->attachment == NULL)
        return false;
    size_t beside = kv_pages_of(pages, pages->charged_bytes + found->attachment->bytes);
    return found->unheld + beside <= kv_pages_places(pages);
}

/* The longest that is there, ends as wanted, and can be taken. */
static struct found_prefix find_prefix(
    const struct kv_pages *pages, const int32_t *tokens, uint32_t most, const struct kv_attachment_wanted *wanted) {
    const struct prefix_index *index = pages->index;
    struct found_prefix found = {0};
    found.blocks = match_blocks(index, tokens, most, &found.last);
    for (uint32_t block = found.last; block != PREFIX_NO_BLOCK; block = index->blocks[block].parent)
        found.unheld += unheld_of_block(pages, block);
    for (; found.blocks > 0; found.blocks--) {
        found.attachment = wanted != NULL ? kv_pages_attachment(pages, found.last, wanted) : NULL;
        if (can_be_taken(pages, &found, wanted != NULL))
            break;
        found.unheld -= unheld_of_block(pages, found.last);
        found.last = index->blocks[found.last].parent;
    }
    return found;
}

uint32_t kv_cache_match_prefix(struct kv_cache *cache, const int32_t *tokens, uint32_t count, uint32_t limit,
    const struct kv_attachment_wanted *wanted, uint32_t *unheld_pages) {
    *unheld_pages = 0;
    if (cache->pages.index == NULL)
        return 0;
    struct found_prefix found = find_prefix(&cache->pages, tokens, blocks_within(count, limit), wanted);
    *unheld_pages = found.unheld;
    return found.blocks * KV_PAGE_SLOTS;
}

static void hold_block(struct kv_sequence *sequence, uint32_t number, uint32_t block) {
    struct kv_pages *pages = &sequence->cache->pages;
    const uint32_t *block_pages = prefix_index_pages(pages->index, block);
    for (uint32_t i = 0; i < pages->heads; i++) {
        kv_pages_hold(pages, block_pages[i]);
        sequence->heads[i].pages[number] = block_pages[i];
        kv_head_touch(&sequence->heads[i], number);
    }
}

uint32_t kv_sequence_adopt_prefix(struct kv_sequence *sequence, const int32_t *tokens, uint32_t count, uint32_t limit,
    const struct kv_attachment_wanted *wanted, struct kv_attachment **found) {
    struct kv_pages *pages = &sequence->cache->pages;
    if (pages->index == NULL || sequence->length > 0)
        return 0;
    struct found_prefix prefix = find_prefix(pages, tokens, blocks_within(count, limit), wanted);
    uint32_t blocks = prefix.blocks, last = prefix.last;
    for (uint32_t i = 0; i < pages->heads; i++)
        if (kv_head_reserve_pages(&sequence->heads[i], blocks) != 0)
            return 0;                   /* computing the prefix instead is always possible */
    if (blocks > 0 && wanted != NULL) { /* others give way to the pages */
        kv_pages_touch_attachment(pages, prefix.attachment);
        *found = prefix.attachment;
    }
    remember_block(sequence, blocks, last);
    for (uint32_t number = blocks; number-- > 0; last = pages->index->blocks[last].parent)
        hold_block(sequence, number, last);
    for (uint32_t i = 0; i < pages->heads; i++) {
        struct kv_head *head = &sequence->heads[i];
        head->pages_count = blocks;
        head->slots = head->first_new = blocks * KV_PAGE_SLOTS;
    }
    sequence->length = blocks * KV_PAGE_SLOTS;
    return sequence->length;
}

void kv_sequence_clear(struct kv_sequence *sequence) {
    kv_sequence_drop_pages(sequence);
    for (uint32_t i = 0; i < sequence->cache->pages.heads; i++) {
        struct kv_head *head = &sequence->heads[i];
        head->pages_count = head->slots = head->first_new = head->gone = 0;
    }
    sequence->length = sequence->gone = 0;
    remember_block(sequence, 0, PREFIX_NO_BLOCK);
}

static uint32_t publish_block(
    struct kv_sequence *sequence, uint32_t number, uint32_t parent, const int32_t tokens[KV_PAGE_SLOTS]) {
    struct kv_cache *cache = sequence->cache;
    uint32_t block = prefix_index_find(cache->pages.index, parent, tokens);
    if (block != PREFIX_NO_BLOCK)
        return block;
    for (uint32_t i = 0; i < cache->pages.heads; i++) {
        if (number < sequence->heads[i].gone)
            return PREFIX_NO_BLOCK;
        cache->block_pages[i] = sequence->heads[i].pages[number];
    }
    return kv_pages_publish(&cache->pages, parent, tokens, cache->block_pages);
}

void kv_sequence_publish(struct kv_sequence *sequence, const int32_t *tokens) {
    uint32_t complete = sequence->length / KV_PAGE_SLOTS;
    if (sequence->cache->pages.index == NULL || sequence->pruned || sequence->published >= complete)
        return;
    /* The chain that was published before may have been taken back: then it is published anew from its start. */
    uint32_t parent = kv_sequence_last_block(sequence);
    uint32_t number = parent != PREFIX_NO_BLOCK ? sequence->published : 0;
    while (number < complete) {
        uint32_t block = publish_block(sequence, number, parent, tokens + (size_t)number * KV_PAGE_SLOTS);
        if (block == PREFIX_NO_BLOCK) /* a sliding head has no such page any more, or tokens are not those of before */
            break;
        parent = block;
        number++;
    }
    remember_block(sequence, number, parent);
}
