/* SPDX-License-Identifier: Apache-2.0
 *
 * cuBLASLt's products on the emulator against plain C: formats, orders, transposes, batches, scales; refusals.
 */
#include "tests/emulator/emulator.h"

#include <stdlib.h>
#include <string.h>

#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>

#include "tests/emulator/unit/checked.h"
#include <cublasLt.h>

enum { M = 19, N = 37, K = 23, PAD = 3, BATCH = 2 };

struct matrix {
    cudaDataType_t type;
    cublasLtOrder_t order;
    int rows, columns, stride, batch_stride;
    char *host;
    void *device;
    cublasLtMatrixLayout_t layout;
};

static uint32_t random_state = 99;

static int small(void) {
    random_state = random_state * 1664525 + 1013904223;
    return (int)(random_state >> 8) % 9 - 4;
}

static void accept(cublasStatus_t status) {
    assert_int_equal(status, CUBLAS_STATUS_SUCCESS);
}

static size_t bytes_of(cudaDataType_t type) {
    return type == CUDA_R_8I ? 1 : type == CUDA_R_32F || type == CUDA_R_32I ? 4 : 2;
}

static void put(char *to, cudaDataType_t type, int value) {
    float single = (float)value;
    _Float16 half = (_Float16)value;
    int8_t byte = (int8_t)value;
    uint32_t bits;
    memcpy(&bits, &single, 4);
    uint16_t bfloat = (uint16_t)(bits >> 16);
    if (type == CUDA_R_32F)
        memcpy(to, &single, 4);
    else if (type == CUDA_R_16F)
        memcpy(to, &half, 2);
    else if (type == CUDA_R_16BF)
        memcpy(to, &bfloat, 2);
    else if (type == CUDA_R_8I)
        memcpy(to, &byte, 1);
    else
        memcpy(to, &value, 4);
}

static int get(const char *from, cudaDataType_t type) {
    float single;
    _Float16 half;
    uint16_t bfloat;
    int value;
    uint32_t bits;
    switch (type) {
    case CUDA_R_32F:
        memcpy(&single, from, 4);
        return (int)single;
    case CUDA_R_16F:
        memcpy(&half, from, 2);
        return (int)half;
    case CUDA_R_16BF:
        memcpy(&bfloat, from, 2);
        bits = (uint32_t)bfloat << 16;
        memcpy(&single, &bits, 4);
        return (int)single;
    case CUDA_R_8I:
        return *(const int8_t *)from;
    default:
        memcpy(&value, from, 4);
        return value;
    }
}

static char *at(const struct matrix *m, int batch, int row, int column) {
    int element = m->order == CUBLASLT_ORDER_COL ? column * m->stride + row : row * m->stride + column;
    return m->host + (size_t)(batch * m->batch_stride + element) * bytes_of(m->type);
}

static size_t matrix_bytes(const struct matrix *m) {
    return (size_t)(m->batch_stride * BATCH) * bytes_of(m->type);
}

static struct matrix make(cudaDataType_t type, cublasLtOrder_t order, int rows, int columns) {
    struct matrix m = {.type = type, .order = order, .rows = rows, .columns = columns};
    int32_t batch = BATCH;
    m.stride = (order == CUBLASLT_ORDER_COL ? rows : columns) + PAD;
    m.batch_stride = m.stride * (order == CUBLASLT_ORDER_COL ? columns : rows) + 5;
    m.host = calloc(1, matrix_bytes(&m));
    for (int i = 0; i < m.batch_stride * BATCH; i++)
        put(m.host + (size_t)i * bytes_of(type), type, small());
    check(cudaMalloc(&m.device, matrix_bytes(&m)));
    check(cudaMemcpy(m.device, m.host, matrix_bytes(&m), cudaMemcpyHostToDevice));
    accept(cublasLtMatrixLayoutCreate(&m.layout, type, (uint64_t)rows, (uint64_t)columns, m.stride));
    int64_t stride = m.batch_stride;
    int32_t order_ = (int32_t)order;
    accept(cublasLtMatrixLayoutSetAttribute(m.layout, CUBLASLT_MATRIX_LAYOUT_ORDER, &order_, sizeof(order_)));
    accept(cublasLtMatrixLayoutSetAttribute(m.layout, CUBLASLT_MATRIX_LAYOUT_BATCH_COUNT, &batch, sizeof(batch)));
    accept(cublasLtMatrixLayoutSetAttribute(
        m.layout, CUBLASLT_MATRIX_LAYOUT_STRIDED_BATCH_OFFSET, &stride, sizeof(stride)));
    return m;
}

static void drop(struct matrix *m) {
    check(cudaFree(m->device));
    accept(cublasLtMatrixLayoutDestroy(m->layout));
    free(m->host);
}

struct shape {
    cudaDataType_t in, out;
    cublasLtOrder_t order_a, order_b, order_d;
    int transpose_a, transpose_b, alpha, beta;
};

static int expected(
    const struct shape *s, const struct matrix *a, const struct matrix *b, const char *old, int batch, int i, int j) {
    int sum = 0;
    for (int k = 0; k < K; k++) {
        int x = get(s->transpose_a ? at(a, batch, k, i) : at(a, batch, i, k), a->type);
        int y = get(s->transpose_b ? at(b, batch, j, k) : at(b, batch, k, j), b->type);
        sum += x * y;
    }
    return s->alpha * sum + s->beta * get(old, s->out);
}

