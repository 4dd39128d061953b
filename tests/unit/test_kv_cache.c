/* SPDX-License-Identifier: Apache-2.0
 *
 * The KV cache, one property a test. Random steps are in test_kv_random.c.
 */
#include "tests/unit/failing_malloc.h"
#include "tests/unit/kv_model.h"

#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

/* Tokens of text number `text`: different in every place and from other texts. */
static int32_t *make_tokens(uint32_t count, int32_t text) {
    int32_t *tokens = malloc(count * sizeof *tokens);
    for (uint32_t i = 0; i < count; i++)
        tokens[i] = text * 100000 + (int32_t)i;
    return tokens;
}

static struct twin *computed(struct kv_cache *cache, const int32_t *tokens, uint32_t count) {
    struct twin *twin = twin_create(cache);
    assert_int_equal(twin_append(twin, tokens, count), 0);
    twin_publish(twin);
    return twin;
}

static void test_page_bytes(void **state) {
    (void)state;
    assert_int_equal(
        kv_page_bytes(&(struct kv_layout){.layers = 30, .kv_heads = 3, .head_dim = 64, .format = KV_F16}), 4096 + 64);
    assert_int_equal(
        kv_page_bytes(&(struct kv_layout){.layers = 30, .kv_heads = 3, .head_dim = 64, .format = KV_BF16}), 4096 + 64);
    assert_int_equal(
        kv_page_bytes(&(struct kv_layout){.layers = 1, .kv_heads = 1, .head_dim = 64, .format = KV_F32}), 8192 + 64);
    assert_int_equal(kv_format_bytes(KV_F16), 2);
    assert_int_equal(kv_format_bytes(KV_F32), 4);
}

static void test_create_refuses(void **state) {
    (void)state;
    struct plain_backend plain;
    plain_backend_open(&plain);
    struct kv_cache_options options = {.layout = {2, 2, 4, KV_F32}, .prefix_sharing = true};
    struct error error;
    options.bytes = 4 * kv_page_bytes(&options.layout) - 1;
    assert_null(kv_cache_create(&plain.backend, &options, &error));
    assert_int_equal(error.code, ERROR_INVALID);
    options.bytes++;
    struct kv_cache *cache = kv_cache_create(&plain.backend, &options, &error);
    assert_non_null(cache);
    assert_int_equal(kv_cache_tokens_max(cache), 16);
    kv_cache_free(cache);
    plain.fail_allocate = true;
    assert_null(kv_cache_create(&plain.backend, &options, &error));
    assert_int_equal(error.code, ERROR_MEMORY);
    plain.fail_allocate = false;
    options.layout.kv_heads = 0;
    assert_null(kv_cache_create(&plain.backend, &options, &error));
    assert_int_equal(error.code, ERROR_INVALID);
}

static void test_create_without_memory(void **state) {
    (void)state;
    struct plain_backend plain;
    plain_backend_open(&plain);
    struct kv_cache_options options = {.layout = {2, 2, 4, KV_F32}, .bytes = 1 << 20, .prefix_sharing = true};
    for (uint32_t successes = 0;; successes++) {
        struct error error = {0};
        failing_malloc_arm(successes);
        struct kv_cache *cache = kv_cache_create(&plain.backend, &options, &error);
        bool injected = failing_malloc_disarm();
        assert_int_equal(cache == NULL, injected);
        kv_cache_free(cache);
        if (!injected)
            break;
        assert_int_equal(error.code, ERROR_MEMORY);
    }
}

static void test_append_is_atomic(void **state) {
    (void)state;
    struct plain_backend plain;
    struct kv_cache *cache = kv_model_cache(&plain, 4 * 3, false);
    int32_t *tokens = make_tokens(64, 1);
    struct twin *twin = computed(cache, tokens, 30);
    struct error error = {0};
    assert_int_equal(kv_cache_tokens_max(cache), 48);
    assert_int_equal(kv_sequence_pages_needed(twin->real, 18), 4);
    assert_int_equal(kv_sequence_pages_needed(twin->real, 19), 8);
    assert_int_equal(kv_sequence_pages_needed(twin->real, 0), 0);
    assert_int_equal(kv_sequence_append(twin->real, 19, &error), ERROR_PAGES);
    assert_int_equal(error.code, ERROR_PAGES);
    twin_compare(twin);
    assert_int_equal(kv_sequence_append(twin->real, KV_NO_POSITION, &error), ERROR_CONTEXT);
    assert_int_equal(kv_sequence_append(twin->real, 1u << 30, &error), ERROR_PAGES);
    assert_int_equal(twin_append(twin, tokens, 18), 0);
    assert_int_equal(kv_cache_pages_free(cache), 0);
    twin_compare(twin);
    kv_model_check(cache, &twin, 1);
    twin_free(twin);
    free(tokens);
    kv_cache_free(cache);
}

