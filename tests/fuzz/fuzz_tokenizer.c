/* SPDX-License-Identifier: Apache-2.0
 *
 * The tokenizer. Inputs whose first byte is even are a text for a good vocabulary that has a token for each byte: its
 * tokens must spell it. The others are [length of a text, 1 byte][the text][a GGUF file]: the file is refused with a
 * message, or its tokenizer encodes the text and the file to ids of its vocabulary.
 */
#include "tests/fuzz/fuzz.h"

#include "engine/chat_template.h"
#include "engine/tokenizer.h"
#include "tests/unit/tiny_llama.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static volatile char sink;

static void expect(bool condition) {
    if (!condition)
        abort();
}

static uint8_t *tiny_file(size_t *bytes) {
    struct tiny_llama options = tiny_llama_default();
    struct gguf_writer *writer = gguf_writer_create();
    tiny_llama_write_tokenizer(writer, &options);
    return gguf_writer_finish(writer, bytes);
}

/* A precompiled map (engine/character_map.h): "T" becomes "t", "Th" "the", and the two bytes of U+00EF "a". */
static void write_map(struct gguf_writer *writer) {
    enum { UNITS = 512, REPLACEMENTS = 8, SIZE = 4 + 4 * UNITS + REPLACEMENTS };
    static const uint32_t units[UNITS] = {
        [0] = 0x100 << 10,
        [0x100 ^ 'T'] = 'T' | 1 << 8 | 0x80 << 10, /* at 0x154; its next units at 0x1d4 */
        [0x1d4] = 1u << 31 | 0,
        [0x1d4 ^ 'h'] = 'h' | 1 << 8 | 0x03 << 10, /* at 0x1bc; its value at 0x1bf */
        [0x1bf] = 1u << 31 | 2,
        [0x100 ^ 0xc3] = 0xc3 | 0xb0 << 10,          /* at 0x1c3; its next units at 0x173 */
        [0x173 ^ 0xaf] = 0xaf | 1 << 8 | 0x01 << 10, /* at 0x1dc; its value at 0x1dd */
        [0x1dd] = 1u << 31 | 6,
    };
    uint8_t array[12 + SIZE] = {GGUF_UINT8, 0, 0, 0, SIZE & 255, SIZE >> 8};
    memcpy(array + 12, &(uint32_t){sizeof units}, 4);
    memcpy(array + 16, units, sizeof units);
    memcpy(array + 16 + sizeof units, "t\0the\0a", REPLACEMENTS);
    gguf_writer_pair(writer, "tokenizer.ggml.precompiled_charsmap", GGUF_ARRAY, array, sizeof array);
}

/* A SentencePiece vocabulary with bytes, scores, and tokens of all kinds. */
static uint8_t *piece_file(const char *model, bool map, size_t *bytes) {
    static const char *const pieces[] = {"<unk>", "<s>", "</s>", "\u2581", "a", "b", "ab", "\u2581ab", "\u4f60", "t",
        "he", "\u2581\u2581", "<tool>", "h", "e", "th", "the", "\u2581the"};
    static const int32_t kinds[] = {2, 3, 3, 1, 1, 1, 1, 1, 1, 1, 1, 4, 4, 1, 1, 1, 1, 1};
    enum { PIECES = sizeof pieces / sizeof pieces[0], TOKENS = PIECES + 256 };
    const char *tokens[TOKENS];
    char names[256][8];
    int32_t types[TOKENS];
    uint8_t scores[12 + 4 * TOKENS] = {GGUF_FLOAT32, 0, 0, 0, TOKENS & 255, TOKENS >> 8};
    for (int i = 0; i < TOKENS; i++) {
        const float score = -(float)(i % 7);
        if (i >= PIECES)
            snprintf(names[i - PIECES], sizeof names[0], "<0x%02X>", (unsigned)(i - PIECES));
        tokens[i] = i < PIECES ? pieces[i] : names[i - PIECES];
        types[i] = i < PIECES ? kinds[i] : 6;
        memcpy(scores + 12 + 4 * i, &score, 4);
    }
    struct gguf_writer *writer = gguf_writer_create();
    gguf_writer_string(writer, "tokenizer.ggml.model", model);
    gguf_writer_strings(writer, "tokenizer.ggml.tokens", tokens, TOKENS);
    gguf_writer_int32s(writer, "tokenizer.ggml.token_type", types, TOKENS);
    gguf_writer_pair(writer, "tokenizer.ggml.scores", GGUF_ARRAY, scores, sizeof scores);
    gguf_writer_uint32(writer, "tokenizer.ggml.bos_token_id", 1);
    gguf_writer_uint32(writer, "tokenizer.ggml.eos_token_id", 2);
    gguf_writer_bool(writer, "tokenizer.ggml.remove_extra_whitespaces", model[0] == 't');
    if (map)
        write_map(writer);
    return gguf_writer_finish(writer, bytes);
}

