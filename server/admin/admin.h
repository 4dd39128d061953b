/* SPDX-License-Identifier: Apache-2.0
 *
 * The admin API: files, training jobs, evaluations, trained policies, status. It has a listening socket of its own, a
 * key of its own, and no CORS; its state is that of the state directory (store/store.h). Read first.
 *
 * Every route is a call: what the request says is copied on the loop's thread, `answer` runs on the store's thread,
 * where it reads the body, reads and writes records, and writes the reply; then, back on the loop's thread, when all is
 * on the disk, `after` does what follows from it (wake the runner, tell streams) and the reply is sent. So neither a
 * body nor the disk keeps the loop waiting.
 */
#ifndef SERVER_ADMIN_ADMIN_H
#define SERVER_ADMIN_ADMIN_H

#include "server/fields.h"
#include "server/http.h"
#include "server/jobs.h"
#include "store/records.h"

struct stream;

struct admin {
    struct server *server;
    struct site site;
    struct key_set *keys; /* one or none */
    uint32_t port;
    struct store *store;
    struct policy_table *policies;   /* NULL: the model is not loaded yet */
    struct trained_policies trained; /* the table's names, for the configuration */
    struct jobs *jobs;               /* NULL: the same, or the model's engine can have no jobs */
    bool draining;
    struct stream *streams; /* of events: streams.c */
};

/* Opens the state directory, and listens if the configuration has an admin port. For a configuration with a state
 * directory. The errors are those of store_open and loop_listen. */
struct admin *admin_create(struct server *server, struct error *error);
/* On the thread that loads the model, in this order (server_hooks): reads the trained policies; learns the server's
 * own; queues again what was running when the last process ended. */
int admin_open_policies(struct admin *admin, const struct policy_model *model, const struct trained_policies **trained,
    struct error *error);
int admin_take_own_policy(struct admin *admin, struct policy_settings *own, struct error *error);
int admin_load(struct admin *admin, struct error *error);
/* The model is there: jobs begin. */
int admin_start(struct admin *admin, struct error *error);
void admin_poll(struct admin *admin);  /* after a wake-up of the loop */
void admin_drain(struct admin *admin); /* jobs leave checkpoints, streams of events end */
bool admin_is_drained(const struct admin *admin);
/* Waits for the runner and the store. While the loop still lives, and the engine. */
void admin_stop(struct admin *admin);
void admin_free(struct admin *admin); /* NULL allowed */

/* --- Calls --- */

struct admin_call;
/* 0: status and reply are written. Else a negative code: what was written to the database is undone, and the fault is
 * sent, or what the error says. */
typedef int (*admin_answer)(struct admin_call *call, struct database *database, struct error *error);
typedef void (*admin_after)(struct admin_call *call);

struct admin_call {
    struct admin *admin;
    struct exchange *exchange; /* a reference; its body may be read */
    char id[POLICY_NAME_MAX];  /* what stands for "{}" in the path */
    /* of the query; texts empty: not given */
    char after_id[64], order[8], purpose[64];
    char *metadata; /* JSON object of metadata[KEY]=VALUE; NULL: none */
    char limit[24];
    admin_answer answer;
    admin_after after;  /* only when answer has succeeded; NULL: nothing */
    admin_after finish; /* in any case, at last; NULL: nothing */
    unsigned status;    /* of the reply */
    struct buffer reply;
    struct fault fault;
    json_t *body; /* parsed by admin_body; freed with the call */
    /* from answer to after */
    char subject[POLICY_NAME_MAX];
    bool changed;
};

void admin_handle(struct exchange *exchange, admin_answer answer, admin_after after);
void admin_handle_with(struct exchange *exchange, admin_answer answer, admin_after after, admin_after finish);
/* Removes a file of one of the state directory's folders, on another thread. */
void admin_unlink(struct admin *admin, const char *folder, const char *name);

/* For answers. */
json_t *admin_body(struct admin_call *call); /* NULL: the fault is set */
/* The page that the query asks for. -1: the fault is set. table: where `after` must be. */
int admin_page(struct admin_call *call, struct database *database, const char *table, int64_t limit, int64_t most,
    struct page *page, struct error *error);
int admin_not_found(struct admin_call *call, const char *what); /* 404; a negative code */
/* {"object": "list", "data": [...], ...}: begin; before each entry admin_list_next, which is false when there are more
 * than the page's limit (ask the store for one more); end. */
struct admin_list {
    struct buffer *out;
    int64_t limit, count;
    bool more;
    char first[64], last[64];
};
void admin_list_begin(struct admin_list *list, struct buffer *out, const struct page *page);
bool admin_list_next(struct admin_list *list, const char *id);
void admin_list_end(struct admin_list *list);

void admin_write_seconds(struct buffer *out, const char *name, int64_t microseconds); /* ,"name":seconds or null */
void admin_write_text(struct buffer *out, const char *name, const char *text);        /* ,"name":"text" or null */
void admin_write_raw(struct buffer *out, const char *name, const char *json);         /* ,"name":json or null */

/* Why a job or an evaluation failed: ,"error":{...}, or null without a message. */
void admin_write_error(struct buffer *out, const char *code, const char *message, const char *parameter);

/* A `metadata` field: at most 16 pairs, keys up to 64 and values up to 512 characters. *text: JSON, owned by the caller
 * (free), NULL when it is absent. */
int admin_read_metadata(const json_t *body, char **text, struct fault *fault);

/* The model must be there, and the server not draining. 0, or -1 and a 503. */
int admin_check_ready(const struct admin *admin, struct fault *fault);

extern const struct route admin_routes[];

/* --- Routes --- */

extern const struct body_reader upload_reader;
void files_upload(struct exchange *exchange);
void files_list_all(struct exchange *exchange);
void files_retrieve(struct exchange *exchange);
void files_content(struct exchange *exchange);
void files_remove(struct exchange *exchange);
void files_write(struct buffer *out, const struct file_record *file);

void training_create(struct exchange *exchange);
void training_list(struct exchange *exchange);
void training_retrieve(struct exchange *exchange);
void training_cancel(struct exchange *exchange);
void training_pause(struct exchange *exchange);
void training_resume(struct exchange *exchange);
void training_events(struct exchange *exchange);
void training_checkpoints(struct exchange *exchange);
void training_write_event(struct buffer *out, const struct event_record *event);

/* Events of a job as they come (server-sent events). */
void streams_open(struct exchange *exchange);
void streams_changed(struct admin *admin, const char *job); /* its events or status have changed */
void streams_end_all(struct admin *admin);

void policies_list_all(struct exchange *exchange);
void policies_retrieve(struct exchange *exchange);
void policies_activate(struct exchange *exchange);
void policies_deactivate(struct exchange *exchange);
void policies_remove(struct exchange *exchange);

void evaluations_create(struct exchange *exchange);
void evaluations_list_all(struct exchange *exchange);
void evaluations_retrieve(struct exchange *exchange);
void evaluations_cancel(struct exchange *exchange);

void status_show(struct exchange *exchange);

#endif
