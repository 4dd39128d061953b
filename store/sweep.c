/* SPDX-License-Identifier: Apache-2.0 */
#include "store/sweep.h"

#include "engine/log.h"
#include "store/records.h"

#include <dirent.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

static const char cancelled[] = "SELECT id FROM jobs WHERE status = 'cancelled'";

struct sweep {
    const struct store *store;
    struct database *database;
    uint64_t removed;
};

static void sweep_unlink(struct sweep *sweep, const char *folder, const char *name) {
    char path[STORE_PATH_MAX];
    if (store_path(sweep->store, folder, name, path, sizeof path) == 0 && unlink(path) == 0)
        sweep->removed++;
}

/* --- Files --- */

static int sweep_found(void *context, const struct row *row) {
    (void)row;
    *(bool *)context = true;
    return 1;
}

/* Without an answer from the database nothing is anybody's guess. */
static bool sweep_is_orphan(const struct sweep *sweep, const char *name) {
    bool found = false;
    if (strncmp(name, ".upload-", 8) == 0)
        return true;
    return strncmp(name, "file-", 5) == 0 &&
           database_query(
               sweep->database, NULL, sweep_found, &found, "SELECT 1 FROM files WHERE stored = ?", "t", name) >= 0 &&
           !found;
}

static void sweep_files(struct sweep *sweep) {
    char path[STORE_PATH_MAX];
    DIR *folder = store_path(sweep->store, "files", NULL, path, sizeof path) == 0 ? opendir(path) : NULL;
    struct dirent *entry;
    while (folder != NULL && (entry = readdir(folder)) != NULL)
        if (sweep_is_orphan(sweep, entry->d_name))
            sweep_unlink(sweep, "files", entry->d_name);
    if (folder != NULL)
        closedir(folder);
}

/* --- Jobs and policies --- */

/* Their files are in one folder without others in it. */
static int sweep_job(void *context, const struct row *row) {
    struct sweep *sweep = context;
    char name[128], path[STORE_PATH_MAX];
    snprintf(name, sizeof name, "jobs/%.100s", row_text(row, 0));
    DIR *folder = store_path(sweep->store, name, NULL, path, sizeof path) == 0 ? opendir(path) : NULL;
    struct dirent *entry;
    if (folder == NULL)
        return 0;
    while ((entry = readdir(folder)) != NULL)
        if (strcmp(entry->d_name, ".") != 0 && strcmp(entry->d_name, "..") != 0)
            sweep_unlink(sweep, name, entry->d_name);
    closedir(folder);
    rmdir(path);
    return 0;
}

static int sweep_policy(void *context, const struct row *row) {
    static const char *const endings[] = {"safetensors", "json"};
    char name[256];
    for (size_t i = 0; i < sizeof endings / sizeof endings[0]; i++) {
        snprintf(name, sizeof name, "%.200s.%s", row_text(row, 0), endings[i]);
        sweep_unlink(context, "policies", name);
    }
    return 0;
}

void store_sweep(const struct store *store, struct database *database) {
    struct sweep sweep = {.store = store, .database = database};
    sweep_files(&sweep);
    database_query(database, NULL, sweep_job, &sweep, cancelled, "");
    database_run(
        database, NULL, "DELETE FROM checkpoints WHERE job IN (SELECT id FROM jobs WHERE status = 'cancelled')", "");
    database_query(database, NULL, sweep_policy, &sweep,
        "SELECT policy FROM jobs WHERE status IN ('succeeded', 'failed', 'cancelled') AND policy NOT IN (SELECT name "
        "FROM policies)",
        "");
    if (sweep.removed > 0)
        log_event(
            LOG_INFO, NULL, "removed what was left in the state directory", "files", LOG_INT(sweep.removed), NULL);
}

/* --- One job --- */

struct discard {
    const struct store *store;
    char job[128];
};

static int discard_run(struct database *database, void *state, struct error *error) {
    const struct discard *discard = state;
    struct sweep sweep = {.store = discard->store, .database = database};
    char sql[120];
    snprintf(sql, sizeof sql, "%s AND id = ?", cancelled);
    int code = database_query(database, error, sweep_job, &sweep, sql, "t", discard->job);
    if (code < 0)
        return code;
    return database_run(database, error,
        "DELETE FROM checkpoints WHERE job IN (SELECT id FROM jobs WHERE status = 'cancelled' AND id = ?)", "t",
        discard->job);
}

static void discard_done(void *state, const struct error *error) {
    (void)error; /* the next start does it */
    free(state);
}

void store_discard_job(struct store *store, const char *job) {
    struct discard *discard = calloc(1, sizeof *discard);
    if (discard == NULL)
        return;
    discard->store = store;
    snprintf(discard->job, sizeof discard->job, "%s", job);
    if (store_post(store, discard_run, discard_done, discard) != 0)
        free(discard);
}
