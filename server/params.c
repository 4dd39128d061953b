/* SPDX-License-Identifier: Apache-2.0 */
#include "server/params.h"

#include "server/cache_params.h"

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

/* best_of asks for more candidates than choices: only the case without any is served. */
static int params_check_best_of(const json_t *body, uint32_t n, struct fault *fault) {
    int64_t best_of = n;
    if (field_integer(body, "best_of", 0, BEST_OF_MAX, &best_of, fault) != 0)
        return -1;
    if (best_of == n || best_of == 0)
        return 0;
    return fault_invalid(fault, "best_of", "best_of %lld is not supported by this server unless it equals n (%u)",
        (long long)best_of, n);
}

static int params_check_format(const json_t *body, struct fault *fault) {
    const json_t *format = field_get(body, "response_format");
    if (format == NULL)
        return 0;
    const char *type = NULL;
    if (!json_is_object(format))
        return fault_invalid(fault, "response_format", "response_format must be an object, not %s", field_type(format));
    if (field_string(format, "type", &type, fault) != 0)
        return -1;
    if (type != NULL && strcmp(type, "text") == 0)
        return 0;
    return fault_invalid(fault, "response_format",
        "response_format of type '%.40s' is not supported by this server; only text is", type == NULL ? "" : type);
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
        params_read_stream(body, plan, fault) != 0 || params_check_best_of(body, (uint32_t)n, fault) != 0 ||
        params_check_format(body, fault) != 0)
        return -1;
    request->n = (uint32_t)n;
    request->ignore_eos = ignore_eos;
    request->skip_special = skip_special;
    return 0;
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
