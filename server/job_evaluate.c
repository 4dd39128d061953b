/* SPDX-License-Identifier: Apache-2.0
 *
 * An evaluation as a job: from its record to server_model.evaluate, its report into the store.
 */
#include "server/evaluation.h"
#include "server/jobs_internal.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

/* Progress on its way to the store. */
struct progress {
    char id[64];
    int64_t done, total;
};

static int progress_run(struct database *database, void *state, struct error *error) {
    const struct progress *progress = state;
    struct evaluation_record record = {.id = progress->id, .done = progress->done, .total = progress->total};
    return evaluations_update(database, &record, error);
}

static void progress_done(void *state, const struct error *error) {
    (void)error; /* the next one says it again */
    free(state);
}

static void evaluate_on_progress(void *context, uint64_t done, uint64_t total) {
    struct jobs *jobs = context;
    struct progress *progress = calloc(1, sizeof *progress);
    if (progress == NULL)
        return;
    snprintf(progress->id, sizeof progress->id, "%s", jobs->task.id);
    progress->done = (int64_t)done;
    progress->total = (int64_t)total;
    if (store_post(jobs->options.store, progress_run, progress_done, progress) != 0)
        free(progress);
    pthread_mutex_lock(&jobs->mutex);
    jobs->state.done = done;
    jobs->state.total = total;
    pthread_mutex_unlock(&jobs->mutex);
}

static bool evaluate_on_asked(void *context) {
    return jobs_is_interrupted(context);
}

struct evaluate_end {
    const char *id, *report;
    int64_t total;
};

static int evaluate_record_success(struct database *database, void *context, struct error *error) {
    const struct evaluate_end *end = context;
    struct evaluation_record record = {
        .id = end->id, .report = end->report, .done = end->total, .total = end->total, .finished = store_now()};
    return evaluations_update(database, &record, error);
}

static int evaluate_run(struct jobs *jobs, const struct config *config, const struct trained_policies *trained,
    struct task_failure *failure) {
    const struct server_model *model = jobs->options.model;
    struct evaluation_run run = {.config = config,
        .trained = trained,
        .engine = model->engine,
        .tokenizer = model->tokenizer,
        .chat = {model->chat_template, model->chat_refusal},
        .background = model->background,
        .stopped = evaluate_on_asked,
        .progress = evaluate_on_progress,
        .context = jobs};
    struct error error = {0};
    char *report = NULL;
    int code = model->evaluate == NULL ? error_set(&error, ERROR_UNSUPPORTED, "this server cannot evaluate")
                                       : model->evaluate(&run, &report, &error);
    if (code == 0) {
        struct evaluate_end end = {.id = jobs->task.id, .report = report, .total = (int64_t)jobs->state.total};
        code = jobs_insist(jobs, evaluate_record_success, &end) == 1 ? 0 : ERROR_CANCELLED;
    } else if (code != ERROR_CANCELLED) {
        task_failure_of(failure, &error, NULL);
    }
    free(report);
    return code;
}

/* The path of the request's file: empty when it names none. */
static int evaluate_find_data(
    const struct jobs *jobs, const json_t *request, char path[STORE_PATH_MAX], struct task_failure *failure) {
    const char *id = json_string_value(json_object_get(request, "data"));
    char message[160];
    path[0] = '\0';
    if (id == NULL)
        return 0;
    if (jobs->task.data_name != NULL &&
        store_path(jobs->options.store, "files", jobs->task.data_name, path, STORE_PATH_MAX) == 0)
        return 0;
    snprintf(message, sizeof message, "the file '%.64s' was deleted before the evaluation ran", id);
    task_failure_set(failure, "file_not_found", "data", message);
    return ERROR_IO;
}

int job_evaluate(struct jobs *jobs, struct task_failure *failure) {
    json_t *request = json_loads(jobs->task.request, 0, NULL);
    char path[STORE_PATH_MAX];
    struct config config = {0};
    struct fault fault = {0};
    const struct trained_policies trained = policy_table_names(jobs->options.policies, false);
    int code = evaluate_find_data(jobs, request, path, failure);
    if (code == 0) {
        code = evaluation_config(request, &trained, path[0] == '\0' ? NULL : path, &config, &fault);
        if (code != 0)
            task_failure_set(failure, "invalid_value", fault.parameter, fault.message);
        else
            code = evaluate_run(jobs, &config, &trained, failure);
    }
    config_free(&config);
    json_decref(request);
    return code;
}
