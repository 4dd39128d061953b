/* SPDX-License-Identifier: Apache-2.0 */
#include "server/http.h"

#include "engine/log.h"
#include "server/metrics.h"
#include "server/server.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { STREAM_BLOCK = 16384 };

/* --- Identity and life --- */

void http_make_id(char *out, size_t size, const char *prefix) {
    unsigned char random[12];
    char hex[2 * sizeof random + 1];
    if (uv_random(NULL, NULL, random, sizeof random, 0, NULL) != 0)
        for (size_t i = 0; i < sizeof random; i++)
            random[i] = (unsigned char)rand();
    for (size_t i = 0; i < sizeof random; i++)
        snprintf(hex + 2 * i, 3, "%02x", random[i]);
    snprintf(out, size, "%s%s", prefix, hex);
}

static bool http_id_is_sane(const char *id) {
    size_t length = strlen(id);
    if (length == 0 || length >= sizeof((struct exchange *)0)->id)
        return false;
    return strspn(id, "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789-_.:") == length;
}

const char *exchange_header(const struct exchange *exchange, const char *name) {
    return MHD_lookup_connection_value(connection_handle(exchange->connection), MHD_HEADER_KIND, name);
}

const char *exchange_query(const struct exchange *exchange, const char *name) {
    return MHD_lookup_connection_value(connection_handle(exchange->connection), MHD_GET_ARGUMENT_KIND, name);
}

/* The path of a request target, which may also be absolute (RFC 9112, section 3.2.2): http://host/path. */
static const char *http_target_path(const char *target) {
    size_t scheme = strncasecmp(target, "http://", 7) == 0 ? 7 : strncasecmp(target, "https://", 8) == 0 ? 8 : 0;
    if (scheme == 0)
        return target;
    target += scheme;
    target += strcspn(target, "/");
    return *target == '\0' ? "/" : target;
}

void *http_begin(void *context, struct connection *connection, const char *uri) {
    const struct site *site = context;
    struct server *server = site->server;
    struct exchange *exchange = calloc(1, sizeof *exchange);
    if (exchange == NULL)
        return NULL;
    uri = http_target_path(uri);
    exchange->path = strndup(uri, strcspn(uri, "?"));
    if (exchange->path == NULL) {
        free(exchange);
        return NULL;
    }
    exchange->server = server;
    exchange->site = site;
    exchange->connection = connection;
    exchange->references = 1;
    exchange->key = -1;
    exchange->began_ns = uv_hrtime();
    http_make_id(exchange->id, sizeof exchange->id, "req-");
    exchange->id_is_ours = true;
    exchange->next = server->exchanges;
    if (exchange->next != NULL)
        exchange->next->previous = exchange;
    server->exchanges = exchange;
    return exchange;
}

void exchange_retain(struct exchange *exchange) {
    exchange->references++;
}

void exchange_release(struct exchange *exchange) {
    if (--exchange->references > 0)
        return;
    struct server *server = exchange->server;
    if (exchange->previous != NULL)
        exchange->previous->next = exchange->next;
    else
        server->exchanges = exchange->next;
    if (exchange->next != NULL)
        exchange->next->previous = exchange->previous;
    if (exchange->response != NULL)
        MHD_destroy_response(exchange->response);
    buffer_free(&exchange->body);
    buffer_free(&exchange->pending);
    free(exchange->path);
    free(exchange);
    server_check_drained(server);
}

static const char *exchange_outcome(enum MHD_RequestTerminationCode reason) {
    switch (reason) {
    case MHD_REQUEST_TERMINATED_COMPLETED_OK:
        return "complete";
    case MHD_REQUEST_TERMINATED_TIMEOUT_REACHED:
        return "timeout";
    case MHD_REQUEST_TERMINATED_DAEMON_SHUTDOWN:
        return "shutdown";
    default:
        return "client left";
    }
}

