/* SPDX-License-Identifier: Apache-2.0
 *
 * Requests inside the scheduler: a task is a request that was taken in, a choice one of its answers. A choice owns a
 * sequence while it runs, the tokens it generated, and the text that comes of them; this module turns sampled tokens
 * into outputs. scheduler_step.c decides when a choice runs.
 *
 * A choice's tokens are its prompt's followed by those it generated. `choice_total` counts them; those beyond the
 * length of its sequence are still to be computed. One uncomputed token after at least one generated is a decode step,
 * everything else is prefill; so a choice that lost its sequence (preemption) simply computes all tokens again. Under
 * an eviction policy what follows the prompt is always computed in decode steps, one token each, as it was the first
 * time: only then are the same slots evicted at the same time (a replay).
 */
#ifndef ENGINE_CHOICE_H
#define ENGINE_CHOICE_H

#include "engine/scheduler.h"
#include "engine/text_stream.h"
#include "grammar/automaton.h"

enum choice_state {
    CHOICE_FOLLOWING, /* waits for the prompt's first choice to compute the prompt */
    CHOICE_WAITING,   /* queued or preempted: no sequence, or one that is swapped out */
    CHOICE_RUNNING,   /* has a sequence */
    CHOICE_FINISHED,
};

struct choice {
    struct task *task;
    uint32_t number; /* prompt * n + i */
    enum choice_state state;
    struct sequence *sequence; /* NULL unless running or swapped */
    bool swapped;              /* waiting, and its sequence is in host memory */
    struct sequence_memory memory;
    struct token_list generated;
    struct penalties penalties;
    uint32_t cached_tokens;
    bool looked_up; /* its prompt was counted in the prefix statistics */
    double started_s;
    double first_token_s;
    struct pooled pooled; /* of its prompt's states so far, with pooling */
    /* Text and log-probabilities. */
    struct text_stream *text;
    char *pending; /* text taken from the stream and not published yet */
    size_t pending_bytes;
    size_t pending_capacity;
    size_t code_points;            /* of all text taken from the stream */
    struct sample_result *results; /* [results_count] of generated tokens, when log-probabilities are asked for */
    size_t results_count;
    size_t results_capacity;
    size_t results_published;
    uint32_t generated_published;
    bool echo_published;
    /* With a grammar. */
    struct automaton_place place; /* of the text generated so far */
    uint32_t *mask;               /* [words] of the token to come */
    struct error grammar_error;   /* code not 0: it cannot be followed any more */
    struct output_node *reserve;  /* for the last output, which must never fail */
    struct choice *next;          /* in the waiting queue */
    struct choice *previous;
};

/* What is known of a prompt beside its tokens; text and below only when echo or log-probabilities are asked for. */
struct prompt_text {
    uint32_t tokens_max; /* that a sequence of this prompt can have; the scheduler's */
    char *text;
    size_t bytes;
    size_t code_points;
    uint32_t *offsets;             /* [tokens] code points before each token */
    struct sample_result *results; /* [tokens] of the prompt's tokens (entry 0 unused), with echo and logprobs */
    uint32_t results_done;         /* entries [1, results_done] are filled */
};

struct task {
    struct request *request;
    const struct tokenizer *tokenizer;
    struct choice *choices; /* [prompts_count * n] */
    uint32_t choices_count;
    uint32_t unfinished;
    struct automaton *automaton;      /* of the request's grammar, for all choices; NULL: there is none */
    struct prompt_text *prompts;      /* [prompts_count] */
    struct token_list held;           /* tokens that must not come before min_tokens: ends and stop tokens */
    struct policy_settings kv_policy; /* the scheduler's choice; policy NULL: all is kept. Gates are borrowed */
    bool started;
    double submitted_s;
    double started_s;
    struct task *next;
    struct task *previous;
};

/* NULL on failed allocation. The request is borrowed. */
struct task *task_create(struct request *request, const struct tokenizer *tokenizer);
void task_free(struct task *task); /* frees sequences that are left */

const struct prompt *choice_prompt(const struct choice *choice);
uint32_t choice_total(const struct choice *choice);
uint32_t choice_remaining(const struct choice *choice); /* tokens to compute before the next can be sampled */
bool choice_is_leader(const struct choice *choice);     /* computes its prompt for the others */
/* Its next step computes one token beyond its prompt: a token just sampled, or one that is replayed. */
bool choice_is_decoding(const struct choice *choice);
bool choice_is_past_prompt(const struct choice *choice); /* has a sequence, which has seen the whole prompt */
/* Tokens that its next step may compute at most: choice_remaining, or up to where its policy prunes, or statistics are
 * kept for others with the same prefix. */
uint32_t choice_chunk(const struct choice *choice);
/* NULL when nothing of it is ever evicted. */
const struct policy_settings *choice_policy(const struct choice *choice);
uint32_t choice_tokens_max(const struct choice *choice);

/* Copies tokens [first, first + count) of the choice to out. */
void choice_copy_tokens(const struct choice *choice, uint32_t first, uint32_t count, int32_t *out);

/* True while the rows of the prompt must be asked for one by one (echo with log-probabilities, a mean of states). */
bool choice_wants_prompt_rows(const struct choice *choice);
/* Fills in params for the token after position `position` of the prompt: its log-probability is asked for. */
void choice_prompt_params(const struct choice *choice, uint32_t position, struct sample_params *params);
void choice_accept_prompt_result(struct choice *choice, uint32_t position, const struct sample_result *result);

/* Adds the states [count, width] of the prompt's tokens from `first` on; those that were added before it was preempted
 * are passed over. ERROR_MEMORY. */
int choice_accept_states(struct choice *choice, uint32_t first, const float *states, uint32_t count, uint32_t width);

/* How to sample the choice's next token. banned: end tokens, used under ignore_eos. params points into the choice. When
 * its grammar cannot be followed, grammar_error says so, and what is sampled is not to be used. */
void choice_sample_params(
    struct choice *choice, const int32_t *banned, uint32_t banned_count, struct sample_params *params);

/* Takes a sampled token. Returns how the choice ends by it, FINISH_NONE when it goes on. tokens_max: of a sequence.
 * ERROR_MEMORY (negative) on failed allocation. */
int choice_accept_token(struct choice *choice, const struct sample_result *result, uint32_t tokens_max, double now);

/* Outputs on their way to the submitter. */
struct output_node {
    struct output output;
    struct output_node *next;
};

/* What became available of a running choice, its first token in any case, later ones for streams only. NULL when there
 * is nothing to publish yet, or when memory ran out (the text is kept for the next one). */
struct output_node *choice_make_output(struct choice *choice, double now);
/* Everything left, and how the choice ended; once a choice. Never NULL: when memory runs out it says FINISH_ERROR and
 * has neither text nor entries. */
struct output_node *choice_make_last_output(
    struct choice *choice, enum finish_reason finish, const struct error *error, double now);
void output_node_free(struct output_node *node);

#endif
