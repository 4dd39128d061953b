/* SPDX-License-Identifier: Apache-2.0
 *
 * Sequences under eviction policies in the scheduler: what they answer and keep depends on the request alone, how many
 * run at once on the pages, and nothing is lost on the way to host memory and back.
 */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "engine/random.h"
#include "tests/sanitized.h"
#include "tests/unit/chosen_backend.h"
#include "tests/unit/serving.h"

/* One request each; ratios and minima are such that prompts of 60 tokens and more are pruned. */
static const char *const policies[] = {
    "streaming,ratio=0.5,minimum=8",
    "streaming,tokens=24,positions=cache",
    "h2o,ratio=0.25,minimum=8",
    "h2o,tokens=40,prefill_prune_every=32",
    "h2o_mean,ratio=0.4,minimum=8",
    "scissorhands,ratio=0.3,minimum=16",
    "tova,ratio=0.3,minimum=8",
    "snapkv,ratio=0.5,minimum=8,window=8",
    "snapkv,tokens=40,window=16,prefill_prune_every=50",
    "snapkv,ratio=0.3,minimum=8,window=8,decode=keep",
    "pyramidkv,ratio=0.5,minimum=24,window=8",
    "adakv,ratio=0.4,minimum=16,window=8",
    "criticalkv,ratio=0.4,minimum=16,window=8,interval=1",
    "keydiff,ratio=0.3,minimum=8",
    "knorm,ratio=0.3,minimum=8,interval=7",
    "keyformer,ratio=0.3,minimum=8",
    "random,ratio=0.3,minimum=8",
    "expected_attention,ratio=0.4,minimum=8",
    "cake,ratio=0.5,minimum=24,window=8",
    "laprox,ratio=0.4,minimum=16,window=8",
    "restkv,ratio=0.4,minimum=16,window=8",
    "rlkv,recent_tokens=24,sinks=4",
    "hybrid,ratio=0.5",
    "h2o,ratio=0.25,minimum=8,summary=1",
    "adakv,tokens=40,window=16,prefill_prune_every=50,interval=3,summary=1",
    "snapkv,ratio=0.3,minimum=8,window=8,decode=keep,summary=1",
    "full",
};
enum { CASES = sizeof policies / sizeof policies[0], CASES_ELSEWHERE = 2, GENERATED = 60 };

static bool slides; /* every second layer of the model */

static int slide(void **state) {
    (void)state;
    serving_set_window(24);
    slides = true;
    return 0;
}

static int stand_still(void **state) {
    (void)state;
    serving_set_window(0);
    slides = false;
    return 0;
}

static uint32_t cases(void) {
    return chosen_backend_share(CASES, CASES_ELSEWHERE);
}

static const char *case_policy(uint32_t i) {
    return policies[i * (CASES / cases())];
}

static struct request *case_request(uint32_t i) {
    struct request *request = serving_request(60 + (i * 37) % 190, 1000 + i, GENERATED + i % 5);
    serving_set_policy(request, case_policy(i));
    request->ignore_eos = true;
    if (i % 2 == 0)
        request->sampling.temperature = 0;
    return request;
}

static void check_equal(const struct answer *a, const struct answer *b, const char *what) {
    if (a->finish == FINISH_ERROR)
        fail_msg("%s: %s", what, a->error.message);
    if (!answers_equal(a, b))
        fail_msg("%s answers differently", what);
    if (a->kv_tokens_seen != b->kv_tokens_seen || a->kv_tokens_kept != b->kv_tokens_kept)
        fail_msg("%s keeps %g of %u tokens, not %g of %u", what, a->kv_tokens_kept, a->kv_tokens_seen,
            b->kv_tokens_kept, b->kv_tokens_seen);
}

static struct scheduler_stats stats_of(struct serving *serving) {
    struct scheduler_stats stats;
    scheduler_get_stats(serving_scheduler(serving), &stats);
    return stats;
}

