/* SPDX-License-Identifier: Apache-2.0
 *
 * Sequences that a network prunes, on a tiny random model: scores are those of the plain computation on what the
 * trainer sees; what is kept depends on nothing but the sequence; and the numbers kept of slots are charged.
 */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "policy/network.h"
#include "tests/unit/chosen_backend.h"
#include "tests/unit/pruning.h"
#include "tests/unit/tiny_network.h"

enum { PROMPT = 90, TOTAL = 130, HEADS = 4, DIM = 16, FILES = 2 };

static char folder[64], files[FILES][128];
static struct policy_network *networks[FILES];
static struct model *model;

static const char *const options[] = {
    "tokens=24,interval=1,scope=head",
    "tokens=24,interval=4",
    "ratio=0.3,minimum=8,interval=3,scope=model,summary=0",
    "ratio=0.3,minimum=8,interval=16,prefill_prune_every=32",
    "tokens=30,interval=5,protect_recent=6,protect_sinks=2",
};
enum { CASES = sizeof options / sizeof options[0] };

static struct engine *open_engine(bool prefix_sharing, const char *tier) {
    return pruning_engine(model, &(struct engine_options){.kv_format = KV_F16,
                                     .batch_rows = 128,
                                     .prefix_sharing = prefix_sharing,
                                     .backend = {.cpu_features = tier}});
}

static struct stream *open_stream(struct engine *engine, uint32_t file, uint32_t index, uint32_t text) {
    char policy[512];
    snprintf(policy, sizeof policy, "distillcache:%s,%s", files[file], options[index]);
    return stream_create(engine, policy, text, PROMPT, TOTAL);
}

/* ---- scores ---- */

static void read_features(struct sequence *sequence, uint32_t head, struct head_features *out) {
    static uint32_t positions[TOTAL];
    static float sum[TOTAL], squared[TOTAL], entropy[TOTAL], keys[TOTAL * DIM], value_norm[TOTAL], output_norm[TOTAL];
    struct error error = {0};
    *out = (struct head_features){.capacity = TOTAL,
        .positions = positions,
        .sum = sum,
        .squared = squared,
        .entropy = entropy,
        .keys = keys,
        .value_norm = value_norm,
        .output_norm = output_norm};
    if (sequence_features(sequence, head / 2, head % 2, out, &error) != 0)
        fail_msg("%s", error.message);
}

/* Scores of a head before anything was pruned, by float32 numbers where the backend has float16. */
static void plain_scores(struct sequence *sequence, const struct policy_network *network, uint32_t head, float *out) {
    static float content[TOTAL * NETWORK_CONTENT_MAX], inputs[TOTAL * NETWORK_INPUTS_MAX];
    struct head_features features;
    float standard[8];
    uint32_t count = network->shape.content;
    read_features(sequence, head, &features);
    for (uint32_t slot = 0; slot < features.slots; slot++)
        for (uint32_t j = 0; j < count; j++) {
            double value = (double)network->content_offset[head * count + j];
            for (uint32_t c = 0; c < DIM; c++)
                value += (double)network->content[(head * count + j) * DIM + c] * (double)features.keys[slot * DIM + c];
            content[slot * count + j] = (float)value;
        }
    struct network_slots slots = {features.slots, sequence_length(sequence),
        policy_budget(sequence_policy(sequence), sequence_length(sequence)), features.positions, features.sum,
        features.squared, features.entropy, content, features.value_norm, features.output_norm};
    network_gather(&network->shape, &slots, inputs);
    network_standardise(&network->shape, inputs, features.slots, standard);
    network_normalise(network, head, standard, features.slots, inputs);
    network_score(network, head, inputs, features.slots, out);
}

