/* SPDX-License-Identifier: Apache-2.0
 *
 * cuBLASLt's products by plain loops over float32 copies of the matrices.
 */
#include "streams.h"
#include "cublasLt.h"

#include <immintrin.h>
#include <stdlib.h>
#include <string.h>

struct layout {
    cudaDataType type;
    cublasLtOrder_t order;
    uint64_t rows, columns;
    int64_t stride; /* between columns, or between rows in row order */
    int32_t batch;
    int64_t batch_stride;
};

struct operation_description {
    cublasComputeType_t compute;
    cudaDataType_t scale;
    int32_t transposed_a, transposed_b;
};

static_assert(sizeof(struct layout) <= sizeof(cublasLtMatrixLayoutOpaque_t), "");

static struct layout *layout_of(cublasLtMatrixLayout_t layout) {
    return (struct layout *)layout;
}

static size_t type_bytes(cudaDataType type) {
    return type == CUDA_R_8I ? 1 : type == CUDA_R_16F || type == CUDA_R_16BF ? 2 : 4;
}

/* ---- Descriptions ---- */

extern "C" const char *cublasLtGetStatusName(cublasStatus_t status) {
    return cublasLtGetStatusString(status);
}

extern "C" const char *cublasLtGetStatusString(cublasStatus_t status) {
    switch (status) {
    case CUBLAS_STATUS_SUCCESS:
        return "success";
    case CUBLAS_STATUS_INVALID_VALUE:
        return "invalid value";
    case CUBLAS_STATUS_NOT_SUPPORTED:
        return "not supported";
    case CUBLAS_STATUS_EXECUTION_FAILED:
        return "execution failed";
    default:
        return "error";
    }
}

extern "C" size_t cublasLtGetVersion(void) {
    return 130000;
}

extern "C" cublasStatus_t cublasLtCreate(cublasLtHandle_t *handle) {
    *handle = (cublasLtHandle_t)calloc(1, 1);
    return *handle ? CUBLAS_STATUS_SUCCESS : CUBLAS_STATUS_ALLOC_FAILED;
}

extern "C" cublasStatus_t cublasLtDestroy(cublasLtHandle_t handle) {
    free(handle);
    return CUBLAS_STATUS_SUCCESS;
}

extern "C" cublasStatus_t cublasLtMatrixLayoutCreate(
    cublasLtMatrixLayout_t *layout, cudaDataType type, uint64_t rows, uint64_t cols, int64_t ld) {
    *layout = (cublasLtMatrixLayout_t)calloc(1, sizeof(cublasLtMatrixLayoutOpaque_t));
    if (!*layout)
        return CUBLAS_STATUS_ALLOC_FAILED;
    *layout_of(*layout) = {type, CUBLASLT_ORDER_COL, rows, cols, ld, 1, 0};
    return CUBLAS_STATUS_SUCCESS;
}

extern "C" cublasStatus_t cublasLtMatrixLayoutDestroy(cublasLtMatrixLayout_t layout) {
    free(layout);
    return CUBLAS_STATUS_SUCCESS;
}

static cublasStatus_t set(void *to, size_t to_bytes, const void *value, size_t bytes) {
    if (bytes != to_bytes)
        return CUBLAS_STATUS_INVALID_VALUE;
    memcpy(to, value, bytes);
    return CUBLAS_STATUS_SUCCESS;
}

extern "C" cublasStatus_t cublasLtMatrixLayoutSetAttribute(
    cublasLtMatrixLayout_t layout_, cublasLtMatrixLayoutAttribute_t attribute, const void *value, size_t bytes) {
    struct layout *layout = layout_of(layout_);
    switch (attribute) {
    case CUBLASLT_MATRIX_LAYOUT_TYPE:
        return set(&layout->type, 4, value, bytes);
    case CUBLASLT_MATRIX_LAYOUT_ORDER:
        return set(&layout->order, 4, value, bytes);
    case CUBLASLT_MATRIX_LAYOUT_ROWS:
        return set(&layout->rows, 8, value, bytes);
    case CUBLASLT_MATRIX_LAYOUT_COLS:
        return set(&layout->columns, 8, value, bytes);
    case CUBLASLT_MATRIX_LAYOUT_LD:
        return set(&layout->stride, 8, value, bytes);
    case CUBLASLT_MATRIX_LAYOUT_BATCH_COUNT:
        return set(&layout->batch, 4, value, bytes);
    case CUBLASLT_MATRIX_LAYOUT_STRIDED_BATCH_OFFSET:
        return set(&layout->batch_stride, 8, value, bytes);
    }
    return CUBLAS_STATUS_NOT_SUPPORTED;
}

