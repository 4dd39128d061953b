/* SPDX-License-Identifier: Apache-2.0 */
#include "engine/prune_plan.h"

#include "policy/budget.h"
#include "policy/network.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

/* ---- work space ---- */

struct arena {
    char *base; /* NULL: only counting */
    size_t at;
};

static void *take(struct arena *arena, size_t count, size_t bytes) {
    void *memory = arena->base != NULL ? arena->base + arena->at : NULL;
    arena->at += (count * bytes + 63) / 64 * 64;
    return memory;
}

void prune_space_free(struct engine *engine) {
    struct prune_space *space = &engine->prune;
    if (engine->backend != NULL)
        engine_operations(engine)->release(engine->backend, space->scores);
    select_scratch_free(&space->select);
    free(space->memory);
    free(space->ahead);
    free(space->identity);
}

static int grow_memory(char **memory, size_t *capacity, size_t bytes) {
    if (bytes <= *capacity)
        return 0;
    char *larger = malloc(bytes + bytes / 8);
    if (larger == NULL)
        return ERROR_MEMORY;
    free(*memory);
    *memory = larger;
    *capacity = bytes + bytes / 8;
    return 0;
}

static int grow_identity(struct prune_space *space, uint32_t count) {
    if (count <= space->identity_count)
        return 0;
    uint32_t *identity = realloc(space->identity, (size_t)count * sizeof *identity);
    if (identity == NULL)
        return ERROR_MEMORY;
    space->identity = identity;
    for (; space->identity_count < count; space->identity_count++)
        identity[space->identity_count] = space->identity_count;
    return 0;
}

static int grow_scores(struct engine *engine, size_t count) {
    struct prune_space *space = &engine->prune;
    if (count <= space->scores_capacity)
        return 0;
    engine_operations(engine)->release(engine->backend, space->scores);
    space->scores = engine_operations(engine)->allocate(engine->backend, (count + count / 8) * sizeof(float));
    space->scores_capacity = space->scores != NULL ? count + count / 8 : 0;
    return space->scores != NULL ? 0 : ERROR_MEMORY;
}

/* ---- which are due ---- */

bool prune_is_due(const struct sequence *sequence) {
    return sequence->swap == NULL && sequence_next_prune(sequence) == sequence_length(sequence);
}

bool prune_is_over(const struct sequence *sequence) {
    uint32_t budget = budget_least(&sequence->eviction.settings, sequence_length(sequence));
    if (sequence->eviction.summaries != NULL)
        budget = sequence_beside_summary(budget);
    const struct model_shape *shape = &sequence->engine->model->shape;
    for (uint32_t i = 0; i < shape->global_layers; i++)
        for (uint32_t head = 0; head < shape->kv_heads; head++)
            if (kv_sequence_tokens(sequence->kv, sequence->engine->model->global_layers[i], head) > budget)
                return true;
    return false;
}

/* ---- rows ---- */

uint32_t prune_heads_a_row(const struct prune_job *job) {
    return job->sequence->eviction.settings.policy->shared ? job->sequence->engine->model->shape.kv_heads : 1;
}

uint32_t prune_head_of_row(const struct prune_job *job, uint32_t row) {
    const struct model *model = job->sequence->engine->model;
    uint32_t kv_heads = model->shape.kv_heads, head = row * prune_heads_a_row(job);
    return model->global_layers[head / kv_heads] * kv_heads + head % kv_heads;
}

/* Slots of a head that a prune is about. */
static uint32_t slots_of(const struct sequence *sequence, uint32_t head) {
    uint32_t kv_heads = sequence->engine->model->shape.kv_heads;
    return engine_head_slides(sequence->engine, head)
               ? 0
               : kv_sequence_slots(sequence->kv, head / kv_heads, head % kv_heads);
}

/* ---- the plan ---- */

/* A head whose slot attention was asked for and has not found. */
enum { NOT_FOUND = KV_NO_SLOT - 1 };

