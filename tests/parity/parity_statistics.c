/* SPDX-License-Identifier: Apache-2.0
 *
 * Statistics of attention, all together and each alone: against the reference; the same bits in chunks, with any number
 * of threads and in any tier; nothing where a query sees nothing; attention's own result untouched.
 */
#include "tests/parity/parity_same.h"
#include "tests/parity/parity_scene.h"
#include "tests/parity/reference_linear.h"
#include "tests/parity/reference_statistics.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

enum {
    KINDS = 9, /* arrays of struct kv_statistics */
    WORDS = STATISTIC_ABOVE_BITS / 64,
    ALL_NEEDS = STATISTIC_SUM | STATISTIC_SQUARED | STATISTIC_WINDOW | STATISTIC_HEAD_WINDOW | STATISTIC_OUTPUTS |
                STATISTIC_ABOVE | STATISTIC_ENTROPY | STATISTIC_NOISY,
};

/* Statistics of all heads of a scene, on the device and what they were before on the host. */
struct recorded {
    uint32_t heads; /* items * K */
    struct kv_statistics device[VIEWS_MAX];
    struct kv_statistics before[VIEWS_MAX]; /* host */
};

static size_t kind_bytes(const struct kv_statistics *s, uint32_t kind, uint32_t group, uint32_t dim) {
    size_t capacity = s->capacity;
    switch (kind) {
    case 0:
    case 1:
    case 2:
        return 2 * capacity * sizeof(uint32_t);
    case 3:
        return s->window * capacity * sizeof(uint16_t);
    case 4:
        return capacity * sizeof(uint32_t);
    case 5:
        return s->window * group * capacity * sizeof(uint16_t);
    case 6:
        return (size_t)s->window * group * dim * sizeof(float);
    case 7:
        return capacity * WORDS * sizeof(uint64_t);
    default:
        return capacity * sizeof(uint16_t);
    }
}

static const uint32_t kind_needs[KINDS] = {STATISTIC_SUM, STATISTIC_SQUARED, STATISTIC_NOISY, STATISTIC_WINDOW,
    STATISTIC_WINDOW, STATISTIC_HEAD_WINDOW, STATISTIC_OUTPUTS, STATISTIC_ABOVE, STATISTIC_ENTROPY};

static void **kind_array(struct kv_statistics *s, uint32_t kind) {
    void **arrays[KINDS] = {(void **)&s->sum, (void **)&s->squared, (void **)&s->noisy, (void **)&s->window_rows,
        (void **)&s->window_sum, (void **)&s->head_rows, (void **)&s->outputs, (void **)&s->above,
        (void **)&s->entropy};
    return arrays[kind];
}

static uint32_t scene_group(const struct scene *scene) {
    return scene->heads / scene->pool.layout.kv_heads;
}

/* Whether a slot is one of the batch's new tokens: its statistics are zero before. */
static bool is_new(const struct kv_item *item, const struct kv_head_view *view, uint32_t slot) {
    return slot >= view->first_slot && slot < view->first_slot + item->rows;
}

/* Large ones, small ones, and such as the batch makes large. */
static void fill_sums(struct parity *parity, const struct kv_statistics *s, const struct kv_item *item,
    const struct kv_head_view *view, uint32_t *planes) {
    uint64_t *sums = parity_host(view->slots * sizeof *sums);
    parity_fill_sums(parity, 45, view->slots, sums);
    for (uint32_t slot = 0; slot < view->slots; slot++)
        kv_sum_set(planes, s->capacity, slot, is_new(item, view, slot) ? 0 : sums[slot]);
    free(sums);
}

/* The query whose row of a ring it is before a batch at `position`; below 0: none yet. */
static int64_t ring_query(uint32_t position, uint32_t ring, uint32_t row) {
    int64_t last = (int64_t)position - 1;
    return last - (last - row + ring) % ring;
}

/* A row of the window and what it adds to the sum. A slot whose token came after the row's query may have what was
 * there before its token (statistics_move.rows_stay); a device zeroes it. */
static void fill_window(struct parity *parity, struct kv_statistics *s, const struct kv_item *item, uint32_t row,
    uint32_t slot, bool seen) {
    unsigned char *half = (unsigned char *)&s->window_rows[(size_t)row * s->capacity + slot];
    if (!seen && (item->rows > 1 || item->window_from > 0 || !parity->operations->host_memory))
        return;
    reference_round(KV_F16, parity_uniform(parity, 0, 1), half);
    if (seen)
        s->window_sum[slot] += (uint32_t)(reference_number(KV_F16, half) * 0x1p24);
}

