/* SPDX-License-Identifier: Apache-2.0
 *
 * References of the operations on KV pages, in float64, straight from engine/backend.h. They work on a host image of
 * the pool.
 */
#ifndef TESTS_PARITY_REFERENCE_ATTEND_H
#define TESTS_PARITY_REFERENCE_ATTEND_H

#include "engine/backend.h"

/* A host image of a pool: batch->pool->base is not used. */
struct reference_pool {
    unsigned char *image;
    size_t page_bytes;
    struct kv_layout layout;
};

size_t reference_number_bytes(enum kv_format format);
double reference_number(enum kv_format format, const unsigned char *at);
/* The bits that a format stores for value: nearest, half to even. Returns how many bytes. */
size_t reference_round(enum kv_format format, double value, unsigned char *to);

/* Where a page keeps things. */
unsigned char *reference_key(const struct reference_pool *pool, uint32_t page, uint32_t place, uint32_t channel);
unsigned char *reference_value(const struct reference_pool *pool, uint32_t page, uint32_t place, uint32_t channel);
int32_t *reference_position(const struct reference_pool *pool, uint32_t page, uint32_t place);

/* One head of dim values, rotated: out [dim]. */
void reference_rope(const struct rope_params *rope, uint32_t position, const float *x, uint32_t dim, double *out);

/* What attend may do otherwise (struct kv_batch). */
struct reference_variant {
    uint32_t window; /* 0: none */
    double scale;    /* 0: 1 / sqrt(d) */
    double cap;      /* 0: none */
};

/* out [R, H*d] of the rows of all items; qkv as rope_and_append left it. summaries: host, of each view, or NULL. */
void reference_attend(const struct reference_pool *pool, const struct kv_item *items, uint32_t items_count,
    const struct kv_head_view *views, const float *const *summaries, struct reference_variant variant, uint32_t heads,
    const float *qkv, double *out);

/* summary [SUMMARY_NUMBERS(d)] of a head after its update; sum [slots] and before (the same numbers): host. */
void reference_summarise(const struct reference_pool *pool, const struct summary_update *update, const uint64_t *sum,
    const float *before, double *summary);

#endif