extern "C" cublasStatus_t cublasLtMatmulDescCreate(
    cublasLtMatmulDesc_t *operation, cublasComputeType_t compute, cudaDataType_t scale) {
    *operation = (cublasLtMatmulDesc_t)calloc(1, sizeof(cublasLtMatmulDescOpaque_t));
    if (!*operation)
        return CUBLAS_STATUS_ALLOC_FAILED;
    *(struct operation_description *)*operation = {compute, scale, CUBLAS_OP_N, CUBLAS_OP_N};
    return CUBLAS_STATUS_SUCCESS;
}

extern "C" cublasStatus_t cublasLtMatmulDescDestroy(cublasLtMatmulDesc_t operation) {
    free(operation);
    return CUBLAS_STATUS_SUCCESS;
}

extern "C" cublasStatus_t cublasLtMatmulDescSetAttribute(
    cublasLtMatmulDesc_t operation_, cublasLtMatmulDescAttributes_t attribute, const void *value, size_t bytes) {
    struct operation_description *operation = (struct operation_description *)operation_;
    int32_t number = 0;
    switch (attribute) {
    case CUBLASLT_MATMUL_DESC_TRANSA:
        return set(&operation->transposed_a, 4, value, bytes);
    case CUBLASLT_MATMUL_DESC_TRANSB:
        return set(&operation->transposed_b, 4, value, bytes);
    case CUBLASLT_MATMUL_DESC_EPILOGUE:
        set(&number, 4, value, bytes);
        return number == CUBLASLT_EPILOGUE_DEFAULT ? CUBLAS_STATUS_SUCCESS : CUBLAS_STATUS_NOT_SUPPORTED;
    case CUBLASLT_MATMUL_DESC_POINTER_MODE:
        set(&number, 4, value, bytes);
        return number == CUBLASLT_POINTER_MODE_HOST ? CUBLAS_STATUS_SUCCESS : CUBLAS_STATUS_NOT_SUPPORTED;
    }
    return CUBLAS_STATUS_NOT_SUPPORTED;
}

extern "C" cublasStatus_t cublasLtMatmulPreferenceCreate(cublasLtMatmulPreference_t *preference) {
    *preference = (cublasLtMatmulPreference_t)calloc(1, sizeof(cublasLtMatmulPreferenceOpaque_t));
    return *preference ? CUBLAS_STATUS_SUCCESS : CUBLAS_STATUS_ALLOC_FAILED;
}

extern "C" cublasStatus_t cublasLtMatmulPreferenceDestroy(cublasLtMatmulPreference_t preference) {
    free(preference);
    return CUBLAS_STATUS_SUCCESS;
}

extern "C" cublasStatus_t cublasLtMatmulPreferenceSetAttribute(
    cublasLtMatmulPreference_t, cublasLtMatmulPreferenceAttributes_t, const void *, size_t) {
    return CUBLAS_STATUS_SUCCESS;
}

/* ---- Shapes ---- */

struct product {
    struct operation_description operation;
    struct layout a, b, c, d;
    float alpha, beta;
    const char *A, *B, *C;
    char *D;
    uint64_t m, n, k;
};

static uint64_t op_rows(const struct layout *layout, int32_t transposed) {
    return transposed == CUBLAS_OP_N ? layout->rows : layout->columns;
}

static uint64_t op_columns(const struct layout *layout, int32_t transposed) {
    return transposed == CUBLAS_OP_N ? layout->columns : layout->rows;
}

static bool layout_ok(const struct layout *l) {
    uint64_t least = l->order == CUBLASLT_ORDER_COL ? l->rows : l->columns;
    return l->rows > 0 && l->columns > 0 && l->stride >= (int64_t)least && l->batch > 0;
}