/* What earlier queries may have left: any numbers, the window's sum in accord with its rows. */
static void fill_before(struct parity *parity, struct kv_statistics *s, const struct reference_pool *pool,
    const struct kv_item *item, const struct kv_head_view *view, uint32_t group) {
    if (s->needs & STATISTIC_SUM)
        fill_sums(parity, s, item, view, s->sum);
    if (s->needs & STATISTIC_SQUARED)
        fill_sums(parity, s, item, view, s->squared);
    if (s->needs & STATISTIC_NOISY)
        fill_sums(parity, s, item, view, s->noisy);
    for (uint32_t slot = 0; slot < view->slots; slot++) {
        int32_t entered = *reference_position(pool, view->pages[slot / KV_PAGE_SLOTS], slot % KV_PAGE_SLOTS);
        for (uint32_t row = 0; s->needs & STATISTIC_WINDOW && row < s->window; row++)
            fill_window(parity, s, item, row, slot,
                !is_new(item, view, slot) && entered <= ring_query(item->position, s->window, row));
        if (is_new(item, view, slot))
            continue;
        for (uint32_t row = 0; s->needs & STATISTIC_HEAD_WINDOW && row < s->window * group; row++) {
            reference_round(
                KV_F16, parity_uniform(parity, 0, 1), (unsigned char *)&s->head_rows[(size_t)row * s->capacity + slot]);
        }
        for (uint32_t word = 0; s->needs & STATISTIC_ABOVE && word < WORDS; word++)
            s->above[slot * WORDS + word] = parity_random_bits(parity);
        if (s->needs & STATISTIC_ENTROPY)
            s->entropy[slot] = (uint16_t)parity_random(parity, 0, 0x4800);
    }
}

static void recorded_create(
    struct parity *parity, const struct scene *scene, uint32_t needs, uint32_t window_max, struct recorded *recorded) {
    uint32_t group = scene_group(scene), kv_heads = scene->pool.layout.kv_heads;
    memset(recorded, 0, sizeof *recorded);
    recorded->heads = scene->items_count * kv_heads;
    for (uint32_t head = 0; head < recorded->heads; head++) {
        struct kv_statistics *s = &recorded->before[head];
        s->needs = head > 0 && parity_random(parity, 0, 5) == 0 ? 0 : needs;
        s->capacity = (scene->views[head].slots + 15) / 16 * 16 + 16 * parity_random(parity, 0, 2);
        s->window = parity_random(parity, 1, window_max);
        s->history = parity_random(parity, 1, parity_random(parity, 0, 1) == 0 ? 40 : STATISTIC_ABOVE_BITS);
        if (window_max > KV_PAGE_SLOTS * 4) /* blocks of tokens then share words of bits */
            s->history = STATISTIC_ABOVE_BITS - s->history % 64;
        s->seed = parity_random_bits(parity);
        for (uint32_t kind = 0; kind < KINDS; kind++) {
            if (s->needs & kind_needs[kind])
                *kind_array(s, kind) = parity_host(kind_bytes(s, kind, group, scene->pool.layout.head_dim));
        }
        fill_before(parity, s, &scene->pool, &scene->items[head / kv_heads], &scene->views[head], group);
        recorded->device[head] = *s;
        for (uint32_t kind = 0; kind < KINDS; kind++) {
            void **array = kind_array(&recorded->device[head], kind);
            if (*array != NULL)
                *array = parity_upload(parity, *array, kind_bytes(s, kind, group, scene->pool.layout.head_dim));
        }
    }
}

/* The device's arrays as they were. */
static void recorded_reset(struct parity *parity, const struct scene *scene, struct recorded *recorded) {
    for (uint32_t head = 0; head < recorded->heads; head++) {
        for (uint32_t kind = 0; kind < KINDS; kind++) {
            struct kv_statistics *s = &recorded->device[head];
            if (*kind_array(s, kind) != NULL)
                parity->operations->upload(parity->backend, *kind_array(s, kind),
                    *kind_array(&recorded->before[head], kind),
                    kind_bytes(s, kind, scene_group(scene), scene->pool.layout.head_dim));
        }
    }
}

