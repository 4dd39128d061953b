/* SPDX-License-Identifier: Apache-2.0
 *
 * A sum goes through slots that all ranks read: each copies its part into its own slot, all meet, each adds up all
 * slots. There are two sets of slots in turn, so that one meeting a sum is enough: whoever fills a set again has met
 * all others since, who have then read it.
 */
#include "parallel/communicator.h"

#include "engine/backend.h"
#include "parallel/wait.h"

#include <pthread.h>
#include <stdbool.h>
#include <stdlib.h>
#include <string.h>

enum { SLOT_FLOATS = 1 << 14, SETS = 2 };

struct rank_state {
    _Alignas(64) uint32_t set; /* for the next sum */
};

struct host_communicator {
    struct communicator base; /* first */
    struct wait_number meetings;
    _Alignas(64) _Atomic uint32_t arrived;
    _Atomic bool failed;
    pthread_mutex_t lock; /* of error */
    struct error error;
    struct rank_state ranks[BACKEND_RANKS_MAX];
    float *slots; /* [SETS][ranks][SLOT_FLOATS] */
};

static struct host_communicator *host(struct communicator *communicator) {
    return (struct host_communicator *)communicator;
}

static void host_give_up(struct communicator *communicator, const struct error *error) {
    struct host_communicator *c = host(communicator);
    pthread_mutex_lock(&c->lock);
    if (!atomic_load(&c->failed))
        c->error = *error;
    atomic_store(&c->failed, true);
    pthread_mutex_unlock(&c->lock);
    wait_number_advance(&c->meetings); /* whoever waits */
}

static int host_check(struct communicator *communicator, struct error *error) {
    struct host_communicator *c = host(communicator);
    if (!atomic_load_explicit(&c->failed, memory_order_acquire))
        return 0;
    pthread_mutex_lock(&c->lock);
    int code = c->error.code;
    if (error != NULL)
        *error = c->error;
    pthread_mutex_unlock(&c->lock);
    return code;
}

/* All ranks wait for all. */
static int meet(struct host_communicator *c) {
    uint32_t meeting = wait_number_get(&c->meetings);
    if (atomic_load(&c->failed))
        return host_check(&c->base, NULL);
    if (atomic_fetch_add(&c->arrived, 1) + 1 == c->base.ranks) {
        atomic_store(&c->arrived, 0);
        wait_number_advance(&c->meetings);
    } else {
        wait_number_await(&c->meetings, meeting);
    }
    return host_check(&c->base, NULL);
}

static float *slot(struct host_communicator *c, uint32_t set, uint32_t rank) {
    return c->slots + ((size_t)set * c->base.ranks + rank) * SLOT_FLOATS;
}

static void add_slots(struct host_communicator *c, uint32_t set, float *out, size_t count) {
    memcpy(out, slot(c, set, 0), count * sizeof *out);
    for (uint32_t rank = 1; rank < c->base.ranks; rank++) {
        const float *part = slot(c, set, rank);
        for (size_t i = 0; i < count; i++)
            out[i] += part[i];
    }
}

static int host_all_reduce(struct communicator *communicator, uint32_t rank, float *buffer, size_t count) {
    struct host_communicator *c = host(communicator);
    for (size_t first = 0; first < count; first += SLOT_FLOATS) {
        size_t left = count - first, part = left < SLOT_FLOATS ? left : SLOT_FLOATS;
        uint32_t set = c->ranks[rank].set;
        c->ranks[rank].set = (set + 1) % SETS;
        memcpy(slot(c, set, rank), buffer + first, part * sizeof *buffer);
        int code = meet(c);
        if (code != 0)
            return code;
        add_slots(c, set, buffer + first, part);
    }
    return 0;
}

/* Each rank writes its own columns. */
static int host_gather(struct communicator *communicator, uint32_t rank, const struct communicator_part *part) {
    (void)rank;
    for (size_t row = 0; row < part->rows; row++)
        memcpy(part->out + row * part->out_stride + part->first, part->part + row * part->stride,
            part->width * sizeof *part->out);
    return meet(host(communicator));
}

static void host_free(struct communicator *communicator) {
    struct host_communicator *c = host(communicator);
    pthread_mutex_destroy(&c->lock);
    free(c->slots);
    free(c);
}

static const struct communicator_operations operations = {
    .free = host_free,
    .all_reduce = host_all_reduce,
    .gather = host_gather,
    .give_up = host_give_up,
    .check = host_check,
};

struct communicator *communicator_host_create(uint32_t ranks, struct error *error) {
    struct host_communicator *c = aligned_alloc(_Alignof(struct host_communicator), sizeof *c);
    float *slots = malloc((size_t)SETS * ranks * SLOT_FLOATS * sizeof *slots);
    if (c == NULL || slots == NULL) {
        free(c);
        free(slots);
        error_set(error, ERROR_MEMORY, "no memory for the exchange between %u devices", ranks);
        return NULL;
    }
    memset(c, 0, sizeof *c);
    c->base = (struct communicator){&operations, ranks};
    c->slots = slots;
    pthread_mutex_init(&c->lock, NULL);
    return &c->base;
}
