/* SPDX-License-Identifier: Apache-2.0 */
#include "server/admin/admin.h"

#include "config/config.h"
#include "engine/log.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { ADMIN_CONNECTIONS = 64, METADATA_PAIRS = 16, METADATA_KEY = 64, METADATA_VALUE = 512 };

/* --- Who is let in --- */

/* Without a key: a browser on this machine would let any page in, directly or by a name that leads here. */
static int admin_admit(struct exchange *exchange, struct fault *fault) {
    const char *host = exchange_header(exchange, "Host");
    const char *reason = "a request from a web page";
    bool page = exchange_header(exchange, "Origin") != NULL || exchange_header(exchange, "Sec-Fetch-Site") != NULL;
    if (!page) {
        size_t length = host == NULL ? 0 : host[0] == '[' ? strcspn(host, "]") + 1 : strcspn(host, ":");
        char name[80];
        snprintf(name, sizeof name, "%.*s", (int)length, host == NULL ? "" : host);
        if (strcmp(name, "localhost") == 0 || strcmp(name, "[::1]") == 0 ||
            (strncmp(name, "127.", 4) == 0 && strspn(name, "0123456789.") == strlen(name)))
            return 0;
        reason = "a Host header other than localhost or a loopback address";
    }
    return fault_set(fault, 403, NULL, NULL, "the admin API has no key and refuses %s; set admin-key", reason);
}

/* --- Life --- */

static void admin_wake(void *context) {
    loop_wake(((struct admin *)context)->server->loop);
}

static const struct loop_callbacks admin_callbacks = {
    .begin = http_begin,
    .access = http_access,
    .completed = http_completed,
    .gone = http_gone,
};

static int admin_listen(struct admin *admin, struct error *error) {
    const struct config *config = admin->server->config;
    struct loop_options options = {.host = config->admin_host,
        .port = config->admin_port,
        .max_connections = ADMIN_CONNECTIONS,
        .keep_alive = config->keep_alive,
        .receive_timeout = config->receive_timeout,
        .tls = config->tls_cert[0] != '\0',
        .callbacks = &admin_callbacks,
        .context = &admin->site};
    int code = loop_listen(admin->server->loop, &options, &admin->port, error);
    if (code != 0)
        return code;
    log_event(LOG_INFO, NULL, "admin listening", "host", LOG_STRING(config->admin_host), "port", LOG_INT(admin->port),
        "key", LOG_BOOL(config->admin_key[0] != '\0'), NULL);
    if (config->admin_key[0] == '\0')
        log_event(LOG_WARNING, NULL, "the admin API has no key: every user of this machine may use it", NULL);
    return 0;
}

struct admin *admin_create(struct server *server, struct error *error) {
    struct admin *admin = calloc(1, sizeof *admin);
    if (admin == NULL) {
        error_set(error, ERROR_MEMORY, "out of memory");
        return NULL;
    }
    admin->server = server;
    admin->keys = keys_create_one("admin-key", server->config->admin_key, error);
    if (admin->keys == NULL)
        goto fail;
    admin->site = (struct site){.server = server, .routes = admin_routes, .keys = admin->keys, .admit = admin_admit};
    struct store_options options = {.directory = server->config->state_dir, .wake = admin_wake, .wake_context = admin};
    admin->store = store_open(&options, error);
    if (admin->store != NULL && (server->config->admin_port == 0 || admin_listen(admin, error) == 0))
        return admin;
fail:
    admin_free(admin);
    return NULL;
}

static int admin_load_policy(void *context, const struct policy_record *policy) {
    struct admin *admin = context;
    char path[STORE_PATH_MAX];
    struct error error;
    int code = store_path(admin->store, "policies", policy->file, path, sizeof path) == 0
                   ? policy_table_load(admin->policies, policy->name, path, policy->job, policy->created, &error)
                   : error_set(&error, ERROR_INVALID, "its path is too long");
    if (code != 0)
        log_event(LOG_WARNING, NULL, "a trained policy cannot be used", "policy", LOG_STRING(policy->name), "message",
            LOG_STRING(error.message), NULL);
    return code == ERROR_MEMORY ? code : 0;
}

