/* SPDX-License-Identifier: Apache-2.0
 *
 * The stage of the DistillCache network (policy/network.h): inputs by chunks of slots, normalised, then the content
 * network or the paper's. Scores among a head's slots as logarithms of shares.
 */
#include "engine/cpu/score_network.h"

#include "engine/cpu/score_state.h"

#include <math.h>
#include <string.h>

/* The network as one layer's heads are scored by it. */
struct stage {
    const struct score_unit *unit;
    const struct policy_network *network;
    const struct network_kernels *kernels;
    enum network_input list[INPUT_KINDS];
    uint32_t list_count, inputs, standardised;
    float budget_input;
    float *x;                       /* [F][NETWORK_CHUNK] */
    struct network_weights weights; /* content */
    float *bias;                    /* [hidden, rounded up] of the present head */
    float *first, *second;          /* [hidden][16] paper */
};

static uint32_t round_rows(uint32_t hidden) {
    return (hidden + NETWORK_ROWS - 1) / NETWORK_ROWS * NETWORK_ROWS;
}

bool score_network_weighs(const struct network_shape *shape) {
    return (shape->inputs >> INPUT_OUTPUT_NORM & 1) != 0;
}

size_t score_network_floats(const struct network_shape *shape, uint32_t dim) {
    size_t inputs = network_inputs_count(shape), hidden = round_rows(shape->hidden);
    size_t own = shape->features == FEATURES_PAPER ? 2 * hidden * SCORE_LANES : hidden * (inputs + 2);
    size_t floats = inputs * NETWORK_CHUNK + own, numbers = score_numbers_floats(dim);
    return floats > numbers ? floats : numbers;
}

/* ---- the network of a layer ---- */

/* Weights of eight units side by side; units that there are not add nothing. */
static void pack(const struct policy_network *network, float *w1, float *w2) {
    uint32_t inputs = network_inputs_count(&network->shape), hidden = network->shape.hidden;
    for (uint32_t j = 0; j < round_rows(hidden); j++) {
        float *to = w1 + (size_t)j / NETWORK_ROWS * NETWORK_ROWS * inputs + j % NETWORK_ROWS;
        for (uint32_t f = 0; f < inputs; f++)
            to[f * NETWORK_ROWS] = j < hidden ? network->w1[(size_t)j * inputs + f] : 0;
        w2[j] = j < hidden ? network->w2[j] : 0;
    }
}

static uint32_t count_standardised(const struct stage *stage) {
    uint32_t count = 0;
    for (uint32_t i = 0; i < stage->list_count; i++)
        count +=
            stage->list[i] == INPUT_MEAN || stage->list[i] == INPUT_VALUE_NORM || stage->list[i] == INPUT_DEVIATION;
    return count;
}

static void stage_open(const struct score_unit *unit, struct stage *stage) {
    const struct policy_network *network = unit->layer->network;
    *stage = (struct stage){.unit = unit, .network = network, .kernels = &unit->kernels->network};
    stage->list_count = network_inputs_list(&network->shape, stage->list);
    stage->inputs = network_inputs_count(&network->shape);
    stage->budget_input = (float)(log((double)unit->layer->budget / (double)unit->layer->seen) + 1.5);
    stage->x = unit->scratch->blocks;
    float *at = stage->x + (size_t)stage->inputs * NETWORK_CHUNK;
    size_t hidden = round_rows(network->shape.hidden);
    if (network->shape.features == FEATURES_PAPER) {
        stage->standardised = count_standardised(stage);
        stage->first = at;
        stage->second = at + hidden * SCORE_LANES;
        return;
    }
    float *w2 = at + hidden * stage->inputs;
    pack(network, at, w2);
    stage->bias = w2 + hidden;
    stage->weights = (struct network_weights){
        .inputs = stage->inputs, .hidden = (uint32_t)hidden, .w1 = at, .b1 = stage->bias, .w2 = w2};
}

/* ---- inputs ---- */

