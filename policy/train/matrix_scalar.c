/* SPDX-License-Identifier: Apache-2.0 */
#include "engine/cpu/lanes_scalar.h"
#include "policy/train/matrix_body.h"

const struct matrix_kernels matrix_kernels_scalar = MATRIX_KERNELS;
