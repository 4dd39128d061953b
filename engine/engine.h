/* SPDX-License-Identifier: Apache-2.0
 *
 * The engine: a model on a backend with a page pool, and the sequences that live in it. The scheduler, the evaluator
 * and the trainer all work through this header, from one thread (the engine thread).
 *
 * engine_forward runs one batch in which prefill chunks and decode tokens mix freely. What comes out stays on the
 * device as hidden rows; engine_sample, engine_logits and engine_kl turn wanted rows into tokens, logits or KL, in
 * tiles, so that no call needs memory for all logits at once.
 */
#ifndef ENGINE_ENGINE_H
#define ENGINE_ENGINE_H

#include "engine/backend.h"
#include "engine/kv_cache.h"
#include "engine/model.h"
#include "policy/policy.h"

/* Sliding layers (struct model) free what left their window by themselves. Policies do not see them: their heads have
 * no statistics, scores or budgets, whatever is listed by head has entries for them that are not used, and explicit
 * actions leave them alone. */

struct engine;   /* opaque */
struct sequence; /* opaque */

struct engine_options {
    struct backend_options backend;
    size_t kv_bytes; /* of the page pool */
    enum kv_format kv_format;
    uint32_t batch_rows; /* most rows (tokens) of one engine_forward; 0: 512 */
    uint32_t context;    /* limit on a sequence's tokens; 0: the model's */
    bool exact;          /* float32 weights and activations (--precision f32) */
    bool prefix_sharing;
    bool poison_free; /* see kv_cache.h */
};

/* model must outlive the engine. */
struct engine *engine_open(const struct model *model, const struct engine_options *options, struct error *error);
void engine_close(struct engine *engine); /* NULL allowed; all sequences must be freed before */

const struct model *engine_model(const struct engine *engine);
struct policy_model engine_policy_model(const struct engine *engine); /* for policy_settings_resolve; borrows */
struct kv_cache *engine_kv_cache(const struct engine *engine);
const char *engine_describe(const struct engine *engine); /* backend and tier, for logs */
/* 0, or ERROR_DEVICE and the like: one of several devices failed, and nothing can be computed any more. From any
 * thread. */
int engine_check(const struct engine *engine, struct error *error);
uint32_t engine_batch_rows(const struct engine *engine);
/* Most tokens one sequence can have: the context, or what the page pool holds if that is less. */
uint32_t engine_tokens_max(const struct engine *engine);
/* Limit on the tokens that any sequence sees; of one that is pruned the pool may hold fewer. */
uint32_t engine_context(const struct engine *engine);
size_t engine_weight_bytes(const struct engine *engine); /* read per decode step, logits included */

struct sequence *sequence_create(struct engine *engine); /* NULL on failed allocation */
/* NULL on failed allocation, or without pages for a copy of the statistics. */
struct sequence *sequence_fork(const struct sequence *sequence); /* shares pages until one side writes */
uint32_t sequence_fork_pages(const struct sequence *sequence);   /* that the fork's own copy of statistics will take */
void sequence_free(struct sequence *sequence);                   /* NULL allowed; pages are free at once */
uint32_t sequence_length(const struct sequence *sequence);       /* tokens seen */
const int32_t *sequence_tokens(const struct sequence *sequence); /* [length] */
uint32_t sequence_pages_needed(const struct sequence *sequence, uint32_t count); /* to append count tokens */
struct kv_sequence *sequence_kv(struct sequence *sequence);

/* What the sequence computes from now on is not left for others to reuse: when it is freed its pages are free, and hold
 * nothing. */
void sequence_keep_private(struct sequence *sequence);

/* Gives an empty sequence the published prefix of tokens [count], never all of it: at least one token is left to
 * compute, and as many as its policy's statistics need to be what they would be without (policy_fresh_tokens; call
 * sequence_set_policy before). Where statistics are sums over all queries, only a prefix that a snapshot of them was
 * left with; and from then on the sequence leaves snapshots where its own prompt may be reused (prefix.c). Returns the
 * number of tokens taken. */
uint32_t sequence_reuse_prefix(struct sequence *sequence, const int32_t *tokens, uint32_t count);
/* What sequence_reuse_prefix would take of tokens [limit] for a sequence with these settings (NULL: no policy), and how
 * many of those pages nobody holds now. limit: policy_reusable_tokens of its prompt. */
uint32_t engine_match_prefix(const struct engine *engine, const struct policy_settings *settings, const int32_t *tokens,
    uint32_t limit, uint32_t *unheld_pages);
/* Tokens of the prompt up to the next snapshot: a batch that ends there lets it be left, one that goes beyond does
 * without. UINT32_MAX: none is wanted. */
uint32_t sequence_snapshot_room(const struct sequence *sequence);

/* ---- eviction ---- */

/* Chooses the policy of a sequence before its first token. prompt_tokens: tokens of its prompt, after which the first
 * prune happens. Copies settings; where they want a network and have none, they are resolved first
 * (policy_settings_resolve, and its errors). ERROR_UNSUPPORTED: the policy cannot work on this model (message says
 * why), ERROR_INVALID, ERROR_MEMORY. A sequence without a policy keeps everything. */