/* One head's arrays on the host. */
static struct kv_statistics recorded_download(
    struct parity *parity, const struct scene *scene, struct recorded *recorded, uint32_t head) {
    struct kv_statistics s = recorded->device[head];
    for (uint32_t kind = 0; kind < KINDS; kind++) {
        void **array = kind_array(&s, kind);
        if (*array != NULL) {
            size_t bytes = kind_bytes(&s, kind, scene_group(scene), scene->pool.layout.head_dim);
            *array = parity_download(parity, *array, bytes);
        }
    }
    return s;
}

static void free_host(struct kv_statistics *s) {
    for (uint32_t kind = 0; kind < KINDS; kind++)
        free(*kind_array(s, kind));
}

static void recorded_free(struct parity *parity, struct recorded *recorded) {
    for (uint32_t head = 0; head < recorded->heads; head++) {
        free_host(&recorded->before[head]);
        for (uint32_t kind = 0; kind < KINDS; kind++)
            parity_release(parity, *kind_array(&recorded->device[head], kind));
    }
}

/* All of it as one array of bytes. */
static unsigned char *recorded_bytes(
    struct parity *parity, const struct scene *scene, struct recorded *recorded, size_t *total) {
    uint32_t group = scene_group(scene), dim = scene->pool.layout.head_dim;
    *total = 0;
    for (uint32_t head = 0; head < recorded->heads; head++) {
        for (uint32_t kind = 0; kind < KINDS; kind++) {
            struct kv_statistics *s = &recorded->device[head];
            *total += *kind_array(s, kind) == NULL ? 0 : kind_bytes(s, kind, group, dim);
        }
    }
    unsigned char *bytes = parity_host(*total), *to = bytes;
    for (uint32_t head = 0; head < recorded->heads; head++) {
        for (uint32_t kind = 0; kind < KINDS; kind++) {
            struct kv_statistics *s = &recorded->device[head];
            if (*kind_array(s, kind) == NULL)
                continue;
            parity->operations->download(parity->backend, to, *kind_array(s, kind), kind_bytes(s, kind, group, dim));
            to += kind_bytes(s, kind, group, dim);
        }
    }
    return bytes;
}

/* A head's numbers after the batch, beside what they should be. */
struct comparison {
    struct parity *parity;
    const struct reference_pool *pool;
    const struct kv_item *item;
    const struct kv_head_view *view;
    const struct kv_statistics *before, *after;
    const struct reference_statistics *want;
};

static uint32_t first_counted(const struct kv_item *item, uint32_t ring, uint32_t from) {
    uint32_t first = item->rows > ring ? item->rows - ring : 0;
    return first > from ? first : from;
}

static bool seen_by_any(const struct comparison *c, uint32_t slot) {
    for (uint32_t row = 0; row < c->want->rows; row++) {
        if (c->want->visible[(size_t)row * c->want->slots + slot])
            return true;
    }
    return false;
}

/* A sum of integers, each rounded from a number with a relative error; its first plane tells of the second. */
static void check_sum(const struct comparison *c, const char *name, uint32_t slot, const uint32_t *before,
    const uint32_t *after, double want) {
    uint32_t capacity = c->after->capacity;
    uint64_t grown = kv_sum_get(after, capacity, slot) - kv_sum_get(before, capacity, slot);
    double got = (double)grown, tolerance = c->want->rows + 3e-5 * want * 0x1p24;
    if (!seen_by_any(c, slot))
        tolerance = 0;
    parity_check_true(c->parity, fabs(got - want * 0x1p24) <= tolerance, "%s of slot %u of %u grew by %.0f, not %.1f",
        name, slot, c->want->slots, got, want * 0x1p24);
    parity_check_true(c->parity, after[slot] >> 31 == (after[capacity + slot] != 0), "%s of slot %u of %u: %#x, %#x",
        name, slot, c->want->slots, after[slot], after[capacity + slot]);
}