/* The answers when every request has the server for itself. */
static struct serving *answer_alone(struct call *calls[CASES]) {
    struct serving *serving = serving_create(&(struct serving_options){.no_prefix_sharing = true});
    for (uint32_t i = 0; i < cases(); i++) {
        calls[i] = serving_must_submit(serving, case_request(i));
        serving_wait(serving, calls[i]);
        const struct answer *answer = &calls[i]->answers[0];
        if (answer->finish != FINISH_LENGTH)
            fail_msg("%s: %s", case_policy(i), answer->error.message);
        assert_int_equal(answer->kv_tokens_seen, answer->prompt_tokens + answer->completion_tokens - 1);
        bool full = strcmp(case_policy(i), "full") == 0;
        if ((answer->kv_tokens_kept < answer->kv_tokens_seen) == full)
            fail_msg("%s keeps %g of %u tokens", case_policy(i), answer->kv_tokens_kept, answer->kv_tokens_seen);
    }
    return serving;
}

/* Submits all at once and compares with the answers alone. */
static struct scheduler_stats answer_together(const struct serving_options *options, struct call *const *alone) {
    struct serving *serving = serving_create(options);
    struct call *calls[CASES];
    for (uint32_t i = 0; i < cases(); i++)
        calls[i] = serving_must_submit(serving, case_request(i));
    serving_wait_all(serving);
    for (uint32_t i = 0; i < cases(); i++)
        check_equal(&calls[i]->answers[0], &alone[i]->answers[0], case_policy(i));
    struct scheduler_stats stats = stats_of(serving);
    serving_free(serving);
    return stats;
}

static void same_answers_alone_and_together(void **state) {
    (void)state;
    struct call *alone[CASES];
    struct serving *serving = answer_alone(alone);
    struct scheduler_stats stats = answer_together(&(struct serving_options){.threads = 2}, alone);
    assert_int_equal(stats.preemptions, 0);
    assert_true(stats.pages_freed_by_policy > 0);
    serving_free(serving);
}

static void same_answers_at_any_chunk_size(void **state) {
    (void)state;
    struct call *alone[CASES];
    struct serving *serving = answer_alone(alone);
    const uint32_t chunks[] = {1, 50, 7};
    for (size_t i = 0; i < (sanitized() ? 2 : 3); i++)
        answer_together(&(struct serving_options){.prefill_chunk = chunks[i]}, alone);
    answer_together(&(struct serving_options){.batch_rows = 31, .prefill_chunk = 5}, alone);
    serving_free(serving);
}

/* Pages that a request takes while its prompt is computed. */
static uint32_t peak_pages(struct serving *serving, const struct request *request) {
    uint32_t count = request->prompts[0].count;
    return (uint32_t)engine_demand(serving_engine(serving), &request->kv_policy, count, count).peak_pages;
}

/* Unpruned requests that came first grow, on pages for little more than them at the start and the case's prompt: it has
 * to give way, perhaps more than once, and to come back. */
static struct scheduler_stats answer_under_pressure(
    uint32_t i, const struct call *alone, struct serving *any, struct serving_options options) {
    enum { GROWING = 4, PAGES_EACH = 4 * 3 };
    struct request *request = case_request(i);
    options.kv_pages = peak_pages(any, request) + GROWING * PAGES_EACH;
    options.lockstep = true; /* all are there before the second token */
    struct serving *serving = serving_create(&options);
    struct call *growing[GROWING];
    for (uint32_t g = 0; g < GROWING; g++) {
        struct request *first = serving_request(20, 50 + g, 90);
        first->ignore_eos = true;
        growing[g] = serving_must_submit(serving, first);
    }
    struct call *call = serving_must_submit(serving, request);
    serving_wait_all(serving);
    check_equal(&call->answers[0], &alone->answers[0], case_policy(i));
    for (uint32_t g = 0; g < GROWING; g++)
        assert_int_equal(growing[g]->answers[0].completion_tokens, 90);
    struct scheduler_stats stats = stats_of(serving);
    assert_int_equal(stats.swapped_bytes, 0);
    serving_free(serving);
    return stats;
}

