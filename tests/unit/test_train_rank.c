/* SPDX-License-Identifier: Apache-2.0
 *
 * Stage rank on a toy: in each head one token a sequence will be attended to, and only its key tells which. From three
 * seeds training must find it, where scores by past attention do not. No engine.
 */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>

#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "engine/cpu/threads.h"
#include "engine/random.h"
#include "policy/train/rank.h"
#include "policy/train/start.h"

enum { LAYERS = 2, KV_HEADS = 2, HEADS = LAYERS * KV_HEADS, DIM = 16, SLOTS = 96, TRAIN = 12, FRESH = 8, STEPS = 400 };
enum { SEQUENCES = TRAIN + FRESH };

struct toy {
    struct model model;
    struct train_run run;
    struct training training;
    struct records *fresh;
    uint32_t useful[SEQUENCES][HEADS];
};

static float normal(uint64_t seed, uint32_t stream, uint64_t index) {
    float a = random_uniform(seed, stream, 0, index), b = random_uniform(seed, stream, 1, index);
    return sqrtf(-2 * logf(a)) * cosf(6.2831853f * b);
}

/* Dimensions of keys have means and deviations of their own, as a model's have; the useful one differs in a direction
 * that its head alone has. */
static float toy_key(const struct toy *toy, uint32_t sequence, uint32_t head, uint32_t slot, uint32_t dim) {
    float deviation = 0.1f * (float)(1 + dim % 7), mean = (float)dim - 5;
    float key = normal(17, sequence * HEADS + head, slot * DIM + dim);
    if (slot == toy->useful[sequence][head])
        key += dim % 4 == head ? 2.5f : 0;
    return mean + deviation * key;
}

static void fill_head(
    const struct toy *toy, const struct records *records, uint32_t index, uint32_t h, struct recorded_head *head) {
    head->head = h;
    head->slots = SLOTS;
    head->positions = malloc(SLOTS * sizeof *head->positions);
    head->inputs = malloc(SLOTS * records->fixed * sizeof *head->inputs);
    head->keys = malloc(SLOTS * DIM * sizeof *head->keys);
    head->targets = malloc(SLOTS * sizeof *head->targets);
    assert_true(head->positions != NULL && head->inputs != NULL && head->keys != NULL && head->targets != NULL);
    for (uint32_t i = 0; i < SLOTS; i++) {
        head->positions[i] = i;
        for (uint32_t f = 0; f < records->fixed; f++)
            head->inputs[i * records->fixed + f] = float_to_half(normal(18, index * HEADS + h, i * 16 + f));
        for (uint32_t d = 0; d < DIM; d++) /* whitened by what toy_key has */
            head->keys[i * DIM + d] = float_to_half(
                (toy_key(toy, index, h, i, d) - records->key_mean[h * DIM + d]) * records->key_scale[h * DIM + d]);
        head->targets[i] = i == toy->useful[index][h] ? 1 : 0.002f;
    }
}

static struct records *make_records(const struct toy *toy, uint32_t first, uint32_t count) {
    struct records *records = calloc(1, sizeof *records);
    assert_non_null(records);
    struct network_shape bare = records->shape = toy->training.network->shape;
    bare.content = 0;
    records->inputs = network_inputs_count(&bare);
    records->fixed = records->inputs - 4;
    records->heads = records->heads_most = HEADS;
    records->slots_most = SLOTS;
    records->count = count;
    records->each = 1;
    records->key_mean = malloc(HEADS * DIM * sizeof(float));
    records->key_scale = malloc(HEADS * DIM * sizeof(float));
    for (uint32_t i = 0; i < HEADS * DIM; i++) {
        records->key_mean[i] = (float)(i % DIM) - 5;
        records->key_scale[i] = 1 / (0.1f * (float)(1 + i % DIM % 7));
    }
    records->sequences = calloc(count, sizeof *records->sequences);
    for (uint32_t s = 0; s < count; s++) {
        records->sequences[s] = (struct recorded_sequence){
            .seen = SLOTS, .heads_count = HEADS, .heads = calloc(HEADS, sizeof(struct recorded_head))};
        for (uint32_t h = 0; h < HEADS; h++)
            fill_head(toy, records, first + s, h, &records->sequences[s].heads[h]);
    }
    return records;
}

/* Their arrays were allocated one by one. */
static void clear_heads(struct records *records) {
    for (uint32_t s = 0; s < records->count; s++) {
        for (uint32_t h = 0; h < HEADS; h++) {
            free(records->sequences[s].heads[h].positions);
            free(records->sequences[s].heads[h].inputs);
            free(records->sequences[s].heads[h].keys);
            free(records->sequences[s].heads[h].targets);
        }
    }
}

