/* SPDX-License-Identifier: Apache-2.0
 *
 * Scores: each rank those of its heads. A stage that takes the mean over a layer's heads needs all of them: ranks run
 * what comes before it, the host takes the mean, and ranks go on from there with what comes after.
 */
#include "parallel/internal.h"

#include <stdlib.h>
#include <string.h>

struct score_call {
    struct parallel *p;
    const struct kv_pool *pool;
    const struct score_layer *layers;
    uint32_t count, heads;
    bool after; /* the mean was taken: only the layers that wait for it, and the stages that follow */
    struct error errors[BACKEND_RANKS_MAX];
    double *entropy, *variance; /* [ranks][count] window_preference */
};

/* A rank's copy of the layers, in its work space. */
struct rank_layers {
    struct score_layer *layers; /* [count] */
    struct tensor *outputs;     /* [count] */
    struct score_head *heads;   /* [count * its heads] of layers that wait for a mean */
};

static size_t space_bytes(const struct score_call *call) {
    uint32_t own = call->pool->layout.kv_heads / call->p->ranks_count;
    return call->count * (sizeof(struct score_layer) + sizeof(struct tensor) + own * sizeof(struct score_head));
}

static struct rank_layers space_of(const struct score_call *call, uint32_t rank) {
    struct rank_layers space = {.layers = call->p->ranks[rank].score.memory};
    space.outputs = (struct tensor *)(space.layers + call->count);
    space.heads = (struct score_head *)(space.outputs + call->count);
    return space;
}

/* Place of the stage that takes a mean over the layer; stages_count: there is none. */
static uint32_t mean_stage(const struct score_layer *layer) {
    uint32_t at = 0;
    while (at < layer->stages_count && layer->stages[at].kind != STAGE_LAYER_MEAN)
        at++;
    return at;
}

static bool waits(const struct score_layer *layer) {
    return mean_stage(layer) < layer->stages_count;
}

/* ---- one call of each rank ---- */

/* Heads that show their scores, in memory of the rank where they have none; after: they may name the worst too. */
static struct score_head *show_scores(const struct score_call *call, const struct score_layer *layer, uint32_t rank,
    struct score_head *to, float **scores) {
    uint32_t own = call->pool->layout.kv_heads / call->p->ranks_count;
    for (uint32_t head = 0; head < own; head++) {
        to[head] = layer->heads[rank * own + head];
        if (!call->after)
            to[head].worst = NULL;
        if (to[head].scores != NULL)
            continue;
        to[head].scores = *scores;
        *scores += to[head].view.slots;
    }
    return to;
}

/* The layers as a rank sees them; returns how many it has to do. */
static uint32_t cut_layers(const struct score_call *call, uint32_t rank) {
    struct rank_layers space = space_of(call, rank);
    uint32_t own = call->pool->layout.kv_heads / call->p->ranks_count, count = 0;
    float *scores = call->p->ranks[rank].scores;
    for (uint32_t i = 0; i < call->count; i++) {
        const struct score_layer *layer = &call->layers[i];
        uint32_t mean = mean_stage(layer);
        if (call->after && mean == layer->stages_count)
            continue;
        struct score_layer *part = &space.layers[count];
        *part = *layer;
        part->heads = layer->heads + rank * own;
        part->moments = parallel_moments(call->p, &layer->moments, rank);
        if (layer->output != NULL) {
            space.outputs[count] = parallel_output(call->p, layer->output, rank);
            part->output = &space.outputs[count];
        }
        if (mean < layer->stages_count) {
            part->heads = show_scores(call, layer, rank, space.heads + (size_t)count * own, &scores);
            part->stages = call->after ? layer->stages + mean + 1 : layer->stages;
            part->stages_count = call->after ? layer->stages_count - mean - 1 : mean;
        }
        count++;
    }
    return count;
}

