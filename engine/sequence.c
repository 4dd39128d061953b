/* SPDX-License-Identifier: Apache-2.0
 *
 * The life of sequences, and when their prunes are due.
 */
#include "engine/engine_internal.h"
#include "policy/budget.h"
#include "policy/network.h"

#include <stdlib.h>
#include <string.h>

enum { RECORDED_WINDOW_MAX = 256 };

struct sequence *sequence_create(struct engine *engine) {
    struct sequence *sequence = calloc(1, sizeof *sequence);
    if (sequence == NULL)
        return NULL;
    sequence->engine = engine;
    sequence->kv = kv_sequence_create(engine->cache);
    if (sequence->kv == NULL) {
        free(sequence);
        return NULL;
    }
    return sequence;
}

/* A copy of count numbers of `bytes` bytes in host memory; NULL stays NULL. */
static int copy_host(void **to, const void *from, size_t count, size_t bytes) {
    if (from == NULL)
        return 0;
    *to = malloc(count * bytes);
    if (*to == NULL)
        return ERROR_MEMORY;
    memcpy(*to, from, count * bytes);
    return 0;
}

static int fork_sinks(struct sequence *fork, const struct sequence *sequence) {
    const float *keys = sequence->eviction.sink_keys;
    struct backend *backend = fork->engine->backend;
    if (keys == NULL)
        return 0;
    size_t bytes = sequence_sink_bytes(fork);
    fork->eviction.sink_keys = backend->operations->allocate(backend, bytes / backend_ranks(backend));
    if (fork->eviction.sink_keys == NULL)
        return ERROR_MEMORY;
    return statistics_copy_device(backend, fork->eviction.sink_keys, keys, bytes);
}

static int fork_eviction(struct sequence *fork, const struct sequence *sequence) {
    const struct eviction *from = &sequence->eviction;
    struct eviction *to = &fork->eviction;
    if (from->settings.policy != NULL)
        policy_settings_copy(&to->settings, &from->settings);
    to->recorded = from->recorded;
    to->recorded_window = from->recorded_window;
    to->evicts = from->evicts;
    to->prompt_tokens = from->prompt_tokens;
    to->handled = from->handled;
    to->pruned = from->pruned;
    to->sinks = from->sinks;
    if (kv_sequence_charge(fork->kv, kv_sequence_charged(sequence->kv), NULL) != 0)
        return ERROR_PAGES;
    const struct engine *engine = fork->engine;
    if (copy_host((void **)&to->layer_preferences, from->layer_preferences, engine->model->shape.global_layers,
            sizeof *to->layer_preferences) != 0 ||
        copy_host((void **)&to->gates, from->gates, engine_heads(engine), sizeof *to->gates) != 0 ||
        fork_sinks(fork, sequence) != 0)
        return ERROR_MEMORY;
    if (from->statistics != NULL) {
        to->statistics = statistics_fork(from->statistics, NULL);
        if (to->statistics == NULL)
            return ERROR_MEMORY;
    }
    if (from->summaries != NULL) {
        to->summaries = summaries_fork(from->summaries);
        if (to->summaries == NULL)
            return ERROR_MEMORY;
    }
    return 0;
}

struct sequence *sequence_fork(const struct sequence *sequence) {
    struct sequence *fork = calloc(1, sizeof *fork);
    if (fork == NULL)
        return NULL;
    uint32_t length = sequence_length(sequence);
    fork->engine = sequence->engine;
    fork->unshared = sequence->unshared;
    fork->capacity = length + 1;
    fork->tokens = malloc(fork->capacity * sizeof *fork->tokens);
    fork->kv = kv_sequence_fork(sequence->kv);
    if (fork->tokens == NULL || fork->kv == NULL || fork_eviction(fork, sequence) != 0) {
        sequence_free(fork);
        return NULL;
    }
    if (length > 0)
        memcpy(fork->tokens, sequence->tokens, length * sizeof *fork->tokens);
    return fork;
}

void sequence_keep_private(struct sequence *sequence) {
    sequence->unshared = true;
}

uint32_t sequence_fork_pages(const struct sequence *sequence) {
    return (uint32_t)kv_cache_pages_of(sequence->engine->cache, kv_sequence_charged(sequence->kv));
}

