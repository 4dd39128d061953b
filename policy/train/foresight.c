/* SPDX-License-Identifier: Apache-2.0 */
#include "policy/train/foresight.h"

#include <stdlib.h>
#include <string.h>

#include "engine/random.h"
#include "policy/train/top.h"

enum { STREAM_PAIRS = 0x50414952 };

double foresight_hinge(const float *scores, const float *targets, uint32_t slots, uint32_t budget, uint32_t recent,
    const struct foresight_pairs *pairs, double factor, float *gradient, double *work, uint32_t *order) {
    uint32_t count = slots > recent ? slots - recent : 0, stay = budget > recent ? budget - recent : 1, going = 0;
    double loss = 0;
    if (stay >= count)
        return 0;
    for (uint32_t i = 0; i < count; i++)
        work[i] = (double)targets[i];
    top_of(work, count, stay, order);
    for (uint32_t i = 0; i < stay; i++)
        work[order[i]] = -1;
    for (uint32_t i = 0; i < count; i++)
        if (work[i] >= 0) /* those that go follow those that stay */
            order[stay + going++] = i;
    for (uint32_t p = 0; p < count && going > 0; p++) {
        uint32_t words[4];
        random_philox(pairs->seed, STREAM_PAIRS, (uint32_t)pairs->step, (uint64_t)pairs->head << 32 | p, words);
        uint32_t a = order[words[0] % stay], b = order[stay + words[1] % going];
        double margin = 1 - ((double)scores[a] - (double)scores[b]);
        if (margin <= 0)
            continue;
        loss += margin / count;
        gradient[a] -= (float)(factor / count);
        gradient[b] += (float)(factor / count);
    }
    return loss;
}

static int compare(const void *a, const void *b) {
    float x = *(const float *)a, y = *(const float *)b;
    return x < y ? -1 : x > y;
}

void foresight_low_entropy(const float *entropies, uint32_t steps, bool *low, float *work) {
    low[0] = false;
    if (steps < 2)
        return;
    memcpy(work, entropies + 1, (steps - 1) * sizeof *work);
    qsort(work, steps - 1, sizeof *work, compare);
    float median = work[(steps - 2) / 2];
    for (uint32_t t = 1; t < steps; t++)
        low[t] = entropies[t] <= median;
}