/* All that goes was found ahead. */
static bool is_found(const struct sequence *sequence) {
    const struct eviction *eviction = &sequence->eviction;
    if (eviction->worst == NULL || eviction->worst_at != sequence_length(sequence))
        return false;
    for (uint32_t i = 0; i < engine_heads(sequence->engine); i++)
        if (eviction->worst[i] == NOT_FOUND)
            return false;
    return true;
}

/* Cuts a job's work space; fills in what decides on its size. */
static void lay_out(struct prune_job *job, struct sequence *sequence, bool found, struct arena *arena) {
    const struct engine *engine = sequence->engine;
    const struct model_shape *shape = &engine->model->shape;
    const struct eviction *eviction = &sequence->eviction;
    uint32_t heads = engine_heads(engine);
    *job = (struct prune_job){
        .sequence = sequence, .seen = sequence_length(sequence), .first = !eviction->pruned, .found = found};
    job->budget = policy_budget(&eviction->settings, job->seen);
    job->mark = job->seen > eviction->prompt_tokens && eviction->settings.interval == 1;
    job->rows_count = eviction->settings.policy->shared ? shape->global_layers : engine_global_heads(engine);
    for (uint32_t i = 0; i < heads; i++)
        job->slots_count += slots_of(sequence, i);
    job->slots = take(arena, heads, sizeof *job->slots);
    job->removals = take(arena, heads, sizeof *job->removals);
    if (eviction->statistics != NULL)
        job->statistics_work = take(arena, 1, statistics_prune_work(eviction->statistics, job->slots_count));
    if (eviction->settings.summary)
        job->summaries_work = take(arena, 1, summaries_work(heads, job->slots_count));
    if (found)
        return;
    job->budgets = take(arena, heads, sizeof *job->budgets);
    job->heads = take(arena, heads, sizeof *job->heads);
    job->stages = take(arena, SCORE_STAGES_MAX, sizeof *job->stages);
    job->worst = take(arena, heads, sizeof *job->worst);
    job->rows = take(arena, job->rows_count, sizeof *job->rows);
    if (engine_operations(engine)->select != NULL)
        job->selected = take(arena, job->rows_count, sizeof *job->selected);
    job->keep = take(arena, job->slots_count, sizeof *job->keep);
}

static void lay_out_all(
    struct prune *prune, struct sequence *const *sequences, uint32_t count, uint32_t chosen, struct arena *arena) {
    uint32_t layers = prune->engine->model->shape.global_layers;
    struct prune_job unused;
    prune->count = prune->scored = 0;
    prune->jobs = take(arena, chosen, sizeof *prune->jobs);
    prune->layers = take(arena, (size_t)chosen * layers, sizeof *prune->layers);
    prune->entropy = take(arena, layers, sizeof *prune->entropy);
    prune->variance = take(arena, layers, sizeof *prune->variance);
    prune->selections = take(arena, chosen, sizeof *prune->selections);
    prune->follows = take(arena, chosen, sizeof *prune->follows);
    prune->moves = take(arena, (size_t)chosen * engine_heads(prune->engine), sizeof *prune->moves);
    prune->scored_slots = 0;
    for (uint32_t i = 0; i < count; i++) {
        if (!sequences[i]->eviction.chosen)
            continue;
        struct prune_job *job = arena->base != NULL ? &prune->jobs[prune->count] : &unused;
        lay_out(job, sequences[i], prune->use_found && is_found(sequences[i]), arena);
        job->layers = arena->base != NULL ? prune->layers + (size_t)prune->scored * layers : NULL;
        prune->scored_slots += job->found ? 0 : job->slots_count;
        prune->scored += !job->found;
        prune->count++;
    }
    const struct backend_operations *operations = engine_operations(prune->engine);
    if (!operations->host_memory && (prune->show_scores || operations->select == NULL))
        prune->host_scores = take(arena, prune->scored_slots, sizeof *prune->host_scores);
}

const uint32_t *prune_positions(const struct engine *engine, const struct sequence *sequence, uint32_t head) {
    uint32_t kv_heads = engine->model->shape.kv_heads;
    const uint32_t *positions = kv_sequence_slot_positions(sequence->kv, head / kv_heads, head % kv_heads);
    return positions != NULL ? positions : engine->prune.identity;
}

