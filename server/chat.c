/* SPDX-License-Identifier: Apache-2.0 */
#include "server/chat.h"

#include "engine/chat.h"
#include "server/generation.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { TOP_LOGPROBS_MAX = 20 };

static const char *const known[] = {PARAMS_KNOWN, "messages", "max_tokens", "max_completion_tokens", "logprobs",
    "top_logprobs", "parallel_tool_calls", "tool_choice", "function_call", "modalities", NULL};
static const struct field_unsupported unsupported[] = {PARAMS_UNSUPPORTED, {"audio", REFUSE_PRESENT},
    {"web_search_options", REFUSE_PRESENT}, {"reasoning_effort", REFUSE_PRESENT}, {"verbosity", REFUSE_PRESENT},
    {"add_special_tokens", REFUSE_TRUE}, {"echo", REFUSE_TRUE}, {"prompt", REFUSE_PRESENT},
    {"continue_final_message", REFUSE_TRUE}, {"chat_template", REFUSE_PRESENT}, {"documents", REFUSE_NONEMPTY},
    {NULL, REFUSE_PRESENT}};

/* Messages, and the contents that had to be joined from parts. */
struct chat_input {
    struct chat_message *messages;
    char **joined; /* [count], NULL where the JSON's own string is used */
    size_t count;
};

static void chat_input_free(struct chat_input *input) {
    for (size_t i = 0; input->joined != NULL && i < input->count; i++)
        free(input->joined[i]);
    free(input->joined);
    free(input->messages);
}

/* The template's role for an API role, NULL for none. */
static const char *chat_role(const char *role) {
    static const char *const roles[] = {"system", "user", "assistant", "tool", "function"};
    if (strcmp(role, "developer") == 0)
        return "system";
    for (size_t i = 0; i < sizeof roles / sizeof roles[0]; i++)
        if (strcmp(role, roles[i]) == 0)
            return roles[i];
    return NULL;
}

/* Joins text parts; name is "messages[i].content". */
static int chat_join_parts(
    const json_t *parts, const char *name, struct chat_message *message, char **joined, struct fault *fault) {
    struct buffer text = {0};
    size_t i;
    json_t *part;
    json_array_foreach(parts, i, part) {
        const json_t *type = json_object_get(part, "type"), *content = json_object_get(part, "text");
        if (!json_is_string(type) || strcmp(json_string_value(type), "text") != 0 || !json_is_string(content)) {
            buffer_free(&text);
            return fault_invalid(fault, name,
                "%s: part %zu is not {\"type\": \"text\", \"text\": string}; other kinds are not supported by this "
                "server",
                name, i);
        }
        buffer_append(&text, json_string_value(content), json_string_length(content));
    }
    if (text.failed) {
        buffer_free(&text);
        return fault_memory(fault);
    }
    *joined = text.data;
    message->content = text.data == NULL ? "" : text.data;
    message->content_bytes = text.length;
    return 0;
}

static int chat_read_message(
    const json_t *item, size_t number, struct chat_message *message, char **joined, struct fault *fault) {
    char name[48];
    const char *role = NULL;
    snprintf(name, sizeof name, "messages[%zu]", number);
    if (!json_is_object(item))
        return fault_invalid(fault, name, "%s must be an object, not %s", name, field_type(item));
    if (json_is_string(field_get(item, "role")))
        role = chat_role(json_string_value(field_get(item, "role")));
    if (role == NULL) {
        const json_t *given = field_get(item, "role");
        snprintf(name, sizeof name, "messages[%zu].role", number);
        return fault_invalid(fault, name,
            "%s is %.40s; it must be one of system, developer, user, assistant, tool, function", name,
            given == NULL           ? "missing"
            : json_is_string(given) ? json_string_value(given)
                                    : field_type(given));
    }
    message->role = role;
    if (field_get(item, "tool_calls") != NULL && json_array_size(field_get(item, "tool_calls")) > 0)
        return fault_invalid(fault, name, "%s.tool_calls is not supported by this server", name);
    snprintf(name, sizeof name, "messages[%zu].content", number);
    const json_t *content = field_get(item, "content");
    if (json_is_array(content))
        return chat_join_parts(content, name, message, joined, fault);
    if (!json_is_string(content) && !(content == NULL && strcmp(role, "assistant") == 0))
        return fault_invalid(fault, name, "%s must be a string or an array of text parts, not %s", name,
            content == NULL ? "null" : field_type(content));
    message->content = content == NULL ? "" : json_string_value(content);
    message->content_bytes = content == NULL ? 0 : json_string_length(content);
    return 0;
}