static void check_sums(const struct comparison *c) {
    for (uint32_t slot = 0; slot < c->want->slots; slot++) {
        double sum = 0;
        for (uint32_t row = 0; row < c->want->rows; row++)
            sum += c->want->a[(size_t)row * c->want->slots + slot];
        if (c->after->needs & STATISTIC_SUM)
            check_sum(c, "sum", slot, c->before->sum, c->after->sum, sum);
        if (c->after->needs & STATISTIC_SQUARED)
            check_sum(c, "squared", slot, c->before->squared, c->after->squared, c->want->squared[slot]);
        if (c->after->needs & STATISTIC_NOISY)
            check_sum(c, "noisy", slot, c->before->noisy, c->after->noisy, c->want->noisy[slot]);
    }
}

/* The row of the batch that a ring row holds now; rows: none. */
static uint32_t ring_holder(const struct kv_item *item, uint32_t ring, uint32_t ring_row, uint32_t from) {
    for (uint32_t row = first_counted(item, ring, from); row < item->rows; row++) {
        if ((item->position + row) % ring == ring_row)
            return row;
    }
    return item->rows;
}

/* One number of a ring: p where the holder sees the slot, else what it was. */
static void check_half(const struct comparison *c, const char *name, uint32_t row, uint32_t slot, uint16_t before,
    uint16_t after, double p) {
    if (row == c->want->rows || !c->want->visible[(size_t)row * c->want->slots + slot]) {
        parity_check_true(c->parity, before == after, "%s: slot %u changed, row %u does not see it", name, slot, row);
        return;
    }
    double got = reference_half(after);
    parity_check_true(
        c->parity, fabs(got - p) <= 0x1p-24 + p * 6e-4, "%s of row %u, slot %u is %g, not %g", name, row, slot, got, p);
}

static void check_window(const struct comparison *c, uint32_t ring_row) {
    const struct kv_statistics *s = c->after;
    uint32_t row = ring_holder(c->item, s->window, ring_row, c->item->window_from), group = c->want->group;
    for (uint32_t slot = 0; slot < c->want->slots; slot++) {
        size_t at = (size_t)ring_row * s->capacity + slot, wanted = (size_t)row * c->want->slots + slot;
        if (s->needs & STATISTIC_WINDOW)
            check_half(c, "window", row, slot, c->before->window_rows[at], s->window_rows[at],
                row < c->want->rows ? c->want->a[wanted] : 0);
        for (uint32_t g = 0; s->needs & STATISTIC_HEAD_WINDOW && g < group; g++) {
            at = ((size_t)ring_row * group + g) * s->capacity + slot;
            wanted = ((size_t)row * group + g) * c->want->slots + slot;
            check_half(c, "head window", row, slot, c->before->head_rows[at], s->head_rows[at],
                row < c->want->rows ? c->want->p[wanted] : 0);
        }
    }
}

static void check_window_sums(const struct comparison *c) {
    for (uint32_t slot = 0; slot < c->want->slots; slot++) {
        double sum = 0;
        int32_t entered = *reference_position(c->pool, c->view->pages[slot / KV_PAGE_SLOTS], slot % KV_PAGE_SLOTS);
        for (uint32_t row = 0; row < c->after->window; row++)
            if (entered <= ring_query(c->item->position + c->item->rows, c->after->window, row))
                sum += reference_half(c->after->window_rows[(size_t)row * c->after->capacity + slot]) * 0x1p24;
        parity_check_true(c->parity, sum == c->after->window_sum[slot], "window sum of slot %u is %u, not %.0f", slot,
            c->after->window_sum[slot], sum);
    }
}

static void check_above(const struct comparison *c) {
    const struct kv_statistics *s = c->after;
    for (uint32_t bit = 0; bit < STATISTIC_ABOVE_BITS; bit++) {
        uint32_t row = bit < s->history ? ring_holder(c->item, s->history, bit, 0) : c->item->rows;
        uint32_t visible = c->view->summary != NULL;
        for (uint32_t slot = 0; row < c->want->rows && slot < c->want->slots; slot++)
            visible += c->want->visible[(size_t)row * c->want->slots + slot];
        for (uint32_t slot = 0; slot < c->want->slots; slot++) {
            size_t word = slot * WORDS + bit / 64;
            bool before = c->before->above[word] >> bit % 64 & 1, after = s->above[word] >> bit % 64 & 1;
            if (row == c->want->rows || !c->want->visible[(size_t)row * c->want->slots + slot]) {
                parity_check_true(c->parity, before == after, "above: bit %u of slot %u changed", bit, slot);
                continue;
            }
            double a = c->want->a[(size_t)row * c->want->slots + slot] * visible;
            parity_check_true(c->parity, after == (a > 1) || fabs(a - 1) < 3e-5,
                "above: bit %u of slot %u is %d at %g of the mean", bit, slot, after, a);
        }
    }
}

