/* SPDX-License-Identifier: Apache-2.0
 *
 * Scores of slots by stages, over random shapes: ragged heads, scattered pages, slots out of order, unused slots, pages
 * and statistics that hold NaN or garbage where no slot is.
 */
#include "tests/parity/parity.h"
#include "tests/parity/parity_same.h"
#include "tests/parity/reference_attend.h"
#include "tests/parity/reference_linear.h"
#include "tests/parity/reference_score.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { LAYERS_MAX = 3, KV_HEADS_MAX = 4, HEADS_MAX = LAYERS_MAX * KV_HEADS_MAX, HOLES_MAX = 32 };

/* One head of the scene: what the device gets, and the same as numbers. */
struct scene_head {
    uint32_t *pages, *positions, *order, order_count;
    double *keys, *values, *sum, *noisy, *above, *a, *p, *outputs, *want;
    struct kv_statistics device;
};

struct scene {
    struct reference_pool pool;
    struct kv_pool device;
    uint32_t layers, group, heads, width, window, pages;
    bool same_slots; /* all heads of a layer hold the same */
    struct scene_head head[HEADS_MAX];
    struct score_head score_heads[HEADS_MAX];
    struct score_layer score_layers[LAYERS_MAX];
    struct reference_score_layer reference[LAYERS_MAX];
    struct reference_score_head reference_heads[HEADS_MAX];
    struct score_stage stages[SCORE_STAGES_MAX];
    uint32_t stages_count;
    struct tensor output[LAYERS_MAX];
    float *inverse_freq;
    struct rope_params rope;
};

static void shuffle(struct parity *parity, uint32_t *array, uint32_t count) {
    for (uint32_t i = count; i > 1; i--) {
        uint32_t other = parity_random(parity, 0, i - 1), moved = array[i - 1];
        array[i - 1] = array[other];
        array[other] = moved;
    }
}

/* Distinct positions below seen: in order, in order but for a few reused slots, or in any order; some slots unused. */
static void draw_positions(struct parity *parity, uint32_t seen, uint32_t slots, uint32_t *positions) {
    uint32_t *all = parity_host(seen * sizeof *all), chosen = 0, kind = parity_random(parity, 0, 2);
    for (uint32_t i = 0; i < seen; i++) { /* every set of slots positions is as likely */
        if (parity_random(parity, 0, seen - i - 1) < slots - chosen)
            all[chosen++] = i;
    }
    memcpy(positions, all, slots * sizeof *positions);
    if (kind == 2)
        shuffle(parity, positions, slots);
    for (uint32_t i = 0; kind == 1 && i < slots / 10; i++) { /* the last tokens moved into places before */
        uint32_t at = parity_random(parity, 0, slots - 1), last = slots - 1 - i, moved = positions[at];
        positions[at] = positions[last];
        positions[last] = moved;
    }
    for (uint32_t i = 0; parity_random(parity, 0, 2) == 0 && i < slots / 8; i++)
        positions[parity_random(parity, 0, slots - 1)] = KV_NO_POSITION;
    free(all);
}

static void find_order(const uint32_t *positions, uint32_t slots, uint32_t *order) {
    for (uint32_t i = 0; i < slots; i++) {
        uint32_t place = 0;
        for (uint32_t j = 0; j < slots; j++)
            place += positions[j] < positions[i] || (positions[j] == positions[i] && j < i);
        order[place] = i;
    }
}

/* Entries that are no slots, anywhere but at the end. Returns the order's new length. */
static uint32_t add_holes(struct parity *parity, uint32_t slots, uint32_t *order) {
    uint32_t count = slots;
    for (uint32_t holes = parity_random(parity, 0, 2) * parity_random(parity, 0, HOLES_MAX / 2); holes > 0; holes--) {
        uint32_t at = parity_random(parity, 0, count - 1);
        memmove(order + at + 1, order + at, (count - at) * sizeof *order);
        order[at] = KV_NO_SLOT;
        count++;
    }
    return count;
}

/* A number as the format stores it. */
static double store(enum kv_format format, double value, unsigned char *to) {
    reference_round(format, value, to);
    return reference_number(format, to);
}

static void fill_pages(struct parity *parity, struct scene *scene, struct scene_head *head, uint32_t slots) {
    const struct kv_layout *layout = &scene->pool.layout;
    for (uint32_t slot = 0; slot < slots; slot++) {
        uint32_t page = head->pages[slot / KV_PAGE_SLOTS], place = slot % KV_PAGE_SLOTS;
        *reference_position(&scene->pool, page, place) = (int32_t)head->positions[slot];
        if (head->positions[slot] == KV_NO_POSITION && slot % 2 == 0)
            continue; /* other empty slots hold what was there before */
        for (uint32_t c = 0; c < layout->head_dim; c++) {
            size_t at = (size_t)slot * layout->head_dim + c;
            double key = 0.5 + (double)parity_normal(parity);
            head->keys[at] = store(layout->format, key, reference_key(&scene->pool, page, place, c));
            head->values[at] =
                store(layout->format, (double)parity_normal(parity), reference_value(&scene->pool, page, place, c));
        }
    }
}

/* Blocks of random bytes, whose f16 d is their first number or their last. */
static void draw_blocks(struct parity *parity, enum tensor_type type, unsigned char *data, size_t count) {
    const struct tensor_format *format = tensor_format_find(type);
    size_t d = type == TENSOR_Q6_K ? format->block_bytes - 2 : 0;
    double largest = type == TENSOR_Q6_K ? 1e-4 : 0.01; /* parts of Q6_K have a scale besides */
    for (size_t block = 0; block < count / format->block_values; block++, data += format->block_bytes) {
        for (size_t at = 0; at < format->block_bytes; at++)
            data[at] = (unsigned char)parity_random(parity, 0, 255);
        reference_round(KV_F16, parity_uniform(parity, largest / 10, largest), data + d);
    }
}

