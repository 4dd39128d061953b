/* SPDX-License-Identifier: Apache-2.0
 *
 * Training jobs in the shapes of OpenAI's fine-tuning jobs: everything but their creation (training_create.c) and their
 * streams of events (streams.c).
 */
#include "server/admin/training.h"
#include "store/sweep.h"

#include <ctype.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { JOBS_LIMIT = 20, JOBS_MOST = 1000, EVENTS_MOST = 10000 };

/* --- Writing --- */

static bool training_is_number(const char *text, size_t length) {
    char copy[64], *end;
    if (length == 0 || length >= sizeof copy || !(isdigit((unsigned char)text[0]) || text[0] == '-'))
        return false;
    memcpy(copy, text, length);
    copy[length] = '\0';
    strtod(copy, &end);
    return *end == '\0' && strspn(copy, "0123456789.eE+-") == length;
}

/* An option's text as JSON: a number, a list of numbers, or a word. */
static void training_write_value(struct buffer *out, const char *text) {
    bool list = strchr(text, ',') != NULL;
    for (const char *item = text; list && *item != '\0'; item += strcspn(item, ","), item += *item == ',')
        list = training_is_number(item, strcspn(item, ","));
    if (list || training_is_number(text, strlen(text))) {
        buffer_string(out, list ? "[" : "");
        buffer_string(out, text);
        buffer_string(out, list ? "]" : "");
    } else {
        buffer_json_cstring(out, text);
    }
}

/* An object of texts as the store has it; all: also those that have null there. */
static void training_write_options(struct buffer *out, const char *object) {
    json_t *options = json_loads(object == NULL ? "{}" : object, 0, NULL);
    const char *name;
    json_t *value;
    size_t count = 0;
    buffer_string(out, "{");
    json_object_foreach(options, name, value) {
        buffer_string(out, count++ == 0 ? "" : ",");
        buffer_json_cstring(out, name);
        buffer_string(out, ":");
        training_write_value(out, json_string_value(value) == NULL ? "" : json_string_value(value));
    }
    buffer_string(out, "}");
    json_decref(options);
}

void training_write(struct buffer *out, const struct job_record *job) {
    bool succeeded = strcmp(job->status, "succeeded") == 0;
    buffer_string(out, "{\"id\":");
    buffer_json_cstring(out, job->id);
    buffer_string(out, ",\"object\":\"fine_tuning.job\"");
    admin_write_seconds(out, "created_at", job->created);
    admin_write_seconds(out, "finished_at", job->finished);
    admin_write_seconds(out, "estimated_finish", job->estimated_finish);
    admin_write_text(out, "model", job->model);
    admin_write_text(out, "fine_tuned_model", succeeded ? job->policy : NULL);
    buffer_string(out, ",\"organization_id\":\"distillcache\",\"result_files\":[],\"integrations\":[]");
    admin_write_text(out, "status", job->status);
    admin_write_text(out, "training_file", job->training_file);
    admin_write_text(out, "validation_file", job->validation_file);
    buffer_string(out, ",\"hyperparameters\":");
    training_write_options(out, job->hyperparameters);
    buffer_string(out, ",\"method\":{\"type\":\"reinforcement\",\"reinforcement\":{\"hyperparameters\":");
    training_write_options(out, job->chosen);
    buffer_string(out, "}}");
    buffer_format(out, ",\"seed\":%lld,\"step\":%lld,\"steps\":%lld,\"trained_tokens\":", (long long)job->seed,
        (long long)job->step, (long long)job->steps);
    if (job->trained_tokens > 0)
        buffer_format(out, "%lld", (long long)job->trained_tokens);
    else
        buffer_string(out, "null");
    admin_write_text(out, "user_provided_suffix", job->suffix);
    admin_write_raw(out, "metadata", job->metadata);
    admin_write_error(out, job->error_code, job->error_message, job->error_param);
    buffer_string(out, "}");
}

