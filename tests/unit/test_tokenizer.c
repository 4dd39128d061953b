/* SPDX-License-Identifier: Apache-2.0
 *
 * The tokenizer over small vocabularies made here: broken metadata, special tokens, end tokens, odd tokens. The real
 * model's is tested by test_tokenizer_model.
 */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>

#include <pthread.h>
#include <stdlib.h>
#include <string.h>

#include "engine/tokenizer.h"
#include "tests/unit/gguf_writer.h"
#include "tests/unit/tiny_llama.h"

#define ABSENT UINT32_MAX

/* Metadata of a tokenizer; NULL or ABSENT leaves a key out. */
struct metadata {
    const char *model, *pre;
    const char *const *tokens;
    uint64_t token_count;
    const int32_t *kinds;
    uint64_t kind_count;
    const char *const *merges;
    uint64_t merge_count;
    uint32_t bos, eos, eot, eom;
    int adds_bos; /* -1: absent */
};

/* "\u0120" is the space of the byte alphabet; "\u00e9" alone is not the letter but the byte e9. */
static const char *const tokens[] = {"a", "b", "c", "\u0120", "ab", "abc", "\u0120ab", "<|im_end|>", "<s>", "<s>>",
    "<tool>", "</s>", "\u00e9", "\u4f60", "", "x", "x"};
static const int32_t kinds[] = {1, 1, 1, 1, 1, 1, 1, 3, 3, 4, 4, 1, 6, 1, 3, 1, 5};
enum {
    AB = 4,
    ABC = 5,
    SPACE_AB = 6,
    IM_END = 7,
    S = 8,
    S_LONG = 9,
    TOOL = 10,
    SLASH_S = 11,
    BYTE_E9 = 12,
    CHINESE = 13,
    COUNT = 17
};
static const char *const merges[] = {"a b", "ab c", "\u0120 ab"};

static struct metadata good(void) {
    return (struct metadata){"gpt2", "smollm", tokens, COUNT, kinds, COUNT, merges, 3, 8, 7, ABSENT, ABSENT, -1};
}

static void write_id(struct gguf_writer *writer, const char *key, uint32_t id) {
    if (id != ABSENT)
        gguf_writer_uint32(writer, key, id);
}

/* The file; *bytes is to be freed after it. */
static struct gguf *open_metadata(const struct metadata *from, uint8_t **bytes) {
    struct gguf_writer *writer = gguf_writer_create();
    gguf_writer_string(writer, "general.architecture", "llama");
    if (from->model != NULL)
        gguf_writer_string(writer, "tokenizer.ggml.model", from->model);
    if (from->pre != NULL)
        gguf_writer_string(writer, "tokenizer.ggml.pre", from->pre);
    if (from->tokens != NULL)
        gguf_writer_strings(writer, "tokenizer.ggml.tokens", from->tokens, from->token_count);
    if (from->kinds != NULL)
        gguf_writer_int32s(writer, "tokenizer.ggml.token_type", from->kinds, from->kind_count);
    if (from->merges != NULL)
        gguf_writer_strings(writer, "tokenizer.ggml.merges", from->merges, from->merge_count);
    write_id(writer, "tokenizer.ggml.bos_token_id", from->bos);
    write_id(writer, "tokenizer.ggml.eos_token_id", from->eos);
    write_id(writer, "tokenizer.ggml.eot_token_id", from->eot);
    write_id(writer, "tokenizer.ggml.eom_token_id", from->eom);
    if (from->adds_bos >= 0)
        gguf_writer_bool(writer, "tokenizer.ggml.add_bos_token", from->adds_bos == 1);
    size_t size;
    *bytes = gguf_writer_finish(writer, &size);
    struct gguf *gguf = gguf_open_memory(*bytes, size, "test", NULL);
    assert_non_null(gguf);
    return gguf;
}

