/* SPDX-License-Identifier: Apache-2.0
 *
 * engine_prune: which sequences are due, what their slots are worth (one call of the backend for all), which stay
 * (policy/select.h), and what follows from it for pages and statistics. Everything is planned in work space of the
 * engine before the first sequence changes.
 *
 * A decode step of most policies is followed by a prune that takes one slot of a head, by scores that attention can
 * compute on its way (backend.h, kv_batch.scored): engine_plan_ahead asks for that before the batch is computed, and
 * engine_prune finds the slots in the sequence. What it does not find there it plans and scores itself.
 */
#include "engine/prune.h"

#include "engine/clock.h"
#include "engine/engine_internal.h"
#include "policy/budget.h"
#include "policy/network.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

/* One sequence at its prune. Heads are numbered layer * kv_heads + head. */
struct prune_job {
    struct sequence *sequence;
    uint32_t seen, budget;
    bool first; /* nothing was pruned before */
    bool mark;  /* a head that loses one slot keeps it for the next token */
    uint32_t rows_count;
    size_t slots_count; /* of all heads */
    bool one;           /* a row that is over its budget is so by one slot, and alone */
    bool found;         /* attention has found what goes: eviction.worst */
    uint32_t *slots;    /* [heads] */
    uint32_t *budgets;  /* [heads] */
    struct score_head *heads;
    struct score_layer *layers; /* [layers] */
    struct score_stage *stages;
    uint32_t *worst;         /* [heads] with `one`: the slot that goes */
    struct select_row *rows; /* one a head, or one a layer where all heads of a layer hold the same */
    uint32_t *keep;          /* rows' lists */
    struct kv_removal *removals;
    void *statistics_work, *summaries_work;
};

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

static bool is_due(const struct sequence *sequence) {
    return sequence->swap == NULL && sequence_next_prune(sequence) == sequence_length(sequence);
}

static bool is_over(const struct sequence *sequence) {
    uint32_t budget = budget_least(&sequence->eviction.settings, sequence_length(sequence));
    if (sequence->eviction.summaries != NULL)
        budget = sequence_beside_summary(budget);
    const struct model_shape *shape = &sequence->engine->model->shape;
    for (uint32_t layer = 0; layer < shape->layers; layer++)
        for (uint32_t head = 0; head < shape->kv_heads; head++)
            if (kv_sequence_tokens(sequence->kv, layer, head) > budget)
                return true;
    return false;
}

/* The prune at this length is over, whether something went or not. */
static void finish(struct sequence *sequence) {
    struct eviction *eviction = &sequence->eviction;
    eviction->handled = sequence_length(sequence);
    if (sequence_next_prune(sequence) == UINT32_MAX && eviction->recorded == 0) { /* decode: keep */
        statistics_free(eviction->statistics);
        eviction->statistics = NULL;
        sequence_charge_less(sequence);
    }
}

/* Chooses those that are due and over budget, and returns their number. Where nothing is to be evicted the prune is
 * over at once. */
static uint32_t choose(struct sequence *const *sequences, uint32_t count) {
    uint32_t chosen = 0;
    for (uint32_t i = 0; i < count; i++) {
        struct eviction *eviction = &sequences[i]->eviction;
        bool due = is_due(sequences[i]);
        eviction->chosen = due && is_over(sequences[i]);
        chosen += eviction->chosen;
        if (due && !eviction->chosen)
            finish(sequences[i]);
    }
    return chosen;
}

/* ---- the plan ---- */

/* A head whose slot attention was asked for and has not found. */
enum { NOT_FOUND = KV_NO_SLOT - 1 };

/* Attention has found all that goes. */
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
    job->rows_count = eviction->settings.policy->shared ? shape->layers : heads;
    for (uint32_t i = 0; i < heads; i++)
        job->slots_count += kv_sequence_slots(sequence->kv, i / shape->kv_heads, i % shape->kv_heads);
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
    job->keep = take(arena, job->slots_count, sizeof *job->keep);
}

struct prune {
    struct engine *engine;
    struct prune_job *jobs;
    uint32_t count;
    struct score_layer *layers; /* [scored * layers] of the jobs that are scored */
    uint32_t scored;
    double *entropy, *variance; /* [layers] */
    bool use_found;             /* what attention has found need not be scored */
    bool show_scores;           /* all of them are asked for */
    float *host_scores;         /* where the device's memory is not the host's */
};

