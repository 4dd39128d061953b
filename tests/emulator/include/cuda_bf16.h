/* SPDX-License-Identifier: Apache-2.0
 *
 * bfloat16 for kernels compiled as C++: storage and conversions ("CUDA Math API", bfloat16 precision intrinsics). Only
 * what this project uses.
 */
#ifndef EMULATOR_CUDA_BF16_H
#define EMULATOR_CUDA_BF16_H

#include "cuda_runtime.h"

struct __nv_bfloat16 {
    unsigned short bits;
};

struct alignas(4) __nv_bfloat162 {
    union {
        struct {
            __nv_bfloat16 x, y;
        };
        uint32_t all;
    };
    EMULATOR_VECTOR_COPY(__nv_bfloat162, uint32_t)
    __nv_bfloat162(__nv_bfloat16 x_, __nv_bfloat16 y_) : x(x_), y(y_) {
    }
};

EMULATOR_INLINE float __bfloat162float(__nv_bfloat16 x) {
    return __uint_as_float((unsigned)x.bits << 16);
}
/* To nearest, ties to even; NaN becomes 0x7fff. */
EMULATOR_INLINE __nv_bfloat16 __float2bfloat16_rn(float x) {
    unsigned bits = __float_as_uint(x);
    if (x != x)
        return __nv_bfloat16{0x7fff};
    return __nv_bfloat16{(unsigned short)((bits + 0x7fff + (bits >> 16 & 1)) >> 16)};
}
EMULATOR_INLINE __nv_bfloat16 __float2bfloat16(float x) {
    return __float2bfloat16_rn(x);
}
EMULATOR_INLINE unsigned short __bfloat16_as_ushort(__nv_bfloat16 x) {
    return x.bits;
}
EMULATOR_INLINE __nv_bfloat16 __ushort_as_bfloat16(unsigned short x) {
    return __nv_bfloat16{x};
}
EMULATOR_INLINE __nv_bfloat162 __halves2bfloat162(__nv_bfloat16 low, __nv_bfloat16 high) {
    return __nv_bfloat162(low, high);
}
EMULATOR_INLINE float __low2float(__nv_bfloat162 x) {
    return __bfloat162float(x.x);
}
EMULATOR_INLINE float __high2float(__nv_bfloat162 x) {
    return __bfloat162float(x.y);
}
EMULATOR_INLINE float2 __bfloat1622float2(__nv_bfloat162 x) {
    return float2(__bfloat162float(x.x), __bfloat162float(x.y));
}
EMULATOR_INLINE __nv_bfloat162 __floats2bfloat162_rn(float low, float high) {
    return __nv_bfloat162(__float2bfloat16_rn(low), __float2bfloat16_rn(high));
}
EMULATOR_INLINE __nv_bfloat162 __float22bfloat162_rn(float2 x) {
    return __floats2bfloat162_rn(x.x, x.y);
}

#endif
