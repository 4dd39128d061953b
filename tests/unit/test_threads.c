/* SPDX-License-Identifier: Apache-2.0 */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>

#include <errno.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include "engine/cpu/threads.h"

enum { CHUNKS_MAX = 300 };

struct job {
    uint32_t threads;
    uint32_t runs[CHUNKS_MAX]; /* plain numbers: a thread sanitizer sees two threads on one chunk */
    atomic_uint wrong;
    unsigned delay_us; /* of the last chunk */
    uint32_t chunks;
};

static void count_chunk(void *context, uint32_t chunk, uint32_t thread) {
    struct job *job = context;
    if (chunk >= job->chunks || thread >= job->threads) {
        atomic_fetch_add(&job->wrong, 1);
        return;
    }
    job->runs[chunk]++;
    if (chunk == job->chunks - 1 && job->delay_us > 0)
        usleep(job->delay_us);
}

static void run_job(struct thread_pool *pool, uint32_t chunks, unsigned delay_us) {
    struct job job = {.threads = thread_pool_size(pool), .chunks = chunks, .delay_us = delay_us};
    thread_pool_run(pool, chunks, count_chunk, &job);
    assert_int_equal(atomic_load(&job.wrong), 0);
    for (uint32_t chunk = 0; chunk < chunks; chunk++)
        assert_int_equal(job.runs[chunk], 1);
}

static void every_chunk_runs_once(void **state) {
    (void)state;
    static const uint32_t sizes[] = {1, 2, 3, 8};
    for (size_t i = 0; i < sizeof sizes / sizeof sizes[0]; i++) {
        struct thread_pool *pool = thread_pool_create(sizes[i], NULL);
        assert_non_null(pool);
        assert_int_equal(thread_pool_size(pool), sizes[i]);
        for (uint32_t run = 0; run < 400; run++)
            run_job(pool, run * 7 % CHUNKS_MAX, 0);
        thread_pool_free(pool);
    }
}

/* Pauses long enough that workers sleep between jobs, and that the caller sleeps at the end of one. */
static void sleepers_wake(void **state) {
    (void)state;
    struct thread_pool *pool = thread_pool_create(3, NULL);
    assert_non_null(pool);
    for (uint32_t run = 0; run < 20; run++) {
        usleep(2000);
        run_job(pool, 1 + run, run % 2 ? 2000 : 0);
    }
    usleep(2000);
    thread_pool_free(pool); /* of sleeping workers */
}

struct parts {
    uint32_t count;
    uint32_t threads;
    uint32_t runs[CHUNKS_MAX]; /* plain numbers, as above */
    uint32_t threads_of[CHUNKS_MAX];
    atomic_uint called;
    atomic_uint wrong;
    bool meet; /* no part ends before all have begun: then each is on a thread of its own */
};

static void count_part(void *context, uint32_t first, uint32_t end, uint32_t thread) {
    struct parts *parts = context;
    atomic_fetch_add(&parts->called, 1);
    uint32_t size = end - first, whole = parts->count / parts->threads;
    if (first >= end || end > parts->count || thread >= parts->threads || size < whole || size > whole + 1) {
        atomic_fetch_add(&parts->wrong, 1);
        return;
    }
    for (uint32_t i = first; i < end; i++) {
        parts->runs[i]++;
        parts->threads_of[i] = thread;
    }
    while (parts->meet && atomic_load(&parts->called) < parts->threads)
        usleep(10);
}

static struct parts run_parts(struct thread_pool *pool, uint32_t count, bool meet) {
    struct parts parts = {.count = count, .threads = thread_pool_size(pool), .meet = meet};
    thread_pool_run_parts(pool, count, count_part, &parts);
    assert_int_equal(atomic_load(&parts.wrong), 0);
    assert_int_equal(atomic_load(&parts.called), count < parts.threads ? count : parts.threads);
    for (uint32_t i = 0; i < count; i++)
        assert_int_equal(parts.runs[i], 1);
    return parts;
}

static void every_part_runs_once(void **state) {
    (void)state;
    static const uint32_t sizes[] = {1, 2, 3, 8};
    for (size_t i = 0; i < sizeof sizes / sizeof sizes[0]; i++) {
        struct thread_pool *pool = thread_pool_create(sizes[i], NULL);
        assert_non_null(pool);
        for (uint32_t run = 0; run < 400; run++)
            run_parts(pool, run * 7 % CHUNKS_MAX, false);
        thread_pool_free(pool);
    }
}

/* Where no thread can help another, each does its own part, which is the same every time. */
static void threads_do_their_own_parts(void **state) {
    (void)state;
    enum { THREADS = 3, COUNT = 100 };
    struct thread_pool *pool = thread_pool_create(THREADS, NULL);
    assert_non_null(pool);
    for (uint32_t run = 0; run < 50; run++) {
        struct parts parts = run_parts(pool, COUNT, true);
        for (uint32_t i = 0; i < COUNT; i++)
            assert_int_equal(parts.threads_of[i], i < 33 ? 0 : i < 66 ? 1 : 2);
    }
    thread_pool_free(pool);
}

