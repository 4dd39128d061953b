/* SPDX-License-Identifier: Apache-2.0
 *
 * The server process: configuration, loop, the loaded model, and how it starts and drains.
 *
 * Start: server_create listens, server_run loads the model on another thread while /health already answers; requests
 * that need the model get 503 with Retry-After until it is there.
 * End: on SIGTERM or SIGINT the server drains: new work gets 503 with Retry-After and `Connection: close`, /ready says
 * 503, /health stays 200, requests that run go on for up to drain_timeout seconds and are then cancelled. When none is
 * left server_run returns 0. A second signal ends the process at once (status 128 + signal).
 */
#ifndef SERVER_SERVER_H
#define SERVER_SERVER_H

#include "config/config.h"
#include "engine/scheduler.h"
#include "server/http.h"

struct background;
struct evaluation_run;
struct train_run;

/* train_run of policy/train/train.h. */
typedef int (*server_train)(const struct train_run *run, struct error *error);

/* What a loaded model gives to the server. Everything is borrowed and must stay until server_free. */
struct server_model {
    struct scheduler *scheduler;
    const struct tokenizer *tokenizer;
    const struct grammar_vocabulary *grammar_vocabulary; /* for masks; NULL: grammars are refused */
    const char *fingerprint;                             /* hex */
    const struct chat_template *chat_template;           /* NULL: there is none */
    const char *chat_refusal;                            /* why there is none */
    uint32_t vocabulary;
    uint32_t width;                   /* numbers of an embedding */
    enum pooling pooling;             /* of embeddings that ask for none; NONE: each must ask */
    uint32_t context;                 /* tokens that any sequence may see: prompt and completion */
    uint32_t tokens_max;              /* of one that is not pruned: the context, or what the page pool holds of it */
    struct policy_settings kv_policy; /* of requests that choose none, resolved; its references are the giver's */
    struct policy_model policy_model; /* for policies that requests choose */
    /* For jobs; engine NULL: there can be none. */
    struct engine *engine;
    struct background *background; /* NULL: jobs have the engine to themselves */
    server_train train;            /* NULL: jobs fail */
    int (*evaluate)(const struct evaluation_run *run, char **report, struct error *error); /* evaluation.h */
};

/* What the server gives to whoever loads its model. */
struct server_hooks {
    void (*wake)(void *context); /* for scheduler_options.wake */
    /* Once the model is known, and before the policies are read: the trained ones. *trained is NULL when there is no
     * state directory. */
    int (*open_policies)(
        void *context, const struct policy_model *model, const struct trained_policies **trained, struct error *error);
    /* The server's own policy as the configuration has it; afterwards with the network of what is active. */
    int (*take_own_policy)(void *context, struct policy_settings *own, struct error *error);
    void *context;
};
/* Loads the model: fills *model. Runs on its own thread. */
typedef int (*server_load)(
    void *context, const struct server_hooks *hooks, struct server_model *model, struct error *error);

struct metrics;
struct admin;
struct tls;
struct tls_pair;

struct server {
    const struct config *config;
    struct loop *loop;
    struct site site; /* the public one */
    struct key_set *keys;
    struct tls *tls; /* NULL: HTTP */
    uv_work_t tls_work;
    struct tls_pair *tls_pair; /* read again by tls_work */
    struct error tls_error;
    bool tls_reading;
    struct admin *admin; /* NULL: there is no state directory */
    struct server_model model;
    bool loaded;
    uint64_t drain_began_ns;
    bool draining;
    bool cancelled;    /* the drain timeout is over */
    uv_timer_t expiry; /* looks for requests over request-timeout */
    char *model_id;
    char fingerprint[32]; /* system_fingerprint */
    int64_t created;      /* Unix time of the start */
    struct metrics *metrics;
    struct exchange *exchanges;     /* all */
    uint32_t exchanges_active;      /* those that were handed to a handler and are not completed */
    struct generation *generations; /* submitted, last output not seen */
    uint32_t generations_active;
    /* loading */
    uv_work_t load_work;
    server_load load;
    void *load_context;
    bool loading;
    int load_status;
    struct error load_error;
};

struct server *server_create(const struct config *config, struct error *error);
void server_free(struct server *server); /* NULL allowed */
/* Until drained. The error is that of load. */
int server_run(struct server *server, server_load load, void *load_context, struct error *error);

/* For http.c and generation.c: something ended; stops the loop when the drain is complete. */
void server_check_drained(struct server *server);

/* 0, or a 503 while the model is loading or the server draining. */
int server_accepts_work(const struct server *server, struct fault *fault);

extern const struct route server_routes[]; /* ends with a NULL method */
extern const char *const server_open_paths[];

#endif
