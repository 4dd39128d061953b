/* SPDX-License-Identifier: Apache-2.0
 *
 * A training job: from its record to train_run, its events into the store, its policy into the table.
 */
#include "server/jobs_internal.h"

#include "engine/log.h"
#include "policy/train/train.h"
#include "server/fields.h"

#include <errno.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

enum { CHECKPOINT_NAME_MAX = 128 };

/* --- Events ---
 *
 * A job that was killed goes on from its last checkpoint, and its steps since then are done, and told, again. So that a
 * job's measures are those of one that nobody disturbed, once each: everything told before a checkpoint is on the disk
 * before that checkpoint replaces the last one, and what is told again in the same words is not stored again.
 */

/* One event on its way to the store. */
struct train_note {
    char job[64];
    char *message;
    char *data; /* JSON; NULL: none */
    const char *type;
    uint64_t step, steps, tokens;
    int64_t estimated_finish;
    char checkpoint[CHECKPOINT_NAME_MAX]; /* name of its file; empty: none */
    bool again;                           /* it may be stored already */
};

static void train_note_free(struct train_note *note) {
    free(note->data);
    free(note->message);
    free(note);
}

static int train_note_checkpoint(struct database *database, const struct train_note *note, struct error *error) {
    char id[64];
    http_make_id(id, sizeof id, "ftckpt_");
    struct checkpoint_record record = {.id = id,
        .job = note->job,
        .file = note->checkpoint,
        .metrics = note->data,
        .created = store_now(),
        .step = (int64_t)note->step};
    return checkpoints_insert(database, &record, error);
}

static int train_note_run(struct database *database, void *state, struct error *error) {
    const struct train_note *note = state;
    int code = note->again ? events_find(database, note->job, note->type, note->message, error) : 0;
    if (code == 0)
        code = job_event_insert(database, note->job, "info", note->type, note->message, note->data, error);
    if (code >= 0 && note->steps > 0)
        code = jobs_progress(database, note->job, (int64_t)note->step, (int64_t)note->steps, (int64_t)note->tokens,
            note->estimated_finish, error);
    if (code >= 0 && note->checkpoint[0] != '\0')
        code = train_note_checkpoint(database, note, error);
    return code;
}

static void train_note_done(void *state, const struct error *error) {
    struct train_note *note = state;
    if (error != NULL)
        log_event(LOG_WARNING, note->job, "an event of the job is lost", "message", LOG_STRING(error->message), NULL);
    train_note_free(note);
}

static char *train_write_data(const struct train_event *event) {
    json_t *object = train_event_json(event);
    char *text = json_dumps(object, JSON_COMPACT | JSON_REAL_PRECISION(TRAIN_EVENT_DIGITS));
    json_decref(object);
    return text;
}

static struct train_note *train_note_create(const struct jobs *jobs, const struct train_event *event) {
    struct train_note *note = calloc(1, sizeof *note);
    if (note == NULL)
        return NULL;
    snprintf(note->job, sizeof note->job, "%s", jobs->task.id);
    note->message = strdup(event->message == NULL ? "" : event->message);
    note->type = event->kind == TRAIN_EVENT_MESSAGE ? "message" : "metrics";
    if (event->kind != TRAIN_EVENT_MESSAGE) {
        note->again = jobs->task.step > 0;
        note->data = train_write_data(event);
        note->step = event->step;
        note->steps = event->steps;
        note->tokens = event->tokens;
        if (isfinite(event->seconds_left) && event->seconds_left >= 0 && event->seconds_left < 1e9)
            note->estimated_finish = store_now() + (int64_t)(event->seconds_left * 1e6);
    }
    if (event->kind == TRAIN_EVENT_CHECKPOINT) {
        const char *slash = event->file == NULL ? NULL : strrchr(event->file, '/');
        snprintf(note->checkpoint, sizeof note->checkpoint, "%s",
            event->file == NULL ? "checkpoint"
            : slash == NULL     ? event->file
                                : slash + 1);
    }
    if (note->message != NULL && (note->data != NULL || event->kind == TRAIN_EVENT_MESSAGE))
        return note;
    train_note_free(note);
    return NULL;
}

