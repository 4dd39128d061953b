/* SPDX-License-Identifier: Apache-2.0
 *
 * Launchers of row-wise kernels: norm, activation, gathering. All pointers but those to structs are device addresses of
 * row-major float matrices; nothing is waited for.
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

/* out [rows, width] = silu(gate) * up, gate_up [rows, gate: width | up: width]. */
void launch_silu_mul(const float *gate_up, uint32_t rows, uint32_t width, float *out, cudaStream_t stream);

/* out [count, width] = x[wanted[i]]; wanted: device [count]. */
void launch_gather_rows(
    const float *x, const uint32_t *wanted, uint32_t count, uint32_t width, float *out, cudaStream_t stream);

#ifdef __cplusplus
}
#endif

#endif
