/* SPDX-License-Identifier: Apache-2.0
 *
 * The tokenizer of the real model (DISTILLCACHE_TEST_MODEL) against every case of tests/data/tokenizer_smollm2.json.
 */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>

#include <jansson.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "engine/chat_template.h"
#include "engine/tokenizer.h"

static struct gguf *model;
static struct tokenizer *tokenizer;
static json_t *fixture;

static const char *required_variable(const char *name) {
    const char *value = getenv(name);
    if (value == NULL)
        fail_msg("%s is not set: this test needs the real model and tests/data", name);
    return value;
}

static int open_all(void **state) {
    (void)state;
    struct error error = {0};
    char path[4096];
    snprintf(path, sizeof path, "%s/tokenizer_smollm2.json", required_variable("DISTILLCACHE_TEST_DATA"));
    fixture = json_load_file(path, 0, NULL);
    assert_non_null(fixture);
    model = gguf_open(required_variable("DISTILLCACHE_TEST_MODEL"), &error);
    if (model != NULL)
        tokenizer = tokenizer_create(model, &error);
    if (tokenizer == NULL)
        fail_msg("%s", error.message);
    return 0;
}

static int close_all(void **state) {
    (void)state;
    json_decref(fixture);
    tokenizer_free(tokenizer);
    gguf_free(model);
    return 0;
}

static bool equals_ids(const struct token_list *list, const json_t *ids) {
    bool equal = list->count == json_array_size(ids);
    for (size_t i = 0; equal && i < list->count; i++)
        equal = list->ids[i] == json_integer_value(json_array_get(ids, i));
    return equal;
}

/* Encodes and compares with ids, or with others where that is not NULL. */
static void check_encode(const char *text, size_t bytes, bool special, const json_t *ids, const json_t *others) {
    struct token_list list = {0};
    assert_int_equal(token_list_append(&list, -7), 0); /* encoding appends */
    assert_int_equal(tokenizer_encode(tokenizer, text, bytes, special, &list, NULL), 0);
    assert_int_equal(list.ids[0], -7);
    struct token_list added = {list.ids + 1, list.count - 1, 0};
    if (!equals_ids(&added, ids) && (others == NULL || !equals_ids(&added, others))) {
        for (size_t i = 0; i < added.count; i++)
            printf("%d ", added.ids[i]);
        fail_msg("other ids for \"%.*s\"", (int)bytes, text);
    }
    token_list_free(&list);
}

static size_t read_hex(const char *hex, char **out) {
    size_t length = strlen(hex) / 2;
    *out = malloc(length + 1);
    assert_non_null(*out);
    for (size_t i = 0; i < length; i++) {
        unsigned byte;
        assert_int_equal(sscanf(hex + 2 * i, "%2x", &byte), 1);
        (*out)[i] = (char)byte;
    }
    return length;
}

static void encodes_every_case(void **state) {
    (void)state;
    json_t *cases = json_object_get(fixture, "encode"), *one;
    size_t i;
    assert_int_equal(json_array_size(cases), 407);
    json_array_foreach(cases, i, one) {
        json_t *text = json_object_get(one, "text");
        check_encode(json_string_value(text), json_string_length(text),
            json_is_true(json_object_get(one, "parse_special")), json_object_get(one, "ids"), NULL);
    }
}

static void encodes_nul(void **state) {
    (void)state;
    json_t *cases = json_object_get(fixture, "encode_nul"), *one;
    size_t i;
    assert_int_equal(json_array_size(cases), 4);
    json_array_foreach(cases, i, one) {
        char *text;
        size_t bytes = read_hex(json_string_value(json_object_get(one, "text_hex")), &text);
        check_encode(
            text, bytes, json_is_true(json_object_get(one, "parse_special")), json_object_get(one, "ids"), NULL);
        free(text);
    }
}

static void encodes_disputed(void **state) {
    (void)state;
    json_t *cases = json_object_get(fixture, "disputed"), *one;
    size_t i;
    assert_int_equal(json_array_size(cases), 2);
    json_array_foreach(cases, i, one) {
        json_t *text = json_object_get(one, "text");
        check_encode(json_string_value(text), json_string_length(text), false, json_object_get(one, "ids"),
            json_object_get(one, "other_ids"));
    }
}

static void decodes_every_case(void **state) {
    (void)state;
    json_t *cases = json_object_get(fixture, "decode"), *one, *id;
    size_t i, j, bytes;
    assert_int_equal(json_array_size(cases), 137);
    json_array_foreach(cases, i, one) {
        char *expected;
        size_t length = read_hex(json_string_value(json_object_get(one, "bytes_hex")), &expected), at = 0;
        bool render_special = json_is_true(json_object_get(one, "render_special"));
        json_array_foreach(json_object_get(one, "ids"), j, id) {
            int32_t token = (int32_t)json_integer_value(id);
            const char *text = tokenizer_token_bytes(tokenizer, token, &bytes);
            if (!render_special && tokenizer_is_special(tokenizer, token))
                continue;
            assert_true(bytes <= length - at);
            assert_memory_equal(text, expected + at, bytes);
            at += bytes;
        }
        assert_int_equal(at, length);
        free(expected);
    }
}

/* Bytes alone (most are not UTF-8) are their own token; the absent ones are dropped. */
static void encodes_single_bytes(void **state) {
    (void)state;
    json_t *absent = json_object_get(fixture, "absent_bytes"), *entry;
    for (int byte = 0; byte < 256; byte++) {
        bool dropped = false;
        size_t i, bytes;
        json_array_foreach(absent, i, entry) dropped |= json_integer_value(entry) == byte;
        const char text[1] = {(char)byte};
        struct token_list list = {0};
        assert_int_equal(tokenizer_encode(tokenizer, text, 1, false, &list, NULL), 0);
        assert_int_equal(list.count, dropped ? 0 : 1);
        if (!dropped) {
            assert_memory_equal(tokenizer_token_bytes(tokenizer, list.ids[0], &bytes), text, 1);
            assert_int_equal(bytes, 1);
        }
        token_list_free(&list);
    }
}

