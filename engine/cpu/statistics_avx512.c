/* SPDX-License-Identifier: Apache-2.0 */
#include "engine/cpu/lanes_avx512.h"
#include "engine/cpu/statistics_body.h"

const struct statistics_kernels statistics_kernels_avx512 = STATISTICS_KERNELS;
