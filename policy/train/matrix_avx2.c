/* SPDX-License-Identifier: Apache-2.0 */
#include "engine/cpu/lanes_avx2.h"
#include "policy/train/matrix_body.h"

const struct matrix_kernels matrix_kernels_avx2 = MATRIX_KERNELS;
