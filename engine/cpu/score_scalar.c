/* SPDX-License-Identifier: Apache-2.0 */
#include "engine/cpu/lanes_scalar.h"
#include "engine/cpu/score_body.h"

const struct score_kernels score_kernels_scalar = SCORE_KERNELS;
