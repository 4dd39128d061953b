/* SPDX-License-Identifier: Apache-2.0
 *
 * Summary slots of sequences on a tiny random model: when they are there, what they hold, what they are charged, and
 * whose they are. That nothing depends on batches, chunks, threads, tiers, forks and swaps is tested with all policies
 * (test_prune.c, test_swap.c); what they do to attention, against references (tests/parity, tests/model).
 */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>

#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "engine/engine_internal.h"
#include "tests/unit/chosen_backend.h"
#include "tests/unit/pruning.h"

enum { PROMPT = 60, TOTAL = 90, HEADS = 4, DIM = 16 };

static struct model *model;

static struct engine *open_engine(void) {
    return pruning_engine(model, &(struct engine_options){.kv_format = KV_F32, .prefix_sharing = true});
}

static size_t charged_statistics(const struct stream *stream) {
    const struct statistics *statistics = stream->sequence->eviction.statistics;
    return statistics != NULL ? statistics->bytes : 0;
}

/* The option is one of the common ones of the settings, and what it needs of attention is recorded. */
static void every_policy_records_what_a_summary_needs(void **state) {
    (void)state;
    static const char *const policies[] = {"streaming,tokens=24", "knorm,tokens=24", "snapkv,tokens=24,window=8",
        "h2o,tokens=24", "expected_attention,tokens=24"};
    for (size_t i = 0; i < sizeof policies / sizeof policies[0]; i++) {
        struct policy_settings settings = pruning_settings(policies[i]);
        settings.summary = true;
        assert_true(policy_needs(&settings, true) & STATISTIC_SUM);
        assert_true(policy_needs(&settings, false) & STATISTIC_SUM);
        assert_true(policy_prefix_needs(&settings) & STATISTIC_SUM); /* it is a sum over all queries */
        policy_settings_release(&settings);
    }
}

/* Nothing is there until something goes; then B - 1 tokens stay, and the memory is charged like statistics. */
static void memory_comes_with_the_first_eviction(void **state) {
    (void)state;
    struct engine *engine = open_engine();
    struct stream *stream = stream_create(engine, "h2o,tokens=70,summary=1", 1, PROMPT, TOTAL);
    while (stream->done < 70) {
        streams_step(&stream, 1, 20);
        assert_null(stream->sequence->eviction.summaries);
        assert_int_equal(sequence_statistics_bytes(stream->sequence), charged_statistics(stream));
    }
    for (; stream->done < TOTAL; streams_step(&stream, 1, 1)) {
        if (stream->done == 70)
            continue;
        const struct summaries *summaries = stream->sequence->eviction.summaries;
        assert_non_null(summaries);
        assert_int_equal(summaries->bytes, HEADS * SUMMARY_NUMBERS(DIM) * sizeof(float));
        assert_int_equal(sequence_statistics_bytes(stream->sequence), charged_statistics(stream) + summaries->bytes);
        for (uint32_t head = 0; head < HEADS; head++)
            assert_int_equal(kv_sequence_tokens(sequence_kv(stream->sequence), head / 2, head % 2), 69);
        struct sequence_memory memory = sequence_memory(stream->sequence);
        assert_true(memory.kept == 69);
        assert_int_equal(memory.bytes,
            kv_sequence_pages_held(sequence_kv(stream->sequence)) * kv_cache_pool(engine_kv_cache(engine))->page_bytes +
                sequence_statistics_bytes(stream->sequence));
    }
    stream_free(stream);
    pruning_engine_close(engine);
}

/* A head that keeps everything has none; one that just holds its budget keeps it. */
static void heads_that_lose_nothing_have_none(void **state) {
    (void)state;
    struct engine *engine = open_engine();
    struct stream *stream =
        stream_create(engine, "hybrid,ratio=0.5,minimum=8,full_heads=0.25,summary=1", 1, PROMPT, TOTAL);
    stream_run(stream);
    uint32_t full = 0;
    for (uint32_t head = 0; head < HEADS; head++) {
        bool all = kv_sequence_tokens(sequence_kv(stream->sequence), head / 2, head % 2) == TOTAL;
        assert_int_equal(summaries_slot(stream->sequence->eviction.summaries, head) == NULL, all);
        full += all;
    }
    assert_int_equal(full, 1);
    stream_free(stream);
    pruning_engine_close(engine);
}

/* ---- what they hold ---- */

/* Keys, values, positions and attention of all tokens of a head, before its prune. */
struct contents {
    uint32_t count;
    uint32_t positions[TOTAL];
    float keys[TOTAL][DIM], values[TOTAL][DIM];
    double sums[TOTAL];
};

