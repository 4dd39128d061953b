/* SPDX-License-Identifier: Apache-2.0
 *
 * The files of --svg DIR (created when it does not exist):
 *   budget-VALUE-LENGTH.svg   VALUE (kl, score, gold_logprob) against the part of the tokens kept, one line a policy
 *   length-VALUE.svg          VALUE against the context's length, when there are several
 *   retained-POLICY.svg       which positions of the prompt (columns) each layer (rows) keeps after the prune, a map a
 *                             budget; from the longest length
 *   positions-LENGTH.svg      part of layers and heads that keep the first tokens and, by distance from the end, the
 *                             others (positions.h), one line a policy and budget
 *   depth-POLICY.svg          score by depth (rows) and length (columns), a map a budget; for tasks with depths
 *   kept-POLICY.html          the first prompt as text, the darker the more layers and heads keep the token
 * Characters of a policy's name other than letters, digits, '.', '-' are '_' in file names.
 */
#ifndef POLICY_EVAL_PLOT_H
#define POLICY_EVAL_PLOT_H

#include "engine/tokenizer.h"
#include "policy/eval/rows.h"

int eval_plot_write(const char *folder, const struct eval_setup *setup, const struct eval_results *results,
    const struct eval_rows *rows, struct error *error);

/* kept [variants]: NULL, or [tokens] 0..255, see run.h. */
int eval_kept_write(const char *folder, const struct eval_setup *setup, const struct tokenizer *tokenizer,
    const struct token_list *tokens, uint8_t *const *kept, struct error *error);

#endif
