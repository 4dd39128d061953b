/* SPDX-License-Identifier: Apache-2.0 */
#include "engine/cpu/statistics.h"

#include <float.h>
#include <math.h>
#include <string.h>

enum { ABOVE_WORDS = STATISTIC_ABOVE_BITS / 64 };

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

/* What a block leaves behind. */

size_t statistics_split_bytes(uint32_t needs, uint32_t rows) {
    size_t numbers = (size_t)rows * ATTEND_SPLIT * (needs & STATISTIC_NOISY ? 2 : 1);
    return sizeof(struct statistics_split) + numbers * sizeof(float);
}

static void fill(float numbers[STATISTICS_ROWS], float value) {
    for (uint32_t row = 0; row < STATISTICS_ROWS; row++)
        numbers[row] = value;
}

void statistics_split_clear(const struct statistics_rows *rows, struct statistics_split *split) {
    split->pages = 0;
    fill(split->m, -FLT_MAX);
    fill(split->l, 0);
    if (rows->needs & STATISTIC_NOISY) {
        fill(split->noisy_m, -FLT_MAX);
        fill(split->noisy_l, 0);
    }
}

static float *noisy_numbers(const struct statistics_rows *rows, struct statistics_part part,
    const struct statistics_split *split, uint32_t row) {
    return (float *)split->p + ((size_t)rows->tokens * part.heads + row) * ATTEND_SPLIT;
}

void statistics_row_clear(
    const struct statistics_rows *rows, struct statistics_part part, uint32_t row, struct statistics_split *split) {
    size_t bytes = split->pages * KV_PAGE_SLOTS * sizeof(float);
    memset(split->p + (size_t)row * ATTEND_SPLIT, 0, bytes);
    if (rows->needs & STATISTIC_NOISY)
        memset(noisy_numbers(rows, part, split, row), 0, bytes);
}

/* The row of a ring of the window that a token has. */
static size_t ring_row(const struct statistics_rows *rows, uint32_t token) {
    return (rows->position + token) % rows->to->window;
}

static void expect(const void *memory, size_t bytes) {
    for (size_t at = 0; at < bytes; at += 64)
        __builtin_prefetch((const char *)memory + at, 1, 2);
}

void statistics_expect(const struct statistics_rows *rows, uint32_t split_number, uint32_t pages) {
    const struct kv_statistics *to = rows->to;
    size_t first = (size_t)split_number * ATTEND_SPLIT, slots = pages * KV_PAGE_SLOTS;
    if (rows->needs & STATISTIC_SUM)
        expect(to->sum + first, slots * sizeof *to->sum);
    if (rows->needs & STATISTIC_SQUARED)
        expect(to->squared + first, slots * sizeof *to->squared);
    if (rows->needs & STATISTIC_NOISY)
        expect(to->noisy + first, slots * sizeof *to->noisy);
    if (rows->needs & STATISTIC_WINDOW) {
        expect(to->window_sum + first, slots * sizeof *to->window_sum);
        expect(to->window_rows + ring_row(rows, 0) * to->capacity + first, slots * sizeof *to->window_rows);
    }
    for (uint32_t head = 0; rows->needs & STATISTIC_HEAD_WINDOW && head < rows->group; head++) {
        size_t row = ring_row(rows, 0) * rows->group + head;
        expect(to->head_rows + row * to->capacity + first, slots * sizeof *to->head_rows);
    }
}

/* Finaliser of SplitMix64 (Steele et al. 2014). */
static uint64_t mix(uint64_t x) {
    x += 0x9e3779b97f4a7c15u;
    x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9u;
    x = (x ^ (x >> 27)) * 0x94d049bb133111ebu;
    return x ^ (x >> 31);
}

/* tau is 1 for the queries of the prompt and 1 + 0.01 n for the n-th decoded token (Adnan 2024). */
static float noise_tau(const struct statistics_rows *rows, uint32_t position) {
    return position < rows->prompt ? 1 : 1 + 0.01f * (float)(position - rows->prompt + 1);
}

