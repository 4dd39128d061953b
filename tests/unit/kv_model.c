/* SPDX-License-Identifier: Apache-2.0 */
#include "tests/unit/kv_model.h"
#include "tests/unit/failing_malloc.h"

#include <setjmp.h>
#include <stdarg.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

char kv_model_place[128] = "";

void kv_model_require(bool holds, const char *text, const char *file, int line) {
    if (holds)
        return;
    print_error("%s: required: %s\n", kv_model_place, text);
    _fail(file, line);
}

static uint64_t mix(uint64_t a, uint64_t b) {
    uint64_t x = (a ^ (b + 0x632be59bd9b4e019u)) * 0xd6e8feb86659fd93u;
    x = (x ^ (x >> 32)) * 0xd6e8feb86659fd93u;
    return x ^ (x >> 32);
}

/* A key (odd 0) or value (odd 1), exact in float32. */
static float number(const struct model_slot *slot, uint32_t head, uint32_t channel, uint32_t odd) {
    return (float)(mix(mix(slot->content, slot->position), (head * 64 + channel) * 2 + odd) & 0xffffff);
}

struct kv_cache *kv_model_cache(struct plain_backend *plain, uint32_t pages, bool prefix_sharing) {
    struct kv_cache_options options = {
        .layout = {MODEL_LAYERS, MODEL_KV_HEADS, MODEL_HEAD_DIM, KV_F32},
        .prefix_sharing = prefix_sharing,
        .poison_free = true,
    };
    plain_backend_open_chosen(plain);
    options.bytes = pages * kv_page_bytes(&options.layout);
    struct error error;
    struct kv_cache *cache = kv_cache_create(&plain->backend, &options, &error);
    REQUIRE(cache != NULL);
    REQUIRE(kv_cache_pages_total(cache) == pages && kv_cache_pages_free(cache) == pages);
    return cache;
}

static struct twin *new_twin(struct kv_sequence *real) {
    failing_malloc_disarm();
    if (real == NULL)
        return NULL;
    struct twin *twin = calloc(1, sizeof *twin);
    twin->real = real;
    for (uint32_t h = 0; h < MODEL_HEADS; h++)
        twin->heads[h].marked = KV_NO_SLOT;
    return twin;
}

struct twin *twin_create(struct kv_cache *cache) {
    return new_twin(kv_sequence_create(cache));
}

static void *copy_of(const void *from, size_t bytes) {
    void *to = malloc(bytes + 1);
    if (bytes > 0)
        memcpy(to, from, bytes);
    return to;
}

struct twin *twin_fork(const struct twin *twin) {
    struct twin *fork = new_twin(kv_sequence_fork(twin->real));
    if (fork == NULL)
        return NULL;
    fork->length = twin->length;
    fork->content = twin->content;
    fork->pruned = twin->pruned;
    fork->tokens = copy_of(twin->tokens, twin->length * sizeof *twin->tokens);
    for (uint32_t h = 0; h < MODEL_HEADS; h++) {
        fork->heads[h] = twin->heads[h];
        fork->heads[h].slots = copy_of(twin->heads[h].slots, twin->heads[h].count * sizeof(struct model_slot));
    }
    return fork;
}

void twin_free(struct twin *twin) {
    kv_sequence_free(twin->real);
    for (uint32_t h = 0; h < MODEL_HEADS; h++)
        free(twin->heads[h].slots);
    free(twin->tokens);
    free(twin->saved);
    free(twin);
}

static void write_slot(
    float *page, const struct kv_layout *layout, uint32_t head, uint32_t place, const struct model_slot *slot) {
    for (uint32_t c = 0; c < MODEL_HEAD_DIM; c++) {
        *plain_key(page, layout, place, c) = number(slot, head, c, 0);
        *plain_value(page, layout, place, c) = number(slot, head, c, 1);
    }
    *plain_position(page, layout, place) = (int32_t)slot->position;
}