static void exchange_log(const struct exchange *exchange, unsigned status, const char *outcome) {
    double seconds = (double)(uv_hrtime() - exchange->began_ns) * 1e-9;
    log_event(LOG_INFO, exchange->id, "request", "method", LOG_STRING(exchange->method), "path",
        LOG_STRING(exchange->path), "status", LOG_INT(status), "seconds", LOG_FLOAT(seconds), "received",
        LOG_INT(exchange->body_bytes), "sent", LOG_INT(exchange->sent_bytes), "outcome", LOG_STRING(outcome),
        "completion", LOG_STRING(exchange->completion_id[0] == '\0' ? NULL : exchange->completion_id), NULL);
}

static void exchange_call_abandon(struct exchange *exchange) {
    exchange->abandoned = true;
    buffer_free(&exchange->pending); /* nobody reads it */
    exchange->pending_read = 0;
    void (*abandon)(void *) = exchange->abandon;
    exchange->abandon = NULL;
    if (abandon != NULL)
        abandon(exchange->state);
}

void http_completed(void *context, unsigned status, enum MHD_RequestTerminationCode reason) {
    struct exchange *exchange = context;
    exchange_log(exchange, status, exchange->abandoned ? "client left" : exchange_outcome(reason));
    metrics_count_response(exchange->server->metrics, status);
    exchange->connection = NULL;
    if (exchange->counted)
        exchange->server->exchanges_active--;
    exchange_call_abandon(exchange);
    exchange_release(exchange);
}

/* --- Receiving --- */

/* The body's announced size; 0 when chunked or none. */
static uint64_t exchange_announced(const struct exchange *exchange) {
    const char *length = exchange_header(exchange, "Content-Length");
    return length == NULL ? 0 : strtoull(length, NULL, 10);
}

/* The size that is refused is the announced one, or what has come of a chunked body. */
static int exchange_refuse_size(struct exchange *exchange) {
    uint64_t announced = exchange_announced(exchange);
    return fault_set(&exchange->refusal, 413, NULL, NULL, "the body has %s%llu bytes; the limit is %zu",
        announced > 0 ? "" : "at least ", (unsigned long long)(announced > 0 ? announced : exchange->body_bytes),
        exchange->server->config->max_body);
}

/* -1: the refusal is to be sent before the body is read. */
static int exchange_drains(const struct exchange *exchange) {
    return exchange_header(exchange, "Expect") != NULL || exchange_announced(exchange) > HTTP_BODY_DRAIN_MAX ? -1 : 0;
}

static const struct route *routes_find(const struct route *routes, const char *path, const char *method);

static bool exchange_is_open(const struct exchange *exchange) {
    for (const char *const *path = exchange->site->open; path != NULL && *path != NULL; path++)
        if (strcmp(*path, exchange->path) == 0)
            return true;
    return false;
}

/* Who asks. -1: the refusal is set. */
static int exchange_admit(struct exchange *exchange) {
    const struct site *site = exchange->site;
    struct fault *refusal = &exchange->refusal;
    if (strcmp(exchange->method, "OPTIONS") == 0 || exchange_is_open(exchange))
        return 0;
    if (keys_count(site->keys) == 0)
        return site->admit == NULL ? 0 : site->admit(exchange, refusal);
    exchange->key = keys_check(
        site->keys, exchange_header(exchange, "Authorization"), exchange_header(exchange, "X-Api-Key"), refusal);
    return exchange->key >= 0 ? 0 : -1;
}

