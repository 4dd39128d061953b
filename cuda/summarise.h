/* SPDX-License-Identifier: Apache-2.0
 *
 * What is evicted goes into summary slots (summarise of engine/backend.h) on the device.
 */
#ifndef CUDA_SUMMARISE_H
#define CUDA_SUMMARISE_H

#include "cuda/views.h"

#include <cuda_runtime_api.h>

/* struct summary_update with device pointers only; positions are read from the pages. */
struct cuda_summary_update {
    struct cuda_head_view view;
    const uint32_t *sum;   /* [2][capacity] */
    const uint32_t *slots; /* [count] */
    float *summary;        /* [SUMMARY_NUMBERS(d)] */
    uint32_t capacity, count, seen;
    float offset;
};

#ifdef __cplusplus
extern "C" {
#endif

/* updates: device [count], of distinct heads. */
void summarise_launch(
    const struct kv_pool *pool, const struct cuda_summary_update *updates, uint32_t count, cudaStream_t stream);

#ifdef __cplusplus
}
#endif

#endif
