/* SPDX-License-Identifier: Apache-2.0 */
#include "server/loop.h"

#include "engine/log.h"
#include "server/listen.h"

#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <unistd.h>

enum {
    RUNS_MAX = 4,  /* of MHD_run in one iteration */
    TICK_MS = 250, /* how often deadlines are looked at while there are connections */
    CONNECTION_MEMORY =
        1 << 16, /* of libmicrohttpd for one connection: headers and read buffer; http.h has our limits */
};

struct connection {
    struct loop *loop;
    struct MHD_Connection *handle;
    struct connection *next, *previous;
    uv_poll_t poll;
    bool watching;
    bool hung_up; /* its client closed or half-closed it between requests; cut at deadline_ms */
    bool suspended;
    int socket;
    uint64_t deadline_ms; /* 0: none */
    void *exchange;       /* the request in progress */
};

struct loop {
    uv_loop_t uv;
    struct MHD_Daemon *daemon;
    const struct loop_callbacks *callbacks;
    void *context;
    uint32_t port;
    uint32_t keep_alive_ms;
    uint32_t receive_ms;
    bool run_due; /* MHD_run before the loop blocks */
    bool stopped;
    bool signal_seen;
    void (*fire)(void *context);
    struct connection *connections;
    uv_poll_t epoll;
    uv_prepare_t prepare;
    uv_timer_t library_timer;
    uv_timer_t tick;
    uv_timer_t after;
    uv_async_t async;
    uv_signal_t signals[2];
};

/* --- Connections --- */

static void connection_close_done(uv_handle_t *handle) {
    free(handle->data);
}

static void connection_unwatch(struct connection *connection) {
    if (connection->watching)
        uv_poll_stop(&connection->poll);
    connection->watching = false;
}

static void connection_hung_up(uv_poll_t *poll, int status, int events) {
    struct connection *connection = poll->data;
    (void)status; /* an error on the socket is a departure too */
    (void)events;
    connection_unwatch(connection);
    if (connection->exchange != NULL) {
        connection->loop->callbacks->gone(connection->exchange);
        return;
    }
    connection->hung_up = true; /* what it sent before is still to be read and may be a request */
    connection->deadline_ms = uv_now(&connection->loop->uv) + TICK_MS;
}

static void connection_watch(struct connection *connection) {
    if (!connection->watching && uv_poll_start(&connection->poll, UV_DISCONNECT, connection_hung_up) == 0)
        connection->watching = true;
}

static void connection_opened(struct loop *loop, struct MHD_Connection *handle, void **socket_context) {
    const union MHD_ConnectionInfo *info = MHD_get_connection_info(handle, MHD_CONNECTION_INFO_CONNECTION_FD);
    struct connection *connection = calloc(1, sizeof *connection);
    if (info == NULL || connection == NULL || uv_poll_init(&loop->uv, &connection->poll, info->connect_fd) != 0) {
        free(connection); /* without a context its requests are refused in connection_begin */
        return;
    }
    connection->loop = loop;
    connection->handle = handle;
    connection->socket = info->connect_fd;
    connection->poll.data = connection;
    connection->deadline_ms = uv_now(&loop->uv) + loop->receive_ms;
    connection->next = loop->connections;
    if (connection->next != NULL)
        connection->next->previous = connection;
    else
        uv_timer_again(&loop->tick);
    loop->connections = connection;
    connection_watch(connection);
    *socket_context = connection;
}

static void connection_closed(struct connection *connection) {
    struct loop *loop = connection->loop;
    if (connection->previous != NULL)
        connection->previous->next = connection->next;
    else
        loop->connections = connection->next;
    if (connection->next != NULL)
        connection->next->previous = connection->previous;
    if (loop->connections == NULL)
        uv_timer_stop(&loop->tick);
    loop->run_due = true; /* at the connection limit the library accepts again only in its next run */
    connection_unwatch(connection);
    uv_close((uv_handle_t *)&connection->poll, connection_close_done);
}

