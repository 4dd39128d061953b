/* SPDX-License-Identifier: Apache-2.0
 *
 * The SQLite file of a state directory: opening with all checks, transactions, and statements without ceremony. One
 * thread at a time; the store's (store.h).
 *
 * Parameters of statements are given by a format, one letter each:
 *   t  const char *   text; NULL is NULL
 *   i  int64_t        whole number
 *   z  int64_t        whole number; 0 is NULL (times and such that are not known)
 *   d  double         number; NaN is NULL
 */
#ifndef STORE_DATABASE_H
#define STORE_DATABASE_H

#include "engine/error.h"

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

struct database; /* opaque */
struct row;      /* opaque: of a query, valid inside its callback */

/* Creates the file when there is none. Refused by ERROR_FORMAT: a file that is no database or damaged, one of another
 * program, one that a newer version of this program has written. Also ERROR_IO, ERROR_MEMORY. In write-ahead mode, with
 * foreign keys, every commit synced. */
struct database *database_open(const char *file, struct error *error);
void database_close(struct database *database); /* NULL allowed */

/* 0, ERROR_IO (also: the disk is full), ERROR_MEMORY. An error inside a transaction may have ended it. */
int database_begin(struct database *database, struct error *error);
int database_commit(struct database *database, struct error *error);
void database_rollback(struct database *database);
bool database_in_transaction(const struct database *database);
int database_savepoint(struct database *database, struct error *error);
void database_release(struct database *database, bool keep); /* the savepoint: what was done since stays, or goes */
/* Since database_begin an error said that the disk is full. */
bool database_is_full(const struct database *database);

/* Runs a statement. Returns the number of rows that it changed, or a negative code. */
int database_run(struct database *database, struct error *error, const char *sql, const char *format, ...);

/* Calls each(context, row) for every row until it returns other than 0. Returns that, 0 after the last row, or a
 * negative code. */
typedef int (*database_each)(void *context, const struct row *row);
int database_query(struct database *database, struct error *error, database_each each, void *context, const char *sql,
    const char *format, ...);

/* Columns from 0. Texts live until the callback returns; NULL is NULL, 0 or NaN. */
const char *row_text(const struct row *row, int column);
int64_t row_integer(const struct row *row, int column);
double row_number(const struct row *row, int column);

#endif
