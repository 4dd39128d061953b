/* SPDX-License-Identifier: Apache-2.0
 *
 * Small kernels that the emulator is tested with (kernels.cu: right ones; faults.cu: each with one deliberate fault).
 * Pointers are device memory.
 */
#ifndef EMULATOR_KERNELS_H
#define EMULATOR_KERNELS_H

#include <stdbool.h>
#include <stdint.h>

#include <cuda_runtime_api.h>

#ifdef __cplusplus
extern "C" {
#endif

/* out[i] = a x[i] + y[i] */
void kernels_axpy(float a, const float *x, const float *y, float *out, unsigned count, cudaStream_t stream);
/* out[0] = sum of x [count], added up over blocks by integers. */
void kernels_sum(const int *x, unsigned count, unsigned long long *out, cudaStream_t stream);
/* out [columns, rows] = in [rows, columns] transposed; both multiples of 32. */
void kernels_transpose(const float *in, unsigned rows, unsigned columns, float *out, cudaStream_t stream);
/* out [m, n] = a [m, k] b [n, k]^T in f16 (bits), f32 sums; m % 16 == 0, n % 8 == 0, k % 16 == 0. */
void kernels_gemm_f16(
    const uint16_t *a, const uint16_t *b, float *out, unsigned m, unsigned n, unsigned k, cudaStream_t stream);
void kernels_gemm_bf16(
    const uint16_t *a, const uint16_t *b, float *out, unsigned m, unsigned n, unsigned k, cudaStream_t stream);
/* The same by ldmatrix from shared memory that cp.async fills, two stages; m and n multiples of 16 (n: two tiles of 8).
 */
void kernels_gemm_staged(
    const uint16_t *a, const uint16_t *b, float *out, unsigned m, unsigned n, unsigned k, cudaStream_t stream);
/* out [m, n] = a [m, k] b [n, k]^T, int8; k % 32 == 0. */
void kernels_gemm_s8(
    const int8_t *a, const int8_t *b, int *out, unsigned m, unsigned n, unsigned k, cudaStream_t stream);
void kernels_gemm_s8_k16(
    const int8_t *a, const int8_t *b, int *out, unsigned m, unsigned n, unsigned k, cudaStream_t stream);
/* Sorted order is the same for all warp functions: out [32][WARP_RESULTS] of one warp. */
enum { WARP_RESULTS = 16 };
void kernels_warp(const int *in, int *out, cudaStream_t stream);
/* Histogram of bytes [count] over bins [256]. */
void kernels_histogram(const unsigned char *bytes, unsigned count, unsigned *bins, cudaStream_t stream);

#ifdef __cplusplus
}
#endif

#endif
