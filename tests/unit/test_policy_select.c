/* SPDX-License-Identifier: Apache-2.0
 *
 * Selection against a plain sort of all slots, on random rows; and the cases that decide a definition. (The NumPy
 * reference is compared in tests/model/test_policy.py.)
 */
#include "policy/select.h"

#include "engine/backend.h"
#include "policy/budget.h"

#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

enum { ROWS_MAX = 12, SLOTS_MAX = 300 };

static uint32_t dice = 4711;

static uint32_t throw_below(uint32_t n) {
    dice = dice * 1664525 + 1013904223;
    return (uint32_t)((uint64_t)(dice >> 8) * n >> 24);
}

/* ---- a plain selection ---- */

struct candidate {
    bool safe;
    float score;
    uint32_t position, layer, head;
    uint32_t row, slot;
};

static int compare_candidates(const void *a, const void *b) {
    const struct candidate *x = a, *y = b;
    if (x->safe != y->safe)
        return x->safe ? -1 : 1;
    if (x->score != y->score)
        return x->score > y->score ? -1 : 1;
    if (x->position != y->position)
        return x->position > y->position ? -1 : 1;
    if (x->layer != y->layer)
        return x->layer < y->layer ? -1 : 1;
    return x->head < y->head ? -1 : x->head > y->head;
}

/* Candidates of one row; those that the floor gives it and protected ones are safe. */
static uint32_t list_row(const struct select_row *row, uint32_t index, uint32_t floor, struct candidate *out) {
    uint32_t count = 0;
    for (uint32_t i = 0; i < row->slots; i++) {
        float score = isnan(row->scores[i]) ? -INFINITY : row->scores[i];
        if (row->positions[i] != KV_NO_POSITION)
            out[count++] = (struct candidate){false, score, row->positions[i], row->layer, row->head, index, i};
    }
    qsort(out, count, sizeof *out, compare_candidates);
    for (uint32_t i = 0; i < count; i++)
        out[i].safe = i < floor || out[i].score == INFINITY;
    return count;
}

/* Marks [rows][SLOTS_MAX] what rows [from, to), which compete, keep. */
static void select_plainly(
    const struct select_row *rows, uint32_t from, uint32_t to, const uint32_t *floors, bool (*stays)[SLOTS_MAX]) {
    static struct candidate all[ROWS_MAX * SLOTS_MAX];
    uint64_t total = 0;
    uint32_t count = 0;
    for (uint32_t r = from; r < to; r++)
        if (rows[r].budget != BUDGET_ALL) {
            count += list_row(&rows[r], r, floors[r], all + count);
            total += rows[r].budget;
        }
    qsort(all, count, sizeof *all, compare_candidates);
    for (uint32_t i = 0; i < count && i < total; i++)
        stays[all[i].row][all[i].slot] = true;
}

/* ---- random rows ---- */

static void make_row(struct select_row *row, uint32_t layer, uint32_t head) {
    uint32_t slots = throw_below(SLOTS_MAX + 1), from = 0;
    float *scores = malloc(slots * sizeof *scores + 1);
    uint32_t *positions = malloc(slots * sizeof *positions + 1);
    bool ties = throw_below(2), strange = throw_below(3) == 0, recent = throw_below(2);
    for (uint32_t i = 0; i < slots; i++) {
        positions[i] = from;
        from += 1 + throw_below(2);
        scores[i] = ties ? (float)throw_below(4) - 2 : (float)throw_below(1u << 24) - (1 << 23);
        if (strange && throw_below(8) == 0)
            scores[i] = ((const float[]){NAN, -NAN, -INFINITY, -0.0f, INFINITY, 1e-45f})[throw_below(6)];
        if (strange && throw_below(16) == 0)
            positions[i] = KV_NO_POSITION;
        if (recent && i + 20 >= slots)
            scores[i] = INFINITY;
    }
    for (uint32_t i = slots; i > 1; i--) { /* slots are in no order */
        uint32_t j = throw_below(i), position = positions[i - 1];
        float score = scores[i - 1];
        positions[i - 1] = positions[j], positions[j] = position;
        scores[i - 1] = scores[j], scores[j] = score;
    }
    *row = (struct select_row){.layer = layer,
        .head = head,
        .slots = slots,
        .budget = throw_below(8) == 0   ? BUDGET_ALL
                  : throw_below(3) == 0 ? (slots > 0 ? slots - 1 : 0)
                                        : throw_below(SLOTS_MAX),
        .scores = scores,
        .positions = positions,
        .keep = malloc(slots * sizeof(uint32_t) + 1)};
}

