/* SPDX-License-Identifier: Apache-2.0 */
#include "server/tool_calls.h"

#include "server/http.h"

#include <jansson.h>
#include <stdlib.h>
#include <string.h>

enum { HEADER_BYTES_MAX = 1024, ID_BYTES = 9 };

static const char python_tag[] = "<|python_tag|>", hermes_end[] = "</tool_call>";

void tool_set_free(struct tool_set *set) {
    for (size_t i = 0; i < set->count; i++)
        free(set->names[i]);
    free(set->names);
    *set = (struct tool_set){0};
}

void tool_parser_begin(struct tool_parser *parser, const struct tool_set *set, const char *opening) {
    *parser = (struct tool_parser){.set = set};
    if (opening != NULL)
        buffer_string(&parser->pending, opening);
}

void tool_parser_free(struct tool_parser *parser) {
    for (size_t i = 0; i < parser->calls_count; i++)
        buffer_free(&parser->calls[i].arguments);
    free(parser->calls);
    buffer_free(&parser->pending);
    buffer_free(&parser->content);
    buffer_free(&parser->dropped);
    *parser = (struct tool_parser){0};
}

bool tool_parser_failed(const struct tool_parser *parser) {
    bool failed = parser->failed || parser->pending.failed || parser->content.failed || parser->dropped.failed;
    for (size_t i = 0; i < parser->calls_count; i++)
        failed = failed || parser->calls[i].arguments.failed;
    return failed;
}

/* --- Bytes --- */

static bool is_blank(char c) {
    return c == ' ' || c == '\t' || c == '\n' || c == '\r';
}

static size_t skip_blanks(const struct buffer *text, size_t at) {
    while (at < text->length && is_blank(text->data[at]))
        at++;
    return at;
}

/* Whether `word` is at `at`: 1; 0 if it cannot be, -1 if the text ends before that is known. */
static int sees(const struct buffer *text, size_t at, const char *word) {
    size_t bytes = strlen(word), left = text->length - at;
    if (memcmp(text->data + at, word, left < bytes ? left : bytes) != 0)
        return 0;
    return left < bytes ? -1 : 1;
}

/* Moves the first bytes of what is pending to the content. */
static void release(struct tool_parser *parser, size_t bytes) {
    buffer_append(&parser->content, parser->pending.data, bytes);
    buffer_consume(&parser->pending, bytes);
}

/* Looks at bytes until a brace closes the object that the first one opened; its end, or 0: it is not there yet. */
static size_t scan_braces(struct brace_scan *scan, const struct buffer *text) {
    for (; scan->at < text->length; scan->at++) {
        char c = text->data[scan->at];
        if (scan->in_string) {
            if (scan->escaped)
                scan->escaped = false;
            else if (c == '\\')
                scan->escaped = true;
            else if (c == '"')
                scan->in_string = false;
        } else if (c == '"') {
            scan->in_string = true;
        } else if (c == '{') {
            scan->depth++;
        } else if (c == '}' && --scan->depth == 0) {
            return ++scan->at;
        }
    }
    return 0;
}

/* --- Calls --- */

static const char *set_find(const struct tool_set *set, const char *name, size_t bytes) {
    for (size_t i = 0; i < set->count; i++)
        if (strlen(set->names[i]) == bytes && memcmp(set->names[i], name, bytes) == 0)
            return set->names[i];
    return NULL;
}

static void add_call(struct tool_parser *parser, const char *name) {
    parser->dropping = parser->set->one_call && parser->calls_count > 0;
    if (parser->dropping)
        return;
    struct tool_call *calls = realloc(parser->calls, (parser->calls_count + 1) * sizeof *calls);
    if (calls == NULL) {
        parser->failed = true;
        parser->dropping = true;
        return;
    }
    parser->calls = calls;
    struct tool_call *call = &calls[parser->calls_count++];
    *call = (struct tool_call){.name = name};
    if (parser->set->format == TOOL_FORMAT_MISTRAL) /* its template takes ids of nine letters and digits only */
        http_make_id(call->id, ID_BYTES + 1, "");
    else
        http_make_id(call->id, sizeof call->id, "call_");
}