static void test_fork_copies_on_write(void **state) {
    (void)state;
    struct plain_backend plain;
    struct kv_cache *cache = kv_model_cache(&plain, 4 * 10, false);
    int32_t *one = make_tokens(32, 1), *two = make_tokens(32, 2);
    struct twin *twins[2] = {computed(cache, one, 24)};
    twins[1] = twin_fork(twins[0]);
    assert_int_equal(kv_cache_pages_free(cache), 4 * 8);
    assert_int_equal(kv_sequence_pages_held(twins[1]->real), 4 * 2);
    assert_int_equal(kv_sequence_pages_needed(twins[0]->real, 1), 4); /* copies of the second page */
    assert_int_equal(twin_append(twins[0], one, 1), 0);
    assert_int_equal(plain.pages_copied, 4);
    assert_int_equal(kv_sequence_pages_needed(twins[1]->real, 1), 0); /* the second page is its own now */
    assert_int_equal(twin_append(twins[1], two, 1), 0);
    assert_int_equal(plain.pages_copied, 4);
    twin_compare(twins[0]);
    twin_compare(twins[1]);
    kv_model_check(cache, twins, 2);
    twin_free(twins[0]);
    twin_compare(twins[1]);
    twin_free(twins[1]);
    assert_int_equal(kv_cache_pages_free(cache), 4 * 10);
    free(one);
    free(two);
    kv_cache_free(cache);
}

/* The case of the server: a prompt of 1,500 tokens is still being decoded when another comes that shares 1,000. */
static void test_prefix_of_a_live_sequence(void **state) {
    (void)state;
    struct plain_backend plain;
    struct kv_cache *cache = kv_model_cache(&plain, 4 * 140, true);
    int32_t *one = make_tokens(1500, 1), *two = make_tokens(1500, 2), more[1] = {7};
    memcpy(two, one, 1000 * sizeof *two);
    struct twin *twins[2] = {computed(cache, one, 1500)};
    assert_int_equal(twin_append(twins[0], more, 1), 0);
    uint32_t unheld, available = kv_cache_pages_free(cache);
    assert_int_equal(kv_cache_match_prefix(cache, two, 1500, 1499, NULL, &unheld), 992);
    assert_int_equal(unheld, 0);
    twins[1] = twin_create(cache);
    assert_int_equal(twin_adopt(twins[1], two, 1500, 1499), 62 * 16);
    assert_int_equal(kv_cache_pages_free(cache), available);
    twin_compare(twins[1]);
    assert_int_equal(twin_append(twins[1], two + 992, 508), 0);
    assert_int_equal(plain.pages_copied, 0);
    assert_int_equal(twin_append(twins[0], more, 1), 0);
    twin_compare(twins[0]);
    twin_compare(twins[1]);
    kv_model_check(cache, twins, 2);
    assert_int_equal(kv_sequence_adopt_prefix(twins[1]->real, one, 1500, 1500, NULL, NULL), 0); /* not empty */
    twin_free(twins[0]);
    twin_free(twins[1]);
    free(one);
    free(two);
    kv_cache_free(cache);
}