/* Pooling wants the slots in order of position; a device has its own ways, and the host need not keep that order. */
static bool reads_order(const struct engine *engine, const struct score_stage *stages, uint32_t count) {
    if (!engine_operations(engine)->host_memory)
        return false;
    for (uint32_t i = 0; i < count; i++)
        if (stages[i].kind == STAGE_POOL_MAX || stages[i].kind == STAGE_POOL_ADAPTIVE)
            return true;
    return false;
}

/* Where a head's scores lie: on its rank. */
static float *score_address(const struct engine *engine, uint32_t head, const float *scores) {
    uint32_t kv_heads = engine->model->shape.kv_heads;
    return backend_address(engine->backend, scores, backend_rank_of_head(engine->backend, kv_heads, head));
}

/* *scores NULL: nothing will be scored. */
void prune_fill_job(struct prune_job *job, bool freeze, float **scores) {
    struct sequence *sequence = job->sequence;
    const struct engine *engine = sequence->engine;
    const struct model_shape *shape = &engine->model->shape;
    const struct eviction *eviction = &sequence->eviction;
    uint32_t stages_count = policy_stages(&eviction->settings, job->stages);
    bool ordered = reads_order(engine, job->stages, stages_count);
    for (uint32_t i = 0; i < shape->global_layers; i++) {
        uint32_t layer = engine->model->global_layers[i];
        job->layers[i] = (struct score_layer){
            .heads = job->heads + (size_t)layer * shape->kv_heads,
            .layer = layer,
            .seen = job->seen,
            .budget = job->budget,
            .seed = eviction->settings.seed,
            .stages = job->stages,
            .stages_count = stages_count,
            .window = eviction->settings.window,
            .rope = &engine->prune.rope,
            .network = eviction->settings.network,
            .freeze = freeze,
            .output = &engine->model->layers[layer].attn_output,
        };
        if (eviction->statistics != NULL)
            job->layers[i].moments = eviction->statistics->moments[layer];
    }
    for (uint32_t i = 0; i < engine_heads(engine); i++) {
        struct score_head *head = &job->heads[i];
        job->slots[i] = slots_of(sequence, i);
        if (engine_head_slides(engine, i)) {
            *head = (struct score_head){.scores = NULL};
            continue;
        }
        *head = (struct score_head){
            .view = kv_sequence_view(sequence->kv, i / shape->kv_heads, i % shape->kv_heads),
            .scores = *scores != NULL ? score_address(engine, i, *scores) : NULL,
            .positions = prune_positions(engine, sequence, i),
        };
        if (ordered)
            head->order =
                kv_sequence_slot_order(sequence->kv, i / shape->kv_heads, i % shape->kv_heads, &head->order_count);
        if (eviction->statistics != NULL)
            head->statistics = eviction->statistics->heads[i];
        if (*scores != NULL)
            *scores += head->view.slots;
    }
}

/* What each head protects: by B, or by its own budget where heads differ. */
static void protect(struct prune_job *job) {
    const struct policy_settings *settings = &job->sequence->eviction.settings;
    uint32_t heads = engine_heads(job->sequence->engine), budget = job->budget, sinks, recent_from;
    policy_protection(settings, job->seen, budget, &sinks, &recent_from);
    for (uint32_t i = 0; i < heads; i++) {
        uint32_t own = settings->policy->heads_differ ? job->budgets[i] : job->budget;
        if (own != BUDGET_ALL && own != budget) {
            budget = own;
            policy_protection(settings, job->seen, budget, &sinks, &recent_from);
        }
        job->heads[i].sinks = sinks;
        job->heads[i].recent_from = recent_from;
    }
}