/* Slots from `first` on, of a head whose number is h, page by page. */
static void write_slots(const struct kv_cache *cache, const struct kv_head_view *view, uint32_t h,
    const struct model_slot *slots, uint32_t first, uint32_t count) {
    const struct kv_pool *pool = kv_cache_pool(cache);
    for (uint32_t at = first; at < first + count;) {
        uint32_t number = view->pages[at / KV_PAGE_SLOTS];
        float *page = plain_page(cache->pages.backend, pool, number);
        do {
            write_slot(page, &pool->layout, h, at % KV_PAGE_SLOTS, &slots[at]);
            at++;
        } while (at % KV_PAGE_SLOTS != 0 && at < first + count);
        plain_page_write(cache->pages.backend, pool, number, page);
        free(page);
    }
}

/* What rope_and_append does in the engine, together with the model's side. */
static void add_to_head(struct twin *twin, uint32_t h, const uint64_t *contents, uint32_t count) {
    struct model_head *head = &twin->heads[h];
    struct kv_head_view views[MODEL_KV_HEADS];
    kv_sequence_views(twin->real, h / MODEL_KV_HEADS, views);
    const struct kv_head_view *view = &views[h % MODEL_KV_HEADS];
    uint32_t first = head->count;
    if (count == 1 && head->marked != KV_NO_SLOT) {
        first = head->marked;
        head->marked = KV_NO_SLOT;
    } else {
        head->count += count;
        head->slots = realloc(head->slots, head->count * sizeof *head->slots);
    }
    REQUIRE(view->first_slot == first && view->slots == head->count);
    for (uint32_t i = 0; i < count; i++)
        head->slots[first + i] = (struct model_slot){twin->length + i, contents[i]};
    write_slots(twin->real->cache, view, h, head->slots, first, count);
}

static uint64_t next_content(const struct twin *twin, uint64_t before, int32_t token) {
    static uint64_t unique = 0; /* what a pruned sequence computes is nobody else's */
    return mix(mix(before, (uint64_t)token), twin->pruned ? ++unique : 0);
}

static void learn_tokens(struct twin *twin, const int32_t *tokens, uint32_t count) {
    twin->tokens = realloc(twin->tokens, (twin->length + count + 1) * sizeof *tokens);
    if (count > 0)
        memcpy(twin->tokens + twin->length, tokens, count * sizeof *tokens);
}

int twin_append(struct twin *twin, const int32_t *tokens, uint32_t count) {
    const struct kv_cache *cache = twin->real->cache;
    uint32_t needed = kv_sequence_pages_needed(twin->real, count), available = kv_cache_pages_free(cache);
    int code = kv_sequence_append(twin->real, count, NULL);
    failing_malloc_disarm();
    REQUIRE((code == ERROR_PAGES) == (needed > available));
    REQUIRE(kv_cache_pages_free(cache) == (code == 0 ? available - needed : available));
    if (code != 0)
        return code;
    uint64_t *contents = malloc(count * sizeof *contents);
    for (uint32_t i = 0; i < count; i++)
        contents[i] = twin->content = next_content(twin, twin->content, tokens[i]);
    for (uint32_t h = 0; h < MODEL_HEADS; h++)
        add_to_head(twin, h, contents, count);
    free(contents);
    learn_tokens(twin, tokens, count);
    twin->length += count;
    return 0;
}

/* The model's side of a prefix that the real side has. */
static void learn_prefix(struct twin *twin, const int32_t *tokens, uint32_t adopted) {
    learn_tokens(twin, tokens, adopted);
    for (uint32_t h = 0; h < MODEL_HEADS; h++) {
        twin->heads[h].slots = calloc(adopted + 1, sizeof(struct model_slot));
        twin->heads[h].count = adopted;
    }
    for (uint32_t i = 0; i < adopted; i++) {
        twin->content = next_content(twin, twin->content, tokens[i]);
        for (uint32_t h = 0; h < MODEL_HEADS; h++)
            twin->heads[h].slots[i] = (struct model_slot){i, twin->content};
    }
    twin->length = adopted;
}

uint32_t twin_adopt(struct twin *twin, const int32_t *tokens, uint32_t count, uint32_t limit) {
    uint32_t adopted = kv_sequence_adopt_prefix(twin->real, tokens, count, limit, NULL, NULL);
    failing_malloc_disarm();
    REQUIRE(adopted <= count && adopted <= limit && adopted % KV_PAGE_SLOTS == 0);
    learn_prefix(twin, tokens, adopted);
    return adopted;
}

