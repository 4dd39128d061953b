/* SPDX-License-Identifier: Apache-2.0
 *
 * What a request asks to be done to logits before a token is chosen, kept up to date for one choice: biases of single
 * tokens, and penalties for tokens that are there already.
 *
 *   z' = (z > 0 ? z / repetition : z * repetition) + bias - presence - frequency * count
 *
 * repetition: of tokens that are in the prompt or the answer (Keskar et al. 2019, CTRL, section 4.1; negative logits as
 * transformers and vLLM have it). presence, frequency: of tokens that the answer has `count` > 0 times (OpenAI's API;
 * like vLLM's, the prompt does not count). Neutral values: repetition 1, the others 0.
 */
#ifndef ENGINE_PENALTIES_H
#define ENGINE_PENALTIES_H

#include "engine/backend.h"

struct logit_bias {
    int32_t token;
    float bias;
};

/* What a request asks for. */
struct penalty_options {
    float presence, frequency, repetition;
    struct logit_bias *biases; /* owned by the request; each token once */
    uint32_t biases_count;
};
bool penalty_options_neutral(const struct penalty_options *options);

/* Of one choice. Zero-initialise; private to penalties.c but for changes and count, which go to struct sample_params.
 */
struct penalties {
    struct logit_change *changes; /* [count] by ascending token, each once */
    uint32_t *times;              /* [count] in the answer */
    uint32_t count, capacity;
};

/* Before the first token. Nothing is kept of tokens [tokens_count], the prompt. ERROR_MEMORY. */
int penalties_begin(
    struct penalties *penalties, const struct penalty_options *options, const int32_t *tokens, uint32_t tokens_count);
/* The answer has a further token. ERROR_MEMORY. */
int penalties_add(struct penalties *penalties, const struct penalty_options *options, int32_t token);
void penalties_free(struct penalties *penalties);

#endif
