/* SPDX-License-Identifier: Apache-2.0 */
#include "server/completions.h"

#include "server/generation.h"
#include "server/prompts.h"

enum { LOGPROBS_MAX = 5, MAX_TOKENS_DEFAULT = 16 };

static const char *const known[] = {
    PARAMS_KNOWN, "add_special_tokens", "prompt", "max_tokens", "logprobs", "echo", NULL};
static const struct field_unsupported unsupported[] = {
    PARAMS_UNSUPPORTED, {"suffix", REFUSE_NONEMPTY}, {"max_completion_tokens", REFUSE_PRESENT}, {NULL, REFUSE_PRESENT}};

/* An echo repeats its prompt n times, before anything is computed or read: without a limit one request could ask for
 * gigabytes. */
static int completions_check_echo(const struct request *request, struct fault *fault) {
    uint64_t tokens = 0;
    for (uint32_t i = 0; request->echo && i < request->prompts_count; i++)
        tokens += (uint64_t)request->prompts[i].count * request->n;
    if (tokens <= ECHOED_MAX)
        return 0;
    return fault_invalid(fault, "echo", "echo would repeat %llu tokens (prompts times n); at most %d are allowed",
        (unsigned long long)tokens, ECHOED_MAX);
}

int completions_parse(const json_t *body, const struct parse_context *context, struct plan *plan, struct fault *fault) {
    if (fields_check(body, known, unsupported, context->request_id, fault) != 0 ||
        params_read(body, context, plan, fault) != 0)
        return -1;
    struct request *request = plan->request;
    int64_t logprobs = -1;
    bool echo = false, add_special = true, present;
    request->max_tokens = MAX_TOKENS_DEFAULT;
    if (field_boolean(body, "echo", &echo, fault) != 0 ||
        params_read_limit(body, "max_tokens", context, &request->max_tokens, &present, fault) != 0 ||
        field_integer(body, "logprobs", 0, LOGPROBS_MAX, &logprobs, fault) != 0 ||
        field_boolean(body, "add_special_tokens", &add_special, fault) != 0)
        return -1;
    request->echo = echo;
    request->logprobs = (int)logprobs;
    if (prompts_read(body, "prompt", add_special, context, request, fault) != 0)
        return -1;
    return completions_check_echo(request, fault);
}

void completions_handle(struct exchange *exchange) {
    generation_handle(exchange, completions_parse);
}