/* Random weights of a layer: floats, halves, or blocks of 8 or 6 bits where the width allows them. */
static void draw_output(struct parity *parity, struct scene *scene, uint32_t layer) {
    uint32_t columns = scene->heads * scene->pool.layout.head_dim, kind = parity_random(parity, 0, 3);
    enum tensor_type type = kind == 2 ? TENSOR_F16 : TENSOR_F32;
    if (kind < 2 && columns % 32 == 0)
        type = columns % 256 == 0 && kind == 0 ? TENSOR_Q6_K : TENSOR_Q8_0;
    size_t count = (size_t)scene->width * columns, bytes = scene->width * tensor_row_bytes(type, columns);
    unsigned char *data = parity_host(bytes);
    if (type == TENSOR_Q8_0 || type == TENSOR_Q6_K)
        draw_blocks(parity, type, data, count);
    for (size_t at = 0; type == TENSOR_F16 && at < count; at++)
        reference_round(KV_F16, 0.1 * (double)parity_normal(parity), data + 2 * at);
    if (type == TENSOR_F32)
        parity_fill_normal(parity, (float *)data, count, 0.1f);
    scene->output[layer] = (struct tensor){
        .name = "output", .type = type, .rows = scene->width, .columns = columns, .data = data, .bytes = bytes};
    double *rows = parity_host(count * sizeof *rows);
    for (uint32_t row = 0; row < scene->width; row++)
        reference_weight_row(&scene->output[layer], row, rows + (size_t)row * columns);
    scene->reference[layer].output = rows;
    scene->score_layers[layer].output = &scene->output[layer];
}

/* Moments of a few random queries: a covariance as it may be. */
static void draw_moments(struct parity *parity, struct scene *scene, uint32_t layer) {
    uint32_t dim = scene->pool.layout.head_dim, count = parity_random(parity, 1, 6);
    size_t numbers = (size_t)dim * dim;
    double *sum = parity_host((size_t)scene->heads * dim * sizeof *sum);
    double *outer = parity_host((size_t)scene->heads * numbers * sizeof *outer);
    double *query = parity_host(dim * sizeof *query);
    for (uint32_t h = 0; h < scene->heads; h++) {
        for (uint32_t n = 0; n < count; n++) {
            for (uint32_t i = 0; i < dim; i++)
                query[i] = 0.5 + (double)parity_normal(parity);
            for (uint32_t i = 0; i < dim; i++) {
                sum[h * dim + i] += query[i];
                for (uint32_t j = i; j < dim; j++)
                    outer[h * numbers + i * dim + j] += query[i] * query[j];
            }
        }
    }
    scene->reference[layer].count = count;
    scene->reference[layer].mean_sum = sum;
    scene->reference[layer].outer = outer;
    scene->score_layers[layer].rope = &scene->rope;
    scene->score_layers[layer].moments = (struct query_moments){
        parity_upload(parity, &count, sizeof count),
        parity_upload(parity, sum, (size_t)scene->heads * dim * sizeof *sum),
        parity_upload(parity, outer, (size_t)scene->heads * numbers * sizeof *outer),
    };
    free(query);
}

/* f16 of a probability, mostly small. */
static uint16_t draw_probability(struct parity *parity, double *value) {
    unsigned char bytes[2];
    uint16_t bits;
    *value = store(KV_F16, pow(parity_uniform(parity, 0, 1), 6), bytes);
    memcpy(&bits, bytes, sizeof bits);
    return bits;
}

/* A row of attention over the slots that are used: a distribution before it was rounded, or nothing of the kind. */
static void draw_row(
    struct parity *parity, const struct scene_head *head, uint32_t slots, double *p, uint16_t *stored) {
    double sum = 0, power = parity_uniform(parity, 1, 30);
    bool normal = parity_random(parity, 0, 3) != 0;
    for (uint32_t slot = 0; slot < slots; slot++) {
        p[slot] = head->positions[slot] != KV_NO_POSITION ? pow(parity_uniform(parity, 0, 1), power) : 0;
        sum += p[slot];
    }
    for (uint32_t slot = 0; slot < slots; slot++) {
        unsigned char bytes[2];
        p[slot] = store(KV_F16, normal && sum > 0 ? p[slot] / sum : p[slot], bytes);
        memcpy(&stored[slot], bytes, sizeof bytes);
    }
}

/* Rings as the device keeps them and windows in order of time; what lies beyond the slots is garbage. */
static void fill_windows(
    struct parity *parity, struct scene *scene, struct scene_head *head, uint32_t slots, uint32_t seen, uint32_t rows) {
    uint32_t capacity = head->device.capacity, group = scene->group, window = scene->window;
    uint16_t *ring = parity_host((size_t)window * capacity * sizeof *ring);
    uint16_t *head_ring = parity_host((size_t)window * group * capacity * sizeof *head_ring);
    uint32_t *sums = parity_host(capacity * sizeof *sums);
    memset(ring, 0xff, (size_t)window * capacity * sizeof *ring);
    memset(head_ring, 0xff, (size_t)window * group * capacity * sizeof *head_ring);
    for (uint32_t t = 0; t < rows; t++) {
        size_t row = (seen - rows + t) % window;
        for (uint32_t slot = 0; slot < slots; slot++) {
            double *a = &head->a[t * slots + slot];
            ring[row * capacity + slot] = draw_probability(parity, a);
            sums[slot] += (uint32_t)(*a * 0x1p24);
        }
        for (uint32_t g = 0; g < group; g++)
            draw_row(parity, head, slots, &head->p[((size_t)t * group + g) * slots],
                head_ring + (row * group + g) * capacity);
    }
    head->device.window_rows = parity_upload(parity, ring, (size_t)window * capacity * sizeof *ring);
    head->device.head_rows = parity_upload(parity, head_ring, (size_t)window * group * capacity * sizeof *head_ring);
    head->device.window_sum = parity_upload(parity, sums, capacity * sizeof *sums);
    free(ring);
    free(head_ring);
    free(sums);
}

