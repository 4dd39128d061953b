/* SPDX-License-Identifier: Apache-2.0 */
#include "server/params.h"

#include "server/cache_params.h"
#include "server/structured.h"

#include <float.h>
#include <stdlib.h>
#include <string.h>
#include <uv.h>

void plan_free(struct plan *plan) {
    request_free(plan->request);
    tool_set_free(&plan->tools);
    *plan = (struct plan){0};
}

int params_check_model(const json_t *body, const struct parse_context *context, struct fault *fault) {
    const char *model = NULL;
    if (field_string(body, "model", &model, fault) != 0)
        return -1;
    if (model == NULL || strcmp(model, context->model_id) == 0)
        return 0;
    return fault_set(fault, 404, "model_not_found", "model", "the model '%.128s' does not exist; this server has '%s'",
        model, context->model_id);
}

static int params_read_seed(const json_t *body, struct sample_params *sampling, struct fault *fault) {
    int64_t seed;
    if (field_get(body, "seed") == NULL) {
        if (uv_random(NULL, NULL, &seed, sizeof seed, 0, NULL) != 0)
            return fault_set(fault, 500, NULL, NULL, "the system has no random numbers");
    } else if (field_integer(body, "seed", INT64_MIN, INT64_MAX, &seed, fault) != 0) {
        return -1;
    }
    sampling->seed = (uint64_t)seed;
    return 0;
}

static int params_read_sampling(const json_t *body, struct sample_params *sampling, struct fault *fault) {
    double temperature = 1.0, top_p = 1.0, min_p = 0.0;
    int64_t top_k = 0;
    if (field_number(body, "temperature", 0.0, 2.0, &temperature, fault) != 0 ||
        field_number(body, "top_p", 0.0, 1.0, &top_p, fault) != 0 ||
        field_number(body, "min_p", 0.0, 1.0, &min_p, fault) != 0 ||
        field_integer(body, "top_k", -1, INT32_MAX, &top_k, fault) != 0)
        return -1;
    sampling->temperature = (float)temperature;
    sampling->top_p = top_p < FLT_MIN ? FLT_MIN : (float)top_p;
    sampling->min_p = (float)min_p;
    sampling->top_k = top_k < 0 ? 0 : (uint32_t)top_k;
    return params_read_seed(body, sampling, fault);
}

static int params_add_stop(struct request *request, const json_t *stop, bool array, struct fault *fault) {
    if (!json_is_string(stop))
        return fault_invalid(fault, "stop", "stop must be a string or an array of strings, not %s%s",
            array ? "an array with " : "", field_type(stop));
    const char *text = json_string_value(stop);
    if (text[0] == '\0' || strlen(text) != json_string_length(stop))
        return fault_invalid(fault, "stop", "a stop string must not be empty and must not contain NUL");
    char *copy = strdup(text);
    if (copy == NULL)
        return fault_memory(fault);
    request->stops[request->stops_count++] = copy;
    return 0;
}

static int params_read_stops(const json_t *body, struct request *request, struct fault *fault) {
    const json_t *stop = field_get(body, "stop");
    if (stop == NULL)
        return 0;
    size_t count = json_is_array(stop) ? json_array_size(stop) : 1;
    if (count > STOPS_MAX)
        return fault_invalid(fault, "stop", "stop has %zu strings; at most %d are allowed", count, STOPS_MAX);
    if (count == 0)
        return 0;
    request->stops = calloc(count, sizeof *request->stops);
    if (request->stops == NULL)
        return fault_memory(fault);
    bool array = json_is_array(stop);
    for (size_t i = 0; i < count; i++)
        if (params_add_stop(request, array ? json_array_get(stop, i) : stop, array, fault) != 0)
            return -1;
    return 0;
}

static int params_read_stream(const json_t *body, struct plan *plan, struct fault *fault) {
    bool stream = false;
    if (field_boolean(body, "stream", &stream, fault) != 0)
        return -1;
    plan->request->stream = stream;
    const json_t *options = field_get(body, "stream_options");
    if (options == NULL)
        return 0;
    if (!json_is_object(options))
        return fault_invalid(fault, "stream_options", "stream_options must be an object, not %s", field_type(options));
    if (!stream)
        return fault_invalid(fault, "stream_options", "stream_options is only allowed when stream is true");
    return field_boolean(options, "include_usage", &plan->include_usage, fault);
}

static int params_read_best_of(const json_t *body, struct plan *plan, struct fault *fault) {
    uint32_t n = plan->request->n;
    int64_t best_of = n;
    if (field_integer(body, "best_of", 0, BEST_OF_MAX, &best_of, fault) != 0)
        return -1;
    plan->n = n;
    if (best_of == n || best_of == 0)
        return 0;
    if (best_of < n)
        return fault_invalid(fault, "best_of", "best_of is %lld; it must be at least n (%u)", (long long)best_of, n);
    if (plan->chat)
        return fault_invalid(
            fault, "best_of", "best_of is %lld; chats have no more candidates than n (%u)", (long long)best_of, n);
    if (plan->request->stream)
        return fault_invalid(
            fault, "best_of", "best_of is %lld; candidates beyond n (%u) cannot be streamed", (long long)best_of, n);
    plan->request->n = (uint32_t)best_of;
    return 0;
}

