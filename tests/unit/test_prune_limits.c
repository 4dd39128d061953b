/* SPDX-License-Identifier: Apache-2.0
 *
 * When prunes are due, what is refused, what admission is told, and what happens when memory or pages run out: no
 * sequence is damaged, and no page is lost in thousands of random steps.
 */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "engine/random.h"
#include "tests/unit/failing_malloc.h"
#include "tests/unit/pruning.h"

static struct model *model;

static struct engine *open_engine(uint32_t pages_a_head, bool prefix_sharing) {
    struct kv_layout layout = {.layers = model->shape.layers,
        .kv_heads = model->shape.kv_heads,
        .head_dim = model->shape.head_dim,
        .format = KV_F16};
    size_t pages = (size_t)layout.layers * layout.kv_heads * pages_a_head;
    return pruning_engine(model, &(struct engine_options){.kv_format = KV_F16,
                                     .kv_bytes = pages * kv_page_bytes(&layout),
                                     .prefix_sharing = prefix_sharing,
                                     .backend = {.threads = 1}});
}

/* ---- when ---- */

/* The lengths at which a sequence that is fed as much as it may take is pruned. */
static uint32_t prune_lengths(
    struct engine *engine, const char *policy, uint32_t prompt, uint32_t total, uint32_t *out) {
    struct stream *stream = stream_create(engine, policy, 1, prompt, total);
    struct error error = {0};
    uint32_t count = 0;
    while (stream->done < total) {
        uint32_t room = sequence_room(stream->sequence), left = total - stream->done;
        uint32_t most = room < left ? room : left;
        struct batch_item item = {.sequence = stream->sequence, .tokens = stream->tokens + stream->done, .count = most};
        assert_int_equal(engine_forward(engine, &item, 1, &error), 0);
        stream->done += most;
        if (sequence_room(stream->sequence) == 0) {
            out[count++] = stream->done;
            item.count = 1; /* refused until it is pruned */
            assert_int_equal(engine_forward(engine, &item, 1, &error), ERROR_INVALID);
        }
        assert_int_equal(engine_prune(engine, &stream->sequence, 1, &error), 0);
    }
    stream_free(stream);
    return count;
}

static void prunes_are_due_by_the_schedule(void **state) {
    (void)state;
    static const struct {
        const char *policy;
        uint32_t lengths[12];
    } cases[] = {
        {"h2o,tokens=16", {50, 51, 52, 53, 54, 55, 56, 57, 58, 59, 60}},
        {"h2o,tokens=16,interval=4", {50, 54, 58}},
        {"h2o,tokens=16,interval=4,prefill_prune_every=20", {20, 40, 50, 54, 58}},
        {"h2o,tokens=16,interval=9,prefill_prune_every=25", {25, 50, 59}},
        {"h2o,tokens=16,interval=9,prefill_prune_every=64", {50, 59}},
        {"snapkv,tokens=16,window=4,decode=keep", {50}},
        {"snapkv,tokens=16,window=4,decode=keep,prefill_prune_every=30", {30, 50}},
        {"h2o,tokens=1000,interval=8", {50, 58}}, /* over budget or not */
        {"full", {0}},
    };
    struct engine *engine = open_engine(64, false);
    for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++) {
        uint32_t lengths[64], expected = 0;
        uint32_t count = prune_lengths(engine, cases[i].policy, 50, 60, lengths);
        while (expected < 12 && cases[i].lengths[expected] != 0)
            expected++;
        assert_int_equal(count, expected);
        assert_memory_equal(lengths, cases[i].lengths, count * sizeof lengths[0]);
    }
    pruning_engine_close(engine);
}

