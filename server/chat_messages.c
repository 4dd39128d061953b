/* SPDX-License-Identifier: Apache-2.0 */
#include "server/chat_messages.h"

#include "server/forced_calls.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

enum { TOOLS_MAX = 1024, NAME_BYTES_MAX = 256, VARIABLES_MAX = 32 };

/* --- One message --- */

static int read_role(json_t *message, size_t number, const struct chat_template *template, struct fault *fault) {
    const json_t *given = field_get(message, "role");
    const char *role = json_is_string(given) ? chat_template_role(template, json_string_value(given)) : NULL;
    char name[48];
    if (role != NULL)
        return json_object_set_new(message, "role", json_string(role)) == 0 ? 0 : fault_memory(fault);
    snprintf(name, sizeof name, "messages[%zu].role", number);
    return fault_invalid(fault, name,
        "%s is %.40s; it must be one of system, developer, user, assistant, tool, function", name,
        given == NULL           ? "missing"
        : json_is_string(given) ? json_string_value(given)
                                : field_type(given));
}

/* Text parts joined; name is "messages[i].content". NULL and a fault for other parts. */
static json_t *join_parts(const json_t *parts, const char *name, struct fault *fault) {
    struct buffer text = {0};
    size_t i;
    json_t *part;
    json_array_foreach(parts, i, part) {
        const json_t *type = json_object_get(part, "type"), *content = json_object_get(part, "text");
        if (!json_is_string(type) || strcmp(json_string_value(type), "text") != 0 || !json_is_string(content)) {
            buffer_free(&text);
            fault_invalid(fault, name,
                "%s: part %zu is not {\"type\": \"text\", \"text\": string}; other kinds are not supported by this "
                "server",
                name, i);
            return NULL;
        }
        buffer_append(&text, json_string_value(content), json_string_length(content));
    }
    json_t *joined = text.failed ? NULL : json_stringn(text.data == NULL ? "" : text.data, text.length);
    buffer_free(&text);
    if (joined == NULL)
        fault_memory(fault);
    return joined;
}

/* Content in the form that the template takes. */
static int read_content(json_t *message, size_t number, const struct chat_template *template, struct fault *fault) {
    const struct chat_abilities *abilities = chat_template_abilities(template);
    const json_t *content = field_get(message, "content");
    const char *role = json_string_value(json_object_get(message, "role"));
    bool calls = json_array_size(field_get(message, "tool_calls")) > 0;
    json_t *text;
    char name[48];
    snprintf(name, sizeof name, "messages[%zu].content", number);
    if (content == NULL && strcmp(role, "assistant") == 0) {
        if (calls && abilities->null_content)
            return json_object_set_new(message, "content", json_null()) == 0 ? 0 : fault_memory(fault);
        text = json_string("");
    } else if (json_is_array(content)) {
        text = join_parts(content, name, fault);
        if (text == NULL)
            return -1;
    } else if (json_is_string(content)) {
        text = json_incref((json_t *)content);
    } else {
        return fault_invalid(fault, name, "%s must be a string or an array of text parts, not %s", name,
            content == NULL ? "null" : field_type(content));
    }
    if (abilities->parts && json_is_array(content)) {
        json_decref(text);
        return 0;
    }
    text = chat_template_content(template, text);
    return text != NULL && json_object_set_new(message, "content", text) == 0 ? 0 : fault_memory(fault);
}

/* The arguments of a call as an object or a string, whichever the template takes. */
static json_t *convert_arguments(const json_t *arguments, bool as_string) {
    if (as_string == json_is_string(arguments))
        return json_incref((json_t *)arguments);
    if (!as_string) {
        json_t *read = json_loadb(
            json_string_value(arguments), json_string_length(arguments), JSON_ALLOW_NUL | JSON_REJECT_DUPLICATES, NULL);
        return json_is_object(read) ? read : (json_decref(read), json_incref((json_t *)arguments));
    }
    char *written = json_dumps(arguments, JSON_PRESERVE_ORDER);
    json_t *text = written == NULL ? NULL : json_string(written);
    free(written);
    return text;
}

/* {id, type, function: {name, arguments}} */
static json_t *read_call(const json_t *call, const char *name, bool as_string, struct fault *fault) {
    const json_t *function = field_get(call, "function"), *arguments = field_get(function, "arguments");
    if (!json_is_string(field_get(function, "name")) || (!json_is_string(arguments) && !json_is_object(arguments))) {
        fault_invalid(fault, name,
            "%s: each must be {\"id\", \"type\": \"function\", \"function\": {\"name\", \"arguments\"}}, the arguments "
            "a string of JSON or an object",
            name);
        return NULL;
    }
    json_t *copy = json_copy((json_t *)call), *inner = json_copy((json_t *)function);
    json_t *converted = convert_arguments(arguments, as_string);
    bool done = copy != NULL && inner != NULL && converted != NULL &&
                json_object_set(inner, "arguments", converted) == 0 && json_object_set(copy, "function", inner) == 0;
    json_decref(inner);
    json_decref(converted);
    if (done)
        return copy;
    json_decref(copy);
    fault_memory(fault);
    return NULL;
}