static void check_shape(cublasLtHandle_t handle, const struct shape *s) {
    struct matrix a = make(s->in, s->order_a, s->transpose_a ? K : M, s->transpose_a ? M : K);
    struct matrix b = make(s->in, s->order_b, s->transpose_b ? N : K, s->transpose_b ? K : N);
    struct matrix d = make(s->out, s->order_d, M, N);
    bool integers = s->in == CUDA_R_8I;
    float alpha = (float)s->alpha, beta = (float)s->beta;
    cublasLtMatmulDesc_t operation;
    int32_t a_op = s->transpose_a ? CUBLAS_OP_T : CUBLAS_OP_N, b_op = s->transpose_b ? CUBLAS_OP_T : CUBLAS_OP_N;
    accept(cublasLtMatmulDescCreate(
        &operation, integers ? CUBLAS_COMPUTE_32I : CUBLAS_COMPUTE_32F, integers ? CUDA_R_32I : CUDA_R_32F));
    accept(cublasLtMatmulDescSetAttribute(operation, CUBLASLT_MATMUL_DESC_TRANSA, &a_op, sizeof(a_op)));
    accept(cublasLtMatmulDescSetAttribute(operation, CUBLASLT_MATMUL_DESC_TRANSB, &b_op, sizeof(b_op)));
    accept(cublasLtMatmul(handle, operation, integers ? (const void *)&s->alpha : &alpha, a.device, a.layout, b.device,
        b.layout, integers ? (const void *)&s->beta : &beta, d.device, d.layout, d.device, d.layout, NULL, NULL, 0,
        NULL));
    struct matrix result = d;
    result.host = malloc(matrix_bytes(&d));
    check(cudaMemcpy(result.host, d.device, matrix_bytes(&d), cudaMemcpyDeviceToHost));
    for (int batch = 0; batch < BATCH; batch++)
        for (int i = 0; i < M; i++)
            for (int j = 0; j < N; j++) {
                assert_int_equal(
                    get(at(&result, batch, i, j), s->out), expected(s, &a, &b, at(&d, batch, i, j), batch, i, j));
                memcpy(at(&result, batch, i, j), at(&d, batch, i, j), bytes_of(s->out));
            }
    assert_memory_equal(result.host, d.host, matrix_bytes(&d)); /* nothing between the rows and matrices */
    free(result.host);
    accept(cublasLtMatmulDescDestroy(operation));
    drop(&a);
    drop(&b);
    drop(&d);
}

static void test_products(void **state) {
    (void)state;
    cublasLtHandle_t handle;
    accept(cublasLtCreate(&handle));
    for (int i = 0; i < 32; i++) {
        cublasLtOrder_t order_a = (cublasLtOrder_t)(i & 1), order_b = (cublasLtOrder_t)(i >> 1 & 1);
        struct shape s = {CUDA_R_32F, CUDA_R_32F, order_a, order_b, (cublasLtOrder_t)(i >> 2 & 1), i >> 3 & 1,
            i >> 4 & 1, i % 3 + 1, i % 2};
        check_shape(handle, &s);
        s.in = CUDA_R_16F;
        check_shape(handle, &s);
        s.in = CUDA_R_16BF;
        check_shape(handle, &s);
        s.in = CUDA_R_16F;
        s.out = CUDA_R_16F;
        check_shape(handle, &s);
        s.in = CUDA_R_8I;
        s.out = CUDA_R_32I;
        check_shape(handle, &s);
    }
    accept(cublasLtDestroy(handle));
}

static void test_refusals(void **state) {
    (void)state;
    cublasLtHandle_t handle;
    cublasLtMatmulDesc_t operation;
    cublasLtMatmulPreference_t preference;
    cublasLtMatmulHeuristicResult_t result;
    int count;
    float one = 1.0f, zero = 0.0f;
    accept(cublasLtCreate(&handle));
    accept(cublasLtMatmulPreferenceCreate(&preference));
    accept(cublasLtMatmulDescCreate(&operation, CUBLAS_COMPUTE_32F, CUDA_R_32F));
    struct matrix a = make(CUDA_R_16F, CUBLASLT_ORDER_COL, M, K), b = make(CUDA_R_16F, CUBLASLT_ORDER_COL, K, N);
    struct matrix d = make(CUDA_R_32F, CUBLASLT_ORDER_COL, M, N), other = make(CUDA_R_16BF, CUBLASLT_ORDER_COL, K, N);
    accept(cublasLtMatmulAlgoGetHeuristic(
        handle, operation, a.layout, b.layout, d.layout, d.layout, preference, 1, &result, &count));
    assert_int_equal(count, 1);
    assert_int_equal(cublasLtMatmulAlgoGetHeuristic(
                         handle, operation, a.layout, other.layout, d.layout, d.layout, preference, 1, &result, &count),
        CUBLAS_STATUS_NOT_SUPPORTED);
    assert_int_equal(cublasLtMatmul(handle, operation, &one, b.device, b.layout, a.device, a.layout, &zero, d.device,
                         d.layout, d.device, d.layout, &result.algo, NULL, 0, NULL),
        CUBLAS_STATUS_INVALID_VALUE);
    /* A matrix that does not lie in its allocation is found when the product runs. */
    emulator_set_quiet(true);
    accept(cublasLtMatmul(handle, operation, &one, a.device, a.layout, (char *)b.device + 64, b.layout, &zero, d.device,
        d.layout, d.device, d.layout, &result.algo, NULL, 0, NULL));
    assert_int_equal(cudaDeviceSynchronize(), cudaErrorIllegalAddress);
    assert_non_null(strstr(emulator_fault(), "matrix B"));
    emulator_fault_clear();
    emulator_set_quiet(false);
    accept(cublasLtMatmulDescDestroy(operation));
    accept(cublasLtMatmulPreferenceDestroy(preference));
    accept(cublasLtDestroy(handle));
    drop(&a);
    drop(&b);
    drop(&d);
    drop(&other);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_products),
        cmocka_unit_test(test_refusals),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
