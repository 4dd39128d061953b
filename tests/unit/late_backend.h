/* SPDX-License-Identifier: Apache-2.0
 *
 * The CPU backend with the manners of a device, so that the engine's ways with one can be tested without any: its
 * memory is not the host's, score does not wait for the slots that go, and it selects. One at a time.
 */
#ifndef TESTS_LATE_BACKEND_H
#define TESTS_LATE_BACKEND_H

#include "engine/backend.h"

struct late_counts {
    uint32_t waits;  /* of synchronize where something was awaited, and of operations with results */
    uint32_t scores; /* layers scored */
    uint32_t selections;
    uint32_t moves; /* calls of move_statistics */
};

/* Puts other operations in the place of the backend's, until late_backend_end; nothing may be awaited then. */
void late_backend_begin(struct backend *backend);
void late_backend_end(struct backend *backend);

struct late_counts late_backend_counts(void); /* since the last call, or begin */
void late_backend_fail_select(bool fail);     /* as if there were no memory */

#endif
