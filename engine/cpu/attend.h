/* SPDX-License-Identifier: Apache-2.0
 *
 * Kernels of attention over pages, and what attend.c and kv_pages.c share. Written once in attend_body.h over sixteen
 * lanes; every tier gives the same bits (lanes_scalar.h).
 *
 * How a row is computed (and with it what makes it independent of batch, chunking and threads). A row is one query
 * head of one token; visible is a slot whose position is not after the token's, nor `window` or more before it.
 *   1. For each split of ATTEND_SPLIT slots alone, over its pages in ascending order:
 *      score   s = fma over channels in ascending order, of the query times the scale; then the soft cap, if any
 *      m       the largest visible score
 *      p       exp(s - m), 0 where not visible;  l = the sum of p: by place in the page, then lanes_sum
 *      o       fma over visible slots in ascending order, of p times value
 *   2. The splits (m, l, o) that have a visible slot are merged in ascending order by `merge`, then the head's summary
 *      slot if there is one (m its score, l 1, o its value); out = o / l.
 * Pages and splits in which a row sees nothing change nothing, so whether they are visited depends on the other rows.
 */
#ifndef ENGINE_CPU_ATTEND_H
#define ENGINE_CPU_ATTEND_H

#include "engine/cpu/cpu.h"

#include <math.h>
#include <pthread.h>

enum {
    ATTEND_ROWS = 24,     /* most rows of a task: G query heads of several tokens */
    ATTEND_DIM_MAX = 256, /* the largest head_dim */
    ATTEND_PAGES = ATTEND_SPLIT / KV_PAGE_SLOTS,
    KV_FORMATS = 3,
    ATTEND_LOCKS = 64,
    ROPE_TABLES = 2, /* sliding layers may turn by other frequencies */
};

/* Kernels for one KV format. `pages` are the starts of count <= ATTEND_PAGES pages. `ahead` [count] is what will be
 * read next in the same way: it is fetched into the second-level cache meanwhile, and need not be valid. */
struct attend_format_kernels {
    /* scores [rows][ATTEND_SPLIT]: element page * P + place. q [dim][ATTEND_ROWS]: a channel's rows side by side. */
    void (*scores)(const float *q, uint32_t rows, uint32_t dim, const char *const *pages, const char *const *ahead,
        uint32_t count, float *scores);
    /* o += p v over the slots whose bit is set in masks [count], the same for all rows; p [rows][ATTEND_SPLIT]. May
     * write up to the next multiple of 16 in a row of o. */
    void (*weigh)(const float *p, uint32_t rows, uint32_t stride, uint32_t dim, const char *const *pages,
        const char *const *ahead, const uint16_t *masks, uint32_t count, float *o);
    /* Rounds count numbers to the format. */
    void (*narrow)(const float *x, uint32_t count, void *out);
};

struct attend_kernels {
    /* Bit s is set when positions[s] <= limit, for one page. */
    uint32_t (*visible)(const int32_t *positions, int32_t limit);
    /* x [count] = cap tanh(x / cap). */
    void (*cap)(float *x, uint32_t count, float cap);
    /* scores [pages * P] become p; returns m, sets l. At least one bit of masks [pages] must be set. */
    float (*softmax)(float *scores, const uint16_t *masks, uint32_t pages, float *l);
    /* The same bits; also sets t, the sum of p ln p. */
    float (*softmax_entropy)(float *scores, const uint16_t *masks, uint32_t pages, float *l, float *t);
    /* total = total * keep + o * add */
    void (*merge)(float *total, float keep, const float *o, float add, uint32_t dim);
    /* out = x * factor */
    void (*scale)(const float *x, float factor, uint32_t dim, float *out);
    float (*exp)(float x);
    struct attend_format_kernels formats[KV_FORMATS];
};

extern const struct attend_kernels attend_kernels_scalar, attend_kernels_avx2, attend_kernels_avx512;

/* Numbers of a row's o buffer. */
static inline uint32_t attend_stride(uint32_t dim) {
    return (dim + 15) / 16 * 16;
}

/* cpu->attend_scratch: grows as needed, kept from call to call. */
struct attend_scratch {
    void *tasks; /* struct attend_task [] */
    size_t tasks_capacity;
    void *queues; /* struct attend_queue [threads] */
    size_t queues_capacity;
    void *blocks; /* struct attend_block [] */
    size_t blocks_capacity;
    void *partials; /* float [], of splits computed by different threads */
    size_t partials_capacity;
    void *kept; /* struct statistics_split [], of blocks whose probabilities are wanted */
    size_t kept_capacity;
    pthread_mutex_t locks[ATTEND_LOCKS];  /* statistics of (item, KV head), by its number modulo ATTEND_LOCKS */
    struct rope_table *rope[ROPE_TABLES]; /* NULL: not made yet */
    uint32_t rope_oldest;                 /* the one that gives way */
};

/* The scratch of a backend, created on first use; NULL when there is no memory. */
struct attend_scratch *attend_scratch_get(struct cpu_backend *cpu);

/* rope.c */
/* The turn of one position (vector.h, rotate): turn [2 * rope->dim]. */
void rope_turn(const struct rope_params *rope, uint32_t position, float *turn);
void rope_table_free(struct rope_table *table);

/* One page's parts. */
static inline char *kv_pool_page(const struct kv_pool *pool, uint32_t page) {
    return (char *)pool->base + (size_t)page * pool->page_bytes;
}

static inline size_t kv_number_bytes(enum kv_format format) {
    return format == KV_F32 ? 4 : 2;
}

static inline char *kv_page_values(const struct kv_layout *layout, char *page) {
    return page + (size_t)layout->head_dim * KV_PAGE_SLOTS * kv_number_bytes(layout->format);
}

static inline int32_t *kv_page_positions(const struct kv_layout *layout, char *page) {
    return (int32_t *)(page + 2 * (size_t)layout->head_dim * KV_PAGE_SLOTS * kv_number_bytes(layout->format));
}

#endif
