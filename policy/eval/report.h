/* SPDX-License-Identifier: Apache-2.0
 *
 * The report of an evaluation.
 *
 *   {"task", "model", "seed", "query_aware", "lengths": [...], "complete", "items", "skipped",
 *    "rows": [{"task", "kv_policy", "kv_ratio" | "kv_tokens", "length", "n",
 *              "kl", "kl_ci": [lo, hi], "kl_geometric", "top1", "perplexity", "perplexity_full", "perplexity_increase",
 *              "score", "score_ci", "score_full", "score_difference", "score_difference_ci", "chance", "claimed",
 *              "gold_logprob", "gold_logprob_ci", "gold_logprob_full", "gold_logprob_difference",
 *              "gold_logprob_difference_ci", "length_ratio", "full_right", "errors": {"right", "repetitive", ...},
 *              "tokens_per_second", "kv_tokens_kept", "kv_tokens_seen", "kv_bytes", "kv_bytes_full",
 *              "kept_sinks", "kept_recent", "kept_between", "kept_first": [...], "kept_distance": [...]}],
 *    "groups": [the same with "group"]}
 * What a task does not measure is absent; a number that is not finite is null. `full` is a row of its own. "complete"
 * is false when the evaluation was stopped. kv_bytes counts pages and statistics. kept_*: positions.h.
 */
#ifndef POLICY_EVAL_REPORT_H
#define POLICY_EVAL_REPORT_H

#include <stdio.h>

#include "policy/eval/rows.h"

struct eval_report {
    const struct eval_setup *setup;
    const struct eval_rows *rows;
    const char *model;       /* its name */
    uint32_t items, skipped; /* skipped: longer than the length asked for */
    bool complete;
};

char *eval_report_json(const struct eval_report *report); /* NULL: no memory; the caller frees it */
void eval_report_table(const struct eval_report *report, FILE *out);
/* Rows and groups, one a line, under a line of names; absent values are empty. */
void eval_report_csv(const struct eval_report *report, FILE *out);

#endif
