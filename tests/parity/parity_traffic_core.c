/* SPDX-License-Identifier: Apache-2.0
 *
 * What the kernels of cuda/vector.cu, rope.cu, pages.cu, sample.cu and kl.cu move.
 */
#include "tests/parity/parity_traffic.h"

#include <stdlib.h>
#include <string.h>

static float *upload_normal(struct parity *parity, size_t count) {
    float *host = parity_host(count * sizeof *host);
    parity_fill_normal(parity, host, count, 1);
    float *device = parity_upload(parity, host, count * sizeof *host);
    free(host);
    return device;
}

static void case_vectors(struct parity *parity) {
    static const struct { uint32_t rows, width; } shapes[] = {{1, 576}, {1, 4096}, {512, 576}, {64, 4096}};
    for (size_t i = 0; i < sizeof shapes / sizeof shapes[0]; i++) {
        uint32_t rows = shapes[i].rows, width = shapes[i].width, wanted[16];
        size_t count = (size_t)rows * width;
        float *x = upload_normal(parity, 2 * count), *weight = upload_normal(parity, width);
        float *out = parity_upload(parity, NULL, 16 * count * sizeof *out);
        traffic_begin(parity);
        parity->operations->rms_norm(parity->backend, x, weight, 1e-5f, rows, width, out);
        traffic_check(parity, "norm_rows", (2 * (double)count + width) * sizeof *x, "%u x %u", rows, width);
        traffic_begin(parity);
        parity->operations->silu_mul(parity->backend, x, rows, width, out);
        traffic_check(parity, "gate_vectors", 3 * (double)count * sizeof *x, "%u x %u", rows, width);
        for (uint32_t k = 0; k < 16; k++)
            wanted[k] = parity_random(parity, 0, rows - 1);
        traffic_begin(parity);
        parity->operations->gather_rows(parity->backend, x, wanted, 16, width, out);
        traffic_check(parity, "gather_vectors", 2.0 * 16 * width * sizeof *x, "16 of %u x %u", rows, width);
        parity_release(parity, x);
        parity_release(parity, weight);
        parity_release(parity, out);
    }
}

/* What other architectures have besides. */
static void case_traits(struct parity *parity) {
    static const struct { uint32_t rows, width; } shapes[] = {{1, 640}, {64, 4096}, {128, 640}};
    for (size_t i = 0; i < sizeof shapes / sizeof shapes[0]; i++) {
        uint32_t rows = shapes[i].rows, width = shapes[i].width;
        size_t count = (size_t)rows * width;
        float *x = upload_normal(parity, 2 * count), *weight = upload_normal(parity, width);
        float *out = upload_normal(parity, count);
        traffic_begin(parity);
        parity->operations->rms_norm_add(parity->backend, x, weight, 1e-5f, rows, width, out);
        traffic_check(parity, "norm_rows", (3 * (double)count + width) * sizeof *x, "added, %u x %u", rows, width);
        traffic_begin(parity);
        parity->operations->add_bias(parity->backend, weight, rows, width, x);
        traffic_check(parity, "bias_rows", (2 * (double)count + width) * sizeof *x, "%u x %u", rows, width);
        traffic_begin(parity);
        parity->operations->soft_cap(parity->backend, 30, rows, width, x);
        traffic_check(parity, "map_numbers", 2 * (double)count * sizeof *x, "soft cap, %u x %u", rows, width);
        traffic_begin(parity);
        parity->operations->scale(parity->backend, 25, rows, width, x);
        traffic_check(parity, "map_numbers", 2 * (double)count * sizeof *x, "scale, %u x %u", rows, width);
        traffic_begin(parity);
        parity->operations->gelu_mul(parity->backend, x, rows, width, out);
        traffic_check(parity, "gate_vectors", 3 * (double)count * sizeof *x, "gelu, %u x %u", rows, width);
        parity_release(parity, x);
        parity_release(parity, weight);
        parity_release(parity, out);
    }
}