static struct buffer *arguments_of(struct tool_parser *parser) {
    if (parser->dropping) {
        parser->dropped.length = 0;
        return &parser->dropped;
    }
    return &parser->calls[parser->calls_count - 1].arguments;
}

enum header { HEADER_MORE, HEADER_CALL, HEADER_WHOLE };

/* A JSON string without escapes at `at`: its text and where it ends. HEADER_CALL: there is one. */
static enum header read_key(const struct buffer *text, size_t at, size_t *begin, size_t *end) {
    if (at >= text->length)
        return HEADER_MORE;
    if (text->data[at] != '"')
        return HEADER_WHOLE;
    *begin = at + 1;
    for (*end = *begin; *end < text->length; ++*end) {
        if (text->data[*end] == '"')
            return HEADER_CALL;
        if (text->data[*end] == '\\')
            return HEADER_WHOLE;
    }
    return HEADER_MORE;
}

static bool key_is(const struct buffer *text, size_t begin, size_t end, const char *key) {
    return strlen(key) == end - begin && memcmp(text->data + begin, key, end - begin) == 0;
}

/* Reads the object at `at` up to the brace with which the arguments begin (*arguments), the name being known by then.
 * HEADER_WHOLE: it is not of this form; it is looked at again when it is complete. */
static enum header read_header(
    const struct buffer *text, size_t at, const struct tool_set *set, const char **name, size_t *arguments) {
    size_t begin, end;
    *name = NULL;
    for (at++;;) {
        at = skip_blanks(text, at);
        enum header found = read_key(text, at, &begin, &end);
        if (found != HEADER_CALL)
            return found;
        bool is_name = key_is(text, begin, end, "name");
        bool is_arguments = key_is(text, begin, end, "arguments") || key_is(text, begin, end, "parameters");
        at = skip_blanks(text, end + 1);
        if (at >= text->length)
            return HEADER_MORE;
        if (text->data[at] != ':')
            return HEADER_WHOLE;
        at = skip_blanks(text, at + 1);
        if (at >= text->length)
            return HEADER_MORE;
        if (is_arguments) {
            *arguments = at;
            return *name != NULL && text->data[at] == '{' ? HEADER_CALL : HEADER_WHOLE;
        }
        found = read_key(text, at, &begin, &end);
        if (found != HEADER_CALL)
            return found;
        if (is_name && (*name = set_find(set, text->data + begin, end - begin)) == NULL)
            return HEADER_WHOLE;
        at = skip_blanks(text, end + 1);
        if (at >= text->length)
            return HEADER_MORE;
        if (text->data[at++] != ',')
            return HEADER_WHOLE;
    }
}

/* The arguments of a complete object, as a text that the caller frees; NULL: it is no call of a tool. */
static char *whole_arguments(const struct tool_set *set, const char *text, size_t bytes, const char **name) {
    json_t *object = json_loadb(text, bytes, JSON_ALLOW_NUL, NULL), *read = NULL;
    const char *given = json_string_value(json_object_get(object, "name"));
    const json_t *arguments = json_object_get(object, "arguments");
    char *result = NULL;
    *name = given == NULL ? NULL : set_find(set, given, strlen(given));
    if (arguments == NULL)
        arguments = json_object_get(object, "parameters");
    if (json_is_string(arguments))
        arguments = read =
            json_loadb(json_string_value(arguments), json_string_length(arguments), JSON_ALLOW_NUL, NULL);
    else if (arguments == NULL || json_is_null(arguments))
        arguments = read = json_object();
    if (*name != NULL && json_is_object(arguments))
        result = json_dumps(arguments, JSON_PRESERVE_ORDER);
    json_decref(read);
    json_decref(object);
    return result;
}

