/* SPDX-License-Identifier: Apache-2.0
 *
 * The device side of CUDA C++ for kernels compiled as C++ (emulator_device.h has the calls behind it): indices,
 * barriers, warp functions, atomics and integer and conversion intrinsics, with the meaning of NVIDIA's "CUDA C++
 * Programming Guide" (13) and "CUDA Math API". Only what this project uses: what is missing here does not compile.
 *
 * Stricter than the device:
 *   - all threads that are named in a mask, and all threads of a block at __syncthreads, must be alive and come to the
 *     same line;
 *   - __activemask() is all lanes that have not ended: masks have to be known, not asked for;
 *   - there is no static shared memory: KERNEL_SHARED (cuda/device.h).
 */
#ifndef EMULATOR_CUDA_RUNTIME_H
#define EMULATOR_CUDA_RUNTIME_H

#include <float.h>
#include <limits.h>
#include <math.h>
#include <stdint.h>
#include <string.h>

#include "cuda_runtime_api.h"
#include "vector_types.h"
#include "emulator_device.h"

#define __global__
#define __device__
#define __host__
#define __constant__
#define __forceinline__ inline __attribute__((always_inline))
#define __launch_bounds__(...)
#define __align__(n) alignas(n)
#define __grid_constant__
#define __shared__ static_assert(false, "shared memory is made by KERNEL_SHARED (cuda/device.h)");

#define EMULATOR_HERE const char *file = __builtin_FILE(), int line = __builtin_LINE()
#define EMULATOR_INLINE static inline __attribute__((always_inline, unused))

/* Indices: each member converts to unsigned; the compiler may ask once per kernel. */
#define EMULATOR_INDEX(name)                                                                                           \
    struct emulator_##name {                                                                                           \
        struct {                                                                                                       \
            __attribute__((always_inline)) operator unsigned() const {                                                 \
                return emulator_##name##_x();                                                                          \
            }                                                                                                          \
        } x;                                                                                                           \
        struct {                                                                                                       \
            __attribute__((always_inline)) operator unsigned() const {                                                 \
                return emulator_##name##_y();                                                                          \
            }                                                                                                          \
        } y;                                                                                                           \
        struct {                                                                                                       \
            __attribute__((always_inline)) operator unsigned() const {                                                 \
                return emulator_##name##_z();                                                                          \
            }                                                                                                          \
        } z;                                                                                                           \
    };                                                                                                                 \
    static const struct emulator_##name name __attribute__((unused)) = {}

EMULATOR_INDEX(threadIdx);
EMULATOR_INDEX(blockIdx);
EMULATOR_INDEX(blockDim);
EMULATOR_INDEX(gridDim);
enum { warpSize = 32 };

/* Barriers and fences. */
EMULATOR_INLINE void __syncthreads(EMULATOR_HERE) {
    emulator_barrier(EMULATOR_BARRIER, 0, file, line);
}
EMULATOR_INLINE int __syncthreads_count(int predicate, EMULATOR_HERE) {
    return emulator_barrier(EMULATOR_BARRIER_COUNT, predicate, file, line);
}
EMULATOR_INLINE int __syncthreads_and(int predicate, EMULATOR_HERE) {
    return emulator_barrier(EMULATOR_BARRIER_AND, predicate, file, line);
}
EMULATOR_INLINE int __syncthreads_or(int predicate, EMULATOR_HERE) {
    return emulator_barrier(EMULATOR_BARRIER_OR, predicate, file, line);
}
EMULATOR_INLINE void __syncwarp(unsigned mask = 0xffffffff, EMULATOR_HERE) {
    emulator_warp(EMULATOR_SYNC, mask, 0, 0, 32, file, line);
}
EMULATOR_INLINE void __threadfence() {
    __atomic_signal_fence(__ATOMIC_SEQ_CST);
    emulator_fence();
}
EMULATOR_INLINE void __threadfence_block() {
    emulator_fence();
}
EMULATOR_INLINE void __threadfence_system() {
    emulator_fence();
}

