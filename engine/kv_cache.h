/* SPDX-License-Identifier: Apache-2.0
 *
 * The paged KV cache: a pool of pages, page tables per (sequence, layer, KV head), forks with copy on write, and shared
 * prefixes. Knows no model and no policy; moves data through the backend's copy operations only.
 *
 * A page (backend.h) holds 16 slots of one layer and one KV head and is counted by references. A sequence owns its
 * length L (tokens seen); slots own original positions. A head's slots may be fewer than L after pruning, and their
 * order may differ from the order of positions once an evicted slot was reused.
 *
 * Shared prefixes: a block is the 16 consecutive tokens 16b .. 16b+15 of a sequence with the pages that hold exactly
 * them in every (layer, head). Blocks are found by a hash chained over the tokens from the start and verified token by
 * token. Pages of a block that no sequence holds count as free: they are taken back least recently used first, when
 * the free list is empty; what follows a block that was taken back cannot be found any more and becomes free with it.
 * A block may be held in part, by a sequence that pruned some heads; its other pages count as free too, and are the
 * last to be taken back. Nothing of a pruned sequence is published, nor what it appends.
 *
 * Attachments: whoever computed a prefix may leave memory with the block that ends it, of which this module knows the
 * size and how to release it. It counts against the pool as a charge does, and as free like the pages of a block that
 * nobody holds: it is released when pages are wanted, least recently used first, and with its block at the latest.
 *
 * Several ranks (struct backend): each holds the pages of its own heads. Pages that are free, needed or available are
 * then counted by the fullest rank, times the number of ranks (kv_pages.h).
 *
 * Sliding layers: a head whose layer has a window gives back the pages that no later token can see (kv_sequence_slide).
 * Its slots keep their numbers, slot == position; it is never pruned, and what is published of it stays so.
 *
 * One thread (the engine thread) calls everything here.
 */
#ifndef ENGINE_KV_CACHE_H
#define ENGINE_KV_CACHE_H

#include "engine/backend.h"

enum { KV_ATTACHED_PART = 8 }; /* attachments take at most this part of the pool */

struct kv_cache;    /* opaque */
struct kv_sequence; /* opaque */

struct kv_cache_options {
    struct kv_layout layout;
    size_t bytes; /* of the page pool; at least one page for each layer and head */
    bool prefix_sharing;
    bool poison_free; /* fill pages with NaN when they become free (tests) */
    const uint32_t
        *windows;         /* [layers] a token sees itself and the window - 1 before it, 0: all; NULL: all 0. Copied */
    uint32_t append_most; /* tokens that are appended at once, at most, where there are windows */
};

struct kv_cache *kv_cache_create(struct backend *backend, const struct kv_cache_options *options, struct error *error);
void kv_cache_free(struct kv_cache *cache); /* all sequences must be freed before */

/* Pages that slots of a head take. */
static inline uint32_t kv_pages_for(uint32_t slots) {
    return slots / KV_PAGE_SLOTS + (slots % KV_PAGE_SLOTS != 0);
}

const struct kv_pool *kv_cache_pool(const struct kv_cache *cache);
size_t kv_cache_pages_of(const struct kv_cache *cache, size_t bytes); /* pages that many bytes amount to, rounded up */
uint32_t kv_cache_pages_total(const struct kv_cache *cache);
uint32_t kv_cache_pages_free(const struct kv_cache *cache); /* blocks that nobody holds included */
/* Tokens that one unpruned sequence can hold when it is alone. */
uint32_t kv_cache_tokens_max(const struct kv_cache *cache);

struct kv_sequence *kv_sequence_create(struct kv_cache *cache); /* NULL on failed allocation */
/* The fork sees the same slots; pages are shared until one side writes. */
struct kv_sequence *kv_sequence_fork(const struct kv_sequence *sequence);
void kv_sequence_free(struct kv_sequence *sequence); /* NULL allowed */

uint32_t kv_sequence_length(const struct kv_sequence *sequence); /* L, tokens seen */
/* Of a sliding head those that are gone are counted: slots are numbered by position. */
uint32_t kv_sequence_slots(const struct kv_sequence *sequence, uint32_t layer, uint32_t head);
uint32_t kv_sequence_tokens(
    const struct kv_sequence *sequence, uint32_t layer, uint32_t head);  /* without a marked one */
uint64_t kv_sequence_slots_held(const struct kv_sequence *sequence);     /* over all layers and heads */
uint64_t kv_sequence_tokens_held(const struct kv_sequence *sequence);    /* the same without evicted slots (marked) */
uint32_t kv_sequence_pages_held(const struct kv_sequence *sequence);     /* references, shared pages included */
uint64_t kv_sequence_tokens_sliding(const struct kv_sequence *sequence); /* of tokens_held those of sliding heads */
uint32_t kv_sequence_pages_slid(const struct kv_sequence *sequence);     /* that sliding heads have given back */
/* Of them those that other sequences hold too: before one of them changes it is copied. */
uint32_t kv_sequence_pages_shared(const struct kv_sequence *sequence);

/* Pages that appending count tokens would take from the free ones, copies of shared pages included. */
uint32_t kv_sequence_pages_needed(const struct kv_sequence *sequence, uint32_t count);