static void set_up(struct toy *toy, uint64_t seed, uint32_t threads) {
    struct error error = {0};
    memset(toy, 0, sizeof *toy);
    toy->model.shape =
        (struct model_shape){.layers = LAYERS, .global_layers = LAYERS, .kv_heads = KV_HEADS, .head_dim = DIM};
    train_options_default(&toy->run.options, TRAIN_RANKER, false);
    toy->run.options.seed = seed;
    toy->run.options.rank_steps = STEPS;
    toy->run.options.warmup_steps = 20;
    toy->run.options.content = 4;
    for (uint32_t i = 0; i < SEQUENCES * HEADS; i++)
        toy->useful[i / HEADS][i % HEADS] = (uint32_t)(random_uniform(19, 0, 0, i) * SLOTS);
    toy->training.run = &toy->run;
    toy->training.options = &toy->run.options;
    toy->training.network = network_start(&toy->run.options, &toy->model, &error);
    if (toy->training.network == NULL)
        fail_msg("%s", error.message);
    toy->training.threads = thread_pool_create(threads, &error);
    toy->training.gradient = gradient_create(toy->training.network);
    toy->training.adamw = adamw_create(network_parameters_count(toy->training.network));
    assert_true(toy->training.threads != NULL && toy->training.gradient != NULL && toy->training.adamw != NULL);
    toy->fresh = make_records(toy, TRAIN, FRESH);
}

static void tear_down(struct toy *toy) {
    clear_heads(toy->fresh);
    records_free(toy->fresh);
    network_release(toy->training.network);
    free(toy->training.gradient);
    adamw_free(toy->training.adamw);
    thread_pool_free(toy->training.threads);
}

/* Part of the fresh heads whose useful slot has the highest score, by the plain computation on keys as they are. */
static double found(const struct toy *toy) {
    const struct policy_network *network = toy->training.network;
    const struct network_shape *shape = &network->shape;
    uint32_t inputs = toy->fresh->inputs, width = network_inputs_count(shape), right = 0;
    float *bare = malloc(SLOTS * inputs * sizeof *bare), *all = malloc(SLOTS * width * sizeof *all), scores[SLOTS];
    assert_true(bare != NULL && all != NULL);
    for (uint32_t s = 0; s < FRESH; s++) {
        for (uint32_t h = 0; h < HEADS; h++) {
            records_inputs(toy->fresh, &toy->fresh->sequences[s], &toy->fresh->sequences[s].heads[h], 16, bare);
            for (uint32_t i = 0; i < SLOTS; i++) {
                for (uint32_t c = 0; c < shape->content; c++) {
                    double sum = network->content_offset[h * shape->content + c];
                    for (uint32_t d = 0; d < DIM; d++)
                        sum += (double)network->content[(h * shape->content + c) * DIM + d] *
                               toy_key(toy, TRAIN + s, h, i, d);
                    all[i * width + c] = (float)sum;
                }
                memcpy(all + i * width + shape->content, bare + i * inputs, inputs * sizeof *all);
            }
            network_normalise(network, h, NULL, SLOTS, all);
            network_score(network, h, all, SLOTS, scores);
            uint32_t best = 0;
            for (uint32_t i = 1; i < SLOTS; i++)
                best = scores[i] > scores[best] ? i : best;
            right += best == toy->useful[TRAIN + s][h];
        }
    }
    free(bare);
    free(all);
    return right / (double)(FRESH * HEADS);
}

static void end(struct toy *toy, struct records *records) {
    clear_heads(records);
    stage_rank.end(&toy->training);
    assert_null(toy->training.stage_state);
}

static double run_steps(struct toy *toy, uint32_t steps) {
    struct stage_result result = {0};
    struct error error = {0};
    double loss = 0;
    for (uint32_t i = 0; i < steps; i++) {
        if (stage_rank.step(&toy->training, &result, &error) != 0)
            fail_msg("%s", error.message);
        toy->training.stage_step++;
        assert_true(isfinite(result.loss) && isfinite(result.gradient_norm) && result.learning_rate > 0);
        loss += result.loss / steps;
    }
    return loss;
}

static void begin_with(struct toy *toy, struct records **records) {
    struct error error = {0};
    *records = make_records(toy, 0, TRAIN);
    if (rank_begin_on(&toy->training, *records, &error) != 0)
        fail_msg("%s", error.message);
}

static void test_finds_the_useful_token(void **state) {
    (void)state;
    for (uint64_t seed = 1; seed <= 3; seed++) {
        struct toy toy;
        struct records *records;
        set_up(&toy, seed, 1);
        begin_with(&toy, &records);
        double before = found(&toy), early = run_steps(&toy, 20);
        run_steps(&toy, STEPS - 40);
        double late = run_steps(&toy, 20), after = found(&toy);
        if (!(before < 0.3 && after > 0.9 && late < 0.9 * early))
            fail_msg("seed %u: found %.2f before, %.2f after; loss %.3f, then %.3f", (unsigned)seed, before, after,
                early, late);
        end(&toy, records);
        tear_down(&toy);
    }
}