void sequence_free(struct sequence *sequence) {
    if (sequence == NULL)
        return;
    struct eviction *eviction = &sequence->eviction;
    sequence_await_found(sequence);
    if (sequence->kv != NULL)
        kv_sequence_free(sequence->kv);
    statistics_free(eviction->statistics);
    summaries_free(eviction->summaries);
    engine_operations(sequence->engine)->release(sequence->engine->backend, eviction->sink_keys);
    if (eviction->settings.policy != NULL)
        policy_settings_release(&eviction->settings);
    free(eviction->layer_preferences);
    free(eviction->gates);
    free(eviction->worst);
    free(sequence->swap);
    free(sequence->tokens);
    free(sequence);
}

uint32_t sequence_length(const struct sequence *sequence) {
    return kv_sequence_length(sequence->kv);
}

const int32_t *sequence_tokens(const struct sequence *sequence) {
    return sequence->tokens;
}

struct kv_sequence *sequence_kv(struct sequence *sequence) {
    return sequence->kv;
}

int sequence_reserve_tokens(struct sequence *sequence, uint32_t count) {
    uint32_t needed = sequence_length(sequence) + count;
    if (needed <= sequence->capacity)
        return 0;
    uint32_t capacity = needed + needed / 2 + KV_PAGE_SLOTS;
    int32_t *tokens = realloc(sequence->tokens, capacity * sizeof *tokens);
    if (tokens == NULL)
        return ERROR_MEMORY;
    sequence->tokens = tokens;
    sequence->capacity = capacity;
    return 0;
}

static int check_gates(const struct engine *engine, const struct policy_settings *settings, struct error *error) {
    const struct model_shape *shape = &engine->model->shape;
    const struct head_gates *gates = settings->gates;
    if (gates != NULL && (gates->layers != shape->layers || gates->kv_heads != shape->kv_heads))
        return error_set(error, ERROR_UNSUPPORTED,
            "the gates are for %u layers of %u KV heads, this model has %u of %u", gates->layers, gates->kv_heads,
            shape->layers, shape->kv_heads);
    return 0;
}

struct statistics_shape engine_statistics_shape(const struct engine *engine, const struct policy_settings *settings) {
    const struct model_shape *shape = &engine->model->shape;
    return (struct statistics_shape){
        .layers = shape->layers,
        .kv_heads = shape->kv_heads,
        .group = shape->heads / shape->kv_heads,
        .head_dim = shape->head_dim,
        .window = settings->window,
        .history = settings->history,
        .seed = settings->seed,
        .content = settings->network != NULL ? settings->network->shape.content : 0,
        .ranks = backend_ranks(engine->backend),
        .windows = engine->model->windows,
    };
}

/* What is needed by a policy (settings->policy NULL: none) and recorded beside it; nothing was attended to yet. */
static int create_statistics(struct sequence *sequence, const struct policy_settings *settings, uint32_t recorded,
    uint32_t window, struct error *error) {
    uint32_t needs = settings->policy != NULL ? policy_needs(settings, true) : 0;
    struct statistics_shape shape = engine_statistics_shape(sequence->engine, settings);
    struct statistics *statistics = NULL;
    if (recorded & STATISTICS_WINDOWED) {
        if ((needs & STATISTICS_WINDOWED) && shape.window != window)
            return error_set(error, ERROR_INVALID, "a window of %u cannot be recorded beside the policy's of %u",
                window, shape.window);
        shape.window = window;
    }
    if ((needs | recorded) != 0) {
        statistics = statistics_create(sequence->engine->backend, &shape, needs | recorded, error);
        if (statistics == NULL)
            return ERROR_MEMORY;
    }
    statistics_free(sequence->eviction.statistics);
    sequence->eviction.statistics = statistics;
    return 0;
}

int sequence_record(struct sequence *sequence, uint32_t statistics, uint32_t window, struct error *error) {
    const uint32_t allowed =
        STATISTIC_SUM | STATISTIC_SQUARED | STATISTIC_ENTROPY | STATISTIC_MOMENTS | STATISTICS_WINDOWED;
    struct eviction *eviction = &sequence->eviction;
    bool windowed = (statistics & STATISTICS_WINDOWED) != 0;
    if (sequence_length(sequence) > 0)
        return error_set(error, ERROR_INVALID, "statistics are recorded from a sequence's first token on");
    if ((statistics & ~allowed) != 0)
        return error_set(error, ERROR_INVALID, "statistics %#x cannot be recorded", statistics & ~allowed);
    if (windowed && (window == 0 || window > RECORDED_WINDOW_MAX))
        return error_set(
            error, ERROR_INVALID, "a window of %u queries, allowed are 1 to %d", window, RECORDED_WINDOW_MAX);
    if (windowed && (eviction->recorded & STATISTICS_WINDOWED) && eviction->recorded_window != window)
        return error_set(
            error, ERROR_INVALID, "a window of %u queries beside one of %u", window, eviction->recorded_window);
    uint32_t recorded = eviction->recorded | statistics, kept = windowed ? window : eviction->recorded_window;
    int code = create_statistics(sequence, &eviction->settings, recorded, kept, error);
    if (code != 0)
        return code;
    eviction->recorded = recorded;
    eviction->recorded_window = kept;
    return 0;
}

