/* SPDX-License-Identifier: Apache-2.0
 *
 * Requests, as far as no scheduler has to do with them.
 */
#include "engine/scheduler.h"
#include "grammar/grammar.h"

#include <stdlib.h>

struct request *request_create(void) {
    struct request *request = calloc(1, sizeof *request);
    if (request == NULL)
        return NULL;
    request->n = 1;
    request->max_tokens = 16;
    request->sampling.temperature = 1;
    request->sampling.top_p = 1;
    request->penalties.repetition = 1;
    request->logprobs = -1;
    request->skip_special = true;
    return request;
}

void request_free_parameters(struct request *request) {
    for (uint32_t i = 0; i < request->prompts_count; i++)
        free(request->prompts[i].tokens);
    for (uint32_t i = 0; i < request->stops_count; i++)
        free(request->stops[i]);
    policy_settings_release(&request->kv_policy);
    free(request->penalties.biases);
    free(request->stop_tokens);
    grammar_free(request->grammar);
    free(request->prompts);
    free(request->stops);
    free(request);
}
