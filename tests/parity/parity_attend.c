/* SPDX-License-Identifier: Apache-2.0
 *
 * Attention and the appending of keys and values: random shapes, ragged slot counts, scattered page tables, holes,
 * slots in any order of position, all storage formats; unused slots and pages hold NaN.
 */
#include "tests/parity/parity.h"
#include "tests/parity/parity_same.h"
#include "tests/parity/parity_scene.h"
#include "tests/parity/reference_attend.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

static float *run_attend(
    struct parity *parity, const struct scene *scene, const struct kv_batch *batch, const float *qkv, uint32_t rows) {
    size_t bytes = (size_t)rows * scene->heads * scene->pool.layout.head_dim * sizeof(float);
    float *out = parity_upload(parity, NULL, bytes);
    parity->operations->attend(parity->backend, batch, scene->heads, qkv, out);
    float *host = parity_download(parity, out, bytes);
    parity_release(parity, out);
    return host;
}

static void check_against_reference(struct parity *parity, const struct scene *scene, const float *got) {
    uint32_t dim = scene->pool.layout.head_dim;
    size_t count = (size_t)scene->rows * scene->heads * dim;
    double *want = parity_host(count * sizeof *want);
    reference_attend(&scene->pool, scene->items, scene->items_count, scene->views,
        (const float *const *)scene->summaries,
        (struct reference_variant){scene->window, (double)scene->scale, (double)scene->cap}, scene->heads, scene->qkv,
        want);
    /* On tensor cores probabilities are rounded to f16 before they weigh f16 values (cuda/attend.h). */
    double tolerance = parity->cuda && scene->pool.layout.format == KV_F16 ? 5e-4 : 3e-5;
    parity_check_close(parity, got, want, count, tolerance, 0, "attend R=%u H=%u K=%u d=%u items=%u", scene->rows,
        scene->heads, scene->pool.layout.kv_heads, dim, scene->items_count);
    free(want);
}

/* Every item alone, in chunks of other sizes, must give the bits that it has in the whole batch. */
static void check_chunks(struct parity *parity, const struct scene *scene, const float *qkv, const float *whole) {
    uint32_t dim = scene->pool.layout.head_dim, kv_heads = scene->pool.layout.kv_heads;
    size_t row_size = (size_t)scene->heads * dim;
    for (uint32_t item = 0; item < scene->items_count; item++) {
        uint32_t rows = scene->items[item].rows;
        for (uint32_t first = 0, chunk; first < rows; first += chunk) {
            chunk = parity_random(parity, 1, rows - first);
            struct kv_item part = {0};
            struct kv_head_view views[KV_HEADS_MAX];
            scene_chunk(scene, item, first, chunk, &part, views);
            struct kv_batch batch = {.pool = &scene->device,
                .items = &part,
                .items_count = 1,
                .views = views,
                .window = scene->window,
                .scale = scene->scale,
                .cap = scene->cap};
            size_t row = scene->items[item].first_row + first;
            float *got = run_attend(parity, scene, &batch, qkv + row * (scene->heads + 2 * kv_heads) * dim, chunk);
            parity_check_bits(parity, got, whole + row * row_size, chunk * row_size,
                "rows %u..%u of %u of item %u alone, d=%u", first, first + chunk, rows, item, dim);
            free(got);
        }
    }
}

static const struct scene_limits limits_of[] = {
    {.dim = 0, .rows = 40, .slots = 700, .group = 5, .sharpness = 1},
    {.dim = 64, .rows = 120, .slots = 1100, .group = 4, .sharpness = 6},
    {.dim = 0, .rows = 3, .slots = 300, .group = 40, .sharpness = 1},
};

