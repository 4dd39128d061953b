/* SPDX-License-Identifier: Apache-2.0 */
#include "engine/cpu/memory.h"

#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>

enum { ALIGNMENT = 64 };
static const size_t MAPPED_FROM = (size_t)1 << 20;
static const size_t HUGE_PAGE = (size_t)2 << 20;
static const size_t SLAB_BYTES = (size_t)64 << 20; /* what is not used of it takes no memory */

/* In the 64 bytes before each block. */
struct memory_header {
    size_t mapped; /* bytes to unmap from the header on; 0: from aligned_alloc */
};

static void *map_bytes(size_t bytes) {
    /* Whole huge pages only pay when the block is larger than one. */
    void *start = mmap(NULL, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (start == MAP_FAILED)
        return NULL;
#ifdef MADV_HUGEPAGE
    if (bytes >= HUGE_PAGE)
        madvise(start, bytes, MADV_HUGEPAGE);
#endif
    return start;
}

static void *heap_bytes(size_t bytes) {
    void *start = aligned_alloc(ALIGNMENT, bytes);
    if (start != NULL)
        memset(start, 0, bytes);
    return start;
}

void *cpu_memory_allocate(size_t bytes) {
    if (bytes > SIZE_MAX / 2)
        return NULL;
    size_t total = (bytes + ALIGNMENT - 1) / ALIGNMENT * ALIGNMENT + ALIGNMENT;
    struct memory_header *header = total >= MAPPED_FROM ? map_bytes(total) : heap_bytes(total);
    if (header == NULL)
        return NULL;
    header->mapped = total >= MAPPED_FROM ? total : 0;
    return (char *)header + ALIGNMENT;
}

void cpu_memory_release(void *memory) {
    if (memory == NULL)
        return;
    struct memory_header *header = (struct memory_header *)((char *)memory - ALIGNMENT);
    if (header->mapped > 0)
        munmap(header, header->mapped);
    else
        free(header);
}

struct cpu_slab {
    size_t bytes;
    size_t used; /* this header included */
    uint32_t blocks;
};

static struct cpu_slab *slab_open(size_t bytes) {
    struct cpu_slab *slab = map_bytes(bytes);
    if (slab == NULL)
        return NULL;
    slab->bytes = bytes;
    slab->used = ALIGNMENT;
    return slab;
}

void *cpu_slab_allocate(struct cpu_slab **open, size_t bytes, struct cpu_slab **slab) {
    if (bytes > SIZE_MAX / 2)
        return NULL;
    bytes = (bytes + ALIGNMENT - 1) / ALIGNMENT * ALIGNMENT;
    if (*open == NULL || (*open)->bytes - (*open)->used < bytes) {
        size_t fresh_bytes = bytes + ALIGNMENT > SLAB_BYTES ? bytes + ALIGNMENT : SLAB_BYTES;
        struct cpu_slab *fresh = slab_open(fresh_bytes);
        if (fresh == NULL)
            return NULL;
        cpu_slab_close(open);
        *open = fresh;
    }
    *slab = *open;
    void *block = (char *)*open + (*open)->used;
    (*open)->used += bytes;
    (*open)->blocks++;
    return block;
}

void cpu_slab_release(struct cpu_slab **open, struct cpu_slab *slab) {
    slab->blocks--;
    if (slab->blocks == 0 && slab != *open)
        munmap(slab, slab->bytes);
}

void cpu_slab_close(struct cpu_slab **open) {
    struct cpu_slab *slab = *open;
    *open = NULL;
    if (slab != NULL && slab->blocks == 0)
        munmap(slab, slab->bytes);
}