/* Votes. */
EMULATOR_INLINE unsigned __activemask() {
    return emulator_active_mask();
}
EMULATOR_INLINE unsigned __ballot_sync(unsigned mask, int predicate, EMULATOR_HERE) {
    return (unsigned)emulator_warp(EMULATOR_BALLOT, mask, predicate != 0, 0, 32, file, line);
}
EMULATOR_INLINE int __any_sync(unsigned mask, int predicate, EMULATOR_HERE) {
    return emulator_warp(EMULATOR_BALLOT, mask, predicate != 0, 0, 32, file, line) != 0;
}
EMULATOR_INLINE int __all_sync(unsigned mask, int predicate, EMULATOR_HERE) {
    return emulator_warp(EMULATOR_BALLOT, mask, predicate == 0, 0, 32, file, line) == 0;
}
template <typename T> EMULATOR_INLINE unsigned __match_any_sync(unsigned mask, T value, EMULATOR_HERE) {
    return (unsigned)emulator_warp(EMULATOR_MATCH, mask, emulator_bits(value), 0, 32, file, line);
}

/* Shuffles of values of up to 8 bytes. */
template <typename T> EMULATOR_INLINE T __shfl_sync(unsigned mask, T value, int lane, int width = 32, EMULATOR_HERE) {
    return emulator_value<T>(
        emulator_warp(EMULATOR_SHUFFLE, mask, emulator_bits(value), (unsigned)lane, (unsigned)width, file, line));
}
template <typename T>
EMULATOR_INLINE T __shfl_up_sync(unsigned mask, T value, unsigned delta, int width = 32, EMULATOR_HERE) {
    return emulator_value<T>(
        emulator_warp(EMULATOR_SHUFFLE_UP, mask, emulator_bits(value), delta, (unsigned)width, file, line));
}
template <typename T>
EMULATOR_INLINE T __shfl_down_sync(unsigned mask, T value, unsigned delta, int width = 32, EMULATOR_HERE) {
    return emulator_value<T>(
        emulator_warp(EMULATOR_SHUFFLE_DOWN, mask, emulator_bits(value), delta, (unsigned)width, file, line));
}
template <typename T>
EMULATOR_INLINE T __shfl_xor_sync(unsigned mask, T value, int lanes, int width = 32, EMULATOR_HERE) {
    return emulator_value<T>(
        emulator_warp(EMULATOR_SHUFFLE_XOR, mask, emulator_bits(value), (unsigned)lanes, (unsigned)width, file, line));
}

/* Reductions of sm_80. */
EMULATOR_INLINE unsigned __reduce_add_sync(unsigned mask, unsigned value, EMULATOR_HERE) {
    return (unsigned)emulator_warp(EMULATOR_REDUCE_ADD, mask, value, 0, 32, file, line);
}
EMULATOR_INLINE int __reduce_add_sync(unsigned mask, int value, EMULATOR_HERE) {
    return (int)emulator_warp(EMULATOR_REDUCE_ADD, mask, (unsigned)value, 0, 32, file, line);
}
EMULATOR_INLINE unsigned __reduce_min_sync(unsigned mask, unsigned value, EMULATOR_HERE) {
    return (unsigned)emulator_warp(EMULATOR_REDUCE_MIN_UNSIGNED, mask, value, 0, 32, file, line);
}
EMULATOR_INLINE int __reduce_min_sync(unsigned mask, int value, EMULATOR_HERE) {
    return (int)emulator_warp(EMULATOR_REDUCE_MIN, mask, (unsigned)value, 0, 32, file, line);
}
EMULATOR_INLINE unsigned __reduce_max_sync(unsigned mask, unsigned value, EMULATOR_HERE) {
    return (unsigned)emulator_warp(EMULATOR_REDUCE_MAX_UNSIGNED, mask, value, 0, 32, file, line);
}
EMULATOR_INLINE int __reduce_max_sync(unsigned mask, int value, EMULATOR_HERE) {
    return (int)emulator_warp(EMULATOR_REDUCE_MAX, mask, (unsigned)value, 0, 32, file, line);
}
EMULATOR_INLINE unsigned __reduce_and_sync(unsigned mask, unsigned value, EMULATOR_HERE) {
    return (unsigned)emulator_warp(EMULATOR_REDUCE_AND, mask, value, 0, 32, file, line);
}
EMULATOR_INLINE unsigned __reduce_or_sync(unsigned mask, unsigned value, EMULATOR_HERE) {
    return (unsigned)emulator_warp(EMULATOR_REDUCE_OR, mask, value, 0, 32, file, line);
}
EMULATOR_INLINE unsigned __reduce_xor_sync(unsigned mask, unsigned value, EMULATOR_HERE) {
    return (unsigned)emulator_warp(EMULATOR_REDUCE_XOR, mask, value, 0, 32, file, line);
}