static void test_adopt_limits(void **state) {
    (void)state;
    struct plain_backend plain;
    struct kv_cache *cache = kv_model_cache(&plain, 4 * 10, true);
    int32_t *tokens = make_tokens(64, 1), *other = make_tokens(64, 2);
    struct twin *twin = computed(cache, tokens, 64);
    uint32_t unheld;
    assert_int_equal(kv_cache_match_prefix(cache, tokens, 64, 64, NULL, &unheld), 64);
    assert_int_equal(kv_cache_match_prefix(cache, tokens, 64, 63, NULL, &unheld), 48);
    assert_int_equal(kv_cache_match_prefix(cache, tokens, 31, 64, NULL, &unheld), 16);
    assert_int_equal(kv_cache_match_prefix(cache, tokens, 64, 15, NULL, &unheld), 0);
    assert_int_equal(kv_cache_match_prefix(cache, tokens, 0, 0, NULL, &unheld), 0);
    assert_int_equal(kv_cache_match_prefix(cache, other, 64, 64, NULL, &unheld), 0);
    assert_int_equal(
        kv_cache_match_prefix(cache, tokens + 16, 48, 48, NULL, &unheld), 0); /* the same tokens elsewhere */
    twin_free(twin);
    assert_int_equal(kv_cache_match_prefix(cache, tokens, 64, 64, NULL, &unheld), 64);
    assert_int_equal(unheld, 16);
    free(tokens);
    free(other);
    kv_cache_free(cache);
}

static uint32_t matched(struct kv_cache *cache, const int32_t *tokens, uint32_t count) {
    uint32_t unheld;
    return kv_cache_match_prefix(cache, tokens, count, count, NULL, &unheld);
}

static void test_published_pages_outlive_their_sequence(void **state) {
    (void)state;
    struct plain_backend plain;
    struct kv_cache *cache = kv_model_cache(&plain, 4 * 9, true);
    int32_t *texts[4];
    for (int32_t t = 0; t < 4; t++)
        texts[t] = make_tokens(80, t);
    struct twin *twins[2] = {computed(cache, texts[0], 48)};
    twins[1] = computed(cache, texts[1], 48);
    twin_free(twins[0]);
    twin_free(twins[1]);
    assert_int_equal(kv_cache_pages_free(cache), 4 * 9);
    assert_int_equal(kv_cache_pages_free(cache) - cache->pages.free_count[0], 4 * 6);

    /* Text 0 is used again: text 1 is the older one now. */
    twins[0] = twin_create(cache);
    assert_int_equal(twin_adopt(twins[0], texts[0], 48, 48), 48);
    twin_compare(twins[0]);
    assert_int_equal(kv_cache_pages_free(cache), 4 * 6);
    twin_free(twins[0]);

    /* Five blocks: three were never used, two come from the end of text 1. */
    twins[0] = computed(cache, texts[2], 80);
    assert_int_equal(matched(cache, texts[0], 48), 48);
    assert_int_equal(matched(cache, texts[1], 48), 16);
    kv_model_check(cache, twins, 1);
    twins[1] = computed(cache, texts[3], 32);
    assert_int_equal(matched(cache, texts[1], 48), 0);
    assert_int_equal(matched(cache, texts[0], 48), 32);
    twin_compare(twins[0]);
    kv_model_check(cache, twins, 2);
    struct error error;
    assert_int_equal(kv_sequence_append(twins[0]->real, 33, &error), ERROR_PAGES);
    assert_int_equal(matched(cache, texts[0], 48), 32);
    assert_int_equal(twin_append(twins[0], texts[0], 32), 0);
    assert_int_equal(kv_cache_pages_free(cache), 0);
    assert_int_equal(matched(cache, texts[0], 48), 0);
    twin_free(twins[0]);
    twin_free(twins[1]);
    kv_model_check(cache, NULL, 0);
    for (int32_t t = 0; t < 4; t++)
        free(texts[t]);
    kv_cache_free(cache);
}

/* Two sequences compute the same text at the same time: the first to publish owns the blocks, and what the second
 * appends after them is found although its own pages of the beginning are not the published ones. */
static void test_publishing_twice(void **state) {
    (void)state;
    struct plain_backend plain;
    struct kv_cache *cache = kv_model_cache(&plain, 4 * 12, true);
    int32_t *tokens = make_tokens(80, 1), *filler = make_tokens(200, 2);
    struct twin *twins[2] = {computed(cache, tokens, 48)};
    twins[1] = computed(cache, tokens, 80);
    assert_int_equal(cache->pages.index->used, 5);
    twin_free(twins[0]); /* blocks 0 to 2 are idle now, and their children held */
    assert_int_equal(matched(cache, tokens, 80), 80);
    kv_model_check(cache, &twins[1], 1);

    twins[0] = computed(cache, filler, 16 * 7); /* takes all that was never used, and the idle blocks */
    assert_int_equal(kv_cache_pages_free(cache), 0);
    assert_int_equal(matched(cache, tokens, 80), 0);
    twin_compare(twins[1]);
    kv_model_check(cache, twins, 2);
    twin_free(twins[0]);

    assert_int_equal(twin_append(twins[1], filler + 100, 16), 0); /* its next block: the text is published anew */
    twin_publish(twins[1]);
    assert_int_equal(matched(cache, tokens, 80), 80);
    kv_model_check(cache, &twins[1], 1);
    twin_free(twins[1]);
    kv_model_check(cache, NULL, 0);
    free(tokens);
    free(filler);
    kv_cache_free(cache);
}

