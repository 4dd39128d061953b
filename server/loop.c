/* SPDX-License-Identifier: Apache-2.0 */
#include "server/loop.h"

#include "engine/log.h"
#include "server/listen.h"
#include "server/tls.h"

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
    SIGNALS = 3,
};

struct connection {
    struct listener *listener;
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

/* A listening socket with the library's daemon that serves it. */
struct listener {
    struct loop *loop;
    struct MHD_Daemon *daemon;
    const struct loop_callbacks *callbacks;
    void *context;
    uint32_t port;
    uint32_t keep_alive_ms;
    uint32_t receive_ms;
    bool run_due; /* MHD_run before the loop blocks */
    struct connection *connections;
    uv_poll_t epoll;
    uv_prepare_t prepare;
    uv_timer_t library_timer;
    uv_timer_t tick;
    struct listener *next;
};

struct loop {
    uv_loop_t uv;
    const struct loop_callbacks *callbacks; /* those of the first listener */
    void *context;
    struct listener *listeners; /* the last one added first */
    uint32_t port;              /* of the first */
    bool stopped;
    bool signal_seen;
    void (*fire)(void *context);
    uv_timer_t after;
    uv_async_t async;
    uv_signal_t signals[SIGNALS];
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
        connection->listener->callbacks->gone(connection->exchange);
        return;
    }
    connection->hung_up = true; /* what it sent before is still to be read and may be a request */
    connection->deadline_ms = uv_now(&connection->listener->loop->uv) + TICK_MS;
}

static void connection_watch(struct connection *connection) {
    if (!connection->watching && uv_poll_start(&connection->poll, UV_DISCONNECT, connection_hung_up) == 0)
        connection->watching = true;
}

static void connection_opened(struct listener *listener, struct MHD_Connection *handle, void **socket_context) {
    const union MHD_ConnectionInfo *info = MHD_get_connection_info(handle, MHD_CONNECTION_INFO_CONNECTION_FD);
    struct connection *connection = calloc(1, sizeof *connection);
    if (info == NULL || connection == NULL ||
        uv_poll_init(&listener->loop->uv, &connection->poll, info->connect_fd) != 0) {
        free(connection); /* without a context its requests are refused in connection_begin */
        return;
    }
    connection->listener = listener;
    connection->handle = handle;
    connection->socket = info->connect_fd;
    connection->poll.data = connection;
    connection->deadline_ms = uv_now(&listener->loop->uv) + listener->receive_ms;
    connection->next = listener->connections;
    if (connection->next != NULL)
        connection->next->previous = connection;
    else
        uv_timer_again(&listener->tick);
    listener->connections = connection;
    connection_watch(connection);
    *socket_context = connection;
}

static void connection_closed(struct connection *connection) {
    struct listener *listener = connection->listener;
    if (connection->previous != NULL)
        connection->previous->next = connection->next;
    else
        listener->connections = connection->next;
    if (connection->next != NULL)
        connection->next->previous = connection->previous;
    if (listener->connections == NULL)
        uv_timer_stop(&listener->tick);
    listener->run_due = true; /* at the connection limit the library accepts again only in its next run */
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
    connection->listener->run_due = true;
}

void connection_received(struct connection *connection) {
    connection->deadline_ms = 0;
}

void connection_extend(struct connection *connection) {
    connection->deadline_ms = uv_now(&connection->listener->loop->uv) + connection->listener->receive_ms;
}

void connection_cut(struct connection *connection) {
    shutdown(connection->socket, SHUT_RDWR);
    connection->listener->run_due = true;
}

/* --- What libmicrohttpd calls --- */

static struct connection *connection_of(struct MHD_Connection *handle) {
    const union MHD_ConnectionInfo *info = MHD_get_connection_info(handle, MHD_CONNECTION_INFO_SOCKET_CONTEXT);
    return info == NULL ? NULL : info->socket_context;
}

static void *loop_begin(void *context, const char *uri, struct MHD_Connection *handle) {
    struct listener *listener = context;
    struct connection *connection = connection_of(handle);
    if (connection == NULL)
        return NULL;
    uv_update_time(&listener->loop->uv);
    connection->hung_up = false;
    connection_watch(connection); /* again, if its client was seen to leave: then the request is told of it */
    connection->deadline_ms = uv_now(&listener->loop->uv) + listener->receive_ms;
    connection->exchange = listener->callbacks->begin(listener->context, connection, uri == NULL ? "" : uri);
    return connection->exchange;
}

static enum MHD_Result loop_access(void *context, struct MHD_Connection *handle, const char *url, const char *method,
    const char *version, const char *data, size_t *bytes, void **exchange) {
    struct listener *listener = context;
    (void)handle;
    if (*exchange == NULL)
        return MHD_NO;
    return listener->callbacks->access(*exchange, url, method, version, data, bytes);
}

