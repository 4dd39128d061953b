/* SPDX-License-Identifier: Apache-2.0
 *
 * The DistillCache network: its parameters, what it is fed, its file, and the plain C computation that backends and the
 * trainer are compared with. One network scores every slot of every (layer, KV head) of one model; the scores' order
 * alone matters. Knows no backend.
 *
 * Inputs of slot i of a head, with L tokens seen, B the sequence's budget (policy_budget), position the slot's original
 * position, A = sum of a[t,i] over the c = L - position queries since the token entered, A2 the same of the group mean
 * of p^2, H the entropy of the attention row of the token's own query (nats), v the value, u_h = v W_h (stages.h), ln
 * natural logarithm, e = 1e-6:
 *
 *   FEATURES_CONTENT, in this order, each one that `inputs` has:
 *     content        [content] C k + o: k the key before RoPE, C [content, head_dim] and o [content] of the head
 *     INPUT_SUM      ln(e + A)
 *     INPUT_MEAN     ln(e + A L / c)
 *     INPUT_DEVIATION ln(e + L sqrt(max(0, A2 / c - (A / c)^2)))
 *     INPUT_ENTROPY  H / ln(position + 2)
 *     INPUT_VALUE_NORM ln(e + |v|)
 *     INPUT_OUTPUT_NORM ln(e + mean over the group of |u_h|), L2 norms
 *     INPUT_POSITION position / L
 *     INPUT_AGE      ln(1 + age) / 6, age = L - 1 - position
 *     INPUT_BUDGET   ln(B / L) + 1.5
 *     INPUT_RECENT_8, _4, _2   1 when age < B / 8, B / 4, B / 2, else 0 (real division)
 *   Each is normalised, (x - mean) * scale by (head, input), and clamped to +-6. Then
 *     score = sum_j w2[j] max(0, b1[head][j] + sum_f w1[j][f] x[f]) + sum_f skip[head][f] x[f]
 *
 *   FEATURES_PAPER (the paper names them; the definitions are POLICIES.md's):
 *     INPUT_MEAN     ln(e + A / c)
 *     INPUT_VALUE_NORM ln(e + |v|)
 *     INPUT_DEVIATION ln(e + sqrt(max(0, A2 / c - (A / c)^2)))
 *     INPUT_ENTROPY  H / ln(max(L, 2))
 *     INPUT_POSITION position / L
 *   in this order. The first three are standardised by mean and population deviation (+ 1e-6) over the slots that the
 *   head holds at the sequence's first prune after its prompt (`standard`), frozen from then on; a prune within the
 *   prompt uses those of the slots present. The last two are mapped by 2x - 1. All are clamped to +-8. Then an MLP
 *   F -> H -> H -> 1 with LayerNorm (epsilon 1e-5) and ReLU after both hidden layers, plus a linear skip:
 *   tests/reference/reference/mlp.py.
 *
 * Per slot a backend keeps, as f16 (enum statistic, STATISTIC_CONTENT): content, then ln(e + |v|), then
 * ln(e + mean |u_h|): content + 2 numbers, computed once, from the key and value as the cache holds them.
 */
#ifndef POLICY_NETWORK_H
#define POLICY_NETWORK_H

#include "engine/error.h"
#include "policy/policy.h"

enum network_features { FEATURES_CONTENT, FEATURES_PAPER };

enum network_input {
    INPUT_SUM,
    INPUT_MEAN,
    INPUT_DEVIATION,
    INPUT_ENTROPY,
    INPUT_VALUE_NORM,
    INPUT_OUTPUT_NORM,
    INPUT_POSITION,
    INPUT_AGE,
    INPUT_BUDGET,
    INPUT_RECENT_8,
    INPUT_RECENT_4,
    INPUT_RECENT_2,
    INPUT_KINDS,
};

enum { NETWORK_CONTENT_MAX = 16, NETWORK_INPUTS_MAX = NETWORK_CONTENT_MAX + INPUT_KINDS, NETWORK_HIDDEN_MAX = 256 };

