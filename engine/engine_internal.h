/* SPDX-License-Identifier: Apache-2.0
 *
 * The inside of engine.h: what its files (engine.c, sequence.c, prefix.c, prune.c, prune_plan.c, features.c,
 * rotation.c, swap.c, demand.c) share.
 */
#ifndef ENGINE_ENGINE_INTERNAL_H
#define ENGINE_ENGINE_INTERNAL_H

#include "engine/engine.h"
#include "engine/prune.h"
#include "engine/statistics.h"
#include "engine/summary.h"
#include "engine/transformer.h"

struct engine {
    const struct model *model;
    struct backend *backend;
    struct kv_cache *cache;
    struct transformer *transformer;
    uint32_t batch_rows;
    uint32_t context;      /* limit on a sequence, by the model or the options */
    uint32_t tokens_max;   /* the same, by the page pool too */
    uint32_t wanted_count; /* hidden rows of the last batch */
    /* Host work space for one batch, batch_rows entries unless said otherwise. */
    int32_t *tokens;
    uint32_t *wanted;
    struct kv_item *items;
    struct kv_head_view *views;       /* [layers][items][kv_heads], grown as batches need it */
    struct kv_statistics *statistics; /* the same */
    struct query_moments *moments;    /* [layers][items] */
    size_t views_capacity;
    struct prune_space prune;
};

/* What a sequence keeps for its policy. */
struct eviction {
    struct policy_settings settings; /* policy NULL: none was chosen */
    uint32_t recorded;               /* statistics that are kept in any case: sequence_record */
    uint32_t recorded_window;
    bool evicts; /* some token may have to go */
    uint32_t prompt_tokens;
    uint32_t handled; /* length at the last prune that was due and is done */
    bool chosen;      /* for the prune that is being planned */
    bool pruned;      /* a prune took place that was over budget */
    /* [layers * kv_heads] the slots that go at the prune at length worst_at, KV_NO_SLOT: none; found ahead of it
     * (engine_plan_ahead). NULL before the first. */
    uint32_t *worst;
    /* [layers * kv_heads] kv_removal.rank of them, as far as the backend told; in the same memory. */
    uint32_t *worst_ranks;
    uint32_t worst_at;
    bool worst_awaited;            /* the backend writes them when something is waited for next: sequence_await_found */
    struct statistics *statistics; /* NULL: none are needed */
    bool snapshots;                /* of them are left with the blocks of the prompt: prefix.c */
    uint32_t snapshot_at;          /* length at the last one that was reused or left */
    uint32_t parts_at;             /* where the prompt parts from those that were published before it */
    struct summaries *summaries;   /* NULL: not asked for, or nothing was evicted */
    double *layer_preferences;     /* [layers] of the first prune, cake; else NULL */
    float *gates;     /* [layers * kv_heads] of the first prune, rlkv and hybrid without a file; else NULL */
    uint32_t sinks;   /* tokens that sink_keys are of, with cache_positions */
    bool sinks_saved; /* sink_keys are in host memory */
    float *sink_keys; /* device, on each rank: [its heads][sinks][head_dim] unrotated, with cache_positions */
};

struct sequence {
    struct engine *engine;
    struct kv_sequence *kv;
    int32_t *tokens; /* [length], capacity below */
    uint32_t capacity;
    struct eviction eviction;
    void *swap;    /* host memory; NULL: it is not swapped out */
    bool unshared; /* nothing of it is published */
};

static inline const struct backend_operations *engine_operations(const struct engine *engine) {
    return engine->backend->operations;
}

static inline uint32_t engine_heads(const struct engine *engine) {
    return engine->model->shape.layers * engine->model->shape.kv_heads;
}

/* Heads of sliding layers go by themselves: policies, budgets and statistics are those of the others. */
static inline bool engine_head_slides(const struct engine *engine, uint32_t head) {
    return engine->model->windows[head / engine->model->shape.kv_heads] != 0;
}

