/* SPDX-License-Identifier: Apache-2.0
 *
 * Sequences that are pruned, on tiny random models: what must not change does not, whatever the policy; and what is
 * left is what dense attention over it gives.
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

#include "engine/cpu/score.h"
#include "engine/engine_internal.h"
#include "engine/random.h"
#include "tests/unit/chosen_backend.h"
#include "tests/unit/pruning.h"
#include "tests/unit/tiny_network.h"

enum { PROMPT = 90, TOTAL = 120 };

enum { CASES = PRUNING_POLICIES };

static const char *const *const policies = pruning_policies;

/* Two of them on a device that is emulated. */
static uint32_t cases(void) {
    return chosen_backend_share(CASES, 2);
}

static const char *case_policy(uint32_t i) {
    return policies[i * (CASES / cases())];
}

struct fixture {
    struct model *model;
    struct engine *engine;
};

static struct fixture open_fixture(const struct tiny_llama *shape, const struct engine_options *options) {
    struct fixture fixture;
    fixture.model = pruning_model(shape);
    fixture.engine = pruning_engine(fixture.model, options);
    return fixture;
}

static struct fixture open_default(void) {
    struct tiny_llama shape = tiny_llama_default();
    return open_fixture(&shape, &(struct engine_options){.kv_format = KV_F16});
}

/* Nothing may be left behind. */
static void close_fixture(struct fixture *fixture) {
    pruning_engine_close(fixture->engine);
    model_free(fixture->model);
}

static struct stream *run_stream(struct engine *engine, const char *policy, uint32_t text) {
    struct stream *stream = stream_create(engine, policy, text, PROMPT, TOTAL);
    stream_run(stream);
    return stream;
}

static void a_budget_that_is_not_exceeded_changes_nothing(void **state) {
    (void)state;
    char folder[64];
    struct fixture fixture = open_default();
    tiny_folder_create(folder);
    pruning_ship_networks(fixture.engine, folder);
    struct stream *full = run_stream(fixture.engine, NULL, 1);
    for (uint32_t i = 0; i < policy_count(); i += chosen_backend_share(1, 9)) {
        char text[128];
        snprintf(text, sizeof text, "%s,tokens=%d", policy_at(i)->name, TOTAL);
        if (strcmp(policy_at(i)->name, "full") == 0)
            strcpy(text, "full");
        if (strcmp(policy_at(i)->name, "rlkv") == 0)
            strcpy(text, "rlkv,recent_tokens=200");
        for (uint32_t summary = 0; summary < 2; summary++) {
            struct stream *stream = run_stream(fixture.engine, text, 1);
            streams_require_same(full, stream, 0, text);
            stream_free(stream);
            strcat(text, ",summary=1");
        }
    }
    stream_free(full);
    tiny_folder_remove(folder);
    close_fixture(&fixture);
}

/* What sequence_set_policy says of these settings on an empty sequence; the settings are released. */
static int try_settings(const struct fixture *fixture, struct policy_settings settings, struct error *error) {
    struct sequence *sequence = sequence_create(fixture->engine);
    assert_non_null(sequence);
    int code = sequence_set_policy(sequence, &settings, 10, error);
    if (code != 0)
        assert_null(sequence_policy(sequence));
    sequence_free(sequence);
    policy_settings_release(&settings);
    return code;
}

