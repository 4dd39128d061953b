/* SPDX-License-Identifier: Apache-2.0
 *
 * Examples of the stages that learn from recorded caches: what the network is fed with at a prune, and how much
 * attention each slot gets from the queries that follow (POLICIES.md, Training). Each sequence of the data is computed
 * once by a teacher, keeping everything: its cache at the end of the prompt is an example. For rank_pruned students
 * prune the same tokens as serving does, and their caches at some of their prunes are examples too; what the slots
 * there will be worth is what the teacher pays to the same positions. Of a part of the layers that do not slide, drawn
 * by the seed, all heads are recorded. Numbers are kept as f16.
 */
#ifndef POLICY_TRAIN_RECORD_H
#define POLICY_TRAIN_RECORD_H

#include "policy/train/internal.h"

/* One head of one example: [slots] each, in the order of slots, which is that of positions. */
struct recorded_head {
    uint32_t head; /* layer * kv_heads + KV head */
    uint32_t slots;
    uint32_t *positions;
    uint16_t *inputs;  /* [fixed], f16: before normalisation, those that do not depend on the budget */
    uint16_t *keys;    /* [head_dim], f16: before RoPE, whitened once all are there; NULL: no input needs them */
    float *targets;    /* attention of the future queries times output norm */
    float standard[6]; /* FEATURES_PAPER */
    /* What the error of its output is computed from, of some of the queries that follow; NULL: not recorded. */
    uint16_t *attention; /* [queries][group][slots] f16: on its slots */
    uint16_t *values;    /* [slots][head_dim] f16 */
    float *later;        /* [queries][group][1 + head_dim] attention on tokens that came later, and what it adds */
};

enum { RECORD_QUERIES = 16 /* of those that follow, at even distances, whose output is compared */ };

/* An example: a cache. */
struct recorded_sequence {
    uint32_t seen;   /* tokens */
    uint32_t budget; /* B of a student; 0: nothing was pruned, any budget may be asked for */
    uint32_t fresh;  /* of a student: tokens since its prune before: about so many go at this one */
    uint32_t heads_count;
    uint32_t queries; /* of recorded outputs */
    struct recorded_head *heads;
    void *memory; /* of all arrays */
};

struct records {
    struct network_shape shape;
    uint32_t fixed;                /* inputs that do not depend on the budget: they come first */
    uint32_t inputs;               /* all, without content */
    uint32_t fixed_mask;           /* enum network_input */
    uint32_t heads;                /* of the model */
    uint32_t layers;               /* that may be recorded: those that do not slide */
    const uint32_t *layer_numbers; /* [layers] their places among the model's */
    uint32_t group;                /* query heads of a KV head */
    bool outputs;                  /* what errors of outputs are computed from is recorded */
    uint32_t heads_most;           /* of an example */
    uint32_t slots_most;           /* of any head */
    uint32_t each;  /* examples of a sequence of the data: the teacher's, then those of students; they lie together */
    uint32_t count; /* of all examples */
    struct recorded_sequence *sequences; /* [count] */
    /* Of each head, over all recorded slots: what keys were whitened by. */
    float *key_mean, *key_scale; /* [heads][head_dim]; scale: 1 / deviation */
};

/* Students of a sequence, prunes that are recorded of each, and the intervals after the prompt that they are drawn
 * from. */
enum { RECORD_STUDENTS = 2, RECORD_PRUNES = 3, RECORD_INTERVALS = 8 };

/* What is to be recorded. */
struct record_plan {
    uint32_t sequences;
    uint64_t first;                        /* sequence of the data set */
    const struct policy_network *students; /* what students prune by; NULL: there are none */
    bool outputs; /* with what errors of outputs are computed from: future is at most 256, and there are no students */
};
/* Tokens that may follow a prompt, for a network that prunes every `interval` steps. */
uint32_t record_tokens(const struct train_options *options, bool students, uint32_t interval);

/* 0, codes as train_run. *out is to be freed. */
int records_create(
    struct training *training, const struct record_plan *plan, struct records **out, struct error *error);
void records_free(struct records *records); /* NULL allowed */

/* Inputs of a head at a budget, without content: out [slots][inputs]. */
void records_inputs(const struct records *records, const struct recorded_sequence *sequence,
    const struct recorded_head *head, uint32_t budget, float *out);
/* Whitened keys: out [slots][head_dim]. */
void records_keys(const struct records *records, const struct recorded_head *head, float *out);

/* Numbers that are kept as f16. */
void records_widen(const uint16_t *from, size_t count, float *to);

/* Mean and scale of the inputs of training->network by head, over all slots (those that depend on the budget over a
 * grid of budgets); content keeps 0 and 1. Gives way between heads. */
int records_normalise(struct training *training, const struct records *records, struct error *error);

/* Means and deviations of keys by head, and all keys whitened by them. Gives way between heads. */
int records_whiten_keys(struct training *training, struct records *records, struct error *error);
/* Turns the content map into the one that takes whitened keys, and back. Gradients of all its numbers are alike there,
 * whatever the keys. */
void records_whiten(const struct records *records, struct policy_network *network);
void records_unwhiten(const struct records *records, struct policy_network *network);

/* B of a prompt for a ratio, as policies have it by default. */
uint32_t records_budget(double ratio, uint32_t slots);

#endif
