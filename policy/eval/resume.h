/* SPDX-License-Identifier: Apache-2.0
 *
 * The file of --resume: JSON Lines, one finished result each, with everything that it depends on (model, task, policy,
 * its network, ratio or budget, length, seed, query_aware, continuation, item and part, digest of the item's tokens).
 * Lines are appended and flushed one by one; a line that a killed run left torn is passed over. Results of other
 * settings may stand in the same file.
 */
#ifndef POLICY_EVAL_RESUME_H
#define POLICY_EVAL_RESUME_H

#include <stdio.h>

#include "policy/eval/results.h"

struct eval_resume {
    FILE *file;
    const char *name;
    uint32_t torn; /* lines that were passed over */
};

/* Creates the file when there is none; reads those results of it that belong to the setup. ERROR_IO, ERROR_FORMAT (a
 * line is JSON but no result, which is named), ERROR_MEMORY. */
int eval_resume_open(struct eval_resume *resume, const char *name, const struct eval_setup *setup,
    struct eval_results *results, struct error *error);
int eval_resume_append(
    struct eval_resume *resume, const struct eval_setup *setup, const struct eval_result *result, struct error *error);
void eval_resume_close(struct eval_resume *resume);

#endif
