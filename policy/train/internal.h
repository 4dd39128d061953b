/* SPDX-License-Identifier: Apache-2.0
 *
 * What the stages of a run (train.h) share. A stage is a file: it makes its step from (run, network, step number) and
 * leaves the network changed; train.c calls them in turn, validates, saves and reports.
 */
#ifndef POLICY_TRAIN_INTERNAL_H
#define POLICY_TRAIN_INTERNAL_H

#include "policy/train/adamw.h"
#include "policy/train/dataset.h"
#include "policy/train/train.h"

struct thread_pool;
struct validator;

/* The state of a run. What a checkpoint holds is marked (saved). */
struct training {
    const struct train_run *run;
    const struct train_options *options;
    struct engine *engine;
    struct dataset *dataset;
    struct thread_pool *threads;    /* of arithmetic */
    struct policy_network *network; /* (saved) being trained */
    struct adamw *adamw;            /* (saved) of the present stage */
    struct gradient *gradient;
    uint32_t stage;                       /* (saved) */
    uint64_t stage_step;                  /* (saved) steps of the stage done */
    uint64_t step;                        /* (saved) of all stages */
    double *baselines;                    /* (saved) [TRAIN_RATIOS_MAX] moving averages of the reward */
    uint64_t tokens;                      /* (saved) computed by the engine */
    struct policy_network *stage_network; /* (saved) as it was when the stage began; NULL: the stage needs none */
    void *stage_state;           /* the stage's own; what of it must survive is a function of (networks, step) */
    struct validator *validator; /* what held-out comparisons share (validate.c); NULL: none */
};

struct stage_result { /* NaN: no such measure */
    double loss, reward, entropy, gradient_norm, learning_rate;
};

/* A stage. begin makes stage_state anew, also after a resumption (end frees it whether begin succeeded or not); step
 * makes one, or returns a code and has changed nothing that is saved. Codes as train_run; TRAIN_AGAIN never leaves a
 * stage: it begins its piece of work again. */
struct train_stage {
    const char *name;
    bool keeps_network; /* stage_network is there in begin */
    uint32_t (*steps)(const struct train_options *options);
    int (*begin)(struct training *training, struct error *error);
    int (*step)(struct training *training, struct stage_result *result, struct error *error);
    void (*end)(struct training *training); /* frees stage_state */
};
extern const struct train_stage stage_rank, stage_rank_pruned, stage_local, stage_kl, stage_kl_parameter, stage_gates;

/* background_yield for stages: 0, ERROR_CANCELLED, or TRAIN_AGAIN: all sequences must be freed, and
 * train_gave_up called, before the piece of work is done again. */
enum { TRAIN_AGAIN = 1 };
int train_yield(struct training *training);
int train_gave_up(struct training *training); /* waits for a turn: 0 or ERROR_CANCELLED */
/* After ERROR_PAGES, all sequences freed: live requests hold pages, so that the piece of work is worth doing again
 * after train_gave_up. */
bool train_may_wait(const struct training *training);
/* For arithmetic, while the stage holds no sequences: gives way, pages too. 0 or ERROR_CANCELLED. */
int train_pause(struct training *training);
/* A message that says how far a stage's preparation is: "recording: 8 of 160". */
void train_progress(struct training *training, const char *what, uint64_t done, uint64_t all);

/* Paired held-out comparison by rollouts that prune (validate.c): geometric mean of the students' mean KL over prompts
 * and ratios, and the same relative to h2o's. */
struct validation {
    double kl, relative;
};
/* ERROR_IO, ERROR_FORMAT (data), ERROR_INVALID, ERROR_MEMORY. */
struct validator *validator_create(struct training *training, struct error *error);
void validator_free(struct validator *validator); /* NULL allowed */
int train_validate(
    struct training *training, const struct policy_network *network, struct validation *out, struct error *error);

#endif