/* The same bits with any number of threads, and from the middle on with what a checkpoint holds. */
static void test_same_bits(void **state) {
    (void)state;
    struct toy one, two;
    struct records *records_one, *records_two;
    struct network_array a, b;
    set_up(&one, 5, 1);
    set_up(&two, 5, 2);
    begin_with(&one, &records_one);
    begin_with(&two, &records_two);
    run_steps(&one, 12);
    run_steps(&two, 5);
    end(&two, records_two);
    begin_with(&two, &records_two);
    run_steps(&two, 7);
    for (uint32_t i = 0; network_array(one.training.network, i, &a); i++) {
        assert_true(network_array(two.training.network, i, &b));
        assert_memory_equal(a.values, b.values, a.count * sizeof *a.values);
    }
    end(&one, records_one);
    end(&two, records_two);
    tear_down(&one);
    tear_down(&two);
}

/* Training starts from h2o: the order of scores is that of the first input, ln A. */
static void test_starts_from_attention(void **state) {
    (void)state;
    struct toy toy;
    struct records *records;
    set_up(&toy, 1, 1);
    begin_with(&toy, &records);
    const struct policy_network *network = toy.training.network;
    uint32_t width = network_inputs_count(&network->shape), content = network->shape.content;
    for (uint32_t head = 0; head < HEADS; head++) {
        for (uint32_t f = 0; f < width; f++) {
            size_t at = (size_t)head * width + f;
            bool sum = f == content;
            assert_true(sum ? fabsf(network->skip[at] * network->scale[at] - 1) < 1e-6f : network->skip[at] == 0);
            if (f < content)
                assert_true(network->mean[at] == 0 && network->scale[at] == 1);
            else if (f < content + records->fixed) /* inputs of the toy are normal */
                assert_true(fabsf(network->mean[at]) < 0.1f && fabsf(network->scale[at] - 1) < 0.1f);
        }
    }
    end(&toy, records);
    tear_down(&toy);
}

/* Inputs that depend on the budget are what network.h says, beside the stored ones. */
static void test_inputs_at_a_budget(void **state) {
    (void)state;
    struct toy toy;
    set_up(&toy, 1, 1);
    const struct recorded_sequence *sequence = &toy.fresh->sequences[2];
    const struct recorded_head *head = &sequence->heads[1];
    uint32_t fixed = toy.fresh->fixed, width = toy.fresh->inputs;
    float *out = malloc(SLOTS * width * sizeof *out);
    assert_non_null(out);
    records_inputs(toy.fresh, sequence, head, 40, out);
    for (uint32_t i = 0; i < SLOTS; i++) {
        double age = SLOTS - 1 - i;
        for (uint32_t f = 0; f < fixed; f++)
            assert_true(out[i * width + f] == half_to_float(head->inputs[i * fixed + f]));
        assert_true(fabs(out[i * width + fixed] - (log(40.0 / SLOTS) + 1.5)) < 1e-6);
        for (uint32_t j = 0; j < 3; j++)
            assert_true(out[i * width + fixed + 1 + j] == (age < 40.0 / (8 >> j) ? 1 : 0));
    }
    free(out);
    assert_int_equal(records_budget(0.25, 1000), 250);
    assert_int_equal(records_budget(0.05, 100), 32);
    tear_down(&toy);
}

/* There and back. */
static void test_whitening(void **state) {
    (void)state;
    struct toy toy;
    set_up(&toy, 1, 1);
    struct policy_network *network = toy.training.network;
    network_start_content(network, 3);
    struct policy_network *before = network_copy(network);
    records_unwhiten(toy.fresh, network);
    for (uint32_t r = 0; r < HEADS * 4; r++) { /* c of a key, both ways */
        double white = before->content_offset[r], plain = network->content_offset[r];
        for (uint32_t d = 0; d < DIM; d++) {
            double key = toy_key(&toy, TRAIN, r / 4, 3, d);
            const float *mean = toy.fresh->key_mean, *scale = toy.fresh->key_scale;
            plain += network->content[r * DIM + d] * key;
            white += before->content[r * DIM + d] * (key - mean[r / 4 * DIM + d]) * scale[r / 4 * DIM + d];
        }
        assert_true(fabs(plain - white) < 1e-4);
    }
    records_whiten(toy.fresh, network);
    for (uint32_t i = 0; i < HEADS * 4 * DIM; i++)
        assert_true(fabsf(network->content[i] - before->content[i]) < 1e-6f);
    network_release(before);
    tear_down(&toy);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_finds_the_useful_token),
        cmocka_unit_test(test_same_bits),
        cmocka_unit_test(test_starts_from_attention),
        cmocka_unit_test(test_inputs_at_a_budget),
        cmocka_unit_test(test_whitening),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
