/* SPDX-License-Identifier: Apache-2.0 */
#include "cuda/device.h"
#include "tests/emulator/unit/faults.h"

static const unsigned ALL = 0xffffffff;
enum { THREADS = 64 };

__global__ static void barrier_kernel(bool right, int *words) {
    KERNEL_SHARED(int, shared);
    shared[threadIdx.x] = -1;
    __syncthreads();
    shared[threadIdx.x] = (int)threadIdx.x;
    if (right)
        __syncthreads();
    words[threadIdx.x] = shared[THREADS - 1 - threadIdx.x];
}

__global__ static void barrier_reuse_kernel(bool right, int *words) {
    KERNEL_SHARED(int, shared);
    for (int i = 0; i < 2; i++) {
        shared[threadIdx.x] = i;
        __syncthreads();
        words[threadIdx.x] += shared[(threadIdx.x + 1) % THREADS];
        if (right)
            __syncthreads();
    }
}

__global__ static void syncwarp_kernel(bool right, int *words) {
    KERNEL_SHARED(int, shared);
    shared[threadIdx.x] = -1;
    __syncthreads();
    shared[threadIdx.x] = (int)threadIdx.x;
    if (right)
        __syncwarp();
    words[threadIdx.x] = shared[threadIdx.x ^ 1];
}

__global__ static void syncwarp_mask_kernel(bool right, int *words) {
    KERNEL_SHARED(int, shared);
    shared[threadIdx.x] = -1;
    __syncthreads();
    shared[threadIdx.x] = (int)threadIdx.x;
    unsigned half = threadIdx.x % 32 < 16 ? 0x0000ffff : 0xffff0000;
    __syncwarp(half);
    words[threadIdx.x] = shared[threadIdx.x ^ (right ? 15 : 16)];
}

__global__ static void global_race_kernel(bool right, int *words) {
    words[right ? threadIdx.x : threadIdx.x / 2 * 2] = 1;
}

__global__ static void byte_race_kernel(bool right, int *words) {
    unsigned char *bytes = (unsigned char *)words;
    bytes[right || threadIdx.x != 5 ? threadIdx.x : 6] += 1;
}

__global__ static void block_race_kernel(bool right, int *words) {
    if (threadIdx.x < 32)
        words[threadIdx.x + (right ? 32 : 1) * blockIdx.x] = 1;
}

__global__ static void memcpy_past_kernel(bool right, int *words) {
    char bytes[65];
    memset(bytes, 0, 65);
    if (threadIdx.x == 0)
        memcpy(words + 48, bytes, right ? 64 : 65);
}

__global__ static void read_past_kernel(bool right, int *words) {
    int x = words[threadIdx.x + (right ? 0 : 1)];
    __syncthreads();
    words[threadIdx.x] = x;
}

__global__ static void write_before_kernel(bool right, int *words) {
    words[(int)threadIdx.x - (right ? 0 : 1)] = 1;
}

__global__ static void shared_past_kernel(bool right, int *words) {
    KERNEL_SHARED(int, shared);
    shared[threadIdx.x + (right ? 0 : 1)] = 1;
    words[threadIdx.x] = 1;
}

__global__ static void unwritten_kernel(bool right, int *words) {
    KERNEL_SHARED(int, shared);
    if (right || threadIdx.x != 17)
        shared[threadIdx.x] = 1;
    words[threadIdx.x] = shared[threadIdx.x];
}

__global__ static void unwritten_other_kernel(bool right, int *words) {
    KERNEL_SHARED(int, shared);
    if (right || blockIdx.x == 0)
        shared[threadIdx.x] = 1;
    atomicAdd(&words[threadIdx.x], shared[threadIdx.x]);
}

__global__ static void diverged_kernel(bool right, int *words) {
    int x = (int)threadIdx.x;
    if (right || threadIdx.x % 32 < 16)
        x = __shfl_xor_sync(ALL, x, 1);
    else
        x = __shfl_xor_sync(ALL, x, 2);
    words[threadIdx.x] = x;
}

__global__ static void ended_lane_kernel(bool right, int *words) {
    if (!right && threadIdx.x == 40)
        return;
    words[threadIdx.x] = __shfl_down_sync(ALL, (int)threadIdx.x, 1);
}

__global__ static void ended_thread_kernel(bool right, int *words) {
    if (!right && threadIdx.x == 63)
        return;
    __syncthreads();
    words[threadIdx.x] = 1;
}

__global__ static void half_barrier_kernel(bool right, int *words) {
    if (right || threadIdx.x < 32)
        __syncthreads();
    else
        __syncthreads();
    words[threadIdx.x] = 1;
}

__global__ static void mask_self_kernel(bool right, int *words) {
    words[threadIdx.x] = (int)__ballot_sync(right ? ALL : 0x7fffffff, 1);
}

__global__ static void mask_source_kernel(bool right, int *words) {
    unsigned half = threadIdx.x % 32 < 16 ? 0x0000ffff : 0xffff0000;
    words[threadIdx.x] = __shfl_xor_sync(half, (int)threadIdx.x, right ? 8 : 16);
}

