/* SPDX-License-Identifier: Apache-2.0
 *
 * Selection on the device against policy/select.c: scores with many ties, protected and empty slots, ragged rows, all
 * scopes and floors, budgets from nothing to everything. The same slots in the same order.
 */
#include "tests/parity/parity.h"

#include "cuda/select.h"
#include "policy/budget.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

enum { ROWS_MAX = 24 };

struct rows {
    uint32_t count;
    enum policy_scope scope;
    float floor_part;
    struct kv_pool pool;
    struct select_row want[ROWS_MAX];
    struct kv_head_view views[ROWS_MAX];
    float *device_scores[ROWS_MAX];
    uint32_t *device_keep[ROWS_MAX];
    uint32_t *device_kept;
};

/* Few different scores, so that most are equal; infinities and none at all. */
static float draw_score(struct parity *parity, uint32_t kinds) {
    uint32_t kind = parity_random(parity, 0, 40);
    if (kind == 0)
        return INFINITY;
    if (kind == 1)
        return NAN;
    if (kind == 2)
        return -INFINITY;
    if (kind == 3)
        return parity_random(parity, 0, 1) == 0 ? 0.0f : -0.0f;
    return kinds > 0 ? (float)parity_random(parity, 0, kinds) - 2 : parity_normal(parity);
}

/* Positions of a row: distinct, in any order, some slots empty. */
static uint32_t *draw_positions(struct parity *parity, uint32_t slots, uint32_t step) {
    uint32_t *positions = parity_host((slots + 1) * sizeof *positions);
    for (uint32_t i = 0; i < slots; i++)
        positions[i] = i * step;
    for (uint32_t i = slots; i > 1; i--) {
        uint32_t other = parity_random(parity, 0, i - 1), moved = positions[i - 1];
        positions[i - 1] = positions[other];
        positions[other] = moved;
    }
    for (uint32_t i = 0; parity_random(parity, 0, 1) == 0 && i < slots / 5; i++)
        positions[parity_random(parity, 0, slots - 1)] = KV_NO_POSITION;
    return positions;
}

static uint32_t draw_budget(struct parity *parity, uint32_t slots) {
    switch (parity_random(parity, 0, 7)) {
    case 0:
        return 0;
    case 1:
        return BUDGET_ALL;
    case 2:
        return slots + parity_random(parity, 0, 20);
    default:
        return parity_random(parity, 0, slots);
    }
}

/* ties: rows have the same positions, and every other slot the same score. */
static void row_create(
    struct parity *parity, struct rows *rows, uint32_t r, uint32_t slots, uint32_t kinds, bool ties) {
    uint32_t *positions = draw_positions(parity, slots, ties ? 1 : parity_random(parity, 1, 3));
    float *scores = parity_host((slots + 1) * sizeof *scores);
    for (uint32_t i = 0; i < slots; i++)
        scores[i] = ties ? (float)parity_random(parity, 0, 1) : draw_score(parity, kinds);
    rows->want[r].slots = slots;
    rows->want[r].budget = ties ? parity_random(parity, 0, slots) : draw_budget(parity, slots);
    rows->want[r].scores = scores;
    rows->want[r].positions = positions;
    rows->want[r].keep = parity_host((slots + 1) * sizeof(uint32_t));
    rows->device_scores[r] = parity_upload(parity, scores, (slots + 1) * sizeof *scores);
    rows->device_keep[r] = parity_upload(parity, NULL, (slots + 1) * sizeof(uint32_t));
}

/* Pages that hold positions alone. */
static void pages_create(struct parity *parity, struct rows *rows) {
    struct kv_layout layout = {1, 1, 2, KV_F16};
    size_t bytes = kv_page_bytes(&layout), places = (size_t)2 * 2 * KV_PAGE_SLOTS * 2;
    uint32_t pages = 0, next = 0;
    for (uint32_t r = 0; r < rows->count; r++)
        pages += (rows->want[r].slots + KV_PAGE_SLOTS - 1) / KV_PAGE_SLOTS;
    char *image = parity_host(pages * bytes + 1);
    for (uint32_t r = 0; r < rows->count; r++) {
        const struct select_row *row = &rows->want[r];
        uint32_t count = (row->slots + KV_PAGE_SLOTS - 1) / KV_PAGE_SLOTS,
                 *table = parity_host((count + 1) * sizeof *table);
        for (uint32_t i = 0; i < count; i++) {
            uint32_t left = row->slots - i * KV_PAGE_SLOTS, some = left < KV_PAGE_SLOTS ? left : KV_PAGE_SLOTS;
            table[i] = pages - 1 - next++; /* from the end on */
            memset(image + table[i] * bytes, 0x11, bytes);
            memcpy(
                image + table[i] * bytes + places, row->positions + (size_t)i * KV_PAGE_SLOTS, some * sizeof(int32_t));
        }
        rows->views[r] = (struct kv_head_view){.pages = table, .slots = row->slots};
    }
    rows->pool = (struct kv_pool){parity_upload(parity, image, pages * bytes + 1), bytes, layout};
    free(image);
}

