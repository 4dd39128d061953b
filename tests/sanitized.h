/* SPDX-License-Identifier: Apache-2.0
 *
 * Whether a test is compiled for the address or the thread sanitizer, under which it takes five to twenty times as
 * long. What is there to compare numbers, over sizes and seeds that are alike to a sanitizer, takes fewer of them then;
 * each way through the program is still taken. The release build has them all, and so have sanitizers when
 * DISTILLCACHE_TEST_FULL is set (scripts/test.sh --full).
 */
#ifndef TESTS_SANITIZED_H
#define TESTS_SANITIZED_H

#include <stdbool.h>
#include <stdlib.h>

static inline bool sanitized(void) {
#if defined __SANITIZE_ADDRESS__ || defined __SANITIZE_THREAD__
    const char *full = getenv("DISTILLCACHE_TEST_FULL");
    return full == NULL || full[0] == '\0';
#else
    return false;
#endif
}

#endif