/* Makes room for count new tokens (positions L .. L+count-1) in every head: each takes the head's evicted slot if one
 * is marked (kv_sequence_evict; only with count 1), else new slots at the end. Pages that will be written and are
 * shared are copied; in new pages all slots are unused (KV_NO_POSITION). L grows by count. ERROR_PAGES when the free
 * pages do not suffice, ERROR_CONTEXT beyond the last position, ERROR_MEMORY; then nothing changed. The caller fills
 * the slots by rope_and_append. */
int kv_sequence_append(struct kv_sequence *sequence, uint32_t count, struct error *error);

/* The device's copies of page tables, for backends that read them there (write_tables). Any change of a table makes its
 * copy be behind; views name copies that are not. gather notes what the sequence's copies lack, and makes or enlarges
 * them; send writes all that was gathered at once. In between sequences must not change. Copies are 4 bytes a page and
 * head, and like the tables themselves not charged to the pool; without memory for them there are none. */
void kv_sequence_gather_tables(struct kv_sequence *sequence);
void kv_cache_send_tables(struct kv_cache *cache);

/* Gives back pages of sliding heads that no token from position L on can see. After what was appended was computed, and
 * published. */
void kv_sequence_slide(struct kv_sequence *sequence);
/* Pages that a sliding head with this window holds at most, when as many tokens are appended at once. */
static inline uint32_t kv_pages_for_window(uint32_t window, uint32_t append_most) {
    return kv_pages_for(window + append_most) + 1;
}

/* The views of one layer for the count tokens appended last: views [kv_heads]. Valid until the sequence changes. */
void kv_sequence_views(const struct kv_sequence *sequence, uint32_t layer, struct kv_head_view *views);
struct kv_head_view kv_sequence_view(const struct kv_sequence *sequence, uint32_t layer, uint32_t head);

/* Slots of a head in ascending order of position: out [slots]. */
void kv_sequence_order(const struct kv_sequence *sequence, uint32_t layer, uint32_t head, uint32_t *out);
/* Original positions by slot: out [slots]; a slot marked by kv_sequence_evict has KV_NO_POSITION. */
void kv_sequence_positions(const struct kv_sequence *sequence, uint32_t layer, uint32_t head, uint32_t *out);

/* Keeps the listed slots of a head (ascending by slot, distinct) and compacts them into its front pages without
 * changing their order; pages that became empty are free at once. A marked slot may be kept, and stays marked. Pages
 * that must change and are shared are replaced: ERROR_PAGES when there are not enough free ones for that (a page that
 * is shared only with the index of prefixes is unpublished then, so that this never fails for a sequence that shares
 * no page with others), ERROR_INVALID, ERROR_MEMORY; then nothing changed. Keeping all slots changes nothing. */
int kv_sequence_keep(struct kv_sequence *sequence, uint32_t layer, uint32_t head, const uint32_t *slots, uint32_t count,
    struct error *error);

/* Evicts one slot in place: it is not attended to (its position becomes KV_NO_POSITION), and the next
 * kv_sequence_append of one token reuses it. At most one per head may be marked: ERROR_INVALID. May replace a shared
 * page, as keep does: ERROR_PAGES, ERROR_MEMORY. */
int kv_sequence_evict(struct kv_sequence *sequence, uint32_t layer, uint32_t head, uint32_t slot, struct error *error);

/* What goes of one head: keep and drop say the same; the shorter list is less work. Both NULL: nothing moves. */
struct kv_removal {
    const uint32_t *keep; /* slots that stay, ascending and distinct */
    uint32_t count;       /* of slots that stay, with keep or drop */
    uint32_t evict;       /* with neither: the slot to mark as kv_sequence_evict does, or KV_NO_SLOT */
    uint32_t rank;        /* where kv_sequence_slot_of_rank would find that slot, if known: then it is found sooner */
    const uint32_t *drop; /* with keep NULL: slots that go, ascending and distinct */
};

static inline bool kv_removal_compacts(const struct kv_removal *removal) {
    return removal->keep != NULL || removal->drop != NULL;
}

/* A prune of all heads at once: removals [layers * kv_heads]. Where slots move, those below `count` stay where they
 * are and those above move into the places that became free (kv_removal_moves): only as many slots move as must, and
 * the head's slots are no longer in order of position. Errors as kv_sequence_keep; then nothing changed in any head. */
int kv_sequence_prune(struct kv_sequence *sequence, const struct kv_removal *removals, struct error *error);
/* The same; before(context) is called once nothing can fail any more, while all slots are still there: for whoever
 * wants to read what goes. Not called when nothing goes. */
int kv_sequence_prune_after(struct kv_sequence *sequence, const struct kv_removal *removals, void (*before)(void *),
    void *context, struct error *error);
/* The moves of a removal with a list, of a head with `slots` slots: from, to, both ascending; at most as many as stay,
 * or as go. Returns how many there are. */
uint32_t kv_removal_moves(const struct kv_removal *removal, uint32_t slots, uint32_t *from, uint32_t *to);

