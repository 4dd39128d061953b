/* SPDX-License-Identifier: Apache-2.0 */
#include "engine/cpu/lanes_scalar.h"
#include "engine/cpu/attend_body.h"

const struct attend_kernels attend_kernels_scalar = ATTEND_KERNELS;
