/* SPDX-License-Identifier: Apache-2.0
 *
 * Shared prefixes under policies that sum over all queries, on a tiny random model: a sequence that goes on from a
 * snapshot of statistics is the one that computed everything, bit for bit; where snapshots are left; and that they give
 * way to everything else.
 */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "engine/engine_internal.h"
#include "engine/random.h"
#include "tests/sanitized.h"
#include "tests/unit/chosen_backend.h"
#include "tests/unit/failing_malloc.h"
#include "tests/unit/pruning.h"
#include "tests/unit/tiny_network.h"

enum { PROMPT = 420, LONGER = 560, DECODED = 18, WORDS_MAX = 64 };

static char folder[64];
static struct model *model;

static struct engine *open_engine(size_t kv_bytes, bool prefix_sharing) {
    return pruning_engine(
        model, &(struct engine_options){.kv_format = KV_F16, .kv_bytes = kv_bytes, .prefix_sharing = prefix_sharing});
}

/* The first `shared` tokens of text 0, then those of `text`. */
static struct stream *open_stream(
    struct engine *engine, const char *policy, uint32_t text, uint32_t shared, uint32_t prompt) {
    struct stream *stream = stream_create(engine, policy, text, prompt, prompt + DECODED);
    for (uint32_t i = 0; i < shared && i < prompt; i++)
        stream->tokens[i] = pruning_token(model, 0, i);
    return stream;
}

static uint32_t reuse(struct stream *stream) {
    stream->done = sequence_reuse_prefix(stream->sequence, stream->tokens, stream->prompt);
    return stream->done;
}

/* Computes the stream on an engine that shares prefixes, and on `plain`, which does not; returns what was reused. */
static uint32_t run_and_compare(
    struct engine *engine, struct engine *plain, const char *policy, uint32_t text, uint32_t shared, uint32_t prompt) {
    struct stream *expected = open_stream(plain, policy, text, shared, prompt);
    struct stream *stream = open_stream(engine, policy, text, shared, prompt);
    uint32_t reused = reuse(stream);
    stream_run(expected);
    stream_run(stream);
    streams_require_same(expected, stream, 0, policy);
    assert_true(kv_cache_check(engine_kv_cache(engine)));
    stream_free(expected);
    stream_free(stream);
    return reused;
}

static bool sums(const char *policy) {
    struct policy_settings settings = pruning_settings(policy);
    uint32_t needs = policy_prefix_needs(&settings);
    policy_settings_release(&settings);
    return needs != 0;
}

/* What a prompt reuses of one that is the same. No snapshot is left within the first 128 tokens. */
static uint32_t most_reused(const char *policy, uint32_t prompt) {
    struct policy_settings settings = pruning_settings(policy);
    uint32_t most = policy_reusable_tokens(&settings, prompt) / KV_PAGE_SLOTS * KV_PAGE_SLOTS;
    policy_settings_release(&settings);
    return sums(policy) && most < 128 ? 0 : most;
}

/* The same prompt again, a conversation that goes on, and a beginning that several prompts share. */
static void use_in_every_way(const char *policy, struct engine *plain) {
    struct engine *engine = open_engine(0, true);
    uint32_t most = most_reused(policy, PROMPT), longer = most_reused(policy, LONGER);
    uint32_t part = most < 208 ? most : 208;
    assert_int_equal(run_and_compare(engine, plain, policy, 0, PROMPT, PROMPT), 0);
    assert_int_equal(run_and_compare(engine, plain, policy, 0, PROMPT, PROMPT), most);
    assert_int_equal(run_and_compare(engine, plain, policy, 1, PROMPT, LONGER), sums(policy)   ? most
                                                                                : longer < 416 ? longer
                                                                                               : 416);
    assert_int_equal(run_and_compare(engine, plain, policy, 1, PROMPT, LONGER), longer);
    assert_int_equal(run_and_compare(engine, plain, policy, 2, 210, PROMPT), sums(policy) ? 0 : part);
    assert_int_equal(run_and_compare(engine, plain, policy, 3, 210, PROMPT), part);
    pruning_engine_close(engine);
}

