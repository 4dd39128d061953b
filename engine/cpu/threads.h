/* SPDX-License-Identifier: Apache-2.0
 *
 * The CPU backend's threads: a fixed pool that runs chunks of a parallel operation. The caller works too. Workers take
 * chunks from an atomic counter; the end is a barrier that spins for a while, then sleeps on a futex (KERNELS.md,
 * Threads). One thread at a time may call thread_pool_run.
 */
#ifndef ENGINE_CPU_THREADS_H
#define ENGINE_CPU_THREADS_H

#include "engine/error.h"

#include <stdint.h>

struct thread_pool; /* opaque */

/* Threads that this process may use: its affinity mask, limited by the cgroup's CPU quota (v1 and v2). At least 1. */
uint32_t thread_count_available(void);

/* threads counts the caller: 1 starts none. */
struct thread_pool *thread_pool_create(uint32_t threads, struct error *error);
void thread_pool_free(struct thread_pool *pool);
uint32_t thread_pool_size(const struct thread_pool *pool);

/* Runs work(context, chunk, thread) for every chunk in [0, chunks), thread in [0, size), and returns when all are done.
 * Which thread takes which chunk is not defined; results must not depend on it. */
typedef void (*thread_work)(void *context, uint32_t chunk, uint32_t thread);
void thread_pool_run(struct thread_pool *pool, uint32_t chunks, thread_work work, void *context);

#endif
