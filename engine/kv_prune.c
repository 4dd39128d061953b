/* SPDX-License-Identifier: Apache-2.0
 *
 * Fewer slots: keep compacts a head, evict makes one slot free for the next token.
 */
#include "engine/kv_internal.h"

#include <stdlib.h>
#include <string.h>

/* How many of the head's pages [first, end) must be replaced before they are written. */
static uint32_t count_shared(const struct kv_pages *pages, const struct kv_head *head, uint32_t first, uint32_t end) {
    uint32_t shared = 0;
    for (uint32_t i = first; i < end; i++)
        shared += kv_pages_is_shared(pages, head->pages[i]);
    return shared;
}

/* Pruning must not fail for the sake of a prefix that might be asked for again: when pages are short, blocks of which
 * only this head holds the page are unpublished, the end of the text first, so that their pages can be written in
 * place. Returns false when pages are still short. */
static bool make_writable(struct kv_pages *pages, const struct kv_head *head, uint32_t first, uint32_t end) {
    uint32_t shared = count_shared(pages, head, first, end);
    uint32_t available = kv_pages_available_on(pages, head->rank); /* unpublishing does not change it */
    for (uint32_t i = end; shared > available && i-- > first;) {
        const struct kv_page_state *state = &pages->states[head->pages[i]];
        if (state->references > 1 || state->block == PREFIX_NO_BLOCK)
            continue;
        kv_pages_unpublish(pages, state->block);
        shared--;
    }
    return count_shared(pages, head, first, end) <= available;
}

/* What kv_sequence_keep works on; all in one allocation. */
struct compaction {
    uint32_t written;     /* first page of the table that is written */
    uint32_t pages_count; /* afterwards */
    uint32_t *table;      /* the head's old pages, then fresh ones that replace shared pages */
    uint32_t *target;     /* [pages_count] index into table of each page that is kept */
    uint32_t *from, *to;  /* [count] moves */
    uint32_t *positions;  /* [kv_order_numbers] the head's new positions and order */
    uint32_t capacity;
};

static uint32_t first_moved(const uint32_t *slots, uint32_t count) {
    uint32_t i = 0;
    while (i < count && slots[i] == i)
        i++;
    return i;
}

static int compaction_create(
    struct compaction *plan, const struct kv_head *head, const uint32_t *slots, uint32_t count, uint32_t shared) {
    size_t pages = (size_t)head->pages_count + shared + plan->pages_count;
    plan->capacity = count + KV_PAGE_SLOTS;
    plan->table = malloc((pages + 2 * (size_t)count) * sizeof *plan->table + 1);
    plan->positions = malloc(kv_order_numbers(plan->capacity) * sizeof *plan->positions);
    if (plan->table == NULL || plan->positions == NULL) {
        free(plan->table);
        free(plan->positions);
        return ERROR_MEMORY;
    }
    plan->target = plan->table + head->pages_count + shared;
    plan->from = plan->target + plan->pages_count;
    plan->to = plan->from + count;
    for (uint32_t i = 0; i < count; i++)
        plan->positions[i] = head->positions != NULL ? head->positions[slots[i]] : slots[i];
    return 0;
}

/* Index of slot in the ascending list, or KV_NO_SLOT. */
static uint32_t find_slot(const uint32_t *slots, uint32_t count, uint32_t slot) {
    uint32_t low = 0, high = count;
    while (low < high) {
        uint32_t middle = low + (high - low) / 2;
        if (slots[middle] < slot)
            low = middle + 1;
        else
            high = middle;
    }
    return low < count && slots[low] == slot ? low : KV_NO_SLOT;
}

static void order_kept(struct compaction *plan, struct kv_head *head, const uint32_t *slots, uint32_t count) {
    uint32_t *order = plan->positions + plan->capacity;
    uint32_t kept = 0;
    if (head->positions == NULL) /* slots ascend by position */
        for (; kept < count; kept++)
            order[kept] = kept;
    const uint32_t *old = head->positions != NULL ? kv_head_closed_order(head) : NULL;
    for (uint32_t i = 0; old != NULL && i < head->slots; i++) {
        uint32_t slot = find_slot(slots, count, old[i]);
        if (slot != KV_NO_SLOT)
            order[kept++] = slot;
    }
}

/* Moves never overwrite what a later one reads: a slot only moves to the front, and moves ascend. */
static void move_kept(struct kv_pages *pages, struct compaction *plan, const struct kv_head *head,
    const uint32_t *slots, uint32_t count) {
    struct backend *backend = pages->backend;
    uint32_t moves = 0;
    for (uint32_t i = plan->written * KV_PAGE_SLOTS; i < count; i++) {
        uint32_t to = plan->target[i / KV_PAGE_SLOTS] * KV_PAGE_SLOTS + i % KV_PAGE_SLOTS;
        if (to == slots[i])
            continue;
        plan->from[moves] = slots[i];
        plan->to[moves++] = to;
    }
    if (moves > 0)
        backend->operations->move_slots(backend, &pages->pool, plan->table, plan->from, plan->to, moves);
    uint32_t end = plan->pages_count * KV_PAGE_SLOTS;
    if (count < end)
        backend->operations->clear_slots(backend, &pages->pool, head->pages, count, end);
}

