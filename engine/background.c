/* SPDX-License-Identifier: Apache-2.0
 *
 * One mutex, one condition: everybody looks at the state after each change. Changes are as rare as steps.
 */
#include "engine/background.h"

#include "engine/clock.h"

#include <pthread.h>
#include <stdlib.h>

enum { ROWS_BUSY = 16, ROWS_IDLE = 32 };

static const double credit_most = 0.25;    /* seconds that can be owed to the job */
static const double credit_least = -2;     /* or by it: a long call does not shut it out for minutes */
static const double after_reclaim = 0.5;   /* seconds without a lack of pages before the job begins anew */
static const double counts_as_busy = 0.25; /* seconds after a step in which rows are kept few */

enum job_state {
    JOB_NONE,
    JOB_WAITING,  /* in begin or yield, or has pages to give up */
    JOB_RUNNING,  /* has the engine */
    JOB_GIVING_UP /* has the engine to free its sequences, and nothing else */
};

struct background {
    pthread_mutex_t mutex;
    pthread_cond_t changed;
    double share;
    enum job_state job;
    bool holds_pages;  /* the job had a turn since it gave up its pages */
    bool in_step;      /* the foreground has the engine */
    bool wanted;       /* the foreground waits for it */
    bool busy;         /* after its last step there was more to do */
    bool waiting;      /* requests wait for pages */
    bool reclaiming;   /* the foreground waits for the job's pages, within a step */
    bool gave_up;      /* the job waits until nothing is lacking */
    bool stopped;      /* background_stop */
    double credit;     /* seconds owed to the job */
    double turn_start; /* of a turn */
    double last_look;  /* of the job, at whose turn it is */
    double step_start; /* of a step */
    double last_step;  /* the end of the last step */
    double last_lack;  /* when requests last lacked pages */
    struct background_stats stats;
};

struct background *background_create(double share, struct error *error) {
    if (!(share >= 0 && share <= 0.9)) {
        error_set(error, ERROR_INVALID, "a share of %g for background work is not between 0 and 0.9", share);
        return NULL;
    }
    struct background *b = calloc(1, sizeof *b);
    if (b == NULL) {
        error_set(error, ERROR_MEMORY, "no memory for background work");
        return NULL;
    }
    b->share = share;
    b->last_step = b->last_lack = -1e9;
    pthread_mutex_init(&b->mutex, NULL);
    pthread_condattr_t attributes;
    pthread_condattr_init(&attributes);
    pthread_condattr_setclock(&attributes, CLOCK_MONOTONIC);
    pthread_cond_init(&b->changed, &attributes);
    pthread_condattr_destroy(&attributes);
    return b;
}

void background_free(struct background *b) {
    if (b == NULL)
        return;
    pthread_mutex_destroy(&b->mutex);
    pthread_cond_destroy(&b->changed);
    free(b);
}

/* ---- the job; the mutex is held by the static functions ---- */

static bool may_have_turn(const struct background *b, double now) {
    if (b->in_step || b->wanted)
        return false;
    if (b->gave_up && (b->waiting || now - b->last_lack < after_reclaim))
        return false;
    return !b->busy || b->credit > 0;
}

static void wait_for_seconds(struct background *b, double seconds) { /* at most */
    double now = clock_seconds() + seconds;
    struct timespec until = {.tv_sec = (time_t)now, .tv_nsec = (long)((now - (double)(time_t)now) * 1e9)};
    pthread_cond_timedwait(&b->changed, &b->mutex, &until);
}

static void look(struct background *b, double now) {
    if (now - b->last_look > b->stats.longest)
        b->stats.longest = now - b->last_look;
    b->last_look = now;
}

static void start_turn(struct background *b, double now) {
    b->job = JOB_RUNNING;
    b->holds_pages = true;
    b->gave_up = false;
    b->turn_start = b->last_look = now;
    b->stats.turns++;
}

static void end_turn(struct background *b, double now) {
    double seconds = now - b->turn_start;
    look(b, now);
    b->stats.seconds += seconds;
    if (b->busy) {
        b->stats.busy_seconds += seconds;
        b->credit = b->credit - seconds > credit_least ? b->credit - seconds : credit_least;
    }
    b->job = JOB_WAITING;
    pthread_cond_broadcast(&b->changed);
}

static enum background_turn wait_for_turn(struct background *b) {
    for (;;) {
        double now = clock_seconds();
        if (b->job == JOB_RUNNING) /* it was given */
            return b->stopped ? BACKGROUND_STOP : BACKGROUND_GO_ON;
        if (b->reclaiming && b->holds_pages) {
            b->job = JOB_GIVING_UP;
            return BACKGROUND_GIVE_UP_PAGES;
        }
        if (b->stopped && !b->in_step) { /* its sequences are freed in a turn of their own */
            start_turn(b, now);
            return BACKGROUND_STOP;
        }
        if (!b->stopped && may_have_turn(b, now)) {
            start_turn(b, now);
            return BACKGROUND_GO_ON;
        }
        if (b->gave_up && !b->waiting)
            wait_for_seconds(b, after_reclaim);
        else
            pthread_cond_wait(&b->changed, &b->mutex);
    }
}

