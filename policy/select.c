/* SPDX-License-Identifier: Apache-2.0
 *
 * Slots are compared by one number: safe (1 bit), score (32), position (31). Only slots of different rows can be equal
 * in all three; they go to the lower layer, then the lower head, and rows are visited in that order. The number of the
 * last slot that stays is found by digits (radix selection), in time linear in the slots whatever their scores are.
 */
#include "policy/select.h"

#include "engine/backend.h"
#include "policy/budget.h"
#include "policy/order.h"

#include <stdlib.h>

static const uint64_t safe_bit = (uint64_t)1 << 63;
enum { POSITION_BITS = 31, DIGIT_BITS = 8, DIGITS = 1 << DIGIT_BITS };

/* 0: an empty slot; no other slot is 0, since -infinity is not the lowest order. */
static uint64_t slot_key(float score, uint32_t position) {
    if (position == KV_NO_POSITION)
        return 0;
    uint32_t order = (uint32_t)order_of_float(score) ^ 0x80000000u;
    return (uint64_t)order << POSITION_BITS | (position & 0x7fffffff);
}

static uint32_t count_present(const struct select_row *row) {
    uint32_t count = 0;
    for (uint32_t i = 0; i < row->slots; i++)
        count += row->positions[i] != KV_NO_POSITION;
    return count;
}

static void keep_present(struct select_row *row, uint32_t present) {
    row->kept = present;
    if (present == row->slots) {
        for (uint32_t i = 0; i < present; i++)
            row->keep[i] = i;
        return;
    }
    uint32_t kept = 0;
    for (uint32_t i = 0; i < row->slots; i++)
        if (row->positions[i] != KV_NO_POSITION)
            row->keep[kept++] = i;
}

/* ---- the number of the last slot that stays ---- */

/* The rank-th largest (from 1) of keys [count], which are reordered; *equal: how many keys equal to it are among the
 * rank largest. */
static uint64_t find_ranked(uint64_t *keys, size_t count, size_t rank, size_t *equal) {
    uint64_t found = 0;
    for (int shift = 64 - DIGIT_BITS; shift >= 0; shift -= DIGIT_BITS) {
        size_t histogram[DIGITS] = {0};
        for (size_t i = 0; i < count; i++)
            histogram[keys[i] >> shift & (DIGITS - 1)]++;
        uint64_t digit = DIGITS - 1;
        while (rank > histogram[digit])
            rank -= histogram[digit--];
        found |= digit << shift;
        if (histogram[digit] == count)
            continue; /* all share this digit */
        size_t left = 0;
        for (size_t i = 0; i < count; i++) {
            keys[left] = keys[i];
            left += (keys[i] >> shift & (DIGITS - 1)) == digit;
        }
        count = left;
    }
    *equal = rank;
    return found;
}

/* ---- rows that compete ---- */

struct group {
    struct select_row **rows; /* ascending by layer, head */
    uint32_t count;
    uint64_t *keys, *copy; /* room for all slots, row after row */
    bool floors;
    uint32_t shared_floor; /* scope model; else UINT32_MAX: each row's own */
    float floor_part;
};

/* Marks the row's `floor` best as safe. keys [slots] of the row, copy: room for as many. */
static void mark_safe(uint64_t *keys, uint64_t *copy, uint32_t slots, uint32_t present, uint32_t floor) {
    size_t equal;
    uint64_t least = 1;
    if (floor == 0)
        return;
    if (floor < present) {
        memcpy(copy, keys, slots * sizeof *keys);
        least = find_ranked(copy, slots, floor, &equal);
    }
    for (uint32_t i = 0; i < slots; i++)
        keys[i] |= keys[i] >= least ? safe_bit : 0;
}

/* Protected slots are safe by their score: no other is higher, and a floor's own are safe with or without them. */
static const uint64_t protected_key = (uint64_t)(0x7f800000u ^ 0x80000000u) << POSITION_BITS;

static void write_keys(const struct group *group, const struct select_row *row, uint32_t present, uint64_t *keys) {
    for (uint32_t i = 0; i < row->slots; i++)
        keys[i] = slot_key(row->scores[i], row->positions[i]);
    if (!group->floors)
        return;
    uint32_t floor =
        group->shared_floor != UINT32_MAX ? group->shared_floor : budget_part(group->floor_part, row->budget);
    mark_safe(keys, group->copy, row->slots, present, floor);
    for (uint32_t i = 0; i < row->slots; i++)
        keys[i] |= (keys[i] & ~safe_bit) >= protected_key ? safe_bit : 0;
}

static void keep_from(struct select_row *row, const uint64_t *keys, uint64_t least, size_t *equal) {
    uint32_t kept = 0;
    for (uint32_t i = 0; i < row->slots; i++) {
        bool last = keys[i] == least && *equal > 0;
        *equal -= last;
        if (keys[i] > least || last)
            row->keep[kept++] = i;
    }
    row->kept = kept;
}

