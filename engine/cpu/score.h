/* SPDX-License-Identifier: Apache-2.0
 *
 * Scoring of slots (backend.h, score): how stages are run, and what the files score*.c share.
 *
 * A unit is one layer of one sequence; units run in parallel, each on one thread, and a unit runs its stages one after
 * the other over the scores of its heads. A stage is a row of a table: a function for one head or for the whole layer.
 * Loops over slots are kernels, written once in score_body.h and compiled per tier; every tier gives the same bits
 * (lanes_scalar.h). Scratch memory is sized before the units start, so that no stage can fail.
 *
 *   score.c            scratch memory, threads
 *   score_attention.c  stages on attention statistics; window_preference
 *   score_keys.c       stages on keys, and the norm of values
 *   score_output.c     stages that need the output matrix W_o
 *   score_matrix.c     what is computed from W_o before the stages, and kept
 *   score_numbers.c    what the network keeps of a slot; slot_norms
 *   score_network.c    the DistillCache network, and shares among a head's slots
 *   score_pool.c       pooling along positions, protection
 *   score_rotate.c     rotate_slots, unrotate_slots
 */
#ifndef ENGINE_CPU_SCORE_H
#define ENGINE_CPU_SCORE_H

#include "engine/cpu/attend.h"
#include "engine/cpu/score_network.h"

enum {
    SCORE_LANES = KV_PAGE_SLOTS, /* a block is the numbers of one page's slots, one slot a lane: [channels][16] */
    SCORE_POOL_FIXED = 8,        /* pooling up to this many positions away is a loop over neighbours */
    SCORE_PAD = 16,              /* neighbours on either side of a list, at least SCORE_POOL_FIXED */
    SCORE_MATRIX_ROWS = 32,      /* rows of W_o that are worked on at a time */
};

/* Per KV format: 16 slots of a page as a block of floats. Lanes of slots that the head does not have hold anything.
 * `ahead`: the page that will be read next, which is fetched meanwhile. */
struct score_format_kernels {
    void (*keys)(const char *page, const char *ahead, uint32_t dim, float *block);
    void (*values)(const char *page, const char *ahead, uint32_t dim, float *block);
};

struct score_kernels {
    /* Scores of `count` slots from statistics (stages.h). Integer sums are in units of 2^-24; low, high: their planes,
     * which go on to a multiple of 16 slots. */
    void (*sums)(const uint32_t *low, const uint32_t *high, uint32_t count, float *out);
    void (*sums_per_query)(
        const uint32_t *low, const uint32_t *high, const int32_t *positions, uint32_t seen, uint32_t count, float *out);
    void (*window_sums)(const uint32_t *sums, uint32_t count, float *out);
    /* Mean + gamma times the population variance; rows [rows][stride] f16, of which the sums are known. */
    void (*spread)(const uint16_t *rows, uint32_t rows_count, size_t stride, const uint32_t *sums, float gamma,
        uint32_t count, float *out);
    void (*above)(const uint64_t *bits, uint32_t count, float *out);
    void (*positions)(const int32_t *positions, uint32_t count, float *out);
    void (*uniform)(const int32_t *positions, uint64_t seed, uint32_t stream, uint32_t count, float *out);
    int32_t (*last_position)(const int32_t *positions, uint32_t count); /* the largest; -1 when there is none */

    /* +infinity at positions < sinks or >= recent_from, NaN at KV_NO_POSITION. */
    void (*protect)(const int32_t *positions, int32_t sinks, int32_t recent_from, uint32_t count, float *scores);
    /* to = the entries of order [count] that are not KV_NO_SLOT; writes no more than these. */
    void (*close)(const uint32_t *order, uint32_t count, uint32_t *to);
    /* Positions and scores [slots] of the slots order [count], and scores back to their slots. */
    void (*gather)(const int32_t *positions, const float *scores, uint32_t slots, const uint32_t *order, uint32_t count,
        int32_t *out_positions, float *out_scores);
    void (*scatter)(const float *from, const uint32_t *order, uint32_t count, float *scores);
    /* Maximum over neighbours at most `reach` <= SCORE_POOL_FIXED positions away. Positions ascend; both lists go on
     * for SCORE_PAD entries before and after with positions far away. */
    void (*pool_max)(const int32_t *positions, const float *scores, uint32_t count, uint32_t reach, float *out);