/* What a text has in common with others is older than its end, and yet the end is taken back first. */
static void test_end_of_a_text_is_taken_back_first(void **state) {
    (void)state;
    struct plain_backend plain;
    struct kv_cache *cache = kv_model_cache(&plain, 4 * 8, true);
    int32_t *tokens = make_tokens(80, 1), *filler = make_tokens(32, 2);
    struct twin *twins[2] = {computed(cache, tokens, 48)};
    twins[1] = computed(cache, tokens, 80); /* publishes blocks 3 and 4 behind the other's blocks */
    twin_free(twins[0]);
    twin_free(twins[1]);
    assert_int_equal(cache->pages.free_count[0], 4 * 3);
    twins[0] = computed(cache, filler, 32);
    assert_int_equal(twin_append(twins[0], filler, 32), 0);
    assert_int_equal(matched(cache, tokens, 80), 64);
    kv_model_check(cache, twins, 1);
    twin_free(twins[0]);
    free(tokens);
    free(filler);
    kv_cache_free(cache);
}

/* Blocks of which some pages are still held give little: they are taken back after those that nobody holds. */
static void test_partly_held_blocks_are_taken_back_last(void **state) {
    (void)state;
    struct plain_backend plain;
    struct kv_cache *cache = kv_model_cache(&plain, 4 * 5, true);
    int32_t *texts[3];
    for (int32_t t = 0; t < 3; t++)
        texts[t] = make_tokens(64, t);
    struct twin *twins[2] = {computed(cache, texts[0], 32)};
    assert_int_equal(twin_keep(twins[0], 0, NULL, 0), 0);
    assert_int_equal(kv_cache_pages_free(cache), 4 * 3 + 2); /* the two pages of its first head count as free */
    twin_free(computed(cache, texts[1], 32));
    twins[1] = computed(cache, texts[2], 32);
    assert_int_equal(matched(cache, texts[0], 32), 32);
    assert_int_equal(matched(cache, texts[1], 32), 16);
    assert_int_equal(twin_append(twins[1], texts[0], 16), 0);
    assert_int_equal(matched(cache, texts[0], 32), 32);
    assert_int_equal(kv_cache_pages_free(cache), 2);
    uint32_t keep[] = {3};
    assert_int_equal(twin_keep(twins[1], 0, keep, 1), 0); /* copies one published page; two stay in the index */
    for (uint32_t h = 1; h < MODEL_HEADS; h++)
        assert_int_equal(twin_keep(twins[1], h, NULL, 0), 0);
    kv_model_check(cache, twins, 2);
    twin_free(twins[0]);
    twin_free(twins[1]);
    kv_model_check(cache, NULL, 0);
    for (int32_t t = 0; t < 3; t++)
        free(texts[t]);
    kv_cache_free(cache);
}

static void test_keep_frees_pages_at_once(void **state) {
    (void)state;
    struct plain_backend plain;
    struct kv_cache *cache = kv_model_cache(&plain, 4 * 8, false);
    int32_t *tokens = make_tokens(128, 1);
    struct twin *twin = computed(cache, tokens, 128);
    struct kv_head_view views[MODEL_KV_HEADS];
    kv_sequence_views(twin->real, 1, views);
    uint32_t last_page = views[0].pages[7];
    uint32_t slots[40];
    for (uint32_t i = 0; i < 40; i++)
        slots[i] = 3 * i + 1;
    assert_int_equal(kv_cache_pages_free(cache), 0);
    assert_int_equal(twin_keep(twin, 2, slots, 40), 0); /* needs no page, though none is free */
    assert_int_equal(kv_cache_pages_free(cache), 5);
    assert_true(plain_is_poisoned(cache->pages.backend, kv_cache_pool(cache), last_page));
    twin_compare(twin);
    kv_model_check(cache, &twin, 1);
    assert_int_equal(twin->real->heads[2].slots_capacity < 64, true); /* O(B) on the host */

    assert_int_equal(kv_sequence_pages_needed(twin->real, 1), 3); /* the other heads are full pages */
    assert_int_equal(twin_append(twin, tokens, 1), 0);
    assert_int_equal(twin_keep(twin, 2, slots, 0), 0);
    assert_int_equal(kv_sequence_slots(twin->real, 1, 0), 0);
    twin_compare(twin);
    assert_int_equal(twin_append(twin, tokens, 3), 0);
    twin_compare(twin);
    kv_model_check(cache, &twin, 1);
    twin_free(twin);
    free(tokens);
    kv_cache_free(cache);
}