static int admin_load_policies(struct database *database, void *context, struct error *error) {
    struct admin *admin = context;
    struct error local;
    char active[POLICY_NAME_MAX];
    int code = policies_list(database, admin_load_policy, admin, error);
    if (code == 0)
        code = settings_get(database, "active_policy", active, sizeof active, error);
    if (code == 0 && policy_table_activate(admin->policies, active, &local) != 0)
        log_event(LOG_WARNING, NULL, "the active policy cannot be used: requests get what they got before it", "policy",
            LOG_STRING(active), "message", LOG_STRING(local.message), NULL);
    return code;
}

int admin_open_policies(struct admin *admin, const struct policy_model *model, const struct trained_policies **trained,
    struct error *error) {
    admin->policies = policy_table_create(model);
    if (admin->policies == NULL)
        return error_set(error, ERROR_MEMORY, "no memory for policies");
    admin->trained = policy_table_names(admin->policies, true);
    *trained = &admin->trained;
    policy_table_load_shipped(admin->policies);
    return store_call(admin->store, admin_load_policies, admin, error);
}

int admin_take_own_policy(struct admin *admin, struct policy_settings *own, struct error *error) {
    policy_table_set_own(admin->policies, own);
    return policy_settings_take_trained(&admin->trained, own, error);
}

static int admin_requeue(struct database *database, void *context, struct error *error) {
    (void)context;
    return jobs_requeue(database, error);
}

int admin_load(struct admin *admin, struct error *error) {
    return store_call(admin->store, admin_requeue, NULL, error);
}

static void admin_changed(void *context, const char *id) {
    streams_changed(context, id);
}

int admin_start(struct admin *admin, struct error *error) {
    if (admin->draining)
        return 0;
    struct jobs_options options = {.store = admin->store,
        .model = &admin->server->model,
        .model_id = admin->server->model_id,
        .policies = admin->policies,
        .changed = admin_changed,
        .stopped = admin_wake,
        .context = admin};
    admin->jobs = jobs_create(&options, error);
    return admin->jobs == NULL ? error->code : 0;
}

void admin_poll(struct admin *admin) {
    store_poll(admin->store);
}

void admin_drain(struct admin *admin) {
    admin->draining = true;
    if (admin->jobs != NULL)
        jobs_drain(admin->jobs);
    streams_end_all(admin);
}

bool admin_is_drained(const struct admin *admin) {
    return admin->jobs == NULL || jobs_are_stopped(admin->jobs);
}

void admin_stop(struct admin *admin) {
    jobs_free(admin->jobs);
    admin->jobs = NULL;
    streams_end_all(admin);
    store_close(admin->store);
    admin->store = NULL;
}

void admin_free(struct admin *admin) {
    if (admin == NULL)
        return;
    admin_stop(admin);
    policy_table_free(admin->policies);
    keys_free(admin->keys);
    free(admin);
}

int admin_check_ready(const struct admin *admin, struct fault *fault) {
    return server_accepts_work(admin->server, fault);
}

/* --- Calls --- */

static void admin_call_free(struct admin_call *call) {
    if (call->finish != NULL)
        call->finish(call);
    exchange_release(call->exchange);
    json_decref(call->body);
    buffer_free(&call->reply);
    free(call->metadata);
    free(call);
}

static int admin_call_run(struct database *database, void *state, struct error *error) {
    struct admin_call *call = state;
    json_decref(call->body); /* of a first time, that could not be committed */
    call->body = NULL;
    call->reply.length = 0;
    call->fault = (struct fault){0};
    call->subject[0] = '\0';
    call->changed = false;
    int code = call->answer(call, database, error);
    return code < 0 || call->fault.status == 0 ? code : ERROR_INVALID;
}

static void admin_call_done(void *state, const struct error *error) {
    struct admin_call *call = state;
    if (error != NULL && call->fault.status == 0)
        fault_set(&call->fault, 500, NULL, NULL, "%s",
            error->message[0] == '\0' ? "the state cannot be read or written" : error->message);
    if (call->fault.status != 0) {
        exchange_fault(call->exchange, &call->fault);
    } else {
        if (call->after != NULL)
            call->after(call);
        exchange_json(call->exchange, call->status, &call->reply);
    }
    admin_call_free(call);
}

static void admin_copy_query(const struct exchange *exchange, const char *name, char *out, size_t size) {
    const char *value = exchange_query(exchange, name);
    snprintf(out, size, "%s", value == NULL ? "" : value);
}

