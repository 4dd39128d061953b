/* SPDX-License-Identifier: Apache-2.0
 *
 * Answers into content and calls of tools: every case whole, byte by byte, and cut in two at every place, with the same
 * result; every beginning of it loses nothing.
 */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>

#include "server/tool_calls.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static char *names[] = {"get_weather", "f"};

struct example {
    enum tool_format format;
    const char *text;
    const char *content;
    const char *calls; /* "name(arguments)" each */
    bool one_call;
};

static const struct example examples[] = {
    {TOOL_FORMAT_HERMES, "<tool_call>\n{\"name\": \"f\", \"arguments\": {\"a\": \"}\\\"{\"}}\n</tool_call>", "",
        "f({\"a\": \"}\\\"{\"})", false},
    {TOOL_FORMAT_HERMES,
        "Let me see.\n\n<tool_call>{\"name\":\"f\",\"arguments\":{}}</tool_call>\n<tool_call>\n{\"name\": "
        "\"get_weather\", "
        "\"arguments\": {\"place\": \"K\u00f6ln\", \"x\": {\"y\": [1]}}}</tool_call>\n",
        "Let me see.", "f({})get_weather({\"place\": \"K\u00f6ln\", \"x\": {\"y\": [1]}})", false},
    {TOOL_FORMAT_HERMES,
        "<tool_call>{\"name\":\"f\",\"arguments\":{}}</tool_call><tool_call>{\"name\":\"f\",\"arguments\":{\"b\":2}}"
        "</tool_call> and text",
        " and text", "f({})", true},
    /* the arguments first, in a string, missing; other members; a brace forgotten */
    {TOOL_FORMAT_HERMES, "<tool_call>{\"arguments\": {\"a\":1}, \"name\": \"f\"}</tool_call>", "", "f({\"a\": 1})",
        false},
    {TOOL_FORMAT_HERMES, "<tool_call>{\"name\": \"f\", \"arguments\": \"{\\\"a\\\":1}\"}</tool_call>", "",
        "f({\"a\": 1})", false},
    {TOOL_FORMAT_HERMES, "<tool_call>{\"name\": \"f\"}</tool_call>", "", "f({})", false},
    {TOOL_FORMAT_HERMES,
        "<tool_call>{\"id\": \"7\", \"name\": \"f\", \"arguments\": {}, \"z\": {\"n\": 1}}</tool_call>.", ".", "f({})",
        false},
    {TOOL_FORMAT_HERMES, "<tool_call>{\"name\": \"f\", \"arguments\": {}</tool_call> t", " t", "f({})", false},
    /* text that is none */
    {TOOL_FORMAT_HERMES, "a <tool_call> b", "a <tool_call> b", "", false},
    {TOOL_FORMAT_HERMES, " <tool_call>\n{\"name\": \"g\", \"arguments\": {}}</tool_call> ",
        " <tool_call>\n{\"name\": \"g\", \"arguments\": {}}</tool_call> ", "", false},
    {TOOL_FORMAT_HERMES, "<tool_call>{not json}</tool_call>", "<tool_call>{not json}</tool_call>", "", false},
    {TOOL_FORMAT_HERMES, "<tool_call>{\"name\": \"f\", \"arguments\": [1]}</tool_call>",
        "<tool_call>{\"name\": \"f\", \"arguments\": [1]}</tool_call>", "", false},
    {TOOL_FORMAT_HERMES, "1 < 2 <tool <tool_", "1 < 2 <tool <tool_", "", false},
    {TOOL_FORMAT_HERMES, "<tool_call><tool_call>{\"name\":\"f\",\"arguments\":{}}</tool_call>", "<tool_call>", "f({})",
        false},
    {TOOL_FORMAT_HERMES, "{\"name\": \"f\", \"arguments\": {}}", "{\"name\": \"f\", \"arguments\": {}}", "", false},
    {TOOL_FORMAT_HERMES, "  \n ", "  \n ", "", false},
    {TOOL_FORMAT_LLAMA3, "{\"name\": \"f\", \"parameters\": {\"a\": 1}}", "", "f({\"a\": 1})", false},
    {TOOL_FORMAT_LLAMA3,
        "\n<|python_tag|>{\"type\": \"function\", \"name\": \"f\", \"parameters\": {}}; {\"name\": \"get_weather\", "
        "\"parameters\": {\"p\": null}}",
        "", "f({})get_weather({\"p\": null})", false},
    {TOOL_FORMAT_LLAMA3, "Use {\"name\": \"f\", \"parameters\": {}}", "Use {\"name\": \"f\", \"parameters\": {}}", "",
        false},
    {TOOL_FORMAT_LLAMA3, "{\"title\": \"x\", \"parameters\": {}} is JSON",
        "{\"title\": \"x\", \"parameters\": {}} is JSON", "", false},
    {TOOL_FORMAT_LLAMA3, "{\"name\": \"f\", \"parameters\": {}} so", " so", "f({})", false},
    {TOOL_FORMAT_LLAMA3, "{\"name\": \"f\", \"parameters\": {}}; {\"name\": \"g\"}", "; {\"name\": \"g\"}", "f({})",
        false},
    {TOOL_FORMAT_MISTRAL,
        "[TOOL_CALLS][{\"name\": \"f\", \"arguments\": {\"a\": [1, 2]}}, {\"name\": \"get_weather\", "
        "\"arguments\": {}, \"id\": \"abcdefghi\"}]",
        "", "f({\"a\": [1, 2]})get_weather({})", false},
    {TOOL_FORMAT_MISTRAL, "t [TOOL_CALLS] [ {\"name\": \"f\", \"arguments\": {}} ] u", "t u", "f({})", false},
    {TOOL_FORMAT_MISTRAL, "[TOOL_CALLS] none, [1]", "[TOOL_CALLS] none, [1]", "", false},
};
enum { EXAMPLES = sizeof examples / sizeof examples[0] };

