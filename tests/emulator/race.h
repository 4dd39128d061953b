/* SPDX-License-Identifier: Apache-2.0
 *
 * Races inside a block: two threads touch the same bytes between two points at which they met, one of them writing, not
 * both atomically. Threads of a block meet at __syncthreads, lanes of a warp at __syncwarp too. Races between blocks
 * are not looked for: the order of blocks is not known to the emulator (README.md).
 */
#ifndef EMULATOR_RACE_H
#define EMULATOR_RACE_H

#include "internal.h"
#include "check.h"

/* State of a byte of shared memory. */
enum shared_state { SHARED_UNWRITTEN, SHARED_WRITTEN, SHARED_COPYING };

/* Who touched a word (or byte) last; see race.cpp for the bits. */
struct race_cell {
    uint64_t write, read;
};

void race_create(void);
void race_worker_create(struct worker *worker);
/* Reads of large memory that no kernel writes are not kept in mind (weights); those of this range are from the start.
 */
void race_expect_writes(size_t offset, size_t bytes);
void race_block_begin(struct worker *worker);
void race_barrier(struct worker *worker);
/* Lanes of the mask met. */
void race_meeting(struct worker *worker, struct warp *warp, unsigned mask);

/* An access of bytes at an offset of the arena or of shared memory. Returns false and the other thread of a race. */
bool race_global(
    struct worker *worker, struct thread *thread, size_t offset, size_t bytes, enum access_kind kind, unsigned *other);
/* A plain write: false when another block of this launch wrote there too. */
bool race_blocks(struct worker *worker, size_t offset, size_t bytes, unsigned *other);
bool race_shared(
    struct worker *worker, struct thread *thread, size_t offset, size_t bytes, enum access_kind kind, unsigned *other);

#endif
