/* SPDX-License-Identifier: Apache-2.0 */
#include "engine/prefix_index.h"

#include <stdlib.h>
#include <string.h>
#include <sys/random.h>

static uint64_t hash_tokens(uint64_t before, const int32_t tokens[KV_PAGE_SLOTS]) {
    uint64_t hash = before;
    for (uint32_t i = 0; i < KV_PAGE_SLOTS; i++) {
        hash ^= (uint32_t)tokens[i];
        hash *= 0x9e3779b97f4a7c15u; /* 2^64 / golden ratio, odd */
        hash ^= hash >> 32;
    }
    return hash;
}

static uint32_t bucket_count(uint32_t capacity) {
    uint32_t count = 16;
    while (count < capacity && count < 1u << 31)
        count *= 2;
    return count;
}

struct prefix_index *prefix_index_create(uint32_t capacity, uint32_t pages_a_block) {
    struct prefix_index *index = calloc(1, sizeof *index);
    if (index == NULL)
        return NULL;
    uint32_t buckets = bucket_count(capacity);
    index->capacity = capacity;
    index->pages_a_block = pages_a_block;
    index->blocks = calloc(capacity, sizeof *index->blocks);
    index->pages = calloc((size_t)capacity * pages_a_block, sizeof *index->pages);
    index->buckets = malloc(buckets * sizeof *index->buckets);
    if (index->blocks == NULL || index->pages == NULL || index->buckets == NULL) {
        prefix_index_free(index);
        return NULL;
    }
    memset(index->buckets, 0xff, buckets * sizeof *index->buckets); /* PREFIX_NO_BLOCK */
    index->bucket_mask = buckets - 1;
    for (uint32_t i = 0; i < capacity; i++)
        index->blocks[i].next_in_bucket = i + 1 < capacity ? i + 1 : PREFIX_NO_BLOCK;
    index->unused = capacity > 0 ? 0 : PREFIX_NO_BLOCK;
    index->idle = index->partial = (struct prefix_list){PREFIX_NO_BLOCK, PREFIX_NO_BLOCK};
    index->hash = hash_tokens;
    if (getrandom(&index->seed, sizeof index->seed, GRND_NONBLOCK) != (ssize_t)sizeof index->seed)
        index->seed = (uintptr_t)index;
    return index;
}

void prefix_index_free(struct prefix_index *index) {
    if (index == NULL)
        return;
    free(index->blocks);
    free(index->pages);
    free(index->buckets);
    free(index);
}

const uint32_t *prefix_index_pages(const struct prefix_index *index, uint32_t block) {
    return index->pages + (size_t)block * index->pages_a_block;
}

static uint64_t block_hash(const struct prefix_index *index, uint32_t parent, const int32_t tokens[KV_PAGE_SLOTS]) {
    return index->hash(parent == PREFIX_NO_BLOCK ? index->seed : index->blocks[parent].hash, tokens);
}

static uint32_t *bucket_of(const struct prefix_index *index, uint64_t hash) {
    return &index->buckets[(uint32_t)hash & index->bucket_mask];
}

uint32_t prefix_index_find(const struct prefix_index *index, uint32_t parent, const int32_t tokens[KV_PAGE_SLOTS]) {
    uint64_t hash = block_hash(index, parent, tokens);
    uint32_t found = *bucket_of(index, hash);
    while (found != PREFIX_NO_BLOCK) {
        const struct prefix_block *block = &index->blocks[found];
        if (block->hash == hash && block->parent == parent && memcmp(block->tokens, tokens, sizeof block->tokens) == 0)
            return found;
        found = block->next_in_bucket;
    }
    return PREFIX_NO_BLOCK;
}

/* Lists: the list a block belongs to follows from how many of its pages are held. */

static struct prefix_list *list_of(struct prefix_index *index, uint32_t pages_held) {
    if (pages_held == 0)
        return &index->idle;
    return pages_held < index->pages_a_block ? &index->partial : NULL;
}

static void list_append(struct prefix_index *index, struct prefix_list *list, uint32_t number) {
    struct prefix_block *block = &index->blocks[number];
    block->older = list->newest;
    block->newer = PREFIX_NO_BLOCK;
    if (list->newest != PREFIX_NO_BLOCK)
        index->blocks[list->newest].newer = number;
    else
        list->oldest = number;
    list->newest = number;
}

static void list_remove(struct prefix_index *index, struct prefix_list *list, uint32_t number) {
    struct prefix_block *block = &index->blocks[number];
    if (block->older != PREFIX_NO_BLOCK)
        index->blocks[block->older].newer = block->newer;
    else
        list->oldest = block->newer;
    if (block->newer != PREFIX_NO_BLOCK)
        index->blocks[block->newer].older = block->older;
    else
        list->newest = block->older;
}

static void set_pages_held(struct prefix_index *index, uint32_t number, uint32_t pages_held) {
    struct prefix_block *block = &index->blocks[number];
    struct prefix_list *before = list_of(index, block->pages_held);
    struct prefix_list *after = list_of(index, pages_held);
    block->pages_held = pages_held;
    if (before == after)
        return;
    if (before != NULL)
        list_remove(index, before, number);
    if (after != NULL)
        list_append(index, after, number);
}

void prefix_index_page_held(struct prefix_index *index, uint32_t block) {
    set_pages_held(index, block, index->blocks[block].pages_held + 1);
}