/* What the parser has made, in the notation of the examples. */
static void write_result(const struct tool_parser *parser, char *content, char *calls) {
    sprintf(content, "%.*s", (int)parser->content.length, parser->content.data == NULL ? "" : parser->content.data);
    calls[0] = '\0';
    for (size_t i = 0; i < parser->calls_count; i++) {
        const struct tool_call *call = &parser->calls[i];
        assert_true(strlen(call->id) >= 9);
        sprintf(calls + strlen(calls), "%s(%.*s)", call->name, (int)call->arguments.length,
            call->arguments.data == NULL ? "" : call->arguments.data);
    }
}

/* Feeds the text in pieces that end at `cut`, or of one byte each (cut SIZE_MAX). */
static void check(const struct example *example, size_t cut) {
    const struct tool_set set = {.format = example->format, .names = names, .count = 2, .one_call = example->one_call};
    struct tool_parser parser;
    char content[1024], calls[1024];
    size_t bytes = strlen(example->text);
    tool_parser_begin(&parser, &set, NULL);
    if (cut == SIZE_MAX) {
        for (size_t i = 0; i < bytes; i++)
            tool_parser_push(&parser, example->text + i, 1);
    } else {
        tool_parser_push(&parser, example->text, cut);
        tool_parser_push(&parser, example->text + cut, bytes - cut);
    }
    tool_parser_finish(&parser);
    assert_false(tool_parser_failed(&parser));
    write_result(&parser, content, calls);
    if (strcmp(content, example->content) != 0 || strcmp(calls, example->calls) != 0)
        fail_msg("%s, cut at %zd: content '%s' calls '%s'", example->text, (ssize_t)cut, content, calls);
    tool_parser_free(&parser);
}

