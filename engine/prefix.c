/* SPDX-License-Identifier: Apache-2.0
 *
 * Shared prefixes of sequences: what of a prompt is reused, and where snapshots of statistics are left for others.
 *
 * A policy that sums over all queries can only go on from a prefix whose statistics are known (snapshot.h). Later
 * queries add to all slots, so that a snapshot of P tokens holds P slots, whatever there is before it: h2o's 8 bytes a
 * slot and head beside 4 d bytes of keys and values (256 in f16 at d = 64), distillcache's 18. Snapshots of one prompt
 * therefore lie the further apart the longer they are. They are left
 *   - on a grid from the start of the text, the same for all texts, so that a shared beginning of unknown length is
 *     found again at once at least in part: a point comes after as many tokens as have GRID_PART times the bytes that
 *     its predecessor's snapshot takes. Those before the last one so take at most a GRID_PART-th of what the prefix
 *     itself does, and the last one what its slots do: 9 % together for h2o at d = 64, 13 % for distillcache;
 *   - where the prompt parts from one that was published before: that is the end of what both share, a system prompt
 *     or a document, and the third request reuses all of it;
 *   - at the last page boundary of the prompt that may be reused: a conversation that goes on, the same prompt again.
 * Each one ends a chunk of the prompt's computation, which costs one more pass over the weights: none is left within
 * SNAPSHOT_APART tokens after another. None is larger than the pages of its prefix (moments of queries do not grow with
 * it), and all together have a part of the pool (KV_ATTACHED_PART), of which the least recently used go first.
 */
#include "engine/engine_internal.h"
#include "engine/snapshot.h"

#include <string.h>

enum {
    SNAPSHOT_APART = 128, /* tokens */
    GRID_STEP = 256,      /* tokens; points are multiples of it */
    GRID_PART = 16,
};

/* ---- what is reused ---- */

struct wanted_snapshot {
    struct statistics_shape shape;
    uint32_t needs;
};

static bool accepts(const struct kv_attachment *attachment, const void *context) {
    const struct wanted_snapshot *wanted = context;
    return snapshot_serves((const struct snapshot *)attachment, &wanted->shape, wanted->needs);
}

static struct wanted_snapshot wanted_by(const struct engine *engine, const struct policy_settings *settings) {
    if (settings == NULL || settings->policy == NULL)
        return (struct wanted_snapshot){.needs = 0};
    return (struct wanted_snapshot){engine_statistics_shape(engine, settings), policy_prefix_needs(settings)};
}

uint32_t engine_match_prefix(const struct engine *engine, const struct policy_settings *settings, const int32_t *tokens,
    uint32_t limit, uint32_t *unheld_pages) {
    struct wanted_snapshot snapshot = wanted_by(engine, settings);
    struct kv_attachment_wanted wanted = {accepts, &snapshot};
    return kv_cache_match_prefix(
        engine->cache, tokens, limit, limit, snapshot.needs != 0 ? &wanted : NULL, unheld_pages);
}

/* Statistics get their memory first: it may take the place of snapshots. */
static uint32_t adopt_with_snapshot(
    struct sequence *sequence, const int32_t *tokens, uint32_t limit, const struct wanted_snapshot *snapshot) {
    struct kv_attachment_wanted wanted = {accepts, snapshot};
    struct kv_attachment *found = NULL;
    uint32_t unheld, matched;
    matched = kv_cache_match_prefix(sequence->engine->cache, tokens, limit, limit, &wanted, &unheld);
    if (matched == 0 || sequence_reserve_statistics(sequence, matched, NULL) != 0)
        return 0;
    uint32_t reused = kv_sequence_adopt_prefix(sequence->kv, tokens, limit, limit, &wanted, &found);
    if (reused == 0 || snapshot_restore((const struct snapshot *)found, sequence->eviction.statistics) == 0)
        return reused;
    kv_sequence_clear(sequence->kv);
    return 0;
}

/* Leading tokens of a prompt [count] that may be reused. */
static uint32_t reusable_tokens(const struct sequence *sequence, uint32_t count) {
    const struct eviction *eviction = &sequence->eviction;
    if (eviction->recorded != 0) /* from the first token on */
        return 0;
    if (!eviction->evicts)
        return count > 0 ? count - 1 : 0;
    uint32_t prompt = eviction->prompt_tokens < count ? eviction->prompt_tokens : count;
    return policy_reusable_tokens(&eviction->settings, prompt);
}

