/* SPDX-License-Identifier: Apache-2.0 */
#include "engine/cpu/lanes_avx2.h"
#include "engine/cpu/attend_body.h"

const struct attend_kernels attend_kernels_avx2 = ATTEND_KERNELS;
