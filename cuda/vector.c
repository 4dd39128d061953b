/* SPDX-License-Identifier: Apache-2.0 */
#include "cuda/vector.h"
#include "cuda/cuda_backend.h"
#include "cuda/step.h"

void cuda_rms_norm(struct backend *backend, const float *x, const float *weight, float epsilon, uint32_t rows,
    uint32_t width, float *out) {
    struct cuda_backend *cuda = cuda_backend(backend);
    launch_rms_norm(x, weight, epsilon, rows, width, out, cuda->stream);
    cuda_check_launch(cuda, "rms_norm");
}

void cuda_rms_norm_add(struct backend *backend, const float *x, const float *weight, float epsilon, uint32_t rows,
    uint32_t width, float *out) {
    struct cuda_backend *cuda = cuda_backend(backend);
    launch_rms_norm_add(x, weight, epsilon, rows, width, out, cuda->stream);
    cuda_check_launch(cuda, "rms_norm_add");
}

void cuda_head_norms(struct backend *backend, const float *query_weight, const float *key_weight, float epsilon,
    uint32_t rows, uint32_t heads, uint32_t kv_heads, uint32_t head_dim, float *qkv) {
    struct cuda_backend *cuda = cuda_backend(backend);
    launch_head_norms(query_weight, key_weight, epsilon, rows, heads, kv_heads, head_dim, qkv, cuda->stream);
    cuda_check_launch(cuda, "head_norms");
}

void cuda_add_bias(struct backend *backend, const float *bias, uint32_t rows, uint32_t width, float *x) {
    struct cuda_backend *cuda = cuda_backend(backend);
    launch_add_bias(bias, rows, width, x, cuda->stream);
    cuda_check_launch(cuda, "add_bias");
}

void cuda_scale(struct backend *backend, float factor, uint32_t rows, uint32_t width, float *x) {
    struct cuda_backend *cuda = cuda_backend(backend);
    launch_scale(factor, rows, width, x, cuda->stream);
    cuda_check_launch(cuda, "scale");
}

void cuda_soft_cap(struct backend *backend, float cap, uint32_t rows, uint32_t width, float *x) {
    struct cuda_backend *cuda = cuda_backend(backend);
    launch_soft_cap(cap, rows, width, x, cuda->stream);
    cuda_check_launch(cuda, "soft_cap");
}

void cuda_gelu_mul(struct backend *backend, const float *gate_up, uint32_t rows, uint32_t width, float *out) {
    struct cuda_backend *cuda = cuda_backend(backend);
    launch_gelu_mul(gate_up, rows, width, out, cuda->stream);
    cuda_check_launch(cuda, "gelu_mul");
}

void cuda_silu_mul(struct backend *backend, const float *gate_up, uint32_t rows, uint32_t width, float *out) {
    struct cuda_backend *cuda = cuda_backend(backend);
    launch_silu_mul(gate_up, rows, width, out, cuda->stream);
    cuda_check_launch(cuda, "silu_mul");
}

void cuda_gather_rows(
    struct backend *backend, const float *x, const uint32_t *rows_wanted, uint32_t count, uint32_t width, float *out) {
    struct cuda_backend *cuda = cuda_backend(backend);
    const uint32_t *wanted = cuda_step_wanted(cuda, rows_wanted);
    if (count == 0)
        return;
    if (wanted == NULL) {
        struct cuda_stage stage;
        if (!cuda_stage_begin(cuda, count * sizeof *rows_wanted, &stage))
            return;
        wanted = cuda_stage_copy(&stage, rows_wanted, count * sizeof *rows_wanted);
        if (!cuda_stage_send(cuda, &stage))
            return;
    }
    launch_gather_rows(x, wanted, count, width, out, cuda->stream);
    cuda_check_launch(cuda, "gather_rows");
}
