/* SPDX-License-Identifier: Apache-2.0 */
#include "server/jobs_internal.h"

#include "engine/background.h"
#include "engine/log.h"
#include "server/fields.h"
#include "store/sweep.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

enum { RETRY_SECONDS_MOST = 16 };

/* --- Texts --- */

void task_failure_set(struct task_failure *failure, const char *code, const char *parameter, const char *message) {
    failure->code = code;
    failure->parameter = parameter;
    snprintf(failure->message, sizeof failure->message, "%s", message);
}

void task_failure_of(struct task_failure *failure, const struct error *error, const char *parameter) {
    static const struct {
        int error;
        const char *code;
    } codes[] = {{ERROR_INVALID, "invalid_value"}, {ERROR_MEMORY, "out_of_memory"}, {ERROR_IO, "io_error"},
        {ERROR_FORMAT, "invalid_file"}, {ERROR_UNSUPPORTED, "unsupported"}, {ERROR_CONTEXT, "context_too_small"},
        {ERROR_PAGES, "kv_memory_too_small"}};
    const char *code = "server_error";
    for (size_t i = 0; i < sizeof codes / sizeof codes[0]; i++)
        if (codes[i].error == error->code)
            code = codes[i].code;
    task_failure_set(failure, code, parameter, error->message[0] == '\0' ? "unknown error" : error->message);
}

static void task_clear(struct task *task) {
    free(task->model);
    free(task->fingerprint);
    free(task->training_file);
    free(task->validation_file);
    free(task->training_name);
    free(task->validation_name);
    free(task->hyperparameters);
    free(task->policy);
    free(task->method);
    free(task->request);
    free(task->data_name);
    *task = (struct task){.found = false};
}

/* NULL stays NULL; false when memory ran out. */
static bool task_copy(char **to, const char *from) {
    *to = from == NULL ? NULL : strdup(from);
    return from == NULL || *to != NULL;
}

/* --- On the store's thread --- */

int job_event_insert(struct database *database, const char *job, const char *level, const char *type,
    const char *message, const char *data, struct error *error) {
    char id[64];
    int64_t number;
    http_make_id(id, sizeof id, "ftevent-");
    struct event_record event = {
        .id = id, .job = job, .level = level, .type = type, .message = message, .data = data, .created = store_now()};
    return events_insert(database, &event, &number, error);
}

static int task_take_name(void *context, const struct file_record *file) {
    return task_copy(context, file->stored) ? 0 : ERROR_MEMORY;
}

static int task_find_file(struct database *database, const char *id, char **name, struct error *error) {
    return id == NULL ? 0 : files_find(database, id, task_take_name, name, error);
}

static int task_take_job(void *context, const struct job_record *job) {
    struct task *task = context;
    task->found = true;
    task->step = job->step;
    bool copied = task_copy(&task->model, job->model) && task_copy(&task->fingerprint, job->fingerprint) &&
                  task_copy(&task->training_file, job->training_file) &&
                  task_copy(&task->validation_file, job->validation_file) &&
                  task_copy(&task->hyperparameters, job->hyperparameters) && task_copy(&task->policy, job->policy) &&
                  task_copy(&task->method, job->method);
    return copied ? 0 : ERROR_MEMORY;
}

static int task_begin_job(struct database *database, struct task *task, struct error *error) {
    char message[120] = "the job is running";
    int code = jobs_find(database, task->id, task_take_job, task, error);
    if (code >= 0)
        code = task_find_file(database, task->training_file, &task->training_name, error);
    if (code >= 0)
        code = task_find_file(database, task->validation_file, &task->validation_name, error);
    if (code >= 0)
        code = jobs_move(database, task->id, "queued", "running", 0, error);
    if (code < 0)
        return code;
    if (task->step > 0)
        snprintf(message, sizeof message, "the job goes on from its last checkpoint (it had come to step %lld)",
            (long long)task->step);
    return job_event_insert(database, task->id, "info", "message", message, NULL, error);
}

