/* SPDX-License-Identifier: Apache-2.0
 *
 * The schema compiler: a JSON document as a schema, other text as a pattern, what follows a line end as a text to try.
 * Compiling fails with a message, or gives a grammar that writes a text byte by byte, of which every byte is allowed,
 * and a text of a schema that ended is JSON. On the way masks of a small vocabulary (bytes, pairs of letters) are
 * compared with what the automaton says of each token alone.
 */
#include "grammar/automaton.h"
#include "tests/fuzz/fuzz.h"
#include "tests/unit/tiny_llama.h"

#include <stdlib.h>
#include <string.h>

enum { STEPS = 300, TOKENS = 700, MASKS = 3 };

static void expect(bool condition) {
    if (!condition)
        abort();
}

static void expect_message(const struct error *error) {
    expect(error->code < 0 && error->message[0] != '\0' && strchr(error->message, '\n') == NULL);
}

/* Made once. */
static struct {
    uint8_t *file;
    struct gguf *gguf;
    struct tokenizer *tokenizer;
    struct grammar_vocabulary *vocabulary;
} tiny;

static void free_tiny(void) {
    grammar_vocabulary_free(tiny.vocabulary);
    tokenizer_free(tiny.tokenizer);
    gguf_free(tiny.gguf);
    free(tiny.file);
}

static const struct grammar_vocabulary *tiny_vocabulary(void) {
    if (tiny.vocabulary != NULL)
        return tiny.vocabulary;
    struct tiny_llama options = tiny_llama_default();
    struct gguf_writer *writer = gguf_writer_create();
    size_t bytes;
    options.vocabulary = TOKENS;
    tiny_llama_write_tokenizer(writer, &options);
    tiny.file = gguf_writer_finish(writer, &bytes);
    tiny.gguf = gguf_open_memory(tiny.file, bytes, "tokenizer", NULL);
    tiny.tokenizer = tiny.gguf == NULL ? NULL : tokenizer_create(tiny.gguf, NULL);
    tiny.vocabulary = tiny.tokenizer == NULL ? NULL : grammar_vocabulary_create(tiny.tokenizer, TOKENS, NULL);
    expect(tiny.vocabulary != NULL);
    atexit(free_tiny);
    return tiny.vocabulary;
}

static bool allows_alone(struct automaton *automaton, const struct automaton_place *place, int32_t token) {
    const struct tokenizer *tokenizer = tiny_vocabulary()->tokenizer;
    struct automaton_place after = *place;
    size_t bytes;
    const char *text = tokenizer_token_bytes(tokenizer, token, &bytes);
    if (tokenizer_is_end(tokenizer, token))
        return automaton_may_end(automaton, place);
    return !tokenizer_is_special(tokenizer, token) &&
           automaton_advance(automaton, &after, text, bytes, &(struct error){0}) == 0;
}

static void compare_mask(struct automaton *automaton, const struct automaton_place *place) {
    uint32_t mask[TOKENS / 32 + 1];
    struct error error = {0};
    if (automaton_mask(automaton, place, mask, &error) != 0) {
        expect_message(&error);
        return;
    }
    for (int32_t token = 0; token < TOKENS; token++) {
        bool allowed = (mask[token / 32] >> token % 32 & 1) != 0;
        expect(allowed == allows_alone(automaton, place, token));
    }
}

/* The `pick`th of the allowed bytes, those that end things first; -1: there is none. */
static int pick_byte(const struct byte_set *set, uint32_t pick) {
    int bytes[256], count = 0;
    static const char closers[] = "\"]}";
    for (int i = 0; i < 3; i++)
        if (byte_set_has(set, (uint8_t)closers[i]) && pick % 2 == 0)
            return closers[i];
    for (int byte = 0; byte < 256; byte++)
        if (byte_set_has(set, (uint8_t)byte))
            bytes[count++] = byte;
    return count == 0 ? -1 : bytes[pick % (uint32_t)count];
}

static void write_text(struct automaton *automaton, uint32_t seed, bool json) {
    struct automaton_place place = {0};
    struct error error = {0};
    char text[STEPS + 1];
    size_t count = 0;
    int masks = 0;
    if (automaton_start(automaton, &place, &error) != 0) {
        expect_message(&error);
        return;
    }
    while (count < STEPS && !automaton_must_end(automaton, &place)) {
        struct byte_set set;
        if (automaton_bytes(automaton, &place, &set, &error) != 0) {
            expect_message(&error);
            return;
        }
        seed = seed * 1664525 + 1013904223;
        if (masks < MASKS && (seed >> 8) % 4 == 0) {
            compare_mask(automaton, &place);
            masks++;
        }
        int byte = pick_byte(&set, seed >> 16);
        expect(byte >= 0); /* what can neither go on nor end was never to be begun */
        text[count++] = (char)byte;
        expect(automaton_advance(automaton, &place, &text[count - 1], 1, &error) == 0 || error.code != ERROR_INVALID);
    }
    if (!json || !automaton_may_end(automaton, &place))
        return;
    json_t *value = json_loadb(text, count, JSON_DECODE_ANY | JSON_ALLOW_NUL | JSON_REJECT_DUPLICATES, NULL);
    expect(value != NULL);
    json_decref(value);
}

