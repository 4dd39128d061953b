/* SPDX-License-Identifier: Apache-2.0
 *
 * Inputs of the DistillCache network on the device (policy/network.h). What is not a number stays that. For .cu files.
 */
#ifndef CUDA_NETWORK_DEVICE_H
#define CUDA_NETWORK_DEVICE_H

#include "cuda/score_device.h"
#include "cuda/sums.cuh"

/* ln(1e-6 + x * factor) */
SCORE_INLINE float log_input(float x, float factor) {
    return logf(fmaf(x, factor, 1e-6f));
}

/* A sum in units of 2^-24 as the plain computation takes it: rounded to float first. */
SCORE_INLINE double sum_input(uint64_t sum) {
    return (double)(float)((double)sum * 0x1p-24);
}

/* What several inputs are made of. */
struct network_sums {
    double sum, squared;
};

/* needs: mask of those that are there. */
SCORE_INLINE struct network_sums network_sums(const struct cuda_score_unit *unit, uint32_t needs, uint32_t slot) {
    struct network_sums sums = {0, 0};
    if ((needs & STATISTIC_SUM) != 0)
        sums.sum = sum_input(sum_get(unit->statistics.sum, unit->statistics.capacity, slot));
    if ((needs & STATISTIC_SQUARED) != 0)
        sums.squared = sum_input(sum_get(unit->statistics.squared, unit->statistics.capacity, slot));
    return sums;
}

/* An input before normalisation, of a slot at `position` (0 where there is none). In double as far as differences of
 * near numbers go. */
SCORE_INLINE float network_input(const struct cuda_score_unit *unit, uint32_t features, uint32_t input, uint32_t slot,
    int32_t position, struct network_sums sums) {
    const struct kv_statistics *statistics = &unit->statistics;
    float seen = (float)unit->seen, budget = (float)unit->budget, factor = features == FEATURES_PAPER ? 1 : seen;
    double queries = (double)unit->seen - (double)position;
    const uint16_t *norms = statistics->content_rows + (size_t)statistics->content * statistics->capacity;
    switch (input) {
    case INPUT_SUM:
        return log_input((float)sums.sum, 1);
    case INPUT_MEAN:
        return log_input((float)(sums.sum / queries), factor);
    case INPUT_DEVIATION: {
        double mean = sums.sum / queries;
        float variance = (float)(sums.squared / queries - mean * mean);
        return log_input(sqrtf(variance < 0 ? 0 : variance), factor);
    }
    case INPUT_ENTROPY:
        return half_number(statistics->entropy[slot]) /
               logf(features == FEATURES_PAPER ? fmaxf(seen, 2) : (float)position + 2);
    case INPUT_VALUE_NORM:
        return half_number(norms[slot]);
    case INPUT_OUTPUT_NORM:
        return half_number(norms[statistics->capacity + slot]);
    case INPUT_POSITION:
        return (float)position * (1 / seen);
    case INPUT_AGE:
        return logf(seen - (float)position) * (1 / 6.0f);
    case INPUT_BUDGET:
        return (float)(log((double)unit->budget / (double)unit->seen) + 1.5);
    case INPUT_RECENT_8:
        return seen - 1 - (float)position < budget / 8 ? 1 : 0;
    case INPUT_RECENT_4:
        return seen - 1 - (float)position < budget / 4 ? 1 : 0;
    default:
        return seen - 1 - (float)position < budget / 2 ? 1 : 0;
    }
}

/* (x - offset) * factor, clamped to +-limit. */
SCORE_INLINE float normal_input(float x, float offset, float factor, float limit) {
    float normal = (x - offset) * factor;
    return normal > limit ? limit : normal < -limit ? -limit : normal;
}

SCORE_INLINE float rectify(float x) {
    return x < 0 ? 0 : x;
}

#endif
