/* SPDX-License-Identifier: Apache-2.0
 *
 * Means with 95 % intervals by the percentile bootstrap (Efron 1979). Which items a resample takes depends on the seed
 * and on the number of items only: means of different policies over the same items are resampled alike, and a
 * difference of policies is resampled as the difference of pairs.
 */
#ifndef POLICY_EVAL_BOOTSTRAP_H
#define POLICY_EVAL_BOOTSTRAP_H

#include <stddef.h>
#include <stdint.h>

enum { BOOTSTRAP_RESAMPLES = 2000 };

struct bootstrap_interval {
    double mean;
    double low, high; /* 2.5 % and 97.5 % quantiles of the resampled means, linearly interpolated */
};

/* values [count], count >= 1. All zero when count is 0; low and high are the mean when memory runs out. */
struct bootstrap_interval bootstrap_mean(const double *values, size_t count, uint64_t seed);

#endif