static void test_keep_checks_slots(void **state) {
    (void)state;
    struct plain_backend plain;
    struct kv_cache *cache = kv_model_cache(&plain, 4 * 8, true);
    int32_t *tokens = make_tokens(40, 1);
    struct twin *twin = computed(cache, tokens, 40);
    struct error error;
    uint32_t twice[] = {1, 1}, descending[] = {2, 1}, beyond[] = {1, 40}, all[40];
    assert_int_equal(kv_sequence_keep(twin->real, 0, 0, twice, 2, &error), ERROR_INVALID);
    assert_int_equal(kv_sequence_keep(twin->real, 0, 0, descending, 2, &error), ERROR_INVALID);
    assert_int_equal(kv_sequence_keep(twin->real, 0, 0, beyond, 2, &error), ERROR_INVALID);
    assert_int_equal(kv_sequence_keep(twin->real, 2, 0, beyond, 1, &error), ERROR_INVALID);
    assert_int_equal(kv_sequence_keep(twin->real, 0, 2, beyond, 1, &error), ERROR_INVALID);
    assert_int_equal(kv_sequence_evict(twin->real, 0, 0, 40, &error), ERROR_INVALID);
    assert_int_equal(kv_sequence_evict(twin->real, 0, 2, 0, &error), ERROR_INVALID);
    for (uint32_t i = 0; i < 40; i++)
        all[i] = i;
    assert_int_equal(twin_keep(twin, 0, all, 40), 0); /* nothing changes: it may still publish */
    twin_compare(twin);
    assert_int_equal(twin_append(twin, tokens, 8), 0);
    twin_publish(twin);
    assert_int_equal(cache->pages.index->used, 3);
    twin_free(twin);
    free(tokens);
    kv_cache_free(cache);
}

static void test_evicted_slot_is_reused(void **state) {
    (void)state;
    struct plain_backend plain;
    struct kv_cache *cache = kv_model_cache(&plain, 4 * 2, false);
    int32_t *tokens = make_tokens(32, 1);
    struct twin *twin = computed(cache, tokens, 32);
    struct error error;
    for (uint32_t step = 0; step < 100; step++) { /* no page is free and none is needed */
        for (uint32_t h = 0; h < MODEL_HEADS; h++)
            assert_int_equal(twin_evict(twin, h, (step * 7 + h) % 32), 0);
        twin_compare(twin);
        assert_int_equal(kv_sequence_evict(twin->real, 0, 0, 1, &error), ERROR_INVALID);
        assert_int_equal(kv_sequence_pages_needed(twin->real, 1), 0);
        assert_int_equal(twin_append(twin, tokens, 1), 0);
        twin_compare(twin);
    }
    assert_int_equal(kv_sequence_length(twin->real), 132);
    assert_int_equal(kv_sequence_slots(twin->real, 1, 1), 32);
    kv_model_check(cache, &twin, 1);
    twin_free(twin);
    free(tokens);
    kv_cache_free(cache);
}