/* Looks at the headers. -1: the refusal is to be sent before the body is read. */
static int exchange_check_headers(struct exchange *exchange) {
    const struct site *site = exchange->site;
    const union MHD_ConnectionInfo *info =
        MHD_get_connection_info(connection_handle(exchange->connection), MHD_CONNECTION_INFO_REQUEST_HEADER_SIZE);
    if (info != NULL && info->header_size > HTTP_HEADERS_MAX)
        return fault_set(&exchange->refusal, 431, NULL, NULL, "the headers have %zu bytes; the limit is %d",
            info->header_size, HTTP_HEADERS_MAX);
    const char *encoding = exchange_header(exchange, "Transfer-Encoding");
    if (encoding != NULL && strcasecmp(encoding, "chunked") != 0)
        return fault_invalid(
            &exchange->refusal, NULL, "transfer encoding %.40s is not supported; only chunked is", encoding);
    /* Two lengths in one request: proxies and servers may disagree where it ends (RFC 9112, section 6.1). */
    if (encoding != NULL && exchange_header(exchange, "Content-Length") != NULL)
        return fault_invalid(&exchange->refusal, NULL, "both Transfer-Encoding and Content-Length are given");
    if (exchange_admit(exchange) != 0)
        return exchange_drains(exchange);
    uint64_t announced = exchange_announced(exchange);
    exchange->route = routes_find(site->routes, exchange->path, exchange->method);
    exchange->reader = exchange->route == NULL ? NULL : exchange->route->reader;
    if (exchange->reader != NULL)
        return exchange->reader->begin(exchange, announced, &exchange->refusal) == 0 ? 0 : exchange_drains(exchange);
    if (announced <= exchange->server->config->max_body)
        return 0;
    exchange_refuse_size(exchange);
    return exchange_drains(exchange);
}

static void exchange_begin_headers(struct exchange *exchange, const char *url, const char *method) {
    exchange->headers_seen = true;
    snprintf(exchange->method, sizeof exchange->method, "%s", method);
    char *path = strdup(http_target_path(url)); /* now without %xx */
    if (path != NULL) {
        free(exchange->path);
        exchange->path = path;
    }
    const char *id = exchange_header(exchange, "x-request-id");
    if (id != NULL && http_id_is_sane(id)) {
        snprintf(exchange->id, sizeof exchange->id, "%s", id);
        exchange->id_is_ours = false;
    }
}

static void exchange_receive(struct exchange *exchange, const char *data, size_t bytes) {
    exchange->body_bytes += bytes;
    if (exchange->reader != NULL) {
        if (exchange->refusal.status == 0 && !exchange->abandoned)
            exchange->reader->piece(exchange, data, bytes, &exchange->refusal);
        return;
    }
    if (exchange->refusal.status == 0 && exchange->body_bytes > exchange->server->config->max_body)
        exchange_refuse_size(exchange);
    if (exchange->refusal.status == 0) {
        buffer_append(&exchange->body, data, bytes);
        if (exchange->body.failed)
            fault_memory(&exchange->refusal);
    }
    if (exchange->refusal.status != 0)
        buffer_free(&exchange->body);
}

/* --- Routing --- */

/* part: where what stands for "{}" begins; NULL if nothing does. */
static bool route_matches(const struct route *route, const char *path, const char **part) {
    const char *pattern = route->path;
    *part = NULL;
    while (*pattern != '\0') {
        if (pattern[0] == '*' && pattern[1] == '\0')
            return *path != '\0';
        if (pattern[0] == '{' && pattern[1] == '}') {
            size_t length = strcspn(path, "/");
            *part = path;
            if (length == 0)
                return false;
            path += length;
            pattern += 2;
        } else if (*pattern++ != *path++) {
            return false;
        }
    }
    return *path == '\0';
}

const char *exchange_path_rest(const struct exchange *exchange) {
    return exchange->path + strlen(exchange->route->path) - 1;
}

void exchange_path_part(const struct exchange *exchange, char *out, size_t size) {
    const char *part;
    route_matches(exchange->route, exchange->path, &part);
    snprintf(out, size, "%.*s", part == NULL ? 0 : (int)strcspn(part, "/"), part == NULL ? "" : part);
}

static bool route_serves(const struct route *route, const char *method) {
    if (strcmp(method, "HEAD") == 0)
        method = "GET";
    return strcmp(route->method, method) == 0;
}

