/* SPDX-License-Identifier: Apache-2.0 */
#include "engine/cpu/score.h"

#include "engine/cpu/score_state.h"

#include <math.h>

static const struct score_operation operations[STAGE_KIND_COUNT] = {
    [STAGE_POSITION] = {.alone = true, .run = score_position},
    [STAGE_RANDOM] = {.alone = true, .run = score_random},
    [STAGE_SUM] = {.alone = true, .run = score_sum},
    [STAGE_SUM_PER_QUERY] = {.alone = true, .run = score_sum_per_query},
    [STAGE_ABOVE] = {.alone = true, .run = score_above},
    [STAGE_WINDOW_SUM] = {.alone = true, .run = score_window_sum},
    [STAGE_WINDOW_SPREAD] = {.alone = true, .run = score_window_spread},
    [STAGE_NOISY] = {.alone = true, .run = score_noisy},
    [STAGE_KEY_NORM] = {.alone = true, .run = score_key_norm},
    [STAGE_KEY_DIFFERENCE] = {.alone = true, .run = score_key_difference},
    [STAGE_EXPECTED_ATTENTION] = {.run = score_expected_attention},
    [STAGE_LAPROX] = {.whole_layer = true, .run = score_laprox},
    [STAGE_LAPROX_HEAD] = {.whole_layer = true, .run = score_laprox_head},
    [STAGE_DROP_ERROR] = {.run = score_drop_error},
    [STAGE_LAYER_MEAN] = {.whole_layer = true, .run = score_layer_mean},
    [STAGE_TIMES_VALUE_NORM] = {.alone = true, .run = score_times_value_norm},
    [STAGE_TIMES_OUTPUT_NORM] = {.run = score_times_output_norm},
    [STAGE_POOL_MAX] = {.alone = true, .run = score_pool_max},
    [STAGE_POOL_ADAPTIVE] = {.alone = true, .run = score_pool_adaptive},
    [STAGE_PROTECT] = {.alone = true, .run = score_protect},
    [STAGE_PROTECT_BEST] = {.alone = true, .run = score_protect_best},
    [STAGE_NETWORK] = {.whole_layer = true, .run = score_network},
    [STAGE_LOG_SOFTMAX] = {.run = score_log_softmax},
};

const struct score_kernels *cpu_score_kernels(enum cpu_tier tier) {
#if defined(__x86_64__)
    if (tier >= CPU_AVX512)
        return &score_kernels_avx512;
    if (tier >= CPU_AVX2)
        return &score_kernels_avx2;
#endif
    (void)tier;
    return &score_kernels_scalar;
}

/* ---- threads ---- */

/* Where a head's slots are: the host's list, or what the pages hold. Both are below 2^31. */
static void find_slots(const struct score_unit *unit, uint32_t head, int32_t *space) {
    const struct score_head *at = &unit->layer->heads[head];
    struct score_slots *slots = &unit->scratch->slots[head];
    if (at->positions != NULL) {
        slots->positions = (const int32_t *)at->positions;
    } else {
        slots->positions = space;
        for (uint32_t slot = 0; slot < at->view.slots; slot += KV_PAGE_SLOTS) {
            const int32_t *from = kv_page_positions(&unit->pool->layout, score_page(unit, &at->view, slot));
            for (uint32_t place = 0; place < KV_PAGE_SLOTS; place++)
                space[slot + place] = from[place];
        }
    }
    if (at->order != NULL && at->order_count > 0) /* unused slots come last */
        slots->holes = slots->positions[at->order[at->order_count - 1]] == KV_NO_POSITION;
    else
        slots->holes = unit->kernels->last_position(slots->positions, at->view.slots) == KV_NO_POSITION;
}

static void clear_holes(const struct score_unit *unit, uint32_t head) {
    const struct score_slots *slots = &unit->scratch->slots[head];
    const struct score_head *at = &unit->layer->heads[head];
    for (uint32_t slot = 0; slots->holes && slot < at->view.slots; slot++) {
        if (slots->positions[slot] == KV_NO_POSITION)
            at->scores[slot] = NAN;
    }
}

/* The layer as its stages see it: every head has scores. */
static struct score_layer scored_layer(
    const struct score_layer *layer, uint32_t kv_heads, struct score_scratch *scratch) {
    struct score_layer scored = *layer;
    float *scores = scratch->scores;
    for (uint32_t head = 0; head < kv_heads; head++) {
        scratch->heads[head] = layer->heads[head];
        if (layer->heads[head].scores == NULL)
            scratch->heads[head].scores = scores;
        scores += score_round(layer->heads[head].view.slots);
    }
    scored.heads = scratch->heads;
    return scored;
}

static void find_worst(const struct score_unit *unit, uint32_t head) {
    const struct score_head *at = &unit->layer->heads[head];
    if (at->worst != NULL)
        *at->worst = unit->kernels->worst(at->scores, unit->scratch->slots[head].positions, at->view.slots);
}

/* The stages of snapkv. */
static bool pools_window_sums(const struct score_layer *layer) {
    const struct score_stage *stages = layer->stages;
    return layer->stages_count == 3 && stages[0].kind == STAGE_WINDOW_SUM && stages[1].kind == STAGE_PROTECT &&
           stages[2].kind == STAGE_POOL_MAX;
}

/* Of every head only the slot that goes is asked for: a decode step. */
static bool only_pooled_worst(const struct score_layer *layer, uint32_t kv_heads) {
    bool pooled = pools_window_sums(layer);
    for (uint32_t head = 0; head < kv_heads && pooled; head++)
        pooled = layer->heads[head].scores == NULL;
    return pooled;
}

