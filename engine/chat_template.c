/* SPDX-License-Identifier: Apache-2.0 */
#include "engine/chat_template.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { SOURCE_BYTES_MAX = 1 << 20, VARIABLES_MAX = 64, PROBE_STEPS = 1000000, PROBE_BYTES = 1 << 20 };

static const char template_key[] = "tokenizer.chat_template";

struct chat_template {
    struct template *parsed;
    struct chat_abilities abilities;
    json_t *bos, *eos;                    /* NULL: the model has none */
    struct chat_template *tool_use, *rag; /* NULL: there is no such variant */
};

enum tool_format tool_format_find(const char *name) {
    static const char *const names[] = {[TOOL_FORMAT_TEXT] = "text",
        [TOOL_FORMAT_HERMES] = "hermes",
        [TOOL_FORMAT_LLAMA3] = "llama3",
        [TOOL_FORMAT_MISTRAL] = "mistral"};
    for (int i = TOOL_FORMAT_TEXT; i <= TOOL_FORMAT_MISTRAL; i++)
        if (strcmp(names[i], name) == 0)
            return (enum tool_format)i;
    return TOOL_FORMAT_UNKNOWN;
}

/* --- Rendering --- */

/* Variables of the request behind ours: the last of a name wins. */
static size_t add_variables(const json_t *more, struct template_variable *variables, size_t count) {
    const char *name;
    json_t *value;
    json_object_foreach((json_t *)more, name, value) {
        bool ours = strcmp(name, "messages") == 0 || strcmp(name, "tools") == 0;
        if (!ours && count < VARIABLES_MAX)
            variables[count++] = (struct template_variable){name, value, true, NULL};
    }
    return count;
}

static int render(const struct chat_template *template, const struct chat_input *input, uint64_t steps, size_t bytes,
    struct template_text *out, struct error *error) {
    json_t *none = json_null();
    struct template_variable variables[VARIABLES_MAX] = {
        {"messages", input->messages, true, "role"},
        {"tools", input->tools != NULL ? input->tools : none, true, NULL},
        {"documents", input->documents != NULL ? input->documents : none, true, NULL},
        {"add_generation_prompt", input->add_generation_prompt ? json_true() : json_false(), false, NULL},
        {"bos_token", template->bos, false, NULL},
        {"eos_token", template->eos, false, NULL},
    };
    struct template_options options = {.variables = variables,
        .count = add_variables(input->variables, variables, 6),
        .now = input->now,
        .steps_max = steps,
        .bytes_max = bytes};
    return template_render(template->parsed, &options, out, error);
}

int chat_template_render(const struct chat_template *template, const struct chat_input *input,
    struct template_text *out, struct error *error) {
    return render(template, input, 0, 0, out, error);
}

/* --- Messages --- */

const char *chat_template_role(const struct chat_template *template, const char *role) {
    static const char *const roles[] = {"system", "user", "assistant", "tool", "function"};
    if (strcmp(role, "developer") == 0)
        return template->abilities.developer ? "developer" : "system";
    for (size_t i = 0; i < sizeof roles / sizeof roles[0]; i++)
        if (strcmp(role, roles[i]) == 0)
            return roles[i];
    return NULL;
}

json_t *chat_template_content(const struct chat_template *template, json_t *text) {
    return template->abilities.parts ? json_pack("[{s:s,s:o}]", "type", "text", "text", text) : text;
}

/* --- What it can do --- */

/* Renders messages (a JSON text) with tools (one too, or NULL): the text, which the caller frees; NULL: it refuses. */
static char *probe(const struct chat_template *template, const char *messages, const char *tools) {
    json_t *list = json_loads(messages, 0, NULL), *offered = tools == NULL ? NULL : json_loads(tools, 0, NULL);
    struct template_text text = {0};
    const struct chat_input input = {.messages = list, .tools = offered, .add_generation_prompt = true};
    int code = list == NULL || (tools != NULL && offered == NULL)
                   ? -1
                   : render(template, &input, PROBE_STEPS, PROBE_BYTES, &text, NULL);
    json_decref(list);
    json_decref(offered);
    free(text.input);
    return code == 0 ? text.text : NULL;
}

