/* SPDX-License-Identifier: Apache-2.0
 *
 * What the kernels of cuda/score_*.cu and select.cu move. Heads as after a long prompt: slots in order of position.
 */
#include "tests/parity/parity_traffic.h"

#include "cuda/score.h"
#include "policy/network.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

enum { UNITS_MAX = 16, WINDOW = 32, CONTENT = 4 };

struct scene {
    struct kv_pool pool;
    uint32_t layers, kv_heads, group, slots, dim;
    uint32_t *pages[UNITS_MAX];
    struct score_head heads[UNITS_MAX];
    struct score_layer score_layers[UNITS_MAX];
    struct score_stage stages[SCORE_STAGES_MAX];
    struct tensor output;
    struct rope_params rope;
    float inverse_freq[128];
    struct policy_network *network;
};

/* Normal keys and values, positions in order. */
static void fill_page(struct parity *parity, const struct scene *scene, char *page, uint32_t first) {
    uint16_t *numbers = (uint16_t *)page;
    size_t count = (size_t)2 * scene->dim * KV_PAGE_SLOTS;
    for (size_t i = 0; i < count; i++)
        numbers[i] = float_to_half(parity_normal(parity));
    for (uint32_t place = 0; place < KV_PAGE_SLOTS; place++)
        ((int32_t *)(page + count * sizeof *numbers))[place] = (int32_t)(first + place);
}

static void create_unit(struct parity *parity, struct scene *scene, uint32_t unit, char *image, uint32_t pages) {
    uint32_t slots = scene->slots, each = slots / KV_PAGE_SLOTS;
    scene->pages[unit] = parity_host(each * sizeof(uint32_t));
    for (uint32_t i = 0; i < each; i++) {
        scene->pages[unit][i] = (uint32_t)(((uint64_t)unit * each + i) * 7 % pages);
        fill_page(parity, scene, image + scene->pages[unit][i] * scene->pool.page_bytes, i * KV_PAGE_SLOTS);
    }
    uint32_t *sums = parity_host(2 * (size_t)slots * sizeof *sums); /* small ones: the second plane is 0 */
    uint16_t *entropy = parity_host(slots * sizeof *entropy);
    for (uint32_t i = 0; i < slots; i++) {
        sums[i] = (uint32_t)(parity_random_bits(parity) >> 34);
        entropy[i] = 0x3c00;
    }
    scene->heads[unit] = (struct score_head){
        .view = {.pages = scene->pages[unit], .slots = slots},
        .sinks = 4,
        .recent_from = slots - 32,
        .scores = parity_upload(parity, NULL, slots * sizeof(float)),
        .statistics = {.capacity = slots,
            .window = WINDOW,
            .content = CONTENT,
            .sum = parity_upload(parity, sums, 2 * (size_t)slots * sizeof *sums),
            .squared = parity_upload(parity, sums, 2 * (size_t)slots * sizeof *sums),
            .entropy = parity_upload(parity, entropy, slots * sizeof *entropy),
            .window_sum = parity_upload(parity, sums, slots * sizeof(uint32_t)),
            .window_rows = parity_upload(parity, NULL, (size_t)WINDOW * slots * sizeof(uint16_t)),
            .above = parity_upload(parity, NULL, slots * STATISTIC_ABOVE_BITS / 8),
            .content_rows = parity_upload(parity, NULL, (CONTENT + 2) * (size_t)slots * sizeof(uint16_t)),
            .standard = parity_upload(parity, NULL, STATISTIC_STANDARD_NUMBERS * sizeof(float))},
    };
    free(sums);
    free(entropy);
}

static void create_network(struct parity *parity, struct scene *scene) {
    const struct network_shape shape = {.features = FEATURES_CONTENT,
        .inputs = (1u << INPUT_KINDS) - 1,
        .content = CONTENT,
        .hidden = 32,
        .layers = scene->layers,
        .kv_heads = scene->kv_heads,
        .head_dim = scene->dim};
    struct network_array array;
    struct error error = {0};
    scene->network = network_create(&shape, &error);
    if (!parity_check_true(parity, scene->network != NULL, "network: %s", error.message))
        exit(1);
    for (uint32_t i = 0; network_array(scene->network, i, &array); i++)
        parity_fill_normal(parity, array.values, array.count, 0.5f);
}

