/* SPDX-License-Identifier: Apache-2.0 */
#include "engine/bpe.h"

#include <stdbool.h>
#include <stdlib.h>
#include <string.h>

#include "engine/error.h"

#define NO_RANK UINT32_MAX
#define SHORT_PIECE 48 /* symbols up to which searching all ranks beats keeping a heap */

struct merge { /* an entry of an open-addressing table */
    uint64_t pair;
    uint32_t rank; /* NO_RANK: the entry is empty */
    int32_t id;
};

struct bpe {
    struct merge *table; /* [mask + 1], a power of two */
    uint64_t mask;
};

static uint64_t pair_key(int32_t left, int32_t right) {
    return (uint64_t)(uint32_t)left << 32 | (uint32_t)right;
}

static uint64_t pair_hash(uint64_t pair) {
    pair *= 0x9e3779b97f4a7c15u; /* 2^64 over the golden ratio */
    return pair ^ pair >> 32;
}

struct bpe *bpe_create(size_t merges) {
    if (merges >= UINT32_MAX / 2)
        return NULL;
    size_t entries = 16;
    while (entries < 2 * merges)
        entries *= 2;
    struct bpe *bpe = calloc(1, sizeof *bpe);
    if (bpe == NULL)
        return NULL;
    bpe->table = malloc(entries * sizeof *bpe->table);
    if (bpe->table == NULL) {
        free(bpe);
        return NULL;
    }
    bpe->mask = entries - 1;
    for (size_t i = 0; i < entries; i++)
        bpe->table[i] = (struct merge){.rank = NO_RANK};
    return bpe;
}

void bpe_free(struct bpe *bpe) {
    if (bpe == NULL)
        return;
    free(bpe->table);
    free(bpe);
}

/* The entry of a pair, or the empty one where it would be. */
static struct merge *find_entry(const struct bpe *bpe, uint64_t pair) {
    uint64_t at = pair_hash(pair) & bpe->mask;
    while (bpe->table[at].rank != NO_RANK && bpe->table[at].pair != pair)
        at = (at + 1) & bpe->mask;
    return &bpe->table[at];
}

void bpe_add(struct bpe *bpe, int32_t left, int32_t right, int32_t id, uint32_t rank) {
    struct merge *entry = find_entry(bpe, pair_key(left, right));
    if (entry->rank == NO_RANK)
        *entry = (struct merge){.pair = pair_key(left, right), .rank = rank, .id = id};
}

static struct merge find_merge(const struct bpe *bpe, int32_t left, int32_t right) {
    return *find_entry(bpe, pair_key(left, right));
}

/* Few symbols: the ranks of all neighbours in an array, the lowest found by looking at each. */
static size_t merge_short(const struct bpe *bpe, int32_t *ids, size_t count) {
    struct merge merges[SHORT_PIECE]; /* [i] of ids i and i + 1 */
    for (size_t i = 0; i + 1 < count; i++)
        merges[i] = find_merge(bpe, ids[i], ids[i + 1]);
    while (count > 1) {
        size_t best = 0;
        for (size_t i = 1; i + 1 < count; i++)
            if (merges[i].rank < merges[best].rank)
                best = i;
        if (merges[best].rank == NO_RANK)
            break;
        ids[best] = merges[best].id;
        memmove(ids + best + 1, ids + best + 2, (count - best - 2) * sizeof *ids);
        memmove(merges + best, merges + best + 1, (count - best - 2) * sizeof *merges);
        count--;
        if (best > 0)
            merges[best - 1] = find_merge(bpe, ids[best - 1], ids[best]);
        if (best + 1 < count)
            merges[best] = find_merge(bpe, ids[best], ids[best + 1]);
    }
    return count;
}

/* Many symbols: a linked list of symbols and a heap of (rank, position of the left symbol). Entries whose rank is no
 * longer that of the pair at their position are skipped when they come up. */
struct list {
    int32_t *ids; /* arrays of [symbols] */
    uint32_t *ranks;
    int32_t *merged; /* what the pair becomes */
    uint32_t *next;  /* symbols: the end */
    uint32_t *previous;
    uint64_t *heap; /* at most 2 * symbols: a merge takes one entry and adds two */
    size_t heap_count;
    uint32_t symbols;
};

