/* SPDX-License-Identifier: Apache-2.0 */
#include "cuda/step.h"

#include "cuda/attend_state.h"
#include "cuda/graph.h"
#include "cuda/linear.h"
#include "cuda/rope.h"

#include <stdlib.h>
#include <string.h>

enum {
    EXACT_ROWS = 8,   /* up to as many rows are not padded, since weights cost as much for eight as for one */
    EXACT_SPLITS = 8, /* the same for splits of attention */
    ROWS_STEP = 8,
};

/* Where the parts lie in the device's memory, [rounded-up counts]: offsets that follow from a graph's key. */
struct step_layout {
    size_t tokens, items, rows, wanted, tiles, views, moments;
    size_t tables; /* page tables that the device does not have; the last, as long as need be */
    size_t bytes;
};

/* Statistics' addresses and sizes on the device, which hardly change: layers that did are sent. */
struct step_statistics {
    struct cuda_scratch memory;
    size_t bytes;                /* that the memory had when all was sent: others have lost it */
    struct kv_statistics *heads; /* host [room]: what it holds, [layers][heads of a layer] */
    size_t room;
    uint32_t layers;
    size_t real, padded; /* heads of a layer: those of items, and with those that do nothing */
};

struct step_state {
    bool graphs_on;
    struct graphs graphs;
    struct cuda_scratch memory;
    struct step_statistics statistics;
    struct kv_item *items; /* host [items_room] */
    uint32_t items_room;
    /* The step under way. */
    bool active;
    struct kv_step step;
    struct cuda_batch batch; /* of layer 0, without a layer's offsets */
    struct step_layout layout;
    struct graph *graph; /* of its key; NULL: none */
    bool capturing;
};

void cuda_step_free(struct cuda_backend *cuda) {
    struct step_state *state = cuda->step;
    if (state == NULL)
        return;
    graphs_free(cuda, &state->graphs);
    cuda_scratch_free(&state->memory);
    cuda_scratch_free(&state->statistics.memory);
    free(state->statistics.heads);
    free(state->items);
    free(state);
    cuda->step = NULL;
}

static struct step_state *state_get(struct cuda_backend *cuda) {
    if (cuda->step != NULL)
        return cuda->step;
    cuda->step = calloc(1, sizeof *cuda->step);
    if (cuda->step == NULL) {
        cuda_check(cuda, cudaErrorMemoryAllocation, "step");
        return NULL;
    }
    const char *wish = getenv("DISTILLCACHE_CUDA_GRAPHS");
    cuda->step->graphs_on = wish == NULL || strcmp(wish, "off") != 0;
    return cuda->step;
}

/* ---- rounding up ---- */

/* Rows of another number may be multiplied by another kernel, with other bits: from LINEAR_LIBRARY_ROWS on each number
 * is on its own. */
static uint32_t padded_rows(uint32_t rows, uint32_t room) {
    if (rows <= EXACT_ROWS || rows >= LINEAR_LIBRARY_ROWS)
        return rows;
    uint32_t padded = (rows + ROWS_STEP - 1) / ROWS_STEP * ROWS_STEP;
    if (padded >= LINEAR_LIBRARY_ROWS)
        padded = LINEAR_LIBRARY_ROWS - 1;
    return padded < room ? padded : room;
}

/* To one of four bounds between powers of two. */
static uint32_t rounded_slots(uint32_t slots) {
    uint32_t splits = (slots + ATTEND_SPLIT - 1) / ATTEND_SPLIT, step = 1;
    while (splits > EXACT_SPLITS * step)
        step *= 2;
    return (splits + step - 1) / step * step * ATTEND_SPLIT;
}

static size_t views_count(const struct step_state *state, uint32_t items) {
    const struct kv_layout *layout = &state->step.pool->layout;
    return (size_t)layout->layers * items * layout->kv_heads;
}

/* Items with those that do nothing, and upper bounds. False when there was an error. */
static bool bound_step(struct cuda_backend *cuda, struct step_state *state, bool rounds) {
    const struct kv_step *step = &state->step;
    struct cuda_batch *batch = &state->batch;
    *batch = (struct cuda_batch){.pool = *step->pool, .items_count = step->items_count};
    cuda_batch_bound(
        step->items, step->items_count, step->views, views_count(state, step->items_count), step->statistics, batch);
    batch->slots_most = step->slots_most > batch->slots_most ? step->slots_most : batch->slots_most;
    if (rounds) {
        batch->rows_count = batch->items_count = padded_rows(step->rows, step->rows_room);
        batch->slots_most = rounded_slots(batch->slots_most);
    }
    if (batch->items_count > state->items_room) {
        free(state->items);
        state->items = malloc(batch->items_count * sizeof *state->items);
        state->items_room = state->items != NULL ? batch->items_count : 0;
        if (state->items == NULL)
            return cuda_check(cuda, cudaErrorMemoryAllocation, "step");
    }
    memcpy(state->items, step->items, step->items_count * sizeof *state->items);
    for (uint32_t i = step->items_count; i < batch->items_count; i++)
        state->items[i] = (struct kv_item){.first_row = i, .rows = 1};
    return true;
}

