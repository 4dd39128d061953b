/* SPDX-License-Identifier: Apache-2.0
 *
 * What the tables hold, as records, and everything that is done to them. For work on the store's thread (store.h).
 *
 * A record's texts are borrowed: from the row during a callback, from the caller on the way in. Lists call
 * each(context, record) in order until it returns other than 0. Functions return 0 or 1 as said, or a negative code.
 */
#ifndef STORE_RECORDS_H
#define STORE_RECORDS_H

#include "store/database.h"

/* Where a list begins and ends: entries after the one named (NULL: from the start), at most limit. The newest comes
 * first, unless oldest_first. metadata: JSON object of strings; entries must have all of its pairs (NULL: any). */
struct page {
    const char *after;
    int64_t limit;
    bool oldest_first;
    const char *metadata;
};

/* --- Files --- */

struct file_record {
    const char *id, *filename, *purpose;
    const char *stored; /* name in the folder of files */
    int64_t created, bytes;
};
typedef int (*file_each)(void *context, const struct file_record *file);
int files_insert(struct database *database, const struct file_record *file, struct error *error);
/* 1: each was called, 0: no such file. */
int files_find(struct database *database, const char *id, file_each each, void *context, struct error *error);
int files_list(struct database *database, const struct page *page, const char *purpose, file_each each, void *context,
    struct error *error);
int files_delete(struct database *database, const char *id, struct error *error); /* 1: it was there */

/* --- Jobs --- */

struct job_record {
    const char *id, *status, *model, *fingerprint, *training_file, *validation_file, *method, *recipe;
    const char *hyperparameters, *chosen; /* JSON objects */
    const char *suffix, *metadata, *policy;
    const char *error_code, *error_message, *error_param;
    int64_t created, finished, estimated_finish; /* 0: not known */
    int64_t seed, step, steps, trained_tokens;
};
typedef int (*job_each)(void *context, const struct job_record *job);
int jobs_insert(struct database *database, const struct job_record *job, struct error *error);
int jobs_find(struct database *database, const char *id, job_each each, void *context, struct error *error);
int jobs_list(struct database *database, const struct page *page, job_each each, void *context, struct error *error);
/* Moves a job to a status if it is in one of those of `from` ("queued,running"): 1, or 0. finished: time, 0: none. */
int jobs_move(
    struct database *database, const char *id, const char *from, const char *to, int64_t finished, struct error *error);
/* Of a running job: failed, with the reason. 1, or 0 when it is not running any more. */
int jobs_fail(struct database *database, const char *id, const char *code, const char *message, const char *parameter,
    int64_t finished, struct error *error);
int jobs_progress(struct database *database, const char *id, int64_t step, int64_t steps, int64_t tokens,
    int64_t estimated_finish, struct error *error);
/* At the start of the process: what was running is queued again. Evaluations too. */
int jobs_requeue(struct database *database, struct error *error);

/* What is to be run next: the oldest queued job or evaluation. 1: each of the kind was called. */
int jobs_next(struct database *database, char kind[static 16], char id[static 64], struct error *error);

/* --- Events and checkpoints --- */

struct event_record {
    const char *id, *job, *level, *type, *message;
    const char *data; /* JSON object or NULL */
    int64_t created, number;
};
typedef int (*event_each)(void *context, const struct event_record *event);
int events_insert(struct database *database, const struct event_record *event, int64_t *number, struct error *error);
/* 1: the job has an event of this type with these words, 0: none. Reads the job's events. */
int events_find(struct database *database, const char *job, const char *type, const char *message, struct error *error);
int events_list(struct database *database, const char *job, const struct page *page, event_each each, void *context,
    struct error *error);
/* Those with a number above this one, oldest first: for streams. */
int events_since(struct database *database, const char *job, int64_t number, int64_t limit, event_each each,
    void *context, struct error *error);

struct checkpoint_record {
    const char *id, *job, *file, *metrics;
    int64_t created, step;
};
typedef int (*checkpoint_each)(void *context, const struct checkpoint_record *checkpoint);
/* A checkpoint of the same step is replaced. */
int checkpoints_insert(struct database *database, const struct checkpoint_record *checkpoint, struct error *error);
int checkpoints_list(struct database *database, const char *job, const struct page *page, checkpoint_each each,
    void *context, struct error *error);

/* --- Policies --- */

struct policy_record {
    const char *name, *job, *file;
    int64_t created;
};
typedef int (*policy_each)(void *context, const struct policy_record *policy);
int policies_insert(struct database *database, const struct policy_record *policy, struct error *error);
int policies_list(struct database *database, policy_each each, void *context, struct error *error);
/* 1: each was called, 0: no such policy. */
int policies_find(struct database *database, const char *name, policy_each each, void *context, struct error *error);
int policies_delete(struct database *database, const char *name, struct error *error); /* 1: it was there */

/* One text by key; value NULL or empty: none. */
int settings_set(struct database *database, const char *key, const char *value, struct error *error);
/* out: empty when there is none. */
int settings_get(struct database *database, const char *key, char *out, size_t size, struct error *error);

/* --- Evaluations --- */

struct evaluation_record {
    const char *id, *status, *model, *request, *metadata, *report;
    const char *error_code, *error_message, *error_param;
    int64_t created, finished, done, total;
};
typedef int (*evaluation_each)(void *context, const struct evaluation_record *evaluation);
int evaluations_insert(struct database *database, const struct evaluation_record *evaluation, struct error *error);
int evaluations_find(
    struct database *database, const char *id, evaluation_each each, void *context, struct error *error);
int evaluations_list(
    struct database *database, const struct page *page, evaluation_each each, void *context, struct error *error);
int evaluations_move(
    struct database *database, const char *id, const char *from, const char *to, int64_t finished, struct error *error);
/* Of a running one: its progress, and when report or error_message is given, its end. 1, or 0: it is not running. */
int evaluations_update(struct database *database, const struct evaluation_record *evaluation, struct error *error);

/* Whether a list's `after` names something: 1 or 0. table: "files", "jobs", "events", "checkpoints", "evaluations". */
int records_exist(struct database *database, const char *table, const char *id, struct error *error);

#endif