/* Atomics return the value before. */
#define EMULATOR_ATOMIC(type)                                                                                          \
    EMULATOR_INLINE type atomicAdd(type *at, type value) {                                                             \
        return emulator_value<type>(                                                                                   \
            emulator_atomic(EMULATOR_ADD, at, emulator_number<type>(), emulator_bits(value), 0));                      \
    }                                                                                                                  \
    EMULATOR_INLINE type atomicExch(type *at, type value) {                                                            \
        return emulator_value<type>(                                                                                   \
            emulator_atomic(EMULATOR_EXCHANGE, at, emulator_number<type>(), emulator_bits(value), 0));                 \
    }
#define EMULATOR_ATOMIC_INTEGER(type)                                                                                  \
    EMULATOR_ATOMIC(type)                                                                                              \
    EMULATOR_INLINE type atomicMax(type *at, type value) {                                                             \
        return emulator_value<type>(                                                                                   \
            emulator_atomic(EMULATOR_MAX, at, emulator_number<type>(), emulator_bits(value), 0));                      \
    }                                                                                                                  \
    EMULATOR_INLINE type atomicMin(type *at, type value) {                                                             \
        return emulator_value<type>(                                                                                   \
            emulator_atomic(EMULATOR_MIN, at, emulator_number<type>(), emulator_bits(value), 0));                      \
    }                                                                                                                  \
    EMULATOR_INLINE type atomicAnd(type *at, type value) {                                                             \
        return emulator_value<type>(                                                                                   \
            emulator_atomic(EMULATOR_AND, at, emulator_number<type>(), emulator_bits(value), 0));                      \
    }                                                                                                                  \
    EMULATOR_INLINE type atomicOr(type *at, type value) {                                                              \
        return emulator_value<type>(                                                                                   \
            emulator_atomic(EMULATOR_OR, at, emulator_number<type>(), emulator_bits(value), 0));                       \
    }                                                                                                                  \
    EMULATOR_INLINE type atomicXor(type *at, type value) {                                                             \
        return emulator_value<type>(                                                                                   \
            emulator_atomic(EMULATOR_XOR, at, emulator_number<type>(), emulator_bits(value), 0));                      \
    }                                                                                                                  \
    EMULATOR_INLINE type atomicCAS(type *at, type expected, type value) {                                              \
        return emulator_value<type>(emulator_atomic(                                                                   \
            EMULATOR_COMPARE, at, emulator_number<type>(), emulator_bits(value), emulator_bits(expected)));            \
    }
EMULATOR_ATOMIC_INTEGER(int)
EMULATOR_ATOMIC_INTEGER(unsigned)
EMULATOR_ATOMIC_INTEGER(unsigned long long)
EMULATOR_ATOMIC(float)
EMULATOR_INLINE unsigned atomicInc(unsigned *at, unsigned limit) {
    return (unsigned)emulator_atomic(EMULATOR_INCREMENT, at, EMULATOR_UNSIGNED, limit, 0);
}
EMULATOR_INLINE unsigned atomicSub(unsigned *at, unsigned value) {
    return atomicAdd(at, 0u - value);
}
EMULATOR_INLINE int atomicSub(int *at, int value) {
    return atomicAdd(at, (int)(0u - (unsigned)value));
}

