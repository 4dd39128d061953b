/* SPDX-License-Identifier: Apache-2.0 */
#ifndef EMULATOR_CHECK_H
#define EMULATOR_CHECK_H

#include "internal.h"

enum access_kind { ACCESS_READ, ACCESS_WRITE, ACCESS_ATOMIC };

/* Checks one access of the thread and counts it; raises a fault where it is wrong: out of bounds, freed, unaligned
 * (aligned: the address has to be a multiple of the size, a power of two), unwritten shared memory, a race. */
void check_access(struct thread *thread, const void *at, size_t bytes, enum access_kind kind, bool aligned, void *site);

/* An asynchronous copy of 16 bytes begins (the thread's source and destination) and ends. */
void check_copy_begin(struct thread *thread, const void *to, const void *from, unsigned valid, void *site);
void check_copy_end(struct worker *worker, struct thread *thread, const void *to);

#endif
