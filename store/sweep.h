/* SPDX-License-Identifier: Apache-2.0
 *
 * What lies in the state directory and is nobody's (any more).
 */
#ifndef STORE_SWEEP_H
#define STORE_SWEEP_H

#include "store/store.h"

/* When the store opens: uploads that are not whole or have no record, policy files of jobs that have ended without a
 * policy, checkpoints of cancelled jobs. What has none of the store's names is left alone. */
void store_sweep(const struct store *store, struct database *database);

/* If the job is cancelled, its checkpoints and their records go, sooner or later. Any thread. */
void store_discard_job(struct store *store, const char *job);

#endif
