/* SPDX-License-Identifier: Apache-2.0
 *
 * Blocks of device memory that come and go: those of 2 KB to 1 MB lie side by side in chunks of 2 MB on huge pages,
 * larger and smaller ones where memory.h puts them. The statistics of a sequence are hundreds of arrays of some ten
 * kilobytes, of which a decode step touches a few pages each: on pages of 4 KB every one of these is a miss of the
 * address cache, which in a virtual machine costs as much as the data.
 *
 * Chunks are cut into units of 4 KB; a block takes the first run of free ones. Of empty chunks one is kept, others go
 * back to the system. Not thread-safe.
 */
#ifndef ENGINE_CPU_BLOCKS_H
#define ENGINE_CPU_BLOCKS_H

#include <stddef.h>

struct cpu_chunk;

struct cpu_blocks {           /* zero to begin with */
    struct cpu_chunk *chunks; /* what was given back to last comes first */
    struct cpu_chunk *spare;  /* one of them, empty; or NULL */
};

/* Zeroed, 64-byte aligned. NULL when there is no memory. */
void *cpu_block_allocate(struct cpu_blocks *blocks, size_t bytes);
void cpu_block_release(struct cpu_blocks *blocks, void *block); /* NULL is allowed */
void cpu_blocks_free(struct cpu_blocks *blocks);                /* all blocks were released */

#endif
