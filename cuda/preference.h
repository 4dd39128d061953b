/* SPDX-License-Identifier: Apache-2.0
 *
 * cake's layer preference (window_preference of engine/backend.h) on the device.
 */
#ifndef CUDA_PREFERENCE_H
#define CUDA_PREFERENCE_H

#include "cuda/views.h"

#include <cuda_runtime_api.h>

enum { PREFERENCE_SLOTS = 128 }; /* of a block */

/* A head of a layer at a prune; pointers are device memory. */
struct preference_head {
    const uint32_t *pages;
    const uint16_t *head_rows; /* struct kv_statistics */
    uint32_t slots, capacity;
    uint32_t rows; /* of the ring that hold a query */
    uint32_t sinks, recent_from;
};

struct __attribute__((aligned(16))) preference {
    double entropy, variance;
};

#ifdef __cplusplus
extern "C" {
#endif

/* heads: device [layers * K]; parts: device [layers * K][blocks], blocks of the largest head: its slots /
 * PREFERENCE_SLOTS, rounded up; out: device [layers]. group: G. */
void preference_launch(const struct kv_pool *pool, const struct preference_head *heads, uint32_t layers, uint32_t group,
    uint32_t blocks, struct preference *parts, struct preference *out, cudaStream_t stream);

#ifdef __cplusplus
}
#endif

#endif