/* cake: what the window prefers at the first prune. */
static int prefer_layers(struct prune *prune, struct prune_job *job) {
    struct engine *engine = prune->engine;
    struct eviction *eviction = &job->sequence->eviction;
    uint32_t layers = engine->model->shape.global_layers;
    double *preferences = malloc(layers * sizeof *preferences);
    if (preferences == NULL)
        return ERROR_MEMORY;
    engine_operations(engine)->window_preference(engine->backend, kv_cache_pool(engine->cache), job->layers, layers,
        engine->model->shape.heads, prune->entropy, prune->variance);
    for (uint32_t layer = 0; layer < layers; layer++)
        preferences[layer] = pow(prune->entropy[layer], 1 / (double)eviction->settings.tau1) *
                             pow(prune->variance[layer], 1 / (double)eviction->settings.tau2);
    eviction->layer_preferences = preferences;
    return 0;
}

/* rlkv, hybrid without a file: gates by where the prompt's attention went. */
static int gate_heads(struct prune_job *job) {
    struct engine *engine = job->sequence->engine;
    struct eviction *eviction = &job->sequence->eviction;
    uint32_t heads = engine_heads(engine), most = 0;
    for (uint32_t i = 0; i < heads; i++)
        most = job->slots[i] > most ? job->slots[i] : most;
    float *gates = malloc(heads * sizeof *gates);
    uint32_t *sums = malloc(most * sizeof *sums);
    if (gates == NULL || sums == NULL) {
        free(gates);
        free(sums);
        return ERROR_MEMORY;
    }
    for (uint32_t i = 0; i < heads; i++) {
        struct backend *on = backend_of_head(engine->backend, engine->model->shape.kv_heads, i);
        gates[i] = 0;
        if (engine_head_slides(engine, i))
            continue;
        on->operations->download(on, sums, eviction->statistics->heads[i].window_sum, job->slots[i] * sizeof *sums);
        gates[i] = head_gate_from_attention(sums, prune_positions(engine, job->sequence, i), job->slots[i], job->seen);
    }
    free(sums);
    eviction->gates = gates;
    return 0;
}

void engine_gather_gates(const struct engine *engine, const float *gates, float *out) {
    uint32_t kv_heads = engine->model->shape.kv_heads;
    for (uint32_t i = 0; i < engine->model->shape.global_layers; i++)
        memcpy(out + (size_t)i * kv_heads, gates + (size_t)engine->model->global_layers[i] * kv_heads,
            kv_heads * sizeof *out);
}

/* Budgets that lie one after the other move to their layers; those of sliding layers keep everything. */
static void spread_budgets(const struct engine *engine, uint32_t *budgets) {
    const struct model *model = engine->model;
    uint32_t kv_heads = model->shape.kv_heads, left = model->shape.global_layers;
    for (uint32_t layer = model->shape.layers; layer-- > 0;) {
        uint32_t *to = budgets + (size_t)layer * kv_heads;
        if (model->windows[layer] == 0)
            memmove(to, budgets + (size_t)--left * kv_heads, kv_heads * sizeof *to);
        else
            for (uint32_t head = 0; head < kv_heads; head++)
                to[head] = BUDGET_ALL;
    }
}

static int allocate_budgets(struct prune *prune, struct prune_job *job) {
    struct eviction *eviction = &job->sequence->eviction;
    const struct policy_settings *settings = &eviction->settings;
    const struct model_shape *shape = &prune->engine->model->shape;
    enum policy_allocation allocation = settings->policy->allocation;
    if (allocation == ALLOCATE_CAKE && eviction->layer_preferences == NULL && prefer_layers(prune, job) != 0)
        return ERROR_MEMORY;
    if (allocation == ALLOCATE_GATES && settings->gates == NULL && eviction->gates == NULL && gate_heads(job) != 0)
        return ERROR_MEMORY;
    struct budget_input input = {
        .settings = settings,
        .layers = shape->global_layers,
        .numbers = prune->engine->model->global_layers,
        .kv_heads = shape->kv_heads,
        .seen = job->seen,
        .layer_preferences = eviction->layer_preferences,
    };
    const float *all = settings->gates != NULL ? settings->gates->values : eviction->gates;
    float *gates = all != NULL ? malloc(engine_heads(prune->engine) * sizeof *gates) : NULL;
    if (all != NULL && gates == NULL)
        return ERROR_MEMORY;
    if (all != NULL)
        engine_gather_gates(prune->engine, all, gates);
    input.gates = gates;
    budget_allocate(&input, job->budgets);
    spread_budgets(prune->engine, job->budgets);
    free(gates);
    return 0;
}

