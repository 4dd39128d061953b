/* SPDX-License-Identifier: Apache-2.0 */
#include "engine/cpu/lanes_avx512.h"
#include "engine/cpu/vector_body.h"

const struct vector_kernels vector_kernels_avx512 = VECTOR_KERNELS;
