/* SPDX-License-Identifier: Apache-2.0
 *
 * One HTTP request ("exchange"): collecting its body, finding its route, and answering.
 *
 * A route's handler is called once, on the loop's thread, when the whole request has arrived. It never blocks: it
 * answers at once, or hands work on (exchange_work, a generation) and returns; the connection is then suspended until
 * somebody answers. An exchange is answered exactly once, by one of exchange_json, exchange_text, exchange_fault or
 * exchange_stream.
 *
 * An exchange lives as long as it has references: one belongs to the HTTP library, one to each piece of work on another
 * thread, one to the generation that runs for it. When the client leaves, `abandoned` becomes true and the route's
 * abandon function is called; whoever still holds a reference carries on to its end, and its answer goes nowhere.
 *
 * Every response has x-request-id (the client's, when it is 1 to 63 characters of letters, digits and -_.:, else one of
 * ours), and on sites with origins CORS headers for those. Answers to prompts have X-Prefix-Hash (prefix_hash.h).
 */
#ifndef SERVER_HTTP_H
#define SERVER_HTTP_H

#include "server/fault.h"
#include "server/keys.h"
#include "server/loop.h"
#include "server/prefix_hash.h"

struct server;

enum {
    HTTP_BODY_INLINE_MAX =
        4096,                 /* larger bodies, and those with schemas, are parsed on another thread: exchange_work */
    HTTP_HEADERS_MAX = 16384, /* bytes of request line and headers; above: 431 */
    HTTP_BACKLOG_MAX = 16 << 20,    /* bytes of a stream that its client has not read; above, it is cut off */
    HTTP_BODY_DRAIN_MAX = 64 << 20, /* of a body that is refused, so much is read before the 413 is sent, so that the
                                       client gets to read it; above, the connection is closed at once */
};

struct exchange;

/* What a listening socket serves. */
struct site {
    struct server *server;
    const struct route *routes; /* ends with a NULL method */
    /* Whose web pages may read what it answers (CORS): origins, each text one or several separated by commas; "*" is
     * any. NULL or empty: nobody's. */
    const struct string_list *origins;
    /* One of these must be sent. Empty: everybody is let in whom admit lets in. OPTIONS, which a browser sends without
     * a key before the request itself, is let in always. */
    struct key_set *keys;
    const char *const *open; /* paths that need no key; ends with NULL. NULL: none */
    /* Without keys looks at a request's headers before its body is read: 0, or -1 and a fault. NULL: all are let in. */
    int (*admit)(struct exchange *exchange, struct fault *fault);
};

struct exchange {
    struct server *server;
    const struct site *site;
    struct connection *connection; /* NULL when the library is done with it */
    const struct route *route;
    char *path;
    char id[64]; /* x-request-id */
    bool id_is_ours;
    int key; /* its number in the site's keys; -1: none was needed */
    char method[16];
    struct buffer body;            /* as received; not touched after the handler was called */
    bool abandoned;                /* nobody reads the answer */
    void (*abandon)(void *state);  /* set by whoever works for it; called when the client leaves or time is over */
    void *state;                   /* of whoever works for it */
    char completion_id[64];        /* for the access log; empty: none */
    char prefix[PREFIX_HASH_SIZE]; /* sent as X-Prefix-Hash; empty: none */
    /* private to http.c */
    unsigned references;
    bool headers_seen, handled;
    const struct body_reader *reader;
    bool streams;
    bool delivered;       /* the library has all of the answer */
    struct fault refusal; /* found in headers or body, sent when the request was read */
    struct MHD_Response *response;
    unsigned status;
    uint64_t body_bytes; /* received, also when refused */
    uint64_t sent_bytes;
    struct buffer pending; /* stream: written; the first pending_read bytes were sent */
    size_t pending_read;
    size_t backlog_max; /* of what is pending */
    bool stream_ended;
    void (*drained)(void *state);
    bool counted; /* in server->exchanges_active */
    uint64_t began_ns;
    struct exchange *next, *previous; /* in server->exchanges */
};

