/* SPDX-License-Identifier: Apache-2.0
 *
 * Vectors of texts (engine/pooling.h) from the scheduler, on a tiny random model.
 */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>

#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "tests/unit/chosen_backend.h"
#include "tests/unit/serving.h"

enum { CASES = 11, TOKENS = 37 };

static struct request *vector_request(uint32_t tokens, uint64_t seed, enum pooling pooling) {
    struct request *request = serving_request(tokens, seed, 0);
    request->pooling = pooling;
    request->logprobs = -1;
    request->stream = false;
    return request;
}

static const struct answer *answer(struct serving *serving, struct request *request) {
    struct call *call = serving_must_submit(serving, request);
    serving_wait(serving, call);
    const struct answer *answer = &call->answers[0];
    if (answer->finish != FINISH_STOP)
        fail_msg("finish %d: %s", answer->finish, answer->error.message);
    assert_non_null(answer->vector);
    return answer;
}

static struct request *case_request(uint32_t i) {
    return vector_request(1 + i * 37 % 230, 100 + i, i % 3 == 0 ? POOLING_LAST : POOLING_MEAN);
}

static struct serving *answer_alone(const struct answer *alone[CASES]) {
    struct serving *serving = serving_create(&(struct serving_options){0});
    for (uint32_t i = 0; i < CASES; i++)
        alone[i] = answer(serving, case_request(i));
    return serving;
}

static void expect_equal(const struct answer *a, const struct answer *b) {
    assert_int_equal(a->vector_width, b->vector_width);
    assert_memory_equal(a->vector, b->vector, a->vector_width * sizeof *a->vector);
}

/* The mean over a text is the mean of what its beginnings have last. */
static void mean_and_last_agree(void **state) {
    (void)state;
    struct serving *serving = serving_create(&(struct serving_options){0});
    const struct answer *mean = answer(serving, vector_request(TOKENS, 5, POOLING_MEAN));
    double sum[1024] = {0};
    assert_in_range(mean->vector_width, 1, 1024);
    for (uint32_t count = 1; count <= TOKENS; count++) {
        const struct answer *last = answer(serving, vector_request(count, 5, POOLING_LAST));
        for (uint32_t i = 0; i < last->vector_width; i++)
            sum[i] += last->vector[i];
    }
    for (uint32_t i = 0; i < mean->vector_width; i++)
        assert_true(sum[i] / TOKENS == mean->vector[i]);
    serving_free(serving);
}

static void normalised_ones_have_length_one(void **state) {
    (void)state;
    struct serving *serving = serving_create(&(struct serving_options){0});
    const struct answer *plain = answer(serving, vector_request(TOKENS, 5, POOLING_MEAN));
    struct request *request = vector_request(TOKENS, 5, POOLING_MEAN);
    request->normalise = true;
    const struct answer *unit = answer(serving, request);
    double squares = 0, length = 0;
    for (uint32_t i = 0; i < unit->vector_width; i++) {
        squares += unit->vector[i] * unit->vector[i];
        length += plain->vector[i] * plain->vector[i];
    }
    assert_true(fabs(squares - 1) < 1e-12);
    for (uint32_t i = 0; i < unit->vector_width; i++)
        assert_true(fabs(unit->vector[i] * sqrt(length) - plain->vector[i]) < 1e-12);
    serving_free(serving);
}

/* Vectors and answers of text in the same batches; the vectors are as they are alone. */
static void answer_together(const struct serving_options *options, const struct answer *alone[CASES]) {
    struct serving *serving = serving_create(options);
    struct call *calls[CASES];
    for (uint32_t i = 0; i < CASES; i++) {
        serving_must_submit(serving, serving_request(40, 500 + i, 60));
        calls[i] = serving_must_submit(serving, case_request(i));
    }
    serving_wait_all(serving);
    for (uint32_t i = 0; i < CASES; i++)
        expect_equal(&calls[i]->answers[0], alone[i]);
    serving_free(serving);
}

static void same_whatever_else_runs(void **state) {
    (void)state;
    const struct answer *alone[CASES];
    struct serving *serving = answer_alone(alone);
    answer_together(&(struct serving_options){.threads = 2}, alone);
    answer_together(&(struct serving_options){.prefill_chunk = 7}, alone);
    answer_together(&(struct serving_options){.kv_policy = "h2o,ratio=0.25,minimum=4,prefill_prune_every=16"}, alone);
    serving_free(serving);
}

/* Decoding sequences grow until they take the pages of a text that is being computed: its states are computed again,
 * and count once. */