static void connection_notified(
    void *context, struct MHD_Connection *handle, void **socket_context, enum MHD_ConnectionNotificationCode code) {
    if (code == MHD_CONNECTION_NOTIFY_STARTED)
        connection_opened(context, handle, socket_context);
    else if (*socket_context != NULL)
        connection_closed(*socket_context);
}

struct MHD_Connection *connection_handle(struct connection *connection) {
    return connection->handle;
}

void connection_suspend(struct connection *connection) {
    MHD_suspend_connection(connection->handle);
    connection->suspended = true;
    connection_watch(connection);
}

bool connection_is_suspended(const struct connection *connection) {
    return connection->suspended;
}

void connection_resume(struct connection *connection) {
    connection->suspended = false;
    MHD_resume_connection(connection->handle);
    connection->loop->run_due = true;
}

void connection_received(struct connection *connection) {
    connection->deadline_ms = 0;
}

void connection_cut(struct connection *connection) {
    shutdown(connection->socket, SHUT_RDWR);
    connection->loop->run_due = true;
}

/* --- What libmicrohttpd calls --- */

static struct connection *connection_of(struct MHD_Connection *handle) {
    const union MHD_ConnectionInfo *info = MHD_get_connection_info(handle, MHD_CONNECTION_INFO_SOCKET_CONTEXT);
    return info == NULL ? NULL : info->socket_context;
}

static void *loop_begin(void *context, const char *uri, struct MHD_Connection *handle) {
    struct loop *loop = context;
    struct connection *connection = connection_of(handle);
    if (connection == NULL)
        return NULL;
    uv_update_time(&loop->uv);
    connection->hung_up = false;
    connection_watch(connection); /* again, if its client was seen to leave: then the request is told of it */
    connection->deadline_ms = uv_now(&loop->uv) + loop->receive_ms;
    connection->exchange = loop->callbacks->begin(loop->context, connection, uri == NULL ? "" : uri);
    return connection->exchange;
}

static enum MHD_Result loop_access(void *context, struct MHD_Connection *handle, const char *url, const char *method,
    const char *version, const char *data, size_t *bytes, void **exchange) {
    struct loop *loop = context;
    (void)handle;
    if (*exchange == NULL)
        return MHD_NO;
    return loop->callbacks->access(*exchange, url, method, version, data, bytes);
}

static void loop_completed(
    void *context, struct MHD_Connection *handle, void **exchange, enum MHD_RequestTerminationCode reason) {
    struct loop *loop = context;
    struct connection *connection = connection_of(handle);
    if (*exchange == NULL || connection == NULL)
        return;
    const union MHD_ConnectionInfo *info = MHD_get_connection_info(handle, MHD_CONNECTION_INFO_HTTP_STATUS);
    connection_watch(connection); /* again: between requests it ends the connection */
    connection->exchange = NULL;
    connection->deadline_ms = uv_now(&loop->uv) + loop->keep_alive_ms + loop->receive_ms;
    loop->callbacks->completed(*exchange, info == NULL ? 0 : info->http_status, reason);
    *exchange = NULL;
}

static void loop_library_log(void *context, const char *format, va_list arguments) {
    (void)context;
    char line[256];
    vsnprintf(line, sizeof line, format, arguments);
    line[strcspn(line, "\n")] = '\0';
    log_event(LOG_DEBUG, NULL, "http library", "message", LOG_STRING(line), NULL);
}

/* --- What libuv calls --- */

static void loop_epoll_ready(uv_poll_t *poll, int status, int events) {
    (void)status;
    (void)events;
    ((struct loop *)poll->data)->run_due = true;
}

static void loop_timer_fired(uv_timer_t *timer) {
    ((struct loop *)timer->data)->run_due = true;
}

