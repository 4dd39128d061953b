/* SPDX-License-Identifier: Apache-2.0
 *
 * Workers of a leader (parallel/hosts.h) as threads of the test: everything but the process is real.
 */
#ifndef TESTS_HOSTS_WORKER_H
#define TESTS_HOSTS_WORKER_H

#include "parallel/hosts.h"

#include <pthread.h>

struct hosts_worker {
    const struct model *model;
    struct rendezvous options;
    pthread_t thread;
    int code;
    struct error error;
};

/* Writes "127.0.0.1:PORT" with a port that is free now. */
enum { HOSTS_ADDRESS = 32 };
void hosts_address(char address[HOSTS_ADDRESS]);

/* What a worker of the test's own version needs. */
struct rendezvous hosts_options(const char *address, uint32_t rank);

void hosts_worker_start(struct hosts_worker *worker, const struct model *model, const struct rendezvous *options);
/* Waits until it has ended; its code. */
int hosts_worker_join(struct hosts_worker *worker);

#endif