static void scores_are_the_networks(void **state) {
    (void)state;
    for (uint32_t file = 0; file < FILES; file++) {
        struct engine *engine = open_engine(false, NULL);
        struct stream *stream = open_stream(engine, file, 0, 5);
        float scores[HEADS * PROMPT], plain[PROMPT];
        struct error error = {0};
        struct batch_item item = {.sequence = stream->sequence, .tokens = stream->tokens, .count = PROMPT};
        assert_int_equal(engine_forward(engine, &item, 1, &error), 0);
        assert_int_equal(sequence_scores(stream->sequence, scores, &error), 0);
        for (uint32_t head = 0; head < HEADS; head++) {
            plain_scores(stream->sequence, networks[file], head, plain);
            for (uint32_t slot = 0; slot < PROMPT; slot++)
                if (!(fabsf(scores[head * PROMPT + slot] - plain[slot]) < 0.01f))
                    fail_msg("head %u, slot %u: %g, not %g", head, slot, (double)scores[head * PROMPT + slot],
                        (double)plain[slot]);
        }
        stream_free(stream);
        engine_close(engine);
    }
}

/* ---- what is kept ---- */

typedef void (*go_on)(struct engine *engine, struct stream *stream);

static void in_small_chunks(struct engine *engine, struct stream *stream) {
    (void)engine;
    streams_run(&stream, 1, 7);
}

static void beside_others(struct engine *engine, struct stream *stream) {
    struct stream *streams[4] = {stream_create(engine, "h2o,tokens=20", 8, 40, 100), open_stream(engine, 1, 1, 9),
        stream, open_stream(engine, 0, 2, 10)};
    streams_run(streams, 4, 23);
    stream_free(streams[0]);
    stream_free(streams[1]);
    stream_free(streams[3]);
}

static void swapped_at_times(struct engine *engine, struct stream *stream) {
    struct error error = {0};
    (void)engine;
    while (streams_step(&stream, 1, 50)) {
        assert_int_equal(sequence_swap_out(stream->sequence, &error), 0);
        assert_int_equal(sequence_swap_in(stream->sequence, &error), 0);
    }
}

static void scored_before(struct engine *engine, struct stream *stream) {
    float scores[HEADS * TOTAL];
    struct error error = {0};
    (void)engine;
    while (streams_step(&stream, 1, 50)) /* asking freezes and changes nothing */
        assert_int_equal(sequence_scores(stream->sequence, scores, &error), 0);
}

/* The prompt was published by another sequence. */
static void after_its_prefix(struct engine *engine, struct stream *stream) {
    struct stream *other = stream_create(engine, NULL, 5, PROMPT, TOTAL);
    stream_run(other);
    stream->done = sequence_reuse_prefix(stream->sequence, stream->tokens, PROMPT);
    streams_run(&stream, 1, 50);
    stream_free(other);
}

static void what_is_kept_depends_on_the_sequence(void **state) {
    const go_on ways[] = {in_small_chunks, beside_others, swapped_at_times, scored_before, after_its_prefix};
    const char *const names[] = {"small chunks", "others beside it", "swaps", "scores asked for", "a prefix"};
    (void)state;
    for (uint32_t i = 0; i < FILES * CASES; i += chosen_backend_share(1, 7)) {
        struct engine *engine = open_engine(true, NULL);
        struct stream *expected = open_stream(engine, i / CASES, i % CASES, 5);
        streams_run(&expected, 1, UINT32_MAX);
        assert_true(kv_sequence_tokens_held(sequence_kv(expected->sequence)) < HEADS * TOTAL / 2);
        for (uint32_t way = 0; way < sizeof ways / sizeof ways[0]; way++) {
            struct stream *stream = open_stream(engine, i / CASES, i % CASES, 5);
            ways[way](engine, stream);
            streams_require_same(expected, stream, 0, names[way]);
            stream_free(stream);
        }
        stream_free(expected);
        assert_int_equal(engine_statistics_bytes(engine), 0);
        engine_close(engine);
    }
}

static void forks_go_the_same_way(void **state) {
    (void)state;
    for (uint32_t i = 0; i < FILES * CASES; i += chosen_backend_share(1, 5)) {
        struct engine *engine = open_engine(false, NULL);
        struct stream *stream = open_stream(engine, i / CASES, i % CASES, 5);
        while (stream->done < PROMPT + 13)
            streams_step(&stream, 1, 40);
        struct stream *fork = stream_fork(stream);
        stream_run(stream);
        stream_run(fork);
        streams_require_same(stream, fork, 0, options[i % CASES]);
        stream_free(stream);
        stream_free(fork);
        engine_close(engine);
    }
}

