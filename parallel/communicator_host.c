/* SPDX-License-Identifier: Apache-2.0
 *
 * A sum goes through slots that all ranks read: each copies its part into its own slot, all meet, each adds up all
 * slots. There are two sets of slots in turn, so that one meeting a sum is enough: whoever fills a set again has met
 * all others since, who have then read it.
 */
#include "parallel/communicator.h"

#include "engine/backend.h"
#include "parallel/wait.h"

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
    struct rank_state ranks[BACKEND_RANKS_MAX];
    float *slots; /* [SETS][ranks][SLOT_FLOATS] */
};

static struct host_communicator *host(struct communicator *communicator) {
    return (struct host_communicator *)communicator;
}

static void host_stop(struct communicator *communicator) {
    wait_number_advance(&host(communicator)->meetings); /* whoever waits */
}

/* All ranks wait for all. */
static int meet(struct host_communicator *c) {
    uint32_t meeting = wait_number_get(&c->meetings);
    int code = communicator_check(&c->base, NULL);
    if (code != 0)
        return code;
    if (atomic_fetch_add(&c->arrived, 1) + 1 == c->base.ranks) {
        atomic_store(&c->arrived, 0);
        wait_number_advance(&c->meetings);
    } else {
        wait_number_await(&c->meetings, meeting);
    }
    return communicator_check(&c->base, NULL);
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

static int host_all_reduce(struct communicator *communicator, uint32_t rank, const struct communicator_sum *sum) {
    struct host_communicator *c = host(communicator);
    size_t count = (size_t)sum->rows * sum->width;
    for (size_t first = 0; first < count; first += SLOT_FLOATS) {
        size_t left = count - first, part = left < SLOT_FLOATS ? left : SLOT_FLOATS;
        uint32_t set = c->ranks[rank].set;
        c->ranks[rank].set = (set + 1) % SETS;
        memcpy(slot(c, set, rank), sum->x + first, part * sizeof *sum->x);
        int code = meet(c);
        if (code != 0)
            return code;
        add_slots(c, set, sum->x + first, part);
    }
    return 0;
}

/* Each rank writes its own columns. */
static int host_gather(struct communicator *communicator, uint32_t rank, const struct communicator_part *part) {
    size_t width = communicator_part_width(part, rank), out_width = part->first[communicator->ranks];
    for (size_t row = 0; row < part->rows; row++)
        memcpy(part->out + row * out_width + part->first[rank], part->part + row * width, width * sizeof *part->out);
    return meet(host(communicator));
}

static void host_free(struct communicator *communicator) {
    struct host_communicator *c = host(communicator);
    communicator_destroy(communicator);
    free(c->slots);
    free(c);
}

static const struct communicator_operations operations = {
    .name = "threads",
    .free = host_free,
    .all_reduce = host_all_reduce,
    .gather = host_gather,
    .stop = host_stop,
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
    communicator_init(&c->base, &operations, ranks);
    c->slots = slots;
    return &c->base;
}
