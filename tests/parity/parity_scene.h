/* SPDX-License-Identifier: Apache-2.0
 *
 * A random batch over a random cache: ragged slot counts, scattered page tables, holes, slots in any order of position,
 * summary slots, all storage formats; unused slots and pages hold NaN.
 */
#ifndef TESTS_PARITY_PARITY_SCENE_H
#define TESTS_PARITY_PARITY_SCENE_H

#include "tests/parity/parity.h"
#include "tests/parity/reference_attend.h"

enum { ITEMS_MAX = 4, KV_HEADS_MAX = 4, VIEWS_MAX = ITEMS_MAX * KV_HEADS_MAX };

/* A batch over a random cache. */
struct scene {
    struct reference_pool pool; /* host image */
    struct kv_pool device;
    uint32_t pages;
    uint32_t heads;
    uint32_t items_count;
    uint32_t rows;
    uint32_t layer;
    struct kv_item items[ITEMS_MAX];
    struct kv_head_view views[VIEWS_MAX];
    uint32_t *tables[VIEWS_MAX]; /* page tables */
    float *summaries[VIEWS_MAX]; /* host, what views' summary points to; NULL: none */
    float *inverse_freq;
    struct rope_params rope;
    uint32_t window; /* this and what follows: as in struct kv_batch */
    float scale, cap;
    float *qkv; /* host, before rope_and_append */
    size_t qkv_bytes;
};

/* What to draw. */
struct scene_limits {
    uint32_t dim;       /* 0: any */
    uint32_t rows;      /* most rows of an item */
    uint32_t slots;     /* most old slots of a head */
    uint32_t group;     /* most query heads a KV head */
    float sharpness;    /* scale of queries: scores have this standard deviation */
    bool first_is_long; /* the first item has nearly the most rows, after an odd number of tokens */
};

size_t scene_page_bytes(const struct kv_layout *layout);
void scene_create(struct parity *parity, struct scene *scene, enum kv_format format, const struct scene_limits *limits);
void scene_free(struct parity *parity, struct scene *scene);
struct kv_batch scene_batch(const struct scene *scene);

/* Rows first .. first + count - 1 of an item, alone and as if the later ones had not come: part, views [K]. Other
 * fields of part than rows and position are left alone. */
void scene_chunk(const struct scene *scene, uint32_t item, uint32_t first, uint32_t count, struct kv_item *part,
    struct kv_head_view *views);

/* The device's qkv after rope_and_append; the host's copy becomes the same, and so does the pool's image. */
float *scene_append(struct parity *parity, struct scene *scene);

#endif
