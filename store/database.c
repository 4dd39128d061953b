/* SPDX-License-Identifier: Apache-2.0 */
#include "store/database.h"

#include "store/schema.h"

#include <fcntl.h>
#include <math.h>
#include <sqlite3.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

/* Of the write-ahead log: what is on the disk from the start, and pages of 4 KiB after which it is emptied. */
enum { LOG_BYTES = 2 << 20, LOG_PAGES = 256 };

struct database {
    sqlite3 *handle;
    char *file;
    bool full;
};

/* --- Errors --- */

static int database_error(struct database *database, struct error *error, const char *doing) {
    int code = sqlite3_errcode(database->handle);
    database->full |= code == SQLITE_FULL;
    if (code == SQLITE_NOMEM)
        return error_set(error, ERROR_MEMORY, "no memory for %.300s", database->file);
    if (code == SQLITE_NOTADB || code == SQLITE_CORRUPT)
        return error_set(error, ERROR_FORMAT, "%.300s: damaged, or not a database: %s", database->file,
            sqlite3_errmsg(database->handle));
    return error_set(error, ERROR_IO, "%.300s: cannot %s: %s", database->file, doing, sqlite3_errmsg(database->handle));
}

bool database_is_full(const struct database *database) {
    return database->full;
}

/* --- Statements --- */

static int database_bind(sqlite3_stmt *statement, const char *format, va_list arguments) {
    int code = SQLITE_OK;
    for (int i = 1; format[i - 1] != '\0' && code == SQLITE_OK; i++) {
        char kind = format[i - 1];
        if (kind == 't') {
            code = sqlite3_bind_text(statement, i, va_arg(arguments, const char *), -1, SQLITE_TRANSIENT);
        } else if (kind == 'd') {
            double value = va_arg(arguments, double);
            code = isnan(value) ? sqlite3_bind_null(statement, i) : sqlite3_bind_double(statement, i, value);
        } else {
            int64_t value = va_arg(arguments, int64_t);
            bool null = kind == 'z' && value == 0;
            code = null ? sqlite3_bind_null(statement, i) : sqlite3_bind_int64(statement, i, value);
        }
    }
    return code;
}

static int database_execute(struct database *database, struct error *error, database_each each, void *context,
    const char *sql, const char *format, va_list arguments) {
    sqlite3_stmt *statement = NULL;
    int code = 0;
    if (sqlite3_prepare_v2(database->handle, sql, -1, &statement, NULL) != SQLITE_OK ||
        database_bind(statement, format, arguments) != SQLITE_OK) {
        code = database_error(database, error, "read or write");
        goto out;
    }
    int step;
    while ((step = sqlite3_step(statement)) == SQLITE_ROW && code == 0)
        code = each == NULL ? 0 : each(context, (const struct row *)statement);
    if (step != SQLITE_ROW && step != SQLITE_DONE)
        code = database_error(database, error, "read or write");
out:
    sqlite3_finalize(statement);
    return code;
}

int database_run(struct database *database, struct error *error, const char *sql, const char *format, ...) {
    va_list arguments;
    va_start(arguments, format);
    int code = database_execute(database, error, NULL, NULL, sql, format, arguments);
    va_end(arguments);
    return code == 0 ? sqlite3_changes(database->handle) : code;
}

int database_query(struct database *database, struct error *error, database_each each, void *context, const char *sql,
    const char *format, ...) {
    va_list arguments;
    va_start(arguments, format);
    int code = database_execute(database, error, each, context, sql, format, arguments);
    va_end(arguments);
    return code;
}

const char *row_text(const struct row *row, int column) {
    return (const char *)sqlite3_column_text((sqlite3_stmt *)row, column);
}

int64_t row_integer(const struct row *row, int column) {
    return sqlite3_column_int64((sqlite3_stmt *)row, column);
}

double row_number(const struct row *row, int column) {
    sqlite3_stmt *statement = (sqlite3_stmt *)row;
    return sqlite3_column_type(statement, column) == SQLITE_NULL ? NAN : sqlite3_column_double(statement, column);
}

/* --- Transactions --- */

static int database_script(struct database *database, const char *sql, struct error *error) {
    if (sqlite3_exec(database->handle, sql, NULL, NULL, NULL) != SQLITE_OK)
        return database_error(database, error, "write");
    return 0;
}

int database_begin(struct database *database, struct error *error) {
    database->full = false;
    return database_script(database, "BEGIN", error);
}

int database_commit(struct database *database, struct error *error) {
    return database_script(database, "COMMIT", error);
}

void database_rollback(struct database *database) {
    if (database_in_transaction(database))
        sqlite3_exec(database->handle, "ROLLBACK", NULL, NULL, NULL);
}

