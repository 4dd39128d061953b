/* SPDX-License-Identifier: Apache-2.0
 *
 * Each word of device memory and of shared memory has a cell with its last write and its last read: when (the worker's
 * stamp, which grows at each barrier and meeting) and by whom. Accesses to parts of words have cells per byte instead.
 */
#include "race.h"

#include <string.h>
#include <sys/mman.h>

/* An access: stamp << 22 | worker << 16 | warp << 11 | lane << 6 | flags. */
enum {
    CELL_STAMP = 22,
    CELL_WORKER = 16,
    CELL_WARP = 11,
    CELL_LANE = 6,
    CELL_ANY_WARP = 32, /* threads of several warps */
    CELL_ANY_LANE = 16, /* several lanes of the warp */
    CELL_ATOMIC = 8
};

enum { CHUNK_LOG = 16, CHUNK_WRITTEN = 1, CHUNK_PARTS = 2 };

static struct race_cell *global_words, *global_bytes;
/* Of each 64 KiB: whether a kernel ever wrote to it (memory that is only read needs no cells), or touched parts of
 * words.
 */
static uint8_t *chunks;
/* The last block that wrote a word, or a byte of it: launch << 32 | block. */
static uint64_t *word_writers, *byte_writers;

static struct race_cell *cells_reserve(size_t count) {
    return (struct race_cell *)memory_reserve(count * sizeof(struct race_cell), PROT_READ | PROT_WRITE);
}

void race_create(void) {
    size_t bytes = (size_t)1 << MEMORY_ARENA_BYTES_LOG;
    global_words = cells_reserve(bytes / 4);
    global_bytes = cells_reserve(bytes);
    chunks = (uint8_t *)memory_reserve(bytes >> CHUNK_LOG, PROT_READ | PROT_WRITE);
    word_writers = (uint64_t *)memory_reserve(bytes / 4 * sizeof(uint64_t), PROT_READ | PROT_WRITE);
    byte_writers = (uint64_t *)memory_reserve(bytes * sizeof(uint64_t), PROT_READ | PROT_WRITE);
}

void race_expect_writes(size_t offset, size_t bytes) {
    for (size_t chunk = offset >> CHUNK_LOG; chunk <= (offset + bytes - 1) >> CHUNK_LOG; chunk++)
        __atomic_fetch_or(&chunks[chunk], CHUNK_WRITTEN, __ATOMIC_RELAXED);
}

void race_worker_create(struct worker *worker) {
    worker->shared_words = cells_reserve(BLOCK_SHARED_SPACE / 4);
    worker->shared_bytes = cells_reserve(BLOCK_SHARED_SPACE);
}

/* ---- Points at which threads meet ---- */

void race_block_begin(struct worker *worker) {
    worker->barrier_stamp = ++worker->stamp;
    for (unsigned w = 0; w < worker->warps_count; w++) {
        worker->warps[w].common_stamp = worker->barrier_stamp;
        if (worker->warps[w].pairs)
            memset(worker->warps[w].pair_stamp, 0, sizeof(worker->warps[w].pair_stamp));
        worker->warps[w].pairs = false;
    }
}

void race_barrier(struct worker *worker) {
    worker->barrier_stamp = ++worker->stamp;
}

void race_meeting(struct worker *worker, struct warp *warp, unsigned mask) {
    uint64_t stamp = ++worker->stamp;
    if (mask == warp->live) {
        warp->common_stamp = stamp;
        return;
    }
    warp->pairs = true;
    for (unsigned a = 0; a < WARP_LANES; a++)
        for (unsigned b = 0; b < WARP_LANES; b++)
            if ((mask >> a & 1) && (mask >> b & 1))
                warp->pair_stamp[a][b] = stamp;
}

/* ---- Cells ---- */

static inline uint64_t cell_mine(const struct worker *worker, const struct thread *thread) {
    return worker->stamp << CELL_STAMP | (uint64_t)worker->number << CELL_WORKER |
           (uint64_t)thread->warp->number << CELL_WARP | (uint64_t)thread->lane << CELL_LANE;
}

static inline bool cell_is_current(const struct worker *worker, uint64_t cell) {
    return cell >> CELL_STAMP >= worker->barrier_stamp && (cell >> CELL_WORKER & 63) == worker->number;
}

/* After the last partial meeting of a lane with some other lane: with several lanes in the cell, the benefit of doubt.
 */
static bool before_pair(const struct thread *thread, uint64_t cell) {
    const struct warp *warp = thread->warp;
    uint64_t stamp = cell >> CELL_STAMP, last = warp->pair_stamp[cell >> CELL_LANE & 31][thread->lane];
    if (cell & CELL_ANY_LANE)
        for (unsigned lane = 0; lane < WARP_LANES; lane++)
            last = warp->pair_stamp[lane][thread->lane] > last ? warp->pair_stamp[lane][thread->lane] : last;
    return stamp < last;
}

