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
struct kv_cache *engine_kv_cache(const struct engine *engine);
const char *engine_describe(const struct engine *engine); /* backend and tier, for logs */
uint32_t engine_batch_rows(const struct engine *engine);
/* Most tokens one sequence can have: the context, or what the page pool holds if that is less. */
uint32_t engine_tokens_max(const struct engine *engine);
size_t engine_weight_bytes(const struct engine *engine); /* read per decode step, logits included */

struct sequence *sequence_create(struct engine *engine);         /* NULL on failed allocation */
struct sequence *sequence_fork(const struct sequence *sequence); /* shares pages until one side writes */
void sequence_free(struct sequence *sequence);                   /* NULL allowed; pages are free at once */
uint32_t sequence_length(const struct sequence *sequence);       /* tokens seen */
const int32_t *sequence_tokens(const struct sequence *sequence); /* [length] */
uint32_t sequence_pages_needed(const struct sequence *sequence, uint32_t count); /* to append count tokens */
struct kv_sequence *sequence_kv(struct sequence *sequence);

/* Gives an empty sequence the published prefix of tokens [count], never all of it: at least one token is left to
 * compute. Returns the number of tokens taken. */
uint32_t sequence_reuse_prefix(struct sequence *sequence, const int32_t *tokens, uint32_t count);

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
 * ERROR_MEMORY: sequences of the batch may hold slots that were not computed; free them.
 * Wanted rows stay valid until the next engine_forward, whether it succeeds or not. */
int engine_forward(struct engine *engine, struct batch_item *items, uint32_t items_count, struct error *error);

/* One result per entry: rows[i] is a wanted row (rows may repeat), params[i] what to do with it. */
int engine_sample(struct engine *engine, const uint32_t *rows, const struct sample_params *params, uint32_t count,
    struct sample_result *results, struct error *error);

/* Logits of one wanted row: out [vocabulary], host. */
int engine_logits(struct engine *engine, uint32_t row, float *out, struct error *error);

/* out[i] = KL(row p_rows[i] || row q_rows[i]) in nats. */
int engine_kl(struct engine *engine, const uint32_t *p_rows, const uint32_t *q_rows, uint32_t count, float *out,
    struct error *error);

/* Seconds and bytes per operation since the last reset, for `bench --profile`; off by default. */
enum engine_phase {
    PHASE_EMBED,
    PHASE_NORM,
    PHASE_QKV,
    PHASE_ROPE,
    PHASE_ATTEND,
    PHASE_ATTN_OUTPUT,
    PHASE_GATE_UP,
    PHASE_SILU,
    PHASE_DOWN,
    PHASE_LOGITS,
    PHASE_SAMPLE,
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