static int task_take_evaluation(void *context, const struct evaluation_record *evaluation) {
    struct task *task = context;
    task->found = true;
    return task_copy(&task->model, evaluation->model) && task_copy(&task->request, evaluation->request) ? 0
                                                                                                        : ERROR_MEMORY;
}

static int task_begin_evaluation(struct database *database, struct task *task, struct error *error) {
    int code = evaluations_find(database, task->id, task_take_evaluation, task, error);
    json_t *request = code >= 0 && task->request != NULL ? json_loads(task->request, 0, NULL) : NULL;
    if (code >= 0)
        code = task_find_file(database, json_string_value(json_object_get(request, "data")), &task->data_name, error);
    json_decref(request);
    return code < 0 ? code : evaluations_move(database, task->id, "queued", "running", 0, error);
}

/* The oldest in the queue becomes the work at hand. */
static int jobs_take_work(struct database *database, void *context, struct error *error) {
    struct jobs *jobs = context;
    struct task *task = &jobs->task;
    task_clear(task);
    int code = jobs_next(database, task->kind, task->id, error);
    if (code <= 0)
        return code;
    bool job = strcmp(task->kind, "job") == 0;
    code = job ? task_begin_job(database, task, error) : task_begin_evaluation(database, task, error);
    if (code == ERROR_MEMORY)
        error_set(error, ERROR_MEMORY, "no memory for a job");
    if (code < 0)
        return code;
    /* Nobody can have cancelled it yet: that is work of this thread too. */
    pthread_mutex_lock(&jobs->mutex);
    jobs->interrupt = jobs->draining;
    if (job) /* else these are those of the last job */
        jobs->state = (struct jobs_state){.reward = NAN, .kl_valid = NAN};
    jobs->state.done = jobs->state.total = 0;
    snprintf(jobs->state.id, sizeof jobs->state.id, "%s", task->id);
    snprintf(jobs->state.kind, sizeof jobs->state.kind, "%s", task->kind);
    pthread_mutex_unlock(&jobs->mutex);
    return 0;
}

/* How a task ended that did not succeed. */
struct task_end {
    const struct task *task;
    const struct task_failure *failure; /* NULL: it was interrupted */
    bool draining;
};

static int jobs_end_job(struct database *database, const struct task_end *end, struct error *error) {
    const char *id = end->task->id;
    const char *level = "info", *message = "the server shuts down: the job goes on at the next start";
    int code = 0;
    if (end->failure != NULL) {
        level = "error";
        message = end->failure->message;
        code = jobs_fail(
            database, id, end->failure->code, end->failure->message, end->failure->parameter, store_now(), error);
    } else if (!end->draining) {
        return jobs_move(database, id, "running", "queued", 0, error);
    }
    if (code < 0 || (code == 0 && end->failure != NULL))
        return code;
    return job_event_insert(database, id, level, "message", message, NULL, error);
}

static int jobs_end_evaluation(struct database *database, const struct task_end *end, struct error *error) {
    const struct task_failure *failure = end->failure;
    if (failure == NULL)
        return end->draining ? 0 : evaluations_move(database, end->task->id, "running", "queued", 0, error);
    struct evaluation_record record = {.id = end->task->id,
        .error_code = failure->code,
        .error_message = failure->message,
        .error_param = failure->parameter,
        .finished = store_now()};
    return evaluations_update(database, &record, error);
}

static int jobs_end_work(struct database *database, void *context, struct error *error) {
    const struct task_end *end = context;
    return strcmp(end->task->kind, "job") == 0 ? jobs_end_job(database, end, error)
                                               : jobs_end_evaluation(database, end, error);
}

/* --- The runner --- */

bool jobs_is_interrupted(struct jobs *jobs) {
    pthread_mutex_lock(&jobs->mutex);
    bool interrupt = jobs->interrupt;
    pthread_mutex_unlock(&jobs->mutex);
    return interrupt;
}

static bool jobs_is_draining(struct jobs *jobs) {
    pthread_mutex_lock(&jobs->mutex);
    bool draining = jobs->draining;
    pthread_mutex_unlock(&jobs->mutex);
    return draining;
}