/* Loads and stores with cache hints: plain ones here. */
template <typename T> EMULATOR_INLINE T __ldg(const T *from) {
    return *from;
}
template <typename T> EMULATOR_INLINE T __ldcg(const T *from) {
    return *from;
}
template <typename T> EMULATOR_INLINE T __ldca(const T *from) {
    return *from;
}
template <typename T> EMULATOR_INLINE T __ldcs(const T *from) {
    return *from;
}
template <typename T> EMULATOR_INLINE void __stcg(T *to, T value) {
    *to = value;
}
template <typename T> EMULATOR_INLINE void __stcs(T *to, T value) {
    *to = value;
}

/* Integers. */
EMULATOR_INLINE int __popc(unsigned x) {
    return __builtin_popcount(x);
}
EMULATOR_INLINE int __popcll(unsigned long long x) {
    return __builtin_popcountll(x);
}
EMULATOR_INLINE int __ffs(int x) {
    return __builtin_ffs(x);
}
EMULATOR_INLINE int __ffsll(long long x) {
    return __builtin_ffsll(x);
}
EMULATOR_INLINE int __clz(int x) {
    return x == 0 ? 32 : __builtin_clz((unsigned)x);
}
EMULATOR_INLINE int __clzll(long long x) {
    return x == 0 ? 64 : __builtin_clzll((unsigned long long)x);
}
EMULATOR_INLINE unsigned __brev(unsigned x) {
    unsigned result = 0;
    for (int bit = 0; bit < 32; bit++)
        result |= (x >> bit & 1u) << (31 - bit);
    return result;
}
EMULATOR_INLINE unsigned __umulhi(unsigned a, unsigned b) {
    return (unsigned)((uint64_t)a * b >> 32);
}
EMULATOR_INLINE int __mulhi(int a, int b) {
    return (int)((int64_t)a * b >> 32);
}
EMULATOR_INLINE unsigned long long __umul64hi(unsigned long long a, unsigned long long b) {
    return (unsigned long long)((unsigned __int128)a * b >> 64);
}
EMULATOR_INLINE unsigned __funnelshift_l(unsigned low, unsigned high, unsigned shift) {
    return (unsigned)(((uint64_t)high << 32 | low) << (shift & 31) >> 32);
}
EMULATOR_INLINE unsigned __funnelshift_r(unsigned low, unsigned high, unsigned shift) {
    return (unsigned)(((uint64_t)high << 32 | low) >> (shift & 31));
}
EMULATOR_INLINE unsigned __byte_perm(unsigned x, unsigned y, unsigned selector) {
    uint64_t bytes = (uint64_t)y << 32 | x;
    unsigned result = 0;
    for (int i = 0; i < 4; i++) {
        unsigned choice = selector >> 4 * i & 15;
        unsigned byte = (unsigned)(bytes >> 8 * (choice & 7)) & 255;
        if (choice & 8)
            byte = byte & 128 ? 255 : 0;
        result |= byte << 8 * i;
    }
    return result;
}
EMULATOR_INLINE int __dp4a(int a, int b, int c) {
    unsigned sum = (unsigned)c;
    for (int i = 0; i < 4; i++)
        sum += (unsigned)((int)(int8_t)((unsigned)a >> 8 * i) * (int)(int8_t)((unsigned)b >> 8 * i));
    return (int)sum;
}
EMULATOR_INLINE unsigned __dp4a(unsigned a, unsigned b, unsigned c) {
    for (int i = 0; i < 4; i++)
        c += (a >> 8 * i & 255) * (b >> 8 * i & 255);
    return c;
}
/* Four bytes at once. */
EMULATOR_INLINE unsigned __vadd4(unsigned a, unsigned b) {
    return ((a & 0x7f7f7f7f) + (b & 0x7f7f7f7f)) ^ ((a ^ b) & 0x80808080);
}
EMULATOR_INLINE unsigned __vsub4(unsigned a, unsigned b) {
    return ((a | 0x80808080) - (b & 0x7f7f7f7f)) ^ ((a ^ ~b) & 0x80808080);
}

