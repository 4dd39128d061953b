/* SPDX-License-Identifier: Apache-2.0
 *
 * The DistillCache network over random shapes: ragged heads, slots out of order, unused ones, numbers that are known
 * already. What is kept of a slot is compared with products in float64; scores with the plain computation of
 * policy/network.h on the numbers that were kept.
 */
#include "tests/parity/parity.h"
#include "tests/parity/parity_same.h"
#include "tests/parity/reference_attend.h"
#include "tests/parity/reference_linear.h"
#include "policy/network.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

enum { LAYERS_MAX = 3, KV_HEADS_MAX = 3, HEADS_MAX = LAYERS_MAX * KV_HEADS_MAX, DIM_MAX = 96, SLOTS_MAX = 300 };

struct scene_head {
    uint32_t slots, capacity, *pages, *positions;
    float *sum, *squared, *entropy;
    uint16_t *rows; /* [content + 2][capacity] before */
    struct kv_statistics device;
};

struct scene {
    struct reference_pool pool;
    struct kv_pool device;
    uint32_t group, heads, pages, heads_count; /* heads_count: (layer, KV head) */
    struct policy_network *network;
    struct tensor output[LAYERS_MAX];
    struct rope_params rope;
    float inverse_freq[DIM_MAX / 2];
    uint32_t seen, budget;
    struct score_stage stages[3];
    uint32_t stages_count;
    struct scene_head head[HEADS_MAX];
    struct score_head score_heads[HEADS_MAX];
    struct score_layer layers[LAYERS_MAX];
    unsigned char *written; /* scores and rows of all heads, for comparing tiers */
    size_t written_bytes;
};

/* ---- a scene ---- */

static struct network_shape draw_shape(struct parity *parity, bool paper) {
    static const uint32_t dims[] = {64, 32, 96, 2, 40, 16};
    static const uint32_t hidden[] = {32, 1, 7, 8, 9, 64, 256};
    const uint32_t all_paper =
        1u << INPUT_MEAN | 1u << INPUT_VALUE_NORM | 1u << INPUT_DEVIATION | 1u << INPUT_ENTROPY | 1u << INPUT_POSITION;
    struct network_shape shape = {.features = paper ? FEATURES_PAPER : FEATURES_CONTENT,
        .inputs = paper ? all_paper : (1u << INPUT_KINDS) - 1,
        .content = paper ? 0 : parity_random(parity, 0, NETWORK_CONTENT_MAX),
        .hidden = hidden[parity_random(parity, 0, sizeof hidden / sizeof hidden[0] - 1)],
        .layers = parity_random(parity, 1, LAYERS_MAX),
        .kv_heads = parity_random(parity, 1, KV_HEADS_MAX),
        .head_dim = dims[parity_random(parity, 0, sizeof dims / sizeof dims[0] - 1)]};
    if (parity_random(parity, 0, 1) == 0)
        shape.inputs &= (uint32_t)parity_random_bits(parity);
    if (shape.inputs == 0)
        shape.inputs = 1u << INPUT_POSITION;
    return shape;
}

static void draw_network(struct parity *parity, struct scene *scene, bool paper) {
    struct network_shape shape = draw_shape(parity, paper);
    struct network_array array;
    struct error error = {0};
    scene->network = network_create(&shape, &error);
    if (!parity_check_true(parity, scene->network != NULL, "network: %s", error.message))
        exit(1);
    for (uint32_t i = 0; network_array(scene->network, i, &array); i++)
        if (strcmp(array.name, "layer_budgets") != 0)
            parity_fill_normal(parity, array.values, array.count, strcmp(array.name, "scale") == 0 ? 0.7f : 0.5f);
    uint32_t heads = parity_random(parity, 1, shape.kv_heads); /* a rank's */
    scene->pool.layout = (struct kv_layout){.layers = shape.layers,
        .kv_heads = heads,
        .head_dim = shape.head_dim,
        .format = KV_F32,
        .first_head = parity_random(parity, 0, shape.kv_heads - heads),
        .model_heads = shape.kv_heads};
    scene->heads_count = shape.layers * heads;
}