static void jobs_pause_before_retry(struct jobs *jobs, unsigned seconds) {
    struct timespec until;
    clock_gettime(CLOCK_REALTIME, &until);
    until.tv_sec += seconds;
    pthread_mutex_lock(&jobs->mutex);
    if (!jobs->draining)
        pthread_cond_timedwait(&jobs->woken, &jobs->mutex, &until);
    pthread_mutex_unlock(&jobs->mutex);
}

int jobs_insist(struct jobs *jobs, store_run run, void *state) {
    struct error error = {0};
    for (unsigned seconds = 1;; seconds = seconds < RETRY_SECONDS_MOST ? 2 * seconds : seconds) {
        int code = store_call(jobs->options.store, run, state, &error);
        if (code >= 0)
            return code;
        log_event(LOG_ERROR, jobs->task.id, "the state cannot be written; trying again", "message",
            LOG_STRING(error.message), NULL);
        if (jobs_is_draining(jobs))
            return ERROR_CANCELLED;
        jobs_pause_before_retry(jobs, seconds);
    }
}

struct announcement {
    void (*changed)(void *context, const char *id);
    void *context;
    char id[64];
};

static int announcement_run(struct database *database, void *state, struct error *error) {
    (void)database;
    (void)state;
    (void)error;
    return 0;
}

static void announcement_done(void *state, const struct error *error) {
    struct announcement *announcement = state;
    (void)error;
    announcement->changed(announcement->context, announcement->id);
    free(announcement);
}

void jobs_announce(struct jobs *jobs) {
    struct announcement *announcement = calloc(1, sizeof *announcement);
    if (announcement == NULL)
        return; /* it is seen with the next one */
    announcement->changed = jobs->options.changed;
    announcement->context = jobs->options.context;
    snprintf(announcement->id, sizeof announcement->id, "%s", jobs->task.id);
    if (store_post(jobs->options.store, announcement_run, announcement_done, announcement) != 0)
        free(announcement);
}

/* The engine is free again for the next job, whoever stopped this one. */
static void jobs_put_down(struct jobs *jobs) {
    pthread_mutex_lock(&jobs->mutex);
    jobs->interrupt = false;
    jobs->state.id[0] = '\0';
    if (jobs->options.model->background != NULL && !jobs->draining)
        background_allow(jobs->options.model->background);
    pthread_mutex_unlock(&jobs->mutex);
}

static int jobs_check_model(const struct jobs *jobs, struct task_failure *failure) {
    const char *own = jobs->options.model->fingerprint;
    const struct task *task = &jobs->task;
    char message[400];
    if (task->fingerprint == NULL || own == NULL || strcmp(task->fingerprint, own) == 0)
        return 0;
    snprintf(message, sizeof message,
        "the job was created for another model file (model '%.80s', fingerprint %.12s) than the one that is served "
        "now ('%.80s', %.12s)",
        task->model, task->fingerprint, jobs->options.model_id, own);
    task_failure_set(failure, "model_changed", "model", message);
    return ERROR_INVALID;
}

static void jobs_do(struct jobs *jobs) {
    struct task *task = &jobs->task;
    struct task_failure failure = {.code = NULL};
    bool job = strcmp(task->kind, "job") == 0;
    log_event(LOG_INFO, task->id, "job started", "kind", LOG_STRING(task->kind), NULL);
    jobs_announce(jobs);
    int code = jobs_check_model(jobs, &failure);
    if (code == 0)
        code = job ? job_train(jobs, &failure) : job_evaluate(jobs, &failure);
    if (code != 0) {
        struct task_end end = {
            .task = task, .failure = code == ERROR_CANCELLED ? NULL : &failure, .draining = jobs_is_draining(jobs)};
        jobs_insist(jobs, jobs_end_work, &end);
    }
    log_event(code == 0 || code == ERROR_CANCELLED ? LOG_INFO : LOG_WARNING, task->id, "job ended", "outcome",
        LOG_STRING(code == 0                 ? "succeeded"
                   : code == ERROR_CANCELLED ? "interrupted"
                                             : "failed"),
        "message", LOG_STRING(failure.code == NULL ? NULL : failure.message), NULL);
    jobs_put_down(jobs);
    if (job && code == ERROR_CANCELLED) /* after it: whoever cancels it from now on discards it too */
        store_discard_job(jobs->options.store, task->id);
    jobs_announce(jobs);
}

