/* SPDX-License-Identifier: Apache-2.0
 *
 * A rank that works for a leader in another process: reads its messages (messages.h) and does what they say on a
 * backend of its own, with its own copy of the model file. Whatever a message asks for is checked first (messages.h);
 * the first that is none ends the connection, and all that was allocated for the leader is freed.
 */
#ifndef PARALLEL_WORKER_H
#define PARALLEL_WORKER_H

#include "engine/backend.h"
#include "parallel/link.h"
#include "parallel/wire.h"

struct model;
struct worker; /* opaque */

/* Borrows the model and the backend. bytes_most: of device memory that the leader may have. ERROR_MEMORY. */
struct worker *worker_create(const struct model *model, struct backend *backend, uint32_t rank, uint32_t world,
    size_t bytes_most, struct error *error);
/* Frees all that the leader had, too. NULL allowed. */
void worker_free(struct worker *worker);

/* Does what a message says. bytes: [size], 8-byte aligned; overwritten. *answers: it has an answer, which is in
 * `answer` (begun for writing by the caller). ERROR_FORMAT: it is no message, or asks for what it may not. */
int worker_take(struct worker *worker, uint32_t operation, void *bytes, size_t size, struct wire *answer, bool *answers,
    struct error *error);

/* Works until the leader says goodbye: 0; ERROR_IO (the leader is lost, or link_stop), ERROR_FORMAT, ERROR_MEMORY. */
int worker_run(struct worker *worker, struct link *link, struct error *error);

#endif