static bool rows_are_alone(const struct policy_settings *settings) {
    return settings->scope == SCOPE_HEAD || (settings->scope == SCOPE_LAYER && settings->policy->shared);
}

/* The summary slot is one of a head's B. Where rows do not compete, a head that has lost nothing and need not lose
 * anything now has none. */
static void leave_room_for_summaries(struct prune_job *job) {
    const struct eviction *eviction = &job->sequence->eviction;
    bool alone = rows_are_alone(&eviction->settings);
    for (uint32_t i = 0; eviction->settings.summary && i < engine_heads(job->sequence->engine); i++) {
        bool has = summaries_slot(eviction->summaries, i) != NULL || job->slots[i] > job->budgets[i];
        if (job->budgets[i] != BUDGET_ALL && (has || !alone))
            job->budgets[i] = sequence_beside_summary(job->budgets[i]);
    }
}

/* Heads that keep everything show no slots: they are neither scored nor selected. */
static void leave_out_full(struct prune_job *job) {
    for (uint32_t i = 0; i < engine_heads(job->sequence->engine); i++)
        if (job->budgets[i] == BUDGET_ALL)
            job->heads[i].view.slots = 0;
}

bool prune_over_by_one(const struct prune_job *job, uint32_t head) {
    return job->heads[head].view.slots == (uint64_t)job->budgets[head] + 1;
}

/* The case of a decode step: rows do not compete, and those over budget are so by the token that came. Then the backend
 * need not show scores, only the one slot of a row that goes. */
static void ask_for_worst(struct prune_job *job) {
    const struct policy_settings *settings = &job->sequence->eviction.settings;
    uint32_t heads = engine_heads(job->sequence->engine), heads_a_row = prune_heads_a_row(job);
    job->one = job->mark && rows_are_alone(settings);
    for (uint32_t i = 0; i < heads && job->one; i++)
        job->one = job->heads[i].view.slots <= job->budgets[i] || prune_over_by_one(job, i);
    for (uint32_t i = 0; i < heads && job->one; i++) {
        job->heads[i].scores = NULL;
        job->heads[i].worst = i % heads_a_row == 0 && prune_over_by_one(job, i) ? &job->worst[i] : NULL;
    }
}

/* Work space of all jobs: where their numbers lie. */
int prune_prepare(struct prune *prune, struct sequence *const *sequences, uint32_t count, uint32_t chosen) {
    struct prune_space *space = &prune->engine->prune;
    struct arena arena = {0};
    uint32_t longest = 0;
    lay_out_all(prune, sequences, count, chosen, &arena);
    if (grow_memory(&space->memory, &space->bytes, arena.at) != 0)
        return ERROR_MEMORY;
    arena = (struct arena){.base = space->memory};
    lay_out_all(prune, sequences, count, chosen, &arena);
    for (uint32_t i = 0; i < prune->count; i++)
        longest = prune->jobs[i].seen > longest ? prune->jobs[i].seen : longest;
    return grow_identity(space, longest);
}

/* What a job asks the backend for. Scores are taken from *scores on; NULL: none are there. */
static int plan_job(struct prune *prune, struct prune_job *job, float **scores) {
    bool freeze = !prune->show_scores && job->seen >= job->sequence->eviction.prompt_tokens;
    prune_fill_job(job, freeze, scores);
    memset(
        job->budgets, 0xff, engine_heads(prune->engine) * sizeof *job->budgets); /* protection by B until allocated */
    protect(job);
    if (allocate_budgets(prune, job) != 0)
        return ERROR_MEMORY;
    if (job->sequence->eviction.settings.policy->heads_differ) {
        protect(job);
        leave_out_full(job);
    }
    leave_room_for_summaries(job);
    if (!prune->show_scores)
        ask_for_worst(job);
    return 0;
}