/* A connection that the library closes while it asks for more of a stream is put away only when it next looks for those
 * that timed out. There it stops at the first that is older and open, as any idle connection is; but it goes through
 * all of those whose timeout differs from the daemon's. */
static void connection_let_go(struct connection *connection) {
    unsigned seconds = (unsigned)(connection->listener->keep_alive_ms / 1000) + 1;
    MHD_set_connection_option(connection->handle, MHD_CONNECTION_OPTION_TIMEOUT, seconds);
    connection->listener->run_due = true;
}

static void loop_completed(
    void *context, struct MHD_Connection *handle, void **exchange, enum MHD_RequestTerminationCode reason) {
    struct listener *listener = context;
    struct connection *connection = connection_of(handle);
    if (*exchange == NULL || connection == NULL)
        return;
    const union MHD_ConnectionInfo *info = MHD_get_connection_info(handle, MHD_CONNECTION_INFO_HTTP_STATUS);
    connection_watch(connection); /* again: between requests it ends the connection */
    connection->exchange = NULL;
    connection->deadline_ms = uv_now(&listener->loop->uv) + listener->keep_alive_ms + listener->receive_ms;
    listener->callbacks->completed(*exchange, info == NULL ? 0 : info->http_status, reason);
    *exchange = NULL;
    if (reason != MHD_REQUEST_TERMINATED_COMPLETED_OK)
        connection_let_go(connection);
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
    ((struct listener *)poll->data)->run_due = true;
}

static void loop_timer_fired(uv_timer_t *timer) {
    ((struct listener *)timer->data)->run_due = true;
}

/* The last thing before libuv blocks: let the library work, then tell libuv when it wants to work again. */
static void loop_before_poll(uv_prepare_t *prepare) {
    struct listener *listener = prepare->data;
    if (!listener->run_due)
        return;
    for (int i = 0; i < RUNS_MAX && listener->run_due; i++) {
        listener->run_due = false;
        MHD_run(listener->daemon);
    }
    unsigned long long wait_ms = 0;
    bool timed = listener->run_due || MHD_get_timeout(listener->daemon, &wait_ms) == MHD_YES;
    uv_update_time(&listener->loop->uv);
    if (timed)
        uv_timer_start(&listener->library_timer, loop_timer_fired, wait_ms, 0);
    else
        uv_timer_stop(&listener->library_timer);
}

