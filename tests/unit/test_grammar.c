/* SPDX-License-Identifier: Apache-2.0
 *
 * Grammars when memory runs out, and automata that drop their states: the texts that they allow stay the same. What
 * they allow is tested in tests/model/test_grammar.py. Slices of a vocabulary against their definition.
 */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>

#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "engine/model.h"
#include "grammar/automaton.h"
#include "grammar/slice.h"
#include "tests/unit/failing_malloc.h"
#include "tests/unit/tiny_llama.h"

struct ground {
    struct model *model;
    struct tokenizer *tokenizer;
};

static const char schema_text[] =
    "{\"type\":\"object\",\"properties\":{\"a\":{\"$ref\":\"#/$defs/"
    "s\"},\"b\":{\"allOf\":[{\"type\":\"integer\"},{\"minimum\":3}]},"
    "\"c\":{\"oneOf\":[{\"const\":1},{\"type\":\"string\",\"pattern\":\"^(x|[a-z]{2})+[a-z "
    "]*$\"}]}},\"required\":[\"a\","
    "\"z\"],"
    "\"additionalProperties\":{\"type\":[\"null\",\"array\"]},\"$defs\":{\"s\":{\"type\":\"string\",\"maxLength\":9}}}";

static int set_up(void **state) {
    struct ground *ground = calloc(1, sizeof *ground);
    struct tiny_llama options = tiny_llama_default();
    char *path = tiny_llama_save(&options);
    ground->model = model_open(path, NULL);
    assert_non_null(ground->model);
    ground->tokenizer = tokenizer_create(ground->model->file, NULL);
    assert_non_null(ground->tokenizer);
    unlink(path);
    free(path);
    *state = ground;
    return 0;
}

static int tear_down(void **state) {
    struct ground *ground = *state;
    tokenizer_free(ground->tokenizer);
    model_free(ground->model);
    free(ground);
    return 0;
}

/* Everything from the schema to the masks of a text. Returns 0, or the code of the first failure. */
static int follow(const struct ground *ground, const json_t *schema, const char *text, struct error *error) {
    uint32_t count = tokenizer_vocabulary(ground->tokenizer);
    struct grammar_vocabulary *vocabulary = grammar_vocabulary_create(ground->tokenizer, count, error);
    struct grammar *grammar = vocabulary == NULL ? NULL : grammar_of_schema(schema, error);
    struct automaton *automaton = grammar == NULL ? NULL : automaton_create(grammar, vocabulary, error);
    struct automaton_place place = {0};
    uint32_t mask[64] = {0};
    int code = automaton == NULL ? error->code : automaton_start(automaton, &place, error);
    for (; code == 0 && *text != '\0'; text++) {
        code = automaton_mask(automaton, &place, mask, error);
        if (code == 0)
            code = automaton_advance(automaton, &place, text, 1, error);
    }
    if (code == 0)
        assert_true(automaton_must_end(automaton, &place));
    automaton_free(automaton);
    grammar_free(grammar);
    grammar_vocabulary_free(vocabulary);
    return code;
}

static void test_every_allocation_may_fail(void **state) {
    const char *text = "{\"a\": \"xy\\n\", \"b\": 12, \"c\":\"xab\",\"z\":[1, {}], \"q\":null}";
    json_t *schema = json_loads(schema_text, 0, NULL);
    struct error error = {0};
    assert_non_null(schema);
    assert_int_equal(follow(*state, schema, text, &error), 0);
    uint32_t failures = 0, at = 0;
    for (;; at += at < 200 ? 1 : 7) {
        failing_malloc_arm(at);
        int code = follow(*state, schema, text, &error);
        if (!failing_malloc_disarm())
            break;
        failures++;
        if (code != 0 && code != ERROR_MEMORY) /* an array that was not made smaller does no harm */
            fail_msg("allocation %u: %d %s", at, code, error.message);
    }
    assert_true(failures > 50);
    json_decref(schema);
}