/* Every policy as it is, and with a summary slot; with sanitizers in turns. */
static void every_policy_goes_on_from_a_prefix(void **state) {
    (void)state;
    struct engine *plain = open_engine(0, false);
    uint32_t summing = 0;
    for (uint32_t i = 0; i < policy_count(); i++)
        for (uint32_t summary = sanitized() ? i % 2 : 0; summary < 2; summary += sanitized() ? 2 : 1) {
            char policy[WORDS_MAX];
            const char *name = policy_at(i)->name;
            const char *budget = strcmp(name, "rlkv") == 0 ? "ratio=0.4" : "tokens=70";
            if (strcmp(name, "full") == 0)
                continue;
            snprintf(policy, sizeof policy, "%s,%s,summary=%u", name, budget, summary);
            use_in_every_way(policy, plain);
            summing += sums(policy);
        }
    assert_true(summing >= policy_count() / (sanitized() ? 2 : 1)); /* with a summary slot all do */
    pruning_engine_close(plain);
}

static void options_change_nothing(void **state) {
    (void)state;
    static const char *const policies[] = {
        "h2o,ratio=0.3,minimum=8,prefill_prune_every=200,interval=3",
        "h2o,ratio=0.3,prefill_prune_every=90",
        "keyformer,tokens=40,seed=7,interval=4",
        "snapkv,tokens=40,window=8,prefill_prune_every=250,summary=1",
        "hybrid,ratio=0.5,base=h2o",
        "distillcache,ratio=0.2,minimum=8,prefill_prune_every=400",
        "h2o,tokens=1000",
    };
    struct engine *plain = open_engine(0, false);
    for (uint32_t i = 0; i < sizeof policies / sizeof policies[0]; i++) {
        struct engine *engine = open_engine(0, true);
        uint32_t most = most_reused(policies[i], PROMPT);
        assert_true(run_and_compare(engine, plain, policies[i], 0, PROMPT, PROMPT) == 0);
        assert_int_equal(run_and_compare(engine, plain, policies[i], 0, PROMPT, PROMPT), most);
        pruning_engine_close(engine);
    }
    pruning_engine_close(plain);
}

/* A snapshot of more statistics serves a policy with fewer, not the other way round, and noise goes by its seed. On a
 * device, which is slow, what differs in the memory that is copied. */
static void statistics_must_be_there(void **state) {
    (void)state;
    bool all = chosen_backend_is_cpu();
    struct engine *plain = open_engine(0, false), *engine = open_engine(0, true);
    assert_int_equal(run_and_compare(engine, plain, "h2o,tokens=40", 0, PROMPT, PROMPT), 0);
    assert_int_equal(run_and_compare(engine, plain, "distillcache,tokens=40", 0, PROMPT, PROMPT), 0);
    assert_int_equal(run_and_compare(engine, plain, "h2o_mean,tokens=30", 0, PROMPT, PROMPT), 416);
    if (all)
        assert_int_equal(run_and_compare(engine, plain, "distillcache,tokens=50", 0, PROMPT, PROMPT), 416);
    assert_int_equal(run_and_compare(engine, plain, "keyformer,tokens=40,seed=1", 0, PROMPT, PROMPT), 0);
    if (all)
        assert_int_equal(run_and_compare(engine, plain, "keyformer,tokens=40,seed=2", 0, PROMPT, PROMPT), 0);
    assert_int_equal(run_and_compare(engine, plain, "keyformer,tokens=40,seed=1", 0, PROMPT, PROMPT), 416);
    assert_int_equal(run_and_compare(engine, plain, "expected_attention,tokens=40", 0, PROMPT, PROMPT), 0);
    assert_int_equal(run_and_compare(engine, plain, "expected_attention,tokens=40", 0, PROMPT, PROMPT), 416);
    if (all)
        assert_int_equal(run_and_compare(engine, plain, "full", 0, PROMPT, PROMPT), 416);
    pruning_engine_close(engine);
    if (!all) {
        pruning_engine_close(plain);
        return;
    }
    engine = open_engine(0, true);
    assert_int_equal(run_and_compare(engine, plain, "distillcache,tokens=40", 0, PROMPT, PROMPT), 0);
    size_t bytes = engine_snapshot_bytes(engine);
    assert_true(bytes > 0);
    assert_int_equal(run_and_compare(engine, plain, "h2o,tokens=40", 0, PROMPT, PROMPT), 416);
    assert_int_equal(engine_snapshot_bytes(engine), bytes); /* that there is serves */
    pruning_engine_close(engine);
    pruning_engine_close(plain);
}

