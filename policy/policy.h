/* SPDX-License-Identifier: Apache-2.0
 *
 * Eviction policies: what each declares, the registry, and the settings by which a sequence chooses one. Read first.
 *
 * A policy is data: which statistics it needs, of which stages its score is made (stages.h), which slots it protects,
 * how slots compete (scope) and how the budget is shared out over layers and heads (budget.h). Scoring is the
 * backend's, selection (select.h) is shared. One file a policy or a family fills one or several `struct policy`.
 *
 * Shared rules. L counts all tokens seen. B = max(floor(ratio L), minimum), or `tokens` as it is. A prune happens after
 * the whole prompt and after every `interval` decode steps; with prefill_prune_every N also at positions N, 2N, ... of
 * the prompt. It never changes the logits of the step before it, and nothing at all while no head holds more than its
 * budget. Protected slots rank above all others. Ties: the more recent token, then the lower layer, the lower head.
 */
#ifndef POLICY_POLICY_H
#define POLICY_POLICY_H

#include "engine/error.h"
#include "policy/stages.h"

#include <stdbool.h>
#include <stddef.h>

enum policy_scope { SCOPE_HEAD, SCOPE_LAYER, SCOPE_MODEL };

struct policy_network; /* network.h */
struct head_gates;     /* budget.h: one number per (layer, KV head), shared and counted by references */
struct policy;

/* A policy with its budget and options, ready to be used. Plain data, copied by value, except gates and network: use
 * policy_settings_copy and policy_settings_release. */
struct policy_settings {
    const struct policy *policy;
    /* Budget. */
    double ratio;     /* (0, 1]; used when tokens is 0 */
    uint32_t tokens;  /* slots per head; 0: by ratio */
    uint32_t minimum; /* B_min of ratios, default 32 */
    /* When. */
    uint32_t interval;            /* decode steps from one prune to the next, >= 1 */
    uint32_t prefill_prune_every; /* 0: only after the whole prompt */
    /* What is protected, beside what the policy itself protects. */
    uint32_t protect_recent, protect_sinks;
    /* How slots compete. */
    enum policy_scope scope;
    float floor; /* scopes layer and model: part of B that every head keeps */
    /* Options of some policies only; policy->options says of which. Others are left at their defaults and not read. */
    uint32_t sinks;            /* streaming 4, expected_attention 4, rlkv 16 */
    float recent;              /* h2o 0.5, keyformer 0.3: part of B that goes to the most recent tokens */
    uint32_t recent_tokens;    /* scissorhands 10, rlkv 64 */
    uint32_t window;           /* w, 32; 1 to 256 */
    uint32_t kernel;           /* of pooling, 7 */
    uint32_t history;          /* scissorhands 400; at most STATISTIC_ABOVE_BITS */
    float beta;                /* pyramidkv 20 */
    float gamma;               /* cake 200 */
    float tau1, tau2;          /* cake 1, 1 */
    float epsilon;             /* expected_attention 0.01 */
    uint32_t future;           /* expected_attention 512 */
    float smoothing;           /* restkv 0.3 */
    float sparsity;            /* rlkv 0.5: part of the heads that do not keep everything; NaN: by the budget */
    float full_heads;          /* hybrid 0.2: part of the heads that keep everything */
    const struct policy *base; /* hybrid h2o: scores the heads that do not keep everything */
    bool frozen_prompt;   /* `decode: keep`: prunes happen during and after the prompt as ever, and then never again:
                             what the prompt left stays, and so does every generated token */
    bool cache_positions; /* streaming `positions: cache` */
    uint64_t seed;        /* random, keyformer: the request's */
    struct head_gates *gates; /* rlkv, hybrid: NULL: from attention statistics */
    /* One slot of each head's B stands for all tokens evicted from it (POLICIES.md, summary slot): a common option,
     * `summary: 0 | 1`. Needs STATISTIC_SUM of every policy. Heads then hold B - 1 tokens beside it. */
    bool summary;
    /* distillcache, ranker, and hybrid with one of them as base: a reference, or NULL: the one that ships for the
     * model, which sequence_set_policy and whoever checks settings against a model puts here (policy_settings_resolve).
     */
    struct policy_network *network;
    uint64_t named; /* options that were set by name: 1 << their index in the table. policy_settings_set keeps it */
};

