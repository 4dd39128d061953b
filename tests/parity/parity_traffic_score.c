/* SPDX-License-Identifier: Apache-2.0
 *
 * What the kernels of cuda/score_*.cu and select.cu move. Heads as after a long prompt: slots in order of position.
 */
#include "tests/parity/parity_traffic.h"

#include "cuda/preference.h"
#include "cuda/score.h"
#include "policy/network.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

enum { UNITS_MAX = 16, WINDOW = 32, CONTENT = 4, PAPER_HIDDEN = 64 };

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
            .standard = parity_upload(parity, NULL, STATISTIC_STANDARD_NUMBERS * sizeof(float)),
            .head_rows = parity_upload(parity, NULL, (size_t)WINDOW * scene->group * slots * sizeof(uint16_t)),
            .outputs = parity_upload(parity, NULL, (size_t)WINDOW * scene->group * scene->dim * sizeof(float)),
            .output_norm = parity_upload(parity, NULL, slots * sizeof(float))},
    };
    free(sums);
    free(entropy);
}

static void create_network(struct parity *parity, struct scene *scene, bool paper) {
    const uint32_t of_paper = 1u << INPUT_MEAN | 1u << INPUT_DEVIATION | 1u << INPUT_VALUE_NORM | 1u << INPUT_POSITION;
    const struct network_shape shape = {.features = paper ? FEATURES_PAPER : FEATURES_CONTENT,
        .inputs = paper ? of_paper : (1u << INPUT_KINDS) - 1,
        .content = paper ? 0 : CONTENT,
        .hidden = paper ? PAPER_HIDDEN : 32,
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
    struct kv_layout layout = {.layers = layers, .kv_heads = kv_heads, .head_dim = dim, .format = KV_F16};
    uint32_t units = layers * kv_heads, pages = units * slots / KV_PAGE_SLOTS;
    pages += pages % 7 == 0; /* steps of 7 reach every page */
    *scene = (struct scene){.layers = layers, .kv_heads = kv_heads, .group = group, .slots = slots, .dim = dim};
    scene->pool = (struct kv_pool){.page_bytes = kv_page_bytes(&layout), .layout = layout};
    char *image = parity_host(pages * scene->pool.page_bytes);
    for (uint32_t i = 0; i < units; i++)
        create_unit(parity, scene, i, image, pages);
    scene->pool.base = parity_upload(parity, image, pages * scene->pool.page_bytes);
    free(image);
    uint32_t rows = 64, columns = kv_heads * group * dim;
    float *data = parity_host((size_t)rows * columns * sizeof *data);
    parity_fill_normal(parity, data, (size_t)rows * columns, 0.1f);
    scene->output = (struct tensor){.name = "output",
        .type = TENSOR_F32,
        .rows = rows,
        .columns = columns,
        .data = data,
        .bytes = (size_t)rows * columns * sizeof *data};
    for (uint32_t pair = 0; pair < dim / 2; pair++)
        scene->inverse_freq[pair] = (float)pow(10000, -2.0 * pair / dim);
    scene->rope = (struct rope_params){dim, scene->inverse_freq};
    create_network(parity, scene, false);
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
            statistics->standard, statistics->head_rows, statistics->outputs, statistics->output_norm};
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

/* Probabilities of the window's queries, of slots that are not protected. */
static void check_preference(struct parity *parity, struct scene *scene) {
    double units = scene->layers * scene->kv_heads, parts = scene->kv_heads * scene->slots / (double)PREFERENCE_SLOTS;
    double entropy[UNITS_MAX], variance[UNITS_MAX];
    traffic_begin(parity);
    parity->operations->window_preference(parity->backend, &scene->pool, scene->score_layers, scene->layers,
        scene->kv_heads * scene->group, entropy, variance);
    traffic_check(parity, "preference_slots_kernel",
        units * scene->slots * (position + page + WINDOW * scene->group * sizeof(uint16_t)), "%.0f x %u slots", units,
        scene->slots);
    traffic_check(parity, "preference_layers_kernel", scene->layers * (parts * sizeof(struct preference) + 32),
        "%.0f parts", parts);
}

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
    double chunks = (slots + SCORE_KEYS_CHUNK - 1) / SCORE_KEYS_CHUNK;
    traffic_check(parity, "score_anchor",
        units * ((chunks + 1) * dim * number + (double)sizeof(struct cuda_score_unit)), "%.0f chunks, d=%u", chunks,
        dim);
    CHECK("score_keys", key + each, "key difference");
    score_one(parity, &scene, STAGE_TIMES_VALUE_NORM, 0, 0);
    CHECK("score_value_norms", key + each + number, "value norms");
    uint32_t worst[UNITS_MAX];
    for (uint32_t i = 0; i < units; i++)
        scene.heads[i].worst = &worst[i];
    score_one(parity, &scene, STAGE_POSITION, 0, 0);
    CHECK("score_worst", each, "worst");
    float *scores[UNITS_MAX];
    for (uint32_t i = 0; i < units; i++) {
        scores[i] = scene.heads[i].scores;
        scene.heads[i].scores = NULL;
    }
    check_preference(parity, &scene);
    const struct score_stage alone[] = {{STAGE_SUM, 0, 0}, {STAGE_PROTECT, 0, 0}};
    score(parity, &scene, alone, 2);
    CHECK("score_chain_worst", position + page + sizeof(uint32_t), "worst of sums");
    for (uint32_t i = 0; i < units; i++)
        scene.heads[i].scores = scores[i];
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

/* The paper's: 32 slots go through both layers at a time. */
static void case_paper(struct parity *parity) {
    struct scene scene;
    scene_create(parity, &scene, 2, 2, 2, 2048, 64);
    network_release(scene.network);
    create_network(parity, &scene, true);
    double units = scene.layers * scene.kv_heads, inputs = network_inputs_count(&scene.network->shape);
    for (uint32_t layer = 0; layer < scene.layers; layer++)
        scene.score_layers[layer].network = scene.network;
    for (uint32_t i = 0; i < units; i++)
        scene.heads[i].statistics.content = 0;
    double weights = ((inputs + PAPER_HIDDEN + 7) * PAPER_HIDDEN + 1) * number;
    score_one(parity, &scene, STAGE_NETWORK, 0, 0);
    CHECK("score_standard", position + page + 2 * sizeof(uint32_t) + 2, "standard");
    CHECK("score_paper", position + page + 2 * sizeof(uint32_t) + 2 + number + weights / 32, "the paper's network");
    scene_free(parity, &scene);
}

/* ---- stages with matrices ---- */

/* Bytes that a tile of slots reads of a matrix [dim][dim, padded], which rows of 64 read as far as they go or whole. */
static double factor_bytes(uint32_t dim, bool triangular) {
    double bytes = 0;
    for (uint32_t row = 0; row < dim; row += 64)
        bytes += (triangular ? fmin(row + 64, dim) : dim) * 64 * number;
    return bytes;
}

/* What is made of W_o once: its products by pairs of heads (each with itself: factors). Blocks have tiles of 64 by 64
 * channels. A factor takes a step a channel, in which the triangle that is left is read and written, in shared memory
 * from any bank on. */
static void check_products(struct parity *parity, const struct scene *scene, double heads, double pairs) {
    double dim = scene->dim, width = scene->output.rows, tiles = dim / 64, triangles = 0;
    for (uint32_t j = 0; j < scene->dim; j++)
        triangles += j * (j + 1) / 2.0;
    traffic_check(parity, "score_pairs", pairs * tiles * tiles * (2 * 64 * width * number + 64 * 64 * sizeof(double)),
        "%.0f pairs, d=%.0f", pairs, dim);
    /* A factor's numbers are turned: each is written to a sector of its own. */
    traffic_check_atomics(parity, "score_factor",
        heads * (2 * triangles * sizeof(double) + dim * (dim + 1) / 2 * (2 * sizeof(double) + 32)), 1.2, "d=%.0f", dim);
    traffic_check(parity, "score_gram", (pairs - heads) * dim * dim * (sizeof(double) + number), "d=%.0f", dim);
}

/* What tiles of 64 slots read of matrices is read anew by each: the second-level cache has them. */
static void check_matrices(struct parity *parity, uint32_t slots, uint32_t dim) {
    struct scene scene;
    struct query_moments moments[UNITS_MAX];
    enum { GROUP = 2, KV_HEADS = 2, TILE = 64 };
    scene_create(parity, &scene, 1, KV_HEADS, GROUP, slots, dim);
    double units = scene.layers * scene.kv_heads, heads = KV_HEADS * GROUP, width = scene.output.rows, value = dim * 2;
    double each = position + page + number, lower = factor_bytes(dim, true), full = factor_bytes(dim, false);
    double row = WINDOW * 2; /* probabilities of a slot and query head */
    for (uint32_t layer = 0; layer < scene.layers; layer++) {
        moments[layer].count = parity_upload(parity, &(uint32_t){100}, sizeof(uint32_t));
        moments[layer].sum = parity_upload(parity, NULL, heads * dim * sizeof(double));
        moments[layer].outer = parity_upload(parity, NULL, heads * dim * dim * sizeof(double));
        scene.score_layers[layer].moments = moments[layer];
    }
    const struct score_stage norms[] = {{STAGE_WINDOW_SUM, 0, 0}, {STAGE_TIMES_OUTPUT_NORM, 0.1f, 0}};
    score(parity, &scene, norms, 2);
    CHECK("score_output_list", each, "slots without norms");
    traffic_check(
        parity, "score_turn", 2 * width * scene.output.columns * number, "%.0f x %u", width, scene.output.columns);
    CHECK("score_output_norms", value + position + page + 2 * number + GROUP * dim * width * number / TILE, "norms");

    score_one(parity, &scene, STAGE_LAPROX_HEAD, 0, 0);
    check_products(parity, &scene, heads, heads + units * GROUP * (GROUP - 1) / 2);
    traffic_check(parity, "score_window_norm",
        scene.layers * (heads * dim * width * number + width / 64 * heads * WINDOW * dim * number), "outputs, d=%u",
        dim);
    /* A pair of heads reads the probabilities of both. */
    CHECK("score_laprox", value + each + (GROUP * lower + full) / TILE + GROUP * GROUP * row, "laprox of groups");
    score_one(parity, &scene, STAGE_LAPROX, 0, 0);
    double pairs = heads * (heads - 1) / 2, tiles = KV_HEADS * (KV_HEADS + 1) / 2;
    traffic_check(parity, "score_laprox",
        scene.layers * (double)slots *
            (tiles * value + KV_HEADS * each + (heads * lower + pairs * full) / TILE + heads * heads * row),
        "laprox of layers, d=%u", dim);

    score_one(parity, &scene, STAGE_DROP_ERROR, 0.3f, 0);
    traffic_check(parity, "score_drop_outputs", units * GROUP * (WINDOW * dim * number + dim * TILE * number + lower),
        "outputs, d=%u", dim);
    CHECK("score_drop_excess", GROUP * (row + position + page), "sums of probabilities");
    CHECK("score_drop", value + each + GROUP * ((lower + dim * TILE * number) / TILE + row), "errors");

    score_one(parity, &scene, STAGE_EXPECTED_ATTENTION, 0.01f, 512);
    /* Of the triangle, rows from their own pair of channels on; the mean and the covariance are written. */
    traffic_check(parity, "score_expect_query",
        units * GROUP * ((dim / 2 + 1) * dim + dim) * sizeof(double) + units * GROUP * (dim + 1) * dim * number,
        "expected queries, d=%u", dim);
    CHECK("score_expect_logits", value + page + GROUP * ((lower + dim * number) / TILE + number), "logits");
    CHECK("score_expect_shares", position + page + GROUP * number + number, "shares");
    for (uint32_t layer = 0; layer < scene.layers; layer++) {
        parity_release(parity, moments[layer].count);
        parity_release(parity, moments[layer].sum);
        parity_release(parity, moments[layer].outer);
    }
    scene_free(parity, &scene);
}

static void case_matrices(struct parity *parity) {
    check_matrices(parity, 512, 64);
    check_matrices(parity, 512, 128);
}

/* restkv's mean: the best slots of each query, then all slots along positions. */
static void case_adaptive(struct parity *parity) {
    struct scene scene;
    scene_create(parity, &scene, 2, 2, 2, 2048, 64);
    double units = scene.layers * scene.kv_heads, each = position + page + number;
    for (uint32_t i = 0; i < units; i++) {
        uint16_t *rows = parity_host((size_t)WINDOW * scene.slots * sizeof *rows);
        for (size_t n = 0; n < (size_t)WINDOW * scene.slots; n++)
            rows[n] = float_to_half((float)parity_uniform(parity, 0, 1));
        parity->operations->upload(
            parity->backend, scene.heads[i].statistics.window_rows, rows, (size_t)WINDOW * scene.slots * sizeof *rows);
        free(rows);
    }
    const struct score_stage stages[] = {{STAGE_WINDOW_SUM, 0, 0}, {STAGE_PROTECT, 0, 0}, {STAGE_POOL_ADAPTIVE, 0, 0}};
    score(parity, &scene, stages, 3);
    CHECK_ATOMICS("score_best_sums", WINDOW * (position + page + 2), 20, "best of queries");
    CHECK_ATOMICS("score_pool_mean", each + number, 3, "means");
    scene_free(parity, &scene);
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
    float *shared = scene.heads[0].scores; /* of all rows at last: their slots tie */
    for (uint32_t scope = SCOPE_HEAD; scope <= SCOPE_MODEL + 1; scope++) {
        for (uint32_t i = 0; i < units && scope > SCOPE_MODEL; i++)
            rows[i].scores = shared, rows[i].budget = scene.slots / KEEP + (i == 0); /* of four that tie one stays */
        const struct selection selection = {
            rows, (uint32_t)units, scope > SCOPE_MODEL ? SCOPE_MODEL : (enum policy_scope)scope, 0.5f};
        traffic_begin(parity);
        int code = parity->operations->select(parity->backend, &scene.pool, &selection, 1, &error);
        parity_check_true(parity, code == 0, "select: %s", error.message);
        CHECK_ATOMICS("select_rows", each + (scope == SCOPE_HEAD ? bit : 0), 20, "rows");
        if (scope == SCOPE_HEAD)
            continue;
        /* Scores differ after three digits of 11 bits at most, slots of a row after all six; each also fills and
         * empties counters. */
        if (scope > SCOPE_MODEL)
            CHECK("select_ties", each, "ties");
        CHECK_ATOMICS(
            "select_digit", (scope > SCOPE_MODEL ? 6 : 3) * (each + 2.0 * 2048 * number / scene.slots), 20, "digits");
        CHECK("select_keep", each + bit, "bits of slots that stay");
    }
    scene_free(parity, &scene);
}

const struct parity_case parity_traffic_score_cases[] = {
    {"traffic score stages", case_stages, 1, 0, NULL},
    {"traffic score network", case_network, 1, 0, NULL},
    {"traffic score paper", case_paper, 1, 0, NULL},
    {"traffic score matrices", case_matrices, 1, 0, NULL},
    {"traffic score adaptive", case_adaptive, 1, 0, NULL},
    {"traffic select", case_select, 1, 0, NULL},
    {0},
};
