/* SPDX-License-Identifier: Apache-2.0
 *
 * Right kernels on the emulator against plain C: results.
 */
#include "tests/emulator/emulator.h"
#include "tests/emulator/unit/kernels.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>

#include "tests/emulator/unit/checked.h"

static uint32_t random_state = 12345;

static uint32_t random_next(void) {
    random_state = random_state * 1664525 + 1013904223;
    return random_state >> 8;
}

static void *device(const void *from, size_t bytes) {
    void *memory;
    check(cudaMalloc(&memory, bytes));
    if (from)
        check(cudaMemcpy(memory, from, bytes, cudaMemcpyHostToDevice));
    return memory;
}

/* Copies back and frees. */
static void take(void *to, void *memory, size_t bytes) {
    check(cudaMemcpy(to, memory, bytes, cudaMemcpyDeviceToHost));
    check(cudaFree(memory));
}

static void test_axpy(void **state) {
    (void)state;
    enum { N = 1000 };
    float x[N], y[N], out[N];
    for (int i = 0; i < N; i++) {
        x[i] = (float)i;
        y[i] = (float)(i * i);
    }
    float *dx = device(x, sizeof(x)), *dy = device(y, sizeof(y)), *dout = device(NULL, sizeof(out));
    kernels_axpy(3.0f, dx, dy, dout, N, NULL);
    take(out, dout, sizeof(out));
    for (int i = 0; i < N; i++)
        assert_true(out[i] == 3.0f * x[i] + y[i]);
    cudaFree(dx);
    cudaFree(dy);
}

static void test_sum(void **state) {
    (void)state;
    enum { N = 100000 };
    int *x = malloc(N * sizeof(int));
    long long sum = 0, out;
    for (int i = 0; i < N; i++)
        sum += x[i] = (int)random_next() - (1 << 23);
    int *dx = device(x, N * sizeof(int));
    unsigned long long *dout = device(NULL, sizeof(out));
    kernels_sum(dx, N, dout, NULL);
    take(&out, dout, sizeof(out));
    assert_true(out == sum);
    cudaFree(dx);
    free(x);
}

static void test_transpose(void **state) {
    (void)state;
    enum { R = 64, C = 96 };
    float *x = malloc(R * C * sizeof(float)), *out = malloc(R * C * sizeof(float));
    for (int i = 0; i < R * C; i++)
        x[i] = (float)i;
    float *dx = device(x, R * C * sizeof(float)), *dout = device(NULL, R * C * sizeof(float));
    kernels_transpose(dx, R, C, dout, NULL);
    take(out, dout, R * C * sizeof(float));
    for (int r = 0; r < R; r++)
        for (int c = 0; c < C; c++)
            assert_true(out[c * R + r] == x[r * C + c]);
    cudaFree(dx);
    free(x);
    free(out);
}

static float from_half(uint16_t bits) {
    _Float16 value;
    memcpy(&value, &bits, 2);
    return (float)value;
}

static float from_bfloat16(uint16_t bits) {
    uint32_t wide = (uint32_t)bits << 16;
    float value;
    memcpy(&value, &wide, 4);
    return value;
}

/* Small integers, exact in both formats and in their sums: no rounding hides a swapped element. */
static uint16_t small_half(void) {
    _Float16 value = (_Float16)((int)(random_next() % 33) - 16);
    uint16_t bits;
    memcpy(&bits, &value, 2);
    return bits;
}

static uint16_t small_bfloat16(void) {
    float value = (float)((int)(random_next() % 33) - 16);
    uint32_t bits;
    memcpy(&bits, &value, 4);
    return (uint16_t)(bits >> 16);
}

typedef void gemm_function(
    const uint16_t *a, const uint16_t *b, float *out, unsigned m, unsigned n, unsigned k, cudaStream_t stream);

static void check_gemm(gemm_function *gemm, uint16_t (*make)(void), float (*value)(uint16_t)) {
    enum { M = 48, N = 32, K = 80 };
    static uint16_t a[M * K], b[N * K];
    static float out[M * N];
    for (int i = 0; i < M * K; i++)
        a[i] = make();
    for (int i = 0; i < N * K; i++)
        b[i] = make();
    uint16_t *da = device(a, sizeof(a)), *db = device(b, sizeof(b));
    float *dout = device(NULL, sizeof(out));
    gemm(da, db, dout, M, N, K, NULL);
    take(out, dout, sizeof(out));
    for (int i = 0; i < M; i++)
        for (int j = 0; j < N; j++) {
            float sum = 0;
            for (int k = 0; k < K; k++)
                sum += value(a[i * K + k]) * value(b[j * K + k]);
            assert_true(out[i * N + j] == sum);
        }
    cudaFree(da);
    cudaFree(db);
}

static void test_gemm(void **state) {
    (void)state;
    check_gemm(kernels_gemm_f16, small_half, from_half);
    check_gemm(kernels_gemm_bf16, small_bfloat16, from_bfloat16);
    check_gemm(kernels_gemm_staged, small_half, from_half);
}

static void check_gemm_s8(
    void (*gemm)(const int8_t *, const int8_t *, int *, unsigned, unsigned, unsigned, cudaStream_t)) {
    enum { M = 32, N = 24, K = 96 };
    static int8_t a[M * K], b[N * K];
    static int out[M * N];
    for (int i = 0; i < M * K; i++)
        a[i] = (int8_t)random_next();
    for (int i = 0; i < N * K; i++)
        b[i] = (int8_t)random_next();
    int8_t *da = device(a, sizeof(a)), *db = device(b, sizeof(b));
    int *dout = device(NULL, sizeof(out));
    gemm(da, db, dout, M, N, K, NULL);
    take(out, dout, sizeof(out));
    for (int i = 0; i < M; i++)
        for (int j = 0; j < N; j++) {
            int sum = 0;
            for (int k = 0; k < K; k++)
                sum += a[i * K + k] * b[j * K + k];
            assert_int_equal(out[i * N + j], sum);
        }
    cudaFree(da);
    cudaFree(db);
}