static int read_calls(json_t *message, size_t number, const struct chat_abilities *abilities, struct fault *fault) {
    const json_t *calls = field_get(message, "tool_calls");
    char name[48];
    size_t i;
    json_t *call;
    if (calls == NULL || json_array_size(calls) == 0) {
        json_object_del(message, "tool_calls");
        snprintf(name, sizeof name, "messages[%zu].tool_calls", number);
        return calls == NULL || json_is_array(calls) ? 0 : fault_invalid(fault, name, "%s must be an array", name);
    }
    snprintf(name, sizeof name, "messages[%zu].tool_calls", number);
    json_t *list = json_array();
    json_array_foreach(calls, i, call) {
        json_t *read = read_call(call, name, abilities->string_arguments, fault);
        if (read == NULL || json_array_append_new(list, read) != 0) {
            json_decref(list);
            return read == NULL ? -1 : fault_memory(fault);
        }
    }
    return json_object_set_new(message, "tool_calls", list) == 0 ? 0 : fault_memory(fault);
}

/* A copy of the message for the template, added to the list. */
static int read_message(
    const json_t *item, size_t number, const struct chat_template *template, json_t *list, struct fault *fault) {
    char name[48];
    snprintf(name, sizeof name, "messages[%zu]", number);
    if (!json_is_object(item))
        return fault_invalid(fault, name, "%s must be an object, not %s", name, field_type(item));
    json_t *message = json_copy((json_t *)item);
    if (message == NULL || json_array_append_new(list, message) != 0)
        return fault_memory(fault);
    if (read_role(message, number, template, fault) != 0 || read_content(message, number, template, fault) != 0)
        return -1;
    return read_calls(message, number, chat_template_abilities(template), fault);
}

static json_t *read_messages(const json_t *body, const struct chat_template *template, struct fault *fault) {
    const json_t *messages = field_get(body, "messages");
    size_t i;
    json_t *item, *list = json_array();
    if (!json_is_array(messages) || json_array_size(messages) == 0) {
        fault_invalid(fault, "messages", "messages must be an array with at least one message");
        json_decref(list);
        return NULL;
    }
    json_array_foreach(messages, i, item) {
        if (read_message(item, i, template, list, fault) != 0) {
            json_decref(list);
            return NULL;
        }
    }
    return list;
}

/* --- Tools --- */

static int read_tool(const json_t *tool, size_t number, struct tool_set *set, struct fault *fault) {
    char parameter[48];
    const json_t *type = field_get(tool, "type"), *name = field_get(field_get(tool, "function"), "name");
    bool function = json_is_string(type) && strcmp(json_string_value(type), "function") == 0;
    snprintf(parameter, sizeof parameter, "tools[%zu]", number);
    if (!function || !json_is_string(name) || json_string_length(name) == 0 ||
        json_string_length(name) > NAME_BYTES_MAX || strlen(json_string_value(name)) != json_string_length(name))
        return fault_invalid(fault, parameter,
            "%s must be {\"type\": \"function\", \"function\": {\"name\": ...}} with a name of 1 to %d bytes",
            parameter, NAME_BYTES_MAX);
    set->names[set->count] = strdup(json_string_value(name));
    if (set->names[set->count] == NULL)
        return fault_memory(fault);
    set->count++;
    return 0;
}

/* The tools that the template is to see; *tools NULL: none. */
static int read_tools(const json_t *body, const struct chat_template *template, struct tool_set *set,
    const json_t **tools, struct fault *fault) {
    const struct chat_abilities *abilities = chat_template_abilities(chat_template_choose(template, true, false));
    const json_t *given = field_get(body, "tools");
    bool wanted, forced, parallel = true;
    const char *only;
    size_t i;
    json_t *tool;
    *tools = NULL;
    if (forced_calls_read_choice(body, &wanted, &forced, &only, fault) != 0 ||
        field_boolean(body, "parallel_tool_calls", &parallel, fault) != 0)
        return -1;
    if (given != NULL && !json_is_array(given))
        return fault_invalid(fault, "tools", "tools must be an array, not %s", field_type(given));
    if (json_array_size(given) > TOOLS_MAX)
        return fault_invalid(
            fault, "tools", "tools has %zu entries; at most %d are allowed", json_array_size(given), TOOLS_MAX);
    set->one_call = !parallel;
    set->names = calloc(json_array_size(given) + 1, sizeof *set->names);
    if (set->names == NULL)
        return fault_memory(fault);
    json_array_foreach(given, i, tool) {
        if (read_tool(tool, i, set, fault) != 0)
            return -1;
    }
    if ((set->count == 0 && !forced) || !wanted) {
        tool_set_free(set);
        return 0;
    }
    if (set->count > 0 && !abilities->tools)
        return fault_invalid(fault, "tools",
            "tools: the chat template of this model has no place for tools; the server's option chat-template can give "
            "it another");
    if (set->count > 0 && abilities->format == TOOL_FORMAT_UNKNOWN)
        return fault_invalid(fault, "tools",
            "tools: how this model writes calls is not known; the server's option tool-call-format says it");
    set->format = abilities->format;
    if (forced_calls_choose(set, forced, only, fault) != 0)
        return -1;
    *tools = given;
    if (set->format == TOOL_FORMAT_TEXT)
        tool_set_free(set);
    return 0;
}