/* Values are left alone. A warp reads its weights once for eight heads; of few heads there are few warps. */
static void case_head_norms(struct parity *parity) {
    static const struct {
        uint32_t rows, heads, kv_heads, dim;
    } shapes[] = {{1, 32, 8, 128}, {16, 8, 4, 256}, {64, 9, 3, 64}};
    for (size_t i = 0; i < sizeof shapes / sizeof shapes[0]; i++) {
        uint32_t rows = shapes[i].rows, heads = shapes[i].heads, kv_heads = shapes[i].kv_heads, dim = shapes[i].dim;
        float *qkv = upload_normal(parity, (size_t)rows * (heads + 2 * kv_heads) * dim);
        float *weight = upload_normal(parity, 2 * dim);
        traffic_begin(parity);
        parity->operations->head_norms(parity->backend, weight, weight + dim, 1e-6f, rows, heads, kv_heads, dim, qkv);
        double normed = (double)rows * (heads + kv_heads) * dim;
        traffic_check(parity, "norm_heads", (2 * normed + 2 * dim) * sizeof *qkv, "%u rows, %u and %u heads of %u",
            rows, heads, kv_heads, dim);
        parity_release(parity, qkv);
        parity_release(parity, weight);
    }
}

/* Widths that are no multiple of 4, a number at a time; one row, since others begin in the middle of a sector. */
static void case_odd_vectors(struct parity *parity) {
    enum { WIDTH = 4098 };
    const uint32_t wanted = 0;
    float *x = upload_normal(parity, 2 * WIDTH), *weight = upload_normal(parity, WIDTH);
    float *out = parity_upload(parity, NULL, WIDTH * sizeof *out);
    traffic_begin(parity);
    parity->operations->rms_norm(parity->backend, x, weight, 1e-5f, 1, WIDTH, out);
    traffic_check(parity, "norm_any", 4.0 * WIDTH * sizeof *x, "1 x %d, read twice", WIDTH);
    traffic_begin(parity);
    parity->operations->silu_mul(parity->backend, x, 1, WIDTH, out);
    traffic_check(parity, "gate_any", 3.0 * WIDTH * sizeof *x, "1 x %d", WIDTH);
    traffic_begin(parity);
    parity->operations->gather_rows(parity->backend, x, &wanted, 1, WIDTH, out);
    traffic_check(parity, "gather_any", 2.0 * WIDTH * sizeof *x, "1 x %d", WIDTH);
    parity_release(parity, x);
    parity_release(parity, weight);
    parity_release(parity, out);
}

/* A pool whose pages are all one table, in another order. */
struct pages {
    struct kv_pool pool;
    uint32_t *table;
    uint32_t count;
};

static struct pages pages_create(struct parity *parity, uint32_t count, uint32_t kv_heads, uint32_t dim) {
    struct kv_layout layout = {.layers = 1, .kv_heads = kv_heads, .head_dim = dim, .format = KV_F16};
    size_t bytes = kv_page_bytes(&layout);
    struct pages pages = {{.base = parity_upload(parity, NULL, count * bytes), .page_bytes = bytes, .layout = layout},
        parity_host(count * sizeof(uint32_t)), count};
    for (uint32_t i = 0; i < count; i++)
        pages.table[i] = (uint32_t)((i * (uint64_t)7 + 3) % count); /* 7 divides no count used here */
    return pages;
}

static void pages_free(struct parity *parity, struct pages *pages) {
    parity_release(parity, pages->pool.base);
    free(pages->table);
}

