/* SPDX-License-Identifier: Apache-2.0 */
#include "engine/cpu/lanes_avx512.h"
#include "engine/cpu/attend_body.h"

const struct attend_kernels attend_kernels_avx512 = ATTEND_KERNELS;