/* Windows, scales and soft caps, and pages that are gone: whoever reads one leaves the pool. */
static void vary_scene(struct parity *parity, struct scene *scene) {
    enum { NO_PAGE = UINT32_MAX / 2 };
    scene->window = parity->round % 3 != 0 ? parity_random(parity, 1, parity_random(parity, 1, 400)) : 0;
    scene->scale = parity->round % 2 != 0 ? (float)parity_uniform(parity, 0.02, 0.5) : 0;
    scene->cap = parity->round % 4 != 1 ? (float)parity_uniform(parity, 0.5, 50) : 0;
    for (uint32_t i = 0; i < scene->items_count * scene->pool.layout.kv_heads; i++) {
        struct kv_head_view *view = &scene->views[i];
        uint32_t gone = parity_random(parity, 0, view->first_slot / KV_PAGE_SLOTS);
        view->from_slot = gone * KV_PAGE_SLOTS;
        for (uint32_t page = 0; page < gone; page++)
            scene->tables[i][page] = NO_PAGE;
    }
}

static void run_scene(struct parity *parity, uint32_t which, bool vary) {
    struct scene scene;
    scene_create(parity, &scene, (enum kv_format)(parity->round % 3), &limits_of[which]);
    if (vary)
        vary_scene(parity, &scene);
    float *qkv = scene_append(parity, &scene);
    struct kv_batch batch = scene_batch(&scene);
    float *got = run_attend(parity, &scene, &batch, qkv, scene.rows);
    check_against_reference(parity, &scene, got);
    parity_check_same(parity, got, (size_t)scene.rows * scene.heads * scene.pool.layout.head_dim * sizeof(float));
    check_chunks(parity, &scene, qkv, got);
    free(got);
    parity_release(parity, qkv);
    scene_free(parity, &scene);
}

static void case_attend(struct parity *parity) {
    run_scene(parity, parity->entry->index, false);
}

static void case_variants(struct parity *parity) {
    if (parity->operations->attend_variants)
        run_scene(parity, parity->entry->index, true);
}

/* Keys and values as the definition says, everything else in the pool untouched. */
static void check_appended(struct parity *parity, const struct scene *before, const struct scene *after) {
    const struct kv_layout *layout = &before->pool.layout;
    uint32_t dim = layout->head_dim;
    size_t stride = (size_t)(before->heads + 2 * layout->kv_heads) * dim,
           number = reference_number_bytes(layout->format);
    double rotated[256], tolerance = layout->format == KV_F32 ? 3e-7 : layout->format == KV_F16 ? 5e-4 : 4e-3;
    float stored[256];
    for (uint32_t item = 0; item < before->items_count; item++) {
        for (uint32_t token = 0; token < before->items[item].rows; token++) {
            uint32_t position = before->items[item].position + token;
            const float *row = before->qkv + (before->items[item].first_row + token) * stride;
            const float *turned = after->qkv + (before->items[item].first_row + token) * stride;
            for (uint32_t head = 0; head < before->heads; head++) {
                reference_rope(&before->rope, position, row + head * dim, dim, rotated);
                parity_check_close(parity, turned + head * dim, rotated, dim, 1e-6, 3e-7, "rotated query");
            }
            for (uint32_t head = 0; head < layout->kv_heads; head++) {
                const struct kv_head_view *view = &before->views[item * layout->kv_heads + head];
                uint32_t slot = view->first_slot + token, place = slot % KV_PAGE_SLOTS;
                uint32_t page = view->pages[slot / KV_PAGE_SLOTS];
                const float *key = row + (before->heads + head) * dim, *value = key + layout->kv_heads * dim;
                reference_rope(&before->rope, position, key, dim, rotated);
                for (uint32_t channel = 0; channel < dim; channel++) {
                    unsigned char *at = reference_key(&after->pool, page, place, channel);
                    stored[channel] = (float)reference_number(layout->format, at);
                    memcpy(reference_key(&before->pool, page, place, channel), at, number); /* compared here */
                    reference_round(
                        layout->format, (double)value[channel], reference_value(&before->pool, page, place, channel));
                }
                parity_check_close(parity, stored, rotated, dim, 1e-6, tolerance, "stored key");
                *reference_position(&before->pool, page, place) = (int32_t)position;
            }
        }
    }
    parity_check_bytes(parity, after->pool.image, before->pool.image, before->pages * before->pool.page_bytes,
        "pool after append, d=%u, format %d", dim, (int)layout->format);
}