static int check_network(const struct engine *engine, const struct policy_settings *settings, struct error *error) {
    const struct policy_model model = engine_policy_model(engine);
    return policy_settings_want_network(settings) ? policy_settings_fit(settings, &model, error) : 0;
}

/* laprox and laprox_head divide by the norm of a layer's whole output, laprox multiplies values of different heads: no
 * rank has all of them. */
static int check_ranks(const struct engine *engine, const struct policy_settings *settings, struct error *error) {
    struct score_stage stages[SCORE_STAGES_MAX];
    uint32_t count = backend_ranks(engine->backend) > 1 ? policy_stages(settings, stages) : 0;
    for (uint32_t i = 0; i < count; i++)
        if (stages[i].kind == STAGE_LAPROX || stages[i].kind == STAGE_LAPROX_HEAD)
            return error_set(error, ERROR_UNSUPPORTED, "policy %s needs all heads of a layer on one device, not on %u",
                settings->policy->name, backend_ranks(engine->backend));
    return 0;
}

static int set_policy(
    struct sequence *sequence, const struct policy_settings *settings, uint32_t prompt_tokens, struct error *error) {
    struct eviction *eviction = &sequence->eviction;
    int code = policy_settings_check(settings, error);
    if (code == 0)
        code = check_gates(sequence->engine, settings, error);
    if (code == 0)
        code = check_network(sequence->engine, settings, error);
    if (code == 0)
        code = check_ranks(sequence->engine, settings, error);
    if (code == 0)
        code = create_statistics(sequence, settings, eviction->recorded, eviction->recorded_window, error);
    if (code != 0)
        return code;
    policy_settings_copy(&eviction->settings, settings);
    eviction->evicts = !policy_settings_keep_all(settings);
    eviction->prompt_tokens = prompt_tokens;
    return 0;
}

int sequence_set_policy(
    struct sequence *sequence, const struct policy_settings *settings, uint32_t prompt_tokens, struct error *error) {
    if (sequence_length(sequence) > 0 || sequence->eviction.settings.policy != NULL)
        return error_set(error, ERROR_INVALID, "a policy is chosen once, before a sequence's first token");
    if (settings->network != NULL || !policy_settings_want_network(settings))
        return set_policy(sequence, settings, prompt_tokens, error);
    const struct policy_model model = engine_policy_model(sequence->engine);
    struct policy_settings resolved;
    policy_settings_copy(&resolved, settings);
    int code = policy_settings_resolve(&resolved, &model, NULL, error);
    if (code == 0)
        code = set_policy(sequence, &resolved, prompt_tokens, error);
    policy_settings_release(&resolved);
    return code;
}

int sequence_set_budget(struct sequence *sequence, double ratio, uint32_t tokens, struct error *error) {
    struct eviction *eviction = &sequence->eviction;
    struct policy_settings changed = eviction->settings; /* borrows gates and network */
    if (changed.policy == NULL || eviction->handled > 0)
        return error_set(
            error, ERROR_INVALID, "a budget is changed between the choice of a policy and its first prune");
    changed.ratio = ratio;
    changed.tokens = tokens;
    int code = policy_settings_check(&changed, error);
    if (code != 0)
        return code;
    if (policy_settings_keep_all(&changed) == eviction->evicts ||
        policy_needs(&changed, true) != policy_needs(&eviction->settings, true))
        return error_set(error, ERROR_INVALID, "a budget of %g, %u tokens needs other statistics than those there are",
            ratio, tokens);
    eviction->settings.ratio = ratio;
    eviction->settings.tokens = tokens;
    return 0;
}

