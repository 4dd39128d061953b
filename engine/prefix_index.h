/* SPDX-License-Identifier: Apache-2.0
 *
 * The index of shared prefixes: blocks of 16 tokens, found by what stands before them and by their own tokens. Knows
 * which pages a block has and how many of them are held; moves no data and counts no references (kv_pages.h does).
 *
 * A block is a child of the block before it, so that a path from a block without a parent spells a text. A lookup goes
 * by a hash chained over the text and then compares parent and tokens: equal hashes of different texts are harmless.
 * Every ancestor of an indexed block is indexed: a block is removed after its children.
 *
 * Blocks that nobody holds wait in the list `idle` to be taken back, oldest first; after them come those of `partial`,
 * of which some pages are held (their holders pruned other heads). All memory is allocated at creation.
 */
#ifndef ENGINE_PREFIX_INDEX_H
#define ENGINE_PREFIX_INDEX_H

#include "engine/backend.h"

#define PREFIX_NO_BLOCK UINT32_MAX

struct prefix_block {
    uint64_t hash;
    int32_t tokens[KV_PAGE_SLOTS];
    uint32_t parent; /* PREFIX_NO_BLOCK: starts a text */
    uint32_t first_child;
    uint32_t next_sibling, previous_sibling;
    uint32_t next_in_bucket; /* or in the chain of unused blocks */
    uint32_t older, newer;   /* in the list it belongs to */
    uint32_t pages_held;
    uint32_t generation; /* grows when the block is removed: tells a remembered number from its successor */
    bool used;
};

struct prefix_list {
    uint32_t oldest, newest;
};

typedef uint64_t (*prefix_hash)(uint64_t before, const int32_t tokens[KV_PAGE_SLOTS]);

struct prefix_index {
    uint32_t capacity;      /* blocks */
    uint32_t used;          /* blocks */
    uint32_t pages_a_block; /* one for each (layer, KV head) */
    struct prefix_block *blocks;
    uint32_t *pages; /* [capacity, pages_a_block] */
    uint32_t *buckets;
    uint32_t bucket_mask;
    uint32_t unused; /* first of the chain */
    struct prefix_list idle, partial;
    prefix_hash hash;
    uint64_t seed; /* the hash before the first block; random, so that nobody can prepare texts that collide */
};

struct prefix_index *prefix_index_create(uint32_t capacity, uint32_t pages_a_block); /* NULL on failed allocation */
void prefix_index_free(struct prefix_index *index);                                  /* NULL allowed */

/* The block with these tokens after parent, or PREFIX_NO_BLOCK. */
uint32_t prefix_index_find(const struct prefix_index *index, uint32_t parent, const int32_t tokens[KV_PAGE_SLOTS]);

/* Adds a block that find does not know, with all its pages held: pages [pages_a_block]. There must be an unused one. */
uint32_t prefix_index_add(
    struct prefix_index *index, uint32_t parent, const int32_t tokens[KV_PAGE_SLOTS], const uint32_t *pages);

/* Removes a block without children. */
void prefix_index_remove(struct prefix_index *index, uint32_t block);

const uint32_t *prefix_index_pages(const struct prefix_index *index, uint32_t block); /* [pages_a_block] */

/* One page more or less of the block is held. */
void prefix_index_page_held(struct prefix_index *index, uint32_t block);
void prefix_index_page_unheld(struct prefix_index *index, uint32_t block);

/* Makes the block the newest of its list, if it is in one. */
void prefix_index_touch(struct prefix_index *index, uint32_t block);

/* The block to take back next, or PREFIX_NO_BLOCK. It may have children. */
uint32_t prefix_index_oldest(const struct prefix_index *index);

/* Checks lists, chains and counts against each other; for tests. */
bool prefix_index_check(const struct prefix_index *index);

#endif
