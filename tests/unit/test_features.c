/* SPDX-License-Identifier: Apache-2.0
 *
 * What the trainer sees of a sequence and does to it: features against the pages, the statistics and plain arithmetic;
 * recorded statistics; and prunes to lists of the caller.
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

enum { PROMPT = 90, TOTAL = 120, DIM_MAX = 32, WINDOW = 128 };

struct fixture {
    struct model *model;
    struct engine *engine;
};

static struct fixture open_fixture(enum kv_format format) {
    struct fixture fixture;
    struct tiny_llama shape = tiny_llama_default();
    shape.heads = 6;
    fixture.model = pruning_model(&shape);
    fixture.engine = pruning_engine(
        fixture.model, &(struct engine_options){.kv_format = format, .batch_rows = 64, .prefix_sharing = true});
    return fixture;
}

static void close_fixture(struct fixture *fixture) {
    engine_close(fixture->engine);
    model_free(fixture->model);
}

/* All features of a head, in memory of their own. */
static struct head_features read_features(struct sequence *sequence, uint32_t layer, uint32_t head) {
    struct error error = {0};
    struct head_features features = {.capacity = TOTAL};
    size_t dim = engine_model(sequence->engine)->shape.head_dim;
    features.positions = calloc(TOTAL, sizeof(uint32_t));
    features.sum = calloc(TOTAL, sizeof(float));
    features.squared = calloc(TOTAL, sizeof(float));
    features.entropy = calloc(TOTAL, sizeof(float));
    features.keys = calloc(TOTAL * dim, sizeof(float));
    features.values = calloc(TOTAL * dim, sizeof(float));
    features.value_norm = calloc(TOTAL, sizeof(float));
    features.output_norm = calloc(TOTAL, sizeof(float));
    if (sequence_features(sequence, layer, head, &features, &error) != 0)
        fail_msg("%s", error.message);
    return features;
}

static void free_features(struct head_features *features) {
    free(features->positions);
    free(features->sum);
    free(features->squared);
    free(features->entropy);
    free(features->keys);
    free(features->values);
    free(features->value_norm);
    free(features->output_norm);
}

static void require_near(double value, double expected, double tolerance, const char *what) {
    if (!(fabs(value - expected) <= tolerance * (1 + fabs(expected))))
        fail_msg("%s: %.9g, not %.9g", what, value, expected);
}

static struct sequence *record(struct fixture *fixture, const char *policy, uint32_t statistics, uint32_t window) {
    struct error error = {0};
    struct sequence *sequence = sequence_create(fixture->engine);
    if (policy != NULL) {
        struct policy_settings settings = pruning_settings(policy);
        assert_int_equal(sequence_set_policy(sequence, &settings, PROMPT, &error), 0);
        policy_settings_release(&settings);
    }
    if (sequence_record(sequence, statistics, window, &error) != 0)
        fail_msg("%s", error.message);
    return sequence;
}

static void feed(struct sequence *sequence, uint32_t count, bool prune) {
    struct error error = {0};
    while (count > 0) {
        int32_t tokens[64];
        uint32_t done = sequence_length(sequence), room = sequence_room(sequence), now = count < 37 ? count : 37;
        now = now < room ? now : room;
        for (uint32_t i = 0; i < now; i++)
            tokens[i] = pruning_token(engine_model(sequence->engine), 3, done + i);
        struct batch_item item = {.sequence = sequence, .tokens = tokens, .count = now, .want = WANT_LAST};
        if (engine_forward(sequence->engine, &item, 1, &error) != 0)
            fail_msg("%s", error.message);
        if (prune && engine_prune(sequence->engine, &sequence, 1, &error) != 0)
            fail_msg("%s", error.message);
        count -= now;
    }
}

/* ---- features ---- */

static double number_of(enum kv_format format, const char *from, size_t i) {
    if (format == KV_F32)
        return (double)((const float *)from)[i];
    return (double)(format == KV_F16 ? half_to_float(((const uint16_t *)from)[i])
                                     : bfloat_to_float(((const uint16_t *)from)[i]));
}

