/* SPDX-License-Identifier: Apache-2.0
 *
 * Moments of queries before rotation (query_moments of engine/backend.h) on the device. The product of two floats is
 * exact in float64, so sums in order of position have the same bits everywhere.
 */
#ifndef CUDA_MOMENTS_H
#define CUDA_MOMENTS_H

#include "cuda/views.h"

#include <cuda_runtime_api.h>

#ifdef __cplusplus
extern "C" {
#endif

/* moments: device [items]; sum NULL: the item needs none. */
void moments_launch(const struct cuda_batch *batch, uint32_t heads, const float *qkv,
    const struct query_moments *moments, cudaStream_t stream);

#ifdef __cplusplus
}
#endif

#endif