void twin_clear(struct twin *twin) {
    REQUIRE(!twin->pruned);
    kv_sequence_clear(twin->real);
    for (uint32_t h = 0; h < MODEL_HEADS; h++)
        twin->heads[h].count = 0;
    twin->length = 0;
    twin->content = 0;
}

/* ---- notes ---- */

struct note *kv_model_notes;

static void release_note(struct kv_attachment *attachment) {
    struct note *note = (struct note *)attachment, **link = &kv_model_notes;
    while (*link != note) {
        REQUIRE(*link != NULL); /* it lives */
        link = &(*link)->next;
    }
    *link = note->next;
    free(note);
}

static bool is_of_kind(const struct kv_attachment *attachment, const void *context) {
    return ((const struct note *)attachment)->kind == *(const uint32_t *)context;
}

bool twin_leave_note(struct twin *twin, uint32_t kind, size_t bytes) {
    const struct kv_cache *cache = twin->real->cache;
    struct kv_attachment_wanted wanted = {is_of_kind, &kind};
    bool at_end = !twin->pruned && twin->length > 0 && twin->length % KV_PAGE_SLOTS == 0;
    bool can = kv_sequence_can_attach(twin->real, bytes);
    uint32_t available = kv_cache_pages_free(cache);
    REQUIRE(!can || at_end);
    if (kv_sequence_has_attached(twin->real, &wanted)) {
        REQUIRE(at_end);
        return false;
    }
    struct note *note = calloc(1, sizeof *note);
    *note = (struct note){{.bytes = bytes, .release = release_note}, kv_model_notes, twin->content, twin->length, kind};
    kv_model_notes = note;
    bool left = kv_sequence_attach(twin->real, &note->attachment);
    REQUIRE(left == can && kv_cache_pages_free(cache) == available);
    if (!left)
        release_note(&note->attachment);
    REQUIRE(left == kv_sequence_has_attached(twin->real, &wanted));
    return left;
}

/* The content of the last of a text's tokens. */
static uint64_t content_of(const int32_t *tokens, uint32_t count) {
    struct twin unpruned = {0};
    uint64_t content = 0;
    for (uint32_t i = 0; i < count; i++)
        content = next_content(&unpruned, content, tokens[i]);
    return content;
}

uint32_t kv_model_longest_noted(
    struct kv_cache *cache, const int32_t *tokens, uint32_t count, uint32_t limit, uint32_t kind) {
    uint32_t longest = 0, held = kv_cache_pages_total(cache) - cache->pages.free_count[0] - cache->pages.idle_count[0];
    for (const struct note *note = kv_model_notes; note != NULL; note = note->next) {
        uint32_t length = note->length, unheld;
        if (note->kind != kind || length <= longest || length > count || length > limit ||
            note->content != content_of(tokens, length))
            continue;
        if (kv_cache_match_prefix(cache, tokens, length, length, NULL, &unheld) < length)
            continue;
        size_t beside = kv_cache_pages_of(cache, kv_cache_charged(cache) + note->attachment.bytes);
        if (held + unheld + beside <= kv_cache_pages_total(cache))
            longest = length;
    }
    return longest;
}

uint32_t twin_adopt_noted(struct twin *twin, const int32_t *tokens, uint32_t count, uint32_t limit, uint32_t kind) {
    struct kv_attachment_wanted wanted = {is_of_kind, &kind};
    struct kv_attachment *found = NULL;
    uint32_t adopted = kv_sequence_adopt_prefix(twin->real, tokens, count, limit, &wanted, &found);
    failing_malloc_disarm();
    REQUIRE(adopted <= count && adopted <= limit && adopted % KV_PAGE_SLOTS == 0);
    learn_prefix(twin, tokens, adopted);
    const struct note *note = kv_model_notes;
    while (note != NULL && &note->attachment != found)
        note = note->next;
    REQUIRE((adopted > 0) == (found != NULL) && (note != NULL) == (found != NULL)); /* it still lives */
    REQUIRE(note == NULL || (note->length == adopted && note->content == twin->content && note->kind == kind));
    return adopted;
}