static bool types_ok(const struct product *p) {
    if (p->operation.compute == CUBLAS_COMPUTE_32I)
        return p->a.type == CUDA_R_8I && p->b.type == CUDA_R_8I && p->c.type == CUDA_R_32I && p->d.type == CUDA_R_32I &&
               p->operation.scale == CUDA_R_32I;
    bool inputs =
        p->a.type == p->b.type && (p->a.type == CUDA_R_16F || p->a.type == CUDA_R_16BF || p->a.type == CUDA_R_32F);
    bool output = p->c.type == p->d.type && (p->d.type == CUDA_R_32F || p->d.type == p->a.type);
    return inputs && output && p->operation.scale == CUDA_R_32F && p->operation.compute == CUBLAS_COMPUTE_32F;
}

static cublasStatus_t product_shape(struct product *p, cublasLtMatmulDesc_t operation, cublasLtMatrixLayout_t a,
    cublasLtMatrixLayout_t b, cublasLtMatrixLayout_t c, cublasLtMatrixLayout_t d) {
    if (!operation || !a || !b || !c || !d)
        return CUBLAS_STATUS_INVALID_VALUE;
    p->operation = *(struct operation_description *)operation;
    p->a = *layout_of(a);
    p->b = *layout_of(b);
    p->c = *layout_of(c);
    p->d = *layout_of(d);
    p->m = p->d.rows;
    p->n = p->d.columns;
    p->k = op_columns(&p->a, p->operation.transposed_a);
    if (!layout_ok(&p->a) || !layout_ok(&p->b) || !layout_ok(&p->c) || !layout_ok(&p->d))
        return CUBLAS_STATUS_INVALID_VALUE;
    if (op_rows(&p->a, p->operation.transposed_a) != p->m || op_rows(&p->b, p->operation.transposed_b) != p->k ||
        op_columns(&p->b, p->operation.transposed_b) != p->n || p->c.rows != p->m || p->c.columns != p->n)
        return CUBLAS_STATUS_INVALID_VALUE;
    if (p->a.batch != p->d.batch || p->b.batch != p->d.batch || p->c.batch != p->d.batch)
        return CUBLAS_STATUS_INVALID_VALUE;
    return types_ok(p) ? CUBLAS_STATUS_SUCCESS : CUBLAS_STATUS_NOT_SUPPORTED;
}

extern "C" cublasStatus_t cublasLtMatmulAlgoGetHeuristic(cublasLtHandle_t, cublasLtMatmulDesc_t operation,
    cublasLtMatrixLayout_t a, cublasLtMatrixLayout_t b, cublasLtMatrixLayout_t c, cublasLtMatrixLayout_t d,
    cublasLtMatmulPreference_t, int wanted, cublasLtMatmulHeuristicResult_t results[], int *count) {
    struct product product = {};
    *count = 0;
    cublasStatus_t status = product_shape(&product, operation, a, b, c, d);
    if (status != CUBLAS_STATUS_SUCCESS)
        return status;
    if (wanted < 1)
        return CUBLAS_STATUS_INVALID_VALUE;
    memset(&results[0], 0, sizeof(results[0]));
    results[0].wavesCount = 1.0f;
    *count = 1;
    return CUBLAS_STATUS_SUCCESS;
}

/* ---- Numbers ---- */

static float number_read(const char *from, cudaDataType type) {
    int8_t small;
    uint16_t half;
    uint32_t bits;
    float value;
    switch (type) {
    case CUDA_R_8I:
        memcpy(&small, from, 1);
        return small;
    case CUDA_R_16F:
        memcpy(&half, from, 2);
        return _cvtsh_ss(half);
    case CUDA_R_16BF:
        memcpy(&half, from, 2);
        bits = (uint32_t)half << 16;
        memcpy(&value, &bits, 4);
        return value;
    default:
        memcpy(&value, from, 4);
        return value;
    }
}

