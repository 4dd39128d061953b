/* SPDX-License-Identifier: Apache-2.0 */
#include "server/completions.h"

#include "server/generation.h"

#include <stdlib.h>

enum { LOGPROBS_MAX = 5, MAX_TOKENS_DEFAULT = 16 };

static const char *const known[] = {
    PARAMS_KNOWN, "add_special_tokens", "prompt", "max_tokens", "logprobs", "echo", NULL};
static const struct field_unsupported unsupported[] = {
    PARAMS_UNSUPPORTED, {"suffix", REFUSE_NONEMPTY}, {"max_completion_tokens", REFUSE_PRESENT}, {NULL, REFUSE_PRESENT}};

/* One prompt: text or an array of ids. */
static int completions_add(const json_t *item, bool add_special, const struct parse_context *context,
    struct request *request, struct fault *fault) {
    struct token_list ids = {0};
    int failed;
    if (json_is_string(item))
        failed =
            params_encode_prompt(json_string_value(item), json_string_length(item), add_special, context, &ids, fault);
    else
        failed = params_read_tokens(item, "prompt", context, &ids, fault);
    if (failed == 0)
        failed = params_add_prompt(request, &ids, context, "prompt", fault);
    token_list_free(&ids);
    return failed;
}

/* The number of prompts in the field, 0 with a fault. */
static size_t completions_count(const json_t *prompt, struct fault *fault) {
    if (json_is_string(prompt))
        return 1;
    if (!json_is_array(prompt) || json_array_size(prompt) == 0) {
        fault_invalid(fault, "prompt",
            "prompt must be a string, an array of strings, an array of token ids or an array of arrays of token ids, "
            "not %s",
            json_is_array(prompt) ? "an empty array" : field_type(prompt));
        return 0;
    }
    const json_t *first = json_array_get(prompt, 0);
    if (json_is_number(first))
        return 1;
    bool text = json_is_string(first);
    size_t i;
    json_t *item;
    json_array_foreach(prompt, i, item) {
        if (text ? json_is_string(item) : json_is_array(item))
            continue;
        fault_invalid(fault, "prompt",
            "entry %zu of prompt is %s: all entries must be strings, or all token ids, or all arrays of token ids", i,
            field_type(item));
        return 0;
    }
    return json_array_size(prompt);
}

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

static int completions_read_prompts(
    const json_t *body, const struct parse_context *context, struct request *request, struct fault *fault) {
    const json_t *prompt = field_get(body, "prompt");
    bool add_special = true;
    if (prompt == NULL)
        return fault_invalid(fault, "prompt", "prompt is missing");
    if (field_boolean(body, "add_special_tokens", &add_special, fault) != 0)
        return -1;
    size_t count = completions_count(prompt, fault);
    if (count == 0)
        return -1;
    if (count * request->n > CHOICES_MAX)
        return fault_invalid(fault, "prompt", "%zu prompts with n %u are %zu choices; at most %d are allowed", count,
            request->n, count * request->n, CHOICES_MAX);
    request->prompts = calloc(count, sizeof *request->prompts);
    if (request->prompts == NULL)
        return fault_memory(fault);
    if (json_is_string(prompt) || json_is_number(json_array_get(prompt, 0)))
        return completions_add(prompt, add_special, context, request, fault);
    for (size_t i = 0; i < count; i++)
        if (completions_add(json_array_get(prompt, i), add_special, context, request, fault) != 0)
            return -1;
    return 0;
}

int completions_parse(const json_t *body, const struct parse_context *context, struct plan *plan, struct fault *fault) {
    if (fields_check(body, known, unsupported, context->request_id, fault) != 0 ||
        params_read(body, context, plan, fault) != 0)
        return -1;
    struct request *request = plan->request;
    int64_t logprobs = -1;
    bool echo = false, present;
    request->max_tokens = MAX_TOKENS_DEFAULT;
    if (field_boolean(body, "echo", &echo, fault) != 0 ||
        params_read_limit(body, "max_tokens", context, &request->max_tokens, &present, fault) != 0 ||
        field_integer(body, "logprobs", 0, LOGPROBS_MAX, &logprobs, fault) != 0)
        return -1;
    request->echo = echo;
    request->logprobs = (int)logprobs;
    return completions_read_prompts(body, context, request, fault) != 0 ? -1 : completions_check_echo(request, fault);
}

void completions_handle(struct exchange *exchange) {
    generation_handle(exchange, completions_parse);
}