static int list_reserve(struct list *list, struct bpe_scratch *scratch, size_t symbols) {
    size_t wanted = symbols * (2 * sizeof(uint64_t) + 4 * sizeof(uint32_t));
    if (scratch->bytes < wanted) {
        free(scratch->memory);
        scratch->bytes = 0;
        scratch->memory = malloc(wanted);
        if (scratch->memory == NULL)
            return ERROR_MEMORY;
        scratch->bytes = wanted;
    }
    list->heap = scratch->memory;
    list->ranks = (uint32_t *)(list->heap + 2 * symbols);
    list->merged = (int32_t *)(list->ranks + symbols);
    list->next = (uint32_t *)(list->merged + symbols);
    list->previous = list->next + symbols;
    list->heap_count = 0;
    list->symbols = (uint32_t)symbols;
    return 0;
}

static void sift_down(uint64_t *heap, size_t count, size_t at) {
    uint64_t value = heap[at];
    for (size_t child = 2 * at + 1; child < count; child = 2 * at + 1) {
        if (child + 1 < count && heap[child + 1] < heap[child])
            child++;
        if (heap[child] >= value)
            break;
        heap[at] = heap[child];
        at = child;
    }
    heap[at] = value;
}

static void heap_push(struct list *list, uint64_t value) {
    size_t at = list->heap_count++;
    while (at > 0 && list->heap[(at - 1) / 2] > value) {
        list->heap[at] = list->heap[(at - 1) / 2];
        at = (at - 1) / 2;
    }
    list->heap[at] = value;
}

static uint64_t heap_pop(struct list *list) {
    uint64_t lowest = list->heap[0];
    list->heap[0] = list->heap[--list->heap_count];
    if (list->heap_count > 0)
        sift_down(list->heap, list->heap_count, 0);
    return lowest;
}

/* Looks up the pair that begins at a symbol. */
static bool update_pair(const struct bpe *bpe, struct list *list, uint32_t at) {
    list->ranks[at] = NO_RANK;
    if (list->next[at] == list->symbols)
        return false;
    struct merge merge = find_merge(bpe, list->ids[at], list->ids[list->next[at]]);
    list->ranks[at] = merge.rank;
    list->merged[at] = merge.id;
    return merge.rank != NO_RANK;
}

static uint64_t heap_key(const struct list *list, uint32_t at) {
    return (uint64_t)list->ranks[at] << 32 | at;
}

static void list_fill(const struct bpe *bpe, struct list *list) {
    for (uint32_t i = 0; i < list->symbols; i++) {
        list->next[i] = i + 1;
        list->previous[i] = i - 1;
        if (update_pair(bpe, list, i))
            list->heap[list->heap_count++] = heap_key(list, i);
    }
    for (size_t i = list->heap_count / 2; i-- > 0;)
        sift_down(list->heap, list->heap_count, i);
}

static void list_merge(const struct bpe *bpe, struct list *list, uint32_t at) {
    uint32_t gone = list->next[at];
    list->ids[at] = list->merged[at];
    list->next[at] = list->next[gone];
    if (list->next[at] < list->symbols)
        list->previous[list->next[at]] = at;
    list->ranks[gone] = NO_RANK;
    if (update_pair(bpe, list, at))
        heap_push(list, heap_key(list, at));
    if (at > 0 && update_pair(bpe, list, list->previous[at]))
        heap_push(list, heap_key(list, list->previous[at]));
}

static int merge_long(const struct bpe *bpe, struct bpe_scratch *scratch, int32_t *ids, size_t *count) {
    struct list list = {.ids = ids};
    if (list_reserve(&list, scratch, *count) != 0)
        return ERROR_MEMORY;
    list_fill(bpe, &list);
    while (list.heap_count > 0) {
        uint64_t lowest = heap_pop(&list);
        uint32_t at = (uint32_t)lowest;
        if (list.ranks[at] == (uint32_t)(lowest >> 32))
            list_merge(bpe, &list, at);
    }
    size_t kept = 0;
    for (uint32_t i = 0; i < list.symbols; i = list.next[i])
        ids[kept++] = ids[i];
    *count = kept;
    return 0;
}

void bpe_scratch_free(struct bpe_scratch *scratch) {
    free(scratch->memory);
    *scratch = (struct bpe_scratch){0};
}

int bpe_merge(const struct bpe *bpe, struct bpe_scratch *scratch, int32_t *ids, size_t *count) {
    if (*count > SHORT_PIECE)
        return merge_long(bpe, scratch, ids, count);
    *count = merge_short(bpe, ids, *count);
    return 0;
}
