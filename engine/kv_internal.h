/* SPDX-License-Identifier: Apache-2.0
 *
 * The inside of kv_cache.h: what its files (kv_cache.c, kv_append.c, kv_attach.c, kv_charge.c, kv_prune.c,
 * kv_remove.c, kv_prefix.c, kv_save.c, kv_tables.c, kv_check.c) and its tests share.
 */
#ifndef ENGINE_KV_INTERNAL_H
#define ENGINE_KV_INTERNAL_H

#include "engine/kv_cache.h"
#include "engine/kv_pages.h"

enum {
    KV_BATCH_PAGES = 256,
    KV_ORDER_HOLES = 32, /* most holes of an order */
};

/* Page operations gathered over heads, so that the backend is called once for many pages. The source of a copy is
 * dropped after the copy was made: until then nobody else can take it. */
struct kv_page_batch {
    uint32_t copy_from[KV_BATCH_PAGES];
    uint32_t copy_to[KV_BATCH_PAGES];
    uint32_t copies;
    uint32_t fresh[KV_BATCH_PAGES]; /* pages whose slots are to be marked as unused */
    uint32_t fresh_count;
};

/* What a sequence holds of one (layer, KV head). Slot s lies in pages[s / 16]; exactly the pages that slots need are
 * held, but for the first `gone` of a sliding head. */
struct kv_head {
    uint32_t window; /* of its layer; 0: none */
    uint32_t gone;   /* leading entries of pages whose pages were given back */
    uint32_t rank;   /* that its pages are of */
    uint32_t *pages;
    uint32_t pages_count, pages_capacity;
    uint32_t changed_first, changed_end; /* entries that the device's copy of the table may lack; none: 0, 0 */
    uint32_t slots;
    uint32_t first_new;      /* slot of the first token appended last */
    uint32_t marked;         /* evicted slot that waits for a new token, or KV_NO_SLOT */
    uint32_t slots_capacity; /* of positions and order */
    uint32_t *positions;     /* [slots] by slot; NULL while the head is unpruned: slot == position */
    /* [order_count] slots by ascending position, the marked one last, and between them KV_NO_SLOT where one was: a slot
     * that is marked goes to the end, and the others stay where they are for a while. Inside positions' memory. */
    uint32_t *order;
    uint32_t order_count; /* at most KV_ORDER_HOLES more than slots; 0 while it is stale */
    /* Keeping the order costs memory's time at every mark, which policies that never read it need not pay: it is kept
     * as long as it was read since the last mark, and sorted anew when it is read again. */
    bool order_read, order_stale;
};

struct kv_sequence {
    struct kv_cache *cache;
    struct kv_sequence *next, *previous; /* of the cache's list */
    uint32_t length;                     /* L */
    bool pruned;                         /* some head is */
    uint32_t gone;                       /* pages that sliding heads gave back */
    bool saved;                          /* its pages are not held: kv_sequence_save */
    size_t charged;                      /* bytes: kv_sequence_charge */
    uint32_t *device_tables;             /* device [a rank's heads][device_pages] page tables; NULL: none */
    uint32_t device_pages;               /* a multiple of KV_PAGE_SLOTS */
    uint32_t published;                  /* leading blocks that are adopted, published, or found published */
    uint32_t last_block;                 /* the last of them, if it is still the one of that generation */
    uint32_t last_generation;
    struct kv_head heads[]; /* [layers * kv_heads] */
};

struct kv_cache {
    struct kv_pages pages;
    struct kv_sequence *sequences; /* a list of all, for kv_cache_check */
    struct kv_page_batch batch;    /* empty between calls */
    uint32_t *block_pages;         /* [layers * kv_heads] for publishing */
    uint32_t *windows;             /* [layers]; NULL: no layer slides */
    uint32_t sliding_heads;
    uint32_t append_most;
    struct kv_table_write *writes; /* gathered for kv_cache_send_tables */
    uint32_t writes_count, writes_capacity;
};

/* NULL when the layout has no such head. */
struct kv_head *kv_sequence_head(const struct kv_sequence *sequence, uint32_t layer, uint32_t head);

/* Entry `page` of a head's table is another from now on: called for every change of one. */
static inline void kv_head_touch(struct kv_head *head, uint32_t page) {
    if (head->changed_end == 0 || page < head->changed_first)
        head->changed_first = page;
    if (page >= head->changed_end)
        head->changed_end = page + 1;
}

/* The device's copy of a head's table, or NULL when there is none that is up to date. */
const uint32_t *kv_sequence_device_table(const struct kv_sequence *sequence, uint32_t head);
/* Gives the device's copies back. */
void kv_sequence_drop_tables(struct kv_sequence *sequence);

/* Room for count pages (count slots of a pruned head), with growth by doubling; 0 or ERROR_MEMORY. */
int kv_head_reserve_pages(struct kv_head *head, uint32_t count);
int kv_head_reserve_slots(struct kv_head *head, uint32_t count);

/* Replaces a shared page of a head's table by a copy of its own, which has its content after kv_cache_flush_batch.
 * There must be an available page. */
void kv_cache_own_page(struct kv_cache *cache, struct kv_head *head, uint32_t page);
void kv_cache_flush_batch(struct kv_cache *cache);

/* Gives an unpruned head its host arrays, in which nothing differs yet from what they stand for; 0 or ERROR_MEMORY. */
int kv_head_materialise(struct kv_head *head);
/* Numbers of positions and order for so many slots. */
static inline size_t kv_order_numbers(uint32_t capacity) {
    return 2 * (size_t)capacity + KV_ORDER_HOLES;
}

/* The order of a materialised head, sorted if need be: [order_count], with holes. */
const uint32_t *kv_head_order(struct kv_head *head);
/* The same without holes [slots]. */
const uint32_t *kv_head_closed_order(struct kv_head *head);
void kv_head_close_order(struct kv_head *head);
/* Marks a slot of a materialised head as evicted; its page is the head's own, and no slot is marked. rank: how many
 * slots are before it in the order, as far as known; else any number. */
void kv_head_mark(struct kv_cache *cache, struct kv_head *head, uint32_t slot, uint32_t rank);
/* Fetches what that touches, and what it costs to find out about the slot's page. */
void kv_head_expect_mark(const struct kv_cache *cache, const struct kv_head *head, uint32_t slot, uint32_t rank);

/* Drops the sequence's references to its pages, the end of the text first. The page tables are left as they are. */
void kv_sequence_drop_pages(struct kv_sequence *sequence);

/* Forgets that the sequence's remembered block exists when it was taken back meanwhile; returns it or
 * PREFIX_NO_BLOCK. */
uint32_t kv_sequence_last_block(const struct kv_sequence *sequence);

#endif
