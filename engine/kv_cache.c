/* SPDX-License-Identifier: Apache-2.0
 *
 * The cache, the life of sequences, and what they show of themselves.
 */
#include "engine/kv_internal.h"

#include <stdlib.h>
#include <string.h>

/* Remembers which layers slide. */
static int copy_windows(struct kv_cache *cache, const struct kv_cache_options *options) {
    uint32_t layers = options->layout.layers;
    if (options->windows == NULL)
        return 0;
    cache->windows = malloc(layers * sizeof *cache->windows);
    if (cache->windows == NULL)
        return ERROR_MEMORY;
    memcpy(cache->windows, options->windows, layers * sizeof *cache->windows);
    for (uint32_t layer = 0; layer < layers; layer++)
        cache->sliding_heads += cache->windows[layer] != 0 ? options->layout.kv_heads : 0;
    cache->append_most = options->append_most;
    return 0;
}

struct kv_cache *kv_cache_create(struct backend *backend, const struct kv_cache_options *options, struct error *error) {
    struct kv_cache *cache = calloc(1, sizeof *cache);
    if (cache == NULL) {
        error_set(error, ERROR_MEMORY, "no memory for a KV cache");
        return NULL;
    }
    if (kv_pages_create(&cache->pages, backend, &options->layout, options->bytes, options->prefix_sharing,
            options->poison_free, error) != 0)
        goto failed;
    cache->block_pages = calloc(cache->pages.heads, sizeof *cache->block_pages);
    if (cache->block_pages == NULL || copy_windows(cache, options) != 0) {
        error_set(error, ERROR_MEMORY, "no memory for a KV cache of %u heads", cache->pages.heads);
        goto failed;
    }
    return cache;

failed:
    kv_cache_free(cache);
    return NULL;
}

void kv_cache_free(struct kv_cache *cache) {
    if (cache == NULL)
        return;
    kv_pages_free(&cache->pages);
    free(cache->block_pages);
    free(cache->windows);
    free(cache->writes);
    free(cache);
}

const struct kv_pool *kv_cache_pool(const struct kv_cache *cache) {
    return &cache->pages.pool;
}

uint32_t kv_cache_pages_total(const struct kv_cache *cache) {
    return cache->pages.total;
}

uint32_t kv_cache_pages_free(const struct kv_cache *cache) {
    return kv_pages_available(&cache->pages);
}

/* Tokens beyond all windows: what sliding heads hold at most is taken, the others share the rest. */
static uint64_t tokens_beyond_windows(const struct kv_cache *cache) {
    const struct kv_layout *layout = &cache->pages.pool.layout;
    uint64_t taken = 0, others = cache->pages.heads - cache->sliding_heads;
    for (uint32_t layer = 0; layer < layout->layers; layer++)
        if (cache->windows[layer] != 0)
            taken += (uint64_t)layout->kv_heads * kv_pages_for_window(cache->windows[layer], cache->append_most);
    if (taken > cache->pages.total)
        return 0;
    return others == 0 ? KV_NO_POSITION : (cache->pages.total - taken) / others * KV_PAGE_SLOTS;
}

uint32_t kv_cache_tokens_max(const struct kv_cache *cache) {
    uint64_t tokens = (uint64_t)(cache->pages.total / cache->pages.heads) * KV_PAGE_SLOTS;
    uint64_t beyond = cache->sliding_heads > 0 ? tokens_beyond_windows(cache) : 0;
    tokens = beyond > tokens ? beyond : tokens;
    return tokens < KV_NO_POSITION ? (uint32_t)tokens : KV_NO_POSITION;
}

static struct kv_sequence *allocate_sequence(struct kv_cache *cache) {
    struct kv_sequence *sequence = calloc(1, sizeof *sequence + cache->pages.heads * sizeof sequence->heads[0]);
    if (sequence == NULL)
        return NULL;
    sequence->cache = cache;
    sequence->last_block = PREFIX_NO_BLOCK;
    for (uint32_t i = 0; i < cache->pages.heads; i++) {
        sequence->heads[i].rank = kv_pages_rank(&cache->pages, i);
        sequence->heads[i].marked = KV_NO_SLOT;
        if (cache->windows != NULL)
            sequence->heads[i].window = cache->windows[i / cache->pages.pool.layout.kv_heads];
    }
    sequence->next = cache->sequences;
    if (sequence->next != NULL)
        sequence->next->previous = sequence;
    cache->sequences = sequence;
    return sequence;
}

struct kv_sequence *kv_sequence_create(struct kv_cache *cache) {
    return allocate_sequence(cache);
}

