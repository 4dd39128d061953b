/* SPDX-License-Identifier: Apache-2.0
 *
 * The state directory: records survive, work that fails changes nothing, many threads post at once, and files that are
 * damaged, foreign or newer are refused by a message that says so.
 */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>

#include "store/records.h"
#include "store/schema.h"
#include "store/store.h"
#include "store/sweep.h"

#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

static char directory[64];

static int setup(void **state) {
    (void)state;
    snprintf(directory, sizeof directory, "/tmp/test_store.XXXXXX");
    return mkdtemp(directory) == NULL ? -1 : 0;
}

static int teardown(void **state) {
    char command[100];
    (void)state;
    snprintf(command, sizeof command, "rm -rf %s", directory);
    return system(command) == 0 ? 0 : -1;
}

static struct store *open_store(void) {
    struct store_options options = {.directory = directory};
    struct error error = {0};
    struct store *store = store_open(&options, &error);
    if (store == NULL)
        fail_msg("%s", error.message);
    return store;
}

static void assert_refused(int code, const char *words) {
    struct store_options options = {.directory = directory};
    struct error error = {0};
    assert_null(store_open(&options, &error));
    assert_int_equal(error.code, code);
    if (strstr(error.message, words) == NULL || strstr(error.message, directory) == NULL)
        fail_msg("'%s' lacks '%s' or the directory", error.message, words);
}

static void write_file(const char *name, const void *bytes, size_t size, long offset) {
    char path[128];
    snprintf(path, sizeof path, "%s/%s", directory, name);
    FILE *file = fopen(path, offset > 0 ? "r+b" : "wb");
    assert_non_null(file);
    assert_int_equal(fseek(file, offset, SEEK_SET), 0);
    assert_int_equal(fwrite(bytes, 1, size, file), size);
    assert_int_equal(fclose(file), 0);
}

/* --- Work --- */

static int insert_job(struct database *database, void *state, struct error *error) {
    char policy[64];
    snprintf(policy, sizeof policy, "policy-of-%s", (const char *)state);
    struct job_record job = {.id = state,
        .model = "m",
        .fingerprint = "f",
        .training_file = "file-1",
        .method = "ranker",
        .recipe = "default",
        .hyperparameters = "{}",
        .chosen = "{}",
        .metadata = "{\"team\":\"a\",\"name\":\"quo\\\"te\"}",
        .policy = policy,
        .created = store_now(),
        .seed = 1};
    return jobs_insert(database, &job, error);
}

struct found {
    char ids[8][64], status[16], message[64];
    int count;
    int64_t step;
};

static int take_job(void *context, const struct job_record *job) {
    struct found *found = context;
    snprintf(found->ids[found->count++ % 8], 64, "%s", job->id);
    snprintf(found->status, sizeof found->status, "%s", job->status);
    snprintf(found->message, sizeof found->message, "%s", job->error_message == NULL ? "" : job->error_message);
    found->step = job->step;
    return 0;
}

struct lookup {
    const char *id;
    struct page page;
    struct found found;
    int result;
};

static int look_up(struct database *database, void *state, struct error *error) {
    struct lookup *lookup = state;
    lookup->result = lookup->id != NULL ? jobs_find(database, lookup->id, take_job, &lookup->found, error)
                                        : jobs_list(database, &lookup->page, take_job, &lookup->found, error);
    return lookup->result;
}

static void call(struct store *store, store_run run, void *state) {
    struct error error = {0};
    int code = store_call(store, run, state, &error);
    if (code < 0)
        fail_msg("%d: %s", code, error.message);
}

static const char *status_of(struct store *store, const char *id) {
    static struct lookup lookup;
    lookup = (struct lookup){.id = id};
    call(store, look_up, &lookup);
    assert_int_equal(lookup.found.count, 1);
    return lookup.found.status;
}

struct move {
    const char *id, *from, *to;
    int moved;
};

static int move_job(struct database *database, void *state, struct error *error) {
    struct move *move = state;
    move->moved = jobs_move(database, move->id, move->from, move->to, 0, error);
    return move->moved;
}

static int requeue(struct database *database, void *state, struct error *error) {
    (void)state;
    return jobs_requeue(database, error);
}