int sequence_set_policy(
    struct sequence *sequence, const struct policy_settings *settings, uint32_t prompt_tokens, struct error *error);
const struct policy_settings *sequence_policy(const struct sequence *sequence); /* NULL: none */
/* Another budget for the policy that was chosen, until its first prune: a prompt is computed once, forked before
 * engine_prune, and each fork pruned to its own. ratio counts when tokens is 0. ERROR_INVALID: a prune was done, or the
 * budget is none for the policy, or one that needs other statistics (everything is kept, or nothing was to be). */
int sequence_set_budget(struct sequence *sequence, double ratio, uint32_t tokens, struct error *error);
/* Other settings for the sequence, until its first prune: a prompt is computed once, forked before engine_prune, and
 * each fork pruned by its own network or options. Copies settings. ERROR_INVALID: a prune was done, or the settings
 * need other statistics, or prunes of the prompt at other positions, than those that the sequence was computed with. */
int sequence_change_policy(struct sequence *sequence, const struct policy_settings *settings, struct error *error);
/* The sequence has no policy any more and keeps everything, if nothing was pruned yet: a fork becomes the full cache
 * that others are compared with. ERROR_INVALID: a prune was done, or statistics are recorded. */
int sequence_drop_policy(struct sequence *sequence, struct error *error);

/* Tokens that may be appended before a prune is due (to the end of the prompt or the next multiple of
 * prefill_prune_every); UINT32_MAX when none will be. engine_forward refuses more (ERROR_INVALID). */
uint32_t sequence_room(const struct sequence *sequence);

/* Prunes those of the sequences (distinct) that are due: scores, selects and compacts; pages are free afterwards.
 * Statistics follow their slots. Called after every engine_forward, before forks are taken. Does not change rows that
 * were asked for. On failure of one (ERROR_MEMORY, ERROR_PAGES) it is not pruned, and stays valid. */
int engine_prune(struct engine *engine, struct sequence *const *sequences, uint32_t count, struct error *error);
/* Since the last engine_forward: a device is finding what goes at the sequence's prune. It is known with the results of
 * engine_sample or whatever else is waited for, so that a prune after those need not wait itself. */
bool sequence_prune_awaits_results(const struct sequence *sequence);

/* The scores that a prune now would go by, due or not: out [slots of all global layers and heads], by layer, head and
 * slot; NaN where the policy gives none, +infinity for slots that stay in any case. ERROR_INVALID (the sequence has no
 * policy that evicts), ERROR_MEMORY. */
int sequence_scores(struct sequence *sequence, float *out, struct error *error);

/* The policy's view of one head's cached tokens, for the trainer: slots by slot number. Arrays are the caller's, host
 * [capacity] or [capacity][head_dim]; NULL: not wanted. Statistics that the sequence does not keep are zero. Numbers
 * are those that a prune now would see. */
struct head_features {
    uint32_t capacity;    /* in: slots that the arrays have room for */
    uint32_t slots;       /* out; empty ones (position KV_NO_POSITION) included; 0 of a sliding layer */
    uint32_t *positions;  /* original positions */
    float *sum, *squared; /* A and A2 (policy/network.h) */
    float *entropy;       /* H, of the token's own query */
    float *keys;          /* before RoPE */
    float *values;
    float *value_norm, *output_norm; /* ln(1e-6 + |v|), ln(1e-6 + group mean of |v W_h|), L2 */
    /* f16 p[h,t,i] of the last `window` queries: [window][G][capacity], the row of the query at position t is t %
     * window. Only with STATISTIC_HEAD_WINDOW of that window (sequence_record); ERROR_INVALID without it. */
    uint32_t window; /* in */
    uint16_t *head_window;
};
/* ERROR_INVALID: capacity is too small (slots says what is needed), or the sequence is swapped out; ERROR_MEMORY. */
int sequence_features(
    struct sequence *sequence, uint32_t layer, uint32_t head, struct head_features *out, struct error *error);
/* Records these statistics (mask of enum statistic, window: of the windowed ones) in a sequence without a policy, or
 * beside those of its policy, from its first token on. Before the first token. ERROR_INVALID, ERROR_MEMORY. */
int sequence_record(struct sequence *sequence, uint32_t statistics, uint32_t window, struct error *error);

/* An explicit action: keeps the listed slots of a head (ascending), as kv_sequence_keep does, statistics included. */
int sequence_keep(struct sequence *sequence, uint32_t layer, uint32_t head, const uint32_t *slots, uint32_t count,
    struct error *error);
/* A prune that is due, with the caller's action in place of the policy's: head i (layer * kv_heads + head) keeps the
 * slots lists[i] [counts[i]] (ascending); everything else is as engine_prune does it (summary slots, statistics, pages,
 * the next prune). ERROR_INVALID when no prune is due. */
int sequence_prune_to(
    struct sequence *sequence, const uint32_t *const *lists, const uint32_t *counts, struct error *error);