static void number_write(char *to, cudaDataType type, float value) {
    uint32_t bits;
    uint16_t half;
    memcpy(&bits, &value, 4);
    if (type == CUDA_R_32F) {
        memcpy(to, &value, 4);
        return;
    }
    if (type == CUDA_R_16F)
        half = _cvtss_sh(value, _MM_FROUND_TO_NEAREST_INT);
    else
        half = value != value ? 0x7fff : (uint16_t)((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
    memcpy(to, &half, 2);
}

static size_t element(const struct layout *l, uint64_t row, uint64_t column) {
    return l->order == CUBLASLT_ORDER_COL ? column * (size_t)l->stride + row : row * (size_t)l->stride + column;
}

/* to[row * to_stride + column] of op(matrix), or its transpose: whichever the inner loop wants. */
static std::vector<float> gather(
    const char *from, const struct layout *l, int32_t transposed, bool by_column, uint64_t pad) {
    uint64_t rows = op_rows(l, transposed), columns = op_columns(l, transposed), each = type_bytes(l->type);
    std::vector<float> to((by_column ? columns : rows) * pad);
    for (uint64_t row = 0; row < rows; row++)
        for (uint64_t column = 0; column < columns; column++) {
            size_t at = transposed == CUBLAS_OP_N ? element(l, row, column) : element(l, column, row);
            to[by_column ? column * pad + row : row * pad + column] = number_read(from + at * each, l->type);
        }
    return to;
}

/* ---- Products ---- */

enum { TILE_ROWS = 4, TILE_COLUMNS = 16 };

/* sums [TILE_ROWS][TILE_COLUMNS] = rows of a [k][m_pad], from one row on, by columns of b [k][n_pad] */
static void multiply_tile(
    const float *a, uint64_t a_stride, const float *b, uint64_t b_stride, uint64_t k, float *sums) {
    __m256 acc[TILE_ROWS][2];
    for (int i = 0; i < TILE_ROWS; i++)
        acc[i][0] = acc[i][1] = _mm256_setzero_ps();
    for (uint64_t at = 0; at < k; at++) {
        __m256 low = _mm256_loadu_ps(b + at * b_stride), high = _mm256_loadu_ps(b + at * b_stride + 8);
        for (int i = 0; i < TILE_ROWS; i++) {
            __m256 x = _mm256_set1_ps(a[at * a_stride + i]);
            acc[i][0] = _mm256_fmadd_ps(x, low, acc[i][0]);
            acc[i][1] = _mm256_fmadd_ps(x, high, acc[i][1]);
        }
    }
    for (int i = 0; i < TILE_ROWS; i++) {
        _mm256_storeu_ps(sums + i * TILE_COLUMNS, acc[i][0]);
        _mm256_storeu_ps(sums + i * TILE_COLUMNS + 8, acc[i][1]);
    }
}

static void store(const struct product *p, const char *C, char *D, uint64_t row, uint64_t column, float sum) {
    float value = p->alpha * sum;
    if (p->beta != 0.0f)
        value += p->beta * number_read(C + element(&p->c, row, column) * type_bytes(p->c.type), p->c.type);
    number_write(D + element(&p->d, row, column) * type_bytes(p->d.type), p->d.type, value);
}

static void multiply_floats(const struct product *p, const char *A, const char *B, const char *C, char *D) {
    uint64_t m_pad = (p->m + TILE_ROWS - 1) / TILE_ROWS * TILE_ROWS;
    uint64_t n_pad = (p->n + TILE_COLUMNS - 1) / TILE_COLUMNS * TILE_COLUMNS;
    std::vector<float> a = gather(A, &p->a, p->operation.transposed_a, true, m_pad);
    std::vector<float> b = gather(B, &p->b, p->operation.transposed_b, false, n_pad);
    float sums[TILE_ROWS * TILE_COLUMNS];
    for (uint64_t column = 0; column < p->n; column += TILE_COLUMNS)
        for (uint64_t row = 0; row < p->m; row += TILE_ROWS) {
            multiply_tile(a.data() + row, m_pad, b.data() + column, n_pad, p->k, sums);
            for (uint64_t i = 0; i < TILE_ROWS && row + i < p->m; i++)
                for (uint64_t j = 0; j < TILE_COLUMNS && column + j < p->n; j++)
                    store(p, C, D, row + i, column + j, sums[i * TILE_COLUMNS + j]);
        }
}

static void multiply_integers(const struct product *p, const char *A, const char *B, const char *C, char *D) {
    int32_t alpha, beta;
    memcpy(&alpha, &p->alpha, 4);
    memcpy(&beta, &p->beta, 4);
    for (uint64_t row = 0; row < p->m; row++)
        for (uint64_t column = 0; column < p->n; column++) {
            uint32_t sum = 0;
            for (uint64_t k = 0; k < p->k; k++) {
                size_t at_a = p->operation.transposed_a ? element(&p->a, k, row) : element(&p->a, row, k);
                size_t at_b = p->operation.transposed_b ? element(&p->b, column, k) : element(&p->b, k, column);
                sum += (uint32_t)((int8_t)A[at_a] * (int8_t)B[at_b]);
            }
            uint32_t value = (uint32_t)alpha * sum, old;
            if (beta != 0) {
                memcpy(&old, C + element(&p->c, row, column) * 4, 4);
                value += (uint32_t)beta * old;
            }
            memcpy(D + element(&p->d, row, column) * 4, &value, 4);
        }
}

static bool matrix_ok(const char *name, const void *at, const struct layout *l) {
    uint64_t lines = l->order == CUBLASLT_ORDER_COL ? l->columns : l->rows;
    uint64_t line = l->order == CUBLASLT_ORDER_COL ? l->rows : l->columns;
    uint64_t elements = (lines - 1) * (uint64_t)l->stride + line + (uint64_t)(l->batch - 1) * (uint64_t)l->batch_stride;
    if (memory_range_ok(at, elements * type_bytes(l->type)) && memory_device_of(at) == runtime_device())
        return true;
    char what[256];
    memory_describe(at, what, sizeof(what));
    fault_host("cublasLtMatmul: %llu elements of matrix %s are not in one allocation of device %u: %s",
        (unsigned long long)elements, name, runtime_device(), what);
    return false;
}

static void product_run(const struct product *p) {
    bool ok = matrix_ok("A", p->A, &p->a) && matrix_ok("B", p->B, &p->b) && matrix_ok("D", p->D, &p->d) &&
              (p->beta == 0.0f || matrix_ok("C", p->C, &p->c));
    if (!ok) {
        runtime_set_sticky(cudaErrorIllegalAddress);
        return;
    }
    for (int32_t i = 0; i < p->d.batch; i++) {
        const char *A = p->A + i * p->a.batch_stride * (int64_t)type_bytes(p->a.type);
        const char *B = p->B + i * p->b.batch_stride * (int64_t)type_bytes(p->b.type);
        const char *C = p->C + i * p->c.batch_stride * (int64_t)type_bytes(p->c.type);
        char *D = p->D + i * p->d.batch_stride * (int64_t)type_bytes(p->d.type);
        if (p->operation.compute == CUBLAS_COMPUTE_32I)
            multiply_integers(p, A, B, C, D);
        else
            multiply_floats(p, A, B, C, D);
    }
}

extern "C" cublasStatus_t cublasLtMatmul(cublasLtHandle_t, cublasLtMatmulDesc_t operation, const void *alpha,
    const void *A, cublasLtMatrixLayout_t a, const void *B, cublasLtMatrixLayout_t b, const void *beta, const void *C,
    cublasLtMatrixLayout_t c, void *D, cublasLtMatrixLayout_t d, const cublasLtMatmulAlgo_t *, void *workspace,
    size_t workspace_bytes, cudaStream_t stream) {
    struct product product = {};
    cublasStatus_t status = product_shape(&product, operation, a, b, c, d);
    if (status != CUBLAS_STATUS_SUCCESS)
        return status;
    if (!alpha || !beta || !A || !B || !D || (workspace_bytes > 0 && (uintptr_t)workspace % 16 != 0))
        return CUBLAS_STATUS_INVALID_VALUE;
    memcpy(&product.alpha, alpha, 4);
    memcpy(&product.beta, beta, 4);
    product.A = (const char *)A;
    product.B = (const char *)B;
    product.C = (const char *)C;
    product.D = (char *)D;
    struct runtime_scope scope;
    if (workspace_bytes > 0 && !memory_range_ok(workspace, workspace_bytes)) {
        fault_host("cublasLtMatmul: the workspace is not in one device allocation");
        return CUBLAS_STATUS_INVALID_VALUE;
    }
    runtime_calls.launches += stream_counts(stream);
    if (stream_add(stream, [product] { product_run(&product); }) != cudaSuccess)
        return CUBLAS_STATUS_EXECUTION_FAILED;
    return CUBLAS_STATUS_SUCCESS;
}