static void expect_error(struct metadata from, int code, const char *message) {
    uint8_t *bytes;
    struct error error = {0};
    struct gguf *gguf = open_metadata(&from, &bytes);
    assert_null(tokenizer_create(gguf, &error));
    if (strstr(error.message, message) == NULL)
        fail_msg("\"%s\" does not say \"%s\"", error.message, message);
    assert_int_equal(error.code, code);
    assert_null(tokenizer_create(gguf, NULL));
    gguf_free(gguf);
    free(bytes);
}

static void refuses_other_tokenizers(void **state) {
    (void)state;
    struct metadata m = good();
    m.model = "bert";
    expect_error(m, ERROR_UNSUPPORTED, "\"bert\"");
    m.model = NULL;
    expect_error(m, ERROR_FORMAT, "tokenizer.ggml.model");
    m = good();
    m.pre = "tekken\n";
    expect_error(m, ERROR_UNSUPPORTED, "\"tekken?\"");
}

static void refuses_broken_tokens(void **state) {
    (void)state;
    struct metadata m = good();
    m.tokens = NULL;
    expect_error(m, ERROR_FORMAT, "tokenizer.ggml.tokens is missing");
    m = good();
    m.token_count = 0;
    expect_error(m, ERROR_FORMAT, "tokenizer.ggml.tokens has 0 elements");
    m = good();
    m.kind_count = COUNT - 1;
    expect_error(m, ERROR_FORMAT, "tokenizer.ggml.token_type has 16 elements for 17 tokens");
    static const int32_t wrong[][COUNT] = {{1, 1, 0}, {1, 1, 7}, {1, 1, -1}, {1, 1, INT32_MIN}};
    for (size_t i = 0; i < sizeof wrong / sizeof wrong[0]; i++) {
        m = good();
        m.kinds = wrong[i];
        expect_error(m, ERROR_FORMAT, "tokenizer.ggml.token_type of token 2 is");
    }
}

static void refuses_broken_merges(void **state) {
    (void)state;
    struct metadata m = good();
    m.merges = NULL;
    expect_error(m, ERROR_FORMAT, "tokenizer.ggml.merges is missing");
    static const char *const broken[][2] = {{"ab", "merge 1 is not two texts"}, {"", "merge 1 is not two texts"},
        {" b", "merge 1 is not two texts"}, {"a ", "merge 1 is not two texts"}, {" ", "merge 1 is not two texts"},
        {"z b", "merge 1: the vocabulary has no token for its left part"},
        {"a z", "merge 1: the vocabulary has no token for its right part"},
        {"a  b", "merge 1: the vocabulary has no token for its right part"},
        {"b a", "merge 1: the vocabulary has no token for its joined part"}};
    for (size_t i = 0; i < sizeof broken / sizeof broken[0]; i++) {
        const char *const list[] = {"a b", broken[i][0]};
        m = good();
        m.merges = list;
        m.merge_count = 2;
        expect_error(m, ERROR_FORMAT, broken[i][1]);
    }
}

static void refuses_broken_ids(void **state) {
    (void)state;
    struct metadata m = good();
    m.bos = COUNT;
    expect_error(m, ERROR_FORMAT, "tokenizer.ggml.bos_token_id is 17, but there are 17 tokens");
    m = good();
    m.eos = UINT32_MAX - 1;
    expect_error(m, ERROR_FORMAT, "tokenizer.ggml.eos_token_id is 4294967294");
    m = good();
    m.eot = COUNT;
    expect_error(m, ERROR_FORMAT, "tokenizer.ggml.eot_token_id");
    m = good();
    m.eom = COUNT;
    expect_error(m, ERROR_FORMAT, "tokenizer.ggml.eom_token_id");
    m = good();
    m.bos = ABSENT;
    m.adds_bos = 1;
    expect_error(m, ERROR_FORMAT, "tokenizer.ggml.add_bos_token is true");
    char text[600];
    memset(text, '<', sizeof text);
    text[sizeof text - 1] = '\0';
    const char *const list[] = {text};
    m = (struct metadata){"gpt2", "smollm", list, 1, (int32_t[]){3}, 1, merges, 0, ABSENT, ABSENT, ABSENT, ABSENT, -1};
    expect_error(m, ERROR_UNSUPPORTED, "the text of special token 0 has 599 bytes");
}