/* Made once, freed at exit. */
static struct {
    uint8_t *file;
    struct gguf *gguf;
    struct tokenizer *tokenizer;
} good;

static void free_good(void) {
    tokenizer_free(good.tokenizer);
    gguf_free(good.gguf);
    free(good.file);
}

static const struct tokenizer *good_tokenizer(void) {
    size_t bytes;
    if (good.tokenizer != NULL)
        return good.tokenizer;
    good.file = tiny_file(&bytes);
    good.gguf = gguf_open_memory(good.file, bytes, "good", NULL);
    expect(good.gguf != NULL);
    good.tokenizer = tokenizer_create(good.gguf, NULL);
    expect(good.tokenizer != NULL && atexit(free_good) == 0);
    return good.tokenizer;
}

static void spell(const char *text, size_t bytes, bool special) {
    const struct tokenizer *tokenizer = good_tokenizer();
    struct token_list list = {0};
    size_t at = 0, length;
    expect(tokenizer_encode(tokenizer, text, bytes, special, &list, NULL) == 0);
    for (size_t i = 0; i < list.count; i++) {
        const char *token = tokenizer_token_bytes(tokenizer, list.ids[i], &length);
        expect(length <= bytes - at && memcmp(token, text + at, length) == 0);
        at += length;
    }
    expect(at == bytes);
    token_list_free(&list);
}

static void encode(const struct tokenizer *tokenizer, const char *text, size_t bytes, bool special) {
    struct token_list list = {0};
    size_t length;
    expect(tokenizer_encode(tokenizer, text, bytes, special, &list, NULL) == 0);
    for (size_t i = 0; i < list.count; i++) {
        expect(list.ids[i] >= 0 && (uint32_t)list.ids[i] < tokenizer_vocabulary(tokenizer));
        const char *token = tokenizer_token_bytes(tokenizer, list.ids[i], &length);
        for (size_t j = 0; j < length; j++)
            sink ^= token[j];
    }
    token_list_free(&list);
}

static void open_file(const char *text, size_t text_bytes, const uint8_t *file, size_t bytes) {
    struct error error = {0};
    struct gguf *gguf = gguf_open_memory(file, bytes, "input", NULL);
    if (gguf == NULL)
        return;
    struct tokenizer *tokenizer = tokenizer_create(gguf, &error);
    expect(tokenizer != NULL || (error.code < 0 && error.message[0] != '\0'));
    if (tokenizer != NULL) {
        encode(tokenizer, text, text_bytes, false);
        encode(tokenizer, text, text_bytes, true);
        encode(tokenizer, (const char *)file, bytes, true);
        chat_template_free(chat_template_open(gguf, tokenizer, &error));
    }
    tokenizer_free(tokenizer);
    gguf_free(gguf);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t bytes) {
    if (bytes < 2)
        return 0;
    if (data[0] % 2 == 0) {
        spell((const char *)data + 1, bytes - 1, false);
        spell((const char *)data + 1, bytes - 1, true);
        return 0;
    }
    size_t text = data[1] < bytes - 2 ? data[1] : bytes - 2;
    open_file((const char *)data + 2, text, data + 2 + text, bytes - 2 - text);
    return 0;
}

uint8_t *fuzz_seed(unsigned index, size_t *bytes) {
    static const char *const texts[] = {
        "The quick brown fox's 42 jumps;  over\n\n\tthe lazy dog. Na\u00efve \u4f60\u597d \U0001f600",
        "<|im_start|>user\nHello<|im_end|>\n<|endoftext|><|im_<|im_end|",
        "\xff\xc3(\xe2\x82 a\xf0\x9f\x98 \xed\xa0\x80\xc0\xaf'll"};
    enum { TEXTS = sizeof texts / sizeof texts[0] };
    if (index >= 5 * TEXTS)
        return NULL;
    const char *text = texts[index % TEXTS];
    size_t length = strlen(text), file_bytes = 0;
    uint8_t *file = NULL;
    if (index >= 2 * TEXTS)
        file = piece_file(index < 3 * TEXTS ? "llama" : "t5", index >= 4 * TEXTS, &file_bytes);
    else if (index >= TEXTS)
        file = tiny_file(&file_bytes);
    uint8_t *seed = malloc(2 + length + file_bytes);
    expect(seed != NULL);
    size_t at = 0;
    seed[at++] = index >= TEXTS;
    if (file != NULL)
        seed[at++] = (uint8_t)length;
    memcpy(seed + at, text, length);
    at += length;
    if (file != NULL)
        memcpy(seed + at, file, file_bytes);
    free(file);
    *bytes = at + file_bytes;
    return seed;
}
