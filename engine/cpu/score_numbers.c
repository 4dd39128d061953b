/* SPDX-License-Identifier: Apache-2.0
 *
 * Numbers that depend on a slot's key and value alone (policy/network.h): norms of the value and of what it adds to the
 * layer's output, for the network and for the trainer.
 *
 * No output is formed: the length of v W_h is that of F_h v (score_state.h).
 */
#include "engine/cpu/score_numbers.h"

#include "engine/cpu/memory.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

/* Angles of a position are the sum of those of its low and its high part: two tables and no sine a slot. */
enum { TURNS_LOW = 256 };

struct number_turns {
    uint32_t dim;
    float *inverse_freq; /* [dim / 2] that the turns were computed with */
    uint32_t high_count; /* positions below high_count * TURNS_LOW can be turned */
    float *low, *high;   /* [TURNS_LOW], [high_count] of cosines and sines, see unturn */
};

/* ---- norms of one page ---- */

void score_page_norms(const struct score_kernels *kernels, uint32_t dim, const float *factors, uint32_t group,
    const float *values, float *turned, float *value_norm, float *output_norm) {
    double squares[SCORE_LANES], sums[SCORE_LANES] = {0};
    float norms[SCORE_LANES];
    if (value_norm != NULL) {
        kernels->squares(values, dim, squares);
        for (uint32_t lane = 0; lane < SCORE_LANES; lane++)
            norms[lane] = (float)sqrt(squares[lane]);
        kernels->logs(norms, value_norm);
    }
    if (output_norm == NULL)
        return;
    for (uint32_t g = 0; g < group; g++) {
        kernels->products(values, SCORE_LANES, factors + (size_t)g * dim * dim, dim, 1, dim, dim, true, turned);
        kernels->squares(turned, dim, squares);
        for (uint32_t lane = 0; lane < SCORE_LANES; lane++)
            sums[lane] += sqrt(squares[lane]);
    }
    for (uint32_t lane = 0; lane < SCORE_LANES; lane++)
        norms[lane] = (float)(sums[lane] / (double)group);
    kernels->logs(norms, output_norm);
}

/* ---- turns ---- */

static uint32_t padded_pairs(uint32_t dim) {
    return (dim / 2 + SCORE_LANES - 1) / SCORE_LANES * SCORE_LANES;
}

void score_number_turns_free(struct number_turns *turns) {
    if (turns == NULL)
        return;
    free(turns->inverse_freq);
    cpu_memory_release(turns->low);
    cpu_memory_release(turns->high);
    free(turns);
}

/* Turns of positions step, 2 step, ...; angles in double, rounded once. NULL when there is no memory. */
static float *turns_fill(const struct rope_params *rope, uint32_t step, uint32_t count) {
    uint32_t padded = padded_pairs(rope->dim);
    float *turns = cpu_memory_allocate(((size_t)count * 2 * padded + 1) * sizeof *turns);
    for (uint32_t i = 0; turns != NULL && i < count; i++) {
        for (uint32_t p = 0; p < rope->dim / 2; p++) {
            double angle = (double)i * step * (double)rope->inverse_freq[p];
            turns[(size_t)i * 2 * padded + p] = (float)cos(angle);
            turns[(size_t)i * 2 * padded + padded + p] = (float)sin(angle);
        }
    }
    return turns;
}

static struct number_turns *turns_create(const struct rope_params *rope) {
    struct number_turns *turns = calloc(1, sizeof *turns);
    if (turns == NULL)
        return NULL;
    turns->dim = rope->dim;
    turns->inverse_freq = malloc(rope->dim / 2 * sizeof(float) + 1);
    turns->low = turns_fill(rope, 1, TURNS_LOW);
    if (turns->inverse_freq == NULL || turns->low == NULL) {
        score_number_turns_free(turns);
        return NULL;
    }
    memcpy(turns->inverse_freq, rope->inverse_freq, rope->dim / 2 * sizeof(float));
    return turns;
}

static bool turns_fit(const struct number_turns *turns, const struct rope_params *rope) {
    return turns != NULL && turns->dim == rope->dim &&
           memcmp(turns->inverse_freq, rope->inverse_freq, rope->dim / 2 * sizeof(float)) == 0;
}

