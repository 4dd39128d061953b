/* SPDX-License-Identifier: Apache-2.0
 *
 * References of `sample` and `kl`: sorting, float64, straight from the definitions in engine/backend.h. NaN counts as
 * -infinity; logits must have a largest finite one.
 */
#ifndef TESTS_PARITY_REFERENCE_SAMPLE_H
#define TESTS_PARITY_REFERENCE_SAMPLE_H

#include "engine/backend.h"

/* Tokens by descending logit, equal ones by ascending id: order [vocabulary]. */
void reference_rank(const float *logits, uint32_t vocabulary, uint32_t *order);

/* Log-probabilities of the logits as they are: out [vocabulary]. */
void reference_log_softmax(const float *logits, uint32_t vocabulary, double *out);

/* The distribution that a random choice follows, after changes, bans, temperature, top_k, top_p and min_p: out
 * [vocabulary]. slack widens (or, below 0, narrows) top_p and min_p, relatively, to find tokens at their limits. */
void reference_distribution(
    const float *logits, uint32_t vocabulary, const struct sample_params *params, double slack, double *out);

double reference_kl(const float *p, const float *q, uint32_t vocabulary);

#endif
