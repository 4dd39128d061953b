/* SPDX-License-Identifier: Apache-2.0
 *
 * Renders templates for tests/template/test_*.py: one JSON object a line on standard input,
 * {"template", "variables": {...}, "input": [names of variables that are a stranger's], "now": Unix time, "steps"},
 * one a line on standard output: {"text", "input": [[begin, end], ...]} (bytes that come from input), or {"error"}.
 */
#include "template/template.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { VARIABLES_MAX = 64 };

static bool is_input(const json_t *names, const char *name) {
    size_t i;
    json_t *one;
    json_array_foreach(names, i, one) {
        if (strcmp(json_string_value(one), name) == 0)
            return true;
    }
    return false;
}

static json_t *input_ranges(const struct template_text *text) {
    json_t *ranges = json_array();
    for (size_t at = 0, end; text->input != NULL && at < text->bytes; at = end) {
        for (end = at; end < text->bytes && !text->input[end] == !text->input[at];)
            end++;
        if (text->input[at])
            json_array_append_new(ranges, json_pack("[I,I]", (json_int_t)at, (json_int_t)end));
    }
    return ranges;
}

static json_t *answer(const json_t *order) {
    struct template_variable variables[VARIABLES_MAX];
    struct template_options options = {.variables = variables};
    struct template_text text = {0};
    struct error error = {0};
    const json_t *source = json_object_get(order, "template"), *names = json_object_get(order, "input");
    const char *name;
    json_t *value;
    json_object_foreach(json_object_get(order, "variables"), name, value) {
        if (options.count < VARIABLES_MAX)
            variables[options.count++] = (struct template_variable){name, value, is_input(names, name), "role"};
    }
    options.now = json_integer_value(json_object_get(order, "now"));
    options.steps_max = (uint64_t)json_integer_value(json_object_get(order, "steps"));
    struct template *template = template_parse(json_string_value(source), json_string_length(source), &error);
    int code = template == NULL ? error.code : template_render(template, &options, &text, &error);
    json_t *reply = code != 0 ? json_pack("{s:s}", "error", error.message)
                              : json_pack("{s:s%,s:o}", "text", text.text, text.bytes, "input", input_ranges(&text));
    template_text_free(&text);
    template_free(template);
    return reply;
}

int main(void) {
    char *line = NULL;
    size_t room = 0;
    ssize_t bytes;
    while ((bytes = getline(&line, &room, stdin)) > 0) {
        json_t *order = json_loadb(line, (size_t)bytes, JSON_ALLOW_NUL, NULL);
        json_t *reply = order == NULL ? NULL : answer(order);
        if (reply == NULL) {
            fprintf(stderr, "template_tool: not an order: %.200s\n", line);
            return 1;
        }
        json_dumpf(reply, stdout, JSON_COMPACT);
        putchar('\n');
        fflush(stdout);
        json_decref(order);
        json_decref(reply);
    }
    free(line);
    return 0;
}
