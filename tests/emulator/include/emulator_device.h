/* SPDX-License-Identifier: Apache-2.0
 *
 * What cuda_runtime.h and cuda/device.h of the emulated build call: the emulator's own entry points for kernels.
 * Kernels never name them. Every call that needs other lanes or threads carries its source line: lanes that meet must
 * have come from the same one.
 */
#ifndef EMULATOR_DEVICE_H
#define EMULATOR_DEVICE_H

#include <stddef.h>
#include <stdint.h>
#include <tuple>
#include <type_traits>

#include "cuda_runtime_api.h"
#include "vector_types.h"

extern "C" {

/* Indices of the running thread. They never change within a kernel: const. */
unsigned emulator_threadIdx_x(void) __attribute__((const));
unsigned emulator_threadIdx_y(void) __attribute__((const));
unsigned emulator_threadIdx_z(void) __attribute__((const));
unsigned emulator_blockIdx_x(void) __attribute__((const));
unsigned emulator_blockIdx_y(void) __attribute__((const));
unsigned emulator_blockIdx_z(void) __attribute__((const));
unsigned emulator_blockDim_x(void) __attribute__((const));
unsigned emulator_blockDim_y(void) __attribute__((const));
unsigned emulator_blockDim_z(void) __attribute__((const));
unsigned emulator_gridDim_x(void) __attribute__((const));
unsigned emulator_gridDim_y(void) __attribute__((const));
unsigned emulator_gridDim_z(void) __attribute__((const));
void *emulator_shared(void) __attribute__((const)); /* the block's dynamic shared memory */
unsigned emulator_active_mask(void);
void emulator_fence(void);
/* The thread waits for something outside of the launch: other threads, other devices and the host go on. */
void emulator_pause(void);
uint64_t emulator_nanoseconds(void);

enum emulator_barrier_kind { EMULATOR_BARRIER, EMULATOR_BARRIER_COUNT, EMULATOR_BARRIER_AND, EMULATOR_BARRIER_OR };
int emulator_barrier(enum emulator_barrier_kind kind, int predicate, const char *file, int line);

enum emulator_warp_kind {
    EMULATOR_SYNC,
    EMULATOR_BALLOT,
    EMULATOR_MATCH,
    EMULATOR_SHUFFLE,
    EMULATOR_SHUFFLE_UP,
    EMULATOR_SHUFFLE_DOWN,
    EMULATOR_SHUFFLE_XOR,
    EMULATOR_REDUCE_ADD,
    EMULATOR_REDUCE_MIN,
    EMULATOR_REDUCE_MIN_UNSIGNED,
    EMULATOR_REDUCE_MAX,
    EMULATOR_REDUCE_MAX_UNSIGNED,
    EMULATOR_REDUCE_AND,
    EMULATOR_REDUCE_OR,
    EMULATOR_REDUCE_XOR,
    EMULATOR_MMA_F16,
    EMULATOR_MMA_BF16,
    EMULATOR_MMA_S8,
    EMULATOR_MMA_S8_K16,
    EMULATOR_LDMATRIX,
    EMULATOR_LDMATRIX_TRANS
};
/* argument: source lane, delta or lanes of a shuffle. */
uint64_t emulator_warp(enum emulator_warp_kind kind, unsigned mask, uint64_t value, unsigned argument, unsigned width,
    const char *file, int line);

/* d = a b + c by the whole warp; fragments as uint32_t: d, c [4], a [4], b [2]. */
void emulator_mma(enum emulator_warp_kind kind, uint32_t *d, const uint32_t *a, const uint32_t *b, const uint32_t *c,
    const char *file, int line);
/* Four 8x8 matrices of 16-bit numbers, row i of matrix j at the address of lane 8 * j + i. */
void emulator_ldmatrix(enum emulator_warp_kind kind, uint32_t *result, const void *row, const char *file, int line);

enum emulator_number_kind { EMULATOR_INT, EMULATOR_UNSIGNED, EMULATOR_UNSIGNED_LONG_LONG, EMULATOR_FLOAT };
enum emulator_atomic_kind {
    EMULATOR_ADD,
    EMULATOR_EXCHANGE,
    EMULATOR_MAX,
    EMULATOR_MIN,
    EMULATOR_AND,
    EMULATOR_OR,
    EMULATOR_XOR,
    EMULATOR_COMPARE,
    EMULATOR_INCREMENT
};
uint64_t emulator_atomic(
    enum emulator_atomic_kind kind, void *at, enum emulator_number_kind number, uint64_t value, uint64_t expected);

/* Asynchronous copies of 16 bytes to shared memory; `valid` bytes are copied, the others become 0. */
void emulator_copy_async(void *to, const void *from, unsigned valid);
void emulator_copy_commit(void);
void emulator_copy_wait(unsigned groups);

void *emulator_memcpy(void *to, const void *from, size_t bytes);
void *emulator_memset(void *to, int value, size_t bytes);

/* name: up to the first comma outside brackets. arguments: copied, run by invoke(arguments) once per thread. */
cudaError_t emulator_launch(const char *name, struct dim3 grid, struct dim3 block, size_t shared_bytes,
    cudaStream_t stream, void (*invoke)(const void *arguments), const void *arguments, size_t arguments_bytes);
}

template <typename T> static inline __attribute__((always_inline)) uint64_t emulator_bits(T value) {
    static_assert(sizeof(T) <= 8, "at most 8 bytes");
    uint64_t bits = 0;
    __builtin_memcpy(&bits, &value, sizeof(T));
    return bits;
}

template <typename T> static inline __attribute__((always_inline)) T emulator_value(uint64_t bits) {
    T value;
    __builtin_memcpy((void *)&value, &bits, sizeof(T));
    return value;
}

template <typename T> static inline constexpr enum emulator_number_kind emulator_number() {
    return std::is_same<T, float>::value ? EMULATOR_FLOAT
           : sizeof(T) == 8              ? EMULATOR_UNSIGNED_LONG_LONG
           : std::is_signed<T>::value    ? EMULATOR_INT
                                         : EMULATOR_UNSIGNED;
}

template <typename... P> struct emulator_call {
    void (*kernel)(P...);
    std::tuple<P...> arguments;
};

template <typename... P> static void emulator_invoke(const void *call_) {
    const struct emulator_call<P...> *call = (const struct emulator_call<P...> *)call_;
    std::apply(call->kernel, call->arguments);
}

/* Arguments are evaluated here, as at a launch on the device, whenever the kernel runs. */
template <typename... P, typename... A>
static inline cudaError_t emulator_launch_kernel(const char *name, void (*kernel)(P...), struct dim3 grid,
    struct dim3 block, size_t shared_bytes, cudaStream_t stream, A... arguments) {
    static_assert((std::is_trivially_destructible<P>::value && ...), "arguments of kernels are plain data");
    struct emulator_call<P...> call = {
        kernel, std::tuple<P...>(static_cast<P>(arguments)...)
    };
    return emulator_launch(name, grid, block, shared_bytes, stream, emulator_invoke<P...>, &call, sizeof(call));
}

#endif
