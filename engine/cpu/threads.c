/* SPDX-License-Identifier: Apache-2.0
 *
 * How a job is handed out: `ticket` holds the job's number and how many of its chunks are still to be taken. A thread
 * owns a chunk once its compare-and-swap took one off; only then may it read the job's fields, which the caller does
 * not change before `pending` says that every chunk is done. So a worker that comes late finds nothing and harms
 * nothing.
 */
#include "engine/cpu/threads.h"

#include "engine/spin.h"

#include <linux/futex.h>
#include <pthread.h>
#include <sched.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/syscall.h>
#include <unistd.h>

enum { SPINS = 2000 };

struct worker {
    struct thread_pool *pool;
    uint32_t thread;
    pthread_t handle;
};

/* What every job writes is in one line of the caches, what threads spin on apart from it is hardly ever written. */
struct thread_pool {
    _Alignas(64) _Atomic uint64_t ticket; /* job number << 32 | chunks not yet taken */
    _Atomic uint32_t pending;             /* chunks not yet done; the caller sleeps on it */
    _Atomic uint32_t caller_sleeps;
    thread_work work; /* the job; written by the caller while no chunk is out */
    void *context;
    uint32_t chunks;

    _Alignas(64) _Atomic uint32_t wake; /* workers sleep on it */
    _Atomic uint32_t sleepers;          /* workers that sleep or are about to */

    _Alignas(64) _Atomic bool stop;
    uint32_t size;
    uint32_t started; /* workers that run */
    struct worker *workers;
};

static void futex_wait(_Atomic uint32_t *word, uint32_t expected) {
    syscall(SYS_futex, word, FUTEX_WAIT_PRIVATE, expected, NULL, NULL, 0);
}

static void futex_wake(_Atomic uint32_t *word, int count) {
    syscall(SYS_futex, word, FUTEX_WAKE_PRIVATE, count, NULL, NULL, 0);
}

/* Takes one chunk; false when there is none. */
static bool take_chunk(struct thread_pool *pool, uint32_t *chunk) {
    uint64_t ticket = atomic_load_explicit(&pool->ticket, memory_order_acquire);
    do {
        if ((uint32_t)ticket == 0)
            return false;
    } while (!atomic_compare_exchange_weak_explicit(
        &pool->ticket, &ticket, ticket - 1, memory_order_acquire, memory_order_acquire));
    *chunk = pool->chunks - (uint32_t)ticket;
    return true;
}

/* Does chunks until there are none, and then says how many it did: as long as it did not, the job stays. */
static bool do_chunks(struct thread_pool *pool, uint32_t thread) {
    uint32_t chunk;
    uint32_t done = 0;
    for (; take_chunk(pool, &chunk); done++)
        pool->work(pool->context, chunk, thread);
    if (done == 0)
        return false;
    uint32_t left = atomic_fetch_sub(&pool->pending, done) - done;
    if (left == 0 && atomic_load(&pool->caller_sleeps))
        futex_wake(&pool->pending, 1);
    return true;
}

static bool has_work(struct thread_pool *pool) {
    return (uint32_t)atomic_load_explicit(&pool->ticket, memory_order_acquire) != 0;
}

static void wait_for_work(struct thread_pool *pool) {
    for (int i = 0; i < SPINS; i++) {
        if (has_work(pool) || atomic_load_explicit(&pool->stop, memory_order_relaxed))
            return;
        spin_pause();
    }
    uint32_t seen = atomic_load(&pool->wake);
    atomic_fetch_add(&pool->sleepers, 1);
    if (!has_work(pool) && !atomic_load(&pool->stop))
        futex_wait(&pool->wake, seen);
    atomic_fetch_sub(&pool->sleepers, 1);
}

static void *worker_main(void *argument) {
    struct worker *worker = argument;
    struct thread_pool *pool = worker->pool;
    while (!atomic_load(&pool->stop)) {
        if (!do_chunks(pool, worker->thread))
            wait_for_work(pool);
    }
    return NULL;
}

/* A worker that this does not see announces itself later, and then looks for work once more before it sleeps. */
static void wake_workers(struct thread_pool *pool) {
    if (atomic_load(&pool->sleepers) == 0)
        return;
    atomic_fetch_add(&pool->wake, 1);
    futex_wake(&pool->wake, (int)pool->size);
}

static void wait_until_done(struct thread_pool *pool) {
    for (int i = 0; i < SPINS; i++) {
        if (atomic_load_explicit(&pool->pending, memory_order_acquire) == 0)
            return;
        spin_pause();
    }
    atomic_store(&pool->caller_sleeps, 1);
    uint32_t left;
    while ((left = atomic_load(&pool->pending)) != 0)
        futex_wait(&pool->pending, left);
    atomic_store(&pool->caller_sleeps, 0);
}