static int fork_head(struct kv_pages *pages, struct kv_head *to, const struct kv_head *from) {
    if (kv_head_reserve_pages(to, from->pages_count) != 0 ||
        (from->positions != NULL && kv_head_reserve_slots(to, from->slots) != 0))
        return ERROR_MEMORY;
    to->gone = from->gone;
    for (uint32_t i = from->gone; i < from->pages_count; i++) {
        to->pages[i] = from->pages[i];
        kv_head_touch(to, i);
        kv_pages_hold(pages, from->pages[i]);
    }
    if (from->positions != NULL && from->slots > 0) {
        memcpy(to->positions, from->positions, from->slots * sizeof *to->positions);
        memcpy(to->order, from->order, from->order_count * sizeof *to->order);
    }
    to->order_count = from->order_count;
    to->order_read = from->order_read;
    to->order_stale = from->order_stale;
    to->pages_count = from->pages_count;
    to->slots = from->slots;
    to->first_new = from->first_new;
    to->marked = from->marked;
    return 0;
}

struct kv_sequence *kv_sequence_fork(const struct kv_sequence *sequence) {
    struct kv_cache *cache = sequence->cache;
    struct kv_sequence *fork = allocate_sequence(cache);
    if (fork == NULL)
        return NULL;
    for (uint32_t i = 0; i < cache->pages.heads; i++)
        if (fork_head(&cache->pages, &fork->heads[i], &sequence->heads[i]) != 0) {
            kv_sequence_free(fork);
            return NULL;
        }
    fork->length = sequence->length;
    fork->pruned = sequence->pruned;
    fork->gone = sequence->gone;
    fork->published = sequence->published;
    fork->last_block = sequence->last_block;
    fork->last_generation = sequence->last_generation;
    return fork;
}

/* The end of a text goes first, and then its published blocks are lined up so that the end is taken back before what
 * other texts share with it. */
void kv_sequence_drop_pages(struct kv_sequence *sequence) {
    struct kv_pages *pages = &sequence->cache->pages;
    uint32_t most = 0;
    for (uint32_t i = 0; i < pages->heads; i++)
        if (sequence->heads[i].pages_count > most)
            most = sequence->heads[i].pages_count;
    while (most-- > 0)
        for (uint32_t i = 0; i < pages->heads; i++)
            if (most < sequence->heads[i].pages_count && most >= sequence->heads[i].gone)
                kv_pages_drop(pages, sequence->heads[i].pages[most]);
    uint32_t block = kv_sequence_last_block(sequence);
    for (; block != PREFIX_NO_BLOCK; block = pages->index->blocks[block].parent)
        prefix_index_touch(pages->index, block);
}

void kv_sequence_free(struct kv_sequence *sequence) {
    if (sequence == NULL)
        return;
    kv_sequence_drop_pages(sequence);
    kv_sequence_drop_tables(sequence);
    kv_sequence_charge(sequence, 0, NULL);
    for (uint32_t i = 0; i < sequence->cache->pages.heads; i++) {
        free(sequence->heads[i].pages);
        free(sequence->heads[i].positions);
    }
    if (sequence->next != NULL)
        sequence->next->previous = sequence->previous;
    if (sequence->previous != NULL)
        sequence->previous->next = sequence->next;
    else
        sequence->cache->sequences = sequence->next;
    free(sequence);
}

struct kv_head *kv_sequence_head(const struct kv_sequence *sequence, uint32_t layer, uint32_t head) {
    const struct kv_layout *layout = &sequence->cache->pages.pool.layout;
    if (layer >= layout->layers || head >= layout->kv_heads)
        return NULL;
    return (struct kv_head *)&sequence->heads[layer * layout->kv_heads + head];
}

uint32_t kv_sequence_length(const struct kv_sequence *sequence) {
    return sequence->length;
}

uint32_t kv_sequence_slots(const struct kv_sequence *sequence, uint32_t layer, uint32_t head) {
    return kv_sequence_head(sequence, layer, head)->slots;
}

uint32_t kv_sequence_tokens(const struct kv_sequence *sequence, uint32_t layer, uint32_t head) {
    const struct kv_head *at = kv_sequence_head(sequence, layer, head);
    return at->slots - (at->marked != KV_NO_SLOT);
}

/* The heads of an unpruned sequence are alike: asked of each sequence in every step, these must not visit them all. */

uint64_t kv_sequence_slots_held(const struct kv_sequence *sequence) {
    uint64_t held = 0;
    if (!sequence->pruned)
        return (uint64_t)sequence->length * sequence->cache->pages.heads - (uint64_t)sequence->gone * KV_PAGE_SLOTS;
    for (uint32_t i = 0; i < sequence->cache->pages.heads; i++)
        held += sequence->heads[i].slots;
    return held - (uint64_t)sequence->gone * KV_PAGE_SLOTS;
}

uint64_t kv_sequence_tokens_held(const struct kv_sequence *sequence) {
    uint64_t held = kv_sequence_slots_held(sequence);
    for (uint32_t i = 0; sequence->pruned && i < sequence->cache->pages.heads; i++)
        held -= sequence->heads[i].marked != KV_NO_SLOT;
    return held;
}

uint32_t kv_sequence_pages_held(const struct kv_sequence *sequence) {
    uint32_t held = 0;
    if (!sequence->pruned)
        return sequence->heads[0].pages_count * sequence->cache->pages.heads - sequence->gone;
    for (uint32_t i = 0; i < sequence->cache->pages.heads; i++)
        held += sequence->heads[i].pages_count;
    return held - sequence->gone;
}

