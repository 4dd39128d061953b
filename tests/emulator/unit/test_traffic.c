/* SPDX-License-Identifier: Apache-2.0
 *
 * Counts of sectors and bank conflicts, against what the definitions give by hand.
 */
#include "tests/emulator/emulator.h"
#include "tests/emulator/unit/faults.h"
#include "tests/emulator/unit/kernels.h"

#include <string.h>

#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>

#include "tests/emulator/unit/checked.h"

static struct emulator_traffic read_and_reset(const char *kernel) {
    struct emulator_traffic traffic, none;
    assert_true(emulator_traffic_read(kernel, &traffic));
    emulator_traffic_reset();
    assert_false(emulator_traffic_read(kernel, &none));
    return traffic;
}

static void test_coalesced(void **state) {
    (void)state;
    enum { N = 1000 }; /* 125 sectors */
    float *x = device_zeros(N * 4), *y = device_zeros(N * 4), *out = device_zeros(N * 4);
    emulator_traffic_reset();
    kernels_axpy(2.0f, x, y, out, N, NULL);
    kernels_axpy(2.0f, x, y, out, N, NULL);
    struct emulator_traffic t = read_and_reset("axpy_kernel");
    assert_int_equal(t.launches, 2);
    assert_int_equal(t.sectors_read, 2 * 2 * 125);
    assert_int_equal(t.unique_read, 2 * 2 * 125);
    assert_int_equal(t.sectors_written, 2 * 125);
    assert_int_equal(t.unique_written, 2 * 125);
    assert_int_equal(t.sectors_atomic, 0);
    assert_int_equal(t.shared_wavefronts, 0);
    /* Read at an odd place: a warp's 128 bytes touch 5 sectors, 31 full warps and 7 lanes (2 sectors). */
    kernels_axpy(2.0f, x + 1, x + 1, out, N - 1, NULL);
    t = read_and_reset("axpy_kernel");
    assert_int_equal(t.sectors_read, 2 * (31 * 5 + 1));
    assert_int_equal(t.unique_read, 125);
    check(cudaFree(x));
    check(cudaFree(y));
    check(cudaFree(out));
}

static void test_columns(void **state) {
    (void)state;
    enum { N = 64 };
    float *from = device_zeros(N * N * 4), *to = device_zeros(N * N * 4);
    emulator_traffic_reset();
    faults_copy(from, to, N, false, NULL);
    struct emulator_traffic rows = read_and_reset("copy_kernel");
    faults_copy(from, to, N, true, NULL);
    struct emulator_traffic columns = read_and_reset("copy_kernel");
    assert_int_equal(rows.sectors_read, N * N / 8);
    assert_int_equal(rows.sectors_written, N * N / 8);
    assert_int_equal(columns.sectors_read, N * N); /* one sector for each word */
    assert_int_equal(columns.sectors_written, N * N);
    assert_int_equal(columns.unique_read, N * N / 8);
    check(cudaFree(from));
    check(cudaFree(to));
}

static void test_vectors(void **state) {
    (void)state;
    enum { N = 1000 };
    void *from = device_zeros(N * 16), *to = device_zeros(N * 16);
    emulator_traffic_reset();
    faults_copy_vectors(from, to, N, NULL);
    struct emulator_traffic t = read_and_reset("copy_vectors_kernel");
    assert_int_equal(t.sectors_read, N / 2);
    assert_int_equal(t.sectors_written, N / 2);
    check(cudaFree(from));
    check(cudaFree(to));
}

static void test_banks(void **state) {
    (void)state;
    float *from = device_zeros(32 * 32 * 4), *to = device_zeros(32 * 32 * 4);
    emulator_traffic_reset();
    faults_transpose(from, to, 33, NULL);
    struct emulator_traffic padded = read_and_reset("transpose_stride_kernel");
    faults_transpose(from, to, 32, NULL);
    struct emulator_traffic plain = read_and_reset("transpose_stride_kernel");
    faults_transpose(from, to, 34, NULL);
    struct emulator_traffic even = read_and_reset("transpose_stride_kernel");
    assert_int_equal(padded.shared_ideal, 64);
    assert_int_equal(padded.shared_wavefronts, 64);
    assert_int_equal(plain.shared_ideal, 64);
    assert_int_equal(plain.shared_wavefronts, 32 + 32 * 32);
    assert_int_equal(even.shared_wavefronts, 32 + 32 * 2);
    assert_int_equal(padded.sectors_read, 128);
    check(cudaFree(from));
    check(cudaFree(to));
}

