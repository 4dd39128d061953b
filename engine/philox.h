/* SPDX-License-Identifier: Apache-2.0
 *
 * The generator of random.h as an inline function: for loops over many numbers that the compiler vectorises, and for
 * kernels (cuda/).
 */
#ifndef ENGINE_PHILOX_H
#define ENGINE_PHILOX_H

#include <stdint.h>

#ifdef __CUDACC__
#define PHILOX_INLINE static inline __host__ __device__
#else
#define PHILOX_INLINE static inline __attribute__((always_inline))
#endif

enum { PHILOX_ROUNDS = 10 };

PHILOX_INLINE void philox_words(uint64_t seed, uint32_t stream, uint32_t step, uint64_t index, uint32_t out[4]) {
    uint32_t key0 = (uint32_t)seed, key1 = (uint32_t)(seed >> 32);
    uint32_t c0 = (uint32_t)index, c1 = (uint32_t)(index >> 32), c2 = step, c3 = stream;
    for (int round = 0; round < PHILOX_ROUNDS; round++) {
        uint64_t product0 = (uint64_t)0xD2511F53u * c0;
        uint64_t product1 = (uint64_t)0xCD9E8D57u * c2;
        c0 = (uint32_t)(product1 >> 32) ^ c1 ^ key0;
        c1 = (uint32_t)product1;
        c2 = (uint32_t)(product0 >> 32) ^ c3 ^ key1;
        c3 = (uint32_t)product0;
        key0 += 0x9E3779B9u;
        key1 += 0xBB67AE85u;
    }
    out[0] = c0;
    out[1] = c1;
    out[2] = c2;
    out[3] = c3;
}

/* Uniform in (0, 1) from a word: an odd multiple of 2^-24. */
PHILOX_INLINE float philox_uniform(uint32_t word) {
    return ((float)(int32_t)(word >> 9) + 0.5f) * 0x1p-23f;
}

#endif
