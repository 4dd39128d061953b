/* SPDX-License-Identifier: Apache-2.0
 *
 * What stages cost, in a model of SmolLM2-135M's shape (30 layers, 3 KV heads of 64 channels, groups of 3): a quarter
 * of 7,168 tokens kept. Cheap stages for eight sequences, as in a decode step; those with products per slot for one.
 * Contents are random and repeat from sequence to sequence, what stages write and sums are each head's own.
 */
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
    SLOTS = 1792,
    SEEN = 7168,
    WINDOW = 32,
    SEQUENCES = 8,
    PAGES = SLOTS / KV_PAGE_SLOTS,
};

struct timed {
    const char *name;
    struct score_stage stages[SCORE_STAGES_MAX];
    uint32_t count, sequences;
    bool ordered; /* slots are in order of position */
    bool listed;  /* the host knows positions and order */
    bool worst;   /* only the slots that go are asked for */
};

static const struct timed pipelines[] = {
    {"position, protect", {{STAGE_POSITION, 0, 0}, {STAGE_PROTECT, 0, 0}}, 2, SEQUENCES, true, true, false},
    {"sum, protect (h2o)", {{STAGE_SUM, 0, 0}, {STAGE_PROTECT, 0, 0}}, 2, SEQUENCES, true, true, false},
    {"sum, protect, positions from pages", {{STAGE_SUM, 0, 0}, {STAGE_PROTECT, 0, 0}}, 2, SEQUENCES, true, false,
        false},
    {"window sum, protect, pool 7 (snapkv)", {{STAGE_WINDOW_SUM, 0, 0}, {STAGE_PROTECT, 0, 0}, {STAGE_POOL_MAX, 0, 7}},
        3, SEQUENCES, true, true, false},
    {"the same, slots out of order", {{STAGE_WINDOW_SUM, 0, 0}, {STAGE_PROTECT, 0, 0}, {STAGE_POOL_MAX, 0, 7}}, 3,
        SEQUENCES, false, true, false},
    {"the same, the slot that goes alone", {{STAGE_WINDOW_SUM, 0, 0}, {STAGE_PROTECT, 0, 0}, {STAGE_POOL_MAX, 0, 7}}, 3,
        SEQUENCES, false, true, true},
    {"the same, order sorted here", {{STAGE_WINDOW_SUM, 0, 0}, {STAGE_PROTECT, 0, 0}, {STAGE_POOL_MAX, 0, 7}}, 3, 1,
        false, false, false},
    {"random", {{STAGE_RANDOM, 0, 0}}, 1, SEQUENCES, true, true, false},
    {"sum per query", {{STAGE_SUM_PER_QUERY, 0, 0}}, 1, SEQUENCES, true, true, false},
    {"above, protect (scissorhands)", {{STAGE_ABOVE, 0, 0}, {STAGE_PROTECT, 0, 0}}, 2, SEQUENCES, true, true, false},
    {"window sum, layer mean (tova)", {{STAGE_WINDOW_SUM, 0, 0}, {STAGE_LAYER_MEAN, 0, 0}}, 2, SEQUENCES, true, true,
        false},
    {"window spread (cake)", {{STAGE_WINDOW_SPREAD, 200, 0}}, 1, SEQUENCES, true, true, false},
    {"key norm", {{STAGE_KEY_NORM, 0, 0}}, 1, SEQUENCES, true, true, false},
    {"key difference", {{STAGE_KEY_DIFFERENCE, 0, 0}}, 1, SEQUENCES, true, true, false},
    {"window sum, protect best", {{STAGE_WINDOW_SUM, 0, 0}, {STAGE_PROTECT_BEST, 0, 0}}, 2, SEQUENCES, true, true,
        false},
    {"times output norm, all known", {{STAGE_POSITION, 0, 0}, {STAGE_TIMES_OUTPUT_NORM, 0, 0}}, 2, SEQUENCES, true,
        true, false},
    {"expected attention", {{STAGE_EXPECTED_ATTENTION, 0.01f, 512}}, 1, 1, true, true, false},
    {"times value norm", {{STAGE_TIMES_VALUE_NORM, 0, 0}}, 1, 1, true, true, false},
    {"laprox (per slot of a KV head)", {{STAGE_LAPROX, 0, 0}}, 1, 1, true, true, false},
    {"laprox per head", {{STAGE_LAPROX_HEAD, 0, 0}}, 1, 1, true, true, false},
    {"drop error", {{STAGE_DROP_ERROR, 0.3f, 0}}, 1, 1, true, true, false},
    {"pool adaptive", {{STAGE_POOL_ADAPTIVE, 0, 0}}, 1, 1, true, true, false},
};