static void expect(const void *memory, size_t bytes) {
    for (size_t at = 0; memory != NULL && at < bytes; at += 64)
        __builtin_prefetch((const char *)memory + at, 0, 2);
}

/* Fetches what find_pooled_worst reads of a head. */
static void expect_head(const struct score_head *at) {
    size_t slots = at->view.slots;
    if (at->worst == NULL)
        return;
    expect(at->statistics.window_sum, slots * sizeof *at->statistics.window_sum);
    expect(at->order, at->order_count * sizeof *at->order);
    expect(at->positions, slots * sizeof *at->positions);
}

/* What the stages of a pooled layer lead to, without a score for every slot. */
static void find_pooled_worst(const struct score_unit *unit, uint32_t head) {
    const struct score_stage *stages = unit->layer->stages;
    if (unit->layer->heads[head].worst == NULL)
        return;
    score_window_sum(unit, &stages[0], head);
    if (score_worst_pooled(unit, &stages[2], head))
        return;
    score_protect(unit, &stages[1], head);
    clear_holes(unit, head);
    find_worst(unit, head);
}

/* All heads; those of the layer that this thread is likely to do next are fetched meanwhile. */
static void find_all_pooled_worst(const struct score_unit *unit, const struct score_layer *next) {
    uint32_t kv_heads = unit->pool->layout.kv_heads;
    for (uint32_t head = 0; head < kv_heads; head++) {
        if (head + 1 < kv_heads)
            expect_head(&unit->layer->heads[head + 1]);
        else if (next != NULL)
            expect_head(&next->heads[0]);
        find_pooled_worst(unit, head);
    }
}

static struct score_unit score_unit(const struct score_call *call, const struct score_layer *layer, uint32_t thread) {
    return (struct score_unit){
        .cpu = call->cpu,
        .kernels = call->cpu->score,
        .pool = call->pool,
        .layer = layer,
        .scratch = &call->state->scratch[thread],
        .matrix = layer->layer < call->state->layers ? &call->state->matrices[layer->layer] : NULL,
        .heads = call->heads,
        .group = call->heads / call->pool->layout.kv_heads,
    };
}

static void score_work(void *context, uint32_t chunk, uint32_t thread) {
    const struct score_call *call = context;
    uint32_t kv_heads = call->pool->layout.kv_heads;
    const struct score_layer scored = scored_layer(&call->layers[chunk], kv_heads, &call->state->scratch[thread]);
    const struct score_layer *layer = &scored;
    const struct score_unit unit = score_unit(call, layer, thread);
    int32_t *space = unit.scratch->positions;
    for (uint32_t head = 0; head < kv_heads; head++) {
        find_slots(&unit, head, space);
        space += score_round(layer->heads[head].view.slots);
    }
    if (only_pooled_worst(&call->layers[chunk], kv_heads)) {
        uint32_t next = chunk + call->state->threads;
        find_all_pooled_worst(&unit, next < call->count ? &call->layers[next] : NULL);
        return;
    }
    for (uint32_t i = 0; i < layer->stages_count; i++) {
        const struct score_stage *stage = &layer->stages[i];
        const struct score_operation *operation = &operations[stage->kind];
        for (uint32_t head = 0; head < (operation->whole_layer ? 1 : kv_heads); head++)
            operation->run(&unit, stage, head);
    }
    for (uint32_t head = 0; head < kv_heads; head++) {
        clear_holes(&unit, head);
        find_worst(&unit, head);
    }
}

bool cpu_attend_scores(const struct score_stage *stages, uint32_t count) {
    for (uint32_t i = 0; i < count; i++) {
        if ((uint32_t)stages[i].kind >= STAGE_KIND_COUNT || !operations[stages[i].kind].alone)
            return false;
    }
    return true;
}

void score_expect(const struct score_layer *layer, uint32_t head, uint32_t first_slot, uint32_t slots) {
    const struct score_head *at = &layer->heads[head];
    if (at->worst != NULL && at->order != NULL)
        expect(at->order + first_slot, slots * sizeof *at->order);
}

/* Positions are those of the pages, which attention has just read. */
void score_head_alone(const struct score_call *call, const struct score_layer *layer, uint32_t head, uint32_t thread) {
    struct score_scratch *scratch = &call->state->scratch[thread];
    struct score_layer scored = *layer;
    scratch->heads[head] = layer->heads[head];
    scratch->heads[head].scores = scratch->scores;
    scratch->heads[head].positions = NULL;
    scored.heads = scratch->heads;
    const struct score_unit unit = score_unit(call, &scored, thread);
    find_slots(&unit, head, scratch->positions);
    if (pools_window_sums(layer)) {
        find_pooled_worst(&unit, head);
        return;
    }
    for (uint32_t i = 0; i < layer->stages_count; i++)
        operations[layer->stages[i].kind].run(&unit, &layer->stages[i], head);
    clear_holes(&unit, head);
    find_worst(&unit, head);
}

int cpu_score(struct backend *backend, const struct kv_pool *pool, const struct score_layer *layers, uint32_t count,
    uint32_t heads, struct error *error) {
    int code = score_check(pool, layers, count, heads, error);
    if (code != 0)
        return code;
    struct score_call call = {cpu_backend(backend), NULL, pool, layers, count, heads};
    call.state = score_state_get(call.cpu);
    if (call.state == NULL)
        return error_set(error, ERROR_MEMORY, "no memory for scoring");
    code = score_scratch_prepare(&call, error);
    if (code == 0)
        code = score_matrices_prepare(&call, error);
    if (code == 0)
        code = score_numbers_fill(&call, error);
    if (code != 0)
        return code;
    if (count == 1)
        score_work(&call, 0, 0);
    else if (count > 1)
        thread_pool_run(call.cpu->threads, count, score_work, &call);
    return 0;
}