/* Key and value of a slot as its page holds them, the key's rotation undone. */
static void read_slot(struct sequence *sequence, uint32_t layer, uint32_t head, uint32_t slot, uint32_t position,
    double *key, double *value) {
    const struct kv_pool *pool = kv_cache_pool(sequence->engine->cache);
    const struct model_shape *shape = &engine_model(sequence->engine)->shape;
    struct kv_head_view view = kv_sequence_view(sequence->kv, layer, head);
    char *page = chosen_backend_page(sequence->engine->backend, pool, view.pages[slot / 16]);
    const char *values = page + 16 * shape->head_dim * kv_format_bytes(pool->layout.format);
    for (uint32_t c = 0; c < shape->head_dim; c++) {
        key[c] = number_of(pool->layout.format, page, c * 16 + slot % 16);
        value[c] = number_of(pool->layout.format, values, slot % 16 * shape->head_dim + c);
    }
    free(page);
    for (uint32_t i = 0; i < shape->rope_dim / 2; i++) {
        double angle = -(double)position * pow((double)shape->rope_base, -2.0 * i / shape->rope_dim);
        double x = key[2 * i], y = key[2 * i + 1];
        key[2 * i] = x * cos(angle) - y * sin(angle);
        key[2 * i + 1] = x * sin(angle) + y * cos(angle);
    }
}

/* Mean over the group of |v W_h|, by the whole matrix. */
static double output_norm(const struct model *model, uint32_t layer, uint32_t head, const double *value) {
    const struct tensor *output = &model->layers[layer].attn_output;
    uint32_t group = model->shape.heads / model->shape.kv_heads, dim = model->shape.head_dim;
    float *row = malloc(output->columns * sizeof *row);
    double squares[8] = {0}, mean = 0;
    for (uint32_t r = 0; r < output->rows; r++) {
        tensor_dequantise_row(output, r, row);
        for (uint32_t g = 0; g < group; g++) {
            double sum = 0;
            for (uint32_t c = 0; c < dim; c++)
                sum += (double)row[(head * group + g) * dim + c] * value[c];
            squares[g] += sum * sum;
        }
    }
    for (uint32_t g = 0; g < group; g++)
        mean += sqrt(squares[g]) / group;
    free(row);
    return mean;
}

static void check_head(struct sequence *sequence, uint32_t layer, uint32_t head) {
    const struct model *model = engine_model(sequence->engine);
    struct head_features features = read_features(sequence, layer, head);
    uint32_t dim = model->shape.head_dim, positions[TOTAL];
    assert_int_equal(features.slots, kv_sequence_slots(sequence->kv, layer, head));
    kv_sequence_positions(sequence->kv, layer, head, positions);
    for (uint32_t slot = 0; slot < features.slots; slot++) {
        double key[DIM_MAX], value[DIM_MAX], square = 0;
        assert_int_equal(features.positions[slot], positions[slot]);
        if (positions[slot] == KV_NO_POSITION)
            continue;
        read_slot(sequence, layer, head, slot, positions[slot], key, value);
        for (uint32_t c = 0; c < dim; c++) {
            require_near((double)features.keys[slot * dim + c], key[c], 2e-5, "key");
            require_near((double)features.values[slot * dim + c], value[c], 0, "value");
            square += value[c] * value[c];
        }
        require_near((double)features.value_norm[slot], log(1e-6 + sqrt(square)), 1e-5, "value norm");
        require_near((double)features.output_norm[slot], log(1e-6 + output_norm(model, layer, head, value)), 1e-4,
            "output norm");
    }
    free_features(&features);
}

static void check_heads(struct sequence *sequence) {
    for (uint32_t layer = 0; layer < 2; layer++)
        for (uint32_t head = 0; head < 2; head++)
            check_head(sequence, layer, head);
}

static void test_pages(void **state) {
    const enum kv_format formats[] = {KV_F32, KV_F16, KV_BF16};
    (void)state;
    for (uint32_t i = 0; i < 3; i++) {
        struct fixture fixture = open_fixture(formats[i]);
        struct sequence *sequence = record(&fixture, NULL, STATISTIC_SUM, 0);
        feed(sequence, PROMPT, false);
        check_heads(sequence);
        sequence_free(sequence);
        sequence = record(&fixture, "knorm,tokens=20,interval=1", STATISTIC_SUM, 0);
        feed(sequence, PROMPT + 7, true); /* slots out of order, one of them empty */
        check_heads(sequence);
        sequence_free(sequence);
        close_fixture(&fixture);
    }
}