/* "GET, HEAD, OPTIONS" or the like: the methods of a path. Empty: no such path. */
static void routes_allow(const struct route *routes, const char *path, char *out, size_t size) {
    const char *part;
    out[0] = '\0';
    size_t length = 0;
    for (const struct route *route = routes; route->method != NULL; route++) {
        if (!route_matches(route, path, &part))
            continue;
        const char *name = strcmp(route->method, "GET") == 0 ? "GET, HEAD" : route->method;
        length += (size_t)snprintf(out + length, size - length, "%s, ", name);
    }
    if (length > 0)
        snprintf(out + length, size - length, "OPTIONS");
}

static const struct route *routes_find(const struct route *routes, const char *path, const char *method) {
    const char *part;
    for (const struct route *route = routes; route->method != NULL; route++)
        if (route_matches(route, path, &part) && route_serves(route, method))
            return route;
    return NULL;
}

static void exchange_answer(struct exchange *exchange, unsigned status, struct MHD_Response *response);

/* What Access-Control-Allow-Origin says of the page that asks: its origin, "*", or NULL when it may not read. */
static const char *exchange_origin(const struct exchange *exchange) {
    const struct string_list *origins = exchange->site->origins;
    const char *origin = exchange_header(exchange, "Origin");
    for (size_t i = 0; origins != NULL && i < origins->count; i++) {
        for (const char *item = origins->items[i];; item++) {
            size_t length = strcspn(item, ",");
            if (length == 1 && item[0] == '*')
                return "*";
            if (origin != NULL && strlen(origin) == length && strncasecmp(item, origin, length) == 0)
                return origin;
            item += length;
            if (*item == '\0')
                break;
        }
    }
    return NULL;
}

static void exchange_add_origin(const struct exchange *exchange, struct MHD_Response *response) {
    const struct string_list *origins = exchange->site->origins;
    const char *allowed = exchange_origin(exchange);
    if (allowed != NULL) {
        MHD_add_response_header(response, "Access-Control-Allow-Origin", allowed);
        MHD_add_response_header(response, "Access-Control-Expose-Headers",
            "x-request-id, x-prefix-hash, retry-after, retry-after-ms, x-should-retry");
    }
    /* A cache must not give one page what was answered to another. */
    if (origins != NULL && origins->count > 0 && (allowed == NULL || strcmp(allowed, "*") != 0))
        MHD_add_response_header(response, "Vary", "Origin");
}

/* The answer to OPTIONS, also to a browser's preflight. */
static void exchange_options(struct exchange *exchange, const char *allow) {
    struct MHD_Response *response = MHD_create_response_from_buffer(0, NULL, MHD_RESPMEM_PERSISTENT);
    if (response != NULL) {
        MHD_add_response_header(response, "Allow", allow);
    }
    if (response != NULL && exchange_origin(exchange) != NULL) {
        MHD_add_response_header(response, "Access-Control-Allow-Methods", allow);
        MHD_add_response_header(
            response, "Access-Control-Allow-Headers", "Authorization, Content-Type, X-Api-Key, X-Request-Id, *");
        MHD_add_response_header(response, "Access-Control-Max-Age", "86400");
    }
    exchange_answer(exchange, 204, response);
}

/* The response that tells a fault; NULL when memory ran out. */
static struct MHD_Response *exchange_fault_response(struct exchange *exchange, const struct fault *fault) {
    struct buffer body = {0};
    fault_write(fault, &body);
    struct MHD_Response *response =
        body.failed ? NULL : MHD_create_response_from_buffer(body.length, body.data, MHD_RESPMEM_MUST_COPY);
    exchange->sent_bytes = body.length;
    buffer_free(&body);
    if (response != NULL)
        MHD_add_response_header(response, "Content-Type", "application/json");
    return response;
}

static void exchange_not_allowed(struct exchange *exchange, const char *allow) {
    struct fault fault;
    fault_set(&fault, 405, NULL, NULL, "method %s is not allowed on %.200s; allowed: %s", exchange->method,
        exchange->path, allow);
    struct MHD_Response *response = exchange_fault_response(exchange, &fault);
    if (response != NULL)
        MHD_add_response_header(response, "Allow", allow);
    exchange_answer(exchange, 405, response);
}

