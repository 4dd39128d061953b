/* SPDX-License-Identifier: Apache-2.0
 *
 * The inside of scheduler.h, shared by its files: scheduler.c is what other threads see and the loop of the engine
 * thread, scheduler_step.c what happens in a step, scheduler_memory.c who is let in and who gives way, and
 * scheduler_tasks.c the queue and the ends of choices. The functions below are the engine thread's.
 */
#ifndef ENGINE_SCHEDULER_INTERNAL_H
#define ENGINE_SCHEDULER_INTERNAL_H

#include <pthread.h>

#include "engine/choice.h"

/* What other threads ask for, in the order they asked. */
struct command {
    struct task *submit;    /* a new task, or NULL */
    struct request *cancel; /* a request to end, or NULL */
    bool expired;           /* its time is over: what it has is its answer */
    struct command *next;
};

/* What the batch computes of one choice. */
struct batched_choice {
    struct choice *choice;
    uint32_t first; /* position of its first token in the batch */
    bool completes; /* nothing of it is left to compute: its next token can be sampled */
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
    struct token_list end_tokens;

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
    uint32_t heads;                 /* layers * kv_heads: pages that a block of tokens takes */
    struct batch_item *items;       /* [batch_rows] */
    struct batched_choice *batched; /* [batch_rows] the choice of each item */
    struct sequence **pruned;       /* [batch_rows] those of the batch that have a policy */
    uint32_t items_count;
    int32_t *tokens; /* [batch_rows] of the batch */
    uint32_t rows;
    int32_t *scratch;          /* [context] a waiting choice's tokens */
    float *states;             /* [batch_rows, width] hidden states of a prompt; NULL before the first */
    struct wanted_row *wanted; /* grown as needed, as the next two */
    uint32_t *wanted_rows;
    struct sample_params *params;
    struct sample_result *results;
    size_t wanted_count, wanted_capacity;
    struct scheduler_stats counters;       /* published to stats after each step */
    struct output_node *made, **made_tail; /* outputs of this step */
};

/* ---- scheduler_tasks.c ---- */

/* Takes in a new task: the first choice of each prompt joins the queue. */
void scheduler_take_task(struct scheduler *s, struct task *task);
/* Ends the request's choices, in whatever state they are. */
void scheduler_cancel_task(struct scheduler *s, const struct request *request, bool expired);
void scheduler_cancel_all(struct scheduler *s);

/* The waiting queue. In front: those that were preempted. */
void scheduler_queue_back(struct scheduler *s, struct choice *choice);
void scheduler_queue_front(struct scheduler *s, struct choice *choice);
void scheduler_queue_remove(struct scheduler *s, struct choice *choice);

void scheduler_add_output(struct scheduler *s, struct output_node *node); /* NULL allowed */
void scheduler_mark_started(struct scheduler *s, struct task *task, double now);
/* Ends a choice in whatever state it is. With its last choice the task moves to the finished ones. It stays in the
 * running list until scheduler_sweep_running. */
void scheduler_finish_choice(
    struct scheduler *s, struct choice *choice, enum finish_reason finish, const struct error *error, double now);
/* Ends every unfinished choice of a task, and sweeps. */
void scheduler_finish_task(
    struct scheduler *s, struct task *task, enum finish_reason finish, const struct error *error);
/* Ends the choices of a prompt of which nothing is to be generated. */
void scheduler_finish_prompt(struct scheduler *s, struct choice *leader, double now);
/* Drops choices that do not run any more from the running list. */
void scheduler_sweep_running(struct scheduler *s);
void scheduler_free_finished(struct scheduler *s);

/* ---- scheduler_memory.c ---- */

/* Lets waiting choices run while there are pages and places for them. */
void scheduler_admit(struct scheduler *s);
/* Adds a choice to the running ones. There must be a place. */
void scheduler_set_running(struct scheduler *s, struct choice *choice);
/* Takes a running choice's pages; it goes on later, ahead of the queue. may_swap: its sequence may go to host memory;
 * otherwise it is computed again. */
void scheduler_preempt(struct scheduler *s, struct choice *choice, bool may_swap);
/* Frees pages until `needed` are free, by preempting the choices admitted last, down to but not including `choice` and
 * those in the batch. */
bool scheduler_make_room(struct scheduler *s, const struct choice *choice, uint64_t needed);
/* A choice that finds no page although it is the last one admitted gives up its own. Alone it always fits. */
void scheduler_give_way(struct scheduler *s, struct choice *choice);
/* Pages that the choice's next step takes when it appends count tokens: those, and what a prune may have to copy. */
uint64_t scheduler_pages_of_step(const struct scheduler *s, const struct choice *choice, uint32_t count);
/* Pages that it takes at its worst until its prompt is done, beyond those it has. */
uint64_t scheduler_pages_of_prompt(const struct scheduler *s, const struct choice *choice);
/* Frees a choice's sequence, running or swapped out, after noting what it holds. */
void scheduler_drop_sequence(struct scheduler *s, struct choice *choice);
/* Fills in the counters of the running sequences' memory. */
void scheduler_count_memory(struct scheduler *s);

/* The policy of a request's sequences: its own or the default, with a seed. policy NULL: everything is kept. Gates are
 * borrowed. Any thread. */
struct policy_settings scheduler_policy(const struct scheduler *s, const struct request *request);
/* Tokens that a sequence with a prompt of `count` tokens can have: the context, or what the pages hold of so many. 0:
 * not even the prompt can be computed. settings: NULL or policy NULL: everything is kept. Any thread. */
uint32_t scheduler_tokens_max(const struct scheduler *s, const struct policy_settings *settings, uint32_t count);

/* ---- scheduler_step.c ---- */

/* Admits what fits, computes one batch, hands out its tokens. Outputs gather in s->made. */
void scheduler_run_step(struct scheduler *s);

#endif