struct timing {
    struct parity *parity;
    struct kv_pool pool;
    uint32_t *pages, *positions[2], *order[2]; /* in order, and not */
    struct kv_statistics shared;
    struct query_moments moments;
    struct rope_params rope;
    float inverse_freq[DIM / 2];
    struct tensor output[LAYERS];
    struct score_head *heads;
    struct score_layer *layers;
    uint32_t count;
    uint32_t worst[SEQUENCES * LAYERS * KV_HEADS];
    bool forget_norms;
};

/* A quarter of all positions; in order, or as a prune leaves them: those that were in the front part stay, the others
 * fill the gaps, and a hundred slots were reused since. */
static void draw_positions(struct parity *parity, struct timing *timing) {
    uint32_t kept = 0, front = 0, next = 0, *in = timing->positions[0], *out = timing->positions[1];
    for (uint32_t position = 0; position < SEEN; position++) {
        if (parity_random(parity, 0, SEEN - position - 1) < (uint32_t)SLOTS - kept)
            in[kept++] = position;
    }
    memset(out, 0xff, SLOTS * sizeof *out);
    for (; in[front] < SLOTS; front++)
        out[in[front]] = in[front];
    for (uint32_t slot = 0; slot < SLOTS; slot++) {
        if (out[slot] == UINT32_MAX)
            out[slot] = in[front + next++];
    }
    for (uint32_t i = 0; i < 100; i++)
        out[parity_random(parity, 0, SLOTS - 1)] = SEEN + i;
    for (uint32_t slot = 0; slot < SLOTS; slot++) {
        uint32_t place = 0;
        for (uint32_t other = 0; other < SLOTS; other++)
            place += out[other] < out[slot];
        timing->order[1][place] = slot;
        timing->order[0][slot] = slot;
    }
}

static uint16_t *draw_rows(struct parity *parity, size_t count) {
    uint16_t *rows = parity_host(count * sizeof *rows);
    for (size_t i = 0; i < count; i++)
        rows[i] = (uint16_t)parity_random(parity, 0x0800, 0x2800); /* 2^-13 to 2^-5 */
    uint16_t *device = parity_upload(parity, rows, count * sizeof *rows);
    free(rows);
    return device;
}

static void *draw_words(struct parity *parity, size_t count) {
    uint64_t *words = parity_host(count * sizeof *words);
    for (size_t i = 0; i < count; i++)
        words[i] = parity_random_bits(parity) >> 36;
    uint64_t *device = parity_upload(parity, words, count * sizeof *words);
    free(words);
    return device;
}

/* Of slots of which the first few are attended to by every query. */
static uint32_t *draw_sums(struct parity *parity, uint32_t slots) {
    uint64_t *sums = parity_host(slots * sizeof *sums);
    for (uint32_t i = 0; i < slots; i++)
        sums[i] = parity_random_bits(parity) >> (i < 4 ? 30 : 36);
    uint32_t *device = parity_upload_sums(parity, sums, slots, slots);
    free(sums);
    return device;
}

