/* SPDX-License-Identifier: Apache-2.0
 *
 * Statistics that follow their slots: columns of random arrays moved within a head, into smaller arrays with fewer of
 * them, and in any order, against the definition in engine/backend.h, byte for byte.
 */
#include "tests/parity/parity.h"

#include <stdlib.h>
#include <string.h>

enum { HEADS = 4, ARRAYS = 10, WINDOW_ROWS = 3 /* among the arrays */, GROUP_MOST = 4 };

/* One array of a head: rows of elements, or numbers that are copied as a whole. */
struct array {
    size_t bytes, rows; /* of an element; bytes 0: not there */
    unsigned char *host;
    void *device;
};

struct head {
    struct kv_statistics statistics; /* device */
    struct array arrays[ARRAYS];     /* by slot */
    struct array outputs, standard;  /* as a whole: bytes of all, one row */
};

static void array_create(struct parity *parity, struct array *array, size_t columns, bool zero) {
    size_t bytes = array->bytes * array->rows * columns;
    array->host = parity_host(bytes);
    for (size_t i = 0; i < bytes && !zero; i++)
        array->host[i] = (unsigned char)parity_random(parity, 1, 255);
    array->device = bytes > 0 ? parity_upload(parity, array->host, bytes) : NULL;
}

/* Which arrays there are is drawn; zero: as new arrays are. */
static void head_create(struct parity *parity, struct head *head, uint32_t capacity, uint32_t window, uint32_t group,
    uint32_t dim, uint32_t needs, bool zero) {
    uint32_t content = 2;
    const struct array shapes[ARRAYS] = {{4, 2, NULL, NULL}, {4, 2, NULL, NULL}, {4, 2, NULL, NULL},
        {2, window, NULL, NULL}, {4, 1, NULL, NULL}, {2, (size_t)window * group, NULL, NULL},
        {STATISTIC_ABOVE_BITS / 8, 1, NULL, NULL}, {2, 1, NULL, NULL}, {4, 1, NULL, NULL},
        {2, (size_t)content + 2, NULL, NULL}};
    for (uint32_t i = 0; i < ARRAYS; i++) {
        head->arrays[i] = shapes[i];
        if ((needs >> i & 1) == 0)
            head->arrays[i].bytes = 0;
        array_create(parity, &head->arrays[i], capacity, zero);
    }
    head->outputs = (struct array){(needs >> ARRAYS & 1) * (size_t)window * group * dim * sizeof(float), 1, NULL, NULL};
    head->standard = (struct array){(needs >> ARRAYS & 1) * 8 * sizeof(float), 1, NULL, NULL};
    array_create(parity, &head->outputs, 1, zero);
    array_create(parity, &head->standard, 1, zero);
    head->statistics = (struct kv_statistics){
        .capacity = capacity,
        .window = window,
        .sum = head->arrays[0].device,
        .squared = head->arrays[1].device,
        .noisy = head->arrays[2].device,
        .window_rows = head->arrays[3].device,
        .window_sum = head->arrays[4].device,
        .head_rows = head->arrays[5].device,
        .above = head->arrays[6].device,
        .entropy = head->arrays[7].device,
        .output_norm = head->arrays[8].device,
        .content_rows = head->arrays[9].device,
        .content = content,
        .outputs = head->outputs.device,
        .standard = head->standard.device,
    };
}

static void array_free(struct parity *parity, struct array *array) {
    parity_release(parity, array->device);
    free(array->host);
}

static void head_free(struct parity *parity, struct head *head) {
    for (uint32_t i = 0; i < ARRAYS; i++)
        array_free(parity, &head->arrays[i]);
    array_free(parity, &head->outputs);
    array_free(parity, &head->standard);
}

/* ---- the definition ---- */