/* Floats. */
EMULATOR_INLINE float __int_as_float(int x) {
    return emulator_value<float>((unsigned)x);
}
EMULATOR_INLINE float __uint_as_float(unsigned x) {
    return emulator_value<float>(x);
}
EMULATOR_INLINE int __float_as_int(float x) {
    return (int)emulator_bits(x);
}
EMULATOR_INLINE unsigned __float_as_uint(float x) {
    return (unsigned)emulator_bits(x);
}
EMULATOR_INLINE double __longlong_as_double(long long x) {
    return emulator_value<double>((uint64_t)x);
}
EMULATOR_INLINE long long __double_as_longlong(double x) {
    return (long long)emulator_bits(x);
}
/* Conversions to integers saturate, and NaN is 0 (as the PTX instruction cvt). */
EMULATOR_INLINE int __float2int_rn(float x) {
    return x != x ? 0 : x >= 2147483648.0f ? INT_MAX : x <= -2147483648.0f ? INT_MIN : (int)rintf(x);
}
EMULATOR_INLINE int __float2int_rz(float x) {
    return x != x ? 0 : x >= 2147483648.0f ? INT_MAX : x <= -2147483648.0f ? INT_MIN : (int)x;
}
EMULATOR_INLINE int __float2int_rd(float x) {
    return __float2int_rz(floorf(x));
}
EMULATOR_INLINE unsigned __float2uint_rn(float x) {
    return !(x > 0.0f) ? 0 : x >= 4294967296.0f ? UINT_MAX : (unsigned)rintf(x);
}
EMULATOR_INLINE unsigned __float2uint_rz(float x) {
    return !(x > 0.0f) ? 0 : x >= 4294967296.0f ? UINT_MAX : (unsigned)x;
}
EMULATOR_INLINE long long __float2ll_rn(float x) {
    return x != x ? 0 : x >= 0x1p63f ? LLONG_MAX : x <= -0x1p63f ? LLONG_MIN : (long long)rintf(x);
}
EMULATOR_INLINE unsigned long long __float2ull_rn(float x) {
    return !(x > 0.0f) ? 0 : x >= 0x1p64f ? ULLONG_MAX : (unsigned long long)rintf(x);
}
EMULATOR_INLINE long long __double2ll_rn(double x) {
    return x != x ? 0 : x >= 0x1p63 ? LLONG_MAX : x <= -0x1p63 ? LLONG_MIN : (long long)rint(x);
}
EMULATOR_INLINE float __int2float_rn(int x) {
    return (float)x;
}
EMULATOR_INLINE float __uint2float_rn(unsigned x) {
    return (float)x;
}
EMULATOR_INLINE float __ull2float_rn(unsigned long long x) {
    return (float)x;
}
EMULATOR_INLINE float __ll2float_rn(long long x) {
    return (float)x;
}
EMULATOR_INLINE float __double2float_rn(double x) {
    return (float)x;
}
EMULATOR_INLINE float __fadd_rn(float a, float b) {
    return a + b;
}
EMULATOR_INLINE float __fsub_rn(float a, float b) {
    return a - b;
}
EMULATOR_INLINE float __fmul_rn(float a, float b) {
    return a * b;
}
EMULATOR_INLINE float __fdiv_rn(float a, float b) {
    return a / b;
}
EMULATOR_INLINE float __fmaf_rn(float a, float b, float c) {
    return fmaf(a, b, c);
}
EMULATOR_INLINE float __fsqrt_rn(float x) {
    return sqrtf(x);
}
EMULATOR_INLINE float __frcp_rn(float x) {
    return 1.0f / x;
}
EMULATOR_INLINE double __dadd_rn(double a, double b) {
    return a + b;
}
EMULATOR_INLINE double __dmul_rn(double a, double b) {
    return a * b;
}
EMULATOR_INLINE double __fma_rn(double a, double b, double c) {
    return fma(a, b, c);
}
EMULATOR_INLINE float rsqrtf(float x) {
    return 1.0f / sqrtf(x);
}
EMULATOR_INLINE float __saturatef(float x) {
    return x > 0.0f ? (x < 1.0f ? x : 1.0f) : 0.0f;
}
EMULATOR_INLINE float normcdff(float x) {
    return 0.5f * erfcf(-x * 0.70710678f);
}

