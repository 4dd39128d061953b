/* SPDX-License-Identifier: Apache-2.0
 *
 * The scheduler: one engine thread that turns requests into batches (continuous batching with chunked prefill),
 * samples, and publishes what comes out. The server's loop thread talks to it through this header only.
 *
 * Threads: scheduler_submit, scheduler_cancel and scheduler_get_stats may be called from any thread. Outputs are
 * delivered by scheduler_poll on the thread that calls it; the wake function tells (from the engine thread) that there
 * are some.
 *
 * Order: a step serves all decoding sequences first, then prefill chunks of admitted requests, first come first
 * served, up to batch_rows tokens. Requests wait while pages do not suffice for their prompts. When a decoding
 * sequence finds no page, the sequence admitted last is preempted and goes on later, ahead of the queue; its client
 * sees a pause, nothing else. An unpruned one is computed again; a pruned one is swapped to host memory, or, when that
 * is full, replayed: prompt, prunes and decode steps as they were.
 *
 * One request: prompts [P] with n choices each. Choice number = prompt * n + i. The prompt is computed once and forked.
 *
 * Or, with pooling, a vector for each prompt in place of an answer: n is 1 and max_tokens 0. Their prompts are computed
 * in the same batches as everything else, without an eviction policy, whatever the default is, and leave nothing in the
 * cache.
 */
#ifndef ENGINE_SCHEDULER_H
#define ENGINE_SCHEDULER_H

#include "engine/background.h"
#include "engine/engine.h"
#include "engine/penalties.h"
#include "engine/pooling.h"
#include "engine/tokenizer.h"

struct scheduler; /* opaque */
struct grammar;   /* grammar/grammar.h */
struct grammar_vocabulary;

enum finish_reason {
    FINISH_NONE,      /* not finished */
    FINISH_STOP,      /* a stop string, an end token, the end of what its grammar allows; or its vector is there */
    FINISH_LENGTH,    /* max_tokens or the context is reached */
    FINISH_CANCELLED, /* scheduler_cancel, or the scheduler is being closed */
    FINISH_ERROR,     /* output.error says why */
};

enum { KEPT_SPECIAL_MAX = 4 };

struct prompt {
    int32_t *tokens; /* at least one, in [0, vocabulary) */
    uint32_t count;
};

/* A request. The submitter creates it, owns it again after its last output, and must not touch it in between
 * (user excepted). */
struct request {
    char id[64]; /* "cmpl-...", for logs */
    struct prompt *prompts;
    uint32_t prompts_count;
    uint32_t n;                    /* choices a prompt, >= 1 */
    uint32_t max_tokens;           /* 0: nothing is generated */
    struct sample_params sampling; /* seed, temperature, top_p, top_k, min_p; the rest is the scheduler's */
    struct penalty_options penalties;
    uint32_t min_tokens;  /* before these, end tokens and stop tokens are never chosen */
    int32_t *stop_tokens; /* end it as end tokens do, also with ignore_eos */
    uint32_t stop_tokens_count;
    char **stops; /* UTF-8 */
    uint32_t stops_count;
    bool ignore_eos;   /* end tokens do not end it and are never chosen */
    bool echo;         /* the prompt's text (and log-probabilities) come out first */
    bool stream;       /* publish after every step; else when a choice's first token is there and at its end */
    int logprobs;      /* -1: none, 0..SAMPLE_TOP_MAX: report the chosen token and that many most likely ones */
    bool skip_special; /* text of special tokens is left out of the output (default of the APIs: true) */
    int32_t kept_special[KEPT_SPECIAL_MAX]; /* special tokens whose text comes out all the same */
    uint32_t kept_special_count;
    struct policy_settings kv_policy; /* policy NULL: the scheduler's default; request_free releases it */
    struct grammar *grammar;          /* owned; what the text must be; NULL: anything */
    const struct grammar_vocabulary *grammar_vocabulary; /* the tokenizer's; with a grammar */
    enum pooling pooling;                                /* not NONE: vectors are asked for */
    bool normalise;                                      /* vectors: of length 1 */
    void *user;                                          /* the submitter's */
    struct task *task;                                   /* request_prepare's */
};

struct request *request_create(void);                  /* zeroed, with the API's defaults; NULL on failed allocation */
void request_free(struct request *request);            /* frees prompts and stops too; NULL allowed */
void request_free_parameters(struct request *request); /* the same for one without a task; for schedulers */

/* Does the part of scheduler_submit that takes time in proportion to prompts and choices, for callers that must not
 * wait: on another thread, when the request is complete (id and user excepted). ERROR_MEMORY. */
int request_prepare(struct request *request, const struct tokenizer *tokenizer, struct error *error);

/* One token that came out (or, with echo, one of the prompt). */
struct output_token {
    int32_t token;
    uint32_t text_offset; /* code points from the start of the prompt's text */
    bool from_prompt;
    bool has_logprob; /* false for the first token of a prompt and when none were asked for */
    float logprob;
    uint32_t top_count;
    struct {
        int32_t token;
        float logprob;
    } * top; /* [top_count], inside the output's allocation */
};

