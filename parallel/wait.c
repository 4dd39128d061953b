/* SPDX-License-Identifier: Apache-2.0 */
#include "parallel/wait.h"

#include "engine/spin.h"

#include <limits.h>
#include <linux/futex.h>
#include <stddef.h>
#include <sys/syscall.h>
#include <unistd.h>

enum { SPINS = 2000 };

void wait_number_advance(struct wait_number *number) {
    atomic_fetch_add(&number->value, 1);
    if (atomic_load(&number->sleepers) > 0)
        syscall(SYS_futex, &number->value, FUTEX_WAKE_PRIVATE, INT_MAX, NULL, NULL, 0);
}

void wait_number_await(struct wait_number *number, uint32_t old) {
    for (int i = 0; i < SPINS; i++) {
        if (wait_number_get(number) != old)
            return;
        spin_pause();
    }
    atomic_fetch_add(&number->sleepers, 1); /* before the value is looked at again: advance looks in the other order */
    while (atomic_load(&number->value) == old)
        syscall(SYS_futex, &number->value, FUTEX_WAIT_PRIVATE, old, NULL, NULL, 0);
    atomic_fetch_sub(&number->sleepers, 1);
}