static void read_head(const struct stream *stream, uint32_t head, struct contents *out) {
    const struct kv_pool *pool = kv_cache_pool(engine_kv_cache(stream->engine));
    struct kv_head_view view = kv_sequence_view(sequence_kv(stream->sequence), head / 2, head % 2);
    const struct kv_statistics *statistics = &stream->sequence->eviction.statistics->heads[head];
    struct backend *on = backend_of_head(stream->engine->backend, 2, head);
    uint32_t *sums = chosen_backend_read(on, statistics->sum, 2 * (size_t)statistics->capacity * sizeof *sums);
    float *page = NULL;
    out->count = 0;
    for (uint32_t slot = 0; slot < view.slots; slot++) {
        if (slot % 16 == 0) {
            free(page);
            page = chosen_backend_page(stream->engine->backend, pool, view.pages[slot / 16]);
        }
        int32_t position = ((const int32_t *)(page + (size_t)2 * DIM * 16))[slot % 16];
        if (position == KV_NO_POSITION)
            continue;
        uint32_t i = out->count++;
        out->positions[i] = (uint32_t)position;
        out->sums[i] = (double)kv_sum_get(sums, statistics->capacity, slot) / (1 << 24);
        for (uint32_t c = 0; c < DIM; c++) {
            out->keys[i][c] = page[c * 16 + slot % 16];
            out->values[i][c] = page[(size_t)DIM * 16 + slot % 16 * DIM + c];
        }
    }
    free(page);
    free(sums);
}

static bool stays(const struct stream *stream, uint32_t head, uint32_t position) {
    uint32_t positions[TOTAL], count = stream_positions(stream, head / 2, head % 2, positions);
    for (uint32_t i = 0; i < count; i++)
        if (positions[i] == position)
            return true;
    return false;
}

/* Sums of one head by definition. */
struct sums {
    double key[DIM], value[DIM], weight, weighted;
};

static void add_gone(const struct stream *stream, uint32_t head, const struct contents *before, struct sums *sums) {
    for (uint32_t i = 0; i < before->count; i++) {
        if (stays(stream, head, before->positions[i]))
            continue;
        double weight = fmax(before->sums[i] / (stream->done - before->positions[i]), ldexp(1, -24));
        for (uint32_t c = 0; c < DIM; c++) {
            sums->key[c] += weight * (double)before->keys[i][c];
            sums->value[c] += weight * (double)before->values[i][c];
        }
        sums->weight += weight;
        sums->weighted += weight * log(weight);
    }
}

static void require_near(float got, double want) {
    if (fabs((double)got - want) > 1e-4 * (1 + fabs(want)))
        fail_msg("%g is not %g", (double)got, want);
}

static void check_head(const struct stream *stream, uint32_t head, const struct sums *sums) {
    const float *memory = summaries_slot(stream->sequence->eviction.summaries, head);
    if (sums->weight == 0) {
        assert_null(memory);
        return;
    }
    struct backend *on = backend_of_head(stream->engine->backend, 2, head);
    float *slot = chosen_backend_read(on, memory, (2 * DIM + 1) * sizeof *slot);
    for (uint32_t c = 0; c < DIM; c++) {
        require_near(slot[c], sums->key[c] / sums->weight);
        require_near(slot[DIM + c], sums->value[c] / sums->weight);
    }
    require_near(slot[2 * DIM], log(sums->weight) - sums->weighted / sums->weight);
    free(slot);
}

static void check_contents(const char *policy) {
    struct engine *engine = open_engine();
    struct stream *stream = stream_create(engine, policy, 3, PROMPT, TOTAL);
    static struct contents before[HEADS];
    struct sums sums[HEADS] = {0};
    struct error error = {0};
    while (stream->done < TOTAL) {
        uint32_t room = sequence_room(stream->sequence), count = stream->done < PROMPT ? PROMPT - stream->done : 1;
        count = count < room ? count : room;
        struct batch_item item = {
            .sequence = stream->sequence, .tokens = stream->tokens + stream->done, .count = count};
        assert_int_equal(engine_forward(engine, &item, 1, &error), 0);
        stream->done += count;
        for (uint32_t head = 0; head < HEADS; head++)
            read_head(stream, head, &before[head]);
        assert_int_equal(engine_prune(engine, &stream->sequence, 1, &error), 0);
        for (uint32_t head = 0; head < HEADS; head++) {
            add_gone(stream, head, &before[head], &sums[head]);
            check_head(stream, head, &sums[head]);
        }
    }
    for (uint32_t head = 0; head < HEADS; head++)
        assert_true(sums[head].weight > 0);
    stream_free(stream);
    pruning_engine_close(engine);
}