static void scene_create(struct parity *parity, struct scene *scene, uint32_t layers, uint32_t kv_heads, uint32_t group,
    uint32_t slots, uint32_t dim) {
    struct kv_layout layout = {layers, kv_heads, dim, KV_F16};
    uint32_t units = layers * kv_heads, pages = units * slots / KV_PAGE_SLOTS;
    pages += pages % 7 == 0; /* steps of 7 reach every page */
    *scene = (struct scene){.layers = layers, .kv_heads = kv_heads, .group = group, .slots = slots, .dim = dim};
    scene->pool = (struct kv_pool){NULL, kv_page_bytes(&layout), layout};
    char *image = parity_host(pages * scene->pool.page_bytes);
    for (uint32_t i = 0; i < units; i++)
        create_unit(parity, scene, i, image, pages);
    scene->pool.base = parity_upload(parity, image, pages * scene->pool.page_bytes);
    free(image);
    uint32_t rows = 64, columns = kv_heads * group * dim;
    float *data = parity_host((size_t)rows * columns * sizeof *data);
    parity_fill_normal(parity, data, (size_t)rows * columns, 0.1f);
    scene->output = (struct tensor){"output", TENSOR_F32, rows, columns, data, (size_t)rows * columns * sizeof *data};
    for (uint32_t pair = 0; pair < dim / 2; pair++)
        scene->inverse_freq[pair] = (float)pow(10000, -2.0 * pair / dim);
    scene->rope = (struct rope_params){dim, scene->inverse_freq};
    create_network(parity, scene);
    for (uint32_t layer = 0; layer < layers; layer++)
        scene->score_layers[layer] = (struct score_layer){.heads = scene->heads + (size_t)layer * kv_heads,
            .layer = layer,
            .seen = slots + 1,
            .budget = slots / 2,
            .stages = scene->stages,
            .window = WINDOW,
            .output = &scene->output,
            .rope = &scene->rope,
            .network = scene->network};
}

static void scene_free(struct parity *parity, struct scene *scene) {
    for (uint32_t i = 0; i < scene->layers * scene->kv_heads; i++) {
        const struct kv_statistics *statistics = &scene->heads[i].statistics;
        void *device[] = {scene->heads[i].scores, statistics->sum, statistics->squared, statistics->entropy,
            statistics->window_sum, statistics->window_rows, statistics->above, statistics->content_rows,
            statistics->standard};
        for (size_t j = 0; j < sizeof device / sizeof device[0]; j++)
            parity_release(parity, device[j]);
        free(scene->pages[i]);
    }
    parity_release(parity, scene->pool.base);
    free((void *)scene->output.data);
    network_release(scene->network);
}

static void score(struct parity *parity, struct scene *scene, const struct score_stage *stages, uint32_t count) {
    struct error error = {0};
    memcpy(scene->stages, stages, count * sizeof *stages);
    for (uint32_t layer = 0; layer < scene->layers; layer++)
        scene->score_layers[layer].stages_count = count;
    traffic_begin(parity);
    int code = parity->operations->score(
        parity->backend, &scene->pool, scene->score_layers, scene->layers, scene->kv_heads * scene->group, &error);
    parity_check_true(parity, code == 0, "score: %s", error.message);
}

static void score_one(struct parity *parity, struct scene *scene, enum score_stage_kind kind, float x, uint32_t n) {
    const struct score_stage stage = {kind, x, n};
    score(parity, scene, &stage, 1);
}

#define CHECK(kernel, slot_bytes, what)                                                                                \
    traffic_check(parity, kernel, units *scene.slots *(double)(slot_bytes), what " of %u x %u slots, d=%u",            \
        scene.layers *scene.kv_heads, scene.slots, scene.dim)
#define CHECK_ATOMICS(kernel, slot_bytes, passes, what)                                                                \
    traffic_check_atomics(parity, kernel, units *scene.slots *(double)(slot_bytes), passes,                            \
        what " of %u x %u slots, d=%u", scene.layers *scene.kv_heads, scene.slots, scene.dim)

/* A position, a score, and the slot's part of a page number. */
static const double position = sizeof(int32_t), number = sizeof(float), page = sizeof(uint32_t) / 16.0;

static void check_stages(struct parity *parity, uint32_t layers, uint32_t kv_heads, uint32_t slots, uint32_t dim) {
    struct scene scene;
    scene_create(parity, &scene, layers, kv_heads, 2, slots, dim);
    double units = scene.layers * scene.kv_heads, key = scene.dim * 2, each = position + page + number;
    const struct score_stage pool[] = {
        {STAGE_WINDOW_SUM, 0, 0}, {STAGE_PROTECT, 0, 0}, {STAGE_POOL_MAX, 0, 7}, {STAGE_PROTECT_BEST, 0, 0}};
    score_one(parity, &scene, STAGE_SUM, 0, 0);
    CHECK("score_chain", each + sizeof(uint32_t), "sum");
    score_one(parity, &scene, STAGE_WINDOW_SPREAD, 200, 0);
    CHECK("score_chain", each + number + WINDOW * 2, "window spread");
    score_one(parity, &scene, STAGE_ABOVE, 0, 0);
    CHECK("score_chain", each + STATISTIC_ABOVE_BITS / 8.0, "above");
    score(parity, &scene, pool, 4);
    CHECK("score_chain", each + number, "window sum and protection");
    CHECK_ATOMICS("score_pool_max", each + number, 3, "maximum");
    CHECK_ATOMICS("score_protect_best", each + number / 2, 20, "best half");
    score_one(parity, &scene, STAGE_LAYER_MEAN, 0, 0);
    CHECK("score_layer_mean", 2 * number, "mean");
    score_one(parity, &scene, STAGE_LOG_SOFTMAX, 0, 0);
    CHECK("score_log_softmax", 2 * number, "shares");
    score_one(parity, &scene, STAGE_KEY_NORM, 0, 0);
    CHECK("score_keys", key + each, "key norm");
    score_one(parity, &scene, STAGE_KEY_DIFFERENCE, 0, 0);
    CHECK("score_directions", key + position + page, "directions");
    CHECK("score_keys", key + each, "key difference");
    score_one(parity, &scene, STAGE_TIMES_VALUE_NORM, 0, 0);
    CHECK("score_value_norms", key + each + number, "value norms");
    uint32_t worst[UNITS_MAX];
    for (uint32_t i = 0; i < units; i++)
        scene.heads[i].worst = &worst[i];
    score_one(parity, &scene, STAGE_POSITION, 0, 0);
    CHECK("score_worst", each, "worst");
    scene_free(parity, &scene);
}

