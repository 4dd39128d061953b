/* SPDX-License-Identifier: Apache-2.0 */
#include "server/prefix_hash.h"

#include <inttypes.h>
#include <stdio.h>

void prefix_hash_write(const int32_t *tokens, uint32_t count, uint32_t length, char out[static PREFIX_HASH_SIZE]) {
    out[0] = '\0';
    if (length == 0 || count < length)
        return;
    uint64_t hash = UINT64_C(0xcbf29ce484222325);
    for (uint32_t i = 0; i < length; i++)
        for (unsigned shift = 0; shift < 32; shift += 8) {
            hash ^= (uint32_t)tokens[i] >> shift & 0xff;
            hash *= UINT64_C(0x100000001b3);
        }
    snprintf(out, PREFIX_HASH_SIZE, "%016" PRIx64, hash);
}