static void score_on_rank(void *context, uint32_t rank) {
    struct score_call *call = context;
    struct backend *on = call->p->inner[rank];
    struct kv_pool pool = parallel_pool(call->p, call->pool, rank);
    uint32_t count = cut_layers(call, rank);
    on->operations->score(
        on, &pool, space_of(call, rank).layers, count, call->heads / call->p->ranks_count, &call->errors[rank]);
}

static int run(struct score_call *call, struct error *error) {
    memset(call->errors, 0, sizeof call->errors);
    parallel_run(call->p, score_on_rank, call);
    for (uint32_t rank = 0; rank < call->p->ranks_count; rank++)
        if (call->errors[rank].code != 0)
            return error_set(error, call->errors[rank].code, "%s", call->errors[rank].message);
    return communicator_check(call->p->communicator, error);
}

/* ---- the mean ---- */

/* Where the scores of a layer's head lie: on its rank. */
static const struct score_head *shown_head(const struct score_call *call, uint32_t at, uint32_t head) {
    uint32_t own = call->pool->layout.kv_heads / call->p->ranks_count;
    return &space_of(call, head / own).layers[at].heads[head % own];
}

/* The `at`-th layer of the ranks' work space. Heads are added in ascending order, as one rank does. */
static void take_mean(const struct score_call *call, uint32_t at, float *scores, double *total) {
    uint32_t heads = call->pool->layout.kv_heads, own = heads / call->p->ranks_count;
    uint32_t slots = shown_head(call, at, 0)->view.slots;
    for (uint32_t head = 0; head < heads; head++) {
        struct backend *on = call->p->inner[head / own];
        on->operations->download(on, scores, shown_head(call, at, head)->scores, slots * sizeof *scores);
        for (uint32_t slot = 0; slot < slots; slot++)
            total[slot] = (head > 0 ? total[slot] : 0) + (double)scores[slot];
    }
    for (uint32_t slot = 0; slot < slots; slot++)
        scores[slot] = (float)(total[slot] / (double)heads);
    for (uint32_t head = 0; head < heads; head++) {
        struct backend *on = call->p->inner[head / own];
        on->operations->upload(on, shown_head(call, at, head)->scores, scores, slots * sizeof *scores);
    }
}

static int take_means(const struct score_call *call, struct error *error) {
    uint32_t most = 0;
    for (uint32_t i = 0; i < call->count; i++)
        if (waits(&call->layers[i]) && call->layers[i].heads[0].view.slots > most)
            most = call->layers[i].heads[0].view.slots;
    double *total = malloc(most * (sizeof *total + sizeof(float)) + 1);
    if (total == NULL)
        return error_set(error, ERROR_MEMORY, "no memory for scores");
    for (uint32_t i = 0; i < call->count; i++) /* in the first call every layer is there */
        if (waits(&call->layers[i]))
            take_mean(call, i, (float *)(total + most), total);
    free(total);
    return 0;
}

/* Memory for scores that nobody else will read; also sees that heads of a layer hold as many slots. */
static int prepare_means(struct score_call *call, struct error *error) {
    uint32_t heads = call->pool->layout.kv_heads, own = heads / call->p->ranks_count;
    size_t needed = 0;
    for (uint32_t i = 0; i < call->count; i++) {
        const struct score_head *of = call->layers[i].heads;
        for (uint32_t head = 0; waits(&call->layers[i]) && head < heads; head++)
            if (of[head].view.slots != of[0].view.slots)
                return error_set(
                    error, ERROR_UNSUPPORTED, "stage layer mean needs the same slots in all heads of a layer");
        needed += waits(&call->layers[i]) ? (size_t)own * of[0].view.slots : 0;
    }
    for (uint32_t rank = 0; rank < call->p->ranks_count; rank++) {
        struct rank *of = &call->p->ranks[rank];
        if (needed <= of->scores_count)
            continue;
        of->backend->operations->release(of->backend, of->scores);
        of->scores = of->backend->operations->allocate(of->backend, (needed + needed / 8) * sizeof *of->scores);
        of->scores_count = of->scores != NULL ? needed + needed / 8 : 0;
        if (of->scores == NULL)
            return error_set(error, ERROR_MEMORY, "no memory for scores");
    }
    return 0;
}

