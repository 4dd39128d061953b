/* SPDX-License-Identifier: Apache-2.0 */
#include "store/records.h"

#include <stdio.h>
#include <string.h>

#define JOB_COLUMNS                                                                                                    \
    "id, status, model, training_file, validation_file, method, recipe, hyperparameters, chosen, suffix, metadata, "   \
    "policy, error_code, error_message, error_param, created, finished, estimated_finish, seed, step, steps, "         \
    "trained_tokens, fingerprint"

/* Every pair of the wanted object ?2 is one of the record's. */
#define HAS_METADATA                                                                                                   \
    "(?2 IS NULL OR NOT EXISTS (SELECT 1 FROM json_each(?2) AS want WHERE NOT EXISTS (SELECT 1 FROM "                  \
    "json_each(coalesce(metadata, '{}')) AS have WHERE have.key = want.key AND have.value = want.value)))"

struct job_reader {
    job_each each;
    void *context;
    bool found;
};

static int job_row(void *context, const struct row *row) {
    struct job_reader *reader = context;
    struct job_record job = {.id = row_text(row, 0),
        .status = row_text(row, 1),
        .model = row_text(row, 2),
        .training_file = row_text(row, 3),
        .validation_file = row_text(row, 4),
        .method = row_text(row, 5),
        .recipe = row_text(row, 6),
        .hyperparameters = row_text(row, 7),
        .chosen = row_text(row, 8),
        .suffix = row_text(row, 9),
        .metadata = row_text(row, 10),
        .policy = row_text(row, 11),
        .error_code = row_text(row, 12),
        .error_message = row_text(row, 13),
        .error_param = row_text(row, 14),
        .created = row_integer(row, 15),
        .finished = row_integer(row, 16),
        .estimated_finish = row_integer(row, 17),
        .seed = row_integer(row, 18),
        .step = row_integer(row, 19),
        .steps = row_integer(row, 20),
        .trained_tokens = row_integer(row, 21),
        .fingerprint = row_text(row, 22)};
    reader->found = true;
    return reader->each(reader->context, &job);
}

int jobs_insert(struct database *database, const struct job_record *job, struct error *error) {
    int changed = database_run(database, error,
        "INSERT INTO jobs(id, status, model, training_file, validation_file, method, recipe, hyperparameters, chosen, "
        "suffix, metadata, policy, created, seed, fingerprint) VALUES(?, 'queued', ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, "
        "?)",
        "tttttttttttiit", job->id, job->model, job->training_file, job->validation_file, job->method, job->recipe,
        job->hyperparameters, job->chosen, job->suffix, job->metadata, job->policy, job->created, job->seed,
        job->fingerprint);
    return changed < 0 ? changed : 0;
}

int jobs_find(struct database *database, const char *id, job_each each, void *context, struct error *error) {
    struct job_reader reader = {.each = each, .context = context};
    int code =
        database_query(database, error, job_row, &reader, "SELECT " JOB_COLUMNS " FROM jobs WHERE id = ?", "t", id);
    return code < 0 ? code : reader.found;
}

int jobs_list(struct database *database, const struct page *page, job_each each, void *context, struct error *error) {
    struct job_reader reader = {.each = each, .context = context};
    return database_query(database, error, job_row, &reader,
        "SELECT " JOB_COLUMNS
        " FROM jobs WHERE (?1 IS NULL OR number < (SELECT number FROM jobs WHERE id = ?1)) AND " HAS_METADATA
        " ORDER BY number DESC LIMIT ?3",
        "tti", page->after, page->metadata, page->limit);
}

int jobs_move(struct database *database, const char *id, const char *from, const char *to, int64_t finished,
    struct error *error) {
    return database_run(database, error,
        "UPDATE jobs SET status = ?1, finished = ?2, estimated_finish = CASE WHEN ?1 = 'running' THEN estimated_finish "
        "END WHERE id = ?3 AND instr(',' || ?4 || ',', ',' || status || ',') > 0",
        "tztt", to, finished, id, from);
}

int jobs_fail(struct database *database, const char *id, const char *code, const char *message, const char *parameter,
    int64_t finished, struct error *error) {
    return database_run(database, error,
        "UPDATE jobs SET status = 'failed', finished = ?1, estimated_finish = NULL, error_code = ?2, error_message = "
        "?3, error_param = ?4 WHERE id = ?5 AND status = 'running'",
        "ztttt", finished, code, message, parameter, id);
}

int jobs_progress(struct database *database, const char *id, int64_t step, int64_t steps, int64_t tokens,
    int64_t estimated_finish, struct error *error) {
    int changed = database_run(database, error,
        "UPDATE jobs SET step = ?1, steps = ?2, trained_tokens = ?3, estimated_finish = CASE WHEN status = 'running' "
        "THEN ?4 END WHERE id = ?5",
        "iizzt", step, steps, tokens, estimated_finish, id);
    return changed < 0 ? changed : 0;
}

int jobs_requeue(struct database *database, struct error *error) {
    int changed = database_run(database, error, "UPDATE jobs SET status = 'queued' WHERE status = 'running'", "");
    if (changed >= 0)
        changed =
            database_run(database, error, "UPDATE evaluations SET status = 'queued' WHERE status = 'running'", "");
    return changed < 0 ? changed : 0;
}

struct next {
    char *kind, *id;
    bool found;
};

static int next_row(void *context, const struct row *row) {
    struct next *next = context;
    snprintf(next->kind, 16, "%s", row_text(row, 0));
    snprintf(next->id, 64, "%s", row_text(row, 1));
    next->found = true;
    return 1;
}

int jobs_next(struct database *database, char kind[static 16], char id[static 64], struct error *error) {
    struct next next = {.kind = kind, .id = id};
    int code = database_query(database, error, next_row, &next,
        "SELECT 'job', id, created, number FROM jobs WHERE status = 'queued' UNION ALL SELECT 'evaluation', id, "
        "created, number FROM evaluations WHERE status = 'queued' ORDER BY 3, 4 LIMIT 1",
        "");
    return code < 0 ? code : next.found;
}
