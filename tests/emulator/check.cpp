/* SPDX-License-Identifier: Apache-2.0
 *
 * One access of a kernel: whether the thread may make it, and its record for the counts.
 */
#include "check.h"
#include "race.h"
#include "traffic.h"

#include <stdio.h>
#include <string.h>

static const char *const verbs[] = {"reads", "writes", "updates"};

static void fault_range(const void *at, size_t bytes, enum access_kind kind, void *site) {
    struct place place = {NULL, 0, site};
    char what[256];
    memory_describe(at, what, sizeof(what));
    fault_raise(&place, "kernel %s %zu bytes out of bounds: %s", verbs[kind], bytes, what);
}

static void fault_device(const void *at, size_t bytes, enum access_kind kind, void *site) {
    struct place place = {NULL, 0, site};
    char what[256];
    memory_describe(at, what, sizeof(what));
    fault_raise(&place, "kernel of device %u %s %zu bytes of another device: %s", worker_running->launch->device,
        verbs[kind], bytes, what);
}

static void fault_race(
    const struct thread *thread, const void *at, size_t bytes, enum access_kind kind, void *site, unsigned other) {
    struct place place = {NULL, 0, site};
    char what[256];
    const struct worker *worker = worker_running;
    size_t offset = (size_t)((const char *)at - worker->shared);
    if (offset < BLOCK_SHARED_SPACE)
        snprintf(what, sizeof(what), "byte %zu of shared memory", offset);
    else
        memory_describe(at, what, sizeof(what));
    fault_raise(&place, "race: thread %u %s %zu bytes that thread %u (or another) touched since they last met: %s",
        thread->number, verbs[kind], bytes, other, what);
}

static void fault_blocks(const void *at, size_t bytes, void *site, unsigned other) {
    struct place place = {NULL, 0, site};
    char what[256];
    memory_describe(at, what, sizeof(what));
    fault_raise(&place, "race: blocks %u and %u both write %zu bytes: %s", worker_running->block, other, bytes, what);
}

static void fault_alignment(const void *at, size_t bytes, enum access_kind kind, void *site) {
    struct place place = {NULL, 0, site};
    fault_raise(&place, "kernel %s %zu bytes at %p, which is no multiple of that", verbs[kind], bytes, at);
}

static bool global_ok(size_t offset, size_t bytes) {
    for (size_t at = offset; at < offset + bytes;) {
        size_t end = (at | 15) + 1 < offset + bytes ? (at | 15) + 1 : offset + bytes;
        uint8_t state = memory_states[at / 16];
        if (state > 16 || (at & 15) + (end - at) > state)
            return false;
        at = end;
    }
    return true;
}

static void access_global(
    struct thread *thread, size_t offset, const void *at, size_t bytes, enum access_kind kind, void *site) {
    unsigned other;
    if (memory_device_of_offset(offset) != worker_running->launch->device)
        fault_device(at, bytes, kind, site);
    if (!global_ok(offset, bytes))
        fault_range(at, bytes, kind, site);
    if (!race_global(worker_running, thread, offset, bytes, kind, &other))
        fault_race(thread, at, bytes, kind, site, other);
    if (kind == ACCESS_WRITE && !race_blocks(worker_running, offset, bytes, &other))
        fault_blocks(at, bytes, site, other);
    traffic_record(worker_running, thread, false, offset, bytes, kind, site);
}

static void access_shared(
    struct thread *thread, size_t offset, const void *at, size_t bytes, enum access_kind kind, void *site) {
    struct worker *worker = worker_running;
    struct place place = {NULL, 0, site};
    unsigned other;
    if (offset + bytes > worker->launch->shared_bytes)
        fault_raise(&place, "kernel %s byte %zu of shared memory, which has %zu", verbs[kind], offset + bytes - 1,
            worker->launch->shared_bytes);
    uint8_t *states = worker->shared_states + offset;
    for (size_t i = 0; i < bytes; i++) {
        if (states[i] == SHARED_COPYING)
            fault_raise(&place, "kernel %s byte %zu of shared memory before the wait for its asynchronous copy",
                verbs[kind], offset + i);
        if (states[i] == SHARED_UNWRITTEN && kind != ACCESS_WRITE)
            fault_raise(
                &place, "kernel %s byte %zu of shared memory, which nobody has written", verbs[kind], offset + i);
        states[i] = SHARED_WRITTEN;
    }
    if (!race_shared(worker, thread, offset, bytes, kind, &other))
        fault_race(thread, at, bytes, kind, site, other);
    traffic_record(worker, thread, true, offset, bytes, kind, site);
}

/* Own variables, arguments, constants, and pinned memory of the host. */
static void access_other(const void *at, size_t bytes, enum access_kind kind, void *site) {
    const struct launch *launch = worker_running->launch;
    if ((size_t)((const char *)at - launch->arguments.data()) < launch->arguments.size())
        return;
    if (memory_is_static(at) || memory_is_pinned(at, bytes))
        return;
    struct place place = {NULL, 0, site};
    fault_raise(&place, "kernel %s %zu bytes of host memory at %p", verbs[kind], bytes, at);
}

void check_access(
    struct thread *thread, const void *at, size_t bytes, enum access_kind kind, bool aligned, void *site) {
    struct worker *worker = worker_running;
    size_t global = (size_t)((const char *)at - memory_arena);
    size_t shared = (size_t)((const char *)at - worker->shared);
    bool is_global = global < (size_t)1 << MEMORY_ARENA_BYTES_LOG;
    if (!is_global && shared >= BLOCK_SHARED_SPACE) {
        if ((size_t)((const char *)at - thread->fiber->stack) >= FIBER_STACK_BYTES)
            access_other(at, bytes, kind, site);
        return;
    }
    if (aligned && ((uintptr_t)at & (bytes - 1)) != 0)
        fault_alignment(at, bytes, kind, site);
    if (is_global)
        access_global(thread, global, at, bytes, kind, site);
    else
        access_shared(thread, shared, at, bytes, kind, site);
}

void check_copy_begin(struct thread *thread, const void *to, const void *from, unsigned valid, void *site) {
    struct worker *worker = worker_running;
    struct place place = {NULL, 0, site};
    size_t offset = (size_t)((const char *)to - worker->shared);
    if (offset + 16 > worker->launch->shared_bytes)
        fault_raise(&place, "cp.async to %p, which is not in the block's %zu bytes of shared memory", to,
            worker->launch->shared_bytes);
    if (valid > 0 && !memory_is_device(from))
        fault_raise(&place, "cp.async from %p, which is no device memory", from);
    if (valid > 0)
        check_access(thread, from, valid, ACCESS_READ, false, site);
    check_access(thread, to, 16, ACCESS_WRITE, true, (char *)site + 1); /* a place of its own for the counts */
    memset(worker->shared_states + offset, SHARED_COPYING, 16);
}

void check_copy_end(struct worker *worker, struct thread *thread, const void *to) {
    unsigned other;
    size_t offset = (size_t)((const char *)to - worker->shared);
    memset(worker->shared_states + offset, SHARED_WRITTEN, 16);
    if (!race_shared(worker, thread, offset, 16, ACCESS_WRITE, &other))
        fault_race(thread, to, 16, ACCESS_WRITE, NULL, other);
}