/* --- Tests --- */

static void records_survive_a_reopening(void **state) {
    (void)state;
    struct store *store = open_store();
    call(store, insert_job, "job-1");
    struct move move = {"job-1", "queued,paused", "running", 0};
    call(store, move_job, &move);
    assert_int_equal(move.moved, 1);
    store_close(store);
    store = open_store();
    assert_string_equal(status_of(store, "job-1"), "running");
    call(store, requeue, NULL);
    assert_string_equal(status_of(store, "job-1"), "queued");
    store_close(store);
}

static void moves_only_from_the_statuses_named(void **state) {
    (void)state;
    struct store *store = open_store();
    call(store, insert_job, "job-1");
    struct move move = {"job-1", "running,paused", "cancelled", 7};
    call(store, move_job, &move);
    assert_int_equal(move.moved, 0);
    assert_string_equal(status_of(store, "job-1"), "queued");
    move = (struct move){"job-1", "queue", "cancelled", 7}; /* a part of a name is no name */
    call(store, move_job, &move);
    assert_int_equal(move.moved, 0);
    store_close(store);
}

static void lists_are_newest_first_with_pages_and_metadata(void **state) {
    (void)state;
    static char ids[5][32];
    struct store *store = open_store();
    for (int i = 0; i < 5; i++) {
        snprintf(ids[i], sizeof ids[i], "job-%d", i);
        call(store, insert_job, ids[i]);
    }
    struct lookup lookup = {.page = {.limit = 2}};
    call(store, look_up, &lookup);
    assert_int_equal(lookup.found.count, 2);
    assert_string_equal(lookup.found.ids[0], "job-4");
    lookup = (struct lookup){.page = {.limit = 10, .after = "job-3"}};
    call(store, look_up, &lookup);
    assert_int_equal(lookup.found.count, 3);
    assert_string_equal(lookup.found.ids[0], "job-2");
    lookup = (struct lookup){.page = {.limit = 10, .metadata = "{\"team\":\"a\",\"name\":\"quo\\\"te\"}"}};
    call(store, look_up, &lookup);
    assert_int_equal(lookup.found.count, 5);
    lookup = (struct lookup){.page = {.limit = 10, .metadata = "{\"team\":\"b\"}"}};
    call(store, look_up, &lookup);
    assert_int_equal(lookup.found.count, 0);
    store_close(store);
}

static int insert_then_fail(struct database *database, void *state, struct error *error) {
    int code = insert_job(database, state, error);
    return code < 0 ? code : error_set(error, ERROR_INVALID, "thought better of it");
}

static void work_that_fails_changes_nothing(void **state) {
    (void)state;
    struct store *store = open_store();
    struct error error = {0};
    assert_int_equal(store_call(store, insert_then_fail, "job-1", &error), ERROR_INVALID);
    assert_string_equal(error.message, "thought better of it");
    call(store, insert_job, "job-1"); /* the id is free */
    assert_int_equal(store_call(store, insert_job, "job-1", &error), ERROR_IO);
    assert_non_null(strstr(error.message, "UNIQUE"));
    store_close(store);
}

static int insert_event(struct database *database, void *state, struct error *error) {
    static int count;
    char id[32];
    int64_t number = 0;
    snprintf(id, sizeof id, "event-%d", count++);
    struct event_record event = {
        .id = id, .job = state, .level = "info", .type = "message", .message = "m", .created = store_now()};
    int code = events_insert(database, &event, &number, error);
    return code == 0 && number <= 0 ? ERROR_INVALID : code;
}

static void an_event_needs_its_job(void **state) {
    (void)state;
    struct store *store = open_store();
    struct error error = {0};
    assert_int_equal(store_call(store, insert_event, "job-1", &error), ERROR_IO);
    assert_non_null(strstr(error.message, "FOREIGN KEY"));
    call(store, insert_job, "job-1");
    call(store, insert_event, "job-1");
    store_close(store);
}

static int find_message(struct database *database, void *state, struct error *error) {
    return events_find(database, "job-1", "message", state, error);
}

static int find_metrics(struct database *database, void *state, struct error *error) {
    return events_find(database, "job-1", "metrics", state, error);
}

