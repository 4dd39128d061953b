/* SPDX-License-Identifier: Apache-2.0 */
#include "engine/score_check.h"

#include "policy/network.h"

struct stage_needs {
    const char *name;
    uint32_t statistics; /* mask of enum statistic whose arrays must be there */
    bool same_slots;     /* all heads of the layer must hold as many slots */
    bool matrix;         /* needs W_o */
};

static const struct stage_needs needs_of[STAGE_KIND_COUNT] = {
    [STAGE_POSITION] = {.name = "position"},
    [STAGE_RANDOM] = {.name = "random"},
    [STAGE_SUM] = {.name = "sum", .statistics = STATISTIC_SUM},
    [STAGE_SUM_PER_QUERY] = {.name = "sum per query", .statistics = STATISTIC_SUM},
    [STAGE_ABOVE] = {.name = "above", .statistics = STATISTIC_ABOVE},
    [STAGE_WINDOW_SUM] = {.name = "window sum", .statistics = STATISTIC_WINDOW},
    [STAGE_WINDOW_SPREAD] = {.name = "window spread", .statistics = STATISTIC_WINDOW},
    [STAGE_NOISY] = {.name = "noisy", .statistics = STATISTIC_NOISY},
    [STAGE_KEY_NORM] = {.name = "key norm"},
    [STAGE_KEY_DIFFERENCE] = {.name = "key difference"},
    [STAGE_EXPECTED_ATTENTION] = {.name = "expected attention"},
    [STAGE_LAPROX] = {.name = "laprox",
        .statistics = STATISTIC_HEAD_WINDOW | STATISTIC_OUTPUTS,
        .same_slots = true,
        .matrix = true},
    [STAGE_LAPROX_HEAD] = {.name = "laprox per head",
        .statistics = STATISTIC_HEAD_WINDOW | STATISTIC_OUTPUTS,
        .matrix = true},
    [STAGE_DROP_ERROR] = {.name = "drop error",
        .statistics = STATISTIC_HEAD_WINDOW | STATISTIC_OUTPUTS,
        .matrix = true},
    [STAGE_LAYER_MEAN] = {.name = "layer mean", .same_slots = true},
    [STAGE_TIMES_VALUE_NORM] = {.name = "times value norm"},
    [STAGE_TIMES_OUTPUT_NORM] = {.name = "times output norm", .statistics = STATISTIC_OUTPUT_NORM, .matrix = true},
    [STAGE_POOL_MAX] = {.name = "pool max"},
    [STAGE_POOL_ADAPTIVE] = {.name = "pool adaptive", .statistics = STATISTIC_WINDOW},
    [STAGE_PROTECT] = {.name = "protect"},
    [STAGE_PROTECT_BEST] = {.name = "protect best"},
    [STAGE_NETWORK] = {.name = "network"},
    [STAGE_LOG_SOFTMAX] = {.name = "log softmax"},
};

bool score_has_stage(const struct score_layer *layer, enum score_stage_kind kind) {
    for (uint32_t i = 0; i < layer->stages_count; i++) {
        if (layer->stages[i].kind == kind)
            return true;
    }
    return false;
}

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
        {STATISTIC_SQUARED, statistics->squared != NULL},
        {STATISTIC_ENTROPY, statistics->entropy != NULL},
        {STATISTIC_CONTENT, statistics->content_rows != NULL},
        {STATISTIC_STANDARD, statistics->standard != NULL},
    };
    for (size_t i = 0; i < sizeof arrays / sizeof arrays[0]; i++) {
        if ((needs & arrays[i].need) != 0 && !arrays[i].there)
            return false;
    }
    return true;
}

static int check_heads(const struct kv_pool *pool, const struct score_layer *layer, const struct stage_needs *stage,
    uint32_t statistics, struct error *error) {
    for (uint32_t head = 0; head < pool->layout.kv_heads; head++) {
        const struct score_head *at = &layer->heads[head];
        if (!has_statistics(&at->statistics, statistics) ||
            (statistics != 0 && at->statistics.capacity < at->view.slots))
            return error_set(
                error, ERROR_INVALID, "stage %s needs statistics that the sequence does not keep", stage->name);
        if (stage->same_slots && at->view.slots != layer->heads[0].view.slots)
            return error_set(
                error, ERROR_UNSUPPORTED, "stage %s needs the same slots in all heads of a layer", stage->name);
    }
    return 0;
}

