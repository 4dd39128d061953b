/* SPDX-License-Identifier: Apache-2.0 */
#include "store/records.h"

#define EVENT_COLUMNS "id, job, level, type, message, data, created, number"
#define CHECKPOINT_COLUMNS "id, job, file, metrics, created, step"

struct event_reader {
    event_each each;
    void *context;
};

static int event_row(void *context, const struct row *row) {
    const struct event_reader *reader = context;
    struct event_record event = {.id = row_text(row, 0),
        .job = row_text(row, 1),
        .level = row_text(row, 2),
        .type = row_text(row, 3),
        .message = row_text(row, 4),
        .data = row_text(row, 5),
        .created = row_integer(row, 6),
        .number = row_integer(row, 7)};
    return reader->each(reader->context, &event);
}

static int number_row(void *context, const struct row *row) {
    *(int64_t *)context = row_integer(row, 0);
    return 1;
}

int events_insert(struct database *database, const struct event_record *event, int64_t *number, struct error *error) {
    int code = database_query(database, error, number_row, number,
        "INSERT INTO events(id, job, level, type, message, data, created) VALUES(?, ?, ?, ?, ?, ?, ?) RETURNING number",
        "tttttti", event->id, event->job, event->level, event->type, event->message, event->data, event->created);
    return code < 0 ? code : 0;
}

static int event_found(void *context, const struct row *row) {
    (void)context;
    (void)row;
    return 1;
}

int events_find(
    struct database *database, const char *job, const char *type, const char *message, struct error *error) {
    return database_query(database, error, event_found, NULL,
        "SELECT 1 FROM events WHERE job = ? AND type = ? AND message = ? LIMIT 1", "ttt", job, type, message);
}

int events_list(struct database *database, const char *job, const struct page *page, event_each each, void *context,
    struct error *error) {
    struct event_reader reader = {.each = each, .context = context};
    return database_query(database, error, event_row, &reader,
        "SELECT " EVENT_COLUMNS " FROM events WHERE job = ?1 AND (?2 IS NULL OR number < (SELECT number FROM events "
        "WHERE id = ?2)) ORDER BY number DESC LIMIT ?3",
        "tti", job, page->after, page->limit);
}

int events_since(struct database *database, const char *job, int64_t number, int64_t limit, event_each each,
    void *context, struct error *error) {
    struct event_reader reader = {.each = each, .context = context};
    return database_query(database, error, event_row, &reader,
        "SELECT " EVENT_COLUMNS " FROM events WHERE job = ?1 AND number > ?2 ORDER BY number LIMIT ?3", "tii", job,
        number, limit);
}

struct checkpoint_reader {
    checkpoint_each each;
    void *context;
};

static int checkpoint_row(void *context, const struct row *row) {
    const struct checkpoint_reader *reader = context;
    struct checkpoint_record checkpoint = {.id = row_text(row, 0),
        .job = row_text(row, 1),
        .file = row_text(row, 2),
        .metrics = row_text(row, 3),
        .created = row_integer(row, 4),
        .step = row_integer(row, 5)};
    return reader->each(reader->context, &checkpoint);
}

int checkpoints_insert(struct database *database, const struct checkpoint_record *checkpoint, struct error *error) {
    int changed = database_run(database, error,
        "INSERT INTO checkpoints(" CHECKPOINT_COLUMNS ") VALUES(?, ?, ?, ?, ?, ?) ON CONFLICT(job, step) DO UPDATE SET "
        "file = excluded.file, metrics = excluded.metrics",
        "ttttii", checkpoint->id, checkpoint->job, checkpoint->file, checkpoint->metrics, checkpoint->created,
        checkpoint->step);
    return changed < 0 ? changed : 0;
}

int checkpoints_list(struct database *database, const char *job, const struct page *page, checkpoint_each each,
    void *context, struct error *error) {
    struct checkpoint_reader reader = {.each = each, .context = context};
    return database_query(database, error, checkpoint_row, &reader,
        "SELECT " CHECKPOINT_COLUMNS " FROM checkpoints WHERE job = ?1 AND (?2 IS NULL OR number < (SELECT number FROM "
        "checkpoints WHERE id = ?2)) ORDER BY number DESC LIMIT ?3",
        "tti", job, page->after, page->limit);
}
