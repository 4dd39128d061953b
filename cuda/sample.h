/* SPDX-License-Identifier: Apache-2.0
 *
 * Launchers of the choice of tokens and of the divergence of two distributions. All pointers are device addresses;
 * nothing is waited for.
 */
#ifndef CUDA_SAMPLE_H
#define CUDA_SAMPLE_H

#include "engine/backend.h"

#include <cuda_runtime_api.h>
#include <stdint.h>

/* One row's struct sample_params, as the kernel wants it. */
struct sample_row {
    const uint32_t *marks; /* bit id % 32 of word id / 32: the token is banned, or in changes; NULL: none is */
    const struct logit_change *changes; /* by ascending token; a marked token that is not here is banned */
    uint32_t changes_count;
    double log_min_p; /* ln min_p; -infinity: none */
    uint64_t seed;    /* of the draw, as struct sample_params has it */
    uint32_t stream, step;
    float scale; /* 1 / temperature, finite */
    float top_p;
    uint32_t top_k;
    int32_t forced;         /* a token, or -1 */
    uint32_t first_allowed; /* the lowest id that is not banned; 0 when all are */
    uint32_t top_count;     /* <= SAMPLE_TOP_MAX */
    bool greedy, want_logprob;
};

#ifdef __cplusplus
extern "C" {
#endif

/* logits [rows, vocabulary] -> results [rows], zeroed before. */
void launch_sample(const float *logits, uint32_t rows, uint32_t vocabulary, const struct sample_row *params,
    struct sample_result *results, cudaStream_t stream);

/* out [rows] = KL(softmax(p[p_rows[r]]) || softmax(q[r])). */
void launch_kl(const float *p, const uint32_t *p_rows, const float *q, uint32_t rows, uint32_t vocabulary, float *out,
    cudaStream_t stream);

#ifdef __cplusplus
}
#endif

#endif
