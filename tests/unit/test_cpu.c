/* SPDX-License-Identifier: Apache-2.0
 *
 * The CPU backend's frame: tiers, memory. What its operations compute is tested in tests/parity.
 */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "engine/cpu/cpu.h"
#include "engine/cpu/memory.h"

static struct backend *open_cpu(const char *features, uint32_t threads, struct error *error) {
    struct backend_options options = {.cpu_features = features, .threads = threads};
    return backend_cpu_open(&options, error);
}

static void tiers_can_be_lowered(void **state) {
    (void)state;
    enum cpu_tier highest = cpu_tier_detect();
    for (int tier = 0; tier < CPU_TIER_COUNT; tier++) {
        struct error error;
        const char *name = cpu_tier_name((enum cpu_tier)tier);
        struct backend *backend = open_cpu(name, 1, &error);
        if (tier > (int)highest) {
            assert_null(backend);
            assert_int_equal(error.code, ERROR_UNSUPPORTED);
            assert_non_null(strstr(error.message, name));
            continue;
        }
        assert_non_null(backend);
        assert_int_equal(cpu_backend(backend)->tier, tier);
        assert_non_null(strstr(backend->operations->describe(backend), name));
        backend->operations->close(backend);
    }
}

/* The kernel's own list of features is the independent source. */
static void detection_agrees_with_the_kernel(void **state) {
    (void)state;
    FILE *file = fopen("/proc/cpuinfo", "r");
    assert_non_null(file);
    char *line = NULL;
    size_t bytes = 0;
    enum cpu_tier expected = CPU_SCALAR;
    while (getline(&line, &bytes, file) > 0) {
        if (strncmp(line, "flags", 5) != 0)
            continue;
        line[strcspn(line, "\n")] = ' ';
        if (strstr(line, " avx2 ") && strstr(line, " fma ") && strstr(line, " f16c "))
            expected = CPU_AVX2;
        if (expected == CPU_AVX2 && strstr(line, " avx512f ") && strstr(line, " avx512bw ") &&
            strstr(line, " avx512vl ") && strstr(line, " avx512dq ") && strstr(line, " avx512_vnni "))
            expected = CPU_AVX512;
        break;
    }
    free(line);
    fclose(file);
    assert_int_equal(cpu_tier_detect(), expected);
}

static void automatic_choices(void **state) {
    (void)state;
    static const char *const names[] = {NULL, "auto"};
    for (size_t i = 0; i < 2; i++) {
        struct backend *backend = open_cpu(names[i], 0, NULL);
        assert_non_null(backend);
        assert_int_equal(cpu_backend(backend)->tier, cpu_tier_detect());
        assert_int_equal(thread_pool_size(cpu_backend(backend)->threads), thread_count_available());
        assert_string_equal(backend->operations->name, "cpu");
        backend->operations->close(backend);
    }
    struct backend *backend = open_cpu("scalar", 2, NULL);
    assert_string_equal(backend->operations->describe(backend), "cpu, scalar, 2 threads");
    backend->operations->close(backend);
}

static void wrong_options_are_refused(void **state) {
    (void)state;
    struct error error;
    assert_null(open_cpu("sse9", 1, &error));
    assert_int_equal(error.code, ERROR_INVALID);
    assert_non_null(strstr(error.message, "sse9"));
    assert_null(open_cpu("scalar", THREADS_MAX + 1, &error));
    assert_int_equal(error.code, ERROR_INVALID);
}

static void memory_is_aligned_and_zero(void **state) {
    (void)state;
    struct backend *backend = open_cpu("auto", 1, NULL);
    assert_non_null(backend);
    static const size_t sizes[] = {0, 1, 63, 64, 65, 5000, (1 << 20) - 64, 1 << 20, 5 << 20};
    for (size_t i = 0; i < sizeof sizes / sizeof sizes[0]; i++) {
        for (int again = 0; again < 2; again++) {
            unsigned char *memory = backend->operations->allocate(backend, sizes[i]);
            assert_non_null(memory);
            assert_int_equal((uintptr_t)memory % 64, 0);
            for (size_t at = 0; at < sizes[i]; at++)
                if (memory[at] != 0)
                    fail_msg("byte %zu of %zu is not zero", at, sizes[i]);
            memset(memory, 0xa5, sizes[i]);
            backend->operations->release(backend, memory);
        }
    }
    assert_null(backend->operations->allocate(backend, SIZE_MAX));
    assert_null(backend->operations->allocate(backend, SIZE_MAX / 2 - 64));
    backend->operations->release(backend, NULL);
    unsigned char there[3];
    void *memory = backend->operations->allocate(backend, 3);
    backend->operations->upload(backend, memory, "abc", 3);
    backend->operations->download(backend, there, memory, 3);
    backend->operations->synchronize(backend);
    assert_memory_equal(there, "abc", 3);
    backend->operations->release(backend, memory);
    backend->operations->close(backend);
}

static void slabs_hold_several_blocks(void **state) {
    (void)state;
    struct cpu_slab *open = NULL;
    struct cpu_slab *slabs[6];
    char *blocks[6];
    for (int i = 0; i < 6; i++) {
        size_t bytes = i == 3 ? (size_t)100 << 20 : (size_t)30000 + (size_t)i; /* the fourth is larger than a slab */
        blocks[i] = cpu_slab_allocate(&open, bytes, &slabs[i]);
        assert_non_null(blocks[i]);
        assert_int_equal((uintptr_t)blocks[i] % 64, 0);
        assert_int_equal(blocks[i][0] | blocks[i][bytes - 1], 0);
        memset(blocks[i], i + 1, 30000);
    }
    for (int i = 0; i < 6; i++)
        assert_true(blocks[i][0] == i + 1 && blocks[i][29999] == i + 1);
    assert_ptr_equal(slabs[0], slabs[1]);
    assert_ptr_not_equal(slabs[2], slabs[3]);
    for (int i = 5; i >= 0; i--)
        cpu_slab_release(&open, slabs[i]);
    cpu_slab_close(&open);
    assert_null(open);
    cpu_slab_close(&open);
    struct cpu_slab *slab = NULL;
    assert_null(cpu_slab_allocate(&open, SIZE_MAX, &slab));
    assert_null(cpu_slab_allocate(&open, SIZE_MAX / 4, &slab));
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(tiers_can_be_lowered),
        cmocka_unit_test(detection_agrees_with_the_kernel),
        cmocka_unit_test(automatic_choices),
        cmocka_unit_test(wrong_options_are_refused),
        cmocka_unit_test(memory_is_aligned_and_zero),
        cmocka_unit_test(slabs_hold_several_blocks),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
