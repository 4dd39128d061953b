/* SPDX-License-Identifier: Apache-2.0
 *
 * What the runner (jobs.c) and the two kinds of work (job_train.c, job_evaluate.c) share.
 */
#ifndef SERVER_JOBS_INTERNAL_H
#define SERVER_JOBS_INTERNAL_H

#include "server/jobs.h"
#include "store/records.h"

#include <pthread.h>

/* The work at hand, with everything of its record that is needed; texts are owned. */
struct task {
    char kind[16], id[64];
    bool found; /* the record was there */
    char *model, *fingerprint;
    /* job */
    char *training_file, *validation_file; /* ids; validation may be NULL */
    char *training_name, *validation_name; /* names in the folder of files; NULL: deleted */
    char *hyperparameters, *policy, *method;
    int64_t step; /* where an earlier run stopped */
    /* evaluation */
    char *request;
    char *data_name; /* file of the request; NULL: none, or deleted */
};

struct jobs {
    struct jobs_options options;
    pthread_t thread;
    bool started;
    pthread_mutex_t mutex;
    pthread_cond_t woken;
    /* Under the mutex: */
    bool poked, draining, stopped;
    bool interrupt; /* the work at hand is to end */
    struct jobs_state state;
    /* The runner's own: */
    struct task task;
};

bool jobs_is_interrupted(struct jobs *jobs);

/* Why a task failed, as the API tells it. */
struct task_failure {
    const char *code;
    const char *parameter; /* NULL: none */
    char message[512];
};
void task_failure_set(struct task_failure *failure, const char *code, const char *parameter, const char *message);
/* From an error of what was read or computed. */
void task_failure_of(struct task_failure *failure, const struct error *error, const char *parameter);

/* Runs the task. 0: it succeeded, and was recorded as such. ERROR_CANCELLED: interrupted. Else failure is filled. */
int job_train(struct jobs *jobs, struct task_failure *failure);
int job_evaluate(struct jobs *jobs, struct task_failure *failure);

/* Does work on the store's thread and repeats it while the disk refuses, until it is done or the runner drains. Returns
 * the work's code, or ERROR_CANCELLED. */
int jobs_insist(struct jobs *jobs, store_run run, void *state);
/* Tells the loop that the task at hand has changed. */
void jobs_announce(struct jobs *jobs);

/* An event of a job, for store_post (it frees the state) or in other work of the store's thread. data: JSON object or
 * NULL. */
int job_event_insert(struct database *database, const char *job, const char *level, const char *type,
    const char *message, const char *data, struct error *error);

#endif