/* Bytes that are not UTF-8 stand alone; the text around them is cut as if it ended there. */
static void encodes_invalid_bytes(void **state) {
    (void)state;
    struct token_list list = {0}, expected = {0};
    static const char *const parts[] = {"caf", "\xc3", " the", "\xe2", "\x82", "  ", "\x80", "end"};
    char text[64];
    size_t bytes = 0;
    for (size_t i = 0; i < sizeof parts / sizeof parts[0]; i++) {
        size_t length = strlen(parts[i]);
        memcpy(text + bytes, parts[i], length);
        bytes += length;
        assert_int_equal(tokenizer_encode(tokenizer, parts[i], length, false, &expected, NULL), 0);
    }
    assert_int_equal(tokenizer_encode(tokenizer, text, bytes, false, &list, NULL), 0);
    assert_int_equal(list.count, expected.count);
    assert_memory_equal(list.ids, expected.ids, list.count * sizeof *list.ids);
    token_list_free(&list);
    token_list_free(&expected);
}

/* Long pieces finish (a quadratic merge or a recursing pattern would not) and spell the text. */
static void encodes_long_runs(void **state) {
    (void)state;
    static const char *const units[] = {
        "a", " ", "\xf0\x9f\x98\x80", "1", "\n", "ab", "!", "\xcc\x81", "'s", "\xc3", "<|im_start", "<"};
    size_t limit = 1 << 20;
    char *text = malloc(limit + 16);
    assert_non_null(text);
    for (size_t u = 0; u < sizeof units / sizeof units[0]; u++) {
        size_t length = 0, at = 0, bytes;
        for (; length < limit; length += strlen(units[u]))
            memcpy(text + length, units[u], strlen(units[u]));
        struct token_list list = {0};
        assert_int_equal(tokenizer_encode(tokenizer, text, length, true, &list, NULL), 0);
        for (size_t i = 0; i < list.count; i++) {
            const char *token = tokenizer_token_bytes(tokenizer, list.ids[i], &bytes);
            assert_true(bytes <= length - at && memcmp(token, text + at, bytes) == 0);
            at += bytes;
        }
        assert_int_equal(at, length);
        token_list_free(&list);
    }
    free(text);
}

static bool has_special(const json_t *messages) {
    size_t i;
    json_t *message;
    json_array_foreach(messages, i,
        message) if (strstr(json_string_value(json_object_get(message, "content")), "<|") != NULL) return true;
    return false;
}

/* The tokens that the model's own template makes of a conversation: the fixture's, but for the texts of special tokens
 * in messages, which stay texts. */
static void check_conversation(const struct chat_template *template, const json_t *one) {
    const json_t *messages = json_object_get(one, "messages"), *ids = json_object_get(one, "ids");
    const struct chat_input input = {
        .messages = messages, .add_generation_prompt = json_is_true(json_object_get(one, "add_generation_prompt"))};
    struct template_text text;
    struct token_list list = {0};
    assert_int_equal(chat_template_render(template, &input, &text, NULL), 0);
    assert_int_equal(tokenizer_encode_marked(tokenizer, text.text, text.input, text.bytes, &list, NULL), 0);
    bool same = list.count == json_array_size(ids);
    for (size_t i = 0; same && i < list.count; i++)
        same = list.ids[i] == json_integer_value(json_array_get(ids, i));
    assert_int_equal(same, !has_special(messages));
    token_list_free(&list);
    template_text_free(&text);
}

/* Prompts of conversations, with their special tokens parsed, and as chats are written. */
static void encodes_chat_prompts(void **state) {
    (void)state;
    char path[4096];
    snprintf(path, sizeof path, "%s/chat_template_smollm2.json", required_variable("DISTILLCACHE_TEST_DATA"));
    json_t *chat = json_load_file(path, 0, NULL), *one;
    json_t *cases = json_object_get(chat, "cases");
    struct chat_template *template = chat_template_open(model, tokenizer, NULL);
    size_t i;
    assert_non_null(template);
    assert_int_equal(json_array_size(cases), 34);
    json_array_foreach(cases, i, one) {
        check_conversation(template, one);
        json_t *prompt = json_object_get(one, "prompt");
        check_encode(json_string_value(prompt), json_string_length(prompt), true, json_object_get(one, "ids"), NULL);
    }
    chat_template_free(template);
    json_decref(chat);
}

static void knows_special_tokens(void **state) {
    (void)state;
    assert_int_equal(tokenizer_vocabulary(tokenizer), 49152);
    assert_int_equal(tokenizer_bos(tokenizer), 1);
    assert_int_equal(tokenizer_eos(tokenizer), 2);
    assert_false(tokenizer_adds_bos(tokenizer));
    for (int32_t id = -1; id <= 49152; id++) {
        assert_int_equal(tokenizer_is_special(tokenizer, id), id >= 0 && id < 17);
        assert_int_equal(tokenizer_is_end(tokenizer, id), id == 0 || id == 2);
    }
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(encodes_every_case),
        cmocka_unit_test(encodes_nul),
        cmocka_unit_test(encodes_disputed),
        cmocka_unit_test(decodes_every_case),
        cmocka_unit_test(encodes_single_bytes),
        cmocka_unit_test(encodes_invalid_bytes),
        cmocka_unit_test(encodes_long_runs),
        cmocka_unit_test(encodes_chat_prompts),
        cmocka_unit_test(knows_special_tokens),
    };
    return cmocka_run_group_tests(tests, open_all, close_all);
}
