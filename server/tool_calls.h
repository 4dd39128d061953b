/* SPDX-License-Identifier: Apache-2.0
 *
 * The text of an answer, as it comes, into content and calls of tools: by the format in which the model writes calls
 * (engine/chat_template.h). The same text gives the same result whatever pieces it comes in.
 *
 * A call begins where the format's marker is followed by a JSON object whose "name" is a tool of the request. Its
 * arguments ("arguments" or "parameters") are handed on as the model writes them, up to the brace that closes them:
 * from then on it stays a call, also when the answer ends within. What does not come so far is content, to the last
 * byte. Blanks beside calls are dropped.
 *
 * Objects with the arguments before the name, with arguments in a string, or with none are taken when they are
 * complete.
 */
#ifndef SERVER_TOOL_CALLS_H
#define SERVER_TOOL_CALLS_H

#include "engine/chat_template.h"
#include "server/buffer.h"

/* What a request says about tools. */
struct tool_set {
    enum tool_format format;
    char **names; /* [count] */
    size_t count;
    bool one_call; /* parallel_tool_calls false: calls after the first are dropped */
    bool forced;   /* the answer consists of calls (forced_calls.h); their first opening is in the prompt */
    size_t only;   /* forced: the one that may be called; SIZE_MAX: any */
};
void tool_set_free(struct tool_set *set);

struct tool_call {
    char id[40];
    const char *name; /* of the set */
    struct buffer arguments;
    size_t sent;    /* bytes of arguments that were streamed */
    bool announced; /* id and name were */
};

enum tool_mode {
    TOOL_MODE_TEXT,      /* looking for a marker */
    TOOL_MODE_CALL,      /* an object is expected */
    TOOL_MODE_ARGUMENTS, /* of the last call */
    TOOL_MODE_CLOSE,     /* the rest of a call's object */
    TOOL_MODE_BETWEEN,   /* behind an object: another, or the end of the calls */
    TOOL_MODE_PLAIN,     /* nothing but text follows */
};

/* Braces outside of strings. */
struct brace_scan {
    size_t at; /* bytes looked at */
    uint32_t depth;
    bool in_string, escaped;
};

struct tool_parser {
    const struct tool_set *set;
    enum tool_mode mode;
    struct buffer pending; /* not decided yet */
    size_t marker;         /* MODE_CALL: bytes before the object: blanks, marker, blanks */
    struct brace_scan scan;
    struct buffer content; /* decided; whoever sends it makes it empty */
    struct tool_call *calls;
    size_t calls_count;
    struct buffer dropped; /* arguments of a call that one_call forbids */
    bool dropping;
    bool failed; /* no memory */
};

/* opening: what stands in the prompt of the first call; NULL: nothing. */
void tool_parser_begin(struct tool_parser *parser, const struct tool_set *set, const char *opening);
void tool_parser_push(struct tool_parser *parser, const char *text, size_t bytes);
void tool_parser_finish(struct tool_parser *parser); /* the answer is complete */
void tool_parser_free(struct tool_parser *parser);
bool tool_parser_failed(const struct tool_parser *parser);

#endif