/* Turns of all positions below `seen`. */
static int turns_prepare(struct score_state *state, const struct rope_params *rope, uint32_t seen) {
    uint32_t needed = seen / TURNS_LOW + 1;
    if (!turns_fit(state->number_turns, rope)) {
        score_number_turns_free(state->number_turns);
        state->number_turns = turns_create(rope);
    }
    struct number_turns *turns = state->number_turns;
    if (turns == NULL)
        return ERROR_MEMORY;
    if (turns->high_count >= needed)
        return 0;
    float *high = turns_fill(rope, TURNS_LOW, needed + needed / 4);
    if (high == NULL)
        return ERROR_MEMORY;
    cpu_memory_release(turns->high);
    turns->high = high;
    turns->high_count = needed + needed / 4;
    return 0;
}

int score_numbers_prepare(const struct score_call *call, struct error *error) {
    const struct rope_params *rope = NULL;
    uint32_t seen = 0;
    for (uint32_t i = 0; i < call->count; i++) {
        const struct score_layer *layer = &call->layers[i];
        if (!score_has_stage(layer, STAGE_NETWORK) || layer->network->shape.content == 0)
            continue;
        if (rope != NULL && (rope->dim != layer->rope->dim || memcmp(rope->inverse_freq, layer->rope->inverse_freq,
                                                                  rope->dim / 2 * sizeof(float)) != 0))
            return error_set(error, ERROR_UNSUPPORTED, "layers of one call rotate keys in different ways");
        rope = layer->rope;
        seen = layer->seen > seen ? layer->seen : seen;
    }
    if (rope != NULL && turns_prepare(call->state, rope, seen) != 0)
        return error_set(error, ERROR_MEMORY, "no memory for the rotation of keys");
    return 0;
}

/* ---- what the network keeps of a slot ---- */

size_t score_numbers_floats(uint32_t dim) {
    size_t block = (size_t)dim * SCORE_LANES, turns = 2 * (size_t)padded_pairs(dim) * SCORE_LANES + block;
    return 2 * block + turns + NETWORK_CONTENT_MAX * SCORE_LANES;
}

/* A page's keys without rotation. */
static void read_keys(const struct score_unit *unit, const struct score_head *head, uint32_t slot,
    const int32_t positions[SCORE_LANES], float *keys, float *space) {
    const struct number_turns *turns = unit->turns;
    size_t row = 2 * (size_t)padded_pairs(turns->dim);
    const float *low[SCORE_LANES], *high[SCORE_LANES];
    for (uint32_t lane = 0; lane < SCORE_LANES; lane++) {
        low[lane] = turns->low + (size_t)((uint32_t)positions[lane] % TURNS_LOW) * row;
        high[lane] = turns->high + (size_t)((uint32_t)positions[lane] / TURNS_LOW) * row;
    }
    score_page_keys(unit, &head->view, slot, keys);
    unit->kernels->network.unturn(keys, low, high, turns->dim / 2, space);
}

/* One row of content_rows: the lanes of `mask`. */
static void store_row(const struct score_unit *unit, const struct score_head *head, uint32_t row, uint32_t slot,
    uint32_t mask, const float *numbers, float offset) {
    uint16_t narrow[SCORE_LANES], *to = head->statistics.content_rows + (size_t)row * head->statistics.capacity + slot;
    unit->kernels->network.narrow(numbers, offset, narrow);
    for (uint32_t lane = 0; lane < SCORE_LANES; lane++)
        if (mask >> lane & 1)
            to[lane] = narrow[lane];
}

static void fill_page(
    const struct score_unit *unit, uint32_t head, uint32_t slot, uint32_t mask, const int32_t positions[SCORE_LANES]) {
    const struct score_head *at = &unit->layer->heads[head];
    const struct policy_network *network = unit->layer->network;
    uint32_t dim = unit->pool->layout.head_dim, content = network->shape.content;
    size_t block = (size_t)dim * SCORE_LANES;
    float *keys = unit->scratch->blocks, *turned = keys + block, *numbers = turned + block;
    float *space = numbers + NETWORK_CONTENT_MAX * SCORE_LANES, value_norm[SCORE_LANES], output_norm[SCORE_LANES];
    if (content > 0) {
        size_t number = (size_t)unit->layer->layer * unit->pool->layout.kv_heads + head;
        const float *offset = network->content_offset + number * content;
        read_keys(unit, at, slot, positions, keys, space);
        unit->kernels->products(
            keys, SCORE_LANES, network->content + number * content * dim, dim, 1, content, dim, false, numbers);
        for (uint32_t j = 0; j < content; j++)
            store_row(unit, at, j, slot, mask, numbers + j * SCORE_LANES, offset[j]);
    }
    bool outputs = score_network_weighs(&network->shape);
    const float *factors = outputs ? unit->matrix->factors + (size_t)head * unit->group * dim * dim : NULL;
    score_page_values(unit, &at->view, slot, keys);
    score_page_norms(unit->kernels, dim, factors, unit->group, keys, turned, value_norm, outputs ? output_norm : NULL);
    if (outputs)
        store_row(unit, at, content + 1, slot, mask, output_norm, 0);
    store_row(unit, at, content, slot, mask, value_norm, 0); /* last: says that all are there */
}