static void policies_are_chosen_once_and_in_time(void **state) {
    (void)state;
    struct engine *engine = open_engine(64, false);
    struct error error = {0};
    struct policy_settings settings = pruning_settings("h2o,tokens=20");
    struct stream *stream = stream_create(engine, NULL, 1, 30, 40);
    streams_step(&stream, 1, 10);
    assert_int_equal(sequence_set_policy(stream->sequence, &settings, 30, &error), ERROR_INVALID);
    stream_free(stream);
    stream = stream_create(engine, "h2o,tokens=24", 1, 30, 40);
    assert_int_equal(sequence_set_policy(stream->sequence, &settings, 30, &error), ERROR_INVALID);
    assert_int_equal(sequence_policy(stream->sequence)->tokens, 24);
    stream_free(stream);
    policy_settings_release(&settings);

    char path[] = "/tmp/gates-XXXXXX"; /* gates of another model */
    int file = mkstemp(path);
    assert_true(file >= 0);
    FILE *out = fdopen(file, "w");
    fputs("{\"gates\": [[0.5, 1]]}", out);
    fclose(out);
    char text[64];
    snprintf(text, sizeof text, "rlkv:%s", path);
    settings = pruning_settings(text);
    struct sequence *sequence = sequence_create(engine);
    assert_int_equal(sequence_set_policy(sequence, &settings, 30, &error), ERROR_UNSUPPORTED);
    assert_non_null(strstr(error.message, "1 layers"));
    sequence_free(sequence);
    policy_settings_release(&settings);
    remove(path);
    pruning_engine_close(engine);
}

static void explicit_actions_take_statistics_along(void **state) {
    (void)state;
    struct engine *engine = open_engine(64, false);
    struct error error = {0};
    struct stream *stream = stream_create(engine, "h2o,tokens=60", 1, 50, 70);
    streams_step(&stream, 1, 50);
    uint32_t slots[50], count = 0, total = (uint32_t)kv_sequence_slots_held(sequence_kv(stream->sequence));
    float *before = calloc(total, sizeof *before), *after = calloc(total, sizeof *after);
    assert_int_equal(sequence_scores(stream->sequence, before, &error), 0);
    for (uint32_t i = 0; i < 50; i += 1 + i % 3)
        slots[count++] = i;
    assert_int_equal(sequence_keep(stream->sequence, 0, 1, slots, count, &error), 0);
    assert_int_equal(kv_sequence_slots(sequence_kv(stream->sequence), 0, 1), count);
    assert_int_equal(sequence_scores(stream->sequence, after, &error), 0);
    for (uint32_t i = 0; i < count; i++)
        assert_true(after[50 + i] == before[50 + slots[i]]);
    assert_memory_equal(after, before, 50 * sizeof *after);
    assert_int_equal(sequence_keep(stream->sequence, 2, 0, slots, count, &error), ERROR_INVALID);
    assert_int_equal(sequence_keep(stream->sequence, 0, 0, slots + 1, 50, &error), ERROR_INVALID);
    stream_run(stream);
    free(before);
    free(after);
    stream_free(stream);

    /* A policy that holds the same slots in all heads of a layer cannot go on when they were made different. */
    stream = stream_create(engine, "tova,tokens=20", 1, 50, 70);
    struct batch_item item = {.sequence = stream->sequence, .tokens = stream->tokens, .count = 50};
    assert_int_equal(engine_forward(engine, &item, 1, &error), 0);
    assert_int_equal(sequence_keep(stream->sequence, 1, 1, slots, count, &error), 0);
    assert_true(engine_prune(engine, &stream->sequence, 1, &error) < 0);
    assert_true(kv_cache_check(engine_kv_cache(engine)));
    stream_free(stream);
    float score;
    stream = stream_create(engine, "full", 1, 50, 70);
    assert_int_equal(sequence_scores(stream->sequence, &score, &error), ERROR_INVALID);
    stream_free(stream);
    pruning_engine_close(engine);
}