/* What shares B out (budget.h). */
enum policy_allocation { ALLOCATE_EQUAL, ALLOCATE_PYRAMID, ALLOCATE_CAKE, ALLOCATE_GATES, ALLOCATE_NETWORK };

struct policy {
    const char *name;
    const char *summary; /* one line for --help and errors */
    const char *source;  /* author, year, where the definition is from */
    uint32_t options;    /* mask of enum policy_option: those that may be set beside the common ones */
    void (*defaults)(struct policy_settings *); /* sets what differs from the common defaults; NULL: nothing */
    /* Statistics needed to score with these settings. first: until the first prune is done, when more is needed. */
    uint32_t (*needs)(const struct policy_settings *, bool first); /* NULL: none */
    /* Writes the stages, at most SCORE_STAGES_MAX, and returns their number; 0: nothing is ever evicted. */
    uint32_t (*stages)(const struct policy_settings *, struct score_stage *);
    /* Slots that the policy itself protects at a prune with budget B: positions < *sinks, and the *recent newest. NULL:
     * none. Options protect_* are added by the caller (the larger counts). */
    void (*protect)(const struct policy_settings *, uint32_t budget, uint32_t *sinks, uint32_t *recent);
    enum policy_allocation allocation;
    bool shared;       /* all heads of a layer hold the same slots: one candidate row per layer */
    bool heads_differ; /* gated heads (ALLOCATE_GATES): those that do not keep everything use the stages */
};

/* Options in words: common ones (ratio, tokens, minimum, interval, prefill_prune_every, protect_recent, protect_sinks,
 * scope, floor, summary) and those of some policies. */
enum policy_option {
    OPTION_SINKS = 1 << 0,
    OPTION_RECENT = 1 << 1,
    OPTION_RECENT_TOKENS = 1 << 2,
    OPTION_WINDOW = 1 << 3,
    OPTION_KERNEL = 1 << 4,
    OPTION_HISTORY = 1 << 5,
    OPTION_BETA = 1 << 6,
    OPTION_GAMMA = 1 << 7,
    OPTION_TAU = 1 << 8, /* tau1, tau2 */
    OPTION_EPSILON = 1 << 9,
    OPTION_FUTURE = 1 << 10,
    OPTION_SMOOTHING = 1 << 11,
    OPTION_SPARSITY = 1 << 12,
    OPTION_FULL_HEADS = 1 << 13,
    OPTION_DECODE = 1 << 14,    /* decode: slide | keep */
    OPTION_POSITIONS = 1 << 15, /* positions: original | cache */
    OPTION_GATES = 1 << 16,     /* a gate file */
    OPTION_SEED = 1 << 17,
    OPTION_BASE = 1 << 18,    /* base: h2o | snapkv | streaming | knorm | distillcache | ranker */
    OPTION_NETWORK = 1 << 19, /* a policy file */
};

/* The registry, in the order of policy/README.md. */
uint32_t policy_count(void);
const struct policy *policy_at(uint32_t index);
const struct policy *policy_find(const char *name); /* NULL: none of that name */
/* "full, random, streaming, ..." for help and errors; static. */
const char *policy_names(void);

/* The table of options, for help, replies and documents; in the order of policy/README.md. Texts are those that
 * policy_settings_set takes. */
uint32_t policy_options_count(void);
const char *policy_option_name(uint32_t index);
bool policy_option_exists(const char *name);
const char *policy_option_help(uint32_t index); /* half a line */
bool policy_option_common(uint32_t index);      /* every policy has it */
bool policy_option_applies(uint32_t index, const struct policy *policy);
void policy_option_allowed(uint32_t index, char *out, size_t size); /* "a whole number from 1 to 256" */
void policy_option_value(uint32_t index, const struct policy_settings *settings, char *out, size_t size);

/* Defaults of a policy: ratio 0.25 (full: 1), minimum 32, interval 1 (16 for policies with products per slot). */
void policy_settings_default(const struct policy *policy, struct policy_settings *settings);

/* Sets one option from text ("window", "16"); choices by their words. allow_files: gate and policy files may be read
 * (then also the errors of head_gates_load and network_load); a network's defaults are taken over for options that were
 * not set by name. ERROR_INVALID with a message that names the option, the value and what is allowed, or
 * lists the options that the policy has when it does not have this one; settings are then as they were. Works on
 * settings that were set by policy_settings_default. Of ratio, tokens and (rlkv) sparsity the last one set counts. */