/* Makes the page of a slot the head's own, so that its content may be changed. ERROR_PAGES. */
int kv_sequence_own(struct kv_sequence *sequence, uint32_t layer, uint32_t head, uint32_t slot, struct error *error);

/* Borrowed positions by slot [slots] until the sequence changes; NULL while the head is unpruned: slot == position. */
const uint32_t *kv_sequence_slot_positions(const struct kv_sequence *sequence, uint32_t layer, uint32_t head);
/* The same of slots in ascending order of position [*count], and KV_NO_SLOT where slots were taken out of the order. */
const uint32_t *kv_sequence_slot_order(
    const struct kv_sequence *sequence, uint32_t layer, uint32_t head, uint32_t *count);
/* The slot with the rank-th lowest position; KV_NO_SLOT when there are not as many. A marked slot ranks last. */
uint32_t kv_sequence_slot_of_rank(const struct kv_sequence *sequence, uint32_t layer, uint32_t head, uint32_t rank);

/* Sets the bytes that the sequence holds beside its pages and that count against the pool: the pages that all
 * sequences' charges together would fill are not available. ERROR_PAGES when there are not as many; then nothing
 * changed. A fork starts without a charge; kv_sequence_free takes it back. */
int kv_sequence_charge(struct kv_sequence *sequence, size_t bytes, struct error *error);
size_t kv_sequence_charged(const struct kv_sequence *sequence);
size_t kv_cache_charged(const struct kv_cache *cache); /* of all sequences */

/* Copies the contents of the pages held [kv_sequence_pages_held] to host memory and gives them all back. Until they are
 * restored, only length, slots, order and positions may be asked for, and the sequence charged or freed. */
void kv_sequence_save(struct kv_sequence *sequence, void *host);
/* The same contents in pages of its own. ERROR_PAGES; then nothing changed. */
int kv_sequence_restore(struct kv_sequence *sequence, const void *host, struct error *error);
/* Pages that are saved, or would be now; and those that restoring takes from the free ones (with several ranks more,
 * where they are not spread evenly). */
uint64_t kv_sequence_pages_saved(const struct kv_sequence *sequence);
uint64_t kv_sequence_pages_to_restore(const struct kv_sequence *sequence);

/* What is left with a block; the first member of what its owner allocated. */
struct kv_attachment {
    size_t bytes;                            /* that count against the pool */
    void (*release)(struct kv_attachment *); /* frees it; may be called whenever pages are taken or memory charged */
    /* The cache's: */
    uint32_t block;
    struct kv_attachment *next_of_block;
    struct kv_attachment *older, *newer; /* by their last use, of all blocks */
};

/* Which attachments will do. */
struct kv_attachment_wanted {
    bool (*accepts)(const struct kv_attachment *attachment, const void *context);
    const void *context;
};

/* Gives an empty sequence the longest published prefix of tokens [count], at most `limit` tokens, that the available
 * pages allow: returns how many tokens it now holds (a multiple of 16; 0 when nothing matched or sharing is off).
 * wanted: only a prefix that has such an attachment at its end, which is *found then, and stays until the next call
 * that takes pages or charges memory. NULL: any, and found is not used. */
uint32_t kv_sequence_adopt_prefix(struct kv_sequence *sequence, const int32_t *tokens, uint32_t count, uint32_t limit,
    const struct kv_attachment_wanted *wanted, struct kv_attachment **found);
/* What adopt would return, and how many of those pages are held by nobody now (they would leave the free ones). */
uint32_t kv_cache_match_prefix(struct kv_cache *cache, const int32_t *tokens, uint32_t count, uint32_t limit,
    const struct kv_attachment_wanted *wanted, uint32_t *unheld_pages);
/* Gives the pages of an unpruned sequence back: it is empty again. */
void kv_sequence_clear(struct kv_sequence *sequence);

/* Publishes all complete blocks of an unpruned sequence whose tokens are tokens [L], once their slots are filled.
 * Blocks that are published already by others are skipped. Cheap to call after every step. */
void kv_sequence_publish(struct kv_sequence *sequence, const int32_t *tokens);

/* Whether `bytes` more could be left with the block that ends where the unpruned sequence does: it ends with one that
 * is published, and there is a place for them, where other attachments give way. */
bool kv_sequence_can_attach(const struct kv_sequence *sequence, size_t bytes);
/* Leaves an attachment there, which is the cache's from then on; false: it could not, and nothing changed. */
bool kv_sequence_attach(struct kv_sequence *sequence, struct kv_attachment *attachment);
/* Whether there is one that is wanted already; it counts as used. */
bool kv_sequence_has_attached(struct kv_sequence *sequence, const struct kv_attachment_wanted *wanted);
/* Releases all attachments, for whoever lacks memory outside the pool; false: there were none. */
bool kv_cache_release_attached(struct kv_cache *cache);
size_t kv_cache_attached(const struct kv_cache *cache);      /* bytes of all attachments */
size_t kv_cache_attached_most(const struct kv_cache *cache); /* that they may have; 0: no sharing of prefixes */

/* Checks every count, list and reference against every other one; for tests. True when consistent. */
bool kv_cache_check(const struct kv_cache *cache);

#endif
