/* SPDX-License-Identifier: Apache-2.0
 *
 * What a prune's scores by the network cost, in a model of SmolLM2-135M's shape (30 layers, 3 KV heads of 64 channels,
 * groups of 3): eight sequences of 7,000 tokens, a quarter kept, sixteen tokens new since the last prune.
 */
#include "policy/network.h"
#include "tests/parity/parity.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum {
    LAYERS = 30,
    KV_HEADS = 3,
    GROUP = 3,
    DIM = 64,
    WIDTH = GROUP * KV_HEADS * DIM,
    SEEN = 7000,
    SLOTS = 1766,
    FRESH = 16,
    CAPACITY = 1776,
    SEQUENCES = 8,
    HEADS = SEQUENCES * LAYERS * KV_HEADS,
    PAGES = CAPACITY / KV_PAGE_SLOTS,
};

struct timing {
    struct parity *parity;
    struct kv_pool pool;
    struct policy_network *network;
    struct tensor output[LAYERS];
    float inverse_freq[DIM / 2];
    struct rope_params rope;
    struct score_stage stages[2];
    uint32_t pages[LAYERS * KV_HEADS * PAGES], positions[SLOTS];
    struct score_head heads[HEADS];
    struct score_layer layers[SEQUENCES * LAYERS];
    uint32_t forget; /* slots a head whose numbers are not known */
};

/* Of slots of which the first few are attended to by every query. */
static uint32_t *draw_sums(struct parity *parity, uint32_t slots, uint32_t shift) {
    uint64_t *sums = parity_host(slots * sizeof *sums);
    for (uint32_t i = 0; i < slots; i++)
        sums[i] = parity_random_bits(parity) >> (i < 4 ? shift - 6 : shift);
    uint32_t *device = parity_upload_sums(parity, sums, slots, slots);
    free(sums);
    return device;
}

static void create_pool(struct parity *parity, struct timing *timing) {
    size_t page_bytes = (2 * KV_PAGE_SLOTS * DIM * 2 + KV_PAGE_SLOTS * sizeof(int32_t) + 63) / 64 * 64;
    size_t pages = (size_t)LAYERS * KV_HEADS * PAGES;
    uint16_t *image = parity_host(pages * page_bytes);
    for (size_t i = 0; i < pages * page_bytes / 2; i++)
        image[i] = (uint16_t)(0x3000 + (parity_random_bits(parity) & 0x83ff));
    timing->pool = (struct kv_pool){.base = parity_upload(parity, image, pages * page_bytes),
        .page_bytes = page_bytes,
        .layout = {.layers = LAYERS, .kv_heads = KV_HEADS, .head_dim = DIM, .format = KV_F16}};
    free(image);
    for (uint32_t i = 0; i < pages; i++)
        timing->pages[i] = i;
    for (uint32_t i = 0; i < SLOTS; i++) /* the last ones are new */
        timing->positions[i] = i < SLOTS - FRESH ? i * 4 : SEEN - SLOTS + i;
}

static void create_model(struct parity *parity, struct timing *timing, struct network_shape shape) {
    struct network_array array;
    timing->network = network_create(&shape, NULL);
    for (uint32_t i = 0; network_array(timing->network, i, &array); i++)
        parity_fill_normal(parity, array.values, array.count, 0.5f);
    for (uint32_t layer = 0; layer < LAYERS; layer++) {
        size_t count = (size_t)WIDTH * WIDTH;
        float *data = parity_host(count * sizeof *data);
        parity_fill_normal(parity, data, count, 0.1f);
        timing->output[layer] = (struct tensor){.name = "output",
            .type = TENSOR_F32,
            .rows = WIDTH,
            .columns = WIDTH,
            .data = data,
            .bytes = count * sizeof *data};
    }
    for (uint32_t pair = 0; pair < DIM / 2; pair++)
        timing->inverse_freq[pair] = (float)pow(10000, -2.0 * pair / DIM);
    timing->rope = (struct rope_params){DIM, timing->inverse_freq};
}

