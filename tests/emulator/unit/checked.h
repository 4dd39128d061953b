/* SPDX-License-Identifier: Apache-2.0
 *
 * Calls of the runtime that must succeed, for the emulator's tests; include cmocka.h first.
 */
#ifndef TESTS_EMULATOR_UNIT_CHECKED_H
#define TESTS_EMULATOR_UNIT_CHECKED_H

#include <cuda_runtime_api.h>

static inline void check(cudaError_t error) {
    if (error != cudaSuccess)
        fail_msg("%s", cudaGetErrorString(error));
}

/* Device memory, zeroed. */
static inline void *device_zeros(size_t bytes) {
    void *memory;
    check(cudaMalloc(&memory, bytes));
    check(cudaMemset(memory, 0, bytes));
    return memory;
}

#endif