static void draw_positions(struct parity *parity, struct scene *scene, struct scene_head *head) {
    uint32_t *all = parity_host(scene->seen * sizeof *all);
    for (uint32_t i = 0; i < scene->seen; i++)
        all[i] = i;
    for (uint32_t i = 0; i < head->slots; i++) {
        uint32_t other = parity_random(parity, i, scene->seen - 1), moved = all[i];
        all[i] = all[other];
        all[other] = moved;
        head->positions[i] = all[i];
    }
    for (uint32_t i = 0; parity_random(parity, 0, 1) == 0 && i < head->slots / 6; i++)
        head->positions[parity_random(parity, 0, head->slots - 1)] = KV_NO_POSITION;
    free(all);
}

static void fill_pages(struct parity *parity, struct scene *scene, struct scene_head *head) {
    for (uint32_t slot = 0; slot < head->slots; slot++) {
        uint32_t page = head->pages[slot / KV_PAGE_SLOTS], place = slot % KV_PAGE_SLOTS;
        double scale = parity_random(parity, 0, 9) == 0 ? 1e-7 : 1;
        *reference_position(&scene->pool, page, place) = (int32_t)head->positions[slot];
        for (uint32_t c = 0; head->positions[slot] != KV_NO_POSITION && c < scene->pool.layout.head_dim; c++) {
            reference_round(
                scene->pool.layout.format, (double)parity_normal(parity), reference_key(&scene->pool, page, place, c));
            reference_round(scene->pool.layout.format, scale * (double)parity_normal(parity),
                reference_value(&scene->pool, page, place, c));
        }
    }
}

/* Sums as attention leaves them: of c probabilities, and of their squares. What lies beyond the slots is garbage. */
static void fill_statistics(struct parity *parity, struct scene *scene, struct scene_head *head) {
    uint32_t capacity = head->capacity, content = scene->network->shape.content;
    uint64_t *sum = parity_host(capacity * sizeof *sum), *squared = parity_host(capacity * sizeof *squared);
    uint16_t *entropy = parity_host(capacity * sizeof *entropy);
    head->rows = parity_host((content + 2) * (size_t)capacity * sizeof *head->rows);
    for (uint32_t slot = 0; slot < capacity; slot++) {
        bool there = slot < head->slots && head->positions[slot] != KV_NO_POSITION;
        double queries = there ? (double)(scene->seen - head->positions[slot]) : 1;
        double mean = pow(parity_uniform(parity, 0, 1), 8), spread = parity_uniform(parity, 0, 1);
        sum[slot] = there ? (uint64_t)(mean * queries * 0x1p24) : parity_random_bits(parity) >> 14;
        squared[slot] = (uint64_t)((mean * mean + spread * mean * (1 - mean)) * queries * 0x1p24);
        if (parity_random(parity, 0, 9) == 0) /* no deviation, or but a little: only rounding decides */
            squared[slot] = (uint64_t)(mean * mean * queries * 0x1p24);
        entropy[slot] = (uint16_t)parity_random(parity, 0x2000, 0x4700);
        if (slot < head->slots) {
            head->sum[slot] = (float)((double)sum[slot] * 0x1p-24);
            head->squared[slot] = (float)((double)squared[slot] * 0x1p-24);
            head->entropy[slot] = (float)reference_half(entropy[slot]);
        }
        for (uint32_t row = 0; there && parity_random(parity, 0, 3) == 0 && row < content + 2; row++)
            head->rows[(size_t)row * capacity + slot] = (uint16_t)parity_random(parity, 0xb000, 0xc400);
    }
    head->device = (struct kv_statistics){.capacity = capacity,
        .sum = parity_upload_sums(parity, sum, capacity, capacity),
        .squared = parity_upload_sums(parity, squared, capacity, capacity),
        .entropy = parity_upload(parity, entropy, capacity * sizeof *entropy),
        .content = content,
        .content_rows = parity_upload(parity, head->rows, (content + 2) * (size_t)capacity * sizeof *head->rows),
        .standard = parity_upload(parity, NULL, STATISTIC_STANDARD_NUMBERS * sizeof(float))};
    free(sum);
    free(squared);
    free(entropy);
}

