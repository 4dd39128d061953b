/* SPDX-License-Identifier: Apache-2.0
 *
 * Statistics of attention: what attend.c hands over, and how it is added to struct kv_statistics. attend.c is the only
 * caller.
 *
 * A block of rows (attend.c) leaves each split with its probabilities p relative to the split's own maximum. When all
 * splits of the block are there, they are merged into each row's m and l (struct statistics_totals), and one sweep
 * over what was left turns them into probabilities, means over the group, and integers: statistics_add.
 * A group of more than ATTEND_ROWS query heads comes in parts, each with its own totals: then statistics_gather adds up
 * the means part by part, in ascending order, and statistics_count takes those.
 * All sums are integers, so blocks may come in any order; several blocks of a KV head write under its lock.
 */
#ifndef ENGINE_CPU_STATISTICS_H
#define ENGINE_CPU_STATISTICS_H

#include "engine/cpu/attend.h"

/* Numbers by row, rounded up to whole vectors. */
enum { STATISTICS_ROWS = (ATTEND_ROWS + 15) / 16 * 16 };

/* Statistics that are made of probabilities: the others are not attention's business, or outputs. */
enum {
    STATISTICS_SWEPT = STATISTIC_SUM | STATISTIC_SQUARED | STATISTIC_WINDOW | STATISTIC_HEAD_WINDOW | STATISTIC_ABOVE |
                       STATISTIC_ENTROPY | STATISTIC_NOISY,
};

/* Some tokens of a split. Rows are ATTEND_SPLIT apart, token after token, each with `heads` rows; the share of a slot
 * is the sum over a token's rows, in order, of p * factor (or its square), times scale; limited to [0, 1], 0 for NaN.
 */
struct statistics_source {
    const float *p;
    const float *factors; /* [tokens * heads] */
    uint32_t heads;
    float scale;
    uint32_t pages;
    const uint8_t *places; /* [pages] which pages of the split they are */
};

/* Kernels over sixteen lanes (statistics_body.h); every tier gives the same bits. Arrays by slot begin at the split's
 * first slot. */
struct statistics_kernels {
    /* factors = exp(m - total_m) / total_l, by row. */
    void (*factors)(uint32_t rows, const float *m, const float *total_m, const float *total_l, float *factors);
    /* Merges a split's m and l into the totals, as attention does; rows that see nothing have m -FLT_MAX, l 0. */
    void (*merge)(uint32_t rows, const float *m, const float *l, float *total_m, float *total_l);
    /* sum += rint(share * 2^24), over at most ATTEND_ROWS tokens; low, high: the sum's planes. squares: of the sum of
     * squares. */
    void (*count)(const struct statistics_source *from, uint32_t tokens, uint32_t *low, uint32_t *high);
    void (*count_squares)(const struct statistics_source *from, uint32_t tokens, uint32_t *low, uint32_t *high);
    /* One token's row of the window: ring = f16(share) in the lanes of masks [pages], and sum += what that changes,
     * times 2^24, where what lanes outside `counted` [pages] held counts as 0; sum, counted NULL: there is none. */
    void (*window)(const struct statistics_source *from, const uint16_t *masks, const uint16_t *counted, uint16_t *ring,
        uint32_t *sum);
    /* above [pages] = masks of one token's lanes where share > limit. */
    void (*above)(const struct statistics_source *from, const uint16_t *masks, float limit, uint16_t *above);
    /* One token's share before scale and limits, added to total [ATTEND_SPLIT] when more, else stored. */
    void (*add)(const struct statistics_source *from, bool more, float *total);
    void (*add_squares)(const struct statistics_source *from, bool more, float *total);
    /* noisy [pages * P] = (scores + Gumbel noise) * factor; noise is a function of key and the slot's position alone.
     */
    void (*noise)(
        uint64_t key, const float *scores, const int32_t *const *positions, uint32_t pages, float factor, float *noisy);
    /* outer [4][vectors * 16] += a[row][i] * b[row][j] in order of row; rows of a and b lie `from_stride` apart, those
     * of outer `stride`. */
    void (*products)(const double *a, const double *b, size_t from_stride, uint32_t rows, uint32_t vectors,
        double *outer, size_t stride);
    /* outer [dim][dim] += q[i] * q[j] where i <= j. */
    void (*products_of_one)(const double *q, uint32_t dim, double *outer);
};