/* A long text of distinct states, beside one that has only begun; the automaton is asked to drop them all along. */
static void test_dropped_states_are_found_again(void **state) {
    const struct ground *ground = *state;
    enum { LENGTH = 30000 };
    json_t *schema = json_pack("{s:s,s:i}", "type", "string", "maxLength", LENGTH);
    struct error error = {0};
    struct grammar_vocabulary *vocabulary =
        grammar_vocabulary_create(ground->tokenizer, tokenizer_vocabulary(ground->tokenizer), &error);
    struct grammar *grammar = grammar_of_schema(schema, &error);
    struct automaton *automaton = automaton_create(grammar, vocabulary, &error);
    struct automaton_place places[2] = {0}, *place = &places[1];
    assert_int_equal(automaton_start(automaton, &places[0], &error), 0);
    assert_int_equal(automaton_start(automaton, place, &error), 0);
    char *text = malloc(LENGTH + 2);
    uint32_t dropped = 0;
    memset(text, 'a', LENGTH + 2);
    text[0] = text[LENGTH + 1] = '"';
    for (size_t i = 0; i < LENGTH + 2; i++) {
        struct automaton_figures before, after;
        automaton_get_figures(automaton, &before);
        automaton_trim(automaton, places, sizeof places[0], 2);
        automaton_get_figures(automaton, &after);
        dropped += after.bytes < before.bytes;
        assert_false(automaton_is_lost(automaton, place));
        struct byte_set set;
        assert_int_equal(automaton_bytes(automaton, place, &set, &error), 0);
        assert_int_equal(byte_set_has(&set, 'a'), i > 0 && i <= LENGTH);
        assert_int_equal(automaton_advance(automaton, place, &text[i], 1, &error), 0);
        struct automaton_figures figures;
        automaton_get_figures(automaton, &figures);
        assert_true(figures.bytes <= AUTOMATON_BYTES_MAX);
    }
    assert_true(automaton_must_end(automaton, place));
    assert_int_equal(automaton_advance(automaton, &places[0], "\"a\"", 3, &error), 0);
    assert_true(automaton_must_end(automaton, &places[0]));
    assert_true(dropped > 0);
    free(text);
    automaton_free(automaton);
    grammar_free(grammar);
    grammar_vocabulary_free(vocabulary);
    json_decref(schema);
}

/* Whether a grammar has the text; *ends: it may end there. */
static bool has_text(const struct grammar *grammar, const char *text, bool *ends) {
    struct error error;
    struct automaton_place place = {0};
    struct automaton *automaton = automaton_create(grammar, NULL, &error);
    assert_non_null(automaton);
    assert_int_equal(automaton_start(automaton, &place, &error), 0);
    bool has = automaton_advance(automaton, &place, text, strlen(text), &error) == 0;
    *ends = has && automaton_may_end(automaton, &place);
    automaton_free(automaton);
    return has;
}

static void expect_calls(const struct grammar_calls *calls, const char *const *whole, const char *const *wrong) {
    struct error error = {0};
    struct grammar *grammar = grammar_of_calls(calls, &error);
    if (grammar == NULL)
        fail_msg("%s", error.message);
    bool ends;
    for (; *whole != NULL; whole++)
        if (!has_text(grammar, *whole, &ends) || !ends)
            fail_msg("not taken as a whole: %s", *whole);
    for (; *wrong != NULL; wrong++)
        if (has_text(grammar, *wrong, &ends) && ends)
            fail_msg("taken: %s", *wrong);
    grammar_free(grammar);
}

static void test_calls(void **state) {
    (void)state;
    json_t *city =
        json_loads("{\"type\":\"object\",\"properties\":{\"a\":{\"$ref\":\"#/$defs/s\"}},\"required\":[\"a\"],"
                   "\"$defs\":{\"s\":{\"enum\":[\"x\",\"y\"]}}}",
            0, NULL);
    json_t *untyped = json_loads("{\"properties\":{\"b\":{\"type\":\"boolean\"}}}", 0, NULL);
    json_t *bad = json_loads("{\"type\":\"object\",\"properties\":{\"a\":{\"contains\":1}}}", 0, NULL);
    struct grammar_function functions[] = {{"f", city}, {"g\"", untyped}, {"none", NULL}};
    struct grammar_calls calls = {.open = "[",
        .begin = "{\"name\": ",
        .middle = ", \"arguments\": ",
        .end = "}",
        .between = ", ",
        .close = "]",
        .blank = true,
        .most = 2,
        .functions = functions,
        .count = 3};
    const char *const several[] = {"[{\"name\": \"f\", \"arguments\": {\"a\": \"y\"}}]",
        " [{\"name\": \"g\\\"\", \"arguments\": {\"b\":true}}, {\"name\": \"none\", \"arguments\": {}}]",
        "[{\"name\": \"g\\\"\", \"arguments\": {}}]", NULL};
    const char *const wrong[] = {"[{\"name\": \"h\", \"arguments\": {}}]", "[{\"name\": \"f\", \"arguments\": {}}]",
        "[{\"name\": \"f\", \"arguments\": {\"a\": \"z\"}}]", "[{\"name\": \"none\", \"arguments\": {\"a\": \"x\"}}]",
        "[{\"name\": \"g\\\"\", \"arguments\": [1]}]", "[]", "", "[{\"name\": \"none\", \"arguments\": {}}",
        "[{\"name\": \"none\", \"arguments\": {}}, {\"name\": \"none\", \"arguments\": {}}, "
        "{\"name\": \"none\", \"arguments\": {}}]",
        NULL};
    expect_calls(&calls, several, wrong);
    calls.most = 1;
    calls.open = calls.close = "";
    calls.blank = false;
    const char *const one[] = {"{\"name\": \"none\", \"arguments\": {}}", NULL};
    const char *const two[] = {
        "{\"name\": \"none\", \"arguments\": {}}, {\"name\": \"none\", \"arguments\": {}}", " ", NULL};
    expect_calls(&calls, one, two);
    struct error error = {0};
    functions[1].parameters = bad;
    assert_null(grammar_of_calls(&calls, &error));
    assert_int_equal(error.code, ERROR_UNSUPPORTED);
    assert_non_null(strstr(error.message, "parameters of g\": "));
    assert_non_null(strstr(error.message, "contains"));
    json_decref(city);
    json_decref(untyped);
    json_decref(bad);
}