static void same_after_preemption(void **state) {
    (void)state;
    enum { DECODING = 3, LONG = 200 };
    struct serving *serving =
        serving_create(&(struct serving_options){.kv_pages = 4 * 20, .prefill_chunk = 5, .lockstep = true});
    for (uint32_t i = 0; i < DECODING; i++) {
        struct request *request = serving_request(10, 500 + i, 150);
        request->ignore_eos = true;
        serving_wait_output(serving, serving_must_submit(serving, request), 1);
    }
    struct call *call = serving_must_submit(serving, vector_request(LONG, 5, POOLING_MEAN));
    serving_wait_all(serving);
    struct scheduler_stats stats;
    scheduler_get_stats(serving_scheduler(serving), &stats);
    assert_true(stats.preemptions > 0);
    struct serving *other = serving_create(&(struct serving_options){0});
    expect_equal(&call->answers[0], answer(other, vector_request(LONG, 5, POOLING_MEAN)));
    serving_free(other);
    serving_free(serving);
}

static void a_list_has_one_each(void **state) {
    (void)state;
    struct serving *serving = serving_create(&(struct serving_options){0});
    struct request *request = vector_request(TOKENS, 5, POOLING_MEAN),
                   *other = vector_request(TOKENS + 9, 6, POOLING_MEAN);
    request->prompts = realloc(request->prompts, 2 * sizeof *request->prompts);
    request->prompts[1] = other->prompts[0];
    request->prompts_count = 2;
    other->prompts_count = 0;
    request_free(other);
    struct call *call = serving_must_submit(serving, request);
    serving_wait(serving, call);
    expect_equal(&call->answers[0], answer(serving, vector_request(TOKENS, 5, POOLING_MEAN)));
    expect_equal(&call->answers[1], answer(serving, vector_request(TOKENS + 9, 6, POOLING_MEAN)));
    serving_free(serving);
}

/* No page is held afterwards, and none is found by the same tokens; what others left may be used. */
static void nothing_is_left(void **state) {
    (void)state;
    struct serving *serving = serving_create(&(struct serving_options){0});
    const struct answer *first = answer(serving, vector_request(100, 5, POOLING_LAST));
    const struct answer *again = answer(serving, vector_request(100, 5, POOLING_LAST));
    assert_int_equal(again->cached_tokens, 0);
    expect_equal(first, again);
    struct call *text = serving_must_submit(serving, serving_request(100, 5, 3));
    serving_wait(serving, text);
    assert_int_equal(text->answers[0].cached_tokens, 0);
    const struct answer *reusing = answer(serving, vector_request(100, 5, POOLING_LAST));
    assert_int_equal(reusing->cached_tokens, 96);
    expect_equal(first, reusing);
    assert_int_equal(answer(serving, vector_request(100, 5, POOLING_MEAN))->cached_tokens, 0);
    struct scheduler_stats stats;
    scheduler_get_stats(serving_scheduler(serving), &stats);
    assert_int_equal(stats.pages_free, stats.pages_total);
    serving_free(serving);
}

static void states_that_are_no_numbers_are_an_error(void **state) {
    (void)state;
    struct serving *serving = serving_create(&(struct serving_options){.broken_model = true});
    struct call *call = serving_must_submit(serving, vector_request(TOKENS, 5, POOLING_MEAN));
    serving_wait(serving, call);
    assert_int_equal(call->answers[0].finish, FINISH_ERROR);
    assert_null(call->answers[0].vector);
    serving_free(serving);
}

static void bad_requests_are_refused(void **state) {
    (void)state;
    struct serving *serving = serving_create(&(struct serving_options){.context = 64});
    struct error error = {0};
    struct request *request = vector_request(TOKENS, 5, POOLING_MEAN);
    request->n = 2;
    assert_null(serving_submit(serving, request, &error));
    assert_int_equal(error.code, ERROR_INVALID);
    request = vector_request(TOKENS, 5, POOLING_MEAN);
    request->max_tokens = 1;
    assert_null(serving_submit(serving, request, &error));
    assert_null(serving_submit(serving, vector_request(65, 5, POOLING_MEAN), &error));
    assert_int_equal(error.code, ERROR_CONTEXT);
    answer(serving, vector_request(64, 5, POOLING_MEAN)); /* may fill it */
    serving_free(serving);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(mean_and_last_agree),
        cmocka_unit_test(normalised_ones_have_length_one),
        cmocka_unit_test(same_whatever_else_runs),
        cmocka_unit_test(same_after_preemption),
        cmocka_unit_test(a_list_has_one_each),
        cmocka_unit_test(nothing_is_left),
        cmocka_unit_test(states_that_are_no_numbers_are_an_error),
        cmocka_unit_test(bad_requests_are_refused),
    };
    const struct CMUnitTest elsewhere[] = {
        cmocka_unit_test(mean_and_last_agree),
        cmocka_unit_test(same_after_preemption),
        cmocka_unit_test(nothing_is_left),
        cmocka_unit_test(states_that_are_no_numbers_are_an_error),
    };
    if (!chosen_backend_is_cpu())
        return cmocka_run_group_tests(elsewhere, NULL, NULL);
    return cmocka_run_group_tests(tests, NULL, NULL);
}
