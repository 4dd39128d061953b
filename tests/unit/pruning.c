/* SPDX-License-Identifier: Apache-2.0 */
#include "tests/unit/pruning.h"

#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>

#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "tests/unit/chosen_backend.h"
#include "tests/unit/tiny_network.h"

enum { STREAMS_MAX = 64, TOKENS_MAX = 1024 };

const char *const pruning_policies[] = {
    "random,tokens=24",
    "streaming,tokens=24",
    "streaming,tokens=20,positions=cache",
    "streaming,ratio=0.3,minimum=8,prefill_prune_every=32,positions=cache",
    "h2o,tokens=24",
    "h2o,ratio=0.3,minimum=8,interval=4",
    "h2o_mean,ratio=0.3,minimum=8,scope=layer",
    "scissorhands,tokens=20",
    "tova,tokens=20",
    "snapkv,tokens=24,window=8",
    "snapkv,tokens=24,window=8,decode=keep",
    "snapkv,tokens=24,window=8,prefill_prune_every=25,interval=3",
    "pyramidkv,tokens=32,window=8",
    "adakv,tokens=24,window=8",
    "criticalkv,tokens=24,window=8,interval=1",
    "keydiff,tokens=24,protect_recent=6",
    "knorm,tokens=24,scope=model",
    "keyformer,tokens=24",
    "expected_attention,tokens=24,interval=2",
    "cake,tokens=24,window=8",
    "laprox,tokens=24,window=8,interval=1",
    "laprox_head,tokens=24,window=8,interval=5",
    "restkv,tokens=24,window=8,interval=2",
    "rlkv,sinks=4,recent_tokens=16",
    "hybrid,ratio=0.5,minimum=8",
    "h2o,tokens=24,summary=1",
    "h2o,ratio=0.3,minimum=8,prefill_prune_every=25,interval=3,summary=1",
    "streaming,tokens=24,summary=1",
    "snapkv,tokens=24,window=8,decode=keep,summary=1",
    "adakv,tokens=24,window=8,summary=1",
    "tova,tokens=20,interval=4,summary=1",
    "knorm,tokens=24,scope=model,summary=1",
    "keyformer,tokens=24,summary=1",
    "scissorhands,tokens=20,summary=1",
    "hybrid,ratio=0.5,minimum=8,summary=1",
};

_Static_assert(sizeof pruning_policies / sizeof pruning_policies[0] == PRUNING_POLICIES, "the header counts them");

struct model *pruning_model(const struct tiny_llama *shape) {
    struct error error = {0};
    char *path = tiny_llama_save(shape);
    struct model *model = model_open(path, &error);
    if (model == NULL)
        fail_msg("%s", error.message);
    unlink(path);
    free(path);
    return model;
}

struct engine *pruning_engine(const struct model *model, const struct engine_options *options) {
    struct error error = {0};
    struct engine_options all = *options;
    all.poison_free = true;
    all.kv_bytes = all.kv_bytes > 0 ? all.kv_bytes : (size_t)16 << 20;
    if (all.backend.cpu_features == NULL) {
        all.backend.name = chosen_backend();
        all.backend.ranks = chosen_backend_ranks();
        all.backend.all_reduce = chosen_backend_all_reduce();
    }
    all.backend.threads = all.backend.threads > 0 ? all.backend.threads : 2;
    struct engine *engine = engine_open(model, &all, &error);
    if (engine == NULL)
        fail_msg("%s", error.message);
    return engine;
}

void pruning_engine_close(struct engine *engine) {
    const struct kv_cache *cache = engine_kv_cache(engine);
    assert_true(kv_cache_check(cache));
    assert_int_equal(kv_cache_pages_free(cache), kv_cache_pages_total(cache));
    assert_int_equal(engine_statistics_bytes(engine), 0);
    engine_close(engine);
}