uint32_t sequence_reuse_prefix(struct sequence *sequence, const int32_t *tokens, uint32_t count) {
    struct eviction *eviction = &sequence->eviction;
    struct kv_cache *cache = sequence->engine->cache;
    struct wanted_snapshot snapshot = wanted_by(sequence->engine, &eviction->settings);
    uint32_t limit = reusable_tokens(sequence, count), reused, unheld;
    if (limit == 0 || sequence_length(sequence) > 0 || sequence_reserve_tokens(sequence, count) != 0)
        return 0;
    if (snapshot.needs != 0)
        reused = adopt_with_snapshot(sequence, tokens, limit, &snapshot);
    else
        reused = kv_sequence_adopt_prefix(sequence->kv, tokens, limit, limit, NULL, NULL);
    memcpy(sequence->tokens, tokens, reused * sizeof *tokens);
    kv_sequence_slide(sequence->kv);
    eviction->snapshots = snapshot.needs != 0 && kv_cache_attached_most(cache) > 0;
    eviction->snapshot_at = reused;
    if (eviction->snapshots)
        eviction->parts_at = kv_cache_match_prefix(cache, tokens, limit, limit, NULL, &unheld);
    return reused;
}

/* ---- what is left ---- */

static size_t bytes_of_snapshot(const struct sequence *sequence, uint32_t tokens) {
    const struct eviction *eviction = &sequence->eviction;
    return snapshot_bytes(&eviction->statistics->shape, policy_prefix_needs(&eviction->settings), tokens);
}

static size_t bytes_of_pages(const struct sequence *sequence, uint32_t tokens) {
    const struct engine *engine = sequence->engine;
    return (size_t)kv_pages_for(tokens) * engine_heads(engine) * kv_cache_pool(engine->cache)->page_bytes;
}

static uint32_t whole_steps(uint64_t tokens) {
    uint64_t steps = (tokens + GRID_STEP - 1) / GRID_STEP;
    return steps < UINT32_MAX / 2 / GRID_STEP ? (uint32_t)steps * GRID_STEP : UINT32_MAX / 2;
}

/* The first point of the grid from `least` on. */
static uint32_t point_of_grid(const struct sequence *sequence, uint32_t least) {
    size_t bytes_of_block = bytes_of_pages(sequence, KV_PAGE_SLOTS);
    uint64_t point = 0;
    do {
        uint64_t bytes = bytes_of_snapshot(sequence, (uint32_t)point);
        uint32_t step = whole_steps(bytes * GRID_PART * KV_PAGE_SLOTS / bytes_of_block);
        point += step > 0 ? step : GRID_STEP;
    } while (point < least);
    return point < UINT32_MAX ? (uint32_t)point : UINT32_MAX;
}

static bool is_worth_it(const struct sequence *sequence, uint32_t point) {
    size_t bytes = bytes_of_snapshot(sequence, point);
    return bytes <= bytes_of_pages(sequence, point) && bytes <= kv_cache_attached_most(sequence->engine->cache);
}

/* The shortest length above `from` at which a snapshot is wanted; UINT32_MAX: none. */
static uint32_t point_after(const struct sequence *sequence, uint32_t from) {
    const struct eviction *eviction = &sequence->eviction;
    if (!eviction->snapshots || eviction->handled > 0 || from >= eviction->prompt_tokens)
        return UINT32_MAX;
    uint32_t end = reusable_tokens(sequence, eviction->prompt_tokens) / KV_PAGE_SLOTS * KV_PAGE_SLOTS;
    uint32_t least = from + 1, apart = eviction->snapshot_at + SNAPSHOT_APART, next = UINT32_MAX;
    least = least > apart ? least : apart;
    const uint32_t points[] = {point_of_grid(sequence, least), eviction->parts_at, end};
    for (uint32_t i = 0; i < sizeof points / sizeof points[0]; i++)
        if (points[i] >= least && points[i] <= end && points[i] < next && is_worth_it(sequence, points[i]))
            next = points[i];
    return next;
}

uint32_t sequence_snapshot_room(const struct sequence *sequence) {
    uint32_t length = sequence_length(sequence), next = point_after(sequence, length);
    return next == UINT32_MAX ? UINT32_MAX : next - length;
}

void sequence_leave_snapshot(struct sequence *sequence) {
    struct eviction *eviction = &sequence->eviction;
    uint32_t length = sequence_length(sequence);
    if (!eviction->snapshots || point_after(sequence, length - 1) != length)
        return;
    struct wanted_snapshot snapshot = wanted_by(sequence->engine, &eviction->settings);
    struct kv_attachment_wanted wanted = {accepts, &snapshot};
    eviction->snapshot_at = length;
    if (kv_sequence_has_attached(sequence->kv, &wanted) ||
        !kv_sequence_can_attach(sequence->kv, bytes_of_snapshot(sequence, length)))
        return;
    struct snapshot *left = snapshot_create(eviction->statistics, snapshot.needs, length);
    if (left != NULL && !kv_sequence_attach(sequence->kv, &left->attachment))
        left->attachment.release(&left->attachment);
}

size_t engine_snapshot_bytes(const struct engine *engine) {
    return kv_cache_attached(engine->cache);
}
