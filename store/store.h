/* SPDX-License-Identifier: Apache-2.0
 *
 * The state directory: its one process (lock), its folders, its database, and the thread that alone uses the database.
 * Read first.
 *
 *   STATE_DIR/lock             held while a process uses the directory
 *   STATE_DIR/state.sqlite     tables of schema.c (and its -wal, -shm)
 *   STATE_DIR/reserve          disk space that is given up when the disk is full, so that it can still be said
 *   STATE_DIR/files/           uploaded files; those that are not whole or have no record go at the start (sweep.h)
 *   STATE_DIR/policies/        policy files by name
 *   STATE_DIR/jobs/ID/         checkpoints of a job
 *
 * Work is done in the order in which it was posted. What has come together is one transaction, each piece in a
 * savepoint of its own: a piece that fails changes nothing. If it cannot be committed each piece is done again in a
 * transaction of its own. So done is called when the work is on the disk. Work must not do anything outside the
 * database that cannot be done in vain, or twice: each time it begins anew.
 */
#ifndef STORE_STORE_H
#define STORE_STORE_H

#include "store/database.h"

struct store; /* opaque */

/* On the store's thread, perhaps more than once. 0, or a negative code with error filled. */
typedef int (*store_run)(struct database *database, void *state, struct error *error);
/* On the thread that calls store_poll. error: NULL when the work was done. */
typedef void (*store_done)(void *state, const struct error *error);

struct store_options {
    const char *directory;       /* created if its parent exists */
    void (*wake)(void *context); /* any thread: something is to be polled; NULL: nobody waits */
    void *wake_context;
};

/* Everything is there and checked when it returns. ERROR_IO, ERROR_FORMAT, ERROR_MEMORY. */
struct store *store_open(const struct store_options *options, struct error *error);
/* Does what was posted, and calls done for it (on this thread). NULL allowed. */
void store_close(struct store *store);

/* Any thread; never waits. done may be NULL. ERROR_MEMORY: neither will be called. */
int store_post(struct store *store, store_run run, store_done done, void *state);
/* Any thread but the store's and one that must not wait: does the work and returns its code. */
int store_call(struct store *store, store_run run, void *state, struct error *error);
/* Waits while too much is posted: for threads that produce more than the disk takes. */
void store_pace(struct store *store);

void store_poll(struct store *store);

/* Joins the directory's path and a name in one of its folders ("files", "policies", "jobs"; NULL: none). 0, or -1 when
 * it does not fit. */
int store_path(const struct store *store, const char *folder, const char *name, char *out, size_t size);
enum { STORE_PATH_MAX = 4300 };

/* Syncs a folder of the directory, so that what was renamed in it stays. */
int store_sync_folder(const struct store *store, const char *folder, struct error *error);

int64_t store_now(void); /* microseconds of Unix time */

#endif
