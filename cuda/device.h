/* SPDX-License-Identifier: Apache-2.0
 *
 * What kernels use that nvcc and the emulator (tests/emulator) write differently. Included by .cu files only;
 * everything else in them is plain CUDA C++: threadIdx, __syncthreads, __shfl_xor_sync, atomicAdd, __ldg, __dp4a and so
 * on, as far as tests/emulator/include/cuda_runtime.h knows it.
 *
 *   KERNEL_LAUNCH(kernel, grid, block, shared_bytes, stream, arguments...)
 *       The only way to launch. The kernel may be a template with its arguments: scale_kernel<64, 2>. Dynamic shared
 *       memory above 48 KiB is asked for here. Nothing waits; errors are seen by cudaGetLastError().
 *   KERNEL_SHARED(type, name)
 *       type *name: the block's dynamic shared memory, 16-byte aligned, undefined at first. There is no other shared
 *       memory.
 *   device_copy_async_16(to, from), device_copy_async_16_part(to, from, valid)
 *       cp.async of 16 bytes from global to shared memory past L1, both 16-byte aligned; of the second form only the
 * first `valid` (0 to 16) bytes are read and the others become 0. The destination must not be touched before the wait.
 *   device_copy_commit(), device_copy_wait<N>()
 *       Close a group of copies; wait until at most the N newest groups of this thread are under way. Other threads see
 *       the bytes after a barrier.
 *   device_mma_m16n8k16_f16, device_mma_m16n8k16_bf16 (float d[4], uint32_t a[4], uint32_t b[2], float c[4])
 *   device_mma_m16n8k32_s8 (int d[4], uint32_t a[4], uint32_t b[2], int c[4])
 *   device_mma_m16n8k16_s8 (int d[4], uint32_t a[2], uint32_t b[1], int c[4]): the first registers of k32
 *       d = a b + c by the whole warp, a row-major [16, k], b column-major [k, 8]; d == c is allowed. Fragments (PTX
 * ISA, "Matrix Fragments for mma.m16n8k16"), with g = lane / 4, t = lane % 4, each register's first element in its low
 *       bits:
 *           a[0] row g,     columns 2t, 2t+1          k32: columns 4t to 4t+3
 *           a[1] row g + 8, the same
 *           a[2] row g,     columns 2t+8, 2t+9        k32: columns 4t+16 to 4t+19
 *           a[3] row g + 8, the same
 *           b[0] rows 2t, 2t+1 of column g            k32: rows 4t to 4t+3
 *           b[1] rows 2t+8, 2t+9 of column g          k32: rows 4t+16 to 4t+19
 *           c, d [0], [1] row g, columns 2t, 2t+1; [2], [3] row g + 8, the same
 *   device_ldmatrix_x4(uint32_t r[4], shared), device_ldmatrix_x4_trans
 *       Four 8x8 matrices of 16-bit elements; lane 8 j + i gives the address of row i (16 bytes, aligned) of matrix j.
 *       r[j] of a lane: row g, elements 2t, 2t+1 of matrix j; _trans: rows 2t, 2t+1 of column g.
 *   device_pause()
 *       What a thread does again and again that waits for another device, or for the host.
 *   device_nanoseconds()
 *       A clock that goes on everywhere, to bound such a wait.
 */
#ifndef CUDA_DEVICE_H
#define CUDA_DEVICE_H

#include <stddef.h>
#include <stdint.h>

#include <cuda_runtime.h>

#define KERNEL_LAUNCH(...) DEVICE_LAUNCH(#__VA_ARGS__, __VA_ARGS__)
#define KERNEL_SHARED(type, name) type *name = (type *)device_shared_memory()

#ifdef __CUDACC__

#define DEVICE_LAUNCH(text, ...) device_launch(__VA_ARGS__)

template <typename... P, typename... A>
static inline void device_launch(
    void (*kernel)(P...), dim3 grid, dim3 block, size_t shared_bytes, cudaStream_t stream, A... arguments) {
    if (shared_bytes > 48 * 1024)
        cudaFuncSetAttribute((const void *)kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, (int)shared_bytes);
    kernel<<<grid, block, shared_bytes, stream>>>(static_cast<P>(arguments)...);
}

static __device__ __forceinline__ void *device_shared_memory() {
    extern __shared__ uint4 device_shared_bytes[];
    return device_shared_bytes;
}

static __device__ __forceinline__ void device_copy_async_16(void *to, const void *from) {
    unsigned address = (unsigned)__cvta_generic_to_shared(to);
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(address), "l"(from) : "memory");
}

static __device__ __forceinline__ void device_copy_async_16_part(void *to, const void *from, unsigned valid) {
    unsigned address = (unsigned)__cvta_generic_to_shared(to);
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(address), "l"(from), "r"(valid) : "memory");
}

static __device__ __forceinline__ void device_copy_commit() {
    asm volatile("cp.async.commit_group;" ::: "memory");
}

template <unsigned GROUPS> static __device__ __forceinline__ void device_copy_wait() {
    asm volatile("cp.async.wait_group %0;" ::"n"(GROUPS) : "memory");
}

static __device__ __forceinline__ void device_pause() {
    __nanosleep(40);
}

static __device__ __forceinline__ uint64_t device_nanoseconds() {
    uint64_t time;
    asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(time)::"memory");
    return time;
}

static __device__ __forceinline__ void device_mma_m16n8k16_f16(
    float *d, const uint32_t *a, const uint32_t *b, const float *c) {
    asm volatile(
        "mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 "
        "{%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%10, %11, %12, %13};"
        : "=f"(d[0]), "=f"(d[1]), "=f"(d[2]), "=f"(d[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]), "f"(c[0]), "f"(c[1]), "f"(c[2]), "f"(c[3]));
}