/* --- Modes: each returns whether it got on --- */

static bool refuse_call(struct tool_parser *parser) {
    bool llama = parser->set->format == TOOL_FORMAT_LLAMA3;
    /* Behind a marker that leads nowhere another one may begin. */
    release(parser, parser->marker < parser->pending.length ? parser->marker : parser->pending.length);
    parser->mode = llama ? TOOL_MODE_PLAIN : TOOL_MODE_TEXT;
    return true;
}

static bool take_whole(struct tool_parser *parser) {
    const char *name;
    size_t end = scan_braces(&parser->scan, &parser->pending);
    if (end == 0)
        return false;
    char *arguments = whole_arguments(parser->set, parser->pending.data + parser->marker, end - parser->marker, &name);
    if (arguments == NULL)
        return refuse_call(parser);
    add_call(parser, name);
    buffer_string(arguments_of(parser), arguments);
    free(arguments);
    buffer_consume(&parser->pending, end);
    parser->mode = TOOL_MODE_BETWEEN;
    return true;
}

static bool step_call(struct tool_parser *parser) {
    const struct buffer *text = &parser->pending;
    const char *name;
    size_t arguments;
    if (parser->marker >= text->length)
        return false;
    if (text->data[parser->marker] != '{')
        return refuse_call(parser);
    enum header header = read_header(text, parser->marker, parser->set, &name, &arguments);
    if (header == HEADER_MORE && text->length - parser->marker < HEADER_BYTES_MAX)
        return false;
    if (header != HEADER_CALL)
        return take_whole(parser);
    add_call(parser, name);
    buffer_consume(&parser->pending, arguments);
    parser->scan = (struct brace_scan){0};
    parser->mode = TOOL_MODE_ARGUMENTS;
    return true;
}

static bool step_arguments(struct tool_parser *parser) {
    size_t end = scan_braces(&parser->scan, &parser->pending);
    size_t bytes = end > 0 ? end : parser->pending.length;
    buffer_append(arguments_of(parser), parser->pending.data, bytes);
    buffer_consume(&parser->pending, bytes);
    parser->scan.at = 0;
    if (end == 0)
        return false;
    parser->scan = (struct brace_scan){.depth = 1};
    parser->mode = TOOL_MODE_CLOSE;
    return true;
}

/* The rest of the object: a brace, or more members, which are passed over. A model that forgets the brace is forgiven.
 */
static bool step_close(struct tool_parser *parser) {
    size_t at = skip_blanks(&parser->pending, 0);
    if (at >= parser->pending.length)
        return false;
    char c = parser->pending.data[at];
    size_t end = at;
    if (c == '}') {
        end = at + 1;
    } else if (c == ',') {
        end = scan_braces(&parser->scan, &parser->pending);
        if (end == 0)
            return false;
    }
    if (c == '}' || c == ',')
        buffer_consume(&parser->pending, end);
    parser->mode = TOOL_MODE_BETWEEN;
    return true;
}

/* Behind an object: the format's word for "another one" or "the end". */
static bool step_between(struct tool_parser *parser) {
    const struct buffer *text = &parser->pending;
    bool hermes = parser->set->format == TOOL_FORMAT_HERMES, llama = parser->set->format == TOOL_FORMAT_LLAMA3;
    size_t at = skip_blanks(text, 0);
    if (at >= text->length)
        return false;
    int another = hermes ? 0 : sees(text, at, llama ? ";" : ",");
    int end = hermes ? sees(text, at, hermes_end) : llama ? 0 : sees(text, at, "]");
    if (end < 0)
        return false;
    if (another > 0) {
        parser->marker = skip_blanks(text, at + 1);
        if (parser->marker >= text->length)
            return false;
        parser->scan = (struct brace_scan){.at = parser->marker};
        parser->mode = TOOL_MODE_CALL;
        return true;
    }
    if (end > 0)
        buffer_consume(&parser->pending, at + (hermes ? strlen(hermes_end) : 1));
    parser->mode = llama ? TOOL_MODE_PLAIN : TOOL_MODE_TEXT;
    return true;
}

