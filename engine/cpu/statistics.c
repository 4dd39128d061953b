/* SPDX-License-Identifier: Apache-2.0 */
#include "engine/cpu/statistics.h"

#include <float.h>
#include <math.h>
#include <string.h>

const struct statistics_kernels *cpu_statistics_kernels(enum cpu_tier tier) {
#if defined(__x86_64__)
    if (tier >= CPU_AVX512)
        return &statistics_kernels_avx512;
    if (tier >= CPU_AVX2)
        return &statistics_kernels_avx2;
#endif
    (void)tier;
    return &statistics_kernels_scalar;
}

size_t statistics_split_bytes(uint32_t needs, uint32_t rows) {
    size_t numbers = (size_t)rows * ATTEND_SPLIT * (needs & STATISTIC_NOISY ? 2 : 1);
    return sizeof(struct statistics_split) + numbers * sizeof(float);
}

static void fill(float *numbers, float value) {
    for (uint32_t row = 0; row < STATISTICS_ROWS; row++)
        numbers[row] = value;
}

void statistics_split_clear(struct statistics_split *split) {
    split->pages = 0;
    fill(split->m, -FLT_MAX);
    fill(split->l, 0);
    fill(split->t, 0);
    fill(split->noisy_m, -FLT_MAX);
    fill(split->noisy_l, 0);
}

void statistics_begin(struct statistics_totals *totals) {
    memset(totals, 0, sizeof *totals);
    fill(totals->m, -FLT_MAX);
    fill(totals->noisy_m, -FLT_MAX);
}

/* Finaliser of SplitMix64 (Steele et al. 2014). */
static uint64_t mix(uint64_t x) {
    x += 0x9e3779b97f4a7c15ull;
    x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9ull;
    x = (x ^ (x >> 27)) * 0x94d049bb133111ebull;
    return x ^ (x >> 31);
}

static float gumbel(uint64_t key, uint32_t position) {
    double uniform = ((double)(mix(key ^ position) >> 11) + 0.5) * 0x1p-53;
    return (float)-log(-log(uniform));
}

static float *noisy_numbers(const struct statistics_rows *rows, struct statistics_part part,
    const struct statistics_split *split, uint32_t row) {
    return (float *)split->p + ((size_t)rows->tokens * part.heads + row) * ATTEND_SPLIT;
}

/* tau is 1 for the queries of the prompt and 1 + 0.01 n for the n-th decoded token (Adnan 2024). */
static float noise_tau(const struct statistics_rows *rows, uint32_t position) {
    return position < rows->prompt ? 1 : 1 + 0.01f * (float)(position - rows->prompt + 1);
}

void statistics_add_noise(const struct statistics_rows *rows, struct statistics_part part, uint32_t token,
    uint32_t head, const float *scores, const int32_t *const *positions, const struct attend_kernels *kernels,
    struct statistics_split *split) {
    uint32_t position = rows->position + token, row = token * part.heads + head;
    uint64_t key = mix(mix(mix(rows->to->seed) ^ rows->layer) ^ (part.head + head));
    key = mix(key ^ position);
    float *noisy = noisy_numbers(rows, part, split, row), factor = 1 / noise_tau(rows, position);
    for (uint32_t i = 0; i < split->pages * KV_PAGE_SLOTS; i++) {
        int32_t slot = positions[i / KV_PAGE_SLOTS][i % KV_PAGE_SLOTS];
        noisy[i] = (scores[i] + gumbel(key, (uint32_t)slot)) * factor;
    }
    split->noisy_m[row] = kernels->softmax(noisy, split->masks[token], split->pages, &split->noisy_l[row]);
}

/* Adds a split's sums of p and p ln p to a row's, all relative to the larger maximum. */
static void entropy_total(
    const struct statistics_split *split, uint32_t row, float before, struct statistics_totals *to) {
    double m = to->m[row], keep = exp((double)before - m), add = exp((double)split->m[row] - m);
    double weight = split->l[row], weighted = split->t[row];
    double kept = to->weighted[row] + ((double)before - m) * to->weight[row];
    to->weighted[row] = keep * kept + add * (weighted + ((double)split->m[row] - m) * weight);
    to->weight[row] = keep * to->weight[row] + add * weight;
}