static void fill_outputs(
    struct parity *parity, struct scene *scene, struct scene_head *head, uint32_t seen, uint32_t rows) {
    size_t row_floats = (size_t)scene->group * scene->pool.layout.head_dim;
    float *outputs = parity_host(scene->window * row_floats * sizeof *outputs);
    memset(outputs, 0xff, scene->window * row_floats * sizeof *outputs);
    for (uint32_t t = 0; t < rows; t++) {
        size_t row = (seen - rows + t) % scene->window;
        for (size_t i = 0; i < row_floats; i++) {
            outputs[row * row_floats + i] = parity_normal(parity);
            head->outputs[t * row_floats + i] = (double)outputs[row * row_floats + i];
        }
    }
    head->device.outputs = parity_upload(parity, outputs, scene->window * row_floats * sizeof *outputs);
    free(outputs);
}

static void fill_sums(struct parity *parity, struct scene_head *head, uint32_t slots, uint32_t history) {
    enum { WORDS = STATISTIC_ABOVE_BITS / 64 };
    uint32_t capacity = head->device.capacity;
    uint64_t *sum = parity_host(capacity * sizeof *sum), *noisy = parity_host(capacity * sizeof *noisy);
    uint64_t *above = parity_host((size_t)capacity * WORDS * sizeof *above);
    parity_fill_sums(parity, 50, slots, sum);
    parity_fill_sums(parity, 50, slots, noisy);
    for (uint32_t slot = 0; slot < slots; slot++) {
        head->sum[slot] = (double)sum[slot] * 0x1p-24;
        head->noisy[slot] = (double)noisy[slot] * 0x1p-24;
        for (uint32_t bit = 0; bit < history; bit++) {
            uint64_t set = parity_random(parity, 0, 4) == 0;
            above[(size_t)slot * WORDS + bit / 64] |= set << bit % 64;
            head->above[slot] += (double)set;
        }
    }
    head->device.sum = parity_upload_sums(parity, sum, slots, capacity);
    head->device.noisy = parity_upload_sums(parity, noisy, slots, capacity);
    head->device.above = parity_upload(parity, above, (size_t)capacity * WORDS * sizeof *above);
    head->device.output_norm = parity_upload(parity, NULL, capacity * sizeof(float));
    free(sum);
    free(noisy);
    free(above);
}

static void head_create(struct parity *parity, struct scene *scene, uint32_t index, uint32_t slots, uint32_t *next) {
    struct scene_head *head = &scene->head[index];
    struct reference_score_layer *layer = &scene->reference[index / scene->pool.layout.kv_heads];
    uint32_t dim = scene->pool.layout.head_dim,
             first = index / scene->pool.layout.kv_heads * scene->pool.layout.kv_heads;
    uint32_t pages = (slots + KV_PAGE_SLOTS - 1) / KV_PAGE_SLOTS;
    *head = (struct scene_head){
        .pages = parity_host(pages * sizeof(uint32_t)),
        .positions = parity_host(slots * sizeof(uint32_t)),
        .order = parity_host((slots + HOLES_MAX) * sizeof(uint32_t)),
        .keys = parity_host((size_t)slots * dim * sizeof(double)),
        .values = parity_host((size_t)slots * dim * sizeof(double)),
        .sum = parity_host(slots * sizeof(double)),
        .noisy = parity_host(slots * sizeof(double)),
        .above = parity_host(slots * sizeof(double)),
        .a = parity_host((size_t)layer->rows * slots * sizeof(double)),
        .p = parity_host((size_t)layer->rows * scene->group * slots * sizeof(double)),
        .outputs = parity_host((size_t)layer->rows * scene->group * dim * sizeof(double)),
        .want = parity_host(slots * sizeof(double)),
        .device = {.capacity = pages * KV_PAGE_SLOTS + 16 * parity_random(parity, 0, 2),
            .window = scene->window,
            .history = parity_random(parity, 1, STATISTIC_ABOVE_BITS)},
    };
    for (uint32_t i = 0; i < pages; i++)
        head->pages[i] = (*next)++ * 7 % scene->pages;
    if (scene->same_slots && index != first)
        memcpy(head->positions, scene->head[first].positions, slots * sizeof(uint32_t));
    else
        draw_positions(parity, layer->seen, slots, head->positions);
    find_order(head->positions, slots, head->order);
    head->order_count = add_holes(parity, slots, head->order);
    fill_pages(parity, scene, head, slots);
    fill_sums(parity, head, slots, head->device.history);
    fill_windows(parity, scene, head, slots, layer->seen, layer->rows);
    fill_outputs(parity, scene, head, layer->seen, layer->rows);
}

static void head_connect(struct parity *parity, struct scene *scene, uint32_t index, uint32_t slots) {
    struct scene_head *head = &scene->head[index];
    uint32_t seen = scene->reference[index / scene->pool.layout.kv_heads].seen;
    uint32_t sinks = parity_random(parity, 0, 1) * parity_random(parity, 0, 6);
    uint32_t recent_from = parity_random(parity, 0, 3) == 0 ? UINT32_MAX : seen - parity_random(parity, 0, seen / 2);
    scene->score_heads[index] = (struct score_head){
        .view = {head->pages, slots, 0},
        .statistics = head->device,
        .sinks = sinks,
        .recent_from = recent_from,
        .scores = parity_upload(parity, NULL, slots * sizeof(float)),
        .positions = parity_random(parity, 0, 1) == 0 ? head->positions : NULL,
        .order = parity_random(parity, 0, 1) == 0 ? head->order : NULL,
        .order_count = head->order_count,
    };
    scene->reference_heads[index] = (struct reference_score_head){slots, head->positions, head->keys, head->values,
        head->sum, head->noisy, head->above, head->a, head->p, head->outputs, sinks, recent_from, head->want};
}

