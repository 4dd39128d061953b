/* SPDX-License-Identifier: Apache-2.0
 *
 * Examples of students on a tiny model, beside what the engine says when one sequence after the other is decoded token
 * by token: which slots a student has at a prune, what the network is fed with there, and what the full model pays to
 * the same positions afterwards. No run: what it gives to stages is here.
 */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>

#include <math.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "policy/train/record.h"
#include "policy/train/start.h"
#include "tests/unit/tiny_llama.h"

enum { SEQUENCES = 6, INTERVAL = 3, FUTURE = 5, FIRST = 40, SLOTS_MAX = 256, DIM = 16, MINIMUM = 32 };

static struct model *model;
static struct tokenizer *tokenizer;
static struct engine *engine;
static uint32_t gave_up, again_at, yields;

/* In place of the run's (train.c). */
int train_yield(struct training *training) {
    (void)training;
    return ++yields == again_at ? TRAIN_AGAIN : 0;
}

int train_pause(struct training *training) {
    (void)training;
    return 0;
}

int train_gave_up(struct training *training) {
    (void)training;
    gave_up++;
    return 0;
}

bool train_may_wait(const struct training *training) {
    (void)training;
    return false;
}

void train_progress(struct training *training, const char *what, uint64_t done, uint64_t all) {
    (void)training;
    assert_non_null(what);
    assert_true(done <= all);
}

struct setting {
    struct train_run run;
    struct training training;
    struct records *records;
};

static struct engine *open_engine(uint32_t threads, uint32_t rows, size_t kv_bytes) {
    struct error error = {0};
    struct engine_options options = {.backend = {.threads = threads},
        .kv_bytes = kv_bytes,
        .kv_format = KV_F16,
        .batch_rows = rows,
        .poison_free = true};
    return engine_open(model, &options, &error);
}

static int set_up_model(const struct tiny_llama *tiny) {
    struct error error = {0};
    char *path = tiny_llama_save(tiny);
    model = model_open(path, &error);
    unlink(path);
    free(path);
    tokenizer = model != NULL ? tokenizer_create(model->file, &error) : NULL;
    engine = tokenizer != NULL ? open_engine(1, 64, 16 << 20) : NULL;
    return engine == NULL;
}

static int set_up(void **state) {
    (void)state;
    struct tiny_llama tiny = tiny_llama_default();
    return set_up_model(&tiny);
}

/* Layers 0 and 2 slide: nothing is recorded of them. */
static int set_up_sliding(void **state) {
    (void)state;
    struct tiny_llama tiny = tiny_llama_default();
    tiny.layers = 4;
    tiny.window = 20;
    return set_up_model(&tiny);
}

static int tear_down(void **state) {
    (void)state;
    engine_close(engine);
    tokenizer_free(tokenizer);
    model_free(model);
    return 0;
}

static void record(struct setting *setting, enum network_features features) {
    struct error error = {0};
    memset(setting, 0, sizeof *setting);
    struct train_options *options = &setting->run.options;
    train_options_default(options, TRAIN_RANKER, false);
    assert_int_equal(
        train_options_set(options, "features", features == FEATURES_PAPER ? "paper" : "content", &error), 0);
    options->prompt_least = 70;
    options->prompt_most = 90;
    options->future = FUTURE;
    options->interval = INTERVAL;
    options->hidden = 8;
    setting->run.tokenizer = tokenizer;
    setting->training = (struct training){.run = &setting->run, .options = options, .engine = engine};
    struct dataset_options data = {.tokenizer = tokenizer,
        .least = 70,
        .most = 90,
        .future = record_tokens(options, true, INTERVAL),
        .copying = 1,
        .part = DATASET_TRAIN,
        .seed = 1};
    assert_int_equal(data.future, FUTURE + RECORD_INTERVALS * INTERVAL);
    setting->training.dataset = dataset_load(NULL, &data, &error);
    setting->training.network = network_start(options, model, &error);
    assert_true(setting->training.dataset != NULL && setting->training.network != NULL);
    struct record_plan plan = {.sequences = SEQUENCES, .first = FIRST, .students = setting->training.network};
    uint32_t pages = kv_cache_pages_free(engine_kv_cache(engine));
    if (records_create(&setting->training, &plan, &setting->records, &error) != 0)
        fail_msg("%s", error.message);
    assert_int_equal(kv_cache_pages_free(engine_kv_cache(engine)), pages);
}

static void clear(struct setting *setting) {
    records_free(setting->records);
    dataset_free(setting->training.dataset);
    network_release(setting->training.network);
}

/* ---- the plain way ---- */

struct plain {
    struct head_features features;
    uint32_t positions[SLOTS_MAX];
    float sum[SLOTS_MAX], squared[SLOTS_MAX], entropy[SLOTS_MAX], value_norm[SLOTS_MAX], output_norm[SLOTS_MAX];
    float keys[SLOTS_MAX * DIM];
};