/* Whether the access in the cell is one of another thread that this one has not met since. */
static inline bool cell_conflicts(const struct worker *worker, const struct thread *thread, uint64_t cell) {
    if (!cell_is_current(worker, cell))
        return false;
    if ((cell & CELL_ANY_WARP) || (cell >> CELL_WARP & 31) != thread->warp->number)
        return true;
    if (cell >> CELL_STAMP < thread->warp->common_stamp)
        return false;
    if (!(cell & CELL_ANY_LANE) && (cell >> CELL_LANE & 31) == thread->lane)
        return false;
    return !thread->warp->pairs || !before_pair(thread, cell);
}

/* The cell after an access by the thread that keeps in mind who else is not ordered before it. */
static inline uint64_t cell_merge(const struct worker *worker, const struct thread *thread, uint64_t cell) {
    uint64_t mine = cell_mine(worker, thread);
    if (!cell_is_current(worker, cell))
        return mine;
    if ((cell & CELL_ANY_WARP) || (cell >> CELL_WARP & 31) != thread->warp->number)
        return mine | CELL_ANY_WARP | CELL_ANY_LANE;
    if (cell >> CELL_STAMP < thread->warp->common_stamp)
        return mine;
    if (!(cell & CELL_ANY_LANE) && (cell >> CELL_LANE & 31) == thread->lane)
        return mine;
    return mine | CELL_ANY_LANE;
}

static unsigned cell_thread(uint64_t cell) {
    return (unsigned)(cell >> CELL_LANE & 1023);
}

static inline bool cell_check(const struct worker *worker, const struct thread *thread, const struct race_cell *cell,
    enum access_kind kind, unsigned *other) {
    bool both_atomic = kind == ACCESS_ATOMIC && (cell->write & CELL_ATOMIC);
    if (!both_atomic && cell_conflicts(worker, thread, cell->write)) {
        *other = cell_thread(cell->write);
        return false;
    }
    if (kind != ACCESS_READ && cell_conflicts(worker, thread, cell->read)) {
        *other = cell_thread(cell->read);
        return false;
    }
    return true;
}

static inline void cell_record(
    const struct worker *worker, const struct thread *thread, struct race_cell *cell, enum access_kind kind) {
    if (kind == ACCESS_READ)
        cell->read = cell_merge(worker, thread, cell->read);
    else if (kind == ACCESS_WRITE)
        cell->write = cell_mine(worker, thread);
    else
        cell->write = cell_merge(worker, thread, cell->write) | CELL_ATOMIC;
}

/* parts: this memory has cells of bytes in use. */
static bool access(const struct worker *worker, const struct thread *thread, struct race_cell *words,
    struct race_cell *bytes, bool parts, size_t offset, size_t length, enum access_kind kind, unsigned *other) {
    bool whole = offset % 4 == 0 && length % 4 == 0;
    for (size_t word = offset / 4; word <= (offset + length - 1) / 4; word++) {
        if (!cell_check(worker, thread, &words[word], kind, other))
            return false;
        if (whole)
            cell_record(worker, thread, &words[word], kind);
    }
    if (!parts)
        return true;
    for (size_t byte = offset; byte < offset + length; byte++) {
        if (!cell_check(worker, thread, &bytes[byte], kind, other))
            return false;
        if (!whole)
            cell_record(worker, thread, &bytes[byte], kind);
    }
    return true;
}

bool race_global(
    struct worker *worker, struct thread *thread, size_t offset, size_t bytes, enum access_kind kind, unsigned *other) {
    uint8_t *chunk = &chunks[offset >> CHUNK_LOG];
    uint8_t flags = *chunk;
    if (kind == ACCESS_READ && !(flags & CHUNK_WRITTEN))
        return true;
    uint8_t wanted = CHUNK_WRITTEN | (offset % 4 != 0 || bytes % 4 != 0 ? CHUNK_PARTS : 0);
    if ((flags & wanted) != wanted)
        __atomic_fetch_or(chunk, wanted, __ATOMIC_RELAXED);
    return access(worker, thread, global_words, global_bytes, *chunk & CHUNK_PARTS, offset, bytes, kind, other);
}

static bool writer_ok(uint64_t *writer, uint64_t mine, unsigned *other) {
    uint64_t last = __atomic_exchange_n(writer, mine, __ATOMIC_RELAXED);
    *other = (unsigned)last;
    return last == mine || last >> 32 != mine >> 32;
}

bool race_blocks(struct worker *worker, size_t offset, size_t bytes, unsigned *other) {
    uint64_t mine = worker->launch_number << 32 | worker->block;
    if (offset % 4 == 0 && bytes % 4 == 0) {
        for (size_t word = offset / 4; word < (offset + bytes) / 4; word++)
            if (!writer_ok(&word_writers[word], mine, other))
                return false;
        return true;
    }
    for (size_t byte = offset; byte < offset + bytes; byte++)
        if (!writer_ok(&byte_writers[byte], mine, other))
            return false;
    return true;
}

bool race_shared(
    struct worker *worker, struct thread *thread, size_t offset, size_t bytes, enum access_kind kind, unsigned *other) {
    bool *parts = &worker->shared_parts[offset / 1024];
    *parts |= offset % 4 != 0 || bytes % 4 != 0;
    return access(worker, thread, worker->shared_words, worker->shared_bytes, *parts, offset, bytes, kind, other);
}