void statistics_total(const struct statistics_kernels *kernels, const struct statistics_rows *rows,
    struct statistics_part part, const struct statistics_split *split, struct statistics_totals *totals) {
    if (split->pages == 0)
        return;
    float before[STATISTICS_ROWS];
    memcpy(before, totals->m, sizeof before);
    kernels->merge(split->m, split->l, totals->m, totals->l);
    if (rows->needs & STATISTIC_NOISY)
        kernels->merge(split->noisy_m, split->noisy_l, totals->noisy_m, totals->noisy_l);
    for (uint32_t row = 0; rows->needs & STATISTIC_ENTROPY && row < rows->tokens * part.heads; row++) {
        if (split->l[row] != 0)
            entropy_total(split, row, before[row], totals);
    }
    for (uint32_t token = 0; rows->needs & STATISTIC_ABOVE && token < rows->tokens; token++) {
        for (uint32_t page = 0; page < split->pages; page++)
            totals->visible[token] += (uint32_t)__builtin_popcount(split->masks[token][page]);
    }
}

/* Whether a token's mean over the group is wanted. */
static bool wants_mean(const struct statistics_rows *rows, uint32_t token) {
    return rows->needs & STATISTIC_SUM || (rows->needs & STATISTIC_WINDOW && token >= rows->window_token) ||
           (rows->needs & STATISTIC_ABOVE && token >= rows->above_token);
}

static bool sees(const struct statistics_split *split, struct statistics_part part, uint32_t token) {
    return split->l[token * part.heads] != 0;
}

/* A token's ring row in head_rows. */
static void gather_heads(const struct statistics_kernels *kernels, const struct statistics_rows *rows,
    struct statistics_part part, const struct statistics_split *split, uint32_t split_number, uint32_t token,
    const float *factors) {
    const struct kv_statistics *to = rows->to;
    size_t ring = (size_t)((rows->position + token) % to->window) * rows->group + part.first;
    for (uint32_t head = 0; head < part.heads; head++) {
        uint32_t row = token * part.heads + head;
        kernels->head(split->p + (size_t)row * ATTEND_SPLIT, split->masks[token], split->pages, split->places,
            factors[row], to->head_rows + (ring + head) * to->capacity + (size_t)split_number * ATTEND_SPLIT);
    }
}

void statistics_gather(const struct statistics_kernels *kernels, const struct statistics_rows *rows,
    struct statistics_part part, const struct statistics_split *split, uint32_t split_number,
    const struct statistics_totals *totals, struct statistics_work *work) {
    if (split->pages == 0)
        return;
    float factors[STATISTICS_ROWS], noisy[STATISTICS_ROWS];
    uint32_t pages = split->pages, heads = part.heads;
    size_t bytes = pages * KV_PAGE_SLOTS * sizeof(float);
    bool more = part.first > 0;
    kernels->factors(split->m, totals->m, totals->l, factors);
    if (rows->needs & STATISTIC_NOISY)
        kernels->factors(split->noisy_m, totals->noisy_m, totals->noisy_l, noisy);
    for (uint32_t token = 0; token < rows->tokens; token++) {
        uint32_t row = token * heads;
        if (!sees(split, part, token)) {
            memset(work->mean[token], 0, bytes);
            memset(work->square[token], 0, bytes);
            memset(work->noisy[token], 0, bytes);
            continue;
        }
        const float *p = split->p + (size_t)row * ATTEND_SPLIT;
        if (wants_mean(rows, token))
            kernels->mean(p, factors + row, heads, pages, more, work->mean[token]);
        if (rows->needs & STATISTIC_SQUARED)
            kernels->square(p, factors + row, heads, pages, more, work->square[token]);
        if (rows->needs & STATISTIC_NOISY)
            kernels->mean(noisy_numbers(rows, part, split, row), noisy + row, heads, pages, more, work->noisy[token]);
        if (rows->needs & STATISTIC_HEAD_WINDOW && token >= rows->window_token)
            gather_heads(kernels, rows, part, split, split_number, token, factors);
    }
}