static void move_array(
    const struct statistics_move *move, const struct array *from, const struct array *to, bool stays) {
    if (from->bytes == 0 || to->bytes == 0)
        return;
    size_t bytes = to->bytes;
    for (size_t row = 0; row < to->rows; row++) {
        unsigned char *source = from->host + row * move->from->capacity * bytes;
        unsigned char *target = to->host + row * move->to->capacity * bytes;
        for (uint32_t i = 0; i < move->count; i++) {
            uint32_t a = move->from_slots != NULL ? move->from_slots[i] : i;
            uint32_t b = move->from_slots != NULL ? move->to_slots[i] : i;
            memmove(target + b * bytes, source + a * bytes, bytes);
        }
        for (uint32_t slot = move->clear_first; slot < move->clear_end && !stays; slot++)
            memset(target + slot * bytes, 0, bytes);
    }
}

static void move_whole(const struct array *from, const struct array *to) {
    if (from->bytes != 0 && to->bytes != 0)
        memmove(to->host, from->host, to->bytes);
}

static void move_head(const struct statistics_move *move, const struct head *from, const struct head *to) {
    for (uint32_t i = 0; i < ARRAYS; i++)
        move_array(move, &from->arrays[i], &to->arrays[i], move->rows_stay && i == WINDOW_ROWS);
    move_whole(&from->outputs, &to->outputs);
    move_whole(&from->standard, &to->standard);
}

/* ---- cases ---- */

static void check_head(struct parity *parity, const struct head *head, uint32_t capacity, const char *kind) {
    for (uint32_t i = 0; i <= ARRAYS + 1; i++) {
        const struct array *array = i < ARRAYS ? &head->arrays[i] : i == ARRAYS ? &head->outputs : &head->standard;
        size_t bytes = array->bytes * array->rows * (i < ARRAYS ? capacity : 1);
        if (bytes == 0)
            continue;
        unsigned char *got = parity_download(parity, array->device, bytes);
        parity_check_bytes(parity, got, array->host, bytes, "array %u, %s, capacity %u", i, kind, capacity);
        free(got);
    }
}

/* Slots that stay below `kept` and those that fill the holes (kind 0), runs to the front (1), or anything (2). */
static uint32_t draw_moves(
    struct parity *parity, uint32_t kind, uint32_t slots, uint32_t kept, uint32_t *from, uint32_t *to) {
    uint32_t count = 0, source = kept;
    for (uint32_t i = 0; i < slots && kind == 2; i++, count++) {
        from[count] = parity_random(parity, 0, slots - 1);
        to[count] = parity_random(parity, 0, slots - 1);
    }
    for (uint32_t slot = 0; slot < slots && kind == 1; slot++)
        if (parity_random(parity, 0, 1) == 0) {
            from[count] = slot;
            to[count] = count;
            count++;
        }
    for (uint32_t slot = 0; slot < kept && kind == 0; slot++) {
        source += parity_random(parity, 0, 2);
        if (source >= slots || parity_random(parity, 0, 1) == 0)
            continue;
        from[count] = source++;
        to[count++] = slot;
    }
    return count;
}

static const char *const kinds[] = {"holes filled", "runs to the front", "any moves", "whole columns"};