uint64_t kv_sequence_tokens_sliding(const struct kv_sequence *sequence) {
    return (uint64_t)sequence->length * sequence->cache->sliding_heads - (uint64_t)sequence->gone * KV_PAGE_SLOTS;
}

uint32_t kv_sequence_pages_slid(const struct kv_sequence *sequence) {
    return sequence->gone;
}

void kv_sequence_slide(struct kv_sequence *sequence) {
    struct kv_pages *pages = &sequence->cache->pages;
    uint32_t kv_heads = pages->pool.layout.kv_heads, length = sequence->length;
    for (uint32_t i = 0; sequence->cache->sliding_heads > 0 && i < pages->heads; i++) {
        struct kv_head *head = &sequence->heads[i];
        if (head->window == 0) {
            i += kv_heads - 1; /* the other heads of its layer neither */
            continue;
        }
        uint32_t gone = length >= head->window ? (length + 1 - head->window) / KV_PAGE_SLOTS : 0;
        for (; head->gone < gone && head->gone < head->pages_count; head->gone++, sequence->gone++)
            kv_pages_drop(pages, head->pages[head->gone]);
    }
}

uint32_t kv_sequence_pages_shared(const struct kv_sequence *sequence) {
    const struct kv_pages *pages = &sequence->cache->pages;
    uint32_t shared = 0;
    for (uint32_t i = 0; pages->shared_count > 0 && i < pages->heads; i++)
        for (uint32_t p = sequence->heads[i].gone; p < sequence->heads[i].pages_count; p++)
            shared += pages->states[sequence->heads[i].pages[p]].references > 1;
    return shared;
}

/* Whole splits of attention whose pages are gone are not shown. */
static struct kv_head_view view_of(const struct kv_sequence *sequence, uint32_t head) {
    enum { SPLIT_PAGES = ATTEND_SPLIT / KV_PAGE_SLOTS };
    const struct kv_head *at = &sequence->heads[head];
    const uint32_t *device_pages = kv_sequence_device_table(sequence, head);
    uint32_t hidden = at->gone / SPLIT_PAGES * SPLIT_PAGES, slots = hidden * KV_PAGE_SLOTS;
    return (struct kv_head_view){
        .pages = hidden > 0 ? at->pages + hidden : at->pages,
        .slots = at->slots - slots,
        .first_slot = at->first_new - slots,
        .from_slot = (at->gone - hidden) * KV_PAGE_SLOTS,
        .device_pages = device_pages != NULL ? device_pages + hidden : NULL,
    };
}

void kv_sequence_views(const struct kv_sequence *sequence, uint32_t layer, struct kv_head_view *views) {
    uint32_t kv_heads = sequence->cache->pages.pool.layout.kv_heads;
    for (uint32_t i = 0; i < kv_heads; i++)
        views[i] = view_of(sequence, layer * kv_heads + i);
}

struct kv_head_view kv_sequence_view(const struct kv_sequence *sequence, uint32_t layer, uint32_t head) {
    return view_of(sequence, (uint32_t)(kv_sequence_head(sequence, layer, head) - sequence->heads));
}

void kv_sequence_order(const struct kv_sequence *sequence, uint32_t layer, uint32_t head, uint32_t *out) {
    struct kv_head *at = kv_sequence_head(sequence, layer, head);
    const uint32_t *order = at->positions != NULL ? kv_head_closed_order(at) : NULL;
    for (uint32_t i = 0; i < at->slots; i++)
        out[i] = order != NULL ? order[i] : i;
}

void kv_sequence_positions(const struct kv_sequence *sequence, uint32_t layer, uint32_t head, uint32_t *out) {
    const struct kv_head *at = kv_sequence_head(sequence, layer, head);
    for (uint32_t i = 0; i < at->slots; i++)
        out[i] = at->positions != NULL ? at->positions[i] : i;
}

const uint32_t *kv_sequence_slot_positions(const struct kv_sequence *sequence, uint32_t layer, uint32_t head) {
    return kv_sequence_head(sequence, layer, head)->positions;
}

const uint32_t *kv_sequence_slot_order(
    const struct kv_sequence *sequence, uint32_t layer, uint32_t head, uint32_t *count) {
    struct kv_head *at = kv_sequence_head(sequence, layer, head);
    const uint32_t *order = at->positions != NULL ? kv_head_order(at) : NULL;
    *count = order != NULL ? at->order_count : 0;
    return order;
}

uint32_t kv_sequence_slot_of_rank(const struct kv_sequence *sequence, uint32_t layer, uint32_t head, uint32_t rank) {
    struct kv_head *at = kv_sequence_head(sequence, layer, head);
    if (rank >= at->slots)
        return KV_NO_SLOT;
    return at->positions != NULL ? kv_head_closed_order(at)[rank] : rank;
}