static void wrong_sizes_are_refused(void **state) {
    (void)state;
    struct error error;
    assert_null(thread_pool_create(0, &error));
    assert_int_equal(error.code, ERROR_INVALID);
    assert_null(thread_pool_create(THREADS_MAX + 1, &error));
    assert_int_equal(error.code, ERROR_INVALID);
    assert_non_null(strstr(error.message, "257"));
    thread_pool_free(NULL);
}

static void some_threads_are_available(void **state) {
    (void)state;
    uint32_t count = thread_count_available();
    assert_true(count >= 1 && count <= THREADS_MAX);
    assert_true(count <= (uint32_t)sysconf(_SC_NPROCESSORS_CONF));
}

/* A made-up /proc/self/cgroup and /sys/fs/cgroup below one temporary directory. */

static char root[64];

static void write_file(const char *name, const char *text) {
    char path[256];
    snprintf(path, sizeof path, "%s/%s", root, name);
    for (char *slash = strchr(path + 1, '/'); slash != NULL; slash = strchr(slash + 1, '/')) {
        *slash = '\0';
        assert_true(mkdir(path, 0700) == 0 || errno == EEXIST);
        *slash = '/';
    }
    FILE *file = fopen(path, "w");
    assert_non_null(file);
    fputs(text, file);
    fclose(file);
}

static uint32_t quota_of(const char *membership) {
    write_file("membership", membership);
    char path[256];
    snprintf(path, sizeof path, "%s/membership", root);
    return thread_count_quota(path, root);
}

static void quotas_of_version_2(void **state) {
    (void)state;
    write_file("whole/cpu.max", "max 100000\n");
    write_file("three/cpu.max", "350000 100000\n");
    write_file("three/inner/cpu.max", "max 100000\n");
    write_file("three/half/cpu.max", "50000 100000\n");
    write_file("broken/cpu.max", "many\n");
    assert_int_equal(quota_of("0::/whole\n"), UINT32_MAX);
    assert_int_equal(quota_of("0::/three\n"), 3);
    assert_int_equal(quota_of("0::/three/inner\n"), 3);
    assert_int_equal(quota_of("0::/three/half\n"), 1);
    assert_int_equal(quota_of("0::/broken\n"), UINT32_MAX);
    assert_int_equal(quota_of("0::/\n"), UINT32_MAX);
    assert_int_equal(quota_of(""), UINT32_MAX);
    assert_int_equal(quota_of("0:\nnonsense\n"), UINT32_MAX);
    write_file("cpu.max", "200000 100000\n"); /* a container's own group, whatever the path says */
    assert_int_equal(quota_of("0::/elsewhere/deep\n"), 2);
    assert_int_equal(quota_of("0::/\n"), 2);
    assert_int_equal(thread_count_quota("/nonexistent/membership", root), UINT32_MAX);
}

static void quotas_of_version_1(void **state) {
    (void)state;
    write_file("cpu,cpuacct/job/cpu.cfs_quota_us", "400000\n");
    write_file("cpu,cpuacct/job/cpu.cfs_period_us", "100000\n");
    write_file("cpu,cpuacct/free/cpu.cfs_quota_us", "-1\n");
    write_file("cpu,cpuacct/free/cpu.cfs_period_us", "100000\n");
    write_file("cpu/lone/cpu.cfs_quota_us", "500000\n");
    write_file("cpu/lone/cpu.cfs_period_us", "100000\n");
    assert_int_equal(quota_of("5:memory:/job\n4:cpu,cpuacct:/job\n"), 4);
    assert_int_equal(quota_of("4:cpu,cpuacct:/free\n"), UINT32_MAX);
    assert_int_equal(quota_of("4:cpuset:/job\n3:cpuacct:/job\n"), UINT32_MAX);
    assert_int_equal(quota_of("4:cpu:/lone\n"), 5);
    assert_int_equal(quota_of("4:cpuacct,cpu:/lone\n"), 5); /* mounted under one controller's name */
}

static int make_root(void **state) {
    (void)state;
    snprintf(root, sizeof root, "/tmp/distillcache-threads-XXXXXX");
    return mkdtemp(root) != NULL ? 0 : -1;
}

static int remove_root(void **state) {
    (void)state;
    char command[128];
    snprintf(command, sizeof command, "rm -r '%s'", root);
    return system(command);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(every_chunk_runs_once),
        cmocka_unit_test(sleepers_wake),
        cmocka_unit_test(every_part_runs_once),
        cmocka_unit_test(threads_do_their_own_parts),
        cmocka_unit_test(wrong_sizes_are_refused),
        cmocka_unit_test(some_threads_are_available),
        cmocka_unit_test_setup_teardown(quotas_of_version_2, make_root, remove_root),
        cmocka_unit_test_setup_teardown(quotas_of_version_1, make_root, remove_root),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
