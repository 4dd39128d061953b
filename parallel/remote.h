/* SPDX-License-Identifier: Apache-2.0
 *
 * A rank in another process, as a backend of the leader's: each operation is a message to the worker (messages.h),
 * which calls the same operation of its own backend. Operations without a result are sent and not waited for, so that
 * the worker computes while the leader goes on; those with one wait, at most the link's patience. Device addresses are
 * numbers that the leader hands out and the worker looks up.
 *
 * What ranks other than the first are not asked for is NULL: sample, kl, select, steps, tables.
 *
 * When the worker is lost, or answers what it should not, the rank fails for good: the communicator gives up with the
 * error, operations do nothing, allocate returns NULL and results are zeros.
 */
#ifndef PARALLEL_REMOTE_H
#define PARALLEL_REMOTE_H

#include "engine/backend.h"
#include "parallel/communicator.h"
#include "parallel/link.h"

/* Takes the link over, also on an error. ERROR_MEMORY. */
struct backend *remote_open(struct link *link, uint32_t rank, struct error *error);

/* Where the rank's failures are told; before the first operation. Borrowed. */
void remote_set_communicator(struct backend *backend, struct communicator *communicator);

bool remote_is(const struct backend *backend); /* opened by remote_open */
/* Whoever waits for the worker gets an error; any thread. */
void remote_stop(struct backend *backend);
/* Looks whether the worker is still there, without waiting; fails the rank when it is not. Any thread. */
void remote_look(struct backend *backend);

#endif