static void free_row(struct select_row *row) {
    free((void *)row->scores);
    free((void *)row->positions);
    free(row->keep);
}

static void compare_row(const struct select_row *row, const bool *stays) {
    uint32_t kept = 0;
    for (uint32_t i = 0; i < row->slots; i++) {
        bool expected = row->budget == BUDGET_ALL ? row->positions[i] != KV_NO_POSITION : stays[i];
        if (!expected)
            continue;
        assert_true(kept < row->kept);
        assert_int_equal(row->keep[kept++], i);
    }
    assert_int_equal(row->kept, kept);
}

static uint32_t mean_budget(const struct select_row *rows, uint32_t count) {
    uint64_t sum = 0, competing = 0;
    for (uint32_t r = 0; r < count; r++)
        if (rows[r].budget != BUDGET_ALL) {
            sum += rows[r].budget;
            competing++;
        }
    return competing > 0 ? (uint32_t)(sum / competing) : 0;
}

static void try_rows(enum policy_scope scope, struct select_scratch *scratch) {
    static bool stays[ROWS_MAX][SLOTS_MAX];
    struct select_row rows[ROWS_MAX];
    uint32_t layers = 1 + throw_below(4), heads = 1 + throw_below(3), count = layers * heads, floors[ROWS_MAX];
    float part = (float)throw_below(11) / 10;
    memset(stays, 0, sizeof stays);
    for (uint32_t r = 0; r < count; r++)
        make_row(&rows[r], r / heads, r % heads);
    for (uint32_t r = 0; r < count; r++)
        floors[r] = scope == SCOPE_HEAD
                        ? 0
                        : budget_part(part, scope == SCOPE_MODEL ? mean_budget(rows, count) : rows[r].budget);
    uint32_t step = scope == SCOPE_HEAD ? 1 : scope == SCOPE_LAYER ? heads : count;
    for (uint32_t r = 0; r < count; r += step)
        select_plainly(rows, r, r + step, floors, stays);
    assert_int_equal(select_slots(rows, count, scope, part, scratch, NULL), 0);
    for (uint32_t r = 0; r < count; r++) {
        compare_row(&rows[r], stays[r]);
        free_row(&rows[r]);
    }
}

static void test_random_rows(void **state) {
    (void)state;
    struct select_scratch scratch = {0};
    for (int round = 0; round < 1500; round++)
        try_rows((enum policy_scope)(round % 3), &scratch);
    select_scratch_free(&scratch);
    assert_null(scratch.memory);
}

/* ---- cases that decide ---- */

/* One row of 8 slots at positions 10, 11, ...; expected: the kept slots. */
static void expect_kept(const float *scores, uint32_t budget, const uint32_t *expected, uint32_t expected_count) {
    static const uint32_t positions[8] = {10, 11, 12, 13, 14, 15, 16, 17};
    uint32_t keep[8];
    struct select_scratch scratch = {0};
    struct select_row row = {.slots = 8, .budget = budget, .scores = scores, .positions = positions, .keep = keep};
    assert_int_equal(select_slots(&row, 1, SCOPE_HEAD, 0, &scratch, NULL), 0);
    assert_int_equal(row.kept, expected_count);
    assert_memory_equal(keep, expected, expected_count * sizeof *keep);
    select_scratch_free(&scratch);
}

#define EXPECT_KEPT(scores, budget, ...)                                                                               \
    expect_kept(                                                                                                       \
        scores, budget, (const uint32_t[]){__VA_ARGS__}, sizeof((const uint32_t[]){__VA_ARGS__}) / sizeof(uint32_t))

static void test_one_row(void **state) {
    (void)state;
    const float same[8] = {0, -0.0f, 0, -0.0f, 0, 0, 0, 0};
    EXPECT_KEPT(same, 7, 1, 2, 3, 4, 5, 6, 7); /* the oldest goes; -0 is 0 */
    EXPECT_KEPT(same, 3, 5, 6, 7);
    EXPECT_KEPT(same, 8, 0, 1, 2, 3, 4, 5, 6, 7);
    EXPECT_KEPT(same, 100, 0, 1, 2, 3, 4, 5, 6, 7);
    const float last[8] = {7, 6, 5, 4, 3, 2, 1, -1};
    EXPECT_KEPT(last, 7, 0, 1, 2, 3, 4, 5, 6); /* the newest can go too */
    const float nans[8] = {NAN, -INFINITY, -1e38f, NAN, 0, 0, 0, 0};
    EXPECT_KEPT(nans, 7, 1, 2, 3, 4, 5, 6, 7); /* NaN is -infinity: the older of the two goes */
    EXPECT_KEPT(nans, 5, 2, 4, 5, 6, 7);
    const float protected[8] = {INFINITY, INFINITY, INFINITY, 3e38f, 0, INFINITY, 1, 2};
    EXPECT_KEPT(protected, 5, 0, 1, 2, 3, 5);
    EXPECT_KEPT(protected, 2, 2, 5); /* more protected than there is room: the more recent */
    expect_kept(protected, 0, NULL, 0);
}

