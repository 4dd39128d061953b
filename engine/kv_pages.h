/* SPDX-License-Identifier: Apache-2.0
 *
 * The page pool of the KV cache: the backend's memory cut into pages, how many sequences hold each, which are free, and
 * which are published in the index of shared prefixes. Inside of kv_cache.h; used by its files only.
 *
 * A page is in one of four states:
 *   free                       on the free list (last in, first out: a page that is still in a cache is used again)
 *   held                       by one or more sequences
 *   published and held         also belongs to an indexed block: must not be written
 *   published and idle         nobody holds it; counts as free, and its block is taken back when the free list is empty
 *
 * With several ranks (struct backend) each has its own pages, and the fullest one decides: whatever counts pages that
 * are free or needed counts as if every rank had as many free as that with the fewest, and needed as many as that which
 * needs most.
 */
#ifndef ENGINE_KV_PAGES_H
#define ENGINE_KV_PAGES_H

#include "engine/kv_cache.h"
#include "engine/prefix_index.h"

struct kv_page_state {
    uint32_t references; /* by sequences */
    uint32_t block;      /* that it is published in, or PREFIX_NO_BLOCK */
};

struct kv_pages {
    struct backend *backend;
    struct kv_pool pool;
    uint32_t total;
    uint32_t heads; /* layers * kv_heads */
    uint32_t ranks; /* each with total / ranks pages, for its heads */
    struct kv_page_state *states;
    uint32_t *free_list; /* [total] a stack for each rank, from its first page's number on */
    uint32_t free_count[BACKEND_RANKS_MAX];
    uint32_t idle_count[BACKEND_RANKS_MAX]; /* published pages that nobody holds */
    size_t charged_bytes;                   /* memory of sequences elsewhere that counts against the pool */
    uint32_t charged;                       /* the pages that it would fill, which must not be taken */
    uint32_t shared_count;                  /* pages that several sequences hold */
    struct prefix_index *index;             /* NULL: no sharing of prefixes */
    /* Attachments: the first of each block [index->capacity], and all of them, least recently used first. The pages
     * that they would fill beside the charges are not held: kv_pages_places >= pages of (charged + attached). */
    struct kv_attachment **attachments;
    struct kv_attachment *oldest, *newest;
    size_t attached_bytes;
    bool poison_free;
};

/* Cuts bytes into pages. On failure everything is released and pages is zero. */
int kv_pages_create(struct kv_pages *pages, struct backend *backend, const struct kv_layout *layout, size_t bytes,
    bool prefix_sharing, bool poison_free, struct error *error);
void kv_pages_free(struct kv_pages *pages);

/* The rank of a head, numbered layer * kv_heads + head; of its pages too. */
static inline uint32_t kv_pages_rank(const struct kv_pages *pages, uint32_t head) {
    return backend_rank_of_head(pages->backend, pages->pool.layout.kv_heads, head);
}

static inline uint32_t kv_pages_places_on(const struct kv_pages *pages, uint32_t rank) {
    return pages->free_count[rank] + pages->idle_count[rank];
}

/* Pages that nobody holds. */
static inline uint32_t kv_pages_places(const struct kv_pages *pages) {
    uint32_t least = kv_pages_places_on(pages, 0);
    for (uint32_t rank = 1; rank < pages->ranks; rank++)
        least = kv_pages_places_on(pages, rank) < least ? kv_pages_places_on(pages, rank) : least;
    return least * pages->ranks;
}

/* Pages that charges leave alone on each rank. */
static inline uint32_t kv_pages_charged_on_rank(const struct kv_pages *pages) {
    return (pages->charged + pages->ranks - 1) / pages->ranks;
}

/* Pages that can be taken: on one rank, and by all heads. Attachments give way. */
static inline uint32_t kv_pages_available_on(const struct kv_pages *pages, uint32_t rank) {
    return kv_pages_places_on(pages, rank) - kv_pages_charged_on_rank(pages);
}

static inline uint32_t kv_pages_available(const struct kv_pages *pages) {
    return kv_pages_places(pages) - pages->ranks * kv_pages_charged_on_rank(pages);
}

/* Pages by rank, as what the fullest one makes of them. */
static inline uint64_t kv_pages_of_ranks(const struct kv_pages *pages, const uint64_t counts[BACKEND_RANKS_MAX]) {
    uint64_t most = 0;
    for (uint32_t rank = 0; rank < pages->ranks; rank++)
        most = counts[rank] > most ? counts[rank] : most;
    return most * pages->ranks;
}

/* A page must be copied before its holder writes to it. */
static inline bool kv_pages_is_shared(const struct kv_pages *pages, uint32_t page) {
    const struct kv_page_state *state = &pages->states[page];
    return state->references > 1 || state->block != PREFIX_NO_BLOCK;
}

/* Takes an available page of a rank, with one reference; its content is undefined. Takes back a block when the free
 * list is empty, which unpublishes that block's other pages. */
uint32_t kv_pages_take(struct kv_pages *pages, uint32_t rank);

/* Another reference to a page that is held or published. */
void kv_pages_hold(struct kv_pages *pages, uint32_t page);
/* Gives back one reference. */
void kv_pages_drop(struct kv_pages *pages, uint32_t page);

/* Publishes held pages [heads] as the block of these tokens after parent. Returns the block; PREFIX_NO_BLOCK when one
 * of the pages is published already. */
uint32_t kv_pages_publish(
    struct kv_pages *pages, uint32_t parent, const int32_t tokens[KV_PAGE_SLOTS], const uint32_t *block_pages);

/* Removes a block and all that follow it from the index: idle pages become free, held ones their holders' own, and
 * attachments are released. */
void kv_pages_unpublish(struct kv_pages *pages, uint32_t block);

/* Pages that so many bytes amount to, rounded up. */
static inline size_t kv_pages_of(const struct kv_pages *pages, size_t bytes) {
    size_t page_bytes = pages->pool.page_bytes;
    return bytes / page_bytes + (bytes % page_bytes != 0);
}

/* kv_attach.c */

/* The block's first attachment that is wanted; NULL: none. */
struct kv_attachment *kv_pages_attachment(
    const struct kv_pages *pages, uint32_t block, const struct kv_attachment_wanted *wanted);
/* It is the last to give way from now on. */
void kv_pages_touch_attachment(struct kv_pages *pages, struct kv_attachment *attachment);
/* Whether so many bytes of attachments have a place beside what is held and charged. */
bool kv_pages_have_place(const struct kv_pages *pages, size_t attached_bytes);
/* After pages were taken or charged: releases attachments, the least recently used first, until the rest fits. */
void kv_pages_fit_attachments(struct kv_pages *pages);
void kv_pages_release_attachments(struct kv_pages *pages, uint32_t block); /* of a block */

#endif
