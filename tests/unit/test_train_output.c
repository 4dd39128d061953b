/* SPDX-License-Identifier: Apache-2.0
 *
 * Errors of heads' outputs against plain arithmetic in double from the model's own matrix; what is recorded for them
 * against the attention statistics; and the utility of rankings.
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

#include "engine/cpu/threads.h"
#include "engine/random.h"
#include "policy/train/output.h"
#include "policy/train/ranking.h"
#include "policy/train/start.h"
#include "tests/unit/tiny_llama.h"

enum { SLOTS = 5, QUERIES = 2, GROUP = 2, DIM = 16 };

/* In place of the run's (train.c): there is none. */
int train_yield(struct training *training) {
    (void)training;
    return 0;
}

int train_pause(struct training *training) {
    return train_yield(training);
}

int train_gave_up(struct training *training) {
    (void)training;
    return 0;
}

bool train_may_wait(const struct training *training) {
    (void)training;
    return false;
}

void train_progress(struct training *training, const char *what, uint64_t done, uint64_t all) {
    (void)training;
    (void)what;
    assert_true(done <= all);
}

static struct model *model;
static struct thread_pool *threads;

static int set_up(void **state) {
    (void)state;
    struct error error = {0};
    struct tiny_llama options = tiny_llama_default();
    char *path = tiny_llama_save(&options);
    model = model_open(path, &error);
    threads = thread_pool_create(2, &error);
    unlink(path);
    free(path);
    return model == NULL || threads == NULL;
}

static int tear_down(void **state) {
    (void)state;
    model_free(model);
    thread_pool_free(threads);
    return 0;
}

/* |x W_h| of a layer, from the rows of W_o. */
static double plain_norm(uint32_t layer, uint32_t head, const double *x) {
    const struct tensor *output = &model->layers[layer].attn_output;
    float *row = malloc(output->columns * sizeof *row);
    double sum = 0;
    assert_non_null(row);
    for (uint32_t r = 0; r < output->rows; r++) {
        double product = 0;
        tensor_dequantise_row(output, r, row);
        for (uint32_t d = 0; d < DIM; d++)
            product += x[d] * (double)row[head * DIM + d];
        sum += product * product;
    }
    free(row);
    return sqrt(sum);
}

/* A made-up head. */
struct made {
    uint16_t attention[QUERIES][GROUP][SLOTS], values[SLOTS][DIM];
    float later[QUERIES][GROUP][1 + DIM];
    struct recorded_head head;
    struct recorded_sequence sequence;
    struct records records;
};

static void make(struct made *made, uint32_t head) {
    for (uint32_t q = 0; q < QUERIES; q++) {
        for (uint32_t g = 0; g < GROUP; g++) {
            for (uint32_t i = 0; i < SLOTS; i++)
                made->attention[q][g][i] = float_to_half(random_uniform(1, q, g, i) / 4);
            for (uint32_t d = 0; d <= DIM; d++)
                made->later[q][g][d] = random_uniform(2, q, g, d) / 4;
        }
    }
    for (uint32_t i = 0; i < SLOTS; i++)
        for (uint32_t d = 0; d < DIM; d++)
            made->values[i][d] = float_to_half(2 * random_uniform(3, i, 0, d) - 1);
    made->head = (struct recorded_head){.head = head,
        .slots = SLOTS,
        .attention = made->attention[0][0],
        .values = made->values[0],
        .later = made->later[0][0]};
    made->sequence = (struct recorded_sequence){.seen = SLOTS, .queries = QUERIES};
    made->records = (struct records){
        .shape = {.kv_heads = model->shape.kv_heads, .head_dim = DIM}, .group = GROUP, .outputs = true};
}

static void plain_mix(const struct made *made, uint32_t q, uint32_t g, const uint8_t *keep, double *out) {
    double all = (double)made->later[q][g][0];
    for (uint32_t d = 0; d < DIM; d++)
        out[d] = (double)made->later[q][g][1 + d];
    for (uint32_t i = 0; i < SLOTS; i++) {
        double p = keep[i] ? (double)half_to_float(made->attention[q][g][i]) : 0;
        all += p;
        for (uint32_t d = 0; d < DIM; d++)
            out[d] += p * (double)half_to_float(made->values[i][d]);
    }
    for (uint32_t d = 0; d < DIM; d++)
        out[d] /= all;
}

static double plain_error(const struct made *made, uint32_t layer, uint32_t kv_head, const uint8_t *keep) {
    static const uint8_t everything[SLOTS] = {1, 1, 1, 1, 1};
    double sum = 0;
    for (uint32_t q = 0; q < QUERIES; q++)
        for (uint32_t g = 0; g < GROUP; g++) {
            double whole[DIM], left[DIM];
            plain_mix(made, q, g, everything, whole);
            plain_mix(made, q, g, keep, left);
            for (uint32_t d = 0; d < DIM; d++)
                left[d] -= whole[d];
            sum += plain_norm(layer, kv_head * GROUP + g, left) / plain_norm(layer, kv_head * GROUP + g, whole);
        }
    return sum / (QUERIES * GROUP);
}