static void loop_tick(uv_timer_t *timer) {
    struct listener *listener = timer->data;
    uint64_t now = uv_now(&listener->loop->uv);
    for (struct connection *connection = listener->connections; connection != NULL; connection = connection->next) {
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
    loop->signal_seen = loop->signal_seen || number != SIGHUP;
    loop->callbacks->signalled(loop->context, number);
}

static void loop_after_fired(uv_timer_t *timer) {
    struct loop *loop = timer->data;
    loop->fire(loop->context);
}

/* --- Life --- */

static int listener_start_daemon(struct listener *listener, const struct loop_options *options, struct error *error) {
    listener->port = options->port;
    int fd = listen_open(options->host, &listener->port, error);
    if (fd < 0)
        return ERROR_IO;
    struct MHD_OptionItem tls[] = {{MHD_OPTION_HTTPS_PRIORITIES, 0, TLS_PRIORITIES},
        {MHD_OPTION_HTTPS_CERT_CALLBACK2, 0, (void *)tls_retrieve}, {MHD_OPTION_END, 0, NULL}};
    unsigned flags = MHD_USE_EPOLL | MHD_ALLOW_SUSPEND_RESUME | MHD_USE_ERROR_LOG;
    listener->daemon = MHD_start_daemon(options->tls ? flags | MHD_USE_TLS : flags, 0, NULL, NULL, loop_access,
        listener, MHD_OPTION_EXTERNAL_LOGGER, loop_library_log, NULL, MHD_OPTION_LISTEN_SOCKET, fd,
        MHD_OPTION_CONNECTION_LIMIT, (unsigned)listen_raise_limit(options->max_connections),
        MHD_OPTION_CONNECTION_TIMEOUT, (unsigned)options->keep_alive, MHD_OPTION_CONNECTION_MEMORY_LIMIT,
        (size_t)CONNECTION_MEMORY, MHD_OPTION_STRICT_FOR_CLIENT, 1, MHD_OPTION_SIGPIPE_HANDLED_BY_APP, 1,
        MHD_OPTION_URI_LOG_CALLBACK, loop_begin, listener, MHD_OPTION_NOTIFY_COMPLETED, loop_completed, listener,
        MHD_OPTION_NOTIFY_CONNECTION, connection_notified, listener, MHD_OPTION_ARRAY,
        options->tls ? tls : tls + sizeof tls / sizeof *tls - 1, MHD_OPTION_END);
    if (listener->daemon == NULL) {
        close(fd);
        return error_set(error, ERROR_IO, "cannot start the HTTP library on %s port %u", options->host, listener->port);
    }
    return 0;
}

/* Initialises every handle; they cannot fail but for descriptors. */
static int listener_start_handles(struct listener *listener) {
    uv_loop_t *uv = &listener->loop->uv;
    const union MHD_DaemonInfo *info = MHD_get_daemon_info(listener->daemon, MHD_DAEMON_INFO_EPOLL_FD);
    int failed = info == NULL ? UV_EINVAL : uv_poll_init(uv, &listener->epoll, info->epoll_fd);
    if (failed != 0)
        return failed;
    uv_prepare_init(uv, &listener->prepare);
    uv_timer_init(uv, &listener->library_timer);
    uv_timer_init(uv, &listener->tick);
    listener->epoll.data = listener->prepare.data = listener->library_timer.data = listener->tick.data = listener;
    failed = uv_poll_start(&listener->epoll, UV_READABLE, loop_epoll_ready);
    if (failed == 0)
        failed = uv_prepare_start(&listener->prepare, loop_before_poll);
    uv_timer_start(&listener->tick, loop_tick, TICK_MS, TICK_MS);
    uv_timer_stop(&listener->tick); /* armed by the first connection */
    return failed;
}

int loop_listen(struct loop *loop, const struct loop_options *options, uint32_t *port, struct error *error) {
    struct listener *listener = calloc(1, sizeof *listener);
    if (listener == NULL)
        return error_set(error, ERROR_MEMORY, "out of memory");
    listener->loop = loop;
    listener->callbacks = options->callbacks;
    listener->context = options->context;
    listener->keep_alive_ms = options->keep_alive * 1000;
    listener->receive_ms = options->receive_timeout * 1000;
    listener->run_due = true;
    listener->next = loop->listeners;
    loop->listeners = listener; /* loop_free cleans up what failed half way */
    int code = listener_start_daemon(listener, options, error);
    if (code != 0)
        return code;
    int failed = listener_start_handles(listener);
    if (failed != 0)
        return error_set(error, ERROR_IO, "cannot set up the event loop: %s", uv_strerror(failed));
    *port = listener->port;
    return 0;
}

static int loop_start_handles(struct loop *loop, bool tls) {
    static const int signals[SIGNALS] = {SIGTERM, SIGINT, SIGHUP};
    int failed = uv_async_init(&loop->uv, &loop->async, loop_async_woken);
    if (failed != 0)
        return failed;
    uv_timer_init(&loop->uv, &loop->after);
    loop->after.data = loop->async.data = loop;
    for (size_t i = 0; i < SIGNALS && failed == 0; i++) {
        uv_signal_init(&loop->uv, &loop->signals[i]);
        loop->signals[i].data = loop;
        if (signals[i] != SIGHUP || tls)
            failed = uv_signal_start(&loop->signals[i], loop_signalled, signals[i]);
    }
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
    signal(SIGPIPE, SIG_IGN);
    if (uv_loop_init(&loop->uv) != 0) {
        free(loop);
        error_set(error, ERROR_IO, "cannot create an event loop");
        return NULL;
    }
    int failed = loop_start_handles(loop, options->tls);
    if (failed != 0)
        error_set(error, ERROR_IO, "cannot set up the event loop: %s", uv_strerror(failed));
    else if (loop_listen(loop, options, &loop->port, error) == 0)
        return loop;
    loop_free(loop);
    return NULL;
}

static void loop_close_handle(uv_handle_t *handle, void *unused) {
    (void)unused;
    if (!uv_is_closing(handle))
        uv_close(handle, NULL);
}

/* Closes its connections; its handles are closed with all others. */
static void listener_stop(struct listener *listener) {
    for (struct connection *connection = listener->connections; connection != NULL; connection = connection->next)
        if (connection->suspended)
            connection_resume(connection);
    if (listener->daemon == NULL)
        return;
    if (listener->epoll.loop != NULL)
        uv_poll_stop(&listener->epoll);
    if (listener->prepare.loop != NULL)
        uv_prepare_stop(&listener->prepare);
    MHD_stop_daemon(listener->daemon);
}

void loop_free(struct loop *loop) {
    if (loop == NULL)
        return;
    for (struct listener *listener = loop->listeners; listener != NULL; listener = listener->next)
        listener_stop(listener);
    uv_walk(&loop->uv, loop_close_handle, NULL);
    if (loop->signal_seen) { /* libuv gave the signals back to the system, whose default would be to kill us */
        signal(SIGTERM, SIG_IGN);
        signal(SIGINT, SIG_IGN);
    }
    /* Close callbacks, and work that is still on other threads. A loop_stop made meanwhile ends a run too early. */
    while (uv_run(&loop->uv, UV_RUN_DEFAULT) != 0)
        continue;
    uv_loop_close(&loop->uv);
    for (struct listener *listener = loop->listeners, *next; listener != NULL; listener = next) {
        next = listener->next;
        free(listener);
    }
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