int twin_keep(struct twin *twin, uint32_t h, const uint32_t *slots, uint32_t count) {
    struct model_head *head = &twin->heads[h];
    uint32_t available = kv_cache_pages_free(twin->real->cache);
    int code = kv_sequence_keep(twin->real, h / MODEL_KV_HEADS, h % MODEL_KV_HEADS, slots, count, NULL);
    if (code != 0)
        REQUIRE(kv_cache_pages_free(twin->real->cache) == available);
    if (code != 0 || count == head->count)
        return code;
    uint32_t marked = KV_NO_SLOT;
    for (uint32_t i = 0; i < count; i++) {
        if (slots[i] == head->marked)
            marked = i;
        head->slots[i] = head->slots[slots[i]];
    }
    head->marked = marked;
    head->count = count;
    twin->pruned = true;
    return 0;
}

int twin_evict(struct twin *twin, uint32_t h, uint32_t slot) {
    struct model_head *head = &twin->heads[h];
    uint32_t available = kv_cache_pages_free(twin->real->cache);
    int code = kv_sequence_evict(twin->real, h / MODEL_KV_HEADS, h % MODEL_KV_HEADS, slot, NULL);
    if (code != 0) {
        REQUIRE(kv_cache_pages_free(twin->real->cache) == available);
        return code;
    }
    REQUIRE(head->marked == KV_NO_SLOT && slot < head->count);
    head->marked = slot;
    head->slots[slot].position = KV_NO_POSITION;
    twin->pruned = true;
    return 0;
}

/* The slots of a head after a prune: those below count that stay are where they were, the others fill the gaps. */
static void prune_head(struct model_head *head, const uint32_t *keep, uint32_t count) {
    struct model_slot *slots = malloc((count + 1) * sizeof *slots);
    uint32_t marked = KV_NO_SLOT, next = 0;
    bool *stays = calloc(head->count + 1, sizeof *stays);
    for (uint32_t i = 0; i < count; i++)
        stays[keep[i]] = true;
    while (next < count && keep[next] < count)
        next++;
    for (uint32_t place = 0; place < count; place++) {
        uint32_t from = stays[place] ? place : keep[next++];
        slots[place] = head->slots[from];
        if (from == head->marked)
            marked = place;
    }
    free(stays);
    free(head->slots);
    head->slots = slots;
    head->count = count;
    head->marked = marked;
}

/* The slots that stay: keep, or what drop leaves out. */
static const uint32_t *kept_slots(const struct kv_removal *removal, uint32_t slots) {
    static uint32_t kept[4096];
    uint32_t count = 0, dropped = 0;
    if (removal->drop == NULL)
        return removal->keep;
    REQUIRE(slots <= sizeof kept / sizeof kept[0]);
    for (uint32_t slot = 0; slot < slots; slot++) {
        if (dropped < slots - removal->count && removal->drop[dropped] == slot)
            dropped++;
        else
            kept[count++] = slot;
    }
    return kept;
}

int twin_prune(struct twin *twin, const struct kv_removal *removals) {
    uint32_t available = kv_cache_pages_free(twin->real->cache);
    int code = kv_sequence_prune(twin->real, removals, NULL);
    failing_malloc_disarm();
    if (code != 0) {
        REQUIRE(kv_cache_pages_free(twin->real->cache) == available);
        return code;
    }
    for (uint32_t h = 0; h < MODEL_HEADS; h++) {
        struct model_head *head = &twin->heads[h];
        const struct kv_removal *removal = &removals[h];
        if (kv_removal_compacts(removal) && removal->count < head->count) {
            prune_head(head, kept_slots(removal, head->count), removal->count);
            twin->pruned = true;
        } else if (!kv_removal_compacts(removal) && removal->evict != KV_NO_SLOT) {
            head->marked = removal->evict;
            head->slots[removal->evict].position = KV_NO_POSITION;
            twin->pruned = true;
        }
    }
    return 0;
}

int twin_charge(struct twin *twin, size_t bytes) {
    const struct kv_cache *cache = twin->real->cache;
    uint32_t available = kv_cache_pages_free(cache);
    int code = kv_sequence_charge(twin->real, bytes, NULL);
    if (code == 0)
        twin->charged = bytes;
    else
        REQUIRE(code == ERROR_PAGES && bytes > twin->charged && kv_cache_pages_free(cache) == available);
    return code;
}