static void layer_draw(struct parity *parity, struct scene *scene, uint32_t layer, uint32_t slots_max) {
    uint32_t kv_heads = scene->pool.layout.kv_heads, seen = slots_max + parity_random(parity, 0, slots_max);
    if (slots_max > 4000 && parity_random(parity, 0, 1) == 0)
        seen += 131072;
    if (parity_random(parity, 0, 2) == 0) /* few of many tokens are left: what is attended to may move far */
        seen += parity_random(parity, 0, 60000);
    uint32_t rows = seen < scene->window ? seen : scene->window;
    scene->reference[layer] = (struct reference_score_layer){
        .heads = scene->reference_heads + (size_t)layer * kv_heads,
        .kv_heads = kv_heads,
        .first_head = scene->pool.layout.first_head,
        .model_heads = scene->pool.layout.model_heads,
        .group = scene->group,
        .dim = scene->pool.layout.head_dim,
        .width = scene->width,
        .layer = layer,
        .seen = seen,
        .budget = parity_random(parity, 1, slots_max),
        .rows = rows,
        .seed = parity_random_bits(parity),
        .rope_dim = scene->rope.dim,
        .inverse_freq = scene->inverse_freq,
    };
    scene->score_layers[layer] = (struct score_layer){
        .heads = scene->score_heads + (size_t)layer * kv_heads,
        .layer = layer,
        .seen = seen,
        .budget = scene->reference[layer].budget,
        .seed = scene->reference[layer].seed,
        .stages = scene->stages,
        .window = scene->window,
    };
    draw_output(parity, scene, layer);
    draw_moments(parity, scene, layer);
}

static void draw_rope(struct parity *parity, struct scene *scene) {
    uint32_t dim = scene->pool.layout.head_dim, turned = parity_random(parity, 0, 2) == 0 ? dim / 4 * 2 : dim;
    scene->inverse_freq = parity_host((turned / 2 + 1) * sizeof(float));
    for (uint32_t pair = 0; pair < turned / 2; pair++)
        scene->inverse_freq[pair] = (float)pow(10000, -2.0 * pair / turned);
    scene->rope = (struct rope_params){turned, scene->inverse_freq};
}

/* SMALL: few slots, for references that take long. LONG: one head with more slots than a block of a GPU keeps, and now
 * and then of more tokens than fit in its shared memory as bits. */
enum scene_size { SCENE_ANY, SCENE_SMALL, SCENE_FEW /* small, with few heads */, SCENE_LONG };

/* Everything but the slots is small then. */
static void make_long(struct parity *parity, struct scene *scene, struct kv_layout *layout) {
    scene->layers = layout->layers = layout->kv_heads = scene->group = scene->heads = 1;
    layout->head_dim = 2;
    scene->window = parity_random(parity, 2, 5);
}

/* same_slots: of all heads of a layer. */
static void scene_create(struct parity *parity, struct scene *scene, bool same_slots, enum scene_size size) {
    bool small = size == SCENE_SMALL || size == SCENE_FEW;
    static const uint32_t dims[] = {64, 32, 128, 40, 66, 2};
    struct kv_layout layout = {.layers = 1,
        .kv_heads = parity_random(parity, 1, KV_HEADS_MAX),
        .head_dim = dims[parity_random(parity, 0, 5)],
        .format = (enum kv_format)parity_random(parity, 0, 2)};
    uint32_t slots[HEADS_MAX], slots_max[LAYERS_MAX], pages = 0;
    memset(scene, 0, sizeof *scene);
    scene->layers = parity_random(parity, 1, LAYERS_MAX);
    if (size == SCENE_FEW) {
        scene->layers = 1;
        layout.kv_heads = layout.kv_heads > 2 ? 2 : layout.kv_heads;
    }
    layout.layers = scene->layers;
    scene->group = parity_random(parity, 1, small ? 3 : 8);
    scene->heads = layout.kv_heads * scene->group;
    scene->window = parity_random(parity, 1, 40);
    scene->width = parity_random(parity, 1, small ? 90 : 40);
    scene->same_slots = same_slots;
    if (size == SCENE_LONG)
        make_long(parity, scene, &layout);
    layout.model_heads = layout.kv_heads * parity_random(parity, 1, 3); /* of several ranks */
    layout.first_head = parity_random(parity, 0, layout.model_heads - layout.kv_heads);
    for (uint32_t i = 0; i < scene->layers * layout.kv_heads; i++) {
        uint32_t layer = i / layout.kv_heads;
        if (i % layout.kv_heads == 0)
            slots_max[layer] = parity_random(parity, 1, parity_random(parity, 0, 5) == 0 ? 3 : small ? 40 : 200);
        if (size == SCENE_LONG)
            slots_max[layer] = parity_random(parity, 8000, 11000);
        slots[i] = same_slots || size == SCENE_LONG ? slots_max[layer] : parity_random(parity, 1, slots_max[layer]);
        pages += (slots[i] + KV_PAGE_SLOTS - 1) / KV_PAGE_SLOTS;
    }
    scene->pages = pages % 7 == 0 ? pages + 1 : pages; /* steps of 7 reach every page */
    size_t numbers = (size_t)2 * KV_PAGE_SLOTS * layout.head_dim * reference_number_bytes(layout.format);
    scene->pool = (struct reference_pool){NULL, (numbers + KV_PAGE_SLOTS * sizeof(int32_t) + 63) / 64 * 64, layout};
    draw_rope(parity, scene);
    scene->pool.image = parity_host(scene->pages * scene->pool.page_bytes);
    memset(scene->pool.image, 0xff, scene->pages * scene->pool.page_bytes);
    for (uint32_t place = 0; place < scene->pages * KV_PAGE_SLOTS; place++)
        *reference_position(&scene->pool, place / KV_PAGE_SLOTS, place % KV_PAGE_SLOTS) = KV_NO_POSITION;
    for (uint32_t i = 0, next = 0; i < scene->layers * layout.kv_heads; i++) {
        if (i % layout.kv_heads == 0)
            layer_draw(parity, scene, i / layout.kv_heads, slots_max[i / layout.kv_heads]);
        head_create(parity, scene, i, slots[i], &next);
        head_connect(parity, scene, i, slots[i]);
    }
    scene->device = (struct kv_pool){.page_bytes = scene->pool.page_bytes, .layout = layout};
    scene->device.base = parity_upload(parity, scene->pool.image, scene->pages * scene->pool.page_bytes);
}

