/* SPDX-License-Identifier: Apache-2.0
 *
 * One vector for a text: the hidden states of its tokens (after the model's final norm) pooled over positions.
 *
 *   mean  sum over positions of h_t, divided by their number (Reimers and Gurevych 2019, arXiv:1908.10084, section 3)
 *   last  h of the last token, the only one that has seen the whole text
 *
 * States are added in order of position and in double precision, so that the vector does not depend on the chunks they
 * come in.
 */
#ifndef ENGINE_POOLING_H
#define ENGINE_POOLING_H

#include <stdbool.h>
#include <stdint.h>

enum pooling {
    POOLING_NONE, /* no vector is asked for */
    POOLING_MEAN,
    POOLING_LAST,
};

struct pooled {
    double *sum;    /* [width]; NULL before the first state */
    uint32_t width; /* of the model */
    uint32_t count; /* states added */
};

/* Adds states [count, width]. ERROR_MEMORY, at the first only. */
int pooled_add(struct pooled *pooled, const float *states, uint32_t count, uint32_t width);
/* Makes the vector of the sum: the mean, of length 1 (L2) if normalise; a vector of zeros stays as it is. Returns
 * whether all of it are numbers. At least one state was added. */
bool pooled_finish(struct pooled *pooled, bool normalise);
void pooled_free(struct pooled *pooled);

#endif
