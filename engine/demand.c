/* SPDX-License-Identifier: Apache-2.0
 *
 * What a sequence will take, for admission.
 */
#include "engine/engine_internal.h"
#include "policy/budget.h"

#include <math.h>
#include <stdlib.h>

uint32_t demand_prompt_slots(const struct policy_settings *settings, uint32_t prompt_tokens) {
    uint32_t every = settings->prefill_prune_every;
    if (policy_settings_keep_all(settings) || every == 0 || every >= prompt_tokens)
        return prompt_tokens;
    uint64_t slots = (uint64_t)policy_budget(settings, prompt_tokens) + every;
    return slots < prompt_tokens ? (uint32_t)slots : prompt_tokens;
}

/* What all heads hold together. */
struct holding {
    uint64_t slots;
    uint64_t pages;
};

static void hold(struct holding *holding, uint32_t slots) {
    holding->slots += slots;
    holding->pages += kv_pages_for(slots);
}

/* A length, tokens that came after its prune, and what there is at most of both. */
struct moment {
    uint32_t seen, more, tokens;
    bool summary; /* one of B's slots is none of a token, once one went */
};

static uint32_t slots_at(const struct moment *moment, uint32_t budget) {
    uint64_t slots = moment->seen;
    if (budget < moment->seen)
        slots = moment->summary ? sequence_beside_summary(budget) : budget;
    slots += moment->more;
    return slots < moment->tokens ? (uint32_t)slots : moment->tokens;
}

/* How many heads keep everything does not depend on the gates: where they are not known yet, any will do. */
static struct holding hold_gated(
    const struct engine *engine, const struct policy_settings *settings, const struct moment *moment) {
    struct holding holding = {0};
    uint32_t heads = engine_global_heads(engine);
    uint32_t *budgets = malloc(heads * sizeof *budgets);
    float *gates = calloc(heads, sizeof *gates);
    if (gates != NULL && settings->gates != NULL)
        engine_gather_gates(engine, settings->gates->values, gates);
    struct budget_input input = {
        .settings = settings,
        .layers = engine->model->shape.global_layers,
        .numbers = engine->model->global_layers,
        .kv_heads = engine->model->shape.kv_heads,
        .seen = moment->seen,
        .gates = gates,
    };
    bool known = budgets != NULL && gates != NULL;
    if (known)
        budget_allocate(&input, budgets);
    uint64_t by_rank[BACKEND_RANKS_MAX] = {0}, most = 0; /* the fullest rank decides, as for free pages */
    for (uint32_t i = 0; i < heads; i++) {
        uint32_t slots = slots_at(moment, known ? budgets[i] : UINT32_MAX);
        uint64_t *pages = &by_rank[backend_rank_of_head(engine->backend, input.kv_heads, i)];
        holding.slots += slots;
        *pages += kv_pages_for(slots);
        most = *pages > most ? *pages : most;
    }
    holding.pages = most * backend_ranks(engine->backend);
    free(budgets);
    free(gates);
    return holding;
}

static struct holding hold_all(
    const struct engine *engine, const struct policy_settings *settings, const struct moment *moment) {
    struct holding holding = {0};
    if (settings->policy->allocation == ALLOCATE_GATES)
        return hold_gated(engine, settings, moment);
    uint32_t slots = slots_at(moment, policy_budget(settings, moment->seen));
    for (uint32_t i = 0; i < engine_global_heads(engine); i++)
        hold(&holding, slots);
    if (settings->scope != SCOPE_HEAD || settings->policy->allocation != ALLOCATE_EQUAL)
        holding.pages += engine_global_heads(engine); /* as many slots, in pages that are not full */
    return holding;
}

/* Of statistics with room for `room` slots a head, as they are until the first prune or after it. */
static uint64_t statistics_pages(
    const struct engine *engine, const struct policy_settings *settings, bool first, uint32_t room) {
    const struct model_shape *shape = &engine->model->shape;
    uint32_t needs = policy_needs(settings, first), heads = engine_global_heads(engine);
    struct statistics_shape arrays = engine_statistics_shape(engine, settings);
    size_t bytes = statistics_moments_bytes(&arrays, needs);
    bytes += heads * statistics_head_bytes(&arrays, needs, room);
    if (settings->cache_positions) /* from just before the first prune on */
        bytes += (size_t)engine_heads(engine) * (settings->sinks < room ? settings->sinks : room) * shape->head_dim *
                 sizeof(float);
    return kv_cache_pages_of(engine->cache, bytes);
}

