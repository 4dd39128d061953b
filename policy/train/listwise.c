/* SPDX-License-Identifier: Apache-2.0 */
#include "policy/train/listwise.h"

#include "policy/train/top.h"

#include <math.h>
#include <string.h>

/* Makes work the scores, -infinity for those that take no part. */
static void leave_out(const float *scores, uint32_t slots, uint32_t left_out, double *work, uint32_t *order) {
    for (uint32_t i = 0; i < slots; i++)
        work[i] = (double)scores[i];
    top_of(work, slots, left_out, order);
    for (uint32_t i = 0; i < left_out; i++)
        work[order[i]] = -INFINITY;
}

double listwise_loss(const float *scores, const float *targets, uint32_t slots, uint32_t left_out, double factor,
    float *gradient, double *work, uint32_t *order) {
    memset(gradient, 0, slots * sizeof(float));
    if (left_out >= slots)
        return 0;
    leave_out(scores, slots, left_out, work, order);
    double total = 0, highest = -INFINITY;
    for (uint32_t i = 0; i < slots; i++) {
        if (work[i] == -INFINITY)
            continue;
        total += (double)targets[i];
        highest = work[i] > highest ? work[i] : highest;
    }
    if (!(total > 0))
        return 0;
    double weights = 0, crossed = 0; /* sum of e^(score - highest); of p (score - highest) */
    for (uint32_t i = 0; i < slots; i++) {
        if (work[i] == -INFINITY)
            continue;
        double above = work[i] - highest;
        work[i] = exp(above);
        weights += work[i];
        crossed += (double)targets[i] / total * above;
    }
    for (uint32_t i = 0; i < slots; i++)
        if (work[i] != -INFINITY)
            gradient[i] = (float)(factor * (work[i] / weights - (double)targets[i] / total));
    return log(weights) - crossed;
}
