/* SPDX-License-Identifier: Apache-2.0
 *
 * Pages as kernels see them: where their parts lie (struct kv_pool in backend.h has the layout), and numbers of the KV
 * formats. For .cu files; include cuda/device.h first.
 */
#ifndef CUDA_PAGES_CUH
#define CUDA_PAGES_CUH

#include "cuda/views.h"

#include <cuda_bf16.h>
#include <cuda_fp16.h>

static __device__ __forceinline__ constexpr uint32_t number_bytes(enum kv_format format) {
    return format == KV_F32 ? 4 : 2;
}

static __device__ __forceinline__ char *page_at(const struct kv_pool &pool, uint32_t page) {
    return (char *)pool.base + (size_t)page * pool.page_bytes;
}

/* keys [d][P] lie at the page's start. */
static __device__ __forceinline__ char *page_values(const struct kv_layout &layout, char *page) {
    return page + (size_t)layout.head_dim * KV_PAGE_SLOTS * number_bytes(layout.format);
}

static __device__ __forceinline__ int32_t *page_positions(const struct kv_layout &layout, char *page) {
    return (int32_t *)(page + 2 * (size_t)layout.head_dim * KV_PAGE_SLOTS * number_bytes(layout.format));
}

static __device__ __forceinline__ float half_number(uint16_t bits) {
    return __half2float(__ushort_as_half(bits));
}

static __device__ __forceinline__ float bfloat_number(uint16_t bits) {
    return __uint_as_float((uint32_t)bits << 16);
}

/* The 16 bits of a number in one of the two 16-bit formats, rounded half to even. */
static __device__ __forceinline__ uint16_t narrow_bits(enum kv_format format, float x) {
    if (format == KV_F16)
        return __half_as_ushort(__float2half_rn(x));
    return __bfloat16_as_ushort(__float2bfloat16_rn(x));
}

static __device__ __forceinline__ float number_load(enum kv_format format, const void *numbers, size_t i) {
    if (format == KV_F32)
        return ((const float *)numbers)[i];
    uint16_t bits = ((const uint16_t *)numbers)[i];
    return format == KV_F16 ? half_number(bits) : bfloat_number(bits);
}

static __device__ __forceinline__ void number_store(enum kv_format format, void *numbers, size_t i, float x) {
    if (format == KV_F32)
        ((float *)numbers)[i] = x;
    else
        ((uint16_t *)numbers)[i] = narrow_bits(format, x);
}

/* Two neighbours; i is even. */
static __device__ __forceinline__ void number_store_pair(
    enum kv_format format, void *numbers, size_t i, float x, float y) {
    if (format == KV_F32) {
        *(float2 *)((float *)numbers + i) = make_float2(x, y);
    } else {
        uint32_t low = narrow_bits(format, x), high = narrow_bits(format, y);
        *(uint32_t *)((uint16_t *)numbers + i) = low | high << 16;
    }
}

#endif
