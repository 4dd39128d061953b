/* SPDX-License-Identifier: Apache-2.0
 *
 * Host side of score and slot_norms: everything that kernels need goes to the device in one copy, then stages are
 * launched one after the other for all layers that have the same ones.
 */
#include "cuda/score.h"

#include "cuda/score_state.h"
#include "engine/score_check.h"

#include <stdlib.h>
#include <string.h>

enum { DEVICE_ALIGNMENT = 256 };

/* Layers [first, first + count) of the call's order, which have the same stages. */
struct score_group {
    uint32_t first, count;
    const struct score_layer *layer; /* one of them */
    uint32_t slots_most, positions_most, window_most, width_most;
    bool only_worst; /* stages on slots alone, and nobody reads a score */
    const struct cuda_score_network *network, *device_network;
    const float *inverse_freq; /* device */
};

struct score_job {
    struct cuda_backend *cuda;
    struct score_state *state;
    const struct kv_pool *pool;
    const struct score_layer *layers;
    uint32_t count, heads;
    uint32_t *order; /* [count] layers, group by group, ascending by number */
    struct score_group *groups;
    uint32_t groups_count;
    struct cuda_score_unit *units; /* [count * K] in the same order, host */
    const struct cuda_score_unit *device_units;
    uint32_t *worst; /* device [count * K]: the slots that go */
    bool asks_worst;
};

/* ---- groups ---- */

static bool same_stages(const struct score_layer *a, const struct score_layer *b) {
    if (a->stages_count != b->stages_count || a->network != b->network)
        return false;
    for (uint32_t i = 0; i < a->stages_count; i++)
        if (a->stages[i].kind != b->stages[i].kind || memcmp(&a->stages[i].x, &b->stages[i].x, sizeof(float)) != 0 ||
            a->stages[i].n != b->stages[i].n)
            return false;
    return a->rope == b->rope ||
           (a->rope != NULL && b->rope != NULL && a->rope->dim == b->rope->dim &&
               memcmp(a->rope->inverse_freq, b->rope->inverse_freq, a->rope->dim / 2 * sizeof(float)) == 0);
}

/* Layers of a group by number, and of one number in the order of the call. */
static void order_group(const struct score_job *job, uint32_t *order, uint32_t count) {
    for (uint32_t i = 1; i < count; i++) {
        uint32_t moved = order[i], at = i;
        for (; at > 0 && job->layers[order[at - 1]].layer > job->layers[moved].layer; at--)
            order[at] = order[at - 1];
        order[at] = moved;
    }
}

static uint32_t larger(uint32_t a, uint32_t b) {
    return a > b ? a : b;
}

/* Whether a stage looks at a slot alone. */
static bool is_chained(enum score_stage_kind kind) {
    return kind <= STAGE_NOISY || kind == STAGE_TIMES_OUTPUT_NORM || kind == STAGE_PROTECT;
}

static void measure_group(const struct score_job *job, struct score_group *group) {
    group->only_worst = group->layer->stages_count > 0;
    for (uint32_t i = 0; i < group->layer->stages_count; i++)
        group->only_worst = group->only_worst && is_chained(group->layer->stages[i].kind);
    for (uint32_t i = 0; i < group->count; i++) {
        const struct score_layer *layer = &job->layers[job->order[group->first + i]];
        group->positions_most = larger(group->positions_most, layer->seen);
        group->width_most = larger(group->width_most, layer->output != NULL ? layer->output->rows : 0);
        for (uint32_t k = 0; k < job->pool->layout.kv_heads; k++) {
            group->slots_most = larger(group->slots_most, layer->heads[k].view.slots);
            group->window_most = larger(group->window_most, layer->heads[k].statistics.window);
            group->only_worst = group->only_worst && layer->heads[k].scores == NULL;
        }
    }
}

static void find_groups(struct score_job *job, bool *taken) {
    uint32_t at = 0;
    for (uint32_t i = 0; i < job->count; i++) {
        if (taken[i])
            continue;
        struct score_group *group = &job->groups[job->groups_count++];
        *group = (struct score_group){.first = at, .layer = &job->layers[i]};
        for (uint32_t j = i; j < job->count; j++) {
            if (taken[j] || !same_stages(&job->layers[i], &job->layers[j]))
                continue;
            taken[j] = true;
            job->order[at++] = j;
        }
        group->count = at - group->first;
        order_group(job, job->order + group->first, group->count);
        measure_group(job, group);
    }
}