static void head_create(struct parity *parity, struct scene *scene, struct scene_head *head, uint32_t *next) {
    uint32_t pages = (head->slots + KV_PAGE_SLOTS - 1) / KV_PAGE_SLOTS;
    head->capacity = (pages + parity_random(parity, 0, 2)) * KV_PAGE_SLOTS;
    head->pages = parity_host((pages + 1) * sizeof *head->pages);
    head->positions = parity_host((head->slots + 1) * sizeof *head->positions);
    head->sum = parity_host((head->slots + 1) * sizeof *head->sum);
    head->squared = parity_host((head->slots + 1) * sizeof *head->squared);
    head->entropy = parity_host((head->slots + 1) * sizeof *head->entropy);
    for (uint32_t i = 0; i < pages; i++)
        head->pages[i] = (*next)++;
    draw_positions(parity, scene, head);
    fill_pages(parity, scene, head);
    fill_statistics(parity, scene, head);
}

static void connect(struct parity *parity, struct scene *scene) {
    uint32_t kv_heads = scene->pool.layout.kv_heads;
    for (uint32_t i = 0; i < scene->heads_count; i++) {
        struct scene_head *head = &scene->head[i];
        scene->score_heads[i] = (struct score_head){
            .view = {head->pages, head->slots, 0, NULL},
            .statistics = head->device,
            .sinks = 2,
            .recent_from = scene->seen - 3,
            .scores = parity_upload(parity, NULL, (head->slots + 1) * sizeof(float)),
            .positions = parity_random(parity, 0, 1) == 0 ? head->positions : NULL,
        };
    }
    for (uint32_t layer = 0; layer < scene->pool.layout.layers; layer++)
        scene->layers[layer] = (struct score_layer){
            .heads = scene->score_heads + (size_t)layer * kv_heads,
            .layer = layer,
            .seen = scene->seen,
            .budget = scene->budget,
            .stages = scene->stages,
            .stages_count = scene->stages_count,
            .rope = &scene->rope,
            .output = &scene->output[layer],
            .network = scene->network,
        };
}

static void scene_create(struct parity *parity, struct scene *scene, bool paper) {
    memset(scene, 0, sizeof *scene);
    draw_network(parity, scene, paper);
    struct kv_layout *layout = &scene->pool.layout;
    uint32_t dim = layout->head_dim, next = 0, total = 0;
    layout->format = (enum kv_format)parity_random(parity, 0, 2);
    scene->group = parity_random(parity, 1, 3);
    scene->heads = scene->group * layout->kv_heads;
    scene->seen = SLOTS_MAX + parity_random(parity, 0, 1) * parity_random(parity, 0, 9000);
    scene->budget = parity_random(parity, 1, scene->seen);
    scene->stages[scene->stages_count++] = (struct score_stage){.kind = STAGE_NETWORK};
    for (uint32_t i = 0; i < scene->heads_count; i++) {
        uint32_t kind = parity_random(parity, 0, 5);
        scene->head[i].slots = kind == 0 ? 0 : parity_random(parity, 1, kind < 3 ? 40 : SLOTS_MAX);
        total += (scene->head[i].slots + KV_PAGE_SLOTS - 1) / KV_PAGE_SLOTS;
    }
    scene->pages = total + 1;
    scene->pool.page_bytes = 2 * KV_PAGE_SLOTS * dim * reference_number_bytes(layout->format);
    scene->pool.page_bytes = (scene->pool.page_bytes + KV_PAGE_SLOTS * sizeof(int32_t) + 63) / 64 * 64;
    scene->pool.image = parity_host(scene->pages * scene->pool.page_bytes);
    memset(scene->pool.image, 0xff, scene->pages * scene->pool.page_bytes);
    for (uint32_t page = 0; page < scene->pages; page++)
        for (uint32_t place = 0; place < KV_PAGE_SLOTS; place++)
            *reference_position(&scene->pool, page, place) = KV_NO_POSITION;
    for (uint32_t i = 0; i < scene->heads_count; i++)
        head_create(parity, scene, &scene->head[i], &next);
    for (uint32_t layer = 0; layer < layout->layers; layer++) {
        uint32_t rows = parity_random(parity, 1, 80);
        size_t count = (size_t)rows * scene->heads * dim;
        float *data = parity_host(count * sizeof *data);
        parity_fill_normal(parity, data, count, 0.3f);
        scene->output[layer] = (struct tensor){.name = "output",
            .type = TENSOR_F32,
            .rows = rows,
            .columns = scene->heads * dim,
            .data = data,
            .bytes = count * sizeof *data};
    }
    scene->rope = (struct rope_params){parity_random(parity, 0, 2) == 0 ? dim / 4 * 2 : dim, scene->inverse_freq};
    for (uint32_t pair = 0; pair < scene->rope.dim / 2; pair++)
        scene->inverse_freq[pair] = (float)pow(10000, -2.0 * pair / scene->rope.dim);
    scene->device =
        (struct kv_pool){.base = parity_upload(parity, scene->pool.image, scene->pages * scene->pool.page_bytes),
            .page_bytes = scene->pool.page_bytes,
            .layout = *layout};
    connect(parity, scene);
}

