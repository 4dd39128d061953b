/* SPDX-License-Identifier: Apache-2.0
 *
 * What the kernels of attention and of its statistics move (cuda/attend.h, cuda/statistics.h).
 */
#include "cuda/attend.h"
#include "tests/parity/parity_traffic.h"
#include "tests/parity/reference_attend.h"

#include <stdlib.h>
#include <string.h>

enum { ITEMS = 4, VIEWS = ITEMS * 8 };

/* Sequences in a cache of their own, all slots used and in order; page numbers are spread over the pool. */
struct shape {
    enum kv_format format;
    uint32_t heads, kv_heads, dim;
    uint32_t items, rows;
    uint32_t old[ITEMS]; /* slots of each item before its rows */
};

struct cache {
    const struct shape *shape;
    struct kv_pool pool;
    struct kv_item items[ITEMS];
    struct kv_head_view views[VIEWS];
    struct kv_statistics statistics[VIEWS];
    struct kv_batch batch;
    uint32_t *table;
    float *qkv, *out;
    double slots, pages, splits; /* of all views together */
};

static void cache_create(struct parity *parity, const struct shape *shape, struct cache *cache) {
    struct kv_layout layout = {
        .layers = 1, .kv_heads = shape->kv_heads, .head_dim = shape->dim, .format = shape->format};
    size_t page_bytes = kv_page_bytes(&layout), pages = 0, at = 0;
    memset(cache, 0, sizeof *cache);
    cache->shape = shape;
    for (uint32_t item = 0; item < shape->items; item++)
        pages += (shape->old[item] + shape->rows + KV_PAGE_SLOTS - 1) / KV_PAGE_SLOTS * shape->kv_heads;
    struct reference_pool image = {parity_host(pages * page_bytes), page_bytes, layout};
    cache->table = parity_host(pages * sizeof *cache->table);
    for (size_t i = 0; i < pages; i++)
        cache->table[i] = (uint32_t)(pages - 1 - i);
    for (uint32_t i = 0; i < shape->items * shape->kv_heads; i++) {
        uint32_t item = i / shape->kv_heads, slots = shape->old[item] + shape->rows;
        cache->views[i] =
            (struct kv_head_view){.pages = cache->table + at, .slots = slots, .first_slot = shape->old[item]};
        for (uint32_t slot = 0; slot < slots; slot++)
            *reference_position(&image, cache->table[at + slot / KV_PAGE_SLOTS], slot % KV_PAGE_SLOTS) = (int32_t)slot;
        at += (slots + KV_PAGE_SLOTS - 1) / KV_PAGE_SLOTS;
        cache->slots += slots;
        cache->splits += (slots + ATTEND_SPLIT - 1) / ATTEND_SPLIT;
    }
    cache->pages = (double)pages;
    for (uint32_t item = 0; item < shape->items; item++)
        cache->items[item] = (struct kv_item){
            .first_row = item * shape->rows, .rows = shape->rows, .position = shape->old[item], .prompt = 1};
    cache->pool = (struct kv_pool){
        .base = parity_upload(parity, image.image, pages * page_bytes), .page_bytes = page_bytes, .layout = layout};
    free(image.image);
    size_t width = (size_t)(shape->heads + 2 * shape->kv_heads) * shape->dim, rows = shape->items * shape->rows;
    float *qkv = parity_host(rows * width * sizeof *qkv);
    parity_fill_normal(parity, qkv, rows * width, 1);
    cache->qkv = parity_upload(parity, qkv, rows * width * sizeof *qkv);
    cache->out = parity_upload(parity, NULL, rows * shape->heads * shape->dim * sizeof *qkv);
    free(qkv);
    cache->batch = (struct kv_batch){
        .pool = &cache->pool, .items = cache->items, .items_count = shape->items, .views = cache->views, .layer = 1};
}

/* Sums, and a window. */
static void cache_add_statistics(struct parity *parity, struct cache *cache, uint32_t needs) {
    for (uint32_t i = 0; i < cache->shape->items * cache->shape->kv_heads; i++) {
        struct kv_statistics *to = &cache->statistics[i];
        *to = (struct kv_statistics){.needs = needs,
            .capacity = (cache->views[i].slots + 15) / 16 * 16,
            .window = 32,
            .history = STATISTIC_ABOVE_BITS};
        to->sum = parity_upload(parity, NULL, 2 * to->capacity * sizeof *to->sum);
        to->window_rows = parity_upload(parity, NULL, (size_t)to->window * to->capacity * sizeof *to->window_rows);
        to->window_sum = parity_upload(parity, NULL, to->capacity * sizeof *to->window_sum);
        to->noisy = parity_upload(parity, NULL, 2 * to->capacity * sizeof *to->noisy);
        to->entropy = parity_upload(parity, NULL, to->capacity * sizeof *to->entropy);
        size_t outputs = (size_t)cache->shape->heads / cache->shape->kv_heads * cache->shape->dim;
        to->outputs = parity_upload(parity, NULL, to->window * outputs * sizeof *to->outputs);
    }
    cache->batch.statistics = cache->statistics;
}