static void case_append(struct parity *parity) {
    static const struct scene_limits limits = {.rows = 60, .slots = 100, .group = 3, .sharpness = 1};
    struct scene after;
    scene_create(parity, &after, (enum kv_format)(parity->round % 3), &limits);
    struct scene before = after;
    size_t bytes = after.pages * after.pool.page_bytes;
    before.pool.image = parity_host(bytes);
    memcpy(before.pool.image, after.pool.image, bytes);
    before.qkv = parity_host(after.qkv_bytes);
    memcpy(before.qkv, after.qkv, after.qkv_bytes);
    parity_release(parity, scene_append(parity, &after));
    check_appended(parity, &before, &after);
    parity_check_same(parity, after.pool.image, bytes);
    free(before.pool.image);
    free(before.qkv);
    scene_free(parity, &after);
}

/* A number of values that are hard to round, as the values of one appended token. */
static void case_append_rounding(struct parity *parity) {
    static const float hard[] = {65504, 65519.996f, 65520, 1e6f, INFINITY, -INFINITY, 0x1p-24f, 0x1p-25f, 0x1.8p-25f,
        -0x1p-26f, 1 + 0x1p-11f, 1 + 0x3p-11f, 1 + 0x1.002p-11f, 0x1.fffffep127f, 1 + 0x1p-8f, 1 + 0x3p-8f, 0, -0.0f,
        0x1p-126f, 0x1p-149f, 0x1.ffcp-15f, 0x1.ffffp-15f};
    enum { DIM = 64 };
    enum kv_format format = (enum kv_format)(parity->round % 3);
    struct kv_layout layout = {.layers = 1, .kv_heads = 1, .head_dim = DIM, .format = format};
    struct reference_pool pool = {NULL, scene_page_bytes(&layout), layout};
    struct kv_pool device = {
        .base = parity_upload(parity, NULL, pool.page_bytes), .page_bytes = pool.page_bytes, .layout = layout};
    static const float inverse_freq[DIM / 2];
    static const uint32_t table[] = {0};
    float row[3 * DIM];
    for (uint32_t i = 0; i < 3 * DIM; i++)
        row[i] = i % DIM < sizeof hard / sizeof hard[0] ? hard[i % DIM] : parity_normal(parity);
    for (uint32_t i = 0; i < 2 * DIM; i++)
        row[i] = parity_normal(parity);
    struct kv_item item = {.rows = 1, .position = 5};
    struct kv_head_view view = {.pages = table, .slots = 8, .first_slot = 7};
    struct kv_batch batch = {.pool = &device, .items = &item, .items_count = 1, .views = &view};
    struct rope_params rope = {DIM, inverse_freq};
    float *qkv = parity_upload(parity, row, sizeof row);
    parity->operations->rope_and_append(parity->backend, &batch, &rope, 1, qkv);
    pool.image = parity_download(parity, device.base, pool.page_bytes);
    for (uint32_t channel = 0; channel < DIM; channel++) {
        unsigned char want[4];
        size_t bytes = reference_round(format, (double)row[2 * DIM + channel], want);
        parity_check_bytes(parity, reference_value(&pool, 0, 7, channel), want, bytes, "%a in format %d",
            (double)row[2 * DIM + channel], (int)format);
        bytes = reference_round(format, (double)row[DIM + channel], want); /* frequency 0: the key is not turned */
        parity_check_bytes(parity, reference_key(&pool, 0, 7, channel), want, bytes, "key %a in format %d",
            (double)row[DIM + channel], (int)format);
    }
    free(pool.image);
    parity_release(parity, qkv);
    parity_release(parity, device.base);
}