/* Backends keep what they computed of output matrices by where those lie, and models stay where they are. Here another
 * one may come to lie at the same place: a call for a model of another shape lets go of the last one. */
static void forget_matrices(struct parity *parity) {
    static const float numbers[KV_HEADS_MAX * 4 * 2];
    const struct kv_pool pool = {
        .page_bytes = 0, .layout = {.layers = LAYERS_MAX + 1, .kv_heads = 1, .head_dim = 2, .format = KV_F32}};
    const struct tensor output = {.name = "output",
        .type = TENSOR_F32,
        .rows = 1,
        .columns = 2,
        .data = (void *)numbers,
        .bytes = 2 * sizeof *numbers};
    const struct kv_head_view view = {.pages = NULL, .slots = 0, .first_slot = 0};
    float norm;
    struct error error = {0};
    int code = parity->operations->slot_norms(parity->backend, &pool, &view, &output, 0, 0, 1, NULL, &norm, &error);
    parity_check_true(parity, code == 0, "norms of no slots: %s", error.message);
}

static void scene_free(struct parity *parity, struct scene *scene) {
    forget_matrices(parity);
    for (uint32_t i = 0; i < scene->heads_count; i++) {
        struct scene_head *head = &scene->head[i];
        free(head->pages);
        free(head->positions);
        free(head->sum);
        free(head->squared);
        free(head->entropy);
        free(head->rows);
        parity_release(parity, head->device.sum);
        parity_release(parity, head->device.squared);
        parity_release(parity, head->device.entropy);
        parity_release(parity, head->device.content_rows);
        parity_release(parity, head->device.standard);
        parity_release(parity, scene->score_heads[i].scores);
    }
    for (uint32_t layer = 0; layer < scene->pool.layout.layers; layer++)
        free((void *)scene->output[layer].data);
    parity_release(parity, scene->device.base);
    free(scene->pool.image);
    free(scene->written);
    network_release(scene->network);
}

/* ---- what is kept of a slot ---- */

/* Key before RoPE and value of a slot. */
static void read_slot(
    const struct scene *scene, const struct scene_head *head, uint32_t slot, double *key, float *value) {
    const struct kv_layout *layout = &scene->pool.layout;
    uint32_t page = head->pages[slot / KV_PAGE_SLOTS], place = slot % KV_PAGE_SLOTS;
    for (uint32_t c = 0; c < layout->head_dim; c++) {
        key[c] = reference_number(layout->format, reference_key(&scene->pool, page, place, c));
        value[c] = (float)reference_number(layout->format, reference_value(&scene->pool, page, place, c));
    }
    for (uint32_t pair = 0; pair < scene->rope.dim / 2; pair++) {
        double angle = (double)head->positions[slot] * (double)scene->inverse_freq[pair];
        double x = key[2 * pair], y = key[2 * pair + 1];
        key[2 * pair] = x * cos(angle) + y * sin(angle);
        key[2 * pair + 1] = y * cos(angle) - x * sin(angle);
    }
}