/* With sanitizers each case in one of the ways of giving way. */
static void same_answers_after_swapping_and_replaying(void **state) {
    (void)state;
    struct call *alone[CASES];
    struct serving *serving = answer_alone(alone);
    const struct serving_options kinds[] = {
        {.swap_bytes = 1 << 30}, {.swap_bytes = 0}, {.swap_bytes = 0, .prefill_chunk = 40, .no_prefix_sharing = true}};
    uint32_t count = chosen_backend_share(sizeof kinds / sizeof kinds[0], 1);
    for (uint32_t k = 0; k < count; k++) {
        uint32_t swapped = 0, replayed = 0, tried = 0;
        for (uint32_t i = sanitized() ? k : 0; i < cases(); i += sanitized() ? count : 1) {
            struct scheduler_stats stats = answer_under_pressure(i, alone[i], serving, kinds[k]);
            swapped += stats.swaps > 0;
            replayed += stats.replays > 0;
            tried++;
        }
        assert_int_equal(kinds[k].swap_bytes > 0 ? replayed : swapped, 0);
        /* Sliding layers do not grow: more cases have enough pages. */
        assert_true(swapped + replayed >= (slides ? tried / 4 : tried - (sanitized() ? 6 : cases() * 6 / CASES)));
    }
    serving_free(serving);
}

/* Of a case's prompt, which was answered without a policy before: where statistics are sums, what has a snapshot. */
static uint32_t reused_in_round(uint32_t i, int round) {
    struct request *request = case_request(i);
    uint32_t count = request->prompts[0].count;
    const struct policy_settings *settings = &request->kv_policy;
    bool full = policy_settings_keep_all(settings), sums = policy_prefix_needs(settings) != 0;
    uint32_t most = full ? count - 1 : policy_reusable_tokens(settings, count);
    most = most / KV_PAGE_SLOTS * KV_PAGE_SLOTS;
    request_free(request);
    return sums && (round == 0 || most < 128) ? 0 : most;
}

static void same_answers_with_a_reused_prefix(void **state) {
    (void)state;
    struct call *alone[CASES];
    struct serving *reference = answer_alone(alone);
    struct serving *serving = serving_create(&(struct serving_options){0});
    struct call *full[CASES], *calls[CASES];
    for (uint32_t i = 0; i < cases(); i++) { /* the same prompts, unpruned, live and then idle in the index */
        struct request *request = case_request(i);
        serving_set_policy(request, "full");
        full[i] = serving_must_submit(serving, request);
    }
    for (uint32_t i = 0; i < cases(); i++)
        serving_wait_output(serving, full[i], 1);
    for (int round = 0; round < 2; round++) {
        for (uint32_t i = 0; i < cases(); i++)
            calls[i] = serving_must_submit(serving, case_request(i));
        serving_wait_all(serving);
        for (uint32_t i = 0; i < cases(); i++) {
            check_equal(&calls[i]->answers[0], &alone[i]->answers[0], case_policy(i));
            assert_int_equal(calls[i]->answers[0].cached_tokens, reused_in_round(i, round));
        }
    }
    serving_free(serving);
    serving_free(reference);
}

/* Forks share what the prompt left; each evicts for itself afterwards. */
static void choices_are_forks_of_a_pruned_prompt(void **state) {
    (void)state;
    enum { N = 4 };
    for (uint32_t i = 0; i < cases(); i += sanitized() ? 4 : 1) {
        struct call *calls[3];
        struct serving *servings[3] = {
            serving_create(&(struct serving_options){.lockstep = true}),
            serving_create(&(struct serving_options){.max_sequences = 1, .prefill_chunk = 33}),
            serving_create(&(struct serving_options){.kv_pages = 4 * 50, .swap_bytes = i % 3 == 0 ? 1 << 20 : 0}),
        };
        for (int s = 0; s < 3; s++) {
            struct request *request = case_request(i);
            request->n = N;
            request->sampling.temperature = 5;
            calls[s] = serving_must_submit(servings[s], request);
        }
        serving_wait_output(servings[0], calls[0], 1);
        struct scheduler_stats stats = stats_of(servings[0]);
        if (calls[0]->answers[0].generated == 1 && strcmp(case_policy(i), "full") != 0) {
            assert_int_equal(stats.requests_running, N);
            assert_true(stats.kv_tokens_kept < stats.kv_tokens_seen);
        }
        for (int s = 0; s < 3; s++)
            serving_wait(servings[s], calls[s]);
        for (uint32_t c = 0; c < N; c++) {
            check_equal(&calls[1]->answers[c], &calls[0]->answers[c], case_policy(i));
            check_equal(&calls[2]->answers[c], &calls[0]->answers[c], case_policy(i));
            if (c > 0)
                assert_false(answers_equal(&calls[0]->answers[c], &calls[0]->answers[0]));
        }
        for (int s = 0; s < 3; s++)
            serving_free(servings[s]);
    }
}