/* Llama 3: an answer that is a call begins with it. */
static bool step_answer(struct tool_parser *parser) {
    const struct buffer *text = &parser->pending;
    size_t at = skip_blanks(text, 0);
    if (at >= text->length)
        return false;
    int tag = sees(text, at, python_tag);
    if (tag < 0)
        return false;
    if (tag > 0)
        at = skip_blanks(text, at + strlen(python_tag));
    if (at >= text->length)
        return false;
    parser->marker = at;
    parser->scan = (struct brace_scan){.at = at};
    parser->mode = text->data[at] == '{' ? TOOL_MODE_CALL : TOOL_MODE_PLAIN;
    return true;
}

/* Behind the marker at `at`: where an object may begin, 0: not known yet. */
static size_t behind_marker(const struct tool_parser *parser, size_t at, size_t marker_bytes) {
    const struct buffer *text = &parser->pending;
    at = skip_blanks(text, at + marker_bytes);
    if (parser->set->format == TOOL_FORMAT_MISTRAL && at < text->length && text->data[at] == '[')
        at = skip_blanks(text, at + 1);
    return at < text->length ? at : 0;
}

static bool step_text(struct tool_parser *parser) {
    const struct buffer *text = &parser->pending;
    const char *marker = parser->set->format == TOOL_FORMAT_HERMES ? "<tool_call>" : "[TOOL_CALLS]";
    size_t at = 0, blanks = 0; /* blanks: where those before `at` begin */
    int found = 0;
    if (parser->set->format == TOOL_FORMAT_LLAMA3)
        return step_answer(parser);
    for (; at < text->length; at++) {
        found = text->data[at] == marker[0] ? sees(text, at, marker) : 0;
        if (found != 0)
            break;
        blanks = is_blank(text->data[at]) ? blanks : at + 1;
    }
    release(parser, blanks);
    at -= blanks;
    if (found <= 0)
        return false;
    parser->marker = behind_marker(parser, at, strlen(marker));
    if (parser->marker == 0)
        return false;
    parser->scan = (struct brace_scan){.at = parser->marker};
    parser->mode = TOOL_MODE_CALL;
    return true;
}

static bool step_plain(struct tool_parser *parser) {
    bool blank = skip_blanks(&parser->pending, 0) == parser->pending.length;
    if (parser->calls_count == 0 || !blank)
        release(parser, parser->pending.length);
    return false;
}

static bool step(struct tool_parser *parser) {
    switch (parser->mode) {
    case TOOL_MODE_TEXT:
        return step_text(parser);
    case TOOL_MODE_CALL:
        return step_call(parser);
    case TOOL_MODE_ARGUMENTS:
        return step_arguments(parser);
    case TOOL_MODE_CLOSE:
        return step_close(parser);
    case TOOL_MODE_BETWEEN:
        return step_between(parser);
    case TOOL_MODE_PLAIN:
        break;
    }
    return step_plain(parser);
}

void tool_parser_push(struct tool_parser *parser, const char *text, size_t bytes) {
    buffer_append(&parser->pending, text, bytes);
    while (parser->pending.length > 0 && !tool_parser_failed(parser) && step(parser))
        ;
}

void tool_parser_finish(struct tool_parser *parser) {
    bool blank = skip_blanks(&parser->pending, 0) == parser->pending.length;
    bool ending = parser->mode == TOOL_MODE_BETWEEN && !blank &&
                  sees(&parser->pending, skip_blanks(&parser->pending, 0), hermes_end) < 0;
    if (!(blank && parser->calls_count > 0) && !ending && !parser->set->forced) /* the limit cut a call's beginning */
        release(parser, parser->pending.length);
    parser->pending.length = 0;
}