/* Keys with values of other types. */
static void refuses_wrong_types(void **state) {
    (void)state;
    static const char *const keys[] = {"tokenizer.ggml.model", "tokenizer.ggml.pre", "tokenizer.ggml.tokens",
        "tokenizer.ggml.token_type", "tokenizer.ggml.merges", "tokenizer.ggml.bos_token_id",
        "tokenizer.ggml.eos_token_id", "tokenizer.ggml.add_bos_token"};
    for (size_t wrong = 0; wrong < sizeof keys / sizeof keys[0]; wrong++) {
        struct metadata m = good();
        struct gguf_writer *writer = gguf_writer_create();
        gguf_writer_float(writer, keys[wrong], 1.5f);
        if (wrong != 0)
            gguf_writer_string(writer, keys[0], m.model);
        if (wrong != 1)
            gguf_writer_string(writer, keys[1], m.pre);
        if (wrong != 2)
            gguf_writer_strings(writer, keys[2], m.tokens, m.token_count);
        if (wrong != 4)
            gguf_writer_strings(writer, keys[4], m.merges, m.merge_count);
        size_t size;
        uint8_t *bytes = gguf_writer_finish(writer, &size);
        struct gguf *gguf = gguf_open_memory(bytes, size, "test", NULL);
        struct error error = {0};
        assert_non_null(gguf);
        assert_null(tokenizer_create(gguf, &error));
        assert_int_equal(error.code, ERROR_FORMAT);
        assert_non_null(strstr(error.message, keys[wrong]));
        gguf_free(gguf);
        free(bytes);
    }
}

/* A tokenizer with what it reads from. */
struct opened {
    uint8_t *bytes;
    struct gguf *gguf;
    struct tokenizer *tokenizer;
};

static struct opened open_tokenizer(struct metadata from) {
    struct opened opened;
    struct error error = {0};
    opened.gguf = open_metadata(&from, &opened.bytes);
    opened.tokenizer = tokenizer_create(opened.gguf, &error);
    if (opened.tokenizer == NULL)
        fail_msg("%s", error.message);
    return opened;
}

static void close_tokenizer(struct opened *opened) {
    tokenizer_free(opened->tokenizer);
    gguf_free(opened->gguf);
    free(opened->bytes);
}

/* ids end with -1. */
static void expect_ids(const struct opened *opened, const char *text, bool special, const int32_t *ids) {
    struct token_list list = {0};
    assert_int_equal(tokenizer_encode(opened->tokenizer, text, strlen(text), special, &list, NULL), 0);
    size_t count = 0;
    while (ids[count] >= 0)
        count++;
    assert_int_equal(list.count, count);
    if (count > 0)
        assert_memory_equal(list.ids, ids, count * sizeof *ids);
    token_list_free(&list);
}

#define IDS(...) ((const int32_t[]){__VA_ARGS__, -1})

static void merges_by_rank(void **state) {
    (void)state;
    struct opened opened = open_tokenizer(good());
    expect_ids(&opened, "", false, IDS(-1));
    expect_ids(&opened, "abc", false, IDS(ABC));
    expect_ids(&opened, "abab", false, IDS(AB, AB));
    expect_ids(&opened, "ab abc ab", false, IDS(AB, 3, ABC, SPACE_AB)); /* "ab c" ranks before "space ab" */
    expect_ids(&opened,
        "a\xe9"
        "b",
        false, IDS(0, BYTE_E9, 1));               /* not UTF-8: a piece of its own */
    expect_ids(&opened, "a!b", false, IDS(0, 1)); /* "!" has no token */
    expect_ids(&opened, "x", false, IDS(16));     /* of equal texts the last */
    close_tokenizer(&opened);
}

