/* SPDX-License-Identifier: Apache-2.0
 *
 * The plan of a prune: for each sequence what is known of its heads, what they protect, how many slots each may hold,
 * and what the backend is asked for. prune.c carries it out; nobody else includes this.
 *
 * A decode step of most policies is followed by a prune that takes one slot of a head. engine_plan_ahead plans it
 * before the batch is computed. By scores that attention can compute on its way (backend.h, kv_batch.scored) the slots
 * are found there; where scoring does not wait, engine_score_ahead asks for them behind the batch, and they come with
 * whatever is waited for next. prune_plan finds them in the sequence. What it does not find there is scored.
 */
#ifndef ENGINE_PRUNE_PLAN_H
#define ENGINE_PRUNE_PLAN_H

#include "engine/engine_internal.h"

/* One sequence at its prune. Heads are numbered layer * kv_heads + head. */
struct prune_job {
    struct sequence *sequence;
    uint32_t seen, budget;
    bool first; /* nothing was pruned before */
    bool mark;  /* a head that loses one slot keeps it for the next token */
    uint32_t rows_count;
    size_t slots_count; /* of all heads, but for sliding layers' */
    bool one;           /* a row that is over its budget is so by one slot, and alone */
    bool found;         /* what goes was found ahead: eviction.worst */
    bool compacted;     /* its statistics are yet to follow */
    int code;           /* of its selection */
    uint32_t *slots;    /* [heads] 0 of sliding layers' */
    uint32_t *budgets;  /* [heads] */
    struct score_head *heads;
    struct score_layer *layers; /* [global layers] */
    struct score_stage *stages;
    uint32_t *worst;               /* [heads] with `one`: the slot that goes */
    struct select_row *rows;       /* one a head, or one a layer where all heads of a layer hold the same */
    struct selected_row *selected; /* the same where the backend selects */
    uint32_t *keep;                /* rows' lists */
    struct kv_removal *removals;
    void *statistics_work, *summaries_work;
};

/* Some sequences at their prunes, in work space of the engine. */
struct prune {
    struct engine *engine;
    struct prune_job *jobs;
    uint32_t count;
    struct score_layer *layers; /* [scored * global layers] of the jobs that are scored */
    uint32_t scored;
    size_t scored_slots;              /* of those jobs */
    double *entropy, *variance;       /* [global layers] */
    struct selection *selections;     /* [scored] */
    struct statistics_prune *follows; /* [count] */
    struct statistics_move *moves;    /* [count * heads] */
    uint32_t settled;                 /* jobs that are over, with all that follows */
    bool use_found;                   /* what was found ahead need not be scored */
    bool show_scores;                 /* all of them are asked for */
    float *host_scores;               /* where the host reads scores and the device's memory is not its own */
};

/* Heads of a row, and which is the first of row r; the row of a head of a global layer. */
uint32_t prune_heads_a_row(const struct prune_job *job);
uint32_t prune_head_of_row(const struct prune_job *job, uint32_t row);

/* Whether a prune of the sequence is due; whether some head holds more than it may at least. */
bool prune_is_due(const struct sequence *sequence);
bool prune_is_over(const struct sequence *sequence);

/* Original positions of a head's slots, by slot. */
const uint32_t *prune_positions(const struct engine *engine, const struct sequence *sequence, uint32_t head);
bool prune_over_by_one(const struct prune_job *job, uint32_t head);

/* Jobs of the sequences [count] that are chosen (eviction.chosen), `chosen` of them, valid until the next call; their
 * numbers are not filled in yet. ERROR_MEMORY. */
int prune_prepare(struct prune *prune, struct sequence *const *sequences, uint32_t count, uint32_t chosen);
/* A job's heads and layers. Scores are taken from *scores on; NULL: nothing will be scored. */
void prune_fill_job(struct prune_job *job, bool freeze, float **scores);
/* Both, with budgets and protection: all that the backend needs to score. ERROR_MEMORY. */
int prune_plan(struct prune *prune, struct sequence *const *sequences, uint32_t count, uint32_t chosen);

#endif