/* What a prompt was computed with serves both. */
static bool same_statistics(const struct policy_settings *a, const struct policy_settings *b) {
    uint32_t content_a = a->network != NULL ? a->network->shape.content : 0;
    uint32_t content_b = b->network != NULL ? b->network->shape.content : 0;
    return policy_needs(a, true) == policy_needs(b, true) && a->window == b->window && a->history == b->history &&
           a->seed == b->seed && content_a == content_b;
}

int sequence_change_policy(struct sequence *sequence, const struct policy_settings *settings, struct error *error) {
    struct eviction *eviction = &sequence->eviction;
    const struct policy_settings *old = &eviction->settings;
    if (old->policy == NULL || eviction->handled > 0)
        return error_set(
            error, ERROR_INVALID, "a policy is changed between the choice of a policy and its first prune");
    if (policy_settings_keep_all(settings) || !eviction->evicts || !same_statistics(old, settings) ||
        settings->prefill_prune_every != old->prefill_prune_every || settings->cache_positions != old->cache_positions)
        return error_set(error, ERROR_INVALID, "%s needs other statistics than those of %s", settings->policy->name,
            old->policy->name);
    struct policy_settings copy;
    policy_settings_copy(&copy, settings);
    policy_settings_release(&eviction->settings);
    eviction->settings = copy;
    return 0;
}

int sequence_drop_policy(struct sequence *sequence, struct error *error) {
    struct eviction *eviction = &sequence->eviction;
    if (eviction->handled > 0 || eviction->recorded != 0)
        return error_set(error, ERROR_INVALID, "a policy is dropped before the first prune, where nothing is recorded");
    policy_settings_release(&eviction->settings);
    eviction->settings = (struct policy_settings){.policy = NULL};
    eviction->evicts = false;
    statistics_free(eviction->statistics);
    eviction->statistics = NULL;
    sequence_charge_less(sequence);
    return 0;
}

const struct policy_settings *sequence_policy(const struct sequence *sequence) {
    return sequence->eviction.settings.policy != NULL ? &sequence->eviction.settings : NULL;
}

/* The first length after `from` at which a prune is due. */
static uint32_t prune_after(const struct eviction *eviction, uint32_t from) {
    const struct policy_settings *settings = &eviction->settings;
    uint32_t prompt = eviction->prompt_tokens, every = settings->prefill_prune_every;
    uint64_t next;
    if (from < prompt) {
        next = every > 0 ? ((uint64_t)from / every + 1) * every : prompt;
        return next < prompt ? (uint32_t)next : prompt;
    }
    if (settings->frozen_prompt)
        return UINT32_MAX;
    next = from + (uint64_t)settings->interval - (from - prompt) % settings->interval;
    return next < UINT32_MAX ? (uint32_t)next : UINT32_MAX;
}

uint32_t sequence_next_prune(const struct sequence *sequence) {
    const struct eviction *eviction = &sequence->eviction;
    return eviction->evicts ? prune_after(eviction, eviction->handled) : UINT32_MAX;
}

uint32_t sequence_room(const struct sequence *sequence) {
    uint32_t next = sequence_next_prune(sequence), length = sequence_length(sequence);
    if (next == UINT32_MAX)
        return UINT32_MAX;
    return next > length ? next - length : 0;
}

/* Slots that a head gets room for at once. */
static uint32_t statistics_hint(const struct sequence *sequence) {
    const struct eviction *eviction = &sequence->eviction;
    if (sequence_length(sequence) >= eviction->prompt_tokens)
        return 0;
    uint32_t slots = demand_prompt_slots(&eviction->settings, eviction->prompt_tokens);
    return slots < sequence->engine->tokens_max ? slots : sequence->engine->tokens_max;
}

size_t sequence_device_bytes(const struct sequence *sequence) {
    const struct eviction *eviction = &sequence->eviction;
    size_t sinks = eviction->sink_keys != NULL || eviction->sinks_saved ? sequence_sink_bytes(sequence) : 0;
    size_t summaries = eviction->summaries != NULL ? eviction->summaries->bytes : 0;
    return sinks + summaries + (eviction->statistics != NULL ? eviction->statistics->bytes : 0);
}

void sequence_charge_less(struct sequence *sequence) {
    kv_sequence_charge(sequence->kv, sequence_device_bytes(sequence), NULL);
}