/* The inputs of a head's slots from `first` on: of all, or of the first `wanted` alone. */
static uint32_t chunk_inputs(const struct stage *stage, uint32_t head, uint32_t first, uint32_t wanted) {
    const struct score_unit *unit = stage->unit;
    const struct score_head *at = &unit->layer->heads[head];
    const struct kv_statistics *statistics = &at->statistics;
    const int32_t *from = unit->scratch->slots[head].positions + first;
    uint32_t left = at->view.slots - first, count = left < NETWORK_CHUNK ? left : NETWORK_CHUNK;
    int32_t positions[NETWORK_CHUNK];
    for (uint32_t i = 0; i < count; i++)
        positions[i] = from[i] == KV_NO_POSITION ? 0 : from[i];
    for (uint32_t i = count; i < score_round(count); i++)
        positions[i] = 0;
    struct network_chunk chunk = {
        .shape = &stage->network->shape,
        .list = stage->list,
        .list_count = wanted,
        .seen = unit->layer->seen,
        .budget = unit->layer->budget,
        .budget_input = stage->budget_input,
        .count = count,
        .positions = positions,
        .sum = statistics->sum != NULL ? statistics->sum + first : NULL,
        .squared = statistics->squared != NULL ? statistics->squared + first : NULL,
        .entropy = statistics->entropy != NULL ? statistics->entropy + first : NULL,
        .rows = statistics->content_rows != NULL ? statistics->content_rows + first : NULL,
        .stride = statistics->capacity,
    };
    stage->kernels->inputs(&chunk, stage->x);
    return count;
}

static void normalise_content(const struct stage *stage, uint32_t number, uint32_t count) {
    const float *mean = stage->network->mean + (size_t)number * stage->inputs;
    const float *scale = stage->network->scale + (size_t)number * stage->inputs;
    for (uint32_t f = 0; f < stage->inputs; f++)
        stage->kernels->normalise(stage->x + f * NETWORK_CHUNK, count, mean[f], scale[f], 6);
}

static void normalise_paper(const struct stage *stage, const float *standard, uint32_t count) {
    for (uint32_t f = 0; f < stage->inputs; f++) {
        bool own = f < stage->standardised;
        stage->kernels->normalise(
            stage->x + f * NETWORK_CHUNK, count, own ? standard[2 * f] : 0.5f, own ? standard[2 * f + 1] : 2, 8);
    }
}

/* ---- the paper's standard ---- */

/* Mean and 1 / (deviation + 1e-6) of numbers [slots] where a slot is. */
static void standard_of(const float *numbers, const int32_t *positions, uint32_t slots, float out[2]) {
    double sum = 0, squares = 0;
    uint32_t count = 0;
    for (uint32_t i = 0; i < slots; i++) {
        if (positions[i] == KV_NO_POSITION)
            continue;
        sum += (double)numbers[i];
        count++;
    }
    double mean = count > 0 ? sum / count : 0;
    for (uint32_t i = 0; i < slots; i++) {
        double off = (double)numbers[i] - mean;
        squares += positions[i] != KV_NO_POSITION ? off * off : 0;
    }
    out[0] = (float)mean;
    out[1] = (float)(1 / (sqrt(count > 0 ? squares / count : 0) + 1e-6));
}

/* Of the slots that the head holds now. */
static void standardise(const struct stage *stage, uint32_t head, float *standard) {
    const struct score_unit *unit = stage->unit;
    uint32_t slots = unit->layer->heads[head].view.slots;
    size_t row = score_round(slots);
    float *numbers = (float *)unit->scratch->wide; /* room for four rows */
    for (uint32_t first = 0; first < slots; first += NETWORK_CHUNK) {
        uint32_t count = chunk_inputs(stage, head, first, stage->standardised);
        for (uint32_t f = 0; f < stage->standardised; f++)
            memcpy(numbers + f * row + first, stage->x + f * NETWORK_CHUNK, count * sizeof(float));
    }
    for (uint32_t f = 0; f < stage->standardised; f++)
        standard_of(numbers + f * row, unit->scratch->slots[head].positions, slots, standard + 2 * f);
}