static void read_plain(struct sequence *sequence, uint32_t head, struct plain *plain) {
    struct error error = {0};
    plain->features = (struct head_features){.capacity = SLOTS_MAX,
        .positions = plain->positions,
        .sum = plain->sum,
        .squared = plain->squared,
        .entropy = plain->entropy,
        .keys = plain->keys,
        .value_norm = plain->value_norm,
        .output_norm = plain->output_norm};
    if (sequence_features(
            sequence, head / model->shape.kv_heads, head % model->shape.kv_heads, &plain->features, &error) != 0)
        fail_msg("%s", error.message);
}

static void feed(struct sequence *sequence, const int32_t *tokens, uint32_t until) {
    struct error error = {0};
    while (sequence_length(sequence) < until) {
        uint32_t seen = sequence_length(sequence);
        if (engine_prune(engine, &sequence, 1, &error) != 0)
            fail_msg("%s", error.message);
        struct batch_item item = {.sequence = sequence, .tokens = tokens + seen, .count = 1};
        if (engine_forward(engine, &item, 1, &error) != 0)
            fail_msg("%s", error.message);
    }
}

/* A sequence that was decoded with the example's budget; 0: with none. */
static struct sequence *decode(
    const struct setting *setting, uint32_t budget, const int32_t *tokens, uint32_t prompt, uint32_t until) {
    struct error error = {0};
    struct policy_settings settings;
    struct sequence *sequence = sequence_create(engine);
    assert_non_null(sequence);
    policy_settings_default(policy_find("distillcache"), &settings);
    policy_settings_use_network(&settings, setting->training.network);
    settings.tokens = budget;
    if (budget > 0)
        assert_int_equal(sequence_set_policy(sequence, &settings, prompt, &error), 0);
    policy_settings_release(&settings);
    assert_int_equal(sequence_record(sequence, STATISTIC_SUM | STATISTIC_SQUARED | STATISTIC_ENTROPY, 0, &error), 0);
    feed(sequence, tokens, until);
    return sequence;
}

static void assert_near(double found, double expected, double tolerance, const char *what, uint32_t slot) {
    if (!(fabs(found - expected) <= tolerance * (1 + fabs(expected))))
        fail_msg("%s of slot %u: %g is not %g", what, slot, found, expected);
}

/* What the network is fed with, at a budget, and keys. */
static void check_inputs(const struct setting *setting, const struct recorded_sequence *example,
    const struct recorded_head *head, const struct plain *plain) {
    const struct records *records = setting->records;
    struct network_shape bare = records->shape;
    bare.content = 0;
    uint32_t width = network_inputs_count(&bare), budget = example->budget > 0 ? example->budget : 20;
    static float found[SLOTS_MAX * INPUT_KINDS], expected[SLOTS_MAX * INPUT_KINDS], keys[SLOTS_MAX * DIM];
    struct network_slots slots = {.count = head->slots,
        .seen = example->seen,
        .budget = budget,
        .positions = plain->positions,
        .sum = plain->sum,
        .squared = plain->squared,
        .entropy = plain->entropy,
        .value_norm = plain->value_norm,
        .output_norm = plain->output_norm};
    network_gather(&bare, &slots, expected);
    records_inputs(records, example, head, budget, found);
    for (uint32_t i = 0; i < head->slots * width; i++)
        assert_near((double)found[i], (double)expected[i], 1e-3, "input", i / width);
    if (records->shape.content == 0)
        return;
    records_keys(records, head, keys);
    for (uint32_t i = 0; i < head->slots * DIM; i++) {
        size_t at = (size_t)head->head * DIM + i % DIM;
        double white = ((double)plain->keys[i] - (double)records->key_mean[at]) * (double)records->key_scale[at];
        assert_near((double)keys[i], white, 4e-3, "key", i / DIM);
    }
}

/* One head: slots, inputs, and what is paid from `then` to `later` by the teacher. */
static void check_head(const struct setting *setting, const struct recorded_sequence *example,
    const struct recorded_head *head, struct sequence *sequence, struct sequence *then, struct sequence *later) {
    static struct plain plain, before, after;
    assert_int_equal(model->windows[head->head / model->shape.kv_heads], 0);
    read_plain(sequence, head->head, &plain);
    read_plain(then, head->head, &before);
    read_plain(later, head->head, &after);
    assert_int_equal(head->slots, plain.features.slots);
    assert_memory_equal(head->positions, plain.positions, head->slots * sizeof *head->positions);
    check_inputs(setting, example, head, &plain);
    for (uint32_t i = 0; i < head->slots; i++) {
        uint32_t position = head->positions[i];
        double paid = (double)after.sum[position] - (double)before.sum[position];
        assert_near((double)head->targets[i], paid * exp((double)plain.output_norm[i]), 1e-4, "target", i);
    }
}

static void check_example(
    const struct setting *setting, const struct recorded_sequence *example, const int32_t *tokens, uint32_t prompt) {
    struct sequence *sequence = decode(setting, example->budget, tokens, prompt, example->seen);
    struct sequence *then = decode(setting, 0, tokens, prompt, example->seen);
    struct sequence *later = decode(setting, 0, tokens, prompt, example->seen + FUTURE);
    assert_true(example->heads_count > 0);
    for (uint32_t h = 0; h < example->heads_count; h++)
        check_head(setting, example, &example->heads[h], sequence, then, later);
    sequence_free(sequence);
    sequence_free(then);
    sequence_free(later);
}