static void networks_must_fit_the_model(void **state) {
    (void)state;
    char folder[64];
    struct error error;
    struct fixture fixture = open_default();
    const struct policy_model model = engine_policy_model(fixture.engine);
    tiny_folder_create(folder);
    setenv("DISTILLCACHE_POLICIES", folder, 1);
    assert_int_equal(try_settings(&fixture, pruning_settings("distillcache"), &error), ERROR_IO);
    assert_non_null(strstr(error.message, "is trained for this model"));
    assert_int_equal(try_settings(&fixture, pruning_settings("hybrid,base=ranker"), &error), ERROR_IO);
    assert_int_equal(try_settings(&fixture, pruning_settings("distillcache,ratio=1"), &error), 0);
    pruning_ship_networks(fixture.engine, folder);
    assert_int_equal(try_settings(&fixture, pruning_settings("distillcache"), &error), 0);
    assert_int_equal(try_settings(&fixture, pruning_settings("hybrid,base=ranker"), &error), 0);
    /* Settings that have a network: what they say counts, not what the network was trained with. */
    struct network_shape shape = tiny_network_shape(FEATURES_CONTENT, model.layers, model.kv_heads, model.head_dim);
    struct policy_settings settings = pruning_settings("distillcache");
    settings.network = tiny_network_create(&shape, 3);
    settings.interval = 3;
    struct sequence *sequence = sequence_create(fixture.engine);
    assert_int_equal(sequence_set_policy(sequence, &settings, 10, &error), 0);
    assert_int_equal(sequence_policy(sequence)->interval, 3);
    assert_false(sequence_policy(sequence)->summary);
    assert_ptr_equal(sequence_policy(sequence)->network, settings.network);
    assert_int_equal(settings.network->references, 2);
    sequence_free(sequence);
    assert_int_equal(settings.network->references, 1);
    policy_settings_release(&settings);
    shape.layers++;
    settings = pruning_settings("distillcache");
    settings.network = tiny_network_create(&shape, 3);
    assert_int_equal(try_settings(&fixture, settings, &error), ERROR_UNSUPPORTED);
    assert_non_null(strstr(error.message, "the policy's network is for"));
    tiny_folder_remove(folder);
    close_fixture(&fixture);
}

static void keeping_everything_costs_nothing(void **state) {
    (void)state;
    static const char *const all[] = {"full", "h2o,ratio=1", "snapkv,ratio=1", "rlkv,sparsity=0"};
    struct fixture fixture = open_default();
    struct stream *full = run_stream(fixture.engine, NULL, 1);
    assert_null(sequence_policy(full->sequence));
    assert_int_equal(sequence_room(full->sequence), UINT32_MAX);
    for (size_t i = 0; i < sizeof all / sizeof all[0]; i++) {
        struct stream *stream = run_stream(fixture.engine, all[i], 1);
        streams_require_same(full, stream, 0, all[i]);
        assert_non_null(sequence_policy(stream->sequence));
        assert_int_equal(sequence_room(stream->sequence), UINT32_MAX);
        assert_int_equal(sequence_statistics_bytes(stream->sequence), 0);
        stream_free(stream);
    }
    stream_free(full);
    close_fixture(&fixture);
}

/* ---- against dense attention ---- */

/* Logits after the last of tokens [count], which are all that a new sequence sees. */
static void dense_logits(struct engine *engine, const int32_t *tokens, uint32_t count, float *out) {
    struct sequence *sequence = sequence_create(engine);
    struct error error = {0};
    struct batch_item item = {.sequence = sequence, .tokens = tokens, .count = count, .want = WANT_LAST};
    assert_int_equal(engine_forward(engine, &item, 1, &error), 0);
    assert_int_equal(engine_logits(engine, item.first_row, out, &error), 0);
    sequence_free(sequence);
}

/* In a model of one layer keys and values depend on their own token alone: after a prune the next token's logits are
 * those of a sequence that only ever saw what was kept, if positions are those in the cache, or nothing but a suffix
 * was kept. */
static void check_dense(const char *policy, uint32_t sinks, uint32_t budget) {
    struct tiny_llama shape = tiny_llama_default();
    shape.layers = 1;
    struct fixture fixture = open_fixture(&shape, &(struct engine_options){.kv_format = KV_F32, .exact = true});
    struct stream *stream = run_stream(fixture.engine, policy, 3);
    uint32_t vocabulary = shape.vocabulary;
    float *expected = malloc(vocabulary * sizeof *expected);
    for (uint32_t length = PROMPT + 1; length <= TOTAL; length++) {
        int32_t seen[TOTAL];
        uint32_t count = 0, recent = budget - sinks;
        for (uint32_t i = 0; i < sinks; i++)
            seen[count++] = stream->tokens[i];
        for (uint32_t i = length - 1 - recent; i < length; i++)
            seen[count++] = stream->tokens[i];
        dense_logits(fixture.engine, seen, count, expected);
        const float *logits = stream->logits + (size_t)(length - PROMPT) * vocabulary;
        for (uint32_t i = 0; i < vocabulary; i++)
            if (fabsf(logits[i] - expected[i]) > 2e-4f * (1 + fabsf(expected[i])))
                fail_msg("%s: logit %u after %u tokens is %g, not %g", policy, i, length, logits[i], expected[i]);
    }
    free(expected);
    stream_free(stream);
    close_fixture(&fixture);
}

