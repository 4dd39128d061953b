/* SPDX-License-Identifier: Apache-2.0
 *
 * Chat templates of model files: every conversation of tests/data/chat_template_smollm2.json as jinja2 renders it (the
 * ids need the real model: test_tokenizer_model), files without a template, or with a wrong one, or several.
 */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>

#include <jansson.h>
#include <stdlib.h>
#include <string.h>

#include "engine/chat_template.h"
#include "tests/unit/tiny_llama.h"

static json_t *load_fixture(void) {
    char path[4096];
    const char *folder = getenv("DISTILLCACHE_TEST_DATA");
    assert_non_null(folder);
    snprintf(path, sizeof path, "%s/chat_template_smollm2.json", folder);
    json_t *fixture = json_load_file(path, 0, NULL);
    assert_non_null(fixture);
    return fixture;
}

/* A file with a tokenizer and these pairs of strings, which end with NULL. */
struct chat_file {
    struct gguf *gguf;
    uint8_t *bytes;
    struct tokenizer *tokenizer;
};

static struct chat_file open_file(const char *const *pairs) {
    struct tiny_llama options = tiny_llama_default();
    struct gguf_writer *writer = gguf_writer_create();
    struct chat_file file;
    size_t bytes;
    gguf_writer_string(writer, "general.architecture", "llama");
    for (size_t i = 0; pairs[i] != NULL; i += 2)
        gguf_writer_string(writer, pairs[i], pairs[i + 1]);
    tiny_llama_write_tokenizer(writer, &options);
    file.bytes = gguf_writer_finish(writer, &bytes);
    file.gguf = gguf_open_memory(file.bytes, bytes, "test", NULL);
    assert_non_null(file.gguf);
    file.tokenizer = tokenizer_create(file.gguf, NULL);
    assert_non_null(file.tokenizer);
    return file;
}

static void close_file(struct chat_file *file) {
    tokenizer_free(file->tokenizer);
    gguf_free(file->gguf);
    free(file->bytes);
}

static void check_case(const struct chat_template *template, const json_t *one) {
    const struct chat_input input = {.messages = json_object_get(one, "messages"),
        .add_generation_prompt = json_is_true(json_object_get(one, "add_generation_prompt"))};
    const json_t *prompt = json_object_get(one, "prompt");
    struct template_text text;
    assert_int_equal(chat_template_render(template, &input, &text, NULL), 0);
    assert_int_equal(text.bytes, json_string_length(prompt));
    assert_string_equal(text.text, json_string_value(prompt));
    template_text_free(&text);
}

static void renders_every_case(void **state) {
    (void)state;
    json_t *fixture = load_fixture(), *one;
    json_t *cases = json_object_get(fixture, "cases");
    const char *source = json_string_value(json_object_get(fixture, "template"));
    struct chat_file file = open_file((const char *[]){"tokenizer.chat_template", source, NULL});
    struct chat_template *template = chat_template_open(file.gguf, file.tokenizer, NULL);
    size_t i;
    assert_non_null(template);
    assert_int_equal(json_array_size(cases), 34);
    json_array_foreach(cases, i, one) check_case(template, one);
    chat_template_free(template);
    close_file(&file);
    json_decref(fixture);
}

static void assert_refused(const char *const *pairs, const char *why) {
    struct chat_file file = open_file(pairs);
    struct error error = {0};
    assert_null(chat_template_open(file.gguf, file.tokenizer, &error));
    assert_int_equal(error.code, ERROR_UNSUPPORTED);
    if (strstr(error.message, why) == NULL)
        fail_msg("\"%s\" does not say \"%s\"", error.message, why);
    close_file(&file);
}

static void refuses_what_is_none(void **state) {
    (void)state;
    assert_refused((const char *[]){NULL}, "the model has no chat template (tokenizer.chat_template)");
    assert_refused((const char *[]){"tokenizer.chat_template", "a\n{% if %}", NULL}, "line 2: ");
}