/* The whole request is there. */
static void exchange_dispatch(struct exchange *exchange) {
    struct server *server = exchange->server;
    struct fault fault = exchange->refusal;
    char allow[64];
    exchange->handled = true;
    exchange->counted = true;
    server->exchanges_active++;
    connection_received(exchange->connection);
    if (fault.status != 0) {
        exchange_fault(exchange, &fault);
        return;
    }
    routes_allow(exchange->site->routes, exchange->path, allow, sizeof allow);
    if (allow[0] == '\0') {
        fault_set(&fault, 404, NULL, NULL, "there is no %s %.200s", exchange->method, exchange->path);
        exchange_fault(exchange, &fault);
    } else if (strcmp(exchange->method, "OPTIONS") == 0) {
        exchange_options(exchange, allow);
    } else if (exchange->route == NULL) {
        exchange_not_allowed(exchange, allow);
    } else if (exchange->route->work &&
               (server_accepts_work(server, &fault) != 0 ||
                   keys_take(exchange->site->keys, exchange->key, (double)uv_hrtime() * 1e-9, &fault) != 0)) {
        exchange_fault(exchange, &fault);
    } else {
        exchange->route->handle(exchange);
    }
}

/* Queues the answer, or suspends until there is one. */
static enum MHD_Result exchange_queue(struct exchange *exchange) {
    if (exchange->abandoned)
        return MHD_NO;
    if (exchange->response == NULL) {
        connection_suspend(exchange->connection);
        return MHD_YES;
    }
    struct MHD_Response *response = exchange->response;
    exchange->response = NULL;
    exchange->delivered = !exchange->streams;
    enum MHD_Result result = MHD_queue_response(connection_handle(exchange->connection), exchange->status, response);
    MHD_destroy_response(response);
    return result;
}

enum MHD_Result http_access(
    void *context, const char *url, const char *method, const char *version, const char *data, size_t *bytes) {
    struct exchange *exchange = context;
    (void)version;
    if (!exchange->headers_seen) {
        exchange_begin_headers(exchange, url, method);
        if (exchange_check_headers(exchange) == 0)
            return MHD_YES;
        exchange_dispatch(exchange);
        return exchange_queue(exchange);
    }
    if (*bytes > 0) {
        exchange_receive(exchange, data, *bytes);
        *bytes = 0;
        return MHD_YES;
    }
    if (!exchange->handled)
        exchange_dispatch(exchange);
    return exchange_queue(exchange);
}

/* --- Answering --- */

/* Takes the response over. NULL: memory ran out, the connection is closed. */
static void exchange_answer(struct exchange *exchange, unsigned status, struct MHD_Response *response) {
    exchange->status = status;
    if (exchange->connection == NULL) {
        if (response != NULL)
            MHD_destroy_response(response);
        return;
    }
    if (response == NULL) {
        exchange_abandon(exchange);
        return;
    }
    MHD_add_response_header(response, "x-request-id", exchange->id);
    exchange_add_origin(exchange, response);
    if (exchange->prefix[0] != '\0')
        MHD_add_response_header(response, "X-Prefix-Hash", exchange->prefix);
    if (exchange->server->draining)
        MHD_add_response_header(response, "Connection", "close");
    exchange->response = response;
    if (connection_is_suspended(exchange->connection))
        connection_resume(exchange->connection);
}

void exchange_text(struct exchange *exchange, unsigned status, const char *type, struct buffer *body) {
    struct MHD_Response *response = NULL;
    if (!body->failed) {
        response = MHD_create_response_from_buffer(body->length, body->data, MHD_RESPMEM_MUST_FREE);
        exchange->sent_bytes = body->length;
    }
    if (response != NULL) {
        *body = (struct buffer){0};
        MHD_add_response_header(response, "Content-Type", type);
    }
    buffer_free(body);
    exchange_answer(exchange, status, response);
}