static void what_is_kept_is_attended_to_as_if_nothing_else_had_been(void **state) {
    (void)state;
    check_dense("streaming,tokens=24,sinks=0", 0, 24);
    check_dense("streaming,tokens=24,sinks=0,positions=cache", 0, 24);
    check_dense("streaming,tokens=24,positions=cache", 4, 24);
    check_dense("streaming,tokens=17,sinks=3,positions=cache", 3, 17);
    check_dense("streaming,tokens=24,positions=cache,prefill_prune_every=40", 4, 24);
}

/* ---- the bound on what a prune changes ---- */

/* Keys and values of a head, by slot, read from its pages (KV_F32). */
struct contents {
    uint32_t count;
    uint32_t positions[TOTAL];
    float keys[TOTAL][16], values[TOTAL][16];
};

static void read_head(const struct stream *stream, uint32_t layer, uint32_t head, struct contents *out) {
    const struct kv_pool *pool = kv_cache_pool(engine_kv_cache(stream->engine));
    struct kv_head_view view = kv_sequence_view(sequence_kv(stream->sequence), layer, head);
    uint32_t dim = pool->layout.head_dim;
    float *page = NULL;
    out->count = 0;
    for (uint32_t slot = 0; slot < view.slots; slot++) {
        if (slot % 16 == 0) {
            free(page);
            page = chosen_backend_page(stream->engine->backend, pool, view.pages[slot / 16]);
        }
        const int32_t *positions = (const int32_t *)(page + (size_t)2 * dim * 16);
        uint32_t place = slot % 16;
        if (positions[place] == KV_NO_POSITION)
            continue;
        out->positions[out->count] = (uint32_t)positions[place];
        for (uint32_t c = 0; c < dim; c++) {
            out->keys[out->count][c] = page[c * 16 + place];
            out->values[out->count][c] = page[(size_t)dim * 16 + place * dim + c];
        }
        out->count++;
    }
    free(page);
}

/* Attention of one query: out [dim], probabilities [count]. */
static void attend(const struct contents *head, const float *query, uint32_t dim, double *out, double *p) {
    double most = -INFINITY, sum = 0;
    for (uint32_t i = 0; i < head->count; i++) {
        p[i] = 0;
        for (uint32_t c = 0; c < dim; c++)
            p[i] += (double)query[c] * (double)head->keys[i][c] / sqrt(dim);
        most = p[i] > most ? p[i] : most;
    }
    for (uint32_t i = 0; i < head->count; i++)
        sum += p[i] = exp(p[i] - most);
    for (uint32_t c = 0; c < dim; c++)
        out[c] = 0;
    for (uint32_t i = 0; i < head->count; i++) {
        p[i] /= sum;
        for (uint32_t c = 0; c < dim; c++)
            out[c] += p[i] * (double)head->values[i][c];
    }
}

static double norm(const double *x, uint32_t dim) {
    double sum = 0;
    for (uint32_t c = 0; c < dim; c++)
        sum += x[c] * x[c];
    return sqrt(sum);
}

static bool holds(const struct contents *head, uint32_t position) {
    for (uint32_t i = 0; i < head->count; i++)
        if (head->positions[i] == position)
            return true;
    return false;
}

