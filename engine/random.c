/* SPDX-License-Identifier: Apache-2.0 */
#include "engine/random.h"

#include "engine/philox.h"

void random_philox(uint64_t seed, uint32_t stream, uint32_t step, uint64_t index, uint32_t out[4]) {
    philox_words(seed, stream, step, index, out);
}

float random_uniform(uint64_t seed, uint32_t stream, uint32_t step, uint64_t index) {
    uint32_t words[4];
    philox_words(seed, stream, step, index, words);
    return philox_uniform(words[0]);
}

double random_uniform_fine(uint64_t seed, uint32_t stream, uint32_t step, uint64_t index) {
    uint32_t words[4];
    philox_words(seed, stream, step, index, words);
    return ((double)((uint64_t)words[0] << 20 | words[1] >> 12) + 0.5) * 0x1p-52;
}
