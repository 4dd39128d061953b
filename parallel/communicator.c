/* SPDX-License-Identifier: Apache-2.0 */
#include "parallel/communicator.h"

void communicator_init(
    struct communicator *communicator, const struct communicator_operations *operations, uint32_t ranks) {
    *communicator = (struct communicator){.operations = operations, .ranks = ranks, .patience = COMMUNICATOR_PATIENCE};
    pthread_mutex_init(&communicator->lock, NULL);
}

void communicator_destroy(struct communicator *communicator) {
    pthread_mutex_destroy(&communicator->lock);
}

void communicator_give_up(struct communicator *communicator, const struct error *error) {
    pthread_mutex_lock(&communicator->lock);
    bool first = !atomic_load(&communicator->failed);
    if (first)
        communicator->error = *error;
    atomic_store(&communicator->failed, true);
    pthread_mutex_unlock(&communicator->lock);
    if (first)
        communicator->operations->stop(communicator);
}

int communicator_check(struct communicator *communicator, struct error *error) {
    if (!atomic_load_explicit(&communicator->failed, memory_order_acquire))
        return 0;
    pthread_mutex_lock(&communicator->lock);
    int code = communicator->error.code;
    if (error != NULL)
        *error = communicator->error;
    pthread_mutex_unlock(&communicator->lock);
    return code;
}
