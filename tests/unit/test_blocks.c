/* SPDX-License-Identifier: Apache-2.0
 *
 * Blocks of the CPU backend's memory: random sequences of taking and giving back, beside a list of what is held.
 */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>

#include <stdlib.h>
#include <string.h>

#include "engine/cpu/blocks.h"
#include "engine/random.h"

enum { HELD = 200, STEPS = 4000 };

struct held {
    unsigned char *block;
    size_t bytes;
    unsigned char mark;
};

static uint32_t draw(uint32_t step, uint32_t which, uint32_t end) {
    uint32_t words[4];
    random_philox(7, 0, which, step, words);
    return words[0] % end;
}

/* From a few bytes to more than a chunk. */
static size_t draw_bytes(uint32_t step) {
    static const size_t most[] = {100, 3000, 5000, 40000, 300000, 1100000, 5000000};
    return 1 + draw(step, 1, (uint32_t)most[draw(step, 2, 100) < 95 ? draw(step, 3, 5) : 5 + draw(step, 3, 2)]);
}

static void take(struct cpu_blocks *blocks, struct held *held, uint32_t step) {
    held->bytes = draw_bytes(step);
    held->block = cpu_block_allocate(blocks, held->bytes);
    held->mark = (unsigned char)(1 + step % 255);
    assert_non_null(held->block);
    assert_int_equal((uintptr_t)held->block % 64, 0);
    for (size_t i = 0; i < held->bytes; i++)
        assert_true(held->block[i] == 0);
    memset(held->block, held->mark, held->bytes);
}

/* Nobody else wrote to it. */
static void give_back(struct cpu_blocks *blocks, struct held *held) {
    for (size_t i = 0; i < held->bytes; i++)
        assert_true(held->block[i] == held->mark);
    cpu_block_release(blocks, held->block);
    held->block = NULL;
}

static void blocks_are_zero_and_nobody_elses(void **state) {
    (void)state;
    struct cpu_blocks blocks = {0};
    static struct held held[HELD];
    for (uint32_t step = 0; step < STEPS; step++) {
        struct held *one = &held[draw(step, 0, HELD)];
        if (one->block == NULL)
            take(&blocks, one, step);
        else
            give_back(&blocks, one);
    }
    for (uint32_t i = 0; i < HELD; i++)
        if (held[i].block != NULL)
            give_back(&blocks, &held[i]);
    cpu_blocks_free(&blocks);
    assert_null(blocks.chunks);
}

static void no_memory_is_said(void **state) {
    (void)state;
    struct cpu_blocks blocks = {0};
    assert_null(cpu_block_allocate(&blocks, SIZE_MAX));
    assert_null(cpu_block_allocate(&blocks, SIZE_MAX - 63));
    assert_null(cpu_block_allocate(&blocks, (size_t)1 << 60));
    cpu_block_release(&blocks, NULL);
    cpu_blocks_free(&blocks);
    assert_null(blocks.chunks);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(blocks_are_zero_and_nobody_elses),
        cmocka_unit_test(no_memory_is_said),
    };
    return cmocka_run_group_tests_name("blocks", tests, NULL, NULL);
}