static void cache_free(struct parity *parity, struct cache *cache) {
    for (uint32_t i = 0; i < VIEWS; i++) {
        parity_release(parity, cache->statistics[i].sum);
        parity_release(parity, cache->statistics[i].window_rows);
        parity_release(parity, cache->statistics[i].window_sum);
        parity_release(parity, cache->statistics[i].noisy);
        parity_release(parity, cache->statistics[i].entropy);
        parity_release(parity, cache->statistics[i].outputs);
    }
    parity_release(parity, cache->pool.base);
    parity_release(parity, cache->qkv);
    parity_release(parity, cache->out);
    free(cache->table);
}

static void attend(struct parity *parity, struct cache *cache) {
    traffic_begin(parity);
    parity->operations->attend(parity->backend, &cache->batch, cache->shape->heads, cache->qkv, cache->out);
}

/* Bytes of the queries, or of the results. */
static double row_bytes(const struct shape *shape) {
    return (double)shape->items * shape->rows * shape->heads * shape->dim * sizeof(float);
}

/* Bytes of all pages with their numbers. */
static double cache_bytes(const struct cache *cache) {
    return cache->pages * ((double)cache->pool.page_bytes + sizeof(uint32_t));
}

/* m, l and o of each split and query head. */
static double part_bytes(const struct cache *cache) {
    const struct shape *shape = cache->shape;
    return cache->splits * shape->rows * (shape->heads / shape->kv_heads) * (shape->dim * sizeof(float) + 16);
}

static const struct shape decode_shapes[] = {
    {KV_F16, 32, 8, 128, 1, 1, {2000}},
    {KV_F16, 9, 3, 64, 4, 1, {700, 1023, 1600, 800}},
    {KV_BF16, 8, 2, 128, 2, 1, {1100, 900}},
    {KV_F16, 8, 4, 256, 1, 1, {767}},
    {KV_F32, 9, 3, 64, 2, 1, {1279, 1023}},
    {KV_F16, 6, 2, 96, 1, 2, {766}},
};

static void case_decode(struct parity *parity) {
    for (size_t i = 0; i < sizeof decode_shapes / sizeof decode_shapes[0]; i++) {
        const struct shape *shape = &decode_shapes[i];
        const char *kernel = shape->format == KV_F32 ? "attend_plain_kernel" : "attend_split_kernel";
        struct cache cache;
        cache_create(parity, shape, &cache);
        attend(parity, &cache);
        traffic_check(parity, kernel, cache_bytes(&cache) + row_bytes(shape) + part_bytes(&cache),
            "format %d, %u and %u heads of %u, %u items", (int)shape->format, shape->heads, shape->kv_heads, shape->dim,
            shape->items);
        double totals = (double)shape->items * shape->rows * shape->heads * 16;
        traffic_check(parity, "attend_merge_kernel", part_bytes(&cache) + totals + row_bytes(shape), "%u heads of %u",
            shape->heads, shape->dim);
        cache_free(parity, &cache);
    }
}

/* A sliding layer: of its cache what the window has, whole pages, and splits that are gone cost nothing. */
static void case_window(struct parity *parity) {
    static const struct shape shapes[] = {{KV_F16, 8, 4, 256, 1, 1, {1535}}, {KV_F32, 9, 3, 64, 1, 1, {1279}}};
    for (size_t i = 0; i < sizeof shapes / sizeof shapes[0]; i++) {
        enum { WINDOW = 512 };
        const struct shape *shape = &shapes[i];
        const char *kernel = shape->format == KV_F32 ? "attend_plain_kernel" : "attend_split_kernel";
        struct cache cache;
        cache_create(parity, shape, &cache);
        uint32_t slots = shape->old[0] + 1, gone = (slots - WINDOW) / KV_PAGE_SLOTS;
        for (uint32_t head = 0; head < shape->kv_heads; head++)
            cache.views[head].from_slot = gone * KV_PAGE_SLOTS;
        cache.pages = shape->kv_heads * ((slots + KV_PAGE_SLOTS - 1) / KV_PAGE_SLOTS - gone);
        cache.splits =
            shape->kv_heads * ((slots + ATTEND_SPLIT - 1) / ATTEND_SPLIT - gone * KV_PAGE_SLOTS / ATTEND_SPLIT);
        cache.batch.window = WINDOW;
        cache.batch.cap = 50;
        attend(parity, &cache);
        traffic_check(parity, kernel, cache_bytes(&cache) + row_bytes(shape) + part_bytes(&cache),
            "window of %d, format %d, %u and %u heads of %u", WINDOW, (int)shape->format, shape->heads, shape->kv_heads,
            shape->dim);
        cache_free(parity, &cache);
    }
}