static void answers_become_content_and_calls(void **state) {
    (void)state;
    for (size_t i = 0; i < EXAMPLES; i++) {
        check(&examples[i], SIZE_MAX);
        for (size_t cut = 0; cut <= strlen(examples[i].text); cut++)
            check(&examples[i], cut);
    }
}

/* An answer may end anywhere: what is no call by then is content; a call that had begun keeps what there is. */
static void ends_within_lose_nothing(void **state) {
    (void)state;
    for (size_t i = 0; i < EXAMPLES; i++) {
        const struct tool_set set = {.format = examples[i].format, .names = names, .count = 2};
        for (size_t bytes = 0; bytes < strlen(examples[i].text); bytes++) {
            struct tool_parser parser;
            tool_parser_begin(&parser, &set, NULL);
            tool_parser_push(&parser, examples[i].text, bytes);
            size_t calls = parser.calls_count;
            tool_parser_finish(&parser);
            assert_int_equal(parser.calls_count, calls);
            if (calls == 0) {
                assert_int_equal(parser.content.length, bytes);
                assert_true(bytes == 0 || memcmp(parser.content.data, examples[i].text, bytes) == 0);
            }
            tool_parser_free(&parser);
        }
    }
}

/* Arguments are handed on before they are complete. */
static void arguments_come_in_pieces(void **state) {
    (void)state;
    const struct tool_set set = {.format = TOOL_FORMAT_HERMES, .names = names, .count = 2};
    static const char begin[] = "<tool_call>{\"name\": \"f\", \"arguments\": {\"a\": \"long";
    struct tool_parser parser;
    tool_parser_begin(&parser, &set, NULL);
    tool_parser_push(&parser, begin, strlen(begin));
    assert_int_equal(parser.calls_count, 1);
    assert_int_equal(parser.calls[0].arguments.length, strlen("{\"a\": \"long"));
    tool_parser_free(&parser);
}

/* What opens the first call is in the prompt; a call that the limit cut before its name is nothing. */
static void forced_calls_are_never_content(void **state) {
    (void)state;
    static const char text[] = "\n{\"name\": \"f\", \"arguments\": {\"a\": 1}}\n</tool_call>\n<tool_call>\n{\"name\": "
                               "\"get_weather\", \"arguments\": {}}\n</tool_call>";
    const struct tool_set set = {.format = TOOL_FORMAT_HERMES, .names = names, .count = 2, .forced = true};
    for (size_t bytes = 0; bytes <= strlen(text); bytes++) {
        struct tool_parser parser;
        char content[1024], calls[1024];
        tool_parser_begin(&parser, &set, "<tool_call>");
        tool_parser_push(&parser, text, bytes);
        tool_parser_finish(&parser);
        write_result(&parser, content, calls);
        assert_string_equal(content, "");
        if (bytes == strlen(text))
            assert_string_equal(calls, "f({\"a\": 1})get_weather({})");
        tool_parser_free(&parser);
    }
}

static void ids_are_what_the_templates_take(void **state) {
    (void)state;
    static const char text[] = "[TOOL_CALLS][{\"name\": \"f\", \"arguments\": {}}";
    const struct tool_set set = {.format = TOOL_FORMAT_MISTRAL, .names = names, .count = 2};
    struct tool_parser parser;
    tool_parser_begin(&parser, &set, NULL);
    tool_parser_push(&parser, text, strlen(text));
    assert_int_equal(parser.calls_count, 1);
    assert_int_equal(strlen(parser.calls[0].id), 9);
    assert_int_equal(strspn(parser.calls[0].id, "0123456789abcdef"), 9);
    tool_parser_free(&parser);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(answers_become_content_and_calls),
        cmocka_unit_test(ends_within_lose_nothing),
        cmocka_unit_test(arguments_come_in_pieces),
        cmocka_unit_test(forced_calls_are_never_content),
        cmocka_unit_test(ids_are_what_the_templates_take),
    };
    return cmocka_run_group_tests_name("server_tools", tests, NULL, NULL);
}
