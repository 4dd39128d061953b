/* SPDX-License-Identifier: Apache-2.0
 *
 * The event loop: one thread on which libuv polls libmicrohttpd's epoll descriptors (one for each listening socket),
 * wake-ups of other threads, signals and timers. It owns the TCP connections' deadlines and knows nothing of routes.
 *
 * How the two libraries are joined (facts of libmicrohttpd 0.9.75, external polling with MHD_USE_EPOLL):
 * - MHD_run does whatever is due without blocking. It is called once an iteration, just before libuv blocks, when the
 *   epoll descriptor was readable, MHD_get_timeout's time is over, or a connection was resumed or closed (only its next
 *   run accepts again after the connection limit was reached); the timer is armed anew after each run.
 * - A suspended connection is outside the library's epoll set and never times out; the library does not notice that its
 *   client left. Nor does it notice an end that came together with data (its epoll is edge-triggered and it stops at a
 *   short read). So libuv watches every socket for a hang-up (EPOLLRDHUP). A client that only closes its sending half
 *   counts as gone; a whole request that it sent before is still answered where that needs no waiting.
 * - The library closes a socket after its last notification of the connection: the watch is stopped there.
 * - The library's timeout counts inactivity only. A request must also have arrived within receive_timeout seconds of
 *   its first line (on a new connection: of the accept), else the socket is shut down. An idle connection is closed by
 *   the library after keep_alive seconds, and by us when a request's first line has not come receive_timeout later.
 * - With TLS the library reads and decrypts as far as it can at each run; what its TLS library holds decrypted makes
 *   MHD_get_timeout say 0. The handshake counts as part of the first request, for deadlines. A client that leaves is
 *   seen by the same hang-up of its socket; its TLS end alone (close_notify) is only noticed when the library reads.
 * - Everything suspended must be resumed before MHD_stop_daemon; loop_free does it.
 *
 * All functions are for the loop's thread, loop_wake excepted.
 */
#ifndef SERVER_LOOP_H
#define SERVER_LOOP_H

#include "engine/error.h"

#include <microhttpd.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <uv.h>

struct loop;       /* opaque */
struct connection; /* opaque: one TCP connection, over all its requests */

/* What the loop reports. `context` is that of the options, `exchange` what begin returned. */
struct loop_callbacks {
    /* A request line has arrived. NULL: the connection is closed. */
    void *(*begin)(void *context, struct connection *connection, const char *uri);
    /* libmicrohttpd's access handler: first with the headers, then with pieces of the body, then with none when all was
     * received, and again after each resume until a response was queued. */
    enum MHD_Result (*access)(
        void *exchange, const char *url, const char *method, const char *version, const char *data, size_t *bytes);
    /* The library is done with the request; connection must not be used for it any more. status: of the response, 0 if
     * there was none. */
    void (*completed)(void *exchange, unsigned status, enum MHD_RequestTerminationCode reason);
    /* The client left during the request; reported at most once between two suspensions. */
    void (*gone)(void *exchange);
    /* After loop_wake; several wake-ups may become one. */
    void (*woken)(void *context);
    /* SIGINT or SIGTERM; with tls SIGHUP, too. */
    void (*signalled)(void *context, int number);
};

struct loop_options {
    const char *host; /* name or address to listen on */
    uint32_t port;    /* 0: any free one */
    uint32_t max_connections;
    uint32_t keep_alive;      /* seconds */
    uint32_t receive_timeout; /* seconds */
    bool tls;                 /* HTTPS, with what tls_retrieve gives (tls.h) */
    const struct loop_callbacks *callbacks;
    void *context;
};

/* Listens already when it returns; nothing is accepted before loop_run. Raises the limit on descriptors as far as it
 * may, or lowers max_connections to it. Handles SIGINT, SIGTERM, with tls SIGHUP, and ignores SIGPIPE. */
struct loop *loop_create(const struct loop_options *options, struct error *error);
void loop_free(struct loop *loop); /* closes all connections, calls completed for their requests; NULL allowed */
uint32_t loop_port(const struct loop *loop); /* of the socket of loop_create */
/* Listens on a further socket, with its own callbacks (woken and signalled are those of loop_create). Before loop_run.
 * *port: the real one. */
int loop_listen(struct loop *loop, const struct loop_options *options, uint32_t *port, struct error *error);
void loop_run(struct loop *loop);  /* until loop_stop */
void loop_stop(struct loop *loop); /* may come before loop_run */
void loop_wake(struct loop *loop); /* any thread */
uv_loop_t *loop_uv(struct loop *loop);

/* Calls fire(context) once after this time; a later call replaces it. */
void loop_after(struct loop *loop, double seconds, void (*fire)(void *context));

struct MHD_Connection *connection_handle(struct connection *connection);
/* Only inside the access callback or a content reader. */
void connection_suspend(struct connection *connection);
bool connection_is_suspended(const struct connection *connection);
void connection_resume(struct connection *connection);
/* The request was received: its deadline is off. */
void connection_received(struct connection *connection);
/* A part of a long request was received and put away: its deadline begins anew. */
void connection_extend(struct connection *connection);
/* Shuts the socket down both ways: the library sees the end and closes it. */
void connection_cut(struct connection *connection);

#endif