void pruning_ship_networks(const struct engine *engine, const char *folder) {
    const struct policy_model model = engine_policy_model(engine);
    for (int i = 0; i < 2; i++) {
        enum network_features features = i == 0 ? FEATURES_CONTENT : FEATURES_PAPER;
        struct network_shape shape = tiny_network_shape(features, model.layers, model.kv_heads, model.head_dim);
        tiny_network_ship(
            tiny_network_create(&shape, 1), folder, model.fingerprint, i == 0 ? "distillcache" : "ranker");
    }
    setenv("DISTILLCACHE_POLICIES", folder, 1);
}

struct policy_settings pruning_settings(const char *text) {
    struct policy_settings settings;
    struct error error = {0};
    if (policy_settings_parse(text, &settings, &error) != 0)
        fail_msg("%s: %s", text, error.message);
    return settings;
}

int32_t pruning_token(const struct model *model, uint32_t text, uint32_t i) {
    uint32_t mixed = (text * 2654435761u) ^ (i * 40503u + 77);
    return (int32_t)((mixed ^ mixed >> 13) % model->shape.vocabulary);
}

static struct stream *allocate_stream(struct engine *engine, uint32_t prompt, uint32_t total) {
    struct stream *stream = calloc(1, sizeof *stream);
    uint32_t vocabulary = engine_model(engine)->shape.vocabulary, steps = total - prompt + 1;
    stream->engine = engine;
    stream->prompt = prompt;
    stream->total = total;
    stream->tokens = calloc(total, sizeof *stream->tokens);
    stream->logits = calloc((size_t)steps * vocabulary, sizeof *stream->logits);
    stream->kept = calloc(steps, sizeof *stream->kept);
    return stream;
}

struct stream *stream_create(
    struct engine *engine, const char *policy, uint32_t text, uint32_t prompt, uint32_t total) {
    struct stream *stream = allocate_stream(engine, prompt, total);
    struct error error = {0};
    for (uint32_t i = 0; i < total; i++)
        stream->tokens[i] = pruning_token(engine_model(engine), text, i);
    stream->sequence = sequence_create(engine);
    assert_non_null(stream->sequence);
    if (policy == NULL)
        return stream;
    struct policy_settings settings = pruning_settings(policy);
    if (sequence_set_policy(stream->sequence, &settings, prompt, &error) != 0)
        fail_msg("%s: %s", policy, error.message);
    policy_settings_release(&settings);
    return stream;
}

struct stream *stream_fork(const struct stream *stream) {
    struct stream *fork = allocate_stream(stream->engine, stream->prompt, stream->total);
    uint32_t vocabulary = engine_model(stream->engine)->shape.vocabulary, steps = stream->total - stream->prompt + 1;
    memcpy(fork->tokens, stream->tokens, stream->total * sizeof *fork->tokens);
    memcpy(fork->logits, stream->logits, (size_t)steps * vocabulary * sizeof *fork->logits);
    memcpy(fork->kept, stream->kept, steps * sizeof *fork->kept);
    fork->done = stream->done;
    fork->sequence = sequence_fork(stream->sequence);
    assert_non_null(fork->sequence);
    return fork;
}

void stream_free(struct stream *stream) {
    if (stream == NULL)
        return;
    sequence_free(stream->sequence);
    free(stream->tokens);
    free(stream->logits);
    free(stream->kept);
    free(stream);
}

uint32_t stream_positions(const struct stream *stream, uint32_t layer, uint32_t head, uint32_t *out) {
    struct kv_sequence *kv = sequence_kv(stream->sequence);
    uint32_t slots = kv_sequence_slots(kv, layer, head), tokens = kv_sequence_tokens(kv, layer, head);
    uint32_t positions[TOKENS_MAX], order[TOKENS_MAX];
    assert_true(slots <= TOKENS_MAX);
    kv_sequence_positions(kv, layer, head, positions);
    kv_sequence_order(kv, layer, head, order);
    for (uint32_t i = 0; i < tokens; i++)
        out[i] = positions[order[i]];
    return tokens;
}

