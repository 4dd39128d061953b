/* SPDX-License-Identifier: Apache-2.0
 *
 * Selection by the backend against policy/select.c, of several sequences in one call: scores with many ties, protected
 * and empty slots, ragged rows, all scopes and floors, budgets from nothing to everything. Backends whose scores are
 * host memory have none of their own.
 */
#include "tests/parity/parity.h"

#include "policy/budget.h"
#include "policy/select.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

enum { ROWS_MAX = 24, SELECTIONS_MAX = 3 };

/* One sequence. */
struct rows {
    uint32_t count;
    enum policy_scope scope;
    float floor_part;
    struct select_row want[ROWS_MAX];
    struct selected_row got[ROWS_MAX];
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
    rows->got[r] = (struct selected_row){.scores = parity_upload(parity, scores, (slots + 1) * sizeof *scores),
        .layer = rows->want[r].layer,
        .head = rows->want[r].head,
        .budget = rows->want[r].budget};
}

static uint32_t pages_for(uint32_t slots) {
    return (slots + KV_PAGE_SLOTS - 1) / KV_PAGE_SLOTS;
}

/* Pages of all rows, that hold positions alone; page numbers from the end on. */
static struct kv_pool pages_create(struct parity *parity, struct rows *rows, uint32_t count) {
    const struct kv_layout layout = {.layers = 1, .kv_heads = 1, .head_dim = 2, .format = KV_F16};
    size_t bytes = kv_page_bytes(&layout), places = (size_t)2 * 2 * KV_PAGE_SLOTS * 2;
    uint32_t next = 0;
    for (uint32_t i = 0; i < count; i++)
        for (uint32_t r = 0; r < rows[i].count; r++)
            next += pages_for(rows[i].want[r].slots);
    size_t all = next * bytes + 1;
    char *image = parity_host(all);
    for (uint32_t i = 0; i < count * ROWS_MAX; i++) {
        struct rows *of = &rows[i / ROWS_MAX];
        if (i % ROWS_MAX >= of->count)
            continue;
        const struct select_row *row = &of->want[i % ROWS_MAX];
        uint32_t pages = pages_for(row->slots), *table = parity_host((pages + 1) * sizeof *table);
        for (uint32_t p = 0; p < pages; p++) {
            uint32_t left = row->slots - p * KV_PAGE_SLOTS, some = left < KV_PAGE_SLOTS ? left : KV_PAGE_SLOTS;
            table[p] = --next;
            memset(image + table[p] * bytes, 0x11, bytes);
            memcpy(
                image + table[p] * bytes + places, row->positions + (size_t)p * KV_PAGE_SLOTS, some * sizeof(int32_t));
        }
        of->got[i % ROWS_MAX].view = (struct kv_head_view){.pages = table, .slots = row->slots};
    }
    const struct kv_pool pool = {.base = parity_upload(parity, image, all), .page_bytes = bytes, .layout = layout};
    free(image);
    return pool;
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
}

static void rows_free(struct parity *parity, struct rows *rows) {
    for (uint32_t r = 0; r < rows->count; r++) {
        free((void *)rows->want[r].scores);
        free((void *)rows->want[r].positions);
        free(rows->want[r].keep);
        free((void *)rows->got[r].view.pages);
        parity_release(parity, (void *)rows->got[r].scores);
    }
}

static void check_row(struct parity *parity, const struct rows *rows, uint32_t r) {
    const struct select_row *want = &rows->want[r];
    size_t words = (want->slots + 31) / 32;
    uint32_t *bits = parity_host((words + 1) * sizeof *bits);
    memset(bits, 0, (words + 1) * sizeof *bits);
    for (uint32_t i = 0; i < want->kept; i++)
        bits[want->keep[i] / 32] |= 1u << want->keep[i] % 32;
    parity_check_bytes(parity, rows->got[r].stays, bits, words * sizeof *bits,
        "scope %d, floor %g, row %u: slots that stay, %u of %u", (int)rows->scope, (double)rows->floor_part, r,
        want->kept, want->slots);
    free(bits);
}

static void check(struct parity *parity, uint32_t slots_most, bool ties) {
    struct rows rows[SELECTIONS_MAX];
    struct selection selections[SELECTIONS_MAX];
    struct select_scratch host = {0};
    struct error error = {0};
    uint32_t count = slots_most > 1000 ? 1 : parity_random(parity, 1, SELECTIONS_MAX);
    if (parity->operations->select == NULL) {
        parity_skip(parity, "the host selects");
        return;
    }
    for (uint32_t i = 0; i < count; i++) {
        rows_create(parity, &rows[i], (enum policy_scope)((parity->round + i) % 3), slots_most, ties);
        int code = select_slots(rows[i].want, rows[i].count, rows[i].scope, rows[i].floor_part, &host, &error);
        parity_check_true(parity, code == 0, "select_slots: %s", error.message);
        selections[i] = (struct selection){rows[i].got, rows[i].count, rows[i].scope, rows[i].floor_part};
    }
    struct kv_pool pool = pages_create(parity, rows, count);
    int code = parity->operations->select(parity->backend, &pool, selections, count, &error);
    if (parity_check_true(parity, code == 0, "select: %s", error.message))
        for (uint32_t i = 0; i < count * ROWS_MAX; i++)
            if (i % ROWS_MAX < rows[i / ROWS_MAX].count)
                check_row(parity, &rows[i / ROWS_MAX], i % ROWS_MAX);
    select_scratch_free(&host);
    for (uint32_t i = 0; i < count; i++)
        rows_free(parity, &rows[i]);
    parity_release(parity, pool.base);
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