static void memory_kept_is_reported(void **state) {
    (void)state;
    struct serving *serving =
        serving_create(&(struct serving_options){.kv_policy = "streaming,tokens=40", .lockstep = true});
    const struct model_shape *shape = &engine_model(serving_engine(serving))->shape;
    uint64_t heads = shape->layers * shape->kv_heads;
    uint64_t page = kv_cache_pool(engine_kv_cache(serving_engine(serving)))->page_bytes;
    struct request *request = serving_request(100, 1, 61), *full = serving_request(100, 1, 61);
    struct request *small = serving_request(20, 1, 10), *counted = serving_request(100, 2, 61);
    request->ignore_eos = full->ignore_eos = small->ignore_eos = counted->ignore_eos = true;
    serving_set_policy(full, "full");
    serving_set_policy(counted, "h2o,ratio=0.25,minimum=8");
    struct call *call = serving_must_submit(serving, request);
    serving_wait_output(serving, call, 2);
    struct scheduler_stats stats = stats_of(serving);
    assert_int_equal(stats.requests_running, 1);
    assert_int_equal(stats.kv_tokens_seen, 100 + call->answers[0].generated - 1);
    assert_int_equal(stats.kv_tokens_kept, 40);
    assert_int_equal(stats.kv_bytes, 3 * heads * page);
    assert_int_equal(stats.kv_bytes_full, 7 * heads * page);
    assert_true(stats.pages_freed_by_policy >= 4 * heads);
    serving_run_free(serving);
    struct call *others[] = {
        serving_must_submit(serving, full), serving_must_submit(serving, small), serving_must_submit(serving, counted)};
    serving_wait_all(serving);
    const struct answer *answer = &call->answers[0];
    assert_int_equal(answer->kv_tokens_seen, 160);
    assert_true(answer->kv_tokens_kept == 40);
    assert_int_equal(answer->kv_bytes, 3 * heads * page);
    assert_int_equal(answer->kv_bytes_full, 10 * heads * page);
    answer = &others[0]->answers[0];
    assert_int_equal(answer->kv_tokens_seen, 160);
    assert_true(answer->kv_tokens_kept == 160);
    assert_int_equal(answer->kv_bytes, 10 * heads * page);
    assert_int_equal(answer->kv_bytes_full, 10 * heads * page);
    answer = &others[1]->answers[0];
    assert_int_equal(answer->kv_tokens_seen, 29);
    assert_true(answer->kv_tokens_kept == 29);
    answer = &others[2]->answers[0];
    assert_true(answer->kv_tokens_kept == 40);
    assert_true(answer->kv_bytes > 3 * heads * page); /* statistics */
    assert_int_equal(answer->kv_bytes_full, 10 * heads * page);
    serving_free(serving);
}

/* A prompt below its budget answers as without a policy, bit for bit. */
static void budget_not_exceeded_changes_nothing(void **state) {
    (void)state;
    struct serving *serving = serving_create(&(struct serving_options){.no_prefix_sharing = true});
    for (uint32_t i = 0; i < cases(); i++) {
        char policy[64];
        snprintf(policy, sizeof policy, "%.*s,tokens=400", (int)strcspn(case_policy(i), ","), case_policy(i));
        if (strncmp(policy, "full", 4) == 0 || strncmp(policy, "rlkv", 4) == 0 || strncmp(policy, "hybrid", 6) == 0)
            continue;
        struct request *pruned = serving_request(100, i, 50), *full = serving_request(100, i, 50);
        pruned->ignore_eos = full->ignore_eos = true;
        serving_set_policy(pruned, policy);
        struct call *a = serving_must_submit(serving, pruned), *b = serving_must_submit(serving, full);
        serving_wait_all(serving);
        check_equal(&a->answers[0], &b->answers[0], policy);
    }
    serving_free(serving);
}

