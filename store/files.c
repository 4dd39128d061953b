/* SPDX-License-Identifier: Apache-2.0 */
#include "store/records.h"

#include <stdio.h>
#include <string.h>

#define FILE_COLUMNS "id, filename, purpose, stored, created, bytes"

struct file_reader {
    file_each each;
    void *context;
    bool found;
};

static int file_row(void *context, const struct row *row) {
    struct file_reader *reader = context;
    struct file_record file = {.id = row_text(row, 0),
        .filename = row_text(row, 1),
        .purpose = row_text(row, 2),
        .stored = row_text(row, 3),
        .created = row_integer(row, 4),
        .bytes = row_integer(row, 5)};
    reader->found = true;
    return reader->each(reader->context, &file);
}

int files_insert(struct database *database, const struct file_record *file, struct error *error) {
    int changed = database_run(database, error, "INSERT INTO files(" FILE_COLUMNS ") VALUES(?, ?, ?, ?, ?, ?)",
        "ttttii", file->id, file->filename, file->purpose, file->stored, file->created, file->bytes);
    return changed < 0 ? changed : 0;
}

int files_find(struct database *database, const char *id, file_each each, void *context, struct error *error) {
    struct file_reader reader = {.each = each, .context = context};
    int code =
        database_query(database, error, file_row, &reader, "SELECT " FILE_COLUMNS " FROM files WHERE id = ?", "t", id);
    return code < 0 ? code : reader.found;
}

int files_list(struct database *database, const struct page *page, const char *purpose, file_each each, void *context,
    struct error *error) {
    struct file_reader reader = {.each = each, .context = context};
    const char *sql = page->oldest_first
                          ? "SELECT " FILE_COLUMNS " FROM files WHERE (?1 IS NULL OR number > (SELECT number FROM "
                            "files WHERE id = ?1)) AND (?2 IS NULL OR purpose = ?2) ORDER BY number LIMIT ?3"
                          : "SELECT " FILE_COLUMNS " FROM files WHERE (?1 IS NULL OR number < (SELECT number FROM "
                            "files WHERE id = ?1)) AND (?2 IS NULL OR purpose = ?2) ORDER BY number DESC LIMIT ?3";
    return database_query(database, error, file_row, &reader, sql, "tti", page->after, purpose, page->limit);
}

int files_delete(struct database *database, const char *id, struct error *error) {
    return database_run(database, error, "DELETE FROM files WHERE id = ?", "t", id);
}

static int exists_row(void *context, const struct row *row) {
    (void)row;
    *(bool *)context = true;
    return 1;
}

int records_exist(struct database *database, const char *table, const char *id, struct error *error) {
    char sql[80];
    bool found = false;
    snprintf(sql, sizeof sql, "SELECT 1 FROM %s WHERE id = ?", table);
    int code = database_query(database, error, exists_row, &found, sql, "t", id);
    return code < 0 ? code : found;
}