static struct byte_set set_of(const char *bytes) {
    struct byte_set set = {0};
    for (; *bytes != '\0'; bytes++)
        byte_set_add(&set, (uint8_t)*bytes);
    return set;
}

/* Bytes of a token from `first` on if all are of the set; SLICE_OTHERS: they are not. */
static uint8_t bytes_of_set(
    const struct grammar_vocabulary *vocabulary, int32_t token, size_t first, const struct byte_set *set) {
    size_t count;
    const char *bytes = tokenizer_token_bytes(vocabulary->tokenizer, token, &count);
    for (size_t i = first; i < count; i++)
        if (!byte_set_has(set, (uint8_t)bytes[i]))
            return SLICE_OTHERS;
    return (uint8_t)(count - first);
}

static void check_slice(const struct grammar_vocabulary *vocabulary, const struct slice *slice) {
    const struct trie *trie = &vocabulary->all;
    for (uint32_t i = 0; i < trie->count; i++) {
        uint8_t below = 0;
        for (uint32_t k = trie->nodes[i].first; k < trie->nodes[trie->nodes[i].skip].first; k++) {
            uint8_t bytes = bytes_of_set(vocabulary, trie->tokens[k], trie->nodes[i].depth, &slice->set);
            below = bytes > below ? bytes : below;
        }
        assert_int_equal(slice->below[i], below);
    }
    for (uint32_t k = 0; k < trie->tokens_count; k++)
        for (uint32_t most = 0; most <= SLICE_LENGTHS; most++) {
            uint32_t token = (uint32_t)trie->tokens[k], word = slice->tokens[most * vocabulary->words + token / 32];
            assert_int_equal(word >> token % 32 & 1, bytes_of_set(vocabulary, (int32_t)token, 0, &slice->set) <= most);
        }
}

/* More sets than there is room for, over and over; some of them in use. */
static void test_slices_are_as_defined(void **state) {
    const struct ground *ground = *state;
    const struct grammar_vocabulary *vocabulary =
        grammar_vocabulary_create(ground->tokenizer, tokenizer_vocabulary(ground->tokenizer), NULL);
    const struct slice *held[SLICES_MAX];
    const struct byte_set letters = set_of("abcdefghijklmnopqrstuvwxyz");
    for (uint32_t i = 0; i < 3 * SLICES_MAX; i++) {
        struct byte_set set = letters;
        set.words[3] = i % (SLICES_MAX + 8);
        const struct slice *slice = slice_take(vocabulary, &set);
        check_slice(vocabulary, slice);
        slice_give_back(vocabulary, slice);
    }
    for (uint32_t i = 0; i < SLICES_MAX; i++) {
        struct byte_set set = set_of("abcdefgh");
        set.words[3] = i;
        held[i] = slice_take(vocabulary, &set);
        assert_non_null(held[i]);
    }
    assert_null(slice_take(vocabulary, &letters));
    slice_give_back(vocabulary, held[7]);
    held[7] = slice_take(vocabulary, &letters);
    check_slice(vocabulary, held[7]);
    assert_ptr_equal(slice_take(vocabulary, &letters), held[7]);
    slice_give_back(vocabulary, held[7]);
    for (uint32_t i = 0; i < SLICES_MAX; i++) {
        if (i != 7)
            assert_int_equal(held[i]->set.words[3], i); /* what is in use stays */
        slice_give_back(vocabulary, held[i]);
    }
    grammar_vocabulary_free((struct grammar_vocabulary *)vocabulary);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_every_allocation_may_fail),
        cmocka_unit_test(test_dropped_states_are_found_again),
        cmocka_unit_test(test_calls),
        cmocka_unit_test(test_slices_are_as_defined),
    };
    return cmocka_run_group_tests_name("grammar", tests, set_up, tear_down);
}