static void echo_scores_the_prompt_before_it_is_pruned(void **state) {
    (void)state;
    struct serving *serving = serving_create(&(struct serving_options){.prefill_chunk = 19});
    struct call *calls[3];
    for (int i = 0; i < 3; i++) {
        struct request *request = serving_request(120, 7, i == 2 ? 0 : 20);
        request->echo = true;
        request->ignore_eos = true;
        if (i > 0)
            serving_set_policy(request, "h2o,ratio=0.25,minimum=8");
        calls[i] = serving_must_submit(serving, request);
        serving_wait(serving, calls[i]);
        assert_int_equal(calls[i]->answers[0].finish, FINISH_LENGTH);
        assert_int_equal(calls[i]->answers[0].prompt_entries, 120);
        assert_int_equal(calls[i]->answers[0].cached_tokens, 0);
    }
    const struct answer *full = &calls[0]->answers[0], *pruned = &calls[1]->answers[0], *scored = &calls[2]->answers[0];
    /* The prompt, and the first token, are computed with everything in the cache; the second one is not. */
    assert_memory_equal(full->logprobs, pruned->logprobs, 121 * sizeof(float));
    assert_memory_equal(full->tokens, pruned->tokens, 121 * sizeof(int32_t));
    assert_memory_not_equal(full->logprobs, pruned->logprobs, 140 * sizeof(float));
    assert_memory_equal(full->logprobs, scored->logprobs, 120 * sizeof(float));
    assert_int_equal(scored->completion_tokens, 0);
    serving_free(serving);
}

/* Unpruned requests that run at once in the next test. */
static uint32_t at_once(void) {
    return sanitized() ? 6 : 16;
}

/* Most requests of a kind that ran at once until all were done, and how often one of them had to give way. */
static uint32_t run_at_once(const char *policy, uint32_t pages, uint32_t *preemptions) {
    enum { PROMPT = 1024, REQUESTS_MOST = 70, ANSWER = 200 };
    uint32_t requests = at_once() * 4 + 6;
    struct serving *serving = serving_create(&(struct serving_options){.kv_pages = pages,
        .context = 2048,
        .head_dim = 64,
        .kv_policy = policy,
        .swap_bytes = 1 << 30,
        .no_prefix_sharing = true});
    assert_in_range(requests, 1, REQUESTS_MOST);
    struct call *calls[REQUESTS_MOST];
    for (uint32_t i = 0; i < requests; i++) {
        struct request *request = serving_request(PROMPT, i, ANSWER);
        request->ignore_eos = true;
        request->logprobs = -1;
        calls[i] = serving_must_submit(serving, request);
    }
    uint32_t most = 0;
    for (uint32_t i = 0; i < requests; i++)
        while (!calls[i]->ended) {
            serving_wait_output(serving, calls[i], calls[i]->answers[0].outputs + 1);
            struct scheduler_stats stats = stats_of(serving);
            most = stats.requests_running > most ? stats.requests_running : most;
        }
    for (uint32_t i = 0; i < requests; i++)
        assert_int_equal(calls[i]->answers[0].completion_tokens, ANSWER);
    *preemptions = (uint32_t)stats_of(serving).preemptions;
    serving_free(serving);
    return most;
}

static void more_pruned_sequences_run_at_once(void **state) {
    (void)state;
    uint32_t pages = 4 * 66 * at_once(), policies_tried = sanitized() ? 1 : 4, preemptions;
    uint32_t full = run_at_once("full", pages, &preemptions);
    assert_in_range(full, at_once() - 3, at_once());
    const struct {
        const char *policy;
        double times;
    } expected[] = {
        {"h2o,ratio=0.25", 3.4},
        {"snapkv,ratio=0.25,prefill_prune_every=128", 2.8},
        {"streaming,ratio=0.25", 3.5},
        {"snapkv,ratio=0.25", 2.7},
    };
    for (size_t i = 0; i < policies_tried; i++) {
        uint32_t pruned = run_at_once(expected[i].policy, pages, &preemptions);
        print_message("%s: %u at once, full %u; %u preemptions\n", expected[i].policy, pruned, full, preemptions);
        /* One prompt at a time has all its pages until it is pruned. */
        if (pruned < expected[i].times * 16 / 15 * (at_once() - 1))
            fail_msg("%s: %u at once where full has %u", expected[i].policy, pruned, full);
        assert_true(preemptions <= 10);
    }
}