/* More slots are present than total, and total > 0. */
static void select_best(struct group *group, uint64_t total) {
    size_t slots = 0, equal;
    for (uint32_t r = 0; r < group->count; r++) {
        write_keys(group, group->rows[r], group->rows[r]->kept, group->keys + slots);
        slots += group->rows[r]->slots;
    }
    memcpy(group->copy, group->keys, slots * sizeof *group->keys);
    uint64_t least = find_ranked(group->copy, slots, total, &equal);
    slots = 0;
    for (uint32_t r = 0; r < group->count; r++) {
        keep_from(group->rows[r], group->keys + slots, least, &equal);
        slots += group->rows[r]->slots;
    }
}

static void select_group(struct group *group) {
    uint64_t present = 0, total = 0;
    for (uint32_t r = 0; r < group->count; r++) {
        group->rows[r]->kept = count_present(group->rows[r]);
        present += group->rows[r]->kept;
        total += group->rows[r]->budget;
    }
    if (present <= total) {
        for (uint32_t r = 0; r < group->count; r++)
            keep_present(group->rows[r], group->rows[r]->kept);
    } else if (total == 0) {
        for (uint32_t r = 0; r < group->count; r++)
            group->rows[r]->kept = 0;
    } else {
        select_best(group, total);
    }
}

/* ---- scratch ---- */

void select_scratch_free(struct select_scratch *scratch) {
    free(scratch->memory);
    *scratch = (struct select_scratch){0};
}

/* Room for pointers to rows [rows_count], then twice `slots` keys. */
static int grow_scratch(struct select_scratch *scratch, size_t rows_count, size_t slots, struct error *error) {
    size_t pointers = rows_count * sizeof(uint64_t); /* a pointer is not larger, and keys stay aligned */
    if (slots > (SIZE_MAX - pointers) / (2 * sizeof(uint64_t)))
        return error_set(error, ERROR_MEMORY, "no memory to select among %zu slots", slots);
    size_t bytes = pointers + slots * 2 * sizeof(uint64_t);
    if (bytes <= scratch->bytes)
        return 0;
    void *memory = malloc(bytes);
    if (memory == NULL)
        return error_set(error, ERROR_MEMORY, "no memory to select among %zu slots", slots);
    free(scratch->memory);
    *scratch = (struct select_scratch){memory, bytes};
    return 0;
}

static int compare_rows(const void *a, const void *b) {
    const struct select_row *x = *(struct select_row *const *)a, *y = *(struct select_row *const *)b;
    if (x->layer != y->layer)
        return x->layer < y->layer ? -1 : 1;
    return x->head < y->head ? -1 : x->head > y->head;
}

/* Rows that take part in the competition, in order; the others keep what they have. Returns their number. */
static uint32_t order_rows(struct select_row *rows, uint32_t rows_count, struct select_row **ordered) {
    uint32_t count = 0;
    bool sorted = true;
    for (uint32_t r = 0; r < rows_count; r++) {
        if (rows[r].budget == BUDGET_ALL) {
            keep_present(&rows[r], count_present(&rows[r]));
            continue;
        }
        ordered[count++] = &rows[r];
        sorted = sorted && (count < 2 || compare_rows(&ordered[count - 2], &ordered[count - 1]) <= 0);
    }
    if (!sorted)
        qsort(ordered, count, sizeof *ordered, compare_rows);
    return count;
}

/* Rows from `first` that form a group. */
static uint32_t group_length(
    struct select_row *const *ordered, uint32_t count, uint32_t first, enum policy_scope scope) {
    uint32_t length = 1;
    while (first + length < count &&
           (scope == SCOPE_MODEL || (scope == SCOPE_LAYER && ordered[first + length]->layer == ordered[first]->layer)))
        length++;
    return length;
}

static uint32_t mean_budget(struct select_row *const *ordered, uint32_t count) {
    uint64_t sum = 0;
    for (uint32_t r = 0; r < count; r++)
        sum += ordered[r]->budget;
    return count > 0 ? (uint32_t)(sum / count) : 0;
}

/* Slots that compete at most: those of the largest row, or all. */
static size_t most_slots(const struct select_row *rows, uint32_t rows_count, enum policy_scope scope) {
    size_t largest = 0, sum = 0;
    for (uint32_t r = 0; r < rows_count; r++) {
        largest = rows[r].slots > largest ? rows[r].slots : largest;
        sum += rows[r].slots;
    }
    return scope == SCOPE_HEAD ? largest : sum;
}

int select_slots(struct select_row *rows, uint32_t rows_count, enum policy_scope scope, float floor_part,
    struct select_scratch *scratch, struct error *error) {
    size_t slots = most_slots(rows, rows_count, scope);
    if (grow_scratch(scratch, rows_count, slots, error) != 0)
        return ERROR_MEMORY;
    struct select_row **ordered = scratch->memory;
    uint64_t *keys = (uint64_t *)scratch->memory + rows_count;
    uint32_t count = order_rows(rows, rows_count, ordered), shared_floor = UINT32_MAX;
    if (scope == SCOPE_MODEL)
        shared_floor = budget_part(floor_part, mean_budget(ordered, count));
    for (uint32_t first = 0, length; first < count; first += length) {
        length = group_length(ordered, count, first, scope);
        struct group group = {.rows = ordered + first,
            .count = length,
            .keys = keys,
            .copy = keys + slots,
            .floors = length > 1,
            .shared_floor = shared_floor,
            .floor_part = floor_part};
        select_group(&group);
    }
    return 0;
}