/* ---- operations ---- */

static int reserve(const struct score_call *call, struct error *error) {
    for (uint32_t rank = 0; rank < call->p->ranks_count; rank++)
        if (parallel_reserve(&call->p->ranks[rank].score, space_bytes(call)) == NULL)
            return error_set(error, ERROR_MEMORY, "no memory for scoring");
    return 0;
}

static int check_stages(const struct score_call *call, bool *means, struct error *error) {
    *means = false;
    if (call->heads % call->p->ranks_count != 0)
        return error_set(
            error, ERROR_INVALID, "%u heads cannot be scored by %u devices", call->heads, call->p->ranks_count);
    for (uint32_t i = 0; i < call->count; i++) {
        const struct score_layer *layer = &call->layers[i];
        *means = *means || waits(layer);
        for (uint32_t s = 0; s < layer->stages_count; s++)
            if (layer->stages[s].kind == STAGE_LAPROX || layer->stages[s].kind == STAGE_LAPROX_HEAD)
                return error_set(error, ERROR_UNSUPPORTED, "stage laprox needs all heads of a layer on one device");
    }
    return 0;
}

int parallel_score(struct backend *backend, const struct kv_pool *pool, const struct score_layer *layers,
    uint32_t count, uint32_t heads, struct error *error) {
    struct score_call call = {
        .p = parallel_of(backend), .pool = pool, .layers = layers, .count = count, .heads = heads};
    bool means;
    int code = check_stages(&call, &means, error);
    if (code == 0)
        code = reserve(&call, error);
    if (code == 0 && means)
        code = prepare_means(&call, error);
    if (code == 0)
        code = run(&call, error);
    if (code != 0 || !means)
        return code;
    code = take_means(&call, error);
    call.after = true;
    return code == 0 ? run(&call, error) : code;
}

static void preference_on_rank(void *context, uint32_t rank) {
    struct score_call *call = context;
    struct backend *on = call->p->inner[rank];
    struct kv_pool pool = parallel_pool(call->p, call->pool, rank);
    struct rank_layers space = space_of(call, rank);
    uint32_t own = pool.layout.kv_heads;
    for (uint32_t i = 0; i < call->count; i++) {
        space.layers[i] = call->layers[i];
        space.layers[i].heads += rank * own;
    }
    on->operations->window_preference(on, &pool, space.layers, call->count, call->heads / call->p->ranks_count,
        call->entropy + (size_t)rank * call->count, call->variance + (size_t)rank * call->count);
}

/* Both are sums over heads. */
void parallel_window_preference(struct backend *backend, const struct kv_pool *pool, const struct score_layer *layers,
    uint32_t count, uint32_t heads, double *entropy, double *variance) {
    struct score_call call = {
        .p = parallel_of(backend), .pool = pool, .layers = layers, .count = count, .heads = heads};
    size_t numbers = (size_t)call.p->ranks_count * count;
    memset(entropy, 0, count * sizeof *entropy);
    memset(variance, 0, count * sizeof *variance);
    call.entropy = calloc(2 * numbers + 1, sizeof *call.entropy);
    if (call.entropy == NULL || reserve(&call, NULL) != 0) {
        parallel_fail(call.p, ERROR_MEMORY, "no memory for the preferences of layers");
        free(call.entropy);
        return;
    }
    call.variance = call.entropy + numbers;
    parallel_run(call.p, preference_on_rank, &call);
    for (size_t i = 0; i < numbers; i++) {
        entropy[i % count] += call.entropy[i];
        variance[i % count] += call.variance[i];
    }
    free(call.entropy);
}