/* The token id that a key of logit_bias writes out; -1: none. */
static int64_t params_bias_token(const char *key) {
    size_t length = strlen(key);
    if (length == 0 || length > 9 || strspn(key, "0123456789") != length || (key[0] == '0' && length > 1))
        return -1;
    return strtol(key, NULL, 10);
}

static int params_read_biases(
    const json_t *body, const struct parse_context *context, struct penalty_options *options, struct fault *fault) {
    json_t *biases = field_get(body, "logit_bias");
    const char *key;
    json_t *value;
    if (biases == NULL)
        return 0;
    if (!json_is_object(biases))
        return fault_invalid(fault, "logit_bias", "logit_bias must be an object, not %s", field_type(biases));
    size_t count = json_object_size(biases);
    if (count > BIASES_MAX)
        return fault_invalid(
            fault, "logit_bias", "logit_bias has %zu tokens; at most %d are allowed", count, BIASES_MAX);
    options->biases = calloc(count + 1, sizeof *options->biases);
    if (options->biases == NULL)
        return fault_memory(fault);
    json_object_foreach(biases, key, value) {
        int64_t token = params_bias_token(key);
        if (token < 0 || token >= context->vocabulary)
            return fault_invalid(fault, "logit_bias",
                "logit_bias: '%.40s' is no token id of the vocabulary of %u tokens", key, context->vocabulary);
        double bias = json_is_number(value) ? json_number_value(value) : 1000;
        if (!(bias >= -100 && bias <= 100))
            return fault_invalid(
                fault, "logit_bias", "logit_bias: the bias of token %s must be a number from -100 to 100", key);
        options->biases[options->biases_count++] = (struct logit_bias){(int32_t)token, (float)bias};
    }
    return 0;
}

static int params_read_penalties(
    const json_t *body, const struct parse_context *context, struct penalty_options *options, struct fault *fault) {
    double presence = 0, frequency = 0, repetition = 1;
    if (field_number(body, "presence_penalty", -2, 2, &presence, fault) != 0 ||
        field_number(body, "frequency_penalty", -2, 2, &frequency, fault) != 0 ||
        field_number(body, "repetition_penalty", 0.01, 10, &repetition, fault) != 0)
        return -1;
    options->presence = (float)presence;
    options->frequency = (float)frequency;
    options->repetition = (float)repetition;
    return params_read_biases(body, context, options, fault);
}

/* Tokens that end the answer, and when they may. */
static int params_read_ends(
    const json_t *body, const struct parse_context *context, struct request *request, struct fault *fault) {
    bool present;
    if (params_read_limit(body, "min_tokens", context, &request->min_tokens, &present, fault) != 0)
        return -1;
    const json_t *stops = field_get(body, "stop_token_ids");
    if (stops == NULL)
        return 0;
    if (!json_is_array(stops))
        return fault_invalid(fault, "stop_token_ids", "stop_token_ids must be an array, not %s", field_type(stops));
    if (json_array_size(stops) > STOP_TOKENS_MAX)
        return fault_invalid(fault, "stop_token_ids", "stop_token_ids has %zu tokens; at most %d are allowed",
            json_array_size(stops), STOP_TOKENS_MAX);
    if (json_array_size(stops) == 0)
        return 0;
    struct token_list ids = {0};
    int failed = params_read_tokens(stops, "stop_token_ids", context, &ids, fault);
    request->stop_tokens = ids.ids;
    request->stop_tokens_count = failed == 0 ? (uint32_t)ids.count : 0;
    return failed;
}

int params_finish(struct plan *plan, struct fault *fault) {
    struct request *request = plan->request;
    plan->logprobs = request->logprobs;
    if (request->min_tokens > request->max_tokens)
        return fault_invalid(fault, "min_tokens", "min_tokens is %u; it must be at most max_tokens (%u)",
            request->min_tokens, request->max_tokens);
    if (request->n > plan->n && request->logprobs < 0)
        request->logprobs = 0;
    uint64_t tokens = 0;
    for (uint32_t i = 0; request->penalties.repetition != 1 && i < request->prompts_count; i++)
        tokens += (uint64_t)request->prompts[i].count * request->n;
    if (tokens > ECHOED_MAX) /* each choice has its own list of them */
        return fault_invalid(fault, "repetition_penalty",
            "repetition_penalty would weigh %llu tokens (prompts times n); at most %d are allowed",
            (unsigned long long)tokens, ECHOED_MAX);
    return 0;
}