struct metadata_filter {
    json_t *object;
    bool failed;
};

/* metadata[KEY]=VALUE */
static enum MHD_Result admin_take_metadata(void *context, enum MHD_ValueKind kind, const char *key, const char *value) {
    struct metadata_filter *filter = context;
    size_t length = strlen(key);
    (void)kind;
    if (strncmp(key, "metadata[", 9) != 0 || key[length - 1] != ']')
        return MHD_YES;
    char name[256];
    snprintf(name, sizeof name, "%.*s", (int)(length - 10), key + 9);
    json_t *text = json_string(value == NULL ? "" : value);
    filter->failed |= text == NULL || json_object_set_new(filter->object, name, text) != 0;
    return MHD_YES;
}

static int admin_copy_metadata(struct admin_call *call) {
    struct metadata_filter filter = {.object = json_object()};
    if (filter.object == NULL)
        return fault_memory(&call->fault);
    MHD_get_connection_values(
        connection_handle(call->exchange->connection), MHD_GET_ARGUMENT_KIND, admin_take_metadata, &filter);
    if (!filter.failed && json_object_size(filter.object) > 0) {
        call->metadata = json_dumps(filter.object, JSON_COMPACT);
        filter.failed = call->metadata == NULL;
    }
    json_decref(filter.object);
    return filter.failed ? fault_invalid(&call->fault, "metadata", "metadata in the query is not UTF-8") : 0;
}

static struct admin *admin_of(const struct exchange *exchange) {
    return exchange->server->admin;
}

static void admin_unlinked(uv_fs_t *request) {
    uv_fs_req_cleanup(request);
    free(request);
}

void admin_unlink(struct admin *admin, const char *folder, const char *name) {
    char path[STORE_PATH_MAX];
    uv_fs_t *request = malloc(sizeof *request);
    if (request == NULL || store_path(admin->store, folder, name, path, sizeof path) != 0 ||
        uv_fs_unlink(loop_uv(admin->server->loop), request, path, admin_unlinked) != 0)
        free(request);
}

void admin_handle(struct exchange *exchange, admin_answer answer, admin_after after) {
    admin_handle_with(exchange, answer, after, NULL);
}

void admin_handle_with(struct exchange *exchange, admin_answer answer, admin_after after, admin_after finish) {
    struct admin_call *call = calloc(1, sizeof *call);
    if (call == NULL) {
        exchange_fault_memory(exchange);
        return;
    }
    call->finish = finish;
    call->admin = admin_of(exchange);
    call->exchange = exchange;
    call->answer = answer;
    call->after = after;
    call->status = 200;
    exchange_retain(exchange);
    exchange_path_part(exchange, call->id, sizeof call->id);
    admin_copy_query(exchange, "after", call->after_id, sizeof call->after_id);
    admin_copy_query(exchange, "order", call->order, sizeof call->order);
    admin_copy_query(exchange, "purpose", call->purpose, sizeof call->purpose);
    admin_copy_query(exchange, "limit", call->limit, sizeof call->limit);
    if (admin_copy_metadata(call) != 0) {
        exchange_fault(exchange, &call->fault);
        admin_call_free(call);
    } else if (store_post(call->admin->store, admin_call_run, admin_call_done, call) != 0) {
        exchange_fault_memory(exchange);
        admin_call_free(call);
    }
}

/* --- For answers --- */

json_t *admin_body(struct admin_call *call) {
    const struct buffer *body = &call->exchange->body;
    call->body = fields_parse(body->data == NULL ? "" : body->data, body->length, &call->fault);
    return call->body;
}

int admin_not_found(struct admin_call *call, const char *what) {
    fault_set(&call->fault, 404, NULL, NULL, "there is no %s '%.100s'", what, call->id);
    return ERROR_INVALID;
}

