/* SPDX-License-Identifier: Apache-2.0
 *
 * Writes random texts that a grammar allows, and tells which given texts it allows, for tests/model/test_grammar.py.
 *
 *   grammar_tool [MODEL.gguf] [--time]
 *
 * Standard input: one JSON object a line: "schema" (any JSON), "choices" or "pattern"; "seed"; "texts": how many to
 * write; "accept": texts to try. Standard output: one line each: {"error", "code"} or {"texts": [text, or null when it
 * did not end], "accepted": [bool]}. With a model texts are written in its tokens, each drawn evenly from the mask, and
 * masks are compared with what the automaton says of each token alone: "compared" counts the masks. Without, they are
 * written byte by byte.
 * --time: no texts, but what each token of the texts in "accept" took, in microseconds of processor time: "mask_us" of
 * new masks, "cached_us" of those met before, "token_us" mask and step, in order.
 */
#include "engine/gguf.h"
#include "grammar/automaton.h"
#include "grammar/slice.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

enum { SOFT_BYTES = 200, HARD_BYTES = 20000 };

static const struct grammar_vocabulary *vocabulary;
static bool timing;
static uint64_t random_state;

static uint32_t random_below(uint32_t limit) {
    random_state = random_state * 6364136223846793005u + 1442695040888963407u;
    return (uint32_t)((random_state >> 33) % limit);
}

static void die(const char *what) {
    fprintf(stderr, "grammar_tool: %s\n", what);
    exit(1);
}

struct text {
    char bytes[HARD_BYTES + 2048];
    size_t count;
};

/* Bytes that end things, and bytes that do not begin new ones: long texts are brought to an end by them. */
static bool is_closer(int byte) {
    return byte == '"' || byte == ']' || byte == '}';
}

static bool is_opener(int byte) {
    return byte == '{' || byte == '[' || byte == ',' || byte == '\n' || byte == ' ';
}

static int pick_byte(const struct byte_set *set, bool finish) {
    uint8_t all[256], good[256], closers[256];
    uint32_t counts[3] = {0};
    for (int byte = 0; byte < 256; byte++) {
        if (!byte_set_has(set, (uint8_t)byte))
            continue;
        all[counts[0]++] = (uint8_t)byte;
        if (!is_opener(byte))
            good[counts[1]++] = (uint8_t)byte;
        if (is_closer(byte))
            closers[counts[2]++] = (uint8_t)byte;
    }
    if (counts[0] == 0)
        die("nothing may follow, and the text may not end");
    if (finish && counts[2] > 0)
        return closers[random_below(counts[2])];
    return finish && counts[1] > 0 ? good[random_below(counts[1])] : all[random_below(counts[0])];
}

static bool write_bytes(struct automaton *automaton, struct text *text) {
    struct automaton_place place = {0};
    struct error error;
    if (automaton_start(automaton, &place, &error) != 0)
        die(error.message);
    for (text->count = 0; text->count < HARD_BYTES;) {
        struct byte_set set;
        if (automaton_must_end(automaton, &place) || (automaton_may_end(automaton, &place) && random_below(2) == 0))
            return true;
        if (automaton_bytes(automaton, &place, &set, &error) != 0)
            die(error.message);
        uint8_t byte = (uint8_t)pick_byte(&set, text->count > SOFT_BYTES);
        if (automaton_advance(automaton, &place, &byte, 1, &error) != 0)
            die("a byte of the set is refused");
        text->bytes[text->count++] = (char)byte;
    }
    return false;
}

static bool allows(const uint32_t *mask, uint32_t token) {
    return (mask[token / 32] >> token % 32 & 1) != 0;
}

/* What the mask should be: every token is tried alone. */
static void compare_mask(struct automaton *automaton, const struct automaton_place *place, const uint32_t *mask) {
    const struct tokenizer *tokenizer = vocabulary->tokenizer;
    struct error error;
    for (uint32_t token = 0; token < tokenizer_vocabulary(tokenizer); token++) {
        size_t bytes;
        const char *text = tokenizer_token_bytes(tokenizer, (int32_t)token, &bytes);
        struct automaton_place after = *place;
        bool allowed;
        if (tokenizer_is_end(tokenizer, (int32_t)token))
            allowed = automaton_may_end(automaton, place);
        else if (tokenizer_is_special(tokenizer, (int32_t)token))
            allowed = false;
        else
            allowed = bytes > 0 && automaton_advance(automaton, &after, text, bytes, &error) == 0;
        if (allowed != allows(mask, token)) {
            fprintf(stderr, "token %u \"%.*s\": ", token, (int)bytes, text);
            die(allowed ? "missing in the mask" : "wrongly in the mask");
        }
    }
}