#define EMULATOR_MINMAX(type)                                                                                          \
    EMULATOR_INLINE type min(type a, type b) {                                                                         \
        return a < b ? a : b;                                                                                          \
    }                                                                                                                  \
    EMULATOR_INLINE type max(type a, type b) {                                                                         \
        return a > b ? a : b;                                                                                          \
    }
EMULATOR_MINMAX(int)
EMULATOR_MINMAX(unsigned)
EMULATOR_MINMAX(long)
EMULATOR_MINMAX(unsigned long)
EMULATOR_MINMAX(long long)
EMULATOR_MINMAX(unsigned long long)
EMULATOR_INLINE unsigned min(int a, unsigned b) {
    return min((unsigned)a, b);
}
EMULATOR_INLINE unsigned min(unsigned a, int b) {
    return min(a, (unsigned)b);
}
EMULATOR_INLINE unsigned max(int a, unsigned b) {
    return max((unsigned)a, b);
}
EMULATOR_INLINE unsigned max(unsigned a, int b) {
    return max(a, (unsigned)b);
}
EMULATOR_INLINE float min(float a, float b) {
    return fminf(a, b);
}
EMULATOR_INLINE float max(float a, float b) {
    return fmaxf(a, b);
}

/* Copies that the compiler does not turn into single accesses are checked as a whole. */
#define memcpy(to, from, bytes)                                                                                        \
    (__builtin_constant_p(bytes) && (bytes) <= 16 && ((bytes) & ((bytes)-1)) == 0 ? __builtin_memcpy(to, from, bytes)  \
                                                                                  : emulator_memcpy(to, from, bytes))
#define memset(to, value, bytes) emulator_memset(to, value, bytes)

/* Types of pointers that CUDA's header takes as templates. */
template <typename T> static inline cudaError_t cudaMalloc(T **memory, size_t bytes) {
    return cudaMalloc((void **)memory, bytes);
}
template <typename T> static inline cudaError_t cudaHostAlloc(T **memory, size_t bytes, unsigned flags) {
    return cudaHostAlloc((void **)memory, bytes, flags);
}
template <typename T> static inline cudaError_t cudaMallocHost(T **memory, size_t bytes) {
    return cudaMallocHost((void **)memory, bytes);
}
template <typename... P>
static inline cudaError_t cudaFuncSetAttribute(void (*kernel)(P...), enum cudaFuncAttribute attribute, int value) {
    return cudaFuncSetAttribute((const void *)kernel, attribute, value);
}
template <typename... P>
static inline cudaError_t cudaFuncGetAttributes(struct cudaFuncAttributes *attributes, void (*kernel)(P...)) {
    return cudaFuncGetAttributes(attributes, (const void *)kernel);
}
template <typename... P>
static inline cudaError_t cudaOccupancyMaxActiveBlocksPerMultiprocessor(
    int *blocks, void (*kernel)(P...), int block_threads, size_t shared_bytes) {
    return cudaOccupancyMaxActiveBlocksPerMultiprocessor(blocks, (const void *)kernel, block_threads, shared_bytes);
}

#endif