static void case_stages(struct parity *parity) {
    check_stages(parity, 4, 4, 1024, 64);
    check_stages(parity, 1, 2, 6400, 128);
}

/* Everything is computed once of all slots, then scores of all. */
static void check_network(struct parity *parity, uint32_t slots, uint32_t dim) {
    struct scene scene;
    scene_create(parity, &scene, 2, 2, 2, slots, dim);
    double units = scene.layers * scene.kv_heads, rows = (CONTENT + 2) * 2, inputs = INPUT_KINDS + CONTENT;
    /* Of 64 slots: the factors of the group, padded, in columns as far as a row's tile of 64 goes, and C. */
    double padded = (dim + 63) / 64 * 64, factors = 0;
    for (uint32_t row = 0; row < dim; row += 64)
        factors += 2 * fmin(row + 64, dim) * 64 * number;
    double weights = (32 * (inputs + 2) + 3 * inputs) * number;
    score_one(parity, &scene, STAGE_NETWORK, 0, 0);
    CHECK("score_numbers_list", position + page + 2, "list");
    CHECK("score_numbers", 2 * dim * 2 + position + page + 2 + rows + (factors + dim * 16 * number) / 64, "numbers");
    CHECK("score_network", 2 * sizeof(uint32_t) + 2 + rows + position + page + number + weights / 1024, "network");
    parity_check_true(parity, padded >= dim, "rows are padded");
    scene_free(parity, &scene);
}

static void case_network(struct parity *parity) {
    check_network(parity, 2048, 64);
    check_network(parity, 1024, 128);
}

/* Rows that compete: every launch reads scores and positions once. */
static void case_select(struct parity *parity) {
    enum { KEEP = 2 };
    struct scene scene;
    struct selected_row rows[UNITS_MAX];
    struct error error = {0};
    scene_create(parity, &scene, 2, 2, 1, 4096, 64);
    double units = scene.layers * scene.kv_heads, each = position + page + number, bit = 1 / 8.0;
    float *host = parity_host(scene.slots * sizeof *host);
    for (uint32_t i = 0; i < units; i++) {
        parity_fill_normal(parity, host, scene.slots, 1);
        parity->operations->upload(parity->backend, scene.heads[i].scores, host, scene.slots * sizeof *host);
        rows[i] = (struct selected_row){.view = scene.heads[i].view,
            .scores = scene.heads[i].scores,
            .layer = i / 2,
            .head = i % 2,
            .budget = scene.slots / KEEP};
    }
    free(host);
    for (uint32_t scope = SCOPE_HEAD; scope <= SCOPE_MODEL; scope++) {
        const struct selection selection = {rows, (uint32_t)units, (enum policy_scope)scope, 0.5f};
        traffic_begin(parity);
        int code = parity->operations->select(parity->backend, &scene.pool, &selection, 1, &error);
        parity_check_true(parity, code == 0, "select: %s", error.message);
        CHECK_ATOMICS("select_rows", each + (scope == SCOPE_HEAD ? bit : 0), 20, "rows");
        if (scope == SCOPE_HEAD)
            continue;
        /* Scores differ after three digits of 11 bits at most; each also fills and empties counters. */
        CHECK_ATOMICS("select_digit", 3 * (each + 2.0 * 2048 * number / scene.slots), 20, "digits");
        CHECK("select_keep", each + bit, "bits of slots that stay");
    }
    scene_free(parity, &scene);
}

const struct parity_case parity_traffic_score_cases[] = {
    {"traffic score stages", case_stages, 1, 0, NULL},
    {"traffic score network", case_network, 1, 0, NULL},
    {"traffic select", case_select, 1, 0, NULL},
    {0},
};
