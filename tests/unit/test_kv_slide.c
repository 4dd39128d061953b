/* SPDX-License-Identifier: Apache-2.0
 *
 * Sliding layers of the page cache: which pages go, and that forks, prefixes, prunes and swaps go on with what is left.
 * Expectations are counted by hand from the definition: a token at position p sees p - window + 1 to p.
 */
#include "tests/unit/kv_model.h"

#include <setjmp.h>
#include <stdarg.h>
#include <stdlib.h>

#include <cmocka.h>

enum { LAYERS = 3, HEADS = 2, WINDOW = 20, APPEND = 48, PAGES = 120, SLIDING = 1 };

struct fixture {
    struct plain_backend plain;
    struct kv_cache *cache;
};

static int set_up(void **state) {
    static const uint32_t windows[LAYERS] = {0, WINDOW, 0};
    struct fixture *f = calloc(1, sizeof *f);
    struct kv_cache_options options = {
        .layout = {.layers = LAYERS, .kv_heads = HEADS, .head_dim = 16, .format = KV_F32},
        .prefix_sharing = true,
        .poison_free = true,
        .windows = windows,
        .append_most = APPEND,
    };
    plain_backend_open(&f->plain);
    options.bytes = PAGES * kv_page_bytes(&options.layout);
    f->cache = kv_cache_create(&f->plain.backend, &options, NULL);
    *state = f;
    return f->cache != NULL ? 0 : -1;
}

static int tear_down(void **state) {
    struct fixture *f = *state;
    kv_cache_free(f->cache);
    free(f);
    return 0;
}

static void grow(struct kv_sequence *sequence, uint32_t count) {
    assert_int_equal(kv_sequence_append(sequence, count, NULL), 0);
    kv_sequence_slide(sequence);
}

/* Pages that one sliding head has given back when the next token is at position `length`: whole pages before length -
 * WINDOW + 1. */
static uint32_t gone(uint32_t length) {
    return length < WINDOW ? 0 : (length - WINDOW + 1) / KV_PAGE_SLOTS;
}

static void pages_that_left_the_window_are_free(void **state) {
    struct fixture *f = *state;
    struct kv_sequence *sequence = kv_sequence_create(f->cache);
    for (uint32_t length = 1; length <= 200; length++) {
        grow(sequence, 1);
        uint32_t held = LAYERS * HEADS * kv_pages_for(length) - HEADS * gone(length);
        assert_int_equal(kv_sequence_pages_held(sequence), held);
        assert_int_equal(kv_cache_pages_free(f->cache), PAGES - held);
        assert_int_equal(kv_sequence_pages_slid(sequence), HEADS * gone(length));
        assert_int_equal(kv_sequence_tokens_sliding(sequence), HEADS * (length - gone(length) * KV_PAGE_SLOTS));
        assert_int_equal(kv_sequence_tokens_held(sequence), 2 * HEADS * length + kv_sequence_tokens_sliding(sequence));
        assert_true(kv_cache_check(f->cache));
    }
    kv_sequence_free(sequence);
    assert_int_equal(kv_cache_pages_free(f->cache), PAGES);
}

static void views_begin_at_the_first_page_or_at_its_split(void **state) {
    struct fixture *f = *state;
    struct kv_sequence *sequence = kv_sequence_create(f->cache);
    for (uint32_t i = 0; i < 6; i++)
        grow(sequence, 48); /* 288 tokens: 16 whole pages are gone, which is one split of 256 slots */
    struct kv_head_view view = kv_sequence_view(sequence, SLIDING, 1), full = kv_sequence_view(sequence, 0, 1);
    assert_int_equal(gone(288), 16);
    assert_int_equal(view.from_slot, 0);
    assert_int_equal(view.slots, 288 - 256);
    assert_int_equal(view.first_slot, (uint32_t)240 - 256);
    assert_int_equal(full.slots, 288);
    grow(sequence, 16);
    view = kv_sequence_view(sequence, SLIDING, 1);
    assert_int_equal(view.from_slot, 16);
    assert_int_equal(view.slots, 304 - 256);
    assert_int_equal(view.first_slot, 288 - 256);
    kv_sequence_free(sequence);
}

static void windows_let_more_tokens_in(void **state) {
    struct fixture *f = *state;
    /* One sliding layer takes 2 (ceil((20 + 48) / 16) + 1) = 12 pages, four other heads share 108. */
    assert_int_equal(kv_cache_tokens_max(f->cache), 108 / 4 * KV_PAGE_SLOTS);
    struct kv_sequence *sequence = kv_sequence_create(f->cache);
    for (uint32_t length = 0; length < 432; length += 48)
        grow(sequence, 48);
    assert_true(kv_cache_check(f->cache));
    kv_sequence_free(sequence);
}