/* At decode the slot that goes waits for the next token: nothing else moves, and no page comes or goes. */
static void a_decode_step_reuses_the_slot_that_went(void **state) {
    (void)state;
    static const char *const policies[] = {
        "streaming,tokens=24", "h2o,tokens=24", "tova,tokens=24", "snapkv,tokens=24,window=8"};
    struct engine *engine = open_engine(64, false);
    for (size_t i = 0; i < sizeof policies / sizeof policies[0]; i++) {
        struct stream *stream = stream_create(engine, policies[i], 1, 50, 90);
        struct kv_sequence *kv = sequence_kv(stream->sequence);
        uint32_t before[4][32] = {0}, after[32], went = 0;
        while (streams_step(&stream, 1, 50)) {
            uint32_t pages = kv_sequence_pages_held(kv);
            for (uint32_t head = 0; head < 4; head++) {
                uint32_t slots = kv_sequence_slots(kv, head / 2, head % 2), changed = 0;
                kv_sequence_positions(kv, head / 2, head % 2, after);
                assert_int_equal(kv_sequence_tokens(kv, head / 2, head % 2), 24);
                assert_int_equal(slots, stream->done == 50 ? 24 : 25);
                for (uint32_t slot = 0; slot < slots && stream->done > 51; slot++)
                    changed += after[slot] != before[head][slot];
                assert_true(changed <= 2); /* where the token came and where one went, which may be the same */
                went += changed;
                memcpy(before[head], after, slots * sizeof after[0]);
            }
            assert_int_equal(pages, 4 * 2);
        }
        assert_true(went > 100);
        stream_free(stream);
    }
    pruning_engine_close(engine);
}

/* ---- what it takes ---- */

static uint32_t pages_taken(const struct engine *engine) {
    struct kv_cache *cache = engine_kv_cache((struct engine *)engine);
    return kv_cache_pages_total(cache) - kv_cache_pages_free(cache);
}

/* Admission must not be told less than what is taken, and not much more. */
static void demand_is_what_is_taken(void **state) {
    (void)state;
    static const char *const policies[] = {"full", "streaming,tokens=40", "streaming,ratio=0.4,positions=cache",
        "h2o,ratio=0.25", "h2o,tokens=40,interval=16", "h2o,tokens=40,prefill_prune_every=32",
        "snapkv,ratio=0.25,window=8", "snapkv,tokens=40,window=8,decode=keep", "pyramidkv,tokens=60,window=8",
        "adakv,tokens=40,window=8", "criticalkv,tokens=60,window=8,interval=1", "cake,tokens=40,window=8",
        "laprox,tokens=40,window=8", "restkv,tokens=40,window=8", "keyformer,ratio=0.5", "expected_attention,tokens=40",
        "scissorhands,ratio=0.25", "knorm,tokens=40,scope=model", "rlkv,recent_tokens=24,sinks=4", "hybrid,ratio=0.4",
        "h2o,tokens=400", "tova,tokens=40,interval=3", "h2o,tokens=40,summary=1", "h2o,tokens=49,interval=16,summary=1",
        "snapkv,tokens=40,window=8,decode=keep,summary=1", "adakv,tokens=40,window=8,summary=1",
        "streaming,ratio=0.4,prefill_prune_every=32,summary=1", "hybrid,ratio=0.4,summary=1",
        "h2o,tokens=400,summary=1"};
    struct engine *engine = open_engine(256, false);
    for (size_t i = 0; i < sizeof policies / sizeof policies[0]; i++) {
        for (uint32_t round = 0; round < 3; round++) {
            uint32_t prompt = 150 + 37 * round, total = prompt + (round == 2 ? 0 : 60), peak = 0, end = 0;
            struct policy_settings settings = pruning_settings(policies[i]);
            struct sequence_demand demand = engine_demand(engine, &settings, prompt, total);
            policy_settings_release(&settings);
            struct stream *stream = stream_create(engine, policies[i], 4, prompt, total);
            while (streams_step(&stream, 1, 50)) {
                uint32_t taken = pages_taken(engine);
                peak = stream->done <= prompt && taken > peak ? taken : peak;
                end = stream->done > prompt && taken > end ? taken : end;
            }
            end = pages_taken(engine) > end ? pages_taken(engine) : end;
            if (peak > demand.peak_pages || end > demand.pages)
                fail_msg("%s, %u of %u: %u and %u pages where %llu and %llu were foreseen", policies[i], prompt, total,
                    peak, end, (unsigned long long)demand.peak_pages, (unsigned long long)demand.pages);
            if (demand.pages > end + end / 2 + 16)
                fail_msg("%s, %u of %u: %u pages at the end where %llu were foreseen", policies[i], prompt, total, end,
                    (unsigned long long)demand.pages);
            stream_free(stream);
        }
    }
    pruning_engine_close(engine);
}