static void check_entropy(const struct comparison *c) {
    for (uint32_t slot = 0; slot < c->want->slots; slot++) {
        if (!is_new(c->item, c->view, slot)) {
            parity_check_true(c->parity, c->before->entropy[slot] == c->after->entropy[slot],
                "entropy of slot %u changed, it is no new token's", slot);
            continue;
        }
        double got = reference_half(c->after->entropy[slot]), want = c->want->entropy[slot - c->view->first_slot];
        parity_check_true(
            c->parity, fabs(got - want) <= 5e-6 + 6e-4 * want, "entropy of slot %u is %g, not %g", slot, got, want);
    }
}

static void check_outputs(const struct comparison *c, const struct scene *scene, uint32_t kv_head, const float *out) {
    uint32_t dim = scene->pool.layout.head_dim, group = c->want->group;
    size_t numbers = (size_t)group * dim;
    for (uint32_t ring_row = 0; ring_row < c->after->window; ring_row++) {
        uint32_t row = ring_holder(c->item, c->after->window, ring_row, c->item->window_from);
        const float *want = c->before->outputs + ring_row * numbers;
        if (row < c->item->rows)
            want = out + ((size_t)(c->item->first_row + row) * scene->heads + (size_t)kv_head * group) * dim;
        parity_check_bits(
            c->parity, c->after->outputs + ring_row * numbers, want, numbers, "outputs, ring row %u", ring_row);
    }
}

static void check_head(
    struct parity *parity, const struct scene *scene, struct recorded *recorded, uint32_t head, const float *out) {
    uint32_t kv_heads = scene->pool.layout.kv_heads, layer = scene->layer;
    if (recorded->before[head].needs == 0)
        return;
    const struct kv_item *item = &scene->items[head / kv_heads];
    struct reference_statistics want = reference_statistics(&scene->pool, item, &scene->views[head],
        scene->summaries[head], (struct reference_variant){0, (double)scene->scale, (double)scene->cap},
        head % kv_heads, layer, recorded->before[head].seed, scene->heads, scene->qkv);
    struct kv_statistics after = recorded_download(parity, scene, recorded, head);
    struct comparison c = {parity, &scene->pool, item, &scene->views[head], &recorded->before[head], &after, &want};
    check_sums(&c);
    for (uint32_t row = 0; row < after.window; row++)
        check_window(&c, row);
    if (after.needs & STATISTIC_WINDOW)
        check_window_sums(&c);
    if (after.needs & STATISTIC_ABOVE)
        check_above(&c);
    if (after.needs & STATISTIC_ENTROPY)
        check_entropy(&c);
    if (after.needs & STATISTIC_OUTPUTS)
        check_outputs(&c, scene, head % kv_heads, out);
    free_host(&after);
    reference_statistics_free(&want);
}

static float *run_attend(
    struct parity *parity, const struct scene *scene, const struct kv_batch *batch, const float *qkv, uint32_t rows) {
    size_t bytes = (size_t)rows * scene->heads * scene->pool.layout.head_dim * sizeof(float);
    float *out = parity_upload(parity, NULL, bytes);
    parity->operations->attend(parity->backend, batch, scene->heads, qkv, out);
    float *host = parity_download(parity, out, bytes);
    parity_release(parity, out);
    return host;
}

/* Every item alone, in chunks. */
static void run_chunks(struct parity *parity, const struct scene *scene, struct recorded *recorded, const float *qkv) {
    uint32_t kv_heads = scene->pool.layout.kv_heads, width = scene->heads + 2 * kv_heads;
    for (uint32_t item = 0; item < scene->items_count; item++) {
        uint32_t rows = scene->items[item].rows;
        for (uint32_t first = 0, chunk; first < rows; first += chunk) {
            chunk = parity_random(parity, 1, rows - first);
            struct kv_item part = scene->items[item];
            struct kv_head_view views[KV_HEADS_MAX];
            part.first_row = 0;
            scene_chunk(scene, item, first, chunk, &part, views);
            struct kv_batch batch = scene_batch(scene);
            batch.items = &part;
            batch.items_count = 1;
            batch.views = views;
            batch.statistics = recorded->device + item * kv_heads;
            size_t row = scene->items[item].first_row + first;
            free(run_attend(parity, scene, &batch, qkv + row * width * scene->pool.layout.head_dim, chunk));
        }
    }
}

