/* SPDX-License-Identifier: Apache-2.0 */
#include "store/store.h"

#include "engine/log.h"
#include "store/sweep.h"

#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <time.h>
#include <unistd.h>

enum { RESERVE_BYTES = 1 << 20, BATCH_MAX = 256, PACE_MAX = 1024 };

static const char *const folders[] = {NULL, "files", "policies", "jobs"};
enum { FOLDERS = sizeof folders / sizeof folders[0] };

/* Posted work, and a caller's that waits on its own stack. */
struct store_work {
    store_run run;
    store_done done;
    void *state;
    struct store_work *next;
    bool waits; /* owned by a caller that waits */
    bool over;
    int code;
    struct error error;
};

struct work_list {
    struct store_work *first, **last;
    size_t count;
};

struct store {
    char *directory;
    int lock;
    struct database *database;
    void (*wake)(void *context);
    void *wake_context;
    bool reserved; /* the reserve is on the disk; the store's thread */
    pthread_t thread;
    bool started;
    pthread_mutex_t mutex;
    pthread_cond_t posted, finished; /* finished: calls that wait, and pace */
    struct work_list queue;          /* under mutex */
    struct work_list results;        /* under mutex: done is to be called */
    bool closing;
};

int64_t store_now(void) {
    struct timespec now;
    clock_gettime(CLOCK_REALTIME, &now);
    return (int64_t)now.tv_sec * 1000000 + now.tv_nsec / 1000;
}

/* --- Lists --- */

static void list_clear(struct work_list *list) {
    list->first = NULL;
    list->last = &list->first;
    list->count = 0;
}

static void list_add(struct work_list *list, struct store_work *work) {
    work->next = NULL;
    *list->last = work;
    list->last = &work->next;
    list->count++;
}

static struct store_work *list_take(struct work_list *list) {
    struct store_work *work = list->first;
    if (work == NULL)
        return NULL;
    list->first = work->next;
    if (list->first == NULL)
        list->last = &list->first;
    list->count--;
    return work;
}

/* --- Files --- */

int store_path(const struct store *store, const char *folder, const char *name, char *out, size_t size) {
    int length = snprintf(out, size, "%s%s%s%s%s", store->directory, folder == NULL ? "" : "/",
        folder == NULL ? "" : folder, name == NULL ? "" : "/", name == NULL ? "" : name);
    return length < 0 || (size_t)length >= size ? -1 : 0;
}

int store_sync_folder(const struct store *store, const char *folder, struct error *error) {
    char path[STORE_PATH_MAX];
    if (store_path(store, folder, NULL, path, sizeof path) != 0)
        return error_set(error, ERROR_INVALID, "the path is too long");
    int fd = open(path, O_RDONLY | O_DIRECTORY | O_CLOEXEC);
    bool failed = fd < 0 || fsync(fd) != 0;
    int code = failed ? error_set(error, ERROR_IO, "cannot sync %.300s: %s", path, strerror(errno)) : 0;
    if (fd >= 0)
        close(fd);
    return code;
}

/* Blocks that are surely on the disk. Without them everything works as well, but for a full disk. */
static void store_reserve(struct store *store) {
    char path[STORE_PATH_MAX];
    if (store->reserved || store_path(store, NULL, "reserve", path, sizeof path) != 0)
        return;
    int fd = open(path, O_WRONLY | O_CREAT | O_CLOEXEC, 0600);
    if (fd < 0)
        return;
    store->reserved = posix_fallocate(fd, 0, RESERVE_BYTES) == 0;
    close(fd);
    if (!store->reserved)
        unlink(path);
}

static bool store_give_up_reserve(struct store *store) {
    char path[STORE_PATH_MAX];
    if (!store->reserved || store_path(store, NULL, "reserve", path, sizeof path) != 0)
        return false;
    store->reserved = false;
    log_event(LOG_ERROR, NULL, "the disk of the state directory is full: its reserve is used", "directory",
        LOG_STRING(store->directory), NULL);
    return unlink(path) == 0;
}

static int store_make_folder(const struct store *store, const char *folder, struct error *error) {
    char path[STORE_PATH_MAX];
    if (store_path(store, folder, NULL, path, sizeof path) != 0)
        return error_set(error, ERROR_INVALID, "the path of the state directory is too long");
    if (mkdir(path, 0700) != 0 && errno != EEXIST)
        return error_set(error, ERROR_IO, "cannot create the folder %.300s: %s", path, strerror(errno));
    return 0;
}

