/* SPDX-License-Identifier: Apache-2.0
 *
 * Little-endian numbers at any address, on any machine. Compilers turn these into one load.
 */
#ifndef ENGINE_BYTES_H
#define ENGINE_BYTES_H

#include <stdint.h>

static inline uint16_t load_u16(const void *from) {
    const uint8_t *b = from;
    return (uint16_t)(b[0] | b[1] << 8);
}

static inline uint32_t load_u32(const void *from) {
    const uint8_t *b = from;
    return (uint32_t)b[0] | (uint32_t)b[1] << 8 | (uint32_t)b[2] << 16 | (uint32_t)b[3] << 24;
}

static inline uint64_t load_u64(const void *from) {
    const uint8_t *b = from;
    return load_u32(b) | (uint64_t)load_u32(b + 4) << 32;
}

#endif