static void test_errors(void **state) {
    (void)state;
    static struct made made;
    struct train_run run = {.engine = NULL};
    struct training training = {.run = &run, .threads = threads};
    float *grams = output_grams(&training, model, NULL);
    assert_non_null(grams);
    for (uint32_t head = 0; head < model->shape.layers * model->shape.kv_heads; head++) {
        make(&made, head);
        float *work = malloc(output_work(&made.records, SLOTS) * sizeof *work);
        struct output output;
        output_open(&made.records, &made.sequence, &made.head, grams, work, &output);
        for (uint32_t set = 0; set < 1 << SLOTS; set++) {
            uint8_t keep[SLOTS];
            for (uint32_t i = 0; i < SLOTS; i++)
                keep[i] = set >> i & 1;
            double expected = plain_error(&made, head / model->shape.kv_heads, head % model->shape.kv_heads, keep);
            assert_true(fabs(output_error(&output, keep) - expected) < 1e-4 * (1 + expected));
        }
        free(work);
    }
    free(grams);
}

/* ---- what is recorded ---- */

static void test_records(void **state) {
    (void)state;
    struct error error = {0};
    struct engine_options options = {.backend = {.threads = 1}, .kv_bytes = 16 << 20, .kv_format = KV_F16};
    struct train_options train;
    train_options_default(&train, TRAIN_RANKER, false);
    train.prompt_least = 40;
    train.prompt_most = 60;
    train.future = QUERIES * 8; /* every query is one of those that are kept */
    train.sequences = 3;
    struct tokenizer *tokenizer = tokenizer_create(model->file, &error);
    struct engine *engine = engine_open(model, &options, &error);
    assert_true(tokenizer != NULL && engine != NULL);
    struct dataset_options data = {.tokenizer = tokenizer,
        .least = 40,
        .most = 60,
        .future = train.future,
        .copying = 1,
        .part = DATASET_ALL,
        .seed = 1};
    struct train_run run = {.engine = engine, .tokenizer = tokenizer};
    struct training training = {.run = &run, .options = &train, .engine = engine, .threads = threads};
    training.dataset = dataset_load(NULL, &data, &error);
    training.network = network_start(&train, model, &error);
    struct record_plan plan = {.sequences = train.sequences, .outputs = true};
    struct records *records = NULL;
    if (training.dataset == NULL || training.network == NULL || records_create(&training, &plan, &records, &error) != 0)
        fail_msg("%s", error.message);
    for (uint32_t s = 0; s < records->count; s++) {
        const struct recorded_sequence *sequence = &records->sequences[s];
        assert_int_equal(sequence->queries, RECORD_QUERIES);
        for (uint32_t h = 0; h < sequence->heads_count; h++) {
            const struct recorded_head *head = &sequence->heads[h];
            double worth = 0, largest = 0;
            for (uint32_t i = 0; i < head->slots; i++) { /* targets: sum over queries of the group's mean */
                double sum = 0;
                for (uint32_t r = 0; r < RECORD_QUERIES * GROUP; r++)
                    sum += (double)half_to_float(head->attention[(size_t)r * head->slots + i]) / GROUP;
                worth = fmax(worth, fabs(sum));
                largest = fmax(largest, (double)head->targets[i]);
                assert_true((head->targets[i] > 0) == (sum > 0) || sum < 1e-3);
            }
            assert_true(worth > 0 && largest > 0);
            for (uint32_t r = 0; r < RECORD_QUERIES * GROUP; r++) { /* probabilities add up to 1 */
                double sum = (double)head->later[(size_t)r * (1 + DIM)];
                assert_true(sum > 0);
                for (uint32_t i = 0; i < head->slots; i++)
                    sum += (double)half_to_float(head->attention[(size_t)r * head->slots + i]);
                assert_true(fabs(sum - 1) < 2e-3);
            }
        }
    }
    records_free(records);
    network_release(training.network);
    dataset_free(training.dataset);
    engine_close(engine);
    tokenizer_free(tokenizer);
}

static void test_utility(void **state) {
    (void)state;
    static const float worth[] = {4, 0, 1, 3}, nothing[] = {0, 0, 0, 0};
    static const uint32_t best[] = {0, 3, 2}, other[] = {3, 1, 0}, budgets[] = {1, 3};
    assert_true(fabs(ranking_utility(worth, best, best, budgets, 2) - 1) < 1e-12);
    assert_true(fabs(ranking_utility(worth, other, best, budgets, 2) - (0.75 + 7.0 / 8) / 2) < 1e-12);
    assert_true(fabs(ranking_utility(nothing, other, best, budgets, 2) - 1) < 1e-12);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_errors),
        cmocka_unit_test(test_records),
        cmocka_unit_test(test_utility),
    };
    return cmocka_run_group_tests(tests, set_up, tear_down);
}
