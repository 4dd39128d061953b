/* SPDX-License-Identifier: Apache-2.0
 *
 * Checks that results are the same bits in every tier and with every number of threads.
 */
#ifndef TESTS_PARITY_PARITY_SAME_H
#define TESTS_PARITY_PARITY_SAME_H

#include "tests/parity/parity.h"

/* Compares bytes with those that the first tier gave in this case and round; CUDA's with CUDA's own. One call a round.
 */
bool parity_check_same(struct parity *parity, const void *bytes, size_t count);

#endif
