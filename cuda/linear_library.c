/* SPDX-License-Identifier: Apache-2.0
 *
 * Products of 16-bit matrices by cuBLASLt. Its matrices are column-major: out transposed [columns, rows] is weights
 * [pitch, columns] transposed times halves [pitch, rows]. What its heuristics chose for a shape is kept.
 */
#include "cuda/linear.h"

#include <stdlib.h>
#include <string.h>

#include <cublasLt.h>

enum { PLANS = 64, ALIGNMENT_MOST = 256 };

/* cuBLASLt's kernels for Hopper want more; others do with less. */
static const size_t WORKSPACE_BYTES = (size_t)8 << 20, WORKSPACE_BYTES_90 = (size_t)32 << 20;

struct shape {
    uint32_t columns, pitch, rows, out_pitch;
    uint32_t alignment; /* of out, bytes */
    bool bfloat;
};

struct plan {
    struct shape shape;
    cublasLtMatmulDesc_t operation; /* NULL: free */
    cublasLtMatrixLayout_t weights, halves, out;
    cublasLtMatmulAlgo_t algorithm;
};

struct linear_library {
    cublasLtHandle_t handle;
    struct cuda_scratch workspace;
    size_t workspace_bytes;
    struct plan plans[PLANS];
    uint32_t next; /* that is replaced when all are taken */
};

static bool check(struct cuda_backend *cuda, cublasStatus_t status, const char *what) {
    return cuda_check(cuda, status == CUBLAS_STATUS_SUCCESS ? cudaSuccess : cudaErrorUnknown, what);
}

static void plan_clear(struct plan *plan) {
    if (plan->operation != NULL)
        cublasLtMatmulDescDestroy(plan->operation);
    cublasLtMatrixLayout_t layouts[] = {plan->weights, plan->halves, plan->out};
    for (size_t i = 0; i < sizeof layouts / sizeof layouts[0]; i++)
        if (layouts[i] != NULL)
            cublasLtMatrixLayoutDestroy(layouts[i]);
    memset(plan, 0, sizeof *plan);
}

struct linear_library *linear_library_create(struct cuda_backend *cuda) {
    struct linear_library *library = calloc(1, sizeof *library);
    if (library == NULL) {
        cuda_check(cuda, cudaErrorMemoryAllocation, "linear");
        return NULL;
    }
    library->workspace_bytes = cuda->capability >= 90 ? WORKSPACE_BYTES_90 : WORKSPACE_BYTES;
    if (!check(cuda, cublasLtCreate(&library->handle), "cuBLASLt") ||
        cuda_scratch_reserve(cuda, &library->workspace, library->workspace_bytes) == NULL) {
        linear_library_free(library);
        return NULL;
    }
    return library;
}

void linear_library_free(struct linear_library *library) {
    if (library == NULL)
        return;
    for (uint32_t i = 0; i < PLANS; i++)
        plan_clear(&library->plans[i]);
    if (library->handle != NULL)
        cublasLtDestroy(library->handle);
    cuda_scratch_free(&library->workspace);
    free(library);
}

static uint32_t alignment_of(const void *address) {
    uintptr_t bits = (uintptr_t)address | ALIGNMENT_MOST;
    return (uint32_t)(bits & -bits);
}

static bool same_shape(const struct shape *a, const struct shape *b) {
    return a->columns == b->columns && a->pitch == b->pitch && a->rows == b->rows && a->out_pitch == b->out_pitch &&
           a->alignment == b->alignment && a->bfloat == b->bfloat;
}