static void test_empty_slots_do_not_count(void **state) {
    (void)state;
    const uint32_t positions[4] = {KV_NO_POSITION, 3, KV_NO_POSITION, 1};
    const float scores[4] = {INFINITY, 1, 5, 2};
    uint32_t keep[4];
    struct select_scratch scratch = {0};
    struct select_row row = {.slots = 4, .budget = 2, .scores = scores, .positions = positions, .keep = keep};
    for (row.budget = 2; row.budget <= 3; row.budget++) {
        assert_int_equal(select_slots(&row, 1, SCOPE_HEAD, 0, &scratch, NULL), 0);
        assert_int_equal(row.kept, 2);
        assert_memory_equal(keep, ((uint32_t[]){1, 3}), 2 * sizeof *keep);
    }
    row.budget = 1;
    assert_int_equal(select_slots(&row, 1, SCOPE_HEAD, 0, &scratch, NULL), 0);
    assert_int_equal(row.kept, 1);
    assert_int_equal(keep[0], 3);
    assert_int_equal(select_slots(NULL, 0, SCOPE_MODEL, 0, &scratch, NULL), 0);
    select_scratch_free(&scratch);
}

/* The same score and position in several heads: the lower layer, then the lower head. */
static void test_ties_between_heads(void **state) {
    (void)state;
    const uint32_t positions[2] = {0, 1};
    const float scores[2] = {INFINITY, INFINITY};
    uint32_t keep[4][2];
    struct select_row rows[4];
    struct select_scratch scratch = {0};
    for (uint32_t r = 0; r < 4; r++) /* listed backwards */
        rows[r] = (struct select_row){.layer = 1 - r / 2,
            .head = 1 - r % 2,
            .slots = 2,
            .budget = r == 0 ? 3 : 0,
            .scores = scores,
            .positions = positions,
            .keep = keep[r]};
    assert_int_equal(select_slots(rows, 4, SCOPE_MODEL, 0, &scratch, NULL), 0);
    assert_int_equal(rows[3].kept, 1); /* layer 0, head 0 */
    assert_int_equal(keep[3][0], 1);
    assert_int_equal(rows[2].kept, 1);
    assert_int_equal(rows[1].kept, 1);
    assert_int_equal(rows[0].kept, 0);
    select_scratch_free(&scratch);
}

/* A head of low scores keeps its floor; without one, nothing. */
static void test_floors(void **state) {
    (void)state;
    enum { SLOTS = 10 };
    uint32_t positions[SLOTS], keep[2][SLOTS];
    float high[SLOTS], low[SLOTS];
    for (uint32_t i = 0; i < SLOTS; i++) {
        positions[i] = i;
        high[i] = 100;
        low[i] = (float)i;
    }
    struct select_row rows[2] = {
        {.head = 0, .slots = SLOTS, .budget = 5, .scores = high, .positions = positions, .keep = keep[0]},
        {.head = 1, .slots = SLOTS, .budget = 5, .scores = low, .positions = positions, .keep = keep[1]}};
    struct select_scratch scratch = {0};
    for (int scope = SCOPE_LAYER; scope <= SCOPE_MODEL; scope++) {
        assert_int_equal(select_slots(rows, 2, (enum policy_scope)scope, 0.4f, &scratch, NULL), 0);
        assert_int_equal(rows[0].kept, 8);
        assert_int_equal(rows[1].kept, 2);
        assert_memory_equal(keep[1], ((uint32_t[]){8, 9}), 2 * sizeof(uint32_t));
        assert_int_equal(select_slots(rows, 2, (enum policy_scope)scope, 0, &scratch, NULL), 0);
        assert_int_equal(rows[1].kept, 0);
    }
    select_scratch_free(&scratch);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_random_rows),
        cmocka_unit_test(test_one_row),
        cmocka_unit_test(test_empty_slots_do_not_count),
        cmocka_unit_test(test_ties_between_heads),
        cmocka_unit_test(test_floors),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