/* items sequences of `rows` new tokens each after `old`. */
static void check_append(struct parity *parity, uint32_t items_count, uint32_t rows, uint32_t old, uint32_t heads,
    uint32_t kv_heads, uint32_t dim) {
    enum { ITEMS = 8, VIEWS = 64 };
    uint32_t each = (old + rows + KV_PAGE_SLOTS - 1) / KV_PAGE_SLOTS, views_count = items_count * kv_heads;
    struct pages pages = pages_create(parity, views_count * each, kv_heads, dim);
    struct kv_item items[ITEMS];
    struct kv_head_view views[VIEWS];
    float inverse_freq[128];
    for (uint32_t i = 0; i < dim / 2; i++)
        inverse_freq[i] = 1.0f / (float)(i + 1);
    for (uint32_t i = 0; i < items_count; i++)
        items[i] = (struct kv_item){.first_row = i * rows, .rows = rows, .position = old};
    for (uint32_t i = 0; i < views_count; i++)
        views[i] = (struct kv_head_view){.pages = pages.table + i * each, .slots = old + rows, .first_slot = old};
    struct kv_batch batch = {.pool = &pages.pool, .items = items, .items_count = items_count, .views = views};
    struct rope_params rope = {dim, inverse_freq};
    float *qkv = upload_normal(parity, (size_t)items_count * rows * (heads + 2 * kv_heads) * dim);
    parity->operations->rope_and_append(parity->backend, &batch, &rope, heads, qkv); /* makes the table of turns */
    traffic_begin(parity);
    parity->operations->rope_and_append(parity->backend, &batch, &rope, heads, qkv);
    double tokens = (double)items_count * rows, slots = tokens * kv_heads;
    double queries = tokens * heads * dim * 2 * sizeof(float), fresh = slots * dim * 2 * sizeof(float);
    double turns = tokens * dim * sizeof(float), values = slots * dim * sizeof(uint16_t);
    /* A token alone writes 2 bytes of each channel's sector, and 4 of that of the positions. */
    double touched = (double)views_count * ((rows + KV_PAGE_SLOTS - 1) / KV_PAGE_SLOTS);
    double keys = touched * dim * 32, positions = touched * (rows < 8 ? 32 : 64);
    traffic_check(parity, "rope_append", queries + fresh + turns + values + keys + positions,
        "%u items of %u rows after %u, %u and %u heads of %u", items_count, rows, old, heads, kv_heads, dim);
    parity_release(parity, qkv);
    pages_free(parity, &pages);
}

static void case_append(struct parity *parity) {
    check_append(parity, 1, 256, 0, 9, 3, 64);
    check_append(parity, 2, 64, 32, 32, 8, 128);
    check_append(parity, 1, 1, 100, 32, 8, 128);
    check_append(parity, 8, 1, 100, 9, 3, 64);
}

static void case_pages(struct parity *parity) {
    enum { PAGES = 96, SLOTS = PAGES * KV_PAGE_SLOTS, KEPT = SLOTS / 4 };
    struct pages pages = pages_create(parity, PAGES + 1, 1, 128);
    uint32_t from[KEPT], to[KEPT], count = 0;
    traffic_begin(parity);
    parity->operations->copy_pages(parity->backend, &pages.pool, pages.table, pages.table + PAGES / 2, PAGES / 2);
    traffic_check(parity, "copy_pages", (double)PAGES * (double)pages.pool.page_bytes, "%d pages", PAGES / 2);
    traffic_begin(parity);
    parity->operations->poison_pages(parity->backend, &pages.pool, pages.table, PAGES);
    traffic_check(parity, "poison_pages", (double)PAGES * (double)pages.pool.page_bytes, "%d pages", PAGES);
    /* A prune to a quarter: what is kept is spread evenly, and fills the holes at the front. */
    for (uint32_t slot = KEPT; slot < SLOTS && count < KEPT * 3 / 4; slot += 4) {
        from[count] = slot;
        to[count] = count + count / 3;
        count++;
    }
    traffic_begin(parity);
    parity->operations->move_slots(parity->backend, &pages.pool, pages.table, from, to, count);
    traffic_check_once(parity, "move_slots", "%u of %d slots", count, SLOTS);
    /* Every slot is read after it was written: by way of memory outside of the pages, which has d keys and values and a
     * position of each. A sector of each channel, the values' row, and the position's. */
    for (uint32_t i = 0; i < PAGES; i++) {
        from[i] = (i + 1) % PAGES * KV_PAGE_SLOTS;
        to[i] = i * KV_PAGE_SLOTS;
    }
    traffic_begin(parity);
    parity->operations->move_slots(parity->backend, &pages.pool, pages.table, from, to, PAGES);
    double slot = 128 * 32 + 128 * 2 + 32, outside = 2 * 128 * 2 + 4;
    traffic_check(parity, "move_slots_through", PAGES * 2 * (slot + outside), "a cycle of %d slots", PAGES);
    traffic_begin(parity);
    parity->operations->clear_slots(parity->backend, &pages.pool, pages.table, 0, SLOTS);
    traffic_check_once(parity, "clear_places", "%d slots", SLOTS);
    pages_free(parity, &pages);
}

