/* SPDX-License-Identifier: Apache-2.0
 *
 * The monotonic clock in seconds, for measurements and logs; results never depend on it.
 */
#ifndef ENGINE_CLOCK_H
#define ENGINE_CLOCK_H

#include <time.h>

static inline double clock_seconds(void) {
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (double)now.tv_sec + 1e-9 * (double)now.tv_nsec;
}

#endif