/* Where the network has what it knows of the scene's `number`-th head. */
static uint32_t network_number(const struct scene *scene, uint32_t number) {
    const struct kv_layout *layout = &scene->pool.layout;
    return number / layout->kv_heads * layout->model_heads + layout->first_head + number % layout->kv_heads;
}

static double output_length(const struct scene *scene, uint32_t number, const float *value) {
    const struct tensor *output = &scene->output[number / scene->pool.layout.kv_heads];
    uint32_t dim = scene->pool.layout.head_dim, head = number % scene->pool.layout.kv_heads;
    double mean = 0;
    for (uint32_t g = 0; g < scene->group; g++) {
        double square = 0;
        for (uint32_t row = 0; row < output->rows; row++) {
            const float *weights = (const float *)output->data + (size_t)row * output->columns;
            double sum = 0;
            for (uint32_t c = 0; c < dim; c++)
                sum += (double)weights[(head * scene->group + g) * dim + c] * (double)value[c];
            square += sum * sum;
        }
        mean += sqrt(square) / scene->group;
    }
    return mean;
}

/* f16 of a number: what is stored may be off by its rounding and by what the float sum is. */
static void check_number(struct parity *parity, uint16_t stored, double want, double scale, const char *what) {
    float got = (float)reference_half(stored);
    parity_check_close(parity, &got, &want, 1, 1e-4 * scale + 2e-4, 0x1p-10, "%s", what);
    parity_check_true(parity, stored != 0, "%s is stored as +0", what);
}

static void check_rows(struct parity *parity, const struct scene *scene, uint32_t number, const uint16_t *rows) {
    const struct scene_head *head = &scene->head[number];
    const struct policy_network *network = scene->network;
    uint32_t content = network->shape.content, dim = network->shape.head_dim, capacity = head->capacity;
    bool kept = (network_needs(&network->shape) & STATISTIC_CONTENT) != 0;
    bool outputs = (network->shape.inputs >> INPUT_OUTPUT_NORM & 1) != 0;
    for (uint32_t slot = 0; slot < capacity; slot++) {
        bool there = slot < head->slots && head->positions[slot] != KV_NO_POSITION;
        if (!kept || !there || head->rows[content * capacity + slot] != 0) { /* as it was */
            for (uint32_t row = 0; row < content + 2; row++)
                parity_check_true(parity, rows[row * capacity + slot] == head->rows[row * capacity + slot],
                    "row %u of slot %u was written", row, slot);
            continue;
        }
        double key[DIM_MAX], square = 0;
        float value[DIM_MAX];
        read_slot(scene, head, slot, key, value);
        for (uint32_t j = 0; j < content; j++) {
            size_t at = (size_t)network_number(scene, number) * content + j;
            double want = (double)network->content_offset[at], scale = fabs(want);
            for (uint32_t c = 0; c < dim; c++) {
                want += (double)network->content[at * dim + c] * key[c];
                scale += fabs((double)network->content[at * dim + c] * key[c]);
            }
            check_number(parity, rows[j * capacity + slot], want, scale, "content");
        }
        for (uint32_t c = 0; c < dim; c++)
            square += (double)value[c] * (double)value[c];
        check_number(parity, rows[content * capacity + slot], log(1e-6 + sqrt(square)), 1, "value norm");
        if (outputs)
            check_number(parity, rows[(content + 1) * capacity + slot], log(1e-6 + output_length(scene, number, value)),
                20, "output norm");
    }
}

/* ---- scores ---- */

