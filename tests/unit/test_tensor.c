/* SPDX-License-Identifier: Apache-2.0 */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>

#include <math.h>
#include <string.h>

#include "engine/random.h"
#include "engine/tensor.h"
#include "tests/unit/quantise.h"

/* The value of a binary16 by its definition, in double. */
static double half_value(uint16_t half) {
    int exponent = half >> 10 & 31;
    double fraction = half & 1023;
    double sign = half & 0x8000 ? -1 : 1;
    if (exponent == 31)
        return fraction == 0 ? sign * INFINITY : NAN;
    return sign * (exponent == 0 ? ldexp(fraction, -24) : ldexp(1024 + fraction, exponent - 25));
}

static void every_half_is_exact_and_returns(void **state) {
    (void)state;
    for (uint32_t half = 0; half < 65536; half++) {
        float value = half_to_float((uint16_t)half);
        double expected = half_value((uint16_t)half);
        if (isnan(expected)) {
            assert_true(isnan(value));
            assert_true(isnan(half_to_float(float_to_half(value))));
            assert_int_equal(float_to_half(value) >> 15, half >> 15);
            continue;
        }
        assert_true((double)value == expected && !signbit(value) == !(half & 0x8000));
        assert_int_equal(float_to_half(value), half);
    }
}

/* The halves above and below a value, by search; ties to the even pattern. */
static uint16_t nearest_half(double magnitude) {
    uint16_t low = 0;
    uint16_t high = 0x7c00;
    while (high - low > 1) {
        uint16_t middle = (uint16_t)((low + high) / 2);
        *(half_value(middle) <= magnitude ? &low : &high) = middle;
    }
    double above = high == 0x7c00 ? 65536 : half_value(high); /* where the next binary16 would be */
    double to_low = magnitude - half_value(low);
    double to_high = above - magnitude;
    if (to_low == to_high)
        return low % 2 == 0 ? low : high;
    return to_low < to_high ? low : high;
}

static void float_rounds_to_the_nearest_half(void **state) {
    (void)state;
    for (uint32_t i = 0; i < 200000; i++) {
        uint32_t words[4];
        float value;
        random_philox(7, 0, 0, i, words);
        uint32_t exponent =
            96 + words[1] % 50; /* 2^-31 to 2^18: from far below the smallest to far above the largest */
        uint32_t bits = exponent << 23 | (words[0] & 0x7fffff);
        if (words[2] % 2 == 0)
            bits &= 0xfffff000 >> (words[2] / 2 % 12); /* ties and their neighbours */
        memcpy(&value, &bits, sizeof value);
        uint16_t expected = value >= 65520 ? 0x7c00 : nearest_half(value);
        assert_int_equal(float_to_half(value), expected);
        assert_int_equal(float_to_half(-value), expected | 0x8000);
    }
    assert_int_equal(float_to_half(65519.996f), 0x7bff);
    assert_int_equal(float_to_half(65520.0f), 0x7c00);
    assert_int_equal(float_to_half(INFINITY), 0x7c00);
    assert_int_equal(float_to_half(0x1p-25f), 0);
    assert_int_equal(float_to_half(nextafterf(0x1p-25f, 1)), 1);
    assert_int_equal(float_to_half(0x1p-149f), 0);
}

static void bfloat_rounds_to_nearest_even(void **state) {
    (void)state;
    for (uint32_t pattern = 0; pattern < 65536; pattern++) {
        float value = bfloat_to_float((uint16_t)pattern);
        uint16_t back = float_to_bfloat(value);
        if (isnan(value)) {
            assert_true(isnan(bfloat_to_float(back)));
            continue;
        }
        assert_int_equal(back, pattern);
        if ((pattern & 0x7f80) == 0x7f80)
            continue;
        uint32_t bits = pattern << 16 | 0x8000; /* half way to the next */
        float middle;
        memcpy(&middle, &bits, sizeof middle);
        assert_int_equal(float_to_bfloat(middle), pattern + pattern % 2);
        assert_int_equal(float_to_bfloat(nextafterf(middle, 0)), pattern);
        assert_int_equal(float_to_bfloat(nextafterf(middle, copysignf(INFINITY, middle))), pattern + 1);
    }
    float nan_of_low_bits;
    memcpy(&nan_of_low_bits, &(uint32_t){0x7f800001}, 4);
    assert_true(isnan(bfloat_to_float(float_to_bfloat(nan_of_low_bits))));
}

