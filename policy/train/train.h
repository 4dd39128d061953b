/* SPDX-License-Identifier: Apache-2.0
 *
 * Training of a policy for one model: what can be chosen, and the run from data to policy file. The command line
 * (commands/train.c) and the admin API's jobs (server/jobs.c) are its callers. Read first.
 *
 * A run is a list of stages, each so many steps (options *_steps; 0: left out):
 *   rank           listwise cross-entropy on future attention (rank.h)
 *   rank_pruned    the same on caches of students that prune while they decode (rank.h)
 *   local          policy gradient, reward: each head's own output error against the teacher's
 *   kl             policy gradient on rollouts, reward -KL(teacher || student) per step (the paper's)
 *   kl_parameter   policy gradient in the space of few parameters (last-layer directions per layer group, recency
 *                  weights, layer budgets, floor), on rollouts
 *   gates          policy gradient on which heads keep everything (rlkv.h), of method rlkv alone
 * The methods are presets of stages and features: distillcache all of them, ranker rank alone, foresight and rlkv their
 * own (foresight.h, rlkv.h). recipe `paper` is the paper's features, network and single stage.
 *
 * Everything random is a function of (seed, stage, step, ...): a run that was interrupted and resumed from its last
 * checkpoint gives the same numbers, to the bit, as one that was not. A checkpoint holds the network, the optimiser's
 * moments, baselines, the step, and the best policy so far; it is written to a temporary name, synced and renamed.
 *
 * The caller's thread does everything; it is the engine's background job (engine/background.h) while it runs, and gives
 * way at every yield.
 */
#ifndef POLICY_TRAIN_TRAIN_H
#define POLICY_TRAIN_TRAIN_H

#include "engine/background.h"
#include "engine/chat_template.h"
#include "engine/engine.h"
#include "engine/tokenizer.h"
#include "policy/network.h"

enum train_method { TRAIN_DISTILLCACHE, TRAIN_RANKER, TRAIN_FORESIGHT, TRAIN_RLKV };
enum train_reward { REWARD_KL, REWARD_ROLLOUT8, REWARD_RANKING };
enum train_sampler { SAMPLER_GUMBEL, SAMPLER_SUBSET };
enum { TRAIN_RATIOS_MAX = 16 };

/* Every hyperparameter, by the name it has in the API, on the command line and in records. */
struct train_options {
    enum train_method method;
    bool paper; /* recipe: paper | default */
    uint64_t seed;
    /* Network. */
    enum network_features features;
    uint32_t inputs; /* mask, network.h */
    uint32_t content, hidden;
    enum policy_scope scope;
    float floor;
    bool summary;
    uint32_t interval;
    uint32_t protect_recent; /* tokens */
    /* Data. */
    uint32_t prompt_least, prompt_most; /* tokens */
    double copying;                     /* part of the sequences that are generated copying prompts */
    uint32_t sequences;                 /* rank, local: recorded and used again and again */
    uint32_t pruned_sequences;          /* the same of rank_pruned */
    double ratios[TRAIN_RATIOS_MAX];    /* budgets, one drawn per rollout */
    uint32_t ratios_count;
    /* Stages. */
    uint32_t rank_steps, pruned_steps, local_steps, kl_steps, parameter_steps, gate_steps;
    uint32_t future;   /* rank, rank_pruned: queries whose attention is to be predicted, 64 */
    uint32_t rollout;  /* kl, kl_parameter: tokens of a rollout */
    uint32_t students; /* K */
    enum train_reward reward;
    enum train_sampler sampler;
    float temperature;    /* tau of the subset sampler */
    float discount;       /* gamma 0.99 */
    float entropy;        /* beta 0.01 */
    float baseline_decay; /* of the moving average, 0.9 */
    float gate_penalty;   /* rlkv: of a gate that is 1 */
    /* Optimiser (adamw.h). */
    float parameter_rate; /* kl_parameter: steps of its optimiser, in standard deviations of its draws */
    float rank_rate, learning_rate, weight_decay, clip;
    uint32_t warmup_steps;
    /* Held-out selection. */
    uint32_t valid_every; /* steps; 0: at the end of each stage */
    uint32_t valid_prompts;
    uint32_t valid_rollout;
    uint32_t checkpoint_every; /* steps */
};

void train_options_default(struct train_options *options, enum train_method method, bool paper);
/* By name, from text; ERROR_INVALID lists what is allowed, or all names. method and recipe come first: they set all
 * others but the seed to their presets; features sets inputs, content and hidden. */
int train_options_set(struct train_options *options, const char *name, const char *value, struct error *error);
/* Makes the steps of all stages `steps` together, each with its part of them. ERROR_INVALID: fewer than stages. */
int train_options_scale(struct train_options *options, uint32_t steps, struct error *error);
int train_options_check(const struct train_options *options, struct error *error); /* as a whole */
/* The table, for --help and the API. */
uint32_t train_options_count(void);
const char *train_option_name(uint32_t index);
bool train_option_exists(const char *name);
const char *train_option_help(uint32_t index);
void train_option_value(uint32_t index, const struct train_options *options, char *out, size_t size);
const char *train_method_name(enum train_method method);
int train_method_find(const char *name); /* -1: none */

/* CHECKPOINT: its policy file is written, the run's state not yet. The state replaces the last one when the event
 * function returns, so whoever keeps events has until then: a resumed run tells again what came after its state, and
 * only that. */
enum train_event_kind { TRAIN_EVENT_MESSAGE, TRAIN_EVENT_METRICS, TRAIN_EVENT_CHECKPOINT };
/* A measure that does not exist at this step is NaN. */
struct train_event {
    enum train_event_kind kind;
    const char *message; /* MESSAGE, and one line about the others */
    const char *stage;
    uint64_t step, steps; /* over all stages */
    double loss, reward, entropy, gradient_norm, learning_rate;
    double kl_valid;          /* geometric mean on held-out prompts, over ratios */
    double kl_valid_relative; /* of h2o's on the same, paired */
    double tokens_per_second; /* of the engine, since the last event */
    double seconds, seconds_left;
    uint64_t tokens;  /* computed by the engine so far */
    const char *file; /* CHECKPOINT: the policy file, in the run's directory */
};
/* Stage and numbers by name, those that there are; NULL on failed allocation. Print reals with TRAIN_EVENT_DIGITS. */
struct json_t *train_event_json(const struct train_event *event);
enum { TRAIN_EVENT_DIGITS = 9 };

struct train_run {
    struct train_options options;
    struct engine *engine;
    const struct tokenizer *tokenizer;
    struct chat_source chat;       /* of conversations in the data */
    struct background *background; /* NULL: the engine is the caller's alone */
    const char *data;              /* file; NULL: generated sequences only */
    const char *valid;             /* file; NULL: held out from data */
    const char *directory;         /* checkpoints; exists */
    const char *out;               /* the policy file (rlkv: the gate file) */
    bool resume;                   /* from the last checkpoint in directory, if there is one */
    uint32_t threads;              /* for arithmetic; 0: as the engine has */
    void (*event)(void *context, const struct train_event *event);
    bool (*stopped)(void *context); /* asked between steps: leave a checkpoint and end with ERROR_CANCELLED */
    void *context;
};

/* 0: out is written. ERROR_CANCELLED: stopped, resumable; ERROR_IO, ERROR_FORMAT (data), ERROR_MEMORY, ERROR_PAGES (the
 * pool is too small for one teacher and its students), ERROR_INVALID. */
int train_run(const struct train_run *run, struct error *error);

#endif
