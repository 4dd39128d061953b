/* SPDX-License-Identifier: Apache-2.0
 *
 * The inside of scheduler.h, shared by its files: scheduler.c is what other threads see and the loop of the engine
 * thread, scheduler_step.c what happens in a step. The functions below are the engine thread's.
 */
#ifndef ENGINE_SCHEDULER_INTERNAL_H
#define ENGINE_SCHEDULER_INTERNAL_H

#include <pthread.h>

#include "engine/choice.h"

/* What other threads ask for, in the order they asked. */
struct command {
    struct task *submit;    /* a new task, or NULL */
    struct request *cancel; /* a request to end, or NULL */
    struct command *next;
};

/* One row whose hidden state is asked for, and what to do with the result. */
struct wanted_row {
    struct choice *choice;
    bool of_prompt;
    uint32_t position; /* of the prompt, when of_prompt */
};

struct scheduler {
    struct engine *engine;
    const struct tokenizer *tokenizer;
    struct scheduler_options options;
    pthread_t thread;
    int32_t *end_tokens;
    uint32_t end_tokens_count;

    pthread_mutex_t mutex; /* guards everything up to the next comment */
    pthread_cond_t changed;
    struct command *commands;
    struct command **commands_tail;
    struct output_node *outputs;
    struct output_node **outputs_tail;
    uint32_t requests_waiting;   /* submitted and not started */
    uint32_t commands_submitted; /* submitted and not taken by the engine thread */
    struct scheduler_stats stats;
    bool stopping;
    bool joined;

    /* The engine thread's own. */
    struct task *tasks;
    struct task *finished; /* to be freed at the end of the step */
    struct choice *waiting_first, *waiting_last;
    struct choice **running; /* in order of admission, at most max_sequences */
    uint32_t running_count;
    uint32_t waiting_count;
    uint32_t heads;           /* layers * kv_heads: pages that a block of tokens takes */
    struct batch_item *items; /* [batch_rows] */
    struct choice **batched;  /* [batch_rows] the choice of each item */
    uint32_t items_count;
    int32_t *tokens; /* [batch_rows] of the batch */
    uint32_t rows;
    int32_t *scratch;          /* [tokens_max] a waiting choice's tokens */
    struct wanted_row *wanted; /* grown as needed, as the next two */
    uint32_t *wanted_rows;
    struct sample_params *params;
    struct sample_result *results;
    size_t wanted_count, wanted_capacity;
    struct scheduler_stats counters;       /* published to stats after each step */
    struct output_node *made, **made_tail; /* outputs of this step */
};

/* Takes in a new task: the first choice of each prompt joins the queue. */
void scheduler_take_task(struct scheduler *s, struct task *task);
/* Ends the request's choices, in whatever state they are. */
void scheduler_cancel_task(struct scheduler *s, const struct request *request);
void scheduler_cancel_all(struct scheduler *s);

/* Admits what fits, computes one batch, hands out its tokens. Outputs gather in s->made. */
void scheduler_run_step(struct scheduler *s);

#endif
