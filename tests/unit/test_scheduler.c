/* SPDX-License-Identifier: Apache-2.0 */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>

#include <pthread.h>
#include <stdlib.h>
#include <string.h>

#include "engine/random.h"
#include "tests/unit/chosen_backend.h"
#include "tests/unit/serving.h"

enum { CASES = 17, CASES_ELSEWHERE = 4, GENERATED = 40 };

static uint32_t cases(void) {
    return chosen_backend_share(CASES, CASES_ELSEWHERE);
}

static struct request *case_request(uint32_t i) {
    return serving_request(1 + (i * 37) % 230, 1000 + i, GENERATED + i % 5);
}

/* The answers when every request has the server for itself. */
static struct serving *answer_alone(struct call *calls[CASES]) {
    struct serving *serving = serving_create(&(struct serving_options){.no_prefix_sharing = true});
    for (uint32_t i = 0; i < cases(); i++) {
        calls[i] = serving_must_submit(serving, case_request(i));
        serving_wait(serving, calls[i]);
        assert_true(calls[i]->answers[0].finish == FINISH_LENGTH || calls[i]->answers[0].finish == FINISH_STOP);
        assert_int_equal(calls[i]->answers[0].error.code, 0);
        assert_true(calls[i]->answers[0].tokens_count > 0);
    }
    return serving;
}

/* Submits all at once and compares with the answers alone. */
static struct scheduler_stats answer_together(const struct serving_options *options, struct call *const *alone) {
    struct serving_options all = *options;
    all.lockstep = true; /* all are there before the second token, however late this thread is */
    struct serving *serving = serving_create(&all);
    struct call *calls[CASES];
    for (uint32_t i = 0; i < cases(); i++)
        calls[i] = serving_must_submit(serving, case_request(i));
    serving_run_free(serving);
    serving_wait_all(serving);
    for (uint32_t i = 0; i < cases(); i++)
        if (!answers_equal(&calls[i]->answers[0], &alone[i]->answers[0]))
            fail_msg("request %u answers differently than alone", i);
    struct scheduler_stats stats;
    scheduler_get_stats(serving_scheduler(serving), &stats);
    serving_free(serving);
    return stats;
}

static void same_answers_alone_and_together(void **state) {
    (void)state;
    struct call *alone[CASES];
    struct serving *serving = answer_alone(alone);
    struct scheduler_stats stats = answer_together(&(struct serving_options){.threads = 2}, alone);
    assert_int_equal(stats.preemptions, 0);
    serving_free(serving);
}

static void same_answers_at_any_chunk_size(void **state) {
    (void)state;
    struct call *alone[CASES];
    struct serving *serving = answer_alone(alone);
    const uint32_t chunks[] = {1, 7, 16, 50, 300};
    for (size_t i = 0; i < sizeof chunks / sizeof chunks[0]; i++)
        answer_together(&(struct serving_options){.prefill_chunk = chunks[i]}, alone);
    answer_together(&(struct serving_options){.batch_rows = 19, .prefill_chunk = 5}, alone);
    serving_free(serving);
}

static void same_answers_after_preemption(void **state) {
    (void)state;
    struct call *alone[CASES];
    struct serving *serving = answer_alone(alone);
    /* 4 pages a block of tokens; the longest request needs 18 blocks, or 10. */
    uint32_t pages = 4 * chosen_backend_share(40, 14);
    struct scheduler_stats stats = answer_together(&(struct serving_options){.kv_pages = pages}, alone);
    assert_true(stats.preemptions > 0);
    if (chosen_backend_is_cpu()) {
        stats = answer_together(&(struct serving_options){.kv_pages = pages, .no_prefix_sharing = true}, alone);
        assert_true(stats.preemptions > 0);
    }
    serving_free(serving);
}