static void events_are_found_by_type_and_words(void **state) {
    (void)state;
    struct store *store = open_store();
    call(store, insert_job, "job-1");
    call(store, insert_job, "job-2");
    call(store, insert_event, "job-2");
    assert_int_equal(store_call(store, find_message, "m", NULL), 0); /* another job's */
    call(store, insert_event, "job-1");
    assert_int_equal(store_call(store, find_message, "m", NULL), 1);
    assert_int_equal(store_call(store, find_message, "M", NULL), 0);
    assert_int_equal(store_call(store, find_metrics, "m", NULL), 0);
    store_close(store);
}

/* --- Threads --- */

enum { WRITERS = 6, EVENTS = 200 };

struct writer {
    struct store *store;
    pthread_t thread;
    int failures;
};

static void count_failure(void *state, const struct error *error) {
    struct writer *writer = state;
    (void)writer;
    if (error != NULL)
        writer->failures++;
}

static int insert_event_of_writer(struct database *database, void *state, struct error *error) {
    (void)state;
    return insert_event(database, "job-1", error);
}

static void *write_events(void *context) {
    struct writer *writer = context;
    struct error error;
    for (int i = 0; i < EVENTS; i++) {
        if (store_post(writer->store, insert_event_of_writer, count_failure, writer) != 0)
            abort();
        if (i % 50 == 0 && store_call(writer->store, insert_event, "job-1", &error) < 0)
            abort();
        store_pace(writer->store);
    }
    return NULL;
}

static int count_event(void *context, const struct event_record *event) {
    int64_t *last = context;
    assert_true(event->number > last[1]);
    last[1] = event->number;
    last[0]++;
    return 0;
}

static int count_events(struct database *database, void *state, struct error *error) {
    return events_since(database, "job-1", 0, 1000000, count_event, state, error);
}

static void many_threads_write_at_once(void **state) {
    (void)state;
    struct writer writers[WRITERS] = {{0}};
    struct store *store = open_store();
    int64_t counts[2] = {0, 0};
    call(store, insert_job, "job-1");
    for (int i = 0; i < WRITERS; i++) {
        writers[i].store = store;
        assert_int_equal(pthread_create(&writers[i].thread, NULL, write_events, &writers[i]), 0);
    }
    for (int i = 0; i < WRITERS; i++)
        pthread_join(writers[i].thread, NULL);
    call(store, count_events, counts);
    assert_int_equal(counts[0], WRITERS * (EVENTS + EVENTS / 50));
    store_close(store); /* polls */
    for (int i = 0; i < WRITERS; i++)
        assert_int_equal(writers[i].failures, 0);
}

static void closing_does_what_was_posted(void **state) {
    (void)state;
    struct writer writer = {.store = open_store()};
    int64_t counts[2] = {0, 0};
    call(writer.store, insert_job, "job-1");
    for (int i = 0; i < 500; i++)
        assert_int_equal(store_post(writer.store, insert_event_of_writer, count_failure, &writer), 0);
    store_close(writer.store);
    struct store *store = open_store();
    call(store, count_events, counts);
    assert_int_equal(counts[0], 500);
    store_close(store);
}

/* --- A full disk --- */

static int limit_pages(struct database *database, void *state, struct error *error) {
    return database_run(database, error, state, "");
}

static void a_full_disk_is_told_and_survived(void **state) {
    (void)state;
    char path[128];
    struct stat status;
    struct store *store = open_store();
    struct error error = {0};
    int code = 0;
    snprintf(path, sizeof path, "%s/reserve", directory);
    assert_int_equal(stat(path, &status), 0);
    assert_true(status.st_blocks * 512 >= 1 << 20); /* it really takes the space */
    call(store, insert_job, "job-1");
    call(store, limit_pages, "PRAGMA max_page_count = 40"); /* what SQLite says is what it says of a disk */
    for (int i = 0; i < 5000 && code >= 0; i++)
        code = store_call(store, insert_event, "job-1", &error);
    assert_int_equal(code, ERROR_IO);
    assert_non_null(strstr(error.message, "full"));
    assert_int_not_equal(stat(path, &status), 0); /* given up */
    call(store, limit_pages, "PRAGMA max_page_count = 100000");
    struct move move = {"job-1", "queued", "failed", 0};
    call(store, move_job, &move);
    assert_int_equal(move.moved, 1);
    store_close(store);
    store_close(open_store());
    assert_int_equal(stat(path, &status), 0); /* taken again */
}

