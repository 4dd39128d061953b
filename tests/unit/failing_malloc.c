/* SPDX-License-Identifier: Apache-2.0 */
#include "tests/unit/failing_malloc.h"

#include <stdatomic.h>
#include <stddef.h>

void *__real_malloc(size_t size);
void *__real_calloc(size_t count, size_t size);
void *__real_realloc(void *memory, size_t size);
void *__wrap_malloc(size_t size);
void *__wrap_calloc(size_t count, size_t size);
void *__wrap_realloc(void *memory, size_t size);

static atomic_bool armed, failed;
static atomic_uint successes_left;
static _Thread_local bool spared;

void failing_malloc_arm(uint32_t successes) {
    failed = false;
    successes_left = successes;
    armed = true;
}

bool failing_malloc_disarm(void) {
    armed = false;
    return failed;
}

void failing_malloc_spare_thread(void) {
    spared = true;
}

static bool fails_now(void) {
    if (spared || !armed || successes_left-- > 0)
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
