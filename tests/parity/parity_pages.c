/* SPDX-License-Identifier: Apache-2.0
 *
 * The operations that move, mark and poison pages, against the layout in engine/backend.h.
 */
#include "tests/parity/parity.h"
#include "tests/parity/reference_attend.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

enum { PAGES = 12, TABLE = 7 };

/* A pool of random bytes and a page table into it. */
struct pool_pair {
    struct reference_pool host;
    struct kv_pool device;
    uint32_t table[TABLE];
};

static void pair_create(struct parity *parity, struct pool_pair *pair) {
    struct kv_layout layout = {.layers = 1,
        .kv_heads = 1,
        .head_dim = 2 * parity_random(parity, 1, 60),
        .format = (enum kv_format)(parity->round % 3)};
    size_t numbers = (size_t)2 * KV_PAGE_SLOTS * layout.head_dim * reference_number_bytes(layout.format);
    pair->host.layout = pair->device.layout = layout;
    pair->host.page_bytes = pair->device.page_bytes = (numbers + KV_PAGE_SLOTS * sizeof(int32_t) + 63) / 64 * 64;
    pair->host.image = parity_host(PAGES * pair->host.page_bytes);
    for (size_t i = 0; i < PAGES * pair->host.page_bytes; i++)
        pair->host.image[i] = (unsigned char)parity_random(parity, 0, 255);
    pair->device.base = parity_upload(parity, pair->host.image, PAGES * pair->host.page_bytes);
    for (uint32_t i = 0; i < TABLE; i++)
        pair->table[i] = (i * 5 + 3) % PAGES;
}

/* Compares the device's pool with the host's, which the case changed by the definition. */
static void pair_check(struct parity *parity, struct pool_pair *pair) {
    unsigned char *got = parity_download(parity, pair->device.base, PAGES * pair->host.page_bytes);
    parity_check_bytes(parity, got, pair->host.image, PAGES * pair->host.page_bytes, "pool, d=%u, format %d",
        pair->host.layout.head_dim, (int)pair->host.layout.format);
    free(got);
    parity_release(parity, pair->device.base);
    free(pair->host.image);
}

static void case_copy_pages(struct parity *parity) {
    struct pool_pair pair;
    pair_create(parity, &pair);
    static const uint32_t from[] = {3, 3, 7, 5}, to[] = {0, 1, 2, 5};
    parity->operations->copy_pages(parity->backend, &pair.device, from, to, 4);
    for (uint32_t i = 0; i < 3; i++)
        memcpy(pair.host.image + to[i] * pair.host.page_bytes, pair.host.image + from[i] * pair.host.page_bytes,
            pair.host.page_bytes);
    pair_check(parity, &pair);
}

static void slot_copy(const struct pool_pair *pair, uint32_t from, uint32_t to) {
    size_t number = reference_number_bytes(pair->host.layout.format);
    uint32_t from_page = pair->table[from / KV_PAGE_SLOTS], to_page = pair->table[to / KV_PAGE_SLOTS];
    from %= KV_PAGE_SLOTS;
    to %= KV_PAGE_SLOTS;
    if (from_page == to_page && from == to)
        return;
    for (uint32_t channel = 0; channel < pair->host.layout.head_dim; channel++) {
        memcpy(reference_key(&pair->host, to_page, to, channel), reference_key(&pair->host, from_page, from, channel),
            number);
        memcpy(reference_value(&pair->host, to_page, to, channel),
            reference_value(&pair->host, from_page, from, channel), number);
    }
    *reference_position(&pair->host, to_page, to) = *reference_position(&pair->host, from_page, from);
}

/* By turns a compaction (ascending, to <= from), any moves, whose order counts, and holes filled from behind. */
static void case_move_slots(struct parity *parity) {
    enum { SLOTS = TABLE * KV_PAGE_SLOTS };
    struct pool_pair pair;
    pair_create(parity, &pair);
    uint32_t from[SLOTS], to[SLOTS], count = 0, kind = parity->round / 3 % 3, source = SLOTS / 3;
    for (uint32_t slot = 0; slot < SLOTS && source < SLOTS; slot++) {
        if (parity_random(parity, 0, 2) == 0)
            continue;
        from[count] = kind == 0 ? slot : kind == 1 ? parity_random(parity, 0, SLOTS - 1) : source++;
        to[count] = kind == 0 ? count : kind == 1 ? parity_random(parity, 0, SLOTS - 1) : slot;
        source += kind == 2 ? parity_random(parity, 0, 3) : 0;
        count++;
        if (kind == 2 && slot + 1 >= SLOTS / 3)
            break;
    }
    parity->operations->move_slots(parity->backend, &pair.device, pair.table, from, to, count);
    for (uint32_t i = 0; i < count; i++)
        slot_copy(&pair, from[i], to[i]);
    pair_check(parity, &pair);
}

static void case_clear_slots(struct parity *parity) {
    struct pool_pair pair;
    pair_create(parity, &pair);
    uint32_t first = parity_random(parity, 0, TABLE * KV_PAGE_SLOTS);
    uint32_t end = parity_random(parity, first, TABLE * KV_PAGE_SLOTS);
    parity->operations->clear_slots(parity->backend, &pair.device, pair.table, first, end);
    for (uint32_t slot = first; slot < end; slot++)
        *reference_position(&pair.host, pair.table[slot / KV_PAGE_SLOTS], slot % KV_PAGE_SLOTS) = KV_NO_POSITION;
    pair_check(parity, &pair);
}