struct network_shape {
    enum network_features features;
    uint32_t inputs;  /* mask of 1 << enum network_input */
    uint32_t content; /* numbers from the key; 0 for the paper's features */
    uint32_t hidden;
    uint32_t layers, kv_heads, head_dim; /* of the model; layers that slide have their places, and are never scored */
};

/* Inputs of the network: content and those of the mask. */
uint32_t network_inputs_count(const struct network_shape *shape);
/* Those of the mask, in the order in which the network is fed with them, after content. Returns their number. */
uint32_t network_inputs_list(const struct network_shape *shape, enum network_input out[INPUT_KINDS]);
/* In words, as in files: "sum", "mean", ...; "content" and "paper". */
const char *network_input_name(enum network_input input);
const char *network_features_name(enum network_features features);

/* Parameters and what belongs to them. Shared by references; not changed once it is in use by a sequence, but for the
 * trainer's own copies (network_copy). All arrays lie in one allocation. heads = layers * kv_heads, F inputs. */
struct policy_network {
    uint32_t references;
    struct network_shape shape;
    /* FEATURES_CONTENT */
    float *content;        /* [heads][content][head_dim] C */
    float *content_offset; /* [heads][content] o */
    float *mean, *scale;   /* [heads][F] */
    float *w1;             /* [hidden][F] */
    float *b1;             /* [heads][hidden] */
    float *w2;             /* [hidden] */
    float *skip;           /* [heads][F] */
    /* FEATURES_PAPER: named as in mlp.py, matrices [out, in]; w1 [hidden][F] and w2 [hidden][hidden] above are used */
    float *mlp_b1, *g1, *o1; /* [hidden] */
    float *mlp_b2, *g2, *o2; /* [hidden] */
    float *w3;               /* [hidden] */
    float *b3;               /* [1] */
    float *mlp_skip;         /* [F] */
    /* Both: what depends on how much is kept, with level = network_level(B, L), [layers] each */
    float *layer_budgets;       /* a layer's part of the budgets is proportional to */
    float *layer_budget_slopes; /*   layer_budgets exp(layer_budget_slopes level) */
    float *summary_offsets;     /* the logit of a layer's summary slots is greater by */
    float *summary_slopes;      /*   summary_offsets + summary_slopes level */
    /* Defaults of a policy that uses it; see policy_settings. */
    enum policy_scope scope;
    float floor;
    uint32_t interval;
    bool summary;
    uint32_t protect_recent, protect_sinks;
    char fingerprint[65]; /* of the model it was trained for */
    char *method;         /* "distillcache", "ranker", "foresight" */
    char *record;         /* JSON object: how it was trained; never NULL */
};

/* ln(4 B / L), from -3 to 3: 0 where a quarter is kept. */
double network_level(uint32_t budget, uint32_t seen);
/* A layer's part of the budgets, and what is added to its summary slots' logits. */
double network_layer_budget(const struct policy_network *network, uint32_t layer, double level);
float network_summary_offset(const struct policy_network *network, uint32_t layer, double level);

/* All zero but scale, layer_budgets (1) and defaults (scope layer, floor 0.75, interval 16, summary); method NULL and
 * record "{}". NULL and ERROR_INVALID (a shape out of range), ERROR_MEMORY. One reference. */
struct policy_network *network_create(const struct network_shape *shape, struct error *error);
struct policy_network *network_copy(const struct policy_network *network); /* NULL on failed allocation */
/* Another shape, all arrays as network_create has them, and everything else as in `like`. */
struct policy_network *network_create_like(
    const struct policy_network *like, const struct network_shape *shape, struct error *error);
struct policy_network *network_take(struct policy_network *network); /* one more reference (any thread) */
void network_release(struct policy_network *network);                /* one less; NULL allowed */