static void take_targets(struct kv_pages *pages, struct compaction *plan, struct kv_head *head) {
    uint32_t table_count = head->pages_count;
    memcpy(plan->table, head->pages, head->pages_count * sizeof *plan->table);
    for (uint32_t i = plan->written; i < plan->pages_count; i++) { /* decide before taking changes what is shared */
        plan->target[i] = kv_pages_is_shared(pages, head->pages[i]) ? table_count++ : i;
    }
    for (uint32_t i = head->pages_count; i < table_count; i++)
        plan->table[i] = kv_pages_take(pages, head->rank);
    for (uint32_t i = plan->written; i < plan->pages_count; i++) {
        if (plan->target[i] != i)
            kv_head_touch(head, i);
        head->pages[i] = plan->table[plan->target[i]];
    }
}

/* Drops what is no longer in the head's table, the end first. */
static void drop_replaced(struct kv_pages *pages, const struct compaction *plan, struct kv_head *head) {
    for (uint32_t i = head->pages_count; i-- > plan->written;)
        if (i >= plan->pages_count || plan->target[i] != i)
            kv_pages_drop(pages, plan->table[i]);
    head->pages_count = plan->pages_count;
}

static int check_slots(const struct kv_head *head, const uint32_t *slots, uint32_t count, struct error *error) {
    if (head == NULL)
        return error_set(error, ERROR_INVALID, "no such layer or KV head");
    if (head->window != 0)
        return error_set(error, ERROR_INVALID, "a sliding layer keeps its window");
    for (uint32_t i = 0; i < count; i++)
        if (slots[i] >= head->slots || (i > 0 && slots[i] <= slots[i - 1]))
            return error_set(
                error, ERROR_INVALID, "slot %u to keep is out of order or not one of %u", slots[i], head->slots);
    return 0;
}

int kv_sequence_keep(struct kv_sequence *sequence, uint32_t layer, uint32_t head_number, const uint32_t *slots,
    uint32_t count, struct error *error) {
    struct kv_pages *pages = &sequence->cache->pages;
    struct kv_head *head = kv_sequence_head(sequence, layer, head_number);
    int code = check_slots(head, slots, count, error);
    if (code != 0 || count == head->slots)
        return code;
    struct compaction plan = {
        .written = first_moved(slots, count) / KV_PAGE_SLOTS,
        .pages_count = kv_pages_for(count),
    };
    if (!make_writable(pages, head, plan.written, plan.pages_count))
        return error_set(error, ERROR_PAGES, "no free KV pages to copy %u shared ones",
            count_shared(pages, head, plan.written, plan.pages_count));
    uint32_t shared = count_shared(pages, head, plan.written, plan.pages_count);
    if (compaction_create(&plan, head, slots, count, shared) != 0)
        return error_set(error, ERROR_MEMORY, "no memory to keep %u slots", count);

    order_kept(&plan, head, slots, count);
    take_targets(pages, &plan, head);
    move_kept(pages, &plan, head, slots, count);
    drop_replaced(pages, &plan, head);
    head->marked = head->marked == KV_NO_SLOT ? KV_NO_SLOT : find_slot(slots, count, head->marked);
    head->slots = head->first_new = count;
    free(head->positions);
    head->positions = plan.positions;
    head->order = plan.positions + plan.capacity;
    head->order_count = count;
    head->order_stale = false;
    head->slots_capacity = plan.capacity;
    free(plan.table);
    sequence->pruned = true;
    return 0;
}

int kv_head_materialise(struct kv_head *head) {
    if (head->positions != NULL)
        return 0;
    if (kv_head_reserve_slots(head, head->slots) != 0)
        return ERROR_MEMORY;
    for (uint32_t i = 0; i < head->slots; i++)
        head->positions[i] = head->order[i] = i;
    head->order_count = head->slots;
    return 0;
}

static int compare_positions(const void *a, const void *b, void *context) {
    const uint32_t *positions = context;
    uint32_t x = positions[*(const uint32_t *)a], y = positions[*(const uint32_t *)b];
    return x < y ? -1 : x > y;
}