void thread_pool_run(struct thread_pool *pool, uint32_t chunks, thread_work work, void *context) {
    if (pool->size == 1 || chunks <= 1) {
        for (uint32_t chunk = 0; chunk < chunks; chunk++)
            work(context, chunk, 0);
        return;
    }
    pool->work = work;
    pool->context = context;
    pool->chunks = chunks;
    atomic_store_explicit(&pool->pending, chunks, memory_order_relaxed);
    uint64_t job = (atomic_load_explicit(&pool->ticket, memory_order_relaxed) >> 32) + 1;
    atomic_store(&pool->ticket, job << 32 | chunks);
    wake_workers(pool);
    do_chunks(pool, 0);
    wait_until_done(pool);
}

struct parts_job {
    thread_part_work work;
    void *context;
    uint32_t count;
    uint32_t parts;
    atomic_bool taken[THREADS_MAX];
};

/* Called as often as there are parts, and each call does one: the thread's own, else the next that nobody has. */
static void do_part(void *context, uint32_t ignored, uint32_t thread) {
    struct parts_job *job = context;
    uint32_t part = thread;
    (void)ignored;
    while (atomic_load_explicit(&job->taken[part], memory_order_relaxed) ||
           atomic_exchange_explicit(&job->taken[part], true, memory_order_relaxed))
        part = part + 1 < job->parts ? part + 1 : 0;
    uint32_t first = (uint32_t)((uint64_t)job->count * part / job->parts);
    uint32_t end = (uint32_t)((uint64_t)job->count * (part + 1) / job->parts);
    if (first < end)
        job->work(job->context, first, end, thread);
}

void thread_pool_run_parts(struct thread_pool *pool, uint32_t count, thread_part_work work, void *context) {
    struct parts_job job = {.work = work, .context = context, .count = count, .parts = pool->size};
    for (uint32_t part = 0; part < job.parts; part++)
        atomic_init(&job.taken[part], false);
    thread_pool_run(pool, job.parts, do_part, &job);
}

struct thread_pool *thread_pool_create(uint32_t threads, struct error *error) {
    if (threads < 1 || threads > THREADS_MAX) {
        error_set(error, ERROR_INVALID, "threads is %u, it must be from 1 to %d", threads, THREADS_MAX);
        return NULL;
    }
    struct thread_pool *pool = aligned_alloc(64, sizeof *pool);
    struct worker *workers = calloc(threads, sizeof *workers);
    if (pool == NULL || workers == NULL) {
        error_set(error, ERROR_MEMORY, "no memory for a pool of %u threads", threads);
        free(pool);
        free(workers);
        return NULL;
    }
    memset(pool, 0, sizeof *pool);
    pool->size = threads;
    pool->workers = workers;
    for (uint32_t thread = 1; thread < threads; thread++) {
        workers[thread] = (struct worker){.pool = pool, .thread = thread};
        int code = pthread_create(&workers[thread].handle, NULL, worker_main, &workers[thread]);
        if (code != 0) {
            error_set(error, ERROR_IO, "cannot start thread %u of %u: %s", thread + 1, threads, strerror(code));
            thread_pool_free(pool);
            return NULL;
        }
        pool->started++;
    }
    return pool;
}

void thread_pool_free(struct thread_pool *pool) {
    if (pool == NULL)
        return;
    atomic_store(&pool->stop, true);
    atomic_fetch_add(&pool->wake, 1);
    futex_wake(&pool->wake, (int)pool->size);
    for (uint32_t thread = 1; thread <= pool->started; thread++)
        pthread_join(pool->workers[thread].handle, NULL);
    free(pool->workers);
    free(pool);
}

uint32_t thread_pool_size(const struct thread_pool *pool) {
    return pool->size;
}

/* Affinity mask: the kernel's mask may be wider than cpu_set_t, so that the buffer grows until it fits. */
static uint32_t count_affinity(void) {
    for (int cpus = 1024; cpus <= 1 << 20; cpus *= 2) {
        cpu_set_t *set = CPU_ALLOC(cpus);
        if (set == NULL)
            return 1;
        size_t bytes = CPU_ALLOC_SIZE(cpus);
        int code = sched_getaffinity(0, bytes, set);
        int count = code == 0 ? CPU_COUNT_S(bytes, set) : 0;
        CPU_FREE(set);
        if (count > 0)
            return (uint32_t)count;
    }
    return 1;
}

uint32_t thread_count_available(void) {
    uint32_t count = count_affinity();
    uint32_t quota = thread_count_quota("/proc/self/cgroup", "/sys/fs/cgroup");
    if (quota < count)
        count = quota;
    return count < THREADS_MAX ? count : THREADS_MAX;
}
