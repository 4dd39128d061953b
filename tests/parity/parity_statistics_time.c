/* SPDX-License-Identifier: Apache-2.0
 *
 * For --time: what each statistic costs, beside attention without any, on layers of SmolLM2-135M (9 query heads, 3 KV
 * heads, d = 64, f16). Each call works on the next layer, as in a model.
 */
#include "tests/parity/parity_scene.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <time.h>

enum { HEADS = 9, KV_HEADS = 3, GROUP = HEADS / KV_HEADS, DIM = 64, WIDTH = (HEADS + 2 * KV_HEADS) * DIM, WINDOW = 32 };

struct timed {
    struct parity *parity;
    struct kv_pool pool;
    struct kv_item *items;
    uint32_t items_count, layers, layer, views_count; /* of all layers */
    struct kv_head_view *views;
    struct kv_statistics *statistics;
    struct query_moments *moments;
    uint32_t *table;
    float *qkv, *out;
    bool recording;
};

static void fill_pages(struct parity *parity, struct timed *timed, uint32_t table_pages) {
    struct kv_layout layout = {.layers = 1, .kv_heads = KV_HEADS, .head_dim = DIM, .format = KV_F16};
    timed->pool = (struct kv_pool){.page_bytes = scene_page_bytes(&layout), .layout = layout};
    uint32_t pages = timed->views_count * table_pages, slots = timed->views[0].slots;
    struct reference_pool image = {parity_host(pages * timed->pool.page_bytes), timed->pool.page_bytes, layout};
    timed->table = parity_host(pages * sizeof(uint32_t));
    for (uint32_t view = 0; view < timed->views_count; view++) {
        uint32_t *table = timed->table + (size_t)view * table_pages;
        for (uint32_t i = 0; i < table_pages; i++)
            table[i] = i * timed->views_count + view; /* all heads grow together */
        for (uint32_t slot = 0; slot < slots; slot++)
            *reference_position(&image, table[slot / KV_PAGE_SLOTS], slot % KV_PAGE_SLOTS) = (int32_t)slot;
        timed->views[view].pages = table;
    }
    timed->pool.base = parity_upload(parity, image.image, pages * timed->pool.page_bytes);
    free(image.image);
}

static void timed_create(
    struct parity *parity, struct timed *timed, uint32_t layers, uint32_t items, uint32_t rows, uint32_t depth) {
    *timed = (struct timed){.parity = parity, .items_count = items, .layers = layers};
    timed->views_count = layers * items * KV_HEADS;
    timed->items = parity_host(items * sizeof *timed->items);
    timed->views = parity_host(timed->views_count * sizeof *timed->views);
    timed->statistics = parity_host(timed->views_count * sizeof *timed->statistics);
    timed->moments = parity_host(layers * items * sizeof *timed->moments);
    for (uint32_t item = 0; item < items; item++)
        timed->items[item] =
            (struct kv_item){.first_row = item * rows, .rows = rows, .position = depth, .prompt = depth + rows};
    for (uint32_t view = 0; view < timed->views_count; view++)
        timed->views[view] = (struct kv_head_view){.pages = NULL, .slots = depth + rows, .first_slot = depth};
    fill_pages(parity, timed, (depth + rows + KV_PAGE_SLOTS - 1) / KV_PAGE_SLOTS);
    size_t count = (size_t)items * rows * WIDTH;
    float *qkv = parity_host(count * sizeof *qkv);
    parity_fill_normal(parity, qkv, count, 1);
    timed->qkv = parity_upload(parity, qkv, count * sizeof *qkv);
    timed->out = parity_upload(parity, NULL, count * sizeof *qkv);
    free(qkv);
}

static void allocate_statistics(struct parity *parity, struct timed *timed, uint32_t needs) {
    uint32_t capacity = (timed->views[0].slots + 15) / 16 * 16;
    for (uint32_t view = 0; view < timed->views_count; view++) {
        struct kv_statistics *s = &timed->statistics[view];
        *s = (struct kv_statistics){.needs = needs, .capacity = capacity, .window = WINDOW, .history = 400};
        if (needs & STATISTIC_SUM)
            s->sum = parity_upload(parity, NULL, (size_t)2 * capacity * sizeof *s->sum);
        if (needs & STATISTIC_SQUARED)
            s->squared = parity_upload(parity, NULL, (size_t)2 * capacity * sizeof *s->squared);
        if (needs & STATISTIC_NOISY)
            s->noisy = parity_upload(parity, NULL, (size_t)2 * capacity * sizeof *s->noisy);
        if (needs & STATISTIC_WINDOW) {
            s->window_rows = parity_upload(parity, NULL, (size_t)WINDOW * capacity * sizeof *s->window_rows);
            s->window_sum = parity_upload(parity, NULL, capacity * sizeof *s->window_sum);
        }
        if (needs & STATISTIC_HEAD_WINDOW)
            s->head_rows = parity_upload(parity, NULL, (size_t)WINDOW * GROUP * capacity * sizeof *s->head_rows);
        if (needs & STATISTIC_OUTPUTS)
            s->outputs = parity_upload(parity, NULL, (size_t)WINDOW * GROUP * DIM * sizeof *s->outputs);
        if (needs & STATISTIC_ABOVE)
            s->above = parity_upload(parity, NULL, (size_t)capacity * (STATISTIC_ABOVE_BITS / 8));
        if (needs & STATISTIC_ENTROPY)
            s->entropy = parity_upload(parity, NULL, capacity * sizeof *s->entropy);
    }
}

