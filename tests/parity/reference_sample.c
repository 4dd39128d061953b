/* SPDX-License-Identifier: Apache-2.0 */
#include "tests/parity/reference_sample.h"

#include <math.h>
#include <stdlib.h>

struct ranked {
    float logit;
    uint32_t id;
};

static int compare_ranked(const void *left, const void *right) {
    const struct ranked *a = left, *b = right;
    if (a->logit != b->logit)
        return a->logit > b->logit ? -1 : 1;
    return a->id < b->id ? -1 : 1;
}

static void *memory(size_t count, size_t bytes) {
    void *result = calloc(count, bytes);
    if (result == NULL)
        abort();
    return result;
}

void reference_rank(const float *logits, uint32_t vocabulary, uint32_t *order) {
    struct ranked *ranked = memory(vocabulary, sizeof *ranked);
    for (uint32_t id = 0; id < vocabulary; id++)
        ranked[id] = (struct ranked){isnan(logits[id]) ? -INFINITY : logits[id], id};
    qsort(ranked, vocabulary, sizeof *ranked, compare_ranked);
    for (uint32_t i = 0; i < vocabulary; i++)
        order[i] = ranked[i].id;
    free(ranked);
}

void reference_log_softmax(const float *logits, uint32_t vocabulary, double *out) {
    double most = -INFINITY, sum = 0;
    for (uint32_t id = 0; id < vocabulary; id++) {
        out[id] = isnan(logits[id]) ? -INFINITY : (double)logits[id];
        most = fmax(most, out[id]);
    }
    for (uint32_t id = 0; id < vocabulary; id++)
        sum += exp(out[id] - most);
    for (uint32_t id = 0; id < vocabulary; id++)
        out[id] -= most + log(sum);
}

void reference_distribution(
    const float *logits, uint32_t vocabulary, const struct sample_params *params, double slack, double *out) {
    float *allowed = memory(vocabulary, sizeof *allowed);
    uint32_t *order = memory(vocabulary, sizeof *order);
    for (uint32_t id = 0; id < vocabulary; id++)
        allowed[id] = logits[id];
    for (uint32_t i = 0; i < params->changes_count; i++) {
        const struct logit_change *change = &params->changes[i];
        float logit = logits[change->token], scaled = logit > 0 ? logit * change->positive : logit * change->negative;
        allowed[change->token] = scaled + change->add;
    }
    for (uint32_t id = 0; params->allowed != NULL && id < vocabulary; id++)
        if ((params->allowed[id / 32] >> id % 32 & 1) == 0)
            allowed[id] = -INFINITY;
    for (uint32_t i = 0; i < params->banned_count; i++)
        allowed[params->banned[i]] = -INFINITY;
    reference_rank(allowed, vocabulary, order);
    uint32_t kept = params->top_k > 0 && params->top_k < vocabulary ? params->top_k : vocabulary;
    double most = allowed[order[0]], total = 0, reached = 0, left = 0;
    for (uint32_t i = 0; i < vocabulary; i++) {
        double logit = allowed[order[i]];
        out[order[i]] = i < kept && logit > -INFINITY ? exp((logit - most) / (double)params->temperature) : 0;
        total += out[order[i]];
    }
    for (uint32_t i = 0; i < vocabulary; i++) {
        double weight = out[order[i]];
        bool enough = params->top_p < 1 && i > 0 && reached >= (double)params->top_p * total * (1 + slack);
        if (enough || weight < (double)params->min_p * (1 - slack))
            out[order[i]] = 0;
        reached += weight;
        left += out[order[i]];
    }
    for (uint32_t id = 0; id < vocabulary; id++)
        out[id] /= left;
    free(allowed);
    free(order);
}

double reference_kl(const float *p, const float *q, uint32_t vocabulary) {
    double *log_p = memory(vocabulary, sizeof *log_p), *log_q = memory(vocabulary, sizeof *log_q), sum = 0;
    reference_log_softmax(p, vocabulary, log_p);
    reference_log_softmax(q, vocabulary, log_q);
    for (uint32_t id = 0; id < vocabulary; id++) {
        if (log_p[id] > -INFINITY)
            sum += exp(log_p[id]) * (log_p[id] - log_q[id]);
    }
    free(log_p);
    free(log_q);
    return sum;
}
