/* SPDX-License-Identifier: Apache-2.0
 *
 * How fast each pair of a head turns with the position (Su et al. 2021), and how models were stretched to longer
 * contexts: with b the base, pair i of a head turns by theta_i = b^(-2i / dim) a position, and then
 *   linear   theta_i / factor
 *   yarn     theta_i / factor where a turn takes longer than the original context, theta_i where it is short, a blend
 *            between; scores are multiplied by (0.1 ln factor + 1)^2 (Peng et al. 2023, section 3)
 *   llama3   theta_i / factor for wavelengths above original / low, theta_i below original / high, a blend between
 *            (Llama 3.1; transformers' rope type "llama3"). GGUF files have it as numbers by which theta_i is divided.
 */
#ifndef ENGINE_ROPE_FREQUENCIES_H
#define ENGINE_ROPE_FREQUENCIES_H

#include <stdint.h>

enum rope_scaling_kind { ROPE_UNSCALED, ROPE_LINEAR, ROPE_YARN, ROPE_LLAMA3 };

struct rope_scaling {
    enum rope_scaling_kind kind;
    float factor;               /* at least 1 */
    uint32_t original_context;  /* tokens; yarn and llama3 */
    float low, high;            /* llama3: low_freq_factor, high_freq_factor */
    float beta_fast, beta_slow; /* yarn: turns within the original context */
    float attention_factor;     /* yarn: of queries and of keys; 0: 0.1 ln factor + 1 */
};

/* Frequencies of the pairs: out [dim / 2]. divisors [dim / 2]: further numbers by which they are divided, or NULL. */
void rope_frequencies(const struct rope_scaling *scaling, float base, uint32_t dim, const float *divisors, float *out);

/* By which scores q k are multiplied. */
float rope_score_factor(const struct rope_scaling *scaling);

#endif
