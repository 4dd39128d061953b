/* SPDX-License-Identifier: Apache-2.0 */
#include "engine/cpu/lanes_avx512.h"
#include "policy/train/matrix_body.h"

const struct matrix_kernels matrix_kernels_avx512 = MATRIX_KERNELS;