static void same_answers_with_a_reused_prefix(void **state) {
    (void)state;
    struct call *alone[CASES];
    struct serving *reference = answer_alone(alone);
    struct serving *serving = serving_create(&(struct serving_options){0});
    struct call *calls[2][CASES];
    for (int round = 0; round < 2; round++) {
        for (uint32_t i = 0; i < cases(); i++)
            calls[round][i] = serving_must_submit(serving, case_request(i));
        serving_wait_all(serving);
    }
    uint32_t cached = 0;
    for (uint32_t i = 0; i < cases(); i++) {
        assert_true(answers_equal(&calls[0][i]->answers[0], &alone[i]->answers[0]));
        assert_true(answers_equal(&calls[1][i]->answers[0], &alone[i]->answers[0]));
        uint32_t prompt = calls[1][i]->answers[0].prompt_tokens;
        assert_int_equal(calls[1][i]->answers[0].cached_tokens, (prompt - 1) / 16 * 16);
        cached += calls[1][i]->answers[0].cached_tokens;
    }
    struct scheduler_stats stats;
    scheduler_get_stats(serving_scheduler(serving), &stats);
    assert_int_equal(stats.prefix_hits, cached);
    serving_free(serving);
    serving_free(reference);
}

static void reuses_the_prefix_of_a_live_sequence(void **state) {
    (void)state;
    struct serving *serving = serving_create(&(struct serving_options){.lockstep = true});
    struct request *first = serving_request(300, 5, 150), *second = serving_request(300, 6, 4);
    first->ignore_eos = second->ignore_eos = true;
    memcpy(second->prompts[0].tokens, first->prompts[0].tokens, 200 * sizeof(int32_t));
    struct call *live = serving_must_submit(serving, first);
    serving_wait_output(serving, live, 2);
    struct call *call = serving_must_submit(serving, second);
    serving_wait(serving, call);
    assert_false(live->ended);
    assert_int_equal(call->answers[0].cached_tokens, 192);
    serving_wait_all(serving);
    serving_free(serving);
}

static void newcomer_is_served_while_others_decode(void **state) {
    (void)state;
    enum { CHUNK = 16, PROMPT = 240 };
    struct serving *serving = serving_create(&(struct serving_options){.prefill_chunk = CHUNK, .lockstep = true});
    struct request *request = serving_request(10, 1, 400);
    request->ignore_eos = true;
    struct call *old = serving_must_submit(serving, request);
    serving_wait_output(serving, old, 5);
    uint32_t before = old->answers[0].outputs;
    struct call *newcomer = serving_must_submit(serving, serving_request(PROMPT, 2, 8));
    serving_wait_output(serving, newcomer, 1);
    uint32_t during = old->answers[0].outputs - before;
    /* The old stream has a token in every step, and the newcomer's prompt takes this many. Text may be held back for
     * a step or two where a character is incomplete. */
    assert_true(during + 4 >= PROMPT / CHUNK);
    assert_false(old->ended);
    serving_wait(serving, newcomer);
    assert_false(old->ended);
    serving_wait_all(serving);
    serving_free(serving);
}

static void choices_are_forks_with_their_own_random_numbers(void **state) {
    (void)state;
    struct serving *serving = serving_create(&(struct serving_options){0});
    struct request *request = case_request(4);
    request->n = 5;
    struct call *many = serving_must_submit(serving, request);
    serving_wait(serving, many);
    struct call *one = serving_must_submit(serving, case_request(4));
    serving_wait(serving, one);
    assert_true(answers_equal(&many->answers[0], &one->answers[0]));
    uint32_t different = 0;
    for (uint32_t i = 1; i < 5; i++)
        different += !answers_equal(&many->answers[i], &many->answers[0]);
    assert_int_equal(different, 4);
    serving_free(serving);
    /* The same with places for two sequences only: the others wait, and say the same. */
    struct serving *narrow = serving_create(&(struct serving_options){.max_sequences = 2});
    request = case_request(4);
    request->n = 5;
    struct call *again = serving_must_submit(narrow, request);
    serving_wait(narrow, again);
    struct serving *wide = serving_create(&(struct serving_options){0});
    request = case_request(4);
    request->n = 5;
    struct call *reference = serving_must_submit(wide, request);
    serving_wait(wide, reference);
    for (uint32_t i = 0; i < 5; i++)
        assert_true(answers_equal(&again->answers[i], &reference->answers[i]));
    serving_free(narrow);
    serving_free(wide);
}