/* |o - o'| <= 2 max |v| m, m the attention on what was evicted, for queries of all kinds. */
static void check_bound(const struct contents *before, const struct contents *after, uint32_t dim, uint64_t seed) {
    double o[16], pruned[16], p[TOTAL], q[TOTAL], largest = 0, evicted = 0;
    for (uint32_t kind = 0; kind < 3; kind++) {
        float query[16];
        for (uint32_t c = 0; c < dim; c++) {
            float scale = powf(8, (float)kind - 1); /* from even to sharp attention */
            query[c] = scale * (2 * random_uniform(seed, kind, c, 0) - 1);
        }
        attend(before, query, dim, o, p);
        attend(after, query, dim, pruned, q);
        largest = evicted = 0;
        for (uint32_t i = 0; i < before->count; i++) {
            double value[16];
            for (uint32_t c = 0; c < dim; c++)
                value[c] = before->values[i][c];
            largest = fmax(largest, norm(value, dim));
            evicted += holds(after, before->positions[i]) ? 0 : p[i];
        }
        for (uint32_t c = 0; c < dim; c++)
            o[c] -= pruned[c];
        if (norm(o, dim) > 2 * largest * evicted + 1e-6 * largest)
            fail_msg("an error of %g where %g is the limit", norm(o, dim), 2 * largest * evicted);
    }
}

static void the_error_of_a_prune_is_bounded_by_the_attention_on_what_went(void **state) {
    (void)state;
    struct tiny_llama shape = tiny_llama_default();
    struct fixture fixture = open_fixture(&shape, &(struct engine_options){.kv_format = KV_F32});
    static struct contents before[4], after;
    struct error error = {0};
    for (uint32_t i = 0; i < cases(); i++) {
        if (strstr(case_policy(i), "positions=cache") != NULL)
            continue; /* keys change there */
        struct stream *stream = stream_create(fixture.engine, case_policy(i), 5, PROMPT, TOTAL);
        uint32_t prunes = 0;
        while (stream->done < stream->total) {
            uint32_t room = sequence_room(stream->sequence), left = stream->total - stream->done;
            uint32_t most = stream->done < stream->prompt ? stream->prompt - stream->done : 1;
            most = most < room ? most : room;
            struct batch_item item = {.sequence = stream->sequence,
                .tokens = stream->tokens + stream->done,
                .count = most < left ? most : left};
            assert_int_equal(engine_forward(fixture.engine, &item, 1, &error), 0);
            stream->done += item.count;
            for (uint32_t h = 0; h < 4; h++)
                read_head(stream, h / 2, h % 2, &before[h]);
            assert_int_equal(engine_prune(fixture.engine, &stream->sequence, 1, &error), 0);
            for (uint32_t h = 0; h < 4; h++) {
                read_head(stream, h / 2, h % 2, &after);
                prunes += after.count < before[h].count;
                assert_true(after.count <= before[h].count && after.count > 0);
                check_bound(&before[h], &after, shape.head_dim, stream->done * 4 + h);
            }
        }
        assert_true(prunes > 0);
        stream_free(stream);
    }
    close_fixture(&fixture);
}

/* ---- however the work is cut ---- */

static void chunks_and_batch_mates_change_nothing(void **state) {
    (void)state;
    struct fixture fixture = open_default();
    struct stream *alone[CASES], *together[CASES];
    for (uint32_t i = 0; i < cases(); i++) {
        alone[i] = run_stream(fixture.engine, case_policy(i), i);
        together[i] = stream_create(fixture.engine, case_policy(i), i, PROMPT, TOTAL);
        struct stream *slow = stream_create(fixture.engine, case_policy(i), i, PROMPT, TOTAL);
        streams_run(&slow, 1, 7);
        streams_require_same(alone[i], slow, 0, case_policy(i));
        stream_free(slow);
    }
    streams_run(together, cases(), 33);
    for (uint32_t i = 0; i < cases(); i++) {
        streams_require_same(alone[i], together[i], 0, case_policy(i));
        stream_free(alone[i]);
        stream_free(together[i]);
    }
    close_fixture(&fixture);
}

static void tiers_and_threads_change_nothing(void **state) {
    (void)state;
    if (!chosen_backend_is_cpu())
        skip();
    struct tiny_llama shape = tiny_llama_default();
    struct fixture first = open_default();
    struct fixture second = open_fixture(
        &shape, &(struct engine_options){
                    .backend = {.cpu_features = "scalar", .threads = 1}, .kv_format = KV_F16, .batch_rows = 16});
    for (uint32_t i = 0; i < cases(); i++) {
        struct stream *a = run_stream(first.engine, case_policy(i), i),
                      *b = run_stream(second.engine, case_policy(i), i);
        streams_require_same(a, b, 0, case_policy(i));
        stream_free(a);
        stream_free(b);
    }
    close_fixture(&first);
    close_fixture(&second);
}

