/* SPDX-License-Identifier: Apache-2.0
 *
 * Statistics of attention: what attend.c hands over, and how it is added to struct kv_statistics. attend.c is the only
 * caller.
 *
 * A block of rows (attend.c) leaves each split with its probabilities relative to the split's own maximum. When all
 * splits of the block are there, they are merged into each row's m and l (struct statistics_totals), and one sweep
 * over what was left turns them into probabilities, means over the group, and integers:
 *   statistics_begin; statistics_total for each split in ascending order;
 *   then for each split statistics_gather and statistics_count. Entropies follow from the totals alone.
 * A group of more than ATTEND_ROWS query heads comes in parts, each with its own totals: statistics_gather is called
 * for each part in ascending order before statistics_count. All sums are integers, so blocks may come in any order;
 * statistics_count is the only function that writes what several blocks of a KV head share, under `lock`.
 */
#ifndef ENGINE_CPU_STATISTICS_H
#define ENGINE_CPU_STATISTICS_H

#include "engine/cpu/attend.h"

#include <pthread.h>

/* Numbers by row, rounded up to whole vectors. */
enum { STATISTICS_ROWS = (ATTEND_ROWS + 15) / 16 * 16 };

/* What attend can record of rows: the others are not its business, or need no probabilities (outputs). */
enum {
    STATISTICS_SWEPT = STATISTIC_SUM | STATISTIC_SQUARED | STATISTIC_WINDOW | STATISTIC_HEAD_WINDOW | STATISTIC_ABOVE |
                       STATISTIC_ENTROPY | STATISTIC_NOISY,
};

/* Kernels over sixteen lanes (statistics_body.h); every tier gives the same bits. Rows of numbers by slot are
 * ATTEND_SPLIT apart; `places` [pages] say which page of the split each is, and arrays of a whole split begin at its
 * first slot. share(x) is x * scale, limited to [0, 1], 0 for NaN. */
struct statistics_kernels {
    /* factors = exp(m - total_m) / total_l, by row. */
    void (*factors)(const float *m, const float *total_m, const float *total_l, float *factors);
    /* Merges a split's m and l of all rows into the totals; rows that see nothing have m -FLT_MAX, l 0. */
    void (*merge)(const float *m, const float *l, float *total_m, float *total_l);
    /* total (more: +)= sum over rows, in order, of p * factor (or of its square). */
    void (*mean)(const float *p, const float *factors, uint32_t rows, uint32_t pages, bool more, float *total);
    void (*square)(const float *p, const float *factors, uint32_t rows, uint32_t pages, bool more, float *total);
    /* sum += rint(share(x) * 2^24), over tokens. */
    void (*count)(const float *x, uint32_t tokens, uint32_t pages, const uint8_t *places, float scale, uint64_t *sum);
    /* A row of the window: ring = f16(share(x)) in the lanes of masks, and sum += what that changes, times 2^24. */
    void (*window)(const float *x, const uint16_t *masks, uint32_t pages, const uint8_t *places, float scale,
        uint16_t *ring, uint32_t *sum);
    /* The same without a sum. */
    void (*head)(
        const float *x, const uint16_t *masks, uint32_t pages, const uint8_t *places, float scale, uint16_t *ring);
    /* above = masks of the lanes where share(x) > limit. */
    void (*above)(const float *x, const uint16_t *masks, uint32_t pages, float scale, float limit, uint16_t *above);
};

extern const struct statistics_kernels statistics_kernels_scalar, statistics_kernels_avx2, statistics_kernels_avx512;

/* Rows of one KV head of one item: `tokens` consecutive tokens, each with its group of query heads. */
struct statistics_rows {
    const struct kv_statistics *to;
    uint32_t needs;    /* those of STATISTICS_SWEPT that some token needs */
    uint32_t layer;    /* noise is a function of these */
    uint32_t position; /* of the first token */
    uint32_t tokens;
    uint32_t group;        /* all query heads of the KV head */
    uint32_t own_slot;     /* of the first token */
    uint32_t prompt;       /* struct kv_item */
    uint32_t window_token; /* the first token that is counted in windows */
    uint32_t above_token;  /* the first that is counted in the history */
    pthread_mutex_t *lock; /* NULL: no other thread works on this KV head */
};

/* A part of the group's query heads: those from `head` (counted from the layer's first) on, `first` of the group. */
struct statistics_part {
    uint32_t head;
    uint32_t first;
    uint32_t heads;
};

/* One split of one block: row = token * heads of the part + query head. */
struct statistics_split {
    uint32_t pages;                            /* that some row sees */
    uint8_t places[ATTEND_PAGES];              /* which of the split's pages they are */
    uint16_t masks[ATTEND_ROWS][ATTEND_PAGES]; /* the slots that each token sees */
    float m[STATISTICS_ROWS], l[STATISTICS_ROWS];
    float t[STATISTICS_ROWS]; /* with STATISTIC_ENTROPY: sum of p ln p, p relative to m */
    float noisy_m[STATISTICS_ROWS], noisy_l[STATISTICS_ROWS];
    /* p [rows][ATTEND_SPLIT]; with STATISTIC_NOISY the noisy ones [rows][ATTEND_SPLIT] after them. */
    float p[] __attribute__((aligned(64)));
};

/* Bytes of a split, a multiple of 64. */
size_t statistics_split_bytes(uint32_t needs, uint32_t rows);

struct statistics_totals {
    float m[STATISTICS_ROWS], l[STATISTICS_ROWS];
    float noisy_m[STATISTICS_ROWS], noisy_l[STATISTICS_ROWS];
    double weight[ATTEND_ROWS], weighted[ATTEND_ROWS]; /* sums of p, of p ln p, relative to m */
    uint32_t visible[ATTEND_ROWS];                     /* slots that each token sees */
};

/* What statistics_gather leaves for statistics_count. */
struct statistics_work {
    float mean[ATTEND_ROWS][ATTEND_SPLIT] __attribute__((aligned(64)));
    float square[ATTEND_ROWS][ATTEND_SPLIT] __attribute__((aligned(64)));
    float noisy[ATTEND_ROWS][ATTEND_SPLIT] __attribute__((aligned(64)));
};

/* A split that no row sees anything of yet. */
void statistics_split_clear(struct statistics_split *split);

/* Fills the noisy part of a split, for one row: scores [pages * P] are its logits, `positions` of each page. */
void statistics_add_noise(const struct statistics_rows *rows, struct statistics_part part, uint32_t token,
    uint32_t head, const float *scores, const int32_t *const *positions, const struct attend_kernels *kernels,
    struct statistics_split *split);

void statistics_begin(struct statistics_totals *totals);
void statistics_total(const struct statistics_kernels *kernels, const struct statistics_rows *rows,
    struct statistics_part part, const struct statistics_split *split, struct statistics_totals *totals);
void statistics_gather(const struct statistics_kernels *kernels, const struct statistics_rows *rows,
    struct statistics_part part, const struct statistics_split *split, uint32_t split_number,
    const struct statistics_totals *totals, struct statistics_work *work);
void statistics_count(const struct statistics_kernels *kernels, const struct statistics_rows *rows,
    const struct statistics_split *split, uint32_t split_number, const struct statistics_totals *totals,
    const struct statistics_work *work);
/* Adds the entropies of a part's rows to sums, by token. */
void statistics_entropy(const struct statistics_rows *rows, struct statistics_part part,
    const struct statistics_totals *totals, double sums[ATTEND_ROWS]);
void statistics_store_entropy(const struct statistics_rows *rows, const double sums[ATTEND_ROWS]);

#endif