static __device__ __forceinline__ void device_mma_m16n8k16_bf16(
    float *d, const uint32_t *a, const uint32_t *b, const float *c) {
    asm volatile(
        "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 "
        "{%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%10, %11, %12, %13};"
        : "=f"(d[0]), "=f"(d[1]), "=f"(d[2]), "=f"(d[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]), "f"(c[0]), "f"(c[1]), "f"(c[2]), "f"(c[3]));
}

static __device__ __forceinline__ void device_mma_m16n8k32_s8(
    int *d, const uint32_t *a, const uint32_t *b, const int *c) {
    asm volatile(
        "mma.sync.aligned.m16n8k32.row.col.s32.s8.s8.s32 "
        "{%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%10, %11, %12, %13};"
        : "=r"(d[0]), "=r"(d[1]), "=r"(d[2]), "=r"(d[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]), "r"(c[0]), "r"(c[1]), "r"(c[2]), "r"(c[3]));
}

static __device__ __forceinline__ void device_mma_m16n8k16_s8(
    int *d, const uint32_t *a, const uint32_t *b, const int *c) {
    asm volatile("mma.sync.aligned.m16n8k16.row.col.s32.s8.s8.s32 "
                 "{%0, %1, %2, %3}, {%4, %5}, {%6}, {%7, %8, %9, %10};"
                 : "=r"(d[0]), "=r"(d[1]), "=r"(d[2]), "=r"(d[3])
                 : "r"(a[0]), "r"(a[1]), "r"(b[0]), "r"(c[0]), "r"(c[1]), "r"(c[2]), "r"(c[3]));
}

static __device__ __forceinline__ void device_ldmatrix_x4(uint32_t *r, const void *row) {
    unsigned address = (unsigned)__cvta_generic_to_shared(row);
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
                 : "r"(address)
                 : "memory");
}

static __device__ __forceinline__ void device_ldmatrix_x4_trans(uint32_t *r, const void *row) {
    unsigned address = (unsigned)__cvta_generic_to_shared(row);
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
                 : "r"(address)
                 : "memory");
}

#else /* the emulator */

#define DEVICE_LAUNCH(text, ...) emulator_launch_kernel(text, __VA_ARGS__)

static inline __attribute__((always_inline, unused)) void *device_shared_memory() {
    return emulator_shared();
}

EMULATOR_INLINE void device_copy_async_16(void *to, const void *from) {
    emulator_copy_async(to, from, 16);
}

EMULATOR_INLINE void device_copy_async_16_part(void *to, const void *from, unsigned valid) {
    emulator_copy_async(to, from, valid);
}

EMULATOR_INLINE void device_copy_commit() {
    emulator_copy_commit();
}

template <unsigned GROUPS> EMULATOR_INLINE void device_copy_wait() {
    emulator_copy_wait(GROUPS);
}

EMULATOR_INLINE void device_pause() {
    emulator_pause();
}

EMULATOR_INLINE uint64_t device_nanoseconds() {
    return emulator_nanoseconds();
}

/* The callers' arrays are copied, so that only the copies have addresses: those of registers have none. */
template <typename T>
EMULATOR_INLINE void device_mma(
    enum emulator_warp_kind kind, T *d, const uint32_t *a, const uint32_t *b, const T *c, const char *file, int line) {
    uint32_t a_[4] = {a[0], a[1], a[2], a[3]}, b_[2] = {b[0], b[1]}, d_[4];
    uint32_t c_[4] = {(uint32_t)emulator_bits(c[0]), (uint32_t)emulator_bits(c[1]), (uint32_t)emulator_bits(c[2]),
        (uint32_t)emulator_bits(c[3])};
    emulator_mma(kind, d_, a_, b_, c_, file, line);
    for (int i = 0; i < 4; i++)
        d[i] = emulator_value<T>(d_[i]);
}

EMULATOR_INLINE void device_mma_m16n8k16_f16(
    float *d, const uint32_t *a, const uint32_t *b, const float *c, EMULATOR_HERE) {
    device_mma(EMULATOR_MMA_F16, d, a, b, c, file, line);
}

EMULATOR_INLINE void device_mma_m16n8k16_bf16(
    float *d, const uint32_t *a, const uint32_t *b, const float *c, EMULATOR_HERE) {
    device_mma(EMULATOR_MMA_BF16, d, a, b, c, file, line);
}

EMULATOR_INLINE void device_mma_m16n8k32_s8(int *d, const uint32_t *a, const uint32_t *b, const int *c, EMULATOR_HERE) {
    device_mma(EMULATOR_MMA_S8, d, a, b, c, file, line);
}

EMULATOR_INLINE void device_mma_m16n8k16_s8(int *d, const uint32_t *a, const uint32_t *b, const int *c, EMULATOR_HERE) {
    const uint32_t a_[4] = {a[0], a[1]}, b_[2] = {b[0]};
    device_mma(EMULATOR_MMA_S8_K16, d, a_, b_, c, file, line);
}

EMULATOR_INLINE void device_ldmatrix_x4(uint32_t *r, const void *row, EMULATOR_HERE) {
    uint32_t r_[4];
    emulator_ldmatrix(EMULATOR_LDMATRIX, r_, row, file, line);
    for (int i = 0; i < 4; i++)
        r[i] = r_[i];
}

EMULATOR_INLINE void device_ldmatrix_x4_trans(uint32_t *r, const void *row, EMULATOR_HERE) {
    uint32_t r_[4];
    emulator_ldmatrix(EMULATOR_LDMATRIX_TRANS, r_, row, file, line);
    for (int i = 0; i < 4; i++)
        r[i] = r_[i];
}

#endif

#endif