static bool shows(const char *text, const char *part) {
    return text != NULL && strstr(text, part) != NULL;
}

/* Whether the text of messages and tools, as the template writes it, has `part`. */
static bool probe_shows(
    const struct chat_template *template, const char *messages, const char *tools, const char *part) {
    char *text = probe(template, messages, tools);
    bool found = shows(text, part);
    free(text);
    return found;
}

#define PROBE_USER "{\"role\": \"user\", \"content\": \"needle\"}"
#define PROBE_TOOLS                                                                                                    \
    "[{\"type\": \"function\", \"function\": {\"name\": \"needle_tool\", \"description\": \"d\", \"parameters\": "     \
    "{\"type\": \"object\", \"properties\": {}}}}]"
#define PROBE_CALL(content, arguments)                                                                                 \
    "[" PROBE_USER ", {\"role\": \"assistant\", \"content\": " content ", \"tool_calls\": [{\"id\": \"abcdefghi\", "   \
    "\"type\": \"function\", \"function\": {\"name\": \"needle_tool\", \"arguments\": " arguments "}}]}]"

static bool probe_parts(const struct chat_template *template) {
    return !probe_shows(template, "[" PROBE_USER "]", NULL, "needle") &&
           probe_shows(template, "[{\"role\": \"user\", \"content\": [{\"type\": \"text\", \"text\": \"needle\"}]}]",
               NULL, "needle");
}

/* Null where the template takes it and does not write Python's "None". */
static bool probe_null_content(const struct chat_template *template) {
    char *with_null = probe(template, PROBE_CALL("null", "{\"needle_key\": 1}"), PROBE_TOOLS);
    char *with_text = probe(template, PROBE_CALL("\"\"", "{\"needle_key\": 1}"), PROBE_TOOLS);
    bool takes = with_null != NULL && (!shows(with_null, "None") || shows(with_text, "None"));
    free(with_null);
    free(with_text);
    return takes;
}

/* An object is written as JSON by most templates; some put the arguments into the text as they are. */
static bool probe_string_arguments(const struct chat_template *template) {
    static const char written[] = "\"needle_key\"";
    return !probe_shows(template, PROBE_CALL("\"\"", "{\"needle_key\": 1}"), PROBE_TOOLS, written) &&
           probe_shows(template, PROBE_CALL("\"\"", "\"{\\\"needle_key\\\": 1}\""), PROBE_TOOLS, written);
}

/* By the markers that the template itself writes calls with. */
static enum tool_format detect_format(const char *source) {
    if (strstr(source, "<tool_call>") != NULL && strstr(source, "<function=") == NULL &&
        strstr(source, "<arg_key>") == NULL)
        return TOOL_FORMAT_HERMES;
    if (strstr(source, "[TOOL_CALLS]") != NULL && strstr(source, "[ARGS]") == NULL)
        return TOOL_FORMAT_MISTRAL;
    if (strstr(source, "\"parameters\": ") != NULL && strstr(source, "ipython") != NULL)
        return TOOL_FORMAT_LLAMA3;
    return TOOL_FORMAT_UNKNOWN;
}

static void find_abilities(struct chat_template *template, const char *source) {
    struct chat_abilities *abilities = &template->abilities;
    abilities->tools = probe_shows(template, "[" PROBE_USER "]", PROBE_TOOLS, "needle_tool");
    abilities->developer = strstr(source, "developer") != NULL;
    abilities->parts = probe_parts(template);
    abilities->null_content = probe_null_content(template);
    abilities->string_arguments = probe_string_arguments(template);
    abilities->format = detect_format(source);
}

/* --- Opening --- */

static json_t *token_text(const struct tokenizer *tokenizer, int32_t token) {
    size_t bytes;
    if (token < 0)
        return NULL;
    const char *text = tokenizer_token_bytes(tokenizer, token, &bytes);
    return json_stringn(text, bytes);
}