static void head_free(struct parity *parity, struct scene *scene, uint32_t index) {
    struct scene_head *head = &scene->head[index];
    void *host[] = {head->pages, head->positions, head->order, head->keys, head->values, head->sum, head->noisy,
        head->above, head->a, head->p, head->outputs, head->want};
    void *device[] = {head->device.sum, head->device.noisy, head->device.window_rows, head->device.window_sum,
        head->device.head_rows, head->device.outputs, head->device.above, head->device.output_norm,
        scene->score_heads[index].scores};
    for (size_t i = 0; i < sizeof host / sizeof host[0]; i++)
        free(host[i]);
    for (size_t i = 0; i < sizeof device / sizeof device[0]; i++)
        parity_release(parity, device[i]);
}

static void scene_free(struct parity *parity, struct scene *scene) {
    for (uint32_t i = 0; i < scene->layers * scene->pool.layout.kv_heads; i++)
        head_free(parity, scene, i);
    for (uint32_t layer = 0; layer < scene->layers; layer++) {
        struct query_moments *moments = &scene->score_layers[layer].moments;
        parity_release(parity, moments->count);
        parity_release(parity, moments->sum);
        parity_release(parity, moments->outer);
        free((void *)scene->output[layer].data);
        free((void *)scene->reference[layer].output);
        free((void *)scene->reference[layer].mean_sum);
        free((void *)scene->reference[layer].outer);
    }
    free(scene->inverse_freq);
    parity_release(parity, scene->device.base);
    free(scene->pool.image);
}

/* ---- cases ---- */

struct pipeline {
    struct score_stage stages[SCORE_STAGES_MAX];
    double relative; /* tolerance: of the head's mean absolute score, and of the score */
    bool same_slots;
    enum scene_size size;
};

enum { ANY = 0x7fffffff /* a kernel that is drawn */ };

static const struct pipeline pipelines[] = {
    {{{STAGE_POSITION, 0, 0}, {STAGE_PROTECT, 0, 0}}, 0, false, SCENE_ANY},
    {{{STAGE_RANDOM, 0, 0}}, 0, false, SCENE_ANY},
    {{{STAGE_SUM, 0, 0}, {STAGE_PROTECT, 0, 0}}, 0, false, SCENE_ANY},
    {{{STAGE_SUM_PER_QUERY, 0, 0}}, 0, false, SCENE_ANY},
    {{{STAGE_ABOVE, 0, 0}, {STAGE_PROTECT, 0, 0}}, 0, false, SCENE_ANY},
    {{{STAGE_WINDOW_SUM, 0, 0}, {STAGE_PROTECT, 0, 0}, {STAGE_POOL_MAX, 0, 7}}, 0, false, SCENE_ANY},
    {{{STAGE_WINDOW_SUM, 0, 0}, {STAGE_POOL_MAX, 0, ANY}}, 0, false, SCENE_ANY},
    {{{STAGE_WINDOW_SUM, 0, 0}, {STAGE_PROTECT, 0, 0}, {STAGE_POOL_MAX, 0, 5}, {STAGE_PROTECT_BEST, 0, 0}}, 0, false,
        SCENE_ANY},
    {{{STAGE_ABOVE, 0, 0}, {STAGE_PROTECT_BEST, 0, 0}}, 0, false, SCENE_ANY},
    {{{STAGE_WINDOW_SPREAD, 200, 0}, {STAGE_PROTECT, 0, 0}}, 1e-6, false, SCENE_ANY},
    {{{STAGE_NOISY, 0, 0}, {STAGE_PROTECT, 0, 0}}, 0, false, SCENE_ANY},
    {{{STAGE_WINDOW_SUM, 0, 0}, {STAGE_LAYER_MEAN, 0, 0}, {STAGE_PROTECT, 0, 0}}, 0, true, SCENE_ANY},
    {{{STAGE_KEY_NORM, 0, 0}}, 3e-7, false, SCENE_ANY},
    {{{STAGE_KEY_DIFFERENCE, 0, 0}}, 1e-6, false, SCENE_ANY},
    {{{STAGE_EXPECTED_ATTENTION, 0.01f, 512}, {STAGE_TIMES_VALUE_NORM, 0, 0}, {STAGE_PROTECT, 0, 0}}, 1e-5, false,
        SCENE_SMALL},
    {{{STAGE_LAPROX, 0, 0}, {STAGE_PROTECT, 0, 0}}, 3e-6, true, SCENE_SMALL},
    {{{STAGE_LAPROX_HEAD, 0, 0}, {STAGE_PROTECT, 0, 0}}, 3e-6, false, SCENE_SMALL},
    {{{STAGE_DROP_ERROR, 0.3f, 0}, {STAGE_PROTECT, 0, 0}}, 1e-5, false, SCENE_SMALL},
    {{{STAGE_WINDOW_SUM, 0, 0}, {STAGE_PROTECT, 0, 0}, {STAGE_POOL_ADAPTIVE, 0, 0}}, 1e-6, false, SCENE_ANY},
    {{{STAGE_WINDOW_SUM, 0, 0}, {STAGE_PROTECT, 0, 0}, {STAGE_POOL_MAX, 0, 7}, {STAGE_PROTECT_BEST, 0, 0},
         {STAGE_TIMES_OUTPUT_NORM, 1e-4f, 0}},
        1e-6, false, SCENE_SMALL},
    {{{STAGE_WINDOW_SUM, 0, 0}, {STAGE_PROTECT, 0, 0}, {STAGE_POOL_MAX, 0, 7}, {STAGE_PROTECT_BEST, 0, 0}}, 0, false,
        SCENE_LONG},
    {{{STAGE_WINDOW_SUM, 0, 0}, {STAGE_PROTECT, 0, 0}, {STAGE_POOL_ADAPTIVE, 0, 0}}, 1e-6, false, SCENE_LONG},
    {{{STAGE_KEY_DIFFERENCE, 0, 0}, {STAGE_TIMES_VALUE_NORM, 0, 0}, {STAGE_PROTECT_BEST, 0, 0}}, 3e-6, false,
        SCENE_LONG},
};