void prefix_index_page_unheld(struct prefix_index *index, uint32_t block) {
    set_pages_held(index, block, index->blocks[block].pages_held - 1);
}

void prefix_index_touch(struct prefix_index *index, uint32_t block) {
    struct prefix_list *list = list_of(index, index->blocks[block].pages_held);
    if (list == NULL)
        return;
    list_remove(index, list, block);
    list_append(index, list, block);
}

uint32_t prefix_index_oldest(const struct prefix_index *index) {
    return index->idle.oldest != PREFIX_NO_BLOCK ? index->idle.oldest : index->partial.oldest;
}

uint32_t prefix_index_add(
    struct prefix_index *index, uint32_t parent, const int32_t tokens[KV_PAGE_SLOTS], const uint32_t *pages) {
    uint32_t number = index->unused;
    struct prefix_block *block = &index->blocks[number];
    index->unused = block->next_in_bucket;
    index->used++;
    block->used = true;
    block->hash = block_hash(index, parent, tokens);
    memcpy(block->tokens, tokens, sizeof block->tokens);
    memcpy(index->pages + (size_t)number * index->pages_a_block, pages, index->pages_a_block * sizeof *pages);
    block->pages_held = index->pages_a_block;

    uint32_t *bucket = bucket_of(index, block->hash);
    block->next_in_bucket = *bucket;
    *bucket = number;

    block->parent = parent;
    block->first_child = block->next_sibling = block->previous_sibling = PREFIX_NO_BLOCK;
    if (parent != PREFIX_NO_BLOCK) {
        block->next_sibling = index->blocks[parent].first_child;
        if (block->next_sibling != PREFIX_NO_BLOCK)
            index->blocks[block->next_sibling].previous_sibling = number;
        index->blocks[parent].first_child = number;
    }
    return number;
}

static void leave_parent(struct prefix_index *index, const struct prefix_block *block) {
    if (block->previous_sibling != PREFIX_NO_BLOCK)
        index->blocks[block->previous_sibling].next_sibling = block->next_sibling;
    else if (block->parent != PREFIX_NO_BLOCK)
        index->blocks[block->parent].first_child = block->next_sibling;
    if (block->next_sibling != PREFIX_NO_BLOCK)
        index->blocks[block->next_sibling].previous_sibling = block->previous_sibling;
}

void prefix_index_remove(struct prefix_index *index, uint32_t number) {
    struct prefix_block *block = &index->blocks[number];
    uint32_t *link = bucket_of(index, block->hash);
    while (*link != number)
        link = &index->blocks[*link].next_in_bucket;
    *link = block->next_in_bucket;
    leave_parent(index, block);
    struct prefix_list *list = list_of(index, block->pages_held);
    if (list != NULL)
        list_remove(index, list, number);
    block->used = false;
    block->generation++;
    block->next_in_bucket = index->unused;
    index->unused = number;
    index->used--;
}

static bool check_block(const struct prefix_index *index, uint32_t number) {
    const struct prefix_block *block = &index->blocks[number];
    if (prefix_index_find(index, block->parent, block->tokens) != number)
        return false;
    if (block->parent != PREFIX_NO_BLOCK && !index->blocks[block->parent].used)
        return false;
    uint32_t previous = PREFIX_NO_BLOCK;
    for (uint32_t child = block->first_child; child != PREFIX_NO_BLOCK; child = index->blocks[child].next_sibling) {
        if (!index->blocks[child].used || index->blocks[child].parent != number ||
            index->blocks[child].previous_sibling != previous)
            return false;
        previous = child;
    }
    return block->pages_held <= index->pages_a_block;
}

/* The list's length, or UINT32_MAX when a link or a member is wrong. */
static uint32_t check_list(const struct prefix_index *index, const struct prefix_list *list, bool idle) {
    uint32_t count = 0, previous = PREFIX_NO_BLOCK;
    for (uint32_t i = list->oldest; i != PREFIX_NO_BLOCK; i = index->blocks[i].newer) {
        const struct prefix_block *block = &index->blocks[i];
        bool belongs =
            idle ? block->pages_held == 0 : block->pages_held > 0 && block->pages_held < index->pages_a_block;
        if (!block->used || !belongs || block->older != previous || ++count > index->used)
            return UINT32_MAX;
        previous = i;
    }
    return list->newest == previous ? count : UINT32_MAX;
}

bool prefix_index_check(const struct prefix_index *index) {
    uint32_t used = 0, idle = 0, partial = 0, children = 0, with_parent = 0;
    for (uint32_t i = 0; i < index->capacity; i++) {
        const struct prefix_block *block = &index->blocks[i];
        if (!block->used)
            continue;
        if (!check_block(index, i))
            return false;
        used++;
        idle += block->pages_held == 0;
        partial += block->pages_held > 0 && block->pages_held < index->pages_a_block;
        with_parent += block->parent != PREFIX_NO_BLOCK;
        for (uint32_t c = block->first_child; c != PREFIX_NO_BLOCK; c = index->blocks[c].next_sibling)
            children++;
    }
    uint32_t unused = 0;
    for (uint32_t i = index->unused; i != PREFIX_NO_BLOCK && unused <= index->capacity; unused++)
        i = index->blocks[i].next_in_bucket;
    return used == index->used && used + unused == index->capacity && children == with_parent &&
           check_list(index, &index->idle, true) == idle && check_list(index, &index->partial, false) == partial;
}
