/* SPDX-License-Identifier: Apache-2.0
 *
 * Opening a model while each allocation in turn fails: always ERROR_MEMORY, never a leak (ASan watches).
 */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>

#include <stdlib.h>
#include <unistd.h>

#include "engine/model.h"
#include "tests/unit/failing_malloc.h"
#include "tests/unit/tiny_llama.h"

static void every_failed_allocation_is_reported(void **state) {
    (void)state;
    struct tiny_llama options = tiny_llama_default();
    char *path = tiny_llama_save(&options);
    bool failed = true;
    uint32_t allocations = 0;
    for (; failed; allocations++) {
        struct error error = {0};
        failing_malloc_arm(allocations);
        struct model *model = model_open(path, &error);
        failed = failing_malloc_disarm();
        assert_int_equal(model == NULL, failed);
        assert_int_equal(error.code, failed ? ERROR_MEMORY : 0);
        model_free(model);
    }
    assert_true(allocations > 8);
    unlink(path);
    free(path);
}

int main(void) {
    const struct CMUnitTest tests[] = {cmocka_unit_test(every_failed_allocation_is_reported)};
    return cmocka_run_group_tests(tests, NULL, NULL);
}
