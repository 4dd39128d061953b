/* SPDX-License-Identifier: Apache-2.0 */
#include "tests/parity/parity_scene.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

static uint32_t draw_dim(struct parity *parity) {
    static const uint32_t dims[] = {64, 64, 128, 80, 96, 256, 2, 40, 66, 112};
    return dims[parity_random(parity, 0, sizeof dims / sizeof dims[0] - 1)];
}

size_t scene_page_bytes(const struct kv_layout *layout) {
    size_t numbers = (size_t)2 * KV_PAGE_SLOTS * layout->head_dim * reference_number_bytes(layout->format);
    return (numbers + KV_PAGE_SLOTS * sizeof(int32_t) + 63) / 64 * 64;
}

static void shuffle(struct parity *parity, uint32_t *array, uint32_t count) {
    for (uint32_t i = count; i > 1; i--) {
        uint32_t other = parity_random(parity, 0, i - 1), moved = array[i - 1];
        array[i - 1] = array[other];
        array[other] = moved;
    }
}

static void fill_poison(struct scene *scene) {
    memset(scene->pool.image, 0xff, scene->pages * scene->pool.page_bytes);
    for (uint32_t page = 0; page < scene->pages; page++) {
        for (uint32_t place = 0; place < KV_PAGE_SLOTS; place++)
            *reference_position(&scene->pool, page, place) = KV_NO_POSITION;
    }
}

static void fill_slot(struct parity *parity, struct scene *scene, const uint32_t *table, uint32_t slot, int32_t at) {
    const struct kv_layout *layout = &scene->pool.layout;
    uint32_t page = table[slot / KV_PAGE_SLOTS], place = slot % KV_PAGE_SLOTS;
    *reference_position(&scene->pool, page, place) = at;
    for (uint32_t channel = 0; channel < layout->head_dim; channel++) {
        reference_round(
            layout->format, (double)parity_normal(parity), reference_key(&scene->pool, page, place, channel));
        reference_round(
            layout->format, (double)parity_normal(parity), reference_value(&scene->pool, page, place, channel));
    }
}

/* Old slots of one head: distinct positions below the item's, in any order, some slots unused. New slots follow at the
 * end, or take the place of unused slots at the front. */
static void fill_head(struct parity *parity, struct scene *scene, uint32_t item, struct kv_head_view *view,
    const uint32_t *table, uint32_t old_slots) {
    uint32_t position = scene->items[item].position, rows = scene->items[item].rows;
    uint32_t *order = parity_host((position + 1) * sizeof *order);
    for (uint32_t i = 0; i < position; i++)
        order[i] = i;
    bool ordered = parity_random(parity, 0, 1) == 0, reused = parity_random(parity, 0, 3) == 0;
    if (!ordered)
        shuffle(parity, order, position);
    uint32_t holes = parity_random(parity, 0, 2) == 0 ? 10 : 0, shift = reused ? rows : 0;
    for (uint32_t slot = 0; slot < old_slots; slot++) {
        if (parity_random(parity, 1, 100) > holes)
            fill_slot(parity, scene, table, slot + shift, (int32_t)order[slot]);
    }
    view->pages = table;
    view->slots = old_slots + rows;
    view->first_slot = reused ? 0 : old_slots;
    free(order);
}

static void draw_items(struct parity *parity, struct scene *scene, const struct scene_limits *limits) {
    scene->items_count = parity_random(parity, 1, ITEMS_MAX);
    for (uint32_t item = 0; item < scene->items_count; item++) {
        uint32_t rows = parity_random(parity, 0, 1) == 0 ? 1 : parity_random(parity, 1, limits->rows);
        uint32_t position = parity_random(parity, 0, 3) == 0 ? 0 : parity_random(parity, 0, limits->slots);
        if (limits->first_is_long && item == 0) {
            rows = limits->rows - parity_random(parity, 0, 15);
            position = parity_random(parity, 1, limits->slots / 2) * 2 - 1;
        }
        scene->items[item] = (struct kv_item){.first_row = scene->rows, .rows = rows, .position = position};
        scene->rows += rows;
    }
}

/* In half of the scenes, for most heads. */
static void draw_summaries(struct parity *parity, struct scene *scene) {
    uint32_t dim = scene->pool.layout.head_dim, views = scene->items_count * scene->pool.layout.kv_heads;
    size_t count = 2 * (size_t)dim + 1;
    if (parity_random(parity, 0, 1) == 0)
        return;
    for (uint32_t view = 0; view < views; view++) {
        if (parity_random(parity, 0, 3) == 0)
            continue;
        float *summary = scene->summaries[view] = parity_host(count * sizeof *summary);
        parity_fill_normal(parity, summary, count - 1, 0.7f);
        summary[2 * dim] = (float)parity_uniform(parity, -2, 7);
        scene->views[view].summary = parity_upload(parity, summary, count * sizeof *summary);
    }
}