static void a_shared_prefix_changes_nothing(void **state) {
    (void)state;
    struct tiny_llama shape = tiny_llama_default();
    struct fixture plain = open_default();
    struct fixture shared = open_fixture(&shape, &(struct engine_options){.kv_format = KV_F16, .prefix_sharing = true});
    uint32_t reused = 0;
    for (uint32_t i = 0; i < cases(); i++) {
        struct stream *expected = run_stream(plain.engine, case_policy(i), 9);
        for (uint32_t round = 0; round < 2; round++) {
            struct stream *stream = stream_create(shared.engine, case_policy(i), 9, PROMPT, TOTAL);
            stream->done = sequence_reuse_prefix(stream->sequence, stream->tokens, PROMPT);
            reused += stream->done;
            stream_run(stream);
            streams_require_same(expected, stream, 0, case_policy(i));
            stream_free(stream);
        }
        stream_free(expected);
    }
    assert_true(reused >= chosen_backend_share(10, 2) * 32); /* by policies that may */
    close_fixture(&plain);
    close_fixture(&shared);
}

/* One sequence prunes what another one shares with it, and neither sees the other. */
static void a_prefix_that_is_shared_survives_a_prune(void **state) {
    (void)state;
    struct tiny_llama shape = tiny_llama_default();
    struct fixture fixture =
        open_fixture(&shape, &(struct engine_options){.kv_format = KV_F16, .prefix_sharing = true});
    struct stream *full = run_stream(fixture.engine, NULL, 2);
    for (uint32_t i = 0; i < cases(); i++) {
        struct stream *mate = stream_create(fixture.engine, NULL, 2, PROMPT, TOTAL);
        mate->done = sequence_reuse_prefix(mate->sequence, mate->tokens, PROMPT);
        assert_true(mate->done >= 80);
        struct stream *pruned = stream_create(fixture.engine, case_policy(i), 2, PROMPT, TOTAL);
        pruned->done = sequence_reuse_prefix(pruned->sequence, pruned->tokens, PROMPT);
        while (streams_step(&pruned, 1, UINT32_MAX))
            streams_step(&mate, 1, UINT32_MAX);
        streams_require_same(full, mate, 0, case_policy(i));
        assert_true(kv_cache_check(engine_kv_cache(fixture.engine)));
        stream_free(mate);
        stream_free(pruned);
    }
    stream_free(full);
    close_fixture(&fixture);
}

static void forks_go_on_as_their_source_would(void **state) {
    (void)state;
    struct fixture fixture = open_default();
    for (uint32_t i = 0; i < cases(); i++) {
        struct stream *expected = run_stream(fixture.engine, case_policy(i), i);
        struct stream *source = stream_create(fixture.engine, case_policy(i), i, PROMPT, TOTAL);
        while (source->done < PROMPT + 10)
            streams_step(&source, 1, 50);
        struct stream *fork = stream_fork(source), *early = NULL;
        assert_int_equal(sequence_statistics_bytes(fork->sequence), sequence_statistics_bytes(source->sequence));
        streams_step(&fork, 1, 1); /* the fork goes first */
        early = stream_fork(fork);
        struct stream *all[] = {source, fork, early};
        streams_run(all, 3, 1);
        for (uint32_t k = 0; k < 3; k++) {
            streams_require_same(expected, all[k], 0, case_policy(i));
            stream_free(all[k]);
        }
        stream_free(expected);
    }
    close_fixture(&fixture);
}

/* ---- the slot that goes ---- */

static const struct backend_operations *plain_operations;
static uint32_t scored_layers;

static int counted_score(struct backend *backend, const struct kv_pool *pool, const struct score_layer *layers,
    uint32_t count, uint32_t heads, struct error *error) {
    scored_layers += count;
    return plain_operations->score(backend, pool, layers, count, heads, error);
}

/* Whether attention finds what goes or a call after it, the same goes. By head alone each prune after the first is
 * attention's, all of it; a policy that compares heads, needs a matrix or prunes at intervals is scored as before. */
