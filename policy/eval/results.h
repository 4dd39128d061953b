/* SPDX-License-Identifier: Apache-2.0
 *
 * What was measured: one result for each (length, item, part, variant). A variant is a policy with a budget; the first
 * one is always `full`. Parts are the two continuations of a kl prompt ("text", "own"); other items have one part.
 * report.h makes rows of them, resume.h keeps them in a file.
 */
#ifndef POLICY_EVAL_RESULTS_H
#define POLICY_EVAL_RESULTS_H

#include "policy/eval/item.h"
#include "policy/eval/metrics.h"
#include "policy/eval/positions.h"
#include "policy/policy.h"

enum { KEPT_BINS = 16 }; /* of positions, in maps of what was retained */

struct eval_variant {
    char *policy; /* as given on the command line */
    double ratio;
    struct policy_settings settings;
};

/* What all results of a run have in common. */
struct eval_setup {
    const char *model; /* fingerprint, precision and number format of the cache: what results depend on */
    const char *task;
    uint64_t seed;
    bool query_aware;
    bool answers;          /* the task has answers to score; else it is kl */
    uint32_t continuation; /* kl: steps compared */
    uint32_t layers;
    const uint32_t *lengths;
    uint32_t lengths_count;
    const struct eval_variant *variants; /* [0] is full */
    uint32_t variants_count;
};

struct eval_result {
    uint32_t length; /* index into lengths */
    uint32_t item;
    uint32_t part;
    uint32_t variant;
    uint64_t digest; /* of the item's tokens: a result is taken up again for the same item only */
    char group[48];  /* empty: none */
    /* kl */
    uint32_t steps; /* 0: not measured */
    double kl;      /* mean over the steps, nats */
    double top1;    /* part of the steps at which both find the same token most likely */
    double loss;    /* mean negative log-probability of the tokens that were fed, nats */
    double loss_full;
    /* answers */
    bool has_score, has_gold;
    double score;
    double chance; /* score of guessing among the classes; 0 when there are none */
    double gold_logprob;
    uint32_t gold_tokens;
    uint32_t output_tokens, max_tokens;
    enum eval_error kind;
    char gold[24]; /* begin of the gold answer: how often each occurs says what guessing could reach */
    /* memory after the last token, and time */
    double tokens_kept; /* mean over layers and heads */
    uint32_t tokens_seen;
    double bytes, bytes_full;
    uint32_t tokens; /* computed */
    double seconds;  /* its share of batches by rows */
    char *output;    /* text of the answer; NULL: none */
    char *kept;      /* [layers * KEPT_BINS] '0' + 0..63: part of the prompt's tokens kept by the prune; NULL: none */
    struct eval_positions positions; /* kept by that prune; as `kept`, of the item's first part only */
};

struct eval_results {
    struct eval_result *list;
    size_t count, capacity;
};

/* Moves a result in (its texts belong to the results afterwards, also on failure). 0 or ERROR_MEMORY. */
int eval_results_add(struct eval_results *results, struct eval_result *result);
void eval_results_free(struct eval_results *results);
void eval_result_clear(struct eval_result *result); /* frees its texts */

/* NULL: none. */
const struct eval_result *eval_results_find(
    const struct eval_results *results, uint32_t length, uint32_t item, uint32_t part, uint32_t variant);

#endif