/* The last thing before libuv blocks: let the library work, then tell libuv when it wants to work again. */
static void loop_before_poll(uv_prepare_t *prepare) {
    struct loop *loop = prepare->data;
    if (!loop->run_due)
        return;
    for (int i = 0; i < RUNS_MAX && loop->run_due; i++) {
        loop->run_due = false;
        MHD_run(loop->daemon);
    }
    unsigned long long wait_ms = 0;
    bool timed = loop->run_due || MHD_get_timeout(loop->daemon, &wait_ms) == MHD_YES;
    uv_update_time(&loop->uv);
    if (timed)
        uv_timer_start(&loop->library_timer, loop_timer_fired, wait_ms, 0);
    else
        uv_timer_stop(&loop->library_timer);
}

static void loop_tick(uv_timer_t *timer) {
    struct loop *loop = timer->data;
    uint64_t now = uv_now(&loop->uv);
    for (struct connection *connection = loop->connections; connection != NULL; connection = connection->next) {
        if (connection->deadline_ms == 0 || now < connection->deadline_ms)
            continue;
        connection->deadline_ms = 0;
        if (!connection->hung_up)
            log_event(LOG_INFO, NULL, "connection cut: no request within the receive timeout", "receiving",
                LOG_BOOL(connection->exchange != NULL), NULL);
        connection_cut(connection);
    }
}

static void loop_async_woken(uv_async_t *async) {
    struct loop *loop = async->data;
    loop->callbacks->woken(loop->context);
}

static void loop_signalled(uv_signal_t *handle, int number) {
    struct loop *loop = handle->data;
    loop->signal_seen = true;
    loop->callbacks->signalled(loop->context, number);
}

static void loop_after_fired(uv_timer_t *timer) {
    struct loop *loop = timer->data;
    loop->fire(loop->context);
}

/* --- Life --- */

static int loop_start_daemon(struct loop *loop, const struct loop_options *options, struct error *error) {
    loop->port = options->port;
    int fd = listen_open(options->host, &loop->port, error);
    if (fd < 0)
        return ERROR_IO;
    loop->daemon = MHD_start_daemon(MHD_USE_EPOLL | MHD_ALLOW_SUSPEND_RESUME | MHD_USE_ERROR_LOG, 0, NULL, NULL,
        loop_access, loop, MHD_OPTION_EXTERNAL_LOGGER, loop_library_log, loop, MHD_OPTION_LISTEN_SOCKET, fd,
        MHD_OPTION_CONNECTION_LIMIT, (unsigned)listen_raise_limit(options->max_connections),
        MHD_OPTION_CONNECTION_TIMEOUT, (unsigned)options->keep_alive, MHD_OPTION_CONNECTION_MEMORY_LIMIT,
        (size_t)CONNECTION_MEMORY, MHD_OPTION_STRICT_FOR_CLIENT, 1, MHD_OPTION_SIGPIPE_HANDLED_BY_APP, 1,
        MHD_OPTION_URI_LOG_CALLBACK, loop_begin, loop, MHD_OPTION_NOTIFY_COMPLETED, loop_completed, loop,
        MHD_OPTION_NOTIFY_CONNECTION, connection_notified, loop, MHD_OPTION_END);
    if (loop->daemon == NULL) {
        close(fd);
        return error_set(error, ERROR_IO, "cannot start the HTTP library on %s port %u", options->host, loop->port);
    }
    return 0;
}

