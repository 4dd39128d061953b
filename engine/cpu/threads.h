/* SPDX-License-Identifier: Apache-2.0
 *
 * The CPU backend's threads: a fixed pool that runs chunks of a parallel operation. The caller works too. Workers take
 * chunks from an atomic counter; who waits spins for a while, then sleeps on a futex (KERNELS.md, Threads). A worker
 * that is not scheduled in time holds nobody up: the others take its chunks. One thread at a time may call
 * thread_pool_run.
 */
#ifndef ENGINE_CPU_THREADS_H
#define ENGINE_CPU_THREADS_H

#include "engine/error.h"

#include <stdint.h>

enum { THREADS_MAX = 256 };

struct thread_pool; /* opaque */

/* Threads that this process may use: its affinity mask, limited by the cgroup's CPU quota (v1 and v2). From 1 to
 * THREADS_MAX. */
uint32_t thread_count_available(void);

/* Whole CPUs (at least 1) that the quotas of a cgroup and its ancestors allow, UINT32_MAX when there is no quota.
 * membership: the text file /proc/self/cgroup; mount: where the hierarchies are mounted, /sys/fs/cgroup. */
uint32_t thread_count_quota(const char *membership, const char *mount);

/* threads counts the caller: 1 starts none. At most THREADS_MAX. */
struct thread_pool *thread_pool_create(uint32_t threads, struct error *error);
void thread_pool_free(struct thread_pool *pool);
uint32_t thread_pool_size(const struct thread_pool *pool);

/* Runs work(context, chunk, thread) for every chunk in [0, chunks), thread in [0, size), and returns when all are done.
 * Which thread takes which chunk is not defined; results must not depend on it. Chunks are begun in ascending order. */
typedef void (*thread_work)(void *context, uint32_t chunk, uint32_t thread);
void thread_pool_run(struct thread_pool *pool, uint32_t chunks, thread_work work, void *context);

/* Cuts [0, count) into as many parts of about the same size as there are threads, and runs work(context, first, end,
 * thread) for each that is not empty. A thread takes its own part, the same for the same count, so that what it wrote
 * there in one operation is still in its caches in the next; others take the part of one that comes late, so that
 * results must not depend on it. */
typedef void (*thread_part_work)(void *context, uint32_t first, uint32_t end, uint32_t thread);
void thread_pool_run_parts(struct thread_pool *pool, uint32_t count, thread_part_work work, void *context);

#endif
