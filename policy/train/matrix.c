/* SPDX-License-Identifier: Apache-2.0 */
#include "policy/train/matrix.h"

const struct matrix_kernels *matrix_kernels(enum cpu_tier tier) {
#if defined(__x86_64__)
    if (tier == CPU_AVX512)
        return &matrix_kernels_avx512;
    if (tier == CPU_AVX2)
        return &matrix_kernels_avx2;
#endif
    (void)tier;
    return &matrix_kernels_scalar;
}
