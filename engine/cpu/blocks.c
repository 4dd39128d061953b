/* SPDX-License-Identifier: Apache-2.0 */
#include "engine/cpu/blocks.h"

#include "engine/cpu/memory.h"

#include <stdbool.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>

enum {
    UNIT_BYTES = 4096,
    CHUNK_BYTES = 2 << 20,
    UNITS = CHUNK_BYTES / UNIT_BYTES,
    HEADER_BYTES = 64,
    LEAST_BYTES = 2048,
    MOST_BYTES = 1 << 20,
};

struct cpu_chunk {
    struct cpu_chunk *next, *previous;
    char *base; /* [CHUNK_BYTES], aligned to as much */
    uint32_t free;
    bool taken[UNITS];
};

/* Before each block, whatever its size. */
struct block_header {
    struct cpu_chunk *chunk; /* NULL: from memory.h */
    uint32_t units;
};

_Static_assert(sizeof(struct block_header) <= HEADER_BYTES, "the header is in front of an aligned block");

/* With the address sanitizer each block is an allocation of its own, so that accesses beyond it are seen. */
#if defined(__SANITIZE_ADDRESS__)
static const bool chunked = false;
#else
static const bool chunked = true;
#endif

static void chunk_unlink(struct cpu_blocks *blocks, struct cpu_chunk *chunk) {
    if (chunk->previous != NULL)
        chunk->previous->next = chunk->next;
    else
        blocks->chunks = chunk->next;
    if (chunk->next != NULL)
        chunk->next->previous = chunk->previous;
}

static void chunk_put_first(struct cpu_blocks *blocks, struct cpu_chunk *chunk) {
    chunk->previous = NULL;
    chunk->next = blocks->chunks;
    if (chunk->next != NULL)
        chunk->next->previous = chunk;
    blocks->chunks = chunk;
}

/* Maps twice as much, and gives back what lies before and behind the aligned part. */
static char *map_aligned(void) {
    char *start = mmap(NULL, 2 * (size_t)CHUNK_BYTES, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (start == MAP_FAILED)
        return NULL;
    size_t before = (CHUNK_BYTES - (uintptr_t)start % CHUNK_BYTES) % CHUNK_BYTES;
    if (before > 0)
        munmap(start, before);
    munmap(start + before + CHUNK_BYTES, CHUNK_BYTES - before);
#ifdef MADV_HUGEPAGE
    madvise(start + before, CHUNK_BYTES, MADV_HUGEPAGE);
#endif
    return start + before;
}

static struct cpu_chunk *chunk_create(struct cpu_blocks *blocks) {
    struct cpu_chunk *chunk = calloc(1, sizeof *chunk);
    if (chunk == NULL)
        return NULL;
    chunk->base = map_aligned();
    if (chunk->base == NULL) {
        free(chunk);
        return NULL;
    }
    chunk->free = UNITS;
    chunk_put_first(blocks, chunk);
    return chunk;
}

static void chunk_free(struct cpu_chunk *chunk) {
    munmap(chunk->base, CHUNK_BYTES);
    free(chunk);
}

/* The first of `units` free units side by side, UNITS: there are none. */
static uint32_t chunk_find(const struct cpu_chunk *chunk, uint32_t units) {
    uint32_t run = 0;
    for (uint32_t i = 0; i < UNITS; i++) {
        run = chunk->taken[i] ? 0 : run + 1;
        if (run == units)
            return i + 1 - units;
    }
    return UNITS;
}

static void *chunk_take(struct cpu_blocks *blocks, struct cpu_chunk *chunk, uint32_t first, uint32_t units) {
    if (blocks->spare == chunk)
        blocks->spare = NULL;
    memset(chunk->taken + first, true, units);
    chunk->free -= units;
    struct block_header *header = (struct block_header *)(chunk->base + (size_t)first * UNIT_BYTES);
    memset(header, 0, (size_t)units * UNIT_BYTES);
    *header = (struct block_header){chunk, units};
    return header;
}

static void *chunked_bytes(struct cpu_blocks *blocks, size_t total) {
    uint32_t units = (uint32_t)((total + UNIT_BYTES - 1) / UNIT_BYTES);
    for (struct cpu_chunk *chunk = blocks->chunks; chunk != NULL; chunk = chunk->next) {
        uint32_t first = chunk->free >= units ? chunk_find(chunk, units) : UNITS;
        if (first < UNITS)
            return chunk_take(blocks, chunk, first, units);
    }
    struct cpu_chunk *fresh = chunk_create(blocks);
    return fresh != NULL ? chunk_take(blocks, fresh, 0, units) : NULL;
}

void *cpu_block_allocate(struct cpu_blocks *blocks, size_t bytes) {
    if (bytes > SIZE_MAX / 2)
        return NULL;
    size_t total = bytes + HEADER_BYTES;
    bool small = chunked && total >= LEAST_BYTES && total <= MOST_BYTES;
    char *block = small ? chunked_bytes(blocks, total) : cpu_memory_allocate(total);
    return block != NULL ? block + HEADER_BYTES : NULL;
}

static void chunk_give_back(struct cpu_blocks *blocks, struct block_header *header) {
    struct cpu_chunk *chunk = header->chunk;
    uint32_t units = header->units;
    memset(chunk->taken + ((char *)header - chunk->base) / UNIT_BYTES, false, units);
    chunk->free += units;
    chunk_unlink(blocks, chunk);
    if (chunk->free == UNITS && blocks->spare != NULL) {
        chunk_free(chunk);
        return;
    }
    chunk_put_first(blocks, chunk);
    if (chunk->free == UNITS)
        blocks->spare = chunk;
}

void cpu_block_release(struct cpu_blocks *blocks, void *block) {
    if (block == NULL)
        return;
    struct block_header *header = (struct block_header *)((char *)block - HEADER_BYTES);
    if (header->chunk != NULL)
        chunk_give_back(blocks, header);
    else
        cpu_memory_release(header);
}

void cpu_blocks_free(struct cpu_blocks *blocks) {
    if (blocks->spare == NULL)
        return;
    chunk_unlink(blocks, blocks->spare);
    chunk_free(blocks->spare);
    blocks->spare = NULL;
}