int policy_settings_set(
    struct policy_settings *settings, const char *option, const char *value, bool allow_files, struct error *error);

/* "name[:FILE][,key=value...]" as on the command line; FILE: the gates of rlkv and hybrid, the network of distillcache
 * and ranker. On an error there is nothing to release. */
int policy_settings_parse(const char *text, struct policy_settings *settings, struct error *error);

/* Slots will be scored by a network (policy_settings_keep_all: they will not). */
bool policy_settings_want_network(const struct policy_settings *settings);

/* Gives settings that want a network and have none the one that ships for the model, takes over the network's defaults
 * (scope, floor, interval, summary, protect_*) for options that were not set by name, and checks the whole again. 0 for
 * settings that want no network. A network of a model with other layers, heads or head_dim is carried over
 * (network_carry). ERROR_IO (no such file), ERROR_FORMAT, ERROR_MEMORY, ERROR_UNSUPPORTED (it cannot be carried over),
 * ERROR_INVALID (policy_settings_check); settings may then have the network, and are to be released as ever. *foreign
 * (may be NULL): it was trained for a model with another fingerprint (a transfer: worth a warning). */
struct policy_model {
    const char *fingerprint; /* of the model file */
    uint32_t layers, kv_heads, head_dim;
};
int policy_settings_resolve(
    struct policy_settings *settings, const struct policy_model *model, bool *foreign, struct error *error);

/* Whether the network that settings have is of a model of this shape: ERROR_UNSUPPORTED. */
int policy_settings_fit(const struct policy_settings *settings, const struct policy_model *model, struct error *error);

/* Gives settings a network (a reference of their own), and what it has as defaults for options that were not set by
 * name, without a look at any model. */
void policy_settings_use_network(struct policy_settings *settings, const struct policy_network *network);

/* What can only be seen of the whole: budget against window, history and so on. Called by parse; call it after the last
 * policy_settings_set. */
int policy_settings_check(const struct policy_settings *settings, struct error *error);

void policy_settings_copy(struct policy_settings *to, const struct policy_settings *from);
void policy_settings_release(struct policy_settings *settings); /* drops gates and network */

/* The number of heads that keep everything is given, and the budget does not count (rlkv with a sparsity). */
bool policy_settings_by_sparsity(const struct policy_settings *settings);

/* Nothing will ever be evicted: policy full, ratio 1 without tokens, or sparsity 0. */
bool policy_settings_keep_all(const struct policy_settings *settings);

/* B for a sequence of `seen` tokens. floor(ratio * seen) in double; 1 is seen. */
uint32_t policy_budget(const struct policy_settings *settings, uint32_t seen);

/* Needs and stages of the policy with these settings; needs is 0 when everything is kept. */
uint32_t policy_needs(const struct policy_settings *settings, bool first);
uint32_t policy_stages(const struct policy_settings *settings, struct score_stage stages[SCORE_STAGES_MAX]);

/* Slots protected at a prune of a sequence of `seen` tokens with budget B: positions below *sinks and from
 * *recent_from. B is that of policy_budget, also where layers get more or less of it (as the windows of pyramidkv and
 * cake need); for policies with heads_differ it is the head's own. */
void policy_protection(
    const struct policy_settings *settings, uint32_t seen, uint32_t budget, uint32_t *sinks, uint32_t *recent_from);

/* Statistics over all queries until the first prune: a shared prefix may be reused only with what they are at its end.
 * 0: any prefix will do. */
uint32_t policy_prefix_needs(const struct policy_settings *settings);
/* Tokens at the end of the prompt that must be computed, and not taken from a shared prefix, for the statistics of a
 * window to be what they would be without sharing: 0 or the window. With prefill_prune_every, "prompt" is what comes
 * before the first prune. */
uint32_t policy_fresh_tokens(const struct policy_settings *settings);
/* Leading tokens of a prompt of `prompt_tokens` that may come from a shared prefix: not the fresh ones, at least one,
 * of what comes before the first prune; what follows a prune is not what is shared. */
uint32_t policy_reusable_tokens(const struct policy_settings *settings, uint32_t prompt_tokens);

/* "snapkv, ratio 0.25, window 32, kernel 7" for logs and reports: the budget, the policy's own options, and common ones
 * that differ from the policy's defaults. */
void policy_settings_describe(const struct policy_settings *settings, char *out, size_t size);

#endif