/* Of the slots of a head that are there: list [count], and the plain computation's inputs [count][F]. */
static uint32_t gather(
    const struct scene *scene, uint32_t number, const uint16_t *rows, uint32_t *list, float *inputs) {
    const struct scene_head *head = &scene->head[number];
    static float sum[SLOTS_MAX], squared[SLOTS_MAX], entropy[SLOTS_MAX], value[SLOTS_MAX], output[SLOTS_MAX];
    static float content[SLOTS_MAX * NETWORK_CONTENT_MAX];
    static uint32_t positions[SLOTS_MAX];
    uint32_t count = 0, width = scene->network->shape.content;
    for (uint32_t slot = 0; slot < head->slots; slot++) {
        if (head->positions[slot] == KV_NO_POSITION)
            continue;
        positions[count] = head->positions[slot];
        sum[count] = head->sum[slot];
        squared[count] = head->squared[slot];
        entropy[count] = head->entropy[slot];
        for (uint32_t j = 0; j < width; j++)
            content[count * width + j] = (float)reference_half(rows[j * head->capacity + slot]);
        value[count] = (float)reference_half(rows[width * head->capacity + slot]);
        output[count] = (float)reference_half(rows[(width + 1) * head->capacity + slot]);
        list[count++] = slot;
    }
    struct network_slots slots = {
        count, scene->seen, scene->budget, positions, sum, squared, entropy, content, value, output};
    network_gather(&scene->network->shape, &slots, inputs);
    return count;
}

/* The plain scores of a head: NaN where no slot is. */
static void plain_scores(const struct scene *scene, uint32_t number, const uint16_t *rows, const float *frozen,
    float standard[STATISTIC_STANDARD_NUMBERS], double *out) {
    static float inputs[SLOTS_MAX * NETWORK_INPUTS_MAX], scores[SLOTS_MAX];
    uint32_t list[SLOTS_MAX], count = gather(scene, number, rows, list, inputs);
    if (frozen[1] != 0)
        memcpy(standard, frozen, 6 * sizeof *standard);
    else
        network_standardise(&scene->network->shape, inputs, count, standard);
    network_normalise(scene->network, network_number(scene, number), standard, count, inputs);
    network_score(scene->network, network_number(scene, number), inputs, count, scores);
    for (uint32_t slot = 0; slot < scene->head[number].slots; slot++)
        out[slot] = NAN;
    for (uint32_t i = 0; i < count; i++)
        out[list[i]] = (double)scores[i];
}

/* Protection and shares, where the stages have them. */
static void plain_stages(const struct scene *scene, uint32_t number, double *scores) {
    const struct scene_head *head = &scene->head[number];
    for (uint32_t i = 1; i < scene->stages_count; i++) {
        double total = 0;
        for (uint32_t slot = 0; slot < head->slots; slot++) {
            uint32_t position = head->positions[slot];
            bool protected = position != KV_NO_POSITION && (position < 2 || position >= scene->seen - 3);
            if (scene->stages[i].kind == STAGE_PROTECT && protected)
                scores[slot] = INFINITY;
            total += scores[slot] < INFINITY ? exp(scores[slot]) : 0;
        }
        for (uint32_t slot = 0; scene->stages[i].kind == STAGE_LOG_SOFTMAX && slot < head->slots; slot++)
            scores[slot] -= scores[slot] < INFINITY ? log(total) : 0;
    }
}

static void write_down(struct scene *scene, const void *bytes, size_t count) {
    scene->written = realloc(scene->written, scene->written_bytes + count + 1);
    memcpy(scene->written + scene->written_bytes, bytes, count);
    scene->written_bytes += count;
}