int sequence_prepare_summaries(struct sequence *sequence, struct error *error) {
    struct engine *engine = sequence->engine;
    uint32_t heads = engine_heads(engine), dim = engine->model->shape.head_dim;
    if (!sequence->eviction.settings.summary || sequence->eviction.summaries != NULL)
        return 0;
    int code = kv_sequence_charge(sequence->kv, sequence_device_bytes(sequence) + summaries_bytes(heads, dim), error);
    if (code != 0)
        return code;
    sequence->eviction.summaries = summaries_create(engine->backend, heads, engine->model->shape.kv_heads, dim);
    if (sequence->eviction.summaries != NULL)
        return 0;
    sequence_charge_less(sequence);
    return error_set(error, ERROR_MEMORY, "no memory for the summary slots of a sequence");
}

void sequence_drop_unused_summaries(struct sequence *sequence) {
    struct eviction *eviction = &sequence->eviction;
    if (eviction->summaries == NULL || eviction->summaries->any)
        return;
    summaries_free(eviction->summaries);
    eviction->summaries = NULL;
    sequence_charge_less(sequence);
}

uint32_t sequence_beside_summary(uint32_t budget) {
    return budget > 1 ? budget - 1 : budget;
}

int sequence_reserve_statistics(struct sequence *sequence, uint32_t count, struct error *error) {
    struct statistics *statistics = sequence->eviction.statistics;
    if (statistics == NULL)
        return 0;
    uint32_t hint = statistics_hint(sequence);
    size_t more = statistics_reserve_bytes(statistics, sequence->kv, count, hint);
    if (more == 0)
        return 0;
    int code = kv_sequence_charge(sequence->kv, kv_sequence_charged(sequence->kv) + more, error);
    if (code == 0)
        code = statistics_reserve(statistics, sequence->kv, count, hint, error);
    if (code == ERROR_MEMORY && kv_cache_release_attached(sequence->engine->cache)) /* snapshots, of the same memory */
        code = statistics_reserve(statistics, sequence->kv, count, hint, error);
    sequence_charge_less(sequence);
    return code;
}

uint32_t sequence_pages_needed(const struct sequence *sequence, uint32_t count) {
    const struct statistics *statistics = sequence->eviction.statistics;
    uint64_t pages = kv_sequence_pages_needed(sequence->kv, count);
    if (statistics != NULL && count > 0) {
        size_t more = statistics_reserve_bytes(statistics, sequence->kv, count, statistics_hint(sequence));
        pages += kv_cache_pages_of(sequence->engine->cache, more);
    }
    return pages < UINT32_MAX ? (uint32_t)pages : UINT32_MAX;
}

bool sequence_prune_awaits_results(const struct sequence *sequence) {
    return sequence->eviction.worst_awaited;
}

size_t sequence_statistics_bytes(const struct sequence *sequence) {
    return kv_sequence_charged(sequence->kv);
}

struct sequence_memory sequence_memory(const struct sequence *sequence) {
    const struct engine *engine = sequence->engine;
    uint64_t page_bytes = kv_cache_pool(engine->cache)->page_bytes, heads = engine_heads(engine);
    uint64_t held = kv_sequence_tokens_held(sequence->kv), counted = engine_global_heads(engine);
    uint32_t seen = sequence_length(sequence);
    held -= counted > 0 ? kv_sequence_tokens_sliding(sequence->kv) : 0;
    return (struct sequence_memory){
        .seen = seen,
        .kept = (double)held / (double)(counted > 0 ? counted : heads),
        .bytes = kv_sequence_pages_held(sequence->kv) * page_bytes + kv_sequence_charged(sequence->kv),
        .bytes_full = (kv_pages_for(seen) * heads - kv_sequence_pages_slid(sequence->kv)) * page_bytes,
    };
}

size_t engine_statistics_bytes(const struct engine *engine) {
    return kv_cache_charged(engine->cache);
}

int sequence_keep(struct sequence *sequence, uint32_t layer, uint32_t head, const uint32_t *slots, uint32_t count,
    struct error *error) {
    const struct model_shape *shape = &sequence->engine->model->shape;
    if (layer >= shape->layers || head >= shape->kv_heads)
        return error_set(error, ERROR_INVALID, "no KV head %u in layer %u", head, layer);
    uint32_t before = kv_sequence_slots(sequence->kv, layer, head);
    int code = kv_sequence_keep(sequence->kv, layer, head, slots, count, error);
    sequence->eviction.worst_at = 0;
    if (code == 0 && count < before && sequence->eviction.statistics != NULL)
        statistics_keep(sequence->eviction.statistics, layer * shape->kv_heads + head, slots, count, before);
    return code;
}