/* Of a shared beginning of unknown length a second prompt has what lies before a point of the grid, a third all. */
static void a_shared_beginning_is_found(void **state) {
    (void)state;
    struct engine *plain = open_engine(0, false), *engine = open_engine(0, true);
    const char *policy = "h2o,tokens=40";
    assert_int_equal(run_and_compare(engine, plain, policy, 1, 420, 460), 0);
    assert_int_equal(run_and_compare(engine, plain, policy, 2, 420, 450), 256);
    assert_int_equal(run_and_compare(engine, plain, policy, 3, 420, 440), 416);
    assert_int_equal(run_and_compare(engine, plain, policy, 4, 250, 440), 0);
    assert_int_equal(run_and_compare(engine, plain, policy, 5, 250, 440), 240);
    /* Short prompts leave nothing, nor does one that goes on a little. */
    size_t bytes = engine_snapshot_bytes(engine);
    assert_int_equal(run_and_compare(engine, plain, policy, 6, 0, 120), 0);
    assert_int_equal(run_and_compare(engine, plain, policy, 7, 420, 490), 416);
    assert_int_equal(engine_snapshot_bytes(engine), bytes);
    pruning_engine_close(engine);
    pruning_engine_close(plain);
}

/* Where chunks end for snapshots, and that they may be passed over. */
static void chunks_may_end_elsewhere(void **state) {
    (void)state;
    struct engine *plain = open_engine(0, false);
    const char *policy = "distillcache,tokens=40";
    struct stream *expected = open_stream(plain, policy, 0, PROMPT, PROMPT);
    stream_run(expected);
    for (uint32_t chunk = 7; chunk < PROMPT; chunk += 61) {
        struct engine *engine = open_engine(0, true);
        for (uint32_t round = 0; round < 2; round++) {
            struct stream *stream = open_stream(engine, policy, 0, PROMPT, PROMPT);
            assert_int_equal(sequence_snapshot_room(stream->sequence), UINT32_MAX);
            assert_int_equal(reuse(stream), round == 0 ? 0 : 416);
            assert_int_equal(sequence_snapshot_room(stream->sequence), round == 0 ? 256 : UINT32_MAX);
            streams_run(&stream, 1, chunk);
            streams_require_same(expected, stream, 0, policy);
            stream_free(stream);
        }
        pruning_engine_close(engine);
    }
    struct engine *engine = open_engine(0, true);
    struct stream *stream = open_stream(engine, policy, 0, PROMPT, PROMPT);
    struct error error = {0};
    reuse(stream);
    struct batch_item item = {.sequence = stream->sequence, .tokens = stream->tokens, .count = PROMPT - 3};
    assert_int_equal(engine_forward(engine, &item, 1, &error), 0);
    assert_int_equal(engine_snapshot_bytes(engine), 0);
    stream->done = PROMPT - 3;
    stream_run(stream);
    streams_require_same(expected, stream, 0, policy);
    stream_free(stream);
    stream_free(expected);
    pruning_engine_close(engine);
    pruning_engine_close(plain);
}