static void prompts_of_a_list_answer_as_alone(void **state) {
    (void)state;
    struct serving *serving = serving_create(&(struct serving_options){0});
    struct request *request = case_request(3), *second = case_request(9);
    request->prompts = realloc(request->prompts, 2 * sizeof *request->prompts);
    request->prompts[1] = second->prompts[0];
    request->prompts_count = 2;
    request->n = 2;
    second->prompts_count = 0;
    request_free(second);
    uint32_t max_tokens = request->max_tokens;
    uint64_t seed = request->sampling.seed;
    struct call *list = serving_must_submit(serving, request);
    serving_wait(serving, list);
    request = case_request(9);
    request->max_tokens = max_tokens;
    request->sampling.seed = seed;
    request->n = 2;
    struct call *alone = serving_must_submit(serving, request);
    serving_wait(serving, alone);
    assert_true(answers_equal(&list->answers[2], &alone->answers[0]));
    assert_true(answers_equal(&list->answers[3], &alone->answers[1]));
    serving_free(serving);
}

static size_t code_points(const char *text, size_t bytes) {
    size_t count = 0;
    for (size_t i = 0; i < bytes; i++)
        count += ((unsigned char)text[i] & 0xc0) != 0x80;
    return count;
}

static void echo_gives_the_prompt_and_its_logprobs(void **state) {
    (void)state;
    struct serving *serving = serving_create(&(struct serving_options){.prefill_chunk = 9, .batch_rows = 20});
    struct request *plain = case_request(2), *echo = case_request(2), *only = case_request(2);
    uint32_t prompt = plain->prompts[0].count;
    echo->echo = true;
    only->echo = true;
    only->max_tokens = 0;
    int32_t *tokens = malloc(prompt * sizeof *tokens);
    memcpy(tokens, plain->prompts[0].tokens, prompt * sizeof *tokens);
    struct call *a = serving_must_submit(serving, plain);
    serving_wait(serving, a);
    struct call *b = serving_must_submit(serving, echo), *c = serving_must_submit(serving, only);
    serving_wait_all(serving);
    const struct answer *alone = &a->answers[0], *echoed = &b->answers[0], *prompt_only = &c->answers[0];
    assert_int_equal(echoed->prompt_entries, prompt);
    assert_int_equal(echoed->tokens_count, prompt + alone->tokens_count);
    assert_memory_equal(echoed->tokens, tokens, prompt * sizeof *tokens);
    assert_memory_equal(echoed->tokens + prompt, alone->tokens, alone->tokens_count * sizeof *tokens);
    assert_memory_equal(echoed->logprobs + prompt, alone->logprobs, alone->tokens_count * sizeof(float));
    assert_memory_equal(echoed->offsets + prompt, alone->offsets, alone->tokens_count * sizeof(uint32_t));
    assert_true(echoed->logprobs[0] == 1); /* none */
    for (uint32_t i = 1; i < prompt; i++)
        assert_true(echoed->logprobs[i] < 0 && echoed->logprobs[i] > -30);
    assert_memory_equal(echoed->text + echoed->text_bytes - alone->text_bytes, alone->text, alone->text_bytes);
    assert_int_equal(echoed->offsets[0], 0);
    assert_int_equal(echoed->offsets[prompt], code_points(echoed->text, echoed->text_bytes - alone->text_bytes));
    assert_int_equal(prompt_only->tokens_count, prompt);
    assert_memory_equal(prompt_only->logprobs, echoed->logprobs, prompt * sizeof(float));
    assert_int_equal(prompt_only->text_bytes, echoed->text_bytes - alone->text_bytes);
    assert_int_equal(prompt_only->completion_tokens, 0);
    assert_int_equal(prompt_only->finish, FINISH_LENGTH);
    assert_int_equal(echoed->cached_tokens, 0); /* the rows of the prompt are needed */
    free(tokens);
    serving_free(serving);
}