/* Stages of a pipeline: those up to the first that is position again (none comes later than first). */
static uint32_t pipeline_count(const struct pipeline *pipeline) {
    uint32_t count = 1;
    while (count < SCORE_STAGES_MAX && pipeline->stages[count].kind != STAGE_POSITION)
        count++;
    return count;
}

static double mean_absolute(const double *scores, uint32_t count) {
    double sum = 0;
    uint32_t finite = 0;
    for (uint32_t i = 0; i < count; i++) {
        sum += isfinite(scores[i]) ? fabs(scores[i]) : 0;
        finite += isfinite(scores[i]) != 0;
    }
    return finite > 0 ? sum / finite : 0;
}

static void check_scene(struct parity *parity, struct scene *scene, const struct pipeline *pipeline) {
    const struct kv_layout *layout = &scene->pool.layout;
    uint32_t heads = scene->layers * layout->kv_heads;
    size_t total = 0;
    for (uint32_t i = 0; i < heads; i++)
        total += scene->reference_heads[i].slots;
    float *all = parity_host(total * sizeof *all), *next = all;
    for (uint32_t i = 0; i < heads; i++) {
        const struct reference_score_head *want = &scene->reference_heads[i];
        parity->operations->download(parity->backend, next, scene->score_heads[i].scores, want->slots * sizeof(float));
        double scale = mean_absolute(want->scores, want->slots);
        parity_check_close(parity, next, want->scores, want->slots, pipeline->relative * scale, pipeline->relative,
            "G=%u d=%u format %d, w=%u L=%u B=%u, head %u: %u slots, sinks %u, recent from %u", scene->group,
            layout->head_dim, (int)layout->format, scene->window, scene->reference[i / layout->kv_heads].seen,
            scene->reference[i / layout->kv_heads].budget, i, want->slots, want->sinks, want->recent_from);
        next += want->slots;
    }
    parity_check_same(parity, all, total * sizeof *all);
    free(all);
}

/* The slot that goes by these scores: the lowest, NaN before all, the oldest of equal ones. */
static uint32_t find_worst(const float *scores, const uint32_t *positions, uint32_t count) {
    uint32_t worst = UINT32_MAX;
    for (uint32_t i = 0; i < count; i++) {
        float score = isnan(scores[i]) ? -INFINITY : scores[i];
        float least = worst == UINT32_MAX ? 0 : isnan(scores[worst]) ? -INFINITY : scores[worst];
        if (positions[i] != KV_NO_POSITION &&
            (worst == UINT32_MAX || score < least || (score == least && positions[i] < positions[worst])))
            worst = i;
    }
    return worst;
}

/* Whether as many slots are before one in the order. */
static bool has_rank(const struct scene_head *head, uint32_t slot, uint32_t rank) {
    for (uint32_t i = 0; i < head->order_count; i++) {
        if (head->order[i] != KV_NO_SLOT && rank-- == 0)
            return head->order[i] == slot;
    }
    return false;
}

/* Asked for the slots that go alone, some of them or all, the backend names those that its scores name. */
static void check_worst(struct parity *parity, struct scene *scene) {
    uint32_t heads = scene->layers * scene->pool.layout.kv_heads, want[HEADS_MAX], got[HEADS_MAX], ranks[HEADS_MAX];
    float *scores[HEADS_MAX];
    bool all = parity_random(parity, 0, 2) > 0;
    struct error error = {0};
    for (uint32_t i = 0; i < heads; i++) {
        struct score_head *head = &scene->score_heads[i];
        float *numbers = parity_host(head->view.slots * sizeof *numbers);
        parity->operations->download(parity->backend, numbers, head->scores, head->view.slots * sizeof *numbers);
        want[i] = find_worst(numbers, scene->head[i].positions, head->view.slots);
        free(numbers);
        scores[i] = head->scores;
        got[i] = want[i];
        ranks[i] = UINT32_MAX; /* not told */
        if (all || parity_random(parity, 0, 1) == 0) {
            head->worst = &got[i];
            head->worst_rank = &ranks[i];
            head->scores = NULL;
            got[i] = UINT32_MAX - 1;
        }
    }
    /* In one call or in several, before anything is waited for. */
    uint32_t layers = parity_random(parity, 0, 1) == 0 ? scene->layers : 1;
    for (uint32_t layer = 0; layer < scene->layers; layer += layers) {
        int code = parity->operations->score(
            parity->backend, &scene->device, scene->score_layers + layer, layers, scene->heads, &error);
        parity_check_true(parity, code == 0, "score: %s", error.message);
    }
    parity->operations->synchronize(parity->backend);
    for (uint32_t i = 0; i < heads; i++) {
        parity_check_true(parity, got[i] == want[i], "the slot that goes of head %u is %u, not %u", i, got[i], want[i]);
        parity_check_true(parity, ranks[i] == UINT32_MAX || has_rank(&scene->head[i], got[i], ranks[i]),
            "slot %u of head %u is not at place %u of the order", got[i], i, ranks[i]);
        scene->score_heads[i].scores = scores[i];
        scene->score_heads[i].worst_rank = NULL;
        scene->score_heads[i].worst = NULL;
    }
}