static uint32_t pick_token(const uint32_t *mask, bool finish) {
    const struct tokenizer *tokenizer = vocabulary->tokenizer;
    uint32_t count = 0, chosen = 0, best = 0;
    for (uint32_t token = 0; token < tokenizer_vocabulary(tokenizer); token++) {
        size_t bytes;
        const char *text = tokenizer_token_bytes(tokenizer, (int32_t)token, &bytes);
        if (!allows(mask, token))
            continue;
        uint32_t rank = !finish                                                                     ? 1
                        : tokenizer_is_end(tokenizer, (int32_t)token) || is_closer(text[bytes - 1]) ? 3
                        : is_opener(text[bytes - 1])                                                ? 1
                                                                                                    : 2;
        if (rank < best)
            continue;
        count = rank > best ? 1 : count + 1;
        best = rank;
        if (random_below(count) == 0)
            chosen = token;
    }
    if (count == 0)
        die("an empty mask");
    return chosen;
}

static bool write_tokens(struct automaton *automaton, struct text *text, uint32_t *mask, uint32_t *compared) {
    struct automaton_place place = {0};
    struct error error;
    if (automaton_start(automaton, &place, &error) != 0)
        die(error.message);
    for (text->count = 0; text->count < HARD_BYTES;) {
        size_t bytes;
        if (automaton_must_end(automaton, &place))
            return true;
        if (automaton_mask(automaton, &place, mask, &error) != 0)
            die(error.message);
        if (random_below(8) == 0 && *compared < 12) {
            compare_mask(automaton, &place, mask);
            ++*compared;
        }
        int32_t token = (int32_t)pick_token(mask, text->count > SOFT_BYTES);
        if (tokenizer_is_end(vocabulary->tokenizer, token))
            return true;
        const char *piece = tokenizer_token_bytes(vocabulary->tokenizer, token, &bytes);
        if (automaton_advance(automaton, &place, piece, bytes, &error) != 0)
            die("a token of the mask is refused");
        memcpy(text->bytes + text->count, piece, bytes);
        text->count += bytes;
    }
    return false;
}

static json_t *write_texts(struct automaton *automaton, size_t count, json_t *reply) {
    static struct text text;
    json_t *texts = json_array();
    uint32_t *mask = vocabulary != NULL ? calloc(vocabulary->words, sizeof *mask) : NULL, compared = 0;
    for (size_t i = 0; i < count; i++) {
        bool done =
            vocabulary != NULL ? write_tokens(automaton, &text, mask, &compared) : write_bytes(automaton, &text);
        json_t *value = done ? json_stringn(text.bytes, text.count) : json_null();
        if (value == NULL)
            die("a text is not UTF-8");
        json_array_append_new(texts, value);
    }
    free(mask);
    json_object_set_new(reply, "compared", json_integer(compared));
    return texts;
}

static bool accepts(struct automaton *automaton, const json_t *text) {
    struct automaton_place place = {0};
    struct error error;
    if (automaton_start(automaton, &place, &error) != 0)
        die(error.message);
    return automaton_advance(automaton, &place, json_string_value(text), json_string_length(text), &error) == 0 &&
           automaton_may_end(automaton, &place);
}

/* Of this thread: others may have the processor meanwhile. */
static double processor_seconds(void) {
    struct timespec time;
    clock_gettime(CLOCK_THREAD_CPUTIME_ID, &time);
    return (double)time.tv_sec + (double)time.tv_nsec * 1e-9;
}