/* Takes a body piece by piece as it comes, instead of having it collected in exchange.body. Both functions may refuse
 * by -1 and a fault; what follows of the body is then dropped. */
struct body_reader {
    int (*begin)(struct exchange *exchange, uint64_t announced, struct fault *fault); /* announced: 0 if unknown */
    /* May suspend the connection by exchange_pause; no further piece comes before exchange_resume. */
    int (*piece)(struct exchange *exchange, const char *data, size_t bytes, struct fault *fault);
};

/* A route. path may end in "/" + "*": the rest is exchange_path_rest, not empty. A part "{}" between slashes stands for
 * any one that is not empty: exchange_path_part. */
struct route {
    const char *method; /* GET (also serves HEAD), POST or DELETE */
    const char *path;
    void (*handle)(struct exchange *exchange);
    bool work;                        /* computes: 503 while loading or draining, and counts for its key's rate */
    const struct body_reader *reader; /* NULL: the body is collected, up to max-body */
};
const char *exchange_path_rest(const struct exchange *exchange);
/* What stands for "{}": copied into out, cut to its size. */
void exchange_path_part(const struct exchange *exchange, char *out, size_t size);

/* Of the request, while it has its connection (in handlers and readers): NULL when there is none. */
const char *exchange_header(const struct exchange *exchange, const char *name);
const char *exchange_query(const struct exchange *exchange, const char *name); /* of the URI, decoded */

/* For the loop (see struct loop_callbacks); begin's context is the site. */
void *http_begin(void *site, struct connection *connection, const char *uri);
enum MHD_Result http_access(
    void *exchange, const char *url, const char *method, const char *version, const char *data, size_t *bytes);
void http_completed(void *exchange, unsigned status, enum MHD_RequestTerminationCode reason);
void http_gone(void *exchange);

/* Takes over the body's memory. */
void exchange_json(struct exchange *exchange, unsigned status, struct buffer *body);
void exchange_text(struct exchange *exchange, unsigned status, const char *type, struct buffer *body);
void exchange_fault(struct exchange *exchange, const struct fault *fault);
void exchange_fault_memory(struct exchange *exchange); /* out of memory: 500 */

/* Starts a reply of server-sent events. exchange_write adds to it (an empty write is allowed) and exchange_end ends it.
 * What the client has not read yet waits in memory, up to HTTP_BACKLOG_MAX bytes and those that exchange_allow_backlog
 * adds (for what comes all at once, so that no client could have read it in time); beyond that the exchange is
 * abandoned: a client that stops reading, or reads more slowly than we write, must not fill the memory. */
void exchange_stream(struct exchange *exchange);
/* The same with another content type; drained(state) is called whenever the client has been sent all that was written.
 * state as exchange.state. size: of the whole, or UINT64_MAX when it is not known. */
void exchange_stream_as(struct exchange *exchange, const char *type, uint64_t size, void (*drained)(void *state));
void exchange_allow_backlog(struct exchange *exchange, size_t bytes);
void exchange_write(struct exchange *exchange, const char *data, size_t bytes);
void exchange_end(struct exchange *exchange);

/* Runs work(state), which may take time in proportion to the body, and then done(state) on the loop's thread, also when
 * the exchange was abandoned meanwhile. Work for a body of more than HTTP_BODY_INLINE_MAX bytes runs on another thread;
 * else both have run when this returns. -1: neither will run. */
int exchange_work(struct exchange *exchange, void (*work)(void *state), void (*done)(void *state), void *state);

/* For body_reader.piece: no more of the body until exchange_resume, which also begins the request's deadline anew. */
void exchange_pause(struct exchange *exchange);
void exchange_resume(struct exchange *exchange);

void exchange_retain(struct exchange *exchange);
void exchange_release(struct exchange *exchange);

/* Ends the request without caring for an answer: the connection is closed. */
void exchange_abandon(struct exchange *exchange);

/* Writes prefix and 24 random hexadecimal digits. */
void http_make_id(char *out, size_t size, const char *prefix);

#endif