/* --- The prompt --- */

static size_t count_blanks(const char *text, size_t bytes, bool at_end) {
    size_t count = 0;
    while (count < bytes && strchr(" \t\n\r\v\f", text[at_end ? bytes - 1 - count : count]) != NULL &&
           text[at_end ? bytes - 1 - count : count] != '\0')
        count++;
    return count;
}

/* Cuts the text behind the last message's content, blanks at its end included if the template kept them. */
static int cut_behind_last(const json_t *messages, struct template_text *text, struct fault *fault) {
    const json_t *content = json_object_get(json_array_get(messages, json_array_size(messages) - 1), "content");
    if (json_is_array(content))
        content = json_object_get(json_array_get(content, json_array_size(content) - 1), "text");
    const char *last = json_string_value(content);
    size_t bytes = json_string_length(content);
    if (last == NULL)
        return fault_invalid(
            fault, "continue_final_message", "continue_final_message: the last message has no text to continue");
    size_t left = count_blanks(last, bytes, false), right = count_blanks(last, bytes, true);
    size_t trimmed = left == bytes ? 0 : bytes - left - right;
    for (size_t at = text->bytes - (trimmed <= text->bytes ? trimmed : text->bytes) + 1; at > 0; at--) {
        if (trimmed > text->bytes || memcmp(text->text + at - 1, last + left, trimmed) != 0)
            continue;
        size_t end = at - 1 + trimmed;
        if (right <= text->bytes - end && memcmp(text->text + end, last + bytes - right, right) == 0)
            end += trimmed == 0 ? 0 : right;
        text->bytes = end;
        text->text[end] = '\0';
        return 0;
    }
    return fault_invalid(fault, "continue_final_message",
        "continue_final_message: the chat template does not write the last message as it is");
}

static int read_input(const json_t *body, struct chat_input *input, bool *goes_on, struct fault *fault) {
    input->variables = field_get(body, "chat_template_kwargs");
    input->documents = field_get(body, "documents");
    input->now = time(NULL);
    if (field_boolean(body, "continue_final_message", goes_on, fault) != 0)
        return -1;
    input->add_generation_prompt = !*goes_on;
    if (field_boolean(body, "add_generation_prompt", &input->add_generation_prompt, fault) != 0)
        return -1;
    if (*goes_on && input->add_generation_prompt)
        return fault_invalid(
            fault, "continue_final_message", "continue_final_message and add_generation_prompt cannot both be true");
    if (input->variables != NULL &&
        (!json_is_object(input->variables) || json_object_size(input->variables) > VARIABLES_MAX))
        return fault_invalid(fault, "chat_template_kwargs",
            "chat_template_kwargs must be an object with at most %d members", VARIABLES_MAX);
    if (input->documents != NULL && !json_is_array(input->documents))
        return fault_invalid(fault, "documents", "documents must be an array, not %s", field_type(input->documents));
    return 0;
}

int chat_messages_render(const json_t *body, const struct parse_context *context, struct tool_set *tools,
    struct template_text *text, struct fault *fault) {
    struct chat_input input = {0};
    struct error error = {0};
    bool goes_on = false;
    if (context->chat_template == NULL)
        return fault_invalid(fault, "messages", "this model cannot chat: %s",
            context->chat_refusal == NULL ? "it has no chat template" : context->chat_refusal);
    if (read_input(body, &input, &goes_on, fault) != 0 ||
        read_tools(body, context->chat_template, tools, &input.tools, fault) != 0)
        return -1;
    if (tools->forced && !input.add_generation_prompt)
        return fault_invalid(
            fault, "tool_choice", "tool_choice can only force a call where the assistant begins to speak");
    const struct chat_template *template =
        chat_template_choose(context->chat_template, input.tools != NULL, json_array_size(input.documents) > 0);
    json_t *messages = read_messages(body, template, fault);
    if (messages == NULL)
        return -1;
    input.messages = messages;
    int code = chat_template_render(template, &input, text, &error);
    if (code == ERROR_FORMAT)
        code =
            fault_invalid(fault, "messages", "the model's chat template refuses this conversation: %s", error.message);
    else if (code != 0)
        code = fault_memory(fault);
    else if (goes_on)
        code = cut_behind_last(messages, text, fault);
    if (code == 0 && tools->forced)
        code = forced_calls_open(tools, text, fault);
    json_decref(messages);
    return code;
}