/* Snapshots take a part of the pool at most, and no sequence is refused a page for them. */
static void snapshots_give_way(void **state) {
    (void)state;
    enum { MOST = 16 };
    const char *policy = "distillcache,tokens=1000"; /* keeps all: statistics stay */
    struct engine *plain = open_engine(0, false);
    size_t page = kv_cache_pool(engine_kv_cache(plain))->page_bytes;
    struct engine *engine = open_engine(4 * 200 * page, true); /* 3200 tokens */
    struct kv_cache *cache = engine_kv_cache(engine);
    uint32_t most = 0;
    for (uint32_t text = 0; text < 30; text++) {
        run_and_compare(engine, plain, policy, text % 7, 0, PROMPT);
        uint32_t bytes = (uint32_t)engine_snapshot_bytes(engine);
        most = most > bytes ? most : bytes;
        assert_true(bytes <= 800 * page / KV_ATTACHED_PART);
        assert_int_equal(kv_cache_pages_free(cache), 800);
    }
    assert_true(most > 0);
    /* Living sequences take all pages. */
    struct stream *streams[MOST];
    uint32_t count = 0, reused = 0;
    struct error error = {0};
    for (; count < MOST; count++) {
        streams[count] = open_stream(engine, policy, count % 2, 0, PROMPT);
        reused += reuse(streams[count]);
        uint32_t left = PROMPT - streams[count]->done;
        struct batch_item item = {streams[count]->sequence, streams[count]->tokens + PROMPT - left, left, WANT_NONE, 0};
        if (engine_forward(engine, &item, 1, &error) != 0)
            break;
        assert_true(kv_cache_check(cache));
    }
    assert_int_equal(error.code, ERROR_PAGES);
    assert_true(count >= 4 && count < MOST);
    for (uint32_t i = 0; i <= count; i++)
        stream_free(streams[i]);
    assert_true(reused > 0);
    pruning_engine_close(engine);
    pruning_engine_close(plain);
}

/* A sequence takes every page that there is: snapshots are gone, and with their blocks at the latest. */
static void snapshots_go_with_their_blocks(void **state) {
    (void)state;
    struct engine *plain = open_engine(0, false);
    size_t page = kv_cache_pool(engine_kv_cache(plain))->page_bytes;
    struct engine *engine = open_engine(4 * 40 * page, true); /* 640 tokens */
    run_and_compare(engine, plain, "h2o,tokens=40", 0, 0, PROMPT);
    assert_true(engine_snapshot_bytes(engine) > 0);
    run_and_compare(engine, plain, "full", 1, 0, 640 - DECODED);
    assert_int_equal(engine_snapshot_bytes(engine), 0);
    assert_int_equal(run_and_compare(engine, plain, "h2o,tokens=40", 0, 0, PROMPT), 0);
    pruning_engine_close(engine);
    pruning_engine_close(plain);
}

/* Forks, swaps and a sequence that is given up before the end of its prompt. */
static void lives_of_sequences(void **state) {
    (void)state;
    const char *policy = "h2o,tokens=60,interval=2";
    struct engine *plain = open_engine(0, false), *engine = open_engine(0, true);
    struct error error = {0};
    struct stream *expected = open_stream(plain, policy, 0, PROMPT, PROMPT);
    stream_run(expected);
    struct stream *cancelled = open_stream(engine, policy, 0, PROMPT, PROMPT);
    reuse(cancelled);
    streams_step(&cancelled, 1, UINT32_MAX);
    assert_int_equal(cancelled->done, 256);
    stream_free(cancelled);
    struct stream *stream = open_stream(engine, policy, 0, PROMPT, PROMPT);
    assert_int_equal(reuse(stream), 256);
    struct stream *early = stream_fork(stream);
    while (stream->done < PROMPT)
        streams_step(&stream, 1, 20);
    struct stream *fork = stream_fork(stream);
    assert_int_equal(sequence_swap_out(fork->sequence, &error), 0);
    stream_run(stream);
    assert_int_equal(sequence_swap_in(fork->sequence, &error), 0);
    stream_run(fork);
    stream_run(early);
    streams_require_same(expected, stream, 0, policy);
    streams_require_same(expected, fork, 0, policy);
    streams_require_same(expected, early, 0, policy);
    stream_free(stream);
    stream_free(fork);
    stream_free(early);
    stream_free(expected);
    pruning_engine_close(engine);
    pruning_engine_close(plain);
}

