/* SPDX-License-Identifier: Apache-2.0
 *
 * Events of a job as they come: GET .../events with ?stream=true or Accept: text/event-stream.
 *
 *   id: 17
 *   data: {"id": "ftevent-...", "object": "fine_tuning.job.event", ...}
 *
 * First those that there are (after the one of Last-Event-ID or ?after=, if given), oldest first, then new ones; when
 * the job has ended, `data: [DONE]`. A stream always reads from the store what has come after its last event, so
 * nothing is lost or doubled; a change of the job only tells it to look again.
 */
#include "server/admin/admin.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { STREAM_PAGE = 500 };

struct stream {
    struct admin *admin;
    struct exchange *exchange; /* a reference */
    char job[POLICY_NAME_MAX];
    char after[64]; /* id of an event; empty: from the start */
    int64_t last;   /* number of the last event that was written */
    bool reading, again, begun, ended, gone;
    bool caught_up; /* what there was is written: from now on its client must keep up */
    struct stream *next, *previous;
    /* of a reading: */
    struct buffer out;
    int64_t count, reached; /* events; the number of the last one */
    bool settled;           /* the runner had done with the job before it began: nothing follows */
    char status[16];        /* of the job; empty: there is none */
};

static void stream_free(struct stream *stream) {
    if (stream->previous != NULL)
        stream->previous->next = stream->next;
    else
        stream->admin->streams = stream->next;
    if (stream->next != NULL)
        stream->next->previous = stream->previous;
    buffer_free(&stream->out);
    exchange_release(stream->exchange);
    free(stream);
}

/* The client left, or the reply is complete. */
static void stream_abandon(void *state) {
    struct stream *stream = state;
    stream->gone = true;
    if (!stream->reading)
        stream_free(stream);
}

/* --- On the store's thread --- */

static int stream_write(void *context, const struct event_record *event) {
    struct stream *stream = context;
    buffer_format(&stream->out, "id: %lld\ndata: ", (long long)event->number);
    training_write_event(&stream->out, event);
    buffer_string(&stream->out, "\n\n");
    stream->reached = event->number;
    stream->count++;
    return 0;
}

static int stream_take_status(void *context, const struct job_record *job) {
    snprintf(context, 16, "%s", job->status);
    return 1;
}

static int stream_take_number(void *context, const struct row *row) {
    *(int64_t *)context = row_integer(row, 0);
    return 1;
}

static int stream_read(struct database *database, void *state, struct error *error) {
    struct stream *stream = state;
    stream->out.length = 0;
    stream->count = 0;
    stream->reached = stream->last;
    stream->status[0] = '\0';
    int code = jobs_find(database, stream->job, stream_take_status, stream->status, error);
    if (code > 0 && stream->after[0] != '\0')
        code = database_query(database, error, stream_take_number, &stream->reached,
            "SELECT number FROM events WHERE id = ?1 OR number = CAST(?1 AS INTEGER)", "t", stream->after);
    if (code >= 0)
        code = events_since(database, stream->job, stream->reached, STREAM_PAGE, stream_write, stream, error);
    return code < 0 ? code : 0;
}

/* --- On the loop's thread --- */

/* A job that was cancelled has ended when the runner has put it down: until then there may be a checkpoint. */
static bool stream_job_has_ended(const struct stream *stream) {
    if (!stream->settled)
        return false;
    return strcmp(stream->status, "succeeded") == 0 || strcmp(stream->status, "failed") == 0 ||
           strcmp(stream->status, "cancelled") == 0;
}

static void stream_fail(struct stream *stream, const struct error *error) {
    struct fault fault;
    if (stream->begun) {
        exchange_abandon(stream->exchange); /* the client may come again with Last-Event-ID */
        return;
    }
    if (error != NULL)
        fault_set(&fault, 500, NULL, NULL, "%s", error->message);
    else
        fault_set(&fault, 404, NULL, NULL, "there is no job '%.100s'", stream->job);
    exchange_fault(stream->exchange, &fault);
}

static void stream_look(struct stream *stream);

static void stream_was_read(void *state, const struct error *error) {
    struct stream *stream = state;
    stream->reading = false;
    if (stream->gone) {
        stream_free(stream);
        return;
    }
    if (error != NULL || stream->status[0] == '\0') {
        stream_fail(stream, error);
        return;
    }
    stream->last = stream->reached;
    stream->after[0] = '\0';
    if (!stream->begun)
        exchange_stream(stream->exchange);
    stream->begun = true;
    if (!stream->caught_up)
        exchange_allow_backlog(stream->exchange, stream->out.length);
    stream->caught_up |= stream->count < STREAM_PAGE;
    exchange_write(stream->exchange, stream->out.data, stream->out.length);
    bool more = stream->count == STREAM_PAGE || stream->again;
    bool ended = stream_job_has_ended(stream) && !more;
    stream->again = false;
    if (ended)
        exchange_write(stream->exchange, "data: [DONE]\n\n", 14);
    stream->ended = ended || stream->admin->draining;
    if (stream->ended)
        exchange_end(stream->exchange);
    else if (more)
        stream_look(stream);
}

static void stream_look(struct stream *stream) {
    stream->again = true;
    if (stream->reading || stream->ended || stream->gone || stream->admin->store == NULL)
        return;
    stream->again = false;
    struct jobs_state state = {.id = ""};
    if (stream->admin->jobs != NULL)
        jobs_get_state(stream->admin->jobs, &state);
    stream->settled = strcmp(state.id, stream->job) != 0;
    stream->reading = store_post(stream->admin->store, stream_read, stream_was_read, stream) == 0;
    if (!stream->reading)
        exchange_abandon(stream->exchange);
}

void streams_open(struct exchange *exchange) {
    struct admin *admin = exchange->server->admin;
    struct stream *stream = calloc(1, sizeof *stream);
    if (stream == NULL) {
        exchange_fault_memory(exchange);
        return;
    }
    const char *after = exchange_query(exchange, "after");
    after = after == NULL ? exchange_header(exchange, "Last-Event-ID") : after;
    stream->admin = admin;
    stream->exchange = exchange;
    exchange_path_part(exchange, stream->job, sizeof stream->job);
    snprintf(stream->after, sizeof stream->after, "%s", after == NULL ? "" : after);
    stream->next = admin->streams;
    if (stream->next != NULL)
        stream->next->previous = stream;
    admin->streams = stream;
    exchange_retain(exchange);
    exchange->state = stream;
    exchange->abandon = stream_abandon;
    stream_look(stream);
}

void streams_changed(struct admin *admin, const char *job) {
    for (struct stream *stream = admin->streams, *next; stream != NULL; stream = next) {
        next = stream->next;
        if (strcmp(stream->job, job) == 0)
            stream_look(stream);
    }
}

void streams_end_all(struct admin *admin) {
    for (struct stream *stream = admin->streams, *next; stream != NULL; stream = next) {
        next = stream->next;
        if (!stream->begun || stream->reading || stream->ended)
            continue; /* it ends when it was read, or has */
        stream->ended = true;
        exchange_end(stream->exchange);
    }
}