/* A token has the same log-probability as part of a prompt as when it was generated. */
static void prompt_logprobs_equal_those_of_generation(void **state) {
    (void)state;
    struct serving *serving = serving_create(&(struct serving_options){.prefill_chunk = 11});
    struct request *first = serving_request(30, 8, 50);
    first->ignore_eos = true;
    int32_t tokens[80];
    memcpy(tokens, first->prompts[0].tokens, 30 * sizeof *tokens);
    struct call *generated = serving_must_submit(serving, first);
    serving_wait(serving, generated);
    const struct answer *answer = &generated->answers[0];
    assert_int_equal(answer->tokens_count, 50);
    memcpy(tokens + 30, answer->tokens, 50 * sizeof *tokens);
    struct request *second = serving_request(80, 8, 1);
    memcpy(second->prompts[0].tokens, tokens, sizeof tokens);
    second->echo = true;
    struct call *echoed = serving_must_submit(serving, second);
    serving_wait(serving, echoed);
    assert_memory_equal(echoed->answers[0].logprobs + 30, answer->logprobs, 50 * sizeof(float));
    serving_free(serving);
}

static void echo_of_text_alone_computes_nothing(void **state) {
    (void)state;
    struct serving *serving = serving_create(&(struct serving_options){0});
    struct request *request = case_request(3);
    request->echo = true;
    request->max_tokens = 0;
    request->logprobs = -1;
    request->n = 3;
    struct call *call = serving_must_submit(serving, request);
    serving_wait(serving, call);
    for (uint32_t i = 0; i < 3; i++) {
        assert_int_equal(call->answers[i].finish, FINISH_LENGTH);
        assert_true(call->answers[i].text_bytes > 0);
    }
    struct scheduler_stats stats;
    scheduler_get_stats(serving_scheduler(serving), &stats);
    assert_int_equal(stats.steps, 0);
    serving_free(serving);
}

static void whole_answer_equals_the_stream(void **state) {
    (void)state;
    struct serving *serving = serving_create(&(struct serving_options){0});
    for (uint32_t i = 0; i < 6; i++) {
        struct request *whole = case_request(i);
        whole->stream = false;
        struct call *a = serving_must_submit(serving, case_request(i)), *b = serving_must_submit(serving, whole);
        serving_wait_all(serving);
        assert_true(answers_equal(&a->answers[0], &b->answers[0]));
        assert_int_equal(b->answers[0].outputs, 2);
        assert_int_equal(a->answers[0].first_generated, 1);
        assert_int_equal(b->answers[0].first_generated, 1);
        assert_int_equal(a->answers[0].generated, a->answers[0].completion_tokens);
        assert_int_equal(b->answers[0].generated, b->answers[0].completion_tokens);
    }
    serving_free(serving);
}

/* Prepared, and then given up or submitted. */
static void prepared_requests_answer_alike(void **state) {
    (void)state;
    struct serving *serving = serving_create(&(struct serving_options){0});
    struct error error;
    struct call *plain = serving_must_submit(serving, case_request(1));
    struct request *request = case_request(1), *dropped = case_request(1);
    assert_int_equal(request_prepare(dropped, serving_tokenizer(serving), &error), 0);
    assert_int_equal(request_prepare(request, serving_tokenizer(serving), &error), 0);
    request_free(dropped);
    struct call *prepared = serving_must_submit(serving, request);
    serving_wait_all(serving);
    assert_true(answers_equal(&plain->answers[0], &prepared->answers[0]));
    serving_free(serving);
}