static void create_model(struct parity *parity, struct timing *timing) {
    size_t page_bytes = (2 * KV_PAGE_SLOTS * DIM * 2 + KV_PAGE_SLOTS * sizeof(int32_t) + 63) / 64 * 64;
    size_t pages = (size_t)LAYERS * KV_HEADS * PAGES, matrix = (size_t)WIDTH * WIDTH / 32 * 20;
    uint16_t *image = parity_host(pages * page_bytes);
    for (size_t i = 0; i < pages * page_bytes / 2; i++)
        image[i] = (uint16_t)(0x3000 + (parity_random_bits(parity) & 0x83ff));
    for (size_t page = 0; page < pages; page++) {
        int32_t *positions = (int32_t *)((char *)image + page * page_bytes + 2 * KV_PAGE_SLOTS * DIM * 2);
        for (uint32_t place = 0; place < KV_PAGE_SLOTS; place++)
            positions[place] = (int32_t)timing->positions[0][page % PAGES * KV_PAGE_SLOTS + place];
    }
    timing->pool = (struct kv_pool){.base = parity_upload(parity, image, pages * page_bytes),
        .page_bytes = page_bytes,
        .layout = {.layers = LAYERS, .kv_heads = KV_HEADS, .head_dim = DIM, .format = KV_F16}};
    free(image);
    timing->pages = parity_host(pages * sizeof *timing->pages);
    for (uint32_t i = 0; i < pages; i++)
        timing->pages[i] = i;
    for (uint32_t layer = 0; layer < LAYERS; layer++) {
        unsigned char *data = parity_host(matrix);
        for (size_t at = 0; at < matrix; at++)
            data[at] = at % 20 < 4 ? (at % 2 != 0 ? 0x20 : 0) : (unsigned char)parity_random_bits(parity);
        timing->output[layer] = (struct tensor){
            .name = "output", .type = TENSOR_Q4_1, .rows = WIDTH, .columns = WIDTH, .data = data, .bytes = matrix};
    }
    for (uint32_t pair = 0; pair < DIM / 2; pair++)
        timing->inverse_freq[pair] = (float)pow(10000, -2.0 * pair / DIM);
    timing->rope = (struct rope_params){DIM, timing->inverse_freq};
}

static void create_statistics(struct parity *parity, struct timing *timing) {
    float *outputs = parity_host((size_t)WINDOW * GROUP * DIM * sizeof *outputs);
    uint32_t count = 100;
    parity_fill_normal(parity, outputs, (size_t)WINDOW * GROUP * DIM, 1);
    timing->shared = (struct kv_statistics){.capacity = SLOTS,
        .window = WINDOW,
        .history = 400,
        .window_rows = draw_rows(parity, (size_t)WINDOW * SLOTS),
        .head_rows = draw_rows(parity, (size_t)WINDOW * GROUP * SLOTS),
        .outputs = parity_upload(parity, outputs, (size_t)WINDOW * GROUP * DIM * sizeof *outputs),
        .above = draw_words(parity, (size_t)SLOTS * STATISTIC_ABOVE_BITS / 64)};
    free(outputs);
    size_t heads = (size_t)GROUP * KV_HEADS;
    double *sum = parity_host(heads * DIM * sizeof *sum), *outer = parity_host(heads * DIM * DIM * sizeof *outer);
    for (size_t i = 0; i < heads * DIM * DIM; i += DIM + 1)
        outer[i] = 100;
    timing->moments = (struct query_moments){parity_upload(parity, &count, sizeof count),
        parity_upload(parity, sum, heads * DIM * sizeof *sum),
        parity_upload(parity, outer, heads * DIM * DIM * sizeof *outer)};
    free(sum);
    free(outer);
}

static void create_heads(struct parity *parity, struct timing *timing, const struct timed *timed) {
    uint32_t layers = timed->sequences * LAYERS;
    timing->layers = parity_host(layers * sizeof *timing->layers);
    timing->heads = parity_host((size_t)layers * KV_HEADS * sizeof *timing->heads);
    timing->count = layers;
    for (uint32_t i = 0; i < layers * KV_HEADS; i++) {
        struct score_head *head = &timing->heads[i];
        size_t first = (size_t)i % (LAYERS * KV_HEADS) * PAGES, place = timed->ordered ? 0 : 1;
        uint32_t *positions = parity_host(SLOTS * sizeof *positions), *order = parity_host(SLOTS * sizeof *order);
        memcpy(positions, timing->positions[place], SLOTS * sizeof *positions);
        memcpy(order, timing->order[place], SLOTS * sizeof *order);
        *head = (struct score_head){.view = {timing->pages + first, SLOTS, 0},
            .statistics = timing->shared,
            .sinks = 4,
            .recent_from = SEEN - WINDOW,
            .scores = timed->worst ? NULL : parity_upload(parity, NULL, SLOTS * sizeof(float)),
            .worst = timed->worst ? &timing->worst[i] : NULL,
            .positions = timed->listed || !timed->ordered ? positions : NULL,
            .order = timed->listed && !timed->ordered ? order : NULL,
            .order_count = SLOTS};
        head->statistics.sum = draw_sums(parity, SLOTS);
        head->statistics.window_sum = draw_words(parity, SLOTS / 2);
        head->statistics.output_norm = parity_upload(parity, NULL, SLOTS * sizeof(float));
        for (uint32_t slot = 0; slot < SLOTS; slot++) /* the CPU backend's memory is the host's */
            head->statistics.output_norm[slot] = 1;
    }
    for (uint32_t i = 0; i < layers; i++)
        timing->layers[i] = (struct score_layer){.heads = timing->heads + (size_t)i * KV_HEADS,
            .layer = i % LAYERS,
            .seen = SEEN,
            .budget = SLOTS,
            .stages = timed->stages,
            .stages_count = timed->count,
            .window = WINDOW,
            .moments = timing->moments,
            .rope = &timing->rope,
            .output = &timing->output[i % LAYERS]};
}