/* Absent bytes are dropped before merging, so that their neighbours meet (C3 A9 is one letter; C3 is absent here). */
static void drops_absent_bytes_first(void **state) {
    (void)state;
    static const char *const list[] = {"a", "\u00a9", "a\u00a9"};
    static const char *const pairs[] = {"a \u00a9"};
    struct metadata m = {"gpt2", "smollm", list, 3, NULL, 0, pairs, 1, ABSENT, ABSENT, ABSENT, ABSENT, -1};
    struct opened opened = open_tokenizer(m);
    expect_ids(&opened, "a\xc3\xa9", false, IDS(2));
    expect_ids(&opened, "a\xc3\xa9", true, IDS(2));
    assert_int_equal(tokenizer_bos(opened.tokenizer), -1);
    assert_int_equal(tokenizer_eos(opened.tokenizer), -1);
    for (int32_t id = 0; id < 3; id++)
        assert_false(tokenizer_is_end(opened.tokenizer, id) || tokenizer_is_special(opened.tokenizer, id));
    close_tokenizer(&opened);
}

static void finds_special_tokens(void **state) {
    (void)state;
    struct opened opened = open_tokenizer(good());
    expect_ids(&opened, "<s>>ab<s>a<|im_end|>", true, IDS(S_LONG, AB, S, 0, IM_END)); /* the longest */
    expect_ids(&opened, "<s<s><tool", true, IDS(S));
    expect_ids(&opened, "<tool><tool>", true, IDS(TOOL, TOOL));
    expect_ids(&opened, "a<s>b", false, IDS(0, 1)); /* its characters have no tokens here */
    expect_ids(&opened, "a</s>b", true, IDS(0, 1)); /* a normal token is not parsed */
    expect_ids(&opened, "a<s> ab", true, IDS(0, S, SPACE_AB));
    assert_true(tokenizer_is_special(opened.tokenizer, TOOL));
    assert_true(tokenizer_is_special(opened.tokenizer, S));
    assert_false(tokenizer_is_special(opened.tokenizer, SLASH_S));
    assert_false(tokenizer_is_special(opened.tokenizer, -1));
    assert_false(tokenizer_is_special(opened.tokenizer, COUNT));
    close_tokenizer(&opened);
}

/* A special token with a marked byte anywhere is none; a shorter one before that byte is still found. */
static void marked_text_has_no_special_tokens(void **state) {
    (void)state;
    static const char text[] = "<s>><s>ab<tool>";
    struct opened opened = open_tokenizer(good());
    for (size_t marked = 0; marked <= strlen(text); marked++) {
        uint8_t marks[sizeof text] = {0};
        struct token_list list = {0};
        marks[marked] = 1; /* the last one: behind the text, nothing is marked */
        assert_int_equal(tokenizer_encode_marked(opened.tokenizer, text, marks, strlen(text), &list, NULL), 0);
        int counts[COUNT] = {0};
        for (size_t i = 0; i < list.count; i++)
            counts[list.ids[i]]++;
        assert_int_equal(counts[S_LONG], marked > 3);
        assert_int_equal(counts[S], (marked < 4 || marked > 6) + (marked == 3));
        assert_int_equal(counts[TOOL], marked < 9 || marked > 14);
        token_list_free(&list);
    }
    struct token_list list = {0};
    assert_int_equal(tokenizer_encode_marked(opened.tokenizer, "<tool>", NULL, 6, &list, NULL), 0);
    assert_int_equal(list.count, 1);
    token_list_free(&list);
    close_tokenizer(&opened);
}

static void knows_end_tokens(void **state) {
    (void)state;
    struct metadata m = good();
    m.eos = AB;
    m.eot = S;
    m.eom = TOOL;
    m.adds_bos = 1;
    struct opened opened = open_tokenizer(m);
    for (int32_t id = -1; id <= COUNT; id++) /* </s> is an end name, but its token is a normal one */
        assert_int_equal(tokenizer_is_end(opened.tokenizer, id), id == AB || id == S || id == TOOL || id == IM_END);
    assert_int_equal(tokenizer_eos(opened.tokenizer), AB);
    assert_int_equal(tokenizer_bos(opened.tokenizer), S);
    assert_true(tokenizer_adds_bos(opened.tokenizer));
    assert_int_equal(tokenizer_vocabulary(opened.tokenizer), COUNT);
    close_tokenizer(&opened);
}

