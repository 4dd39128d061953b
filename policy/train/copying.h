/* SPDX-License-Identifier: Apache-2.0
 *
 * Generated prompts whose continuation can only be copied from them: what a pruned cache loses first, and text has too
 * little of. Four kinds, one after the other by index: records that are looked up again in another order, a passage
 * that is repeated, a list that is said once more, and assignments that are asked for. Filler stands between. The same
 * options and index give the same tokens.
 */
#ifndef POLICY_TRAIN_COPYING_H
#define POLICY_TRAIN_COPYING_H

#include "engine/tokenizer.h"

struct copying_options {
    const struct tokenizer *tokenizer;
    const int32_t *text; /* [text_count] tokens that passages and filler are taken from; NULL: generated prose */
    size_t text_count;
    uint32_t least, most; /* tokens of a prompt */
    uint32_t future;      /* tokens that follow it */
    uint64_t seed;
};

/* Empties out and writes a prompt of *prompt tokens and `future` that follow. ERROR_MEMORY. */
int copying_generate(const struct copying_options *options, uint64_t index, struct token_list *out, uint32_t *prompt,
    struct error *error);

#endif
