/* SPDX-License-Identifier: Apache-2.0 */
#include "tests/unit/failing_malloc.h"

#include <stddef.h>

void *__real_malloc(size_t size);
void *__real_calloc(size_t count, size_t size);
void *__real_realloc(void *memory, size_t size);
void *__wrap_malloc(size_t size);
void *__wrap_calloc(size_t count, size_t size);
void *__wrap_realloc(void *memory, size_t size);

static bool armed, failed;
static uint32_t successes_left;

void failing_malloc_arm(uint32_t successes) {
    armed = true;
    failed = false;
    successes_left = successes;
}

bool failing_malloc_disarm(void) {
    armed = false;
    return failed;
}

static bool fails_now(void) {
    if (!armed || successes_left-- > 0)
        return false;
    armed = false;
    failed = true;
    return true;
}

void *__wrap_malloc(size_t size) {
    return fails_now() ? NULL : __real_malloc(size);
}

void *__wrap_calloc(size_t count, size_t size) {
    return fails_now() ? NULL : __real_calloc(count, size);
}

void *__wrap_realloc(void *memory, size_t size) {
    return fails_now() ? NULL : __real_realloc(memory, size);
}
