/* SPDX-License-Identifier: Apache-2.0
 *
 * OS threads that run the blocks of a launch: the caller and a pool that starts with the first launch of several
 * blocks. A block that waits for other devices lets another launch begin before its own has ended: each has a pool of
 * its own.
 */
#include "internal.h"
#include "race.h"
#include "streams.h"
#include "traffic.h"

#include <pthread.h>
#include <sys/mman.h>
#include <unistd.h>
#include <atomic>

enum { NUMBERS_MAX = 64, THREAD_REST_MICROSECONDS = 50 };

static const unsigned later_workers = 2; /* of pools after the first */

struct pool {
    pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
    pthread_cond_t work = PTHREAD_COND_INITIALIZER, done = PTHREAD_COND_INITIALIZER;
    unsigned workers_count;
    unsigned first_number;
    struct worker *workers[WORKERS_MAX] = {}; /* [0] belongs to whoever launches */
    unsigned started = 0;                     /* OS threads of the pool, numbers 1 to started */
    uint64_t round = 0;
    unsigned busy = 0;
    unsigned resting = 0; /* threads whose blocks wait for what is outside of the launch */
    const struct launch *launch = NULL;
    std::atomic<unsigned> next_block{0};
    std::atomic<bool> fault{false};
    unsigned blocks = 0;
    uint64_t launch_number = 0;
};

/* Both with the runtime's lock held. */
static std::vector<struct pool *> free_pools;
static uint64_t launches;

static struct pool *pool_take(void) {
    static unsigned next_number;
    if (free_pools.empty()) {
        struct pool *pool = new struct pool();
        pool->workers_count = next_number == 0 || settings.workers < later_workers ? settings.workers : later_workers;
        pool->first_number = next_number;
        next_number = (next_number + pool->workers_count) % NUMBERS_MAX;
        return pool;
    }
    struct pool *pool = free_pools.back();
    free_pools.pop_back();
    return pool;
}

static struct worker *worker_get(struct pool *pool, unsigned number) {
    if (!pool->workers[number]) {
        struct worker *worker = new struct worker();
        worker_create(worker, (pool->first_number + number) % NUMBERS_MAX);
        worker->launches = number == 0;
        worker->pool = pool;
        worker->shared = memory_reserve(BLOCK_SHARED_SPACE, PROT_READ | PROT_WRITE);
        worker->shared_states = (uint8_t *)memory_reserve(BLOCK_SHARED_SPACE, PROT_READ | PROT_WRITE);
        race_worker_create(worker);
        traffic_worker_create(worker);
        pool->workers[number] = worker;
    }
    return pool->workers[number];
}

/* A chunk of blocks at a time where there are many. */
static void run_blocks(struct pool *pool, struct worker *worker) {
    unsigned chunk = pool->blocks / (pool->workers_count * 8);
    chunk = chunk < 1 ? 1 : chunk > 64 ? 64 : chunk;
    worker->launch = pool->launch;
    worker->launch_number = pool->launch_number;
    worker->checked = !settings.fast;
    traffic_launch_begin(worker);
    while (!pool->fault) {
        unsigned first = pool->next_block.fetch_add(chunk);
        if (first >= pool->blocks)
            break;
        unsigned end = first + chunk < pool->blocks ? first + chunk : pool->blocks;
        for (unsigned block = first; block < end && !pool->fault; block++) {
            block_run(worker, block);
            if (worker->fault)
                pool->fault = true;
        }
    }
    traffic_launch_end(worker);
}

/* Threads of the pool do not hold the runtime's lock: whoever launched lets others go on for them. */
void worker_rest(struct worker *worker) {
    struct pool *pool = worker->pool;
    if (worker->launches) {
        streams_let_others();
        return;
    }
    pthread_mutex_lock(&pool->lock);
    pool->resting++;
    pthread_cond_signal(&pool->done);
    pthread_mutex_unlock(&pool->lock);
    usleep(THREAD_REST_MICROSECONDS);
    pthread_mutex_lock(&pool->lock);
    pool->resting--;
    pthread_mutex_unlock(&pool->lock);
}

struct pool_thread {
    struct pool *pool;
    unsigned number;
};

static void *pool_main(void *argument) {
    struct pool_thread self = *(struct pool_thread *)argument;
    struct pool *pool = self.pool;
    delete (struct pool_thread *)argument;
    fault_signal_stack();
    pthread_mutex_lock(&pool->lock);
    struct worker *worker = worker_get(pool, self.number);
    uint64_t round = 0;
    for (;;) {
        while (pool->round == round)
            pthread_cond_wait(&pool->work, &pool->lock);
        round = pool->round;
        pthread_mutex_unlock(&pool->lock);
        run_blocks(pool, worker);
        pthread_mutex_lock(&pool->lock);
        if (--pool->busy == 0)
            pthread_cond_signal(&pool->done);
    }
    return NULL;
}

static void pool_start(struct pool *pool) {
    while (pool->started + 1 < pool->workers_count) {
        pthread_t thread;
        struct pool_thread *argument = new struct pool_thread();
        *argument = {pool, pool->started + 1};
        if (pthread_create(&thread, NULL, pool_main, argument) != 0) {
            delete argument;
            break;
        }
        pthread_detach(thread);
        pool->started++;
    }
}

static void wait_for_threads(struct pool *pool) {
    pthread_mutex_lock(&pool->lock);
    while (pool->busy > 0) {
        bool resting = pool->resting > 0;
        if (!resting) {
            pthread_cond_wait(&pool->done, &pool->lock);
            continue;
        }
        pthread_mutex_unlock(&pool->lock);
        streams_let_others();
        pthread_mutex_lock(&pool->lock);
    }
    pthread_mutex_unlock(&pool->lock);
}

bool workers_run(const struct launch *launch) {
    struct pool *pool = pool_take();
    pthread_mutex_lock(&pool->lock);
    pool->launch = launch;
    pool->blocks = launch->grid.x * launch->grid.y * launch->grid.z;
    pool->next_block = 0;
    pool->fault = false;
    pool->launch_number = ++launches;
    bool alone = pool->blocks == 1 || pool->workers_count == 1;
    if (!alone) {
        pool_start(pool);
        pool->busy = pool->started;
        pool->round++;
        pthread_cond_broadcast(&pool->work);
    }
    struct worker *worker = worker_get(pool, 0);
    pthread_mutex_unlock(&pool->lock);
    run_blocks(pool, worker);
    wait_for_threads(pool);
    traffic_launch_done(launch);
    bool ok = !pool->fault;
    free_pools.push_back(pool);
    return ok;
}