static int chat_read_messages(const json_t *body, struct chat_input *input, struct fault *fault) {
    const json_t *messages = field_get(body, "messages");
    if (!json_is_array(messages) || json_array_size(messages) == 0)
        return fault_invalid(fault, "messages", "messages must be an array with at least one message");
    input->count = json_array_size(messages);
    input->messages = calloc(input->count, sizeof *input->messages);
    input->joined = calloc(input->count, sizeof *input->joined);
    if (input->messages == NULL || input->joined == NULL)
        return fault_memory(fault);
    for (size_t i = 0; i < input->count; i++)
        if (chat_read_message(json_array_get(messages, i), i, &input->messages[i], &input->joined[i], fault) != 0)
            return -1;
    return 0;
}

/* Messages -> the request's one prompt. */
static int chat_read_prompt(
    const json_t *body, const struct parse_context *context, struct request *request, struct fault *fault) {
    struct chat_input input = {0};
    struct token_list ids = {0};
    char *prompt = NULL;
    size_t bytes = 0;
    int failed = chat_read_messages(body, &input, fault);
    if (failed != 0)
        goto done;
    request->prompts = calloc(1, sizeof *request->prompts);
    prompt = chat_render(input.messages, input.count, true, &bytes);
    if (request->prompts == NULL || prompt == NULL)
        failed = fault_memory(fault);
    if (failed == 0)
        failed = params_encode(prompt, bytes, false, true, context, &ids, fault);
    if (failed == 0)
        failed = params_add_prompt(request, &ids, context, "messages", fault);
done:
    free(prompt);
    token_list_free(&ids);
    chat_input_free(&input);
    return failed;
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

/* Tools are not there, so only the choices that need none are accepted. */
static int chat_check_tools(const json_t *body, struct fault *fault) {
    static const char *const names[] = {"tool_choice", "function_call"};
    for (size_t i = 0; i < sizeof names / sizeof names[0]; i++) {
        const json_t *choice = field_get(body, names[i]);
        if (choice == NULL)
            continue;
        const char *value = json_is_string(choice) ? json_string_value(choice) : "";
        if (strcmp(value, "none") != 0 && strcmp(value, "auto") != 0)
            return fault_invalid(fault, names[i], "%s is '%.40s'; only none and auto are supported by this server",
                names[i], json_is_string(choice) ? value : field_type(choice));
    }
    const json_t *modalities = field_get(body, "modalities");
    size_t i;
    json_t *modality;
    json_array_foreach(modalities, i, modality) {
        if (!json_is_string(modality) || strcmp(json_string_value(modality), "text") != 0)
            return fault_invalid(fault, "modalities", "modalities other than text are not supported by this server");
    }
    return 0;
}

int chat_parse(const json_t *body, const struct parse_context *context, struct plan *plan, struct fault *fault) {
    plan->chat = true;
    if (fields_check(body, known, unsupported, context->request_id, fault) != 0 ||
        params_read(body, context, plan, fault) != 0 || chat_check_tools(body, fault) != 0 ||
        chat_read_logprobs(body, plan->request, fault) != 0)
        return -1;
    bool present;
    plan->request->max_tokens = context->context;
    if (params_read_limit(body, "max_tokens", context, &plan->request->max_tokens, &present, fault) != 0 ||
        params_read_limit(body, "max_completion_tokens", context, &plan->request->max_tokens, &present, fault) != 0)
        return -1;
    if (context->chat_refusal != NULL)
        return fault_invalid(fault, "messages", "this model cannot chat: %s", context->chat_refusal);
    return chat_read_prompt(body, context, plan->request, fault);
}

void chat_handle(struct exchange *exchange) {
    generation_handle(exchange, chat_parse);
}