/* The window's probabilities as the trainer reads them. */
static void check_head_window(struct sequence *sequence, uint32_t head, const struct kv_statistics *kept) {
    struct error error = {0};
    size_t rows = (size_t)WINDOW * 3;
    struct head_features features = {
        .capacity = TOTAL, .window = WINDOW, .head_window = malloc(rows * TOTAL * sizeof(uint16_t))};
    assert_non_null(features.head_window);
    assert_int_equal(sequence_features(sequence, head / 2, head % 2, &features, &error), 0);
    for (size_t row = 0; row < rows; row++)
        assert_memory_equal(features.head_window + row * TOTAL, kept->head_rows + row * kept->capacity,
            features.slots * sizeof(uint16_t));
    features.window = WINDOW - 1;
    assert_int_equal(sequence_features(sequence, head / 2, head % 2, &features, &error), ERROR_INVALID);
    assert_non_null(strstr(error.message, "a window of 127 queries was not recorded"));
    free(features.head_window);
}

/* Every probability is in a window that holds all queries, so that sums and entropies can be made of them. */
static void test_recorded(void **state) {
    struct fixture fixture = open_fixture(KV_F16);
    uint32_t needs = STATISTIC_SUM | STATISTIC_SQUARED | STATISTIC_ENTROPY | STATISTIC_HEAD_WINDOW, group = 3;
    struct sequence *sequence = record(&fixture, NULL, needs, WINDOW);
    (void)state;
    feed(sequence, PROMPT, false);
    for (uint32_t head = 0; head < 4; head++) {
        struct kv_statistics on_host = sequence->eviction.statistics->heads[head];
        const struct kv_statistics *kept = &on_host;
        size_t rows = (size_t)kept->window * group * kept->capacity;
        on_host.head_rows = chosen_backend_read(
            backend_of_head(fixture.engine->backend, 2, head), kept->head_rows, rows * sizeof *kept->head_rows);
        struct head_features features = read_features(sequence, head / 2, head % 2);
        assert_int_equal(kept->window, WINDOW);
        check_head_window(sequence, head, kept);
        for (uint32_t slot = 0; slot < PROMPT; slot++) {
            double sum = 0, squared = 0, entropy = 0;
            for (uint32_t t = 0; t < PROMPT; t++)
                for (uint32_t g = 0; g < group; g++) {
                    size_t row = ((size_t)t * group + g) * kept->capacity;
                    double p = (double)half_to_float(kept->head_rows[row + slot]);
                    sum += p / group;
                    squared += p * p / group;
                }
            for (uint32_t other = 0; other <= slot; other++)
                for (uint32_t g = 0; g < group; g++) {
                    size_t row = ((size_t)slot * group + g) * kept->capacity;
                    double p = (double)half_to_float(kept->head_rows[row + other]);
                    entropy -= p > 0 ? p * log(p) / group : 0;
                }
            require_near((double)features.sum[slot], sum, 2e-3, "sum");
            require_near((double)features.squared[slot], squared, 2e-3, "sum of squares");
            require_near((double)features.entropy[slot], entropy, 5e-3, "entropy");
        }
        free(on_host.head_rows);
        free_features(&features);
    }
    sequence_free(sequence);
    close_fixture(&fixture);
}