/* Writes a token's bit of the slots that it sees. */
static void count_above(const struct statistics_kernels *kernels, const struct statistics_rows *rows,
    const struct statistics_split *split, uint32_t split_number, const struct statistics_totals *totals, uint32_t token,
    const float *mean, float scale) {
    enum { WORDS = STATISTIC_ABOVE_BITS / 64 };
    uint32_t bit = (rows->position + token) % rows->to->history;
    uint64_t mask = 1ull << bit % 64;
    uint16_t above[ATTEND_PAGES];
    kernels->above(mean, split->masks[token], split->pages, scale, 1 / (float)totals->visible[token], above);
    for (uint32_t page = 0; page < split->pages; page++) {
        size_t slots = (size_t)split_number * ATTEND_SPLIT + split->places[page] * KV_PAGE_SLOTS;
        uint64_t *words = rows->to->above + slots * WORDS + bit / 64;
        for (uint32_t seen = split->masks[token][page]; seen != 0; seen &= seen - 1) {
            uint32_t slot = (uint32_t)__builtin_ctz(seen);
            uint64_t old = words[slot * WORDS], new = above[page] >> slot & 1 ? old | mask : old & ~mask;
            if (new != old) /* most stay, and need not be written back to memory */
                words[slot * WORDS] = new;
        }
    }
}

void statistics_count(const struct statistics_kernels *kernels, const struct statistics_rows *rows,
    const struct statistics_split *split, uint32_t split_number, const struct statistics_totals *totals,
    const struct statistics_work *work) {
    if (split->pages == 0)
        return;
    const struct kv_statistics *to = rows->to;
    size_t first = (size_t)split_number * ATTEND_SPLIT;
    float scale = 1 / (float)rows->group;
    uint32_t tokens = rows->tokens, pages = split->pages;
    if (rows->lock != NULL)
        pthread_mutex_lock(rows->lock);
    if (rows->needs & STATISTIC_SUM)
        kernels->count(work->mean[0], tokens, pages, split->places, scale, to->sum + first);
    if (rows->needs & STATISTIC_SQUARED)
        kernels->count(work->square[0], tokens, pages, split->places, scale, to->squared + first);
    if (rows->needs & STATISTIC_NOISY)
        kernels->count(work->noisy[0], tokens, pages, split->places, scale, to->noisy + first);
    for (uint32_t token = rows->window_token; rows->needs & STATISTIC_WINDOW && token < tokens; token++) {
        uint16_t *ring = to->window_rows + (size_t)((rows->position + token) % to->window) * to->capacity;
        kernels->window(
            work->mean[token], split->masks[token], pages, split->places, scale, ring + first, to->window_sum + first);
    }
    for (uint32_t token = rows->above_token; rows->needs & STATISTIC_ABOVE && token < tokens; token++)
        count_above(kernels, rows, split, split_number, totals, token, work->mean[token], scale);
    if (rows->lock != NULL)
        pthread_mutex_unlock(rows->lock);
}

void statistics_entropy(const struct statistics_rows *rows, struct statistics_part part,
    const struct statistics_totals *totals, double sums[ATTEND_ROWS]) {
    for (uint32_t row = 0; row < rows->tokens * part.heads; row++) {
        if (totals->weight[row] > 0) /* else the row sees nothing */
            sums[row / part.heads] += log(totals->weight[row]) - totals->weighted[row] / totals->weight[row];
    }
}

void statistics_store_entropy(const struct statistics_rows *rows, const double sums[ATTEND_ROWS]) {
    for (uint32_t token = 0; token < rows->tokens; token++) {
        double mean = sums[token] / rows->group;
        rows->to->entropy[rows->own_slot + token] = float_to_half(mean > 0 ? (float)mean : 0); /* not NaN */
    }
}
