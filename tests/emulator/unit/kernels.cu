/* SPDX-License-Identifier: Apache-2.0 */
#include "cuda/device.h"
#include "tests/emulator/unit/kernels.h"

static const unsigned ALL = 0xffffffff;

__global__ static void axpy_kernel(float a, const float *x, const float *y, float *out, unsigned count) {
    unsigned i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i < count)
        out[i] = a * x[i] + y[i];
}

extern "C" void kernels_axpy(float a, const float *x, const float *y, float *out, unsigned count, cudaStream_t stream) {
    KERNEL_LAUNCH(axpy_kernel, (count + 127) / 128, 128, 0, stream, a, x, y, out, count);
}

static __device__ long long warp_sum(long long value) {
    for (int offset = 16; offset > 0; offset /= 2)
        value += __shfl_xor_sync(ALL, value, offset);
    return value;
}

template <int THREADS> __global__ static void sum_kernel(const int *x, unsigned count, unsigned long long *out) {
    KERNEL_SHARED(long long, sums);
    long long sum = 0;
    for (unsigned i = blockIdx.x * THREADS + threadIdx.x; i < count; i += gridDim.x * THREADS)
        sum += x[i];
    sum = warp_sum(sum);
    if (threadIdx.x % 32 == 0)
        sums[threadIdx.x / 32] = sum;
    __syncthreads();
    if (threadIdx.x < 32) {
        sum = threadIdx.x < THREADS / 32 ? sums[threadIdx.x] : 0;
        sum = warp_sum(sum);
        if (threadIdx.x == 0)
            atomicAdd(out, (unsigned long long)sum);
    }
}

extern "C" void kernels_sum(const int *x, unsigned count, unsigned long long *out, cudaStream_t stream) {
    cudaMemsetAsync(out, 0, sizeof(*out), stream);
    KERNEL_LAUNCH(sum_kernel<256>, 4, 256, 256 / 32 * sizeof(long long), stream, x, count, out);
}

enum { TILE = 32, TILE_ROWS = 8, TILE_STRIDE = TILE + 1 };

__global__ static void transpose_kernel(const float *in, unsigned rows, unsigned columns, float *out) {
    KERNEL_SHARED(float, tile);
    unsigned column = blockIdx.x * TILE, row = blockIdx.y * TILE;
    for (unsigned i = threadIdx.y; i < TILE; i += TILE_ROWS)
        tile[i * TILE_STRIDE + threadIdx.x] = in[(row + i) * columns + column + threadIdx.x];
    __syncthreads();
    for (unsigned i = threadIdx.y; i < TILE; i += TILE_ROWS)
        out[(column + i) * rows + row + threadIdx.x] = tile[threadIdx.x * TILE_STRIDE + i];
}

extern "C" void kernels_transpose(const float *in, unsigned rows, unsigned columns, float *out, cudaStream_t stream) {
    KERNEL_LAUNCH(transpose_kernel, dim3(columns / TILE, rows / TILE), dim3(TILE, TILE_ROWS),
        TILE * TILE_STRIDE * sizeof(float), stream, in, rows, columns, out);
}

/* One warp per tile of 16 rows and 8 columns; fragments straight from memory. */
template <bool BF16>
__global__ static void gemm_kernel(const uint16_t *a, const uint16_t *b, float *out, unsigned n, unsigned k) {
    unsigned row = blockIdx.y * 16, column = blockIdx.x * 8, g = threadIdx.x / 4, t = threadIdx.x % 4;
    float sum[4] = {0, 0, 0, 0};
    for (unsigned i = 0; i < k; i += 16) {
        uint32_t fa[4], fb[2];
        for (unsigned r = 0; r < 4; r++)
            fa[r] = *(const uint32_t *)&a[(row + g + r % 2 * 8) * k + i + t * 2 + r / 2 * 8];
        for (unsigned r = 0; r < 2; r++)
            fb[r] = *(const uint32_t *)&b[(column + g) * k + i + t * 2 + r * 8];
        if (BF16)
            device_mma_m16n8k16_bf16(sum, fa, fb, sum);
        else
            device_mma_m16n8k16_f16(sum, fa, fb, sum);
    }
    for (unsigned r = 0; r < 2; r++)
        *(float2 *)&out[(row + g + r * 8) * n + column + t * 2] = make_float2(sum[2 * r], sum[2 * r + 1]);
}