/* A marked slot stays one while several tokens are appended, and while it is kept. */
/* What is in an order with holes, and how many holes it has. Sets rank: of a slot. */
static uint32_t check_order(const struct kv_sequence *sequence, uint32_t slot, uint32_t *rank) {
    uint32_t count, holes = 0, positions[64], slots = kv_sequence_slots(sequence, 0, 1);
    const uint32_t *order = kv_sequence_slot_order(sequence, 0, 1, &count);
    int64_t before = -1;
    kv_sequence_positions(sequence, 0, 1, positions);
    for (uint32_t i = 0; i < count; i++) {
        if (order[i] == KV_NO_SLOT) {
            holes++;
            continue;
        }
        if (order[i] == slot)
            *rank = i - holes;
        assert_true(positions[order[i]] > before);
        before = positions[order[i]];
    }
    assert_int_equal(count - holes, slots);
    assert_int_not_equal(order[count - 1], KV_NO_SLOT);
    return holes;
}

/* Slots leave holes in an order that is read at every step, as long as nobody wants it without; a rank that is not
 * theirs does no harm. */
static void test_order_with_holes(void **state) {
    (void)state;
    struct plain_backend plain;
    struct kv_cache *cache = kv_model_cache(&plain, 32 * 4, false);
    int32_t *tokens = make_tokens(48, 1);
    struct twin *twin = computed(cache, tokens, 40);
    struct kv_removal removals[MODEL_HEADS];
    uint32_t most = 0;
    for (uint32_t h = 0; h < MODEL_HEADS; h++)
        removals[h] = (struct kv_removal){.evict = KV_NO_SLOT};
    assert_int_equal(twin_evict(twin, 1, 3), 0);
    for (uint32_t step = 0; step < 300; step++) {
        uint32_t slots = twin->heads[1].count, rank = UINT32_MAX;
        assert_int_equal(twin_append(twin, tokens, step % 90 == 70 ? 2 : 1), 0);
        removals[1].evict = step % 5 == 0 ? twin->heads[1].count - 1 : step * 7 % slots;
        if (twin->heads[1].marked != KV_NO_SLOT) /* two tokens leave it */
            continue;
        uint32_t holes = check_order(twin->real, removals[1].evict, &rank);
        most = holes > most ? holes : most;
        const uint32_t ranks[] = {rank, 0, slots + 100, UINT32_MAX};
        removals[1].rank = ranks[step % 4];
        assert_int_equal(twin_prune(twin, removals), 0);
        kv_model_check(cache, &twin, 1);
        if (step % 100 == 99)
            twin_compare(twin);
    }
    assert_int_equal(most, KV_ORDER_HOLES);
    struct twin *fork = twin_fork(twin);
    twin_compare(fork);
    twin_compare(twin);
    twin_free(fork);
    twin_free(twin);
    free(tokens);
    kv_cache_free(cache);
}

static void test_marked_slot_waits(void **state) {
    (void)state;
    struct plain_backend plain;
    struct kv_cache *cache = kv_model_cache(&plain, 4 * 4, false);
    int32_t *tokens = make_tokens(32, 1);
    struct twin *twin = computed(cache, tokens, 20);
    assert_int_equal(twin_evict(twin, 1, 5), 0);
    assert_int_equal(twin_append(twin, tokens, 2), 0);
    twin_compare(twin);
    uint32_t slots[] = {0, 5, 9, 21};
    assert_int_equal(twin_keep(twin, 1, slots, 4), 0);
    twin_compare(twin);
    assert_int_equal(twin_append(twin, tokens, 1), 0);
    assert_int_equal(kv_sequence_slots(twin->real, 0, 1), 4);
    uint32_t positions[4];
    kv_sequence_positions(twin->real, 0, 1, positions);
    assert_int_equal(positions[1], 22);
    twin_compare(twin);
    twin_free(twin);
    free(tokens);
    kv_cache_free(cache);
}

/* Pruning a published sequence leaves its published pages as they are, and publishes nothing more. */
static void test_pruning_keeps_the_prefix(void **state) {
    (void)state;
    struct plain_backend plain;
    struct kv_cache *cache = kv_model_cache(&plain, 4 * 12, true);
    int32_t *tokens = make_tokens(80, 1);
    struct twin *twins[2] = {computed(cache, tokens, 64)};
    uint32_t slots[] = {0, 1, 17, 40, 63};
    for (uint32_t h = 0; h < MODEL_HEADS; h++)
        assert_int_equal(twin_keep(twins[0], h, slots, 5), 0);
    assert_int_equal(kv_cache_pages_free(cache), 4 * 11);
    kv_model_check(cache, twins, 1);
    twins[1] = twin_create(cache);
    assert_int_equal(twin_adopt(twins[1], tokens, 64, 64), 64);
    twin_compare(twins[1]);
    assert_int_equal(twin_evict(twins[1], 3, 20), 0);
    assert_int_equal(twin_append(twins[1], tokens + 64, 1), 0);
    assert_int_equal(twin_append(twins[0], tokens + 64, 16), 0);
    twin_publish(twins[0]);
    assert_int_equal(matched(cache, tokens, 80), 64);
    twin_compare(twins[0]);
    twin_compare(twins[1]);
    kv_model_check(cache, twins, 2);
    twin_free(twins[0]);
    twin_free(twins[1]);
    free(tokens);
    kv_cache_free(cache);
}

