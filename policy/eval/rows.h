/* SPDX-License-Identifier: Apache-2.0
 *
 * Results to rows: means with intervals for each (length, variant), and for each group of items within them. A result
 * counts when `full` has one for the same item and part, so that every row is paired with `full` over the same items.
 *
 * Unit of resampling is the item: parts of one item are averaged first. kl_geometric is the geometric mean over
 * continuations of their mean KL, none taken below 1e-9. Perplexity is exp of the mean loss, over the parts "text" when
 * there are any (own continuations are easy by construction).
 */
#ifndef POLICY_EVAL_ROWS_H
#define POLICY_EVAL_ROWS_H

#include "policy/eval/bootstrap.h"
#include "policy/eval/results.h"

struct eval_row {
    uint32_t length, variant;
    char group[48]; /* empty: all items */
    uint32_t n;     /* items */
    bool has_kl;
    struct bootstrap_interval kl;
    double kl_geometric, top1, perplexity, perplexity_full;
    bool has_score;
    struct bootstrap_interval score, score_difference; /* difference: minus full, item by item */
    double score_full, chance;
    bool claimed;                                  /* full beats chance by 15 points */
    uint32_t full_right, errors[EVAL_ERROR_KINDS]; /* over the items that full gets right */
    bool has_gold;
    struct bootstrap_interval gold_logprob, gold_difference;
    double gold_logprob_full;
    bool has_output;
    double length_ratio; /* mean over items of output tokens against full's */
    double tokens_per_second;
    double tokens_kept, tokens_seen, bytes, bytes_full; /* means */
    struct eval_positions positions;                    /* the same */
};

struct eval_rows {
    struct eval_row *list;
    size_t count;
    struct eval_row *groups; /* in order of length, variant, first appearance */
    size_t groups_count;
};

int eval_rows_create(
    const struct eval_setup *setup, const struct eval_results *results, struct eval_rows *rows, struct error *error);
void eval_rows_free(struct eval_rows *rows);

/* The row of all items; NULL: none. */
const struct eval_row *eval_rows_find(const struct eval_rows *rows, uint32_t length, uint32_t variant);

#endif
