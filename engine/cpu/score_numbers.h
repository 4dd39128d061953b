/* SPDX-License-Identifier: Apache-2.0
 *
 * What the network keeps of a slot, computed once from its key and value (score_numbers.c).
 */
#ifndef ENGINE_CPU_SCORE_NUMBERS_H
#define ENGINE_CPU_SCORE_NUMBERS_H

#include "engine/cpu/score_state.h"

void score_number_turns_free(struct number_turns *turns); /* NULL allowed */

/* Of a page's values [d][16]: ln(1e-6 + |v|), and ln(1e-6 + mean over the group of |F_h v|), [16] each; either may be
 * NULL. factors [G][d][d] of the head's group; turned: room for [d][16]. */
void score_page_norms(const struct score_kernels *kernels, uint32_t dim, const float *factors, uint32_t group,
    const float *values, float *turned, float *value_norm, float *output_norm);

#endif
