/* SPDX-License-Identifier: Apache-2.0
 *
 * Runs one question under several variants on the engine, and measures each. Engine thread only.
 *
 * Every variant is a sequence of its own: the prompt is computed (what the policy's statistics allow is taken from the
 * prefix that `full` has published) and pruned; the question that follows, if any, is fed as decode steps with a prune
 * each. Then it is forked. Tasks with answers: one fork is fed the gold answer, for its log-probability; the other
 * generates greedily. kl: one fork is fed the text that follows, the other what the full model continues with, greedily
 * and without end tokens; after each token the fork's next-token distribution is compared with the full model's over
 * the same tokens. The first token after a prompt is the same for all, its logits precede the prune: it is not
 * compared.
 *
 * Variants run side by side in one batch, as many at a time as the page pool holds (`full` with them, for kl). What is
 * measured does not depend on that.
 */
#ifndef POLICY_EVAL_RUN_H
#define POLICY_EVAL_RUN_H

#include "engine/engine.h"
#include "policy/eval/question.h"
#include "policy/eval/results.h"

struct eval_run; /* opaque */

struct eval_run_options {
    struct engine *engine;
    const struct tokenizer *tokenizer;
    const struct eval_setup *setup;
    /* Takes a result (and its texts) as soon as it is there: 0, or a negative code that ends the run. */
    int (*emit)(void *context, struct eval_result *result, struct error *error);
    /* Called between calls of the engine, to give way to others: a code that is not 0 ends the question with it, all
     * its sequences freed. NULL: nothing. */
    int (*between)(void *context);
    struct background
        *background; /* whose turn it is, for the rows of one call of the engine; NULL: the engine is free */
    void *context;
};

/* All of options must outlive the run. */
struct eval_run *eval_run_create(const struct eval_run_options *options, struct error *error);
void eval_run_free(struct eval_run *run); /* NULL allowed */

struct eval_work {
    const struct eval_question *question;
    const struct eval_item *item; /* its answers and metric; NULL: kl */
    uint32_t length;              /* index into the setup's lengths */
    uint32_t index;               /* of the item */
    const bool *wanted;           /* [variants] results that are emitted; `full` is computed in any case */
    uint8_t **kept;               /* [variants] NULL, or set to [prompt tokens] 0..255: part of layers and heads that
                                   * keep the token after the prune; owned by the caller */
};
/* ERROR_PAGES: the page pool is too small for one variant; ERROR_CONTEXT; ERROR_MEMORY; what a policy says against the
 * model. */
int eval_run_question(struct eval_run *run, const struct eval_work *work, struct error *error);

#endif
