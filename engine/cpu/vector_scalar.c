/* SPDX-License-Identifier: Apache-2.0 */
#include "engine/cpu/lanes_scalar.h"
#include "engine/cpu/vector_body.h"

const struct vector_kernels vector_kernels_scalar = VECTOR_KERNELS;