void statistics_add_noise(const struct statistics_kernels *kernels, const struct statistics_rows *rows,
    struct statistics_part part, uint32_t row, const float *scores, const int32_t *const *positions,
    const struct attend_kernels *attend, struct statistics_split *split) {
    uint32_t token = row / part.heads, head = part.head + row % part.heads, position = rows->position + token;
    uint64_t key = mix(mix(mix(mix(rows->to->seed) ^ rows->layer) ^ head) ^ position);
    float *noisy = noisy_numbers(rows, part, split, row), factor = 1 / noise_tau(rows, position);
    kernels->noise(key, scores, positions, split->pages, factor, noisy);
    split->noisy_m[row] = attend->softmax(noisy, split->masks[token], split->pages, &split->noisy_l[row]);
}

/* Totals. */

void statistics_begin(struct statistics_totals *totals) {
    memset(totals, 0, sizeof *totals);
    fill(totals->m, -FLT_MAX);
    fill(totals->noisy_m, -FLT_MAX);
}

/* Adds sums l of p and t of p ln p, p relative to m, to a row's, all relative to the larger maximum. */
static void entropy_total(
    float m, double weight, double weighted, uint32_t row, float before, struct statistics_totals *to) {
    double kept_below = (double)before - (double)to->m[row], added_below = (double)m - (double)to->m[row];
    double keep = exp(kept_below), add = exp(added_below);
    double kept = to->weighted[row] + kept_below * to->weight[row];
    to->weighted[row] = keep * kept + add * (weighted + added_below * weight);
    to->weight[row] = keep * to->weight[row] + add * weight;
}

void statistics_total(const struct statistics_kernels *kernels, const struct statistics_rows *rows,
    struct statistics_part part, const struct statistics_split *split, struct statistics_totals *totals) {
    if (split->pages == 0)
        return;
    uint32_t count = rows->tokens * part.heads;
    float before[STATISTICS_ROWS];
    memcpy(before, totals->m, sizeof before);
    kernels->merge(count, split->m, split->l, totals->m, totals->l);
    if (rows->needs & STATISTIC_NOISY)
        kernels->merge(count, split->noisy_m, split->noisy_l, totals->noisy_m, totals->noisy_l);
    for (uint32_t row = 0; rows->needs & STATISTIC_ENTROPY && row < count; row++) {
        if (split->l[row] != 0)
            entropy_total(split->m[row], (double)split->l[row], (double)split->t[row], row, before[row], totals);
    }
    for (uint32_t token = 0; rows->needs & STATISTIC_ABOVE && token < rows->tokens; token++) {
        for (uint32_t page = 0; page < split->pages; page++)
            totals->visible[token] += (uint32_t)__builtin_popcount(split->masks[token][page]);
    }
}

