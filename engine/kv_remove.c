/* SPDX-License-Identifier: Apache-2.0
 *
 * A prune of all heads of a sequence: count what it takes, reserve memory, then do what can no longer fail. Slots that
 * stay do not move unless they must: the last ones fill the places of those that go.
 */
#include "engine/kv_internal.h"

#include <stdlib.h>
#include <string.h>

/* What is touched of a head that evicts one slot is fetched while the one so many before it is worked on. */
enum { MARKS_AHEAD = 4 };

/* Work space of one prune, in one allocation. */
struct removal_scratch {
    uint32_t **fresh;    /* [heads] positions of heads that have none yet */
    uint32_t *from, *to; /* [slots] moves of one head */
    uint32_t *renamed;   /* [slots] new slot of each slot of a head, or KV_NO_SLOT */
};

static uint32_t moves_of_kept(const uint32_t *keep, uint32_t count, uint32_t *from, uint32_t *to) {
    uint32_t low = 0, moves = 0;
    for (uint32_t place = 0; place < count; place++) {
        if (low < count && keep[low] == place)
            low++;
        else
            to[moves++] = place;
    }
    for (uint32_t i = 0; i < moves; i++)
        from[i] = keep[count - moves + i];
    return moves;
}

/* Places that became free, and the slots behind the last place that stay. */
static uint32_t moves_of_dropped(const uint32_t *drop, uint32_t count, uint32_t slots, uint32_t *from, uint32_t *to) {
    uint32_t moves = 0, found = 0, dropped;
    for (; moves < slots - count && drop[moves] < count; moves++)
        to[moves] = drop[moves];
    dropped = moves;
    for (uint32_t slot = count; slot < slots; slot++) {
        if (dropped < slots - count && drop[dropped] == slot)
            dropped++;
        else
            from[found++] = slot;
    }
    return moves;
}

uint32_t kv_removal_moves(const struct kv_removal *removal, uint32_t slots, uint32_t *from, uint32_t *to) {
    if (removal->keep != NULL)
        return moves_of_kept(removal->keep, removal->count, from, to);
    return moves_of_dropped(removal->drop, removal->count, slots, from, to);
}

static bool goes(const struct kv_head *head, const struct kv_removal *removal) {
    return kv_removal_compacts(removal) ? removal->count < head->slots : removal->evict != KV_NO_SLOT;
}

static int check_removal(const struct kv_head *head, const struct kv_removal *removal, struct error *error) {
    if (head->window != 0 && (kv_removal_compacts(removal) || removal->evict != KV_NO_SLOT))
        return error_set(error, ERROR_INVALID, "a sliding layer keeps its window");
    if (!kv_removal_compacts(removal)) {
        if (removal->evict != KV_NO_SLOT && (removal->evict >= head->slots || head->marked != KV_NO_SLOT))
            return error_set(error, ERROR_INVALID, "slot %u cannot be evicted", removal->evict);
        return 0;
    }
    if (removal->count > head->slots)
        return error_set(error, ERROR_INVALID, "%u slots of %u cannot stay", removal->count, head->slots);
    const uint32_t *list = removal->keep != NULL ? removal->keep : removal->drop;
    uint32_t length = removal->keep != NULL ? removal->count : head->slots - removal->count;
    for (uint32_t i = 0; i < length; i++)
        if (list[i] >= head->slots || (i > 0 && list[i] <= list[i - 1]))
            return error_set(error, ERROR_INVALID, "slot %u is out of order or not one of %u", list[i], head->slots);
    return 0;
}

/* Calls visit for each page (by its place in the head's table) that the removal writes to, once, ascending. */
typedef void (*page_visit)(struct kv_cache *cache, struct kv_head *head, uint32_t page, void *context);

static void visit_written(struct kv_cache *cache, struct kv_head *head, const struct kv_removal *removal,
    struct removal_scratch *scratch, page_visit visit, void *context) {
    if (!goes(head, removal))
        return;
    if (!kv_removal_compacts(removal)) {
        visit(cache, head, removal->evict / KV_PAGE_SLOTS, context);
        return;
    }
    uint32_t moves = kv_removal_moves(removal, head->slots, scratch->from, scratch->to);
    uint32_t next = 0;
    for (uint32_t i = 0; i < moves; i++) {
        uint32_t at = scratch->to[i] / KV_PAGE_SLOTS;
        if (at < next)
            continue;
        visit(cache, head, at, context);
        next = at + 1;
    }
    uint32_t last = removal->count / KV_PAGE_SLOTS; /* where slots behind the last one are marked as unused */
    if (removal->count % KV_PAGE_SLOTS != 0 && last >= next)
        visit(cache, head, last, context);
}

static void visit_all(struct kv_sequence *sequence, const struct kv_removal *removals, struct removal_scratch *scratch,
    page_visit visit, void *context) {
    for (uint32_t i = 0; i < sequence->cache->pages.heads; i++)
        visit_written(sequence->cache, &sequence->heads[i], &removals[i], scratch, visit, context);
}

