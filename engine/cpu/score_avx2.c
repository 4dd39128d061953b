/* SPDX-License-Identifier: Apache-2.0 */
#include "engine/cpu/lanes_avx2.h"
#include "engine/cpu/score_body.h"

const struct score_kernels score_kernels_avx2 = SCORE_KERNELS;
