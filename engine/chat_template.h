/* SPDX-License-Identifier: Apache-2.0
 *
 * The chat template of a model: from messages to prompt text, and what the template can do, found out by rendering
 * short conversations with it when it is opened.
 *
 * The text comes with marks (template.h): what clients wrote is marked, so that the texts of special tokens in it stay
 * text (tokenizer_encode_marked), while those that the template writes become tokens. Roles are not marked: templates
 * make special tokens of them (<|user|>), and they are of a closed set, which the caller checks (chat_template_role).
 *
 * The server, training and evaluation all write conversations through it, so that a policy is trained and measured on
 * what is served.
 */
#ifndef ENGINE_CHAT_TEMPLATE_H
#define ENGINE_CHAT_TEMPLATE_H

#include "engine/gguf.h"
#include "engine/tokenizer.h"
#include "template/template.h"

#include <stdbool.h>

struct chat_template; /* opaque; any number of threads may render with it */

/* How a model writes its calls of tools. */
enum tool_format {
    TOOL_FORMAT_UNKNOWN,
    TOOL_FORMAT_TEXT,    /* calls are not looked for: they stay text */
    TOOL_FORMAT_HERMES,  /* <tool_call>{"name": ..., "arguments": {...}}</tool_call>, repeated */
    TOOL_FORMAT_LLAMA3,  /* the answer is {"name": ..., "parameters": {...}}, several separated by ";" */
    TOOL_FORMAT_MISTRAL, /* [TOOL_CALLS][{"name": ..., "arguments": {...}}, ...] */
};
/* By its name (hermes, llama3, mistral, text); UNKNOWN for any other. */
enum tool_format tool_format_find(const char *name);

struct chat_abilities {
    bool tools;            /* it writes the tools it is given into the prompt */
    bool developer;        /* it knows the role developer */
    bool parts;            /* it wants contents as arrays of parts, not as strings */
    bool null_content;     /* it takes null as the content of a message with tool calls */
    bool string_arguments; /* it wants a call's arguments as a JSON string, not as an object */
    enum tool_format format;
};

/* The template `source` [bytes]; its bos_token and eos_token are the tokenizer's. ERROR_FORMAT with "line N: ...". */
struct chat_template *chat_template_create(
    const char *source, size_t bytes, const struct tokenizer *tokenizer, struct error *error);
/* That of a model file, with its variants; ERROR_UNSUPPORTED when it has none or one that cannot be read:
 *   tokenizer.chat_template, or .default   the one that is used
 *   tokenizer.chat_template.tool_use       the one for requests with tools; alone in its file, for all
 *   tokenizer.chat_template.rag            the one for requests with documents and no tools
 * (Names as llama.cpp's converter writes them; tool_use is chosen as llama.cpp and transformers do. Those leave rag to
 * callers who ask for it by name.) Others of that form are not used. */
struct chat_template *chat_template_open(
    const struct gguf *gguf, const struct tokenizer *tokenizer, struct error *error);
/* That of a text file. */
struct chat_template *chat_template_read(const char *path, const struct tokenizer *tokenizer, struct error *error);
void chat_template_free(struct chat_template *template); /* NULL allowed */

/* The variant for a request; the template itself where it has none. Borrowed. */
const struct chat_template *chat_template_choose(const struct chat_template *template, bool tools, bool documents);

const struct chat_abilities *chat_template_abilities(const struct chat_template *template);
void chat_template_set_format(struct chat_template *template, enum tool_format format); /* and its variants' */

/* The template's own name of a role (system, developer, user, assistant, tool, function); NULL: it is none of them. */
const char *chat_template_role(const struct chat_template *template, const char *role);
/* A content in the form that the template takes: the text itself, or an array of one part. Takes the reference, and
 * returns one; NULL: no memory, or text is NULL. */
json_t *chat_template_content(const struct chat_template *template, json_t *text);

struct chat_input {
    const json_t *messages;  /* as the template is to see them */
    const json_t *tools;     /* NULL: none */
    const json_t *documents; /* NULL: none */
    const json_t *variables; /* an object: more variables, over all others except messages and tools; NULL: none */
    bool add_generation_prompt;
    int64_t now; /* Unix time */
};
/* Noon of 26 July 2024, UTC: the date that Llama's templates write where they are told none. For conversations that
 * must be the same whenever they are written: those of training and evaluation. */
#define CHAT_FIXED_TIME INT64_C(1721995200)
/* ERROR_FORMAT: the template refuses them ("line N: ..."), or ERROR_MEMORY. */
int chat_template_render(const struct chat_template *template, const struct chat_input *input,
    struct template_text *out, struct error *error);

/* For those who can do without a template unless there are conversations. */
struct chat_source {
    const struct chat_template *template; /* NULL: conversations are refused */
    const char *refusal;                  /* why */
};

#endif
