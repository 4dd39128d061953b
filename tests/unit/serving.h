/* SPDX-License-Identifier: Apache-2.0
 *
 * A scheduler over a small random model, and a client that submits requests and collects their outputs: the ground for
 * tests of the engine's serving side.
 */
#ifndef TESTS_UNIT_SERVING_H
#define TESTS_UNIT_SERVING_H

#include "engine/scheduler.h"

struct serving_options {
    size_t kv_pages;        /* of the pool; 0: plenty */
    uint32_t batch_rows;    /* 0: 512 */
    uint32_t prefill_chunk; /* 0: batch_rows */
    uint32_t max_sequences;
    uint32_t max_waiting;
    uint32_t threads;      /* 0: 1 */
    uint32_t context;      /* 0: 512 */
    uint32_t head_dim;     /* 0: 16 */
    const char *kv_policy; /* of requests that choose none, as on the command line; NULL: full */
    size_t swap_bytes;
    bool no_prefix_sharing;
    struct background *background;
    bool broken_model; /* its logits are NaN */
    /* The engine thread stands still after each step that published something, until the client waits for more: what
     * the client does in between comes before the next step, however slow the machine. */
    bool lockstep;
};

/* Models of servings that are created from now on: every second layer slides with this window; 0: none. */
void serving_set_window(uint32_t window);

struct serving; /* opaque */

struct serving *serving_create(const struct serving_options *options);
void serving_free(struct serving *serving);
void serving_run_free(struct serving *serving); /* ends lockstep */
struct scheduler *serving_scheduler(struct serving *serving);
struct engine *serving_engine(struct serving *serving);
const struct tokenizer *serving_tokenizer(struct serving *serving);

/* What one choice has answered so far. */
struct answer {
    int32_t *tokens; /* of the generated entries, when log-probabilities are asked for */
    uint32_t *offsets;
    float *logprobs;
    uint32_t tokens_count;
    uint32_t prompt_entries;
    char *text;
    size_t text_bytes;
    uint32_t outputs;
    uint32_t generated;       /* sum over outputs */
    uint32_t first_generated; /* of the first output */
    enum finish_reason finish;
    struct error error;
    uint32_t prompt_tokens, completion_tokens, cached_tokens;
    uint32_t kv_tokens_seen;
    double kv_tokens_kept;
    double *vector; /* with pooling */
    uint32_t vector_width;
    uint64_t kv_bytes, kv_bytes_full;
};

struct call {
    struct request *request; /* NULL once it ended and was freed */
    struct answer *answers;  /* [prompts * n] */
    uint32_t answers_count;
    bool ended;
    uint32_t first_event; /* serial numbers among the outputs of all calls, for order; 0: none yet */
    uint32_t last_event;
    struct call *next;
};

/* A request for a prompt of `count` pseudo-random tokens (by seed), sampled at a high temperature, all entries wanted.
 */
struct request *serving_request(uint32_t count, uint64_t seed, uint32_t max_tokens);
void serving_set_policy(struct request *request, const char *policy); /* as on the command line */
/* Submits; the call belongs to serving. NULL with the error when it was refused (the request is freed). */
struct call *serving_submit(struct serving *serving, struct request *request, struct error *error);
/* The same; a refusal fails the test. */
struct call *serving_must_submit(struct serving *serving, struct request *request);
void serving_wait_output(struct serving *serving, const struct call *call, uint32_t outputs); /* of choice 0 */
void serving_wait(struct serving *serving, const struct call *call);
void serving_wait_all(struct serving *serving);

bool answers_equal(const struct answer *a, const struct answer *b); /* tokens, log-probabilities, text, finish */

#endif