/* A pruned sequence may be longer than all that the pool could hold. */
static void a_pruned_sequence_outgrows_the_pool(void **state) {
    (void)state;
    struct engine *engine = open_engine(8, false); /* 128 tokens */
    assert_int_equal(engine_tokens_max(engine), 128);
    struct stream *stream = stream_create(engine, "streaming,tokens=40,prefill_prune_every=32", 1, 300, 400);
    stream_run(stream);
    assert_int_equal(sequence_length(stream->sequence), 400);
    stream_free(stream);
    struct error error = {0};
    stream = stream_create(engine, NULL, 1, 129, 129);
    struct batch_item item = {.sequence = stream->sequence, .tokens = stream->tokens, .count = 129};
    assert_int_equal(engine_forward(engine, &item, 1, &error), ERROR_CONTEXT);
    stream_free(stream);
    pruning_engine_close(engine);
}

/* ---- when it fails ---- */

/* All pages are shared with a fork and none is free: nothing can be pruned, and nothing is. Once there are pages, the
 * sequence goes on as if it had never been refused. */
static void check_prune_without_pages(const char *policy, uint32_t pages) {
    struct engine *engine = open_engine(pages, false);
    struct kv_cache *cache = engine_kv_cache(engine);
    struct error error = {0};
    struct stream *expected = stream_create(engine, policy, 1, 120, 140);
    stream_run(expected);
    struct stream *stream = stream_create(engine, policy, 1, 120, 140);
    struct batch_item item = {.sequence = stream->sequence, .tokens = stream->tokens, .count = 120, .want = WANT_LAST};
    assert_int_equal(engine_forward(engine, &item, 1, &error), 0);
    memcpy(stream->logits, expected->logits, model->shape.vocabulary * sizeof(float));
    stream->kept[0] = expected->kept[0];
    stream->done = 120;
    struct sequence *fork = sequence_fork(stream->sequence);
    assert_non_null(fork);
    struct stream *filler = stream_create(engine, NULL, 2, 90, 90);
    while (kv_cache_pages_free(cache) > 0) {
        uint32_t needed = sequence_pages_needed(filler->sequence, 1);
        if (needed > kv_cache_pages_free(cache))
            break;
        struct batch_item more = {.sequence = filler->sequence, .tokens = filler->tokens, .count = 1};
        assert_int_equal(engine_forward(engine, &more, 1, &error), 0);
    }
    uint32_t free_pages = kv_cache_pages_free(cache);
    assert_int_equal(engine_prune(engine, &stream->sequence, 1, &error), ERROR_PAGES);
    assert_true(kv_cache_check(cache));
    assert_int_equal(kv_cache_pages_free(cache), free_pages);
    assert_int_equal(kv_sequence_slots_held(sequence_kv(stream->sequence)), 120 * 4);
    assert_int_equal(sequence_room(stream->sequence), 0);
    assert_int_equal(engine_prune(engine, &stream->sequence, 1, &error), ERROR_PAGES);
    stream_free(filler);
    assert_int_equal(engine_prune(engine, &stream->sequence, 1, &error), 0);
    stream_run(stream);
    streams_require_same(expected, stream, 1, "after waiting");
    sequence_free(fork);
    stream_free(expected);
    stream_free(stream);
    pruning_engine_close(engine);
}

static void a_prune_without_pages_waits(void **state) {
    (void)state;
    check_prune_without_pages("knorm,tokens=40", 16);
    check_prune_without_pages("knorm,tokens=40,summary=1", 24);
}