static void rows_create(
    struct parity *parity, struct rows *rows, enum policy_scope scope, uint32_t slots_most, bool ties) {
    uint32_t layers = parity_random(parity, 1, 5), heads = parity_random(parity, 1, 4);
    uint32_t kinds = parity_random(parity, 0, 2) == 0 ? 0 : parity_random(parity, 1, 60);
    memset(rows, 0, sizeof *rows);
    rows->scope = scope;
    rows->floor_part = parity_random(parity, 0, 2) == 0 ? 0 : (float)parity_uniform(parity, 0, 1);
    for (uint32_t layer = 0; layer < layers; layer++) {
        for (uint32_t head = 0; head < heads; head++) {
            uint32_t most = parity_random(parity, 0, 4) == 0 ? 3 : slots_most;
            rows->want[rows->count].layer = layer;
            rows->want[rows->count].head = head;
            row_create(parity, rows, rows->count++, ties ? slots_most : parity_random(parity, 0, most), kinds, ties);
        }
    }
    rows->device_kept = parity_upload(parity, NULL, rows->count * sizeof(uint32_t));
    pages_create(parity, rows);
}

static void rows_free(struct parity *parity, struct rows *rows) {
    for (uint32_t r = 0; r < rows->count; r++) {
        free((void *)rows->want[r].scores);
        free((void *)rows->want[r].positions);
        free(rows->want[r].keep);
        free((void *)rows->views[r].pages);
        parity_release(parity, rows->device_scores[r]);
        parity_release(parity, rows->device_keep[r]);
    }
    parity_release(parity, rows->device_kept);
    parity_release(parity, rows->pool.base);
}

static void check_row(struct parity *parity, const struct rows *rows, uint32_t r, uint32_t kept) {
    const struct select_row *want = &rows->want[r];
    if (!parity_check_true(parity, kept == want->kept, "scope %d, floor %g, row %u: %u of %u slots stay, not %u",
            (int)rows->scope, (double)rows->floor_part, r, kept, want->slots, want->kept))
        return;
    uint32_t *keep = parity_download(parity, rows->device_keep[r], want->slots * sizeof *keep);
    parity_check_bytes(parity, keep, want->keep, kept * sizeof *keep, "scope %d, floor %g, row %u of %u slots",
        (int)rows->scope, (double)rows->floor_part, r, want->slots);
    free(keep);
}

static void check(struct parity *parity, uint32_t slots_most, bool ties) {
    struct rows rows;
    struct select_scratch host = {0};
    struct cuda_scratch device = {0};
    struct error error = {0};
    if (!parity->cuda) {
        parity_skip(parity, "selection of the CUDA backend");
        return;
    }
    rows_create(parity, &rows, (enum policy_scope)(parity->round % 3), slots_most, ties);
    int code = select_slots(rows.want, rows.count, rows.scope, rows.floor_part, &host, &error);
    parity_check_true(parity, code == 0, "select_slots: %s", error.message);
    const struct cuda_select_rows on_device = {rows.want, rows.views, (const float *const *)rows.device_scores,
        rows.device_keep, rows.device_kept, rows.count};
    code = cuda_select_slots(
        (struct cuda_backend *)parity->backend, &rows.pool, &on_device, rows.scope, rows.floor_part, &device, &error);
    if (parity_check_true(parity, code == 0, "cuda_select_slots: %s", error.message)) {
        uint32_t *kept = parity_download(parity, rows.device_kept, rows.count * sizeof *kept);
        for (uint32_t r = 0; r < rows.count; r++)
            check_row(parity, &rows, r, kept[r]);
        free(kept);
    }
    parity->operations->synchronize(parity->backend);
    cuda_scratch_free(&device);
    select_scratch_free(&host);
    rows_free(parity, &rows);
}

static void case_rows(struct parity *parity) {
    check(parity, 300, false);
}

/* More slots than a block keeps. */
static void case_long(struct parity *parity) {
    check(parity, 12000, false);
}

/* The last slot that stays is one of several rows that tie. */
static void case_ties(struct parity *parity) {
    check(parity, 40, true);
}

const struct parity_case parity_select_cases[] = {
    {"select rows", case_rows, 30, 0, NULL},
    {"select ties", case_ties, 30, 0, NULL},
    {"select long", case_long, 3, 0, NULL},
    {0},
};