static void check_head(struct parity *parity, struct scene *scene, uint32_t number, const float *frozen) {
    struct scene_head *head = &scene->head[number];
    const struct network_shape *shape = &scene->network->shape;
    size_t rows_bytes = (shape->content + 2) * (size_t)head->capacity * sizeof(uint16_t);
    uint16_t *rows = parity_download(parity, head->device.content_rows, rows_bytes);
    float *scores = parity_download(parity, scene->score_heads[number].scores, (head->slots + 1) * sizeof(float));
    float *kept = parity_download(parity, head->device.standard, STATISTIC_STANDARD_NUMBERS * sizeof(float));
    float standard[STATISTIC_STANDARD_NUMBERS] = {0};
    double want[SLOTS_MAX + 1], numbers[6];
    check_rows(parity, scene, number, rows);
    plain_scores(scene, number, rows, frozen, standard, want);
    plain_stages(scene, number, want);
    parity_check_close(parity, scores, want, head->slots, 2e-4, 1e-4, "%s F=%u H=%u content=%u slots=%u seen=%u",
        shape->features == FEATURES_PAPER ? "paper" : "content", network_inputs_count(shape), shape->hidden,
        shape->content, head->slots, scene->seen);
    bool standardised = (network_needs(shape) & STATISTIC_STANDARD) != 0 && frozen[1] == 0;
    for (uint32_t i = 0; i < 6; i++)
        numbers[i] = standardised && scene->layers[0].freeze ? (double)standard[i] : (double)frozen[i];
    parity_check_close(parity, kept, numbers, 6, 1e-5, 1e-4, "standard");
    write_down(scene, rows, rows_bytes);
    write_down(scene, scores, head->slots * sizeof *scores);
    write_down(scene, kept, STATISTIC_STANDARD_NUMBERS * sizeof *kept);
    free(rows);
    free(scores);
    free(kept);
}

static void score(struct parity *parity, struct scene *scene) {
    struct error error = {0};
    int code = parity->operations->score(
        parity->backend, &scene->device, scene->layers, scene->pool.layout.layers, scene->heads, &error);
    parity_check_true(parity, code == 0, "score: %s", error.message);
}

static void run(struct parity *parity, bool paper, bool shares) {
    struct scene scene;
    scene_create(parity, &scene, paper);
    if (shares && parity_random(parity, 0, 1) == 0)
        scene.stages[scene.stages_count++] = (struct score_stage){.kind = STAGE_PROTECT};
    if (shares)
        scene.stages[scene.stages_count++] = (struct score_stage){.kind = STAGE_LOG_SOFTMAX};
    bool freeze = parity_random(parity, 0, 1) == 0, known = paper && parity_random(parity, 0, 2) == 0;
    float frozen[STATISTIC_STANDARD_NUMBERS] = {0};
    for (uint32_t i = 0; known && i < 6; i++)
        frozen[i] = (float)parity_uniform(parity, 0.3, 2);
    for (uint32_t i = 0; i < scene.heads_count && known; i++)
        parity->operations->upload(parity->backend, scene.head[i].device.standard, frozen, sizeof frozen);
    for (uint32_t layer = 0; layer < scene.pool.layout.layers; layer++) {
        scene.layers[layer].stages_count = scene.stages_count;
        scene.layers[layer].freeze = freeze;
    }
    score(parity, &scene);
    for (uint32_t i = 0; i < scene.heads_count; i++)
        check_head(parity, &scene, i, frozen);
    parity_check_same(parity, scene.written, scene.written_bytes);
    scene_free(parity, &scene);
}

static void case_content(struct parity *parity) {
    run(parity, false, false);
}

static void case_paper(struct parity *parity) {
    run(parity, true, false);
}

static void case_shares(struct parity *parity) {
    run(parity, parity_random(parity, 0, 1) == 0, true);
}

/* What was frozen counts at later prunes, with other slots. */
/* Some input had the same value in every slot: its deviation is 0, and what rounds it now counts a million times. */
static bool standardised_by_rounding(const float frozen[STATISTIC_STANDARD_NUMBERS]) {
    bool any = false;
    for (int i = 1; i < 6; i += 2)
        any |= frozen[i] > 1e4f;
    return any;
}

static void case_frozen(struct parity *parity) {
    struct scene scene;
    float frozen[HEADS_MAX][STATISTIC_STANDARD_NUMBERS];
    scene_create(parity, &scene, true);
    for (uint32_t layer = 0; layer < scene.pool.layout.layers; layer++)
        scene.layers[layer].freeze = true;
    score(parity, &scene);
    for (uint32_t i = 0; i < scene.heads_count; i++) {
        parity->operations->download(parity->backend, frozen[i], scene.head[i].device.standard, sizeof frozen[i]);
        scene.head[i].slots -= scene.head[i].slots / 3;
        scene.score_heads[i].view.slots = scene.head[i].slots;
        free(scene.head[i].rows);
        size_t bytes = (scene.network->shape.content + 2) * (size_t)scene.head[i].capacity * sizeof(uint16_t);
        scene.head[i].rows = parity_download(parity, scene.head[i].device.content_rows, bytes);
    }
    score(parity, &scene);
    for (uint32_t i = 0; i < scene.heads_count; i++)
        if (!standardised_by_rounding(frozen[i]))
            check_head(parity, &scene, i, frozen[i]);
    scene_free(parity, &scene);
}