bool database_in_transaction(const struct database *database) {
    return sqlite3_get_autocommit(database->handle) == 0;
}

int database_savepoint(struct database *database, struct error *error) {
    return database_script(database, "SAVEPOINT work", error);
}

void database_release(struct database *database, bool keep) {
    if (!database_in_transaction(database))
        return;
    if (!keep)
        sqlite3_exec(database->handle, "ROLLBACK TO work", NULL, NULL, NULL);
    sqlite3_exec(database->handle, "RELEASE work", NULL, NULL, NULL);
}

/* --- Opening --- */

static int take_integer(void *context, const struct row *row) {
    *(int64_t *)context = row_integer(row, 0);
    return 0;
}

struct check {
    char finding[160]; /* the first one */
};

static int take_finding(void *context, const struct row *row) {
    struct check *check = context;
    const char *text = row_text(row, 0);
    if (text == NULL || strcmp(text, "ok") == 0)
        return 0;
    snprintf(check->finding, sizeof check->finding, "%s", text);
    return 1;
}

static int database_check(struct database *database, struct error *error) {
    struct check check = {{0}};
    int code = database_query(database, error, take_finding, &check, "PRAGMA quick_check(1)", "");
    if (code < 0)
        return code;
    if (check.finding[0] == '\0' &&
        database_query(database, error, take_finding, &check, "PRAGMA foreign_key_check", "") < 0)
        return error->code;
    if (check.finding[0] != '\0')
        return error_set(error, ERROR_FORMAT, "%.300s: damaged: %s", database->file, check.finding);
    return 0;
}

/* Whose file it is and of which version: creates the tables of a new one. */
static int database_prepare_schema(struct database *database, struct error *error) {
    int64_t application = 0, version = 0, tables = 0;
    int code = database_query(database, error, take_integer, &tables, "SELECT count(*) FROM sqlite_schema", "");
    if (code == 0)
        code = database_query(database, error, take_integer, &application, "PRAGMA application_id", "");
    if (code == 0)
        code = database_query(database, error, take_integer, &version, "PRAGMA user_version", "");
    if (code != 0)
        return code;
    if (tables > 0 && application != SCHEMA_APPLICATION)
        return error_set(error, ERROR_FORMAT, "%.300s: a database of another program", database->file);
    if (version > SCHEMA_VERSION)
        return error_set(error, ERROR_FORMAT,
            "%.300s: written by a newer version of distillcache (schema %lld; this one knows %d)", database->file,
            (long long)version, SCHEMA_VERSION);
    if (tables > 0)
        return database_check(database, error);
    return database_script(database, schema_script, error);
}

/* On a full disk what goes into the log can still be written: it has its blocks, of which it uses one after the other
 * whatever the file's size is. Without them everything works as well, but for a full disk. */
static void database_reserve_log(struct database *database) {
    char sql[64];
    char *name = sqlite3_mprintf("%s-wal", database->file);
    int fd = name == NULL ? -1 : open(name, O_WRONLY | O_CREAT | O_CLOEXEC, 0600);
    snprintf(sql, sizeof sql, "PRAGMA wal_autocheckpoint = %d", LOG_PAGES);
    if (fd >= 0 && posix_fallocate(fd, 0, LOG_BYTES) == 0)
        database_script(database, sql, NULL);
    if (fd >= 0)
        close(fd);
    sqlite3_free(name);
}

struct database *database_open(const char *file, struct error *error) {
    struct database *database = calloc(1, sizeof *database);
    struct error local;
    error = error == NULL ? &local : error;
    if (database == NULL || (database->file = strdup(file)) == NULL) {
        free(database);
        error_set(error, ERROR_MEMORY, "no memory for %.300s", file);
        return NULL;
    }
    int flags = SQLITE_OPEN_READWRITE | SQLITE_OPEN_CREATE | SQLITE_OPEN_NOMUTEX;
    if (sqlite3_open_v2(file, &database->handle, flags, NULL) != SQLITE_OK) {
        if (database->handle == NULL)
            error_set(error, ERROR_MEMORY, "no memory for %.300s", file);
        else
            database_error(database, error, "open");
        goto fail;
    }
    sqlite3_extended_result_codes(database->handle, 0);
    /* The first statement that reads the file is where a damaged one is found out. */
    if (database_prepare_schema(database, error) != 0 ||
        database_script(
            database, "PRAGMA journal_mode = WAL; PRAGMA synchronous = FULL; PRAGMA foreign_keys = ON;", error) != 0)
        goto fail;
    database_reserve_log(database);
    return database;
fail:
    database_close(database);
    return NULL;
}

void database_close(struct database *database) {
    if (database == NULL)
        return;
    sqlite3_close_v2(database->handle);
    free(database->file);
    free(database);
}