/* Every allocation of a reuse fails once: all of the prefix or nothing is taken, and what follows is the same. */
static void memory_that_runs_out(void **state) {
    (void)state;
    const char *policy = "distillcache,tokens=40";
    struct engine *plain = open_engine(0, false), *engine = open_engine(0, true);
    struct error error = {0};
    struct stream *expected = open_stream(plain, policy, 0, PROMPT, PROMPT);
    stream_run(expected);
    uint32_t taken = 0, not_taken = 0;
    run_and_compare(engine, plain, policy, 0, PROMPT, PROMPT);
    for (uint32_t successes = 0; successes < 40; successes++) {
        struct stream *stream = open_stream(engine, policy, 0, PROMPT, PROMPT);
        failing_malloc_arm(successes);
        uint32_t reused = reuse(stream);
        failing_malloc_disarm();
        assert_true(reused == 0 || reused == 416);
        taken += reused > 0;
        not_taken += reused == 0;
        assert_true(kv_cache_check(engine_kv_cache(engine)));
        stream_run(stream);
        streams_require_same(expected, stream, 0, policy);
        stream_free(stream);
    }
    assert_true(taken > 0 && not_taken >= 3);
    /* And of a snapshot: it is not left, and nothing else changes. */
    uint32_t left = 0;
    for (uint32_t successes = 0; successes < 24; successes++) {
        struct engine *other = open_engine(0, true);
        struct stream *stream = open_stream(other, policy, 0, PROMPT, PROMPT);
        reuse(stream);
        struct batch_item item = {stream->sequence, stream->tokens, 256, WANT_NONE, 0};
        failing_malloc_arm(successes);
        int code = engine_forward(other, &item, 1, &error);
        failing_malloc_disarm();
        assert_true(code == 0 || code == ERROR_MEMORY);
        left += code == 0 && engine_snapshot_bytes(other) > 0;
        assert_true(kv_cache_check(engine_kv_cache(other)));
        stream->done = sequence_length(stream->sequence);
        if (code == 0) {
            stream_run(stream);
            streams_require_same(expected, stream, 0, policy);
        }
        stream_free(stream);
        pruning_engine_close(other);
    }
    assert_true(left > 0 && left < 24);
    stream_free(expected);
    pruning_engine_close(engine);
    pruning_engine_close(plain);
}

/* The device's memory is one: statistics of sequences get that of snapshots before a request fails for want of it. */

static const struct backend_operations *true_operations;
static uint32_t refusals;

static void *refusing_allocate(struct backend *of, size_t bytes) {
    if (refusals > 0) {
        refusals--;
        return NULL;
    }
    return true_operations->allocate(of, bytes);
}

static void statistics_come_before_snapshots(void **state) {
    (void)state;
    struct engine *plain = open_engine(0, false), *engine = open_engine(0, true);
    run_and_compare(engine, plain, "h2o,tokens=40", 0, PROMPT, PROMPT);
    assert_true(engine_snapshot_bytes(engine) > 0);
    true_operations = engine->backend->operations;
    struct backend_operations operations = *true_operations;
    operations.allocate = refusing_allocate;
    engine->backend->operations = &operations;
    for (uint32_t text = 1; text < 3; text++) {
        struct stream *stream = open_stream(engine, "h2o,tokens=40", text, 0, PROMPT);
        struct batch_item item = {stream->sequence, stream->tokens, 100, WANT_NONE, 0};
        struct error error = {0};
        reuse(stream);
        refusals = 1;
        assert_int_equal(engine_forward(engine, &item, 1, &error), text == 1 ? 0 : ERROR_MEMORY);
        assert_int_equal(engine_snapshot_bytes(engine), 0);
        stream_free(stream);
    }
    engine->backend->operations = true_operations;
    pruning_engine_close(engine);
    pruning_engine_close(plain);
}

/* ---- random lives ---- */