/* With no page free, a sequence can be pruned as long as it shares pages with the index only. */
static void test_pruning_a_full_pool(void **state) {
    (void)state;
    struct plain_backend plain;
    struct kv_cache *cache = kv_model_cache(&plain, 4 * 4, true);
    int32_t *tokens = make_tokens(64, 1);
    struct twin *twin = computed(cache, tokens, 64);
    uint32_t slots[] = {0, 1, 17, 40, 63};
    assert_int_equal(kv_cache_pages_free(cache), 0);
    assert_int_equal(twin_evict(twin, 0, 60), 0);
    assert_int_equal(matched(cache, tokens, 64), 48);
    twin_compare(twin);
    assert_int_equal(twin_keep(twin, 1, slots, 5), 0);
    twin_compare(twin);
    kv_model_check(cache, &twin, 1);

    struct twin *fork = twin_fork(twin);
    assert_int_equal(twin_append(fork, tokens, 1), ERROR_PAGES); /* three new pages and a copy; three are free */
    assert_int_equal(kv_cache_pages_free(cache), 3);
    for (uint32_t h = 0; h < 3; h++)
        assert_int_equal(twin_evict(fork, h, 1), h == 0 ? ERROR_INVALID : 0);
    twin_compare(twin);
    twin_compare(fork);
    twin_free(twin);
    twin_free(fork);
    kv_model_check(cache, NULL, 0);
    free(tokens);
    kv_cache_free(cache);
}

static uint64_t constant_hash(uint64_t before, const int32_t tokens[KV_PAGE_SLOTS]) {
    (void)before, (void)tokens;
    return 42;
}

static void test_equal_hashes(void **state) {
    (void)state;
    struct plain_backend plain;
    struct kv_cache *cache = kv_model_cache(&plain, 4 * 20, true);
    cache->pages.index->hash = constant_hash;
    int32_t *one = make_tokens(64, 1), *two = make_tokens(64, 2);
    memcpy(two, one, 16 * sizeof *two);
    struct twin *twins[3] = {computed(cache, one, 64)};
    assert_int_equal(matched(cache, two, 64), 16);
    assert_int_equal(matched(cache, two + 16, 48), 0);
    assert_int_equal(matched(cache, one + 16, 48), 0);
    twins[1] = computed(cache, two, 64);
    assert_int_equal(cache->pages.index->used, 7);
    twins[2] = twin_create(cache);
    assert_int_equal(twin_adopt(twins[2], two, 64, 64), 64);
    for (uint32_t t = 0; t < 3; t++)
        twin_compare(twins[t]);
    kv_model_check(cache, twins, 3);
    for (uint32_t t = 0; t < 3; t++)
        twin_free(twins[t]);
    free(one);
    free(two);
    kv_cache_free(cache);
}

static void test_sharing_off(void **state) {
    (void)state;
    struct plain_backend plain;
    struct kv_cache *cache = kv_model_cache(&plain, 4 * 4, false);
    int32_t *tokens = make_tokens(32, 1);
    struct twin *twin = computed(cache, tokens, 32);
    assert_int_equal(matched(cache, tokens, 32), 0);
    struct twin *other = twin_create(cache);
    assert_int_equal(twin_adopt(other, tokens, 32, 32), 0);
    twin_free(twin);
    twin_free(other);
    kv_sequence_free(NULL);
    kv_model_check(cache, NULL, 0);
    assert_int_equal(cache->pages.free_count[0], 16);
    free(tokens);
    kv_cache_free(cache);
}

/* Numbers that the device's copies of a twin's tables lacked. */
static uint64_t numbers_sent(struct plain_backend *plain, struct twin *twin) {
    uint64_t before = plain->table_numbers;
    assert_true(twin_send_tables(&twin, 1));
    twin_compare(twin);
    return plain->table_numbers - before;
}

