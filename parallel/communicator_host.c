/* SPDX-License-Identifier: Apache-2.0
 *
 * A sum goes through slots that all ranks read: each copies its part into its own slot, all meet, each adds up all
 * slots. There are two sets of slots in turn, so that one meeting a sum is enough: whoever fills a set again has met
 * all others since, who have then read it.
 *
 * A rank whose memory this process does not see is far: its thread downloads the part into the slot and uploads the
 * sum. So all parts of other processes come to the leader, and each gets the sum back: two ways through the network a
 * sum, whatever the number of ranks, and the same order of adding for all.
 */
#include "parallel/communicator.h"

#include "engine/backend.h"
#include "parallel/remote.h"
#include "parallel/wait.h"

#include <stdlib.h>
#include <string.h>

/* Floats that are added at once: what caches hold, or what makes a way through the network worth it. */
enum { SLOT_FLOATS = 1 << 14, FAR_SLOT_FLOATS = 1 << 18, SETS = 2 };

struct rank_state {
    _Alignas(64) uint32_t set; /* for the next sum */
    struct backend *far;       /* NULL: addresses are this process's */
    float *room;               /* far: [room_floats] on the way to it */
    size_t room_floats;
};

struct host_communicator {
    struct communicator base; /* first */
    struct communicator_operations operations;
    struct wait_number meetings;
    _Alignas(64) _Atomic uint32_t arrived;
    struct rank_state ranks[BACKEND_RANKS_MAX];
    size_t slot_floats;
    float *slots; /* [SETS][ranks][slot_floats] */
};

static struct host_communicator *host(struct communicator *communicator) {
    return (struct host_communicator *)communicator;
}