enum { LIVES = 6, STEPS = 2500, KINDS = 6, TEXTS = 4 };

static const char *const kinds[KINDS] = {"h2o,tokens=40", "distillcache,ratio=0.2,minimum=8,interval=3",
    "keyformer,tokens=30,seed=3", "expected_attention,tokens=40,interval=2", "snapkv,tokens=40,window=8,summary=1",
    "h2o_mean,tokens=50,prefill_prune_every=270"};
static const uint32_t prompts[TEXTS] = {420, 300, 360, 200}, beginnings[TEXTS] = {420, 250, 330, 0};

struct run {
    struct engine *engine;
    struct stream *lives[LIVES], *expected[KINDS][TEXTS];
    uint32_t kind[LIVES], text[LIVES];
    bool out[LIVES];
    uint32_t count, draws;
    uint32_t reused, compared, swaps, forks, left;
};

static uint32_t draw(struct run *run, uint32_t below) {
    uint32_t words[4];
    random_philox(5, 0, 0, run->draws++, words);
    return words[0] % below;
}

static void drop(struct run *run, uint32_t at) {
    stream_free(run->lives[at]);
    uint32_t last = --run->count;
    run->lives[at] = run->lives[last];
    run->kind[at] = run->kind[last];
    run->text[at] = run->text[last];
    run->out[at] = run->out[last];
}

static void add_life(struct run *run, struct stream *stream, uint32_t kind, uint32_t text) {
    run->lives[run->count] = stream;
    run->kind[run->count] = kind;
    run->text[run->count] = text;
    run->out[run->count++] = false;
}

static void begin(struct run *run) {
    uint32_t kind = draw(run, KINDS), text = draw(run, TEXTS);
    struct stream *stream = open_stream(run->engine, kinds[kind], text, beginnings[text], prompts[text]);
    uint32_t reused = reuse(stream);
    run->reused += reused > 0;
    add_life(run, stream, kind, text);
}

static void swap(struct run *run, uint32_t at) {
    struct error error = {0};
    struct sequence *sequence = run->lives[at]->sequence;
    int code = run->out[at] ? sequence_swap_in(sequence, &error) : sequence_swap_out(sequence, &error);
    assert_true(code == 0 || (run->out[at] && code == ERROR_PAGES));
    run->out[at] ^= code == 0;
    run->swaps += code == 0;
}

static void go_on(struct run *run, uint32_t at) {
    enum { COPIES = 60 }; /* pages that a prune may take */
    struct stream *stream = run->lives[at];
    uint32_t chunk = draw(run, 2) == 0 ? UINT32_MAX : 1 + draw(run, 200), left = stream->total - stream->done;
    if (kv_cache_pages_free(engine_kv_cache(run->engine)) <
        sequence_pages_needed(stream->sequence, left < 256 ? left : 256) + COPIES) {
        drop(run, draw(run, run->count));
        return;
    }
    size_t before = engine_snapshot_bytes(run->engine);
    if (streams_step(&stream, 1, chunk)) {
        run->left += engine_snapshot_bytes(run->engine) > before;
        return;
    }
    streams_require_same(run->expected[run->kind[at]][run->text[at]], stream, 0, kinds[run->kind[at]]);
    run->compared++;
    drop(run, at);
}

static void step(struct run *run) {
    uint32_t choice = draw(run, 100), at = run->count > 0 ? draw(run, run->count) : 0;
    if (run->count == 0 || (choice < 10 && run->count < LIVES)) {
        begin(run);
    } else if (choice < 13) {
        drop(run, at);
    } else if (choice < 18 || run->out[at]) {
        swap(run, at);
    } else if (choice < 22 && run->count < LIVES) {
        struct sequence *fork = sequence_fork(run->lives[at]->sequence);
        run->forks += fork != NULL;
        if (fork == NULL) /* no pages for its statistics */
            return;
        sequence_free(fork);
        add_life(run, stream_fork(run->lives[at]), run->kind[at], run->text[at]);
    } else {
        go_on(run, at);
    }
}