void exchange_json(struct exchange *exchange, unsigned status, struct buffer *body) {
    exchange_text(exchange, status, "application/json", body);
}

static void exchange_add_fault_headers(struct MHD_Response *response, const struct fault *fault) {
    char number[16];
    if (fault->status == 401)
        MHD_add_response_header(response, "WWW-Authenticate", "Bearer realm=\"distillcache\"");
    if (fault->no_retry)
        MHD_add_response_header(response, "x-should-retry", "false");
    if (fault->retry_after_ms == 0)
        return;
    snprintf(number, sizeof number, "%u", (fault->retry_after_ms + 999) / 1000);
    MHD_add_response_header(response, "Retry-After", number);
    snprintf(number, sizeof number, "%u", fault->retry_after_ms);
    MHD_add_response_header(response, "retry-after-ms", number);
}

void exchange_fault(struct exchange *exchange, const struct fault *fault) {
    struct MHD_Response *response = exchange_fault_response(exchange, fault);
    if (response != NULL)
        exchange_add_fault_headers(response, fault);
    if (fault->status >= 500)
        log_event(LOG_WARNING, exchange->id, "request not served", "status", LOG_INT(fault->status), "message",
            LOG_STRING(fault->message), NULL);
    exchange_answer(exchange, fault->status, response);
}

void exchange_fault_memory(struct exchange *exchange) {
    struct fault fault;
    fault_memory(&fault);
    exchange_fault(exchange, &fault);
}

/* Copies what was not sent yet. Sent bytes are dropped only when they are the larger part, so that a slow reader's long
 * backlog is not moved for each piece of it. */
static size_t exchange_take_pending(struct exchange *exchange, char *out, size_t room) {
    struct buffer *pending = &exchange->pending;
    size_t bytes = pending->length - exchange->pending_read;
    if (bytes > room)
        bytes = room;
    if (bytes == 0)
        return 0;
    memcpy(out, pending->data + exchange->pending_read, bytes);
    exchange->pending_read += bytes;
    exchange->sent_bytes += bytes;
    if (exchange->pending_read > pending->length / 2) {
        buffer_consume(pending, exchange->pending_read);
        exchange->pending_read = 0;
    }
    return bytes;
}

/* libmicrohttpd asks for more of a stream. */
static ssize_t exchange_read(void *context, uint64_t position, char *out, size_t room) {
    struct exchange *exchange = context;
    (void)position;
    if (exchange->abandoned || exchange->pending.failed)
        return MHD_CONTENT_READER_END_WITH_ERROR;
    size_t bytes = exchange_take_pending(exchange, out, room);
    if (bytes > 0)
        return (ssize_t)bytes;
    if (exchange->stream_ended) {
        exchange->delivered = true;
        return MHD_CONTENT_READER_END_OF_STREAM;
    }
    connection_suspend(exchange->connection);
    if (exchange->drained != NULL)
        exchange->drained(exchange->state);
    return 0;
}

static struct MHD_Response *exchange_stream_response(struct exchange *exchange, const char *type, uint64_t size) {
    exchange->streams = true;
    exchange->backlog_max += HTTP_BACKLOG_MAX;
    struct MHD_Response *response = MHD_create_response_from_callback(
        size == UINT64_MAX ? MHD_SIZE_UNKNOWN : size, STREAM_BLOCK, exchange_read, exchange, NULL);
    if (response != NULL)
        MHD_add_response_header(response, "Content-Type", type);
    return response;
}

void exchange_stream_as(struct exchange *exchange, const char *type, uint64_t size, void (*drained)(void *state)) {
    exchange->drained = drained;
    exchange_answer(exchange, 200, exchange_stream_response(exchange, type, size));
}

