/* SPDX-License-Identifier: Apache-2.0
 *
 * Allocation failures on demand, for programs linked with -Wl,--wrap=malloc,--wrap=calloc,--wrap=realloc.
 */
#ifndef TESTS_FAILING_MALLOC_H
#define TESTS_FAILING_MALLOC_H

#include <stdbool.h>
#include <stdint.h>

/* The allocation after `successes` further ones fails, once. */
void failing_malloc_arm(uint32_t successes);
/* Ends the wait. Returns whether an allocation was made to fail since it began. */
bool failing_malloc_disarm(void);

#endif