/* ---- scratch ---- */

/* Device memory handed out from a start; NULL: only counted. */
struct device_space {
    char *base;
    size_t used;
};

static void *space_take(struct device_space *space, size_t bytes) {
    void *at = space->base != NULL ? space->base + space->used : NULL;
    space->used += (bytes + DEVICE_ALIGNMENT - 1) / DEVICE_ALIGNMENT * DEVICE_ALIGNMENT;
    return at;
}

static size_t round_slots(uint32_t slots) {
    return ((size_t)slots + KV_PAGE_SLOTS - 1) / KV_PAGE_SLOTS * KV_PAGE_SLOTS;
}

/* Of stages with matrices, which do not need it at the same time. */
static size_t space_floats(
    const struct score_job *job, const struct score_group *group, const struct cuda_score_unit *unit) {
    uint32_t kv_heads = job->pool->layout.kv_heads, dim = job->pool->layout.head_dim, each = job->heads / kv_heads;
    size_t floats = 0, more;
    if (score_has_stage(group->layer, STAGE_LAPROX) || score_has_stage(group->layer, STAGE_LAPROX_HEAD))
        floats = 2 * (((size_t)unit->width + SCORE_ROWS - 1) / SCORE_ROWS);
    more = score_has_stage(group->layer, STAGE_DROP_ERROR) ? score_drop_floats(unit->statistics.window, each, dim) : 0;
    floats = more > floats ? more : floats;
    more =
        score_has_stage(group->layer, STAGE_EXPECTED_ATTENTION) ? score_expect_floats(unit->view.slots, each, dim) : 0;
    return more > floats ? more : floats;
}

/* What the stages of a unit work in. */
static void take_scratch(const struct score_job *job, const struct score_group *group, struct cuda_score_unit *unit,
    struct device_space *space) {
    const struct score_layer *layer = group->layer;
    uint32_t slots = unit->view.slots, dim = job->pool->layout.head_dim;
    bool network = group->network != NULL, adaptive = score_has_stage(layer, STAGE_POOL_ADAPTIVE);
    bool pools = adaptive || score_has_stage(layer, STAGE_POOL_MAX);
    if (unit->scores == NULL && !group->only_worst)
        unit->scores = space_take(space, round_slots(slots) * sizeof *unit->scores);
    if (pools && group->slots_most > SCORE_HELD)
        unit->sorted = space_take(space, slots * sizeof *unit->sorted);
    if (pools && group->positions_most > SCORE_POSITIONS_SHARED)
        unit->bits = space_take(space, 2 * (((size_t)unit->seen + 31) / 32) * sizeof *unit->bits);
    if (adaptive && group->slots_most > SCORE_HELD)
        unit->sums = space_take(space, ((size_t)slots + 1) * sizeof *unit->sums);
    if (adaptive)
        unit->row_sums = space_take(space, unit->statistics.window * sizeof *unit->row_sums);
    if (score_has_stage(layer, STAGE_KEY_DIFFERENCE))
        unit->anchor = space_take(space, score_anchor_floats(group->slots_most, dim) * sizeof *unit->anchor);
    if ((network && group->network->keeps) || score_has_stage(layer, STAGE_TIMES_OUTPUT_NORM))
        unit->pages_list = space_take(space, (1 + round_slots(slots) / KV_PAGE_SLOTS) * sizeof *unit->pages_list);
    size_t floats = space_floats(job, group, unit);
    if (floats > 0)
        unit->space = space_take(space, floats * sizeof *unit->space);
    if (network && group->network->standardised > 0)
        unit->standard = space_take(space, STATISTIC_STANDARD_NUMBERS * sizeof *unit->standard);
}

/* ---- units ---- */

static uint32_t limit_position(uint32_t position) {
    return position < KV_NO_POSITION ? position : KV_NO_POSITION;
}