static void limits_count_tokens_seen(void **state) {
    (void)state;
    /* 160 tokens unpruned. */
    struct serving *serving = serving_create(&(struct serving_options){.kv_pages = 4 * 10});
    struct error error;
    assert_int_equal(engine_tokens_max(serving_engine(serving)), 160);
    struct request *request = serving_request(300, 1, 50);
    assert_null(serving_submit(serving, request, &error));
    assert_int_equal(error.code, ERROR_CONTEXT);
    request = serving_request(300, 1, 50);
    serving_set_policy(request, "streaming,tokens=32");
    assert_null(serving_submit(serving, request, &error));
    assert_int_equal(error.code, ERROR_CONTEXT);
    assert_non_null(strstr(error.message, "prefill_prune_every"));
    request = serving_request(300, 1, 50);
    request->ignore_eos = true;
    serving_set_policy(request, "streaming,tokens=32,prefill_prune_every=64");
    struct call *call = serving_must_submit(serving, request);
    serving_wait(serving, call);
    assert_int_equal(call->answers[0].finish, FINISH_LENGTH);
    assert_int_equal(call->answers[0].completion_tokens, 50);
    assert_true(call->answers[0].kv_tokens_kept == 32);
    /* A short prompt whose answer is longer than the pool holds; it ends at the context of 512. */
    request = serving_request(100, 2, 1000);
    request->ignore_eos = true;
    serving_set_policy(request, "knorm,tokens=64");
    call = serving_must_submit(serving, request);
    serving_wait(serving, call);
    assert_int_equal(call->answers[0].finish, FINISH_LENGTH);
    assert_int_equal(call->answers[0].completion_tokens, 412);
    /* One whose budget outgrows the pool ends there, and not with an error. */
    request = serving_request(100, 2, 1000);
    request->ignore_eos = true;
    serving_set_policy(request, "streaming,ratio=0.5");
    call = serving_must_submit(serving, request);
    serving_wait(serving, call);
    assert_int_equal(call->answers[0].finish, FINISH_LENGTH);
    assert_in_range(call->answers[0].completion_tokens, 160, 412);
    request = serving_request(513, 1, 1);
    serving_set_policy(request, "streaming,tokens=32,prefill_prune_every=64");
    assert_null(serving_submit(serving, request, &error));
    assert_int_equal(error.code, ERROR_CONTEXT);
    assert_non_null(strstr(error.message, "512"));
    serving_free(serving);
}

/* Ends one that is swapped out, and one that is being replayed. */
static void cancelling_what_was_preempted(void **state) {
    (void)state;
    for (int swap = 0; swap < 2; swap++) {
        struct serving *serving = serving_create(
            &(struct serving_options){.kv_pages = 4 * 24, .swap_bytes = swap ? 1 << 20 : 0, .lockstep = true});
        struct request *growing = serving_request(100, 1, 270), *pruned = serving_request(120, 2, 200);
        growing->ignore_eos = pruned->ignore_eos = true;
        serving_set_policy(pruned, "streaming,tokens=100");
        struct call *first = serving_must_submit(serving, growing), *victim = serving_must_submit(serving, pruned);
        struct scheduler_stats stats = {0};
        while (!first->ended && stats.preemptions == 0) {
            serving_wait_output(serving, first, first->answers[0].outputs + 1);
            stats = stats_of(serving);
        }
        assert_true(stats.preemptions > 0);
        assert_int_equal(stats.swaps, swap);
        assert_int_equal(stats.swapped_bytes > 0, swap);
        assert_false(victim->ended);
        scheduler_cancel(serving_scheduler(serving), victim->request);
        serving_wait(serving, victim);
        assert_int_equal(victim->answers[0].finish, FINISH_CANCELLED);
        assert_true(victim->answers[0].completion_tokens > 0);
        assert_true(victim->answers[0].kv_tokens_kept == 100);
        stats = stats_of(serving);
        assert_int_equal(stats.swapped_bytes, 0);
        assert_int_equal(stats.requests_waiting, 0);
        serving_run_free(serving);
        serving_wait_all(serving);
        assert_int_equal(first->answers[0].completion_tokens, 270);
        serving_free(serving);
    }
}