int params_read(const json_t *body, const struct parse_context *context, struct plan *plan, struct fault *fault) {
    plan->request = request_create();
    if (plan->request == NULL)
        return fault_memory(fault);
    struct request *request = plan->request;
    int64_t n = 1;
    bool ignore_eos = false, skip_special = true;
    if (params_check_model(body, context, fault) != 0 || field_integer(body, "n", 1, N_MAX, &n, fault) != 0 ||
        params_read_sampling(body, &request->sampling, fault) != 0 ||
        cache_params_read(body, context, request, fault) != 0 || params_read_stops(body, request, fault) != 0 ||
        field_boolean(body, "ignore_eos", &ignore_eos, fault) != 0 ||
        field_boolean(body, "skip_special_tokens", &skip_special, fault) != 0 ||
        params_read_stream(body, plan, fault) != 0 || structured_read(body, context, request, fault) != 0 ||
        params_read_penalties(body, context, &request->penalties, fault) != 0 ||
        params_read_ends(body, context, request, fault) != 0)
        return -1;
    request->n = (uint32_t)n;
    request->ignore_eos = ignore_eos;
    request->skip_special = skip_special;
    return params_read_best_of(body, plan, fault);
}

int params_read_limit(const json_t *body, const char *name, const struct parse_context *context, uint32_t *limit,
    bool *present, struct fault *fault) {
    int64_t value;
    *present = field_get(body, name) != NULL;
    if (!*present)
        return 0;
    if (field_integer(body, name, 0, INT32_MAX, &value, fault) != 0)
        return -1;
    *limit = value > context->context ? context->context : (uint32_t)value;
    return 0;
}

int params_add_prompt(struct request *request, struct token_list *ids, const struct parse_context *context,
    const char *parameter, struct fault *fault) {
    if (ids->count > context->context)
        return fault_set(fault, 400, "context_length_exceeded", parameter,
            "the prompt has %zu tokens; this model's maximum context length is %u tokens", ids->count,
            context->context);
    struct prompt *prompt = &request->prompts[request->prompts_count];
    prompt->tokens = malloc(ids->count * sizeof *prompt->tokens);
    if (prompt->tokens == NULL)
        return fault_memory(fault);
    memcpy(prompt->tokens, ids->ids, ids->count * sizeof *prompt->tokens);
    prompt->count = (uint32_t)ids->count;
    request->prompts_count++;
    return 0;
}

/* What an empty prompt is continued from. */
static int32_t params_first_token(const struct parse_context *context) {
    if (tokenizer_bos(context->tokenizer) >= 0)
        return tokenizer_bos(context->tokenizer);
    for (uint32_t token = 0; token < context->vocabulary; token++)
        if (tokenizer_is_end(context->tokenizer, (int32_t)token))
            return (int32_t)token;
    return 0;
}

int params_encode(const char *text, size_t bytes, bool add_special, bool parse_special,
    const struct parse_context *context, struct token_list *ids, struct fault *fault) {
    struct error error;
    bool failed = false;
    if (add_special && tokenizer_adds_bos(context->tokenizer) && tokenizer_bos(context->tokenizer) >= 0)
        failed = token_list_append(ids, tokenizer_bos(context->tokenizer)) != 0;
    failed = failed || tokenizer_encode(context->tokenizer, text, bytes, parse_special, ids, &error) != 0;
    if (!failed && add_special && tokenizer_adds_eos(context->tokenizer))
        failed = token_list_append(ids, tokenizer_eos(context->tokenizer)) != 0;
    return failed ? fault_memory(fault) : 0;
}

int params_encode_marked(const struct template_text *text, const struct parse_context *context, struct token_list *ids,
    struct fault *fault) {
    struct error error;
    if (tokenizer_encode_marked(context->tokenizer, text->text, text->input, text->bytes, ids, &error) != 0)
        return fault_memory(fault);
    return 0;
}

int params_encode_prompt(const char *text, size_t bytes, bool add_special, const struct parse_context *context,
    struct token_list *ids, struct fault *fault) {
    if (params_encode(text, bytes, add_special, true, context, ids, fault) != 0)
        return -1;
    if (ids->count == 0 && token_list_append(ids, params_first_token(context)) != 0)
        return fault_memory(fault);
    return 0;
}

int params_read_tokens(const json_t *array, const char *name, const struct parse_context *context,
    struct token_list *ids, struct fault *fault) {
    size_t i;
    json_t *item;
    if (json_array_size(array) == 0)
        return fault_invalid(fault, name, "%s has an empty array of tokens", name);
    json_array_foreach(array, i, item) {
        int64_t id;
        if (!json_is_number(item) || !fields_as_integer(item, &id))
            return fault_invalid(fault, name, "%s: entry %zu of a token array is not an integer", name, i);
        if (id < 0 || id >= context->vocabulary)
            return fault_invalid(fault, name, "%s: token id %lld is outside the vocabulary of %u tokens", name,
                (long long)id, context->vocabulary);
        if (token_list_append(ids, (int32_t)id) != 0)
            return fault_memory(fault);
    }
    return 0;
}