static void attention_finds_the_slots_that_score_would(void **state) {
    (void)state;
    struct fixture fixture = open_default();
    struct backend *backend = fixture.engine->backend;
    plain_operations = backend->operations;
    struct backend_operations counted = *plain_operations;
    counted.score = counted_score;
    uint32_t layers = fixture.model->shape.layers, attended = 0;
    for (uint32_t i = 0; i < cases(); i++) {
        for (int later = 0; later < 2; later++) {
            counted.attend_scores = later ? NULL : plain_operations->attend_scores;
            backend->operations = &counted;
            scored_layers = 0;
            struct stream *stream = run_stream(fixture.engine, case_policy(i), 3), *mate = NULL;
            uint32_t alone = scored_layers;
            backend->operations = plain_operations;
            mate = run_stream(fixture.engine, case_policy(i), 3);
            streams_require_same(mate, stream, 0, case_policy(i));
            attended += !later && alone == layers;
            if (strcmp(case_policy(i), "h2o,tokens=24") == 0 ||
                strcmp(case_policy(i), "snapkv,tokens=24,window=8") == 0)
                assert_int_equal(alone, counted.attend_scores == NULL ? layers * (TOTAL - PROMPT + 1) : layers);
            stream_free(stream);
            stream_free(mate);
        }
    }
    if (plain_operations->attend_scores != NULL)
        assert_in_range(attended, cases() / 4, cases());
    close_fixture(&fixture);
}

static uint32_t plain_worst(const float *scores, const int32_t *positions, uint32_t count) {
    uint32_t worst = UINT32_MAX;
    for (uint32_t i = 0; i < count; i++) {
        if (positions[i] == KV_NO_POSITION)
            continue;
        float score = isnan(scores[i]) ? -INFINITY : scores[i];
        float least = worst == UINT32_MAX || isnan(scores[worst]) ? -INFINITY : scores[worst];
        if (worst == UINT32_MAX || score < least || (score == least && positions[i] < positions[worst]))
            worst = i;
    }
    return worst;
}

static void the_slot_that_goes_is_the_oldest_of_the_worst(void **state) {
    (void)state;
    for (uint32_t round = 0; round < 4000; round++) {
        float scores[80];
        int32_t positions[80];
        uint32_t words[4], count = 1 + round % 80;
        for (uint32_t i = 0; i < count; i++) {
            random_philox(round, 0, 0, i, words);
            positions[i] = (int32_t)((i * 37 + round) % 80 * 11);
            scores[i] = (float)(int32_t)(words[0] % (2 + round % 9)) - 1;
            if (words[1] % 40 == 0)
                scores[i] = words[2] % 2 ? INFINITY : -INFINITY;
            if (round % 3 == 0 && words[1] % 17 == 0)
                scores[i] = NAN;
            if (round % 3 != 1 && words[3] % 19 == 0) {
                positions[i] = KV_NO_POSITION;
                scores[i] = NAN;
            }
            if (scores[i] == 0 && words[2] % 2)
                scores[i] = -0.0f;
        }
        uint32_t expected = plain_worst(scores, positions, count);
        for (enum cpu_tier tier = CPU_SCALAR; tier <= cpu_tier_detect(); tier++)
            assert_int_equal(cpu_score_kernels(tier)->worst(scores, positions, count), expected);
    }
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(a_budget_that_is_not_exceeded_changes_nothing),
        cmocka_unit_test(networks_must_fit_the_model),
        cmocka_unit_test(keeping_everything_costs_nothing),
        cmocka_unit_test(what_is_kept_is_attended_to_as_if_nothing_else_had_been),
        cmocka_unit_test(the_error_of_a_prune_is_bounded_by_the_attention_on_what_went),
        cmocka_unit_test(chunks_and_batch_mates_change_nothing),
        cmocka_unit_test(tiers_and_threads_change_nothing),
        cmocka_unit_test(a_shared_prefix_changes_nothing),
        cmocka_unit_test(a_prefix_that_is_shared_survives_a_prune),
        cmocka_unit_test(forks_go_on_as_their_source_would),
        cmocka_unit_test(attention_finds_the_slots_that_score_would),
        cmocka_unit_test(the_slot_that_goes_is_the_oldest_of_the_worst),
    };
    return cmocka_run_group_tests_name("prune", tests, NULL, NULL);
}