void statistics_total_summary(const struct statistics_kernels *kernels, const struct statistics_rows *rows,
    struct statistics_part part, const float scores[STATISTICS_ROWS], struct statistics_totals *totals) {
    uint32_t count = rows->tokens * part.heads;
    float before[STATISTICS_ROWS], one[STATISTICS_ROWS], noisy[STATISTICS_ROWS];
    memcpy(before, totals->m, sizeof before);
    fill(one, 1);
    kernels->merge(count, scores, one, totals->m, totals->l);
    if (rows->needs & STATISTIC_NOISY) {
        fill(noisy, 0);
        for (uint32_t row = 0; row < count; row++)
            noisy[row] = scores[row] * (1 / noise_tau(rows, rows->position + row / part.heads));
        kernels->merge(count, noisy, one, totals->noisy_m, totals->noisy_l);
    }
    for (uint32_t row = 0; rows->needs & STATISTIC_ENTROPY && row < count; row++)
        entropy_total(scores[row], 1, 0, row, before[row], totals);
    for (uint32_t token = 0; rows->needs & STATISTIC_ABOVE && token < rows->tokens; token++)
        totals->visible[token]++;
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

/* The sweep. */

/* A split's rows with the factors that make its p probabilities. */
struct sweep {
    const struct statistics_kernels *kernels;
    const struct statistics_rows *rows;
    const struct statistics_split *split;
    size_t first_slot;
    const struct statistics_totals *totals;
    struct statistics_source plain, squares, noisy;
    float factors[STATISTICS_ROWS], noisy_factors[STATISTICS_ROWS];
};

static void sweep_begin(struct sweep *sweep, struct statistics_part part) {
    const struct statistics_split *split = sweep->split;
    const struct statistics_totals *totals = sweep->totals;
    uint32_t count = sweep->rows->tokens * part.heads;
    sweep->kernels->factors(count, split->m, totals->m, totals->l, sweep->factors);
    if (sweep->rows->needs & STATISTIC_NOISY)
        sweep->kernels->factors(count, split->noisy_m, totals->noisy_m, totals->noisy_l, sweep->noisy_factors);
    sweep->plain = (struct statistics_source){.p = split->p,
        .factors = sweep->factors,
        .heads = part.heads,
        .scale = 1 / (float)sweep->rows->group,
        .pages = split->pages,
        .places = split->places};
    sweep->squares = sweep->noisy = sweep->plain;
    sweep->noisy.factors = sweep->noisy_factors;
    sweep->noisy.p = noisy_numbers(sweep->rows, part, split, 0);
}

static struct statistics_source token_source(const struct statistics_source *from, uint32_t token) {
    struct statistics_source source = *from;
    source.p += (size_t)token * from->heads * ATTEND_SPLIT;
    source.factors += token * from->heads;
    return source;
}

/* Every row of a part has its own ring row in head_rows. */
static void sweep_heads(const struct sweep *sweep, struct statistics_part part) {
    const struct statistics_rows *rows = sweep->rows;
    const struct kv_statistics *to = rows->to;
    for (uint32_t token = rows->window_token; token < rows->tokens; token++) {
        for (uint32_t head = 0; head < part.heads; head++) {
            struct statistics_source source = token_source(&sweep->plain, token);
            source.p += (size_t)head * ATTEND_SPLIT;
            source.factors += head;
            source.heads = 1;
            source.scale = 1;
            size_t row = ring_row(rows, token) * rows->group + part.first + head;
            sweep->kernels->window(&source, sweep->split->masks[token], NULL,
                to->head_rows + row * to->capacity + sweep->first_slot, NULL);
        }
    }
}

static void sweep_window(const struct sweep *sweep) {
    const struct statistics_rows *rows = sweep->rows;
    const struct kv_statistics *to = rows->to;
    for (uint32_t token = rows->window_token; token < rows->tokens; token++) {
        struct statistics_source source = token_source(&sweep->plain, token);
        sweep->kernels->window(&source, sweep->split->masks[token], sweep->split->counted[token],
            to->window_rows + ring_row(rows, token) * to->capacity + sweep->first_slot,
            to->window_sum + sweep->first_slot);
    }
}

/* A token's bit of the slots that it sees. Most stay as they are, and need not be written back to memory. */
static void sweep_above_token(const struct sweep *sweep, uint32_t token) {
    const struct statistics_rows *rows = sweep->rows;
    const uint16_t *masks = sweep->split->masks[token];
    uint32_t bit = (rows->position + token) % rows->to->history;
    uint64_t mask = 1ull << bit % 64;
    uint16_t above[ATTEND_PAGES];
    struct statistics_source source = token_source(&sweep->plain, token);
    sweep->kernels->above(&source, masks, 1 / (float)sweep->totals->visible[token], above);
    for (uint32_t page = 0; page < sweep->split->pages; page++) {
        size_t first = sweep->first_slot + sweep->split->places[page] * KV_PAGE_SLOTS;
        uint64_t *words = rows->to->above + first * ABOVE_WORDS + bit / 64;
        for (uint32_t seen = masks[page]; seen != 0; seen &= seen - 1) {
            uint32_t slot = (uint32_t)__builtin_ctz(seen);
            uint64_t old = words[slot * ABOVE_WORDS], new = above[page] >> slot & 1 ? old | mask : old & ~mask;
            if (new != old)
                words[slot * ABOVE_WORDS] = new;
        }
    }
}

static void sweep_count(const struct sweep *sweep) {
    const struct statistics_rows *rows = sweep->rows;
    const struct statistics_kernels *kernels = sweep->kernels;
    size_t low = sweep->first_slot, high = low + rows->to->capacity;
    if (rows->needs & STATISTIC_SUM)
        kernels->count(&sweep->plain, rows->tokens, rows->to->sum + low, rows->to->sum + high);
    if (rows->needs & STATISTIC_SQUARED && sweep->squares.p == sweep->plain.p)
        kernels->count_squares(&sweep->squares, rows->tokens, rows->to->squared + low, rows->to->squared + high);
    else if (rows->needs & STATISTIC_SQUARED) /* added up before */
        kernels->count(&sweep->squares, rows->tokens, rows->to->squared + low, rows->to->squared + high);
    if (rows->needs & STATISTIC_NOISY)
        kernels->count(&sweep->noisy, rows->tokens, rows->to->noisy + low, rows->to->noisy + high);
    if (rows->needs & STATISTIC_WINDOW)
        sweep_window(sweep);
    for (uint32_t token = rows->above_token; rows->needs & STATISTIC_ABOVE && token < rows->tokens; token++)
        sweep_above_token(sweep, token);
}

static struct sweep sweep_of(const struct statistics_kernels *kernels, const struct statistics_rows *rows,
    const struct statistics_split *split, uint32_t split_number, const struct statistics_totals *totals) {
    return (struct sweep){.kernels = kernels,
        .rows = rows,
        .split = split,
        .first_slot = (size_t)split_number * ATTEND_SPLIT,
        .totals = totals};
}

void statistics_gather(const struct statistics_kernels *kernels, const struct statistics_rows *rows,
    struct statistics_part part, const struct statistics_split *split, uint32_t split_number,
    const struct statistics_totals *totals, struct statistics_work *work) {
    if (split->pages == 0)
        return;
    struct sweep sweep = sweep_of(kernels, rows, split, split_number, totals);
    sweep_begin(&sweep, part);
    if (rows->needs & STATISTIC_HEAD_WINDOW)
        sweep_heads(&sweep, part);
    if (part.heads == rows->group)
        return; /* statistics_count takes p itself */
    kernels->add(&sweep.plain, part.first > 0, work->mean);
    if (rows->needs & STATISTIC_SQUARED)
        kernels->add_squares(&sweep.squares, part.first > 0, work->square);
    if (rows->needs & STATISTIC_NOISY)
        kernels->add(&sweep.noisy, part.first > 0, work->noisy);
}

void statistics_count(const struct statistics_kernels *kernels, const struct statistics_rows *rows,
    struct statistics_part part, const struct statistics_split *split, uint32_t split_number,
    const struct statistics_totals *totals, const struct statistics_work *work) {
    static const float one[1] = {1};
    if (split->pages == 0)
        return;
    struct sweep sweep = sweep_of(kernels, rows, split, split_number, totals);
    sweep_begin(&sweep, part);
    if (part.heads < rows->group) {
        sweep.plain.heads = sweep.squares.heads = sweep.noisy.heads = 1;
        sweep.plain.factors = sweep.squares.factors = sweep.noisy.factors = one;
        sweep.plain.p = work->mean;
        sweep.squares.p = work->square;
        sweep.noisy.p = work->noisy;
    }
    sweep_count(&sweep);
}

static const struct statistics_split *split_at(const struct statistics_split *splits, size_t bytes, uint32_t split) {
    return (const struct statistics_split *)((const char *)splits + split * bytes);
}

void statistics_add(const struct statistics_kernels *kernels, const struct statistics_rows *rows,
    struct statistics_part part, const struct statistics_split *splits, size_t bytes, uint32_t splits_count,
    const float *summary, pthread_mutex_t *lock) {
    struct statistics_totals totals;
    statistics_begin(&totals);
    for (uint32_t split = 0; split < splits_count; split++)
        statistics_total(kernels, rows, part, split_at(splits, bytes, split), &totals);
    if (summary != NULL)
        statistics_total_summary(kernels, rows, part, summary, &totals);
    if (rows->needs & STATISTIC_ENTROPY) {
        double sums[ATTEND_ROWS] = {0};
        statistics_entropy(rows, part, &totals, sums);
        statistics_store_entropy(rows, sums);
    }
    if ((rows->needs & ~(uint32_t)STATISTIC_ENTROPY) == 0)
        return;
    pthread_mutex_lock(lock);
    for (uint32_t split = 0; split < splits_count; split++) {
        struct sweep sweep = sweep_of(kernels, rows, split_at(splits, bytes, split), split, &totals);
        if (sweep.split->pages == 0)
            continue;
        sweep_begin(&sweep, part);
        if (rows->needs & STATISTIC_HEAD_WINDOW)
            sweep_heads(&sweep, part);
        sweep_count(&sweep);
    }
    pthread_mutex_unlock(lock);
}
