/* SPDX-License-Identifier: Apache-2.0
 *
 * Every conversation of tests/data/chat_template_smollm2.json: the prompt that jinja2 renders. The ids need the real
 * model: test_tokenizer_model.
 */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>

#include <jansson.h>
#include <stdlib.h>
#include <string.h>

#include "engine/chat.h"
#include "tests/unit/gguf_writer.h"

static json_t *load_fixture(void) {
    char path[4096];
    const char *folder = getenv("DISTILLCACHE_TEST_DATA");
    assert_non_null(folder);
    snprintf(path, sizeof path, "%s/chat_template_smollm2.json", folder);
    json_t *fixture = json_load_file(path, 0, NULL);
    assert_non_null(fixture);
    return fixture;
}

static void check_case(const json_t *one) {
    json_t *list = json_object_get(one, "messages"), *prompt = json_object_get(one, "prompt");
    struct chat_message messages[64];
    size_t count = json_array_size(list), bytes;
    assert_in_range(count, 1, 64);
    for (size_t i = 0; i < count; i++) {
        json_t *content = json_object_get(json_array_get(list, i), "content");
        messages[i].role = json_string_value(json_object_get(json_array_get(list, i), "role"));
        messages[i].content = json_string_value(content);
        messages[i].content_bytes = json_string_length(content);
    }
    bool generation = json_is_true(json_object_get(one, "add_generation_prompt"));
    char *text = chat_render(messages, count, generation, &bytes);
    assert_non_null(text);
    assert_int_equal(bytes, json_string_length(prompt));
    assert_string_equal(text, json_string_value(prompt));
    free(text);
}

static void renders_every_case(void **state) {
    (void)state;
    json_t *fixture = load_fixture(), *one;
    json_t *cases = json_object_get(fixture, "cases");
    size_t i;
    assert_int_equal(json_array_size(cases), 34);
    json_array_foreach(cases, i, one) check_case(one);
    json_decref(fixture);
}

static void renders_nothing_and_nul(void **state) {
    (void)state;
    size_t bytes;
    char *text = chat_render(NULL, 0, false, &bytes);
    assert_string_equal(text, "");
    assert_int_equal(bytes, 0);
    free(text);
    text = chat_render(NULL, 0, true, &bytes);
    assert_string_equal(text, "<|im_start|>assistant\n");
    free(text);
    const struct chat_message message = {"system", "a\0b", 3};
    text = chat_render(&message, 1, false, &bytes);
    assert_int_equal(bytes, strlen("<|im_start|>system\n") + 3 + strlen("<|im_end|>\n"));
    assert_memory_equal(text + strlen("<|im_start|>system\n"), "a\0b<|im_end|>\n", 3 + strlen("<|im_end|>\n"));
    free(text);
}

/* What chat_template_supported says of a file with this template; NULL: with none. */
static int support_of(const char *template) {
    struct gguf_writer *writer = gguf_writer_create();
    gguf_writer_string(writer, "general.architecture", "llama");
    if (template != NULL)
        gguf_writer_string(writer, "tokenizer.chat_template", template);
    size_t size;
    uint8_t *file = gguf_writer_finish(writer, &size);
    struct gguf *gguf = gguf_open_memory(file, size, "test", NULL);
    assert_non_null(gguf);
    struct error error = {0};
    int code = chat_template_supported(gguf, &error);
    assert_int_equal(code, error.code);
    assert_true((code == 0) == (error.message[0] == '\0'));
    gguf_free(gguf);
    free(file);
    return code;
}

static void knows_its_template_only(void **state) {
    (void)state;
    json_t *fixture = load_fixture();
    const char *known = json_string_value(json_object_get(fixture, "template"));
    char changed[1024];
    snprintf(changed, sizeof changed, "%s", known);
    changed[strlen(changed) / 2] ^= 1;
    assert_int_equal(support_of(known), 0);
    assert_int_equal(support_of(changed), ERROR_UNSUPPORTED);
    assert_int_equal(support_of(""), ERROR_UNSUPPORTED);
    assert_int_equal(support_of(NULL), ERROR_UNSUPPORTED);
    json_decref(fixture);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(renders_every_case),
        cmocka_unit_test(renders_nothing_and_nul),
        cmocka_unit_test(knows_its_template_only),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