static uint64_t hash_kept(const struct stream *stream) {
    const struct model_shape *shape = &engine_model(stream->engine)->shape;
    uint32_t positions[TOKENS_MAX];
    uint64_t hash = 1469598103934665603u;
    for (uint32_t layer = 0; layer < shape->layers; layer++)
        for (uint32_t head = 0; head < shape->kv_heads; head++) {
            uint32_t count = stream_positions(stream, layer, head, positions);
            for (uint32_t i = 0; i <= count; i++)
                hash = (hash ^ (i < count ? positions[i] : UINT32_MAX)) * 1099511628211u;
        }
    return hash;
}

static void note(struct stream *stream, uint32_t row) {
    struct error error = {0};
    uint32_t vocabulary = engine_model(stream->engine)->shape.vocabulary;
    float *logits = stream->logits + (size_t)(stream->done - stream->prompt) * vocabulary;
    assert_int_equal(engine_logits(stream->engine, row, logits, &error), 0);
}

static bool next_item(const struct stream *stream, uint32_t chunk, uint32_t rows, struct batch_item *item) {
    uint32_t left = stream->total - stream->done, most = 1;
    if (left == 0 || rows == 0)
        return false;
    if (stream->done < stream->prompt) {
        uint32_t room = sequence_room(stream->sequence), snapshot = sequence_snapshot_room(stream->sequence);
        most = stream->prompt - stream->done;
        most = most < chunk ? most : chunk;
        most = most < room ? most : room;
        most = most < snapshot ? most : snapshot;
        most = most < rows ? most : rows;
    }
    *item = (struct batch_item){
        .sequence = stream->sequence, .tokens = stream->tokens + stream->done, .count = most, .want = WANT_LAST};
    return true;
}

bool streams_step(struct stream *const *streams, uint32_t count, uint32_t chunk) {
    struct batch_item items[STREAMS_MAX];
    struct stream *owners[STREAMS_MAX];
    struct sequence *sequences[STREAMS_MAX];
    struct error error = {0};
    uint32_t items_count = 0, rows = engine_batch_rows(streams[0]->engine);
    for (uint32_t i = 0; i < count; i++)
        if (next_item(streams[i], chunk, rows, &items[items_count])) {
            rows -= items[items_count].count;
            sequences[items_count] = streams[i]->sequence;
            owners[items_count++] = streams[i];
        }
    if (items_count == 0)
        return false;
    if (engine_forward(streams[0]->engine, items, items_count, &error) != 0)
        fail_msg("%s", error.message);
    for (uint32_t i = 0; i < items_count; i++) {
        owners[i]->done += items[i].count;
        if (owners[i]->done >= owners[i]->prompt)
            note(owners[i], items[i].first_row);
    }
    if (engine_prune(streams[0]->engine, sequences, items_count, &error) != 0)
        fail_msg("%s", error.message);
    for (uint32_t i = 0; i < items_count; i++)
        if (owners[i]->done >= owners[i]->prompt)
            owners[i]->kept[owners[i]->done - owners[i]->prompt] = hash_kept(owners[i]);
    return true;
}

void streams_run(struct stream *const *streams, uint32_t count, uint32_t chunk) {
    while (streams_step(streams, count, chunk))
        ;
}

void stream_run(struct stream *stream) {
    streams_run(&stream, 1, UINT32_MAX);
}

void streams_require_same(const struct stream *a, const struct stream *b, uint32_t first, const char *what) {
    uint32_t vocabulary = engine_model(a->engine)->shape.vocabulary;
    assert_int_equal(a->done, b->done);
    for (uint32_t step = first; step <= a->done - a->prompt; step++) {
        size_t row = (size_t)step * vocabulary;
        if (a->kept[step] != b->kept[step])
            fail_msg("%s: other positions are kept after step %u", what, step);
        if (memcmp(a->logits + row, b->logits + row, vocabulary * sizeof *a->logits) != 0)
            fail_msg("%s: other logits in step %u", what, step);
    }
}