/* ---- the copy ---- */

static size_t place(size_t *at, size_t bytes) {
    size_t offset = *at;
    *at += cuda_stage_size(bytes);
    return offset;
}

static struct step_layout lay_out(const struct step_state *state, uint32_t tiles) {
    const struct cuda_batch *batch = &state->batch;
    const struct kv_step *step = &state->step;
    size_t views = views_count(state, batch->items_count), at = 0;
    size_t moments = (size_t)batch->pool.layout.layers * batch->items_count;
    struct step_layout layout;
    layout.tokens = place(&at, batch->rows_count * sizeof *step->tokens);
    layout.items = place(&at, batch->items_count * sizeof *batch->items);
    layout.rows = place(&at, batch->rows_count * sizeof *batch->rows);
    layout.wanted = place(&at, step->wanted != NULL ? step->wanted_count * sizeof *step->wanted : 0);
    layout.tiles = place(&at, tiles * sizeof(struct attend_tile));
    layout.views = place(&at, views * sizeof *batch->views);
    layout.moments = place(&at, step->moments != NULL ? moments * sizeof *step->moments : 0);
    layout.tables = at;
    for (size_t i = 0; i < views_count(state, step->items_count); i++)
        at += cuda_view_bytes(&step->views[i]);
    layout.bytes = at;
    return layout;
}

/* Arrays [layers][have] of `bytes` each to [layers][want], zero where there are none. */
static void write_layers(char *to, const void *from, uint32_t layers, size_t have, size_t want, size_t bytes) {
    for (uint32_t layer = 0; layer < layers; layer++, to += want * bytes) {
        memcpy(to, (const char *)from + layer * have * bytes, have * bytes);
        memset(to + have * bytes, 0, (want - have) * bytes);
    }
}

static void write_rows(const struct step_state *state, char *host) {
    const struct kv_step *step = &state->step;
    int32_t *tokens = (int32_t *)(host + state->layout.tokens);
    struct cuda_row *row = (struct cuda_row *)(host + state->layout.rows);
    memcpy(tokens, step->tokens, step->rows * sizeof *tokens);
    memset(tokens + step->rows, 0, (state->batch.rows_count - step->rows) * sizeof *tokens);
    for (uint32_t item = 0; item < state->batch.items_count; item++)
        for (uint32_t token = 0; token < state->items[item].rows; token++)
            *row++ = (struct cuda_row){item, token};
}

/* Items that do nothing have a row of the batch, which is computed, but append none. */
static void write_items(const struct step_state *state, struct kv_item *to) {
    memcpy(to, state->items, state->batch.items_count * sizeof *to);
    for (uint32_t i = state->step.items_count; i < state->batch.items_count; i++)
        to[i].rows = 0;
}

/* Views, and behind all other parts the tables of those that need one. */
static void write_views(const struct step_state *state, struct cuda_stage *stage) {
    const struct kv_layout *layout = &state->batch.pool.layout;
    size_t have = (size_t)state->step.items_count * layout->kv_heads;
    size_t want = (size_t)state->batch.items_count * layout->kv_heads;
    struct cuda_head_view *to = (struct cuda_head_view *)(stage->host + state->layout.views);
    const struct kv_head_view *from = state->step.views;
    stage->used = state->layout.tables;
    for (uint32_t layer = 0; layer < layout->layers; layer++, to += want, from += have) {
        for (size_t i = 0; i < have; i++)
            to[i] = cuda_view_stage(stage, &from[i]);
        memset(to + have, 0, (want - have) * sizeof *to);
    }
}

/* Sends everything. False when there was an error. */
static bool send_step(struct cuda_backend *cuda, struct step_state *state, const struct attend_plan *plan) {
    const struct kv_step *step = &state->step;
    const struct step_layout *layout = &state->layout;
    const struct kv_layout *cache = &step->pool->layout;
    struct cuda_stage stage;
    char *device = cuda_scratch_reserve(cuda, &state->memory, layout->bytes);
    if (device == NULL || !cuda_stage_begin(cuda, layout->bytes, &stage))
        return false;
    stage.device = device; /* where it is to stay, instead of the ring's own */
    write_rows(state, stage.host);
    write_items(state, (struct kv_item *)(stage.host + layout->items));
    if (step->wanted != NULL)
        memcpy(stage.host + layout->wanted, step->wanted, step->wanted_count * sizeof *step->wanted);
    memcpy(stage.host + layout->tiles, plan->list, plan->count * sizeof *plan->list);
    if (step->moments != NULL)
        write_layers(stage.host + layout->moments, step->moments, cache->layers, step->items_count,
            state->batch.items_count, sizeof *step->moments);
    write_views(state, &stage);
    return cuda_stage_send(cuda, &stage);
}

