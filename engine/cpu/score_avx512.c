/* SPDX-License-Identifier: Apache-2.0 */
#include "engine/cpu/lanes_avx512.h"
#include "engine/cpu/score_body.h"

const struct score_kernels score_kernels_avx512 = SCORE_KERNELS;
