/* SPDX-License-Identifier: Apache-2.0 */
#include "engine/rope_frequencies.h"

#include <math.h>
#include <stddef.h>

/* The pair, as a real number, that turns `turns` times within the original context. */
static double pair_of_turns(const struct rope_scaling *scaling, double base, uint32_t dim, double turns) {
    return dim * log(scaling->original_context / (turns * 2 * M_PI)) / (2 * log(base));
}

/* How much of pair i is divided by the factor, 0 to 1. */
static double yarn_part(const struct rope_scaling *scaling, double base, uint32_t dim, uint32_t i) {
    double first = fmax(floor(pair_of_turns(scaling, base, dim, scaling->beta_fast)), 0);
    double last = fmin(ceil(pair_of_turns(scaling, base, dim, scaling->beta_slow)), dim - 1.0);
    double width = last - first > 0 ? last - first : 0.001;
    return fmin(fmax((i - first) / width, 0), 1);
}

static double llama3_part(const struct rope_scaling *scaling, double frequency) {
    double turns = scaling->original_context * frequency / (2 * M_PI); /* original context / wavelength */
    if (turns <= scaling->low)
        return 1;
    if (turns >= scaling->high)
        return 0;
    return (scaling->high - turns) / (scaling->high - scaling->low);
}

void rope_frequencies(const struct rope_scaling *scaling, float base, uint32_t dim, const float *divisors, float *out) {
    for (uint32_t i = 0; i < dim / 2; i++) {
        double frequency = pow(base, -2.0 * i / dim), part = 0;
        if (scaling->kind == ROPE_LINEAR)
            part = 1;
        else if (scaling->kind == ROPE_YARN)
            part = yarn_part(scaling, base, dim, i);
        else if (scaling->kind == ROPE_LLAMA3)
            part = llama3_part(scaling, frequency);
        if (part > 0)
            frequency = part * frequency / scaling->factor + (1 - part) * frequency;
        out[i] = (float)(divisors != NULL ? frequency / divisors[i] : frequency);
    }
}

float rope_score_factor(const struct rope_scaling *scaling) {
    if (scaling->kind != ROPE_YARN)
        return 1;
    double factor = scaling->attention_factor > 0 ? scaling->attention_factor : 0.1 * log(scaling->factor) + 1;
    return (float)(factor * factor);
}