void score_numbers_fill(const struct score_unit *unit, uint32_t head) {
    const struct score_head *at = &unit->layer->heads[head];
    const struct kv_statistics *statistics = &at->statistics;
    const int32_t *from = unit->scratch->slots[head].positions;
    const uint16_t *norms = statistics->content_rows + (size_t)statistics->content * statistics->capacity;
    uint32_t slots = at->view.slots;
    for (uint32_t slot = 0;; slot += KV_PAGE_SLOTS) {
        int32_t positions[SCORE_LANES] = {0};
        uint32_t mask = 0;
        slot = slot < slots ? unit->kernels->network.next_unknown(norms, from, slots, slot) : slots;
        if (slot >= slots)
            return;
        for (uint32_t lane = 0; lane < score_page_slots(&at->view, slot); lane++) {
            if (from[slot + lane] == KV_NO_POSITION)
                continue;
            positions[lane] = from[slot + lane];
            mask |= (uint32_t)(norms[slot + lane] == 0) << lane;
        }
        fill_page(unit, head, slot, mask, positions);
    }
}

/* ---- slot_norms ---- */

struct norms_job {
    const struct score_call *call;
    const struct kv_head_view *view;
    const float *factors; /* [G][d][d] of the head's group; NULL: no output norms */
    float *value_norm, *output_norm;
};

static void norms_work(void *context, uint32_t page, uint32_t thread) {
    const struct norms_job *job = context;
    const struct kv_pool *pool = job->call->pool;
    const struct kv_layout *layout = &pool->layout;
    const struct score_kernels *kernels = job->call->cpu->score;
    char *at = kv_pool_page(pool, job->view->pages[page]);
    const int32_t *positions = kv_page_positions(layout, at);
    float *values = job->call->state->scratch[thread].blocks, *turned = values + (size_t)layout->head_dim * SCORE_LANES;
    float value_norm[SCORE_LANES], output_norm[SCORE_LANES];
    uint32_t first = page * KV_PAGE_SLOTS, count = score_page_slots(job->view, first);
    kernels->formats[layout->format].values(at, at, layout->head_dim, values);
    score_page_norms(kernels, layout->head_dim, job->factors, job->call->heads / layout->kv_heads, values, turned,
        job->value_norm != NULL ? value_norm : NULL, job->output_norm != NULL ? output_norm : NULL);
    for (uint32_t lane = 0; lane < count; lane++) {
        bool empty = positions[lane] == KV_NO_POSITION;
        if (job->value_norm != NULL)
            job->value_norm[first + lane] = empty ? 0 : value_norm[lane];
        if (job->output_norm != NULL)
            job->output_norm[first + lane] = empty ? 0 : output_norm[lane];
    }
}

int cpu_slot_norms(struct backend *backend, const struct kv_pool *pool, const struct kv_head_view *view,
    const struct tensor *output, uint32_t layer, uint32_t head, uint32_t heads, float *value_norm, float *output_norm,
    struct error *error) {
    const struct kv_layout *layout = &pool->layout;
    const struct score_layer of = {.layer = layer, .output = output};
    if (heads == 0 || heads % layout->kv_heads != 0 || layer >= layout->layers || head >= layout->kv_heads ||
        layout->head_dim > ATTEND_DIM_MAX || output->columns != (size_t)heads * layout->head_dim)
        return error_set(error, ERROR_INVALID, "no such head, or not its output matrix");
    struct score_call call = {cpu_backend(backend), score_state_get(cpu_backend(backend)), pool, NULL, 0, heads};
    if (call.state == NULL)
        return error_set(error, ERROR_MEMORY, "no memory for norms of slots");
    int code = score_scratch_prepare(&call, error);
    if (code == 0 && output_norm != NULL)
        code = score_factors_prepare(&call, &of, error);
    if (code != 0)
        return code;
    struct norms_job job = {&call, view, NULL, value_norm, output_norm};
    if (output_norm != NULL)
        job.factors = call.state->matrices[layer].factors +
                      (size_t)head * (heads / layout->kv_heads) * layout->head_dim * layout->head_dim;
    uint32_t pages = (view->slots + KV_PAGE_SLOTS - 1) / KV_PAGE_SLOTS;
    thread_pool_run(call.cpu->threads, pages, norms_work, &job);
    return 0;
}