/* Every allocation of every step fails once. */
static void a_prune_without_memory_can_be_tried_again(void **state) {
    (void)state;
    static const char *const policies[] = {"h2o,tokens=24", "snapkv,tokens=24,window=8,interval=3",
        "adakv,tokens=24,window=8", "cake,tokens=24,window=8", "hybrid,ratio=0.4,minimum=8",
        "streaming,tokens=20,positions=cache", "tova,tokens=24,scope=model", "expected_attention,tokens=24,interval=1",
        "knorm,tokens=24,summary=1"};
    struct error error = {0};
    uint32_t failures = 0;
    for (size_t i = 0; i < sizeof policies / sizeof policies[0]; i++) {
        struct engine *engine = open_engine(64, false);
        struct stream *expected = stream_create(engine, policies[i], 1, 60, 70);
        stream_run(expected);
        for (uint32_t nth = 0; nth < 60; nth++) {
            struct engine *fresh = open_engine(64, false); /* without work space */
            struct stream *stream = stream_create(fresh, policies[i], 1, 60, 70);
            while (stream->done < stream->total) {
                uint32_t count = stream->done < 60 ? 60 : 1;
                struct batch_item item = {.sequence = stream->sequence,
                    .tokens = stream->tokens + stream->done,
                    .count = count,
                    .want = WANT_LAST};
                assert_int_equal(engine_forward(fresh, &item, 1, &error), 0);
                stream->done += count;
                float *logits = stream->logits + (size_t)(stream->done - 60) * model->shape.vocabulary;
                assert_int_equal(engine_logits(fresh, item.first_row, logits, &error), 0);
                failing_malloc_arm(nth);
                int code = engine_prune(fresh, &stream->sequence, 1, &error);
                bool failed = failing_malloc_disarm();
                assert_true(code == 0 || (code == ERROR_MEMORY && failed));
                failures += code != 0;
                assert_true(kv_cache_check(engine_kv_cache(fresh)));
                if (code != 0)
                    assert_int_equal(engine_prune(fresh, &stream->sequence, 1, &error), 0);
                stream->kept[stream->done - 60] = expected->kept[stream->done - 60];
            }
            streams_require_same(expected, stream, 0, policies[i]);
            stream_free(stream);
            pruning_engine_close(fresh);
        }
        stream_free(expected);
        pruning_engine_close(engine);
    }
    assert_true(failures > 50);
}

/* ---- random steps ---- */

enum { STREAMS = 8, STEPS = 10000 };

struct run {
    struct engine *engine;
    struct stream *streams[STREAMS];
    bool out[STREAMS];
    uint32_t count;
    uint64_t seed, draws;
    uint32_t prunes, forks, swaps, refused, cancelled, finished, reused;
};

static uint32_t draw(struct run *run, uint32_t below) {
    uint32_t words[4];
    random_philox(run->seed, 0, 0, run->draws++, words);
    return words[0] % below;
}

static void drop(struct run *run, uint32_t at) {
    stream_free(run->streams[at]);
    run->count--;
    run->streams[at] = run->streams[run->count];
    run->out[at] = run->out[run->count];
}

static void add(struct run *run) {
    static const char *const policies[] = {NULL, "full", "streaming,tokens=24,positions=cache",
        "h2o,ratio=0.3,minimum=8", "h2o,tokens=30,interval=4,prefill_prune_every=32", "snapkv,tokens=24,window=8",
        "adakv,tokens=24,window=8", "tova,tokens=20", "cake,tokens=24,window=8,interval=2", "keyformer,tokens=24",
        "expected_attention,tokens=24", "criticalkv,tokens=24,window=8,interval=3", "hybrid,ratio=0.5,minimum=8",
        "knorm,tokens=24,scope=model", "scissorhands,tokens=16", "restkv,tokens=24,window=8,interval=5",
        "snapkv,tokens=24,window=8,decode=keep", "h2o,tokens=24,summary=1",
        "adakv,ratio=0.3,minimum=8,interval=3,prefill_prune_every=32,summary=1",
        "snapkv,tokens=24,window=8,decode=keep,summary=1"};
    uint32_t prompt = 1 + draw(run, 120), total = prompt + draw(run, 60);
    const char *policy = policies[draw(run, sizeof policies / sizeof policies[0])];
    struct stream *stream = stream_create(run->engine, policy, draw(run, 3), prompt, total);
    stream->done = sequence_reuse_prefix(stream->sequence, stream->tokens, prompt);
    run->reused += stream->done;
    run->out[run->count] = false;
    run->streams[run->count++] = stream;
}

