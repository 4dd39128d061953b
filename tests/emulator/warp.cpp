/* SPDX-License-Identifier: Apache-2.0
 *
 * Meetings of a warp's lanes: each brings its value and waits; the last one of the mask computes the results of all.
 */
#include "internal.h"
#include "race.h"
#include "traffic.h"

#include <string.h>

static unsigned mask_lowest(unsigned mask) {
    return (unsigned)__builtin_ctz(mask);
}

#define EACH_LANE(lane, mask)                                                                                          \
    for (unsigned rest_ = (mask), lane; rest_ != 0 && (lane = mask_lowest(rest_), true); rest_ &= rest_ - 1)

/* PTX ISA, shfl.sync: `width` splits the warp into segments; a source outside of the own one gives the own value. */
static unsigned shuffle_source(const struct meeting *meeting, unsigned lane) {
    unsigned width = meeting->width, segment = lane & ~(width - 1), end = segment + width;
    unsigned argument = meeting->argument, source;
    switch (meeting->kind) {
    case EMULATOR_SHUFFLE:
        return segment | (argument & (width - 1));
    case EMULATOR_SHUFFLE_UP:
        return argument <= lane - segment ? lane - argument : lane;
    case EMULATOR_SHUFFLE_DOWN:
        return argument < end - lane ? lane + argument : lane;
    default:
        source = lane ^ (argument & (WARP_LANES - 1));
        return source < end ? source : lane;
    }
}

static void compute_shuffle(struct warp *warp, unsigned mask) {
    EACH_LANE(lane, mask) {
        struct meeting *meeting = warp->lanes[lane]->meeting;
        unsigned source = shuffle_source(meeting, lane);
        if (!(mask >> source & 1))
            fault_raise(&meeting->place, "lane %u reads from lane %u, which is not in mask 0x%08x", lane, source, mask);
        meeting->result = warp->lanes[source]->meeting->value;
    }
}

static void compute_ballot(struct warp *warp, unsigned mask) {
    unsigned ballot = 0;
    EACH_LANE(lane, mask)
    ballot |= (unsigned)(warp->lanes[lane]->meeting->value != 0) << lane;
    EACH_LANE(lane, mask)
    warp->lanes[lane]->meeting->result = ballot;
}

static void compute_match(struct warp *warp, unsigned mask) {
    EACH_LANE(lane, mask) {
        unsigned equal = 0;
        EACH_LANE(other, mask)
        equal |= (unsigned)(warp->lanes[other]->meeting->value == warp->lanes[lane]->meeting->value) << other;
        warp->lanes[lane]->meeting->result = equal;
    }
}

static uint32_t reduce(enum emulator_warp_kind kind, uint32_t a, uint32_t b) {
    switch (kind) {
    case EMULATOR_REDUCE_ADD:
        return a + b;
    case EMULATOR_REDUCE_MIN:
        return (int32_t)a < (int32_t)b ? a : b;
    case EMULATOR_REDUCE_MIN_UNSIGNED:
        return a < b ? a : b;
    case EMULATOR_REDUCE_MAX:
        return (int32_t)a > (int32_t)b ? a : b;
    case EMULATOR_REDUCE_MAX_UNSIGNED:
        return a > b ? a : b;
    case EMULATOR_REDUCE_AND:
        return a & b;
    case EMULATOR_REDUCE_OR:
        return a | b;
    default:
        return a ^ b;
    }
}

static void compute_reduction(struct warp *warp, unsigned mask, enum emulator_warp_kind kind) {
    unsigned first = mask_lowest(mask);
    uint32_t result = (uint32_t)warp->lanes[first]->meeting->value;
    EACH_LANE(lane, mask & (mask - 1))
    result = reduce(kind, result, (uint32_t)warp->lanes[lane]->meeting->value);
    EACH_LANE(lane, mask)
    warp->lanes[lane]->meeting->result = result;
}

static void compute(struct worker *worker, struct warp *warp, unsigned mask, enum emulator_warp_kind kind) {
    switch (kind) {
    case EMULATOR_SYNC:
        break;
    case EMULATOR_BALLOT:
        compute_ballot(warp, mask);
        break;
    case EMULATOR_MATCH:
        compute_match(warp, mask);
        break;
    case EMULATOR_SHUFFLE:
    case EMULATOR_SHUFFLE_UP:
    case EMULATOR_SHUFFLE_DOWN:
    case EMULATOR_SHUFFLE_XOR:
        compute_shuffle(warp, mask);
        break;
    case EMULATOR_MMA_F16:
    case EMULATOR_MMA_BF16:
    case EMULATOR_MMA_S8:
    case EMULATOR_MMA_S8_K16:
        mma_compute(warp, kind);
        break;
    case EMULATOR_LDMATRIX:
    case EMULATOR_LDMATRIX_TRANS:
        ldmatrix_compute(worker, warp, kind);
        break;
    default:
        compute_reduction(warp, mask, kind);
    }
}

