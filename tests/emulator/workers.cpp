/* SPDX-License-Identifier: Apache-2.0
 *
 * OS threads that run the blocks of a launch: the caller and a pool that starts with the first launch of several
 * blocks.
 */
#include "internal.h"
#include "race.h"
#include "traffic.h"

#include <pthread.h>
#include <sys/mman.h>
#include <atomic>

static pthread_mutex_t pool_lock = PTHREAD_MUTEX_INITIALIZER;
static pthread_cond_t pool_work = PTHREAD_COND_INITIALIZER, pool_done = PTHREAD_COND_INITIALIZER;
static struct {
    struct worker *workers[WORKERS_MAX]; /* [0] belongs to whoever launches */
    unsigned started;                    /* OS threads of the pool, numbers 1 to started */
    uint64_t round;
    unsigned busy;
    const struct launch *launch;
    std::atomic<unsigned> next_block;
    std::atomic<bool> fault;
    unsigned blocks;
    uint64_t launches;
} pool;

static struct worker *worker_get(unsigned number) {
    if (!pool.workers[number]) {
        struct worker *worker = new struct worker();
        worker_create(worker, number);
        worker->shared = memory_reserve(BLOCK_SHARED_SPACE, PROT_READ | PROT_WRITE);
        worker->shared_states = (uint8_t *)memory_reserve(BLOCK_SHARED_SPACE, PROT_READ | PROT_WRITE);
        race_worker_create(worker);
        traffic_worker_create(worker);
        pool.workers[number] = worker;
    }
    return pool.workers[number];
}

/* A chunk of blocks at a time where there are many. */
static void run_blocks(struct worker *worker) {
    unsigned chunk = pool.blocks / (settings.workers * 8);
    chunk = chunk < 1 ? 1 : chunk > 64 ? 64 : chunk;
    worker->launch = pool.launch;
    worker->launch_number = pool.launches;
    worker->checked = !settings.fast;
    traffic_launch_begin(worker);
    while (!pool.fault) {
        unsigned first = pool.next_block.fetch_add(chunk);
        if (first >= pool.blocks)
            break;
        unsigned end = first + chunk < pool.blocks ? first + chunk : pool.blocks;
        for (unsigned block = first; block < end && !pool.fault; block++) {
            block_run(worker, block);
            if (worker->fault)
                pool.fault = true;
        }
    }
    traffic_launch_end(worker);
}

static void *pool_thread(void *number) {
    fault_signal_stack();
    pthread_mutex_lock(&pool_lock);
    struct worker *worker = worker_get((unsigned)(uintptr_t)number);
    uint64_t round = 0;
    for (;;) {
        while (pool.round == round)
            pthread_cond_wait(&pool_work, &pool_lock);
        round = pool.round;
        pthread_mutex_unlock(&pool_lock);
        run_blocks(worker);
        pthread_mutex_lock(&pool_lock);
        if (--pool.busy == 0)
            pthread_cond_signal(&pool_done);
    }
    return NULL;
}

static void pool_start(void) {
    while (pool.started + 1 < settings.workers) {
        pthread_t thread;
        if (pthread_create(&thread, NULL, pool_thread, (void *)(uintptr_t)(pool.started + 1)) != 0)
            break;
        pthread_detach(thread);
        pool.started++;
    }
}

bool workers_run(const struct launch *launch) {
    pthread_mutex_lock(&pool_lock);
    pool.launch = launch;
    pool.blocks = launch->grid.x * launch->grid.y * launch->grid.z;
    pool.next_block = 0;
    pool.fault = false;
    pool.launches++;
    bool alone = pool.blocks == 1 || settings.workers == 1;
    if (!alone) {
        pool_start();
        pool.busy = pool.started;
        pool.round++;
        pthread_cond_broadcast(&pool_work);
    }
    struct worker *worker = worker_get(0);
    pthread_mutex_unlock(&pool_lock);
    run_blocks(worker);
    pthread_mutex_lock(&pool_lock);
    while (pool.busy > 0)
        pthread_cond_wait(&pool_done, &pool_lock);
    pthread_mutex_unlock(&pool_lock);
    traffic_launch_done(launch);
    return !pool.fault;
}
