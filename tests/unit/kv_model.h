/* SPDX-License-Identifier: Apache-2.0
 *
 * A KV cache kept twice: the real one, and plain lists of (position, content) a head that are compared with it.
 *
 * The content of a token's slot is a number that stands for everything the token's key and value depend on: the tokens
 * up to it and, once the sequence is pruned, its own history. Keys and values are computed from content, layer, head,
 * position and channel, so that two slots hold the same only when they should.
 *
 * Every function here carries out an operation on both sides and requires that they agree; REQUIRE fails the running
 * test and prints kv_model_place. An allocation that was made to fail (failing_malloc.h) fails on the real side only.
 */
#ifndef TESTS_KV_MODEL_H
#define TESTS_KV_MODEL_H

#include "engine/kv_internal.h"
#include "tests/unit/plain_backend.h"

enum { MODEL_LAYERS = 2, MODEL_KV_HEADS = 2, MODEL_HEADS = MODEL_LAYERS * MODEL_KV_HEADS, MODEL_HEAD_DIM = 4 };

extern char kv_model_place[128]; /* where a test is, for the message of a failure */

void kv_model_require(bool holds, const char *text, const char *file, int line);
#define REQUIRE(condition) kv_model_require((condition), #condition, __FILE__, __LINE__)

struct model_slot {
    uint32_t position;
    uint64_t content;
};

struct model_head {
    struct model_slot *slots;
    uint32_t count;
    uint32_t marked; /* KV_NO_SLOT: none */
};

struct twin {
    struct kv_sequence *real;
    int32_t *tokens;
    uint64_t content; /* of the last token */
    uint32_t length;
    bool pruned;
    size_t charged; /* bytes */
    void *saved;    /* contents of its pages, while it holds none */
    struct model_head heads[MODEL_HEADS];
};

struct kv_cache *kv_model_cache(struct plain_backend *plain, uint32_t pages, bool prefix_sharing);

struct twin *twin_create(struct kv_cache *cache); /* NULL when the real side could not allocate */
struct twin *twin_fork(const struct twin *twin);
void twin_free(struct twin *twin);

/* Each returns the real side's code; unless it is 0, both sides are as before. */
int twin_append(struct twin *twin, const int32_t *tokens, uint32_t count);
int twin_keep(struct twin *twin, uint32_t head, const uint32_t *slots, uint32_t count);
int twin_evict(struct twin *twin, uint32_t head, uint32_t slot);
int twin_prune(struct twin *twin, const struct kv_removal *removals); /* [MODEL_HEADS] */
int twin_charge(struct twin *twin, size_t bytes);
/* Between the two a twin may only be charged, compared as far as it goes, and freed. */
void twin_save(struct twin *twin);
int twin_restore(struct twin *twin);
void twin_publish(struct twin *twin);
uint32_t twin_adopt(struct twin *twin, const int32_t *tokens, uint32_t count, uint32_t limit);
void twin_clear(struct twin *twin); /* unpruned: empty again */

/* What twins leave with prefixes: a note of one of a few kinds about the tokens up to the block's end. Those that live
 * are listed here; the cache's release takes them off. */
struct note {
    struct kv_attachment attachment; /* the first member */
    struct note *next;
    uint64_t content; /* of the last token */
    uint32_t length;
    uint32_t kind;
};
extern struct note *kv_model_notes;

/* Leaves a note at the twin's end if it can be left there; requires that it can only be where blocks end. */
bool twin_leave_note(struct twin *twin, uint32_t kind, size_t bytes);
/* The prefix that adopting with a note of this kind must find. */
uint32_t kv_model_longest_noted(
    struct kv_cache *cache, const int32_t *tokens, uint32_t count, uint32_t limit, uint32_t kind);
/* As twin_adopt, with such a note; requires that it is about these tokens. */
uint32_t twin_adopt_noted(struct twin *twin, const int32_t *tokens, uint32_t count, uint32_t limit, uint32_t kind);

/* Brings the device's copies of the tables of twins [count] (distinct, of one cache) up to date. False when one that is
 * not saved has none then. */
bool twin_send_tables(struct twin *const *twins, uint32_t count);

/* Compares one head, or all of them, with the real side: slots, positions, order, keys, values; and the page table with
 * the device's copy, where the view names one. */
void twin_compare_head(const struct twin *twin, uint32_t head);
void twin_compare(const struct twin *twin);

/* Requires that kv_cache_check is content, that pages free, pages held by twins [count] and pages that their charges
 * stand for make up the pool, that living notes have a place beside those, and that the pages of the free list are
 * poisoned, unless the cache does not do that. */
void kv_model_check(struct kv_cache *cache, struct twin *const *twins, uint32_t count);

#endif
