/* SPDX-License-Identifier: Apache-2.0 */
#include "engine/cpu/score.h"

#include "engine/cpu/score_state.h"

#include <limits.h>
#include <stdlib.h>

static const struct score_operation operations[STAGE_KIND_COUNT] = {
    [STAGE_POSITION] = {"position", 0, false, false, score_position},
    [STAGE_RANDOM] = {"random", 0, false, false, score_random},
    [STAGE_SUM] = {"sum", STATISTIC_SUM, false, false, score_sum},
    [STAGE_SUM_PER_QUERY] = {"sum per query", STATISTIC_SUM, false, false, score_sum_per_query},
    [STAGE_ABOVE] = {"above", STATISTIC_ABOVE, false, false, score_above},
    [STAGE_WINDOW_SUM] = {"window sum", STATISTIC_WINDOW, false, false, score_window_sum},
    [STAGE_WINDOW_SPREAD] = {"window spread", STATISTIC_WINDOW, false, false, score_window_spread},
    [STAGE_NOISY] = {"noisy", STATISTIC_NOISY, false, false, score_noisy},
    [STAGE_KEY_NORM] = {"key norm", 0, false, false, score_key_norm},
    [STAGE_KEY_DIFFERENCE] = {"key difference", 0, false, false, score_key_difference},
    [STAGE_LAYER_MEAN] = {"layer mean", 0, true, false, score_layer_mean},
    [STAGE_POOL_MAX] = {"pool max", 0, false, false, score_pool_max},
    [STAGE_PROTECT] = {"protect", 0, false, false, score_protect},
    [STAGE_PROTECT_BEST] = {"protect best", 0, false, false, score_protect_best},
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

/* ---- checks ---- */

/* Arrays of those statistics that a stage may need, beside the mask: NULL where the sequence does not keep them. */
static bool has_statistics(const struct kv_statistics *statistics, uint32_t needs) {
    const struct {
        uint32_t need;
        bool there;
    } arrays[] = {
        {STATISTIC_SUM, statistics->sum != NULL},
        {STATISTIC_NOISY, statistics->noisy != NULL},
        {STATISTIC_WINDOW, statistics->window_rows != NULL && statistics->window_sum != NULL && statistics->window > 0},
        {STATISTIC_HEAD_WINDOW, statistics->head_rows != NULL && statistics->window > 0},
        {STATISTIC_OUTPUTS, statistics->outputs != NULL && statistics->window > 0},
        {STATISTIC_ABOVE, statistics->above != NULL},
        {STATISTIC_OUTPUT_NORM, statistics->output_norm != NULL},
    };
    for (size_t i = 0; i < sizeof arrays / sizeof arrays[0]; i++) {
        if ((needs & arrays[i].need) != 0 && !arrays[i].there)
            return false;
    }
    return true;
}

static int check_heads(const struct kv_pool *pool, const struct score_layer *layer,
    const struct score_operation *operation, struct error *error) {
    for (uint32_t head = 0; head < pool->layout.kv_heads; head++) {
        const struct score_head *at = &layer->heads[head];
        if (!has_statistics(&at->statistics, operation->needs) ||
            (operation->needs != 0 && at->statistics.capacity < at->view.slots))
            return error_set(
                error, ERROR_INVALID, "stage %s needs statistics that the sequence does not keep", operation->name);
        if (operation->whole_layer && at->view.slots != layer->heads[0].view.slots)
            return error_set(
                error, ERROR_UNSUPPORTED, "stage %s needs the same slots in all heads of a layer", operation->name);
    }
    return 0;
}

static int check_layer(
    const struct kv_pool *pool, const struct score_layer *layer, uint32_t heads, struct error *error) {
    for (uint32_t i = 0; i < layer->stages_count; i++) {
        const struct score_stage *stage = &layer->stages[i];
        const struct score_operation *operation =
            (uint32_t)stage->kind < STAGE_KIND_COUNT ? &operations[stage->kind] : NULL;
        if (operation == NULL || operation->run == NULL)
            return error_set(error, ERROR_UNSUPPORTED, "the CPU backend has no score stage %d", (int)stage->kind);
        int code = check_heads(pool, layer, operation, error);
        if (code != 0)
            return code;
        size_t columns = (size_t)heads * pool->layout.head_dim;
        if (operation->matrix && (layer->output == NULL || layer->output->columns != columns))
            return error_set(
                error, ERROR_INVALID, "stage %s needs an output matrix of %zu columns", operation->name, columns);
        if (stage->kind == STAGE_EXPECTED_ATTENTION && (layer->moments.sum == NULL || layer->rope == NULL))
            return error_set(error, ERROR_INVALID, "stage %s needs moments of queries", operation->name);
    }
    return 0;
}

/* ---- threads ---- */

struct score_job {
    struct cpu_backend *cpu;
    struct score_state *state;
    const struct kv_pool *pool;
    const struct score_layer *layers;
    uint32_t heads;
};

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

static void score_work(void *context, uint32_t chunk, uint32_t thread) {
    const struct score_job *job = context;
    const struct score_layer *layer = &job->layers[chunk];
    uint32_t kv_heads = job->pool->layout.kv_heads;
    const struct score_unit unit = {
        .cpu = job->cpu,
        .kernels = job->cpu->score,
        .pool = job->pool,
        .layer = layer,
        .scratch = &job->state->scratch[thread],
        .heads = job->heads,
        .group = job->heads / kv_heads,
    };
    int32_t *space = unit.scratch->positions;
    for (uint32_t head = 0; head < kv_heads; head++) {
        find_slots(&unit, head, space);
        space += score_round(layer->heads[head].view.slots);
    }
    for (uint32_t i = 0; i < layer->stages_count; i++) {
        const struct score_stage *stage = &layer->stages[i];
        const struct score_operation *operation = &operations[stage->kind];
        for (uint32_t head = 0; head < (operation->whole_layer ? 1 : kv_heads); head++)
            operation->run(&unit, stage, head);
    }
    for (uint32_t head = 0; head < kv_heads; head++)
        clear_holes(&unit, head);
}

int cpu_score(struct backend *backend, const struct kv_pool *pool, const struct score_layer *layers, uint32_t count,
    uint32_t heads, struct error *error) {
    struct cpu_backend *cpu = cpu_backend(backend);
    if (heads == 0 || heads % pool->layout.kv_heads != 0 || pool->layout.head_dim > ATTEND_DIM_MAX)
        return error_set(error, ERROR_UNSUPPORTED, "%u heads of %u channels on %u KV heads cannot be scored", heads,
            pool->layout.head_dim, pool->layout.kv_heads);
    for (uint32_t i = 0; i < count; i++) {
        int code = check_layer(pool, &layers[i], heads, error);
        if (code != 0)
            return code;
    }
    struct score_state *state = score_state_prepare(cpu, pool, layers, count, heads, error);
    if (state == NULL)
        return ERROR_MEMORY;
    struct score_job job = {cpu, state, pool, layers, heads};
    if (count == 1)
        score_work(&job, 0, 0);
    else if (count > 1)
        thread_pool_run(cpu->threads, count, score_work, &job);
    return 0;
}