static const struct scene_limits limits_of[] = {
    {.dim = 0, .rows = 40, .slots = 700, .group = 5, .sharpness = 1},
    {.dim = 64, .rows = 70, .slots = 1000, .group = 4, .sharpness = 4},
    {.dim = 0, .rows = 3, .slots = 300, .group = 60, .sharpness = 1},
    /* Several blocks of tokens add to a slot, and to words of bits that they share. */
    {.dim = 0, .rows = 110, .slots = 100, .group = 2, .sharpness = 1, .first_is_long = true},
};

static const uint32_t needs_alone[] = {STATISTIC_SUM, STATISTIC_SQUARED, STATISTIC_WINDOW, STATISTIC_HEAD_WINDOW,
    STATISTIC_OUTPUTS, STATISTIC_ABOVE, STATISTIC_ENTROPY, STATISTIC_NOISY};

/* Scales and soft caps, of every other two rounds. Layers with a window have no statistics. */
static void vary_scene(struct parity *parity, struct scene *scene) {
    if (!parity->operations->attend_variants || (parity->round + 1) % 4 < 2)
        return;
    scene->cap = (float)parity_uniform(parity, 0.5, 50);
    scene->scale = parity->round % 4 == 2 ? (float)parity_uniform(parity, 0.02, 0.2) : 0;
}

static void case_statistics(struct parity *parity) {
    enum { ALONE = sizeof needs_alone / sizeof needs_alone[0] };
    uint32_t which = parity->entry->index, needs = ALL_NEEDS;
    if (parity->round % 3 == 2)
        needs = needs_alone[parity->round / 3 % ALONE];
    struct scene scene;
    scene_create(parity, &scene, (enum kv_format)(parity->round % 3), &limits_of[which]);
    vary_scene(parity, &scene);
    for (uint32_t item = 0; item < scene.items_count; item++) {
        scene.items[item].prompt = parity_random(parity, 0, scene.items[item].position + scene.items[item].rows);
        if (parity->round % 2 == 1) /* then chunks do not give the same, since what is left out is a row of the item */
            scene.items[item].window_from = parity_random(parity, 0, scene.items[item].rows);
    }
    float *qkv = scene_append(parity, &scene);
    struct recorded recorded;
    recorded_create(parity, &scene, needs, which == 2 ? 6 : which == 3 ? 200 : 40, &recorded);
    struct kv_batch batch = scene_batch(&scene);
    float *plain = run_attend(parity, &scene, &batch, qkv, scene.rows);
    batch.statistics = recorded.device;
    float *out = run_attend(parity, &scene, &batch, qkv, scene.rows);
    size_t bytes, other_bytes;
    parity_check_bits(
        parity, out, plain, (size_t)scene.rows * scene.heads * scene.pool.layout.head_dim, "attention with statistics");
    unsigned char *whole = recorded_bytes(parity, &scene, &recorded, &bytes);
    parity_check_same(parity, whole, bytes);
    if (parity->leads) { /* the others give the same bits */
        for (uint32_t head = 0; head < recorded.heads; head++)
            check_head(parity, &scene, &recorded, head, out);
    }
    if (parity->round % 2 == 0) {
        recorded_reset(parity, &scene, &recorded);
        run_chunks(parity, &scene, &recorded, qkv);
        unsigned char *chunks = recorded_bytes(parity, &scene, &recorded, &other_bytes);
        parity_check_bytes(parity, chunks, whole, bytes, "statistics in chunks, needs %#x", needs);
        free(chunks);
    }
    free(whole);
    free(plain);
    free(out);
    recorded_free(parity, &recorded);
    parity_release(parity, qkv);
    scene_free(parity, &scene);
}

/* ---- scores of a decode step ---- */

