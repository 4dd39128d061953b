/* SPDX-License-Identifier: Apache-2.0
 *
 * Allocation failures on demand, for programs linked with -Wl,--wrap=malloc,--wrap=calloc,--wrap=realloc. Of a program
 * with several threads, in whichever allocates then.
 */
#ifndef TESTS_FAILING_MALLOC_H
#define TESTS_FAILING_MALLOC_H

#include <stdbool.h>
#include <stdint.h>

/* The allocation after `successes` further ones fails, once. */
void failing_malloc_arm(uint32_t successes);
/* Ends the wait. Returns whether an allocation was made to fail since it began. */
bool failing_malloc_disarm(void);
/* Allocations of the calling thread neither count nor fail from now on. */
void failing_malloc_spare_thread(void);

#endif
