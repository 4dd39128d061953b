/* SPDX-License-Identifier: Apache-2.0 */
#include "engine/cpu/score_state.h"

#include "engine/cpu/memory.h"
#include "engine/cpu/score_numbers.h"

#include <stdlib.h>

/* The largest layer of a call. */
struct score_size {
    size_t slots;       /* of a head, rounded up */
    size_t layer_slots; /* of all heads of a layer */
    size_t kv_heads;
    size_t group;
    size_t dim;
    size_t blocks; /* floats for stages on blocks */
};

struct score_state *score_state_get(struct cpu_backend *cpu) {
    if (cpu->score_state != NULL)
        return cpu->score_state;
    struct score_state *state = calloc(1, sizeof *state);
    if (state == NULL)
        return NULL;
    state->threads = thread_pool_size(cpu->threads);
    state->scratch = calloc(state->threads, sizeof *state->scratch);
    if (state->scratch == NULL) {
        free(state);
        return NULL;
    }
    cpu->score_state = state;
    return state;
}

void cpu_score_state_free(struct cpu_backend *cpu) {
    struct score_state *state = cpu->score_state;
    if (state == NULL)
        return;
    score_turns_free(state->turns);
    score_number_turns_free(state->number_turns);
    score_matrices_free(state);
    cpu_memory_release(state->memory);
    free(state->scratch);
    free(state);
    cpu->score_state = NULL;
}

static size_t larger(size_t a, size_t b) {
    return a > b ? a : b;
}

/* Floats that the stages of a layer lay out in blocks: each stage from the start. */
static size_t blocks_floats(const struct score_call *call, const struct score_layer *layer) {
    size_t dim = call->pool->layout.head_dim, kv_heads = call->pool->layout.kv_heads, heads = call->heads;
    size_t block = dim * SCORE_LANES, columns = heads * dim, window = 0, floats = 2 * block;
    for (uint32_t head = 0; head < kv_heads; head++)
        window = larger(window, layer->heads[head].statistics.window);
    size_t rows = SCORE_MATRIX_ROWS * (columns + SCORE_LANES); /* of W_o, and their products */
    if (score_has_stage(layer, STAGE_EXPECTED_ATTENTION))
        floats = larger(floats, 2 * block + dim * dim + dim);
    if (score_has_stage(layer, STAGE_TIMES_OUTPUT_NORM))
        floats = larger(floats, rows + block);
    if (score_has_stage(layer, STAGE_DROP_ERROR))
        floats = larger(floats, 2 * block + window * (2 * SCORE_LANES + heads / kv_heads * (dim + 1) + 1));
    if (score_has_stage(layer, STAGE_NETWORK))
        floats = larger(floats, score_network_floats(&layer->network->shape, (uint32_t)dim));
    if (score_has_stage(layer, STAGE_LAPROX) || score_has_stage(layer, STAGE_LAPROX_HEAD)) {
        size_t outputs = (window + SCORE_LANES - 1) / SCORE_LANES * SCORE_LANES * columns;
        floats = larger(floats, larger(rows + outputs, (kv_heads + 1) * block + heads * window * SCORE_LANES));
    }
    return floats;
}

static struct score_size measure(const struct score_call *call) {
    struct score_size size = {.kv_heads = call->pool->layout.kv_heads, .dim = call->pool->layout.head_dim};
    size.group = call->heads / size.kv_heads;
    size.blocks = 2 * size.dim * SCORE_LANES; /* slot_norms */
    for (uint32_t i = 0; i < call->count; i++) {
        size_t layer_slots = 0;
        if (call->layers[i].heads == NULL)
            continue;
        for (uint32_t head = 0; head < size.kv_heads; head++) {
            size_t slots = score_round(call->layers[i].heads[head].view.slots);
            layer_slots += slots;
            size.slots = larger(size.slots, slots);
        }
        size.layer_slots = larger(size.layer_slots, layer_slots);
        size.blocks = larger(size.blocks, blocks_floats(call, &call->layers[i]));
    }
    return size;
}

/* Takes count items from *at; with at NULL only counts the bytes. Every part begins at a cache line. */
static void *carve(char **at, size_t *bytes, size_t count, size_t item) {
    void *part = *at;
    size_t taken = (count * item + 63) / 64 * 64;
    *bytes += taken;
    if (*at != NULL)
        *at += taken;
    return part;
}

/* Bytes of one thread's scratch; fills it when there is memory. */
static size_t lay_out(const struct score_size *size, char *at, struct score_scratch *scratch) {
    size_t bytes = 0;
    scratch->slots = carve(&at, &bytes, size->kv_heads, sizeof *scratch->slots);
    scratch->heads = carve(&at, &bytes, size->kv_heads, sizeof *scratch->heads);
    scratch->scores = carve(&at, &bytes, size->layer_slots, sizeof *scratch->scores);
    scratch->positions = carve(&at, &bytes, size->layer_slots, sizeof *scratch->positions);
    scratch->near_positions = carve(&at, &bytes, size->slots + 2 * SCORE_PAD, sizeof *scratch->near_positions);
    scratch->near_scores = carve(&at, &bytes, size->slots + 2 * SCORE_PAD, sizeof *scratch->near_scores);
    scratch->order = carve(&at, &bytes, size->slots, sizeof *scratch->order);
    scratch->keys = carve(&at, &bytes, size->slots, sizeof *scratch->keys);
    scratch->wide = carve(&at, &bytes, 2 * size->slots, sizeof *scratch->wide);
    scratch->square = carve(&at, &bytes, size->dim * size->dim, sizeof *scratch->square);
    scratch->blocks = carve(&at, &bytes, size->blocks, sizeof *scratch->blocks);
    return bytes;
}

int score_scratch_prepare(const struct score_call *call, struct error *error) {
    struct score_state *state = call->state;
    struct score_size size = measure(call);
    struct score_scratch unused;
    size_t one = lay_out(&size, NULL, &unused), bytes = one * state->threads;
    if (bytes > state->memory_bytes) {
        cpu_memory_release(state->memory);
        state->memory = cpu_memory_allocate(bytes);
        state->memory_bytes = state->memory != NULL ? bytes : 0;
        if (state->memory == NULL)
            return error_set(error, ERROR_MEMORY, "no memory for scoring: %zu bytes", bytes);
    }
    for (uint32_t thread = 0; thread < state->threads; thread++)
        lay_out(&size, (char *)state->memory + thread * one, &state->scratch[thread]);
    return 0;
}