/* The log has its blocks before it needs them, and what of it was not written yet is told from the rest: a copy of the
 * directory is what a kill leaves. */
static void the_log_has_room_and_is_recovered(void **state) {
    (void)state;
    char path[128], command[300], copy[80];
    struct stat status;
    struct store *store = open_store();
    snprintf(path, sizeof path, "%s/state.sqlite-wal", directory);
    assert_int_equal(stat(path, &status), 0);
    assert_true(status.st_blocks * 512 >= 2 << 20);
    call(store, insert_job, "job-1");
    for (int round = 0; round < 3; round++) { /* the log is emptied in between */
        for (int i = 0; i < 150; i++)
            call(store, insert_event, "job-1");
        snprintf(copy, sizeof copy, "%s.copy", directory);
        snprintf(command, sizeof command, "rm -rf %s && cp -r %s %s", copy, directory, copy);
        assert_int_equal(system(command), 0);
        struct store_options options = {.directory = copy};
        struct store *other = store_open(&options, NULL);
        assert_non_null(other);
        int64_t counts[2] = {0, 0};
        call(other, count_events, counts);
        assert_int_equal(counts[0], (round + 1) * 150);
        store_close(other);
    }
    snprintf(command, sizeof command, "rm -rf %s", copy);
    assert_int_equal(system(command), 0);
    store_close(store);
}

/* What is posted together is one transaction: when that is undone, what only reads gets its answer all the same, and
 * what can be written alone is. */
struct together {
    int begun, done, failed;
    bool fails;
    struct store *store;
};

static int end_transaction(struct database *database, void *state, struct error *error) {
    struct together *piece = state;
    piece->begun++;
    if (!piece->fails)
        return database_run(database, error, "SELECT 1", "");
    database_rollback(database); /* as SQLite does of itself when the disk is full */
    return error_set(error, ERROR_IO, "full");
}

static void count_end(void *state, const struct error *error) {
    struct together *piece = state;
    piece->done++;
    piece->failed += error != NULL;
}

static int wait_a_while(struct database *database, void *state, struct error *error) {
    (void)database;
    (void)state;
    (void)error;
    usleep(50000); /* the others come together meanwhile */
    return 0;
}

static void who_only_reads_does_not_fail_with_others(void **state) {
    (void)state;
    struct store *store = open_store();
    struct together reads = {0}, writes = {.fails = true}, after = {0};
    store_post(store, wait_a_while, NULL, NULL);
    store_post(store, end_transaction, count_end, &reads);
    store_post(store, end_transaction, count_end, &writes);
    store_post(store, end_transaction, count_end, &after);
    store_close(store); /* calls done */
    assert_int_equal(reads.done, 1);
    assert_int_equal(writes.done, 1);
    assert_int_equal(after.done, 1);
    assert_int_equal(reads.failed, 0);
    assert_int_equal(writes.failed, 1);
    assert_int_equal(after.failed, 0);
}

/* --- Files that are not right --- */

static void a_directory_is_for_one_process(void **state) {
    (void)state;
    struct store *store = open_store();
    assert_refused(ERROR_IO, "in use by another process");
    store_close(store);
    store_close(open_store());
}

static void a_file_that_is_no_database_is_refused(void **state) {
    (void)state;
    char text[8192];
    memset(text, 'x', sizeof text);
    write_file("state.sqlite", text, sizeof text, 0);
    assert_refused(ERROR_FORMAT, "not a database");
}

static void a_damaged_file_is_refused(void **state) {
    (void)state;
    struct store *store = open_store();
    char noise[20000];
    call(store, insert_job, "job-1");
    for (int i = 0; i < 300; i++)
        call(store, insert_event, "job-1");
    store_close(store);
    memset(noise, 0xa5, sizeof noise);
    write_file("state.sqlite", noise, sizeof noise, 8192);
    assert_refused(ERROR_FORMAT, "damaged");
}