static void random_lives_end_alike(void **state) {
    (void)state;
    struct engine *plain = open_engine(0, false);
    size_t page = kv_cache_pool(engine_kv_cache(plain))->page_bytes;
    struct run run = {.engine = open_engine(4 * 100 * page, true)};
    for (uint32_t kind = 0; kind < KINDS; kind++)
        for (uint32_t text = 0; text < TEXTS; text++) {
            run.expected[kind][text] = open_stream(plain, kinds[kind], text, beginnings[text], prompts[text]);
            stream_run(run.expected[kind][text]);
        }
    bool few = sanitized() || !chosen_backend_is_cpu();
    uint32_t steps = chosen_backend_share(sanitized() ? STEPS / 5 : STEPS, STEPS / 8), least = few ? 2 : 30;
    for (uint32_t i = 0; i < steps; i++) {
        step(&run);
        assert_true(kv_cache_check(engine_kv_cache(run.engine)));
    }
    while (run.count > 0)
        drop(&run, 0);
    print_message("reused %u, compared %u, swaps %u, forks %u, snapshots %u\n", run.reused, run.compared, run.swaps,
        run.forks, run.left);
    assert_true(run.reused > least && run.compared > least && run.swaps > least && run.forks > least);
    assert_true(run.left > least && (run.swaps > 50 || few));
    for (uint32_t i = 0; i < KINDS * TEXTS; i++)
        stream_free(run.expected[i / TEXTS][i % TEXTS]);
    pruning_engine_close(run.engine);
    pruning_engine_close(plain);
}

static int create_model(void **state) {
    (void)state;
    struct tiny_llama shape = tiny_llama_default();
    shape.context = 1024;
    model = pruning_model(&shape);
    tiny_folder_create(folder);
    struct engine *engine = open_engine(0, false);
    pruning_ship_networks(engine, folder);
    engine_close(engine);
    return 0;
}

static int free_model(void **state) {
    (void)state;
    tiny_folder_remove(folder);
    model_free(model);
    return 0;
}

int main(void) {
    const struct CMUnitTest all[] = {
        cmocka_unit_test(statistics_must_be_there),
        cmocka_unit_test(lives_of_sequences),
        cmocka_unit_test(every_policy_goes_on_from_a_prefix),
        cmocka_unit_test(options_change_nothing),
        cmocka_unit_test(a_shared_beginning_is_found),
        cmocka_unit_test(chunks_may_end_elsewhere),
        cmocka_unit_test(snapshots_give_way),
        cmocka_unit_test(snapshots_go_with_their_blocks),
        cmocka_unit_test(memory_that_runs_out),
        cmocka_unit_test(statistics_come_before_snapshots),
        cmocka_unit_test(random_lives_end_alike),
    };
    const struct CMUnitTest of_device[] = {
        /* what touches device memory */
        cmocka_unit_test(statistics_must_be_there),
        cmocka_unit_test(lives_of_sequences),
    };
    const struct CMUnitTest of_ranks[] = {
        cmocka_unit_test(statistics_must_be_there),
        cmocka_unit_test(lives_of_sequences),
        cmocka_unit_test(snapshots_give_way),
        cmocka_unit_test(random_lives_end_alike),
        cmocka_unit_test(memory_that_runs_out),
    };
    /* A device whose host side finds no memory is lost: that is for the CPU's ranks alone. */
    const struct CMUnitTest of_devices[] = {of_ranks[0], of_ranks[1], of_ranks[2], of_ranks[3]};
    if (chosen_backend_is_cpu())
        return cmocka_run_group_tests_name("prefix", all, create_model, free_model);
    if (chosen_backend_ranks() > 1 && strcmp(chosen_backend(), "cpu") != 0)
        return cmocka_run_group_tests_name("prefix on devices", of_devices, create_model, free_model);
    if (chosen_backend_ranks() > 1)
        return cmocka_run_group_tests_name("prefix on ranks", of_ranks, create_model, free_model);
    return cmocka_run_group_tests_name("prefix on a device", of_device, create_model, free_model);
}