static void case_decode_statistics(struct parity *parity) {
    for (size_t i = 0; i < sizeof decode_shapes / sizeof decode_shapes[0]; i++) {
        const struct shape *shape = &decode_shapes[i];
        const char *kernel = shape->format == KV_F32 ? "attend_plain_kernel" : "attend_split_kernel";
        struct cache cache;
        cache_create(parity, shape, &cache);
        cache_add_statistics(parity, &cache, STATISTIC_SUM | STATISTIC_WINDOW);
        attend(parity, &cache);
        double scores = cache.slots * (shape->heads / shape->kv_heads) * shape->rows * sizeof(float);
        traffic_check(parity, kernel, cache_bytes(&cache) + row_bytes(shape) + part_bytes(&cache) + scores,
            "scores kept, format %d, %u and %u heads of %u", (int)shape->format, shape->heads, shape->kv_heads,
            shape->dim);
        /* The first plane of sums is read and written; so is a ring row for each token, and the window's sum. */
        double sums = cache.slots * 2 * (sizeof(uint32_t) + sizeof(uint32_t) + shape->rows * sizeof(uint16_t));
        double positions = cache.slots * sizeof(int32_t) + cache.pages * sizeof(uint32_t);
        traffic_check(parity, "statistics_sweep_kernel", scores + sums + positions, "%u and %u heads, %u items",
            shape->heads, shape->kv_heads, shape->items);
        cache_free(parity, &cache);
    }
}

/* A block has 8 tiles, so that it reads the slots before its last token once for as many rows. */
static void case_prefill(struct parity *parity) {
    static const struct shape shapes[] = {
        {KV_F16, 9, 3, 64, 1, 256, {0}},
        {KV_F16, 8, 2, 128, 1, 128, {300}},
        {KV_BF16, 4, 1, 64, 2, 96, {64, 0}},
    };
    for (size_t i = 0; i < sizeof shapes / sizeof shapes[0]; i++) {
        const struct shape *shape = &shapes[i];
        struct cache cache;
        cache_create(parity, shape, &cache);
        attend(parity, &cache);
        uint32_t tokens = 8 * (16 / (shape->heads / shape->kv_heads));
        double bytes = 2 * row_bytes(shape);
        for (uint32_t item = 0; item < shape->items; item++) {
            for (uint32_t first = 0; first < shape->rows; first += tokens) {
                uint32_t end = first + tokens < shape->rows ? first + tokens : shape->rows;
                uint32_t pages = (shape->old[item] + end + KV_PAGE_SLOTS - 1) / KV_PAGE_SLOTS;
                bytes += (double)shape->kv_heads * pages * (double)cache.pool.page_bytes;
            }
        }
        traffic_check(parity, "attend_whole_kernel", bytes, "format %d, %u rows after %u, %u and %u heads of %u",
            (int)shape->format, shape->rows, shape->old[0], shape->heads, shape->kv_heads, shape->dim);
        cache_free(parity, &cache);
    }
}

/* Logits are computed anew: a block reads its keys once, and the queries of all rows. */
static void case_prefill_statistics(struct parity *parity) {
    static const struct shape shape = {KV_F16, 9, 3, 64, 1, 192, {500}};
    struct cache cache;
    cache_create(parity, &shape, &cache);
    cache_add_statistics(parity, &cache, STATISTIC_SUM);
    attend(parity, &cache);
    uint32_t blocks = (shape.old[0] + shape.rows + 127) / 128, ranges = (shape.rows + 63) / 64;
    double keys = cache.pages * ((double)cache.pool.page_bytes / 2 + KV_PAGE_SLOTS * sizeof(int32_t)) * ranges;
    double sums = cache.slots * 2 * sizeof(uint32_t) * ranges;
    traffic_check(parity, "statistics_sweep_kernel", row_bytes(&shape) * blocks + keys + sums, "%u rows after %u",
        shape.rows, shape.old[0]);
    cache_free(parity, &cache);
}