static void stop_string_cuts_text_and_entries(void **state) {
    (void)state;
    struct serving *serving = serving_create(&(struct serving_options){0});
    struct request *request = case_request(7);
    request->max_tokens = 200;
    request->ignore_eos = true;
    struct call *full = serving_must_submit(serving, request);
    serving_wait(serving, full);
    const char *text = full->answers[0].text;
    /* A stop string out of the answer: three whole characters that do not occur before, some way in. */
    size_t at = full->answers[0].text_bytes / 3, end;
    char *stop = NULL;
    do {
        free(stop);
        do
            at++;
        while (((unsigned char)text[at] & 0xc0) == 0x80);
        end = at;
        for (int characters = 0; characters < 3; characters++)
            do
                end++;
            while (((unsigned char)text[end] & 0xc0) == 0x80);
        assert_true(end < full->answers[0].text_bytes);
        stop = strndup(text + at, end - at);
    } while (strlen(stop) != end - at || memmem(text, end, stop, end - at) != text + at);
    size_t expected = at;
    for (int stream = 0; stream < 2; stream++) {
        request = case_request(7);
        request->max_tokens = 200;
        request->ignore_eos = true;
        request->stream = stream;
        request->stops = calloc(1, sizeof *request->stops);
        request->stops[0] = strdup(stop);
        request->stops_count = 1;
        struct call *call = serving_must_submit(serving, request);
        serving_wait(serving, call);
        const struct answer *answer = &call->answers[0];
        assert_int_equal(answer->finish, FINISH_STOP);
        assert_int_equal(answer->text_bytes, expected);
        assert_memory_equal(answer->text, text, expected);
        size_t base = full->answers[0].offsets[0];
        assert_true(answer->offsets[answer->tokens_count - 1] < base + code_points(text, expected));
        assert_true(full->answers[0].offsets[answer->tokens_count] >= base + code_points(text, expected));
        assert_memory_equal(answer->tokens, full->answers[0].tokens, answer->tokens_count * sizeof(int32_t));
    }
    free(stop);
    serving_free(serving);
}

static void bad_requests_are_refused(void **state) {
    (void)state;
    struct serving *serving = serving_create(&(struct serving_options){.kv_pages = 4 * 10});
    struct error error;
    assert_int_equal(engine_tokens_max(serving_engine(serving)), 160);
    assert_null(serving_submit(serving, serving_request(161, 1, 1), &error));
    assert_int_equal(error.code, ERROR_CONTEXT);
    assert_null(serving_submit(serving, serving_request(160, 1, 1), &error));
    assert_int_equal(error.code, ERROR_CONTEXT);
    struct request *many = serving_request(5, 1, 1);
    many->prompts = realloc(many->prompts, 2 * sizeof *many->prompts);
    many->prompts[1] = (struct prompt){calloc(1, sizeof(int32_t)), 1};
    many->prompts_count = 2;
    many->n = 0x80000001; /* times 2 is 2 in 32 bits */
    assert_int_equal(scheduler_submit(serving_scheduler(serving), many, &error), ERROR_INVALID);
    request_free(many);
    struct call *full = serving_must_submit(serving, serving_request(159, 1, 50));
    serving_wait(serving, full);
    assert_int_equal(full->answers[0].finish, FINISH_LENGTH);
    assert_int_equal(full->answers[0].completion_tokens, 1);
    serving_free(serving);
}

static void full_queue_refuses(void **state) {
    (void)state;
    struct serving *serving =
        serving_create(&(struct serving_options){.max_sequences = 1, .max_waiting = 2, .lockstep = true});
    struct call *running = serving_must_submit(serving, serving_request(20, 1, 300));
    serving_wait_output(serving, running, 1);
    serving_must_submit(serving, serving_request(5, 2, 2));
    serving_must_submit(serving, serving_request(5, 3, 2));
    struct error error;
    assert_null(serving_submit(serving, serving_request(5, 4, 2), &error));
    assert_int_equal(error.code, ERROR_PAGES);
    serving_wait_all(serving);
    serving_must_submit(serving, serving_request(5, 4, 2));
    serving_wait_all(serving);
    serving_free(serving);
}