static int store_lock(struct store *store, struct error *error) {
    char path[STORE_PATH_MAX];
    store_path(store, NULL, "lock", path, sizeof path);
    store->lock = open(path, O_RDWR | O_CREAT | O_CLOEXEC, 0600);
    if (store->lock < 0)
        return error_set(error, ERROR_IO, "cannot open %.300s: %s", path, strerror(errno));
    if (flock(store->lock, LOCK_EX | LOCK_NB) != 0)
        return error_set(error, ERROR_IO, "the state directory %.300s is in use by another process", store->directory);
    return 0;
}

static bool store_folder_has_files(const struct store *store, const char *folder) {
    char path[STORE_PATH_MAX];
    bool found = false;
    DIR *list = store_path(store, folder, NULL, path, sizeof path) == 0 ? opendir(path) : NULL;
    for (const struct dirent *entry; list != NULL && !found && (entry = readdir(list)) != NULL;)
        found = entry->d_name[0] != '.';
    if (list != NULL)
        closedir(list);
    return found;
}

/* A new database beside the files of a lost one would take them for nobody's, and sweep them away. */
static int store_check_not_lost(const struct store *store, const char *path, struct error *error) {
    struct stat status;
    if (stat(path, &status) == 0 && status.st_size > 0)
        return 0;
    for (size_t i = 1; i < FOLDERS; i++)
        if (store_folder_has_files(store, folders[i]))
            return error_set(error, ERROR_FORMAT,
                "%.300s: missing or empty, but %s/ beside it holds files: put it back, or begin with another directory",
                path, folders[i]);
    return 0;
}

/* SQLite takes over the mode of a file that is there. A failure is found when it opens the file. */
static void store_make_private(const char *path) {
    int fd = open(path, O_RDWR | O_CREAT | O_CLOEXEC, 0600);
    if (fd >= 0)
        close(fd);
}

/* --- The thread --- */

static void store_run_one(struct store *store, struct store_work *work) {
    work->error = (struct error){0};
    work->code = database_savepoint(store->database, &work->error);
    if (work->code == 0)
        work->code = work->run(store->database, work->state, &work->error);
    database_release(store->database, work->code >= 0);
}

/* A transaction of `count` pieces. 0: each knows its own end. Else nothing was done. */
static int store_run_transaction(struct store *store, struct store_work *first, size_t count, struct error *error) {
    int code = database_begin(store->database, error);
    for (struct store_work *work = first; count > 0 && code == 0; work = work->next, count--) {
        store_run_one(store, work);
        if (!database_in_transaction(store->database)) { /* an error has undone it all */
            *error = work->error;
            code = work->code < 0 ? work->code : error_set(error, ERROR_IO, "the transaction was undone");
        }
    }
    if (code == 0)
        code = database_commit(store->database, error);
    if (code != 0)
        database_rollback(store->database);
    return code;
}

/* All in one transaction; if that fails each in one of its own, so that who only reads does not fail with others. */
static void store_run_batch(struct store *store, struct work_list *batch) {
    struct error error = {0};
    int code = store_run_transaction(store, batch->first, batch->count, &error);
    bool more = database_is_full(store->database) && store_give_up_reserve(store);
    if (code == 0)
        return;
    for (struct store_work *work = batch->first; work != NULL; work = work->next) {
        if (more || batch->count > 1)
            code = store_run_transaction(store, work, 1, &error);
        if (code == 0)
            continue;
        log_event(LOG_ERROR, NULL, "cannot write the state", "message", LOG_STRING(error.message), NULL);
        work->code = code;
        work->error = error;
    }
}

static void store_hand_back(struct store *store, struct work_list *batch) {
    struct store_work *work;
    bool wake = false;
    pthread_mutex_lock(&store->mutex);
    while ((work = list_take(batch)) != NULL) {
        if (work->waits)
            work->over = true; /* it may be gone as soon as the mutex is free */
        else
            list_add(&store->results, work);
        wake = true;
    }
    pthread_cond_broadcast(&store->finished);
    pthread_mutex_unlock(&store->mutex);
    if (wake && store->wake != NULL)
        store->wake(store->wake_context);
}