/* All slots of a head: their channels lie in sectors with those of their neighbours. */
static void case_rotation(struct parity *parity) {
    enum { COUNT = 512, DIM = 128, TURNS = 4096 };
    struct pages pages = pages_create(parity, COUNT / KV_PAGE_SLOTS, 1, DIM);
    uint32_t slots[COUNT], to[COUNT];
    float inverse_freq[DIM / 2];
    for (uint32_t i = 0; i < DIM / 2; i++)
        inverse_freq[i] = 1.0f / (float)(i + 2);
    for (uint32_t i = 0; i < COUNT; i++)
        slots[i] = to[i] = i;
    struct rope_params rope = {DIM, inverse_freq};
    float *keys = upload_normal(parity, (size_t)COUNT * DIM);
    double row = DIM * sizeof *keys, turns = row, number = DIM * sizeof(uint16_t);
    /* The first time makes the table of turns (of these frequencies no other case has any): each warp writes a part of
     * it, and reads the frequencies of its pairs. */
    traffic_begin(parity);
    parity->operations->rotate_slots(parity->backend, &pages.pool, &rope, pages.table, slots, keys, to, COUNT);
    traffic_check(parity, "fill_turns", (double)TURNS * (DIM / 2) * (2 + 1) * sizeof(float), "%d positions", TURNS);
    traffic_begin(parity);
    parity->operations->rotate_slots(parity->backend, &pages.pool, &rope, pages.table, slots, keys, to, COUNT);
    double listed = sizeof(uint64_t) + sizeof(uint32_t);
    traffic_check(parity, "rotate_slots", COUNT * (row + turns + number + listed), "%d slots", COUNT);
    traffic_begin(parity);
    parity->operations->unrotate_slots(parity->backend, &pages.pool, &rope, pages.table, slots, COUNT, keys);
    traffic_check(parity, "unrotate_slots", COUNT * (row + turns + number + listed), "%d slots", COUNT);
    parity_release(parity, keys);
    pages_free(parity, &pages);
}

/* Positions beyond the table of turns are computed where they are needed: besides, frequencies are read. */
static void case_far_rotation(struct parity *parity) {
    enum { COUNT = 64, DIM = 128, FAR = 1 << 18 };
    struct pages pages = pages_create(parity, COUNT / KV_PAGE_SLOTS, 1, DIM);
    uint32_t slots[COUNT], to[COUNT];
    float inverse_freq[DIM / 2];
    for (uint32_t i = 0; i < DIM / 2; i++)
        inverse_freq[i] = 1.0f / (float)(i + 3);
    for (uint32_t i = 0; i < COUNT; i++) {
        slots[i] = i;
        to[i] = FAR + i;
    }
    struct rope_params rope = {DIM, inverse_freq};
    float *keys = upload_normal(parity, (size_t)COUNT * DIM);
    double row = DIM * sizeof *keys, frequencies = row / 2, number = DIM * sizeof(uint16_t);
    double listed = sizeof(uint64_t) + sizeof(uint32_t);
    traffic_begin(parity);
    parity->operations->rotate_slots(parity->backend, &pages.pool, &rope, pages.table, slots, keys, to, COUNT);
    traffic_check(parity, "rotate_slots", COUNT * (row + frequencies + number + listed), "%d slots, far", COUNT);
    parity_release(parity, keys);
    pages_free(parity, &pages);
}

/* Tables of a prompt; then one number each of many heads. */
static void case_tables(struct parity *parity) {
    enum { HEADS = 64, PAGES = 128 };
    static uint32_t from[PAGES];
    struct kv_table_write writes[HEADS];
    uint32_t *tables = parity_upload(parity, NULL, HEADS * PAGES * sizeof *tables);
    for (uint32_t length = PAGES; length > 0; length = length == PAGES ? 1 : 0) {
        for (uint32_t i = 0; i < HEADS; i++)
            writes[i] = (struct kv_table_write){.to = tables + i * PAGES, .from = from, .count = length};
        traffic_begin(parity);
        parity->operations->write_tables(parity->backend, writes, HEADS);
        if (length == PAGES)
            traffic_check(parity, "write_tables", HEADS * (16.0 + 2.0 * PAGES * sizeof *from), "%d tables", HEADS);
        else
            traffic_check_once(parity, "write_tables", "one number of %d tables", HEADS);
    }
    parity_release(parity, tables);
}