static void host_stop(struct communicator *communicator) {
    struct host_communicator *c = host(communicator);
    for (uint32_t rank = 0; rank < communicator->ranks; rank++)
        if (c->ranks[rank].far != NULL && remote_is(c->ranks[rank].far))
            remote_stop(c->ranks[rank].far);
    wait_number_advance(&c->meetings); /* whoever waits */
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

/* ---- sums ---- */

static float *slot(struct host_communicator *c, uint32_t set, uint32_t rank) {
    return c->slots + ((size_t)set * c->base.ranks + rank) * c->slot_floats;
}

static void add_slots(struct host_communicator *c, uint32_t set, float *out, size_t count) {
    memcpy(out, slot(c, set, 0), count * sizeof *out);
    for (uint32_t rank = 1; rank < c->base.ranks; rank++) {
        const float *part = slot(c, set, rank);
        for (size_t i = 0; i < count; i++)
            out[i] += part[i];
    }
}

static void fetch(const struct rank_state *own, float *to, const float *from, size_t count) {
    if (own->far != NULL)
        own->far->operations->download(own->far, to, from, count * sizeof *to);
    else
        memcpy(to, from, count * sizeof *to);
}

static int host_all_reduce(struct communicator *communicator, uint32_t rank, const struct communicator_sum *sum) {
    struct host_communicator *c = host(communicator);
    struct rank_state *own = &c->ranks[rank];
    size_t count = (size_t)sum->rows * sum->width;
    for (size_t first = 0; first < count; first += c->slot_floats) {
        size_t left = count - first, part = left < c->slot_floats ? left : c->slot_floats;
        uint32_t set = own->set;
        own->set = (set + 1) % SETS;
        fetch(own, slot(c, set, rank), sum->x + first, part);
        int code = meet(c);
        if (code != 0)
            return code;
        add_slots(c, set, own->far != NULL ? own->room : sum->x + first, part);
        if (own->far != NULL)
            own->far->operations->upload(own->far, sum->x + first, own->room, part * sizeof *own->room);
    }
    return 0;
}

/* ---- columns ---- */

static int reserve_room(struct host_communicator *c, struct rank_state *own, size_t floats) {
    if (floats <= own->room_floats)
        return 0;
    float *grown = realloc(own->room, floats * sizeof *grown);
    if (grown == NULL) {
        const struct error error = {.code = ERROR_MEMORY, .message = "no memory to gather what ranks have computed"};
        communicator_give_up(&c->base, &error);
        return ERROR_MEMORY;
    }
    own->room = grown;
    own->room_floats = floats;
    return 0;
}

/* Where columns come together: rank 0's memory, or room of this process's on the way there, which others see after a
 * meeting. */
static int open_gathered(
    struct host_communicator *c, uint32_t rank, const struct communicator_part *part, float **gathered) {
    struct rank_state *first = &c->ranks[0];
    int code = 0;
    *gathered = part->out;
    if (first->far == NULL)
        return 0;
    if (rank == 0)
        code = reserve_room(c, first, 2 * (size_t)part->rows * part->first[c->base.ranks]);
    if (code == 0)
        code = meet(c);
    *gathered = first->room;
    return code;
}

/* Each rank writes its own columns. */
static int host_gather(struct communicator *communicator, uint32_t rank, const struct communicator_part *part) {
    struct host_communicator *c = host(communicator);
    struct rank_state *own = &c->ranks[rank];
    size_t width = communicator_part_width(part, rank), out_width = part->first[communicator->ranks];
    float *gathered, *parts = (float *)part->part;
    int code = open_gathered(c, rank, part, &gathered);
    if (code == 0 && own->far != NULL && rank > 0)
        code = reserve_room(c, own, part->rows * width);
    if (code != 0)
        return code;
    if (own->far != NULL) {
        parts = rank == 0 ? own->room + part->rows * out_width : own->room;
        fetch(own, parts, part->part, part->rows * width);
    }
    for (size_t row = 0; row < part->rows; row++)
        memcpy(gathered + row * out_width + part->first[rank], parts + row * width, width * sizeof *gathered);
    code = meet(c);
    if (code == 0 && rank == 0 && own->far != NULL)
        own->far->operations->upload(own->far, part->out, gathered, part->rows * out_width * sizeof *gathered);
    return code;
}

/* ---- opening and closing ---- */

static void host_free(struct communicator *communicator) {
    struct host_communicator *c = host(communicator);
    for (uint32_t rank = 0; rank < communicator->ranks; rank++)
        free(c->ranks[rank].room);
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

static struct host_communicator *create(uint32_t ranks, size_t slot_floats, const char *name, struct error *error) {
    struct host_communicator *c = aligned_alloc(_Alignof(struct host_communicator), sizeof *c);
    float *slots = malloc(SETS * ranks * slot_floats * sizeof *slots);
    if (c == NULL || slots == NULL) {
        free(c);
        free(slots);
        error_set(error, ERROR_MEMORY, "no memory for the exchange between %u devices", ranks);
        return NULL;
    }
    memset(c, 0, sizeof *c);
    c->operations = operations;
    c->operations.name = name;
    communicator_init(&c->base, &c->operations, ranks);
    c->slot_floats = slot_floats;
    c->slots = slots;
    return c;
}

struct communicator *communicator_host_create(uint32_t ranks, struct error *error) {
    struct host_communicator *c = create(ranks, SLOT_FLOATS, "threads", error);
    return c != NULL ? &c->base : NULL;
}

struct communicator *communicator_far_create(struct backend *const *inner, uint32_t ranks, struct error *error) {
    struct host_communicator *c = create(ranks, FAR_SLOT_FLOATS, "TCP", error);
    for (uint32_t rank = 0; c != NULL && rank < ranks; rank++) {
        struct rank_state *own = &c->ranks[rank];
        own->far = inner[rank]->operations->host_memory ? NULL : inner[rank];
        own->room = malloc(FAR_SLOT_FLOATS * sizeof *own->room);
        own->room_floats = FAR_SLOT_FLOATS;
        if (own->room == NULL) {
            error_set(error, ERROR_MEMORY, "no memory for the exchange between %u devices", ranks);
            host_free(&c->base);
            return NULL;
        }
    }
    return c != NULL ? &c->base : NULL;
}