static void test_tables_are_sent_by_differences(void **state) {
    (void)state;
    struct plain_backend plain;
    struct kv_cache *cache = kv_model_cache(&plain, 4 * 60, false);
    int32_t *tokens = make_tokens(600, 1);
    struct twin *twin = computed(cache, tokens, 24);
    assert_null(kv_sequence_view(twin->real, 0, 0).device_pages);
    assert_int_equal(numbers_sent(&plain, twin), 4 * 2);
    assert_int_equal(plain.table_calls, 1);
    assert_int_equal(twin_append(twin, tokens, 8), 0); /* into pages that are there */
    assert_int_equal(numbers_sent(&plain, twin), 0);
    assert_int_equal(plain.table_calls, 1);
    assert_int_equal(twin_append(twin, tokens, 1), 0);
    assert_null(kv_sequence_view(twin->real, 0, 0).device_pages); /* is behind */
    assert_int_equal(numbers_sent(&plain, twin), 4);

    struct twin *fork = twin_fork(twin);
    assert_int_equal(numbers_sent(&plain, fork), 4 * 3); /* copies of its own */
    assert_int_equal(twin_append(fork, tokens, 1), 0);   /* the last page is copied */
    assert_int_equal(numbers_sent(&plain, fork), 4);
    assert_int_equal(numbers_sent(&plain, twin), 0);
    assert_int_equal(twin_evict(fork, 2, 5), 0); /* one head's first page is */
    assert_int_equal(numbers_sent(&plain, fork), 1);

    uint32_t slots[] = {0, 1, 20};
    assert_int_equal(twin_keep(fork, 2, slots, 3), 0); /* fits the page that it owns */
    assert_int_equal(numbers_sent(&plain, fork), 0);
    assert_int_equal(twin_append(fork, tokens, 30), 0);
    assert_int_equal(numbers_sent(&plain, fork), 3 * 1 + 2);

    twin_save(fork);
    assert_int_equal(numbers_sent(&plain, fork), 0);
    assert_int_equal(twin_restore(fork), 0);
    assert_int_equal(numbers_sent(&plain, fork), 3 * 4 + 3);
    assert_int_equal(twin_append(twin, tokens, 500), 0); /* more than there was room for: all anew */
    assert_int_equal(numbers_sent(&plain, twin), 4 * 34);

    plain.fail_allocate = true;
    assert_int_equal(twin_append(fork, tokens, 300), 0);
    assert_false(twin_send_tables(&fork, 1));
    assert_null(kv_sequence_view(fork->real, 1, 1).device_pages);
    plain.fail_allocate = false;
    assert_int_equal(numbers_sent(&plain, fork), 3 * 23 + 21);
    twin_free(twin);
    twin_free(fork);
    free(tokens);
    kv_cache_free(cache);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_page_bytes),
        cmocka_unit_test(test_create_refuses),
        cmocka_unit_test(test_create_without_memory),
        cmocka_unit_test(test_append_is_atomic),
        cmocka_unit_test(test_fork_copies_on_write),
        cmocka_unit_test(test_prefix_of_a_live_sequence),
        cmocka_unit_test(test_adopt_limits),
        cmocka_unit_test(test_published_pages_outlive_their_sequence),
        cmocka_unit_test(test_publishing_twice),
        cmocka_unit_test(test_end_of_a_text_is_taken_back_first),
        cmocka_unit_test(test_partly_held_blocks_are_taken_back_last),
        cmocka_unit_test(test_keep_frees_pages_at_once),
        cmocka_unit_test(test_keep_checks_slots),
        cmocka_unit_test(test_evicted_slot_is_reused),
        cmocka_unit_test(test_order_with_holes),
        cmocka_unit_test(test_marked_slot_waits),
        cmocka_unit_test(test_pruning_keeps_the_prefix),
        cmocka_unit_test(test_pruning_a_full_pool),
        cmocka_unit_test(test_equal_hashes),
        cmocka_unit_test(test_sharing_off),
        cmocka_unit_test(test_tables_are_sent_by_differences),
    };
    return cmocka_run_group_tests_name("kv_cache", tests, NULL, NULL);
}