static void free_heads(struct parity *parity, struct timing *timing) {
    for (uint32_t i = 0; i < timing->count * KV_HEADS; i++) {
        struct score_head *head = &timing->heads[i];
        parity_release(parity, head->statistics.sum);
        parity_release(parity, head->statistics.window_sum);
        parity_release(parity, head->statistics.output_norm);
        parity_release(parity, head->scores);
        free((void *)head->positions);
        free((void *)head->order);
    }
    free(timing->heads);
    free(timing->layers);
}

static void work(void *context) {
    struct timing *timing = context;
    struct error error;
    for (uint32_t i = 0; timing->forget_norms && i < timing->count * KV_HEADS; i++)
        memset(timing->heads[i].statistics.output_norm, 0, SLOTS * sizeof(float));
    if (timing->parity->operations->score(
            timing->parity->backend, &timing->pool, timing->layers, timing->count, GROUP * KV_HEADS, &error) != 0)
        printf("score: %s\n", error.message);
}

static void time_pipeline(struct parity *parity, struct timing *timing, const struct timed *timed, const char *name) {
    create_heads(parity, timing, timed);
    double seconds =
        parity_time(parity, work, timing, 0, 0, "%-40s %u x %u heads", name, timed->sequences, LAYERS * KV_HEADS);
    printf("%51s%.2f ns a slot\n", "", 1e9 * seconds / (double)timing->count / KV_HEADS / SLOTS);
    free_heads(parity, timing);
}

static void time_stages(struct parity *parity) {
    struct timing timing = {.parity = parity};
    for (int i = 0; i < 2; i++) {
        timing.positions[i] = parity_host(SLOTS * sizeof(uint32_t));
        timing.order[i] = parity_host(SLOTS * sizeof(uint32_t));
    }
    draw_positions(parity, &timing);
    create_model(parity, &timing);
    create_statistics(parity, &timing);
    for (size_t i = 0; i < sizeof pipelines / sizeof pipelines[0]; i++)
        time_pipeline(parity, &timing, &pipelines[i], pipelines[i].name);
    struct timed norms = {"", {{STAGE_POSITION, 0, 0}, {STAGE_TIMES_OUTPUT_NORM, 0, 0}}, 2, 1, true, true, false};
    timing.forget_norms = true;
    time_pipeline(parity, &timing, &norms, "times output norm, none known");
    for (int i = 0; i < 2; i++) {
        free(timing.positions[i]);
        free(timing.order[i]);
    }
    for (uint32_t layer = 0; layer < LAYERS; layer++)
        free((void *)timing.output[layer].data);
    parity_release(parity, timing.shared.window_rows);
    parity_release(parity, timing.shared.head_rows);
    parity_release(parity, timing.shared.outputs);
    parity_release(parity, timing.shared.above);
    parity_release(parity, timing.moments.count);
    parity_release(parity, timing.moments.sum);
    parity_release(parity, timing.moments.outer);
    parity_release(parity, timing.pool.base);
    free(timing.pages);
}

const struct parity_case parity_score_timed[] = {
    {"score stages", NULL, 0, 0, time_stages},
    {0},
};