/* Sequences whose continuation is in the data; and of students those whose budget is one at every length. */
static void test_examples(void **state) {
    (void)state;
    struct setting setting;
    uint32_t checked = 0, evicted = 0;
    record(&setting, FEATURES_CONTENT);
    const struct records *records = setting.records;
    assert_int_equal(records->each, 1 + RECORD_STUDENTS * RECORD_PRUNES);
    assert_int_equal(records->count, SEQUENCES * records->each);
    for (uint32_t s = 0; s < SEQUENCES; s++) {
        struct dataset_sequence data;
        struct error error = {0};
        assert_int_equal(dataset_sequence(setting.training.dataset, FIRST + s, &data, &error), 0);
        for (uint32_t e = 0; e < records->each; e++) {
            const struct recorded_sequence *example = &records->sequences[s * records->each + e];
            uint32_t after = example->seen - data.prompt;
            if (e == 0) {
                assert_true(example->budget == 0 && after == 0);
            } else {
                assert_true(example->budget >= MINIMUM && after > 0 && after % INTERVAL == 0);
                assert_true(after <= RECORD_INTERVALS * INTERVAL && example->fresh == INTERVAL);
                assert_true((e - 1) % RECORD_PRUNES == 0 || example[-1].seen < example->seen);
            }
            if (data.own || example->budget > MINIMUM)
                continue;
            check_example(&setting, example, data.tokens, data.prompt);
            evicted += e > 0 && example->heads[0].slots < example->seen;
            checked++;
        }
    }
    assert_true(checked > 5 && evicted > 2);
    clear(&setting);
}

/* The paper's means and deviations are those of the cache before the first prune. */
static void test_frozen_means(void **state) {
    (void)state;
    struct setting setting;
    uint32_t other = 0;
    record(&setting, FEATURES_PAPER);
    const struct records *records = setting.records;
    for (uint32_t s = 0; s < SEQUENCES; s++) {
        const struct recorded_sequence *first = &records->sequences[s * records->each];
        for (uint32_t e = 1; e < records->each; e++)
            for (uint32_t h = 0; h < first[e].heads_count; h++)
                for (uint32_t k = 0; k < first->heads_count; k++) {
                    const float *one = first->heads[k].standard, *two = first[e].heads[h].standard;
                    if (first->heads[k].head == first[e].heads[h].head)
                        assert_memory_equal(one, two, sizeof first->heads[k].standard);
                    else
                        other += memcmp(one, two, sizeof first->heads[k].standard) != 0;
                }
    }
    assert_true(other > 0);
    clear(&setting);
}

static void assert_same(const struct records *a, const struct records *b) {
    for (uint32_t s = 0; s < a->count; s++) {
        assert_int_equal(a->sequences[s].seen, b->sequences[s].seen);
        assert_int_equal(a->sequences[s].budget, b->sequences[s].budget);
        for (uint32_t h = 0; h < a->sequences[s].heads_count; h++) {
            const struct recorded_head *one = &a->sequences[s].heads[h], *two = &b->sequences[s].heads[h];
            assert_int_equal(one->slots, two->slots);
            assert_memory_equal(one->positions, two->positions, one->slots * sizeof *one->positions);
            assert_memory_equal(one->inputs, two->inputs, one->slots * a->fixed * sizeof *one->inputs);
            assert_memory_equal(one->keys, two->keys, one->slots * DIM * sizeof *one->keys);
            assert_memory_equal(one->targets, two->targets, one->slots * sizeof *one->targets);
        }
    }
}

/* Pages that are given up, wherever that is, change nothing. */
static void test_begun_anew(void **state) {
    (void)state;
    struct setting whole, part;
    yields = 0;
    record(&whole, FEATURES_CONTENT);
    uint32_t all = yields;
    gave_up = 0;
    for (uint32_t at = 1; at <= all; at += all / 7) {
        yields = 0;
        again_at = at;
        record(&part, FEATURES_CONTENT);
        assert_same(whole.records, part.records);
        clear(&part);
    }
    again_at = 0;
    assert_true(gave_up > 6);
    clear(&whole);
}

/* Nor does an engine with more threads, smaller batches and fewer pages. */
static void test_other_engine(void **state) {
    (void)state;
    struct setting one, two;
    struct engine *usual = engine;
    record(&one, FEATURES_CONTENT);
    engine = open_engine(2, 5, 300 << 10);
    assert_non_null(engine);
    record(&two, FEATURES_CONTENT);
    engine_close(engine);
    engine = usual;
    assert_same(one.records, two.records);
    clear(&one);
    clear(&two);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_examples),
        cmocka_unit_test(test_frozen_means),
        cmocka_unit_test(test_begun_anew),
        cmocka_unit_test(test_other_engine),
    };
    const struct CMUnitTest sliding_tests[] = {
        cmocka_unit_test(test_examples),
        cmocka_unit_test(test_frozen_means),
    };
    int failed = cmocka_run_group_tests(tests, set_up, tear_down);
    return cmocka_run_group_tests(sliding_tests, set_up_sliding, tear_down) + failed;
}
