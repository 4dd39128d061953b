/* SPDX-License-Identifier: Apache-2.0 */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>

#include "engine/random.h"

/* Known-answer vectors of the authors' Random123 distribution (kat_vectors, philox4x32 10 rounds). */
static void philox_known_answers(void **state) {
    (void)state;
    uint32_t out[4];
    random_philox(0, 0, 0, 0, out);
    assert_int_equal(out[0], 0x6627e8d5u);
    assert_int_equal(out[1], 0xe169c58du);
    assert_int_equal(out[2], 0xbc57ac4cu);
    assert_int_equal(out[3], 0x9b00dbd8u);
    random_philox(UINT64_MAX, UINT32_MAX, UINT32_MAX, UINT64_MAX, out);
    assert_int_equal(out[0], 0x408f276du);
    assert_int_equal(out[1], 0x41c83b0eu);
    assert_int_equal(out[2], 0xa20bc7c6u);
    assert_int_equal(out[3], 0x6d5451fdu);
    random_philox(0x299f31d0a4093822ull, 0x03707344u, 0x13198a2eu, 0x85a308d3243f6a88ull, out);
    assert_int_equal(out[0], 0xd16cfe09u);
    assert_int_equal(out[1], 0x94fdccebu);
    assert_int_equal(out[2], 0x5001e420u);
    assert_int_equal(out[3], 0x24126ea1u);
}

static void uniform_stays_open(void **state) {
    (void)state;
    double sum = 0;
    for (uint32_t i = 0; i < 100000; i++) {
        float u = random_uniform(42, 1, 2, i);
        assert_true(u > 0 && u < 1);
        sum += u;
    }
    assert_true(sum > 49500 && sum < 50500);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(philox_known_answers),
        cmocka_unit_test(uniform_stays_open),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