int admin_page(struct admin_call *call, struct database *database, const char *table, int64_t limit, int64_t most,
    struct page *page, struct error *error) {
    *page = (struct page){.after = call->after_id[0] == '\0' ? NULL : call->after_id,
        .limit = limit,
        .oldest_first = strcmp(call->order, "asc") == 0,
        .metadata = call->metadata};
    if (call->limit[0] != '\0') {
        char *end;
        page->limit = strtoll(call->limit, &end, 10);
        if (*end != '\0' || end == call->limit || page->limit < 1 || page->limit > most)
            return fault_invalid(&call->fault, "limit", "limit is '%.23s'; it must be a whole number from 1 to %lld",
                call->limit, (long long)most);
    }
    if (call->order[0] != '\0' && !page->oldest_first && strcmp(call->order, "desc") != 0)
        return fault_invalid(&call->fault, "order", "order is '%.7s'; it must be asc or desc", call->order);
    if (page->after == NULL)
        return 0;
    int found = records_exist(database, table, page->after, error);
    if (found == 0)
        return fault_invalid(&call->fault, "after", "after is '%.63s', which is not in the list", page->after);
    return found < 0 ? found : 0;
}

void admin_list_begin(struct admin_list *list, struct buffer *out, const struct page *page) {
    *list = (struct admin_list){.out = out, .limit = page->limit};
    buffer_string(out, "{\"object\":\"list\",\"data\":[");
}

bool admin_list_next(struct admin_list *list, const char *id) {
    if (list->count == list->limit) {
        list->more = true;
        return false;
    }
    buffer_string(list->out, list->count == 0 ? "" : ",");
    if (list->count++ == 0)
        snprintf(list->first, sizeof list->first, "%s", id);
    snprintf(list->last, sizeof list->last, "%s", id);
    return true;
}

void admin_list_end(struct admin_list *list) {
    buffer_string(list->out, "]");
    admin_write_text(list->out, "first_id", list->count == 0 ? NULL : list->first);
    admin_write_text(list->out, "last_id", list->count == 0 ? NULL : list->last);
    buffer_format(list->out, ",\"has_more\":%s}", list->more ? "true" : "false");
}

void admin_write_seconds(struct buffer *out, const char *name, int64_t microseconds) {
    if (microseconds == 0)
        buffer_format(out, ",\"%s\":null", name);
    else
        buffer_format(out, ",\"%s\":%lld", name, (long long)(microseconds / 1000000));
}

void admin_write_text(struct buffer *out, const char *name, const char *text) {
    buffer_format(out, ",\"%s\":", name);
    buffer_json_cstring(out, text);
}

void admin_write_raw(struct buffer *out, const char *name, const char *json) {
    buffer_format(out, ",\"%s\":", name);
    buffer_string(out, json == NULL ? "null" : json);
}

static int admin_check_pair(const char *key, const json_t *value, struct fault *fault) {
    if (!json_is_string(value))
        return fault_invalid(fault, "metadata", "metadata.%.64s must be a string, not %s", key, field_type(value));
    size_t characters = utf8_count(json_string_value(value), json_string_length(value));
    if (utf8_count(key, strlen(key)) > METADATA_KEY || key[0] == '\0')
        return fault_invalid(fault, "metadata", "a key of metadata must have 1 to %d characters", METADATA_KEY);
    if (characters > METADATA_VALUE)
        return fault_invalid(
            fault, "metadata", "metadata.%.64s has %zu characters; the limit is %d", key, characters, METADATA_VALUE);
    return 0;
}

void admin_write_error(struct buffer *out, const char *code, const char *message, const char *parameter) {
    if (message == NULL) {
        buffer_string(out, ",\"error\":null");
        return;
    }
    buffer_string(out, ",\"error\":{\"code\":");
    buffer_json_cstring(out, code);
    admin_write_text(out, "message", message);
    admin_write_text(out, "param", parameter);
    buffer_string(out, "}");
}

int admin_read_metadata(const json_t *body, char **text, struct fault *fault) {
    const json_t *object = field_get(body, "metadata");
    const char *key;
    json_t *value;
    *text = NULL;
    if (object == NULL)
        return 0;
    if (!json_is_object(object))
        return fault_invalid(fault, "metadata", "metadata must be an object, not %s", field_type(object));
    if (json_object_size(object) > METADATA_PAIRS)
        return fault_invalid(
            fault, "metadata", "metadata has %zu pairs; the limit is %d", json_object_size(object), METADATA_PAIRS);
    json_object_foreach((json_t *)object, key, value) {
        if (admin_check_pair(key, value, fault) != 0)
            return -1;
    }
    *text = json_dumps(object, JSON_COMPACT);
    return *text == NULL ? fault_memory(fault) : 0;
}