void twin_save(struct twin *twin) {
    size_t page_bytes = kv_cache_pool(twin->real->cache)->page_bytes;
    uint64_t pages = kv_sequence_pages_saved(twin->real);
    REQUIRE(pages == kv_sequence_pages_held(twin->real));
    twin->saved = malloc(pages * page_bytes + 1);
    kv_sequence_save(twin->real, twin->saved);
    REQUIRE(kv_sequence_pages_held(twin->real) == 0 && kv_sequence_pages_saved(twin->real) == pages);
}

int twin_restore(struct twin *twin) {
    const struct kv_cache *cache = twin->real->cache;
    uint32_t available = kv_cache_pages_free(cache);
    uint64_t needed = kv_sequence_pages_saved(twin->real);
    int code = kv_sequence_restore(twin->real, twin->saved, NULL);
    REQUIRE((code == ERROR_PAGES) == (needed > available));
    REQUIRE(kv_cache_pages_free(cache) == (code == 0 ? available - needed : available));
    if (code != 0)
        return code;
    free(twin->saved);
    twin->saved = NULL;
    return 0;
}

void twin_publish(struct twin *twin) {
    uint32_t available = kv_cache_pages_free(twin->real->cache);
    kv_sequence_publish(twin->real, twin->tokens);
    REQUIRE(kv_cache_pages_free(twin->real->cache) == available);
}

bool twin_send_tables(struct twin *const *twins, uint32_t count) {
    bool complete = true;
    for (uint32_t i = 0; i < count; i++)
        kv_sequence_gather_tables(twins[i]->real);
    for (uint32_t i = 0; i < count; i++)
        kv_cache_send_tables(twins[i]->real->cache);
    for (uint32_t i = 0; i < count; i++)
        for (uint32_t h = 0; h < MODEL_HEADS; h++) {
            struct kv_head_view view = kv_sequence_view(twins[i]->real, h / MODEL_KV_HEADS, h % MODEL_KV_HEADS);
            complete &= view.device_pages != NULL || twins[i]->saved != NULL;
        }
    return complete;
}

/* The device's copy of a table is its head's, where the view names one. */
static void compare_table(struct backend *backend, const struct kv_head_view *view, uint32_t pages) {
    if (view->device_pages == NULL || pages == 0)
        return;
    uint32_t *copy = malloc(pages * sizeof *copy);
    backend->operations->download(backend, copy, view->device_pages, pages * sizeof *copy);
    for (uint32_t page = 0; page < pages; page++)
        REQUIRE(copy[page] == view->pages[page]);
    free(copy);
}

static void compare_page_slot(
    float *page, const struct kv_layout *layout, const struct model_head *head, uint32_t h, uint32_t at) {
    uint32_t place = at % KV_PAGE_SLOTS;
    if (at >= head->count || at == head->marked) {
        REQUIRE(*plain_position(page, layout, place) == KV_NO_POSITION);
        return;
    }
    const struct model_slot *slot = &head->slots[at];
    REQUIRE(*plain_position(page, layout, place) == (int32_t)slot->position);
    for (uint32_t c = 0; c < MODEL_HEAD_DIM; c++) {
        REQUIRE(*plain_key(page, layout, place, c) == number(slot, h, c, 0));
        REQUIRE(*plain_value(page, layout, place, c) == number(slot, h, c, 1));
    }
}

/* order must name every slot once, by ascending position. */
static void compare_order(const struct model_head *head, const uint32_t *order) {
    for (uint32_t i = 0; i < head->count; i++) {
        REQUIRE(order[i] < head->count);
        if (i > 0)
            REQUIRE(head->slots[order[i - 1]].position < head->slots[order[i]].position);
    }
}

