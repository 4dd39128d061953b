/* SPDX-License-Identifier: Apache-2.0
 *
 * kv_cache_check: every count, list and reference against every other one, for tests.
 */
#include "engine/kv_internal.h"

#include <stdlib.h>
#include <string.h>

static bool check_position(const struct kv_head *head, uint32_t slot, uint32_t length) {
    uint32_t position = head->positions[slot];
    bool marked = slot == head->marked;
    return marked == (position == KV_NO_POSITION) && (marked || position < length);
}

static bool check_order(const struct kv_head *head) {
    uint32_t found = 0;
    int64_t before = -1;
    if (head->order_stale)
        return head->order_count == 0;
    for (uint32_t i = 0; i < head->order_count; i++) {
        if (head->order[i] == KV_NO_SLOT)
            continue;
        if (head->order[i] >= head->slots)
            return false;
        int64_t position = head->positions[head->order[i]];
        if (position <= before) /* strictly: so that order is a permutation */
            return false;
        before = position;
        found++;
    }
    return found == head->slots && head->order_count - found <= KV_ORDER_HOLES;
}

static bool check_positions(const struct kv_head *head, uint32_t length) {
    if (head->slots > head->slots_capacity)
        return false;
    for (uint32_t i = 0; i < head->slots; i++)
        if (!check_position(head, i, length))
            return false;
    return check_order(head) && (head->marked == KV_NO_SLOT || head->marked < head->slots);
}

static bool check_head(const struct kv_sequence *sequence, const struct kv_head *head) {
    uint32_t pages_count = sequence->saved ? head->gone : kv_pages_for(head->slots);
    if (head->gone > pages_count || (head->window == 0 && head->gone > 0))
        return false;
    if (head->pages_count != pages_count || head->pages_count > head->pages_capacity)
        return false;
    if (head->positions == NULL)
        return head->slots == sequence->length && head->marked == KV_NO_SLOT;
    return sequence->pruned && check_positions(head, sequence->length);
}

/* What is charged leaves that many pages alone. */
static bool check_charges(const struct kv_cache *cache) {
    const struct kv_pages *pages = &cache->pages;
    size_t charged = 0;
    for (const struct kv_sequence *s = cache->sequences; s != NULL; s = s->next)
        charged += s->charged;
    return charged == pages->charged_bytes && pages->charged == kv_pages_of(pages, charged) &&
           pages->charged <= kv_pages_places(pages);
}

/* Attachments are those of indexed blocks, and all of them have a place. */
static bool check_attachments(const struct kv_pages *pages) {
    size_t bytes = 0, of_blocks = 0, all = 0;
    for (uint32_t block = 0; pages->index != NULL && block < pages->index->capacity; block++)
        for (const struct kv_attachment *a = pages->attachments[block]; a != NULL; a = a->next_of_block, of_blocks++)
            if (!pages->index->blocks[block].used || a->block != block)
                return false;
    const struct kv_attachment *older = NULL;
    for (const struct kv_attachment *a = pages->oldest; a != NULL; older = a, a = a->newer, all++) {
        if (a->older != older || all > of_blocks)
            return false;
        bytes += a->bytes;
    }
    return older == pages->newest && all == of_blocks && bytes == pages->attached_bytes &&
           kv_pages_have_place(pages, bytes);
}

/* Counts the references of all sequences into references [total]. */
static bool check_sequences(const struct kv_cache *cache, uint32_t *references) {
    for (const struct kv_sequence *s = cache->sequences; s != NULL; s = s->next) {
        if (s->cache != cache || (s->next != NULL && s->next->previous != s))
            return false;
        uint32_t gone = 0;
        for (uint32_t i = 0; i < cache->pages.heads; i++) {
            if (!check_head(s, &s->heads[i]))
                return false;
            gone += s->heads[i].gone;
            for (uint32_t p = s->heads[i].gone; p < s->heads[i].pages_count; p++) {
                if (s->heads[i].pages[p] >= cache->pages.total ||
                    kv_pool_rank(&cache->pages.pool, s->heads[i].pages[p]) != s->heads[i].rank)
                    return false;
                references[s->heads[i].pages[p]]++;
            }
        }
        if (gone != s->gone)
            return false;
    }
    return true;
}

static bool check_blocks(const struct kv_pages *pages) {
    const struct prefix_index *index = pages->index;
    if (index == NULL)
        return true;
    for (uint32_t block = 0; block < index->capacity; block++) {
        if (!index->blocks[block].used)
            continue;
        uint32_t held = 0;
        for (uint32_t i = 0; i < pages->heads; i++) {
            uint32_t page = prefix_index_pages(index, block)[i];
            if (page >= pages->total || kv_pool_rank(&pages->pool, page) != kv_pages_rank(pages, i) ||
                pages->states[page].block != block)
                return false;
            held += pages->states[page].references > 0;
        }
        if (held != index->blocks[block].pages_held)
            return false;
    }
    return prefix_index_check(index);
}

/* Each page is free, idle or held, and only one of them; references [total] are the sequences'. */
static bool check_pages(const struct kv_pages *pages, const uint32_t *references, bool *is_free) {
    for (uint32_t rank = 0; rank < pages->ranks; rank++)
        for (uint32_t i = 0; i < pages->free_count[rank]; i++) {
            uint32_t page = pages->free_list[rank * pages->pool.rank_pages + i];
            if (page >= pages->total || is_free[page] || kv_pool_rank(&pages->pool, page) != rank)
                return false;
            is_free[page] = true;
        }
    uint32_t idle[BACKEND_RANKS_MAX] = {0}, published = 0, shared = 0;
    for (uint32_t page = 0; page < pages->total; page++) {
        const struct kv_page_state *state = &pages->states[page];
        bool is_published = state->block != PREFIX_NO_BLOCK;
        if (state->references != references[page] || is_free[page] != (state->references == 0 && !is_published))
            return false;
        published += is_published;
        idle[kv_pool_rank(&pages->pool, page)] += is_published && state->references == 0;
        shared += state->references > 1;
    }
    uint32_t expected = pages->index != NULL ? pages->index->used * pages->heads : 0;
    return memcmp(idle, pages->idle_count, sizeof idle) == 0 && shared == pages->shared_count && published == expected;
}

bool kv_cache_check(const struct kv_cache *cache) {
    uint32_t *references = calloc(cache->pages.total, sizeof *references);
    bool *is_free = calloc(cache->pages.total, sizeof *is_free);
    bool consistent = references != NULL && is_free != NULL && cache->batch.copies == 0 &&
                      cache->batch.fresh_count == 0 && check_charges(cache) && check_sequences(cache, references) &&
                      check_pages(&cache->pages, references, is_free) && check_blocks(&cache->pages) &&
                      check_attachments(&cache->pages);
    free(references);
    free(is_free);
    return consistent;
}
