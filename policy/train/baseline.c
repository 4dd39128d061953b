/* SPDX-License-Identifier: Apache-2.0 */
#include "policy/train/baseline.h"

#include <math.h>

void returns_discounted(const double *rewards, uint32_t steps, double discount, double *returns) {
    double later = 0;
    for (uint32_t t = steps; t-- > 0;) {
        later = rewards[t] + discount * later;
        returns[t] = later;
    }
}

double entropy_surrogate(double logprob, uint32_t kept) {
    return kept == 0 ? 0 : -logprob / kept;
}

void baseline_leave_one_out(const double *rewards, uint32_t samples, double *advantages) {
    double total = 0;
    for (uint32_t k = 0; k < samples; k++)
        total += rewards[k];
    for (uint32_t k = 0; k < samples; k++) {
        double others = samples > 1 ? (total - rewards[k]) / (samples - 1) : 0;
        advantages[k] = rewards[k] - others;
    }
}

void baseline_group(const double *rewards, uint32_t samples, double *advantages) {
    double mean = 0, variance = 0;
    for (uint32_t k = 0; k < samples; k++)
        mean += rewards[k] / samples;
    for (uint32_t k = 0; k < samples; k++)
        variance += (rewards[k] - mean) * (rewards[k] - mean) / samples;
    for (uint32_t k = 0; k < samples; k++)
        advantages[k] = (rewards[k] - mean) / (sqrt(variance) + 1e-6);
}

double baseline_moving(double average, double value, double decay) {
    if (!isfinite(value))
        return average;
    return isnan(average) ? value : decay * average + (1 - decay) * value;
}

void baseline_advantages(const double *rewards, uint32_t samples, double average, double *advantages) {
    baseline_leave_one_out(rewards, samples, advantages);
    if (samples == 1 && !isnan(average))
        advantages[0] -= average;
}