void twin_compare_head(const struct twin *twin, uint32_t h) {
    const struct model_head *head = &twin->heads[h];
    uint32_t layer = h / MODEL_KV_HEADS, kv_head = h % MODEL_KV_HEADS;
    REQUIRE(kv_sequence_length(twin->real) == twin->length);
    REQUIRE(kv_sequence_slots(twin->real, layer, kv_head) == head->count);
    struct kv_head_view views[MODEL_KV_HEADS];
    kv_sequence_views(twin->real, layer, views);
    REQUIRE(views[kv_head].slots == head->count);

    uint32_t *numbers = malloc((head->count + 1) * sizeof *numbers);
    kv_sequence_positions(twin->real, layer, kv_head, numbers);
    for (uint32_t i = 0; i < head->count; i++)
        REQUIRE(numbers[i] == head->slots[i].position);
    kv_sequence_order(twin->real, layer, kv_head, numbers);
    compare_order(head, numbers);
    free(numbers);
    if (twin->saved != NULL)
        return;

    uint32_t end = (head->count + KV_PAGE_SLOTS - 1) / KV_PAGE_SLOTS * KV_PAGE_SLOTS;
    compare_table(twin->real->cache->pages.backend, &views[kv_head], end / KV_PAGE_SLOTS);
    const struct kv_pool *pool = kv_cache_pool(twin->real->cache);
    for (uint32_t first = 0; first < end; first += KV_PAGE_SLOTS) {
        float *page = plain_page(twin->real->cache->pages.backend, pool, views[kv_head].pages[first / KV_PAGE_SLOTS]);
        for (uint32_t at = first; at < first + KV_PAGE_SLOTS; at++)
            compare_page_slot(page, &pool->layout, head, h, at);
        free(page);
    }
}

void twin_compare(const struct twin *twin) {
    uint32_t pages = 0, slots = 0;
    for (uint32_t h = 0; h < MODEL_HEADS; h++) {
        twin_compare_head(twin, h);
        slots += twin->heads[h].count;
        pages += (twin->heads[h].count + KV_PAGE_SLOTS - 1) / KV_PAGE_SLOTS;
    }
    REQUIRE(kv_sequence_pages_held(twin->real) == (twin->saved != NULL ? 0 : pages));
    REQUIRE(kv_sequence_slots_held(twin->real) == slots);
}

/* Distinct pages that views of twins show, counted without the cache's own counters. */
static uint32_t count_held(const struct kv_cache *cache, struct twin *const *twins, uint32_t count) {
    bool *seen = calloc(kv_cache_pages_total(cache), sizeof *seen);
    uint32_t held = 0;
    for (uint32_t t = 0; t < count; t++)
        for (uint32_t h = 0; h < MODEL_HEADS && twins[t]->saved == NULL; h++) {
            struct kv_head_view views[MODEL_KV_HEADS];
            kv_sequence_views(twins[t]->real, h / MODEL_KV_HEADS, views);
            const struct kv_head_view *view = &views[h % MODEL_KV_HEADS];
            for (uint32_t i = 0; i * KV_PAGE_SLOTS < view->slots; i++) {
                held += !seen[view->pages[i]];
                seen[view->pages[i]] = true;
            }
        }
    free(seen);
    return held;
}

void kv_model_check(struct kv_cache *cache, struct twin *const *twins, uint32_t count) {
    size_t charged = 0, page_bytes = kv_cache_pool(cache)->page_bytes;
    for (uint32_t t = 0; t < count; t++)
        charged += twins[t]->charged;
    size_t noted = 0;
    for (const struct note *note = kv_model_notes; note != NULL; note = note->next)
        noted += note->attachment.bytes;
    REQUIRE(kv_cache_charged(cache) == charged);
    REQUIRE(kv_cache_attached(cache) == noted && noted <= kv_cache_attached_most(cache));
    REQUIRE(count_held(cache, twins, count) + (charged + noted + page_bytes - 1) / page_bytes <=
            kv_cache_pages_total(cache));
    REQUIRE(kv_cache_check(cache));
    REQUIRE(kv_cache_pages_free(cache) + count_held(cache, twins, count) + (charged + page_bytes - 1) / page_bytes ==
            kv_cache_pages_total(cache));
    for (uint32_t i = 0; cache->pages.poison_free && i < cache->pages.free_count[0]; i++)
        REQUIRE(plain_is_poisoned(cache->pages.backend, kv_cache_pool(cache), cache->pages.free_list[i]));
}