/* Pages that a sequence of `tokens` tokens (prompt_tokens of them a prompt) under these settings will hold at its peak
 * while the prompt is computed, and after `tokens` tokens; statistics included. For admission. */
struct sequence_demand {
    uint64_t peak_pages;
    uint64_t pages;
};
struct sequence_demand engine_demand(
    const struct engine *engine, const struct policy_settings *settings, uint32_t prompt_tokens, uint32_t tokens);

/* The ratio at which a sequence, pruned at `tokens` tokens, takes as many bytes as `ratio` of its full cache would:
 * what it keeps, the statistics of that and the summary slots, without the rest of pages. Above 0, at most ratio. */
double engine_ratio_of_bytes(
    const struct engine *engine, const struct policy_settings *settings, double ratio, uint32_t tokens);

/* Bytes of statistics and summary slots that the sequence holds, and that all sequences hold; charged to the page pool.
 */
size_t sequence_statistics_bytes(const struct sequence *sequence);
size_t engine_statistics_bytes(const struct engine *engine);
/* Bytes of snapshots of statistics, which count as free memory of the pool. */
size_t engine_snapshot_bytes(const struct engine *engine);

/* What a sequence holds of the cache. Not of one that is swapped out. */
struct sequence_memory {
    uint32_t seen;       /* tokens */
    double kept;         /* of them: mean over layers and KV heads, but for sliding layers; no summary slots */
    uint64_t bytes;      /* pages, shared ones counted whole, statistics and summary slots */
    uint64_t bytes_full; /* of the pages that all its tokens would take, those that left a window excepted */
};
struct sequence_memory sequence_memory(const struct sequence *sequence);

/* Moves a sequence's pages, statistics, summary slots and policy state to host memory, and back. Out: its pages are
 * free at once; until it is back only sequence_free, sequence_length, sequence_tokens and sequence_swap_in may be
 * called. In: ERROR_PAGES when there are not enough free ones (it stays out). */
int sequence_swap_out(struct sequence *sequence, struct error *error);
int sequence_swap_in(struct sequence *sequence, struct error *error);
size_t sequence_swap_bytes(const struct sequence *sequence);   /* that swapping out takes or took of host memory */
uint64_t sequence_swap_pages(const struct sequence *sequence); /* that swapping in will take */

enum batch_want {
    WANT_NONE,
    WANT_LAST, /* the hidden row of the item's last token */
    WANT_ALL,  /* one hidden row per token */
};

struct batch_item {
    struct sequence *sequence; /* each at most once in a batch */
    const int32_t *tokens;     /* in [0, vocabulary) */
    uint32_t count;            /* >= 1 */
    enum batch_want want;
    uint32_t first_row; /* out: index of the first wanted row for engine_sample and its like */
};

/* Appends every item's tokens to its sequence and computes them. The sum of counts is at most batch_rows.
 * ERROR_PAGES: not enough free pages, and nothing changed; ERROR_CONTEXT: a sequence would pass tokens_max.
 * ERROR_MEMORY, ERROR_DEVICE: sequences of the batch may hold slots that were not computed; free them.
 * Wanted rows stay valid until the next engine_forward, whether it succeeds or not. */
int engine_forward(struct engine *engine, struct batch_item *items, uint32_t items_count, struct error *error);

/* One result per entry: rows[i] is a wanted row (rows may repeat), params[i] what to do with it. */
int engine_sample(struct engine *engine, const uint32_t *rows, const struct sample_params *params, uint32_t count,
    struct sample_result *results, struct error *error);

/* Logits of one wanted row: out [vocabulary], host. */
int engine_logits(struct engine *engine, uint32_t row, float *out, struct error *error);

/* Hidden states of `count` wanted rows from `row` on, after the final norm: out [count, width], host. */
int engine_hidden(struct engine *engine, uint32_t row, uint32_t count, float *out, struct error *error);

/* out[i] = KL(row p_rows[i] || row q_rows[i]) in nats. */
int engine_kl(struct engine *engine, const uint32_t *p_rows, const uint32_t *q_rows, uint32_t count, float *out,
    struct error *error);

/* Seconds and bytes per operation since the last reset, for `bench --profile`; off by default. */
enum engine_phase {
    PHASE_EMBED,
    PHASE_NORM,
    PHASE_QKV,
    PHASE_ROPE,
    PHASE_ATTEND, /* statistics included */
    PHASE_ATTN_OUTPUT,
    PHASE_GATE_UP,
    PHASE_SILU,
    PHASE_DOWN,
    PHASE_LOGITS,
    PHASE_SAMPLE,
    PHASE_SCORE, /* of engine_prune: stages */
    PHASE_SELECT,
    PHASE_COMPACT,
    PHASE_COUNT,
};
const char *engine_phase_name(enum engine_phase phase);
struct engine_profile {
    double seconds[PHASE_COUNT];
    double bytes[PHASE_COUNT]; /* weights and KV read; activations are not counted */
    uint64_t steps;
};
void engine_profile_enable(struct engine *engine, bool enable); /* also resets */
const struct engine_profile *engine_profile_get(const struct engine *engine);

#endif
