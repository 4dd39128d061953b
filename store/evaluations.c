/* SPDX-License-Identifier: Apache-2.0 */
#include "store/records.h"

#define EVALUATION_COLUMNS                                                                                             \
    "id, status, model, request, metadata, report, error_code, error_message, error_param, created, finished, done, "  \
    "total"

struct evaluation_reader {
    evaluation_each each;
    void *context;
    bool found;
};

static int evaluation_row(void *context, const struct row *row) {
    struct evaluation_reader *reader = context;
    struct evaluation_record evaluation = {.id = row_text(row, 0),
        .status = row_text(row, 1),
        .model = row_text(row, 2),
        .request = row_text(row, 3),
        .metadata = row_text(row, 4),
        .report = row_text(row, 5),
        .error_code = row_text(row, 6),
        .error_message = row_text(row, 7),
        .error_param = row_text(row, 8),
        .created = row_integer(row, 9),
        .finished = row_integer(row, 10),
        .done = row_integer(row, 11),
        .total = row_integer(row, 12)};
    reader->found = true;
    return reader->each(reader->context, &evaluation);
}

int evaluations_insert(struct database *database, const struct evaluation_record *evaluation, struct error *error) {
    int changed = database_run(database, error,
        "INSERT INTO evaluations(id, status, model, request, metadata, created) VALUES(?, 'queued', ?, ?, ?, ?)",
        "tttti", evaluation->id, evaluation->model, evaluation->request, evaluation->metadata, evaluation->created);
    return changed < 0 ? changed : 0;
}

int evaluations_find(
    struct database *database, const char *id, evaluation_each each, void *context, struct error *error) {
    struct evaluation_reader reader = {.each = each, .context = context};
    int code = database_query(database, error, evaluation_row, &reader,
        "SELECT " EVALUATION_COLUMNS " FROM evaluations WHERE id = ?", "t", id);
    return code < 0 ? code : reader.found;
}

int evaluations_list(
    struct database *database, const struct page *page, evaluation_each each, void *context, struct error *error) {
    struct evaluation_reader reader = {.each = each, .context = context};
    return database_query(database, error, evaluation_row, &reader,
        "SELECT " EVALUATION_COLUMNS " FROM evaluations WHERE (?1 IS NULL OR number < (SELECT number FROM evaluations "
        "WHERE id = ?1)) ORDER BY number DESC LIMIT ?2",
        "ti", page->after, page->limit);
}

int evaluations_move(struct database *database, const char *id, const char *from, const char *to, int64_t finished,
    struct error *error) {
    return database_run(database, error,
        "UPDATE evaluations SET status = ?1, finished = ?2 WHERE id = ?3 AND instr(',' || ?4 || ',', ',' || status || "
        "',') > 0",
        "tztt", to, finished, id, from);
}

int evaluations_update(struct database *database, const struct evaluation_record *evaluation, struct error *error) {
    return database_run(database, error,
        "UPDATE evaluations SET done = ?1, total = ?2, report = coalesce(?3, report), error_code = ?4, error_message = "
        "?5, error_param = ?6, finished = ?7, status = CASE WHEN ?5 IS NOT NULL THEN 'failed' WHEN ?3 IS NOT NULL THEN "
        "'succeeded' ELSE status END WHERE id = ?8 AND status = 'running'",
        "iittttzt", evaluation->done, evaluation->total, evaluation->report, evaluation->error_code,
        evaluation->error_message, evaluation->error_param, evaluation->finished, evaluation->id);
}
