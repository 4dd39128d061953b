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

/* Those that the keys of a call need. */
static int turns_of_call(const struct score_call *call, struct error *error) {
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

/* Up to sixteen slots of one (layer, KV head), of one or several sequences: a matrix that all are multiplied by is read
 * once. */
struct number_block {
    const struct score_call *call;
    const struct policy_network *network;
    uint32_t head; /* KV head of the layer */
    uint32_t layer;
    uint32_t count;
    const struct kv_statistics *statistics[SCORE_LANES];
    uint32_t slots[SCORE_LANES];
    uint32_t positions[SCORE_LANES];
    const struct score_head *waiting; /* a page is read when the next one is known, and fetched meanwhile */
    uint32_t waiting_slot;
    float *page_keys, *page_values; /* [d][16] of a page */
    float *keys, *values;           /* [d][16] of the block's slots */
    float *turned;                  /* [d][16] */
    float *numbers;                 /* [content][16] */
    float *space;                   /* for unturn */
};

size_t score_numbers_floats(uint32_t dim) {
    size_t block = (size_t)dim * SCORE_LANES, turns = 2 * (size_t)padded_pairs(dim) * SCORE_LANES + block;
    return 5 * block + turns + NETWORK_CONTENT_MAX * SCORE_LANES;
}

/* The row that says which slots have numbers. */
static const uint16_t *norms_of(const struct kv_statistics *statistics) {
    return statistics->content_rows + (size_t)statistics->content * statistics->capacity;
}

static void block_open(const struct score_call *call, float *memory, struct number_block *block) {
    size_t floats = (size_t)call->pool->layout.head_dim * SCORE_LANES;
    *block = (struct number_block){.call = call, .page_keys = memory};
    block->page_values = block->page_keys + floats;
    block->keys = block->page_values + floats;
    block->values = block->keys + floats;
    block->turned = block->values + floats;
    block->numbers = block->turned + floats;
    block->space = block->numbers + NETWORK_CONTENT_MAX * SCORE_LANES;
}

/* One row of content_rows for the block's slots. */
static void store_row(const struct number_block *block, uint32_t row, const float *numbers, float offset) {
    uint16_t narrow[SCORE_LANES];
    block->call->cpu->score->network.narrow(numbers, offset, narrow);
    for (uint32_t lane = 0; lane < block->count; lane++) {
        const struct kv_statistics *to = block->statistics[lane];
        to->content_rows[(size_t)row * to->capacity + block->slots[lane]] = narrow[lane];
    }
}

/* C k + o of the keys without rotation. */
static void store_content(const struct number_block *block) {
    const struct number_turns *turns = block->call->state->number_turns;
    const struct score_kernels *kernels = block->call->cpu->score;
    const struct kv_layout *layout = &block->call->pool->layout;
    uint32_t content = block->network->shape.content, dim = layout->head_dim;
    size_t row = 2 * (size_t)padded_pairs(turns->dim);
    size_t number = kv_layout_head_number(layout, block->layer, block->head);
    const float *low[SCORE_LANES], *high[SCORE_LANES];
    for (uint32_t lane = 0; lane < SCORE_LANES; lane++) {
        low[lane] = turns->low + (size_t)(block->positions[lane] % TURNS_LOW) * row;
        high[lane] = turns->high + (size_t)(block->positions[lane] / TURNS_LOW) * row;
    }
    kernels->network.unturn(block->keys, low, high, turns->dim / 2, block->space);
    kernels->products(block->keys, SCORE_LANES, block->network->content + number * content * dim, dim, 1, content, dim,
        false, block->numbers);
    for (uint32_t j = 0; j < content; j++)
        store_row(block, j, block->numbers + j * SCORE_LANES, block->network->content_offset[number * content + j]);
}

/* Computes what the block's slots lack, and empties it. */
static void block_flush(struct number_block *block) {
    if (block->count == 0)
        return;
    const struct score_call *call = block->call;
    uint32_t dim = call->pool->layout.head_dim, group = call->heads / call->pool->layout.kv_heads;
    uint32_t content = block->network->shape.content;
    float value_norm[SCORE_LANES], output_norm[SCORE_LANES];
    bool outputs = score_network_weighs(&block->network->shape);
    const float *factors =
        outputs ? call->state->matrices[block->layer].factors + (size_t)block->head * group * dim * dim : NULL;
    if (content > 0)
        store_content(block);
    score_page_norms(
        call->cpu->score, dim, factors, group, block->values, block->turned, value_norm, outputs ? output_norm : NULL);
    if (outputs)
        store_row(block, content + 1, output_norm, 0);
    store_row(block, content, value_norm, 0); /* last: says that all are there */
    block->count = 0;
}

static void block_add(struct number_block *block, const struct score_head *head, uint32_t slot, uint32_t position) {
    uint32_t lane = block->count++, place = slot % KV_PAGE_SLOTS, dim = block->call->pool->layout.head_dim;
    block->statistics[lane] = &head->statistics;
    block->slots[lane] = slot;
    block->positions[lane] = position;
    for (uint32_t c = 0; block->network->shape.content > 0 && c < dim; c++)
        block->keys[c * SCORE_LANES + lane] = block->page_keys[c * SCORE_LANES + place];
    for (uint32_t c = 0; c < dim; c++)
        block->values[c * SCORE_LANES + lane] = block->page_values[c * SCORE_LANES + place];
    if (block->count == SCORE_LANES)
        block_flush(block);
}

/* The slots of the page that waits, which have no numbers yet; `next`: the page that will be read after it. */
static void add_waiting(struct number_block *block, const char *next) {
    const struct kv_pool *pool = block->call->pool;
    const struct score_format_kernels *format = &block->call->cpu->score->formats[pool->layout.format];
    const struct score_head *head = block->waiting;
    uint32_t slot = block->waiting_slot;
    block->waiting = NULL;
    if (head == NULL)
        return;
    char *page = kv_pool_page(pool, head->view.pages[slot / KV_PAGE_SLOTS]);
    const int32_t *positions =
        head->positions != NULL ? (const int32_t *)head->positions + slot : kv_page_positions(&pool->layout, page);
    const uint16_t *norms = norms_of(&head->statistics) + slot;
    if (block->network->shape.content > 0)
        format->keys(page, next != NULL ? next : page, pool->layout.head_dim, block->page_keys);
    format->values(page, next != NULL ? next : page, pool->layout.head_dim, block->page_values);
    for (uint32_t place = 0; place < score_page_slots(&head->view, slot); place++)
        if (norms[place] == 0 && positions[place] != KV_NO_POSITION)
            block_add(block, head, slot + place, (uint32_t)positions[place]);
}

static void block_end(struct number_block *block) {
    add_waiting(block, NULL);
    block_flush(block);
}

/* Pages of a head that may have such slots: positions that the host knows spare a look at others. */
static void add_head(struct number_block *block, const struct score_head *head) {
    const struct kv_statistics *statistics = &head->statistics;
    const uint16_t *norms = norms_of(statistics);
    const struct network_kernels *kernels = &block->call->cpu->score->network;
    uint32_t slots = head->view.slots, slot = 0;
    while ((slot = kernels->next_unknown(norms, (const int32_t *)head->positions, slots, slot)) < slots) {
        add_waiting(block, kv_pool_page(block->call->pool, head->view.pages[slot / KV_PAGE_SLOTS]));
        block->waiting = head;
        block->waiting_slot = slot;
        slot += KV_PAGE_SLOTS;
        if (slot >= slots)
            break;
    }
}

static bool needs_numbers(const struct score_layer *layer) {
    return score_has_stage(layer, STAGE_NETWORK) && (network_needs(&layer->network->shape) & STATISTIC_CONTENT) != 0;
}

/* One layer of the model, in all sequences of the call. */
static void numbers_work(void *context, uint32_t chunk, uint32_t thread) {
    const struct score_call *call = context;
    struct number_block block;
    block_open(call, call->state->scratch[thread].blocks, &block);
    block.layer = chunk;
    for (block.head = 0; block.head < call->pool->layout.kv_heads; block.head++) {
        for (uint32_t i = 0; i < call->count; i++) {
            const struct score_layer *layer = &call->layers[i];
            if (layer->layer != chunk || !needs_numbers(layer))
                continue;
            if (block.network != layer->network)
                block_end(&block);
            block.network = layer->network;
            add_head(&block, &layer->heads[block.head]);
        }
        block_end(&block);
    }
}

int score_numbers_fill(const struct score_call *call, struct error *error) {
    uint32_t wanted = 0;
    for (uint32_t i = 0; i < call->count; i++)
        wanted += needs_numbers(&call->layers[i]);
    int code = wanted > 0 ? turns_of_call(call, error) : 0;
    if (code == 0 && wanted > 0)
        thread_pool_run(call->cpu->threads, call->pool->layout.layers, numbers_work, (void *)call);
    return code;
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
