/* SPDX-License-Identifier: Apache-2.0
 *
 * KL(P || Q) as the sum of P (e^d - 1 - d), d = ln(Q / P): what P log(P / Q) is when both sum to 1, but every term is
 * positive and small where P and Q are near each other.
 */
#include "cuda/device.h"

#include "cuda/row.cuh"

/* e^d - 1 - d for |d| <= 1/2, by its series. */
static __device__ __forceinline__ float exp_excess(float d) {
    float sum = 1.0f / 40320;
    sum = fmaf(sum, d, 1.0f / 5040);
    sum = fmaf(sum, d, 1.0f / 720);
    sum = fmaf(sum, d, 1.0f / 120);
    sum = fmaf(sum, d, 1.0f / 24);
    sum = fmaf(sum, d, 1.0f / 6);
    sum = fmaf(sum, d, 0.5f);
    return sum * d * d;
}

/* NaN becomes -infinity, +infinity the largest finite number. */
static __device__ __forceinline__ float clean(float x) {
    x = x >= -INFINITY ? x : -INFINITY;
    return x > FLT_MAX ? FLT_MAX : x;
}

static __device__ __forceinline__ float divergence_term(float p, float q, float p_log, float q_log, double shift) {
    float p_part = number_exp(p - p_log), q_part = number_exp(q - q_log);
    float d = (float)((double)q - (double)p - shift);
    if (d >= -0.5f && d <= 0.5f)
        return p_part * exp_excess(d);
    /* P log(Q / P) is 0 where P is, even if d is infinite there. */
    float crossed = p_part >= FLT_MIN ? p_part * d : 0;
    return q_part - p_part - crossed;
}

static __device__ double block_total(struct row_shared *shared, double x) {
    double *totals = (double *)shared->masses;
    x = warp_sum(x);
    __syncthreads();
    if (threadIdx.x % 32 == 0)
        totals[threadIdx.x / 32] = x;
    __syncthreads();
    return warp_sum(totals[threadIdx.x % 32]);
}

static __global__ void __launch_bounds__(ROW_THREADS, 1)
    divergence(const float *p_logits, const uint32_t *p_rows, const float *q_logits, uint32_t vocabulary, float *out) {
    KERNEL_SHARED(struct row_shared, shared);
    struct row p = {
        p_logits + (size_t)p_rows[blockIdx.x] * vocabulary, NULL, NULL, 0, vocabulary, -INFINITY, -INFINITY, 1, shared};
    struct row q = p;
    q.logits = q_logits + (size_t)blockIdx.x * vocabulary;
    double p_log_sum = row_log_sum(p), q_log_sum = row_log_sum(q), shift = q_log_sum - p_log_sum, sum = 0;
    float p_log = (float)p_log_sum, q_log = (float)q_log_sum;
    if (vocabulary % 4 == 0) {
        for (uint32_t id = 4 * threadIdx.x; id < vocabulary; id += 4 * ROW_THREADS) {
            float4 a = *(const float4 *)(p.logits + id), b = *(const float4 *)(q.logits + id);
            sum += (double)divergence_term(clean(a.x), clean(b.x), p_log, q_log, shift);
            sum += (double)divergence_term(clean(a.y), clean(b.y), p_log, q_log, shift);
            sum += (double)divergence_term(clean(a.z), clean(b.z), p_log, q_log, shift);
            sum += (double)divergence_term(clean(a.w), clean(b.w), p_log, q_log, shift);
        }
    } else {
        for (uint32_t id = threadIdx.x; id < vocabulary; id += ROW_THREADS)
            sum += (double)divergence_term(clean(p.logits[id]), clean(q.logits[id]), p_log, q_log, shift);
    }
    sum = block_total(shared, sum);
    if (threadIdx.x == 0)
        out[blockIdx.x] = sum < 0 ? 0 : (float)sum;
}

void launch_kl(const float *p, const uint32_t *p_rows, const float *q, uint32_t rows, uint32_t vocabulary, float *out,
    cudaStream_t stream) {
    if (rows > 0)
        KERNEL_LAUNCH(divergence, rows, ROW_THREADS, sizeof(struct row_shared), stream, p, p_rows, q, vocabulary, out);
}