/* ---- statistics ---- */

/* Room for the step's, on both sides; what is there is void if it moves, or has another shape. */
static bool statistics_reserve(struct cuda_backend *cuda, struct step_state *state, bool *is_void) {
    struct step_statistics *sent = &state->statistics;
    const struct kv_layout *layout = &state->step.pool->layout;
    size_t real = (size_t)state->step.items_count * layout->kv_heads;
    size_t padded = (size_t)state->batch.items_count * layout->kv_heads, count = layout->layers * padded;
    if (cuda_scratch_reserve(cuda, &sent->memory, count * sizeof *sent->heads) == NULL)
        return false;
    if (count > sent->room) {
        free(sent->heads);
        sent->bytes = 0;
        sent->heads = malloc(count * sizeof *sent->heads);
        sent->room = sent->heads != NULL ? count : 0;
        if (sent->heads == NULL)
            return cuda_check(cuda, cudaErrorMemoryAllocation, "step");
    }
    *is_void = sent->bytes != sent->memory.bytes || sent->layers != layout->layers || sent->real != real ||
               sent->padded != padded;
    if (*is_void)
        memset(sent->heads, 0, count * sizeof *sent->heads);
    sent->bytes = sent->memory.bytes;
    sent->layers = layout->layers;
    sent->real = real;
    sent->padded = padded;
    return true;
}

/* Takes over what the step has. The layers from *first to before *end are others than before. */
static void statistics_take(
    struct step_statistics *sent, const struct kv_statistics *from, uint32_t *first, uint32_t *end) {
    *first = sent->layers;
    *end = 0;
    for (uint32_t layer = 0; layer < sent->layers; layer++) {
        struct kv_statistics *to = sent->heads + layer * sent->padded;
        const struct kv_statistics *next = from + layer * sent->real;
        if (memcmp(to, next, sent->real * sizeof *to) == 0)
            continue;
        memcpy(to, next, sent->real * sizeof *to);
        *first = layer < *first ? layer : *first;
        *end = layer + 1;
    }
}

/* Sends those that changed since the step before. False when there was an error. */
static bool send_statistics(struct cuda_backend *cuda, struct step_state *state) {
    struct step_statistics *sent = &state->statistics;
    struct cuda_stage stage;
    uint32_t first, end;
    bool is_void = true;
    if (state->batch.needs == 0)
        return true;
    if (!statistics_reserve(cuda, state, &is_void))
        return false;
    statistics_take(sent, state->step.statistics, &first, &end);
    if (is_void) {
        first = 0;
        end = sent->layers;
    }
    if (first >= end)
        return true;
    size_t from = first * sent->padded, bytes = (end - first) * sent->padded * sizeof *sent->heads;
    bool done = cuda_stage_begin(cuda, bytes, &stage);
    if (done) {
        stage.device = (char *)sent->memory.memory + from * sizeof *sent->heads;
        cuda_stage_copy(&stage, sent->heads + from, bytes);
        done = cuda_stage_send(cuda, &stage);
    }
    if (!done)
        sent->bytes = 0;
    return done;
}

static void set_addresses(struct step_state *state) {
    const char *device = state->memory.memory;
    state->batch.items = (const struct kv_item *)(device + state->layout.items);
    state->batch.rows = (const struct cuda_row *)(device + state->layout.rows);
    state->batch.views = (const struct cuda_head_view *)(device + state->layout.views);
    if (state->batch.needs != 0)
        state->batch.statistics = state->statistics.memory.memory;
}

/* ---- beginning and ending ---- */

static struct graph *find_graph(struct cuda_backend *cuda, struct step_state *state) {
    struct graph_key key;
    memset(&key, 0, sizeof key);
    key.owner = state->step.owner;
    key.pool = state->step.pool->base;
    key.layout = state->step.pool->layout;
    key.rows = state->batch.rows_count;
    key.slots_most = state->batch.slots_most;
    key.needs = state->batch.needs;
    key.moments = state->step.moments != NULL;
    return graph_find(cuda, &state->graphs, &key);
}