static void case_pipeline(struct parity *parity) {
    const struct pipeline *pipeline = &pipelines[parity->entry->index];
    struct scene scene;
    struct error error = {0};
    /* All pairs of many heads take the checked device most of a minute. */
    bool pairs = pipeline->stages[0].kind == STAGE_LAPROX && parity->cuda && !parity_is_full();
    scene_create(parity, &scene, pipeline->same_slots, pairs ? SCENE_FEW : pipeline->size);
    uint32_t count = pipeline_count(pipeline);
    for (uint32_t i = 0; i < count; i++) {
        scene.stages[i] = pipeline->stages[i];
        if (scene.stages[i].n == ANY)
            scene.stages[i].n = parity_random(parity, 0, 40);
    }
    for (uint32_t layer = 0; layer < scene.layers; layer++) {
        scene.score_layers[layer].stages_count = count;
        reference_score(&scene.reference[layer], scene.stages, count);
    }
    int code = parity->operations->score(
        parity->backend, &scene.device, scene.score_layers, scene.layers, scene.heads, &error);
    if (parity_check_true(parity, code == 0, "score: %s", error.message)) {
        check_scene(parity, &scene, pipeline);
        check_worst(parity, &scene);
    }
    scene_free(parity, &scene);
}

/* The widest window, all of whose queries give a slot everything, and one whose queries give it nothing: the sums of
 * both are 0. */
static void case_full_window(struct parity *parity) {
    enum { QUERIES = 256, CAPACITY = 16 };
    static const uint32_t positions[2] = {7, 9};
    static const float full[2] = {QUERIES, 1};
    uint16_t rows[QUERIES * CAPACITY] = {0};
    uint32_t sums[CAPACITY] = {0};
    struct scene scene;
    struct error error = {0};
    for (uint32_t row = 0; row < QUERIES; row++)
        rows[row * CAPACITY] = 0x3c00;
    scene_create(parity, &scene, false, SCENE_SMALL);
    struct kv_statistics statistics = {.capacity = CAPACITY,
        .window = QUERIES,
        .window_rows = parity_upload(parity, rows, sizeof rows),
        .window_sum = parity_upload(parity, sums, sizeof sums)};
    for (uint32_t i = 0; i < scene.pool.layout.kv_heads; i++) {
        struct score_head *head = &scene.score_heads[i];
        parity_release(parity, head->scores);
        head->scores = parity_upload(parity, NULL, 2 * sizeof(float));
        head->statistics = statistics;
        head->view.slots = 2;
        head->positions = positions;
        head->order = NULL;
    }
    scene.score_layers[0].seen = 300;
    for (uint32_t kind = 0; kind < 2; kind++) {
        scene.stages[0] = (struct score_stage){kind == 0 ? STAGE_WINDOW_SUM : STAGE_WINDOW_SPREAD, 200, 0};
        scene.score_layers[0].stages_count = 1;
        int code =
            parity->operations->score(parity->backend, &scene.device, scene.score_layers, 1, scene.heads, &error);
        parity_check_true(parity, code == 0, "score: %s", error.message);
        float *got = parity_download(parity, scene.score_heads[0].scores, 2 * sizeof *got);
        parity_check_true(parity, got[0] == full[kind] && got[1] == 0, "a full window scores %g, an empty one %g",
            (double)got[0], (double)got[1]);
        free(got);
    }
    parity_release(parity, statistics.window_rows);
    parity_release(parity, statistics.window_sum);
    scene_free(parity, &scene);
}

static void case_preference(struct parity *parity) {
    struct scene scene;
    double entropy[LAYERS_MAX], variance[LAYERS_MAX], want[2];
    scene_create(parity, &scene, false, SCENE_ANY);
    parity->operations->window_preference(
        parity->backend, &scene.device, scene.score_layers, scene.layers, scene.heads, entropy, variance);
    for (uint32_t layer = 0; layer < scene.layers; layer++) {
        float got[2] = {(float)entropy[layer], (float)variance[layer]};
        reference_preference(&scene.reference[layer], &want[0], &want[1]);
        parity_check_close(parity, got, want, 2, 1e-12, 1e-6, "preference of layer %u", layer);
    }
    scene_free(parity, &scene);
}

/* A stage that lacks its statistics is refused, and so is one that does not exist. */
static void case_refused(struct parity *parity) {
    static const enum score_stage_kind kinds[] = {STAGE_SUM, STAGE_NOISY, STAGE_ABOVE, STAGE_WINDOW_SUM, STAGE_LAPROX,
        STAGE_DROP_ERROR, STAGE_TIMES_OUTPUT_NORM, STAGE_KIND_COUNT};
    struct scene scene;
    struct error error = {0};
    scene_create(parity, &scene, false, SCENE_ANY);
    for (size_t i = 0; i < sizeof kinds / sizeof kinds[0]; i++) {
        scene.stages[0] = (struct score_stage){kinds[i], 0, 0};
        scene.score_layers[0].stages_count = 1;
        struct kv_statistics kept = scene.score_heads[0].statistics;
        scene.score_heads[0].statistics = (struct kv_statistics){.capacity = kept.capacity};
        int code =
            parity->operations->score(parity->backend, &scene.device, scene.score_layers, 1, scene.heads, &error);
        parity_check_true(parity, code < 0, "stage %d is not refused", (int)kinds[i]);
        scene.score_heads[0].statistics = kept;
    }
    scene_free(parity, &scene);
}