static void *store_thread(void *context) {
    struct store *store = context;
    for (;;) {
        struct work_list batch;
        struct store_work *work;
        list_clear(&batch);
        pthread_mutex_lock(&store->mutex);
        while (store->queue.first == NULL && !store->closing)
            pthread_cond_wait(&store->posted, &store->mutex);
        while (batch.count < BATCH_MAX && (work = list_take(&store->queue)) != NULL)
            list_add(&batch, work);
        pthread_mutex_unlock(&store->mutex);
        if (batch.first == NULL)
            return NULL;
        store_run_batch(store, &batch);
        store_hand_back(store, &batch);
    }
}

static void store_enqueue(struct store *store, struct store_work *work) {
    pthread_mutex_lock(&store->mutex);
    list_add(&store->queue, work);
    pthread_cond_signal(&store->posted);
    pthread_mutex_unlock(&store->mutex);
}

int store_post(struct store *store, store_run run, store_done done, void *state) {
    struct store_work *work = calloc(1, sizeof *work);
    if (work == NULL)
        return ERROR_MEMORY;
    work->run = run;
    work->done = done;
    work->state = state;
    store_enqueue(store, work);
    return 0;
}

int store_call(struct store *store, store_run run, void *state, struct error *error) {
    struct store_work work = {.run = run, .state = state, .waits = true};
    store_enqueue(store, &work);
    pthread_mutex_lock(&store->mutex);
    while (!work.over)
        pthread_cond_wait(&store->finished, &store->mutex);
    pthread_mutex_unlock(&store->mutex);
    if (work.code < 0 && error != NULL)
        *error = work.error;
    return work.code;
}

void store_pace(struct store *store) {
    pthread_mutex_lock(&store->mutex);
    while (store->queue.count > PACE_MAX)
        pthread_cond_wait(&store->finished, &store->mutex);
    pthread_mutex_unlock(&store->mutex);
}

void store_poll(struct store *store) {
    struct work_list results;
    struct store_work *work;
    list_clear(&results);
    pthread_mutex_lock(&store->mutex);
    while ((work = list_take(&store->results)) != NULL)
        list_add(&results, work);
    pthread_mutex_unlock(&store->mutex);
    while ((work = list_take(&results)) != NULL) {
        if (work->done != NULL)
            work->done(work->state, work->code < 0 ? &work->error : NULL);
        free(work);
    }
}

/* --- Life --- */

struct store *store_open(const struct store_options *options, struct error *error) {
    char path[STORE_PATH_MAX];
    struct store *store = calloc(1, sizeof *store);
    if (store == NULL || (store->directory = strdup(options->directory)) == NULL) {
        free(store);
        error_set(error, ERROR_MEMORY, "no memory for the state directory");
        return NULL;
    }
    store->lock = -1;
    store->wake = options->wake;
    store->wake_context = options->wake_context;
    pthread_mutex_init(&store->mutex, NULL);
    pthread_cond_init(&store->posted, NULL);
    pthread_cond_init(&store->finished, NULL);
    list_clear(&store->queue);
    list_clear(&store->results);
    int code = 0;
    for (size_t i = 0; i < FOLDERS && code == 0; i++) {
        code = store_make_folder(store, folders[i], error);
        if (code == 0 && i == 0)
            code = store_lock(store, error);
    }
    if (code == 0 && store_path(store, NULL, "state.sqlite", path, sizeof path - 16) != 0)
        code = error_set(error, ERROR_INVALID, "the path of the state directory is too long");
    if (code == 0)
        code = store_check_not_lost(store, path, error);
    if (code != 0)
        goto fail;
    store_reserve(store);
    store_make_private(path);
    store->database = database_open(path, error);
    if (store->database == NULL)
        goto fail;
    store_sweep(store, store->database);
    if (pthread_create(&store->thread, NULL, store_thread, store) != 0) {
        error_set(error, ERROR_MEMORY, "cannot start the thread of the store");
        goto fail;
    }
    store->started = true;
    return store;
fail:
    store_close(store);
    return NULL;
}

void store_close(struct store *store) {
    if (store == NULL)
        return;
    if (store->started) {
        pthread_mutex_lock(&store->mutex);
        store->closing = true;
        pthread_cond_signal(&store->posted);
        pthread_mutex_unlock(&store->mutex);
        pthread_join(store->thread, NULL);
        store_poll(store);
    }
    database_close(store->database);
    if (store->lock >= 0)
        close(store->lock);
    pthread_cond_destroy(&store->finished);
    pthread_cond_destroy(&store->posted);
    pthread_mutex_destroy(&store->mutex);
    free(store->directory);
    free(store);
}
