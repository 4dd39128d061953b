/* SPDX-License-Identifier: Apache-2.0
 *
 * What run.c (prompts, waves), run_decode.c (steps) and run_results.c share.
 *
 * A lane is one variant of the question; a wave is the lanes that are in the pool at the same time. A branch is a fork
 * of a lane after the question.
 */
#ifndef POLICY_EVAL_RUN_INTERNAL_H
#define POLICY_EVAL_RUN_INTERNAL_H

#include "engine/text_stream.h"
#include "policy/eval/run.h"

enum { BRANCHES = 2 };

enum branch_kind {
    BRANCH_TEXT, /* kl: fed the text */
    BRANCH_OWN,  /* kl: fed the full model's continuation */
    BRANCH_ANSWER,
    BRANCH_GOLD,
};

struct branch {
    enum branch_kind kind;
    struct sequence *sequence; /* NULL: the branch is not taken, or was finished */
    int32_t next;              /* token to feed */
    uint32_t steps;            /* tokens fed */
    double loss, kl;           /* sums */
    uint32_t same;
    bool loss_is_undefined;
    uint32_t generated;
    bool line_begun; /* the answer's line has something but white space */
    int32_t *output; /* [generated], capacity max_tokens */
    struct text_stream *stream;
};

struct lane {
    uint32_t variant;
    bool silent;               /* a teacher that was measured before */
    struct sequence *sequence; /* until it is forked */
    uint32_t asked;            /* tokens of the question fed */
    struct branch branches[BRANCHES];
    double seconds;
    uint32_t tokens;
    char *kept; /* these two: of the prompt */
    struct eval_positions positions;
    struct sequence_memory memory; /* of the first branch, at its end */
};

/* The prompt before its last prune: variants that differ in the budget only take forks of it. */
struct stem {
    uint32_t variant; /* whose policy it is */
    struct sequence *sequence;
    struct sample_result first[2]; /* see open_branches; when no question follows */
    double seconds;
    uint32_t tokens;
};

struct eval_run {
    struct eval_run_options options;
    struct token_list ends; /* tokens that end a text */
    uint32_t heads;         /* layers * KV heads */
    /* The question at work. */
    const struct eval_work *work;
    struct sequence *teacher; /* `full` after the prompt */
    int32_t own_first;        /* its choice there */
    struct stem stem;
    struct lane *lanes; /* [variants + 1] of the wave */
    uint32_t lanes_count;
    /* Of `full`, for the others. */
    double full_loss[BRANCHES];
    uint32_t full_generated;
    /* Work space of a step, [2 * (variants + 1)]. */
    struct batch_item *items;
    struct sequence **sequences;
    struct branch **active;
    struct lane **owners;
    uint32_t *rows, *teacher_rows;
    struct sample_params *params;
    struct sample_result *samples;
    float *kl;
};

int give_way(struct eval_run *run); /* run_options.between */
/* Feeds the question to the lanes of the wave, forks them, and feeds or generates to the end. */
int run_wave(struct eval_run *run, struct error *error);
/* What the logits after prompt and question say: the most likely token, and the gold answer's first one. */
int first_results(struct eval_run *run, uint32_t row, struct sample_result out[2], struct error *error);
/* Forks the lane into its branches, each with its first token to feed. first: not read for a silent lane. */
int open_branches(struct eval_run *run, struct lane *lane, const struct sample_result first[2], struct error *error);
void branch_close(struct branch *branch);

/* After the prune of the prompt: which positions the lane keeps. */
int record_kept(struct eval_run *run, struct lane *lane, struct error *error);
/* The results of a finished wave that are wanted; keeps those of `full` that others are compared with. */
int emit_wave(struct eval_run *run, struct error *error);

#endif
