/* SPDX-License-Identifier: Apache-2.0
 *
 * What the kernels of matrix products share: finding a thread block's weight, and writing results.
 */
#ifndef CUDA_LINEAR_DEVICE_CUH
#define CUDA_LINEAR_DEVICE_CUH

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include "cuda/device.h"
#include "cuda/linear.h"

static __device__ inline uint32_t linear_least(uint32_t a, uint32_t b) {
    return a < b ? a : b;
}

/* The part that a thread block belongs to. Selected, not indexed: arguments stay in constant memory. */
static __device__ inline struct linear_part linear_find_part(const struct linear_call &call, uint32_t block) {
    struct linear_part part = call.parts[0];
    if (block >= call.parts[1].first_block)
        part = call.parts[1];
    if (block >= call.parts[2].first_block)
        part = call.parts[2];
    return part;
}

static __device__ inline void linear_store(
    const struct linear_call &call, const struct linear_part &part, uint32_t token, uint32_t row, float value) {
    if (token >= call.rows || row >= part.rows)
        return;
    float *out = call.out + (size_t)token * call.out_pitch + part.out_column + row;
    *out = call.add ? *out + value : value;
}

/* Results of rows `row` (even) and row + 1. */
static __device__ inline void linear_store_pair(const struct linear_call &call, const struct linear_part &part,
    uint32_t token, uint32_t row, float first, float second) {
    if (!call.pairs || (part.out_column & 1) != 0 || row + 1 >= part.rows) {
        linear_store(call, part, token, row, first);
        linear_store(call, part, token, row + 1, second);
        return;
    }
    if (token >= call.rows)
        return;
    float2 *out = (float2 *)(call.out + (size_t)token * call.out_pitch + part.out_column + row);
    float2 value = make_float2(first, second);
    if (call.add) {
        float2 before = *out;
        value = make_float2(before.x + first, before.y + second);
    }
    *out = value;
}

/* Cuts the parts into thread blocks of `rows` rows each. */
static inline struct linear_call linear_cut(const struct linear_call *call, uint32_t rows) {
    struct linear_call cut = *call;
    cut.row_blocks = 0;
    for (uint32_t i = 0; i < LINEAR_PARTS; i++) {
        cut.parts[i].first_block = i < cut.parts_count ? cut.row_blocks : UINT32_MAX;
        if (i < cut.parts_count)
            cut.row_blocks += (cut.parts[i].rows - 1) / rows + 1;
    }
    return cut;
}

#endif