/* Of summary slots, from just before the first prune on. */
static uint64_t summaries_pages(const struct engine *engine, const struct policy_settings *settings) {
    const struct model_shape *shape = &engine->model->shape;
    size_t bytes = settings->summary ? summaries_bytes(engine_heads(engine), shape->head_dim) : 0;
    return kv_cache_pages_of(engine->cache, bytes);
}

/* Of sliding layers with `tokens` tokens of which `appended` came at once. */
static uint64_t sliding_pages(const struct engine *engine, uint32_t tokens, uint32_t appended) {
    const struct model_shape *shape = &engine->model->shape;
    uint64_t pages = 0, all = kv_pages_for(tokens);
    for (uint32_t layer = 0; layer < shape->layers; layer++) {
        uint32_t window = engine->model->windows[layer];
        uint64_t most = kv_pages_for_window(window, appended);
        if (window != 0)
            pages += shape->kv_heads * (most < all ? most : all);
    }
    return pages;
}

static struct sequence_demand demand_of_policy(
    const struct engine *engine, const struct policy_settings *settings, uint32_t prompt_tokens, uint32_t tokens) {
    uint64_t heads = engine_global_heads(engine);
    if (tokens < prompt_tokens)
        tokens = prompt_tokens;
    if (settings == NULL || settings->policy == NULL || policy_settings_keep_all(settings))
        return (struct sequence_demand){heads * kv_pages_for(prompt_tokens), heads * kv_pages_for(tokens)};
    struct sequence_demand demand;
    uint32_t peak = demand_prompt_slots(settings, prompt_tokens);
    demand.peak_pages = heads * kv_pages_for(peak) + statistics_pages(engine, settings, true, peak);
    if (prompt_tokens > budget_least(settings, prompt_tokens))
        demand.peak_pages += summaries_pages(engine, settings);
    struct moment moment = {tokens, tokens > prompt_tokens ? settings->interval : 0, tokens, settings->summary};
    if (settings->frozen_prompt)
        moment = (struct moment){prompt_tokens, tokens - prompt_tokens, tokens, settings->summary};
    struct holding holding = hold_all(engine, settings, &moment);
    bool pruned = holding.slots < heads * tokens;
    demand.pages = holding.pages + (pruned ? summaries_pages(engine, settings) : 0);
    if (settings->frozen_prompt)
        return demand;
    uint32_t mean = heads > 0 ? (uint32_t)((holding.slots + heads - 1) / heads) : 0;
    demand.pages += statistics_pages(engine, settings, !pruned, statistics_room_for(mean));
    return demand;
}

struct sequence_demand engine_demand(
    const struct engine *engine, const struct policy_settings *settings, uint32_t prompt_tokens, uint32_t tokens) {
    struct sequence_demand demand = demand_of_policy(engine, settings, prompt_tokens, tokens);
    demand.peak_pages += sliding_pages(engine, prompt_tokens, engine->batch_rows);
    demand.pages += sliding_pages(engine, tokens < prompt_tokens ? prompt_tokens : tokens, 1);
    return demand;
}

double engine_ratio_of_bytes(
    const struct engine *engine, const struct policy_settings *settings, double ratio, uint32_t tokens) {
    const uint32_t many = 1024; /* so that alignment does not count */
    const struct kv_layout *layout = &kv_cache_pool(engine->cache)->layout;
    struct statistics_shape arrays = engine_statistics_shape(engine, settings);
    double slot = (double)kv_page_bytes(layout) / KV_PAGE_SLOTS;
    double counted = slot + (double)statistics_head_bytes(&arrays, policy_needs(settings, false), many) / many;
    double slots = ratio * tokens * slot / counted;
    if (settings->summary) /* is one of the slots, and has its own memory */
        slots += 1 - (double)summaries_bytes(1, layout->head_dim) / counted;
    return fmax(fmin(slots / tokens, ratio), fmin(1.0 / tokens, ratio));
}