/* Waits for something to do; false when the runner is to end. */
static bool jobs_wait(struct jobs *jobs) {
    pthread_mutex_lock(&jobs->mutex);
    while (!jobs->poked && !jobs->draining)
        pthread_cond_wait(&jobs->woken, &jobs->mutex);
    jobs->poked = false;
    bool draining = jobs->draining;
    pthread_mutex_unlock(&jobs->mutex);
    return !draining;
}

static void *jobs_thread(void *context) {
    struct jobs *jobs = context;
    while (jobs_wait(jobs)) {
        while (!jobs_is_draining(jobs)) {
            if (jobs_insist(jobs, jobs_take_work, jobs) < 0 || jobs->task.id[0] == '\0')
                break;
            jobs_do(jobs);
        }
    }
    pthread_mutex_lock(&jobs->mutex);
    jobs->stopped = true;
    pthread_mutex_unlock(&jobs->mutex);
    jobs->options.stopped(jobs->options.context);
    return NULL;
}

/* --- From outside --- */

void jobs_poke(struct jobs *jobs) {
    pthread_mutex_lock(&jobs->mutex);
    jobs->poked = true;
    pthread_cond_signal(&jobs->woken);
    pthread_mutex_unlock(&jobs->mutex);
}

/* With the mutex held. */
static void jobs_stop_work(struct jobs *jobs) {
    jobs->interrupt = true;
    if (jobs->options.model->background != NULL)
        background_stop(jobs->options.model->background);
}

void jobs_interrupt(struct jobs *jobs, const char *id) {
    pthread_mutex_lock(&jobs->mutex);
    if (jobs->state.id[0] != '\0' && strcmp(jobs->state.id, id) == 0)
        jobs_stop_work(jobs);
    pthread_mutex_unlock(&jobs->mutex);
}

void jobs_drain(struct jobs *jobs) {
    pthread_mutex_lock(&jobs->mutex);
    jobs->draining = true;
    jobs_stop_work(jobs);
    pthread_cond_signal(&jobs->woken);
    pthread_mutex_unlock(&jobs->mutex);
}

bool jobs_are_stopped(struct jobs *jobs) {
    pthread_mutex_lock(&jobs->mutex);
    bool stopped = jobs->stopped;
    pthread_mutex_unlock(&jobs->mutex);
    return stopped;
}

void jobs_get_state(struct jobs *jobs, struct jobs_state *out) {
    pthread_mutex_lock(&jobs->mutex);
    *out = jobs->state;
    pthread_mutex_unlock(&jobs->mutex);
}

struct jobs *jobs_create(const struct jobs_options *options, struct error *error) {
    struct jobs *jobs = calloc(1, sizeof *jobs);
    if (jobs == NULL) {
        error_set(error, ERROR_MEMORY, "no memory for the runner of jobs");
        return NULL;
    }
    jobs->options = *options;
    jobs->state.reward = jobs->state.kl_valid = NAN;
    jobs->poked = true; /* what was left from last time */
    pthread_mutex_init(&jobs->mutex, NULL);
    pthread_cond_init(&jobs->woken, NULL);
    jobs->started = pthread_create(&jobs->thread, NULL, jobs_thread, jobs) == 0;
    if (jobs->started)
        return jobs;
    error_set(error, ERROR_MEMORY, "cannot start the runner of jobs");
    jobs_free(jobs);
    return NULL;
}

void jobs_free(struct jobs *jobs) {
    if (jobs == NULL)
        return;
    if (jobs->started) {
        jobs_drain(jobs);
        pthread_join(jobs->thread, NULL);
    }
    task_clear(&jobs->task);
    pthread_cond_destroy(&jobs->woken);
    pthread_mutex_destroy(&jobs->mutex);
    free(jobs);
}