__global__ static void never_kernel(bool right, int *words) {
    unsigned mask = right || threadIdx.x % 32 < 16 ? ALL : 0xfffffff0;
    __syncwarp(mask);
    words[threadIdx.x] = 1;
}

__global__ static void copy_wait_kernel(bool right, int *words) {
    KERNEL_SHARED(int, shared);
    if (threadIdx.x < 16)
        device_copy_async_16(&shared[threadIdx.x * 4], &words[threadIdx.x * 4]);
    device_copy_commit();
    if (right)
        device_copy_wait<0>();
    __syncthreads();
    words[threadIdx.x] = shared[THREADS - 1 - threadIdx.x];
}

template <unsigned GROUPS> __global__ static void copy_groups_kernel(int *words) {
    KERNEL_SHARED(int, shared);
    for (int i = 0; i < 2; i++) {
        if (threadIdx.x < 8)
            device_copy_async_16(&shared[i * 32 + threadIdx.x * 4], &words[i * 32 + threadIdx.x * 4]);
        device_copy_commit();
    }
    device_copy_wait<GROUPS>();
    __syncthreads();
    if (threadIdx.x >= 32)
        words[threadIdx.x] = shared[threadIdx.x];
}

__global__ static void copy_barrier_kernel(bool right, int *words) {
    KERNEL_SHARED(int, shared);
    shared[threadIdx.x] = -1;
    __syncthreads();
    if (threadIdx.x < 16)
        device_copy_async_16(&shared[threadIdx.x * 4], &words[threadIdx.x * 4]);
    device_copy_commit();
    device_copy_wait<0>();
    if (right)
        __syncthreads();
    int x = threadIdx.x >= 32 ? shared[THREADS - 1 - threadIdx.x] : 1;
    __syncthreads();
    words[threadIdx.x] = x;
}

__global__ static void copy_reuse_kernel(bool right, int *words) {
    KERNEL_SHARED(int, shared);
    int sum = 0;
    for (int i = 0; i < 2; i++) {
        if (threadIdx.x < 8)
            device_copy_async_16(&shared[threadIdx.x * 4], &words[i * 32 + threadIdx.x * 4]);
        device_copy_commit();
        device_copy_wait<0>();
        __syncthreads();
        sum += shared[threadIdx.x / 2];
        if (right)
            __syncthreads();
    }
    __syncthreads();
    words[threadIdx.x] = sum;
}

struct pair {
    unsigned long long first, second;
};

/* A struct of two numbers of 8 bytes may lie at any multiple of 8. */
__global__ static void unaligned_kernel(bool right, int *words) {
    if (threadIdx.x < 6) {
        uint4 x = *(const uint4 *)&words[threadIdx.x * 4 + (right ? 0 : 2)];
        *(uint4 *)&words[32 + threadIdx.x * 4] = x;
    }
    if (threadIdx.x == 7)
        *(struct pair *)&words[58] = *(const struct pair *)&words[26];
}

__global__ static void unaligned_word_kernel(bool right, int *words) {
    if (threadIdx.x == 0)
        *(int *)((char *)words + (right ? 4 : 3)) = 1;
}

__global__ static void host_memory_kernel(bool right, int *words, const int *host) {
    words[threadIdx.x] = right ? 1 : host[threadIdx.x];
}

__global__ static void atomic_plain_kernel(bool right, int *words) {
    atomicAdd(&words[0], 1);
    if (right)
        __syncthreads();
    if (threadIdx.x == 1)
        words[1] = words[0];
}

#define RUN(kernel, blocks)                                                                                            \
    KERNEL_LAUNCH(kernel, blocks, THREADS, THREADS * sizeof(int), stream, right, words);                               \
    break

