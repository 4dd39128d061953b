/* SPDX-License-Identifier: Apache-2.0 */
#include "engine/cpu/score_state.h"

#include "engine/cpu/memory.h"

#include <stdlib.h>

/* The largest layer of a call. */
struct score_size {
    size_t slots;       /* of a head, rounded up */
    size_t layer_slots; /* of all heads of a layer */
    size_t kv_heads;
    size_t group;
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
    cpu_memory_release(state->memory);
    free(state->scratch);
    free(state);
    cpu->score_state = NULL;
}

static struct score_size measure(
    const struct kv_pool *pool, const struct score_layer *layers, uint32_t count, uint32_t heads) {
    struct score_size size = {
        .kv_heads = pool->layout.kv_heads,
        .group = heads / pool->layout.kv_heads,
        .blocks = (size_t)4 * pool->layout.head_dim * SCORE_LANES,
    };
    for (uint32_t i = 0; i < count; i++) {
        size_t layer_slots = 0;
        for (uint32_t head = 0; head < pool->layout.kv_heads; head++) {
            size_t slots = score_round(layers[i].heads[head].view.slots);
            layer_slots += slots;
            size.slots = slots > size.slots ? slots : size.slots;
        }
        size.layer_slots = layer_slots > size.layer_slots ? layer_slots : size.layer_slots;
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
    scratch->positions = carve(&at, &bytes, size->layer_slots, sizeof *scratch->positions);
    scratch->near_positions = carve(&at, &bytes, size->slots + 2 * SCORE_PAD, sizeof *scratch->near_positions);
    scratch->near_scores = carve(&at, &bytes, size->slots + 2 * SCORE_PAD, sizeof *scratch->near_scores);
    scratch->order = carve(&at, &bytes, size->slots, sizeof *scratch->order);
    scratch->keys = carve(&at, &bytes, size->slots, sizeof *scratch->keys);
    scratch->wide = carve(&at, &bytes, (size->group + 1) * size->slots, sizeof *scratch->wide);
    scratch->blocks = carve(&at, &bytes, size->blocks, sizeof *scratch->blocks);
    return bytes;
}

struct score_state *score_state_prepare(struct cpu_backend *cpu, const struct kv_pool *pool,
    const struct score_layer *layers, uint32_t count, uint32_t heads, struct error *error) {
    struct score_state *state = score_state_get(cpu);
    if (state == NULL) {
        error_set(error, ERROR_MEMORY, "no memory for scoring");
        return NULL;
    }
    struct score_size size = measure(pool, layers, count, heads);
    struct score_scratch unused;
    size_t one = lay_out(&size, NULL, &unused), bytes = one * state->threads;
    if (bytes > state->memory_bytes) {
        cpu_memory_release(state->memory);
        state->memory = cpu_memory_allocate(bytes);
        state->memory_bytes = state->memory != NULL ? bytes : 0;
        if (state->memory == NULL) {
            error_set(error, ERROR_MEMORY, "no memory for scoring: %zu bytes", bytes);
            return NULL;
        }
    }
    for (uint32_t thread = 0; thread < state->threads; thread++)
        lay_out(&size, (char *)state->memory + thread * one, &state->scratch[thread]);
    return state;
}