/* What was found ahead is the whole plan: a slot of a row's first head, which all of its heads lose. */
static void take_found(struct prune_job *job) {
    const struct sequence *sequence = job->sequence;
    uint32_t heads = engine_heads(sequence->engine), heads_a_row = prune_heads_a_row(job);
    for (uint32_t i = 0; i < heads; i++) {
        job->slots[i] = slots_of(sequence, i);
        uint32_t first = i / heads_a_row * heads_a_row;
        job->removals[i] = (struct kv_removal){
            .evict = sequence->eviction.worst[first], .rank = sequence->eviction.worst_ranks[first]};
    }
}

/* All global layers turn alike. */
static struct rope_params global_rope(const struct engine *engine) {
    const struct model *model = engine->model;
    return transformer_rope(engine->transformer, model->shape.global_layers > 0 ? model->global_layers[0] : 0);
}

/* Plans all jobs, scores excepted. */
int prune_plan(struct prune *prune, struct sequence *const *sequences, uint32_t count, uint32_t chosen) {
    struct engine *engine = prune->engine;
    struct prune_space *space = &engine->prune;
    if (prune_prepare(prune, sequences, count, chosen) != 0)
        return ERROR_MEMORY;
    if (grow_scores(engine, prune->scored_slots) != 0)
        return ERROR_MEMORY;
    space->rope = global_rope(engine);
    float *scores = space->scores;
    int code = 0;
    for (uint32_t i = 0; i < prune->count && code == 0; i++) {
        if (prune->jobs[i].found)
            take_found(&prune->jobs[i]);
        else
            code = plan_job(prune, &prune->jobs[i], &scores);
    }
    return code;
}

/* ---- ahead of the batch ---- */

/* Scores can be asked for behind a batch, whatever the stages are, without waiting for it. */
static bool scores_late(const struct engine *engine) {
    return !engine_operations(engine)->host_memory;
}

/* Attention can score by these stages. */
static bool scores_in_attention(const struct engine *engine, const struct policy_settings *settings) {
    const struct backend_operations *operations = engine_operations(engine);
    struct score_stage stages[SCORE_STAGES_MAX];
    return operations->attend_scores != NULL && !settings->policy->shared &&
           operations->attend_scores(stages, policy_stages(settings, stages));
}

/* Whether a batch's item will be followed by a prune whose slots can be found ahead. What depends on budgets is seen
 * when they are planned. */
static bool can_be_found(const struct batch_item *item) {
    const struct sequence *sequence = item->sequence;
    const struct eviction *eviction = &sequence->eviction;
    const struct policy_settings *settings = &eviction->settings;
    if (item->count != 1 || !eviction->evicts || settings->interval != 1 || !rows_are_alone(settings) ||
        sequence_length(sequence) <= eviction->prompt_tokens || !prune_is_due(sequence) || !prune_is_over(sequence))
        return false;
    if (settings->policy->allocation == ALLOCATE_CAKE && eviction->layer_preferences == NULL)
        return false;
    if (settings->policy->allocation == ALLOCATE_GATES && settings->gates == NULL && eviction->gates == NULL)
        return false;
    return scores_late(sequence->engine) || scores_in_attention(sequence->engine, settings);
}

void sequence_await_found(struct sequence *sequence) {
    if (!sequence->eviction.worst_awaited)
        return;
    engine_operations(sequence->engine)->synchronize(sequence->engine->backend);
    sequence->eviction.worst_awaited = false;
}