static void cancelling_ends_only_its_own_request(void **state) {
    (void)state;
    struct serving *serving =
        serving_create(&(struct serving_options){.max_sequences = 2, .prefill_chunk = 4, .lockstep = true});
    struct request *decoding = serving_request(20, 1, 400), *prefilling = serving_request(400, 2, 50);
    decoding->ignore_eos = true;
    struct call *a = serving_must_submit(serving, decoding);
    serving_wait_output(serving, a, 2);
    struct call *b = serving_must_submit(serving, prefilling);
    struct call *queued = serving_must_submit(serving, serving_request(30, 3, 10));
    struct call *last = serving_must_submit(serving, serving_request(30, 4, 10));
    serving_wait_output(serving, a, 6);
    scheduler_cancel(serving_scheduler(serving), queued->request);
    serving_wait(serving, queued);
    assert_int_equal(queued->answers[0].finish, FINISH_CANCELLED);
    assert_int_equal(queued->answers[0].completion_tokens, 0);
    assert_false(a->ended);
    assert_false(b->ended);
    scheduler_cancel(serving_scheduler(serving), b->request);
    serving_wait(serving, b);
    assert_int_equal(b->answers[0].finish, FINISH_CANCELLED);
    assert_int_equal(b->answers[0].completion_tokens, 0);
    assert_false(a->ended);
    scheduler_cancel(serving_scheduler(serving), a->request);
    serving_wait(serving, a);
    assert_int_equal(a->answers[0].finish, FINISH_CANCELLED);
    serving_wait(serving, last);
    assert_int_equal(last->answers[0].completion_tokens, 10);
    struct scheduler_stats stats;
    scheduler_get_stats(serving_scheduler(serving), &stats);
    assert_int_equal(stats.requests_running, 0);
    assert_int_equal(stats.requests_waiting, 0);
    assert_int_equal(stats.pages_free, stats.pages_total);
    serving_free(serving);
}

/* A second prompt for a request. */
static void add_prompt(struct request *request, struct request *from) {
    request->prompts = realloc(request->prompts, 2 * sizeof *request->prompts);
    request->prompts[1] = from->prompts[0];
    request->prompts_count = 2;
    from->prompts_count = 0;
    request_free(from);
}

static void a_request_whose_time_is_over_keeps_what_it_has(void **state) {
    (void)state;
    struct serving *serving = serving_create(&(struct serving_options){.max_sequences = 1, .lockstep = true});
    struct request *whole = serving_request(20, 1, 60), *cut = serving_request(20, 1, 60);
    whole->ignore_eos = cut->ignore_eos = true;
    add_prompt(cut, serving_request(30, 2, 60));
    struct call *a = serving_must_submit(serving, whole);
    serving_wait(serving, a);
    struct call *b = serving_must_submit(serving, cut),
                *queued = serving_must_submit(serving, serving_request(30, 3, 10));
    serving_wait_output(serving, b, 6);
    scheduler_expire(serving_scheduler(serving), queued->request);
    serving_wait(serving, queued);
    assert_int_equal(queued->answers[0].finish, FINISH_CANCELLED);
    assert_false(b->ended);
    scheduler_expire(serving_scheduler(serving), b->request);
    serving_wait(serving, b);
    const struct answer *full = &a->answers[0], *part = &b->answers[0];
    assert_int_equal(part->finish, FINISH_LENGTH);
    assert_in_range(part->completion_tokens, 6, 59);
    assert_int_equal(part->tokens_count, part->completion_tokens);
    assert_memory_equal(part->tokens, full->tokens, part->tokens_count * sizeof *part->tokens);
    assert_int_equal(b->answers[1].finish, FINISH_CANCELLED);
    assert_int_equal(b->answers[1].completion_tokens, 0);
    struct scheduler_stats stats;
    scheduler_get_stats(serving_scheduler(serving), &stats);
    assert_int_equal(stats.requests_running + stats.requests_waiting, 0);
    assert_int_equal(stats.pages_free, stats.pages_total);
    serving_free(serving);
}

