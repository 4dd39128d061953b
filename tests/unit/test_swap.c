/* SPDX-License-Identifier: Apache-2.0
 *
 * Sequences in host memory: their pages are free meanwhile, and afterwards they go on bit for bit.
 */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>

#include <stdlib.h>

#include "tests/unit/chosen_backend.h"
#include "tests/unit/pruning.h"

enum { PROMPT = 80, TOTAL = 110 };

static const char *const policies[] = {NULL, "h2o,ratio=0.3,minimum=8", "snapkv,tokens=24,window=8",
    "cake,tokens=24,window=8,prefill_prune_every=40", "expected_attention,tokens=24,interval=2",
    "streaming,tokens=20,positions=cache", "adakv,tokens=24,window=8", "keyformer,tokens=24", "scissorhands,tokens=24",
    "restkv,tokens=24,window=8,interval=3", "criticalkv,tokens=24,window=8,interval=1", "hybrid,ratio=0.5,minimum=8",
    "h2o,tokens=24,summary=1", "snapkv,tokens=24,window=8,decode=keep,summary=1",
    "adakv,ratio=0.3,minimum=8,interval=3,summary=1"};
enum { CASES = sizeof policies / sizeof policies[0] };

static struct model *model;

static struct engine *open_engine(size_t kv_bytes, bool prefix_sharing) {
    return pruning_engine(
        model, &(struct engine_options){.kv_format = KV_F16, .kv_bytes = kv_bytes, .prefix_sharing = prefix_sharing});
}

static void swap_out_and_in(struct sequence *sequence) {
    struct error error = {0};
    size_t bytes = sequence_swap_bytes(sequence);
    uint64_t pages = sequence_swap_pages(sequence);
    assert_int_equal(sequence_swap_out(sequence, &error), 0);
    assert_int_equal(sequence_swap_bytes(sequence), bytes);
    assert_int_equal(sequence_swap_pages(sequence), pages);
    assert_int_equal(kv_sequence_pages_held(sequence_kv(sequence)), 0);
    assert_int_equal(sequence_statistics_bytes(sequence), 0);
    assert_int_equal(sequence_swap_in(sequence, &error), 0);
    assert_int_equal(sequence_swap_bytes(sequence), bytes);
}

/* Out and in after every step, prompt and decode, beside one that stays. */
static void sequences_go_on_as_if_they_had_stayed(void **state) {
    (void)state;
    struct engine *engine = open_engine(0, false);
    struct kv_cache *cache = engine_kv_cache(engine);
    for (uint32_t i = 0; i < CASES; i += chosen_backend_share(1, 7)) {
        struct stream *stays = stream_create(engine, policies[i], i, PROMPT, TOTAL);
        struct stream *swaps = stream_create(engine, policies[i], i, PROMPT, TOTAL);
        stream_run(stays);
        swap_out_and_in(swaps->sequence); /* with nothing in it */
        while (streams_step(&swaps, 1, 17)) {
            swap_out_and_in(swaps->sequence);
            assert_true(kv_cache_check(cache));
        }
        streams_require_same(stays, swaps, 0, policies[i] != NULL ? policies[i] : "no policy");
        stream_free(stays);
        stream_free(swaps);
        assert_int_equal(kv_cache_pages_free(cache), kv_cache_pages_total(cache));
    }
    engine_close(engine);
}

static void pages_and_charges_are_free_at_once(void **state) {
    (void)state;
    struct engine *engine = open_engine(0, false);
    struct kv_cache *cache = engine_kv_cache(engine);
    struct error error = {0};
    struct stream *stream = stream_create(engine, "h2o,tokens=24", 1, PROMPT, TOTAL);
    stream_run(stream);
    uint32_t held = kv_cache_pages_total(cache) - kv_cache_pages_free(cache);
    assert_true(engine_statistics_bytes(engine) > 0);
    assert_int_equal(sequence_swap_pages(stream->sequence), held);
    assert_int_equal(sequence_swap_out(stream->sequence, &error), 0);
    assert_int_equal(kv_cache_pages_free(cache), kv_cache_pages_total(cache));
    assert_int_equal(engine_statistics_bytes(engine), 0);
    assert_int_equal(sequence_length(stream->sequence), TOTAL);
    assert_int_equal(sequence_tokens(stream->sequence)[TOTAL - 1], stream->tokens[TOTAL - 1]);

    /* What it may not do meanwhile is refused. */
    struct batch_item item = {.sequence = stream->sequence, .tokens = stream->tokens, .count = 1};
    assert_int_equal(engine_forward(engine, &item, 1, &error), ERROR_INVALID);
    assert_int_equal(sequence_swap_out(stream->sequence, &error), ERROR_INVALID);
    assert_int_equal(engine_prune(engine, &stream->sequence, 1, &error), 0);
    stream_free(stream); /* out */
    assert_true(kv_cache_check(cache));
    engine_close(engine);
}

