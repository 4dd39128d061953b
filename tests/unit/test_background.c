/* SPDX-License-Identifier: Apache-2.0
 *
 * A background job beside live requests: only one of them uses the engine at a time, requests answer as if they were
 * alone, the job gives its pages up and gets its share.
 */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>

#include <pthread.h>
#include <stdatomic.h>
#include <stdlib.h>

#include "engine/clock.h"
#include "tests/unit/serving.h"

/* ---- turns, without an engine ---- */

struct turns {
    struct background *background;
    atomic_int inside; /* threads that have the engine */
    atomic_bool failed;
    uint32_t pieces; /* of the job, until it is stopped */
    uint32_t given_up;
};

static void enter(struct turns *turns) {
    if (atomic_fetch_add(&turns->inside, 1) != 0)
        atomic_store(&turns->failed, true);
}

static void leave(struct turns *turns) {
    atomic_fetch_sub(&turns->inside, 1);
}

static void spend(double seconds) {
    double end = clock_seconds() + seconds;
    while (clock_seconds() < end)
        ;
}

static void *run_pieces(void *context) {
    struct turns *turns = context;
    if (background_begin(turns->background) == BACKGROUND_STOP)
        return NULL;
    for (;;) {
        enter(turns);
        spend(0.001);
        turns->pieces++;
        leave(turns);
        enum background_turn turn = background_yield(turns->background);
        if (turn == BACKGROUND_GIVE_UP_PAGES) {
            turns->given_up++;
            turn = background_gave_up(turns->background);
        }
        if (turn == BACKGROUND_STOP)
            break;
    }
    background_end(turns->background);
    return NULL;
}

static void start(double share, pthread_t *thread, struct turns *turns) {
    *turns = (struct turns){.background = background_create(share, NULL)};
    assert_non_null(turns->background);
    assert_int_equal(pthread_create(thread, NULL, run_pieces, turns), 0);
}

static void stop(pthread_t thread, struct turns *turns) {
    background_stop(turns->background);
    pthread_join(thread, NULL);
    assert_false(turns->failed);
    background_free(turns->background);
}

static void step(struct turns *turns, double seconds, bool busy, bool waiting) {
    background_take(turns->background);
    enter(turns);
    spend(seconds);
    leave(turns);
    background_give(turns->background, busy, waiting);
}

/* What the job had too much of, in seconds. It always has what it is owed; too much it has when the machine holds a
 * thread up in a turn. */
static double measure_excess(double share) {
    pthread_t thread;
    struct turns turns;
    start(share, &thread, &turns);
    for (int n = 0; n < 300; n++)
        step(&turns, 0.002, true, false);
    background_take(turns.background); /* the last turn is over */
    struct background_stats stats;
    background_get_stats(turns.background, &stats);
    background_give(turns.background, false, false);
    stop(thread, &turns);
    double owed = stats.foreground_seconds * share / (1 - share);
    assert_true(stats.busy_seconds >= owed * (1 - 1e-9));
    return stats.busy_seconds - owed;
}

static void one_at_a_time_and_by_share(void **state) {
    (void)state;
    const double shares[] = {0.25, 0.5};
    for (int i = 0; i < 2; i++) {
        double excess = measure_excess(shares[i]);
        for (int again = 0; excess > 0.02 && again < 10; again++)
            excess = measure_excess(shares[i]);
        assert_true(excess <= 0.02);
    }
}

static void no_share_waits_for_idle_time(void **state) {
    (void)state;
    pthread_t thread;
    struct turns turns;
    start(0, &thread, &turns);
    step(&turns, 0.001, true, false);
    background_take(turns.background);
    uint32_t pieces = turns.pieces; /* read while the job has no turn */
    background_give(turns.background, true, false);
    for (int n = 0; n < 100; n++)
        step(&turns, 0.0005, true, false);
    background_take(turns.background);
    assert_int_equal(turns.pieces, pieces);
    background_give(turns.background, false, false);
    for (bool went_on = false; !went_on;) { /* hangs if the job never goes on */
        spend(0.002);
        background_take(turns.background);
        went_on = turns.pieces > pieces;
        background_give(turns.background, false, false);
    }
    stop(thread, &turns);
}

static void a_share_can_be_taken_away(void **state) {
    (void)state;
    pthread_t thread;
    struct turns turns;
    start(0.5, &thread, &turns);
    struct background_stats stats;
    do {
        step(&turns, 0.001, true, false);
        background_get_stats(turns.background, &stats);
    } while (stats.busy_seconds <= 0);
    background_set_share(turns.background, 0);
    background_set_share(turns.background, 0.95); /* too much: changes nothing */
    step(&turns, 0.001, true, false);             /* what was owed before is used up after it */
    background_take(turns.background);
    uint32_t pieces = turns.pieces;
    background_give(turns.background, true, false);
    for (int n = 0; n < 100; n++)
        step(&turns, 0.0005, true, false);
    background_take(turns.background);
    background_get_stats(turns.background, &stats);
    assert_int_equal(turns.pieces, pieces);
    assert_true(stats.longest >= 0.001 && stats.longest <= stats.seconds);
    background_give(turns.background, false, false);
    stop(thread, &turns);
}

static void pages_are_taken_back_within_a_step(void **state) {
    (void)state;
    pthread_t thread;
    struct turns turns;
    start(0.5, &thread, &turns);
    struct background_stats stats;
    do
        background_get_stats(turns.background, &stats);
    while (stats.turns == 0);
    background_take(turns.background);
    enter(&turns);
    assert_true(background_reclaim(turns.background));
    assert_int_equal(turns.given_up, 1);
    assert_false(background_reclaim(turns.background)); /* it has none any more */
    uint32_t pieces = turns.pieces;
    leave(&turns);
    background_give(turns.background, true, true);
    for (int n = 0; n < 50; n++) /* requests still wait: no turn */
        step(&turns, 0.0005, true, true);
    background_take(turns.background);
    assert_int_equal(turns.pieces, pieces);
    background_give(turns.background, false, false);
    stop(thread, &turns);
}