extern "C" void kernels_gemm_f16(
    const uint16_t *a, const uint16_t *b, float *out, unsigned m, unsigned n, unsigned k, cudaStream_t stream) {
    KERNEL_LAUNCH(gemm_kernel<false>, dim3(n / 8, m / 16), 32, 0, stream, a, b, out, n, k);
}

extern "C" void kernels_gemm_bf16(
    const uint16_t *a, const uint16_t *b, float *out, unsigned m, unsigned n, unsigned k, cudaStream_t stream) {
    KERNEL_LAUNCH(gemm_kernel<true>, dim3(n / 8, m / 16), 32, 0, stream, a, b, out, n, k);
}

/* Rows of 16 halves (32 bytes) would put ldmatrix's eight rows on the same banks twice: 24 halves apart they do not.
 * The same holds for the eight lanes that write 16 bytes each at a time: of eight rows. */
enum { STAGES = 2, STAGE_STRIDE = 24, STAGE_HALVES = 2 * 16 * STAGE_STRIDE };

static __device__ void stage_fill(uint16_t *stage, const uint16_t *a, const uint16_t *b, unsigned k, unsigned i) {
    unsigned row = threadIdx.x % 16, part = threadIdx.x / 16 * 8;
    device_copy_async_16(&stage[row * STAGE_STRIDE + part], &a[row * k + i + part]);
    device_copy_async_16(&stage[(16 + row) * STAGE_STRIDE + part], &b[row * k + i + part]);
}

__global__ static void gemm_staged_kernel(const uint16_t *a, const uint16_t *b, float *out, unsigned n, unsigned k) {
    KERNEL_SHARED(uint16_t, stages);
    unsigned row = blockIdx.y * 16, column = blockIdx.x * 16, lane = threadIdx.x;
    float sum[2][4] = {};
    stage_fill(stages, a + row * k, b + column * k, k, 0);
    device_copy_commit();
    for (unsigned i = 0; i < k; i += 16) {
        uint16_t *stage = stages + i / 16 % STAGES * STAGE_HALVES;
        if (i + 16 < k)
            stage_fill(stages + (i / 16 + 1) % STAGES * STAGE_HALVES, a + row * k, b + column * k, k, i + 16);
        device_copy_commit();
        device_copy_wait<1>();
        __syncwarp();
        uint32_t fa[4], fb[4];
        /* Matrices of a: rows 0-7, rows 8-15, then the same of columns 8-15; of b: rows 0-7 of both halves, 8-15. */
        device_ldmatrix_x4(fa, &stage[lane % 16 * STAGE_STRIDE + lane / 16 * 8]);
        device_ldmatrix_x4(fb, &stage[(16 + lane % 8 + lane / 16 * 8) * STAGE_STRIDE + lane / 8 % 2 * 8]);
        device_mma_m16n8k16_f16(sum[0], fa, fb, sum[0]);
        device_mma_m16n8k16_f16(sum[1], fa, fb + 2, sum[1]);
        __syncwarp();
    }
    for (unsigned tile = 0; tile < 2; tile++)
        for (unsigned r = 0; r < 2; r++)
            *(float2 *)&out[(row + lane / 4 + r * 8) * n + column + tile * 8 + lane % 4 * 2] =
                make_float2(sum[tile][2 * r], sum[tile][2 * r + 1]);
}

extern "C" void kernels_gemm_staged(
    const uint16_t *a, const uint16_t *b, float *out, unsigned m, unsigned n, unsigned k, cudaStream_t stream) {
    KERNEL_LAUNCH(gemm_staged_kernel, dim3(n / 16, m / 16), 32, STAGES * STAGE_HALVES * sizeof(uint16_t), stream, a, b,
        out, n, k);
}

