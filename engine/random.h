/* SPDX-License-Identifier: Apache-2.0
 *
 * Counter-based random numbers: a value is a function of (seed, stream, step, index) and of nothing else, so that
 * results depend neither on batch mates nor on order. Philox 4x32-10 (Salmon et al. 2011, "Parallel random numbers:
 * as easy as 1, 2, 3").
 */
#ifndef ENGINE_RANDOM_H
#define ENGINE_RANDOM_H

#include <stdint.h>

/* Four independent 32-bit words. */
void random_philox(uint64_t seed, uint32_t stream, uint32_t step, uint64_t index, uint32_t out[4]);

/* Uniform in (0, 1): an odd multiple of 2^-24, never 0 or 1. */
float random_uniform(uint64_t seed, uint32_t stream, uint32_t step, uint64_t index);

/* The same from 52 bits of the first two words: (0, 1), for what a float's 2^-24 would cut off. */
double random_uniform_fine(uint64_t seed, uint32_t stream, uint32_t step, uint64_t index);

#endif