/* Times of the masks on the way through a text, tokenised greedily by the model's own tokenizer. */
static void time_text(struct automaton *automaton, const json_t *text, json_t *times, json_t *cached, json_t *tokens) {
    struct automaton_place place = {0};
    struct token_list ids = {0};
    struct error error;
    uint32_t *mask = calloc(vocabulary->words, sizeof *mask);
    if (mask == NULL || automaton_start(automaton, &place, &error) != 0 ||
        tokenizer_encode(
            vocabulary->tokenizer, json_string_value(text), json_string_length(text), false, &ids, &error) != 0)
        die("cannot time");
    for (size_t i = 0; i < ids.count; i++) {
        struct automaton_figures before, after;
        double start = processor_seconds();
        automaton_get_figures(automaton, &before);
        if (automaton_mask(automaton, &place, mask, &error) != 0)
            die(error.message);
        automaton_get_figures(automaton, &after);
        double end = processor_seconds();
        json_array_append_new(after.masks_made > before.masks_made ? times : cached, json_real((end - start) * 1e6));
        size_t bytes;
        const char *piece = tokenizer_token_bytes(vocabulary->tokenizer, ids.ids[i], &bytes);
        if (automaton_advance(automaton, &place, piece, bytes, &error) != 0)
            die("the text is not allowed");
        json_array_append_new(tokens, json_real((processor_seconds() - start) * 1e6));
    }
    token_list_free(&ids);
    free(mask);
}

static json_t *answer(const struct grammar *grammar, const json_t *request) {
    struct error error;
    struct automaton *automaton = automaton_create(grammar, vocabulary, &error);
    json_t *reply = json_object(), *accepted = json_array(), *times = json_array(), *cached = json_array(),
           *tokens = json_array(), *text;
    size_t i;
    if (automaton == NULL)
        die(error.message);
    random_state = (uint64_t)json_integer_value(json_object_get(request, "seed")) * 2 + 1;
    json_array_foreach(json_object_get(request, "accept"), i, text) {
        if (timing)
            time_text(automaton, text, times, cached, tokens);
        json_array_append_new(accepted, json_boolean(accepts(automaton, text)));
    }
    size_t count = (size_t)json_integer_value(json_object_get(request, "texts"));
    json_object_set_new(reply, "texts", write_texts(automaton, timing ? 0 : count, reply));
    json_object_set_new(reply, "accepted", accepted);
    json_object_set_new(reply, "mask_us", times);
    json_object_set_new(reply, "cached_us", cached);
    json_object_set_new(reply, "token_us", tokens);
    automaton_free(automaton);
    return reply;
}

static json_t *refusal(const struct error *error) {
    return json_pack("{s:s,s:i}", "error", error->message, "code", error->code);
}

static json_t *serve(const json_t *request) {
    struct error error = {0};
    const json_t *choices = json_object_get(request, "choices"), *pattern = json_object_get(request, "pattern");
    struct grammar *grammar = choices != NULL ? grammar_of_choices(choices, &error)
                              : pattern != NULL
                                  ? grammar_of_pattern(json_string_value(pattern), json_string_length(pattern), &error)
                                  : grammar_of_schema(json_object_get(request, "schema"), &error);
    if (grammar != NULL && vocabulary != NULL)
        slices_prepare(vocabulary, &grammar->pool);
    json_t *reply = grammar == NULL ? refusal(&error) : answer(grammar, request);
    grammar_free(grammar);
    return reply;
}

int main(int count, char **arguments) {
    struct error error = {0};
    struct gguf *gguf = NULL;
    struct tokenizer *tokenizer = NULL;
    struct grammar_vocabulary *own = NULL;
    for (int i = 1; i < count; i++) {
        timing |= strcmp(arguments[i], "--time") == 0;
        if (arguments[i][0] == '-')
            continue;
        gguf = gguf_open(arguments[i], &error);
        tokenizer = gguf == NULL ? NULL : tokenizer_create(gguf, &error);
        double start = processor_seconds();
        own = tokenizer == NULL ? NULL : grammar_vocabulary_create(tokenizer, tokenizer_vocabulary(tokenizer), &error);
        if (own == NULL)
            die(error.message);
        if (timing)
            fprintf(stderr, "vocabulary: %.1f ms, %u nodes, %u of them with other than shown tokens\n",
                (processor_seconds() - start) * 1e3, own->all.count, own->rest.count);
    }
    vocabulary = own;
    char *line = NULL;
    size_t room = 0;
    ssize_t length;
    while ((length = getline(&line, &room, stdin)) > 0) {
        json_t *request = json_loadb(line, (size_t)length, JSON_ALLOW_NUL, NULL);
        if (request == NULL)
            die("a line is not JSON");
        json_t *reply = serve(request);
        json_dumpf(reply, stdout, JSON_COMPACT);
        putchar('\n');
        json_decref(reply);
        json_decref(request);
    }
    free(line);
    grammar_vocabulary_free(own);
    tokenizer_free(tokenizer);
    gguf_free(gguf);
    return 0;
}