/* Initialises every handle; they cannot fail but for descriptors. */
static int loop_start_handles(struct loop *loop) {
    const union MHD_DaemonInfo *info = MHD_get_daemon_info(loop->daemon, MHD_DAEMON_INFO_EPOLL_FD);
    int failed = info == NULL ? UV_EINVAL : uv_poll_init(&loop->uv, &loop->epoll, info->epoll_fd);
    if (failed != 0)
        return failed;
    uv_prepare_init(&loop->uv, &loop->prepare);
    uv_timer_init(&loop->uv, &loop->library_timer);
    uv_timer_init(&loop->uv, &loop->tick);
    uv_timer_init(&loop->uv, &loop->after);
    uv_signal_init(&loop->uv, &loop->signals[0]);
    uv_signal_init(&loop->uv, &loop->signals[1]);
    loop->epoll.data = loop->prepare.data = loop->library_timer.data = loop->tick.data = loop->after.data = loop;
    loop->signals[0].data = loop->signals[1].data = loop->async.data = loop;
    failed = uv_poll_start(&loop->epoll, UV_READABLE, loop_epoll_ready);
    if (failed == 0)
        failed = uv_prepare_start(&loop->prepare, loop_before_poll);
    if (failed == 0)
        failed = uv_signal_start(&loop->signals[0], loop_signalled, SIGTERM);
    if (failed == 0)
        failed = uv_signal_start(&loop->signals[1], loop_signalled, SIGINT);
    uv_timer_start(&loop->tick, loop_tick, TICK_MS, TICK_MS);
    uv_timer_stop(&loop->tick); /* armed by the first connection */
    return failed;
}

struct loop *loop_create(const struct loop_options *options, struct error *error) {
    struct loop *loop = calloc(1, sizeof *loop);
    if (loop == NULL) {
        error_set(error, ERROR_MEMORY, "out of memory");
        return NULL;
    }
    loop->callbacks = options->callbacks;
    loop->context = options->context;
    loop->keep_alive_ms = options->keep_alive * 1000;
    loop->receive_ms = options->receive_timeout * 1000;
    loop->run_due = true;
    signal(SIGPIPE, SIG_IGN);
    if (uv_loop_init(&loop->uv) != 0) {
        free(loop);
        error_set(error, ERROR_IO, "cannot create an event loop");
        return NULL;
    }
    int failed = uv_async_init(&loop->uv, &loop->async, loop_async_woken);
    if (failed == 0 && loop_start_daemon(loop, options, error) != 0)
        goto fail;
    if (failed == 0)
        failed = loop_start_handles(loop);
    if (failed == 0)
        return loop;
    error_set(error, ERROR_IO, "cannot set up the event loop: %s", uv_strerror(failed));
fail:
    loop_free(loop);
    return NULL;
}

static void loop_close_handle(uv_handle_t *handle, void *unused) {
    (void)unused;
    if (!uv_is_closing(handle))
        uv_close(handle, NULL);
}

void loop_free(struct loop *loop) {
    if (loop == NULL)
        return;
    for (struct connection *connection = loop->connections; connection != NULL; connection = connection->next)
        if (connection->suspended)
            connection_resume(connection);
    if (loop->daemon != NULL) {
        if (loop->epoll.loop != NULL)
            uv_poll_stop(&loop->epoll);
        if (loop->prepare.loop != NULL)
            uv_prepare_stop(&loop->prepare);
        MHD_stop_daemon(loop->daemon);
    }
    uv_walk(&loop->uv, loop_close_handle, NULL);
    if (loop->signal_seen) { /* libuv gave the signals back to the system, whose default would be to kill us */
        signal(SIGTERM, SIG_IGN);
        signal(SIGINT, SIG_IGN);
    }
    /* Close callbacks, and work that is still on other threads. A loop_stop made meanwhile ends a run too early. */
    while (uv_run(&loop->uv, UV_RUN_DEFAULT) != 0)
        continue;
    uv_loop_close(&loop->uv);
    free(loop);
}

uint32_t loop_port(const struct loop *loop) {
    return loop->port;
}

void loop_run(struct loop *loop) {
    while (!loop->stopped)
        uv_run(&loop->uv, UV_RUN_DEFAULT);
}

void loop_stop(struct loop *loop) {
    loop->stopped = true;
    uv_stop(&loop->uv);
}

void loop_wake(struct loop *loop) {
    uv_async_send(&loop->async);
}

uv_loop_t *loop_uv(struct loop *loop) {
    return &loop->uv;
}

void loop_after(struct loop *loop, double seconds, void (*fire)(void *context)) {
    loop->fire = fire;
    uv_timer_start(&loop->after, loop_after_fired, (uint64_t)(seconds * 1000), 0);
}
