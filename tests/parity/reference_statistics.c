/* SPDX-License-Identifier: Apache-2.0 */
#include "tests/parity/reference_statistics.h"

#include <math.h>
#include <stdlib.h>

static void *memory(size_t count, size_t bytes) {
    void *result = calloc(count + 1, bytes);
    if (result == NULL)
        abort();
    return result;
}

/* SplitMix64's finaliser (Steele et al. 2014). */
static uint64_t mix(uint64_t x) {
    x += 0x9E3779B97F4A7C15u;
    x ^= x >> 30;
    x *= 0xBF58476D1CE4E5B9u;
    x ^= x >> 27;
    x *= 0x94D049BB133111EBu;
    return x ^ x >> 31;
}

double reference_gumbel(uint64_t seed, uint32_t layer, uint32_t head, uint32_t query, uint32_t slot) {
    uint64_t bits = mix(mix(mix(mix(mix(seed) ^ layer) ^ head) ^ query) ^ slot);
    double uniform = ((double)(bits >> 11) + 0.5) / 9007199254740992.0;
    return -log(-log(uniform));
}

static int64_t slot_position(const struct reference_pool *pool, const struct kv_head_view *view, uint32_t slot) {
    int32_t position = *reference_position(pool, view->pages[slot / KV_PAGE_SLOTS], slot % KV_PAGE_SLOTS);
    return position == KV_NO_POSITION ? INT64_MAX : position;
}

/* The logit of a query and a key, of their product. */
static double varied(double product, struct reference_variant variant, uint32_t dim) {
    double x = variant.scale != 0 ? product * variant.scale : product / sqrt(dim);
    return variant.cap != 0 ? variant.cap * tanh(x / variant.cap) : x;
}

/* The summary's key is that of a slot, and its logit is added. */
static double summary_logit(const float *summary, struct reference_variant variant, uint32_t dim, const float *query) {
    double sum = 0;
    if (summary == NULL)
        return -INFINITY;
    for (uint32_t channel = 0; channel < dim; channel++)
        sum += (double)query[channel] * (double)summary[channel];
    return varied(sum, variant, dim) + (double)summary[2 * dim];
}

static double logit(const struct reference_pool *pool, const struct kv_head_view *view,
    struct reference_variant variant, uint32_t slot, const float *query) {
    uint32_t dim = pool->layout.head_dim;
    double sum = 0;
    for (uint32_t channel = 0; channel < dim; channel++) {
        const unsigned char *key =
            reference_key(pool, view->pages[slot / KV_PAGE_SLOTS], slot % KV_PAGE_SLOTS, channel);
        sum += (double)query[channel] * reference_number(pool->layout.format, key);
    }
    return varied(sum, variant, dim);
}

/* x [slots] becomes its softmax over the visible slots and the summary, 0 elsewhere. Returns the summary's part of it,
 * whose score is -infinity if there is none. */
static double softmax(double *x, const bool *visible, uint32_t slots, double summary) {
    double most = summary, sum = 0;
    for (uint32_t slot = 0; slot < slots; slot++)
        most = visible[slot] ? fmax(most, x[slot]) : most;
    for (uint32_t slot = 0; slot < slots; slot++) {
        x[slot] = visible[slot] ? exp(x[slot] - most) : 0;
        sum += x[slot];
    }
    sum += exp(summary - most);
    for (uint32_t slot = 0; slot < slots; slot++)
        x[slot] /= sum;
    return exp(summary - most) / sum;
}

struct reference_statistics reference_statistics(const struct reference_pool *pool, const struct kv_item *item,
    const struct kv_head_view *view, const float *summary, struct reference_variant variant, uint32_t kv_head,
    uint32_t layer, uint64_t seed, uint32_t heads, const float *qkv) {
    uint32_t slots = view->slots, dim = pool->layout.head_dim, group = heads / pool->layout.kv_heads;
    size_t stride = (size_t)(heads + 2 * pool->layout.kv_heads) * dim;
    struct reference_statistics s = {
        .slots = slots,
        .rows = item->rows,
        .group = group,
        .visible = memory((size_t)item->rows * slots, sizeof(bool)),
        .p = memory((size_t)item->rows * group * slots, sizeof(double)),
        .a = memory((size_t)item->rows * slots, sizeof(double)),
        .squared = memory(slots, sizeof(double)),
        .noisy = memory(slots, sizeof(double)),
        .entropy = memory(item->rows, sizeof(double)),
    };
    double *noisy = memory(slots, sizeof *noisy);
    for (uint32_t row = 0; row < item->rows; row++) {
        uint32_t position = item->position + row;
        double tau = position < item->prompt ? 1 : 1 + 0.01 * (position - item->prompt + 1);
        bool *visible = s.visible + (size_t)row * slots;
        for (uint32_t slot = 0; slot < slots; slot++)
            visible[slot] = slot_position(pool, view, slot) <= position;
        for (uint32_t g = 0; g < group; g++) {
            double *p = s.p + ((size_t)row * group + g) * slots;
            uint32_t head = kv_head * group + g;
            const float *query = qkv + (item->first_row + row) * stride + (size_t)head * dim;
            for (uint32_t slot = 0; slot < slots; slot++) {
                if (!visible[slot])
                    continue;
                p[slot] = logit(pool, view, variant, slot, query);
                uint32_t at = (uint32_t)slot_position(pool, view, slot);
                noisy[slot] = (p[slot] + reference_gumbel(seed, layer, head, position, at)) / tau;
            }
            double rest = summary_logit(summary, variant, dim, query);
            softmax(noisy, visible, slots, rest / tau); /* without noise of its own */
            rest = softmax(p, visible, slots, rest);
            s.entropy[row] -= rest > 0 ? rest * log(rest) / group : 0;
            for (uint32_t slot = 0; slot < slots; slot++) {
                s.a[(size_t)row * slots + slot] += p[slot] / group;
                s.squared[slot] += p[slot] * p[slot] / group;
                s.noisy[slot] += noisy[slot] / group;
                s.entropy[row] -= p[slot] > 0 ? p[slot] * log(p[slot]) / group : 0;
            }
        }
    }
    free(noisy);
    return s;
}

void reference_statistics_free(struct reference_statistics *s) {
    free(s->visible);
    free(s->p);
    free(s->a);
    free(s->squared);
    free(s->noisy);
    free(s->entropy);
}

uint32_t reference_moments(
    const float *queries, size_t stride, uint32_t position, uint32_t rows, uint32_t dim, double *sum, double *outer) {
    uint32_t count = 0;
    for (uint32_t row = 0; row < rows; row++) {
        const float *query = queries + row * stride;
        if (position + row < 4)
            continue;
        count++;
        for (uint32_t i = 0; i < dim; i++) {
            sum[i] += (double)query[i];
            for (uint32_t j = i; j < dim; j++)
                outer[i * dim + j] += (double)query[i] * (double)query[j];
        }
    }
    return count;
}