void scene_create(
    struct parity *parity, struct scene *scene, enum kv_format format, const struct scene_limits *limits) {
    memset(scene, 0, sizeof *scene);
    uint32_t dim = limits->dim != 0 ? limits->dim : draw_dim(parity);
    struct kv_layout layout = {
        .layers = 1, .kv_heads = parity_random(parity, 1, KV_HEADS_MAX), .head_dim = dim, .format = format};
    scene->heads = layout.kv_heads * parity_random(parity, 1, limits->group);
    draw_items(parity, scene, limits);
    uint32_t old_slots[VIEWS_MAX], table_pages[VIEWS_MAX], pages = 0;
    for (uint32_t view = 0; view < scene->items_count * layout.kv_heads; view++) {
        const struct kv_item *item = &scene->items[view / layout.kv_heads];
        old_slots[view] = parity_random(parity, 0, 1) == 0 ? item->position : parity_random(parity, 0, item->position);
        table_pages[view] = (old_slots[view] + item->rows + KV_PAGE_SLOTS - 1) / KV_PAGE_SLOTS;
        pages += table_pages[view];
    }
    scene->pages = pages + parity_random(parity, 0, 5);
    scene->layer = pages % 32; /* drawn by nothing else */
    scene->pool = (struct reference_pool){NULL, scene_page_bytes(&layout), layout};
    scene->pool.image = parity_host(scene->pages * scene->pool.page_bytes);
    fill_poison(scene);
    uint32_t *numbers = parity_host((scene->pages + 1) * sizeof *numbers);
    for (uint32_t page = 0; page < scene->pages; page++)
        numbers[page] = page;
    shuffle(parity, numbers, scene->pages);
    for (uint32_t view = 0, first = 0; view < scene->items_count * layout.kv_heads; view++) {
        scene->tables[view] = parity_host(table_pages[view] * sizeof(uint32_t));
        memcpy(scene->tables[view], numbers + first, table_pages[view] * sizeof(uint32_t));
        first += table_pages[view];
        fill_head(parity, scene, view / layout.kv_heads, &scene->views[view], scene->tables[view], old_slots[view]);
    }
    free(numbers);
    scene->device = (struct kv_pool){.page_bytes = scene->pool.page_bytes, .layout = layout};
    scene->device.base = parity_upload(parity, scene->pool.image, scene->pages * scene->pool.page_bytes);
    uint32_t rope_dim = parity_random(parity, 0, 2) == 0 ? dim / 2 / 2 * 2 : dim;
    scene->inverse_freq = parity_host((rope_dim / 2 + 1) * sizeof(float));
    for (uint32_t pair = 0; pair < rope_dim / 2; pair++)
        scene->inverse_freq[pair] = (float)pow(10000, -2.0 * pair / rope_dim);
    scene->rope = (struct rope_params){rope_dim, scene->inverse_freq};
    size_t count = (size_t)scene->rows * (scene->heads + 2 * layout.kv_heads) * dim;
    scene->qkv_bytes = count * sizeof(float);
    scene->qkv = parity_host(scene->qkv_bytes);
    parity_fill_normal(parity, scene->qkv, count, 1);
    size_t stride = (size_t)(scene->heads + 2 * layout.kv_heads) * dim;
    for (uint32_t row = 0; row < scene->rows; row++) {
        for (uint32_t i = 0; i < scene->heads * dim; i++)
            scene->qkv[row * stride + i] *= limits->sharpness;
    }
    draw_summaries(parity, scene);
}

void scene_free(struct parity *parity, struct scene *scene) {
    for (uint32_t view = 0; view < VIEWS_MAX; view++) {
        free(scene->tables[view]);
        free(scene->summaries[view]);
        parity_release(parity, (void *)scene->views[view].summary);
    }
    parity_release(parity, scene->device.base);
    free(scene->pool.image);
    free(scene->inverse_freq);
    free(scene->qkv);
}

struct kv_batch scene_batch(const struct scene *scene) {
    return (struct kv_batch){.pool = &scene->device,
        .items = scene->items,
        .items_count = scene->items_count,
        .views = scene->views,
        .layer = scene->layer,
        .window = scene->window,
        .scale = scene->scale,
        .cap = scene->cap};
}

void scene_chunk(const struct scene *scene, uint32_t item, uint32_t first, uint32_t count, struct kv_item *part,
    struct kv_head_view *views) {
    uint32_t kv_heads = scene->pool.layout.kv_heads, rows = scene->items[item].rows;
    part->rows = count;
    part->position = scene->items[item].position + first;
    for (uint32_t head = 0; head < kv_heads; head++) {
        views[head] = scene->views[item * kv_heads + head];
        views[head].first_slot += first;
        if (views[head].first_slot + rows - first == views[head].slots)
            views[head].slots = views[head].first_slot + count;
    }
}

float *scene_append(struct parity *parity, struct scene *scene) {
    float *qkv = parity_upload(parity, scene->qkv, scene->qkv_bytes);
    struct kv_batch batch = scene_batch(scene);
    parity->operations->rope_and_append(parity->backend, &batch, &scene->rope, scene->heads, qkv);
    parity->operations->download(parity->backend, scene->qkv, qkv, scene->qkv_bytes);
    parity->operations->download(
        parity->backend, scene->pool.image, scene->device.base, scene->pages * scene->pool.page_bytes);
    return qkv;
}