/* Parts of W_o that the stages of a layer need. */
static uint32_t matrix_parts(const struct score_layer *layer, const struct cuda_score_network *network) {
    uint32_t parts = network != NULL && network->weighs ? SCORE_FACTORS : 0;
    if (score_has_stage(layer, STAGE_DROP_ERROR))
        parts |= SCORE_FACTORS;
    if (score_has_stage(layer, STAGE_LAPROX_HEAD))
        parts |= SCORE_FACTORS | SCORE_GROUP_GRAMS | SCORE_DENSE;
    if (score_has_stage(layer, STAGE_LAPROX))
        parts |= SCORE_FACTORS | SCORE_ALL_GRAMS | SCORE_DENSE;
    if (score_has_stage(layer, STAGE_TIMES_OUTPUT_NORM))
        parts |= SCORE_DENSE;
    return parts;
}

static void fill_unit(
    const struct score_job *job, const struct score_layer *layer, uint32_t head, struct cuda_score_unit *unit) {
    const struct score_head *from = &layer->heads[head];
    uint32_t window = from->statistics.window, rows = layer->seen < window ? layer->seen : window;
    *unit = (struct cuda_score_unit){
        .view = {.slots = from->view.slots, .summary = from->view.summary},
        .statistics = from->statistics,
        .scores = from->scores,
        .worst = from->worst != NULL ? job->worst + (unit - job->units) : NULL,
        .sinks = limit_position(from->sinks),
        .recent_from = limit_position(from->recent_from),
        .number = kv_layout_head_number(&job->pool->layout, layer->layer, head),
        .head = head,
        .seen = layer->seen,
        .budget = layer->budget,
        .rows = rows,
        .first_row = window > 0 ? (layer->seen - rows) % window : 0,
        .seed = layer->seed,
        .moments = layer->moments,
        .freeze = layer->freeze,
        .width = layer->output != NULL ? layer->output->rows : 0,
    };
}

static int add_matrix(const struct score_job *job, const struct score_layer *layer,
    const struct cuda_score_network *network, struct cuda_score_unit *units, struct error *error) {
    uint32_t parts = matrix_parts(layer, network);
    if (parts == 0)
        return 0;
    const struct score_matrix *matrix =
        cuda_score_matrix(job->cuda, &job->pool->layout, layer->layer, layer->output, job->heads, parts, error);
    if (matrix == NULL)
        return ERROR_MEMORY;
    for (uint32_t k = 0; k < job->pool->layout.kv_heads; k++) {
        units[k].factors = matrix->factors;
        units[k].grams = matrix->grams;
        units[k].dense = matrix->dense;
        units[k].dense_halves = matrix->dense_halves;
    }
    return 0;
}

/* Units of a group, but for their page tables; networks and matrices on the device. */
static int fill_group(const struct score_job *job, struct score_group *group, struct error *error) {
    uint32_t kv_heads = job->pool->layout.kv_heads;
    if (score_has_stage(group->layer, STAGE_NETWORK)) {
        group->network = cuda_score_network_of(job->cuda, group->layer->network, error);
        if (group->network == NULL)
            return ERROR_MEMORY;
    }
    for (uint32_t i = 0; i < group->count; i++) {
        const struct score_layer *layer = &job->layers[job->order[group->first + i]];
        struct cuda_score_unit *units = job->units + (size_t)(group->first + i) * kv_heads;
        for (uint32_t k = 0; k < kv_heads; k++)
            fill_unit(job, layer, k, &units[k]);
        int code = add_matrix(job, layer, group->network, units, error);
        if (code != 0)
            return code;
    }
    return 0;
}

static void take_all_scratch(const struct score_job *job, struct device_space *space) {
    uint32_t kv_heads = job->pool->layout.kv_heads;
    for (uint32_t g = 0; g < job->groups_count; g++) {
        const struct score_group *group = &job->groups[g];
        for (size_t i = (size_t)group->first * kv_heads; i < (size_t)(group->first + group->count) * kv_heads; i++) {
            struct cuda_score_unit unit = job->units[i];
            take_scratch(job, group, space->base != NULL ? &job->units[i] : &unit, space);
        }
    }
}

/* ---- staging ---- */

static size_t stage_bytes(const struct score_job *job) {
    uint32_t kv_heads = job->pool->layout.kv_heads;
    size_t bytes = cuda_stage_size((size_t)job->count * kv_heads * sizeof *job->units);
    for (uint32_t i = 0; i < job->count; i++)
        for (uint32_t k = 0; k < kv_heads; k++)
            bytes += cuda_view_bytes(&job->layers[i].heads[k].view);
    for (uint32_t g = 0; g < job->groups_count; g++) {
        const struct score_layer *layer = job->groups[g].layer;
        bytes += layer->stages_count * cuda_stage_size(sizeof(struct cuda_score_chain));
        bytes += layer->rope != NULL ? cuda_stage_size(layer->rope->dim / 2 * sizeof(float)) : 0;
        bytes += cuda_stage_size(sizeof(struct cuda_score_network));
    }
    return bytes;
}