void training_write_event(struct buffer *out, const struct event_record *event) {
    buffer_string(out, "{\"id\":");
    buffer_json_cstring(out, event->id);
    buffer_string(out, ",\"object\":\"fine_tuning.job.event\"");
    admin_write_seconds(out, "created_at", event->created);
    admin_write_text(out, "level", event->level);
    admin_write_text(out, "message", event->message);
    admin_write_text(out, "type", event->type);
    admin_write_raw(out, "data", event->data);
    buffer_string(out, "}");
}

static int training_write_one(void *context, const struct job_record *job) {
    training_write(context, job);
    return 1;
}

int training_answer_job(struct admin_call *call, struct database *database, const char *id, struct error *error) {
    int code = jobs_find(database, id, training_write_one, &call->reply, error);
    return code == 0 ? admin_not_found(call, "job") : code;
}

/* --- Reading --- */

static int training_answer_one(struct admin_call *call, struct database *database, struct error *error) {
    return training_answer_job(call, database, call->id, error);
}

void training_retrieve(struct exchange *exchange) {
    admin_handle(exchange, training_answer_one, NULL);
}

static int training_write_entry(void *context, const struct job_record *job) {
    struct admin_list *list = context;
    if (!admin_list_next(list, job->id))
        return 1;
    training_write(list->out, job);
    return 0;
}

static int training_answer_list(struct admin_call *call, struct database *database, struct error *error) {
    struct page page;
    struct admin_list list;
    int code = admin_page(call, database, "jobs", JOBS_LIMIT, JOBS_MOST, &page, error);
    if (code != 0)
        return code;
    admin_list_begin(&list, &call->reply, &page);
    page.limit++;
    code = jobs_list(database, &page, training_write_entry, &list, error);
    admin_list_end(&list);
    return code;
}

void training_list(struct exchange *exchange) {
    admin_handle(exchange, training_answer_list, NULL);
}

static int training_write_event_entry(void *context, const struct event_record *event) {
    struct admin_list *list = context;
    if (!admin_list_next(list, event->id))
        return 1;
    training_write_event(list->out, event);
    return 0;
}

static int training_check_exists(struct admin_call *call, struct database *database, struct error *error) {
    int found = records_exist(database, "jobs", call->id, error);
    return found == 0 ? admin_not_found(call, "job") : found < 0 ? found : 0;
}

static int training_answer_events(struct admin_call *call, struct database *database, struct error *error) {
    struct page page;
    struct admin_list list;
    int code = training_check_exists(call, database, error);
    if (code == 0)
        code = admin_page(call, database, "events", JOBS_LIMIT, EVENTS_MOST, &page, error);
    if (code != 0)
        return code;
    admin_list_begin(&list, &call->reply, &page);
    page.limit++;
    code = events_list(database, call->id, &page, training_write_event_entry, &list, error);
    admin_list_end(&list);
    return code;
}

void training_events(struct exchange *exchange) {
    const char *stream = exchange_query(exchange, "stream");
    const char *accept = exchange_header(exchange, "Accept");
    bool wanted = accept != NULL && strstr(accept, "text/event-stream") != NULL;
    if (stream != NULL)
        wanted = strcmp(stream, "true") == 0 || strcmp(stream, "1") == 0;
    if (wanted && strcmp(exchange->method, "GET") == 0)
        streams_open(exchange);
    else
        admin_handle(exchange, training_answer_events, NULL);
}

static int training_write_checkpoint(void *context, const struct checkpoint_record *checkpoint) {
    struct admin_list *list = context;
    struct buffer *out = list->out;
    if (!admin_list_next(list, checkpoint->id))
        return 1;
    buffer_string(out, "{\"id\":");
    buffer_json_cstring(out, checkpoint->id);
    buffer_string(out, ",\"object\":\"fine_tuning.job.checkpoint\"");
    admin_write_seconds(out, "created_at", checkpoint->created);
    admin_write_text(out, "fine_tuning_job_id", checkpoint->job);
    admin_write_text(out, "fine_tuned_model_checkpoint", checkpoint->file);
    buffer_format(out, ",\"step_number\":%lld", (long long)checkpoint->step);
    admin_write_raw(out, "metrics", checkpoint->metrics);
    buffer_string(out, "}");
    return 0;
}