/* Random requests with random policies, cancelled at random, on a pool that is much too small. */
static void stress(uint32_t run, const struct serving_options *options) {
    struct serving *serving = serving_create(options);
    enum { REQUESTS = 80 };
    uint32_t requests = sanitized() ? REQUESTS / 2 : REQUESTS;
    struct call *calls[REQUESTS];
    for (uint32_t i = 0; i < requests; i++) {
        uint32_t words[4], more[4];
        random_philox(78, run, 0, i, words);
        random_philox(78, run, 1, i, more);
        struct request *request = serving_request(1 + words[0] % 250, words[1] % 8, 1 + words[2] % 150);
        serving_set_policy(request, policies[more[0] % CASES]);
        request->n = 1 + words[3] % 3;
        request->stream = words[3] & 16;
        request->echo = words[3] & 32;
        request->ignore_eos = words[3] & 512;
        request->logprobs = words[3] & 64 ? 1 : -1;
        calls[i] = serving_must_submit(serving, request);
        if (words[3] & 128) {
            struct call *victim = calls[words[0] % (i + 1)];
            if (!victim->ended)
                scheduler_cancel(serving_scheduler(serving), victim->request);
        }
        if (words[3] & 256)
            serving_wait_output(serving, calls[i / 2], 1);
    }
    serving_wait_all(serving);
    for (uint32_t i = 0; i < requests; i++)
        for (uint32_t j = 0; j < calls[i]->answers_count; j++)
            if (calls[i]->answers[j].finish == FINISH_ERROR)
                fail_msg("run %u, request %u: %s", run, i, calls[i]->answers[j].error.message);
    struct scheduler_stats stats = stats_of(serving);
    print_message("stress %u: %llu steps, %llu preemptions, %llu swaps, %llu replays\n", run,
        (unsigned long long)stats.steps, (unsigned long long)stats.preemptions, (unsigned long long)stats.swaps,
        (unsigned long long)stats.replays);
    assert_true(stats.preemptions > 0);
    assert_int_equal(stats.swapped_bytes, 0);
    serving_free(serving);
}

static void nothing_is_lost_under_stress(void **state) {
    (void)state;
    struct serving_options options = {
        .kv_pages = 4 * 40, .max_sequences = 12, .max_waiting = 10000, .prefill_chunk = 40, .batch_rows = 64};
    options.threads = 2;
    stress(0, &options);
    options.swap_bytes = 60000;
    stress(1, &options);
    options.swap_bytes = 1 << 30;
    options.no_prefix_sharing = true;
    stress(2, &options);
}

/* An argument chooses tests by a pattern. */
int main(int argc, char **argv) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(same_answers_alone_and_together),
        cmocka_unit_test(same_answers_at_any_chunk_size),
        cmocka_unit_test(same_answers_after_swapping_and_replaying),
        cmocka_unit_test(same_answers_with_a_reused_prefix),
        cmocka_unit_test(choices_are_forks_of_a_pruned_prompt),
        cmocka_unit_test(memory_kept_is_reported),
        cmocka_unit_test(budget_not_exceeded_changes_nothing),
        cmocka_unit_test(echo_scores_the_prompt_before_it_is_pruned),
        cmocka_unit_test(more_pruned_sequences_run_at_once),
        cmocka_unit_test(limits_count_tokens_seen),
        cmocka_unit_test(cancelling_what_was_preempted),
        cmocka_unit_test(nothing_is_lost_under_stress),
        cmocka_unit_test_setup_teardown(same_answers_at_any_chunk_size, slide, stand_still),
        cmocka_unit_test_setup_teardown(same_answers_after_swapping_and_replaying, slide, stand_still),
        cmocka_unit_test_setup_teardown(same_answers_with_a_reused_prefix, slide, stand_still),
        cmocka_unit_test_setup_teardown(choices_are_forks_of_a_pruned_prompt, slide, stand_still),
        cmocka_unit_test_setup_teardown(nothing_is_lost_under_stress, slide, stand_still),
    };
    /* What moves pages and statistics about. */
    const struct CMUnitTest elsewhere[] = {
        cmocka_unit_test(same_answers_after_swapping_and_replaying),
    };
    if (argc > 1)
        cmocka_set_test_filter(argv[1]);
    if (!chosen_backend_is_cpu())
        return cmocka_run_group_tests(elsewhere, NULL, NULL);
    return cmocka_run_group_tests(tests, NULL, NULL);
}
