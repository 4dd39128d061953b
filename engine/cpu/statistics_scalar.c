/* SPDX-License-Identifier: Apache-2.0 */
#include "engine/cpu/lanes_scalar.h"
#include "engine/cpu/statistics_body.h"

const struct statistics_kernels statistics_kernels_scalar = STATISTICS_KERNELS;