const uint32_t *kv_head_order(struct kv_head *head) {
    if (head->order_stale) {
        for (uint32_t i = 0; i < head->slots; i++)
            head->order[i] = i;
        qsort_r(head->order, head->slots, sizeof *head->order, compare_positions, head->positions);
        head->order_count = head->slots;
        head->order_stale = false;
    }
    head->order_read = true;
    return head->order;
}

void kv_head_close_order(struct kv_head *head) {
    uint32_t kept = 0;
    for (uint32_t i = 0; head->order_count != head->slots && i < head->order_count; i++) {
        head->order[kept] = head->order[i];
        kept += head->order[i] != KV_NO_SLOT;
    }
    if (kept > 0)
        head->order_count = kept;
}

const uint32_t *kv_head_closed_order(struct kv_head *head) {
    kv_head_order(head);
    kv_head_close_order(head);
    return head->order;
}

/* Where in the order a slot is: behind `rank` slots and as many holes as there are, or else anywhere. */
static uint32_t place_in_order(const struct kv_head *head, uint32_t slot, uint32_t rank) {
    for (uint32_t i = rank; i <= rank + KV_ORDER_HOLES && i < head->order_count; i++)
        if (head->order[i] == slot)
            return i;
    uint32_t place = 0;
    while (head->order[place] != slot)
        place++;
    return place;
}

/* A slot that is to be marked goes to the end of the order. */
static void move_to_end(struct kv_head *head, uint32_t slot, uint32_t rank) {
    head->order_stale |= !head->order_read;
    head->order_read = false;
    if (head->order_stale) {
        head->order_count = 0;
        return;
    }
    if (head->order_count == head->slots + KV_ORDER_HOLES)
        kv_head_close_order(head);
    head->order[place_in_order(head, slot, rank)] = KV_NO_SLOT;
    head->order[head->order_count++] = slot;
}

void kv_head_expect_mark(const struct kv_cache *cache, const struct kv_head *head, uint32_t slot, uint32_t rank) {
    const struct kv_pages *pages = &cache->pages;
    __builtin_prefetch(&pages->states[head->pages[slot / KV_PAGE_SLOTS]]);
    if (head->positions == NULL)
        return;
    __builtin_prefetch(&head->positions[slot], 1);
    if (!head->order_read || head->order_stale)
        return;
    for (uint32_t i = 0; i <= KV_ORDER_HOLES && rank < head->order_count - i; i += 64 / sizeof *head->order)
        __builtin_prefetch(&head->order[rank + i], 1);
    __builtin_prefetch(&head->order[head->order_count - 1], 1);
}

void kv_head_mark(struct kv_cache *cache, struct kv_head *head, uint32_t slot, uint32_t rank) {
    struct backend *backend = cache->pages.backend;
    backend->operations->clear_slots(backend, &cache->pages.pool, head->pages, slot, slot + 1);
    move_to_end(head, slot, rank);
    head->positions[slot] = KV_NO_POSITION;
    head->marked = slot;
}

int kv_sequence_own(
    struct kv_sequence *sequence, uint32_t layer, uint32_t head_number, uint32_t slot, struct error *error) {
    struct kv_cache *cache = sequence->cache;
    struct kv_head *head = kv_sequence_head(sequence, layer, head_number);
    if (head == NULL || slot >= head->slots)
        return error_set(error, ERROR_INVALID, "no such slot: %u", slot);
    uint32_t at = slot / KV_PAGE_SLOTS;
    if (!make_writable(&cache->pages, head, at, at + 1))
        return error_set(error, ERROR_PAGES, "no free KV page to copy a shared one");
    kv_cache_own_page(cache, head, at);
    kv_cache_flush_batch(cache);
    return 0;
}

int kv_sequence_evict(
    struct kv_sequence *sequence, uint32_t layer, uint32_t head_number, uint32_t slot, struct error *error) {
    struct kv_cache *cache = sequence->cache;
    struct kv_head *head = kv_sequence_head(sequence, layer, head_number);
    if (head == NULL || slot >= head->slots)
        return error_set(error, ERROR_INVALID, "no such slot to evict: %u", slot);
    if (head->window != 0)
        return error_set(error, ERROR_INVALID, "a sliding layer keeps its window");
    if (head->marked != KV_NO_SLOT)
        return error_set(error, ERROR_INVALID, "slot %u is evicted already and waits for a token", head->marked);
    uint32_t at = slot / KV_PAGE_SLOTS;
    if (!make_writable(&cache->pages, head, at, at + 1))
        return error_set(error, ERROR_PAGES, "no free KV page to copy a shared one");
    if (kv_head_materialise(head) != 0)
        return error_set(error, ERROR_MEMORY, "no memory for the positions of %u slots", head->slots);
    sequence->pruned = true;
    kv_cache_own_page(cache, head, at);
    kv_cache_flush_batch(cache);
    kv_head_mark(cache, head, slot, 0);
    return 0;
}
