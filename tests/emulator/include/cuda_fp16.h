/* SPDX-License-Identifier: Apache-2.0
 *
 * Half precision for kernels compiled as C++: storage, conversions, and arithmetic that rounds once per operation
 * ("CUDA Math API", half precision intrinsics). Only what this project uses.
 */
#ifndef EMULATOR_CUDA_FP16_H
#define EMULATOR_CUDA_FP16_H

#include "cuda_runtime.h"

struct __half {
    unsigned short bits;
};
typedef struct __half half;

struct alignas(4) __half2 {
    union {
        struct {
            __half x, y;
        };
        uint32_t all;
    };
    EMULATOR_VECTOR_COPY(__half2, uint32_t)
    __half2(__half x_, __half y_) : x(x_), y(y_) {
    }
};
typedef struct __half2 half2;

EMULATOR_INLINE float __half2float(__half x) {
    return (float)emulator_value<_Float16>(x.bits);
}
EMULATOR_INLINE __half __float2half_rn(float x) {
    return __half{(unsigned short)emulator_bits((_Float16)x)};
}
EMULATOR_INLINE __half __float2half(float x) {
    return __float2half_rn(x);
}
EMULATOR_INLINE unsigned short __half_as_ushort(__half x) {
    return x.bits;
}
EMULATOR_INLINE __half __ushort_as_half(unsigned short x) {
    return __half{x};
}
EMULATOR_INLINE short __half_as_short(__half x) {
    return (short)x.bits;
}
EMULATOR_INLINE __half __short_as_half(short x) {
    return __half{(unsigned short)x};
}
EMULATOR_INLINE __half2 __halves2half2(__half low, __half high) {
    return __half2(low, high);
}
EMULATOR_INLINE __half2 __half2half2(__half x) {
    return __half2(x, x);
}
EMULATOR_INLINE __half __low2half(__half2 x) {
    return x.x;
}
EMULATOR_INLINE __half __high2half(__half2 x) {
    return x.y;
}
EMULATOR_INLINE float __low2float(__half2 x) {
    return __half2float(x.x);
}
EMULATOR_INLINE float __high2float(__half2 x) {
    return __half2float(x.y);
}
EMULATOR_INLINE float2 __half22float2(__half2 x) {
    return float2(__half2float(x.x), __half2float(x.y));
}
EMULATOR_INLINE __half2 __floats2half2_rn(float low, float high) {
    return __half2(__float2half_rn(low), __float2half_rn(high));
}
EMULATOR_INLINE __half2 __float22half2_rn(float2 x) {
    return __floats2half2_rn(x.x, x.y);
}
EMULATOR_INLINE __half2 __float2half2_rn(float x) {
    return __floats2half2_rn(x, x);
}
EMULATOR_INLINE __half __hadd(__half a, __half b) {
    return __float2half_rn(__half2float(a) + __half2float(b));
}
EMULATOR_INLINE __half __hsub(__half a, __half b) {
    return __float2half_rn(__half2float(a) - __half2float(b));
}
EMULATOR_INLINE __half __hmul(__half a, __half b) {
    return __float2half_rn(__half2float(a) * __half2float(b));
}
/* The product of two halves and its sum with a third are exact in double: one rounding to half, by way of an odd
 * rounding to float, is left to the compiler's double to half conversion. */
EMULATOR_INLINE __half __hfma(__half a, __half b, __half c) {
    double sum = (double)__half2float(a) * (double)__half2float(b) + (double)__half2float(c);
    return __half{(unsigned short)emulator_bits((_Float16)sum)};
}
EMULATOR_INLINE __half2 __hadd2(__half2 a, __half2 b) {
    return __half2(__hadd(a.x, b.x), __hadd(a.y, b.y));
}
EMULATOR_INLINE __half2 __hsub2(__half2 a, __half2 b) {
    return __half2(__hsub(a.x, b.x), __hsub(a.y, b.y));
}
EMULATOR_INLINE __half2 __hmul2(__half2 a, __half2 b) {
    return __half2(__hmul(a.x, b.x), __hmul(a.y, b.y));
}
EMULATOR_INLINE __half2 __hfma2(__half2 a, __half2 b, __half2 c) {
    return __half2(__hfma(a.x, b.x, c.x), __hfma(a.y, b.y, c.y));
}

#endif