static int training_answer_checkpoints(struct admin_call *call, struct database *database, struct error *error) {
    struct page page;
    struct admin_list list;
    int code = training_check_exists(call, database, error);
    if (code == 0)
        code = admin_page(call, database, "checkpoints", 10, JOBS_MOST, &page, error);
    if (code != 0)
        return code;
    admin_list_begin(&list, &call->reply, &page);
    page.limit++;
    code = checkpoints_list(database, call->id, &page, training_write_checkpoint, &list, error);
    admin_list_end(&list);
    return code;
}

void training_checkpoints(struct exchange *exchange) {
    admin_handle(exchange, training_answer_checkpoints, NULL);
}

/* --- Changing --- */

static int training_take_status(void *context, const struct job_record *job) {
    snprintf(context, 16, "%s", job->status);
    return 1;
}

/* A job in one of the statuses of `from` gets another; one that has it already is left alone. */
struct change {
    const char *from, *to, *message, *verb;
    bool ends;
};

static int training_change(
    struct admin_call *call, struct database *database, const struct change *change, struct error *error) {
    char status[16];
    int found = jobs_find(database, call->id, training_take_status, status, error);
    if (found <= 0)
        return found < 0 ? found : admin_not_found(call, "job");
    if (strcmp(status, change->to) == 0)
        return training_answer_job(call, database, call->id, error);
    int64_t finished = change->ends ? store_now() : 0;
    int moved = jobs_move(database, call->id, change->from, change->to, finished, error);
    if (moved < 0)
        return moved;
    if (moved == 0)
        return fault_set(&call->fault, 400, NULL, NULL, "the job '%.64s' is %s; only one that is %s can be %s",
            call->id, status, change->from, change->verb);
    int code = job_event_insert(database, call->id, "info", "message", change->message, NULL, error);
    call->changed = true;
    return code < 0 ? code : training_answer_job(call, database, call->id, error);
}

static int training_answer_cancel(struct admin_call *call, struct database *database, struct error *error) {
    static const struct change change = {
        "queued,running,paused", "cancelled", "the job was cancelled", "cancelled", true};
    return training_change(call, database, &change, error);
}

static int training_answer_pause(struct admin_call *call, struct database *database, struct error *error) {
    static const struct change change = {"queued,running", "paused", "the job was paused", "paused", false};
    return training_change(call, database, &change, error);
}

static int training_answer_resume(struct admin_call *call, struct database *database, struct error *error) {
    static const struct change change = {"paused", "queued", "the job was resumed", "resumed", false};
    return training_change(call, database, &change, error);
}

static void training_interrupt(struct admin_call *call) {
    if (call->changed && call->admin->jobs != NULL)
        jobs_interrupt(call->admin->jobs, call->id);
    streams_changed(call->admin, call->id);
}

/* The runner does it for the job that it has at hand, when that has written its last. */
static void training_discard(struct admin_call *call) {
    struct jobs_state state = {.id = ""};
    if (call->changed && call->admin->jobs != NULL)
        jobs_get_state(call->admin->jobs, &state);
    if (call->changed && strcmp(state.id, call->id) != 0)
        store_discard_job(call->admin->store, call->id);
    training_interrupt(call);
}

static void training_queued(struct admin_call *call) {
    if (call->admin->jobs != NULL)
        jobs_poke(call->admin->jobs);
    streams_changed(call->admin, call->id);
}

void training_cancel(struct exchange *exchange) {
    admin_handle(exchange, training_answer_cancel, training_discard);
}

void training_pause(struct exchange *exchange) {
    admin_handle(exchange, training_answer_pause, training_interrupt);
}

void training_resume(struct exchange *exchange) {
    admin_handle(exchange, training_answer_resume, training_queued);
}