/* The first status that is not success. */
static cublasStatus_t describe(struct plan *plan) {
    const struct shape *s = &plan->shape;
    cudaDataType_t type = s->bfloat ? CUDA_R_16BF : CUDA_R_16F;
    cublasOperation_t transposed = CUBLAS_OP_T;
    cublasStatus_t status = cublasLtMatmulDescCreate(&plan->operation, CUBLAS_COMPUTE_32F, CUDA_R_32F);
    if (status == CUBLAS_STATUS_SUCCESS)
        status = cublasLtMatmulDescSetAttribute(
            plan->operation, CUBLASLT_MATMUL_DESC_TRANSA, &transposed, sizeof transposed);
    if (status == CUBLAS_STATUS_SUCCESS)
        status = cublasLtMatrixLayoutCreate(&plan->weights, type, s->pitch, s->columns, s->pitch);
    if (status == CUBLAS_STATUS_SUCCESS)
        status = cublasLtMatrixLayoutCreate(&plan->halves, type, s->pitch, s->rows, s->pitch);
    if (status == CUBLAS_STATUS_SUCCESS)
        status = cublasLtMatrixLayoutCreate(&plan->out, CUDA_R_32F, s->columns, s->rows, s->out_pitch);
    return status;
}

static cublasStatus_t choose_algorithm(struct linear_library *library, struct plan *plan) {
    cublasLtMatmulPreference_t preference;
    cublasStatus_t status = cublasLtMatmulPreferenceCreate(&preference);
    if (status != CUBLAS_STATUS_SUCCESS)
        return status;
    status = cublasLtMatmulPreferenceSetAttribute(preference, CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES,
        &library->workspace_bytes, sizeof library->workspace_bytes);
    const cublasLtMatmulPreferenceAttributes_t alignments[] = {
        CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_C_BYTES, CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_D_BYTES};
    for (size_t i = 0; i < 2 && status == CUBLAS_STATUS_SUCCESS; i++)
        status = cublasLtMatmulPreferenceSetAttribute(
            preference, alignments[i], &plan->shape.alignment, sizeof plan->shape.alignment);
    cublasLtMatmulHeuristicResult_t result;
    int found = 0;
    if (status == CUBLAS_STATUS_SUCCESS)
        status = cublasLtMatmulAlgoGetHeuristic(library->handle, plan->operation, plan->weights, plan->halves,
            plan->out, plan->out, preference, 1, &result, &found);
    cublasLtMatmulPreferenceDestroy(preference);
    if (status == CUBLAS_STATUS_SUCCESS && found == 0)
        return CUBLAS_STATUS_NOT_SUPPORTED;
    if (status == CUBLAS_STATUS_SUCCESS)
        plan->algorithm = result.algo;
    return status;
}

/* NULL: an error was kept. */
static struct plan *find_plan(struct cuda_backend *cuda, struct linear_library *library, const struct shape *shape) {
    for (uint32_t i = 0; i < PLANS; i++)
        if (library->plans[i].operation != NULL && same_shape(&library->plans[i].shape, shape))
            return &library->plans[i];
    struct plan *plan = &library->plans[library->next];
    library->next = (library->next + 1) % PLANS;
    plan_clear(plan);
    plan->shape = *shape;
    cublasStatus_t status = describe(plan);
    if (status == CUBLAS_STATUS_SUCCESS)
        status = choose_algorithm(library, plan);
    if (check(cuda, status, "linear, cuBLASLt's choice"))
        return plan;
    plan_clear(plan);
    return NULL;
}

void linear_library_multiply(
    struct cuda_backend *cuda, struct linear_library *library, const struct linear_product *product) {
    const struct shape shape = {.columns = product->columns,
        .pitch = product->pitch,
        .rows = product->rows,
        .out_pitch = product->out_pitch,
        .alignment = alignment_of(product->out),
        .bfloat = product->bfloat};
    const struct plan *plan = find_plan(cuda, library, &shape);
    if (plan == NULL)
        return;
    const float one = 1, beta = product->add ? 1 : 0;
    check(cuda,
        cublasLtMatmul(library->handle, plan->operation, &one, product->weights, plan->weights, product->halves,
            plan->halves, &beta, product->out, plan->out, product->out, plan->out, &plan->algorithm,
            library->workspace.memory, library->workspace_bytes, cuda->stream),
        "linear, cuBLASLt");
}