static void a_sequence_stays_out_until_there_are_pages(void **state) {
    (void)state;
    struct kv_layout layout = {.layers = model->shape.layers,
        .kv_heads = model->shape.kv_heads,
        .head_dim = model->shape.head_dim,
        .format = KV_F16};
    struct engine *engine = open_engine(kv_page_bytes(&layout) * 4 * 12, false); /* 12 pages a head */
    struct kv_cache *cache = engine_kv_cache(engine);
    struct error error = {0};
    struct stream *expected = stream_create(engine, "h2o,tokens=48", 1, PROMPT, TOTAL);
    stream_run(expected);
    struct stream *copy = stream_create(engine, "h2o,tokens=48", 1, PROMPT, TOTAL);
    assert_int_equal(sequence_swap_out(expected->sequence, &error), 0);
    while (copy->done < PROMPT + 9)
        streams_step(&copy, 1, 50);
    assert_int_equal(sequence_swap_out(copy->sequence, &error), 0);
    struct stream *greedy = stream_create(engine, NULL, 2, 170, 180);
    streams_step(&greedy, 1, 170);
    assert_int_equal(sequence_swap_in(copy->sequence, &error), ERROR_PAGES);
    assert_true(kv_cache_check(cache));
    assert_int_equal(sequence_swap_in(copy->sequence, &error), ERROR_PAGES);
    stream_free(greedy);
    assert_int_equal(sequence_swap_in(copy->sequence, &error), 0);
    assert_int_equal(sequence_swap_in(copy->sequence, &error), ERROR_INVALID);
    stream_run(copy);
    streams_require_same(expected, copy, 0, "after waiting");
    stream_free(expected);
    stream_free(copy);
    assert_int_equal(kv_cache_pages_free(cache), kv_cache_pages_total(cache));
    engine_close(engine);
}

/* Shared pages are copied out, and the other holder keeps them. */
static void forks_and_shared_prefixes_are_let_go(void **state) {
    (void)state;
    struct engine *engine = open_engine(0, true);
    struct kv_cache *cache = engine_kv_cache(engine);
    struct error error = {0};
    for (uint32_t i = 0; i < CASES; i += chosen_backend_share(1, 7)) {
        struct stream *stream = stream_create(engine, policies[i], 7, PROMPT, TOTAL);
        while (stream->done < PROMPT + 5)
            streams_step(&stream, 1, 80);
        struct stream *fork = stream_fork(stream);
        assert_int_equal(sequence_swap_out(fork->sequence, &error), 0);
        assert_true(kv_cache_check(cache));
        stream_run(stream);
        assert_int_equal(sequence_swap_in(fork->sequence, &error), 0);
        stream_run(fork);
        streams_require_same(stream, fork, 0, policies[i] != NULL ? policies[i] : "no policy");
        stream_free(stream);
        stream_free(fork);
        assert_true(kv_cache_check(cache));
    }
    assert_int_equal(kv_cache_pages_free(cache), kv_cache_pages_total(cache));
    engine_close(engine);
}

static int open_model(void **state) {
    (void)state;
    struct tiny_llama shape = tiny_llama_default();
    model = pruning_model(&shape);
    return 0;
}

static int close_model(void **state) {
    (void)state;
    model_free(model);
    return 0;
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(sequences_go_on_as_if_they_had_stayed),
        cmocka_unit_test(pages_and_charges_are_free_at_once),
        cmocka_unit_test(a_sequence_stays_out_until_there_are_pages),
        cmocka_unit_test(forks_and_shared_prefixes_are_let_go),
    };
    return cmocka_run_group_tests_name("swap", tests, open_model, close_model);
}
