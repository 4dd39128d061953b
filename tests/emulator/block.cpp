/* SPDX-License-Identifier: Apache-2.0
 *
 * One block: its threads as fibers, who runs next, barriers of the block.
 */
#include "internal.h"
#include "race.h"
#include "traffic.h"

#include <stdio.h>
#include <string.h>
#include <time.h>

__thread struct worker *worker_running;
__thread struct thread *thread_checked;

uint64_t worker_random(struct worker *worker) {
    worker->random += 0x9e3779b97f4a7c15; /* splitmix64 (Steele et al. 2014) */
    uint64_t z = worker->random;
    z = (z ^ z >> 30) * 0xbf58476d1ce4e5b9;
    z = (z ^ z >> 27) * 0x94d049bb133111eb;
    return z ^ z >> 31;
}

static void ready_put_front(struct worker *worker, unsigned thread) {
    worker->ready_first = (worker->ready_first - 1) % (2 * BLOCK_THREADS_MAX);
    worker->ready[worker->ready_first] = (unsigned short)thread;
    worker->ready_count++;
}

static struct thread *ready_take(struct worker *worker) {
    if (worker->ready_count == 0)
        return NULL;
    struct thread *thread = &worker->threads[worker->ready[worker->ready_first]];
    worker->ready_first = (worker->ready_first + 1) % (2 * BLOCK_THREADS_MAX);
    worker->ready_count--;
    return thread;
}

static void run_as(struct worker *worker, struct thread *thread) {
    worker->current = thread;
    thread->state = THREAD_RUNNING;
    thread_checked = worker->checked ? thread : NULL;
}

/* Threads that were just released run first: their stacks are still in the cache. */
void block_ready(struct worker *worker, struct thread **threads, unsigned count) {
    if (worker->checked)
        for (unsigned i = count; i > 1; i--) {
            unsigned j = (unsigned)(worker_random(worker) % i);
            struct thread *swap = threads[i - 1];
            threads[i - 1] = threads[j];
            threads[j] = swap;
        }
    for (unsigned i = count; i-- > 0;) {
        threads[i]->state = THREAD_READY;
        ready_put_front(worker, threads[i]->number);
    }
}

static struct fiber *fiber_take(struct worker *worker) {
    return worker->free_fibers[--worker->free_count];
}

static void thread_run(struct worker *worker, struct thread *thread) {
    worker->launch->invoke(worker->launch->arguments.data());
    if (!thread->copies.copies.empty() || !thread->copies.groups.empty())
        copies_apply(worker, thread, 0);
    thread->state = THREAD_ENDED;
    worker->live--;
    warp_leave(worker, thread);
}

/* A fiber runs one thread after another for as long as they end without waiting. */
static void fiber_main(void) {
    struct worker *worker = worker_running;
    for (;;) {
        struct fiber *mine = worker->current->fiber;
        thread_run(worker, worker->current);
        struct thread *next = ready_take(worker);
        if (next && !next->fiber) {
            next->fiber = mine;
            run_as(worker, next);
            continue;
        }
        worker->free_fibers[worker->free_count++] = mine;
        if (next)
            run_as(worker, next);
        fiber_switch(&mine->stack_pointer, next ? next->fiber->stack_pointer : worker->main_stack_pointer);
    }
}

static void fiber_resume(struct worker *worker, void **save, struct thread *thread) {
    if (!thread->fiber)
        thread->fiber = fiber_take(worker);
    run_as(worker, thread);
    fiber_switch(save, thread->fiber->stack_pointer);
}

void block_wait(struct worker *worker, enum thread_state state) {
    struct thread *self = worker->current;
    self->state = state;
    struct thread *next = ready_take(worker);
    if (next)
        fiber_resume(worker, &self->fiber->stack_pointer, next);
    else
        fiber_switch(&self->fiber->stack_pointer, worker->main_stack_pointer);
}

static void fibers_reset(struct worker *worker) {
    worker->free_count = 0;
    for (unsigned i = BLOCK_THREADS_MAX; i-- > 0;) {
        fiber_reset(&worker->fibers[i], fiber_main);
        worker->free_fibers[worker->free_count++] = &worker->fibers[i];
    }
}

void worker_create(struct worker *worker, unsigned number) {
    worker->number = number;
    fiber_create_all(worker->fibers, BLOCK_THREADS_MAX);
    fibers_reset(worker);
}

