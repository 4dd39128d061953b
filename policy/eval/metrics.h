/* SPDX-License-Identifier: Apache-2.0
 *
 * Scores of answers, and what is wrong with wrong ones. Pure functions of text.
 *
 * LongBench's metrics follow its metrics.py and eval.py (Bai et al. 2023): the best score over the answers; with
 * first_line, of the first line that is not empty. QA F1 uses SQuAD's normalisation (Rajpurkar et al. 2016), ROUGE-L is
 * that of the package rouge 1.0.1, edit similarity that of fuzzywuzzy 0.18 on difflib, in whole percents (similarity.h
 * says which ratio that is, and where LongBench installations differ).
 * The others:
 *   contains      part of the answers that occur in the output, letter case aside (RULER's string match)
 *   contains-any  1 when an answer occurs in the output, both in SQuAD's normalisation (Lost in the Middle)
 *   exact         1 when the first line that is not empty is an answer: letter case, the white space around and between
 *                 words, and a final full stop aside
 *   number        1 when the number of the output is that of the answer. It is the first one behind "####" where the
 *                 text has that, else the last; 1,234.50 is 1234.5
 */
#ifndef POLICY_EVAL_METRICS_H
#define POLICY_EVAL_METRICS_H

#include "policy/eval/item.h"

const char *eval_metric_name(enum eval_metric metric);
const char *eval_metric_names(void); /* "none, contains, ..." */
bool eval_metric_find(const char *name, enum eval_metric *metric);

/* Score of an output in [0, 1]. 0 on failed allocation, and for METRIC_NONE. */
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