static void nobody_waits_for_a_job_that_is_not_there(void **state) {
    (void)state;
    struct turns turns = {.background = background_create(0.25, NULL)};
    step(&turns, 0, true, false);
    background_take(turns.background);
    assert_false(background_reclaim(turns.background));
    background_give(turns.background, false, false);
    background_stop(turns.background);
    assert_int_equal(background_begin(turns.background), BACKGROUND_STOP);
    background_allow(turns.background);
    assert_int_equal(background_begin(turns.background), BACKGROUND_GO_ON);
    background_end(turns.background);
    background_free(turns.background);
    assert_null(background_create(0.95, NULL));
    assert_int_equal(background_begin(NULL), BACKGROUND_GO_ON);
    assert_int_equal(background_yield(NULL), BACKGROUND_GO_ON);
}

/* ---- beside the scheduler ---- */

enum { JOB_TOKENS = 300, REQUESTS = 12 };

struct job {
    struct background *background;
    struct engine *engine;
    uint32_t done, given_up; /* pieces of work */
    float first;             /* a logit of the first piece */
    bool differs, failed;
};

/* One piece: a sequence of JOB_TOKENS tokens, and a logit after them. Codes as background_yield. */
static enum background_turn run_piece(struct job *job) {
    int32_t tokens[JOB_TOKENS];
    static _Thread_local float logits[4096];
    struct error error = {0};
    enum background_turn turn = BACKGROUND_GO_ON;
    for (uint32_t i = 0; i < JOB_TOKENS; i++)
        tokens[i] = (int32_t)(7 * i % 50);
    struct sequence *sequence = sequence_create(job->engine);
    for (uint32_t done = 0; turn == BACKGROUND_GO_ON && done < JOB_TOKENS;) {
        uint32_t rows = background_rows(job->background, engine_batch_rows(job->engine));
        uint32_t count = JOB_TOKENS - done < rows ? JOB_TOKENS - done : rows;
        struct batch_item item = {.sequence = sequence, .tokens = tokens + done, .count = count, .want = WANT_LAST};
        int code = engine_forward(job->engine, &item, 1, &error);
        if (code == ERROR_PAGES) {
            turn = BACKGROUND_GIVE_UP_PAGES;
            break;
        }
        job->failed = job->failed || code != 0;
        done += count;
        if (done == JOB_TOKENS) {
            job->failed = job->failed || engine_logits(job->engine, item.first_row, logits, &error) != 0;
            job->first = job->done == 0 ? logits[3] : job->first;
            job->differs = job->differs || logits[3] != job->first;
            job->done++;
        }
        turn = background_yield(job->background);
    }
    sequence_free(sequence);
    if (turn == BACKGROUND_GIVE_UP_PAGES) {
        job->given_up++;
        turn = background_gave_up(job->background);
    }
    return turn;
}

static void *run_job(void *context) {
    struct job *job = context;
    if (background_begin(job->background) == BACKGROUND_STOP)
        return NULL;
    while (run_piece(job) != BACKGROUND_STOP)
        ;
    background_end(job->background);
    return NULL;
}

static void answer(struct serving *serving, struct call **calls) {
    struct error error = {0};
    for (uint32_t i = 0; i < REQUESTS; i++) {
        struct request *request = serving_request(60 + 20 * i, 500 + i, 40);
        serving_set_policy(request, i % 2 == 0 ? "full" : "h2o,ratio=0.5,minimum=8");
        request->ignore_eos = true;
        calls[i] = serving_submit(serving, request, &error);
        if (calls[i] == NULL)
            fail_msg("refused: %s", error.message);
    }
    serving_wait_all(serving);
}

static void requests_answer_as_if_alone(void **state) {
    (void)state;
    struct call *alone[REQUESTS], *beside[REQUESTS];
    struct serving *first = serving_create(&(struct serving_options){.threads = 2});
    answer(first, alone);
    struct job job = {.background = background_create(0.25, NULL)};
    /* Pages for the job or for some of the requests, not for both. */
    struct serving *serving =
        serving_create(&(struct serving_options){.threads = 2, .kv_pages = 130, .background = job.background});
    job.engine = serving_engine(serving);
    pthread_t thread;
    assert_int_equal(pthread_create(&thread, NULL, run_job, &job), 0);
    struct background_stats stats;
    do
        background_get_stats(job.background, &stats);
    while (stats.turns == 0);
    for (int round = 0; round < 3; round++) {
        answer(serving, beside);
        for (uint32_t i = 0; i < REQUESTS; i++)
            assert_true(answers_equal(&beside[i]->answers[0], &alone[i]->answers[0]));
    }
    background_stop(job.background);
    pthread_join(thread, NULL);
    assert_false(job.failed);
    assert_false(job.differs);
    assert_true(job.given_up > 0);
    serving_free(serving);
    serving_free(first);
    background_free(job.background);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(one_at_a_time_and_by_share),
        cmocka_unit_test(no_share_waits_for_idle_time),
        cmocka_unit_test(a_share_can_be_taken_away),
        cmocka_unit_test(pages_are_taken_back_within_a_step),
        cmocka_unit_test(nobody_waits_for_a_job_that_is_not_there),
        cmocka_unit_test(requests_answer_as_if_alone),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