template <unsigned K>
__global__ static void gemm_s8_kernel(const int8_t *a, const int8_t *b, int *out, unsigned n, unsigned k) {
    unsigned row = blockIdx.y * 16, column = blockIdx.x * 8, g = threadIdx.x / 4, t = threadIdx.x % 4;
    int sum[4] = {0, 0, 0, 0};
    for (unsigned i = 0; i < k; i += K) {
        uint32_t fa[4], fb[2];
        for (unsigned r = 0; r < K / 8; r++)
            fa[r] = *(const uint32_t *)&a[(row + g + r % 2 * 8) * k + i + t * 4 + r / 2 * 16];
        for (unsigned r = 0; r < K / 16; r++)
            fb[r] = *(const uint32_t *)&b[(column + g) * k + i + t * 4 + r * 16];
        if (K == 32)
            device_mma_m16n8k32_s8(sum, fa, fb, sum);
        else
            device_mma_m16n8k16_s8(sum, fa, fb, sum);
    }
    for (unsigned r = 0; r < 4; r++)
        out[(row + g + r / 2 * 8) * n + column + t * 2 + r % 2] = sum[r];
}

extern "C" void kernels_gemm_s8(
    const int8_t *a, const int8_t *b, int *out, unsigned m, unsigned n, unsigned k, cudaStream_t stream) {
    KERNEL_LAUNCH(gemm_s8_kernel<32>, dim3(n / 8, m / 16), 32, 0, stream, a, b, out, n, k);
}

extern "C" void kernels_gemm_s8_k16(
    const int8_t *a, const int8_t *b, int *out, unsigned m, unsigned n, unsigned k, cudaStream_t stream) {
    KERNEL_LAUNCH(gemm_s8_kernel<16>, dim3(n / 8, m / 16), 32, 0, stream, a, b, out, n, k);
}

__global__ static void warp_kernel(const int *in, int *out) {
    int lane = (int)threadIdx.x, x = in[lane];
    unsigned half = lane < 16 ? 0x0000ffff : 0xffff0000;
    int r[WARP_RESULTS] = {
        __shfl_sync(ALL, x, 3),
        __shfl_sync(ALL, x, lane + 1, 8),
        __shfl_up_sync(ALL, x, 2),
        __shfl_down_sync(ALL, x, 5, 16),
        __shfl_xor_sync(ALL, x, 7),
        (int)__ballot_sync(ALL, x > 0),
        __any_sync(ALL, x == 1000),
        __all_sync(ALL, x > -1000),
        (int)__match_any_sync(ALL, x % 3),
        __reduce_add_sync(ALL, x),
        __reduce_min_sync(ALL, x),
        (int)__reduce_max_sync(ALL, (unsigned)x),
        __shfl_sync(half, x, 0, 16),
        (int)__ballot_sync(half, x & 1),
        (int)__shfl_down_sync(ALL, (float)x + 0.5f, 1),
        (int)(__shfl_xor_sync(ALL, ((unsigned long long)(unsigned)x << 32) + 5, 1) >> 32),
    };
    for (int i = 0; i < WARP_RESULTS; i++)
        out[lane * WARP_RESULTS + i] = r[i];
}

extern "C" void kernels_warp(const int *in, int *out, cudaStream_t stream) {
    KERNEL_LAUNCH(warp_kernel, 1, 32, 0, stream, in, out);
}

__global__ static void histogram_kernel(const unsigned char *bytes, unsigned count, unsigned *bins) {
    KERNEL_SHARED(unsigned, local);
    local[threadIdx.x] = 0;
    __syncthreads();
    for (unsigned i = blockIdx.x * blockDim.x + threadIdx.x; i < count; i += gridDim.x * blockDim.x)
        atomicAdd(&local[bytes[i]], 1u);
    __syncthreads();
    atomicAdd(&bins[threadIdx.x], local[threadIdx.x]);
}

extern "C" void kernels_histogram(const unsigned char *bytes, unsigned count, unsigned *bins, cudaStream_t stream) {
    cudaMemsetAsync(bins, 0, 256 * sizeof(unsigned), stream);
    KERNEL_LAUNCH(histogram_kernel, 3, 256, 256 * sizeof(unsigned), stream, bytes, count, bins);
}