/* The same in every tier that the machine has. */
static void tiers_keep_the_same(void **state) {
    const char *const tiers[] = {"scalar", "avx2", "avx512"};
    (void)state;
    if (!chosen_backend_is_cpu())
        skip();
    for (uint32_t i = 0; i < FILES * CASES; i++) {
        struct engine *engines[3];
        struct stream *streams[3];
        uint32_t count = 0;
        for (uint32_t tier = 0; tier < 3; tier++) {
            struct error error = {0};
            struct backend *backend =
                backend_cpu_open(&(struct backend_options){.cpu_features = tiers[tier], .threads = 1}, &error);
            if (backend == NULL)
                break;
            backend->operations->close(backend);
            engines[count] = open_engine(false, tiers[tier]);
            streams[count] = open_stream(engines[count], i / CASES, i % CASES, 5);
            stream_run(streams[count++]);
        }
        assert_true(count > 0);
        for (uint32_t tier = 1; tier < count; tier++)
            streams_require_same(streams[0], streams[tier], 0, tiers[tier]);
        for (uint32_t tier = 0; tier < count; tier++) {
            stream_free(streams[tier]);
            engine_close(engines[tier]);
        }
    }
}

/* ---- memory ---- */

/* Sum, squares (8 bytes), entropy and content + 2 numbers (2) of each slot; `standard` where there is one. */
static void numbers_are_charged(void **state) {
    (void)state;
    const size_t per_slot[FILES] = {8 + 8 + 2 + (4 + 2) * 2, 8 + 8 + 2 + 2 * 2};
    for (uint32_t file = 0; file < FILES; file++) {
        struct engine *engine = open_engine(false, NULL);
        struct stream *stream = open_stream(engine, file, 2, 5); /* without summary slots */
        struct batch_item item = {.sequence = stream->sequence, .tokens = stream->tokens, .count = 80};
        struct sequence_demand demand = engine_demand(engine, sequence_policy(stream->sequence), PROMPT, TOTAL);
        struct error error = {0};
        assert_int_equal(engine_forward(engine, &item, 1, &error), 0);
        size_t slots = (PROMPT + 15) / 16 * 16, bytes = HEADS * (per_slot[file] * slots + (file == 1 ? 64 : 0));
        assert_int_equal(sequence_statistics_bytes(stream->sequence), bytes);
        stream->done = 80;
        const struct kv_cache *cache = engine_kv_cache(engine);
        uint32_t most = 0;
        while (streams_step(&stream, 1, 50)) {
            uint32_t held = kv_cache_pages_total(cache) - kv_cache_pages_free(cache);
            most = held > most ? held : most;
        }
        assert_true(most > 0 && most <= demand.peak_pages);
        assert_true(sequence_statistics_bytes(stream->sequence) < bytes);
        stream_free(stream);
        engine_close(engine);
    }
}

int main(void) {
    struct tiny_llama shape = tiny_llama_default();
    const enum network_features features[FILES] = {FEATURES_CONTENT, FEATURES_PAPER};
    struct error error = {0};
    tiny_folder_create(folder);
    model = pruning_model(&shape);
    for (uint32_t i = 0; i < FILES; i++) {
        struct network_shape of = tiny_network_shape(features[i], shape.layers, shape.kv_heads, shape.head_dim);
        networks[i] = tiny_network_create(&of, 77 + i);
        snprintf(files[i], sizeof files[i], "%s/%u.safetensors", folder, i);
        if (network_save(networks[i], files[i], &error) != 0) {
            fprintf(stderr, "%s\n", error.message);
            return 1;
        }
    }
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(scores_are_the_networks),
        cmocka_unit_test(what_is_kept_depends_on_the_sequence),
        cmocka_unit_test(forks_go_the_same_way),
        cmocka_unit_test(tiers_keep_the_same),
        cmocka_unit_test(numbers_are_charged),
    };
    int failed = cmocka_run_group_tests_name("network_prune", tests, NULL, NULL);
    for (uint32_t i = 0; i < FILES; i++)
        network_release(networks[i]);
    model_free(model);
    tiny_folder_remove(folder);
    return failed;
}