/* Lets a planned job's heads report to the sequence. */
static bool report_to_sequence(struct prune_job *job) {
    struct eviction *eviction = &job->sequence->eviction;
    uint32_t heads = engine_heads(job->sequence->engine);
    if (!job->one)
        return false;
    if (eviction->worst == NULL)
        eviction->worst = calloc(2 * (size_t)heads, sizeof *eviction->worst);
    if (eviction->worst == NULL)
        return false;
    eviction->worst_ranks = eviction->worst + heads;
    eviction->worst_at = job->seen;
    for (uint32_t i = 0; i < heads; i++) {
        bool goes = job->heads[i].worst != NULL;
        eviction->worst[i] = goes ? NOT_FOUND : KV_NO_SLOT;
        job->heads[i].worst = goes ? &eviction->worst[i] : NULL;
        job->heads[i].worst_rank = goes ? &eviction->worst_ranks[i] : NULL;
    }
    return true;
}

/* Cuts up the work space for the chosen items. Returns room for the layers of the batch, all without heads. */
static struct score_layer *lay_out_ahead(
    struct prune *prune, const struct batch_item *items, uint32_t count, struct arena *arena) {
    uint32_t layers = prune->engine->model->shape.layers;
    struct score_layer *scored = take(arena, (size_t)layers * count, sizeof *scored);
    struct prune_job unused;
    prune->jobs = take(arena, count, sizeof *prune->jobs);
    for (uint32_t i = 0; i < count; i++) {
        struct prune_job *job = arena->base != NULL ? &prune->jobs[i] : &unused;
        *job = (struct prune_job){.sequence = NULL};
        if (!items[i].sequence->eviction.chosen)
            continue;
        lay_out(job, items[i].sequence, false, arena);
        job->layers = take(arena, prune->engine->model->shape.global_layers, sizeof *job->layers);
    }
    if (arena->base != NULL)
        memset(scored, 0, (size_t)layers * count * sizeof *scored);
    return scored;
}

/* Chooses the items whose slots can be found ahead; returns the longest of their sequences' lengths, 0: none. */
static uint32_t choose_ahead(const struct batch_item *items, uint32_t count) {
    uint32_t longest = 0;
    for (uint32_t i = 0; i < count; i++) {
        struct sequence *sequence = items[i].sequence;
        sequence_await_found(sequence);
        sequence->eviction.worst_at = 0;
        sequence->eviction.chosen = can_be_found(&items[i]);
        if (sequence->eviction.chosen && sequence_length(sequence) > longest)
            longest = sequence_length(sequence);
    }
    return longest;
}

const struct score_layer *engine_plan_ahead(struct engine *engine, const struct batch_item *items, uint32_t count) {
    struct prune prune = {.engine = engine};
    struct prune_space *space = &engine->prune;
    struct arena arena = {0};
    uint32_t layers = engine->model->shape.global_layers, longest = choose_ahead(items, count), asked = 0;
    space->late_count = 0;
    if (longest == 0)
        return NULL;
    lay_out_ahead(&prune, items, count, &arena);
    if (grow_memory(&space->ahead, &space->ahead_bytes, arena.at) != 0 || grow_identity(space, longest) != 0)
        return NULL;
    arena = (struct arena){.base = space->ahead};
    struct score_layer *scored = lay_out_ahead(&prune, items, count, &arena);
    space->rope = global_rope(engine);
    for (uint32_t i = 0; i < count; i++) {
        struct prune_job *job = &prune.jobs[i];
        float *none = NULL;
        if (job->sequence == NULL || plan_job(&prune, job, &none) != 0 || !report_to_sequence(job))
            continue;
        for (uint32_t layer = 0; layer < layers; layer++) /* late: one sequence after the other */
            scored[scores_late(engine) ? asked * layers + layer : engine->model->global_layers[layer] * count + i] =
                job->layers[layer];
        job->sequence->eviction.worst_awaited = scores_late(engine);
        asked++;
    }
    if (asked == 0)
        return NULL;
    if (!scores_late(engine))
        return scored;
    space->late = scored;
    space->late_count = asked * layers;
    return NULL;
}

void engine_score_ahead(struct engine *engine) {
    struct prune_space *space = &engine->prune;
    if (space->late_count > 0) /* what it cannot do is left to the prune */
        engine_operations(engine)->score(engine->backend, kv_cache_pool(engine->cache), space->late, space->late_count,
            engine->model->shape.heads, NULL);
    space->late_count = 0;
}