/* Roles and contents in the form that a template takes. */
static void knows_roles_and_contents(void **state) {
    (void)state;
    static const char plain[] = "{% for m in messages %}[{{ m.role }}]{{ m.content }}{% endfor %}";
    static const char parts[] = "{% for m in messages %}{% if m.role == 'developer' %}!{% endif %}"
                                "{% for p in m.content %}{{ p.text }}{% endfor %}{% endfor %}";
    struct chat_file file = open_file((const char *[]){NULL});
    struct chat_template *first = chat_template_create(plain, strlen(plain), file.tokenizer, NULL);
    struct chat_template *second = chat_template_create(parts, strlen(parts), file.tokenizer, NULL);
    assert_string_equal(chat_template_role(first, "developer"), "system");
    assert_string_equal(chat_template_role(second, "developer"), "developer");
    assert_string_equal(chat_template_role(second, "tool"), "tool");
    assert_null(chat_template_role(first, "critic"));
    json_t *text = chat_template_content(first, json_string("x")),
           *list = chat_template_content(second, json_string("x"));
    assert_string_equal(json_string_value(text), "x");
    assert_string_equal(json_string_value(json_object_get(json_array_get(list, 0), "text")), "x");
    json_decref(text);
    json_decref(list);
    chat_template_free(first);
    chat_template_free(second);
    close_file(&file);
}

#define KEY "tokenizer.chat_template"

static void assert_chosen(const char *const *pairs, const char *plain, const char *tools, const char *documents) {
    const char *const expected[] = {plain, tools, documents};
    struct chat_file file = open_file(pairs);
    struct chat_template *template = chat_template_open(file.gguf, file.tokenizer, NULL);
    assert_non_null(template);
    for (int i = 0; i < 3; i++) {
        const struct chat_input input = {.messages = NULL};
        struct template_text text;
        assert_int_equal(chat_template_render(chat_template_choose(template, i == 1, i == 2), &input, &text, NULL), 0);
        assert_string_equal(text.text, expected[i]);
        template_text_free(&text);
    }
    chat_template_free(template);
    close_file(&file);
}

/* As converters write a list of templates: the default under the plain key, the others by their names. */
static void chooses_variants(void **state) {
    (void)state;
    assert_chosen((const char *[]){KEY, "a", NULL}, "a", "a", "a");
    assert_chosen((const char *[]){KEY, "a", KEY ".tool_use", "b", KEY ".other", "{% if %}", NULL}, "a", "b", "a");
    assert_chosen((const char *[]){KEY ".rag", "c", KEY ".tool_use", "b", KEY, "a", NULL}, "a", "b", "c");
    assert_chosen((const char *[]){KEY ".default", "d", KEY ".rag", "c", NULL}, "d", "d", "c");
    assert_chosen((const char *[]){KEY, "a", KEY ".default", "d", NULL}, "a", "a", "a");
    assert_chosen((const char *[]){KEY ".tool_use", "b", NULL}, "b", "b", "b");
    assert_refused((const char *[]){KEY ".rag", "c", NULL}, "no chat template");
    assert_refused((const char *[]){KEY, "a", KEY ".tool_use", "\n{% if %}", NULL}, ".tool_use), line 2: ");
}

/* How calls are written is said for all variants. */
static void sets_the_format_of_variants(void **state) {
    (void)state;
    struct chat_file file = open_file((const char *[]){KEY, "a", KEY ".tool_use", "<tool_call>", NULL});
    struct chat_template *template = chat_template_open(file.gguf, file.tokenizer, NULL);
    const struct chat_template *chosen = chat_template_choose(template, true, false);
    assert_int_equal(chat_template_abilities(template)->format, TOOL_FORMAT_UNKNOWN);
    assert_int_equal(chat_template_abilities(chosen)->format, TOOL_FORMAT_HERMES);
    chat_template_set_format(template, TOOL_FORMAT_LLAMA3);
    assert_int_equal(chat_template_abilities(chosen)->format, TOOL_FORMAT_LLAMA3);
    chat_template_free(template);
    close_file(&file);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(renders_every_case),
        cmocka_unit_test(refuses_what_is_none),
        cmocka_unit_test(knows_roles_and_contents),
        cmocka_unit_test(chooses_variants),
        cmocka_unit_test(sets_the_format_of_variants),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