/* A later token whose value is infinite or NaN in the cache must not reach the rows before it. */
static void case_hidden_infinity(struct parity *parity) {
    enum { DIM = 64, ROWS = 21, HEADS = 2, WIDTH = (HEADS + 2) * DIM };
    struct kv_layout layout = {
        .layers = 1, .kv_heads = 1, .head_dim = DIM, .format = (enum kv_format)(parity->round % 3)};
    struct kv_pool pool = {.page_bytes = scene_page_bytes(&layout), .layout = layout};
    static const uint32_t table[] = {1, 0};
    static const float inverse_freq[DIM / 2];
    struct kv_item item = {.rows = ROWS};
    struct kv_head_view view = {.pages = table, .slots = ROWS, .first_slot = 0};
    struct kv_batch batch = {.pool = &pool, .items = &item, .items_count = 1, .views = &view};
    struct rope_params rope = {DIM, inverse_freq};
    float *x = parity_host(ROWS * WIDTH * sizeof *x), *outs[2];
    parity_fill_normal(parity, x, (size_t)ROWS * WIDTH, 1);
    uint32_t bad = parity_random(parity, 1, ROWS - 1);
    for (int spoilt = 0; spoilt < 2; spoilt++) {
        for (uint32_t i = 0; i < DIM && spoilt; i++)
            x[bad * WIDTH + (HEADS + 1) * DIM + i] = i % 2 == 0 ? INFINITY : NAN;
        pool.base = parity_upload(parity, NULL, 2 * pool.page_bytes);
        float *qkv = parity_upload(parity, x, ROWS * WIDTH * sizeof *x);
        float *out = parity_upload(parity, NULL, ROWS * HEADS * DIM * sizeof *out);
        parity->operations->rope_and_append(parity->backend, &batch, &rope, HEADS, qkv);
        parity->operations->attend(parity->backend, &batch, HEADS, qkv, out);
        outs[spoilt] = parity_download(parity, out, ROWS * HEADS * DIM * sizeof *out);
        parity_release(parity, pool.base);
        parity_release(parity, qkv);
        parity_release(parity, out);
    }
    parity_check_bits(parity, outs[1], outs[0], (size_t)bad * HEADS * DIM, "rows before token %u", bad);
    parity_check_true(parity, !isfinite(outs[1][(size_t)bad * HEADS * DIM]), "token %u sees itself", bad);
    free(outs[0]);
    free(outs[1]);
    free(x);
}

struct timed {
    struct parity *parity;
    struct kv_batch batch;
    const struct kv_head_view *views; /* [layers][items][KV heads] */
    uint32_t layers, layer;
    uint32_t heads;
    float *qkv;
    float *out;
    const struct rope_params *rope;
};

/* Each call works on the next layer, as in a model: nothing of it is in the caches when there are many. */
static void work_attend(void *context) {
    struct timed *timed = context;
    timed->layer = (timed->layer + 1) % timed->layers;
    timed->batch.views =
        timed->views + (size_t)timed->layer * timed->batch.items_count * timed->batch.pool->layout.kv_heads;
    timed->parity->operations->attend(timed->parity->backend, &timed->batch, timed->heads, timed->qkv, timed->out);
}

static void work_append(void *context) {
    struct timed *timed = context;
    timed->parity->operations->rope_and_append(
        timed->parity->backend, &timed->batch, timed->rope, timed->heads, timed->qkv);
}