static int check_network(const struct kv_pool *pool, const struct score_layer *layer, struct error *error) {
    const struct kv_layout *layout = &pool->layout;
    const struct policy_network *network = layer->network;
    if (network == NULL)
        return error_set(error, ERROR_INVALID, "stage network needs a network");
    const struct network_shape *shape = &network->shape;
    if (shape->layers != layout->layers || shape->kv_heads != kv_layout_model_heads(layout) ||
        shape->head_dim != layout->head_dim || layer->layer >= layout->layers)
        return error_set(error, ERROR_INVALID,
            "a network for %u layers of %u KV heads of %u channels cannot score layer %u of %u of %u of %u",
            shape->layers, shape->kv_heads, shape->head_dim, layer->layer, layout->layers,
            kv_layout_model_heads(layout), layout->head_dim);
    if (shape->content > 0 && layer->rope == NULL)
        return error_set(error, ERROR_INVALID, "stage network needs the rotation of keys");
    for (uint32_t head = 0; head < layout->kv_heads; head++)
        if (layer->heads[head].statistics.content_rows != NULL &&
            layer->heads[head].statistics.content != shape->content)
            return error_set(error, ERROR_INVALID, "a network of %u numbers of content on a sequence that keeps %u",
                shape->content, layer->heads[head].statistics.content);
    return 0;
}

static int check_matrix(const struct kv_pool *pool, const struct score_layer *layer, uint32_t heads,
    const struct stage_needs *stage, struct error *error) {
    size_t columns = (size_t)heads * pool->layout.head_dim;
    if (layer->layer >= pool->layout.layers)
        return error_set(error, ERROR_INVALID, "layer %u is not one of %u", layer->layer, pool->layout.layers);
    if (layer->output == NULL || layer->output->columns != columns)
        return error_set(error, ERROR_INVALID, "stage %s needs an output matrix of %zu columns", stage->name, columns);
    return 0;
}

static int check_stage(const struct kv_pool *pool, const struct score_layer *layer, uint32_t heads,
    enum score_stage_kind kind, struct error *error) {
    if ((uint32_t)kind >= STAGE_KIND_COUNT || needs_of[kind].name == NULL)
        return error_set(error, ERROR_UNSUPPORTED, "there is no score stage %d", (int)kind);
    const struct stage_needs *stage = &needs_of[kind];
    bool network = kind == STAGE_NETWORK, matrix = stage->matrix;
    int code = network ? check_network(pool, layer, error) : 0;
    if (code != 0)
        return code;
    matrix = matrix || (network && (layer->network->shape.inputs >> INPUT_OUTPUT_NORM & 1) != 0);
    uint32_t statistics = network ? network_needs(&layer->network->shape) : stage->statistics;
    code = check_heads(pool, layer, stage, statistics, error);
    if (code == 0 && matrix)
        code = check_matrix(pool, layer, heads, stage, error);
    if (code == 0 && kind == STAGE_EXPECTED_ATTENTION && (layer->moments.sum == NULL || layer->rope == NULL))
        code = error_set(error, ERROR_INVALID, "stage %s needs moments of queries", stage->name);
    return code;
}

int score_check(
    const struct kv_pool *pool, const struct score_layer *layers, uint32_t count, uint32_t heads, struct error *error) {
    const struct kv_layout *layout = &pool->layout;
    if (heads == 0 || heads % layout->kv_heads != 0 || layout->head_dim > SCORE_HEAD_DIM_MAX)
        return error_set(error, ERROR_UNSUPPORTED, "%u heads of %u channels on %u KV heads cannot be scored", heads,
            layout->head_dim, layout->kv_heads);
    for (uint32_t i = 0; i < count; i++) {
        for (uint32_t s = 0; s < layers[i].stages_count; s++) {
            int code = check_stage(pool, &layers[i], heads, layers[i].stages[s].kind, error);
            if (code != 0)
                return code;
        }
    }
    return 0;
}