    /* The slot with the lowest score (NaN counts as -infinity), of equal ones the one with the lowest position; empty
     * ones are left out. UINT32_MAX: there is no other. */
    uint32_t (*worst)(const float *scores, const int32_t *positions, uint32_t count);

    /* On blocks. out [rows][16]: element r is the sum over columns c of m[r * row_stride + c * column_stride] times
     * x[c * x_stride + lane], by fma in ascending order of c. lower: row r has no columns beyond r. */
    void (*products)(const float *x, size_t x_stride, const float *m, size_t row_stride, size_t column_stride,
        uint32_t rows, uint32_t columns, bool lower, float *out);
    /* The same in double. */
    void (*exact_products)(const float *x, size_t x_stride, const float *m, size_t row_stride, size_t column_stride,
        uint32_t rows, uint32_t columns, double *out);
    /* Per lane, in double: sums of squares of x, and of x times y; [rows][16] each. */
    void (*squares)(const float *x, uint32_t rows, double out[SCORE_LANES]);
    void (*dots)(const float *x, const float *y, uint32_t rows, double out[SCORE_LANES]);
    /* out [rows_x][16]: per lane the sum over c of (x[c] - m[r * m_stride + c])^2, x [columns][16]. */
    void (*distances)(const float *x, const float *m, size_t m_stride, uint32_t rows, uint32_t columns, float *out);
    /* total [rows][16] += p / max(1 - p, 1e-6) times the root of squares [rows][16]; p f16, row r at p + ring[r] *
     * p_stride. excess [rows]: the sum of a row's p over all slots, less 1. */
    void (*drop_errors)(const uint16_t *p, size_t p_stride, const uint32_t *ring, const float *excess,
        const float *squares, uint32_t rows, float *total);
    /* sums [rows][16] += x [rows][16] times factors [16] */
    void (*add_scaled)(const float *x, const float factors[SCORE_LANES], uint32_t rows, float *sums);
    /* out [16] += sum over rows of |x|; x [rows][16] */
    void (*add_absolute)(const float *x, uint32_t rows, double out[SCORE_LANES]);
    /* out [16] = ln(1e-6 + x) of 16 numbers >= 0. */
    void (*logs)(const float x[SCORE_LANES], float out[SCORE_LANES]);
    /* 16 numbers of f16, exact. */
    void (*halves)(const uint16_t *from, float out[SCORE_LANES]);
    struct score_format_kernels formats[KV_FORMATS];
    struct network_kernels network;
};

extern const struct score_kernels score_kernels_scalar, score_kernels_avx2, score_kernels_avx512;

/* A head's slots: positions [slots] as the host knows them or as read from the pages. */
struct score_slots {
    const int32_t *positions;
    bool holes; /* some have KV_NO_POSITION */
};

/* What one thread works in. */
struct score_scratch {
    struct score_slots *slots; /* [K] */
    struct score_head *heads;  /* [K] the layer's, with scores that nobody will read here: */
    float *scores;             /* [sum over heads of their slots, rounded up to 16] */
    int32_t *positions;        /* [sum over heads of their slots, rounded up to 16] */
    int32_t *near_positions;   /* [slots + 2 * SCORE_PAD] in order of position */
    float *near_scores;        /* the same */
    uint32_t *order;           /* [slots] sorted here, or without holes */
    uint64_t *keys;            /* [slots] */
    double *wide;              /* [2 * slots] */
    double *square;            /* [d * d] */
    float *blocks;             /* floats for stages on blocks, as many as score_state.c counts */
};

struct score_unit {
    struct cpu_backend *cpu;
    const struct score_kernels *kernels;
    const struct kv_pool *pool;
    const struct score_layer *layer;
    struct score_scratch *scratch;
    const struct score_matrix *matrix; /* of the layer's W_o (score_state.h); NULL where no stage needs it */
    uint32_t heads, group;             /* H, G */
};

/* One kind of stage; what it needs is checked before (engine/score_check.h). */
struct score_operation {
    bool whole_layer; /* run once a layer (head 0) */
    bool alone;       /* attention may run it: of one head, and nothing has to be computed before */
    void (*run)(const struct score_unit *unit, const struct score_stage *stage, uint32_t head);
};