static void dequantises_blocks_written_by_hand(void **state) {
    (void)state;
    uint8_t q8[2][34] = {{0x00, 0x38, 1, 0x80, 127}, {0x00, 0xc0}}; /* d = 0.5; d = -2 */
    uint8_t q4_0[18] = {0x00, 0x34, 0x0f, 0xf0, 0x38};              /* d = 0.25 */
    uint8_t q4_1[20] = {0x00, 0x3c, 0x00, 0xc2, 0x0f, 0xf0, 0x38};  /* d = 1, m = -3 */
    uint8_t f16[4] = {0x00, 0x3c, 0x01, 0x80};
    uint8_t bf16[4] = {0x80, 0x3f, 0x00, 0xc0};
    float out[64];
    q8[1][2 + 31] = 3;
    struct tensor tensor = {.type = TENSOR_Q8_0, .rows = 2, .columns = 32, .data = q8};
    tensor_dequantise_row(&tensor, 0, out);
    assert_true(out[0] == 0.5f && out[1] == -64 && out[2] == 63.5f && out[31] == 0);
    tensor_dequantise_row(&tensor, 1, out);
    assert_true(out[0] == 0 && out[31] == -6);
    tensor = (struct tensor){.type = TENSOR_Q4_0, .rows = 1, .columns = 32, .data = q4_0};
    tensor_dequantise_row(&tensor, 0, out);
    assert_true(out[0] == 1.75f && out[16] == -2 && out[1] == -2 && out[17] == 1.75f);
    assert_true(out[2] == 0 && out[18] == -1.25f && out[31] == -2);
    tensor = (struct tensor){.type = TENSOR_Q4_1, .rows = 1, .columns = 32, .data = q4_1};
    tensor_dequantise_row(&tensor, 0, out);
    assert_true(out[0] == 12 && out[16] == -3 && out[1] == -3 && out[17] == 12);
    assert_true(out[2] == 5 && out[18] == 0 && out[31] == -3);
    tensor = (struct tensor){.type = TENSOR_F16, .rows = 1, .columns = 2, .data = f16};
    tensor_dequantise_row(&tensor, 0, out);
    assert_true(out[0] == 1 && out[1] == -0x1p-24f);
    tensor = (struct tensor){.type = TENSOR_BF16, .rows = 1, .columns = 2, .data = bf16};
    tensor_dequantise_row(&tensor, 0, out);
    assert_true(out[0] == 1 && out[1] == -2);
}

/* What comes back differs from what went in by at most half a step of the block (and the rounding of d and m). */
static void quantised_rows_come_back(void **state) {
    (void)state;
    static const struct {
        enum tensor_type type;
        float error; /* of values in -1 to 1 */
    } cases[] = {{TENSOR_F32, 0}, {TENSOR_F16, 0x1p-12f}, {TENSOR_BF16, 0x1p-9f}, {TENSOR_Q8_0, 0.5f / 127 + 0.001f},
        {TENSOR_Q4_0, 0.5f / 7 + 0.002f}, {TENSOR_Q4_1, 1.0f / 15 + 0.003f}};
    enum { ROWS = 3, COLUMNS = 96 };
    float values[ROWS][COLUMNS];
    float out[COLUMNS + 1];
    uint8_t data[ROWS * COLUMNS * 4 + 1];
    for (uint32_t i = 0; i < ROWS * COLUMNS; i++)
        values[i / COLUMNS][i % COLUMNS] = 2 * random_uniform(3, 0, 0, i) - 1;
    for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++) {
        size_t row_bytes = tensor_row_bytes(cases[i].type, COLUMNS);
        /* Odd addresses: files promise no alignment. */
        struct tensor tensor = {.type = cases[i].type, .rows = ROWS, .columns = COLUMNS, .data = data + 1};
        test_quantise(cases[i].type, &values[0][0], ROWS * COLUMNS, data + 1);
        assert_true(row_bytes * ROWS <= sizeof data - 1);
        for (uint32_t row = 0; row < ROWS; row++) {
            out[COLUMNS] = 42;
            tensor_dequantise_row(&tensor, row, out);
            for (uint32_t j = 0; j < COLUMNS; j++)
                assert_true(fabsf(out[j] - values[row][j]) <= cases[i].error);
            assert_true(out[COLUMNS] == 42);
        }
    }
}

static void formats_have_names_and_sizes(void **state) {
    (void)state;
    assert_int_equal(tensor_format_find(TENSOR_Q4_1)->block_bytes, 20);
    assert_string_equal(tensor_format_find(TENSOR_BF16)->name, "BF16");
    char names[TENSOR_FORMAT_NAMES_BYTES];
    tensor_format_names(names);
    assert_string_equal(
        names, "F32, F16, BF16, Q8_0, Q4_0, Q4_1, Q5_0, Q5_1, Q2_K, Q3_K, Q4_K, Q5_K, Q6_K, IQ4_NL, MXFP4");
    assert_null(tensor_format_find(16));
    assert_null(tensor_format_find(UINT32_MAX));
    assert_string_equal(tensor_type_name(12), "Q4_K");
    assert_string_equal(tensor_type_name(99), "type 99");
    assert_string_equal(tensor_type_name(4), "type 4");
    assert_int_equal(tensor_row_bytes(TENSOR_F32, 3), 12);
    assert_int_equal(tensor_row_bytes(TENSOR_Q8_0, 576), 612);
    assert_int_equal(tensor_row_bytes(TENSOR_Q4_0, 576), 324);
    assert_int_equal(tensor_row_bytes(TENSOR_Q4_1, 576), 360);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(every_half_is_exact_and_returns),
        cmocka_unit_test(float_rounds_to_the_nearest_half),
        cmocka_unit_test(bfloat_rounds_to_nearest_even),
        cmocka_unit_test(dequantises_blocks_written_by_hand),
        cmocka_unit_test(quantised_rows_come_back),
        cmocka_unit_test(formats_have_names_and_sizes),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