extern const struct statistics_kernels statistics_kernels_scalar, statistics_kernels_avx2, statistics_kernels_avx512;

/* Rows of one KV head of one item: `tokens` consecutive tokens, each with its group of query heads. */
struct statistics_rows {
    const struct kv_statistics *to;
    uint32_t needs;    /* those of STATISTICS_SWEPT that some token needs */
    uint32_t layer;    /* noise is a function of it */
    uint32_t position; /* of the first token */
    uint32_t tokens;
    uint32_t group;        /* all query heads of the KV head */
    uint32_t own_slot;     /* of the first token */
    uint32_t prompt;       /* struct kv_item */
    uint32_t window_token; /* the first token that is counted in windows */
    uint32_t above_token;  /* the first that is counted in the history */
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
    /* With STATISTIC_WINDOW, of each token that is counted there: slots that the query w before it saw. */
    uint16_t counted[ATTEND_ROWS][ATTEND_PAGES];
    float m[STATISTICS_ROWS], l[STATISTICS_ROWS];
    float t[STATISTICS_ROWS]; /* with STATISTIC_ENTROPY: sum of p ln p, p relative to m */
    float noisy_m[STATISTICS_ROWS], noisy_l[STATISTICS_ROWS];
    /* p [rows][ATTEND_SPLIT], 0 for what a row does not see; with STATISTIC_NOISY the noisy ones after them. */
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

/* Sums over the heads of parts, for one split. Parts come one token at a time. */
struct statistics_work {
    float mean[ATTEND_SPLIT], square[ATTEND_SPLIT], noisy[ATTEND_SPLIT];
};

/* A split of which no row sees anything yet. */
void statistics_split_clear(const struct statistics_rows *rows, struct statistics_split *split);
/* One row sees nothing of a split whose pages are known. */
void statistics_row_clear(
    const struct statistics_rows *rows, struct statistics_part part, uint32_t row, struct statistics_split *split);
/* Fetches what will be written for a split's first `pages` pages, for a block of one token; of sums the plane that
 * always is. */
void statistics_expect(const struct statistics_rows *rows, uint32_t split_number, uint32_t pages);
/* The noisy part of a row: scores [pages * P] are its logits, `positions` those of each page. */
void statistics_add_noise(const struct statistics_kernels *kernels, const struct statistics_rows *rows,
    struct statistics_part part, uint32_t row, const float *scores, const int32_t *const *positions,
    const struct attend_kernels *attend, struct statistics_split *split);

/* A whole block whose splits lie `bytes` apart. summary [STATISTICS_ROWS]: the rows' scores with the head's summary
 * slot, or NULL. lock: of the KV head. */
void statistics_add(const struct statistics_kernels *kernels, const struct statistics_rows *rows,
    struct statistics_part part, const struct statistics_split *splits, size_t bytes, uint32_t splits_count,
    const float *summary, pthread_mutex_t *lock);

/* The steps of it, for groups in parts: begin and total (for each split in ascending order) for each part; then, for
 * each split, gather for each part, and count, which takes the last part's p when there is but one. */
void statistics_begin(struct statistics_totals *totals);
void statistics_total(const struct statistics_kernels *kernels, const struct statistics_rows *rows,
    struct statistics_part part, const struct statistics_split *split, struct statistics_totals *totals);
/* After the last split, with a summary slot: probabilities and entropy are those of all slots and the summary, which
 * counts as one that is seen. With noise its score has none, only tau. */
void statistics_total_summary(const struct statistics_kernels *kernels, const struct statistics_rows *rows,
    struct statistics_part part, const float scores[STATISTICS_ROWS], struct statistics_totals *totals);
void statistics_gather(const struct statistics_kernels *kernels, const struct statistics_rows *rows,
    struct statistics_part part, const struct statistics_split *split, uint32_t split_number,
    const struct statistics_totals *totals, struct statistics_work *work);
void statistics_count(const struct statistics_kernels *kernels, const struct statistics_rows *rows,
    struct statistics_part part, const struct statistics_split *split, uint32_t split_number,
    const struct statistics_totals *totals, const struct statistics_work *work);
/* Adds the entropies of a part's rows to sums, by token. */
void statistics_entropy(const struct statistics_rows *rows, struct statistics_part part,
    const struct statistics_totals *totals, double sums[ATTEND_ROWS]);
void statistics_store_entropy(const struct statistics_rows *rows, const double sums[ATTEND_ROWS]);

#endif