/* Queries that the window holds: w, or L when that is less. */
static inline uint32_t score_window_rows(const struct score_unit *unit, const struct kv_statistics *statistics) {
    return unit->layer->seen < statistics->window ? unit->layer->seen : statistics->window;
}

static inline char *score_page(const struct score_unit *unit, const struct kv_head_view *view, uint32_t slot) {
    return kv_pool_page(unit->pool, view->pages[slot / KV_PAGE_SLOTS]);
}

/* The page after that of `slot`, or the same when it is the last. */
static inline char *score_next_page(const struct score_unit *unit, const struct kv_head_view *view, uint32_t slot) {
    return score_page(unit, view, view->slots - slot > KV_PAGE_SLOTS ? slot + KV_PAGE_SLOTS : slot);
}

/* Slots of the page that begins at `slot`. */
static inline uint32_t score_page_slots(const struct kv_head_view *view, uint32_t slot) {
    return view->slots - slot < KV_PAGE_SLOTS ? view->slots - slot : KV_PAGE_SLOTS;
}

static inline void score_page_keys(
    const struct score_unit *unit, const struct kv_head_view *view, uint32_t slot, float *block) {
    const struct kv_layout *layout = &unit->pool->layout;
    unit->kernels->formats[layout->format].keys(
        score_page(unit, view, slot), score_next_page(unit, view, slot), layout->head_dim, block);
}

static inline void score_page_values(
    const struct score_unit *unit, const struct kv_head_view *view, uint32_t slot, float *block) {
    const struct kv_layout *layout = &unit->pool->layout;
    unit->kernels->formats[layout->format].values(
        score_page(unit, view, slot), score_next_page(unit, view, slot), layout->head_dim, block);
}

/* score_attention.c */
void score_sum(const struct score_unit *unit, const struct score_stage *stage, uint32_t head);
void score_sum_per_query(const struct score_unit *unit, const struct score_stage *stage, uint32_t head);
void score_above(const struct score_unit *unit, const struct score_stage *stage, uint32_t head);
void score_window_sum(const struct score_unit *unit, const struct score_stage *stage, uint32_t head);
void score_window_spread(const struct score_unit *unit, const struct score_stage *stage, uint32_t head);
void score_noisy(const struct score_unit *unit, const struct score_stage *stage, uint32_t head);
void score_layer_mean(const struct score_unit *unit, const struct score_stage *stage, uint32_t head);

/* score_keys.c */
void score_key_norm(const struct score_unit *unit, const struct score_stage *stage, uint32_t head);
void score_key_difference(const struct score_unit *unit, const struct score_stage *stage, uint32_t head);
void score_expected_attention(const struct score_unit *unit, const struct score_stage *stage, uint32_t head);
void score_times_value_norm(const struct score_unit *unit, const struct score_stage *stage, uint32_t head);

/* score_output.c */
void score_laprox(const struct score_unit *unit, const struct score_stage *stage, uint32_t head);
void score_laprox_head(const struct score_unit *unit, const struct score_stage *stage, uint32_t head);
void score_drop_error(const struct score_unit *unit, const struct score_stage *stage, uint32_t head);
void score_times_output_norm(const struct score_unit *unit, const struct score_stage *stage, uint32_t head);

/* score_network.c */
void score_network(const struct score_unit *unit, const struct score_stage *stage, uint32_t head);
void score_log_softmax(const struct score_unit *unit, const struct score_stage *stage, uint32_t head);

/* score_pool.c */
void score_position(const struct score_unit *unit, const struct score_stage *stage, uint32_t head);
void score_random(const struct score_unit *unit, const struct score_stage *stage, uint32_t head);
void score_pool_max(const struct score_unit *unit, const struct score_stage *stage, uint32_t head);
/* Finds the slot that goes of a head whose scores are not pooled yet, as if they were protected and pooled (stage);
 * none is NaN. false: all slots are protected. Pooled scores are not stored. */
bool score_worst_pooled(const struct score_unit *unit, const struct score_stage *stage, uint32_t head);
void score_pool_adaptive(const struct score_unit *unit, const struct score_stage *stage, uint32_t head);
void score_protect(const struct score_unit *unit, const struct score_stage *stage, uint32_t head);
void score_protect_best(const struct score_unit *unit, const struct score_stage *stage, uint32_t head);

#endif