static void threads_create(struct worker *worker) {
    struct dim3 size = worker->launch->block;
    worker->threads_count = size.x * size.y * size.z;
    worker->warps_count = (worker->threads_count + WARP_LANES - 1) / WARP_LANES;
    worker->live = worker->threads_count;
    worker->at_barrier = 0;
    for (unsigned w = 0; w < worker->warps_count; w++) {
        struct warp *warp = &worker->warps[w];
        unsigned lanes = worker->threads_count - w * WARP_LANES;
        warp->number = w;
        warp->exists = lanes >= WARP_LANES ? 0xffffffff : (1u << lanes) - 1;
        warp->live = warp->exists;
        warp->waiting = 0;
    }
    for (unsigned i = 0; i < worker->threads_count; i++) {
        struct thread *thread = &worker->threads[i];
        thread->number = i;
        thread->index.x = i % size.x;
        thread->index.y = i / size.x % size.y;
        thread->index.z = i / size.x / size.y;
        thread->lane = i % WARP_LANES;
        thread->warp = &worker->warps[i / WARP_LANES];
        thread->warp->lanes[thread->lane] = thread;
        thread->state = THREAD_READY;
        thread->fiber = NULL;
        thread->meeting = NULL;
        thread->log.clear();
        thread->copies.copies.clear();
        thread->copies.groups.clear();
        thread->copies.open = 0;
    }
}

/* Warps in random order, lanes of a warp in random order. */
static void threads_start(struct worker *worker) {
    worker->ready_first = worker->ready_count = 0;
    unsigned order[BLOCK_WARPS_MAX];
    for (unsigned w = 0; w < worker->warps_count; w++)
        order[w] = w;
    if (worker->checked)
        for (unsigned i = worker->warps_count; i > 1; i--) {
            unsigned j = (unsigned)(worker_random(worker) % i), swap = order[i - 1];
            order[i - 1] = order[j];
            order[j] = swap;
        }
    for (unsigned w = worker->warps_count; w-- > 0;) {
        struct warp *warp = &worker->warps[order[w]];
        struct thread *lanes[WARP_LANES];
        unsigned count = 0;
        for (unsigned lane = 0; lane < WARP_LANES; lane++)
            if (warp->exists >> lane & 1)
                lanes[count++] = warp->lanes[lane];
        block_ready(worker, lanes, count);
    }
}

static void shared_begin(struct worker *worker) {
    if (!worker->checked)
        return;
    memset(worker->shared, 0xff, worker->launch->shared_bytes); /* NaN, and no likely integer */
    memset(worker->shared_states, SHARED_UNWRITTEN, worker->launch->shared_bytes);
    memset(worker->shared_parts, 0, sizeof(worker->shared_parts));
}

/* Nobody can run and some have not ended: who waits where. */
static void report_stuck(struct worker *worker) {
    struct thread *first = NULL;
    char text[1024] = "";
    const struct place *last = NULL;
    for (unsigned i = 0; i < worker->threads_count; i++) {
        struct thread *thread = &worker->threads[i];
        if (thread->state != THREAD_AT_BARRIER && thread->state != THREAD_AT_MEETING)
            continue;
        bool meeting = thread->state == THREAD_AT_MEETING;
        const struct place *place = meeting ? &thread->meeting->place : &thread->barrier_place;
        first = first ? first : thread;
        if (last && last->line == place->line && strcmp(last->file, place->file) == 0)
            continue;
        last = place;
        size_t length = strlen(text);
        if (meeting)
            snprintf(text + length, sizeof(text) - length, "\n  thread %u at %s:%d, mask 0x%08x", i, place->file,
                place->line, thread->meeting->mask);
        else
            snprintf(text + length, sizeof(text) - length, "\n  thread %u at __syncthreads, %s:%d", i, place->file,
                place->line);
    }
    worker->current = first;
    fault_raise(NULL, "threads wait for others for ever, %u have ended:%s", worker->threads_count - worker->live, text);
}

/* Somebody else's block may run on this OS thread meanwhile. */
static void rest(struct worker *worker) {
    worker->rests = false;
    worker_running = NULL;
    worker_rest(worker);
    worker_running = worker;
}