static void expect_bytes(const struct opened *opened, int32_t token, const char *expected) {
    size_t bytes;
    const char *text = tokenizer_token_bytes(opened->tokenizer, token, &bytes);
    assert_int_equal(bytes, strlen(expected));
    assert_memory_equal(text, expected, bytes);
}

static void spells_tokens(void **state) {
    (void)state;
    struct opened opened = open_tokenizer(good());
    expect_bytes(&opened, ABC, "abc");
    expect_bytes(&opened, SPACE_AB, " ab");
    expect_bytes(&opened, IM_END, "<|im_end|>");
    expect_bytes(&opened, TOOL, "<tool>");
    expect_bytes(&opened, BYTE_E9, "\xe9");
    expect_bytes(&opened, CHINESE, "\u4f60"); /* not of the alphabet: its own text */
    expect_bytes(&opened, 14, "");
    close_tokenizer(&opened);
}

/* Every byte has a token in tiny_llama's vocabulary: any bytes come back, and from several threads. */
struct work {
    const struct tokenizer *tokenizer;
    uint32_t seed;
    int failures;
};

static void *encode_in_thread(void *argument) {
    struct work *work = argument;
    uint32_t value = work->seed;
    char text[900];
    for (int round = 0; round < 200; round++) {
        for (size_t i = 0; i < sizeof text; i++) {
            value = value * 1664525 + 1013904223;
            text[i] = round % 2 == 0 ? (char)(value >> 24) : (char)('a' + (value >> 24) % 26);
        }
        struct token_list list = {0};
        work->failures += tokenizer_encode(work->tokenizer, text, sizeof text, false, &list, NULL) != 0;
        size_t at = 0, bytes;
        for (size_t i = 0; i < list.count; i++) {
            const char *token = tokenizer_token_bytes(work->tokenizer, list.ids[i], &bytes);
            work->failures += bytes > sizeof text - at || memcmp(token, text + at, bytes) != 0;
            at += bytes;
        }
        work->failures += at != sizeof text;
        token_list_free(&list);
    }
    return NULL;
}

static void gives_any_bytes_back(void **state) {
    (void)state;
    struct tiny_llama options = tiny_llama_default();
    size_t size;
    struct gguf_writer *writer = gguf_writer_create();
    tiny_llama_write_tokenizer(writer, &options);
    uint8_t *bytes = gguf_writer_finish(writer, &size);
    struct gguf *gguf = gguf_open_memory(bytes, size, "test", NULL);
    assert_non_null(gguf);
    struct tokenizer *tokenizer = tokenizer_create(gguf, NULL);
    assert_non_null(tokenizer);
    pthread_t threads[4];
    struct work works[4];
    for (uint32_t i = 0; i < 4; i++) {
        works[i] = (struct work){tokenizer, i, 0};
        assert_int_equal(pthread_create(&threads[i], NULL, encode_in_thread, &works[i]), 0);
    }
    for (uint32_t i = 0; i < 4; i++) {
        pthread_join(threads[i], NULL);
        assert_int_equal(works[i].failures, 0);
    }
    tokenizer_free(tokenizer);
    gguf_free(gguf);
    free(bytes);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(refuses_other_tokenizers),
        cmocka_unit_test(refuses_broken_tokens),
        cmocka_unit_test(refuses_broken_merges),
        cmocka_unit_test(refuses_broken_ids),
        cmocka_unit_test(refuses_wrong_types),
        cmocka_unit_test(merges_by_rank),
        cmocka_unit_test(drops_absent_bytes_first),
        cmocka_unit_test(finds_special_tokens),
        cmocka_unit_test(marked_text_has_no_special_tokens),
        cmocka_unit_test(knows_end_tokens),
        cmocka_unit_test(spells_tokens),
        cmocka_unit_test(gives_any_bytes_back),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