static void release_statistics(struct parity *parity, struct timed *timed) {
    for (uint32_t view = 0; view < timed->views_count; view++) {
        struct kv_statistics *s = &timed->statistics[view];
        void *arrays[] = {s->sum, s->squared, s->noisy, s->window_rows, s->window_sum, s->head_rows, s->outputs,
            s->above, s->entropy};
        for (size_t i = 0; i < sizeof arrays / sizeof arrays[0]; i++)
            parity_release(parity, arrays[i]);
    }
}

static void timed_free(struct parity *parity, struct timed *timed) {
    parity_release(parity, timed->pool.base);
    parity_release(parity, timed->qkv);
    parity_release(parity, timed->out);
    free(timed->table);
    free(timed->moments);
    free(timed->statistics);
    free(timed->views);
    free(timed->items);
}

static struct kv_batch next_batch(struct timed *timed) {
    timed->layer = (timed->layer + 1) % timed->layers;
    for (uint32_t item = 0; item < timed->items_count; item++) /* another row of the rings */
        timed->items[item].position += timed->layer == 0 && timed->recording;
    size_t first = (size_t)timed->layer * timed->items_count * KV_HEADS;
    return (struct kv_batch){
        .pool = &timed->pool,
        .items = timed->items,
        .items_count = timed->items_count,
        .views = timed->views + first,
        .layer = timed->layer,
        .statistics = timed->recording ? timed->statistics + first : NULL,
    };
}

static void work_attend(struct timed *timed) {
    struct kv_batch batch = next_batch(timed);
    timed->parity->operations->attend(timed->parity->backend, &batch, HEADS, timed->qkv, timed->out);
}

static void work_moments(struct timed *timed) {
    struct kv_batch batch = next_batch(timed);
    const struct query_moments *moments = timed->moments + (size_t)timed->layer * timed->items_count;
    timed->parity->operations->query_moments(timed->parity->backend, &batch, HEADS, timed->qkv, moments);
}

static double now(void) {
    struct timespec time;
    clock_gettime(CLOCK_MONOTONIC, &time);
    return (double)time.tv_sec + 1e-9 * (double)time.tv_nsec;
}

static double seconds_of(struct timed *timed, void (*work)(struct timed *)) {
    double start = now();
    work(timed);
    timed->parity->operations->synchronize(timed->parity->backend);
    return now() - start;
}

/* The best of many calls, in turns with attention alone, so that whatever else the machine does meets both. */
static void time_against_plain(struct timed *timed, void (*work)(struct timed *), bool recording, const char *name) {
    double plain = INFINITY, other = INFINITY, end = now() + timed->parity->seconds;
    do {
        timed->recording = recording;
        other = fmin(other, seconds_of(timed, work));
        timed->recording = false;
        plain = fmin(plain, seconds_of(timed, work_attend));
    } while (now() < end);
    double added = recording ? other - plain : other;
    printf("%-7s %2u threads  attention %.1f us, %-14s %+.1f us a layer, %+.1f %%\n", timed->parity->tier,
        timed->parity->threads, 1e6 * plain, name, 1e6 * added, 100 * added / plain);
}

static const struct {
    const char *name;
    uint32_t needs;
} statistics[] = {
    {"sum", STATISTIC_SUM},
    {"sum, squared", STATISTIC_SUM | STATISTIC_SQUARED},
    {"window", STATISTIC_WINDOW},
    {"head window", STATISTIC_HEAD_WINDOW},
    {"outputs", STATISTIC_OUTPUTS},
    {"above", STATISTIC_ABOVE},
    {"entropy", STATISTIC_ENTROPY},
    {"noisy", STATISTIC_NOISY},
};

static void time_shape(struct parity *parity, uint32_t layers, uint32_t items, uint32_t rows, uint32_t depth) {
    struct timed timed;
    timed_create(parity, &timed, layers, items, rows, depth);
    printf("%u sequences, %u rows, depth %u, %u layers\n", items, rows, depth, layers);
    for (size_t i = 0; i < sizeof statistics / sizeof statistics[0]; i++) {
        allocate_statistics(parity, &timed, statistics[i].needs);
        time_against_plain(&timed, work_attend, true, statistics[i].name);
        release_statistics(parity, &timed);
    }
    for (uint32_t i = 0; i < layers * items; i++) {
        timed.moments[i].count = parity_upload(parity, NULL, sizeof(uint32_t));
        timed.moments[i].sum = parity_upload(parity, NULL, HEADS * DIM * sizeof(double));
        timed.moments[i].outer = parity_upload(parity, NULL, (size_t)HEADS * DIM * DIM * sizeof(double));
    }
    time_against_plain(&timed, work_moments, false, "query moments");
    for (uint32_t i = 0; i < layers * items; i++) {
        parity_release(parity, timed.moments[i].count);
        parity_release(parity, timed.moments[i].sum);
        parity_release(parity, timed.moments[i].outer);
    }
    timed_free(parity, &timed);
}

static void time_decode(struct parity *parity) {
    time_shape(parity, 1, 1, 1, 1791);
    time_shape(parity, 30, 8, 1, 1791);
}

static void time_prefill(struct parity *parity) {
    time_shape(parity, 2, 1, 96, 0);
    time_shape(parity, 2, 1, 8, 4088); /* one block a head: short, so that some call is not disturbed */
}

const struct parity_case parity_statistics_timed[] = {
    {.name = "cost of statistics, decode", .time = time_decode},
    {.name = "cost of statistics, prefill", .time = time_prefill},
    {.name = NULL},
};