static void stage_units(struct score_job *job, struct cuda_stage *stage) {
    uint32_t kv_heads = job->pool->layout.kv_heads;
    for (uint32_t i = 0; i < job->count; i++)
        for (uint32_t k = 0; k < kv_heads; k++)
            job->units[(size_t)i * kv_heads + k].view =
                cuda_view_stage(stage, &job->layers[job->order[i]].heads[k].view);
    job->device_units = cuda_stage_copy(stage, job->units, (size_t)job->count * kv_heads * sizeof *job->units);
}

static void stage_group(struct score_group *group, struct cuda_stage *stage) {
    const struct rope_params *rope = group->layer->rope;
    if (group->network != NULL)
        group->device_network = cuda_stage_copy(stage, group->network, sizeof *group->network);
    if (rope != NULL)
        group->inverse_freq = cuda_stage_copy(stage, rope->inverse_freq, rope->dim / 2 * sizeof(float));
}

/* ---- stages ---- */

/* The run of stages on slots alone from stage `first` on; its length. */
static uint32_t launch_chain(const struct score_job *job, const struct score_group *group,
    const struct cuda_score_call *call, uint32_t first, const struct cuda_score_chain *device) {
    const struct score_layer *layer = group->layer;
    uint32_t count = 0;
    while (first + count < layer->stages_count && is_chained(layer->stages[first + count].kind))
        count++;
    launch_score_chain(call, device, job->cuda->stream);
    return count;
}

/* The chains of a group's stages in order, at most as many as it has stages. */
static const struct cuda_score_chain *stage_chains(const struct score_group *group, struct cuda_stage *stage) {
    const struct score_layer *layer = group->layer;
    struct cuda_score_chain chains[SCORE_STAGES_MAX] = {0};
    uint32_t count = 0;
    for (uint32_t i = 0; i < layer->stages_count; i++) {
        if (!is_chained(layer->stages[i].kind))
            continue;
        count += i == 0 || !is_chained(layer->stages[i - 1].kind);
        chains[count - 1].stages[chains[count - 1].count++] = layer->stages[i];
    }
    return cuda_stage_copy(stage, chains, count * sizeof *chains);
}

static void launch_network(
    const struct score_job *job, const struct score_group *group, const struct cuda_score_call *call) {
    const struct cuda_score_network *network = group->network;
    const struct rope_params *rope = group->layer->rope;
    if (network->keeps)
        launch_score_numbers(call, network, rope != NULL ? rope->dim : 0, group->inverse_freq, job->cuda->stream);
    if (network->features == FEATURES_PAPER)
        launch_score_paper(call, network, job->cuda->stream);
    else
        launch_score_network(call, network, group->device_network, job->cuda->stream);
}

static void launch_stage(const struct score_job *job, const struct score_group *group,
    const struct cuda_score_call *call, const struct score_stage *stage) {
    cudaStream_t stream = job->cuda->stream;
    switch (stage->kind) {
    case STAGE_KEY_NORM:
        launch_score_key_norm(call, stream);
        break;
    case STAGE_KEY_DIFFERENCE:
        launch_score_key_difference(call, stream);
        break;
    case STAGE_EXPECTED_ATTENTION:
        launch_score_expected_attention(call, group->layer->rope->dim, group->inverse_freq, stage->n, stage->x, stream);
        break;
    case STAGE_LAPROX:
    case STAGE_LAPROX_HEAD:
        launch_score_laprox(call, stage->kind == STAGE_LAPROX, group->width_most, stream);
        break;
    case STAGE_DROP_ERROR:
        launch_score_drop_error(call, group->window_most, stage->x, stream);
        break;
    case STAGE_LAYER_MEAN:
        launch_score_layer_mean(call, stream);
        break;
    case STAGE_TIMES_VALUE_NORM:
        launch_score_times_value_norm(call, stream);
        break;
    case STAGE_POOL_MAX:
        launch_score_pool_max(call, stage->n / 2, stream);
        break;
    case STAGE_POOL_ADAPTIVE:
        launch_score_pool_adaptive(call, group->window_most, stream);
        break;
    case STAGE_PROTECT_BEST:
        launch_score_protect_best(call, stream);
        break;
    case STAGE_NETWORK:
        launch_network(job, group, call);
        break;
    case STAGE_LOG_SOFTMAX:
        launch_score_log_softmax(call, stream);
        break;
    default:
        break;
    }
}