void block_run(struct worker *worker, unsigned block) {
    struct dim3 grid = worker->launch->grid;
    worker->block = block;
    worker->block_index.x = block % grid.x;
    worker->block_index.y = block / grid.x % grid.y;
    worker->block_index.z = block / grid.x / grid.y;
    worker->random = settings.seed * 0x9e3779b97f4a7c15 + worker->launch_number * 0xbf58476d1ce4e5b9 + block;
    worker->fault = false;
    threads_create(worker);
    race_block_begin(worker);
    threads_start(worker);
    shared_begin(worker);
    worker_running = worker;
    worker->rests = false;
    do {
        if (worker->rests)
            rest(worker);
        worker->in_block = true;
        fiber_resume(worker, &worker->main_stack_pointer, ready_take(worker));
        worker->in_block = false;
        thread_checked = NULL;
    } while (worker->rests && !worker->fault);
    if (!worker->fault && worker->live > 0)
        report_stuck(worker);
    if (worker->fault)
        fibers_reset(worker);
    worker_running = NULL;
}

/* The thread goes to the end of those that may run. */
extern "C" void emulator_pause(void) {
    struct worker *worker = worker_running;
    struct thread *self = worker->current;
    unsigned end = (worker->ready_first + worker->ready_count) % (2 * BLOCK_THREADS_MAX);
    self->state = THREAD_READY;
    worker->ready[end] = (unsigned short)self->number;
    worker->ready_count++;
    worker->rests = true;
    fiber_switch(&self->fiber->stack_pointer, worker->main_stack_pointer);
}

extern "C" uint64_t emulator_nanoseconds(void) {
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (uint64_t)now.tv_sec * 1000000000 + (uint64_t)now.tv_nsec;
}

/* ---- Barriers of the block ---- */

static int barrier_combine(struct worker *worker) {
    int count = 0;
    for (unsigned i = 0; i < worker->threads_count; i++)
        count += worker->threads[i].barrier_predicate != 0;
    switch (worker->barrier_kind) {
    case EMULATOR_BARRIER_COUNT:
        return count;
    case EMULATOR_BARRIER_AND:
        return count == (int)worker->threads_count;
    case EMULATOR_BARRIER_OR:
        return count > 0;
    default:
        return 0;
    }
}

static void barrier_check(struct worker *worker, const struct place *place) {
    for (unsigned i = 0; i < worker->threads_count; i++) {
        const struct place *other = &worker->threads[i].barrier_place;
        if (other->line != place->line || strcmp(other->file, place->file) != 0)
            fault_raise(place, "__syncthreads: thread %u waits at another one, %s:%d", i, other->file, other->line);
    }
}

static void barrier_release(struct worker *worker, struct thread *self) {
    struct thread *others[BLOCK_THREADS_MAX];
    unsigned count = 0;
    for (unsigned i = 0; i < worker->threads_count; i++)
        if (&worker->threads[i] != self)
            others[count++] = &worker->threads[i];
    worker->at_barrier = 0;
    block_ready(worker, others, count);
}

extern "C" int emulator_barrier(enum emulator_barrier_kind kind, int predicate, const char *file, int line) {
    struct worker *worker = worker_running;
    struct thread *self = worker->current;
    self->barrier_predicate = predicate;
    self->barrier_place.file = file;
    self->barrier_place.line = line;
    self->barrier_place.address = NULL;
    if (worker->live < worker->threads_count)
        fault_raise(&self->barrier_place, "__syncthreads: %u threads of the block have ended without coming here",
            worker->threads_count - worker->live);
    worker->barrier_kind = kind;
    if (++worker->at_barrier < worker->threads_count) {
        block_wait(worker, THREAD_AT_BARRIER);
        return worker->barrier_result;
    }
    barrier_check(worker, &self->barrier_place);
    worker->barrier_result = barrier_combine(worker);
    if (worker->checked) {
        race_barrier(worker);
        traffic_barrier(worker);
    }
    barrier_release(worker, self);
    return worker->barrier_result;
}

/* ---- Indices ---- */

#define INDEX(name, value)                                                                                             \
    extern "C" unsigned emulator_##name##_x(void) {                                                                    \
        return worker_running->value.x;                                                                                \
    }                                                                                                                  \
    extern "C" unsigned emulator_##name##_y(void) {                                                                    \
        return worker_running->value.y;                                                                                \
    }                                                                                                                  \
    extern "C" unsigned emulator_##name##_z(void) {                                                                    \
        return worker_running->value.z;                                                                                \
    }
INDEX(threadIdx, current->index)
INDEX(blockIdx, block_index)
INDEX(blockDim, launch->block)
INDEX(gridDim, launch->grid)

extern "C" void *emulator_shared(void) {
    return worker_running->shared;
}

extern "C" unsigned emulator_active_mask(void) {
    return worker_running->current->warp->live;
}

extern "C" void emulator_fence(void) {
    __atomic_thread_fence(__ATOMIC_SEQ_CST);
}