static void lay_out_all(
    struct prune *prune, struct sequence *const *sequences, uint32_t count, uint32_t chosen, struct arena *arena) {
    uint32_t layers = prune->engine->model->shape.layers;
    struct prune_job unused;
    prune->count = prune->scored = 0;
    prune->jobs = take(arena, chosen, sizeof *prune->jobs);
    prune->layers = take(arena, (size_t)chosen * layers, sizeof *prune->layers);
    prune->entropy = take(arena, layers, sizeof *prune->entropy);
    prune->variance = take(arena, layers, sizeof *prune->variance);
    size_t slots = 0;
    for (uint32_t i = 0; i < count; i++) {
        if (!sequences[i]->eviction.chosen)
            continue;
        struct prune_job *job = arena->base != NULL ? &prune->jobs[prune->count] : &unused;
        lay_out(job, sequences[i], prune->use_found && is_found(sequences[i]), arena);
        job->layers = arena->base != NULL ? prune->layers + (size_t)prune->scored * layers : NULL;
        slots += job->found ? 0 : job->slots_count;
        prune->scored += !job->found;
        prune->count++;
    }
    if (!engine_operations(prune->engine)->host_memory)
        prune->host_scores = take(arena, slots, sizeof *prune->host_scores);
}

static const uint32_t *positions_of(const struct engine *engine, const struct sequence *sequence, uint32_t head) {
    uint32_t kv_heads = engine->model->shape.kv_heads;
    const uint32_t *positions = kv_sequence_slot_positions(sequence->kv, head / kv_heads, head % kv_heads);
    return positions != NULL ? positions : engine->prune.identity;
}

/* Pooling wants the slots in order of position. */
static bool reads_order(const struct score_stage *stages, uint32_t count) {
    for (uint32_t i = 0; i < count; i++)
        if (stages[i].kind == STAGE_POOL_MAX || stages[i].kind == STAGE_POOL_ADAPTIVE)
            return true;
    return false;
}