static void launch_group(
    const struct score_job *job, const struct score_group *group, const struct cuda_score_chain *chains) {
    uint32_t kv_heads = job->pool->layout.kv_heads;
    const struct score_layer *layer = group->layer;
    const struct cuda_score_call call = {
        .pool = *job->pool,
        .units = job->device_units + (size_t)group->first * kv_heads,
        .count = group->count * kv_heads,
        .group = job->heads / kv_heads,
        .slots_most = group->slots_most,
        .positions_most = group->positions_most,
    };
    if (call.slots_most == 0) {
        if (job->asks_worst) /* none */
            launch_score_worst(&call, job->cuda->stream);
        return;
    }
    if (score_has_stage(layer, STAGE_TIMES_OUTPUT_NORM))
        launch_score_output_norms(&call, job->cuda->stream);
    if (group->only_worst) {
        launch_score_chain_worst(&call, chains, job->cuda->stream);
        return;
    }
    for (uint32_t i = 0; i < layer->stages_count;) {
        if (is_chained(layer->stages[i].kind))
            i += launch_chain(job, group, &call, i, chains++);
        else
            launch_stage(job, group, &call, &layer->stages[i++]);
    }
    if (job->asks_worst)
        launch_score_worst(&call, job->cuda->stream);
}

/* ---- the slots that go ---- */

/* They come to the host with the next wait. */
static void take_worst(const struct score_job *job) {
    uint32_t kv_heads = job->pool->layout.kv_heads;
    uint32_t **places = cuda_late_fetch(job->cuda, job->worst, job->count * kv_heads);
    for (uint32_t i = 0; i < job->count; i++)
        for (uint32_t k = 0; k < kv_heads; k++)
            places[(size_t)i * kv_heads + k] = job->layers[job->order[i]].heads[k].worst;
}

static int reserve_worst(struct score_job *job) {
    uint32_t kv_heads = job->pool->layout.kv_heads;
    for (uint32_t i = 0; i < job->count; i++)
        for (uint32_t k = 0; k < kv_heads; k++)
            job->asks_worst = job->asks_worst || job->layers[i].heads[k].worst != NULL;
    return !job->asks_worst || cuda_late_reserve(job->cuda, job->count * kv_heads) ? 0 : ERROR_MEMORY;
}

/* ---- the operation ---- */

/* Device addresses of scratch can only be given once it is known how much there is. */
static int prepare(struct score_job *job, struct error *error) {
    struct device_space space = {0};
    size_t worst = (size_t)job->count * job->pool->layout.kv_heads * sizeof *job->worst;
    if (reserve_worst(job) != 0)
        return error_set(error, ERROR_MEMORY, "no memory for scoring");
    for (uint32_t g = 0; g < job->groups_count; g++) {
        int code = fill_group(job, &job->groups[g], error);
        if (code != 0)
            return code;
    }
    space_take(&space, worst);
    take_all_scratch(job, &space);
    space.base = cuda_scratch_reserve(job->cuda, &job->state->scratch, space.used);
    if (space.base == NULL)
        return error_set(error, ERROR_MEMORY, "no memory for scoring: %zu bytes", space.used);
    space.used = 0;
    job->worst = space_take(&space, worst);
    take_all_scratch(job, &space);
    for (uint32_t i = 0; i < job->count; i++)
        for (uint32_t k = 0; k < job->pool->layout.kv_heads; k++) {
            size_t at = (size_t)i * job->pool->layout.kv_heads + k;
            bool asked = job->layers[job->order[i]].heads[k].worst != NULL;
            job->units[at].worst = asked ? job->worst + at : NULL;
        }
    return 0;
}