/* The lane that came first with the same mask, or the lane itself. It must wait for the same. Lanes that wait with
 * another mask may come later: if they never do, nobody can go on, and block.cpp reports it. */
static struct meeting *meeting_first(struct warp *warp, struct meeting *mine, unsigned mask) {
    EACH_LANE(lane, mask & warp->waiting) {
        struct meeting *other = warp->lanes[lane]->meeting;
        if (other->mask != mine->mask)
            continue;
        if (other->kind != mine->kind || !place_same_line(&other->place, &mine->place))
            fault_raise(&mine->place, "lanes diverged: lane %u of mask 0x%08x is at %s:%d", lane, mine->mask,
                other->place.file, other->place.line);
        return other->first;
    }
    return mine;
}

static void meet(struct worker *worker, struct meeting *mine) {
    struct thread *self = worker->current;
    struct warp *warp = self->warp;
    if (!(mine->mask >> self->lane & 1))
        fault_raise(&mine->place, "mask 0x%08x lacks the lane itself, %u", mine->mask, self->lane);
    unsigned mask = mine->mask & warp->exists;
    if (mask & ~warp->live)
        fault_raise(&mine->place, "mask 0x%08x names lanes that have ended: 0x%08x", mine->mask, mask & ~warp->live);
    mine->met = 0;
    mine->first = meeting_first(warp, mine, mask);
    mine->first->met |= 1u << self->lane;
    self->meeting = mine;
    warp->waiting |= 1u << self->lane;
    if (mine->first->met != mask) {
        block_wait(worker, THREAD_AT_MEETING);
        return;
    }
    if (worker->checked && mask == warp->live)
        traffic_warp(worker, warp);
    compute(worker, warp, mask, mine->kind);
    if (worker->checked && mine->kind == EMULATOR_SYNC) /* the others order no memory (CUDA C++ Programming Guide) */
        race_meeting(worker, warp, mask);
    warp->waiting &= ~mask;
    struct thread *others[WARP_LANES];
    unsigned count = 0;
    EACH_LANE(lane, mask & ~(1u << self->lane))
    others[count++] = warp->lanes[lane];
    block_ready(worker, others, count);
}

void warp_leave(struct worker *worker, struct thread *thread) {
    struct warp *warp = thread->warp;
    warp->live &= ~(1u << thread->lane);
    if (worker->checked && warp->live == 0)
        traffic_warp(worker, warp);
}

extern "C" uint64_t emulator_warp(enum emulator_warp_kind kind, unsigned mask, uint64_t value, unsigned argument,
    unsigned width, const char *file, int line) {
    struct meeting meeting; /* not zeroed: that would take longer than all the rest */
    meeting.kind = kind;
    meeting.mask = mask;
    meeting.value = value;
    meeting.argument = argument;
    meeting.width = width;
    meeting.place.file = file;
    meeting.place.line = line;
    meeting.place.address = NULL;
    if (width == 0 || width > WARP_LANES || (width & (width - 1)) != 0)
        fault_raise(&meeting.place, "width %u is no power of two up to 32", width);
    meet(worker_running, &meeting);
    return meeting.result;
}

extern "C" void emulator_mma(enum emulator_warp_kind kind, uint32_t *d, const uint32_t *a, const uint32_t *b,
    const uint32_t *c, const char *file, int line) {
    struct meeting meeting; /* not zeroed: that would take longer than all the rest */
    meeting.kind = kind;
    meeting.mask = 0xffffffff;
    meeting.fragment_d = d;
    meeting.fragment_a = a;
    meeting.fragment_b = b;
    meeting.fragment_c = c;
    meeting.place.file = file;
    meeting.place.line = line;
    meeting.place.address = NULL;
    meet(worker_running, &meeting);
}

extern "C" void emulator_ldmatrix(
    enum emulator_warp_kind kind, uint32_t *result, const void *row, const char *file, int line) {
    struct meeting meeting; /* not zeroed: that would take longer than all the rest */
    meeting.kind = kind;
    meeting.mask = 0xffffffff;
    meeting.fragment_d = result;
    meeting.row = row;
    meeting.place.file = file;
    meeting.place.line = line;
    meeting.place.address = __builtin_return_address(0);
    meet(worker_running, &meeting);
}