static void train_remember(struct jobs *jobs, const struct train_event *event) {
    if (event->kind == TRAIN_EVENT_MESSAGE)
        return;
    pthread_mutex_lock(&jobs->mutex);
    jobs->state.trained = true;
    jobs->state.step = jobs->state.done = event->step;
    jobs->state.total = jobs->state.steps = event->steps;
    if (isfinite(event->reward))
        jobs->state.reward = event->reward;
    if (isfinite(event->kl_valid))
        jobs->state.kl_valid = event->kl_valid;
    pthread_mutex_unlock(&jobs->mutex);
}

/* A checkpoint's waits until it is stored, with all before it (train.h: the new state is not in place yet). */
static void train_on_event(void *context, const struct train_event *event) {
    struct jobs *jobs = context;
    struct store *store = jobs->options.store;
    struct error error = {0};
    train_remember(jobs, event);
    struct train_note *note = train_note_create(jobs, event);
    if (note == NULL)
        return;
    if (event->kind == TRAIN_EVENT_CHECKPOINT) {
        int code = store_call(store, train_note_run, note, &error);
        train_note_done(note, code < 0 ? &error : NULL);
    } else if (store_post(store, train_note_run, train_note_done, note) != 0) {
        train_note_free(note);
        return;
    }
    jobs_announce(jobs);
    store_pace(store);
}

static bool train_on_asked(void *context) {
    return jobs_is_interrupted(context);
}

/* --- Before --- */

/* The options as they were when the job was created: in the table's order, since method and recipe set the others. */
static int train_read_options(const char *text, struct train_options *options, struct error *error) {
    json_t *object = json_loads(text, 0, NULL);
    int code = 0;
    train_options_default(options, TRAIN_DISTILLCACHE, false);
    for (uint32_t i = 0; i < train_options_count() && code == 0; i++) {
        const char *value = json_string_value(json_object_get(object, train_option_name(i)));
        if (value != NULL)
            code = train_options_set(options, train_option_name(i), value, error);
    }
    json_decref(object);
    return code == 0 ? train_options_check(options, error) : code;
}

/* Path of an uploaded file. NULL id: none. */
static int train_find_file(const struct jobs *jobs, const char *id, const char *name, const char *parameter, char *path,
    struct task_failure *failure) {
    char message[200];
    path[0] = '\0';
    if (id == NULL)
        return 0;
    if (name != NULL && store_path(jobs->options.store, "files", name, path, STORE_PATH_MAX) == 0 &&
        access(path, R_OK) == 0)
        return 0;
    snprintf(message, sizeof message, "the file '%.64s' %s", id,
        name == NULL ? "was deleted before the job ran" : "is not in the state directory any more");
    task_failure_set(failure, "file_not_found", parameter, message);
    return ERROR_IO;
}

static int train_make_folder(const char *path, struct task_failure *failure) {
    char message[400];
    if (mkdir(path, 0700) == 0 || errno == EEXIST)
        return 0;
    snprintf(message, sizeof message, "cannot create the folder %.200s: %s", path, strerror(errno));
    task_failure_set(failure, "io_error", NULL, message);
    return ERROR_IO;
}

/* --- After --- */

struct train_end {
    const struct task *task;
    const char *file; /* name in the folder of policies */
};

static int train_record_success(struct database *database, void *context, struct error *error) {
    const struct train_end *end = context;
    const struct task *task = end->task;
    char message[256];
    int code = jobs_move(database, task->id, "running", "succeeded", store_now(), error);
    if (code <= 0)
        return code;
    struct policy_record policy = {.name = task->policy, .job = task->id, .file = end->file, .created = store_now()};
    code = policies_insert(database, &policy, error);
    snprintf(message, sizeof message, "the job has succeeded: its policy is '%.120s'", task->policy);
    if (code == 0)
        code = job_event_insert(database, task->id, "info", "message", message, NULL, error);
    return code == 0 ? 1 : code;
}

