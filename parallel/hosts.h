/* SPDX-License-Identifier: Apache-2.0
 *
 * Tensor parallel over several processes, on one machine or on several: one leads (rank 0, parallel_hosts_open), the
 * others work for it (hosts_work). The leader has the scheduler, policies, page tables and its own rank's memory; a
 * worker has a backend and the same model file, and does what it is told (remote.h, worker.h). Sums go through the
 * leader (communicator_far_create).
 */
#ifndef PARALLEL_HOSTS_H
#define PARALLEL_HOSTS_H

#include "engine/backend.h"
#include "parallel/rendezvous.h"

struct model;

/* A backend of which rank 0 is `first` and the others are processes that join. Takes `first` over, also on an error.
 * Errors of rendezvous_lead, ERROR_MEMORY. */
struct backend *hosts_lead(struct backend *first, const struct rendezvous *options, struct error *error);

/* options->hosts of backend.h: opens the first backend by its name, and leads. ERROR_UNSUPPORTED: with several ranks of
 * its own. */
struct backend *parallel_hosts_open(const struct backend_options *options, struct error *error);

/* Works for a leader with a backend of one device, until the leader ends: 0. options->fingerprint and ->backend are
 * filled in. `joined` (may be NULL) is told the link, to stop it from a signal's handler, and NULL at the end. Errors
 * of rendezvous_join and worker_run. */
int hosts_work(const struct model *model, struct backend *backend, const struct rendezvous *options,
    void (*joined)(const struct link *link, uint32_t world), struct error *error);

#endif