struct chat_template *chat_template_create(
    const char *source, size_t bytes, const struct tokenizer *tokenizer, struct error *error) {
    struct chat_template *template = calloc(1, sizeof *template);
    char *copy = strndup(source, bytes);
    if (template == NULL || copy == NULL) {
        error_set(error, ERROR_MEMORY, "no memory for a chat template");
    } else if ((template->parsed = template_parse(source, bytes, error)) != NULL) {
        template->bos = token_text(tokenizer, tokenizer_bos(tokenizer));
        template->eos = token_text(tokenizer, tokenizer_eos(tokenizer));
        find_abilities(template, copy);
        free(copy);
        return template;
    }
    free(copy);
    chat_template_free(template);
    return NULL;
}

void chat_template_free(struct chat_template *template) {
    if (template == NULL)
        return;
    chat_template_free(template->tool_use);
    chat_template_free(template->rag);
    template_free(template->parsed);
    json_decref(template->bos);
    json_decref(template->eos);
    free(template);
}

/* The template of a key; *template stays NULL where there is no such key. */
static int open_key(const struct gguf *gguf, const char *key, const struct tokenizer *tokenizer,
    struct chat_template **template, struct error *error) {
    struct gguf_string text;
    struct error cause = {0};
    if (gguf_find(gguf, key) == NULL)
        return 0;
    if (gguf_get_string(gguf, key, &text, NULL) != 0)
        return error_set(error, ERROR_UNSUPPORTED, "the model's chat template (%s) is not a string", key);
    *template = chat_template_create(text.text, text.bytes, tokenizer, &cause);
    if (*template == NULL)
        return error_set(error, ERROR_UNSUPPORTED, "the model's chat template (%s), %.300s", key, cause.message);
    return 0;
}

struct chat_template *chat_template_open(
    const struct gguf *gguf, const struct tokenizer *tokenizer, struct error *error) {
    struct chat_template *template = NULL, *tool_use = NULL, *rag = NULL;
    int code = open_key(gguf, template_key, tokenizer, &template, error);
    if (code == 0 && template == NULL)
        code = open_key(gguf, "tokenizer.chat_template.default", tokenizer, &template, error);
    if (code == 0)
        code = open_key(gguf, "tokenizer.chat_template.tool_use", tokenizer, &tool_use, error);
    if (code == 0)
        code = open_key(gguf, "tokenizer.chat_template.rag", tokenizer, &rag, error);
    if (code == 0 && template == NULL && tool_use != NULL) {
        template = tool_use;
        tool_use = NULL;
    }
    if (code == 0 && template != NULL) {
        template->tool_use = tool_use;
        template->rag = rag;
        return template;
    }
    if (code == 0)
        error_set(error, ERROR_UNSUPPORTED, "the model has no chat template (%s)", template_key);
    chat_template_free(template);
    chat_template_free(tool_use);
    chat_template_free(rag);
    return NULL;
}

const struct chat_template *chat_template_choose(const struct chat_template *template, bool tools, bool documents) {
    if (tools)
        return template->tool_use != NULL ? template->tool_use : template;
    return documents && template->rag != NULL ? template->rag : template;
}

struct chat_template *chat_template_read(const char *path, const struct tokenizer *tokenizer, struct error *error) {
    struct chat_template *template = NULL;
    struct error cause = {0};
    FILE *file = fopen(path, "rb");
    char *text = malloc(SOURCE_BYTES_MAX + 1);
    if (file == NULL) {
        error_set(error, ERROR_IO, "chat template %s: %m", path);
    } else if (text == NULL) {
        error_set(error, ERROR_MEMORY, "no memory for the chat template %s", path);
    } else {
        size_t bytes = fread(text, 1, SOURCE_BYTES_MAX + 1, file);
        if (ferror(file))
            error_set(error, ERROR_IO, "chat template %s: cannot be read", path);
        else if ((template = chat_template_create(text, bytes, tokenizer, &cause)) == NULL)
            error_set(error, cause.code, "chat template %s, %.300s", path, cause.message);
    }
    if (file != NULL)
        fclose(file);
    free(text);
    return template;
}

const struct chat_abilities *chat_template_abilities(const struct chat_template *template) {
    return &template->abilities;
}

void chat_template_set_format(struct chat_template *template, enum tool_format format) {
    template->abilities.format = format;
    if (template->tool_use != NULL)
        template->tool_use->abilities.format = format;
}