/* The policy is whole and fits the model before anybody hears of it. */
static int train_finish(struct jobs *jobs, const char *out, const char *file, struct task_failure *failure) {
    struct train_end end = {.task = &jobs->task, .file = file};
    struct error error = {0};
    int code = policy_table_check_file(jobs->options.policies, out, &error);
    if (code == 0)
        code = store_sync_folder(jobs->options.store, "policies", &error);
    if (code != 0) {
        task_failure_of(failure, &error, NULL);
        return code;
    }
    /* Listed first: whoever reads that the job has succeeded may use its policy at once. */
    code = policy_table_load(jobs->options.policies, jobs->task.policy, out, jobs->task.id, store_now(), &error);
    if (code == 0) {
        code = jobs_insist(jobs, train_record_success, &end);
        code = code == 1 ? 0 : ERROR_CANCELLED;
    }
    if (code == 0)
        return 0;
    policy_table_remove(jobs->options.policies, jobs->task.policy, NULL);
    if (code != ERROR_CANCELLED)
        task_failure_of(failure, &error, NULL);
    return code;
}

/* Names of what the run reads and writes. */
struct train_paths {
    char data[STORE_PATH_MAX], valid[STORE_PATH_MAX], directory[STORE_PATH_MAX], out[STORE_PATH_MAX];
    char file[POLICY_NAME_MAX + 16];
};

static int train_find_paths(struct jobs *jobs, struct train_paths *paths, struct task_failure *failure) {
    const struct task *task = &jobs->task;
    const struct store *store = jobs->options.store;
    snprintf(paths->file, sizeof paths->file, "%.127s%s", task->policy,
        strcmp(task->method, "rlkv") == 0 ? ".json" : ".safetensors");
    int code = train_find_file(jobs, task->training_file, task->training_name, "training_file", paths->data, failure);
    if (code == 0)
        code = train_find_file(
            jobs, task->validation_file, task->validation_name, "validation_file", paths->valid, failure);
    if (code != 0)
        return code;
    if (store_path(store, "jobs", task->id, paths->directory, sizeof paths->directory) != 0 ||
        store_path(store, "policies", paths->file, paths->out, sizeof paths->out) != 0) {
        task_failure_set(failure, "io_error", NULL, "the path of the state directory is too long");
        return ERROR_IO;
    }
    return train_make_folder(paths->directory, failure);
}

/* Which field's file an error is about. Its name is in the message. */
static const char *train_parameter(const struct task *task, const struct error *error) {
    if (strstr(error->message, task->training_name) != NULL)
        return "training_file";
    if (task->validation_name != NULL && strstr(error->message, task->validation_name) != NULL)
        return "validation_file";
    return NULL;
}

static int train_run_job(struct jobs *jobs, struct train_paths *paths, struct task_failure *failure) {
    const struct server_model *model = jobs->options.model;
    struct error error = {0};
    struct train_run run = {.engine = model->engine,
        .tokenizer = model->tokenizer,
        .chat = {model->chat_template, model->chat_refusal},
        .background = model->background,
        .data = paths->data,
        .directory = paths->directory,
        .out = paths->out,
        .resume = true,
        .event = train_on_event,
        .stopped = train_on_asked,
        .context = jobs};
    int code = train_find_paths(jobs, paths, failure);
    run.valid = paths->valid[0] == '\0' ? NULL : paths->valid;
    if (code != 0)
        return code;
    code = train_read_options(jobs->task.hyperparameters, &run.options, &error);
    if (code == 0 && model->train == NULL)
        code = error_set(&error, ERROR_UNSUPPORTED, "this server cannot train");
    if (code == 0)
        code = model->train(&run, &error);
    if (code == 0)
        return train_finish(jobs, paths->out, paths->file, failure);
    if (code != ERROR_CANCELLED)
        task_failure_of(failure, &error, train_parameter(&jobs->task, &error));
    return code;
}

int job_train(struct jobs *jobs, struct task_failure *failure) {
    struct train_paths *paths = calloc(1, sizeof *paths);
    if (paths == NULL) {
        task_failure_set(failure, "out_of_memory", NULL, "no memory for the job");
        return ERROR_MEMORY;
    }
    int code = train_run_job(jobs, paths, failure);
    free(paths);
    return code;
}