/* Sums and windows of a head of 4,096 slots, pruned to a quarter. */
static void case_columns(struct parity *parity) {
    enum { SLOTS = 4096, KEPT = SLOTS / 4, WINDOW = 16 };
    struct kv_statistics head = {.capacity = SLOTS, .window = WINDOW};
    head.sum = parity_upload(parity, NULL, 2 * SLOTS * sizeof *head.sum);
    head.window_rows = parity_upload(parity, NULL, WINDOW * SLOTS * sizeof *head.window_rows);
    uint32_t from[KEPT], to[KEPT], count = 0;
    for (uint32_t slot = KEPT; slot < SLOTS && count < KEPT * 3 / 4; slot += 4) {
        from[count] = slot;
        to[count] = count + count / 3;
        count++;
    }
    struct statistics_move move = {&head, &head, from, to, count, KEPT, SLOTS, 0, false};
    traffic_begin(parity);
    parity->operations->move_statistics(parity->backend, &move, 1, 3, 64);
    /* Four rows at a time read the lists. */
    double lists = (1.0 + WINDOW / 4) * count * 2 * sizeof(uint32_t);
    double sources = count * 32.0 + WINDOW * (double)SLOTS * 3 / 4 * sizeof(uint16_t);
    double targets = SLOTS * sizeof(uint64_t) + WINDOW * (double)SLOTS * sizeof(uint16_t);
    traffic_check(parity, "move_arrays", lists + sources + targets, "%u of %d slots", count, SLOTS);
    parity_release(parity, head.sum);
    parity_release(parity, head.window_rows);
}

/* Passes over the row, each of which finds it in the second-level cache but the first. */
static void case_sample(struct parity *parity) {
    enum { V = 49152, ROWS = 2 };
    static const struct {
        const char *what;
        uint32_t passes;
        struct sample_params params;
    } rows[] = {
        {"greedy", 1, {.top_p = 1, .forced = -1}},
        {"temperature", 2, {.temperature = 1, .top_p = 1, .forced = -1}},
        {"top_p", 5, {.temperature = 1, .top_p = 0.9f, .forced = -1}},
        {"top_k", 4, {.temperature = 1, .top_p = 1, .top_k = 40, .forced = -1}},
        {"report", 6, {.top_p = 1, .forced = -1, .top_count = 20, .want_logprob = true}},
    };
    float *logits = upload_normal(parity, (size_t)ROWS * V);
    for (size_t i = 0; i < sizeof rows / sizeof rows[0]; i++) {
        struct sample_params params[ROWS] = {rows[i].params, rows[i].params};
        struct sample_result results[ROWS];
        traffic_begin(parity);
        parity->operations->sample(parity->backend, logits, ROWS, V, params, results);
        traffic_check_atomics(
            parity, "sample", (double)ROWS * rows[i].passes * V * sizeof *logits, 2.5, "%s", rows[i].what);
    }
    float out;
    traffic_begin(parity);
    parity->operations->kl(parity->backend, logits, (const uint32_t[]){0}, logits + V, 1, V, &out);
    traffic_check(parity, "divergence", 6.0 * V * sizeof *logits, "kl");
    parity_release(parity, logits);
}

const struct parity_case parity_traffic_core_cases[] = {
    {.name = "traffic vectors", .run = case_vectors},
    {.name = "traffic odd vectors", .run = case_odd_vectors},
    {.name = "traffic traits", .run = case_traits},
    {.name = "traffic head_norms", .run = case_head_norms},
    {.name = "traffic far rotation", .run = case_far_rotation},
    {.name = "traffic rope_and_append", .run = case_append},
    {.name = "traffic pages", .run = case_pages},
    {.name = "traffic rotation", .run = case_rotation},
    {.name = "traffic write_tables", .run = case_tables},
    {.name = "traffic move_statistics", .run = case_columns},
    {.name = "traffic sample", .run = case_sample},
    {.name = NULL},
};
