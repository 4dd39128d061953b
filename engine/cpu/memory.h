/* SPDX-License-Identifier: Apache-2.0
 *
 * Memory of the CPU backend: zeroed, 64-byte aligned; large blocks are mapped on their own and ask for huge pages.
 */
#ifndef ENGINE_CPU_MEMORY_H
#define ENGINE_CPU_MEMORY_H

#include <stddef.h>

/* NULL when there is none. */
void *cpu_memory_allocate(size_t bytes);
void cpu_memory_release(void *memory); /* NULL is allowed */

#endif