static void they_hold_what_was_evicted(void **state) {
    (void)state;
    check_contents("h2o,tokens=24,summary=1");
    check_contents("h2o,ratio=0.3,minimum=8,interval=4,prefill_prune_every=25,summary=1");
    check_contents("adakv,tokens=24,window=8,summary=1");
    check_contents("streaming,tokens=20,interval=7,summary=1");
    check_contents("tova,tokens=20,summary=1");
}

/* ---- whose they are ---- */

static bool hold_the_same(const struct engine *engine, const struct summaries *a, const struct summaries *b) {
    void *first = malloc(a->bytes), *second = malloc(a->bytes);
    statistics_download(engine->backend, first, a->memory, a->bytes);
    statistics_download(engine->backend, second, b->memory, a->bytes);
    bool same = memcmp(first, second, a->bytes) == 0;
    free(first);
    free(second);
    return same;
}

/* A fork's slots are a copy: when the two read other tokens, each sums up what it lost itself. */
static void forks_have_their_own(void **state) {
    (void)state;
    struct engine *engine = open_engine();
    struct stream *expected = stream_create(engine, "h2o,tokens=24,summary=1", 5, PROMPT, TOTAL);
    stream_run(expected);
    struct stream *source = stream_create(engine, "h2o,tokens=24,summary=1", 5, PROMPT, TOTAL);
    while (source->done < PROMPT + 8)
        streams_step(&source, 1, 30);
    struct stream *other = stream_fork(source);
    const struct summaries *ours = source->sequence->eviction.summaries, *theirs = other->sequence->eviction.summaries;
    assert_ptr_not_equal(ours->memory, theirs->memory);
    assert_true(hold_the_same(engine, ours, theirs));
    assert_int_equal(sequence_statistics_bytes(source->sequence), sequence_statistics_bytes(other->sequence));
    for (uint32_t i = other->done; i < TOTAL; i++)
        other->tokens[i] = pruning_token(model, 6, i);
    struct stream *both[] = {source, other};
    streams_run(both, 2, 1);
    streams_require_same(expected, source, 0, "beside a fork that reads other tokens");
    assert_false(hold_the_same(engine, ours, theirs));
    stream_free(expected);
    stream_free(source);
    stream_free(other);
    pruning_engine_close(engine);
}

/* `decode: keep`: nothing is evicted any more, statistics go, and the slots are still attended to. */
static void they_outlive_statistics(void **state) {
    (void)state;
    struct engine *engine = open_engine();
    struct stream *stream = stream_create(engine, "snapkv,tokens=24,window=8,decode=keep,summary=1", 1, PROMPT, TOTAL);
    stream_run(stream);
    const struct summaries *summaries = stream->sequence->eviction.summaries;
    assert_null(stream->sequence->eviction.statistics);
    assert_int_equal(sequence_statistics_bytes(stream->sequence), summaries->bytes);
    struct stream *plain = stream_create(engine, "snapkv,tokens=23,window=8,decode=keep", 1, PROMPT, TOTAL);
    stream_run(plain);
    assert_memory_not_equal(stream->logits + model->shape.vocabulary, plain->logits + model->shape.vocabulary,
        model->shape.vocabulary * sizeof(float));
    stream_free(stream);
    stream_free(plain);
    pruning_engine_close(engine);
}

static void positions_in_the_cache_are_refused(void **state) {
    (void)state;
    struct engine *engine = open_engine();
    struct policy_settings settings = pruning_settings("streaming,tokens=24,positions=cache");
    struct sequence *sequence = sequence_create(engine);
    struct error error = {0};
    settings.summary = true;
    assert_int_equal(sequence_set_policy(sequence, &settings, PROMPT, &error), ERROR_UNSUPPORTED);
    assert_non_null(strstr(error.message, "summary"));
    settings.summary = false;
    assert_int_equal(sequence_set_policy(sequence, &settings, PROMPT, &error), 0);
    policy_settings_release(&settings);
    sequence_free(sequence);
    pruning_engine_close(engine);
}

static int open_model(void **state) {
    (void)state;
    struct tiny_llama shape = tiny_llama_default();
    model = pruning_model(&shape);
    assert_int_equal(model->shape.layers * model->shape.kv_heads, HEADS);
    assert_int_equal(model->shape.head_dim, DIM);
    return 0;
}

static int close_model(void **state) {
    (void)state;
    model_free(model);
    return 0;
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(every_policy_records_what_a_summary_needs),
        cmocka_unit_test(memory_comes_with_the_first_eviction),
        cmocka_unit_test(heads_that_lose_nothing_have_none),
        cmocka_unit_test(they_hold_what_was_evicted),
        cmocka_unit_test(forks_have_their_own),
        cmocka_unit_test(they_outlive_statistics),
        cmocka_unit_test(positions_in_the_cache_are_refused),
    };
    return cmocka_run_group_tests_name("summary", tests, open_model, close_model);
}