static void stopping_ends_everything(void **state) {
    (void)state;
    struct serving *serving = serving_create(&(struct serving_options){.max_sequences = 2});
    struct call *calls[6];
    for (uint32_t i = 0; i < 6; i++)
        calls[i] = serving_must_submit(serving, serving_request(100, i, 300));
    scheduler_stop(serving_scheduler(serving));
    serving_wait_all(serving);
    for (uint32_t i = 0; i < 6; i++)
        assert_true(calls[i]->answers[0].finish != FINISH_NONE);
    struct error error;
    assert_null(serving_submit(serving, serving_request(5, 4, 2), &error));
    serving_free(serving);
}

static void memory_of_running_requests_is_counted(void **state) {
    (void)state;
    struct serving *serving = serving_create(&(struct serving_options){.lockstep = true});
    const struct model_shape *shape = &engine_model(serving_engine(serving))->shape;
    uint64_t heads = shape->layers * shape->kv_heads;
    uint64_t page = kv_cache_pool(engine_kv_cache(serving_engine(serving)))->page_bytes;
    struct call *a = serving_must_submit(serving, serving_request(60, 1, 40)),
                *b = serving_must_submit(serving, serving_request(70, 2, 40));
    serving_wait_output(serving, a, 1);
    serving_wait_output(serving, b, 1);
    uint32_t length = 60 + a->answers[0].generated - 1 + 70 + b->answers[0].generated - 1;
    struct scheduler_stats stats;
    scheduler_get_stats(serving_scheduler(serving), &stats);
    assert_int_equal(stats.requests_running, 2);
    assert_int_equal(stats.kv_tokens_seen, length);
    assert_int_equal(stats.kv_tokens_kept, length);
    assert_int_equal(stats.kv_bytes, (4 + 5) * heads * page);
    assert_int_equal(stats.kv_bytes_full, (4 + 5) * heads * page);
    serving_run_free(serving);
    serving_wait_all(serving);
    serving_free(serving);
}

/* Preemption takes from those admitted last: equal requests end in the order in which they came. */
static void preempted_requests_keep_their_place(void **state) {
    (void)state;
    struct serving *serving = serving_create(&(struct serving_options){.kv_pages = 4 * 16});
    struct call *calls[6];
    for (uint32_t i = 0; i < 6; i++) {
        struct request *request = serving_request(60, i, 120);
        request->ignore_eos = true;
        request->stream = false;
        calls[i] = serving_must_submit(serving, request);
    }
    serving_wait_all(serving);
    for (uint32_t i = 1; i < 6; i++)
        assert_true(calls[i]->last_event > calls[i - 1]->last_event);
    struct scheduler_stats stats;
    scheduler_get_stats(serving_scheduler(serving), &stats);
    assert_true(stats.preemptions > 0);
    serving_free(serving);
}

/* Random requests, cancelled at random, on a pool that is much too small. */
static void nothing_is_lost_under_stress(void **state) {
    (void)state;
    struct serving *serving = serving_create(&(struct serving_options){.kv_pages = 4 * 24,
        .max_sequences = 8,
        .max_waiting = 10000,
        .prefill_chunk = 20,
        .batch_rows = 64,
        .threads = 2});
    enum { REQUESTS = 150 };
    struct call *calls[REQUESTS];
    uint32_t cancelled = 0;
    for (uint32_t i = 0; i < REQUESTS; i++) {
        uint32_t words[4];
        random_philox(77, 0, 0, i, words);
        struct request *request = serving_request(1 + words[0] % 300, words[1] % 8, 1 + words[2] % 60);
        request->n = 1 + words[3] % 3;
        request->stream = words[3] & 16;
        request->echo = words[3] & 32;
        request->logprobs = words[3] & 64 ? 1 : -1;
        calls[i] = serving_must_submit(serving, request);
        if (words[3] & 128) {
            struct call *victim = calls[words[0] % (i + 1)];
            if (!victim->ended) {
                scheduler_cancel(serving_scheduler(serving), victim->request);
                cancelled++;
            }
        }
        if (words[3] & 256)
            serving_wait_output(serving, calls[i / 2], 1);
    }
    serving_wait_all(serving);
    assert_true(cancelled > 20);
    for (uint32_t i = 0; i < REQUESTS; i++)
        for (uint32_t j = 0; j < calls[i]->answers_count; j++)
            assert_int_not_equal(calls[i]->answers[j].finish, FINISH_ERROR);
    struct scheduler_stats stats;
    scheduler_get_stats(serving_scheduler(serving), &stats);
    assert_true(stats.preemptions > 0);
    serving_free(serving);
}

