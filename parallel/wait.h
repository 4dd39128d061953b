/* SPDX-License-Identifier: Apache-2.0
 *
 * A number that threads wait for to change: who waits spins for a while, then sleeps on a futex. What was written
 * before a change is seen by whoever saw the change.
 */
#ifndef PARALLEL_WAIT_H
#define PARALLEL_WAIT_H

#include <stdatomic.h>
#include <stdint.h>

struct wait_number {
    _Alignas(64) _Atomic uint32_t value; /* in a line of the caches of its own */
    _Atomic uint32_t sleepers;
};

static inline uint32_t wait_number_get(struct wait_number *number) {
    return atomic_load_explicit(&number->value, memory_order_acquire);
}

void wait_number_advance(struct wait_number *number);             /* by one, and wakes those who sleep */
void wait_number_await(struct wait_number *number, uint32_t old); /* returns once it is another than `old` */

#endif