/* *scores NULL: nothing will be scored. */
static void fill_job(struct prune_job *job, bool freeze, float **scores) {
    struct sequence *sequence = job->sequence;
    const struct engine *engine = sequence->engine;
    const struct model_shape *shape = &engine->model->shape;
    const struct eviction *eviction = &sequence->eviction;
    uint32_t stages_count = policy_stages(&eviction->settings, job->stages);
    bool ordered = reads_order(job->stages, stages_count);
    for (uint32_t layer = 0; layer < shape->layers; layer++) {
        job->layers[layer] = (struct score_layer){
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
            job->layers[layer].moments = eviction->statistics->moments[layer];
    }
    for (uint32_t i = 0; i < engine_heads(engine); i++) {
        struct score_head *head = &job->heads[i];
        *head = (struct score_head){
            .view = kv_sequence_view(sequence->kv, i / shape->kv_heads, i % shape->kv_heads),
            .scores = *scores,
            .positions = positions_of(engine, sequence, i),
        };
        if (ordered)
            head->order = kv_sequence_slot_order(sequence->kv, i / shape->kv_heads, i % shape->kv_heads);
        if (eviction->statistics != NULL)
            head->statistics = eviction->statistics->heads[i];
        job->slots[i] = head->view.slots;
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
    uint32_t layers = engine->model->shape.layers;
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
        engine_operations(engine)->download(
            engine->backend, sums, eviction->statistics->heads[i].window_sum, job->slots[i] * sizeof *sums);
        gates[i] = head_gate_from_attention(sums, positions_of(engine, job->sequence, i), job->slots[i], job->seen);
    }
    free(sums);
    eviction->gates = gates;
    return 0;
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
        .layers = shape->layers,
        .kv_heads = shape->kv_heads,
        .seen = job->seen,
        .layer_preferences = eviction->layer_preferences,
        .gates = settings->gates != NULL ? settings->gates->values : eviction->gates,
    };
    budget_allocate(&input, job->budgets);
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

static bool is_over_by_one(const struct prune_job *job, uint32_t head) {
    return job->heads[head].view.slots == (uint64_t)job->budgets[head] + 1;
}

/* The case of a decode step: rows do not compete, and those over budget are so by the token that came. Then the backend
 * need not show scores, only the one slot of a row that goes. */
static void ask_for_worst(struct prune_job *job) {
    const struct policy_settings *settings = &job->sequence->eviction.settings;
    uint32_t heads = engine_heads(job->sequence->engine), heads_a_row = heads / job->rows_count;
    job->one = job->mark && rows_are_alone(settings);
    for (uint32_t i = 0; i < heads && job->one; i++)
        job->one = job->heads[i].view.slots <= job->budgets[i] || is_over_by_one(job, i);
    for (uint32_t i = 0; i < heads && job->one; i++) {
        job->heads[i].scores = NULL;
        job->heads[i].worst = i % heads_a_row == 0 && is_over_by_one(job, i) ? &job->worst[i] : NULL;
    }
}

/* Work space of all jobs: where their numbers lie. */
static int prepare(struct prune *prune, struct sequence *const *sequences, uint32_t count, uint32_t chosen) {
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
    fill_job(job, freeze, scores);
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

/* What attention has found is the whole plan. */
static void take_found(struct prune_job *job) {
    const struct sequence *sequence = job->sequence;
    uint32_t kv_heads = sequence->engine->model->shape.kv_heads;
    for (uint32_t i = 0; i < engine_heads(sequence->engine); i++) {
        job->slots[i] = kv_sequence_slots(sequence->kv, i / kv_heads, i % kv_heads);
        job->removals[i] = (struct kv_removal){.evict = sequence->eviction.worst[i]};
    }
}

/* Plans all jobs, scores excepted. */
static int plan(struct prune *prune, struct sequence *const *sequences, uint32_t count, uint32_t chosen) {
    struct engine *engine = prune->engine;
    struct prune_space *space = &engine->prune;
    size_t slots = 0;
    if (prepare(prune, sequences, count, chosen) != 0)
        return ERROR_MEMORY;
    for (uint32_t i = 0; i < prune->count; i++)
        slots += prune->jobs[i].found ? 0 : prune->jobs[i].slots_count;
    if (grow_scores(engine, slots) != 0)
        return ERROR_MEMORY;
    space->rope = transformer_rope(engine->transformer);
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

/* Whether a batch's item will be followed by a prune that attention can score for. What depends on budgets is seen
 * when they are planned. */
static bool can_be_found(const struct batch_item *item) {
    const struct sequence *sequence = item->sequence;
    const struct eviction *eviction = &sequence->eviction;
    const struct policy_settings *settings = &eviction->settings;
    const struct backend_operations *operations = engine_operations(sequence->engine);
    struct score_stage stages[SCORE_STAGES_MAX];
    if (item->count != 1 || !eviction->evicts || settings->interval != 1 || settings->policy->shared ||
        !rows_are_alone(settings) || operations->attend_scores == NULL ||
        sequence_length(sequence) <= eviction->prompt_tokens || !is_due(sequence) || !is_over(sequence))
        return false;
    if (settings->policy->allocation == ALLOCATE_CAKE && eviction->layer_preferences == NULL)
        return false;
    if (settings->policy->allocation == ALLOCATE_GATES && settings->gates == NULL && eviction->gates == NULL)
        return false;
    return operations->attend_scores(stages, policy_stages(settings, stages));
}

/* Lets a planned job's heads report to the sequence, and adds its layers to those of the batch, `count` apart. */
static bool ask_attention(struct prune_job *job, uint32_t count, struct score_layer *scored) {
    struct eviction *eviction = &job->sequence->eviction;
    uint32_t heads = engine_heads(job->sequence->engine);
    if (!job->one)
        return false;
    if (eviction->worst == NULL)
        eviction->worst = malloc(heads * sizeof *eviction->worst);
    if (eviction->worst == NULL)
        return false;
    eviction->worst_at = job->seen;
    for (uint32_t i = 0; i < heads; i++) {
        bool goes = job->heads[i].worst != NULL;
        eviction->worst[i] = goes ? NOT_FOUND : KV_NO_SLOT;
        job->heads[i].worst = goes ? &eviction->worst[i] : NULL;
    }
    for (uint32_t layer = 0; layer < job->sequence->engine->model->shape.layers; layer++)
        scored[(size_t)layer * count] = job->layers[layer];
    return true;
}

/* Cuts up the work space for the chosen items. Returns the layers of the batch, all without heads. */
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
        job->layers = take(arena, layers, sizeof *job->layers);
    }
    if (arena->base != NULL)
        memset(scored, 0, (size_t)layers * count * sizeof *scored);
    return scored;
}

const struct score_layer *engine_plan_ahead(struct engine *engine, const struct batch_item *items, uint32_t count) {
    struct prune prune = {.engine = engine};
    struct prune_space *space = &engine->prune;
    struct arena arena = {0};
    uint32_t longest = 0;
    bool any = false;
    for (uint32_t i = 0; i < count; i++) {
        struct eviction *eviction = &items[i].sequence->eviction;
        eviction->worst_at = 0;
        eviction->chosen = can_be_found(&items[i]);
        if (eviction->chosen && sequence_length(items[i].sequence) > longest)
            longest = sequence_length(items[i].sequence);
    }
    if (longest == 0)
        return NULL;
    lay_out_ahead(&prune, items, count, &arena);
    if (grow_memory(&space->ahead, &space->ahead_bytes, arena.at) != 0 || grow_identity(space, longest) != 0)
        return NULL;
    arena = (struct arena){.base = space->ahead};
    struct score_layer *scored = lay_out_ahead(&prune, items, count, &arena);
    space->rope = transformer_rope(engine->transformer);
    for (uint32_t i = 0; i < count; i++) {
        float *none = NULL;
        if (prune.jobs[i].sequence != NULL && plan_job(&prune, &prune.jobs[i], &none) == 0)
            any = ask_attention(&prune.jobs[i], count, scored + i) || any;
    }
    return any ? scored : NULL;
}

/* ---- selection ---- */

static const float *host_scores(const struct prune *prune, const float *scores) {
    return prune->host_scores != NULL ? prune->host_scores + (scores - prune->engine->prune.scores) : scores;
}

static void fill_rows(const struct prune *prune, struct prune_job *job) {
    uint32_t kv_heads = prune->engine->model->shape.kv_heads;
    uint32_t *keep = job->keep;
    for (uint32_t r = 0; r < job->rows_count; r++) {
        uint32_t head = job->sequence->eviction.settings.policy->shared ? r * kv_heads : r;
        job->rows[r] = (struct select_row){
            .layer = head / kv_heads,
            .head = head % kv_heads,
            .slots = job->heads[head].view.slots,
            .budget = job->budgets[head],
            .scores = host_scores(prune, job->heads[head].scores),
            .positions = positions_of(prune->engine, job->sequence, head),
            .keep = keep,
        };
        keep += job->slots[head];
    }
}

/* A layer whose heads are to hold the same slots does so: only explicit actions can have changed that. */
static int check_shared(const struct prune *prune, const struct prune_job *job, struct error *error) {
    uint32_t kv_heads = prune->engine->model->shape.kv_heads;
    for (uint32_t i = 0; i < engine_heads(prune->engine); i++) {
        uint32_t first = i - i % kv_heads;
        const uint32_t *a = positions_of(prune->engine, job->sequence, first);
        const uint32_t *b = positions_of(prune->engine, job->sequence, i);
        if (job->slots[i] != job->slots[first] || (a != b && memcmp(a, b, job->slots[i] * sizeof *a) != 0))
            return error_set(error, ERROR_INVALID, "the heads of layer %u do not hold the same slots", i / kv_heads);
    }
    return 0;
}

/* What goes of a head that keeps `kept` of its slots. A slot that is empty goes too. */
static struct kv_removal removal_of(
    const struct prune_job *job, const uint32_t *keep, uint32_t kept, uint32_t slots, const uint32_t *positions) {
    if (kept == slots)
        return (struct kv_removal){.evict = KV_NO_SLOT};
    if (!job->mark || kept + 1 < slots)
        return (struct kv_removal){.keep = keep, .count = kept, .evict = KV_NO_SLOT};
    uint32_t evict = 0, end = kept;
    while (evict < end) { /* the lists agree up to the slot that is missing */
        uint32_t middle = evict + (end - evict) / 2;
        if (keep[middle] == middle)
            evict = middle + 1;
        else
            end = middle;
    }
    if (positions[evict] == KV_NO_POSITION) /* was marked before, and still is */
        return (struct kv_removal){.evict = KV_NO_SLOT};
    return (struct kv_removal){.evict = evict};
}

/* The backend found what goes. */
static void remove_worst(struct prune_job *job) {
    uint32_t heads = engine_heads(job->sequence->engine), heads_a_row = heads / job->rows_count;
    for (uint32_t i = 0; i < heads; i++) {
        uint32_t head = i / heads_a_row * heads_a_row;
        job->removals[i] = (struct kv_removal){.evict = is_over_by_one(job, head) ? job->worst[head] : KV_NO_SLOT};
    }
}

static int select_job(struct prune *prune, struct prune_job *job, struct error *error) {
    const struct policy_settings *settings = &job->sequence->eviction.settings;
    if (settings->policy->shared) {
        int code = check_shared(prune, job, error);
        if (code != 0)
            return code;
    }
    if (job->found)
        return 0;
    if (job->one) {
        remove_worst(job);
        return 0;
    }
    fill_rows(prune, job);
    int code =
        select_slots(job->rows, job->rows_count, settings->scope, settings->floor, &prune->engine->prune.select, error);
    uint32_t heads_a_row = engine_heads(prune->engine) / job->rows_count;
    for (uint32_t i = 0; i < engine_heads(prune->engine) && code == 0; i++) {
        const struct select_row *row = &job->rows[i / heads_a_row];
        job->removals[i] = removal_of(job, row->keep, row->kept, row->slots, row->positions);
    }
    return code;
}

/* ---- compaction ---- */

/* Statistics follow their slots; what is not needed after the first prune goes. */
static void follow(struct prune_job *job) {
    struct eviction *eviction = &job->sequence->eviction;
    uint32_t needs = sequence_needs(job->sequence, false);
    if (eviction->statistics == NULL)
        return;
    if (needs != 0) {
        bool fit = job->seen >= eviction->prompt_tokens && (job->first || job->seen == eviction->prompt_tokens);
        statistics_prune(eviction->statistics, job->removals, job->slots, needs, fit, job->statistics_work);
        return;
    }
    statistics_free(eviction->statistics);
    eviction->statistics = NULL;
}

/* What is about to go, while it is still there. */
static void summarise(void *context) {
    const struct prune_job *job = context;
    const struct sequence *sequence = job->sequence;
    const struct engine *engine = sequence->engine;
    const struct eviction *eviction = &sequence->eviction;
    if (eviction->summaries != NULL)
        summaries_add(eviction->summaries, kv_cache_pool(engine->cache), sequence->kv, job->removals,
            eviction->statistics->heads, engine->prune.identity, eviction->settings.network,
            network_level(job->budget, job->seen), job->summaries_work);
}

static int compact(struct prune_job *job, struct error *error) {
    struct sequence *sequence = job->sequence;
    struct eviction *eviction = &sequence->eviction;
    int code = sequence_prepare_sinks(sequence, error);
    if (code == 0)
        code = sequence_prepare_summaries(sequence, error);
    if (code == 0)
        code = kv_sequence_prune_after(sequence->kv, job->removals, summarise, job, error);
    sequence_drop_unused_summaries(sequence);
    if (code != 0)
        return code;
    eviction->pruned = true;
    eviction->worst_at = 0;
    follow(job);
    sequence_rotate_sinks(sequence);
    sequence_charge_less(sequence);
    finish(sequence);
    return 0;
}

static void count_time(struct engine *engine, enum engine_phase phase, double *start) {
    double now = clock_seconds();
    transformer_profile(engine->transformer)->seconds[phase] += now - *start;
    *start = now;
}

/* Scores of all jobs, where the host can read them. */
static int score(struct prune *prune, struct error *error) {
    struct engine *engine = prune->engine;
    const struct backend_operations *operations = engine_operations(engine);
    const struct model_shape *shape = &engine->model->shape;
    size_t slots = 0;
    if (prune->scored == 0)
        return 0;
    int code = operations->score(engine->backend, kv_cache_pool(engine->cache), prune->layers,
        prune->scored * shape->layers, shape->heads, error);
    if (code != 0)
        return code;
    for (uint32_t i = 0; i < prune->count; i++)
        slots += prune->jobs[i].found ? 0 : prune->jobs[i].slots_count;
    if (prune->host_scores != NULL)
        operations->download(engine->backend, prune->host_scores, engine->prune.scores, slots * sizeof(float));
    operations->synchronize(engine->backend);
    return 0;
}

int engine_prune(struct engine *engine, struct sequence *const *sequences, uint32_t count, struct error *error) {
    struct prune prune = {.engine = engine, .use_found = true};
    double start = clock_seconds();
    uint32_t chosen = choose(sequences, count);
    if (chosen == 0)
        return 0;
    if (plan(&prune, sequences, count, chosen) != 0)
        return error_set(error, ERROR_MEMORY, "no memory to prune %u sequences", chosen);
    int first = score(&prune, error);
    count_time(engine, PHASE_SCORE, &start);
    if (first != 0)
        return first;
    for (uint32_t i = 0; i < prune.count; i++) {
        struct error *report = first == 0 ? error : NULL; /* the first failure is told */
        int code = select_job(&prune, &prune.jobs[i], report);
        count_time(engine, PHASE_SELECT, &start);
        if (code == 0)
            code = compact(&prune.jobs[i], report);
        count_time(engine, PHASE_COMPACT, &start);
        first = first == 0 ? code : first;
    }
    return first;
}

int sequence_scores(struct sequence *sequence, float *out, struct error *error) {
    struct engine *engine = sequence->engine;
    struct prune prune = {.engine = engine, .show_scores = true};
    if (!sequence->eviction.evicts || sequence->swap != NULL || sequence_length(sequence) == 0)
        return error_set(error, ERROR_INVALID, "no policy scores this sequence");
    sequence->eviction.chosen = true;
    if (plan(&prune, &sequence, 1, 1) != 0)
        return error_set(error, ERROR_MEMORY, "no memory to score a sequence");
    int code = score(&prune, error);
    const struct prune_job *job = prune.jobs;
    for (uint32_t i = 0; i < engine_heads(engine) && code == 0; i++) {
        const float *scores = host_scores(&prune, job->heads[i].scores);
        for (uint32_t slot = 0; slot < job->slots[i]; slot++)
            *out++ = job->heads[i].view.slots > 0 ? scores[slot] : INFINITY; /* it keeps everything */
    }
    return code;
}

/* Slots of a head that stay: ascending, distinct, and there. */
static int check_list(
    const struct prune_job *job, uint32_t head, const uint32_t *list, uint32_t count, struct error *error) {
    for (uint32_t i = 0; i < count; i++)
        if (list[i] >= job->slots[head] || (i > 0 && list[i] <= list[i - 1]))
            return error_set(error, ERROR_INVALID, "head %u: slot %u is out of place among %u of %u", head, list[i],
                count, job->slots[head]);
    return 0;
}

int sequence_prune_to(
    struct sequence *sequence, const uint32_t *const *lists, const uint32_t *counts, struct error *error) {
    struct prune prune = {.engine = sequence->engine};
    bool some = false;
    if (!is_due(sequence))
        return error_set(error, ERROR_INVALID, "no prune of this sequence is due");
    sequence->eviction.chosen = true;
    if (prepare(&prune, &sequence, 1, 1) != 0)
        return error_set(error, ERROR_MEMORY, "no memory to prune a sequence");
    struct prune_job *job = prune.jobs;
    float *none = NULL;
    fill_job(job, false, &none);
    for (uint32_t i = 0; i < engine_heads(sequence->engine); i++) {
        int code = check_list(job, i, lists[i], counts[i], error);
        if (code != 0)
            return code;
        job->removals[i] =
            removal_of(job, lists[i], counts[i], job->slots[i], positions_of(sequence->engine, sequence, i));
        some = some || job->removals[i].keep != NULL || job->removals[i].evict != KV_NO_SLOT;
    }
    if (some)
        return compact(job, error);
    finish(sequence);
    return 0;
}
