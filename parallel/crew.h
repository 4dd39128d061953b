/* SPDX-License-Identifier: Apache-2.0
 *
 * One thread a rank: work is done by all of them at once, each for its own rank, so that they may wait for each other
 * within it. The caller is rank 0. One thread at a time may call crew_run.
 */
#ifndef PARALLEL_CREW_H
#define PARALLEL_CREW_H

#include "engine/error.h"

#include <stdint.h>

struct crew; /* opaque */

struct crew *crew_create(uint32_t ranks, struct error *error); /* 1 to BACKEND_RANKS_MAX. ERROR_MEMORY, ERROR_IO */
void crew_free(struct crew *crew);                             /* NULL allowed */

/* Runs work(context, rank) for every rank, and returns when all are done. */
typedef void (*crew_work)(void *context, uint32_t rank);
void crew_run(struct crew *crew, crew_work work, void *context);

#endif
