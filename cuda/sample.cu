/* SPDX-License-Identifier: Apache-2.0
 *
 * One block a row: no pass over it needs another kernel, and its logits stay in the second-level cache.
 */
#include "cuda/device.h"

#include "cuda/sample.cuh"
#include "engine/philox.h"

static __device__ struct cut cut_min_p(const struct row &row, double log_min_p) {
    double value = (double)row.maximum + log_min_p / (double)row.scale;
    float limit = value < (double)-FLT_MAX ? -FLT_MAX : (float)value;
    return {key_of(limit < row.maximum ? limit : row.maximum), row.vocabulary};
}

static __device__ float uniform_of(const struct sample_row &params) {
    uint32_t words[4];
    philox_words(params.seed, params.stream, params.step, 0, words);
    return philox_uniform(words[0]);
}

/* The token, or the vocabulary's size when there is nothing to choose by. */
static __device__ uint32_t choose(struct row row, const struct sample_row &params) {
    wide best = row_best(row);
    if (best == 0)
        return row.vocabulary;
    if (params.greedy)
        return rank_id(best);
    row.maximum = key_value((uint32_t)(best >> 32));
    row.scale = params.scale;
    struct cut cut = cut_everything(row);
    if (params.top_k > 0 && params.top_k < row.vocabulary)
        cut = cut_find(row, MEASURE_COUNT, params.top_k);
    if (params.top_p < 1) {
        double goal = (double)params.top_p * (double)cut_mass(row, cut);
        cut = cut_shorter(cut, cut_find(row, MEASURE_MASS, goal));
    }
    if (params.log_min_p > -INFINITY)
        cut = cut_shorter(cut, cut_min_p(row, params.log_min_p));
    return row_walk(row, (double)uniform_of(params), 0,
        [&](uint32_t id, float x) { return cut_has(cut, id, x) ? weight_of(row, x) : 0; });
}

static __device__ float log_probability(float logit, double log_sum) {
    logit = logit > FLT_MAX ? FLT_MAX : logit;
    return logit >= -FLT_MAX ? (float)((double)logit - log_sum) : -INFINITY;
}

static __device__ void report(
    struct row row, const struct sample_row &params, uint32_t token, struct sample_result *result) {
    row.marks = NULL;
    row.lowest = -INFINITY;
    double log_sum = row_log_sum(row);
    if (threadIdx.x == 0)
        result->logprob = log_probability(row.logits[token], log_sum);
    if (params.top_count == 0)
        return;
    struct cut cut = cut_find(row, MEASURE_COUNT, params.top_count);
    uint32_t count = list_ranks(row, [&](uint32_t id, float x) { return cut_has(cut, id, x); });
    if (threadIdx.x == 0)
        result->top_count = count;
    if (threadIdx.x < count) {
        wide rank = row.shared->list[threadIdx.x];
        result->top[threadIdx.x].token = (int32_t)rank_id(rank);
        result->top[threadIdx.x].logprob = log_probability(key_value((uint32_t)(rank >> 32)), log_sum);
    }
}

static __global__ void __launch_bounds__(ROW_THREADS, 1)
    sample(const float *logits, uint32_t vocabulary, const struct sample_row *params, struct sample_result *results) {
    KERNEL_SHARED(struct row_shared, shared);
    struct sample_row own = params[blockIdx.x];
    struct sample_result *result = &results[blockIdx.x];
    struct row row = {logits + (size_t)blockIdx.x * vocabulary, own.marks, own.changes, own.changes_count, vocabulary,
        -FLT_MAX, -INFINITY, 1, shared};
    uint32_t token = (uint32_t)own.forced;
    if (own.forced < 0) {
        token = choose(row, own);
        if (threadIdx.x == 0)
            result->undefined = token == vocabulary;
        token = token == vocabulary ? own.first_allowed : token;
    }
    if (threadIdx.x == 0)
        result->token = (int32_t)token;
    if (own.want_logprob || own.top_count > 0)
        report(row, own, token, result);
}

void launch_sample(const float *logits, uint32_t rows, uint32_t vocabulary, const struct sample_row *params,
    struct sample_result *results, cudaStream_t stream) {
    if (rows > 0)
        KERNEL_LAUNCH(
            sample, rows, ROW_THREADS, sizeof(struct row_shared), stream, logits, vocabulary, params, results);
}