/* Takes the step to the device. False when there was an error. */
static bool prepare(struct cuda_backend *cuda, struct step_state *state, bool rounds) {
    const struct kv_step *step = &state->step;
    if (!bound_step(cuda, state, rounds) || !rope_turns_prepare(cuda, step->rope, state->batch.position_most))
        return false;
    const struct attend_plan *plan = attend_plan_get(cuda, &state->batch, state->items, step->heads);
    if (plan == NULL)
        return false;
    state->layout = lay_out(state, plan->count);
    if (!send_statistics(cuda, state) || !send_step(cuda, state, plan))
        return false;
    set_addresses(state);
    return true;
}

enum step_way cuda_step_begin(struct backend *backend, const struct kv_step *step, uint32_t *rows) {
    struct cuda_backend *cuda = cuda_backend(backend);
    struct step_state *state = state_get(cuda);
    *rows = step->rows;
    if (state == NULL || step->rows == 0)
        return STEP_CALLS;
    bool repeats = step->repeats && step->scored == NULL && state->graphs_on;
    state->step = *step;
    state->graph = NULL;
    state->capturing = false;
    state->active = prepare(cuda, state, repeats);
    if (!state->active)
        return STEP_CALLS;
    *rows = state->batch.rows_count;
    if (!repeats)
        return STEP_CALLS;
    state->graph = find_graph(cuda, state);
    bool met = state->graph->uses++ > 0;
    if (graph_is_current(cuda, state->graph))
        return STEP_REPLAY;
    return met && !state->graph->refused ? STEP_CAPTURE : STEP_CALLS;
}

bool cuda_step_start(struct backend *backend, enum step_way way) {
    struct cuda_backend *cuda = cuda_backend(backend);
    struct step_state *state = cuda->step;
    if (state == NULL || state->graph == NULL || way == STEP_CALLS)
        return true;
    if (way == STEP_CAPTURE)
        return state->capturing = graph_capture_begin(cuda, state->graph);
    state->active = false;
    graph_run(cuda, state->graph);
    return true;
}

bool cuda_step_end(struct backend *backend) {
    struct cuda_backend *cuda = cuda_backend(backend);
    struct step_state *state = cuda->step;
    if (state == NULL)
        return true;
    bool captured = state->capturing;
    state->active = false;
    state->capturing = false;
    return !captured || graph_capture_end(cuda, state->graph);
}

/* ---- parts of the step under way ---- */

/* The layer whose part of the step's views this is. */
static bool has_batch(const struct step_state *state, const struct kv_batch *batch) {
    if (state == NULL || !state->active || batch->items != state->step.items ||
        batch->items_count != state->step.items_count)
        return false;
    size_t heads = (size_t)batch->items_count * batch->pool->layout.kv_heads;
    return batch->views == state->step.views + batch->layer * heads;
}

bool cuda_step_batch(struct cuda_backend *cuda, const struct kv_batch *batch, struct cuda_batch *out) {
    const struct step_state *state = cuda->step;
    if (!has_batch(state, batch))
        return false;
    *out = state->batch;
    size_t heads = (size_t)out->items_count * out->pool.layout.kv_heads;
    out->layer = batch->layer;
    cuda_batch_vary(batch, out);
    out->views += batch->layer * heads;
    if (out->statistics != NULL)
        out->statistics += batch->layer * heads;
    return true;
}

const int32_t *cuda_step_tokens(struct cuda_backend *cuda, const int32_t *tokens) {
    const struct step_state *state = cuda->step;
    if (state == NULL || !state->active || tokens != state->step.tokens)
        return NULL;
    return (const int32_t *)((const char *)state->memory.memory + state->layout.tokens);
}

const uint32_t *cuda_step_wanted(struct cuda_backend *cuda, const uint32_t *wanted) {
    const struct step_state *state = cuda->step;
    if (state == NULL || !state->active || wanted == NULL || wanted != state->step.wanted)
        return NULL;
    return (const uint32_t *)((const char *)state->memory.memory + state->layout.wanted);
}

const struct query_moments *cuda_step_moments(
    struct cuda_backend *cuda, const struct kv_batch *batch, const struct query_moments *moments) {
    const struct step_state *state = cuda->step;
    if (!has_batch(state, batch) || moments != state->step.moments + (size_t)batch->layer * batch->items_count)
        return NULL;
    return (const struct query_moments *)((const char *)state->memory.memory + state->layout.moments) +
           (size_t)batch->layer * state->batch.items_count;
}

const struct attend_tile *cuda_step_tiles(struct cuda_backend *cuda, const struct kv_batch *batch) {
    const struct step_state *state = cuda->step;
    if (!has_batch(state, batch))
        return NULL;
    return (const struct attend_tile *)((const char *)state->memory.memory + state->layout.tiles);
}
