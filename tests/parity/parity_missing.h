/* SPDX-License-Identifier: Apache-2.0
 *
 * Backends whose table has gaps: a case that calls a missing operation is left there and counts as skipped, with a line
 * that says so. What the case holds is leaked.
 */
#ifndef TESTS_PARITY_PARITY_MISSING_H
#define TESTS_PARITY_PARITY_MISSING_H

#include "engine/backend.h"

#include <setjmp.h>

/* operations with the gaps filled; a call of what was a gap jumps to *skip (1). Good until the next call. */
const struct backend_operations *parity_fill_missing(const struct backend_operations *operations, jmp_buf *skip);

const char *parity_missing_name(void); /* what was called */

#endif