/* What attention may be asked to score by. */
static const struct score_stage scored_stages[][3] = {
    {{.kind = STAGE_POSITION}, {.kind = STAGE_PROTECT}},
    {{.kind = STAGE_SUM}, {.kind = STAGE_PROTECT}},
    {{.kind = STAGE_SUM_PER_QUERY}},
    {{.kind = STAGE_WINDOW_SUM}, {.kind = STAGE_PROTECT}, {.kind = STAGE_POOL_MAX, .n = 7}},
    {{.kind = STAGE_WINDOW_SPREAD, .x = 2}, {.kind = STAGE_PROTECT}},
    {{.kind = STAGE_ABOVE}, {.kind = STAGE_PROTECT}},
    {{.kind = STAGE_KEY_NORM}, {.kind = STAGE_PROTECT}},
};
static const uint32_t scored_counts[] = {2, 2, 1, 3, 2, 2, 2};

enum { NOT_SCORED = 0xfffffff0u };

struct scored {
    struct score_layer layers[ITEMS_MAX];
    struct score_head heads[VIEWS_MAX];
    uint32_t worst[VIEWS_MAX];
};

/* A backend need not score in attention, by all stages or by any. */
static bool attends_scores(const struct parity *parity, uint32_t list) {
    bool (*takes)(const struct score_stage *, uint32_t) = parity->operations->attend_scores;
    return takes != NULL && takes(scored_stages[list], scored_counts[list]);
}

/* Layers of some items, of whose heads some are asked for their worst slot. */
static void draw_scored(
    struct parity *parity, const struct scene *scene, const struct recorded *recorded, struct scored *scored) {
    uint32_t kv_heads = scene->pool.layout.kv_heads, lists = sizeof scored_counts / sizeof scored_counts[0];
    memset(scored, 0, sizeof *scored);
    for (uint32_t item = 0; item < scene->items_count; item++) {
        uint32_t seen = scene->items[item].position + 1, list = parity_random(parity, 0, lists - 1);
        bool recorded_all = true;
        for (uint32_t head = item * kv_heads; head < (item + 1) * kv_heads; head++) {
            recorded_all = recorded_all && recorded->before[head].needs != 0;
            scored->worst[head] = NOT_SCORED;
            scored->heads[head] = (struct score_head){.view = scene->views[head],
                .statistics = recorded->device[head],
                .sinks = parity_random(parity, 0, 4),
                .recent_from = seen - parity_random(parity, 0, seen / 2),
                .worst = parity_random(parity, 0, 4) > 0 ? &scored->worst[head] : NULL};
        }
        list = recorded_all ? list : 0;
        bool asked = parity_random(parity, 0, 4) > 0;
        if (asked && attends_scores(parity, list))
            scored->layers[item] = (struct score_layer){.heads = scored->heads + item * kv_heads,
                .layer = scene->layer,
                .seen = seen,
                .budget = scene->views[item * kv_heads].slots,
                .stages = scored_stages[list],
                .stages_count = scored_counts[list],
                .window = recorded->before[item * kv_heads].window};
    }
}

/* Attention finds the slots that score finds afterwards, and changes nothing else. */
static void case_scored(struct parity *parity) {
    static const struct scene_limits limits = {.rows = 1, .slots = 1200, .group = 5, .sharpness = 2};
    struct scene scene;
    struct recorded recorded;
    struct scored scored;
    scene_create(parity, &scene, (enum kv_format)(parity->round % 3), &limits);
    float *qkv = scene_append(parity, &scene);
    recorded_create(parity, &scene, ALL_NEEDS & ~(uint32_t)STATISTIC_NOISY, 40, &recorded);
    draw_scored(parity, &scene, &recorded, &scored);
    struct kv_batch batch = scene_batch(&scene);
    batch.statistics = recorded.device;
    float *plain = run_attend(parity, &scene, &batch, qkv, scene.rows);
    size_t bytes, same;
    unsigned char *want = recorded_bytes(parity, &scene, &recorded, &bytes);
    recorded_reset(parity, &scene, &recorded);
    batch.scored = scored.layers;
    float *out = run_attend(parity, &scene, &batch, qkv, scene.rows);
    unsigned char *got = recorded_bytes(parity, &scene, &recorded, &same);
    parity_check_bits(
        parity, out, plain, (size_t)scene.rows * scene.heads * scene.pool.layout.head_dim, "attention that scores");
    parity_check_bytes(parity, got, want, bytes, "statistics of attention that scores");
    for (uint32_t item = 0; item < scene.items_count; item++) {
        uint32_t kv_heads = scene.pool.layout.kv_heads, later[KV_HEADS_MAX];
        for (uint32_t head = 0; head < kv_heads; head++) {
            later[head] = NOT_SCORED;
            if (scored.heads[item * kv_heads + head].worst != NULL)
                scored.heads[item * kv_heads + head].worst = &later[head];
        }
        int code = scored.layers[item].heads == NULL ? 0
                                                     : parity->operations->score(parity->backend, &scene.device,
                                                           &scored.layers[item], 1, scene.heads, NULL);
        parity_check_true(parity, code == 0, "score failed");
        parity->operations->synchronize(parity->backend);
        for (uint32_t head = 0; head < kv_heads; head++)
            parity_check_true(parity, scored.worst[item * kv_heads + head] == later[head],
                "attention found slot %u of head %u of %u slots, score %u", scored.worst[item * kv_heads + head], head,
                scene.views[item * kv_heads + head].slots, later[head]);
    }
    free(got);
    free(want);
    free(out);
    free(plain);
    recorded_free(parity, &recorded);
    parity_release(parity, qkv);
    scene_free(parity, &scene);
}