static void test_gemm_s8(void **state) {
    (void)state;
    check_gemm_s8(kernels_gemm_s8);
    check_gemm_s8(kernels_gemm_s8_k16);
}

static void expect_warp(const int *x, int lane, int *r) {
    int half = lane / 16 * 16, sum = 0, least = x[0];
    unsigned positive = 0, equal = 0, odd = 0, most = 0;
    for (int i = 0; i < 32; i++) {
        sum += x[i];
        least = x[i] < least ? x[i] : least;
        most = (unsigned)x[i] > most ? (unsigned)x[i] : most;
        positive |= (unsigned)(x[i] > 0) << i;
        equal |= (unsigned)(x[i] % 3 == x[lane] % 3) << i;
        if (i / 16 * 16 == half)
            odd |= (unsigned)(x[i] & 1) << i;
    }
    r[0] = x[3];
    r[1] = x[lane / 8 * 8 + (lane + 1) % 8];
    r[2] = x[lane >= 2 ? lane - 2 : lane];
    r[3] = x[lane % 16 + 5 < 16 ? lane + 5 : lane];
    r[4] = x[lane ^ 7];
    r[5] = (int)positive;
    r[6] = 0;
    r[7] = 1;
    r[8] = (int)equal;
    r[9] = sum;
    r[10] = least;
    r[11] = (int)most;
    r[12] = x[half];
    r[13] = (int)odd;
    r[14] = (int)((float)x[lane < 31 ? lane + 1 : lane] + 0.5f);
    r[15] = x[lane ^ 1];
}

static void test_warp(void **state) {
    (void)state;
    int x[32], out[32][WARP_RESULTS], expected[WARP_RESULTS];
    for (int i = 0; i < 32; i++)
        x[i] = (int)(random_next() % 200) - 100;
    int *dx = device(x, sizeof(x)), *dout = device(NULL, sizeof(out));
    kernels_warp(dx, dout, NULL);
    take(out, dout, sizeof(out));
    for (int lane = 0; lane < 32; lane++) {
        expect_warp(x, lane, expected);
        for (int i = 0; i < WARP_RESULTS; i++)
            if (out[lane][i] != expected[i])
                fail_msg("lane %d, result %d: %d, expected %d", lane, i, out[lane][i], expected[i]);
    }
    cudaFree(dx);
}

static void test_histogram(void **state) {
    (void)state;
    enum { N = 5000 };
    static unsigned char bytes[N];
    unsigned bins[256], expected[256] = {0};
    for (int i = 0; i < N; i++)
        expected[bytes[i] = (unsigned char)(random_next() % 200)]++;
    unsigned char *dbytes = device(bytes, sizeof(bytes));
    unsigned *dbins = device(NULL, sizeof(bins));
    kernels_histogram(dbytes, N, dbins, NULL);
    take(bins, dbins, sizeof(bins));
    assert_memory_equal(bins, expected, sizeof(bins));
    cudaFree(dbytes);
}

static void test_graph(void **state) {
    (void)state;
    enum { N = 256 };
    float x[N], y[N], out[N];
    for (int i = 0; i < N; i++)
        x[i] = y[i] = (float)i;
    float *dx = device(x, sizeof(x)), *dy = device(y, sizeof(y));
    cudaStream_t stream, side;
    cudaEvent_t fork, join;
    cudaGraph_t graph;
    cudaGraphExec_t exec;
    check(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking));
    check(cudaStreamCreateWithFlags(&side, cudaStreamNonBlocking));
    check(cudaEventCreateWithFlags(&fork, cudaEventDisableTiming));
    check(cudaEventCreateWithFlags(&join, cudaEventDisableTiming));
    check(cudaStreamBeginCapture(stream, cudaStreamCaptureModeGlobal));
    kernels_axpy(1.0f, dx, dy, dy, N, stream); /* y += x */
    check(cudaEventRecord(fork, stream));
    check(cudaStreamWaitEvent(side, fork, 0));
    kernels_axpy(2.0f, dx, dy, dy, N, side); /* y += 2 x */
    check(cudaEventRecord(join, side));
    check(cudaStreamWaitEvent(stream, join, 0));
    check(cudaStreamEndCapture(stream, &graph));
    check(cudaGraphInstantiate(&exec, graph, 0));
    check(cudaGraphDestroy(graph));
    for (int i = 0; i < 3; i++)
        check(cudaGraphLaunch(exec, stream));
    check(cudaStreamSynchronize(stream));
    take(out, dy, sizeof(out));
    for (int i = 0; i < N; i++)
        assert_true(out[i] == 10.0f * x[i]);
    check(cudaGraphExecDestroy(exec));
    check(cudaEventDestroy(fork));
    check(cudaEventDestroy(join));
    check(cudaStreamDestroy(stream));
    check(cudaStreamDestroy(side));
    cudaFree(dx);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_axpy),
        cmocka_unit_test(test_sum),
        cmocka_unit_test(test_transpose),
        cmocka_unit_test(test_gemm),
        cmocka_unit_test(test_gemm_s8),
        cmocka_unit_test(test_warp),
        cmocka_unit_test(test_histogram),
        cmocka_unit_test(test_graph),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
