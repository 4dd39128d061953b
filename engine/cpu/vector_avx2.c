/* SPDX-License-Identifier: Apache-2.0 */
#include "engine/cpu/lanes_avx2.h"
#include "engine/cpu/vector_body.h"

const struct vector_kernels vector_kernels_avx2 = VECTOR_KERNELS;
