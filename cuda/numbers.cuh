/* SPDX-License-Identifier: Apache-2.0
 *
 * Functions of one number that give the CPU backend's bits (engine/cpu/lanes_math.h has the derivations). For .cu
 * files; include cuda/device.h first.
 */
#ifndef CUDA_NUMBERS_CUH
#define CUDA_NUMBERS_CUH

/* e^x with a relative error of about 1e-7: exactly 0 below -87.33, exactly 1 at 0, the value at 88.72 above it. */
static __device__ __forceinline__ float number_exp(float x) {
    const float rounder = 0x1.8p23f;
    x = x < 88.72f ? x : 88.72f;
    float counter = fmaf(x, 0x1.715476p0f, rounder);
    float n = counter - rounder;
    float r = fmaf(n, -0x1.62e43p-1f, x);
    r = fmaf(n, 0x1.05c610p-29f, r);
    float p = 0x1.6a2254p-10f;
    p = fmaf(p, r, 0x1.123b02p-7f);
    p = fmaf(p, r, 0x1.5558f8p-5f);
    p = fmaf(p, r, 0x1.55549p-3f);
    p = fmaf(p, r, 0x1.fffffcp-2f);
    p = fmaf(p, r, 1.0f);
    p = fmaf(p, r, 1.0f);
    return x < -87.33f ? 0.0f : __uint_as_float(__float_as_uint(p) + (__float_as_uint(counter) << 23));
}

#endif
