/* SPDX-License-Identifier: Apache-2.0
 *
 * Scores of answers, and what is wrong with wrong ones. Pure functions of text.
 * LongBench's metrics follow its metrics.py (Bai et al. 2023) and SQuAD's normalisation (Rajpurkar et al. 2016).
 */
#ifndef POLICY_EVAL_METRICS_H
#define POLICY_EVAL_METRICS_H

#include "policy/eval/item.h"

const char *eval_metric_name(enum eval_metric metric);
bool eval_metric_find(const char *name, enum eval_metric *metric);

/* Score of an output in [0, 1]. 0 on failed allocation. */
double eval_score(const struct eval_item *item, const char *output);

/* Kinds of errors, counted over items that the full cache gets right (score >= 0.5). */
enum eval_error {
    EVAL_RIGHT,
    EVAL_REPETITIVE,  /* the output ends in a text of 1 to 64 tokens that is there at least four times in a row */
    EVAL_OVER_LENGTH, /* reached max_tokens where the full cache did not */
    EVAL_WRONG,       /* anything else */
    EVAL_ERROR_KINDS,
};
const char *eval_error_name(enum eval_error kind);
enum eval_error eval_classify(
    double score, const int32_t *tokens, uint32_t count, uint32_t max_tokens, uint32_t full_count);

#endif