void exchange_stream(struct exchange *exchange) {
    struct MHD_Response *response = exchange_stream_response(exchange, "text/event-stream; charset=utf-8", UINT64_MAX);
    if (response != NULL) {
        MHD_add_response_header(response, "Cache-Control", "no-cache");
        MHD_add_response_header(response, "X-Accel-Buffering", "no"); /* nginx would hold tokens back */
    }
    exchange_answer(exchange, 200, response);
}

static void exchange_continue(struct exchange *exchange) {
    if (exchange->connection != NULL && connection_is_suspended(exchange->connection))
        connection_resume(exchange->connection);
}

void exchange_allow_backlog(struct exchange *exchange, size_t bytes) {
    exchange->backlog_max += bytes;
}

void exchange_write(struct exchange *exchange, const char *data, size_t bytes) {
    if (exchange->abandoned || bytes == 0)
        return;
    size_t unread = exchange->pending.length - exchange->pending_read;
    if (unread + bytes > exchange->backlog_max) {
        log_event(LOG_WARNING, exchange->id, "client does not read its stream: connection cut", "unread_bytes",
            LOG_INT(unread), "limit", LOG_INT(exchange->backlog_max), NULL);
        exchange_abandon(exchange);
        return;
    }
    buffer_append(&exchange->pending, data, bytes);
    exchange_continue(exchange);
}

void exchange_end(struct exchange *exchange) {
    exchange->stream_ended = true;
    exchange_continue(exchange);
}

/* --- Work elsewhere, and leaving --- */

struct exchange_job {
    uv_work_t request;
    struct exchange *exchange;
    void (*work)(void *state);
    void (*done)(void *state);
    void *state;
};

static void exchange_job_run(uv_work_t *request) {
    struct exchange_job *job = request->data;
    job->work(job->state);
}

static void exchange_job_done(uv_work_t *request, int status) {
    struct exchange_job *job = request->data;
    (void)status;
    job->done(job->state);
    exchange_release(job->exchange);
    free(job);
}

/* A short body is parsed sooner than another thread wakes up; but a schema or a pattern takes its time to compile. (A
 * name that is written with escapes is not seen here, which costs that time and nothing else.) */
static bool exchange_is_light(const struct exchange *exchange) {
    static const char *const compiled[] = {"\"response_format\"", "\"guided_", "\"structured_outputs\""};
    const struct buffer *body = &exchange->body;
    if (body->length > HTTP_BODY_INLINE_MAX)
        return false;
    for (size_t i = 0; i < sizeof compiled / sizeof compiled[0]; i++)
        if (body->length > 0 && memmem(body->data, body->length, compiled[i], strlen(compiled[i])) != NULL)
            return false;
    return true;
}

int exchange_work(struct exchange *exchange, void (*work)(void *state), void (*done)(void *state), void *state) {
    if (exchange_is_light(exchange)) {
        work(state);
        done(state);
        return 0;
    }
    struct exchange_job *job = malloc(sizeof *job);
    if (job == NULL)
        return -1;
    *job = (struct exchange_job){.exchange = exchange, .work = work, .done = done, .state = state};
    job->request.data = job;
    if (uv_queue_work(loop_uv(exchange->server->loop), &job->request, exchange_job_run, exchange_job_done) != 0) {
        free(job);
        return -1;
    }
    exchange_retain(exchange);
    return 0;
}

void exchange_pause(struct exchange *exchange) {
    connection_suspend(exchange->connection);
}

void exchange_resume(struct exchange *exchange) {
    if (exchange->connection != NULL)
        connection_extend(exchange->connection);
    exchange_continue(exchange);
}

void exchange_abandon(struct exchange *exchange) {
    if (exchange->connection == NULL)
        return;
    exchange_retain(exchange);
    exchange_call_abandon(exchange);
    connection_cut(exchange->connection);
    exchange_continue(exchange);
    exchange_release(exchange);
}

void http_gone(void *context) {
    struct exchange *exchange = context;
    if (!exchange->delivered) /* a client may close as soon as it has read everything */
        exchange_abandon(exchange);
}
