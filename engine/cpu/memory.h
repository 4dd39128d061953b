/* SPDX-License-Identifier: Apache-2.0
 *
 * Memory of the CPU backend: zeroed, 64-byte aligned; large blocks are mapped on their own and ask for huge pages.
 *
 * Blocks that are read front to back, one after the other, lie side by side in slabs, which are large enough for huge
 * pages where single blocks are not. In a virtual machine a miss of the address cache costs as much as a miss of the
 * data, so that a pass over small pages reads at about half the bandwidth.
 */
#ifndef ENGINE_CPU_MEMORY_H
#define ENGINE_CPU_MEMORY_H

#include <stddef.h>
#include <stdint.h>

/* NULL when there is none. */
void *cpu_memory_allocate(size_t bytes);
void cpu_memory_release(void *memory); /* NULL is allowed */

struct cpu_slab; /* opaque */

/* Takes bytes from the slab *open; when there is none or it is full, opens a new one. *slab is where the block lies.
 * Returns NULL when there is no memory. A slab lives until its blocks are released and it is not open any more. */
void *cpu_slab_allocate(struct cpu_slab **open, size_t bytes, struct cpu_slab **slab);
void cpu_slab_release(struct cpu_slab **open, struct cpu_slab *slab); /* one block less */
void cpu_slab_close(struct cpu_slab **open);                          /* no more blocks from *open */

#endif