static void forks_swaps_and_prunes_leave_windows_alone(void **state) {
    struct fixture *f = *state;
    struct kv_sequence *sequence = kv_sequence_create(f->cache);
    grow(sequence, 48);
    grow(sequence, 22);
    struct kv_sequence *fork = kv_sequence_fork(sequence);
    grow(fork, 30);
    assert_int_equal(kv_sequence_pages_slid(fork), HEADS * gone(100));
    assert_int_equal(kv_sequence_pages_slid(sequence), HEADS * gone(70));
    assert_true(kv_cache_check(f->cache));

    uint32_t held = kv_sequence_pages_held(fork);
    assert_int_equal(kv_sequence_pages_saved(fork), held);
    char *host = malloc(held * kv_cache_pool(f->cache)->page_bytes);
    kv_sequence_save(fork, host);
    assert_true(kv_cache_check(f->cache));
    assert_int_equal(kv_sequence_restore(fork, host, NULL), 0);
    free(host);
    assert_int_equal(kv_sequence_pages_held(fork), held);
    assert_true(kv_cache_check(f->cache));

    struct kv_removal removals[LAYERS * HEADS];
    static const uint32_t keep[] = {0, 1, 2, 97, 98, 99};
    for (uint32_t i = 0; i < LAYERS * HEADS; i++)
        removals[i] = i / HEADS == SLIDING ? (struct kv_removal){.evict = KV_NO_SLOT}
                                           : (struct kv_removal){.keep = keep, .count = 6, .evict = KV_NO_SLOT};
    assert_int_equal(kv_sequence_prune(fork, removals, NULL), 0);
    assert_int_equal(kv_sequence_tokens_held(fork), 4 * 6 + kv_sequence_tokens_sliding(fork));
    assert_true(kv_cache_check(f->cache));
    grow(fork, 1);
    assert_true(kv_cache_check(f->cache));

    struct error error;
    removals[SLIDING * HEADS].evict = 90;
    assert_int_equal(kv_sequence_prune(fork, removals, &error), ERROR_INVALID);
    assert_int_equal(kv_sequence_keep(fork, SLIDING, 0, keep, 6, &error), ERROR_INVALID);
    assert_int_equal(kv_sequence_evict(fork, SLIDING, 0, 90, &error), ERROR_INVALID);
    kv_sequence_free(fork);
    kv_sequence_free(sequence);
    assert_int_equal(kv_cache_pages_free(f->cache), PAGES);
}

static void prefixes_are_shared_whatever_left_a_window(void **state) {
    struct fixture *f = *state;
    int32_t tokens[128];
    for (int32_t i = 0; i < 128; i++)
        tokens[i] = i;
    struct kv_sequence *first = kv_sequence_create(f->cache);
    for (uint32_t length = 32; length <= 96; length += 32) {
        assert_int_equal(kv_sequence_append(first, 32, NULL), 0);
        kv_sequence_publish(first, tokens);
        kv_sequence_slide(first);
    }
    assert_true(kv_cache_check(f->cache));
    struct kv_sequence *second = kv_sequence_create(f->cache);
    assert_int_equal(kv_sequence_adopt_prefix(second, tokens, 128, 127, NULL, NULL), 96);
    kv_sequence_slide(second);
    assert_int_equal(kv_sequence_pages_slid(second), HEADS * gone(96));
    assert_int_equal(kv_sequence_pages_held(second), kv_sequence_pages_held(first));
    assert_true(kv_cache_check(f->cache));
    /* A third text takes nearly all pages: the prefix is taken back, and what the two hold stays. */
    struct kv_sequence *third = kv_sequence_create(f->cache);
    for (uint32_t length = 0; length < 320; length += 16)
        grow(third, 16);
    assert_true(kv_cache_check(f->cache));
    grow(first, 16);
    kv_sequence_publish(first, tokens); /* its first blocks cannot be published again */
    assert_true(kv_cache_check(f->cache));
    kv_sequence_free(third);
    kv_sequence_free(second);
    kv_sequence_free(first);
    assert_int_equal(kv_cache_pages_free(f->cache), PAGES);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test_setup_teardown(pages_that_left_the_window_are_free, set_up, tear_down),
        cmocka_unit_test_setup_teardown(views_begin_at_the_first_page_or_at_its_split, set_up, tear_down),
        cmocka_unit_test_setup_teardown(windows_let_more_tokens_in, set_up, tear_down),
        cmocka_unit_test_setup_teardown(forks_swaps_and_prunes_leave_windows_alone, set_up, tear_down),
        cmocka_unit_test_setup_teardown(prefixes_are_shared_whatever_left_a_window, set_up, tear_down),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
