/* SPDX-License-Identifier: Apache-2.0
 *
 * The runner of training jobs and evaluations: one thread that takes what is queued in the store, oldest first, one at
 * a time, and does it on the engine's idle time (engine/background.h).
 *
 * The status in the store is the truth. Whoever cancels or pauses a job changes its status there and then calls
 * jobs_interrupt; the runner, when the work has ended, changes the status only if it is still `running`. So whatever
 * happens to the process, what was running is found as `running` at the next start, is queued again (jobs_requeue), and
 * goes on from its last checkpoint.
 *
 *   queued -> running -> succeeded | failed
 *   queued, running, paused -> cancelled;  queued, running -> paused -> queued
 *
 * A job that succeeds has its policy file in the folder of policies, whole and checked, before it is registered.
 */
#ifndef SERVER_JOBS_H
#define SERVER_JOBS_H

#include "server/policy_table.h"
#include "server/server.h"
#include "store/store.h"

struct jobs; /* opaque */

struct jobs_options {
    struct store *store;
    const struct server_model *model;
    const char *model_id;
    struct policy_table *policies;
    /* The runner has changed this job or evaluation, or added events. On the thread that polls the store. */
    void (*changed)(void *context, const char *id);
    void (*stopped)(void *context); /* the runner has stopped after jobs_drain; the runner's thread */
    void *context;
};

struct jobs *jobs_create(const struct jobs_options *options, struct error *error);
void jobs_free(struct jobs *jobs); /* drains, and waits for the thread. NULL allowed */

/* ---- any thread; none of them waits ---- */

void jobs_poke(struct jobs *jobs); /* something was queued */
/* Ends the present work if it is this one's: training leaves a checkpoint. Call it after the status was changed. */
void jobs_interrupt(struct jobs *jobs, const char *id);
/* Ends the present work, and begins no other. */
void jobs_drain(struct jobs *jobs);
bool jobs_are_stopped(struct jobs *jobs);

struct jobs_state {
    char id[64];          /* of the work at hand; empty: idle */
    char kind[16];        /* job, evaluation */
    uint64_t done, total; /* of the work at hand: steps, or results; total 0: not known yet */
    /* Of the job at hand, or the last one. */
    bool trained; /* there was a step */
    uint64_t step;
    uint64_t steps;  /* that it makes in all; 0: not known yet */
    double reward;   /* of the last step that had one; NaN: none yet */
    double kl_valid; /* of the last comparison on held-out prompts; NaN: none yet */
};
void jobs_get_state(struct jobs *jobs, struct jobs_state *out);

#endif