static void change_pragma(const char *sql) {
    char path[128];
    struct error error;
    snprintf(path, sizeof path, "%s/state.sqlite", directory);
    struct database *database = database_open(path, &error);
    assert_non_null(database);
    assert_true(database_run(database, &error, sql, "") >= 0);
    database_close(database);
}

static void a_newer_or_foreign_file_is_refused(void **state) {
    (void)state;
    store_close(open_store());
    change_pragma("PRAGMA user_version = 99");
    assert_refused(ERROR_FORMAT, "newer version");
    char path[128];
    snprintf(path, sizeof path, "%s/state.sqlite", directory);
    unlink(path);
    store_close(open_store());
    change_pragma("PRAGMA application_id = 5");
    assert_refused(ERROR_FORMAT, "another program");
}

static void the_schema_has_its_version(void **state) {
    char words[64];
    (void)state;
    snprintf(words, sizeof words, "user_version = %d", SCHEMA_VERSION);
    assert_non_null(strstr(schema_script, words));
    snprintf(words, sizeof words, "application_id = %d", SCHEMA_APPLICATION);
    assert_non_null(strstr(schema_script, words));
}

static bool is_there(const char *name) {
    char path[128];
    struct stat status;
    snprintf(path, sizeof path, "%s/%s", directory, name);
    return stat(path, &status) == 0;
}

static int insert_file(struct database *database, void *state, struct error *error) {
    (void)state;
    struct file_record file = {
        .id = "file-1", .filename = "a", .purpose = "evals", .stored = "file-1.jsonl", .created = 1, .bytes = 1};
    return files_insert(database, &file, error);
}

/* Whatever lies there is not taken for nobody's. */
static void a_lost_database_is_refused(void **state) {
    static const char *const names[] = {"files/file-1.jsonl", "policies/a.safetensors", "jobs/ftjob-1"};
    char path[128];
    (void)state;
    for (size_t i = 0; i < 2 * sizeof names / sizeof names[0]; i++) {
        const char *name = names[i / 2];
        store_close(open_store());
        write_file(name, "x", 1, 0);
        snprintf(path, sizeof path, "%s/state.sqlite", directory);
        assert_int_equal(i % 2 == 0 ? unlink(path) : truncate(path, 0), 0);
        for (int again = 0; again < 2; again++)
            assert_refused(ERROR_FORMAT, "missing or empty");
        snprintf(path, sizeof path, "%s/%s", directory, name);
        assert_int_equal(unlink(path), 0); /* it is still there */
    }
    store_close(open_store());
}

static void uploads_that_nobody_knows_go(void **state) {
    (void)state;
    struct store *store = open_store();
    call(store, insert_file, NULL);
    store_close(store);
    write_file("files/.upload-x", "x", 1, 0);
    write_file("files/file-1.jsonl", "x", 1, 0);
    write_file("files/file-2.jsonl", "x", 1, 0);
    write_file("files/notes.txt", "x", 1, 0);
    store_close(open_store());
    assert_false(is_there("files/.upload-x"));
    assert_true(is_there("files/file-1.jsonl"));
    assert_false(is_there("files/file-2.jsonl"));
    assert_true(is_there("files/notes.txt"));
}

static void write_checkpoint(const char *job) {
    char name[128];
    snprintf(name, sizeof name, "%s/jobs/%s", directory, job);
    assert_int_equal(mkdir(name, 0700), 0);
    snprintf(name, sizeof name, "jobs/%s/checkpoint", job);
    write_file(name, "x", 1, 0);
}

static int insert_checkpoint(struct database *database, void *state, struct error *error) {
    struct checkpoint_record checkpoint = {
        .id = state, .job = state, .file = "checkpoint", .metrics = "{}", .created = 1, .step = 1};
    return checkpoints_insert(database, &checkpoint, error);
}

static int count_checkpoint(void *context, const struct checkpoint_record *checkpoint) {
    (void)checkpoint;
    ++*(int *)context;
    return 0;
}

struct checkpoints {
    const char *job;
    int count;
};