static void case_move(struct parity *parity) {
    struct head from[HEADS], to[HEADS];
    struct statistics_move moves[HEADS];
    uint32_t *lists[HEADS], group = parity_random(parity, 1, GROUP_MOST), dim = 2 * parity_random(parity, 1, 40);
    uint32_t window = parity_random(parity, 1, 9), kind = parity->round % 4;
    bool within = parity->round % 3 != 0;
    for (uint32_t i = 0; i < HEADS; i++) {
        uint32_t capacity = 16 * parity_random(parity, 1, 60), slots = parity_random(parity, 1, capacity);
        uint32_t kept = parity_random(parity, 1, slots);
        uint32_t room = within ? capacity : 16 * ((slots + 15) / 16) + 16;
        head_create(parity, &from[i], capacity, window, group, dim, parity->round % 2 == 0 ? 0xfff : 0xb5b, false);
        if (!within)
            head_create(parity, &to[i], room, window, group, dim, parity->round % 2 == 0 ? 0xfff : 0x76f, true);
        lists[i] = parity_host(2 * (size_t)slots * sizeof(uint32_t));
        moves[i] = (struct statistics_move){
            .from = &from[i].statistics, .to = within ? &from[i].statistics : &to[i].statistics, .count = kept};
        if (kind < 3) {
            moves[i].count = draw_moves(parity, kind, slots, kept, lists[i], lists[i] + slots);
            moves[i].from_slots = lists[i];
            moves[i].to_slots = lists[i] + slots;
        }
        if (parity_random(parity, 0, 2) > 0) {
            moves[i].clear_first = parity_random(parity, 0, slots);
            moves[i].clear_end = parity_random(parity, moves[i].clear_first, slots);
            /* A device may clear what need not be. */
            moves[i].rows_stay = parity->operations->host_memory && parity_random(parity, 0, 1) > 0;
        }
    }
    parity->operations->move_statistics(parity->backend, moves, HEADS, group, dim);
    for (uint32_t i = 0; i < HEADS; i++) {
        move_head(&moves[i], &from[i], within ? &from[i] : &to[i]);
        check_head(parity, &from[i], moves[i].from->capacity, kinds[kind]);
        if (!within)
            check_head(parity, &to[i], moves[i].to->capacity, kinds[kind]);
    }
    for (uint32_t i = 0; i < HEADS; i++) {
        head_free(parity, &from[i]);
        if (!within)
            head_free(parity, &to[i]);
        free(lists[i]);
    }
}

/* Host arguments are consumed before a call returns, however many calls are under way: more of them than a backend can
 * keep on their way to a device. Every call fills other columns with other slots; the lists are used again at once. */
static void case_arguments(struct parity *parity) {
    enum { SLOTS = 1 << 15, CALLS = 32 };
    struct kv_statistics from = {.capacity = SLOTS}, to[CALLS];
    uint32_t *sums = parity_host(SLOTS * sizeof *sums);
    uint32_t *slots = parity_host(2 * SLOTS * sizeof *slots), first[CALLS];
    for (uint32_t i = 0; i < SLOTS; i++)
        sums[i] = (uint32_t)parity_random_bits(parity);
    from.window_sum = parity_upload(parity, sums, SLOTS * sizeof *sums);
    for (uint32_t call = 0; call < CALLS; call++)
        to[call] =
            (struct kv_statistics){.capacity = SLOTS, .window_sum = parity_upload(parity, NULL, SLOTS * sizeof *sums)};
    for (uint32_t call = 0; call < CALLS; call++) {
        first[call] = parity_random(parity, 0, SLOTS - 1);
        for (uint32_t i = 0; i < SLOTS; i++) {
            slots[i] = (first[call] + i) % SLOTS;
            slots[SLOTS + i] = i;
        }
        struct statistics_move move = {&from, &to[call], slots, slots + SLOTS, SLOTS, 0, 0, 0, false};
        parity->operations->move_statistics(parity->backend, &move, 1, 1, 2);
    }
    memset(slots, 0, 2 * SLOTS * sizeof *slots);
    for (uint32_t call = 0; call < CALLS; call++) {
        uint32_t *got = parity_download(parity, to[call].window_sum, SLOTS * sizeof *sums);
        uint32_t wrong = 0;
        for (uint32_t i = 0; i < SLOTS; i++)
            wrong += got[i] != sums[(first[call] + i) % SLOTS];
        parity_check_true(parity, wrong == 0, "%u of %d numbers of call %u are others", wrong, SLOTS, call);
        free(got);
        parity_release(parity, to[call].window_sum);
    }
    parity_release(parity, from.window_sum);
    free(sums);
    free(slots);
}

const struct parity_case parity_move_cases[] = {
    {.name = "move_statistics", .run = case_move, .rounds = 24},
    {.name = "arguments in flight", .run = case_arguments},
    {.name = NULL},
};