/* ---- rotation ---- */

static void case_rotate(struct parity *parity) {
    struct scene scene;
    scene_create(parity, &scene, false, SCENE_ANY);
    const struct kv_layout *layout = &scene.pool.layout;
    uint32_t dim = layout->head_dim, slots = scene.reference_heads[0].slots;
    const struct rope_params *rope = &scene.rope;
    uint32_t *list = parity_host(slots * sizeof *list), *to = parity_host(slots * sizeof *to), count = 0;
    for (uint32_t slot = 0; slot < slots; slot++) {
        if (scene.head[0].positions[slot] != KV_NO_POSITION && parity_random(parity, 0, 3) != 0)
            list[count++] = slot;
    }
    float *device = parity_upload(parity, NULL, (size_t)slots * dim * sizeof *device);
    parity->operations->unrotate_slots(parity->backend, &scene.device, rope, scene.head[0].pages, list, count, device);
    float *keys = parity_download(parity, device, (size_t)slots * dim * sizeof *keys);
    double *want = parity_host((size_t)dim * sizeof *want);
    for (uint32_t i = 0; i < count; i++) { /* rotated by the slot's position they are what is stored */
        float stored[256];
        for (uint32_t c = 0; c < dim; c++)
            stored[c] = (float)scene.head[0].keys[(size_t)list[i] * dim + c];
        reference_rope(rope, scene.head[0].positions[list[i]], keys + (size_t)i * dim, dim, want);
        parity_check_close(parity, stored, want, dim, 1e-5, 0, "unrotate d=%u/%u", rope->dim, dim);
        to[i] = parity_random(parity, 0, 1) == 0 ? parity_random(parity, 0, 300) : parity_random(parity, 0, 100000);
    }
    parity->operations->rotate_slots(
        parity->backend, &scene.device, rope, scene.head[0].pages, list, device, to, count);
    unsigned char *image = parity_download(parity, scene.device.base, scene.pages * scene.pool.page_bytes);
    for (uint32_t i = 0; i < count; i++) {
        uint32_t page = scene.head[0].pages[list[i] / KV_PAGE_SLOTS], place = list[i] % KV_PAGE_SLOTS;
        reference_rope(rope, to[i], keys + (size_t)i * dim, dim, want);
        for (uint32_t c = 0; c < dim; c++) { /* what else is in the pool must stay as it was */
            struct reference_pool got = {image, scene.pool.page_bytes, *layout};
            float number = (float)reference_number(layout->format, reference_key(&got, page, place, c));
            double relative = layout->format == KV_F32 ? 0 : layout->format == KV_F16 ? 0x1p-11 : 0x1p-8;
            parity_check_close(
                parity, &number, &want[c], 1, 1e-5, relative, "rotate d=%u/%u to %u", rope->dim, dim, to[i]);
            memcpy(reference_key(&scene.pool, page, place, c), reference_key(&got, page, place, c),
                reference_number_bytes(layout->format));
        }
    }
    parity_check_bytes(parity, image, scene.pool.image, scene.pages * scene.pool.page_bytes, "pool after rotate");
    parity_release(parity, device);
    free(list);
    free(to);
    free(keys);
    free(want);
    free(image);
    scene_free(parity, &scene);
}

const struct parity_case parity_score_cases[] = {
    {"score full window", case_full_window, 2, 0, NULL},
    {"score position", case_pipeline, 10, 0, NULL},
    {"score random", case_pipeline, 6, 1, NULL},
    {"score sum", case_pipeline, 10, 2, NULL},
    {"score sum per query", case_pipeline, 10, 3, NULL},
    {"score above", case_pipeline, 10, 4, NULL},
    {"score window sum", case_pipeline, 15, 5, NULL},
    {"score window pool", case_pipeline, 20, 6, NULL},
    {"score window best", case_pipeline, 10, 7, NULL},
    {"score best of few", case_pipeline, 10, 8, NULL},
    {"score window spread", case_pipeline, 10, 9, NULL},
    {"score noisy", case_pipeline, 6, 10, NULL},
    {"score layer mean", case_pipeline, 6, 11, NULL},
    {"score key norm", case_pipeline, 10, 12, NULL},
    {"score key difference", case_pipeline, 10, 13, NULL},
    {"score expected attention", case_pipeline, 8, 14, NULL},
    {"score laprox", case_pipeline, 8, 15, NULL},
    {"score laprox per head", case_pipeline, 8, 16, NULL},
    {"score drop error", case_pipeline, 8, 17, NULL},
    {"score pool adaptive", case_pipeline, 15, 18, NULL},
    {"score output norm", case_pipeline, 8, 19, NULL},
    {"score preference", case_preference, 10, 0, NULL},
    {"score refused", case_refused, 2, 0, NULL},
    {"score rotate", case_rotate, 10, 0, NULL},
    {0},
};

/* Of heads that a block of a GPU does not hold; the CPU backend has no such border. */
static void case_long(struct parity *parity) {
    if (parity->cuda)
        case_pipeline(parity);
    else
        parity_skip(parity, "a border of the CUDA backend");
}

const struct parity_case parity_score_long_cases[] = {
    {"score long pool", case_long, 2, 20, NULL},
    {"score long adaptive", case_long, 1, 21, NULL},
    {"score long keys", case_long, 1, 22, NULL},
    {0},
};