static int run(struct score_job *job, struct error *error) {
    struct cuda_stage stage;
    int code = prepare(job, error);
    if (code != 0)
        return code;
    if (!cuda_stage_begin(job->cuda, stage_bytes(job), &stage))
        return error_set(error, ERROR_MEMORY, "no memory for scoring");
    stage_units(job, &stage);
    const struct cuda_score_chain **chains = malloc(job->groups_count * sizeof *chains);
    for (uint32_t g = 0; chains != NULL && g < job->groups_count; g++) {
        stage_group(&job->groups[g], &stage);
        chains[g] = stage_chains(&job->groups[g], &stage);
    }
    if (chains == NULL)
        return error_set(error, ERROR_MEMORY, "no memory for scoring");
    cuda_stage_send(job->cuda, &stage);
    for (uint32_t g = 0; g < job->groups_count; g++)
        launch_group(job, &job->groups[g], chains[g]);
    free(chains);
    cuda_check_launch(job->cuda, "score");
    if (job->asks_worst)
        take_worst(job);
    return 0;
}

int cuda_score(struct backend *backend, const struct kv_pool *pool, const struct score_layer *layers, uint32_t count,
    uint32_t heads, struct error *error) {
    int code = score_check(pool, layers, count, heads, error);
    if (code != 0 || count == 0)
        return code;
    struct score_job job = {.cuda = cuda_backend(backend),
        .state = cuda_score_state(cuda_backend(backend)),
        .pool = pool,
        .layers = layers,
        .count = count,
        .heads = heads};
    bool *taken = calloc(count, sizeof *taken);
    job.order = malloc(count * sizeof *job.order);
    job.groups = malloc(count * sizeof *job.groups);
    job.units = malloc((size_t)count * pool->layout.kv_heads * sizeof *job.units);
    if (taken == NULL || job.order == NULL || job.groups == NULL || job.units == NULL || job.state == NULL) {
        code = error_set(error, ERROR_MEMORY, "no memory for scoring");
    } else {
        find_groups(&job, taken);
        code = run(&job, error);
    }
    free(taken);
    free(job.order);
    free(job.groups);
    free(job.units);
    return code;
}

/* ---- slot_norms ---- */

int cuda_slot_norms(struct backend *backend, const struct kv_pool *pool, const struct kv_head_view *view,
    const struct tensor *output, uint32_t layer, uint32_t head, uint32_t heads, float *value_norm, float *output_norm,
    struct error *error) {
    const struct kv_layout *layout = &pool->layout;
    struct cuda_backend *cuda = cuda_backend(backend);
    struct score_state *state = cuda_score_state(cuda);
    struct cuda_stage stage;
    if (heads == 0 || heads % layout->kv_heads != 0 || layer >= layout->layers || head >= layout->kv_heads ||
        layout->head_dim > SCORE_DIM_MAX || output->columns != (size_t)heads * layout->head_dim)
        return error_set(error, ERROR_INVALID, "no such head, or not its output matrix");
    const struct score_matrix *matrix = NULL;
    if (output_norm != NULL) {
        matrix = cuda_score_matrix(cuda, layout, layer, output, heads, SCORE_FACTORS, error);
        if (matrix == NULL)
            return ERROR_MEMORY;
    }
    size_t slots = view->slots, bytes = cuda_stage_size(sizeof(struct cuda_score_unit)) + cuda_view_bytes(view);
    float *norms = state != NULL ? cuda_scratch_reserve(cuda, &state->scratch, 2 * slots * sizeof *norms) : NULL;
    if (norms == NULL || !cuda_stage_begin(cuda, bytes, &stage))
        return error_set(error, ERROR_MEMORY, "no memory for norms of slots");
    struct cuda_score_unit unit = {.view = cuda_view_stage(&stage, view),
        .number = kv_layout_head_number(layout, layer, head),
        .head = head,
        .factors = matrix != NULL ? matrix->factors : NULL,
        .norms = norms};
    const struct cuda_score_call call = {.pool = *pool,
        .units = cuda_stage_copy(&stage, &unit, sizeof unit),
        .count = 1,
        .group = heads / layout->kv_heads,
        .slots_most = view->slots};
    cuda_stage_send(cuda, &stage);
    launch_score_norms(&call, matrix != NULL, cuda->stream);
    cuda_check_launch(cuda, "slot_norms");
    if (value_norm != NULL)
        cuda_download(backend, value_norm, norms, slots * sizeof *norms);
    if (output_norm != NULL)
        cuda_download(backend, output_norm, norms + slots, slots * sizeof *norms);
    return 0;
}