static void go_on(struct run *run, uint32_t at) {
    struct stream *stream = run->streams[at];
    struct error error = {0};
    uint32_t room = sequence_room(stream->sequence), left = stream->total - stream->done;
    uint32_t most = stream->done < stream->prompt ? stream->prompt - stream->done : 1;
    if (left == 0) {
        run->finished++;
        drop(run, at);
        return;
    }
    if (room > 0) { /* else a prune was refused */
        most = most < room ? most : room;
        most = 1 + draw(run, most);
        struct batch_item item = {.sequence = stream->sequence, .tokens = stream->tokens + stream->done, .count = most};
        int code = engine_forward(run->engine, &item, 1, &error);
        run->refused += code != 0;
        assert_true(code == 0 || code == ERROR_PAGES);
        if (code != 0)
            return;
        stream->done += most;
    }
    int code = engine_prune(run->engine, &stream->sequence, 1, &error);
    assert_true(code == 0 || code == ERROR_PAGES);
    run->prunes += code == 0 && stream->done >= stream->prompt;
    run->refused += code != 0;
}

static void swap(struct run *run, uint32_t at) {
    struct error error = {0};
    struct sequence *sequence = run->streams[at]->sequence;
    int code = run->out[at] ? sequence_swap_in(sequence, &error) : sequence_swap_out(sequence, &error);
    assert_true(code == 0 || (run->out[at] && code == ERROR_PAGES));
    run->out[at] ^= code == 0;
    run->swaps += code == 0;
}

static void fork_one(struct run *run, uint32_t at) {
    struct sequence *fork = sequence_fork(run->streams[at]->sequence);
    if (fork == NULL) { /* no pages for its statistics */
        run->refused++;
        assert_true(
            sequence_fork_pages(run->streams[at]->sequence) > kv_cache_pages_free(engine_kv_cache(run->engine)));
        return;
    }
    struct stream *stream = stream_create(run->engine, NULL, 0, run->streams[at]->prompt, run->streams[at]->total);
    memcpy(stream->tokens, run->streams[at]->tokens, stream->total * sizeof *stream->tokens);
    sequence_free(stream->sequence);
    stream->sequence = fork;
    stream->done = run->streams[at]->done;
    run->out[run->count] = false;
    run->streams[run->count++] = stream;
    run->forks++;
}

static void step(struct run *run) {
    uint32_t choice = draw(run, 100), at = run->count > 0 ? draw(run, run->count) : 0;
    if (run->count == 0 || (choice < 8 && run->count < STREAMS))
        add(run);
    else if (choice < 12) {
        drop(run, at);
        run->cancelled++;
    } else if (choice < 20 || run->out[at])
        swap(run, at);
    else if (choice < 25 && run->count < STREAMS)
        fork_one(run, at);
    else
        go_on(run, at);
}

static void random_steps_lose_no_page(void **state) {
    (void)state;
    for (uint64_t seed = 1; seed <= 2; seed++) {
        struct run run = {.seed = seed, .engine = open_engine(30, seed == 1)};
        for (uint32_t i = 0; i < STEPS; i++) {
            step(&run);
            if (i % 16 == 0)
                assert_true(kv_cache_check(engine_kv_cache(run.engine)));
        }
        while (run.count > 0)
            drop(&run, 0);
        print_message("seed %llu: prunes %u, forks %u, swaps %u, refused %u, cancelled %u, finished %u, reused %u\n",
            (unsigned long long)seed, run.prunes, run.forks, run.swaps, run.refused, run.cancelled, run.finished,
            run.reused);
        assert_true(run.prunes > 1000 && run.forks > 100 && run.swaps > 200 && run.refused > 20 && run.finished > 50);
        pruning_engine_close(run.engine);
    }
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
        cmocka_unit_test(prunes_are_due_by_the_schedule),
        cmocka_unit_test(policies_are_chosen_once_and_in_time),
        cmocka_unit_test(explicit_actions_take_statistics_along),
        cmocka_unit_test(a_decode_step_reuses_the_slot_that_went),
        cmocka_unit_test(demand_is_what_is_taken),
        cmocka_unit_test(a_pruned_sequence_outgrows_the_pool),
        cmocka_unit_test(a_prune_without_pages_waits),
        cmocka_unit_test(a_prune_without_memory_can_be_tried_again),
        cmocka_unit_test(random_steps_lose_no_page),
    };
    return cmocka_run_group_tests_name("prune_limits", tests, open_model, close_model);
}