/* What is put together, or copied, after a decode step: besides, each warp reads what it works for, a sector each. */
static void case_decode_rest(struct parity *parity) {
    static const struct shape shape = {KV_F16, 16, 4, 128, 1, 1, {8191}};
    struct cache cache;
    cache_create(parity, &shape, &cache);
    cache_add_statistics(parity, &cache, STATISTIC_NOISY | STATISTIC_ENTROPY | STATISTIC_OUTPUTS);
    attend(parity, &cache);
    double pieces = 8192.0 / STATISTICS_PIECE, group = 4, work = 4 * 32;
    traffic_check(parity, "statistics_noise_kernel",
        shape.heads * (pieces * sizeof(struct attend_piece) + sizeof(struct attend_total) + work), "%.0f pieces",
        pieces);
    traffic_check(parity, "statistics_entropy_kernel", shape.kv_heads * (group * pieces * sizeof(float) + 32 + work),
        "%.0f pieces", pieces);
    traffic_check(parity, "statistics_outputs_kernel", shape.kv_heads * (group * shape.dim * 2 * sizeof(float) + work),
        "%u heads of %u", shape.heads, shape.dim);
    cache_free(parity, &cache);
}

static void case_moments(struct parity *parity) {
    static const struct shape shapes[] = {{KV_F16, 9, 3, 64, 1, 1, {500}}, {KV_F16, 4, 1, 128, 1, 64, {10}}};
    for (size_t i = 0; i < sizeof shapes / sizeof shapes[0]; i++) {
        const struct shape *shape = &shapes[i];
        struct cache cache;
        cache_create(parity, shape, &cache);
        size_t sums = (size_t)shape->heads * shape->dim;
        struct query_moments moments = {parity_upload(parity, NULL, sizeof(uint32_t)),
            parity_upload(parity, NULL, sums * sizeof(double)),
            parity_upload(parity, NULL, sums * shape->dim * sizeof(double))};
        traffic_begin(parity);
        parity->operations->query_moments(parity->backend, &cache.batch, shape->heads, cache.qkv, &moments);
        /* Of the triangle, and of each row of it, whole sectors; each 32 channels meet the others. */
        double tiles = shape->dim / 32.0, triangle = (double)sums * (shape->dim + 4) / 2;
        traffic_check(parity, "moments_kernel",
            2 * (triangle + (double)sums) * sizeof(double) + row_bytes(shape) * (tiles + 1), "%u rows, %u heads of %u",
            shape->rows, shape->heads, shape->dim);
        parity_release(parity, moments.count);
        parity_release(parity, moments.sum);
        parity_release(parity, moments.outer);
        cache_free(parity, &cache);
    }
}

/* Keys of one slot lie in a sector for each channel: the least is each sector once. */
static void case_summarise(struct parity *parity) {
    enum { EVICTED = 96 };
    static const struct shape shape = {KV_F16, 4, 1, 64, 1, 1, {511}};
    struct cache cache;
    cache_create(parity, &shape, &cache);
    uint32_t positions[512], slots[EVICTED];
    for (uint32_t slot = 0; slot < 512; slot++)
        positions[slot] = slot;
    for (uint32_t i = 0; i < EVICTED; i++)
        slots[i] = i * 5 + 3;
    struct summary_update update = {.view = cache.views[0],
        .sum = parity_upload(parity, NULL, 512 * sizeof(uint64_t)),
        .capacity = 512,
        .positions = positions,
        .slots = slots,
        .count = EVICTED,
        .seen = 512,
        .summary = parity_upload(parity, NULL, SUMMARY_NUMBERS(64) * sizeof(float))};
    traffic_begin(parity);
    parity->operations->summarise(parity->backend, &cache.pool, &update, 1);
    double slot_bytes = 64 * 32 + 64 * 2 + 3 * 32 + 4;
    traffic_check(
        parity, "summarise_kernel", EVICTED * slot_bytes + 2 * SUMMARY_NUMBERS(64) * 4, "%d of 512 slots", EVICTED);
    parity_release(parity, (void *)update.sum);
    parity_release(parity, update.summary);
    cache_free(parity, &cache);
}

const struct parity_case parity_traffic_attend_cases[] = {
    {.name = "traffic attend", .run = case_decode},
    {.name = "traffic attend, window", .run = case_window},
    {.name = "traffic attend with statistics", .run = case_decode_statistics},
    {.name = "traffic attend prefill", .run = case_prefill},
    {.name = "traffic attend prefill with statistics", .run = case_prefill_statistics},
    {.name = "traffic attend, what is left", .run = case_decode_rest},
    {.name = "traffic query_moments", .run = case_moments},
    {.name = "traffic summarise", .run = case_summarise},
    {.name = NULL},
};
