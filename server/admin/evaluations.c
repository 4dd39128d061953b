/* SPDX-License-Identifier: Apache-2.0
 *
 * Evaluations: jobs that compare eviction policies, on the same queue as training. The fields of a request are those of
 * server/evaluation.h; the answer has `rows` as `distillcache eval --json` prints them (policy/eval/report.h), in
 * `report`.
 *
 *   {"id", "object": "evaluation", "created_at", "finished_at", "model", "status", "request", "metadata",
 *    "progress": {"done", "total"}, "report", "rows", "error"}
 */
#include "server/admin/admin.h"
#include "server/evaluation.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { EVALUATIONS_LIMIT = 20, EVALUATIONS_MOST = 1000 };

/* --- Writing --- */

static void evaluations_write_rows(struct buffer *out, const char *report) {
    json_t *document = report == NULL ? NULL : json_loads(report, 0, NULL);
    char *rows = json_dumps(json_object_get(document, "rows"), JSON_COMPACT | JSON_ENCODE_ANY);
    admin_write_raw(out, "rows", rows);
    free(rows);
    json_decref(document);
}

static void evaluations_write(struct buffer *out, const struct evaluation_record *evaluation) {
    buffer_string(out, "{\"id\":");
    buffer_json_cstring(out, evaluation->id);
    buffer_string(out, ",\"object\":\"evaluation\"");
    admin_write_seconds(out, "created_at", evaluation->created);
    admin_write_seconds(out, "finished_at", evaluation->finished);
    admin_write_text(out, "model", evaluation->model);
    admin_write_text(out, "status", evaluation->status);
    admin_write_raw(out, "request", evaluation->request);
    admin_write_raw(out, "metadata", evaluation->metadata);
    buffer_format(
        out, ",\"progress\":{\"done\":%lld,\"total\":%lld}", (long long)evaluation->done, (long long)evaluation->total);
    admin_write_raw(out, "report", evaluation->report);
    evaluations_write_rows(out, evaluation->report);
    admin_write_error(out, evaluation->error_code, evaluation->error_message, evaluation->error_param);
    buffer_string(out, "}");
}

static int evaluations_write_one(void *context, const struct evaluation_record *evaluation) {
    evaluations_write(context, evaluation);
    return 1;
}

static int evaluations_answer(struct admin_call *call, struct database *database, const char *id, struct error *error) {
    int code = evaluations_find(database, id, evaluations_write_one, &call->reply, error);
    return code == 0 ? admin_not_found(call, "evaluation") : code;
}

static int evaluations_answer_one(struct admin_call *call, struct database *database, struct error *error) {
    return evaluations_answer(call, database, call->id, error);
}

static int evaluations_write_entry(void *context, const struct evaluation_record *evaluation) {
    struct admin_list *list = context;
    if (!admin_list_next(list, evaluation->id))
        return 1;
    evaluations_write(list->out, evaluation);
    return 0;
}

static int evaluations_answer_list(struct admin_call *call, struct database *database, struct error *error) {
    struct page page;
    struct admin_list list;
    int code = admin_page(call, database, "evaluations", EVALUATIONS_LIMIT, EVALUATIONS_MOST, &page, error);
    if (code != 0)
        return code;
    admin_list_begin(&list, &call->reply, &page);
    page.limit++;
    code = evaluations_list(database, &page, evaluations_write_entry, &list, error);
    admin_list_end(&list);
    return code;
}

/* --- Creating --- */

static int evaluations_check_data(
    struct admin_call *call, struct database *database, const json_t *body, struct error *error) {
    const char *id = NULL;
    if (field_string(body, "data", &id, &call->fault) != 0)
        return -1;
    int found = id == NULL ? 1 : records_exist(database, "files", id, error);
    if (found == 0)
        return fault_invalid(
            &call->fault, "data", "data is '%.64s'; there is no file of that id (POST /admin/v1/files)", id);
    return found < 0 ? found : 0;
}

static int evaluations_check(
    struct admin_call *call, struct database *database, const json_t *body, struct error *error) {
    static const char *const known[] = {"task", "policies", "ratios", "tokens", "lengths", "data", "limit", "seed",
        "query_aware", "continuation", "metadata", "model", NULL};
    static const struct field_unsupported unsupported[] = {{"shots", REFUSE_PRESENT}, {NULL, REFUSE_PRESENT}};
    const struct trained_policies trained = policy_table_names(call->admin->policies, false);
    struct config config = {0};
    int code = fields_check(body, known, unsupported, call->exchange->id, &call->fault);
    if (code == 0)
        code = evaluations_check_data(call, database, body, error);
    if (code == 0)
        code = evaluation_config(body, &trained, NULL, &config, &call->fault);
    config_free(&config);
    return code;
}

static int evaluations_insert_body(
    struct admin_call *call, struct database *database, json_t *body, const char *metadata, struct error *error) {
    char id[64];
    json_object_del(body, "metadata");
    char *request = json_dumps(body, JSON_COMPACT);
    if (request == NULL)
        return fault_memory(&call->fault);
    http_make_id(id, sizeof id, "eval-");
    struct evaluation_record record = {.id = id,
        .model = call->admin->server->model_id,
        .request = request,
        .metadata = metadata,
        .created = store_now()};
    int code = evaluations_insert(database, &record, error);
    free(request);
    return code == 0 ? evaluations_answer(call, database, id, error) : code;
}

static int evaluations_answer_create(struct admin_call *call, struct database *database, struct error *error) {
    json_t *body = admin_body(call);
    char *metadata = NULL;
    if (body == NULL || admin_read_metadata(body, &metadata, &call->fault) != 0)
        return -1;
    int code = evaluations_check(call, database, body, error);
    if (code == 0)
        code = evaluations_insert_body(call, database, body, metadata, error);
    free(metadata);
    return code;
}

static void evaluations_queued(struct admin_call *call) {
    if (call->admin->jobs != NULL)
        jobs_poke(call->admin->jobs);
}

/* --- Cancelling --- */

static int evaluations_answer_cancel(struct admin_call *call, struct database *database, struct error *error) {
    int found = records_exist(database, "evaluations", call->id, error);
    if (found <= 0)
        return found < 0 ? found : admin_not_found(call, "evaluation");
    int moved = evaluations_move(database, call->id, "queued,running", "cancelled", store_now(), error);
    if (moved < 0)
        return moved;
    call->changed = moved > 0;
    return evaluations_answer(call, database, call->id, error);
}

static void evaluations_cancelled(struct admin_call *call) {
    if (call->changed && call->admin->jobs != NULL)
        jobs_interrupt(call->admin->jobs, call->id);
}

/* --- Routes --- */

void evaluations_create(struct exchange *exchange) {
    struct fault fault;
    if (admin_check_ready(exchange->server->admin, &fault) != 0)
        exchange_fault(exchange, &fault);
    else
        admin_handle(exchange, evaluations_answer_create, evaluations_queued);
}

void evaluations_list_all(struct exchange *exchange) {
    admin_handle(exchange, evaluations_answer_list, NULL);
}

void evaluations_retrieve(struct exchange *exchange) {
    admin_handle(exchange, evaluations_answer_one, NULL);
}

void evaluations_cancel(struct exchange *exchange) {
    admin_handle(exchange, evaluations_answer_cancel, evaluations_cancelled);
}