/* Recording changes nothing; it outlasts prunes, forks and swaps; and no prefix is taken over. */
static void test_recorded_beside(void **state) {
    struct fixture fixture = open_fixture(KV_F16);
    struct error error = {0};
    struct sequence *plain = record(&fixture, "h2o,tokens=24", 0, 0);
    struct sequence *both = record(&fixture, "h2o,tokens=24", STATISTIC_SQUARED | STATISTIC_ENTROPY, 0);
    int32_t tokens[PROMPT];
    (void)state;
    for (uint32_t i = 0; i < PROMPT; i++)
        tokens[i] = pruning_token(fixture.model, 3, i);
    feed(plain, PROMPT + 5, true);
    assert_int_equal(sequence_reuse_prefix(both, tokens, PROMPT), 0);
    feed(both, PROMPT + 5, true);
    struct sequence *fork = sequence_fork(both);
    assert_non_null(fork);
    assert_int_equal(sequence_swap_out(both, &error), 0);
    struct head_features none = {.capacity = TOTAL};
    assert_int_equal(sequence_features(both, 0, 0, &none, &error), ERROR_INVALID);
    assert_int_equal(sequence_swap_in(both, &error), 0);
    for (uint32_t head = 0; head < 4; head++) {
        struct head_features a = read_features(plain, head / 2, head % 2);
        struct head_features b = read_features(both, head / 2, head % 2);
        struct head_features c = read_features(fork, head / 2, head % 2);
        double squared = 0;
        assert_int_equal(a.slots, b.slots);
        assert_memory_equal(a.positions, b.positions, a.slots * sizeof *a.positions);
        assert_memory_equal(a.sum, b.sum, a.slots * sizeof *a.sum);
        assert_memory_equal(b.squared, c.squared, a.slots * sizeof *a.squared);
        assert_memory_equal(b.entropy, c.entropy, a.slots * sizeof *a.entropy);
        for (uint32_t slot = 0; slot < a.slots; slot++) {
            assert_true(a.squared[slot] == 0 && a.entropy[slot] == 0); /* not kept */
            squared += (double)b.squared[slot];
        }
        assert_true(squared > 1);
        free_features(&a);
        free_features(&b);
        free_features(&c);
    }
    sequence_free(plain);
    sequence_free(both);
    sequence_free(fork);
    close_fixture(&fixture);
}

static void test_refused(void **state) {
    struct fixture fixture = open_fixture(KV_F16);
    struct error error = {0};
    struct sequence *sequence = sequence_create(fixture.engine);
    struct policy_settings settings = pruning_settings("snapkv,tokens=24,window=8");
    (void)state;
    assert_int_equal(sequence_record(sequence, STATISTIC_CONTENT, 0, &error), ERROR_INVALID);
    assert_int_equal(sequence_record(sequence, STATISTIC_HEAD_WINDOW, 0, &error), ERROR_INVALID);
    assert_int_equal(sequence_record(sequence, STATISTIC_HEAD_WINDOW, 257, &error), ERROR_INVALID);
    assert_int_equal(sequence_record(sequence, STATISTIC_HEAD_WINDOW, 256, &error), 0);
    assert_int_equal(sequence_set_policy(sequence, &settings, PROMPT, &error), ERROR_INVALID); /* another window */
    policy_settings_release(&settings);
    feed(sequence, 20, false);
    assert_int_equal(sequence_record(sequence, STATISTIC_SUM, 0, &error), ERROR_INVALID);
    struct head_features few = {.capacity = 19};
    assert_int_equal(sequence_features(sequence, 0, 0, &few, &error), ERROR_INVALID);
    assert_int_equal(few.slots, 20);
    assert_int_equal(sequence_features(sequence, 2, 0, &few, &error), ERROR_INVALID);
    assert_int_equal(sequence_features(sequence, 0, 2, &few, &error), ERROR_INVALID);
    sequence_free(sequence);
    close_fixture(&fixture);
}

/* ---- prunes to lists ---- */

/* The slots of a head of `before` whose positions it still held after a prune. */
static uint32_t list_kept(
    const uint32_t *before, uint32_t before_count, const uint32_t *after, uint32_t after_count, uint32_t *list) {
    uint32_t count = 0;
    for (uint32_t slot = 0; slot < before_count; slot++)
        for (uint32_t i = 0; i < after_count; i++)
            if (before[slot] == after[i] && before[slot] != KV_NO_POSITION) {
                list[count++] = slot;
                break;
            }
    return count;
}

