/* SPDX-License-Identifier: Apache-2.0 */
#include "server/tokenize.h"

#include "server/reply_job.h"
#include "server/server.h"

static void tokenize_write(
    const struct token_list *ids, bool strings, const struct parse_context *context, struct buffer *reply) {
    buffer_string(reply, "{\"tokens\":[");
    for (size_t i = 0; i < ids->count; i++)
        buffer_format(reply, i == 0 ? "%d" : ",%d", ids->ids[i]);
    buffer_format(reply, "],\"count\":%zu,\"max_model_len\":%u", ids->count, context->tokens_max);
    if (strings) {
        buffer_string(reply, ",\"token_strs\":[");
        for (size_t i = 0; i < ids->count; i++) {
            size_t count;
            const char *bytes = tokenizer_token_bytes(context->tokenizer, ids->ids[i], &count);
            if (i > 0)
                buffer_string(reply, ",");
            buffer_json_string(reply, bytes, count);
        }
        buffer_string(reply, "]");
    }
    buffer_string(reply, "}");
}

static int tokenize_run(
    const json_t *body, const struct parse_context *context, struct buffer *reply, struct fault *fault) {
    const json_t *prompt = field_get(body, "prompt"), *content = field_get(body, "content");
    const char *name = prompt != NULL ? "prompt" : "content";
    bool add_special = prompt != NULL, parse_special = true, strings = false;
    if (prompt != NULL && content != NULL)
        return fault_invalid(fault, "content", "only one of prompt and content may be given");
    const json_t *text = prompt != NULL ? prompt : content;
    if (text == NULL)
        return fault_invalid(fault, "prompt", "prompt (or content) is missing");
    if (!json_is_string(text))
        return fault_invalid(fault, name, "%s must be a string", name);
    if (params_check_model(body, context, fault) != 0 || field_boolean(body, "add_special", &add_special, fault) != 0 ||
        field_boolean(body, "add_special_tokens", &add_special, fault) != 0 ||
        field_boolean(body, "parse_special", &parse_special, fault) != 0 ||
        field_boolean(body, "return_token_strs", &strings, fault) != 0)
        return -1;
    struct token_list ids = {0};
    int failed = params_encode(
        json_string_value(text), json_string_length(text), add_special, parse_special, context, &ids, fault);
    if (failed == 0)
        tokenize_write(&ids, strings, context, reply);
    token_list_free(&ids);
    return failed;
}

static int detokenize_run(
    const json_t *body, const struct parse_context *context, struct buffer *reply, struct fault *fault) {
    const json_t *tokens = field_get(body, "tokens");
    if (!json_is_array(tokens))
        return fault_invalid(fault, "tokens", "tokens must be an array of token ids");
    if (params_check_model(body, context, fault) != 0)
        return -1;
    struct token_list ids = {0};
    struct buffer text = {0};
    int failed = json_array_size(tokens) == 0 ? 0 : params_read_tokens(tokens, "tokens", context, &ids, fault);
    bool begins = true; /* nothing but special tokens so far */
    for (size_t i = 0; failed == 0 && i < ids.count; i++) {
        size_t count, skip = begins ? tokenizer_leading_space(context->tokenizer, ids.ids[i]) : 0;
        const char *bytes = tokenizer_token_bytes(context->tokenizer, ids.ids[i], &count);
        buffer_append(&text, bytes + skip, count - skip);
        begins &= tokenizer_is_special(context->tokenizer, ids.ids[i]);
    }
    if (failed == 0 && text.failed)
        failed = fault_memory(fault);
    if (failed == 0) {
        buffer_string(reply, "{\"prompt\":");
        buffer_json_string(reply, text.data, text.length);
        buffer_string(reply, ",\"content\":");
        buffer_json_string(reply, text.data, text.length);
        buffer_string(reply, "}");
    }
    buffer_free(&text);
    token_list_free(&ids);
    return failed;
}

static void write_token(const struct tokenizer *tokenizer, const char *name, int32_t token, struct buffer *out) {
    size_t bytes = 0;
    const char *text = token < 0 ? NULL : tokenizer_token_bytes(tokenizer, token, &bytes);
    buffer_format(out, "\"%s\":", name);
    if (text == NULL)
        buffer_string(out, "null");
    else
        buffer_json_string(out, text, bytes);
    buffer_string(out, ",");
}

void tokenizer_info_handle(struct exchange *exchange) {
    const struct server_model *model = &exchange->server->model;
    struct buffer body = {0};
    buffer_string(&body, "{");
    write_token(model->tokenizer, "bos_token", tokenizer_bos(model->tokenizer), &body);
    write_token(model->tokenizer, "eos_token", tokenizer_eos(model->tokenizer), &body);
    buffer_format(&body, "\"add_bos_token\":%s,\"vocab_size\":%u,\"model_max_length\":%u}",
        tokenizer_adds_bos(model->tokenizer) ? "true" : "false", model->vocabulary, model->tokens_max);
    exchange_json(exchange, 200, &body);
}

void tokenize_handle(struct exchange *exchange) {
    reply_job_start(exchange, tokenize_run);
}

void detokenize_handle(struct exchange *exchange) {
    reply_job_start(exchange, detokenize_run);
}
