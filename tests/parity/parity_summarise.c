/* SPDX-License-Identifier: Apache-2.0
 *
 * What is evicted goes into summary slots: against the reference, and the same bits in every tier, with any number of
 * threads and in several updates.
 */
#include "tests/parity/parity_same.h"
#include "tests/parity/parity_scene.h"

#include <stdlib.h>
#include <string.h>

/* One head's update and what it starts from, on the host. */
struct evicted {
    struct summary_update update;
    uint64_t *sum;
    float *before; /* [SUMMARY_NUMBERS(d)] */
    uint32_t *positions, *slots;
};

/* Any slots that hold a token, in any order, most of them few. */
static void draw_slots(struct parity *parity, const struct scene *scene, struct evicted *to) {
    const struct kv_head_view *view = &to->update.view;
    uint32_t percent = parity_random(parity, 0, 3) == 0 ? 0 : parity_random(parity, 1, 100), count = 0;
    bool large = parity_random(parity, 0, 1) == 0;
    if (large)
        parity_fill_sums(parity, 40, view->slots, to->sum);
    for (uint32_t slot = 0; slot < view->slots; slot++) {
        int32_t position = *reference_position(&scene->pool, view->pages[slot / KV_PAGE_SLOTS], slot % KV_PAGE_SLOTS);
        to->positions[slot] = (uint32_t)position;
        if (!large)
            to->sum[slot] = parity_random_bits(parity) >> parity_random(parity, 36, 63);
        if (position == KV_NO_POSITION || parity_random(parity, 1, 100) > percent)
            continue;
        uint32_t place = parity_random(parity, 0, count);
        to->slots[count] = to->slots[place];
        to->slots[place] = slot;
        count++;
    }
    to->update.count = count;
}

static void draw_evicted(struct parity *parity, const struct scene *scene, uint32_t head, struct evicted *to) {
    const struct kv_item *item = &scene->items[head / scene->pool.layout.kv_heads];
    uint32_t dim = scene->pool.layout.head_dim;
    *to = (struct evicted){.update.view = scene->views[head],
        .update.seen = item->position + item->rows,
        .update.offset = (float)parity_uniform(parity, -3, 3)};
    uint32_t slots = to->update.view.slots;
    to->sum = parity_host(slots * sizeof *to->sum);
    to->positions = parity_host(slots * sizeof *to->positions);
    to->slots = parity_host((slots + 1) * sizeof *to->slots);
    to->before = parity_host(SUMMARY_NUMBERS(dim) * sizeof *to->before);
    draw_slots(parity, scene, to);
    if (parity_random(parity, 0, 1) == 0) { /* something was evicted before */
        parity_fill_normal(parity, to->before, 2 * (size_t)dim, 1);
        to->before[2 * dim + 1] = (float)parity_uniform(parity, 0.01, 2);
        to->before[2 * dim + 2] = (float)parity_uniform(parity, -3, 0);
    }
    to->update.positions = to->positions;
    to->update.slots = to->slots;
    to->update.capacity = (slots + 15) / 16 * 16 + 16 * parity_random(parity, 0, 2);
    to->update.sum = parity_upload_sums(parity, to->sum, slots, to->update.capacity);
    to->update.summary = parity_upload(parity, to->before, SUMMARY_NUMBERS(dim) * sizeof *to->before);
}

static void check_evicted(
    struct parity *parity, const struct scene *scene, const struct evicted *evicted, const float *summary) {
    uint32_t dim = scene->pool.layout.head_dim, count = evicted->update.count;
    if (count == 0) {
        parity_check_bits(
            parity, summary, evicted->before, SUMMARY_NUMBERS(dim), "summary of a head that loses nothing");
        return;
    }
    double *want = parity_host(SUMMARY_NUMBERS(dim) * sizeof *want);
    reference_summarise(&scene->pool, &evicted->update, evicted->sum, evicted->before, want);
    double total = want[2 * dim + 1], tolerance = 2e-7 * count * (1 + total);
    parity_check_close(
        parity, summary, want, 2 * dim + 1, tolerance / total + 1e-5, 1e-5, "summary, d=%u, %u slots", dim, count);
    parity_check_close(
        parity, summary + 2 * dim + 1, want + 2 * dim + 1, 2, tolerance, 1e-5, "totals, d=%u, %u slots", dim, count);
    free(want);
}

/* The first `count` slots of each head in one call, the others in a second. */
static void run_in_two(struct parity *parity, const struct scene *scene, struct evicted *evicted, uint32_t heads) {
    struct summary_update updates[VIEWS_MAX];
    uint32_t cuts[VIEWS_MAX], dim = scene->pool.layout.head_dim;
    for (uint32_t head = 0; head < heads; head++) {
        struct evicted *of = &evicted[head];
        parity->operations->upload(
            parity->backend, of->update.summary, of->before, SUMMARY_NUMBERS(dim) * sizeof *of->before);
        cuts[head] = parity_random(parity, 0, of->update.count);
        updates[head] = of->update;
        updates[head].count = cuts[head];
    }
    parity->operations->summarise(parity->backend, &scene->device, updates, heads);
    for (uint32_t head = 0; head < heads; head++) {
        updates[head].slots += cuts[head];
        updates[head].count = evicted[head].update.count - cuts[head];
    }
    parity->operations->summarise(parity->backend, &scene->device, updates, heads);
}

static void case_summarise(struct parity *parity) {
    static const struct scene_limits limits = {.rows = 20, .slots = 400, .group = 1, .sharpness = 1};
    struct scene scene;
    scene_create(parity, &scene, (enum kv_format)(parity->round % 3), &limits);
    parity_release(parity, scene_append(parity, &scene));
    struct evicted evicted[VIEWS_MAX];
    struct summary_update updates[VIEWS_MAX];
    uint32_t heads = scene.items_count * scene.pool.layout.kv_heads, dim = scene.pool.layout.head_dim;
    size_t numbers = SUMMARY_NUMBERS((size_t)dim);
    float *all = parity_host(heads * numbers * sizeof *all);
    for (uint32_t head = 0; head < heads; head++) {
        draw_evicted(parity, &scene, head, &evicted[head]);
        updates[head] = evicted[head].update;
    }
    parity->operations->summarise(parity->backend, &scene.device, updates, heads);
    for (uint32_t head = 0; head < heads; head++) {
        float *summary = all + head * numbers;
        parity->operations->download(parity->backend, summary, updates[head].summary, numbers * sizeof *summary);
        check_evicted(parity, &scene, &evicted[head], summary);
    }
    parity_check_same(parity, all, heads * numbers * sizeof *all);
    run_in_two(parity, &scene, evicted, heads);
    for (uint32_t head = 0; head < heads; head++) {
        float *summary = parity_download(parity, updates[head].summary, numbers * sizeof *summary);
        parity_check_bits(parity, summary, all + head * numbers, (uint32_t)numbers, "summary in two calls");
        free(summary);
        free(evicted[head].sum);
        free(evicted[head].before);
        free(evicted[head].positions);
        free(evicted[head].slots);
        parity_release(parity, (void *)updates[head].sum);
        parity_release(parity, updates[head].summary);
    }
    free(all);
    scene_free(parity, &scene);
}

const struct parity_case parity_summarise_cases[] = {
    {.name = "summarise", .run = case_summarise, .rounds = 15},
    {.name = NULL},
};