static void count_shared(struct kv_cache *cache, struct kv_head *head, uint32_t page, void *context) {
    uint64_t *by_rank = context;
    by_rank[head->rank] += kv_pages_is_shared(&cache->pages, head->pages[page]);
}

/* Takes a page that is only published out of the index, while more of its rank are shared than available. */
static void unpublish(struct kv_cache *cache, struct kv_head *head, uint32_t page, void *context) {
    uint64_t *shared = (uint64_t *)context + head->rank;
    const struct kv_page_state *state = &cache->pages.states[head->pages[page]];
    if (*shared <= kv_pages_available_on(&cache->pages, head->rank) || state->references > 1 ||
        state->block == PREFIX_NO_BLOCK)
        return;
    kv_pages_unpublish(&cache->pages, state->block);
    --*shared;
}

static void own(struct kv_cache *cache, struct kv_head *head, uint32_t page, void *context) {
    (void)context;
    kv_cache_own_page(cache, head, page);
}

/* Whether each rank has as many available. */
static bool suffice(const struct kv_pages *pages, const uint64_t by_rank[BACKEND_RANKS_MAX]) {
    for (uint32_t rank = 0; rank < pages->ranks; rank++)
        if (by_rank[rank] > kv_pages_available_on(pages, rank))
            return false;
    return true;
}

/* Pages for copies of those that must be written and are shared: pruning must not fail for the sake of a prefix that
 * might be asked for again. */
static int find_pages(struct kv_sequence *sequence, const struct kv_removal *removals, struct removal_scratch *scratch,
    struct error *error) {
    const struct kv_pages *pages = &sequence->cache->pages;
    uint64_t shared[BACKEND_RANKS_MAX] = {0};
    visit_all(sequence, removals, scratch, count_shared, shared);
    if (suffice(pages, shared))
        return 0;
    visit_all(sequence, removals, scratch, unpublish, shared);
    memset(shared, 0, sizeof shared);
    visit_all(sequence, removals, scratch, count_shared, shared);
    if (suffice(pages, shared))
        return 0;
    return error_set(error, ERROR_PAGES, "no free KV pages to copy %llu shared ones",
        (unsigned long long)kv_pages_of_ranks(pages, shared));
}

/* Slots that the head's arrays must have room for at once. */
static uint32_t slots_after(const struct kv_head *head, const struct kv_removal *removal) {
    return kv_removal_compacts(removal) ? removal->count : head->slots;
}

static void scratch_free(struct removal_scratch *scratch, uint32_t heads) {
    for (uint32_t i = 0; scratch->fresh != NULL && i < heads; i++)
        free(scratch->fresh[i]);
    free(scratch->fresh);
}

static int scratch_create(
    struct removal_scratch *scratch, const struct kv_sequence *sequence, const struct kv_removal *removals) {
    uint32_t heads = sequence->cache->pages.heads, slots = 0;
    for (uint32_t i = 0; i < heads; i++)
        if (kv_removal_compacts(&removals[i]) && sequence->heads[i].slots > slots)
            slots = sequence->heads[i].slots;
    scratch->fresh = malloc(heads * sizeof *scratch->fresh + 3 * (size_t)slots * sizeof *scratch->from);
    if (scratch->fresh == NULL)
        return ERROR_MEMORY;
    memset(scratch->fresh, 0, heads * sizeof *scratch->fresh);
    scratch->from = (uint32_t *)(scratch->fresh + heads);
    scratch->to = scratch->from + slots;
    scratch->renamed = scratch->to + slots;
    for (uint32_t i = 0; i < heads; i++) {
        const struct kv_head *head = &sequence->heads[i];
        if (head->positions != NULL || !goes(head, &removals[i]))
            continue;
        scratch->fresh[i] =
            malloc(kv_order_numbers(slots_after(head, &removals[i]) + KV_PAGE_SLOTS) * sizeof(uint32_t));
        if (scratch->fresh[i] == NULL)
            return ERROR_MEMORY;
    }
    return 0;
}

/* Hands an unpruned head its arrays, with slots [count] in their places. */
static void adopt_arrays(struct kv_head *head, uint32_t **fresh, uint32_t count) {
    if (head->positions != NULL)
        return;
    head->positions = *fresh;
    head->slots_capacity = count + KV_PAGE_SLOTS;
    head->order = head->positions + head->slots_capacity;
    head->order_count = count;
    *fresh = NULL;
    for (uint32_t i = 0; i < count; i++)
        head->positions[i] = head->order[i] = i;
}

static void move_positions(struct kv_head *head, const struct removal_scratch *scratch, uint32_t moves, bool unpruned) {
    for (uint32_t i = 0; i < moves; i++)
        head->positions[scratch->to[i]] = unpruned ? scratch->from[i] : head->positions[scratch->from[i]];
}