/* ldmatrix reads 4 times 8 rows of 16 bytes. Written: 8 stores of halves; lanes 2 i and 2 i + 1 hold row i. */
static void test_matrix(void **state) {
    (void)state;
    enum { STORES = 8 };
    uint32_t *out = device_zeros(4 * 32 * 4);
    emulator_traffic_reset();
    faults_matrix(24, out, NULL); /* 48 bytes: rows start at banks 0, 12, 24, 4, 16, 28, 8, 20 */
    struct emulator_traffic good = read_and_reset("matrix_kernel");
    faults_matrix(64, out, NULL); /* 128 bytes: all rows start at bank 0 */
    struct emulator_traffic bad = read_and_reset("matrix_kernel");
    assert_int_equal(good.shared_ideal, STORES + 4);
    assert_int_equal(bad.shared_ideal, STORES + 4);
    assert_int_equal(bad.shared_wavefronts, STORES * 16 + 4 * 8);
    assert_int_equal(good.shared_wavefronts, STORES * 4 + 4); /* a store's 32 words: four on each of 8 banks */
    check(cudaFree(out));
}

/* Lanes that leave a loop early are matched by turns of the loop: no turn counts twice. */
static void test_ragged(void **state) {
    (void)state;
    enum { ROWS = 10 };
    int *from = device_zeros(ROWS * 32 * 4), *to = device_zeros(32 * 4);
    for (uint64_t seed = 1; seed <= 5; seed++) {
        emulator_set_seed(seed);
        emulator_traffic_reset();
        faults_ragged(from, to, ROWS, NULL);
        struct emulator_traffic t = read_and_reset("ragged_kernel");
        assert_int_equal(t.sectors_read, ROWS * 4); /* the last turn's 16 lanes touch 4 sectors too */
        assert_int_equal(t.sectors_written, 4);
    }
    check(cudaFree(from));
    check(cudaFree(to));
}

static void test_atomics(void **state) {
    (void)state;
    enum { N = 3 * 256 };
    unsigned char *bytes = device_zeros(N);
    unsigned *bins = device_zeros(256 * 4);
    emulator_traffic_reset();
    kernels_histogram(bytes, N, bins, NULL);
    struct emulator_traffic t = read_and_reset("histogram_kernel");
    assert_int_equal(t.sectors_read, N / 32);
    assert_int_equal(t.sectors_atomic, 3 * 256 * 4 / 32);
    assert_int_equal(t.sectors_written, 0);
    check(cudaFree(bytes));
    check(cudaFree(bins));
}

static void test_gemm(void **state) {
    (void)state;
    enum { M = 32, N = 48, K = 64 };
    uint16_t *a = device_zeros(M * K * 2), *b = device_zeros(N * K * 2);
    float *out = device_zeros(M * N * 4);
    emulator_traffic_reset();
    kernels_gemm_staged(a, b, out, M, N, K, NULL);
    struct emulator_traffic t = read_and_reset("gemm_staged_kernel");
    /* Each tile of 16 x 16 reads 16 rows of a and of b, a stage being one sector of each row. */
    assert_int_equal(t.sectors_read, (M / 16) * (N / 16) * (16 + 16) * (K / 16));
    assert_int_equal(t.unique_read, (M + N) * K * 2 / 32);
    assert_int_equal(t.sectors_written, M * N * 4 / 32);
    assert_int_equal(t.shared_wavefronts, t.shared_ideal);
    struct emulator_traffic list[4];
    assert_int_equal(emulator_traffic_list(list, 4), 0);
    kernels_gemm_f16(a, b, out, M, N, K, NULL);
    kernels_gemm_bf16(a, b, out, M, N, K, NULL);
    assert_int_equal(emulator_traffic_list(list, 4), 2);
    assert_string_equal(list[0].kernel, "gemm_kernel<false>");
    assert_true(emulator_traffic_read("gemm_kernel", &t));
    assert_int_equal(t.launches, 2);
    assert_int_equal(t.sectors_written, 2 * M * N * 4 / 32);
    check(cudaFree(a));
    check(cudaFree(b));
    check(cudaFree(out));
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_coalesced),
        cmocka_unit_test(test_columns),
        cmocka_unit_test(test_vectors),
        cmocka_unit_test(test_banks),
        cmocka_unit_test(test_matrix),
        cmocka_unit_test(test_ragged),
        cmocka_unit_test(test_atomics),
        cmocka_unit_test(test_gemm),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
