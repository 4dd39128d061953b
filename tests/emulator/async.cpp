/* SPDX-License-Identifier: Apache-2.0
 *
 * cp.async: a copy is made when its thread waits for it, so that whoever does not wait sees what was there before.
 */
#include "internal.h"
#include "check.h"

#include <string.h>

static void copy_now(struct worker *worker, struct thread *thread, const struct async_copy *copy) {
    if (worker->checked)
        check_copy_end(worker, thread, copy->to);
    memcpy(copy->to, copy->from, copy->valid);
    memset((char *)copy->to + copy->valid, 0, 16 - copy->valid);
}

static void copies_drop(struct async_copies *copies, unsigned count) {
    copies->copies.erase(copies->copies.begin(), copies->copies.begin() + count);
}

void copies_apply(struct worker *worker, struct thread *thread, unsigned groups) {
    struct async_copies *copies = &thread->copies;
    unsigned done = 0, first = 0;
    while (copies->groups.size() - first > groups)
        done += copies->groups[first++];
    for (unsigned i = 0; i < done; i++)
        copy_now(worker, thread, &copies->copies[i]);
    copies_drop(copies, done);
    copies->groups.erase(copies->groups.begin(), copies->groups.begin() + first);
}

extern "C" void emulator_copy_async(void *to, const void *from, unsigned valid) {
    struct thread *thread = worker_running->current;
    struct place place = {NULL, 0, __builtin_return_address(0)};
    if ((uintptr_t)to % 16 != 0 || (uintptr_t)from % 16 != 0 || valid > 16)
        fault_raise(&place, "cp.async: addresses %p to %p are not multiples of 16, or %u bytes are more than 16", from,
            to, valid);
    if (thread_checked)
        check_copy_begin(thread, to, from, valid, place.address);
    struct async_copy copy = {to, from, valid};
    thread->copies.copies.push_back(copy);
    thread->copies.open++;
}

extern "C" void emulator_copy_commit(void) {
    struct async_copies *copies = &worker_running->current->copies;
    copies->groups.push_back(copies->open);
    copies->open = 0;
}

extern "C" void emulator_copy_wait(unsigned groups) {
    struct worker *worker = worker_running;
    copies_apply(worker, worker->current, groups);
}
