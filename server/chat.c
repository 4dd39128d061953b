/* SPDX-License-Identifier: Apache-2.0 */
#include "server/chat.h"

#include "server/chat_messages.h"
#include "server/forced_calls.h"
#include "server/generation.h"
#include "server/reply_job.h"

#include <stdlib.h>
#include <string.h>

enum { TOP_LOGPROBS_MAX = 20 };

static const char *const known[] = {PARAMS_KNOWN, "messages", "max_tokens", "max_completion_tokens", "logprobs",
    "top_logprobs", "parallel_tool_calls", "tools", "tool_choice", "function_call", "modalities", "documents",
    "add_special_tokens", "add_generation_prompt", "continue_final_message", "chat_template_kwargs", NULL};
static const struct field_unsupported unsupported[] = {PARAMS_UNSUPPORTED, {"audio", REFUSE_PRESENT},
    {"web_search_options", REFUSE_PRESENT}, {"reasoning_effort", REFUSE_PRESENT}, {"verbosity", REFUSE_PRESENT},
    {"echo", REFUSE_TRUE}, {"prompt", REFUSE_PRESENT}, {"chat_template", REFUSE_PRESENT}, {NULL, REFUSE_PRESENT}};

/* The texts between which a format writes calls: as special tokens they would be left out of the answer. */
static void chat_keep_markers(enum tool_format format, const struct parse_context *context, struct request *request) {
    static const struct {
        enum tool_format format;
        const char *text;
    } markers[] = {{TOOL_FORMAT_HERMES, "<tool_call>"}, {TOOL_FORMAT_HERMES, "</tool_call>"},
        {TOOL_FORMAT_LLAMA3, "<|python_tag|>"}, {TOOL_FORMAT_MISTRAL, "[TOOL_CALLS]"}};
    for (size_t i = 0; i < sizeof markers / sizeof markers[0]; i++) {
        struct token_list ids = {0};
        const char *text = markers[i].text;
        bool one = markers[i].format == format &&
                   tokenizer_encode(context->tokenizer, text, strlen(text), true, &ids, NULL) == 0 && ids.count == 1;
        if (one && request->kept_special_count < KEPT_SPECIAL_MAX)
            request->kept_special[request->kept_special_count++] = ids.ids[0];
        token_list_free(&ids);
    }
}

/* The prompt's tokens. Templates write the BOS token themselves; with add_special it is put in front of those that do
 * not. */
static int chat_encode(const struct template_text *text, bool add_special, const struct parse_context *context,
    struct token_list *ids, struct fault *fault) {
    int32_t bos = tokenizer_bos(context->tokenizer);
    if (params_encode_marked(text, context, ids, fault) != 0)
        return -1;
    if (add_special && bos >= 0 && (ids->count == 0 || ids->ids[0] != bos)) {
        if (token_list_append(ids, bos) != 0)
            return fault_memory(fault);
        memmove(ids->ids + 1, ids->ids, (ids->count - 1) * sizeof *ids->ids);
        ids->ids[0] = bos;
    }
    if (ids->count == 0)
        return fault_invalid(fault, "messages", "the chat template makes an empty prompt of these messages");
    return 0;
}

/* Messages -> the request's one prompt. */
static int chat_read_prompt(
    const json_t *body, const struct parse_context *context, struct plan *plan, struct fault *fault) {
    struct template_text text = {0};
    struct token_list ids = {0};
    bool add_special = false;
    if (field_boolean(body, "add_special_tokens", &add_special, fault) != 0 ||
        chat_messages_render(body, context, &plan->tools, &text, fault) != 0)
        goto failed;
    plan->request->prompts = calloc(1, sizeof *plan->request->prompts);
    if (plan->request->prompts == NULL) {
        fault_memory(fault);
        goto failed;
    }
    if (chat_encode(&text, add_special, context, &ids, fault) != 0 ||
        params_add_prompt(plan->request, &ids, context, "messages", fault) != 0)
        goto failed;
    if (plan->tools.forced &&
        forced_calls_compile(field_get(body, "tools"), &plan->tools, context, plan->request, fault) != 0)
        goto failed;
    if (plan->tools.count > 0)
        chat_keep_markers(plan->tools.format, context, plan->request);
    template_text_free(&text);
    token_list_free(&ids);
    return 0;
failed:
    template_text_free(&text);
    token_list_free(&ids);
    return -1;
}

static int chat_read_logprobs(const json_t *body, struct request *request, struct fault *fault) {
    bool logprobs = false;
    int64_t top = 0;
    if (field_boolean(body, "logprobs", &logprobs, fault) != 0 ||
        field_integer(body, "top_logprobs", 0, TOP_LOGPROBS_MAX, &top, fault) != 0)
        return -1;
    if (top > 0 && !logprobs)
        return fault_invalid(
            fault, "top_logprobs", "top_logprobs is %lld; it is only allowed when logprobs is true", (long long)top);
    request->logprobs = logprobs ? (int)top : -1;
    return 0;
}

static int chat_check_modalities(const json_t *body, struct fault *fault) {
    size_t i;
    json_t *modality;
    json_array_foreach(field_get(body, "modalities"), i, modality) {
        if (!json_is_string(modality) || strcmp(json_string_value(modality), "text") != 0)
            return fault_invalid(fault, "modalities", "modalities other than text are not supported by this server");
    }
    return 0;
}

int chat_parse(const json_t *body, const struct parse_context *context, struct plan *plan, struct fault *fault) {
    plan->chat = true;
    if (fields_check(body, known, unsupported, context->request_id, fault) != 0 ||
        params_read(body, context, plan, fault) != 0 || chat_check_modalities(body, fault) != 0 ||
        chat_read_logprobs(body, plan->request, fault) != 0)
        return -1;
    bool present;
    plan->request->max_tokens = context->context;
    if (params_read_limit(body, "max_tokens", context, &plan->request->max_tokens, &present, fault) != 0 ||
        params_read_limit(body, "max_completion_tokens", context, &plan->request->max_tokens, &present, fault) != 0)
        return -1;
    return chat_read_prompt(body, context, plan, fault);
}

void chat_handle(struct exchange *exchange) {
    generation_handle(exchange, chat_parse);
}

/* --- /apply-template --- */

static int apply_run(
    const json_t *body, const struct parse_context *context, struct buffer *reply, struct fault *fault) {
    struct tool_set tools = {0};
    struct template_text prompt = {0};
    int failed = params_check_model(body, context, fault);
    if (failed == 0)
        failed = chat_messages_render(body, context, &tools, &prompt, fault);
    if (failed == 0) {
        buffer_string(reply, "{\"prompt\":");
        buffer_json_string(reply, prompt.text, prompt.bytes);
        buffer_string(reply, "}");
    }
    tool_set_free(&tools);
    template_text_free(&prompt);
    return failed;
}

void apply_template_handle(struct exchange *exchange) {
    reply_job_start(exchange, apply_run);
}