/* Order and marked slot after the moves. unpruned: the order holds only the first slots, as they were. */
static void rename_slots(struct kv_head *head, const struct kv_removal *removal, const struct removal_scratch *scratch,
    uint32_t moves, bool unpruned) {
    uint32_t *renamed = scratch->renamed, kept = 0;
    memset(renamed, 0xff, head->slots * sizeof *renamed);
    if (!unpruned)
        kv_head_close_order(head);
    for (uint32_t i = 0; i < removal->count - moves; i++)
        renamed[removal->keep[i]] = removal->keep[i];
    for (uint32_t i = 0; i < moves; i++)
        renamed[scratch->from[i]] = scratch->to[i];
    for (uint32_t i = 0; i < head->slots && !head->order_stale; i++) {
        uint32_t slot = renamed[unpruned ? i : head->order[i]];
        if (slot != KV_NO_SLOT)
            head->order[kept++] = slot;
    }
    head->order_count = kept;
    if (head->marked != KV_NO_SLOT)
        head->marked = renamed[head->marked];
}

static bool is_among(uint32_t slot, const uint32_t *list, uint32_t count, uint32_t *at) {
    for (*at = 0; *at < count && list[*at] < slot; ++*at)
        ;
    return *at < count && list[*at] == slot;
}

/* The same where few slots go, without a look at all others: the order is sorted anew when it is read. */
static void rename_moved(
    struct kv_head *head, const struct kv_removal *removal, const struct removal_scratch *scratch, uint32_t moves) {
    uint32_t at;
    head->order_stale = true;
    head->order_count = 0;
    if (head->marked == KV_NO_SLOT)
        return;
    if (is_among(head->marked, removal->drop, head->slots - removal->count, &at))
        head->marked = KV_NO_SLOT;
    else if (is_among(head->marked, scratch->from, moves, &at))
        head->marked = scratch->to[at];
}

static void compact_head(struct kv_cache *cache, struct kv_head *head, const struct kv_removal *removal,
    struct removal_scratch *scratch, uint32_t **fresh) {
    struct kv_pages *pages = &cache->pages;
    struct backend *backend = pages->backend;
    bool unpruned = head->positions == NULL;
    uint32_t count = removal->count, pages_count = kv_pages_for(count);
    uint32_t moves = kv_removal_moves(removal, head->slots, scratch->from, scratch->to);
    if (moves > 0)
        backend->operations->move_slots(backend, &pages->pool, head->pages, scratch->from, scratch->to, moves);
    if (count < pages_count * KV_PAGE_SLOTS)
        backend->operations->clear_slots(backend, &pages->pool, head->pages, count, pages_count * KV_PAGE_SLOTS);
    while (head->pages_count > pages_count)
        kv_pages_drop(pages, head->pages[--head->pages_count]);
    adopt_arrays(head, fresh, count);
    move_positions(head, scratch, moves, unpruned);
    if (removal->keep != NULL)
        rename_slots(head, removal, scratch, moves, unpruned);
    else
        rename_moved(head, removal, scratch, moves);
    head->slots = head->first_new = count;
}

/* No two heads' memory is near each other. */
static void expect_mark(const struct kv_cache *cache, const struct kv_head *head, const struct kv_removal *removal) {
    if (!kv_removal_compacts(removal) && removal->evict != KV_NO_SLOT)
        kv_head_expect_mark(cache, head, removal->evict, removal->rank);
}

static void remove_all(
    struct kv_sequence *sequence, const struct kv_removal *removals, struct removal_scratch *scratch) {
    struct kv_cache *cache = sequence->cache;
    for (uint32_t i = 0; i < cache->pages.heads; i++) {
        struct kv_head *head = &sequence->heads[i];
        const struct kv_removal *removal = &removals[i];
        if (i + MARKS_AHEAD < cache->pages.heads)
            expect_mark(cache, head + MARKS_AHEAD, removal + MARKS_AHEAD);
        if (!goes(head, removal))
            continue;
        if (kv_removal_compacts(removal)) {
            compact_head(cache, head, removal, scratch, &scratch->fresh[i]);
        } else {
            adopt_arrays(head, &scratch->fresh[i], head->slots);
            kv_head_mark(cache, head, removal->evict, removal->rank);
        }
    }
}

int kv_sequence_prune(struct kv_sequence *sequence, const struct kv_removal *removals, struct error *error) {
    return kv_sequence_prune_after(sequence, removals, NULL, NULL, error);
}

int kv_sequence_prune_after(struct kv_sequence *sequence, const struct kv_removal *removals, void (*before)(void *),
    void *context, struct error *error) {
    struct removal_scratch scratch = {0};
    uint32_t heads = sequence->cache->pages.heads;
    bool any = false;
    for (uint32_t i = 0; i < heads; i++) {
        int code = check_removal(&sequence->heads[i], &removals[i], error);
        if (code != 0)
            return code;
        any |= goes(&sequence->heads[i], &removals[i]);
    }
    if (!any)
        return 0;
    int code = scratch_create(&scratch, sequence, removals);
    if (code != 0) {
        error_set(error, code, "no memory to prune a sequence of %u tokens", sequence->length);
        goto done;
    }
    code = find_pages(sequence, removals, &scratch, error);
    if (code != 0)
        goto done;
    sequence->pruned = true;
    visit_all(sequence, removals, &scratch, own, NULL);
    kv_cache_flush_batch(sequence->cache);
    if (before != NULL)
        before(context);
    remove_all(sequence, removals, &scratch);
done:
    scratch_free(&scratch, heads);
    return code;
}
