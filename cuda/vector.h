/* SPDX-License-Identifier: Apache-2.0
 *
 * Launchers of row-wise kernels: norms, biases, scales, activations, gathering. All pointers but those to structs are
 * device addresses of row-major float matrices; nothing is waited for.
 */
#ifndef CUDA_VECTOR_H
#define CUDA_VECTOR_H

#include <cuda_runtime_api.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

/* out [rows, width] = x / sqrt(mean(x^2) + epsilon) * weight [width]; x == out allowed. A row's bits do not depend on
 * the number of rows. */
void launch_rms_norm(
    const float *x, const float *weight, float epsilon, uint32_t rows, uint32_t width, float *out, cudaStream_t stream);

/* out += the same. */
void launch_rms_norm_add(
    const float *x, const float *weight, float epsilon, uint32_t rows, uint32_t width, float *out, cudaStream_t stream);

/* Heads of queries and keys in qkv [rows, (heads + 2 kv_heads) * dim], each normed by itself; weights [dim]. */
void launch_head_norms(const float *query_weight, const float *key_weight, float epsilon, uint32_t rows, uint32_t heads,
    uint32_t kv_heads, uint32_t dim, float *qkv, cudaStream_t stream);

/* x [rows, width] += bias [width]; x *= factor; x = cap tanh(x / cap). */
void launch_add_bias(const float *bias, uint32_t rows, uint32_t width, float *x, cudaStream_t stream);
void launch_scale(float factor, uint32_t rows, uint32_t width, float *x, cudaStream_t stream);
void launch_soft_cap(float cap, uint32_t rows, uint32_t width, float *x, cudaStream_t stream);

/* out [rows, width] = silu(gate) * up, gate_up [rows, gate: width | up: width]. */
void launch_silu_mul(const float *gate_up, uint32_t rows, uint32_t width, float *out, cudaStream_t stream);

/* The same with GELU in its tanh form. */
void launch_gelu_mul(const float *gate_up, uint32_t rows, uint32_t width, float *out, cudaStream_t stream);

/* out [count, width] = x[wanted[i]]; wanted: device [count]. */
void launch_gather_rows(
    const float *x, const uint32_t *wanted, uint32_t count, uint32_t width, float *out, cudaStream_t stream);

#ifdef __cplusplus
}
#endif

#endif
