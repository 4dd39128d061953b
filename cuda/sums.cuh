/* SPDX-License-Identifier: Apache-2.0
 *
 * Sums of attention in their two planes (engine/backend.h, struct kv_statistics) on the device. For .cu files; include
 * cuda/device.h first.
 */
#ifndef CUDA_SUMS_CUH
#define CUDA_SUMS_CUH

#include "cuda/views.h"

#define SUM_LOW_BITS 0x7fffffffu
#define SUM_HIGH_USED 0x80000000u

/* The second plane is read where it is not zero only. */
static __device__ __forceinline__ unsigned long long sum_get(const uint32_t *planes, uint32_t capacity, uint32_t slot) {
    uint32_t low = planes[slot];
    unsigned long long high = low & SUM_HIGH_USED ? planes[(size_t)capacity + slot] : 0;
    return high << 31 | (low & SUM_LOW_BITS);
}

/* The first plane after `value` was added to `low`; *high: what the second one grows by. */
static __device__ __forceinline__ uint32_t sum_next(uint32_t low, unsigned long long value, uint32_t *high) {
    uint32_t sum = (low & SUM_LOW_BITS) + ((uint32_t)value & SUM_LOW_BITS);
    *high = (uint32_t)(value >> 31) + (sum >> 31);
    return (sum & SUM_LOW_BITS) | (*high > 0 ? SUM_HIGH_USED : low & SUM_HIGH_USED);
}

/* alone: no other thread adds to the slot in this launch. */
static __device__ __forceinline__ void sum_add(
    uint32_t *planes, uint32_t capacity, uint32_t slot, unsigned long long value, bool alone) {
    uint32_t high, *second = planes + capacity + slot;
    if (value == 0)
        return;
    if (alone) {
        planes[slot] = sum_next(planes[slot], value, &high);
        if (high > 0)
            *second += high;
        return;
    }
    uint32_t before = atomicAdd(&planes[slot], 0u), seen;
    do {
        seen = before;
        before = atomicCAS(&planes[slot], seen, sum_next(seen, value, &high));
    } while (before != seen);
    if (high > 0)
        atomicAdd(second, high);
}

#endif