extern "C" void faults_run(enum fault fault, bool right, int *words, const int *host, cudaStream_t stream) {
    switch (fault) {
    case FAULT_BARRIER:
        RUN(barrier_kernel, 1);
    case FAULT_BARRIER_REUSE:
        RUN(barrier_reuse_kernel, 1);
    case FAULT_SYNCWARP:
        RUN(syncwarp_kernel, 1);
    case FAULT_SYNCWARP_MASK:
        RUN(syncwarp_mask_kernel, 1);
    case FAULT_GLOBAL_RACE:
        RUN(global_race_kernel, 1);
    case FAULT_BYTE_RACE:
        RUN(byte_race_kernel, 1);
    case FAULT_BLOCK_RACE:
        RUN(block_race_kernel, 2);
    case FAULT_MEMCPY_PAST:
        RUN(memcpy_past_kernel, 1);
    case FAULT_READ_PAST:
        RUN(read_past_kernel, 1);
    case FAULT_WRITE_BEFORE:
        RUN(write_before_kernel, 1);
    case FAULT_SHARED_PAST:
        RUN(shared_past_kernel, 1);
    case FAULT_UNWRITTEN:
        RUN(unwritten_kernel, 1);
    case FAULT_UNWRITTEN_OTHER:
        RUN(unwritten_other_kernel, 2);
    case FAULT_DIVERGED:
        RUN(diverged_kernel, 1);
    case FAULT_ENDED_LANE:
        RUN(ended_lane_kernel, 1);
    case FAULT_ENDED_THREAD:
        RUN(ended_thread_kernel, 1);
    case FAULT_HALF_BARRIER:
        RUN(half_barrier_kernel, 1);
    case FAULT_MASK_SELF:
        RUN(mask_self_kernel, 1);
    case FAULT_MASK_SOURCE:
        RUN(mask_source_kernel, 1);
    case FAULT_NEVER:
        RUN(never_kernel, 1);
    case FAULT_COPY_WAIT:
        RUN(copy_wait_kernel, 1);
    case FAULT_COPY_GROUPS:
        if (right)
            KERNEL_LAUNCH(copy_groups_kernel<0>, 1, THREADS, THREADS * sizeof(int), stream, words);
        else
            KERNEL_LAUNCH(copy_groups_kernel<1>, 1, THREADS, THREADS * sizeof(int), stream, words);
        break;
    case FAULT_COPY_BARRIER:
        RUN(copy_barrier_kernel, 1);
    case FAULT_COPY_REUSE:
        RUN(copy_reuse_kernel, 1);
    case FAULT_UNALIGNED:
        RUN(unaligned_kernel, 1);
    case FAULT_UNALIGNED_WORD:
        RUN(unaligned_word_kernel, 1);
    case FAULT_HOST_MEMORY:
        KERNEL_LAUNCH(host_memory_kernel, 1, THREADS, 0, stream, right, words, host);
        break;
    case FAULT_ATOMIC_PLAIN:
        RUN(atomic_plain_kernel, 1);
    case FAULTS:
        break;
    }
}

__global__ static void touch_kernel(int *words) {
    words[threadIdx.x] += 1;
}

extern "C" void faults_touch(int *words, cudaStream_t stream) {
    KERNEL_LAUNCH(touch_kernel, 1, THREADS, 0, stream, words);
}

/* ---- Traffic ---- */

__global__ static void copy_kernel(const float *from, float *to, unsigned size, bool by_columns) {
    unsigned line = blockIdx.x, at = blockIdx.y * 32 + threadIdx.x;
    size_t i = by_columns ? (size_t)at * size + line : (size_t)line * size + at;
    to[i] = from[i];
}

extern "C" void faults_copy(const float *from, float *to, unsigned size, bool by_columns, cudaStream_t stream) {
    KERNEL_LAUNCH(copy_kernel, dim3(size, size / 32), 32, 0, stream, from, to, size, by_columns);
}

__global__ static void copy_vectors_kernel(const uint4 *from, uint4 *to, unsigned count) {
    unsigned i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i < count)
        to[i] = from[i];
}

extern "C" void faults_copy_vectors(const void *from, void *to, unsigned count, cudaStream_t stream) {
    KERNEL_LAUNCH(copy_vectors_kernel, (count + 95) / 96, 96, 0, stream, (const uint4 *)from, (uint4 *)to, count);
}

__global__ static void transpose_stride_kernel(const float *from, float *to, unsigned stride) {
    KERNEL_SHARED(float, tile);
    for (unsigned row = 0; row < 32; row++)
        tile[row * stride + threadIdx.x] = from[row * 32 + threadIdx.x];
    __syncwarp();
    for (unsigned row = 0; row < 32; row++)
        to[row * 32 + threadIdx.x] = tile[threadIdx.x * stride + row];
}

extern "C" void faults_transpose(const float *from, float *to, unsigned stride, cudaStream_t stream) {
    KERNEL_LAUNCH(transpose_stride_kernel, 1, 32, 32 * stride * sizeof(float), stream, from, to, stride);
}

__global__ static void matrix_kernel(unsigned stride, uint32_t *out) {
    KERNEL_SHARED(uint16_t, tile);
    unsigned lane = threadIdx.x;
    uint32_t r[4];
    for (unsigned i = 0; i < 8; i++)
        tile[lane / 2 * stride + lane % 2 * 8 + i] = (uint16_t)(lane * 8 + i);
    __syncwarp();
    device_ldmatrix_x4(r, &tile[lane % 16 * stride + lane / 16 * 8]);
    for (unsigned i = 0; i < 4; i++)
        out[i * 32 + lane] = r[i];
}

extern "C" void faults_matrix(unsigned stride, uint32_t *out, cudaStream_t stream) {
    KERNEL_LAUNCH(matrix_kernel, 1, 32, 16 * stride * sizeof(uint16_t), stream, stride, out);
}

__global__ static void ragged_kernel(const int *from, int *to, unsigned rows) {
    int sum = 0;
    for (unsigned row = 0; row < rows - threadIdx.x % 2; row++)
        sum += from[row * 32 + threadIdx.x];
    to[threadIdx.x] = sum;
}

extern "C" void faults_ragged(const int *from, int *to, unsigned rows, cudaStream_t stream) {
    KERNEL_LAUNCH(ragged_kernel, 1, 32, 0, stream, from, to, rows);
}
