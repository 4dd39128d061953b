/* SPDX-License-Identifier: Apache-2.0 */
#include "server/forced_calls.h"

#include "grammar/grammar.h"

#include <stdlib.h>
#include <string.h>

enum { CALLS_MAX = 32 };

static const struct call_format {
    const char *opening; /* at the end of the prompt */
    struct grammar_calls written;
} formats[] = {
    [TOOL_FORMAT_HERMES] = {"<tool_call>", {.open = "\n",
                                               .begin = "{\"name\": ",
                                               .middle = ", \"arguments\": ",
                                               .end = "}\n</tool_call>",
                                               .between = "\n<tool_call>\n",
                                               .close = ""}},
    [TOOL_FORMAT_LLAMA3] = {"",
        {.open = "", .begin = "{\"name\": ", .middle = ", \"parameters\": ", .end = "}", .between = "; ", .close = ""}},
    [TOOL_FORMAT_MISTRAL] = {"[TOOL_CALLS]", {.open = "[",
                                                 .blank = true,
                                                 .begin = "{\"name\": ",
                                                 .middle = ", \"arguments\": ",
                                                 .end = "}",
                                                 .between = ", ",
                                                 .close = "]"}},
};

/* --- What is asked for --- */

static int read_function(const json_t *choice, const char **name, struct fault *fault) {
    const char *const field = "tool_choice";
    const json_t *type = field_get(choice, "type"), *given = field_get(field_get(choice, "function"), "name");
    if (!json_is_string(type) || strcmp(json_string_value(type), "function") != 0 || !json_is_string(given))
        return fault_invalid(fault, field,
            "%s must be none, auto, required or {\"type\": \"function\", \"function\": {\"name\": ...}}", field);
    *name = json_string_value(given);
    return 0;
}

/* The name that chats had for it before there were tools. */
static int read_old_choice(const json_t *body, struct fault *fault) {
    const json_t *choice = field_get(body, "function_call");
    const char *value = json_is_string(choice) ? json_string_value(choice) : "";
    if (choice == NULL || strcmp(value, "none") == 0 || strcmp(value, "auto") == 0)
        return 0;
    return fault_invalid(fault, "function_call",
        "function_call can only be none or auto; tools and tool_choice force calls on this server");
}

int forced_calls_read_choice(const json_t *body, bool *wanted, bool *forced, const char **name, struct fault *fault) {
    const json_t *choice = field_get(body, "tool_choice");
    const char *value = json_is_string(choice) ? json_string_value(choice) : "";
    *wanted = strcmp(value, "none") != 0;
    *forced = json_is_object(choice) || strcmp(value, "required") == 0;
    *name = NULL;
    if (read_old_choice(body, fault) != 0)
        return -1;
    bool word = !*wanted || strcmp(value, "auto") == 0 || strcmp(value, "required") == 0;
    return choice == NULL || word ? 0 : read_function(choice, name, fault);
}

int forced_calls_choose(struct tool_set *set, bool forced, const char *name, struct fault *fault) {
    set->forced = forced;
    set->only = SIZE_MAX;
    for (size_t i = 0; name != NULL && i < set->count && set->only == SIZE_MAX; i++)
        if (strcmp(set->names[i], name) == 0)
            set->only = i;
    if (forced && set->count == 0)
        return fault_invalid(fault, "tool_choice", "tool_choice asks for a call, but there are no tools");
    if (name != NULL && set->only == SIZE_MAX)
        return fault_invalid(fault, "tool_choice", "tool_choice names '%.64s', which is none of the tools", name);
    if (forced && set->format == TOOL_FORMAT_TEXT)
        return fault_invalid(fault, "tool_choice",
            "tool_choice cannot force a call: how this model writes calls is not known (tool-call-format is text)");
    return 0;
}

/* --- What is made of it --- */

const char *forced_calls_opening(enum tool_format format) {
    return formats[format].opening;
}

int forced_calls_open(const struct tool_set *set, struct template_text *text, struct fault *fault) {
    const char *opening = forced_calls_opening(set->format);
    size_t more = strlen(opening);
    char *grown = realloc(text->text, text->bytes + more + 1);
    if (grown == NULL)
        return fault_memory(fault);
    text->text = grown;
    if (text->input != NULL) {
        uint8_t *marks = realloc(text->input, text->bytes + more + 1);
        if (marks == NULL)
            return fault_memory(fault);
        text->input = marks;
        memset(marks + text->bytes, 0, more);
    }
    memcpy(grown + text->bytes, opening, more + 1);
    text->bytes += more;
    return 0;
}

int forced_calls_compile(const json_t *tools, const struct tool_set *set, const struct parse_context *context,
    struct request *request, struct fault *fault) {
    if (request->grammar != NULL)
        return fault_invalid(
            fault, "tool_choice", "tool_choice cannot force a call where another field gives the answer its form");
    if (context->grammar_vocabulary == NULL)
        return fault_invalid(fault, "tool_choice", "tool_choice: this server cannot force a call");
    struct grammar_calls calls = formats[set->format].written;
    struct grammar_function *functions = calloc(set->count, sizeof *functions);
    if (functions == NULL)
        return fault_memory(fault);
    for (size_t i = 0; i < set->count; i++)
        if (set->only == SIZE_MAX || set->only == i)
            functions[calls.count++] = (struct grammar_function){
                set->names[i], field_get(field_get(json_array_get(tools, i), "function"), "parameters")};
    calls.functions = functions;
    calls.most = set->one_call || set->only != SIZE_MAX ? 1 : CALLS_MAX;
    struct error error = {0};
    request->grammar = grammar_of_calls(&calls, &error);
    free(functions);
    if (request->grammar == NULL)
        return error.code == ERROR_MEMORY ? fault_memory(fault)
                                          : fault_invalid(fault, "tools", "tools: %s", error.message);
    request->grammar_vocabulary = context->grammar_vocabulary;
    return 0;
}