/* Moments in two calls, so that what is there is added to. */
static void case_moments(struct parity *parity) {
    static const struct scene_limits limits = {.rows = 60, .slots = 12, .group = 3, .sharpness = 2};
    struct scene scene;
    scene_create(parity, &scene, KV_F32, &limits);
    uint32_t dim = scene.pool.layout.head_dim, heads = scene.heads;
    size_t squares = (size_t)heads * dim * dim, stride = (size_t)(heads + 2 * scene.pool.layout.kv_heads) * dim;
    struct query_moments moments[ITEMS_MAX];
    for (uint32_t item = 0; item < scene.items_count; item++) {
        moments[item].count = parity_upload(parity, NULL, sizeof(uint32_t));
        moments[item].sum = parity_upload(parity, NULL, heads * dim * sizeof(double));
        moments[item].outer = parity_upload(parity, NULL, squares * sizeof(double));
    }
    float *qkv = parity_upload(parity, scene.qkv, scene.qkv_bytes);
    struct kv_batch batch = scene_batch(&scene);
    parity->operations->query_moments(parity->backend, &batch, heads, qkv, moments);
    for (uint32_t item = 0; item < scene.items_count; item++) {
        uint32_t *count = parity_download(parity, moments[item].count, sizeof(uint32_t)), wanted = 0;
        double *sum = parity_download(parity, moments[item].sum, heads * dim * sizeof(double));
        double *outer = parity_download(parity, moments[item].outer, squares * sizeof(double));
        double *want_sum = parity_host(heads * dim * sizeof(double)), *want = parity_host(squares * sizeof(double));
        const struct kv_item *rows = &scene.items[item];
        for (uint32_t head = 0; head < heads; head++) {
            wanted = reference_moments(scene.qkv + rows->first_row * stride + head * dim, stride, rows->position,
                rows->rows, dim, want_sum + head * dim, want + (size_t)head * dim * dim);
        }
        parity_check_true(parity, *count == wanted, "moments of %u rows, not %u", *count, wanted);
        parity_check_bytes(parity, sum, want_sum, heads * dim * sizeof(double), "sum of queries, d=%u", dim);
        parity_check_bytes(parity, outer, want, squares * sizeof(double), "products of queries, d=%u", dim);
        free(count);
        free(sum);
        free(outer);
        free(want_sum);
        free(want);
        parity_release(parity, moments[item].count);
        parity_release(parity, moments[item].sum);
        parity_release(parity, moments[item].outer);
    }
    parity_release(parity, qkv);
    scene_free(parity, &scene);
}

const struct parity_case parity_statistics_cases[] = {
    {.name = "statistics any shape", .run = case_statistics, .rounds = 24, .index = 0},
    {.name = "statistics long", .run = case_statistics, .rounds = 6, .index = 1},
    {.name = "statistics large groups", .run = case_statistics, .rounds = 12, .index = 2},
    {.name = "statistics many rows", .run = case_statistics, .rounds = 6, .index = 3},
    {.name = "statistics scored", .run = case_scored, .rounds = 12},
    {.name = "query moments", .run = case_moments, .rounds = 8},
    {.name = NULL},
};