/* A damaged model has nothing to say, and says so; echoing and scoring go on. */
static void logits_that_are_no_numbers_are_an_error(void **state) {
    (void)state;
    struct serving *serving = serving_create(&(struct serving_options){.broken_model = true});
    for (uint32_t i = 0; i < 4; i++) {
        struct request *request = serving_request(20, i, 5);
        request->n = 1 + i;
        request->sampling.temperature = i % 2 == 0 ? 0 : 1;
        request->logprobs = i < 2 ? -1 : 3;
        struct call *call = serving_must_submit(serving, request);
        serving_wait(serving, call);
        for (uint32_t c = 0; c <= i; c++) {
            assert_int_equal(call->answers[c].finish, FINISH_ERROR);
            assert_non_null(strstr(call->answers[c].error.message, "not numbers"));
            assert_int_equal(call->answers[c].completion_tokens, 0);
        }
    }
    struct request *scored = serving_request(20, 9, 0);
    scored->echo = true;
    struct call *call = serving_must_submit(serving, scored);
    serving_wait(serving, call);
    assert_int_equal(call->answers[0].finish, FINISH_LENGTH);
    struct scheduler_stats stats;
    scheduler_get_stats(serving_scheduler(serving), &stats);
    assert_int_equal(stats.requests_running, 0);
    assert_int_equal(stats.generated_tokens, 0);
    assert_int_equal(stats.kv_bytes, 0);
    serving_free(serving);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(logits_that_are_no_numbers_are_an_error),
        cmocka_unit_test(same_answers_alone_and_together),
        cmocka_unit_test(same_answers_at_any_chunk_size),
        cmocka_unit_test(same_answers_after_preemption),
        cmocka_unit_test(same_answers_with_a_reused_prefix),
        cmocka_unit_test(reuses_the_prefix_of_a_live_sequence),
        cmocka_unit_test(newcomer_is_served_while_others_decode),
        cmocka_unit_test(choices_are_forks_with_their_own_random_numbers),
        cmocka_unit_test(prompts_of_a_list_answer_as_alone),
        cmocka_unit_test(echo_gives_the_prompt_and_its_logprobs),
        cmocka_unit_test(echo_of_text_alone_computes_nothing),
        cmocka_unit_test(whole_answer_equals_the_stream),
        cmocka_unit_test(prepared_requests_answer_alike),
        cmocka_unit_test(stop_string_cuts_text_and_entries),
        cmocka_unit_test(bad_requests_are_refused),
        cmocka_unit_test(full_queue_refuses),
        cmocka_unit_test(cancelling_ends_only_its_own_request),
        cmocka_unit_test(a_request_whose_time_is_over_keeps_what_it_has),
        cmocka_unit_test(stopping_ends_everything),
        cmocka_unit_test(prompt_logprobs_equal_those_of_generation),
        cmocka_unit_test(memory_of_running_requests_is_counted),
        cmocka_unit_test(preempted_requests_keep_their_place),
        cmocka_unit_test(nothing_is_lost_under_stress),
    };
    const struct CMUnitTest elsewhere[] = {
        cmocka_unit_test(same_answers_after_preemption),
    };
    if (!chosen_backend_is_cpu())
        return cmocka_run_group_tests(elsewhere, NULL, NULL);
    return cmocka_run_group_tests(tests, NULL, NULL);
}