static void create_heads(struct parity *parity, struct timing *timing) {
    uint32_t content = timing->network->shape.content;
    for (uint32_t i = 0; i < HEADS; i++)
        timing->heads[i] =
            (struct score_head){.view = {timing->pages + (size_t)i % (LAYERS * KV_HEADS) * PAGES, SLOTS, 0, NULL},
                .statistics = {.capacity = CAPACITY,
                    .sum = draw_sums(parity, CAPACITY, 36),
                    .squared = draw_sums(parity, CAPACITY, 38),
                    .entropy = parity_upload(parity, NULL, CAPACITY * sizeof(uint16_t)),
                    .content = content,
                    .content_rows = parity_upload(parity, NULL, (content + 2) * CAPACITY * sizeof(uint16_t)),
                    .standard = parity_upload(parity, NULL, STATISTIC_STANDARD_NUMBERS * sizeof(float))},
                .scores = parity_upload(parity, NULL, SLOTS * sizeof(float)),
                .positions = timing->positions};
    for (uint32_t i = 0; i < SEQUENCES * LAYERS; i++)
        timing->layers[i] = (struct score_layer){.heads = timing->heads + (size_t)i * KV_HEADS,
            .layer = i % LAYERS,
            .seen = SEEN,
            .budget = SEEN / 4,
            .stages = timing->stages,
            .stages_count = 2,
            .rope = &timing->rope,
            .output = &timing->output[i % LAYERS],
            .network = timing->network,
            .freeze = true};
}

static void work(void *context) {
    struct timing *timing = context;
    struct error error;
    for (uint32_t i = 0; timing->forget > 0 && i < HEADS; i++) { /* the CPU backend's memory is the host's */
        struct kv_statistics *statistics = &timing->heads[i].statistics;
        memset(statistics->content_rows + (size_t)statistics->content * CAPACITY + SLOTS - timing->forget, 0,
            timing->forget * sizeof(uint16_t));
    }
    if (timing->parity->operations->score(
            timing->parity->backend, &timing->pool, timing->layers, SEQUENCES * LAYERS, GROUP * KV_HEADS, &error) != 0)
        printf("score: %s\n", error.message);
}

static void time_shape(struct parity *parity, struct network_shape shape, const char *name) {
    struct timing *timing = parity_host(sizeof *timing);
    timing->parity = parity;
    timing->stages[0].kind = STAGE_NETWORK;
    timing->stages[1].kind = STAGE_LOG_SOFTMAX;
    create_pool(parity, timing);
    create_model(parity, timing, shape);
    create_heads(parity, timing);
    const uint32_t forget[] = {0, FRESH, SLOTS};
    for (uint32_t i = 0; i < 3; i++) {
        timing->forget = forget[i];
        work(timing);
        double seconds =
            parity_time(parity, work, timing, 0, 0, "%s, %u of %u new, %u heads", name, forget[i], SLOTS, HEADS);
        printf("%51s%.2f ns a slot\n", "", 1e9 * seconds / HEADS / SLOTS);
    }
    for (uint32_t i = 0; i < HEADS; i++) {
        parity_release(parity, timing->heads[i].statistics.sum);
        parity_release(parity, timing->heads[i].statistics.squared);
        parity_release(parity, timing->heads[i].statistics.entropy);
        parity_release(parity, timing->heads[i].statistics.content_rows);
        parity_release(parity, timing->heads[i].statistics.standard);
        parity_release(parity, timing->heads[i].scores);
    }
    for (uint32_t layer = 0; layer < LAYERS; layer++)
        free((void *)timing->output[layer].data);
    parity_release(parity, timing->pool.base);
    network_release(timing->network);
    free(timing);
}

static void time_content(struct parity *parity) {
    struct network_shape shape = {FEATURES_CONTENT, (1u << INPUT_KINDS) - 1, 4, 32, LAYERS, KV_HEADS, DIM};
    time_shape(parity, shape, "content 4, hidden 32");
}

static void time_paper(struct parity *parity) {
    struct network_shape shape = {FEATURES_PAPER,
        1u << INPUT_MEAN | 1u << INPUT_VALUE_NORM | 1u << INPUT_DEVIATION | 1u << INPUT_ENTROPY | 1u << INPUT_POSITION,
        0, 128, LAYERS, KV_HEADS, DIM};
    time_shape(parity, shape, "paper, hidden 128");
}

const struct parity_case parity_network_timed[] = {
    {"network content", NULL, 0, 0, time_content},
    {"network paper", NULL, 0, 0, time_paper},
    {0},
};