static void try_text(struct automaton *automaton, const uint8_t *text, size_t bytes) {
    struct automaton_place place = {0};
    struct error error = {0};
    if (automaton_start(automaton, &place, &error) == 0 &&
        automaton_advance(automaton, &place, text, bytes, &error) != 0)
        expect_message(&error);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t bytes) {
    const uint8_t *line = memchr(data, '\n', bytes);
    size_t length = line == NULL ? bytes : (size_t)(line - data);
    struct error error = {0};
    json_t *schema = json_loadb((const char *)data, length, JSON_DECODE_ANY | JSON_ALLOW_NUL, NULL);
    json_t *text = schema != NULL ? NULL : json_stringn((const char *)data, length);
    struct grammar *grammar = NULL;
    if (schema != NULL)
        grammar = grammar_of_schema(schema, &error);
    else if (text != NULL) /* valid UTF-8, as the server's bodies are */
        grammar = grammar_of_pattern((const char *)data, length, &error);
    struct automaton *automaton = grammar == NULL ? NULL : automaton_create(grammar, tiny_vocabulary(), &error);
    if (automaton == NULL && (schema != NULL || text != NULL))
        expect_message(&error);
    for (uint32_t seed = 0; automaton != NULL && seed < 3; seed++)
        write_text(automaton, seed, schema != NULL);
    if (automaton != NULL && line != NULL)
        try_text(automaton, line + 1, bytes - length - 1);
    automaton_free(automaton);
    grammar_free(grammar);
    json_decref(schema);
    json_decref(text);
    return 0;
}

uint8_t *fuzz_seed(unsigned index, size_t *bytes) {
    static const char *const seeds[] = {
        "{\"type\":\"object\",\"properties\":{\"a\":{\"type\":\"string\",\"maxLength\":3},\"b\":{\"type\":\"integer\","
        "\"minimum\":-3,"
        "\"maximum\":12}},\"required\":[\"a\"]}\n{\"a\":\"x\",\"b\":3}",
        "{\"type\":\"array\",\"prefixItems\":[{\"type\":\"null\"}],\"items\":{\"type\":\"number\",\"exclusiveMinimum\":"
        "0,\"maximum\":1},"
        "\"minItems\":1,\"maxItems\":4}\n[null, 0.5]",
        "{\"anyOf\":[{\"$ref\":\"#/$defs/"
        "a\"},{\"type\":[\"boolean\",\"null\"]}],\"$defs\":{\"a\":{\"type\":\"array\",\"items\":"
        "{\"$ref\":\"#\"}}}}\n[[true]]",
        "{\"oneOf\":[{\"properties\":{\"k\":{\"const\":1}},\"required\":[\"k\"]},{\"properties\":{\"k\":{\"enum\":[2,3]"
        "}},"
        "\"required\":[\"k\"]}]}\n{\"k\":2}",
        "{\"allOf\":[{\"type\":\"object\",\"properties\":{\"a\":{\"minLength\":1}}},{\"properties\":{\"a\":{"
        "\"maxLength\":2}}}]}",
        "{\"type\":\"string\",\"pattern\":\"^[^a-f\\\\d]{2,4}(x|yz?)+\\\\.$\"}\n\"gh\"",
        "{\"type\":\"string\",\"format\":\"date-time\"}\n\"2024-02-29T00:00:00Z\"",
        "{\"type\":\"string\",\"format\":\"ipv6\"}\n\"::1\"",
        "{\"enum\":[\"a\\u0000b\",1.5,{\"k\":[null]}],\"type\":[\"string\",\"object\",\"number\"]}",
        "{\"properties\":{\"a\":true,\"\\u00e9\\\"\":{\"nullable\":true,\"type\":\"string\"}},\"additionalProperties\":"
        "{\"type\":\"integer\"}}",
        "{\"$ref\":\"#/$defs/a%20b~1c/items/0\",\"$defs\":{\"a b/c\":{\"items\":[{\"type\":\"null\"}]}}}",
        "{}\n{\"a\":[1e5,\"\\ud83d\\ude00\"]}",
        "true",
        "^\\w+@[a-z]{1,3}(?:\\.com|(?<n>\\.org))?$\nx@ab.org",
        "(a|b)*?c{2,}|[^\\s\\]]\\x41\\u00e9",
        "^[a-z]{1,3}( [a-z]{1,12}){0,4}[a-z0-9 ]{2}$\nab cde f0",
        "{\"type\":\"string\",\"pattern\":\"^([A-Za-z ,]+|[^0-9]{1,30}[a-z-]*)$\"}\n\"a, b\"",
    };
    if (index >= sizeof seeds / sizeof seeds[0])
        return NULL;
    *bytes = strlen(seeds[index]);
    return (uint8_t *)strdup(seeds[index]);
}