/* What slots weigh, for the host. */
static void case_norms(struct parity *parity) {
    struct scene scene;
    struct error error = {0};
    scene_create(parity, &scene, false);
    uint32_t kv_heads = scene.pool.layout.kv_heads;
    for (uint32_t i = 0; i < scene.heads_count; i++) {
        struct scene_head *head = &scene.head[i];
        float values[SLOTS_MAX + 1], outputs[SLOTS_MAX + 1];
        bool all = parity_random(parity, 0, 2) > 0;
        int code = parity->operations->slot_norms(parity->backend, &scene.device, &scene.score_heads[i].view,
            &scene.output[i / kv_heads], i / kv_heads, i % kv_heads, scene.heads, values, all ? outputs : NULL, &error);
        parity_check_true(parity, code == 0, "slot_norms: %s", error.message);
        for (uint32_t slot = 0; code == 0 && slot < head->slots; slot++) {
            bool there = head->positions[slot] != KV_NO_POSITION;
            double key[DIM_MAX], square = 0, want[2] = {0, 0};
            float value[DIM_MAX], got[2] = {values[slot], all ? outputs[slot] : 0};
            if (there)
                read_slot(&scene, head, slot, key, value);
            for (uint32_t c = 0; there && c < scene.pool.layout.head_dim; c++)
                square += (double)value[c] * (double)value[c];
            want[0] = there ? log(1e-6 + sqrt(square)) : 0;
            want[1] = there && all ? log(1e-6 + output_length(&scene, i, value)) : 0;
            parity_check_close(parity, got, want, 2, 2e-3, 1e-5, "norms of slot %u of head %u", slot, i);
        }
    }
    scene_free(parity, &scene);
}

/* A network of another model, and statistics that are not there. */
static void case_refused(struct parity *parity) {
    struct scene scene;
    struct error error = {0};
    scene_create(parity, &scene, false);
    const struct backend_operations *operations = parity->operations;
    struct policy_network *network = scene.network;
    uint32_t layers = scene.pool.layout.layers;
    scene.layers[0].network = NULL;
    parity_check_true(parity,
        operations->score(parity->backend, &scene.device, scene.layers, layers, scene.heads, &error) == ERROR_INVALID,
        "no network is refused");
    scene.layers[0].network = network;
    network->shape.kv_heads++;
    parity_check_true(parity,
        operations->score(parity->backend, &scene.device, scene.layers, layers, scene.heads, &error) == ERROR_INVALID,
        "another model's network is refused");
    network->shape.kv_heads--;
    scene.score_heads[0].statistics.content++;
    parity_check_true(parity,
        operations->score(parity->backend, &scene.device, scene.layers, layers, scene.heads, &error) == ERROR_INVALID,
        "other content is refused");
    scene.score_heads[0].statistics = (struct kv_statistics){.capacity = scene.head[0].capacity};
    if (network_needs(&network->shape) != 0)
        parity_check_true(parity,
            operations->score(parity->backend, &scene.device, scene.layers, layers, scene.heads, &error) ==
                ERROR_INVALID,
            "missing statistics are refused");
    scene_free(parity, &scene);
}

const struct parity_case parity_network_cases[] = {
    {"network content", case_content, 40, 0, NULL},
    {"network paper", case_paper, 20, 0, NULL},
    {"network shares", case_shares, 20, 0, NULL},
    {"network frozen", case_frozen, 5, 0, NULL},
    {"network norms", case_norms, 5, 0, NULL},
    {"network refused", case_refused, 2, 0, NULL},
    {0},
};
