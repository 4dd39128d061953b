/* SPDX-License-Identifier: Apache-2.0
 *
 * Results that nobody waits for by themselves: numbers of one device array that go to scattered places of the host. The
 * copy into pinned memory is queued behind what computes them; whoever waits for the stream next (cuda_wait) hands them
 * over. Until then the places must be there.
 */
#ifndef CUDA_LATE_H
#define CUDA_LATE_H

#include <stdbool.h>
#include <stdint.h>

struct cuda_backend;

struct cuda_late {
    uint32_t *numbers; /* pinned [room] */
    uint32_t **places; /* [room] of each number; NULL: nobody's */
    uint32_t count, room;
};

/* Room for `count` numbers more. May wait. False: no memory, which is no error of the backend. */
bool cuda_late_reserve(struct cuda_backend *cuda, uint32_t count);

/* Queues the copy of numbers [count], for which there is room. Returns where their places [count] are to be written. */
uint32_t **cuda_late_fetch(struct cuda_backend *cuda, const uint32_t *device, uint32_t count);

/* Hands over all that was fetched; the stream was waited for. */
void cuda_late_deliver(struct cuda_late *late);
void cuda_late_forget(struct cuda_late *late); /* after an error: there is nothing to hand over */
void cuda_late_free(struct cuda_late *late);

#endif