enum background_turn background_begin(struct background *b) {
    if (b == NULL)
        return BACKGROUND_GO_ON;
    pthread_mutex_lock(&b->mutex);
    b->job = JOB_WAITING;
    enum background_turn turn = wait_for_turn(b);
    pthread_mutex_unlock(&b->mutex);
    if (turn == BACKGROUND_STOP)
        background_end(b);
    return turn;
}

/* Beside a busy foreground a turn is over when what was owed is used up. */
static bool turn_goes_on(const struct background *b, double now) {
    return !b->stopped && (b->busy ? now - b->turn_start < b->credit : !b->wanted);
}

enum background_turn background_yield(struct background *b) {
    if (b == NULL)
        return BACKGROUND_GO_ON;
    pthread_mutex_lock(&b->mutex);
    enum background_turn turn = BACKGROUND_GO_ON;
    double now = clock_seconds();
    if (b->job == JOB_RUNNING)
        look(b, now);
    if (b->job == JOB_WAITING || !turn_goes_on(b, now)) {
        if (b->job == JOB_RUNNING)
            end_turn(b, now);
        turn = wait_for_turn(b);
    }
    pthread_mutex_unlock(&b->mutex);
    return turn;
}

enum background_turn background_gave_up(struct background *b) {
    if (b == NULL)
        return BACKGROUND_GO_ON;
    pthread_mutex_lock(&b->mutex);
    double now = clock_seconds();
    if (b->job == JOB_RUNNING)
        end_turn(b, now);
    b->job = JOB_WAITING;
    b->holds_pages = false;
    b->gave_up = true;
    b->last_lack = now;
    b->stats.gave_up++;
    pthread_cond_broadcast(&b->changed);
    enum background_turn turn = wait_for_turn(b);
    pthread_mutex_unlock(&b->mutex);
    return turn;
}

void background_end(struct background *b) {
    if (b == NULL)
        return;
    pthread_mutex_lock(&b->mutex);
    if (b->job == JOB_RUNNING)
        end_turn(b, clock_seconds());
    b->job = JOB_NONE;
    b->holds_pages = b->gave_up = false;
    pthread_cond_broadcast(&b->changed);
    pthread_mutex_unlock(&b->mutex);
}

uint32_t background_rows(struct background *b, uint32_t batch_rows) {
    if (b == NULL)
        return batch_rows;
    pthread_mutex_lock(&b->mutex);
    bool busy = b->busy || clock_seconds() - b->last_step < counts_as_busy;
    pthread_mutex_unlock(&b->mutex);
    uint32_t rows = busy ? ROWS_BUSY : ROWS_IDLE;
    return rows < batch_rows ? rows : batch_rows;
}

/* ---- any thread ---- */

static void set_stopped(struct background *b, bool stopped) {
    pthread_mutex_lock(&b->mutex);
    b->stopped = stopped;
    pthread_cond_broadcast(&b->changed);
    pthread_mutex_unlock(&b->mutex);
}

void background_stop(struct background *b) {
    if (b != NULL)
        set_stopped(b, true);
}

void background_allow(struct background *b) {
    if (b != NULL)
        set_stopped(b, false);
}

void background_set_share(struct background *b, double share) {
    if (!(share >= 0 && share <= 0.9))
        return;
    pthread_mutex_lock(&b->mutex);
    b->share = share;
    pthread_mutex_unlock(&b->mutex);
}

void background_get_stats(struct background *b, struct background_stats *out) {
    pthread_mutex_lock(&b->mutex);
    *out = b->stats;
    pthread_mutex_unlock(&b->mutex);
}

/* ---- the foreground ---- */

void background_take(struct background *b) {
    if (b == NULL)
        return;
    pthread_mutex_lock(&b->mutex);
    b->wanted = true;
    while (b->job == JOB_RUNNING || b->job == JOB_GIVING_UP)
        pthread_cond_wait(&b->changed, &b->mutex);
    b->wanted = false;
    b->in_step = true;
    b->step_start = clock_seconds();
    pthread_mutex_unlock(&b->mutex);
}

void background_give(struct background *b, bool busy, bool waiting) {
    if (b == NULL)
        return;
    pthread_mutex_lock(&b->mutex);
    double now = clock_seconds(), seconds = now - b->step_start;
    double credit = b->credit + seconds * b->share / (1 - b->share);
    b->stats.foreground_seconds += seconds;
    b->credit = !busy ? 0 : credit < credit_most ? credit : credit_most;
    b->in_step = false;
    b->busy = busy;
    b->waiting = waiting;
    b->last_step = now;
    if (waiting)
        b->last_lack = now;
    /* Who is owed a turn has it before the foreground's next step can take the engine. */
    if (b->job == JOB_WAITING && may_have_turn(b, now) && !b->stopped)
        start_turn(b, now);
    pthread_cond_broadcast(&b->changed);
    pthread_mutex_unlock(&b->mutex);
}

bool background_reclaim(struct background *b) {
    if (b == NULL)
        return false;
    pthread_mutex_lock(&b->mutex);
    bool held = b->job != JOB_NONE && b->holds_pages;
    b->reclaiming = true;
    pthread_cond_broadcast(&b->changed);
    while (b->job != JOB_NONE && b->holds_pages)
        pthread_cond_wait(&b->changed, &b->mutex);
    b->reclaiming = false;
    pthread_mutex_unlock(&b->mutex);
    return held;
}