static int count_checkpoints(struct database *database, void *state, struct error *error) {
    struct checkpoints *checkpoints = state;
    struct page page = {.limit = 10};
    return checkpoints_list(database, checkpoints->job, &page, count_checkpoint, &checkpoints->count, error);
}

static void assert_checkpoint(struct store *store, const char *job, bool expected) {
    struct checkpoints checkpoints = {.job = job};
    char name[64];
    snprintf(name, sizeof name, "jobs/%s", job);
    assert_int_equal(is_there(name), expected);
    call(store, count_checkpoints, &checkpoints);
    assert_int_equal(checkpoints.count, expected);
}

/* Three jobs with a checkpoint and a policy file each; the first is cancelled, the second failed, the third queued. */
static void write_jobs(struct store *store) {
    static char *const jobs[] = {"job-1", "job-2", "job-3"};
    char name[64];
    for (size_t i = 0; i < 3; i++) {
        call(store, insert_job, jobs[i]);
        call(store, insert_checkpoint, jobs[i]);
        write_checkpoint(jobs[i]);
        snprintf(name, sizeof name, "policies/policy-of-%s.safetensors", jobs[i]);
        write_file(name, "x", 1, 0);
    }
    call(store, move_job, &(struct move){.id = "job-1", .from = "queued", .to = "cancelled"});
    call(store, move_job, &(struct move){.id = "job-2", .from = "queued", .to = "failed"});
}

static void what_ended_jobs_left_goes_at_the_start(void **state) {
    (void)state;
    struct store *store = open_store();
    write_jobs(store);
    store_close(store);
    store = open_store();
    assert_checkpoint(store, "job-1", false);
    assert_checkpoint(store, "job-2", true);
    assert_checkpoint(store, "job-3", true);
    assert_false(is_there("policies/policy-of-job-1.safetensors"));
    assert_false(is_there("policies/policy-of-job-2.safetensors"));
    assert_true(is_there("policies/policy-of-job-3.safetensors"));
    store_close(store);
}

static void only_cancelled_jobs_are_discarded(void **state) {
    (void)state;
    struct store *store = open_store();
    write_jobs(store);
    store_discard_job(store, "job-1");
    store_discard_job(store, "job-2");
    store_discard_job(store, "job-3");
    store_discard_job(store, "../files");
    assert_string_equal(status_of(store, "job-1"), "cancelled"); /* after what was posted */
    assert_checkpoint(store, "job-1", false);
    assert_checkpoint(store, "job-2", true);
    assert_checkpoint(store, "job-3", true);
    assert_true(is_there("files"));
    store_close(store);
}

static void a_directory_that_cannot_be_made_is_an_error(void **state) {
    (void)state;
    struct store_options options = {.directory = "/nonexistent/parent/state"};
    struct error error = {0};
    assert_null(store_open(&options, &error));
    assert_int_equal(error.code, ERROR_IO);
    assert_non_null(strstr(error.message, "/nonexistent/parent/state"));
}

#define TEST(name) cmocka_unit_test_setup_teardown(name, setup, teardown)

int main(void) {
    const struct CMUnitTest tests[] = {
        TEST(records_survive_a_reopening),
        TEST(moves_only_from_the_statuses_named),
        TEST(lists_are_newest_first_with_pages_and_metadata),
        TEST(work_that_fails_changes_nothing),
        TEST(an_event_needs_its_job),
        TEST(events_are_found_by_type_and_words),
        TEST(many_threads_write_at_once),
        TEST(closing_does_what_was_posted),
        TEST(a_full_disk_is_told_and_survived),
        TEST(a_directory_is_for_one_process),
        TEST(a_file_that_is_no_database_is_refused),
        TEST(a_damaged_file_is_refused),
        TEST(a_newer_or_foreign_file_is_refused),
        cmocka_unit_test(the_schema_has_its_version),
        TEST(the_log_has_room_and_is_recovered),
        TEST(who_only_reads_does_not_fail_with_others),
        TEST(a_lost_database_is_refused),
        TEST(uploads_that_nobody_knows_go),
        TEST(what_ended_jobs_left_goes_at_the_start),
        TEST(only_cancelled_jobs_are_discarded),
        cmocka_unit_test(a_directory_that_cannot_be_made_is_an_error),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