/* A copy for a model with other layers and heads than the network's: what one model's policy says about another. What
 * all heads share stays as it is. What a layer or head has of its own comes from `layers` of the network (ascending
 * [count]; NULL: all), by depth: a layer lies between two of them, and gets what they have, linearly; its heads the
 * mean of theirs, where the number of heads differs. Without `content` alone: maps of keys are one model's own. NULL:
 * ERROR_UNSUPPORTED (the network has content), ERROR_INVALID (a shape out of range), ERROR_MEMORY. */
bool network_can_carry(const struct network_shape *shape);
struct policy_network *network_carry(const struct policy_network *network, const uint32_t *layers, uint32_t count,
    const struct policy_model *model, struct error *error);

/* The named arrays, for files, optimisers and tests. count: numbers; name: as in the file. index from 0 on; false: no
 * more. `trained`: gradients apply (not to mean, scale and what depends on the level). matrix: weight decay applies. */
struct network_array {
    const char *name;
    float *values;
    size_t count;
    uint32_t dimensions[3]; /* 0 after the last */
    bool trained, matrix;
};
bool network_array(const struct policy_network *network, uint32_t index, struct network_array *out);
size_t network_parameters_count(const struct policy_network *network); /* of trained arrays */

/* A number that tells networks apart: of shape, arrays and defaults, not of method, fingerprint and record. */
uint64_t network_digest(const struct policy_network *network);

/* Statistics (enum statistic) that the inputs are made of. */
uint32_t network_needs(const struct network_shape *shape);

/* A safetensors file: F32 tensors by name, and in __metadata__ format "distillcache-policy-1", method, features,
 * inputs (names, comma separated, in order), content, hidden, layers, kv_heads, head_dim, fingerprint, scope, floor,
 * interval, summary, protect_recent, protect_sinks, record. Loading checks every length and offset, names, shapes, that
 * all numbers are finite, and that nothing is missing or unknown; ERROR_IO, ERROR_FORMAT ("FILE: ..."), ERROR_MEMORY.
 * A file with another feature definition is refused by name. */
struct policy_network *network_load(const char *file, struct error *error);
struct policy_network *network_parse(const void *bytes, size_t size, const char *name, struct error *error);
/* Writes FILE.tmp, syncs, renames, and syncs the folder: FILE is whole or as it was. ERROR_IO says what failed. */
int network_save(const struct policy_network *network, const char *file, struct error *error);

/* The network that ships for a model: DIRECTORY/FINGERPRINT.safetensors, where the directory is that of the environment
 * variable DISTILLCACHE_POLICIES, else policy/trained beside the program's build or as installed. ERROR_IO: none; the
 * message says how to train one. */
struct policy_network *network_load_shipped(const char *fingerprint, const char *method, struct error *error);

/* Slots of a head, for the plain computation: arrays [count]. */
struct network_slots {
    uint32_t count;
    uint32_t seen, budget;
    const uint32_t *positions;
    const float *sum, *squared;            /* A, A2 */
    const float *entropy;                  /* H */
    const float *content;                  /* [count][content] C k + o */
    const float *value_norm, *output_norm; /* ln(e + ...) */
};

/* Inputs before normalisation: out [count][F]. Arrays that no input needs may be NULL. */
void network_gather(const struct network_shape *shape, const struct network_slots *slots, float *out);
/* FEATURES_PAPER: mean and 1 / (deviation + 1e-6) of each input of the mask that is standardised, in order and pair by
 * pair, then 0: standard [6]. FEATURES_CONTENT: nothing. */
void network_standardise(const struct network_shape *shape, const float *inputs, uint32_t count, float standard[6]);
/* Normalises and clamps in place. standard: FEATURES_PAPER only. */
void network_normalise(
    const struct policy_network *network, uint32_t head, const float standard[6], uint32_t count, float *inputs);
/* Scores of normalised inputs [count][F]. An input that is not a number makes the slot's score none. */
void network_score(
    const struct policy_network *network, uint32_t head, const float *inputs, uint32_t count, float *scores);

#endif