/* What became available of one choice: text and tokens go on where its last output ended. The first output comes with
 * its first token, even while that token's text is still held back. */
struct output {
    struct request *request;
    uint32_t choice;
    char *text; /* UTF-8, whole characters, text_bytes long, NUL-terminated; NULL when there was no memory for it */
    size_t text_bytes;
    struct output_token *tokens; /* those whose text is part of this or earlier outputs; NULL unless logprobs asked */
    uint32_t tokens_count;
    uint32_t generated; /* tokens generated in this output's steps (also without logprobs) */
    enum finish_reason finish;
    struct error error; /* of FINISH_ERROR */
    double *vector;     /* [vector_width] with pooling, of FINISH_STOP; else NULL */
    uint32_t vector_width;
    bool last; /* nothing follows for this request: the request is the submitter's again */
    /* Filled when finish is not FINISH_NONE: */
    uint32_t prompt_tokens;
    uint32_t completion_tokens;
    uint32_t cached_tokens;  /* of the prompt, reused from shared prefixes; counted on the prompt's first choice only */
    uint32_t kv_tokens_seen; /* tokens in the sequence at the end */
    double kv_tokens_kept;   /* of them in the cache at the end: mean over layers and KV heads */
    uint64_t kv_bytes;       /* of its pages and statistics at the end */
    uint64_t kv_bytes_full;  /* of the pages that all its tokens would take */
    double queued_s;         /* submit to first scheduled */
    double prefill_s;        /* first scheduled to first token */
    double decode_s;         /* first token to finish */
    /* Filled always: */
    double time_s; /* monotonic clock when the step ended */
};

struct scheduler_options {
    uint32_t max_sequences;           /* running at once; 0: 256 */
    uint32_t max_waiting;             /* requests in the queue; 0: 1024 */
    uint32_t prefill_chunk;           /* most prompt tokens a step while others decode; 0: batch_rows */
    struct policy_settings kv_policy; /* of requests that choose none; policy NULL: full. Copied */
    size_t swap_bytes; /* host memory for pruned sequences that are preempted; beyond it they are replayed */
    struct background *background; /* who else uses the engine; NULL: nobody. Must outlive the scheduler */
    void (*wake)(void *context);   /* called on the engine thread when outputs were added to an empty queue */
    void *wake_context;
};

/* Starts the engine thread. engine and tokenizer must outlive the scheduler. */
struct scheduler *scheduler_create(struct engine *engine, const struct tokenizer *tokenizer,
    const struct scheduler_options *options, struct error *error);
/* Cancels what runs and joins the engine thread; the outputs of that are still to be polled. Nothing can be submitted
 * afterwards (ERROR_INVALID). */
void scheduler_stop(struct scheduler *scheduler);
/* Stops if need be; outputs not polled are dropped, and requests whose last output was not polled are freed. NULL
 * allowed. */
void scheduler_free(struct scheduler *scheduler);

/* Queues a request. ERROR_CONTEXT: a prompt is longer than can ever be computed (message in the API's words);
 * ERROR_PAGES: the queue is full, try later. On failure the request stays the caller's. */
int scheduler_submit(struct scheduler *scheduler, struct request *request, struct error *error);

/* Ends a request within one step: queued, prefilling or decoding. Its last output says FINISH_CANCELLED. A request
 * that finished meanwhile is ignored. */
void scheduler_cancel(struct scheduler *scheduler, struct request *request);

/* The same because its time is over: choices that have tokens end as if they had reached max_tokens (FINISH_LENGTH),
 * the others with FINISH_CANCELLED. */
void scheduler_expire(struct scheduler *scheduler, struct request *request);

/* Calls handle for each output, in order; the output is freed after handle returns. Returns how many there were. */
typedef void (*scheduler_handle)(void *context, const struct output *output);
size_t scheduler_poll(struct scheduler *scheduler, scheduler_handle handle, void *context);

struct scheduler_stats {
    uint32_t requests_running; /* sequences that are prefilling or decoding */
    uint32_t requests_waiting; /* prompts and preempted choices in the queue, and requests just submitted */
    uint32_t pages_total;
    uint32_t pages_free;
    uint64_t prefix_queries; /* prompt tokens looked up */
    uint64_t prefix_hits;    /* prompt tokens reused */
    uint64_t prompt_tokens;
    uint64_t generated_tokens;
    uint64_t preemptions;
    uint64_t swaps;   /* preempted sequences that went to host memory */
    uint64_t replays; /* preempted pruned sequences that are computed again, prunes included */
    uint64_t pages_freed_by_policy;
    double policy_seconds; /* of engine_prune */
    size_t swapped_bytes;  /* in host memory now */
    size_t snapshot_bytes; /* of statistics of shared prefixes, in the pool's free pages */
    uint64_t steps;
    /* Over running sequences: */
    uint64_t kv_tokens_seen;
    uint64_t kv_tokens_kept; /* mean over layers and heads */
    uint64_t kv_bytes;       /* of the pages they hold, each sequence's counted whole where pages are shared */
    uint64_t kv_bytes_full;  /* of the pages they would hold if all tokens were kept */
};
void scheduler_get_stats(struct scheduler *scheduler, struct scheduler_stats *out);

#endif