static inline uint32_t engine_global_heads(const struct engine *engine) {
    return engine->model->shape.global_layers * engine->model->shape.kv_heads;
}

/* Statistics of the last queries only. */
enum { STATISTICS_WINDOWED = STATISTIC_WINDOW | STATISTIC_HEAD_WINDOW | STATISTIC_OUTPUTS };

/* Statistics that the sequence keeps: for its policy, before or after its first prune, and those that are recorded. */
static inline uint32_t sequence_needs(const struct sequence *sequence, bool first) {
    const struct eviction *eviction = &sequence->eviction;
    uint32_t needs = eviction->settings.policy != NULL ? policy_needs(&eviction->settings, first) : 0;
    return needs | eviction->recorded;
}

/* sequence.c */

/* Room for `count` more token ids. */
int sequence_reserve_tokens(struct sequence *sequence, uint32_t count);
/* Length at which the next prune is due, UINT32_MAX: none will be. */
uint32_t sequence_next_prune(const struct sequence *sequence);
/* Of the statistics of a sequence with these settings. */
struct statistics_shape engine_statistics_shape(const struct engine *engine, const struct policy_settings *settings);
/* Room for the statistics of `count` more tokens, charged to the pool. ERROR_PAGES, ERROR_MEMORY. */
int sequence_reserve_statistics(struct sequence *sequence, uint32_t count, struct error *error);
/* Before a prune that evicts: memory for summary slots, if they are asked for and there is none yet, charged to the
 * pool. ERROR_PAGES, ERROR_MEMORY; then nothing changed. And gives it back when nothing was evicted after all. */
int sequence_prepare_summaries(struct sequence *sequence, struct error *error);
void sequence_drop_unused_summaries(struct sequence *sequence);
/* What of B is left for tokens, beside the summary slot of a head that has one. */
uint32_t sequence_beside_summary(uint32_t budget);
/* Bytes that the sequence holds in the device beside its pages; and charges the pool with them, which were more. */
size_t sequence_device_bytes(const struct sequence *sequence);
void sequence_charge_less(struct sequence *sequence);

/* prefix.c */

/* After a batch was computed and published, before prunes: leaves a snapshot of the statistics if the sequence is where
 * one is wanted, and there is a place for it. */
void sequence_leave_snapshot(struct sequence *sequence);

/* rotation.c: StreamingLLM's positions in the cache */

/* Before a prune: keeps the keys of the sinks without rotation, if that was not done, and makes their pages the
 * sequence's own. ERROR_PAGES, ERROR_MEMORY; then nothing that can be seen changed. */
int sequence_prepare_sinks(struct sequence *sequence, struct error *error);
/* After a prune: rotates the sinks' keys to their places in the cache. */
void sequence_rotate_sinks(struct sequence *sequence);
size_t sequence_sink_bytes(const struct sequence *sequence); /* of sink_keys, whether they are there or not */

/* prune_plan.c */

/* After a batch's tokens were appended: prepares the prunes that its decode steps will be followed by, so that
 * attention can score their slots at once: [layers][count], valid until the next prune of the engine. NULL: there are
 * none, or no memory, or they are for engine_score_ahead. */
const struct score_layer *engine_plan_ahead(struct engine *engine, const struct batch_item *items, uint32_t count);
/* After the batch was computed: asks for slots that attention does not find, where that does not wait. */
void engine_score_ahead(struct engine *engine);
/* Makes sure that slots which were asked for are there: before they are read, and before the sequence goes. */
void sequence_await_found(struct sequence *sequence);

/* prune_plan.c: gates [layers * kv_heads], those of sliding layers left out: out [global heads]. */
void engine_gather_gates(const struct engine *engine, const float *gates, float *out);

/* demand.c */

/* Slots of a head, at most, while the prompt is computed: without a prune, and with prunes every so often. */
uint32_t demand_prompt_slots(const struct policy_settings *settings, uint32_t prompt_tokens);

#endif
