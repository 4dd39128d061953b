/* SPDX-License-Identifier: Apache-2.0
 *
 * Distributions over which B of L slots stay, given scores s [L]: samples, log-probabilities and gradients. Two that
 * must not be mixed: the Gumbel top-B sample is Plackett-Luce distributed (Kool et al. 2019), the k-subset or
 * conditional Bernoulli distribution (Chen and Liu 1997) has P(S) = exp(sum over S of s / tau) / Z. In double; as in
 * tests/reference/reference/gumbel_topk.py, which tests compare with through tests/data/gumbel_topk.json.
 *
 * Scores of -infinity are never chosen while others are left (they count as 1,000 below the lowest finite one, in
 * probabilities too); +infinity and NaN are not allowed: leave protected slots out. count <= slots everywhere.
 */
#ifndef POLICY_TRAIN_SUBSET_H
#define POLICY_TRAIN_SUBSET_H

#include <stddef.h>
#include <stdint.h>

/* order [count]: the slots with the largest s + Gumbel(uniforms), best first; ties to the higher index. uniforms
 * [slots] in (0, 1). work: [slots] doubles. */
void gumbel_top(
    const float *scores, uint32_t slots, const double *uniforms, uint32_t count, uint32_t *order, double *work);

/* log P(order) = sum_j s[order_j] - logsumexp(s of what was left before draw j), in O(slots). work: [count + slots]. */
double plackett_luce_logprob(const float *scores, uint32_t slots, const uint32_t *order, uint32_t count, double *work);
/* grad [slots] += factor * its gradient, in O(slots). */
void plackett_luce_gradient(const float *scores, uint32_t slots, const uint32_t *order, uint32_t count, double factor,
    float *grad, double *work);

/* The k-subset distribution, by a table of O(slots * count) numbers. */
struct subset_table; /* NULL on failed allocation */
struct subset_table *subset_table_create(const float *scores, uint32_t slots, uint32_t count, double tau);
void subset_table_free(struct subset_table *table);
double subset_log_z(const struct subset_table *table);
/* Exact sample, ascending: subset [count]; uniforms [slots]. */
void subset_sample(const struct subset_table *table, const double *uniforms, uint32_t *subset);
double subset_logprob(const struct subset_table *table, const uint32_t *subset);
/* inclusion [slots]: P(i in S). 0, or ERROR_MEMORY. */
int subset_inclusion(const struct subset_table *table, double *inclusion);
/* grad [slots] += factor * gradient of the log-probability. 0, or ERROR_MEMORY. */
int subset_gradient(const struct subset_table *table, const uint32_t *subset, double factor, float *grad);

#endif
