/* SPDX-License-Identifier: Apache-2.0 */
#include "policy/eval/bootstrap.h"

#include <stdlib.h>

#include "engine/random.h"

enum { BOOTSTRAP_STREAM = 0x626f6f74 };

static double mean_of(const double *values, size_t count) {
    double sum = 0;
    for (size_t i = 0; i < count; i++)
        sum += values[i];
    return sum / (double)count;
}

/* The mean of `count` values drawn with replacement. */
static double resampled_mean(const double *values, size_t count, uint64_t seed, uint32_t resample) {
    uint32_t words[4];
    double sum = 0;
    for (size_t i = 0; i < count; i++) {
        if (i % 4 == 0)
            random_philox(seed, BOOTSTRAP_STREAM, resample, i / 4, words);
        sum += values[((uint64_t)words[i % 4] * count) >> 32];
    }
    return sum / (double)count;
}

static int compare(const void *a, const void *b) {
    double x = *(const double *)a, y = *(const double *)b;
    return (x > y) - (x < y);
}

static double quantile(const double *sorted, size_t count, double q) {
    double at = q * (double)(count - 1);
    size_t below = (size_t)at;
    double part = at - (double)below;
    return below + 1 < count ? sorted[below] * (1 - part) + sorted[below + 1] * part : sorted[below];
}

struct bootstrap_interval bootstrap_mean(const double *values, size_t count, uint64_t seed) {
    struct bootstrap_interval interval = {0};
    if (count == 0)
        return interval;
    interval.mean = interval.low = interval.high = mean_of(values, count);
    double *means = count > 1 ? malloc(BOOTSTRAP_RESAMPLES * sizeof *means) : NULL;
    if (means == NULL)
        return interval;
    for (uint32_t i = 0; i < BOOTSTRAP_RESAMPLES; i++)
        means[i] = resampled_mean(values, count, seed, i);
    qsort(means, BOOTSTRAP_RESAMPLES, sizeof *means, compare);
    interval.low = quantile(means, BOOTSTRAP_RESAMPLES, 0.025);
    interval.high = quantile(means, BOOTSTRAP_RESAMPLES, 0.975);
    free(means);
    return interval;
}