/* Prunes `other` to what engine_prune left of `sequence`; then both hold the same in the same slots. */
static void prune_alike(struct sequence *sequence, struct sequence *other) {
    uint32_t before[4][TOTAL], before_count[4], after[TOTAL], lists[4][TOTAL], counts[4];
    const uint32_t *all[4];
    struct error error = {0};
    for (uint32_t i = 0; i < 4; i++) {
        before_count[i] = kv_sequence_slots(sequence->kv, i / 2, i % 2);
        kv_sequence_positions(sequence->kv, i / 2, i % 2, before[i]);
    }
    assert_int_equal(engine_prune(sequence->engine, &sequence, 1, &error), 0);
    for (uint32_t i = 0; i < 4; i++) {
        kv_sequence_positions(sequence->kv, i / 2, i % 2, after);
        uint32_t slots = kv_sequence_slots(sequence->kv, i / 2, i % 2);
        counts[i] = list_kept(before[i], before_count[i], after, slots, lists[i]);
        all[i] = lists[i];
    }
    if (sequence_prune_to(other, all, counts, &error) != 0)
        fail_msg("%s", error.message);
    for (uint32_t i = 0; i < 4; i++) {
        uint32_t positions[TOTAL], slots = kv_sequence_slots(sequence->kv, i / 2, i % 2);
        kv_sequence_positions(sequence->kv, i / 2, i % 2, after);
        kv_sequence_positions(other->kv, i / 2, i % 2, positions);
        assert_int_equal(kv_sequence_slots(other->kv, i / 2, i % 2), slots);
        assert_memory_equal(positions, after, slots * sizeof *after);
    }
    assert_int_equal(sequence_room(sequence), sequence_room(other));
    assert_int_equal(sequence_statistics_bytes(sequence), sequence_statistics_bytes(other));
}

static void test_prune_to(void **state) {
    const char *const policies[] = {"h2o,tokens=24", "h2o,ratio=0.3,minimum=8,interval=4,prefill_prune_every=32",
        "snapkv,tokens=24,window=8,decode=keep", "streaming,tokens=20,positions=cache", "cake,tokens=24,window=8",
        "knorm,tokens=24,scope=model,interval=3"};
    struct error error = {0};
    (void)state;
    for (uint32_t p = 0; p < sizeof policies / sizeof policies[0]; p++) {
        struct fixture fixture = open_fixture(KV_F16);
        struct sequence *a = record(&fixture, policies[p], 0, 0), *b = record(&fixture, policies[p], 0, 0);
        float logits[2][320];
        while (sequence_length(a) < TOTAL) {
            uint32_t left = sequence_length(a) < PROMPT ? PROMPT - sequence_length(a) : 1;
            uint32_t room = sequence_room(a), count = left < room ? left : room;
            struct sequence *sequences[2] = {a, b};
            for (uint32_t i = 0; i < 2; i++) {
                feed(sequences[i], count, false);
                assert_int_equal(engine_logits(fixture.engine, 0, logits[i], &error), 0);
            }
            assert_memory_equal(logits[0], logits[1], sizeof logits[0]);
            if (sequence_room(a) == 0)
                prune_alike(a, b);
        }
        sequence_free(a);
        sequence_free(b);
        close_fixture(&fixture);
    }
}

static void test_prune_to_refused(void **state) {
    struct fixture fixture = open_fixture(KV_F16);
    struct error error = {0};
    struct sequence *sequence = record(&fixture, "h2o,tokens=24", 0, 0);
    uint32_t list[PROMPT + 1], counts[4] = {3, 3, 3, 3};
    const uint32_t *lists[4] = {list, list, list, list};
    (void)state;
    for (uint32_t i = 0; i <= PROMPT; i++)
        list[i] = i;
    feed(sequence, 20, false);
    assert_int_equal(sequence_prune_to(sequence, lists, counts, &error), ERROR_INVALID); /* not due */
    feed(sequence, PROMPT - 20, false);
    counts[2] = PROMPT + 1;
    assert_int_equal(sequence_prune_to(sequence, lists, counts, &error), ERROR_INVALID);
    counts[2] = 3;
    list[2] = 1;
    assert_int_equal(sequence_prune_to(sequence, lists, counts, &error), ERROR_INVALID);
    for (uint32_t i = 0; i < 4; i++)
        assert_int_equal(kv_sequence_slots(sequence->kv, i / 2, i % 2), PROMPT);
    list[2] = 2;
    for (uint32_t i = 0; i < 4; i++)
        counts[i] = PROMPT; /* nothing goes, and the prune is over */
    assert_int_equal(sequence_prune_to(sequence, lists, counts, &error), 0);
    assert_int_equal(sequence_room(sequence), 1);
    assert_int_equal(sequence_prune_to(sequence, lists, counts, &error), ERROR_INVALID);
    sequence_free(sequence);
    close_fixture(&fixture);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_pages),
        cmocka_unit_test(test_recorded),
        cmocka_unit_test(test_recorded_beside),
        cmocka_unit_test(test_refused),
        cmocka_unit_test(test_prune_to),
        cmocka_unit_test(test_prune_to_refused),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