/* Calls on two tables that share pages: each finds what those before it left. */
static void case_slots_in_turns(struct parity *parity) {
    enum { CALLS = 12, SLOTS = TABLE * KV_PAGE_SLOTS };
    struct pool_pair pair;
    pair_create(parity, &pair);
    uint32_t tables[2][TABLE];
    for (uint32_t i = 0; i < TABLE; i++) {
        tables[0][i] = i;
        tables[1][i] = TABLE + i < PAGES ? TABLE + i : i; /* the last pages are in both */
    }
    for (uint32_t call = 0; call < CALLS; call++) {
        memcpy(pair.table, tables[parity_random(parity, 0, 1)], sizeof pair.table);
        uint32_t from[SLOTS], to[SLOTS], count = 0, kept = parity_random(parity, 1, SLOTS - 1);
        if (parity_random(parity, 0, 1) == 0) {
            uint32_t first = parity_random(parity, 0, SLOTS), end = parity_random(parity, first, SLOTS);
            parity->operations->clear_slots(parity->backend, &pair.device, pair.table, first, end);
            for (uint32_t slot = first; slot < end; slot++)
                *reference_position(&pair.host, pair.table[slot / KV_PAGE_SLOTS], slot % KV_PAGE_SLOTS) =
                    KV_NO_POSITION;
            continue;
        }
        for (uint32_t source = kept; source < SLOTS && count < kept; source += parity_random(parity, 1, 9)) {
            from[count] = source;
            to[count] = count;
            count++;
        }
        parity->operations->move_slots(parity->backend, &pair.device, pair.table, from, to, count);
        for (uint32_t i = 0; i < count; i++)
            slot_copy(&pair, from[i], to[i]);
    }
    pair_check(parity, &pair);
}

/* Ranges of tables, in turns: what lies between them stays. */
static void case_write_tables(struct parity *parity) {
    enum { NUMBERS = 3000, WRITES = 40, CALLS = 3 };
    if (parity->operations->write_tables == NULL) {
        parity_skip(parity, "its tables lie in host memory");
        return;
    }
    uint32_t *want = parity_host(NUMBERS * sizeof *want), *from = parity_host(NUMBERS * sizeof *from);
    memset(want, 0, NUMBERS * sizeof *want);
    uint32_t *device = parity_upload(parity, want, NUMBERS * sizeof *want);
    for (uint32_t call = 0; call < CALLS; call++) {
        struct kv_table_write writes[WRITES];
        uint32_t count = 0;
        for (uint32_t i = 0; i < NUMBERS; i++)
            from[i] = (uint32_t)parity_random_bits(parity);
        for (uint32_t at = parity_random(parity, 0, 100); at < NUMBERS && count < WRITES; count++) {
            uint32_t length = parity_random(parity, 0, 3) > 0 ? 1 : parity_random(parity, 0, 400);
            length = length < NUMBERS - at ? length : NUMBERS - at;
            writes[count] = (struct kv_table_write){.to = device + at, .from = from + at, .count = length};
            memcpy(want + at, from + at, length * sizeof *want);
            at += length + parity_random(parity, 0, 60);
        }
        parity->operations->write_tables(parity->backend, writes, count);
        memset(from, 0xff, NUMBERS * sizeof *from); /* host memory is consumed before the call returns */
    }
    uint32_t *got = parity_download(parity, device, NUMBERS * sizeof *got);
    parity_check_bytes(parity, got, want, NUMBERS * sizeof *got, "page tables");
    free(got);
    free(from);
    free(want);
    parity_release(parity, device);
}

/* The definition leaves the kind of NaN open. */
static void case_poison_pages(struct parity *parity) {
    struct pool_pair pair;
    pair_create(parity, &pair);
    parity->operations->poison_pages(parity->backend, &pair.device, pair.table, TABLE);
    struct reference_pool after = pair.host;
    after.image = parity_download(parity, pair.device.base, PAGES * pair.host.page_bytes);
    for (uint32_t i = 0; i < TABLE; i++) {
        for (uint32_t place = 0; place < KV_PAGE_SLOTS; place++) {
            bool clear = *reference_position(&after, pair.table[i], place) == KV_NO_POSITION;
            for (uint32_t channel = 0; channel < after.layout.head_dim; channel++) {
                unsigned char *key = reference_key(&after, pair.table[i], place, channel);
                unsigned char *value = reference_value(&after, pair.table[i], place, channel);
                clear = clear && isnan(reference_number(after.layout.format, key)) &&
                        isnan(reference_number(after.layout.format, value));
            }
            parity_check_true(parity, clear, "slot %u of page %u is not poisoned", place, pair.table[i]);
        }
        memcpy(pair.host.image + pair.table[i] * after.page_bytes, after.image + pair.table[i] * after.page_bytes,
            after.page_bytes);
    }
    free(after.image);
    pair_check(parity, &pair);
}

const struct parity_case parity_pages_cases[] = {
    {.name = "copy_pages", .run = case_copy_pages, .rounds = 3},
    {.name = "move_slots", .run = case_move_slots, .rounds = 36},
    {.name = "clear_slots", .run = case_clear_slots, .rounds = 12},
    {.name = "slots in turns", .run = case_slots_in_turns, .rounds = 12},
    {.name = "write_tables", .run = case_write_tables, .rounds = 6},
    {.name = "poison_pages", .run = case_poison_pages, .rounds = 3},
    {.name = NULL},
};