static void find_standard(const struct stage *stage, uint32_t head, float *standard) {
    float *frozen = stage->unit->layer->heads[head].statistics.standard;
    size_t bytes = STATISTIC_STANDARD_NUMBERS * sizeof *standard;
    if (stage->standardised == 0)
        return;
    if (frozen[1] != 0) {
        memcpy(standard, frozen, bytes);
        return;
    }
    standardise(stage, head, standard);
    if (stage->unit->layer->freeze)
        memcpy(frozen, standard, bytes);
}

/* ---- scores ---- */

/* The paper's network for sixteen slots. */
static void paper_scores(const struct stage *stage, const float *x, float scores[SCORE_LANES]) {
    const struct policy_network *network = stage->network;
    const struct score_kernels *kernels = stage->unit->kernels;
    uint32_t hidden = network->shape.hidden, inputs = stage->inputs;
    float skip[SCORE_LANES];
    kernels->products(x, NETWORK_CHUNK, network->w1, inputs, 1, hidden, inputs, false, stage->first);
    stage->kernels->layer_norm(stage->first, hidden, network->mlp_b1, network->g1, network->o1);
    kernels->products(stage->first, SCORE_LANES, network->w2, hidden, 1, hidden, hidden, false, stage->second);
    stage->kernels->layer_norm(stage->second, hidden, network->mlp_b2, network->g2, network->o2);
    kernels->products(stage->second, SCORE_LANES, network->w3, hidden, 1, 1, hidden, false, scores);
    kernels->products(x, NETWORK_CHUNK, network->mlp_skip, inputs, 1, 1, inputs, false, skip);
    for (uint32_t lane = 0; lane < SCORE_LANES; lane++)
        scores[lane] = scores[lane] + skip[lane] + network->b3[0];
}

static void score_head_slots(const struct stage *stage, uint32_t head) {
    const struct score_unit *unit = stage->unit;
    const struct score_head *at = &unit->layer->heads[head];
    const int32_t *positions = unit->scratch->slots[head].positions;
    bool paper = stage->network->shape.features == FEATURES_PAPER;
    uint32_t number = kv_layout_head_number(&unit->pool->layout, unit->layer->layer, head);
    float standard[STATISTIC_STANDARD_NUMBERS] = {0}, scores[NETWORK_CHUNK];
    if (paper)
        find_standard(stage, head, standard);
    for (uint32_t first = 0; first < at->view.slots; first += NETWORK_CHUNK) {
        uint32_t count = chunk_inputs(stage, head, first, stage->list_count);
        if (paper) {
            normalise_paper(stage, standard, count);
            for (uint32_t i = 0; i < count; i += SCORE_LANES)
                paper_scores(stage, stage->x + i, scores + i);
        } else {
            normalise_content(stage, number, count);
            stage->kernels->content(&stage->weights, stage->x, count, scores);
        }
        for (uint32_t i = 0; i < count; i++)
            at->scores[first + i] = positions[first + i] == KV_NO_POSITION ? NAN : scores[i];
    }
}

void score_network(const struct score_unit *unit, const struct score_stage *what, uint32_t head) {
    const struct policy_network *network = unit->layer->network;
    uint32_t kv_heads = unit->pool->layout.kv_heads, hidden = network->shape.hidden;
    struct stage stage;
    (void)what;
    (void)head;
    stage_open(unit, &stage);
    for (uint32_t k = 0; k < kv_heads; k++) {
        size_t number = kv_layout_head_number(&unit->pool->layout, unit->layer->layer, k);
        if (network->shape.features == FEATURES_CONTENT) {
            memset(stage.bias, 0, round_rows(hidden) * sizeof *stage.bias);
            memcpy(stage.bias, network->b1 + number * hidden, hidden * sizeof *stage.bias);
            stage.weights.skip = network->skip + number * stage.inputs;
        }
        score_head_slots(&stage, k);
    }
}

void score_log_softmax(const struct score_unit *unit, const struct score_stage *stage, uint32_t head) {
    const struct score_head *at = &unit->layer->heads[head];
    (void)stage;
    unit->kernels->network.log_softmax(at->scores, at->view.slots);
}