/* Layers of SmolLM2-135M: 9 query heads, 3 KV heads, d = 64. */
static void time_attend(struct parity *parity, enum kv_format format, uint32_t layers, uint32_t items_count,
    uint32_t rows, uint32_t depth) {
    enum { HEADS = 9, KV_HEADS = 3, DIM = 64 };
    struct kv_layout layout = {.layers = 1, .kv_heads = KV_HEADS, .head_dim = DIM, .format = format};
    uint32_t table_pages = (depth + rows + KV_PAGE_SLOTS - 1) / KV_PAGE_SLOTS, tables = items_count * KV_HEADS * layers;
    struct kv_pool pool = {.page_bytes = scene_page_bytes(&layout), .layout = layout};
    struct reference_pool image = {parity_host(tables * table_pages * pool.page_bytes), pool.page_bytes, layout};
    uint32_t *table = parity_host(tables * table_pages * sizeof *table);
    struct kv_item *items = parity_host(items_count * sizeof *items);
    struct kv_head_view *views = parity_host(tables * sizeof *views);
    for (uint32_t item = 0; item < items_count; item++)
        items[item] = (struct kv_item){.first_row = item * rows, .rows = rows, .position = depth};
    for (uint32_t view = 0; view < tables; view++) {
        uint32_t *pages = table + view * table_pages;
        for (uint32_t i = 0; i < table_pages; i++)
            pages[i] = i * tables + view; /* all heads grow together */
        for (uint32_t slot = 0; slot < depth + rows; slot++)
            *reference_position(&image, pages[slot / KV_PAGE_SLOTS], slot % KV_PAGE_SLOTS) = (int32_t)slot;
        views[view] = (struct kv_head_view){.pages = pages, .slots = depth + rows, .first_slot = depth};
    }
    pool.base = parity_upload(parity, image.image, tables * table_pages * pool.page_bytes);
    size_t count = (size_t)items_count * rows * (HEADS + 2 * KV_HEADS) * DIM;
    float *qkv = parity_host(count * sizeof *qkv), inverse_freq[DIM / 2];
    parity_fill_normal(parity, qkv, count, 1);
    for (uint32_t pair = 0; pair < DIM / 2; pair++)
        inverse_freq[pair] = (float)pow(10000, -2.0 * pair / DIM);
    struct rope_params rope = {DIM, inverse_freq};
    struct timed timed = {.parity = parity,
        .batch = {.pool = &pool, .items = items, .items_count = items_count, .views = views},
        .views = views,
        .layers = layers,
        .heads = HEADS,
        .qkv = parity_upload(parity, qkv, count * sizeof *qkv),
        .out = parity_upload(parity, NULL, count * sizeof *qkv),
        .rope = &rope};
    double seen = (double)rows * depth + 0.5 * rows * (rows + 1); /* (row, slot) pairs of one sequence */
    double bytes = (double)items_count * KV_HEADS * (depth + rows) * 2 * DIM * (double)reference_number_bytes(format);
    const char *name = format == KV_F32 ? "f32" : format == KV_F16 ? "f16" : "bf16";
    if (layers == 1)
        parity_time(parity, work_append, &timed, 0, 0, "append %u sequences, %u rows", items_count, rows);
    parity_time(parity, work_attend, &timed, rows == 1 ? bytes : 0, seen * items_count * HEADS * DIM * 2,
        "attend %s, %u sequences, %u rows, depth %u, %u layers", name, items_count, rows, depth, layers);
    parity_release(parity, timed.qkv);
    parity_release(parity, timed.out);
    parity_release(parity, pool.base);
    free(qkv);
    free(views);
    free(items);
    free(table);
    free(image.image);
}

static void time_attend_all(struct parity *parity) {
    for (enum kv_format format = KV_F32; format <= KV_BF16; format++) {
        time_attend(parity, format, 1, 1, 1, 512);
        time_attend(parity, format, 1, 1, 1, 7168);
        time_attend(parity, format, 1, 1, 512, 0);
    }
    time_attend(parity, KV_F16, 30, 1, 1, 512);
    time_attend(parity, KV_F16, 30, 1, 1, 7168);
    time_attend(parity, KV_F16, 30, 8, 1, 512);
    time_attend(parity, KV_F16, 4, 8, 1, 7168);
    time_attend(parity, KV_F16, 1, 1, 64, 1024);
    time_attend(parity, KV_F16, 1, 1, 512, 1024);
}

const struct parity_case parity_attend_cases[] = {
    {.name = "attend any shape", .run = case_attend, .rounds = 21, .index = 0, .time = time_attend_all},
    {.name = "attend long", .run = case_attend, .rounds = 6, .index = 1},
    {.name = "attend large groups", .run = case_attend, .rounds = 6, .index = 2},
    {.name = "attend variants", .run = case_variants, .rounds = 12, .index = 0},
    {.name = "attend variants long", .run = case_variants, .rounds = 3, .index = 1},
    {.name = "attend variants large groups", .run = case_variants, .rounds = 3, .index = 2},
    {.name = "attend hidden infinity", .run = case_hidden_infinity, .rounds = 9},
    {.name = "append", .run = case_append, .rounds = 72},
    {.name = "append rounding", .run = case_append_rounding, .rounds = 3},
    {.name = NULL},
};
